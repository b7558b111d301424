#!/usr/bin/env bash
# debian_python.sh VERSION SUITE FOLDER: a Python that this Debian doesn't have yet, from a later one, in a folder.
#
# The later Debian's packages are unpacked and not installed, the C library among them; the interpreter is told to load
# that one. It takes no root. Prints the interpreter's path. Example: debian_python.sh 3.14 forky ~/.cache/python3.14
set -euo pipefail
version=$1 suite=$2 folder=$3
python=$folder/usr/bin/python$version

if [ ! -x "$python" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work"/{lists,archives}/partial "$work/system"
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Label: Debian' | head -n 1)
    [ -n "$mirror" ] || { echo "apt knows no Debian mirror: apt-get update" >&2; exit 1; }
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >"$work/sources"
    touch "$work/status" # nothing is installed: every package that is needed is fetched
    apt=(apt-get -qq -o "Dir::Etc::sourcelist=$work/sources" -o Dir::Etc::sourceparts=- -o "Dir::State=$work"
        -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work"
        -o "Dir::Cache::archives=$work/archives" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
    "${apt[@]}" update >&2
    "${apt[@]}" install --download-only --no-install-recommends -y "python$version" >&2
    for package in "$work"/archives/*.deb; do
        dpkg-deb -x "$package" "$work/system"
    done
    loader=$(cd "$work/system" && find usr/lib* -name 'ld-linux-*.so.*' | head -n 1)
    libraries=$folder/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
    "${PATCHELF:-patchelf}" --set-interpreter "$folder/$loader" --force-rpath --set-rpath "$libraries" \
        "$work/system/usr/bin/python$version"
    mkdir -p "$(dirname "$folder")"
    rm -rf "$folder"
    mv "$work/system" "$folder"
fi
echo "$python"

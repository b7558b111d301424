#!/bin/sh
# collect.sh plugin|baked: install the wheel into this image's Python, or bake, and put the files that this made or
# changed below /overlay, with owner and mode, so that another stage can copy just them.
set -eu
say() { echo "vllm-rocm-fixes: $*" >&2; }
python=$(command -v python3) || { say "the base image has no python3 on its PATH"; exit 1; }
[ -n "$("$python" -c 'import importlib.util as u; print(u.find_spec("vllm") or "")')" ] ||
  { say "the base image's $python finds no vLLM: name an image that holds one (BASE_IMAGE)"; exit 1; }
marker=$(mktemp)
sleep 1 # file times on some storage drivers count in seconds

case $1 in
plugin)
  set -- /tmp/wheel/*.whl
  [ -f "$1" ] || { say "no wheel in dist/: run 'make build' first"; exit 1; }
  "$python" -m pip --version >/dev/null 2>&1 || { say "the base image's $python has no pip"; exit 1; }
  # Debian's and Ubuntu's newer Pythons ask for this word before they let pip write to their own folders.
  PIP_BREAK_SYSTEM_PACKAGES=1 "$python" -m pip install --no-deps --no-index --no-compile --root-user-action=ignore "$@"
  ;;
baked) vllm-rocm-fixes bake ;;
*) say "collect.sh takes plugin or baked, not $1"; exit 2 ;;
esac

mkdir -p /overlay
"$python" - <<'PLACES' | while read -r place; do
import importlib.util, sysconfig
vllm = importlib.util.find_spec("vllm").submodule_search_locations[0]
print(*{sysconfig.get_path("purelib"), sysconfig.get_path("scripts"), vllm.rpartition("/")[0]}, sep="\n")
PLACES
  find "$place" -newer "$marker" ! -type d ! -name '*.pyc' -print
done | sort -u | tar -cf - -T - 2>/dev/null | tar -xpf - -C /overlay
[ -n "$(find /overlay -type f -print -quit)" ] || { say "nothing was made or changed"; exit 1; }

"""Builds the images of docker/ here, on a base made from a minimal Debian, its Python and stock vLLM's sources.

    python tests/image.py             both targets, the smoke script, and a base whose vLLM is broken
    python tests/image.py --keep      the same, and the images stay

Needs root, Debian's packages buildah and debootstrap, and a wheel in dist/ (`make build`). The packages that vLLM
imports aren't copied into the image: the environment of the tests is mounted where the base's Python looks.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from releases import cache, tree

HERE = Path(__file__).parent.parent
RELEASE = "0.23.0"
SITE = "usr/local/lib/python{}/dist-packages"
BUILDAH = ["buildah", "--storage-driver", "vfs"]
VERIFY = "--step sampler"  # one step of the start: the others are what tests/test_verify.py and the contract run
USER, LABEL, ENTRYPOINT = "1000:1000", "org.example.base", ["vllm", "serve"]


class Failed(Exception):
    """A step that did not do what it should; the text is for a person."""


def missing() -> str | None:
    """Why images can't be built here, in words; None where they can."""
    programs = [name for name in ("buildah", "debootstrap", "unshare") if shutil.which(name) is None]
    if programs:
        return f"no {', '.join(programs)} here: apt-get install buildah debootstrap"
    return None if os.geteuid() == 0 else "images are built as root here (chroot isolation)"


def run(*command: str, ok: bool = True, **options: object) -> str:
    """A command's output, both streams; raises Failed where it ended other than expected (ok None: either way)."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    if ok is not None and (done.returncode == 0) != ok:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def debian() -> Path:
    """An archive of a minimal Debian with Python and pip, made once. Raises Failed."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    suite = release.get("VERSION_CODENAME", "bookworm")
    archive = cache() / f"debian-{suite}-python.tar"
    if not archive.exists():
        archive.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            root, partial = f"{folder}/root", f"{archive}.{os.getpid()}"
            run("debootstrap", "--variant=minbase", "--include=python3,python3-pip", suite, root)
            shutil.rmtree(f"{root}/var/cache/apt/archives")
            run("tar", "-C", root, "-cf", partial, ".")
            os.rename(partial, archive)
    return archive


class Store:
    """Images and containers in folders of their own, removed at the end."""

    def __init__(self, folder: str) -> None:
        self.buildah = [*BUILDAH, "--root", f"{folder}/root", "--runroot", f"{folder}/run"]
        self.volume = f"{_dependencies(Path(folder))}:/dependencies:ro"

    def __call__(self, *arguments: str, ok: bool | None = True, **options: object) -> str:
        return run(*self.buildah, *arguments, ok=ok, **options)

    def base(self, name: str, broken: bool = False) -> None:
        """An image like those that a cluster runs: not root, an entry point, labels, stock vLLM."""
        made = self("from", "scratch").strip()
        self("add", "-q", made, str(debian()), "/")
        root = Path(self("mount", made).strip())
        site = root / SITE.format(f"{sys.version_info.major}.{sys.version_info.minor}")
        stock = tree(RELEASE)
        shutil.copytree(stock / "vllm", site / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
        (site / "dependencies.pth").write_text("/dependencies\n")
        info = site / f"vllm-{RELEASE}+rocm721.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {RELEASE}+rocm721\n")
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\nvllm/__init__.py,,\n")
        if broken:
            sampler = site / "vllm/v1/sample/ops/topk_topp_sampler.py"
            sampler.write_text(sampler.read_text().replace("class TopKTopPSampler", "class Renamed"))
        (root / "home/vllm").mkdir(parents=True)
        os.chown(root / "home/vllm", 1000, 1000)
        settings = ["--user", USER, "--label", f"{LABEL}=kept", "--env", "HOME=/home/vllm", "--env", "BASE=kept"]
        self("config", *settings, "--entrypoint", json.dumps(ENTRYPOINT), made)
        self("umount", made)
        self("commit", "-q", "--rm", made, name)

    def build(self, target: str, base: str, name: str, ok: bool = True) -> str:
        """Build one target of docker/Dockerfile; what it printed."""
        arguments = {"BASE_IMAGE": f"localhost/{base}", "VERSION": "0.0.test", "REVISION": "here", "VERIFY": VERIFY}
        pairs = [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
        return self(
            "bud", "--isolation", "chroot", "--volume", self.volume, *pairs, "--target", target, "-t", name,
            "-f", str(HERE / "docker/Dockerfile"), str(HERE), ok=ok,
        )  # fmt: skip

    def inspect(self, name: str) -> dict[str, object]:
        """User, entry point, labels and environment of an image."""
        config: dict[str, object] = json.loads(self("inspect", "--type", "image", name))["OCIv1"]["config"]
        return config

    def runner(self, folder: str) -> Path:
        """A program that takes what smoke.sh gives `docker`: run --rm --network=none --entrypoint "" IMAGE COMMAND."""
        buildah = " ".join(self.buildah)
        script = Path(folder) / "run-image"
        script.write_text(
            '#!/bin/sh\nset -eu\n[ "$*" != "${*#run --rm --network=none --entrypoint}" ] || exit 64\n'
            "shift 5; image=$1; shift\n"
            f'made=$({buildah} from "$image")\ntrap "{buildah} rm $made >/dev/null" EXIT\n'
            f'unshare -n {buildah} run --isolation chroot --volume {self.volume} "$made" -- "$@"\n'
        )
        script.chmod(0o755)
        return script


def _dependencies(folder: Path) -> Path:
    """What vLLM imports, as links to the environment of the tests, without any vLLM and without the overlay."""
    place = folder / "dependencies"
    ignore = shutil.ignore_patterns("vllm*", "__editable__*", "__pycache__", "sitecustomize.py")
    shutil.copytree(sysconfig.get_path("purelib"), place, symlinks=True, ignore=ignore, copy_function=_link)
    return place


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system
        shutil.copy2(source, target)


def check(what: str, holds: bool, shown: object) -> None:
    """Say that something holds; raises Failed where it doesn't."""
    if not holds:
        raise Failed(f"{what}: not so: {shown}")
    print(f"  {what}", flush=True)


def main(arguments: list[str]) -> int:
    """Build and try everything; the exit status."""
    reason = missing()
    if reason:
        print(f"image.py: {reason}", file=sys.stderr)
        return 2
    folder = tempfile.mkdtemp(prefix="images-", dir=os.environ.get("TMPDIR", "/var/tmp"))
    begun = time.monotonic()
    try:
        every_image(Store(folder), folder)
        print(f"images: all built and tried in {time.monotonic() - begun:.0f} s")
        return 0
    except Failed as failure:
        print(f"image.py: {failure}", file=sys.stderr)
        return 1
    finally:
        if "--keep" not in arguments:
            shutil.rmtree(folder, ignore_errors=True)


def every_image(store: Store, folder: str) -> None:
    """Both targets on a good base, the smoke script, and a base whose vLLM is broken."""
    store.base("good")
    runner = store.runner(folder)
    for target in ("plugin", "baked"):
        said = store.build(target, "good", target)
        config = store.inspect(target)
        labels = config["Labels"]
        assert isinstance(labels, dict)
        print(f"{target}:")
        check("keeps user and entry point", (config["User"], config["Entrypoint"]) == (USER, ENTRYPOINT), config)
        check("keeps labels and environment", labels.get(LABEL) == "kept" and "BASE=kept" in str(config["Env"]), config)
        check("has labels of its own", labels.get("io.vllm-rocm-fixes.way") == target, labels)
        check("ran verify while it was built", "verify" in said, said[-2000:])
        smoke = run("sh", str(HERE / "docker/smoke.sh"), target, env={**os.environ, "RUN": str(runner)})
        check("passes smoke.sh without a network", "is fine without a network" in smoke, smoke[-2000:])
    stock = run(str(runner), "run", "--rm", "--network=none", "--entrypoint", "", "baked", *GREP)
    check("baked: the mended file calls the overlay", "vllm_rocm_fixes" in stock, stock)
    store.base("broken", broken=True)
    said = store.build("plugin", "broken", "never", ok=False)
    check("a base with an unknown vLLM doesn't build, and says why", "TopKTopPSampler" in said, said[-3000:])


GREP = ("sh", "-c", "cat /usr/local/lib/python3*/dist-packages/vllm/v1/sample/ops/topk_topp_sampler.py")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

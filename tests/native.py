"""Real packages of every kind a probe may meet, written and compiled into a folder."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

MISSING = "libcudart.so.12"

_PURE = {
    "pure": "VALUE = 1\nprint('{\"ok\": false}')  # what a package prints is no answer\n",
    "raises_import_error": "raise ImportError('a part\\nis missing')\n",
    "raises_other": "raise RuntimeError('no such GPU')\n",
    "ends_with_exit": "raise SystemExit('[aiter] build failed')\n",
    "leaves": "import os\nos._exit(0)\n",
    "lacks_a_part": "import some_other_package_that_is_not_here\n",
    "hangs": "import time\ntime.sleep(600)\n",
    "leaves_a_child": "import subprocess as s, sys\ns.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n",
    "ends_badly": "import atexit, os\natexit.register(os.abort)\n",
    "heavy": "import os, sys\nos.environ['PYTHONPATH'] = 'x'\nsys.path.insert(0, 'x')\nclass ElasticBuffer: ...\n",
}
_NATIVE = {  # what the extension's entry does
    "lacks_a_library": "extern int part(void); void *PyInit_ext(void) { return part() ? 0 : &part; }",
    "aborts": "#include <stdlib.h>\nvoid *PyInit_ext(void) { abort(); }",
    "illegal": "void *PyInit_ext(void) { __builtin_trap(); }",
}


def packages(folder: Path) -> Path:
    """Write all of them into folder, and return it. Needs gcc."""
    for name, source in _PURE.items():
        _write(folder / name, source)
    (folder / "pure" / "inner.py").write_text("")
    for name in _NATIVE:
        native(folder, name, name)
    return folder


def native(folder: Path, name: str, kind: str) -> None:
    """Write the package `name` around an extension that fails in one of the ways lacks_a_library, aborts, illegal."""
    _write(folder / name, "from . import ext\n")
    source = folder / name / "ext.c"
    source.write_text(_NATIVE[kind])
    built = folder / name / f"ext{sysconfig.get_config_var('EXT_SUFFIX')}"
    libraries = []
    if kind == "lacks_a_library":  # linked against a library that is gone afterwards
        part = folder / name / MISSING
        (folder / name / "part.c").write_text("int part(void) { return 1; }")
        _gcc("-shared", f"-Wl,-soname,{MISSING}", "-o", part, folder / name / "part.c")
        libraries = [part]
    _gcc("-shared", "-o", built, source, *libraries)
    for library in libraries:
        library.unlink()


def _write(package: Path, source: str) -> None:
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(source))


def _gcc(*arguments: object) -> None:
    subprocess.run(["gcc", "-fPIC", *map(str, arguments)], check=True)


if __name__ == "__main__":
    print(packages(Path(sys.argv[1])))

"""The question for AITER's fused qk-rmsnorm kernel: the answer of stock's import, without the import."""

import ast
import functools
import importlib
import logging
import sys
import zipfile

import pytest
from on_node import AITERS, DOORS, PROBES, RELEASES, report
from packaging.version import Version
from releases import NIGHTLIES, releases, tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches.aiter_ops import PATCH
from vllm_rocm_fixes.syntax import function

PROBE = "check_aiter_fused_qk_rmsnorm"
MODULE = "aiter.ops.fused_qk_norm_rope_cache_quant"
ASKED_TWICE = [r for r in PROBES if Version(r) >= Version("0.22.0")]  # by the pass manager too
MENDED = [(r, side) for r in PROBES for side in ("live", "doors") if side == "live" or r in DOORS]
each_side = pytest.mark.parametrize(("release", "side"), MENDED)


@each_side
@pytest.mark.parametrize("aiter", AITERS)
def test_configuration_and_pass_manager_get_stocks_answer(release, side, aiter):
    without, done = report(release, "stock")[f"probe {aiter}"], report(release, side)[f"probe {aiter}"]
    has = {"0.1.10": False, "0.1.13": True, "0.1.16": release in ASKED_TWICE}[aiter]
    assert (without["flag"], without["cache"]) == (has, has)
    assert f"import {MODULE}" in without["events"]
    assert (done["flag"], done["cache"], done["passes"]) == (has, has, without["passes"])
    assert done["all events"] == []
    # A user who sets the flag himself: from 0.22.0 on the pass manager's own question saves him.
    assert done["passes"] == [has, has or release not in ASKED_TWICE]


@each_side
@pytest.mark.parametrize("aiter", AITERS)
def test_an_aiter_that_is_loaded_is_asked(release, side, aiter):
    without = report(release, "stock")[f"probe {aiter} loaded"]
    done = report(release, side)[f"probe {aiter} loaded"]
    assert done == without
    assert done["events"] == [f"import {MODULE}"]


@each_side
def test_the_patch_is_applied(release, side):
    state, reason = report(release, side)["states"]["aiter_ops"]
    assert state == "applied" and ("live" in reason) == (side == "live")


@pytest.mark.parametrize("release", [r for r in RELEASES if r not in PROBES])
def test_other_releases_are_left_alone(release):
    assert report(release, "live")["states"]["aiter_ops"][0] == "clear"


# The verdict, on every release


@functools.cache
def source(release):
    return (tree(release) / "vllm" / "_aiter_ops.py").read_text()


@pytest.mark.unit
@pytest.mark.parametrize("release", [*releases(), *NIGHTLIES])
def test_needed_from_since_to_until(release):
    there = Version(PATCH.since) <= Version(release) < Version(PATCH.until)
    there = there and release not in NIGHTLIES  # 0.26.1.dev has the fix of 0.27.0
    mended = mend(source(release), "_aiter_ops.py", [PATCH])
    assert mended.outcomes[0].verdict.kind == ("needed" if there else "clear")
    assert mended.outcomes[0].applied == there
    if there:
        again = ast.unparse(mended.tree)
        assert mend(again, "_aiter_ops.py", [PATCH]).code is None
        before, after = ast.parse(source(release)), ast.parse(again)
        for changed in (before, after):
            function(changed, PROBE).body.clear()
        assert ast.dump(before) == ast.dump(after)


CACHE = "_AITER_HAS_FUSED_QK_RMSNORM"
CAUGHT = "except (ImportError, ModuleNotFoundError, AttributeError)"
FORKS = {
    "renamed": (f"def {PROBE}(", "def aiter_has_qk_rmsnorm("),
    "logs": (f"{CACHE} = False\n    return", f"{CACHE} = False\n    log()\n    return"),
    "catches more": (f"{CAUGHT}:\n            try", "except Exception:\n            try"),
    "imports more": (f"    global {CACHE}\n", f"    import aiter\n    global {CACHE}\n"),
    "twice": (f"def {PROBE}(", f"def {PROBE}():\n    pass\n\n\ndef {PROBE}("),
}  # fmt: skip


@pytest.mark.unit
@pytest.mark.parametrize("fork", FORKS)
def test_a_shape_that_is_not_known_is_left_alone(fork):
    old, new = FORKS[fork]
    assert old in source("0.26.0")
    mended = mend(source("0.26.0").replace(old, new), "_aiter_ops.py", [PATCH])
    assert mended.outcomes[0].verdict.kind == "unknown"
    assert mended.code is None


CALLED = "class rocm_aiter_ops:\n"
KERNEL = MODULE + " import _fused_qk_rmsnorm"
TRIED = (
    f"        try:\n            from {KERNEL}\n        except ImportError:\n            return 0\n        return 1\n"
)
METHODS = {
    "a method tries": TRIED,
    "a method that another calls": f"        return cls.look()\n\n    @classmethod\n    def look(cls):\n{TRIED}",
    "hasattr": f"        import {MODULE} as m\n        return hasattr(m, '_fused_qk_rmsnorm')\n",
    "by its name": f"        m = importlib.import_module('{MODULE}')\n        return hasattr(m, '_fused_qk_rmsnorm')\n",
}


@pytest.mark.unit
@pytest.mark.parametrize("release", ["0.24.0", "0.20.0"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_probe_that_moved_into_the_class_is_not_called_clear(release, method, keeps):
    """Beside a function that asks the method, and alone."""
    stock = source(release)
    probe = ast.get_source_segment(stock, function(ast.parse(stock), PROBE))
    without = f"def {PROBE}():\n    return rocm_aiter_ops.has_qk_rmsnorm()" if keeps else ""
    moved = f"{CALLED}    @classmethod\n    def has_qk_rmsnorm(cls):\n{METHODS[method]}\n"
    changed = stock.replace(probe, without).replace(CALLED, moved)
    verdict = PATCH.examine(ast.parse(changed))
    assert verdict.kind == "unknown", verdict


@pytest.mark.unit
@pytest.mark.parametrize("new", ["", f"def {PROBE}():\n    return rocm_aiter_ops.is_enabled()"])
def test_the_fix_of_0_27_on_an_older_release_is_clear(new):
    stock = source("0.24.0")
    probe = ast.get_source_segment(stock, function(ast.parse(stock), PROBE))
    assert PATCH.examine(ast.parse(stock.replace(probe, new))).kind == "clear"


# The answer, on many an AITER: stock's function and the mended one, both really run

PUBLIC = "def fused_qk_rmsnorm(): ...\n"
PRIVATE = "def _fused_qk_rmsnorm(): ...\n"
DECORATED = "from ..jit.core import compile_ops\n\n@compile_ops('m', fc_name='fused_qk_rmsnorm')\n"
OPS = "ops/fused_qk_norm_rope_cache_quant.py"
KERNELS = {
    "neither name": "def fused_qk_norm_rope_cache_quant_shuffle(): ...\n",
    "public": PUBLIC,
    "private": PRIVATE,
    "both": PUBLIC + PRIVATE,
    "decorated": DECORATED + PRIVATE,
    "decorated, another name": DECORATED + "def fused_qk(): ...\n",
    "async": "async " + PUBLIC,
    "class": "class fused_qk_rmsnorm: ...\n",
    "assigned": "fused_qk_rmsnorm = print\n",
    "assigned with a type": "fused_qk_rmsnorm: object = print\n",
    "a type alone": "fused_qk_rmsnorm: object\n",
    "in a tuple": "a, (fused_qk_rmsnorm, b) = 1, (2, 3)\n",
    "read only": "import builtins\nprint_ = getattr(builtins, 'fused_qk_rmsnorm', None)\n",
    "deleted": PUBLIC + "del fused_qk_rmsnorm\n",
    "inside a function": "def other():\n    fused_qk_rmsnorm = 1\n    return fused_qk_rmsnorm\n",
    "inside a class": "class Other:\n    def fused_qk_rmsnorm(self): ...\n",
    "imported": "from ..other import fused_qk_rmsnorm\n",
    "imported as": "from aiter.other import kernel as _fused_qk_rmsnorm\n",
    "imported, not there": "from ..other import _fused_qk_rmsnorm\n",
    "imported from nowhere": "from ..nowhere import fused_qk_rmsnorm\n",
    "star of other names": "from ..jit.core import *\n" + PUBLIC,
    "star that adds nothing": "from ..jit.core import *\n",
    "circular": "from . import fused_qk_norm_rope_cache_quant as me\n" + PUBLIC,
    "typing": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..other import fused_qk_rmsnorm\n",
    "typing, else": "import typing\nif typing.TYPE_CHECKING:\n    x = 1\nelse:\n    " + PUBLIC,
    "if true": "if True:\n    " + PUBLIC,
    "either way": "import sys\nif sys.flags.debug:\n    fused_qk_rmsnorm = 1\nelse:\n    fused_qk_rmsnorm = 2\n",
    "tried": "try:\n    import nowhere\n    fused_qk_rmsnorm = 1\nexcept ImportError:\n    fused_qk_rmsnorm = 2\n",
    "finally": "try:\n    x = 1\nfinally:\n    fused_qk_rmsnorm = 2\n",
}  # fmt: skip
# Only running it tells: then AITER is imported as in stock, and a warning says so.
RUN_TIME = {
    "one way": "import sys\nif sys.flags.debug:\n    " + PUBLIC,
    "not typing": "import typing\nif not typing.TYPE_CHECKING:\n    " + PUBLIC,
    "the other way": "import sys\nif not sys.flags.debug:\n    " + PUBLIC,
    "tried, one way": "try:\n    from ..other import fused_qk_rmsnorm\nexcept ImportError:\n    pass\n",
    "tried, not there": "try:\n    import nowhere\n    fused_qk_rmsnorm = 1\nexcept ImportError:\n    pass\n",
    "module __getattr__": "def __getattr__(name):\n    return name.count('_')\n",
    "module __getattr__ that refuses": "def __getattr__(name):\n    raise AttributeError(name)\n",
    "a lazy loader": "__getattr__, x = (lambda name: name.count('_')), 1\n",
    "imported, star": "from ..other import *\n",
    "globals": "globals()['fused_qk_rmsnorm'] = 1\n",
    "exec": "exec('_fused_qk_rmsnorm = 1')\n",
    "from another package": "from sys import version as fused_qk_rmsnorm\n",
    "in a loop": "for fused_qk_rmsnorm in (1, 2):\n    pass\n",
    "in a with": "import contextlib as c\nwith c.suppress(ImportError):\n    from ..nowhere import fused_qk_rmsnorm\n",
}  # fmt: skip
PACKAGE = {
    "__init__.py": "import sys\nsys.aiter_ran = True\n",
    "ops/__init__.py": "",
    "jit/__init__.py": "",
    "jit/core.py": "def compile_ops(*a, **k):\n    return lambda f: f\n",
    "other.py": "def kernel(): ...\n" + PUBLIC,
}
SHAPES = {
    "no AITER": {},
    "no submodule": PACKAGE,
    "no folder ops": {"__init__.py": PACKAGE["__init__.py"]},
    "not a package": {"../aiter.py": PACKAGE["__init__.py"]},
    "ops without __init__.py": {k: v for k, v in PACKAGE.items() if k != "ops/__init__.py"} | {OPS: PUBLIC},
    "aiter without __init__.py": {k: v for k, v in PACKAGE.items() if k != "__init__.py"} | {OPS: PUBLIC},
    "the module is a folder": PACKAGE | {OPS[:-3] + "/__init__.py": "from ...other import fused_qk_rmsnorm\n"},
    "the module is a folder without __init__.py": PACKAGE | {OPS[:-3] + "/x.py": ""},
    "in Latin-1": PACKAGE | {OPS: ("# coding: latin-1\nx = 'é'\n" + PUBLIC).encode("latin-1")},
}  # fmt: skip


@pytest.fixture(scope="module", params=PROBES)
def probes(request):
    """Stock's function out of a release, and the mended one: each run with a fresh cache."""
    mended = mend(source(request.param), "_aiter_ops.py", [PATCH]).tree
    made = []
    for module in (ast.parse(source(request.param)), mended):
        code = compile(ast.Module([function(module, PROBE)], []), "_aiter_ops.py", "exec")

        def ask(code=code):
            space = {"_AITER_HAS_FUSED_QK_RMSNORM": None}
            exec(code, space)
            answer = space[PROBE]()
            assert answer is space["_AITER_HAS_FUSED_QK_RMSNORM"] is space[PROBE]()
            return answer

        made.append(ask)
    return made


def write(folder, files):
    for name, text in files.items():
        file = folder / "aiter" / name
        (folder / "aiter").mkdir(exist_ok=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    if not any(folder.glob("aiter/*")) and (folder / "aiter").exists():
        (folder / "aiter").rmdir()


@pytest.fixture
def ask(probes, monkeypatch):
    """Ask both of the AITER in a folder: (stock's answer or error, ours, whether ours ran AITER)."""

    def ask(folder):
        monkeypatch.syspath_prepend(str(folder))
        told = []
        for probe in probes:
            forget()
            sys.aiter_ran = False
            importlib.invalidate_caches()
            try:
                told.append(probe())
            except BaseException as error:
                told.append(type(error).__name__)
            told.append(sys.aiter_ran or "aiter" in sys.modules)
        assert told[1] or told[0] is not True  # stock ran it
        return told[0], told[2], told[3]

    yield ask
    forget()


def forget():
    for name in [n for n in sys.modules if n.partition(".")[0] == "aiter"]:
        del sys.modules[name]


@pytest.mark.unit
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_source_answers_as_the_import_does(ask, tmp_path, kernel):
    write(tmp_path, PACKAGE | {OPS: KERNELS[kernel]})
    stock, ours, ran = ask(tmp_path)
    assert ours is stock and not ran


@pytest.mark.unit
@pytest.mark.parametrize("shape", SHAPES)
def test_every_layout_answers_as_the_import_does(ask, tmp_path, shape):
    write(tmp_path, SHAPES[shape])
    stock, ours, ran = ask(tmp_path)
    assert ours is stock and not ran


@pytest.mark.unit
@pytest.mark.parametrize("kernel", RUN_TIME)
def test_where_the_source_cannot_tell_stocks_import_is_made(ask, tmp_path, kernel, caplog):
    write(tmp_path, PACKAGE | {OPS: RUN_TIME[kernel]})
    with caplog.at_level(logging.WARNING, "vllm.rocm_fixes"):
        stock, ours, ran = ask(tmp_path)
    assert ours is stock
    assert ran and caplog.records


@pytest.mark.unit
def test_an_aiter_in_an_archive(ask, tmp_path):
    with zipfile.ZipFile(tmp_path / "aiter.zip", "w") as archive:
        for name, text in (PACKAGE | {OPS: PUBLIC}).items():
            archive.writestr(f"aiter/{name}", text)
    assert ask(tmp_path / "aiter.zip") == (True, True, False)


@pytest.mark.unit
@pytest.mark.parametrize("how", ["RuntimeError('no ROCm')", "SystemExit('build failed')", "KeyError('gfx1151')"])
def test_an_aiter_that_ends_stocks_configuration_does_not_end_ours(ask, tmp_path, how):
    write(tmp_path, PACKAGE | {OPS: PUBLIC, "__init__.py": f"raise {how}\n"})
    assert ask(tmp_path) == (how.partition("(")[0], True, False)


@pytest.mark.unit
def test_a_source_with_a_syntax_error_is_a_no(ask, tmp_path):
    write(tmp_path, PACKAGE | {OPS: PUBLIC + "def broken(:\n"})
    assert ask(tmp_path) == ("SyntaxError", False, False)


@pytest.mark.unit
def test_the_source_says_yes_where_aiter_cannot_be_imported(ask, tmp_path):
    """The one answer that differs from stock's; the patch's record says what follows."""
    write(tmp_path, PACKAGE | {OPS: PUBLIC, "__init__.py": "raise ImportError('undefined symbol')\n"})
    assert ask(tmp_path) == (False, True, False)

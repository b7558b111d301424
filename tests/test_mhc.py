"""layers/mhc.py: the same answers about AITER's kernels as stock gives, and AITER stays unimported."""

import ast
import importlib
import py_compile
import shutil
import sys
import types

import pytest
from on_release import report
from releases import tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches import mhc

# Where the source binds a name without defining it, stock's own way is gone.
UNTOLD = {"not a function", "from elsewhere"}


@pytest.mark.parametrize("release", ["0.30.0", "0.33.0"])
def test_importing_it_imports_no_aiter_and_finds_the_same(release):
    stock, ours = report(release, "mhc")
    assert ours["state"] == "waiting"
    assert "import aiter" in stock["import"]["events"]
    assert "gpu torch.cuda.get_device_properties" in stock["import"]["events"]
    assert [e for e in ours["import"]["events"] if e.startswith(("import aiter", "gpu"))] == []
    assert len(stock["answers"]) >= 5
    assert stock["answers"] == ours["answers"]


@pytest.mark.parametrize("release", ["0.30.0", "0.33.0"])
def test_every_source_gets_stocks_answer(release):
    stock, ours = report(release, "mhc")
    answers = {case: found["answers"] for case, found in stock["sources"].items()}
    assert answers == {case: found["answers"] for case, found in ours["sources"].items()}
    assert len({tuple(answer) for answer in answers.values()}) >= 5, "the cases don't tell anything apart"
    assert all(found["ran"] for found in stock["sources"].values())
    assert {case for case, found in ours["sources"].items() if found["ran"]} == UNTOLD


def test_a_release_without_these_probes_is_left_alone():
    stock, ours = report("0.27.1", "mhc")
    assert ours["state"] == "clear"
    assert stock["answers"] == ours["answers"]


@pytest.mark.unit
def test_a_stand_in_for_aiter_without_a_spec_is_left_to_stocks_way(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", types.ModuleType("aiter"))
    assert mhc.has_kernel("mhc_fused_post_pre") is None and mhc.takes_norm("mhc_pre") is None
    monkeypatch.setitem(sys.modules, "aiter", None)
    assert mhc.has_kernel("mhc_fused_post_pre") is False and mhc.takes_norm("mhc_pre") is False


@pytest.mark.unit
def test_a_probe_that_is_not_known_is_left_alone():
    head = "class MHCPreOp: ...\n"
    new = head + "def has_new():\n    from aiter.ops import mhc\n    return hasattr(mhc, 'new')\nHAS_NEW = has_new()\n"
    assert mhc.examine(ast.parse(new)).kind == "unknown"
    assert mhc.examine(ast.parse(head + "import aiter\n")).kind == "unknown"
    assert mhc.examine(ast.parse("x = 1")).kind == "unknown"
    used = head + "def forward(x):\n    from aiter.ops.mhc import mhc_pre\n    return mhc_pre(x)\n"
    assert mend(used, "mhc.py", [mhc.PATCH]).outcomes[0].verdict.kind == "clear"


FUSED = """    try:
        from aiter.ops.mhc import mhc_fused_post_pre
    except Exception:
        return False
    return callable(mhc_fused_post_pre)
"""
NORM = "        from aiter.ops import mhc as aiter_mhc\n"
BOTH = 'if "norm_weight" in parameters and "norm_eps" in parameters:'
FORKS = {
    "fused: on some GPUs": (
        FUSED,
        FUSED.replace(
            "return callable", "from vllm.platforms.rocm import on_gfx950\n    return on_gfx950() and callable"
        ),
    ),
    "fused: not with a kernel that is broken": (
        FUSED,
        FUSED.replace("    return c", "    if BROKEN:\n        return False\n    return c"),
    ),
    "fused: more in the try": (FUSED, FUSED.replace("    except", "        check(mhc_fused_post_pre)\n    except")),
    "fused: another end": (FUSED, FUSED.replace("        return False", "        return OLD_ONE")),
    "fused: an else": (FUSED, FUSED.replace("    return c", "    else:\n        check()\n    return c")),
    "fused: a finally": (FUSED, FUSED.replace("    return c", "    finally:\n        check()\n    return c")),
    "norm: a third parameter": (BOTH, BOTH.replace(":", ' and "norm_layout" in parameters:')),
    "norm: one of both": (BOTH, BOTH.replace(" and ", " or ")),
    "norm: neither": (BOTH, BOTH.replace('" in', '" not in')),
    "norm: a list in AITER": (
        NORM,
        f'{NORM}        if op_name in getattr(aiter_mhc, "WITHOUT_NORM", ()):\n            return False\n',
    ),
    "norm: a flag": (NORM, f"{NORM}        if BROKEN:\n            raise ImportError\n"),
    "norm: on some GPUs": (
        NORM,
        f"{NORM}        from vllm.platforms.rocm import on_gfx950\n"
        "        if on_gfx950():\n            raise ImportError\n",
    ),
    "norm: a flag of AITER's": (NORM, f"{NORM}        if aiter_mhc.BROKEN:\n            raise ImportError\n"),
    "norm: after it": (
        "        pass\n    return False",
        "        pass\n    if OLD_ONE:\n        return True\n    return False",
    ),
    "asked of another module": (FUSED, '    return rocm_aiter_ops.has_mhc_op("mhc_fused_post_pre")\n'),
    "asked by name": (FUSED, '    return callable(resolve_obj_by_qualname("aiter.ops.mhc.mhc_fused_post_pre"))\n'),
    "asked at once of another module": ("= _has_aiter_mhc_fused()", "= rocm_aiter_ops.has_mhc_op(FUSED)"),
    "asked below a condition": ("= _has_aiter_mhc_fused()", "= HAS_AITER_MHC and rocm_aiter_ops.has_mhc_op(FUSED)"),
}


def forked(release, before, after):
    text = (tree(release) / "vllm/model_executor/layers/mhc.py").read_text()
    assert before in text
    return text.replace(before, after, 1)


@pytest.mark.unit
@pytest.mark.parametrize("release", ["0.30.0", "0.33.0"])
@pytest.mark.parametrize("fork", FORKS)
def test_a_probe_that_decides_something_else_too_is_left_alone(fork, release):
    text = forked(release, *FORKS[fork])
    assert mhc.examine(ast.parse(text)).kind == "unknown"


@pytest.mark.unit
@pytest.mark.parametrize("release", ["0.30.0", "0.33.0"])
def test_what_comes_before_a_probes_question_stays(release):
    text = forked(
        release,
        "_has_aiter_mhc_fused() -> bool:\n",
        '_has_aiter_mhc_fused() -> bool:\n    """Whether aiter has it."""\n    if not FUSED:\n        return False\n',
    )
    mended = mend(text, "mhc.py", [mhc.PATCH])
    assert mended.outcomes[0].applied
    source = ast.unparse(mended.tree)
    assert source.index("if not FUSED:") < source.index("_from_source")
    assert mhc.examine(ast.parse(source)).kind == "clear"


SOURCE = "def mhc_fused_post_pre(x): ...\ndef mhc_pre(x, norm_weight=None, norm_eps=None): ...\n"
TOLD = {
    SOURCE: (True, True),
    "import os\n": (False, False),
    SOURCE + "del mhc_fused_post_pre\n": (None, True),
    SOURCE + "mhc_pre = wrapped(mhc_pre)\n": (True, None),
    SOURCE.replace("def mhc_pre", "if here():\n  def mhc_pre"): (True, None),
    "from .mhc_impl import *\n" + SOURCE: (True, True),
    SOURCE + "from .mhc_impl import *\n": (None, None),
    "def __getattr__(name): ...\n": (None, None),
}


@pytest.fixture
def aiter(tmp_path, monkeypatch):
    """Where an AITER lies whose aiter/ops/mhc.py is written by the test."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "aiter", raising=False)
    (tmp_path / "aiter" / "ops").mkdir(parents=True)
    (tmp_path / "aiter" / "__init__.py").write_text("raise SystemExit('a start of AITER')\n")
    return tmp_path / "aiter"


def told():
    importlib.invalidate_caches()
    return mhc.has_kernel("mhc_fused_post_pre"), mhc.takes_norm("mhc_pre")


@pytest.mark.unit
@pytest.mark.parametrize("source", TOLD)
def test_what_the_source_tells(aiter, source):
    (aiter / "ops" / "mhc.py").write_text(source)
    assert told() == TOLD[source]


@pytest.mark.unit
def test_where_there_is_no_source_stocks_way_stays(aiter, monkeypatch):
    assert told() == (False, False), "an AITER from before these kernels"
    module = aiter / "ops" / "mhc.py"
    module.write_text(SOURCE)
    archive = shutil.make_archive(str(aiter.parent / "archive"), "zip", aiter.parent, "aiter")
    py_compile.compile(str(module), cfile=str(module.with_suffix(".pyc")))
    module.unlink()
    assert told() == (None, None), "only compiled"
    module.with_suffix(".pyc").unlink()
    (aiter / "ops" / "__init__.py").write_text("__path__.append('/elsewhere')\n")
    assert told() == (None, None), "its modules lie in another folder too"
    monkeypatch.setattr(sys, "path", [archive, *sys.path])
    assert told() == (True, True), "in an archive"

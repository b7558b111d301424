"""Whether an optional package can be imported: found out in a child process, and right for each kind of package."""

import ast

import pytest
from expert_parallel import NIGHTLIES, RELEASES, report
from packaging.version import Version
from releases import releases, tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patches.import_utils import PATCH

EVERY = [*releases(), *NIGHTLIES]
CASES = [*RELEASES, *NIGHTLIES]
ANSWERS = {
    "nothing_of_that_name": False,
    "nothing_of_that_name.inner": False,
    "json": True,
    "pure": True,
    "raises_import_error": False,
    "raises_other": False,
    "ends_with_exit": False,
    "lacks_a_library": False,
    "aborts": False,
    "illegal": False,
}
BROKEN = {
    "raises_import_error": "ImportError: a part is missing",
    "raises_other": "RuntimeError: no such GPU",
    "ends_with_exit": "SystemExit: [aiter] build failed",
    "lacks_a_library": "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    "aborts": "the import ends the interpreter (SIGABRT)",
    "illegal": "the import ends the interpreter (SIGILL)",
}


def _source(version):
    return (tree(version) / "vllm/utils/import_utils.py").read_text()


def _applies(version):
    return Version(version) >= Version(PATCH.since)


def _imports(version):
    """The releases whose probe is a trial import in the process that asks."""
    return Version(version) >= Version("0.23.0")


@pytest.mark.unit
@pytest.mark.parametrize("version", EVERY)
def test_verdict(version):
    mended = mend(_source(version), "stock.py", [PATCH])
    outcome = mended.outcomes[0]
    assert outcome.verdict.kind == ("needed" if _applies(version) else "clear"), outcome.verdict
    assert outcome.applied == _applies(version), outcome.failed
    if mended.tree:
        plain = [n for n in ast.walk(mended.tree) if isinstance(n, ast.Import)]
        assert not [n for n in plain if n.names[0].name == "deep_ep"]


@pytest.mark.unit
def test_what_is_not_understood_is_left():
    for changed in (
        _source("0.33.0").replace("def _has_module(", "def _has_package("),
        _source("0.33.0").replace("importlib.util.find_spec(module_name)", "look(module_name)"),
    ):
        assert mend(changed, "stock.py", [PATCH]).outcomes[0].verdict.kind == "unknown"
    mended = ast.unparse(mend(_source("0.33.0"), "stock.py", [PATCH]).tree)
    assert mend(mended, "stock.py", [PATCH]).outcomes[0].verdict.kind == "clear"
    again = mended + '\n\ndef has_tilelang():\n    return _has_module("tilelang")\n'
    assert (
        mend(again.replace("def has_tilelang", "def before", 1), "stock.py", [PATCH]).outcomes[0].verdict.kind
        == "unknown"
    )


VERSIONED = """    import tilelang

    if tilelang.__version__ < "0.1.9":
        return False
"""
SPEC = """    if not _has_module_spec("tilelang"):
        return False
"""
ASKS = '    return _has_module("{}")\n'
TRIES = "    try:\n        import {}\n    except Exception:\n        return False\n    return True\n"
INSPECTS = """    import deep_ep  # type: ignore[import-not-found]

    if not hasattr(deep_ep, "ElasticBuffer"):
"""
STRANGE = {
    "has_tilelang imports tilelang": ("0.33.0", SPEC, SPEC.replace("_spec", "") + VERSIONED),
    "has_tilelang imports tilelang too": ("0.33.0", SPEC, SPEC + VERSIONED),
    "tilelang_version imports tilelang": (
        "0.23.0",
        "def has_tilelang() -> bool:\n",
        "def tilelang_version():\n    import tilelang\n    return tilelang.__version__\n\n\n"
        "def has_tilelang() -> bool:\n",
    ),
    "has_mori imports mori": ("0.33.0", ASKS.format("mori"), TRIES.format("mori")),
    "has_aiter imports aiter": ("0.20.2", ASKS.format("aiter"), TRIES.format("aiter.ops")),
    "has_nixl_ep imports nixl_ep": (
        "0.33.0",
        ASKS.format("nixl_ep"),
        '    return importlib.import_module("nixl_ep") is not None\n',
    ),
    "has_moonep imports moonep": (
        "0.33.0",
        ASKS.format("moonep"),
        '    return importlib.util.find_spec("moonep._C") is not None\n',
    ),
    "deep_ep_v2_unavailable_reason imports deep_ep": (
        "0.33.0",
        INSPECTS,
        "    try:\n        from deep_ep import ElasticBuffer\n    except ImportError:\n",
    ),
    "deep_ep_v2_unavailable_reason imports deep_ep too": (
        "0.33.0",
        INSPECTS,
        INSPECTS.replace('not hasattr(deep_ep, "ElasticBuffer")', 'getattr(deep_ep, "ElasticBuffer", None) is None'),
    ),
    "check_moonep_system_support imports moonep": (
        "0.33.0",
        '    if not has_moonep():\n        raise RuntimeError(\n            "MoonEP not',
        '    if OURS:\n        raise RuntimeError(\n            "MoonEP not',
    ),
    "the module imports aiter": ("0.18.0", "logger = init_logger", "import aiter\n\nlogger = init_logger"),
}


@pytest.mark.unit
@pytest.mark.parametrize("case", STRANGE)
def test_what_imports_a_package_in_a_way_of_its_own_is_named(case):
    version, before, after = STRANGE[case]
    text = _source(version)
    assert before in text
    verdict = PATCH.examine(ast.parse(text.replace(before, after, 1)))
    assert verdict.kind == "unknown"
    assert case.removesuffix(" too") in verdict.reason


@pytest.mark.unit
@pytest.mark.parametrize("version", ["0.18.0", "0.24.0", "0.33.0"])
def test_what_imports_another_package_or_what_it_is_told_is_not_in_the_way(version):
    more = (
        "\n\ndef has_cutlass():\n    import cutlass\n    return bool(cutlass)\n\n\n"
        "def load(name):\n    return importlib.import_module(name) or importlib.import_module('aiterate')\n\n\n"
        "if TYPE_CHECKING:\n    import aiter\n"
    )
    assert mend(_source(version) + more, "fork.py", [PATCH]).outcomes[0].applied


@pytest.mark.parametrize("version", CASES)
class TestOnTheNode:
    def test_answers(self, version):
        """Every kind of package gets the right answer, and none is imported here; stock imports, believes or dies."""
        stock, ours = (report(version)[side]["has"] for side in ("stock", "mended"))
        if not _applies(version):
            assert ours == stock
            return
        assert {name: ours[name].get("answer") for name in ANSWERS} == ANSWERS
        assert {name: told["imported"] for name, told in ours.items() if told["imported"]} == {}
        assert report(version)["mended"]["states"]["import_utils"] == "applied"
        for name in ("json", "nothing_of_that_name", "pure"):
            assert stock[name]["answer"] == ANSWERS[name]
        if _imports(version):
            assert stock["pure"]["imported"] == ["pure"]
            assert [stock[n].get("answer") for n in ("raises_import_error", "raises_other", "lacks_a_library")] == [
                False
            ] * 3
            assert stock["aborts"] == stock["illegal"] == {"died": True}
            assert "SystemExit" in stock["ends_with_exit"]["raised"]
        else:
            assert [stock[n]["answer"] for n in BROKEN] == [True] * len(BROKEN)
            assert "ModuleNotFoundError" in stock["nothing_of_that_name.inner"]["raised"]

    def test_warnings(self, version):
        """One line for a package that is there and broken, and nothing for one that is absent."""
        if not _applies(version):
            return
        ours = report(version)["mended"]["has"]
        for name, told in ours.items():
            line = f"{name} is installed but counts as absent: {BROKEN.get(name)}"
            assert told["said"] == ([["WARNING", line, False]] if name in BROKEN else [])

    def test_tilelang(self, version):
        """TileLang is answered from its spec: nothing is imported, and PYTHONPATH is as it was."""
        stock, ours = (report(version)[side]["tilelang"] for side in ("stock", "mended"))
        probed = Version("0.23.0") <= Version(version) < Version("0.28.0")
        assert (stock["answer"], stock["imported"], stock["path"]) == (True, ["tilelang"] * probed, int(probed))
        assert (ours["answer"], ours["imported"], ours["path"]) == (True, [], 0)

    def test_functions_held_from_before(self, version):
        """has_* functions that were taken by value before us follow."""
        stock, ours = (report(version)[side]["held"] for side in ("stock", "mended"))
        if not _applies(version):
            return
        assert (ours["has_mori"]["answer"], ours["has_nixl_ep"]["answer"]) == (True, False)
        assert ours["has_mori"]["imported"] == ours["has_nixl_ep"]["imported"] == []
        if _imports(version):
            assert stock["has_mori"]["imported"] == ["mori"]
        else:
            assert stock["has_nixl_ep"]["answer"] is True

    def test_second_interface_of_deep_ep(self, version):
        stock, ours = (report(version)[side]["v2"] for side in ("stock", "mended"))
        assert bool(ours) == (Version(version) >= Version("0.24.0"))
        for kind in ours:
            assert ours[kind]["answer"] == stock[kind]["answer"] == (kind != "without")
            assert (ours[kind]["imported"], stock[kind]["imported"]) == ([], ["deep_ep"])

    def test_forks(self, version):
        """A fork has the answer of its parent; where no child can be started, stock's own way answers."""
        stock, ours = (report(version)[side]["forks"] for side in ("stock", "mended"))
        if _applies(version):
            assert (ours["first"], ours["inherited"]["answer"], ours["inherited"]["imported"]) == (False, False, [])
        for name, told in stock["no child"].items():
            assert ours["no child"][name] == told

    def test_vllms_own_tests_of_the_probe(self, version):
        stock, ours = (report(version)[side]["own tests"] for side in ("stock", "mended"))
        assert ours == stock
        assert ours == (0 if _imports(version) and ".dev" not in version else None)

    def test_loaded_before_us(self, version):
        assert report(version)["stock"]["live"]["states"]["import_utils"] == (
            "applied" if _applies(version) else "clear"
        )

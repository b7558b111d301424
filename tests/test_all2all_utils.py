"""Expert-parallel back ends: imported when chosen, found under their names, and plain about what is wrong with them."""

import ast
import re
import subprocess

import pytest
from expert_parallel import LAZY, NIGHTLIES, RELEASES, UNGUARDED, report
from packaging.version import Version
from releases import releases, tree

from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patch import Site
from vllm_rocm_fixes.patches import all2all, all2all_utils

EVERY = [*releases(), *NIGHTLIES]
CASES = [*RELEASES, *NIGHTLIES]
SKIPPED = frozenset({"hip"})


def _source(version, patch=all2all_utils.PATCH):
    return (tree(version) / (patch.module.replace(".", "/") + ".py")).read_text()


def _mended(version, site=None, patch=all2all_utils.PATCH):
    return mend(_source(version, patch), "stock.py", [patch], site)


def _at_module_scope(module_tree):
    """The modules that are imported at module scope, under whatever conditions."""
    found = []
    todo = list(module_tree.body)
    while todo:
        statement = todo.pop()
        if isinstance(statement, ast.ImportFrom):
            found.append(statement.module)
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            todo += [s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)]
    return found


@pytest.mark.unit
@pytest.mark.parametrize("version", EVERY)
def test_verdict(version):
    mended = _mended(version)
    outcome = mended.outcomes[0]
    assert outcome.verdict.kind == ("clear" if version == LAZY else "needed"), outcome.verdict
    assert outcome.applied == (version != LAZY), outcome.failed
    early = [m for m in _at_module_scope(mended.tree or ast.parse(_source(version))) if m]
    assert not [m for m in early if re.search("deepep|mori|nixl|moonep|pplx", m)]
    if version != LAZY:
        stock = _at_module_scope(ast.parse(_source(version)))
        assert [m for m in stock if m and re.search("deepep_ll", m)]


@pytest.mark.unit
@pytest.mark.parametrize("version", EVERY)
def test_verdict_of_the_managers(version):
    outcome = _mended(version, patch=all2all.PATCH).outcomes[0]
    assert (outcome.verdict.kind, outcome.applied) == ("needed", True), outcome


@pytest.mark.unit
@pytest.mark.parametrize("version", ["0.23.0", "0.33.0"])
def test_a_manager_that_raises_is_one_that_asserts(version):
    stock = _source(version, all2all.PATCH)
    assertion = next(
        n for n in ast.walk(ast.parse(stock)) if isinstance(n, ast.Assert) and ast.unparse(n.test) == "has_mori()"
    )
    raises = "if not has_mori():\n            raise ImportError('MoRI kernels not found')"
    asserts = ast.get_source_segment(stock, assertion)
    outcome = mend(stock.replace(asserts, raises), "stock.py", [all2all.PATCH])
    assert "mori" in outcome.outcomes[0].verdict.reason and outcome.outcomes[0].applied
    assert "check(self, 'mori')\n        if not has_mori():" in ast.unparse(outcome.tree)
    # Where more is asked, stock may not raise: that place isn't ours.
    more = mend(stock.replace(asserts, raises.replace(":", " and self.internode:", 1)), "stock.py", [all2all.PATCH])
    assert "check(self, 'mori')" not in ast.unparse(more.tree)


@pytest.mark.unit
@pytest.mark.parametrize("version", EVERY)
def test_refused_without_the_guard_where_tilelang_gets_in_first(version):
    site = Site(tree(version), version, SKIPPED)
    release = Version(version)
    exposed = Version("0.20.0") <= release <= Version("0.27.1")
    why = all2all_utils.refuse(site)
    assert bool(why) == exposed
    assert all2all_utils.refuse(Site(tree(version), version)) is None
    if exposed:
        file = re.search(r"vllm/[\w/]+\.py", why).group()
        assert "tilelang" in (tree(version) / file).read_text()
        assert "guard hip is skipped" in why
    outcome = _mended(version, site).outcomes[0]
    assert outcome.applied == (not exposed and version != LAZY)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("test", "refused"),
    [
        ("TYPE_CHECKING", False),
        ("current_platform.is_cuda()", False),
        ("current_platform.is_cuda() and has_tilelang()", False),
        ("TYPE_CHECKING or current_platform.is_cuda()", False),
        ("not TYPE_CHECKING", True),
        ("not current_platform.is_cuda()", True),
        ("current_platform.is_cuda() or has_tilelang()", True),
    ],
)
def test_which_condition_keeps_tilelang_off_rocm(tmp_path, test, refused):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "a.py").write_text(f"if {test}:\n    import tilelang\n")
    assert bool(all2all_utils.refuse(Site(tmp_path, "0.23.0", SKIPPED))) == refused


@pytest.mark.unit
def test_refused_where_nothing_can_be_read():
    assert "can't be read" in all2all_utils.refuse(Site(None, None, SKIPPED))


@pytest.mark.unit
@pytest.mark.parametrize("version", CASES)
def test_what_vllm_asks_of_the_module_is_still_there(version):
    root = tree(version)
    if version == LAZY:
        return
    found = subprocess.run(
        [
            "grep",
            "-rlE",
            r"all2all_utils import",
            "--include=*.py",
            "vllm",
            *(["tests"] if (root / "tests").is_dir() else []),
        ],
        cwd=root,
        capture_output=True,
        text=True,
    ).stdout.split()
    wanted = set()
    for file in found:
        for node in ast.walk(ast.parse((root / file).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("all2all_utils"):
                wanted |= {alias.name for alias in node.names}
    assert "maybe_make_prepare_finalize" in wanted
    mended = _mended(version).tree
    there = {n.name for n in mended.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    late = next(n for n in mended.body if isinstance(n, ast.FunctionDef) and n.name == "_rocm_fixes_late")
    there |= {name for n in ast.walk(late) if isinstance(n, ast.Global) for name in n.names}
    there |= {a.name for n in mended.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert wanted <= there


@pytest.mark.unit
@pytest.mark.parametrize(
    "around", ["try:\n{}        except ImportError:\n            pass\n", "with suppress(Exception):\n{}"]
)
def test_an_import_that_may_fail_moves_with_what_it_does_then(around):
    bare = "        from .prepare_finalize.mori import MoriPrepareAndFinalize\n"
    source = _source("0.33.0")
    assert bare in source
    source = source.replace(bare, "        " + around.format(f"    {bare}"))
    mended = mend(source, "stock.py", [all2all_utils.PATCH])
    assert mended.outcomes[0].applied, mended.outcomes[0].failed
    assert not [m for m in _at_module_scope(mended.tree) if m and "mori" in m]


@pytest.mark.unit
def test_what_a_name_is_without_its_package_moves_with_the_import():
    """Stock gives None, ours gives None when somebody asks, and the package isn't asked for before."""
    source = (
        "def has_mori():\n    asked.append(True)\n    return len(asked) > 2\n\n\n"
        "def maybe_make_prepare_finalize():\n    return MoriPrepareAndFinalize\n\n\n"
        "asked = []\nif TYPE_CHECKING:\n    from mori import MoriPrepareAndFinalize\n"
        "if has_mori():\n    from mori import MoriPrepareAndFinalize\nelse:\n    MoriPrepareAndFinalize = None\n"
    )
    done = mend(source, "stock.py", [all2all_utils.PATCH])
    assert done.outcomes[0].applied, done.outcomes[0].failed
    for code, before in ((compile(source, "stock.py", "exec"), [True]), (done.code, [])):
        namespace = {"TYPE_CHECKING": False, "__name__": "stock"}
        exec(code, namespace)
        assert namespace["asked"] == before
        assert namespace["maybe_make_prepare_finalize"]() is None and namespace["asked"] == [True]


@pytest.mark.unit
def test_what_is_not_understood_is_left():
    source = _source("0.33.0")
    other = mend(source.replace("maybe_make_prepare_finalize", "other"), "stock.py", [all2all_utils.PATCH])
    assert other.outcomes[0].verdict.kind == "unknown"
    used = source + "\n\nclass Mine(MoriPrepareAndFinalize): ...\n"
    outcome = mend(used, "stock.py", [all2all_utils.PATCH]).outcomes[0]
    assert "MoriPrepareAndFinalize is read at module scope" in outcome.failed
    bare = mend("class Other: ...\n", "stock.py", [all2all.PATCH]).outcomes[0]
    assert bare.verdict.kind == "unknown"
    twice = mend(ast.unparse(_mended("0.33.0").tree), "stock.py", [all2all_utils.PATCH]).outcomes[0]
    assert twice.verdict.kind == "clear"


@pytest.mark.parametrize("version", CASES)
class TestOnTheNode:
    def test_import(self, version):
        """Importing the module, and the managers, imports no back end's package and tries none."""
        stock, ours = (report(version)[side] for side in ("stock", "mended"))
        early = [] if version == LAZY else ["deep_ep", "mori"] if version != "0.14.1" else ["deep_ep"]
        assert stock["imported"] == early
        broken_one_ends_it = Version("0.18.0") <= Version(version) < Version("0.23.0")
        assert (stock["import"] or "").startswith("ImportError: libcudart.so.12" if broken_one_ends_it else "")
        assert bool(stock["import"]) == broken_one_ends_it
        assert (ours["import"], ours["imported"], ours["children"]) == (None, [], 0)
        assert ours["states"]["all2all_utils"] == ("clear" if version == LAZY else "applied")
        assert ours["states"]["all2all"] == "applied"

    def test_names(self, version):
        """Names that others import from the module resolve, and only then the package is imported."""
        if version == LAZY:
            return
        stock, ours = (report(version)[side]["names"] for side in ("stock", "mended"))
        for name, package in (("DeepEPHTPrepareAndFinalize", "deep_ep"), ("MoriPrepareAndFinalize", "mori")):
            if package == "mori" and version == "0.14.1":
                assert "cannot import name" in ours[name]
                continue
            where, imported = ours[name]
            assert package in imported
            if isinstance(stock.get(name), list):
                assert where == stock[name][0]
        assert ours["DEEPEP_QUANT_BLOCK_SHAPE"][0] == "[128, 128]"
        assert ours["MoriPrepareAndFinalize"][-1] == ["mori"] or version == "0.14.1"
        assert (ours["broken"], ours["unknown"]) == (False, False)

    def test_chosen(self, version):
        """A back end that is chosen is imported then; one that can't be says package, back end and reason."""
        stock, ours = (report(version)[side]["chosen"] for side in ("stock", "mended"))
        good = ["deepep_high_throughput", "deepep_low_latency"] + ["mori"] * (version != "0.14.1")
        for backend in good:
            assert ours[backend]["before"] == []
            assert ours[backend]["after"] == [backend.partition("_")[0].replace("deepep", "deep_ep")]
            assert ours[backend]["made"].lower().startswith(backend[:4])
            if "made" in stock.get(backend, {}):
                assert stock[backend]["made"] == ours[backend]["made"]
        if version == LAZY:
            return
        bad = {"nixl_ep": "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"}
        if version == "0.14.1":
            bad = {"pplx": "it is not installed"}
        if Version(version) >= Version("0.31.0"):
            bad["moonep"] = "it is not installed"
        for backend, why in bad.items():
            package = "pplx_kernels" if backend == "pplx" else backend
            said = f"the all2all back end {backend} was chosen, and its package {package} can't be used: {why}"
            assert ours[backend]["raised"] == f"ImportError: {said}"
            assert said not in str(stock.get(backend))

    def test_managers(self, version):
        """So does the manager of a back end, which is the first to ask in a start of vLLM."""
        stock, ours = (report(version)[side]["managers"] for side in ("stock", "mended"))
        assert len(ours) >= 2
        for name, said in ours.items():
            start = "ImportError: the all2all back end "
            assert said.startswith(start)
            assert not stock[name].startswith(start)
            backend, package, why = re.match(
                r"(\w+) was chosen, and its package (\w+) can't be used: (.*)", said[len(start) :]
            ).groups()
            expected = {
                "deep_ep": "OSError: libmpi.so.40: cannot open shared object file",
                "mori": "OSError: libmpi.so.40: cannot open shared object file",
                "nixl_ep": "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
            }
            assert why == expected.get(package, "it is not installed")
            assert backend[:4] == name.lower()[:4]

    def test_live(self, version):
        """In a module that was loaded before us, what it imported stays, and its functions follow."""
        stock = report(version)["stock"]["live"]
        assert stock["states"]["all2all"] == "applied"
        assert stock["states"]["all2all_utils"] == ("clear" if version == LAZY else "applied")
        if version != LAZY:
            assert stock["chosen"]["raised"].startswith("ImportError: the all2all back end ")


@pytest.mark.parametrize("version", UNGUARDED)
def test_without_the_guard_the_imports_stay_early(version):
    """The guard hip is skipped: stock's early imports, which do its work, are kept, and the reason is said."""
    side = report(version)["unguarded"]
    exposed = version != "0.33.0"
    assert side["state"] == ("refused" if exposed else "applied")
    assert side["imported"] == (report(version)["stock"]["imported"] if exposed else [])
    refused = [
        line for line in side["said"] if line.startswith("all2all_utils: refused, the guard hip is skipped, and ")
    ]
    assert len(refused) == exposed and all("must not come before HIP (#51151)" in line for line in refused)
    assert "hip" not in side["guards"]


@pytest.mark.parametrize("version", UNGUARDED)
def test_a_guard_that_is_switched_off_too_late_stays(version):
    """The module is mended when the switch comes: the guard stays, and the worker says so."""
    side = report(version)["late"]
    exposed = version != "0.33.0"
    assert (side["state"], side["imported"]) == ("applied", [])
    assert ("hip" in side["guards"]) == exposed
    stays = [line for line in side["said"] if line.startswith("hip stays, for all2all_utils is mended already: ")]
    assert len(stays) == exposed and all("set it where `ray start` runs" in line for line in stays)

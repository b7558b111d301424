"""Thousands of changed stock modules: each comes out mended and whole, or is left to stock. Never a third thing.

ROCM_FIXES_EXAMPLES=20 makes twenty times as many, and other ones in each run; without it they are the same each time.
"""

import ast
import builtins
import collections
import dis
import functools
import importlib
import inspect
import os
import py_compile
from importlib.machinery import PathFinder, SourcelessFileLoader
from types import CodeType

import pytest
from changed_sources import CHANGES, ENCODINGS, HOT, MARK, changed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from releases import tree

from vllm_rocm_fixes.importing import Finder, Loader
from vllm_rocm_fixes.installed import path_of
from vllm_rocm_fixes.late import BINDER
from vllm_rocm_fixes.live import by_name, same
from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patch import Site
from vllm_rocm_fixes.patches import SERIES
from vllm_rocm_fixes.process import Process
from vllm_rocm_fixes.rewrite import rewrite
from vllm_rocm_fixes.rewrite import same as same_tree
from vllm_rocm_fixes.syntax import definitions as definitions_of

pytestmark = [pytest.mark.unit, pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")]
RELEASES = (
    "0.14.0",
    "0.18.1",
    "0.20.2",
    "0.21.0",
    "0.22.1",
    "0.23.0",
    "0.26.0",
    "0.28.0",
    "0.30.0",
    "0.33.0",
    "0.28.1.dev202609011116",
)
MODULES = {}
for _patch in SERIES:
    MODULES.setdefault(_patch.module, []).append(_patch)
TIMES = int(os.environ.get("ROCM_FIXES_EXAMPLES", 1))
CHARACTERS = 1_200_000  # of source for each module; together 2,000 examples, and 90 seconds of one core
OWN = {
    "quark": ("aiter_is_installed",),
    "tilelang_jit": ("kernel",),
    "fa_utils": ("flash_attn_varlen_func",),
}  # what a patch defines anew
GONE = {"aiter_dtype": ("dtypes",)}  # what a module doesn't bind any more
ADDED = {BINDER, f"{BINDER}_ran", "__getattr__"}
KNOWN = {*dir(builtins), "__file__", "__name__", "__doc__", "__path__", "__spec__", "__annotations__", "__class__"}


@functools.cache
def stock(module):
    """For each release its text of a module and, where it has the defect, the mended code."""
    found = {}
    for release in RELEASES:
        path = path_of(tree(release), module)
        if path is not None:
            text = path.read_text()
            found[release] = text, mend(text, "m.py", MODULES[module], Site()).code
    return found


def sources(module):
    """The stock texts of a module, those with the defect more often than the ones without it."""
    needed = [(release, text) for release, (text, code) in stock(module).items() if code is not None]
    others = [(release, text) for release, (text, code) in stock(module).items() if code is None]
    assert needed, f"no release has the defect of {module}"
    return [*needed, *needed, *needed, *others]


@functools.cache
def touched(module):
    """The functions that a mend of stock releases changes, by their last names."""
    both = [(compile(text, "m.py", "exec"), code) for text, code in stock(module).values() if code is not None]
    return {name.rpartition(".")[2] for before, after in both for name in differing(before, after)}


def differing(stock, mended):
    """The functions of the first code that the second hasn't, or has otherwise."""
    before, after = by_name(stock), by_name(mended)
    pairs = {name: (codes, after.get(name, [])) for name, codes in before.items()}
    return {name for name, (was, now) in pairs.items() if len(was) != len(now) or not all(map(same, was, now))}


def definitions(node, prefix=""):
    """Every class and function at module scope and in classes: name, signature, decorators, bases, in order."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = prefix + child.name
            heads = [type(child), *child.decorator_list, getattr(child, "args", None), *getattr(child, "bases", ())]
            yield name, [ast.dump(h) if isinstance(h, ast.AST) else str(h) for h in heads]
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{name}.")
            elif child.name == BINDER:  # what it holds stood at module scope
                yield from definitions(child)
        else:
            yield from definitions(child, prefix)


def marks(node, inside=""):
    """(mark, the function it stands in) for each statement or condition that somebody put in."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inside = inside if node.name == BINDER else f"{inside}.{node.name}"
    if isinstance(node, ast.Name) and node.id.startswith(MARK):
        yield node.id, inside
    for child in ast.iter_child_nodes(node):
        yield from marks(child, inside)


@functools.lru_cache(4096)
def operations(code, *kinds):
    """The names that code itself loads, or stores, in these ways."""
    return {i.argval for i in dis.get_instructions(code) if i.opname in kinds}


def inside(code):
    """Code and all code in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from inside(constant)


def reads(*codes):
    """The global names that these read, inner code included."""
    below = [c for code in codes for c in inside(code)]
    return set().union(*(operations(c, *LOADS) - operations(c, "STORE_NAME") for c in below))  # a class has its own


STORES, LOADS = ("STORE_NAME", "STORE_GLOBAL"), ("LOAD_NAME", "LOAD_GLOBAL")


def shared(tree):
    """The names that functions bind at module scope."""
    return {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}


def check_late_names(tree, code):
    """A name that is bound late now is asked for by every function that reads it, and not read at module scope."""
    binder = next((s for s in tree.body if isinstance(s, ast.FunctionDef) and s.name == BINDER), None)
    if binder is None:
        return
    late = shared(binder)
    assert any(isinstance(s, ast.FunctionDef) and s.name == "__getattr__" for s in tree.body)
    assert not late & operations(code, *LOADS), "read at module scope"
    # Names that are bound together: whoever asks for one has the others.
    groups = [{c.value for c in n.comparators[0].elts} for n in ast.walk(binder) if is_group(n)] or [late]

    def look(inner, asked):
        words = {w for c in inner.co_consts for w in (c if isinstance(c, tuple) else (c,)) if isinstance(w, str)}
        asked = asked.union(*(g for g in groups if g & words))
        if late & set(inner.co_names):
            unasked = (operations(inner, *LOADS) & late) - asked
            assert not unasked, f"{inner.co_name} reads {unasked}, and doesn't ask for it"
        for c in inner.co_consts:
            if isinstance(c, CodeType):
                look(c, asked)

    for c in code.co_consts:
        if isinstance(c, CodeType) and c.co_name != BINDER:
            made = [i for i in c.co_consts if isinstance(i, CodeType) and i.co_name == "__init__"]
            words = {w for i in made for w in i.co_consts if isinstance(w, str)}  # a method comes after its constructor
            look(c, set().union(*(g for g in groups if g & words)))


def is_group(node):
    return (
        isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and isinstance(node.comparators[0], ast.Tuple)
    )


def check_helpers(mended):
    """Every name that the edit imports from us is there, and is called as it can be called."""
    for owner in ast.walk(mended):
        if not isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        ours = {}
        for node in ast.walk(owner):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm_rocm_fixes"):
                ours |= {a.asname or a.name: getattr(importlib.import_module(node.module), a.name) for a in node.names}
        for call in (n for n in ast.walk(owner) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)):
            if call.func.id in ours and not any(isinstance(a, ast.Starred) for a in call.args):
                keywords = {k.arg: None for k in call.keywords if k.arg}
                inspect.signature(ours[call.func.id]).bind(*call.args, **keywords)


def check(module, source, write):
    """The property itself. Returns whether the module was mended."""
    patches = MODULES[module]
    mended = mend(source, "m.py", patches, Site())
    applied = [o.patch for o in mended.outcomes if o.applied]
    if mended.code is None:  # the loader lets stock's own loader run: nothing of ours is in it
        assert mended.tree is None and not applied
        return False
    assert applied and mended.tree is not None
    original, before = compile(source, "m.py", "exec", dont_inherit=True), ast.parse(source)
    # What others put in is there, and where it was.
    kept = collections.Counter(marks(mended.tree))
    for place, count in collections.Counter(marks(before)).items():
        assert kept[place] >= count, f"{place} is lost"
    # No definition came, went, or has another head, but for ours.
    own = {name for p in applied for name in OWN.get(p.name, ())}
    heads, new = list(definitions(before)), list(definitions(mended.tree))
    heads, new = (sorted((d for d in ds if d[0] not in ADDED | own), key=lambda d: d[0]) for ds in (heads, new))
    assert new == heads, [d for d in new if d not in heads] + [d for d in heads if d not in new]
    # Nothing vanished from the module, and nothing is read that nobody binds.
    names = operations(original, *STORES) | shared(before)
    after = operations(mended.code, *STORES) | shared(mended.tree)
    errors = {
        h.name for h in ast.walk(before) if isinstance(h, ast.ExceptHandler)
    }  # gone when their handlers have ended
    names, after = names - errors, after - errors
    gone = {name for p in applied for name in GONE.get(p.name, ())} - after
    assert names - gone <= after <= names | ADDED | own, names ^ after
    assert not gone & reads(mended.code), f"{gone} is read"
    was, now = (collections.defaultdict(list, by_name(code)) for code in (original, mended.code))
    changed_ones = differing(mended.code, original)
    for name in changed_ones:
        if len(was[name]) == len(now[name]):
            for one, other in zip(was[name], now[name], strict=True):
                fresh = {*other.co_varnames, *other.co_cellvars} - {*one.co_varnames, *one.co_cellvars}
                assert not fresh & reads(one), f"{name} gets a variable of its own for {fresh & reads(one)}"
        early = reads(original) if name == BINDER else set()  # it holds what stood at module scope
        unbound = reads(*now[name]) - reads(*was[name]) - early - after - KNOWN
        assert not unbound, f"{name}: nobody binds {unbound}"
    check_late_names(mended.tree, mended.code)
    check_helpers(mended.tree)
    for name in {n for n in changed_ones if n.rpartition(".")[2] not in touched(module) | ADDED}:
        texts = [ast.unparse(s) for s in definitions_of(before, name)]
        assert any(HOT.search(text) for text in texts), f"{name} differs, and holds nothing that the patches are about"
    if write:
        text = rewrite(source, mended.tree)
        again = ast.parse(text)
        assert same_tree(again, mended.tree)
        second = mend(text, "m.py", patches, Site())
        assert {o.verdict.kind for o in second.outcomes if o.patch in applied} == {"clear"} and second.code is None
    return True


STEPS = st.lists(
    st.tuples(st.sampled_from(CHANGES), st.integers(0, 9999), st.integers(0, 9999)), min_size=0, max_size=4
)


@pytest.mark.parametrize("module", MODULES)
def test_a_changed_module_is_mended_and_whole_or_stock(module):
    seen = collections.Counter()

    @settings(
        max_examples=TIMES * min(300, CHARACTERS // len(sources(module)[0][1])),
        derandomize=TIMES == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from([release for release, _ in sources(module)]),
        STEPS,
        st.sampled_from([*["utf-8"] * 6, *ENCODINGS]),
    )
    def run(release, steps, encoding):
        text = stock(module)[release][0]
        seen[check(module, changed(text, steps, encoding), sum(seen.values()) % 2 == 0)] += 1

    run()
    assert seen[True] and seen[False], seen


# What was mended, and was neither stock nor mended: lines put in, the release and a line of stock that follows.
FOUND = {
    "vllm.v1.attention.backends.fa_utils": [
        ("    if _mark_1():\n        return None\n", "0.14.0", "        from flash_attn import"),
        ("        import aiter\n", "0.26.0", "        from flash_attn import"),
        (
            "def asks():\n    return _ROCM_FLASH_ATTN_AVAILABLE\n\n\n",
            "0.26.0",
            "def is_flash_attn_varlen_func_available",
        ),
        ("def __getattr__(name):\n    return 1\n\n\n", "0.26.0", "def is_flash_attn_varlen_func_available"),
    ],
    "tests.utils": [
        ("    _mark_1()\n", "0.30.0", "    if not pythonpath:\n        return"),
    ],
    "vllm._aiter_ops": [
        ("_dtypes = lambda: dtypes\n\n\n", "0.14.0", "def _rocm_aiter_fused_moe_impl"),
    ],
}


def test_a_platform_of_another_name():
    module = "vllm.v1.attention.backends.fa_utils"
    text = stock(module)["0.26.0"][0].replace("current_platform", "current_platform_x")
    assert not check(module, text.encode(), write=True)


@pytest.mark.parametrize(("module", "number"), [(m, n) for m in FOUND for n in range(len(FOUND[m]))])
def test_what_was_found(module, number):
    new, release, before = FOUND[module][number]
    text = stock(module)[release][0]
    assert f"\n{before}" in text
    check(module, text.replace(f"\n{before}", f"\n{new}{before}", 1).encode(), write=True)


@pytest.mark.parametrize("module", MODULES)
def test_only_a_pyc(module, tmp_path):
    """Without a source stock's own loader runs its code, and the reason is told."""
    root = tmp_path / "root"
    path = root.joinpath(*module.split("."))
    path.parent.mkdir(parents=True)
    (tmp_path / "m.py").write_text(sources(module)[0][1])
    py_compile.compile(str(tmp_path / "m.py"), str(path.with_suffix(".pyc")), doraise=True)
    spec = PathFinder.find_spec(module, [str(path.parent)])
    process = Process(MODULES[module], ())
    assert type(spec.loader) is SourcelessFileLoader
    assert process._code(module, spec.loader, spec.origin) is None
    for patch in MODULES[module]:
        result = process.results[patch.name]
        assert result.state == "unknown" and "only compiled code" in result.reason
    code = Loader(spec, Finder({module: process._code}, {}, pytest.fail)).get_code(module)
    assert same(code, SourcelessFileLoader(module, spec.origin).get_code(module))

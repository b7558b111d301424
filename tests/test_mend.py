"""Source in, mended tree and outcomes out."""

import ast

import pytest

from vllm_rocm_fixes.late import defer
from vllm_rocm_fixes.mend import mend
from vllm_rocm_fixes.patch import Patch, Site, clear, needed, unknown
from vllm_rocm_fixes.syntax import parse_statements, place

pytestmark = pytest.mark.unit
STOCK = "def f():\n    return 'early'\n\n\ndef g():\n    return 'stock'\n"


def patch(name="one", word="early", better="late", **other):
    """A patch that turns one string into another, and is unknown where neither is there."""

    def strings(tree):
        return [n for n in ast.walk(tree) if isinstance(n, ast.Constant)]

    def examine(tree):
        found = {n.value for n in strings(tree)}
        return needed(word) if word in found else clear(better) if better in found else unknown(f"neither in {found}")

    def edit(tree):
        for node in strings(tree):
            if node.value == word:
                node.value = better

    fields = dict(name=name, module="m", summary="", origin=(), since="0.14.0", until=None, examine=examine, mend=edit)
    return Patch(**{**fields, **other})


def run(code):
    namespace = {}
    exec(code, namespace)
    return namespace


def test_a_needed_patch_is_applied_and_a_second_round_changes_nothing():
    first = mend(STOCK, "m.py", [patch()])
    assert [o.applied for o in first.outcomes] == [True]
    assert run(first.code)["f"]() == "late"
    again = mend(ast.unparse(first.tree), "m.py", [patch()])
    assert again.outcomes[0].verdict.kind == "clear" and again.code is None


def test_unknown_source_is_left_alone():
    done = mend("def f(): return 'something else'\n", "m.py", [patch()])
    assert done.outcomes[0].verdict.kind == "unknown" and done.tree is done.code is None


@pytest.mark.parametrize(
    "source", [b"def f(:\n", b"\xff\xfe\x00", "x = '\udc80'\n", b"\0", b"# coding: nonsense\n"], ids=repr
)
def test_source_that_does_not_parse_is_unknown(source):
    done = mend(source, "m.py", [patch(), patch("two")])
    assert [o.verdict.kind for o in done.outcomes] == ["unknown", "unknown"] and done.code is None


def breaks_halfway(tree):
    tree.body[1].body = []
    raise RuntimeError("halfway")


@pytest.mark.parametrize(
    "bad",
    [
        dict(mend=breaks_halfway),
        dict(mend=lambda tree: None),
        dict(mend=lambda tree: tree.body.clear()),
        dict(refuse=lambda site: 1 / 0),
        dict(mend=lambda tree: tree.body[1].body.append(ast.Return(ast.Constant("mended")))),
        dict(mend=lambda tree: tree.body.extend(parse_statements("nowhere", tree.body[0]))),
    ],
    ids=["raises halfway", "does nothing", "loses the place", "refuse raises", "gives no position", "reads nothing"],
)
def test_a_patch_that_fails_leaves_nothing_behind_and_takes_nobody_along(bad):
    done = mend(STOCK, "m.py", [patch(), patch("bad", "stock", "mended", **bad), patch("third", "late", "latest")])
    assert [o.applied for o in done.outcomes] == [True, False, True]
    assert done.outcomes[1].failed
    assert run(done.code)["g"]() == "stock" and run(done.code)["f"]() == "latest"


def test_an_examination_that_breaks_is_unknown():
    done = mend(STOCK, "m.py", [patch(examine=lambda tree: 1 / 0)])
    assert done.outcomes[0].verdict.kind == "unknown" and "ZeroDivisionError" in done.outcomes[0].verdict.reason


def test_a_tree_that_does_not_compile_is_not_used():
    def edit(tree):
        tree.body[0].body[0].value.value = "late"
        tree.body.append(place(ast.Return(ast.Constant(1)), tree.body[0]))

    done = mend(STOCK, "m.py", [patch(mend=edit)])
    assert done.code is None and "compile" in done.outcomes[0].failed


def test_a_patch_may_refuse_a_site_and_says_why():
    def refuse(site):
        return "without guard hip" if "hip" in site.skipped else None

    assert mend(STOCK, "m.py", [patch(refuse=refuse)]).outcomes[0].applied
    refused = mend(STOCK, "m.py", [patch(refuse=refuse)], Site(skipped=frozenset({"hip"})))
    assert refused.outcomes[0].refused == "without guard hip" and refused.code is None


@pytest.mark.parametrize(
    ("body", "applied"),
    [
        ("return 'early'", True),
        ("return helper('early')", False),
        ("helper = 'early'\n    return helper", False),
        ("return lambda: ('early', helper)", False),
        ("import helper\n    return 'early'", False),
        ("def helper(): ...\n    return 'early'", False),
        ("class C:\n        def helper(self): ...\n    return 'early'", True),
    ],
    ids=["free", "read", "bound", "inside", "imported", "defined", "a method"],
)
@pytest.mark.parametrize("code", ["from os import getcwd as helper", "def helper(): ...", "class helper: ..."])
def test_an_edit_takes_no_name_that_its_function_uses(body, applied, code):
    def edit(tree):
        tree.body[0].body[:0] = parse_statements(code, tree.body[0].body[0])
        for constant in [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == "early"]:
            constant.value = "late"

    elsewhere = "\n\ndef g():\n    return helper\n"
    done = mend(f"def f():\n    {body}\n{elsewhere}", "m.py", [patch(mend=edit)])
    assert [o.applied for o in done.outcomes] == [applied], done.outcomes[0].failed
    assert applied or "needs the name helper" in done.outcomes[0].failed


@pytest.mark.parametrize("elsewhere", ["", "def g():\n    import platform\n"])
@pytest.mark.parametrize("platform", ["platform", "platform_x"])
def test_an_edit_reads_no_name_that_the_module_lacks(platform, elsewhere):
    def edit(tree):
        code = "return 'late' if platform.is_rocm() else len('late')"
        tree.body[1].body = parse_statements(code, tree.body[1].body[0])

    done = mend(f"import {platform}\ndef f():\n    return 'early'\n{elsewhere}", "m.py", [patch(mend=edit)])
    assert done.outcomes[0].applied == (platform == "platform")
    assert done.outcomes[0].applied or "reads platform" in done.outcomes[0].failed


@pytest.mark.parametrize(("behind", "applied"), [("use(x)", True), ("x = 1\n    use(x)", True), ("return x", False)])
def test_an_edit_leaves_no_name_unbound_that_the_source_reads(behind, applied):
    """What is moved below an `if` may bind what is read behind it."""

    def edit(tree):
        block = tree.body[1].body
        block[0].value.value = "late"
        gate = parse_statements("if len('x'):\n    pass", block[0])[0]
        gate.body = [block.pop(0)]
        if behind == "use(x)":
            gate.body.append(block.pop(0))
        block.insert(0, gate)

    source = f"from os import use\ndef f():\n    x = 'early'\n    {behind}\n"
    done = mend(source, "m.py", [patch(mend=edit)])
    assert [o.applied for o in done.outcomes] == [applied], done.outcomes[0].failed
    assert applied or "binds x under a condition" in done.outcomes[0].failed


@pytest.mark.parametrize(
    ("after", "applied"),
    [
        ("", True),
        ("FLAG = False", False),
        ("del FLAG", False),
        ("if late:\n    from os import sep as FLAG", False),
        ("def g():\n    global FLAG\n    FLAG = False", False),
        ("globals()['FLAG'] = False", False),
        ("vars(late).update(FLAG=False)", False),
        ("def g():\n    setattr(late, 'FLAG', False)", False),
        ("def g(FLAG):\n    return FLAG", True),
        ("FLAG = True", True),
        ("FLAG += 1", False),
        ("FLAG.on['x'] = False", False),
        ("del FLAG[0]", False),
        ("FLAG.environ.pop('x')", False),
        ("FLAG.info('x')", True),
        ("match late:\n    case FLAG: ...", False),
        ("if TYPE_CHECKING:\n    from os import FLAG", True),
        ("def g():\n    FLAG = False", True),
        ("class C:\n    FLAG = False", True),
    ],
)
@pytest.mark.parametrize(
    "condition",
    ["if FLAG:", "if not other:\n  if FLAG:", "if FLAG:\n  pass\nelse:", "with late(FLAG):", "if asked():"],
)
def test_what_is_moved_reads_what_it_read_in_its_place(after, applied, condition):
    """An import under a condition isn't deferred where the condition would be another by then."""
    source = (
        "from os import late, other\nFLAG = True\ndef asked():\n    return again()\ndef again():\n    return FLAG\n"
        f"{condition}\n    import mori\n{after}\ndef f():\n    return mori\n"
    )

    def moves(statement):
        return isinstance(statement, ast.With | ast.Import)

    def examine(tree):
        return needed("early") if any(isinstance(s, ast.If | ast.With) for s in tree.body[4:5]) else clear("late")

    done = mend(source, "m.py", [patch(examine=examine, mend=lambda tree: defer(tree, moves) and None)])
    assert [o.applied for o in done.outcomes] == [applied], done.outcomes[0].failed
    assert applied or "reads FLAG, which the source binds in another way after that" in done.outcomes[0].failed


@pytest.mark.parametrize(
    ("before", "after", "applied"),
    [
        ("FLAG = True", "FLAG = not FLAG", False),
        ("FLAG = False\nif other:\n    FLAG = True", "FLAG = False", False),
        ("FLAG = 0\nFLAG += 1", "FLAG += 1", False),
        ("FLAG = 0\nFLAG = 1", "", True),
        ("from os import sep as FLAG", "from os import sep as FLAG, other", True),
        ("from os import sep as FLAG", "from posix import sep as FLAG", False),
        ("import os as FLAG", "import sys as FLAG", False),
        ("FLAG = 1\nwith late() as error: ...", "with late() as error: ...\nerror = 2", True),
    ],
)
def test_the_same_value_again_is_no_other_value(before, after, applied):
    """What counts are all ways to bind the name, and not a name that the moved code binds itself."""
    source = (
        f"from os import late, other\n{before}\n"
        f"try:\n    import mori\nexcept [e for e in FLAG] as error:\n    late(error)\n{after}\n"
    )

    def examine(tree):
        return needed("early") if any(isinstance(s, ast.Try) for s in tree.body) else clear("late")

    edit = patch(examine=examine, mend=lambda tree: defer(tree, lambda s: isinstance(s, ast.Try)) and None)
    done = mend(source, "m.py", [edit])
    assert [o.applied for o in done.outcomes] == [applied], done.outcomes[0].failed
    assert applied or "reads FLAG" in done.outcomes[0].failed

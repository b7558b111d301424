"""A changed tree back into text: whatever the change and however the file is written, the text gives that tree."""

import ast
import difflib
import random
import textwrap

import pytest
from releases import tree

from vllm_rocm_fixes import rewrite as module
from vllm_rocm_fixes.rewrite import rewrite, same
from vllm_rocm_fixes.syntax import find, insert_before, parse_statements, replace, statements

pytestmark = pytest.mark.unit

STOCK = textwrap.dedent('''\
    """A module."""  # kept
    import os

    @decorated  # with a comment
    class Thing( Base ):
        """A thing."""

        # before the method
        def method(self, a,
                   b=2):  # header
            # about x
            x = [1,  2,
                 3]
            try:
                import aiter  # noqa
                log("one "
                    "two")
            except ImportError:
                pass
            if a:
                one()  # first
            elif b:
                # about two
                two()
            else: three()
            a = 1; b = 2
            return """text
      more""", x
''')


def edited(source: str, edit) -> str:
    changed = ast.parse(source)
    edit(changed)
    ast.fix_missing_locations(changed)
    written = rewrite(source.encode(), changed).decode()
    assert same(ast.parse(written), changed)
    assert ast.dump(ast.parse(written)) == ast.dump(changed)
    return written


def lines_changed(before: str, after: str) -> tuple[list[str], list[str]]:
    diff = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return [d[2:] for d in diff if d[0] == "-"], [d[2:] for d in diff if d[0] == "+"]


def block_of(changed: ast.Module, statement: ast.stmt):
    return next(block for block, inner in statements(changed.body, closed=()) if inner is statement)


def test_only_the_changed_lines_change():
    def edit(changed):
        (attempt,) = find(changed, ast.Try)
        replace(block_of(changed, attempt), attempt, parse_statements("self.ops = None", attempt))

    gone, new = lines_changed(STOCK, edited(STOCK, edit))
    assert new == ["        self.ops = None"]
    assert gone[0].strip() == "try:" and len(gone) == 6


def test_a_header_changes_and_its_body_stays():
    def edit(changed):
        find(changed, ast.FunctionDef)[0].args.args.append(ast.arg("c"))
        find(changed, ast.FunctionDef)[0].args.defaults.append(ast.Constant(3))

    gone, new = lines_changed(STOCK, edited(STOCK, edit))
    assert new == ["    def method(self, a, b=2, c=3):"]
    assert len(gone) == 2


def test_an_elif_changes_alone():
    def edit(changed):
        find(changed, ast.If)[1].test = ast.Name("c", ast.Load())

    gone, new = lines_changed(STOCK, edited(STOCK, edit))
    assert (gone, new) == (["        elif b:"], ["        elif c:"])


def test_statements_that_move_take_their_comments_along():
    def edit(changed):
        body = find(changed, ast.FunctionDef)[0].body
        moved = body[:2]
        wrapped = parse_statements("if ready():\n    pass", body[0])[0]
        wrapped.body = moved
        body[:2] = [wrapped]

    written = edited(STOCK, edit)
    assert "        if ready():\n            # about x\n            x = [1,  2,\n" in written
    assert "            x = [1,  2,\n                 3]\n" in written
    assert written.count("# about x") == written.count("# noqa") == 1


def test_a_line_of_two_statements_is_written_anew():
    def edit(changed):
        find(changed, ast.Assign)[1].value = ast.Constant(5)

    gone, new = lines_changed(STOCK, edited(STOCK, edit))
    assert (gone, new) == (["        a = 1; b = 2"], ["        a = 5", "        b = 2"])


def test_a_new_text_over_several_lines_keeps_its_value():
    def edit(changed):
        function = find(changed, ast.FunctionDef)[0]
        inner = parse_statements(
            'def inner():\n    """Doc\n\n  and more"""\n    return f"a\\n{x!r:>{w}}"', function.body[0]
        )
        insert_before(function.body, function.body[0], inner)

    assert "def inner():" in edited(STOCK, edit)


def test_a_new_function_of_module_scope_has_room():
    def edit(changed):
        changed.body.append(
            parse_statements("def __getattr__(name):\n    raise AttributeError(name)", changed.body[-1])[0]
        )

    assert edited(STOCK, edit).endswith('more""", x\n\n\ndef __getattr__(name):\n    raise AttributeError(name)\n')


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_form_feeds_tabs_and_encodings_stay(end, last, mark):
    head = "# -*- coding: utf-8 -*-\nx = 'é'  # \u2028 \x1c kept\n\x0c\n"
    text = head + "if x:\n\ta()\n\tb()  # é\n\f\ndef f():\n\tpass\n\n# end\nz = 1\n"
    source = mark + (text if last else text[:-1]).replace("\n", end).encode()

    def edit(changed):
        block = find(changed, ast.If)[0].body
        replace(block, block[0], parse_statements("for i in x:\n    c(i)", block[0]))

    changed = ast.parse(source)
    edit(changed)
    wanted = text.replace("\ta()\n", "\tfor i in x:\n\t\tc(i)\n")
    assert rewrite(source, changed) == mark + (wanted if last else wanted[:-1]).replace("\n", end).encode()


def test_latin_1_stays_latin_1():
    source = "# coding: latin-1\nx = 'é'\ny = 1\n".encode("latin-1")
    changed = ast.parse(source)
    changed.body[1].value = ast.Constant("ü")
    assert rewrite(source, changed) == "# coding: latin-1\nx = 'é'\ny = 'ü'\n".encode("latin-1")
    changed.body[1].value = ast.Constant("語")
    with pytest.raises(ValueError):
        rewrite(source, changed)


def test_a_tree_that_no_text_gives_is_an_error():
    changed = ast.parse("x = 1\n")
    changed.body[0].targets[0].id = "not a name"
    with pytest.raises(ValueError):
        rewrite(b"x = 1\n", changed)


def test_no_change_gives_the_same_bytes():
    for path in sorted((tree("0.33.0") / "vllm" / "v1" / "worker").glob("*.py")):
        assert rewrite(path.read_bytes(), ast.parse(path.read_bytes())) == path.read_bytes()


def test_random_edits_of_stock_modules_never_need_the_coarse_way(monkeypatch):
    """Edits of the kinds that patches make, on real modules: only the neighbourhood of an edit changes."""
    dice = random.Random(4711)
    paths = [
        p for v in ("0.20.2", "0.33.0") for p in (tree(v) / "vllm").rglob("*.py") if 2000 < p.stat().st_size < 40000
    ]
    depths = []
    writer = module._Writer.__init__
    monkeypatch.setattr(module._Writer, "__init__", lambda s, x, t, d: (depths.append(d), writer(s, x, t, d))[1])
    for path in dice.sample(sorted(paths), 150):
        source = path.read_bytes()
        changed = ast.parse(source)
        for _ in range(dice.randint(1, 4)):
            random_edit(changed, dice)
        ast.fix_missing_locations(changed)
        depths.clear()
        written = rewrite(source, changed)
        assert same(ast.parse(written), changed), path
        assert depths == [100], path


def random_edit(changed: ast.Module, dice: random.Random) -> None:
    block, statement = dice.choice(list(statements(changed.body, closed=())))
    kind = dice.choice(["delete", "insert", "replace", "wrap", "try", "unwrap", "swap"])
    new = parse_statements("from helper import help\nhelp('a', x=[1, 2])", statement)
    if kind == "delete":
        replace(block, statement, [] if len(block) > 1 else [ast.Pass(lineno=statement.lineno, col_offset=0)])
    elif kind == "insert":
        insert_before(block, statement, new)
    elif kind == "replace":
        replace(block, statement, new)
    elif kind in ("wrap", "try"):
        code = "if ready():\n    pass" if kind == "wrap" else "try:\n    pass\nexcept ImportError:\n    found = None"
        (outer,) = parse_statements(code, statement)
        start = block.index(statement)
        outer.body = block[start : start + dice.randint(1, 3)]
        block[start : start + len(outer.body)] = [outer]
    elif kind == "unwrap" and isinstance(statement, ast.If):
        replace(block, statement, statement.body)
    elif kind == "swap":
        at = block.index(statement)
        block[at : at + 2] = reversed(block[at : at + 2])

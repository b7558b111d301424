"""vLLM's own test helpers hand a clean PYTHONPATH to the processes they start.

Stock: importing TileLang puts the folder of its TVM first in PYTHONPATH, and `tests/utils.py` gives the environment of
a long-lived pytest process to each server, to the download before it, and to each test that gets a process of its own.
Seen: children find TileLang's `tvm` in the place of their own, and a mere probe for `tvm` loads TileLang's HIP stub
into them. Origin: vLLM #44823 (0.24.0) cleans it for servers and downloads. Still short of it in 0.33.0: tests in a new
process (spawned, forked, over Ray), and any entry that only contains the folder's name is dropped too.
Delete this file when the oldest supported release cleans all of these, and nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

from vllm_rocm_fixes.patch import Patch, Verdict, absent, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Block,
    Function,
    calls,
    class_,
    find,
    first_statement,
    function,
    holding,
    imports,
    parse_expression,
    parse_statements,
    replace,
)

_HELPERS = "vllm_rocm_fixes.patches.tests_utils"
_SERVERS = ("RemoteVLLMServer", "RemoteOpenAIServer")
_TAIL = ("tilelang", "3rdparty", "tvm", "python")
_CLEAN = ("clean_environment", "_temporarily_sanitized_pythonpath_env")  # ours, and upstream's from 0.24.0 on


def examine(tree: ast.Module) -> Verdict:
    """Every place that starts a process or downloads a model, and whether it is cleaned."""
    if not any(class_(tree, name) for name in _SERVERS) or not imports(tree, "vllm"):
        return absent("this tests.utils isn't vLLM's")
    places = _places(tree)
    lost = [kind for kind in _EDITS if not any(place.kind == kind for place in places)]
    if lost:
        return unknown(f"looked for {', '.join(lost)}, and found none")
    open_ = dict.fromkeys(place.kind for place in places if not place.clean)
    if _drops_too_much(tree):
        if _skip(tree) is None:
            return unknown("_sanitize_pythonpath_value drops entries in a way that isn't known")
        open_["an entry that only looks like TileLang's folder"] = None
    if open_:
        return needed(f"PYTHONPATH isn't kept right for: {', '.join(open_)}")
    return clear("every process that is started gets a PYTHONPATH without TileLang's folder")


def mend(tree: ast.Module) -> None:
    """Wrap each open place; which entries upstream leaves out is said by ours."""
    for place in _places(tree):
        if not place.clean:
            block, statement = holding(place.owner, place.statement)
            replace(block, statement, _EDITS[place.kind](statement))
    skip = _skip(tree)
    if skip is not None:
        value, condition, entry = skip
        condition.test = parse_expression(f"{entry} and (not without_tvm({entry}))", condition.test)
        start = first_statement(value.body)
        value.body[start:start] = parse_statements(f"from {_HELPERS} import without_tvm", value.body[start])


class _Place(NamedTuple):
    kind: str
    owner: Function
    statement: ast.stmt
    clean: bool


def _places(tree: ast.Module) -> list[_Place]:
    """What starts a process or downloads a model, in the servers and in the helpers that run a test elsewhere."""
    found: list[_Place] = []
    methods = [f for c in tree.body if isinstance(c, ast.ClassDef) for f in c.body if isinstance(f, Function)]
    for owner in [*methods, *(f for f in tree.body if isinstance(f, Function))]:

        def add(kind: str, marks: Sequence[ast.AST], clean: bool | None = None, owner: Function = owner) -> None:
            for mark in marks:
                statement = holding(owner, mark)[1]
                found.append(_Place(kind, owner, statement, _is_within(owner, statement) if clean is None else clean))

        for command in (*calls(owner, "subprocess.Popen"), *calls(owner, "subprocess.run")):
            for keyword in (k for k in command.keywords if k.arg == "env"):
                clean = bool(calls(keyword.value, "cleaned") or calls(owner, "_sanitize_pythonpath_env"))
                add("commands", [command], clean)
        add("server processes", calls(owner, "self.proc.start"))
        if owner.name == "__init__":
            download = calls(owner, "self._pre_download_model") or calls(owner, "model_loader.download_model")
            # Up to 0.17.1 it stands in __init__ itself, below `if not is_local`.
            add("downloads", [s for s in _outermost(owner) if any(n in download for n in ast.walk(s))])
        elif owner.name == "fork_new_process_for_each_test":
            tests = [
                s for s in find(owner, ast.Expr) if ast.unparse(s.value) == f"{owner.args.args[0].arg}(*args, **kwargs)"
            ]
            add("forked tests", tests, bool(calls(owner, "clean_here")))
        elif owner.name == "multi_process_parallel":
            handed = [s for s in find(owner, ast.Assign) if any(n.value == "PYTHONPATH" for n in find(s, ast.Constant))]
            add("tests over Ray", [*handed, *calls(owner, "ray.init")])
    return found


def _outermost(owner: Function) -> list[ast.stmt]:
    """The statements of a function, those below a `with` of ours or of upstream's in its place."""
    return [s for o in owner.body for s in (o.body if isinstance(o, ast.With) else [o])]


def _is_within(owner: Function, statement: ast.stmt) -> bool:
    around = [w for w in find(owner, ast.With) if any(n is statement for n in ast.walk(w))]
    return any(calls(w.items[0].context_expr, name) for w in around for name in _CLEAN)


def _drops_too_much(tree: ast.Module) -> Function | None:
    """Upstream's cleaner where it looks for the folder's name anywhere in an entry."""
    value = function(tree, "_sanitize_pythonpath_value")
    return value if value and find(value, ast.Compare, lambda c: isinstance(c.ops[0], ast.In)) else None


def _skip(tree: ast.Module) -> tuple[Function, ast.If, str] | None:
    """That cleaner, its one condition for leaving an entry out, and the entry's name."""
    value = _drops_too_much(tree)
    loops = find(value, ast.For) if value else []
    if value is None or len(loops) != 1 or not isinstance(loops[0].target, ast.Name):
        return None
    compared = find(value, ast.Compare, lambda c: isinstance(c.ops[0], ast.In))
    skips = [s for s in loops[0].body if isinstance(s, ast.If) and s.test in compared]
    known = len(compared) == len(skips) == 1 and isinstance(skips[0].body[-1], ast.Continue) and not skips[0].orelse
    return (value, skips[0], loops[0].target.id) if known else None


# The edits: what comes in the place of one statement


def _with_copy(statement: ast.stmt) -> Block:
    for call in (*calls(statement, "subprocess.Popen"), *calls(statement, "subprocess.run")):
        for keyword in (k for k in call.keywords if k.arg == "env"):
            keyword.value = parse_expression(f"cleaned({ast.unparse(keyword.value)})", keyword.value)
    return [*parse_statements(f"from {_HELPERS} import cleaned", statement), statement]


def _within(statement: ast.stmt) -> Block:
    code = f"from {_HELPERS} import clean_environment\nwith clean_environment():\n    pass"
    begin, block = parse_statements(code, statement)
    assert isinstance(block, ast.With)
    block.body = [statement]
    return [begin, block]


def _after_cleaning(statement: ast.stmt) -> Block:
    return [*parse_statements(f"from {_HELPERS} import clean_here\nclean_here()", statement), statement]


_EDITS: dict[str, Callable[[ast.stmt], Block]] = {
    "commands": _with_copy,
    "downloads": _within,
    "server processes": _within,
    "forked tests": _after_cleaning,
    "tests over Ray": _within,
}


# What the mended code calls


def without_tvm(value: str | None) -> str:
    """A PYTHONPATH without TileLang's TVM folder: `<anything>/tilelang/3rdparty/tvm/python`, whole components.

    Every other entry stays as it is, in its order (facts: tilelang/env.py of 0.1.9 to 0.1.15 prepends that folder).
    """
    entries = (value or "").split(os.pathsep)
    return os.pathsep.join(e for e in entries if tuple(os.path.normpath(e).split(os.sep)[-4:]) != _TAIL)


def cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment, its PYTHONPATH without TileLang's TVM folder; no PYTHONPATH where that was all."""
    copy = dict(environment)
    _clean(copy)
    return copy


def clean_here() -> None:
    """The same for this process, which is a child that ends with its test."""
    _clean(os.environ)


@contextlib.contextmanager
def clean_environment() -> Iterator[None]:
    """The same while a block runs; afterwards PYTHONPATH is what it was, also after an exception."""
    before = os.environ.get("PYTHONPATH")
    clean_here()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def _clean(environment: MutableMapping[str, str]) -> None:
    before = environment.get("PYTHONPATH")
    after = without_tvm(before)
    if before and not after:
        del environment["PYTHONPATH"]
    elif before and after != before:
        environment["PYTHONPATH"] = after


def behaves() -> str | None:
    """What is wrong with the PYTHONPATH of a server that vLLM's tests start; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child. No server is started.
    """
    import subprocess
    from unittest.mock import patch

    tvm = os.path.join(os.sep, "nowhere", *_TAIL)
    similar = f"{tvm}-of-mine"
    helpers: Any = sys.modules[PATCH.module]
    server: Any = object.__new__(helpers.RemoteOpenAIServer)
    with patch.object(subprocess, "Popen") as start:
        server._start_server("model", [], {"PYTHONPATH": os.pathsep.join((tvm, similar))})
    given = start.call_args.kwargs["env"].get("PYTHONPATH", "").split(os.pathsep)
    if tvm in given:
        return "a server that a test starts gets TileLang's folder in PYTHONPATH"
    return None if similar in given else "a server that a test starts misses an entry of PYTHONPATH"


PATCH = Patch(
    name="tests_utils",
    module="tests.utils",
    summary="vLLM's test helpers start their processes without TileLang's folder in PYTHONPATH",
    origin=("vLLM #44823",),
    since="0.14.0",
    until=None,
    examine=examine,
    mend=mend,
)

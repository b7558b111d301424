"""layer_imports: the package of a layer, a back end or a communicator is imported when one is made, not with its file.

Stock imports AITER, flash_attn or NIXL at module scope of files that are imported by who doesn't use them:
- Qwen's gated delta net (0.21.0 on): AITER, where it is switched on. The file comes with Qwen3-Next's and Qwen3.5's
  models, so into the process that only looks at the model's class and into the API server, and with the metadata of
  every gated delta net, Kimi's and OLMo's too.
- Qwen-Omni's thinkers: flash_attn. Qwen3-ASR imports them for a helper.
- ROCM_AITER_FA's back end (0.14.x, 0.29.0 to 0.31.0) and MLA's common part (0.14.x): AITER, flash_attn. Each process
  that drafts tokens (EAGLE, MTP, a draft model) imports them to know a class, switched on or installed or not.
- The communicator of expert load balancing (0.20.x): NIXL, on ROCm RIXL. Each worker imports it.
Seen: seconds, and AITER's kernel builds; "Model architectures [...] failed to be inspected" where AITER raises what
isn't an ImportError; speculative decoding that can't start without AITER, or in 0.14.x without flash_attn.
Here the imports move into a function that the constructor asks. Where stock has an answer for a missing package, one
that can't be imported gets it; where stock has none, who makes the layer gets the error. What runs in a compiled graph
doesn't ask: the constructor has. Who makes a layer without it, as a test does by `__new__`, takes the name from the
module first, or finds it unbound.
Origin: found in the sources. vLLM #22795 and #32902 had mended ROCM_AITER_FA's before, #41392 and #41805 mended NIXL's
(0.21.0). Delete an entry of this file when the first release without its defect is the oldest supported one.
"""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Collection, Iterator
from functools import partial
from typing import NamedTuple

from vllm_rocm_fixes.late import BINDER, asking, binding, catch_whatever, movable, reads
from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Block,
    Definition,
    Function,
    class_,
    definitions,
    everything,
    find,
    first_statement,
    hidden_imports,
    holding,
    imports,
    insert_before,
    outside_functions,
    own_nodes,
    parse_statements,
    replace,
    running,
    running_blocks,
    statements,
)

_RAN = f"{BINDER}_ran"  # what a constructor asks for: a test may have put its own in the place of any other name


class Place(NamedTuple):
    """What is imported early in one file: for which class, what, and the names that are bound once it was tried.

    absent is stock's statement for a package that isn't there, where that stands in another file. by_name says that
    another import of the package is no defect.
    """

    owner: str
    package: str
    asked: tuple[str, ...]
    absent: str = ""
    by_name: bool = False


class Taken(NamedTuple):
    """A statement that moves: its block, the condition around it, and the `try` in whose handler it stands."""

    block: Block
    statement: ast.stmt
    test: ast.expr | None
    handled: ast.Try | None


def examine(at: Place, tree: ast.Module) -> Verdict:
    """Whether the package is imported at module scope, and in a shape that is known."""
    if class_(tree, at.owner) is None:
        return unknown(f"looked for the class {at.owner}, and it isn't there once")
    if not any(_is_early(at, statement) for statement in running(tree.body)):
        if hidden_imports(tree, at.package):
            return unknown(f"{at.package} is imported while the module runs, in a way that isn't known")
        elsewhere: list[ast.stmt | ast.expr] = [
            *brought(tree, at.asked),
            *(_questions(tree) if at.package == "aiter" else []),
        ]
        if elsewhere:
            return unknown(f"line {elsewhere[0].lineno} may import {at.package}, in another file")
        return clear(f"{at.package} isn't imported at module scope")
    try:
        _asking(at, tree)
    except ValueError as doubt:
        return unknown(f"{at.package} is imported at module scope, and {doubt}")
    return needed(f"{at.package} is imported at module scope")


def brought(tree: ast.Module, names: Collection[str]) -> list[ast.stmt]:
    """Where module scope takes one of the names from another module of vLLM's, or from what a call returns.

    Not counted are vLLM's own kernels, which import no package.
    """

    def takes(statement: ast.stmt) -> bool:
        if isinstance(statement, ast.ImportFrom):
            own = statement.level > 0 or (statement.module or "").partition(".")[0] == "vllm"
            own = own and statement.module not in ("vllm.vllm_flash_attn", "vllm._xpu_ops")
            return own and any((alias.asname or alias.name) in names for alias in statement.names)
        targets = getattr(statement, "targets", [*filter(None, [getattr(statement, "target", None)])])
        value = getattr(statement, "value", None)
        return any(ast.unparse(t) in names for t in targets) and value is not None and bool(find(value, ast.Call))

    return [statement for statement in running(tree.body) if takes(statement)]


def _questions(tree: ast.Module) -> list[ast.Call]:
    """What module scope asks of vLLM's own AITER module that imports AITER for its answer."""
    every = (n for s in outside_functions(tree.body) for n in own_nodes(s) if isinstance(n, ast.Call))
    named = ((call, ast.unparse(call.func)) for call in every)
    return [call for call, name in named if name.startswith("rocm_aiter_ops.") and name.endswith("_available")]


def mend(at: Place, tree: ast.Module) -> None:
    """Move the imports into a function, and let the constructor ask it."""
    readers, constructors = _asking(at, tree)
    taken = list(_taken(at, tree.body))
    first = next(s for s in tree.body if any(part is taken[0].statement for part in ast.walk(s)))
    bound = movable([t.statement for t in taken])
    binder, new = binding([*bound, _RAN], first)
    insert_before(tree.body, first, new)
    late: Block = []
    for block, statement, test, _ in taken:
        replace(block, statement, [] if len(block) > 1 else parse_statements("pass", statement))
        last = late[-1] if late else None
        if test is None:
            late.append(statement)
        elif isinstance(last, ast.If) and ast.unparse(last.test) == ast.unparse(test):
            last.body.append(statement)
        else:
            late.append(ast.copy_location(ast.If(copy.deepcopy(test), [statement], []), statement))
    binder.body += [*_with_answer(at, late), *parse_statements(f"{_RAN} = True", late[-1])]
    for constructor in constructors:
        start = constructor.body[first_statement(constructor.body)]
        insert_before(constructor.body, start, asking([_RAN], start))
    for statement, read in readers:
        insert_before(holding(tree, statement)[0], statement, asking(read, statement))


def _with_answer(at: Place, late: Block) -> Block:
    """The statements in a `try` that gives stock's answer for a missing package, where stock has one."""
    if at.absent:
        attempt = parse_statements(f"try:\n    pass\nexcept Exception:\n    {at.absent}", late[0])[0]
        assert isinstance(attempt, ast.Try)
        attempt.body, late = late, [attempt]
    for attempt in (s for s in late if isinstance(s, ast.Try)):
        catch_whatever(attempt, at.package)
    return late


def _is_early(at: Place, statement: ast.stmt) -> bool:
    """An import of the package, or an assignment that asks a function whether it can be imported."""
    if isinstance(statement, ast.Assign):
        return _sets(at, statement) and bool(find(statement.value, ast.Call))
    if not isinstance(statement, ast.Import | ast.ImportFrom) or not imports(statement, at.package):
        return False
    return not at.by_name or any({alias.name, alias.asname} & {*at.asked} for alias in statement.names)


def _sets(at: Place, statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in at.asked


def _moves(at: Place, statement: ast.stmt) -> bool:
    """A statement that moves as a whole: an early one, a `try` for nothing else, an `if` of a name that moves."""
    if isinstance(statement, ast.Try):
        whole = len(statement.handlers) == 1 and not statement.orelse and not statement.finalbody
        return whole and all(_is_early(at, s) for s in statement.body)
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) in at.asked and all(_is_early(at, s) for s in statement.body)
    return _is_early(at, statement)


def _taken(at: Place, block: Block, test: ast.expr | None = None, handled: ast.Try | None = None) -> Iterator[Taken]:
    """What moves, in the order of the source. Raises ValueError where it stands under what can't move with it."""
    for statement in list(block):
        if _moves(at, statement):
            yield Taken(block, statement, test, handled)
        elif not isinstance(statement, Definition):
            for inner in running_blocks(statement):
                if isinstance(statement, ast.If) and inner is statement.body and test is None:
                    yield from _taken(at, inner, statement.test, handled)
                elif isinstance(statement, ast.Try) and inner is not statement.body and handled is None:
                    yield from _taken(at, inner, test, statement)
                elif any(_is_early(at, s) for _, s in statements(inner)):
                    raise ValueError(f"line {statement.lineno} is around it")


def _asking(at: Place, tree: ast.Module) -> tuple[list[tuple[ast.stmt, tuple[str, ...]]], list[Function]]:
    """The statements that must ask for the names they read, and the constructors that must ask for the methods.

    A method is called on what a constructor made. Raises ValueError where somebody else reads a name that moves, or
    binds it.
    """
    taken = list(_taken(at, tree.body))
    bound = set(movable([t.statement for t in taken]))
    if any(definitions(tree, name) for name in ("__getattr__", BINDER)):
        raise ValueError("the module has a __getattr__ of its own")
    inside = {id(n) for t in taken for n in ast.walk(t.statement)}
    for t in taken:
        if t.handled is not None and not set(movable([t.statement])) <= set(movable(t.handled.body)):
            raise ValueError(f"line {t.handled.lineno} handles something else")
        inside |= {id(n) for s in (t.handled.body if t.handled else ()) for n in ast.walk(s)}
    asking: list[tuple[ast.stmt, tuple[str, ...]]] = []
    constructors: dict[int, Function] = {}
    readable = {id(n): (f, c) for f, c in _functions(tree) for s in f.body for n in everything(s)}
    for node in everything(tree):
        if not isinstance(node, ast.Name | ast.arg | ast.alias) or _spelt(node) not in bound or id(node) in inside:
            continue
        if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load) or id(node) not in readable:
            raise ValueError(f"line {node.lineno} uses {_spelt(node)} otherwise")
        function, owner = readable[id(node)]
        if owner is None or function.name == "__init__":
            statement = holding(tree, node)[1]
            if not any(s is statement for s, _ in asking):
                certain, perhaps = reads(statement, bound)
                if perhaps:
                    raise ValueError(f"line {node.lineno} reads {node.id} now and then")
                asking.append((statement, tuple(sorted(certain))))
            continue
        made = [s for s in owner.body if isinstance(s, Function) and s.name == "__init__"]
        if len(made) != 1 or {"staticmethod", "classmethod"} & {ast.unparse(d) for d in function.decorator_list}:
            raise ValueError(f"{owner.name}.{function.name} reads {node.id} without a constructor before it")
        constructors[id(made[0])] = made[0]
    missing = sorted(set(at.asked) - bound)
    if constructors and missing:  # nobody would know of a broken package
        raise ValueError(f"{missing[0]} isn't what it is called there")
    return _firsts(tree, asking), list(constructors.values())


def _spelt(node: ast.Name | ast.arg | ast.alias) -> str:
    if isinstance(node, ast.alias):
        return node.asname or node.name.partition(".")[0]
    return node.id if isinstance(node, ast.Name) else node.arg


def _firsts(tree: ast.Module, asking: list[tuple[ast.stmt, tuple[str, ...]]]) -> list[tuple[ast.stmt, tuple[str, ...]]]:
    """Without what stands behind, or inside of what stands behind, a statement that asks for the same names."""
    kept: list[tuple[ast.stmt, tuple[str, ...]]] = []
    for statement, read in sorted(asking, key=lambda one: one[0].lineno):
        before = (holding(tree, first)[0] for first, had in kept if set(read) <= set(had))
        if not any(part is statement for block in before for s in block for part in ast.walk(s)):
            kept.append((statement, read))
    return kept


def _functions(tree: ast.Module) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Every function of module scope, and every method of a class of module scope with its class."""
    for _, statement in statements(tree.body):
        if isinstance(statement, Function):
            yield statement, None
        elif isinstance(statement, ast.ClassDef):
            yield from ((s, statement) for s in statement.body if isinstance(s, Function))


def _patch(name: str, module: str, at: Place, summary: str, record: tuple[tuple[str, ...], str, str | None]) -> Patch:
    _PLACES[name] = at
    return Patch(name, module, summary, *record, partial(examine, at), partial(mend, at))


def behaves(patch: Patch) -> str | None:
    """What is wrong in this process, which made no such layer; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    known, at = vars(sys.modules[patch.module]), _PLACES[patch.name]
    bound = [name for name in at.asked if name in known]
    own = [name for name in bound if not str(getattr(known[name], "__module__", "")).startswith("vllm.vllm_flash_attn")]
    return f"importing it asked for {at.package}: {', '.join(own)}" if own else None


_PLACES: dict[str, Place] = {}
_LAYERS = "vllm.model_executor.layers.mamba"
_MODELS = "vllm.model_executor.models"
_BACKENDS = "vllm.v1.attention.backends"
_FLAG = "GDN_AITER_TRITON_AVAILABLE"
_AITER = "AITER's kernels for the gated delta net are imported when such a layer is made"
_FA = "AITER is imported when an attention layer of its back end is made"

GDN = _patch(
    "gdn",
    f"{_LAYERS}.gdn.qwen_gdn_linear_attn",
    Place("QwenGatedDeltaNetAttention", "aiter", (_FLAG,), f"{_FLAG} = False"),
    _AITER,
    (("kyuz0/amd-strix-halo-vllm-toolboxes #73",), "0.22.0", None),
)
GDN_OLD = _patch(
    "gdn_old",
    f"{_LAYERS}.gdn_linear_attn",
    Place("GatedDeltaNetAttention", "aiter", (_FLAG,), f"{_FLAG} = False"),
    f"{_AITER} (0.21.0)",
    (("kyuz0/amd-strix-halo-vllm-toolboxes #73",), "0.21.0", "0.22.0"),
)
QWEN_OMNI = _patch(
    "qwen_omni",
    f"{_MODELS}.qwen2_5_omni_thinker",
    Place("Qwen2_5OmniThinkerForConditionalGeneration", "flash_attn", ("flash_attn",)),
    "flash-attention is imported when a Qwen2.5-Omni model is made",
    (("Dao-AILab/flash-attention #2580",), "0.14.0", None),
)
QWEN3_OMNI = _patch(
    "qwen3_omni",
    f"{_MODELS}.qwen3_omni_moe_thinker",
    Place("Qwen3OmniMoeThinkerForConditionalGeneration", "flash_attn", ("flash_attn",)),
    "flash-attention is imported when a Qwen3-Omni model is made",
    (("Dao-AILab/flash-attention #2580",), "0.14.0", "0.16.0"),
)
AITER_FA = _patch(
    "aiter_fa",
    f"{_BACKENDS}.rocm_aiter_fa",
    Place("AiterFlashAttentionImpl", "aiter.ops", ("_pa_decode_gluon", "get_recommended_splits")),
    _FA,
    (("vLLM #22795",), "0.29.0", "0.32.0"),
)
AITER_FA_OLD = _patch(
    "aiter_fa_old",
    f"{_BACKENDS}.rocm_aiter_fa",
    Place("AiterFlashAttentionImpl", "aiter", ("aiter",), by_name=True),
    f"{_FA} (0.14.x)",
    (("vLLM #32902", "vLLM #22795"), "0.14.0", "0.16.0"),
)
MLA_COMMON = _patch(
    "mla_common",
    f"{_BACKENDS}.mla.common",
    Place("MLACommonImpl", "flash_attn", ("flash_attn_varlen_func",)),
    "flash-attention is imported by the first MLA layer that computes with it (0.14.x)",
    (("Dao-AILab/flash-attention #2580",), "0.14.0", "0.16.0"),
)
EPLB_NIXL = _patch(
    "eplb_nixl",
    "vllm.distributed.eplb.eplb_communicator",
    Place("NixlEplbCommunicator", "vllm.distributed.nixl_utils", ("NixlWrapper", "nixl_agent_config"), by_name=True),
    "NIXL is imported by the load balancing that uses it",
    (("vLLM #41392", "vLLM #41805"), "0.20.0", "0.21.0"),
)
PATCHES = (GDN, GDN_OLD, QWEN_OMNI, QWEN3_OMNI, AITER_FA, AITER_FA_OLD, MLA_COMMON, EPLB_NIXL)

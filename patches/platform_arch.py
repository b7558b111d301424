"""platform_arch: which GPU architecture this is, without initialising HIP.

Stock: the platform's answers to "is this gfx9", "does it have fp8" and the like, and the device capability, come from
torch.cuda (0.14.x all of them, 0.16.0 the capability and the methods of RocmPlatform). The first is asked while the
platform module itself is imported, the others while the engine's configuration is made.
Seen: a HIP context in every process that imports vLLM, so `fork` is lost, and CUDA_VISIBLE_DEVICES set later, as Ray
does, is ignored.
Here amdsmi is asked, as upstream does from 0.17.0 on, and torch only where amdsmi can't tell or the node's GPUs differ.
Origin: vLLM #33941, #35069 (0.17.0). Delete this file when 0.17.0 is the oldest supported release.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Function,
    calls,
    everything,
    find,
    first_statement,
    function,
    holding,
    parse_expression,
    parse_statements,
    statements,
    string,
)

_PROPERTIES = "torch.cuda.get_device_properties"
_CAPABILITY = "torch.cuda.get_device_capability"
_METHOD = "RocmPlatform.get_device_capability"


def examine(tree: ast.Module) -> Verdict:
    """Which functions ask torch for the architecture, and whether they only look for parts of its name."""
    method = function(tree, _METHOD)
    if method is None:
        return unknown(f"looked for {_METHOD}, and it isn't there once")
    asking = _asking(tree)
    if _unaccounted(tree, asking):
        return unknown("the architecture's name is asked for in a way that isn't known")
    if any(id(call) not in _known_calls(method) for call in _capability_calls(tree)):
        return unknown("the device capability is asked for in a way that isn't known")
    strange = [f.name for f, node in asking if not _only_searched(f, node)]
    if strange:
        return unknown(f"{', '.join(strange)} asks torch for the architecture and does more than search its name")
    if asking or _asks_torch_first(method):
        return needed(f"torch is asked for the architecture, which initialises HIP, at {len(asking)} places")
    return clear("torch isn't asked for the architecture before amdsmi")


def mend(tree: ast.Module) -> None:
    """Ask amdsmi first, at each of these places."""
    for asker, node in _asking(tree):
        _, statement = holding(tree, node)
        code = f"architecture() or {ast.unparse(node)}"
        _swap(statement, node, parse_expression(code, node))
        _begin(asker, "from vllm_rocm_fixes.patches.platform_arch import architecture")
    method = function(tree, _METHOD)
    assert method is not None
    if _asks_torch_first(method):
        call = calls(method, _CAPABILITY)[0]
        _, statement = holding(method, call)
        _swap(statement, call, parse_expression(f"capability() or {ast.unparse(call)}", call))
        _begin(method, "from vllm_rocm_fixes.patches.platform_arch import capability")


def _asking(tree: ast.Module) -> list[tuple[Function, ast.Attribute]]:
    """Each `torch.cuda.get_device_properties(...).gcnArchName` that isn't the fallback of something else."""
    found = []
    for _, statement in statements(tree.body, closed=()):
        if not isinstance(statement, Function) or statement.name.startswith("_get_gcn_arch"):
            continue
        for node in find(statement, ast.Attribute, lambda a: a.attr == "gcnArchName"):
            call = node.value
            if isinstance(call, ast.Call) and ast.unparse(call.func) == _PROPERTIES:
                found.append((statement, node))
    after = _after_amdsmi(tree) if found else set()
    return [(asker, node) for asker, node in found if id(node) not in after]


def _unaccounted(tree: ast.Module, asking: list[tuple[Function, ast.Attribute]]) -> bool:
    known = {id(node) for _, node in asking}
    named = {id(n) for n in everything(tree) if "gcnArchName" in (getattr(n, "attr", None), string(n))}
    return bool(named - known) and not named - known <= _after_amdsmi(tree)


def _after_amdsmi(tree: ast.Module) -> set[int]:
    """What runs only where amdsmi didn't tell: after our question, or after the `try` of _get_gcn_arch."""
    either = find(tree, ast.BoolOp, lambda b: isinstance(b.op, ast.Or) and bool(calls(b.values[0], "architecture")))
    after: list[ast.AST] = [value for b in either for value in b.values[1:]]
    for asker in find(tree, ast.FunctionDef, lambda f: f.name.startswith("_get_gcn_arch")):
        for index, attempt in enumerate(asker.body):
            if isinstance(attempt, ast.Try) and any(map(_asks_amdsmi, attempt.body)):
                after += [*attempt.handlers, *asker.body[index + 1 :]]
                break
    return {id(node) for part in after for node in everything(part)}


def _asks_amdsmi(statement: ast.stmt) -> bool:
    return bool(find(statement, ast.Call, lambda c: "amdsmi" in ast.unparse(c.func)))


def _only_searched(asker: Function, node: ast.Attribute) -> bool:
    """The name is only the right side of `in`, or bound to a variable that is."""
    searched = [c.comparators[0] for c in find(asker, ast.Compare) if isinstance(c.ops[0], ast.In)]
    if any(s is node for s in searched):
        return True
    bound = [a for a in find(asker, ast.Assign) if a.value is node and isinstance(a.targets[0], ast.Name)]
    if len(bound) != 1:
        return False
    variable = ast.unparse(bound[0].targets[0])
    reads = find(asker, ast.Name, lambda n: n.id == variable and isinstance(n.ctx, ast.Load))
    return all(any(s is read for s in searched) for read in reads)


def _asks_torch_first(method: Function) -> bool:
    """Its first statement asks torch; from 0.17.0 on it first looks at the architecture."""
    first = method.body[first_statement(method.body)]
    return isinstance(first, ast.Assign) and isinstance(first.value, ast.Call) and bool(calls(first, _CAPABILITY))


def _capability_calls(tree: ast.AST) -> list[ast.Call]:
    return find(tree, ast.Call, lambda c: f".{_CAPABILITY}".endswith(f".{ast.unparse(c.func)}"))


def _known_calls(method: Function) -> set[int]:
    """Where the method asks torch for the capability: in its first statement, or after the architecture or amdsmi."""
    first = method.body[first_statement(method.body)]
    if calls(first, "_capability_from_gcn_arch"):
        return {id(call) for call in _capability_calls(method)}
    after = [value for b in find(method, ast.BoolOp) if calls(b.values[0], "capability") for value in b.values[1:]]
    return {id(node) for node in (*after, *(calls(first, _CAPABILITY) if _asks_torch_first(method) else []))}


def _swap(statement: ast.stmt, old: ast.expr, new: ast.expr) -> None:
    for parent in ast.walk(statement):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list):
                value[:] = [new if part is old else part for part in value]


def _begin(asker: Function, code: str) -> None:
    start = first_statement(asker.body)
    asker.body[start:start] = parse_statements(code, asker.body[start])


# What the mended code calls


@functools.cache
def architecture() -> str | None:
    """The architecture of this node's GPUs, such as "gfx942"; None where amdsmi can't tell, or they differ."""
    try:
        amdsmi = importlib.import_module("amdsmi")
        amdsmi.amdsmi_init()
        try:
            every = {
                str(amdsmi.amdsmi_get_gpu_asic_info(gpu).get("target_graphics_version"))
                for gpu in amdsmi.amdsmi_get_processor_handles()
            }
        finally:
            amdsmi.amdsmi_shut_down()
    except Exception:  # stock asks torch
        return None
    only = every.pop() if len(every) == 1 else ""
    return only if re.fullmatch(r"gfx\d+[0-9a-f]{2}", only) else None


def capability() -> tuple[int, int] | None:
    """The device capability as HIP gives it, such as (9, 4) for gfx942; None where amdsmi can't tell."""
    name = architecture()
    return (int(name[3:-2]), int(name[-2], 16)) if name else None


def behaves() -> str | None:
    """What is wrong with the platform's answers; None: nothing. `vllm-rocm-fixes verify` asks, in a child."""
    from vllm_rocm_fixes.checks import CannotAsk, without_gpu

    if architecture() is None:
        raise CannotAsk("amdsmi tells no architecture that all GPUs have, and torch is asked as in stock")
    rocm = importlib.import_module(PATCH.module).RocmPlatform
    for question in ("supports_mx", "supports_fp8", "is_fp8_fnuz", "get_device_capability"):
        with without_gpu() as asked, contextlib.suppress(Exception):
            getattr(rocm, question)()
        if asked:
            return f"{question}() asks {asked[0]}"
    return None


PATCH = Patch(
    name="platform_arch",
    module="vllm.platforms.rocm",
    summary="the GPU's architecture without a HIP context",
    origin=("vLLM #33941", "vLLM #35069"),
    since="0.14.0",
    until="0.17.0",
    examine=examine,
    mend=mend,
)

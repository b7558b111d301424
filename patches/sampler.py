"""TopKTopPSampler: AITER is imported by the first request that can use it, and its failure costs no request.

What stock does. With VLLM_ROCM_USE_AITER=1 on ROCm, 0.14.0 to 0.23.0 import aiter.ops.sampling while a sampler is
made: seconds, or a JIT build of minutes, in every worker. Up to 0.22.1 that buys nothing, because forward_hip holds
AITER's sampler off by a constant; 0.23.0 uses it, and no release has the switch that #26084 and #43331 promised.
0.24.0 to 0.33.0 import with the first request, but let errors through: up to 0.32.0 anything but ImportError, and any
error of the kernel call; in 0.33.0 SystemExit at both, KeyError and others at the call, and on gfx1250 everything.
What a user sees. AITER raises SystemExit when its JIT build fails, RuntimeError or KeyError for a GPU it doesn't know,
OSError where its folders can't be written: the worker ends, and the engine with it.
The edit. __init__ keeps all it does but the import. forward_hip keeps all its decisions (per-request generators,
no top-k and top-p, fp64 noise, processed logprobs, gfx1250); where it would use AITER it returns answer(...) below,
and once a sampler has answered so, stock's own call inside a `try`: a request costs what it costs on stock.
Up to 0.22.1 that place is still never reached. Nothing touches the logits before a kernel has answered (aiter_sample
works on their softmax), so the native sampler gets what AITER got.
SystemExit from a signal handler, which is how vLLM's workers are told to stop, isn't a failure of AITER: it ends the
process as before, and so does KeyboardInterrupt.

ROCM_FIXES_AITER_SAMPLER=0 keeps AITER's sampler alone off (segmentation faults, #57162, can't be caught).

Origin: vLLM #44823, merged for 0.24.0; #57162 and the call-time handler of 0.33.0 for the rest.
Since 0.14.0, until no release yet. Delete this file when the oldest supported release catches SystemExit at both.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import sys
from importlib import import_module
from typing import Any

from vllm_rocm_fixes.failures import is_interruption
from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.settings import flag, read
from vllm_rocm_fixes.syntax import (
    Block,
    Function,
    calls,
    find,
    first_statement,
    function,
    imports,
    imports_by_name,
    names,
    parse_statements,
    replace,
    statements,
)

_LOG = logging.getLogger("vllm.rocm_fixes.sampler")
_SERVED = "_rocm_fixes_served"  # this sampler has answered with AITER: the switch and the import are behind it
_FAILED = "_aiter_ops_import_failed"  # stock's own mark, from 0.24.0 on
_KERNEL = "its kernel failed"
_first = [True]  # AITER's sampler hasn't been called in this process
_CLASS = "TopKTopPSampler"
_OTHER_KERNEL = "_aiter_temp_gumbel_sample"  # of gfx1250
_IMPORT = "import aiter.ops.sampling"
_LOAD = "self.aiter_ops = torch.ops.aiter"
_NATIVE = "return self.forward_native(logits, generators, k, p)"
_LOADED = ast.unparse(ast.parse("self.aiter_ops is None and not self._init_aiter_ops()"))
_GIVEN_UP = {"self._aiter_ops_import_failed = True", "self.forward = self.forward_native"}
# What forward_hip returns where it uses AITER, and what answer() needs to know of it beside the request.
_USES = {
    "(self.aiter_sample(logits, k, p, generators), None)": "",
    f"({_OTHER_KERNEL}(logits, generators), None)": f", kernel={_OTHER_KERNEL}",
}
# What a request costs counts in microseconds: answer() is left out where it would do nothing.
_CALL = f"""
if getattr(self, {_SERVED!r}, False) and not generators:
    try:
        return {{use}}
    except (Exception, SystemExit) as _error:
        from {__name__} import give_up
        return give_up(self, _error, (logits, generators, k, p))
from {__name__} import answer
return answer(self, logits, generators, k, p{{extra}})
"""
_IMPORTERS = {"__init__", "_init_aiter_ops", _OTHER_KERNEL}


def answer(sampler: Any, logits: Any, generators: dict[int, Any], k: Any, p: Any, *, kernel: Any = None) -> Any:
    """What forward_hip returns for a request that AITER can serve: (token ids, None), from AITER or the native sampler.

    kernel stands in for sampler.aiter_sample where stock calls another (gfx1250). After a failure, or where AITER's
    sampler is switched off, this sampler stays native. KeyboardInterrupt and a signal's SystemExit are raised.
    """
    if not flag("ROCM_FIXES_AITER_SAMPLER", True):
        if _stay_native(sampler):
            _LOG.info("AITER's sampler is switched off (ROCM_FIXES_AITER_SAMPLER): PyTorch's native sampler answers")
    elif not getattr(sampler, _FAILED, False):
        states = {i: generator.get_state() for i, generator in generators.items()}
        doing = "its import failed"
        try:
            if kernel is None and getattr(sampler, "aiter_ops", None) is None:
                import_module("aiter.ops.sampling")
                sampler.aiter_ops = import_module("torch").ops.aiter
            doing = _KERNEL
            with _watched():
                tokens = kernel(logits, generators) if kernel else sampler.aiter_sample(logits, k, p, generators)
            setattr(sampler, _SERVED, kernel is None)  # the other kernel doesn't load what aiter_sample needs
            return tokens, None
        except (Exception, SystemExit) as error:
            for i, state in states.items():
                generators[i].set_state(state)  # a seed gives what it gives without AITER
            return give_up(sampler, error, (logits, generators, k, p), doing)
    return sampler.forward_native(logits, generators, k, p)


def give_up(sampler: Any, error: BaseException, request: tuple[Any, ...], doing: str = _KERNEL) -> Any:
    """Let the native sampler answer in AITER's place, from now on; request holds what it takes.

    Raises the error where it is an interruption.
    """
    if is_interruption(error):
        raise error
    _stay_native(sampler)
    reason = f"{type(error).__name__}: {error}"
    _LOG.warning("AITER's sampler is given up, %s (%s): PyTorch's native sampler answers", doing, reason)
    _LOG.debug("Where AITER's sampler failed:", exc_info=error)
    return sampler.forward_native(*request)


def _watched() -> Any:
    """The guard that names the lock file which a first call's build waits for, where it isn't skipped."""
    wanted = _first and not read(["aiter_locks"]).skip
    _first.clear()
    if not wanted or "vllm_rocm_fixes.guards" not in sys.modules:
        return contextlib.nullcontext()
    from vllm_rocm_fixes.guards import aiter_locks

    return aiter_locks.around()


def _stay_native(sampler: Any) -> bool:
    """Take AITER out of a sampler for good. False: it was out before."""
    fresh = not getattr(sampler, _FAILED, False)
    setattr(sampler, _FAILED, True)
    setattr(sampler, _SERVED, False)
    sampler.forward = sampler.forward_native
    return fresh


def examine(tree: ast.Module) -> Verdict:
    """Whether making a sampler imports AITER, and whether a request survives what AITER raises."""
    init, hip = function(tree, f"{_CLASS}.__init__"), function(tree, f"{_CLASS}.forward_hip")
    if init is None or hip is None:
        return unknown(f"looked for {_CLASS}.__init__ and {_CLASS}.forward_hip, one each")
    importers = [f for f in find(tree, ast.FunctionDef) if imports(f, "aiter")]
    if {f.name for f in importers} - _IMPORTERS or len(imports(tree, "aiter")) != len(importers):
        return unknown("AITER is imported in places that aren't known")
    by_name = find(tree, ast.Call, lambda c: imports_by_name(c, "aiter"))
    if by_name or any(calls(init, f"self.{name}") for name in _IMPORTERS - {"__init__"}):
        return unknown("AITER is imported in a way that isn't known")
    eager, uses = _eager(init), _uses(hip)
    if not _loaded_late(init, eager):
        return unknown(f"{_CLASS}.__init__ sets aiter_ops in a way that isn't known")
    if init in importers and eager is None:
        return unknown(f"{_CLASS}.__init__ imports AITER in a way that isn't known")
    known = [*(s for _, s, _ in uses), *(s for s in find(hip, ast.Try) if _catches_all(s))]
    found = {name: sum(len(calls(s, name)) for s in known) for name in ("self.aiter_sample", _OTHER_KERNEL)}
    for name, number in found.items():
        if len(calls(tree, name)) != number:
            return unknown(f"{name} is called in a way that isn't known")
    if not any(found.values()):
        return unknown(f"looked in {_CLASS}.forward_hip for what calls AITER")
    if _handled(hip):
        return unknown("what AITER's kernel raises is handled in a way that isn't known")
    if eager:
        return needed("making a sampler imports AITER, and its failures end the worker")
    load = function(tree, f"{_CLASS}._init_aiter_ops")
    if calls(hip, "self._init_aiter_ops") and (load is None or not _loads(load)):
        return unknown(f"{_CLASS}._init_aiter_ops doesn't load AITER in a way that is known")
    stays = calls(hip, "self._init_aiter_ops") and not (uses and _replaced(hip, uses))
    if load and stays and not any(_catches_all(s) for s in find(load, ast.Try)):
        return unknown("forward_hip catches what AITER's kernel raises, but not what its import raises")
    if uses:
        return needed("AITER is imported late, but its failures end the worker")
    return clear("AITER is imported by a request that can use it, and its failures are caught")


def mend(tree: ast.Module) -> None:
    """Take the import out of __init__, and let answer() use AITER where forward_hip did."""
    init, hip = function(tree, f"{_CLASS}.__init__"), function(tree, f"{_CLASS}.forward_hip")
    assert init is not None and hip is not None, "examine() found both"
    eager = _eager(init)
    if eager:
        block, attempt = eager
        kept = [s for s in attempt.body if not isinstance(s, ast.Import) and ast.unparse(s) != _LOAD]
        replace(block, attempt, [*parse_statements("self.aiter_ops = None", attempt), *kept])
    uses = _uses(hip)
    replaced = _replaced(hip, uses)
    for block, statement, use in uses:
        replace(block, statement, parse_statements(_CALL.format(use=use, extra=_USES[use]), statement))
    for block, statement in statements(hip.body):
        if replaced and isinstance(statement, ast.If) and ast.unparse(statement.test) == _LOADED:
            replace(block, statement, [])


def _eager(init: Function) -> tuple[Block, ast.Try] | None:
    """The try statement that imports AITER while a sampler is made, and the block that holds it; None: not there."""
    for block, statement in statements(init.body):
        if isinstance(statement, ast.Try) and not statement.orelse and not statement.finalbody:
            body = [ast.unparse(s) for s in statement.body]
            if body[0] == _IMPORT and {_LOAD, "self.forward = self.forward_hip"} <= set(body):
                return (block, statement) if len(imports(init, "aiter")) == 1 else None
    return None


def _loaded_late(init: Function, eager: tuple[Block, ast.Try] | None) -> bool:
    """__init__ leaves aiter_ops empty, or sets it in that `try`: then answer() imports what aiter_sample needs."""
    made = find(init, ast.Attribute, lambda a: a.attr == "aiter_ops" and isinstance(a.ctx, ast.Store))
    plain = find(init, ast.Assign, lambda a: ast.unparse(a) == "self.aiter_ops = None")
    return len(made) == len(plain) + sum(ast.unparse(s) == _LOAD for s in (eager[1].body if eager else []))


def _loads(load: Function) -> bool:
    """_init_aiter_ops does what answer() does in its place, and nothing else."""
    body = load.body[first_statement(load.body) :]
    attempts = [s for s in body if isinstance(s, ast.Try) and [ast.unparse(t) for t in s.body] == [_IMPORT]]
    rest = [ast.unparse(s) for s in body if s not in attempts]
    known = ["if self._aiter_ops_import_failed:\n    return False", _LOAD, "return True"]
    return len(attempts) == 1 and rest == known and _gives_up(attempts[0], "return False")


def _uses(hip: Function) -> list[tuple[Block, ast.stmt, str]]:
    """Where forward_hip returns what AITER sampled, unless all that can be raised there is caught already."""
    found: list[tuple[Block, ast.stmt, str]] = []
    done: list[ast.stmt] = []
    for block, statement in statements(hip.body):
        if isinstance(statement, ast.Try) and _catches_all(statement):
            done += [s for _, s in statements(statement.body)]
        inner = statement
        if isinstance(statement, ast.Try) and len(statement.body) == 1 and _gives_up(statement, _NATIVE):
            inner = statement.body[0]
        use = ast.unparse(inner.value) if isinstance(inner, ast.Return) and inner.value else ""
        if use in _USES and inner not in done:
            found.append((block, statement, use))
            done.append(inner)
    return found


def _replaced(hip: Function, uses: list[tuple[Block, ast.stmt, str]]) -> bool:
    """No call of aiter_sample stays that needs stock's own import before it."""
    return len(calls(hip, "self.aiter_sample")) == sum("self.aiter_sample(" in use for _, _, use in uses)


def _handled(hip: Function) -> bool:
    """A `try` around a use of AITER has a handler of its own kind, which would see nothing of what answer() catches."""
    return any(
        isinstance(statement, ast.Try)
        and statement.handlers
        and any(calls(s, name) for s in statement.body for name in ("self.aiter_sample", _OTHER_KERNEL))
        and not (_gives_up(statement, _NATIVE) or _catches_all(statement))
        for _, statement in statements(hip.body)
    )


def _gives_up(attempt: ast.Try, last: str) -> bool:
    """A try statement has one handler, which does what _stay_native() does, says so and ends like that."""
    if len(attempt.handlers) != 1 or attempt.orelse or attempt.finalbody:
        return False
    *body, end = [ast.unparse(s) for s in attempt.handlers[0].body]
    return end == last and all(s in _GIVEN_UP or s.startswith("logger.warning_once(") for s in body)


def _catches_all(attempt: ast.Try) -> bool:
    """A try statement catches SystemExit and every Exception, and raises none of them again."""
    caught: set[str] = set()
    for handler in attempt.handlers:
        if find(handler, ast.Raise):
            return False
        caught |= names(handler.type) if handler.type else {"BaseException"}
    return "BaseException" in caught or {"Exception", "SystemExit"} <= caught


def behaves() -> str | None:
    """What is wrong with this process's sampler, whose AITER fails here as a JIT build does; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    def broken(*_: Any) -> Any:
        raise SystemExit("a build that failed")

    before = "aiter" in sys.modules
    sampler: Any = TopKTopPSampler()
    if not before and "aiter" in sys.modules:
        return "making a sampler imported AITER"
    native = object()  # PyTorch's own sampler may need a GPU too
    sampler.aiter_ops, sampler.aiter_sample, sampler.forward_native = object(), broken, lambda *_: native
    k, p = torch.tensor([3, 3], dtype=torch.int32), torch.tensor([0.9, 0.9])
    answered = sampler.forward_hip(torch.rand(2, 8), {}, k, p)
    return None if answered is native else "a request whose AITER fails isn't answered by the native sampler"


PATCH = Patch(
    name="sampler",
    module="vllm.v1.sample.ops.topk_topp_sampler",
    summary="AITER's sampler is imported by the first request that can use it; when it fails, the native one answers",
    origin=("vLLM #44823", "vLLM #43331", "vLLM #57162"),
    since="0.14.0",
    until=None,
    examine=examine,
    mend=mend,
)

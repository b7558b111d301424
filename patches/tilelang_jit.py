"""tilelang_jit: the kernel that is decorated late on ROCm has the attributes of a TileLang kernel.

Stock: from 0.28.0 to 0.30.0 `tilelang_jit` returns a plain function on ROCm, which decorates its kernel when it is
first called. The warm-up of 0.30.0 compiles without calling: it asks that function for `compile` and `_kernel_cache`.
Seen: "'function' object has no attribute 'compile'", and the engine doesn't start (DeepSeek-V4 and GLM on gfx950).
In 0.28.0 and 0.29.0 nothing of vLLM asks for an attribute.
Origin: vLLM #57192 (0.31.0), #57248. Delete this file when 0.31.0 is the oldest supported release.
"""

from __future__ import annotations

import ast
import copy
import functools
import sys
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import Function, find, function, names, parse_statements, replace


def examine(tree: ast.Module) -> Verdict:
    """What tilelang_jit returns where it decorates late."""
    decorator = function(tree, "tilelang_jit")
    if decorator is None:
        return unknown("looked for the function tilelang_jit, and it isn't there once")
    last = decorator.body[-1]
    if not isinstance(last, ast.Return):
        return unknown("tilelang_jit doesn't end by returning the kernel")
    if isinstance(last.value, ast.Call):
        inner = {s.name for s in decorator.body if isinstance(s, Function)}
        if inner & names(last.value) and ast.unparse(last.value.func) != LateKernel.__name__:
            return unknown("tilelang_jit hands its inner function to something that this patch doesn't know")
        return clear("what tilelang_jit returns is made by a call, not a plain function")
    if _parts(decorator) is None or {"kernel", LateKernel.__name__} & names(decorator):
        return unknown("tilelang_jit returns something that this patch doesn't know")
    return needed("tilelang_jit returns a plain function, which has no compile()")


def mend(tree: ast.Module) -> None:
    """Return an object that is called as the function is, and has the kernel's attributes."""
    decorator = function(tree, "tilelang_jit")
    parts = _parts(decorator) if decorator else None
    assert decorator is not None and parts is not None
    wrapper, shared, made = parts
    last = decorator.body[-1]
    code = f"def kernel():\n    return {shared.names[0]}\n"
    code += "from vllm_rocm_fixes.patches.tilelang_jit import LateKernel\n"
    code += f"return LateKernel({wrapper.name}, kernel)"
    new = parse_statements(code, last)
    kernel = new[0]
    assert isinstance(kernel, ast.FunctionDef)
    kernel.body[:0] = [copy.deepcopy(shared), copy.deepcopy(made)]
    replace(decorator.body, last, new)


def _parts(decorator: Function) -> tuple[ast.FunctionDef, ast.Nonlocal, ast.If] | None:
    """The inner function that is returned, its nonlocal variable for the kernel, and the `if` that makes the kernel."""
    last = decorator.body[-1]
    name = last.value.id if isinstance(last, ast.Return) and isinstance(last.value, ast.Name) else None
    for inner in decorator.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == name and len(inner.body) == 3:
            shared, made, answer = inner.body
            if not (isinstance(shared, ast.Nonlocal) and len(shared.names) == 1 and isinstance(made, ast.If)):
                return None
            kernel = shared.names[0]
            makes = [a for a in find(made, ast.Assign) if ast.unparse(a.targets[0]) == kernel]
            asks = ast.unparse(made.test) == f"{kernel} is None"
            if (
                makes
                and asks
                and isinstance(answer, ast.Return)
                and ast.unparse(answer).startswith(f"return {kernel}(")
            ):
                return inner, shared, made
    return None


class LateKernel:
    """A TileLang kernel that is decorated when it is first called, or when an attribute of it is first asked for."""

    def __init__(self, call: Callable[..., Any], kernel: Callable[[], Any]) -> None:
        self._call, self._late_kernel = call, kernel
        functools.update_wrapper(self, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the kernel returns."""
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("_call", "_late_kernel") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._late_kernel(), name)


def behaves() -> str | None:
    """What is wrong with a kernel that is decorated late, with a TileLang made for this; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    from unittest.mock import patch

    from vllm.platforms import current_platform

    from vllm_rocm_fixes.checks import CannotAsk

    if not current_platform.is_rocm():
        raise CannotAsk("this isn't ROCm, and kernels are decorated early")
    utils: Any = sys.modules[PATCH.module]
    compiled = SimpleNamespace(compile=lambda: None)
    tilelang = SimpleNamespace(jit=lambda **_: lambda function: compiled)
    with patch.multiple(utils, tilelang=tilelang, T=tilelang, _get_pass_configs=dict):
        kernel = utils.tilelang_jit(FunctionType((lambda: None).__code__, {}))
        try:
            return None if kernel.compile is compiled.compile else "a late kernel's compile() isn't TileLang's"
        except AttributeError as error:
            return f"a late kernel has no compile(): {error}"


PATCH = Patch(
    name="tilelang_jit",
    module="vllm.tilelang_utils",
    summary="a TileLang kernel decorated late has compile() and the other attributes",
    origin=("vLLM #57192", "vLLM #57248"),
    since="0.28.0",
    until="0.31.0",
    examine=examine,
    mend=mend,
)

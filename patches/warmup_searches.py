"""warmup_searches: a worker imports a model's file only where that model is loaded.

Stock: two warm-ups run in every worker of every model, and import a model's file in order to look for its class in the
model at hand: Qwen3-VL's vision tower (0.30.0 on) and Step5's attention (0.33.0). Both files lead to transformers'
image processing, which needs torchvision.
Seen: an engine without torchvision dies in its warm-up, whatever model it serves; seconds in each worker otherwise.
An object of a class can't be there before the module of its class is: where that isn't loaded the class is (), which
isinstance takes for no class at all. What else the function does goes on as in stock.
Origin: found in the sources; upstream has not changed it (0.33.0). It is vLLM #49920 in other files.
Delete this file when the helpers don't import the models' files.
"""

from __future__ import annotations

import ast
import sys
from functools import partial
from types import SimpleNamespace

from vllm_rocm_fixes.patch import Patch, Verdict, clear, needed, unknown
from vllm_rocm_fixes.syntax import (
    Function,
    calls,
    find,
    function,
    imports,
    imports_by_name,
    parse_statements,
    replace,
)

_MODELS = ("vllm.model_executor.models.", "vllm.models.")
_PLAIN = "vllm.model_executor.models.interfaces"  # holds no model


def examine(entry: str, tree: ast.Module) -> Verdict:
    """Which functions import a model's file in order to look for its class; entry is the warm-up itself."""
    if function(tree, entry) is None:
        return unknown(f"looked for the function {entry}, and it isn't there once")
    found = _searches(tree)
    if found:
        return needed(f"{', '.join(f.name for f, _ in found)} imports a model's file for every model")
    every_function = [s for s in tree.body if isinstance(s, Function)]
    known = {id(i) for search in every_function for i in find(search, ast.ImportFrom) if _asks(search, i)}
    every = [*find(tree, ast.Import), *find(tree, ast.ImportFrom), *find(tree, ast.Call)]
    if any(_brings(node) for node in every if id(node) not in known):
        return unknown("a model's file is imported in a way that isn't known")
    return clear("no model's file is imported to look for its class")


def mend(tree: ast.Module) -> None:
    """Take the class from the module that is loaded, instead of importing it."""
    for search, imported in _searches(tree):
        new = parse_statements("import sys", imported)
        for alias in imported.names:
            code = f"{alias.asname or alias.name} = getattr(sys.modules.get({imported.module!r}), {alias.name!r}, ())"
            bound = parse_statements(code, imported)[0]
            assert isinstance(bound, ast.Assign)
            ast.copy_location(bound.targets[0], alias)  # the name is stock's own
            new.append(bound)
        replace(search.body, imported, new)


def _brings(node: ast.AST) -> bool:
    """Whether it imports a model's file, or one that isn't said."""
    packages = [package.rstrip(".") for package in _MODELS]
    if isinstance(node, ast.Call):
        return imports_by_name(node, *packages)
    files = {file.rpartition(".")[2] for file in _FILES.values()}
    if files & {*ast.unparse(node).replace(".", " ").split()}:
        return True
    return any(imports(node, package) for package in packages) and getattr(node, "module", None) != _PLAIN


def _asks(search: Function, imported: ast.ImportFrom) -> bool:
    """Whether a function returns before the import where the module isn't loaded."""
    name = repr(imported.module)
    asking = (f"{name} not in sys.modules", f"sys.modules.get({name}) is None", f"not sys.modules.get({name})")
    gates = [s for s in search.body if isinstance(s, ast.If) and s.lineno < imported.lineno]
    return any(isinstance(gate.body[-1], ast.Return) and ast.unparse(gate.test) in asking for gate in gates)


def _searches(tree: ast.Module) -> list[tuple[Function, ast.ImportFrom]]:
    """Functions that import a model's class, use it as a class for isinstance alone, and don't ask before."""
    found = []
    for search in (s for s in tree.body if isinstance(s, Function)):
        asked = [n for c in calls(search, "isinstance") if len(c.args) == 2 for n in _classes(c.args[1])]
        for imported in (s for s in search.body if isinstance(s, ast.ImportFrom) and not _asks(search, s)):
            bound = {alias.asname or alias.name for alias in imported.names}
            used = [n for n in find(search, ast.Name) if n.id in bound]
            is_model = (imported.module or "").startswith(_MODELS) and imported.module != _PLAIN
            if is_model and used and all(n in asked for n in used):
                found.append((search, imported))
    return found


def _classes(second: ast.expr) -> list[ast.expr]:
    """What isinstance is asked for, alone or in tuples; `X | Y` isn't one, because () can't stand in it."""
    return [c for part in second.elts for c in _classes(part)] if isinstance(second, ast.Tuple) else [second]


_FILES = {  # what a warm-up must leave alone where another model is loaded
    "qwen_vl_warmup": "vllm.model_executor.models.qwen3_vl",
    "step5_warmup": "vllm.models.step5.nvidia.sparse_attention",
}


def behaves(patch: Patch) -> str | None:
    """What is wrong with this warm-up, run for a model without any layer; None: nothing.

    `vllm-rocm-fixes verify` asks, in a child.
    """
    import torch

    from vllm_rocm_fixes.checks import CannotAsk

    file, entry = _FILES[patch.name], patch.module.rpartition(".")[2]
    if file in sys.modules:
        raise CannotAsk(f"{file} was there already")
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    worker = SimpleNamespace(get_model=torch.nn.Identity, device=torch.device("cpu"), vllm_config=config)
    try:
        getattr(sys.modules[patch.module], entry)(worker)
    except ImportError as error:
        return f"for another model it fails: {error}"
    return f"for another model it imported {file}" if file in sys.modules else None


QWEN_VL = Patch(
    name="qwen_vl_warmup",
    module="vllm.model_executor.warmup.qwen_vl_triton_warmup",
    summary="Qwen3-VL's file is imported only where that model is loaded",
    origin=("vLLM #49920",),
    since="0.30.0",
    until=None,
    examine=partial(examine, "qwen_vl_triton_warmup"),
    mend=mend,
)
STEP5 = Patch(
    name="step5_warmup",
    module="vllm.model_executor.warmup.step5_dsa_warmup",
    summary="Step5's file is imported only where that model is loaded",
    origin=("vLLM #49920",),
    since="0.33.0",
    until=None,
    examine=partial(examine, "step5_dsa_warmup"),
    mend=mend,
)

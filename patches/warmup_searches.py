"""warmup_searches: a worker imports a model's file only where that model is loaded.

Stock: two warm-ups run in every worker of every model, and import a model's file in order to look for its class in the
model at hand: Qwen3-VL's vision tower (0.30.0 on) and Step5's attention (0.33.0). Both files lead to transformers'
image processing, which needs torchvision.
Seen: an engine without torchvision dies in its warm-up, whatever model it serves; seconds in each worker otherwise.
An object of a class can't be there before the module of its class is, so the search ends where that isn't loaded.
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
    everything,
    find,
    function,
    imports,
    imports_by_name,
    insert_before,
    parse_statements,
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
    asking = [s for s in tree.body if isinstance(s, Function) and _asks(s)]
    known = {id(node) for search in asking for node in everything(search)}
    every = [*find(tree, ast.Import), *find(tree, ast.ImportFrom), *find(tree, ast.Call)]
    if any(_brings(node) for node in every if id(node) not in known):
        return unknown("a model's file is imported in a way that isn't known")
    return clear("no model's file is imported to look for its class")


def mend(tree: ast.Module) -> None:
    """Return before the import where the file isn't loaded."""
    for search, imported in _searches(tree):
        code = f"import sys\nif {imported.module!r} not in sys.modules:\n    return"
        insert_before(search.body, imported, parse_statements(code, imported))


def _brings(node: ast.AST) -> bool:
    """Whether it imports a model's file, or one that isn't said."""
    packages = [package.rstrip(".") for package in _MODELS]
    if isinstance(node, ast.Call):
        return imports_by_name(node, *packages)
    files = {file.rpartition(".")[2] for file in _FILES.values()}
    if files & {*ast.unparse(node).replace(".", " ").split()}:
        return True
    return any(imports(node, package) for package in packages) and getattr(node, "module", None) != _PLAIN


def _asks(search: Function) -> bool:
    return bool(find(search, ast.Compare, lambda c: ast.unparse(c).endswith("not in sys.modules")))


def _searches(tree: ast.Module) -> list[tuple[Function, ast.ImportFrom]]:
    """Functions that import a model's class and use it for nothing but isinstance, and don't ask sys.modules before."""
    found = []
    for search in (s for s in tree.body if isinstance(s, Function)):
        asked = {id(n) for c in calls(search, "isinstance") for n in ast.walk(c)}
        if _asks(search):
            continue
        for imported in (s for s in search.body if isinstance(s, ast.ImportFrom)):
            bound = {alias.asname or alias.name for alias in imported.names}
            used = [n for n in find(search, ast.Name) if n.id in bound]
            if (imported.module or "").startswith(_MODELS) and used and all(id(n) in asked for n in used):
                found.append((search, imported))
    return found


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

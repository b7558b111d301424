"""Modules that are loaded already: the functions that differ get the mended code object.

Whoever holds such a function follows: from-imports, dictionaries, bound methods, registered torch ops. A function
that isn't stock's any more belongs to somebody else, and then the whole module is left as it is.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType

from .patch import Mended

_OPTIMIZED = 0x1  # CO_OPTIMIZED: set for functions, not for the bodies of classes and modules
_COMPARED = (
    *("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_flags", "co_name"),
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount"),
    *(("co_exceptiontable",) if sys.version_info >= (3, 11) else ()),
)
_Running = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_SIGNATURE = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_freevars")


class NotStock(Exception):
    """The module can't be mended where it is; the text says why. Nothing was changed."""


class Transplant:
    """What was done to a loaded module: names of functions changed and added, and of holders that keep the old code.

    unused names functions that differ and that nothing in this process runs: a definition in a branch not taken, say.
    """

    def __init__(self, scope_ran: bool) -> None:
        self.changed: list[str] = []
        self.added: list[str] = []
        self.unreached: list[str] = []
        self.unused: list[str] = []
        self.scope_ran = scope_ran  # module-scope statements differ too, and those had run before

    def __str__(self) -> str:
        late = "; its module scope had run before" if self.scope_ran else ""
        unused = f"; nothing runs stock's {', '.join(self.unused)}" if self.unused else ""
        return f"live, in {', '.join([*self.changed, *self.added]) or 'no function'}{late}{unused}"


def same(a: object, b: object) -> bool:
    """Two constants, or two code objects wherever they stand in the file, do the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, CodeType) and isinstance(b, CodeType):
        return a == b or (all(getattr(a, x) == getattr(b, x) for x in _COMPARED) and same(a.co_consts, b.co_consts))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (not isinstance(a, float | complex) or repr(a) == repr(b))


def transplant(module: ModuleType, stock: CodeType, mended: Mended) -> Transplant:
    """Give a loaded module's functions the mended code. Raises NotStock, before anything is changed.

    stock is the module's code before the edit; mended holds the code after it.
    """
    assert mended.code is not None
    done = Transplant(scope_ran=not same(_without_functions(stock), _without_functions(mended.code)))
    old, new = by_name(stock), by_name(mended.code)
    swaps: list[tuple[str, FunctionType, CodeType]] = []
    clears: list[Callable[[], object]] = []
    for name, codes in new.items():
        before = old.get(name, [])
        if not before:
            if name not in mended.added:
                raise NotStock(f"{name} is new and not at module scope")
            done.added.append(name)
            continue
        if len(codes) != len(before):
            raise NotStock(f"{name} is defined {len(before)} times in stock and {len(codes)} times after the edit")
        for was, becomes in zip(before, codes, strict=True):
            if same(was, becomes):
                continue
            if any(getattr(was, x) != getattr(becomes, x) for x in _SIGNATURE):
                raise NotStock(f"{name} has another signature after the edit")
            found = _find(module, name, was, name in mended.decorated, clears)
            if not found:
                if not _unused(module, name, was, before, stock):
                    raise NotStock(f"{name} isn't stock's any more: something else changed it first")
                done.unused.append(name)
            swaps += [(name, f, becomes) for f in found]
    if not swaps and not done.added and not done.unused:
        raise NotStock("what differs stands at module scope, and that had run before")
    for name in done.added:  # first: the changed functions may call them
        exec(mended.added[name], vars(module))
    for name, function, code in swaps:
        was, function.__code__ = function.__code__, code
        done.unreached += _left_behind(name, was, code)
        done.changed.append(name)
    for clear in clears:
        clear()
    return done


def by_name(code: CodeType, prefix: str = "") -> dict[str, list[CodeType]]:
    """The functions and methods of each qualified name: it may be defined more than once, such as for each platform.

    Left out are inner functions, which are part of theirs, lambdas, and what Python 3.14 makes of annotations.
    """
    found: dict[str, list[CodeType]] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and not inner.co_name.startswith(("<", "__annotate")):
            name = prefix + inner.co_name
            for key, codes in ({name: [inner]} if inner.co_flags & _OPTIMIZED else by_name(inner, f"{name}.")).items():
                found.setdefault(key, []).extend(codes)
    return found


def _without_functions(code: CodeType) -> CodeType:
    """A module's or class's code with its functions taken out: what runs when it is made."""
    kept = [
        (_without_functions(c) if not c.co_flags & _OPTIMIZED else None) if isinstance(c, CodeType) else c
        for c in code.co_consts
    ]
    return code.replace(co_consts=tuple(kept))


def _find(
    module: ModuleType, name: str, code: CodeType, decorated: bool, clears: list[Callable[[], object]]
) -> list[FunctionType]:
    """The functions that run the stock code under a name; none where somebody else's stand there.

    Only what the source decorates is unwrapped: any other wrapper came from somebody who was there first.
    """
    held = _static(module, name)
    if not decorated:
        return [held] if isinstance(held, FunctionType) and same(held.__code__, code) else []
    found = [f for f in _holders(held, clears) if same(f.__code__, code)]
    return found or list(_search(module, name, code))


def _static(module: ModuleType, name: str) -> object:
    """What stands under a qualified name, without running a descriptor; None where nothing does."""
    found: object = module
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _holders(held: object, clears: list[Callable[[], object]]) -> Iterator[FunctionType]:
    """The functions behind one attribute, out of decorators, properties and caches; a cache's clear goes to clears."""
    if held is None:
        return
    if callable(getattr(held, "cache_clear", None)):
        clears.append(held.cache_clear)  # type: ignore[attr-defined]
    if isinstance(held, FunctionType):
        yield held
    if isinstance(held, property):
        inner = [held.fget, held.fset, held.fdel]
    elif isinstance(held, functools.cached_property | functools.partial | functools.partialmethod):
        inner = [held.func]
    elif isinstance(held, staticmethod | classmethod | MethodType):
        inner = [held.__func__]
    else:
        inner = [getattr(held, "__dict__", {}).get("__wrapped__")]
    for part in inner:
        yield from _holders(part, clears)


def _search(module: ModuleType, name: str, code: CodeType) -> Iterator[FunctionType]:
    """Functions of that name and code, wherever a decorator keeps them: a walk over all objects, so last."""
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__globals__ is vars(module) and thing.__qualname__ == name:
            yield from [thing] if same(thing.__code__, code) else []


def _unused(module: ModuleType, name: str, code: CodeType, definitions: list[CodeType], stock: CodeType) -> bool:
    """Whether no function in this process runs a code, and what stands under its name can be stock's all the same.

    That is nothing, another of its definitions, or what else the module binds there: an import, say.
    """
    if any(_search(module, name, code)):
        return False
    held = _static(module, name)
    if held is None or any(same(f.__code__, c) for f in _holders(held, []) for c in definitions):
        return True
    import dis  # only where something else stands there

    first = name.partition(".")[0]
    bound = [i for i in dis.get_instructions(stock) if i.opname.startswith("STORE") and i.argval == first]
    return len(bound) > sum(isinstance(c, CodeType) and c.co_name == first for c in stock.co_consts)


def _left_behind(name: str, was: CodeType, becomes: CodeType) -> list[str]:
    """Who still runs the old code of a function: copies of the function follow, what can't is named."""
    unreached = []
    if sys.getrefcount(was) > _ALONE:
        for holder in gc.get_referrers(was):
            if type(holder) is FunctionType:
                holder.__code__ = becomes
            elif isinstance(holder, _Running) or (isinstance(holder, FrameType) and holder.f_code is was):
                unreached.append(f"{name}, which is running now")
            elif not isinstance(holder, FrameType | CellType | tuple):  # ours, or the constants of code that has run
                unreached.append(f"{name}, held by a {type(holder).__name__}")
    inner = [c for c in _inside(was) if not any(same(c, d) for d in _inside(becomes))]
    if inner and any(type(holder) is FunctionType for holder in gc.get_referrers(*inner)):
        unreached.append(f"functions that {name} has made already")
    return list(dict.fromkeys(unreached))


def _inside(code: CodeType) -> list[CodeType]:
    """What a function's code makes functions of, those of the classes that it makes too."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return inner + [c for body in inner if not body.co_flags & _OPTIMIZED for c in _inside(body)]


def _count_alone() -> int:
    """What getrefcount says in _left_behind of a code object that nobody else holds."""

    def left_behind(was: CodeType) -> int:
        return sys.getrefcount(was)

    function = eval("lambda: 0")
    was, function.__code__ = function.__code__, (lambda: 1).__code__
    return left_behind(was)


_ALONE = _count_alone()

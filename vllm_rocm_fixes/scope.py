"""The global scope of another process: in which order its dynamic loader looks for a symbol.

/proc/PID/maps tells what is mapped, and not who comes first: a library that was opened with RTLD_GLOBAL late comes
before one that was opened locally long ago. So this reads the loader's own list from the process's memory: the link
map that DT_DEBUG leads to, as a debugger does, and in it the search list of the main program, which glibc extends with
each RTLD_GLOBAL (struct r_scope_elem: a pointer to an array, and its length). The list's place in glibc's private
struct isn't known here; it is found by what it must hold.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

_PHDR, _PHENT, _PHNUM = 3, 4, 5  # of the auxiliary vector
_DYNAMIC, _OWN_TABLE = 2, 6  # PT_DYNAMIC, PT_PHDR
_DEBUG = 21  # DT_DEBUG
_PRIVATE = 2048  # bytes of struct link_map that are searched; 1,160 in glibc 2.36


def global_scope(pid: int) -> list[str]:
    """The files of a process's global scope, the first to be searched first; the program itself is left out.

    Raises OSError where the process's memory may not be read, LookupError where the loader isn't glibc's, or isn't
    understood.
    """
    if struct.calcsize("P") != 8:
        raise LookupError("only 64-bit processes are understood")
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        maps = dict(_link_maps(memory, _debug(memory, pid)))
        if not maps:
            raise LookupError(f"process {pid} has no list of libraries")
        main = next(iter(maps))
        block = os.pread(memory, _PRIVATE, main)
        found: list[int] = []
        for offset in range(40, len(block) - 12, 8):
            array, count = struct.unpack_from("<QI", block, offset)
            if array and len(found) < count <= len(maps):
                try:
                    entries = list(struct.unpack(f"<{count}Q", os.pread(memory, 8 * count, array)))
                except (OSError, OverflowError, struct.error):
                    continue
                if entries[0] == main and all(entry in maps for entry in entries) and len(set(entries)) == count:
                    found = entries
        if not found:
            raise LookupError(f"the loader of process {pid} isn't glibc's, or has changed")
        return [maps[entry] for entry in found[1:]]
    finally:
        os.close(memory)


def _debug(memory: int, pid: int) -> int:
    """The address of r_debug, where the loader shows a debugger its list."""
    with open(f"/proc/{pid}/auxv", "rb") as file:
        words = file.read()
    vector = dict(struct.iter_unpack("<QQ", words[: len(words) // 16 * 16]))
    table, size, count = vector[_PHDR], vector[_PHENT], vector[_PHNUM]
    base, dynamic = 0, None
    for number in range(count):
        kind, _, _, address = struct.unpack_from("<IIQQ", os.pread(memory, size, table + number * size))
        if kind == _OWN_TABLE:
            base = table - address
        elif kind == _DYNAMIC:
            dynamic = address
    if dynamic is None:
        raise LookupError(f"process {pid} runs a static program")
    place = base + dynamic
    while True:
        tag, value = struct.unpack("<QQ", os.pread(memory, 16, place))
        if tag == _DEBUG and value:
            return int(value)
        if tag == 0:
            raise LookupError(f"process {pid} shows no list of libraries")
        place += 16


def _link_maps(memory: int, debug: int) -> Iterator[tuple[int, str]]:
    """Each library's link map, in the order of loading, and its file."""
    (entry,) = struct.unpack("<Q", os.pread(memory, 8, debug + 8))
    while entry:
        _, name, _, following = struct.unpack("<QQQQ", os.pread(memory, 32, entry))
        yield entry, os.fsdecode(os.pread(memory, 4096, name).partition(b"\0")[0]) if name else ""
        entry = following

"""end_to_end.py BUILD DOOR [METHOD...]: import the real TileLang beside the real torch; say as JSON what became of it.

DOOR is "stock" or "ours", METHOD a way to start a child (subprocess, or one of multiprocessing's). torch is made to
look like a ROCm build: version.hip is set, and a library linked as libc10_hip.so is has mapped build.py's runtime.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path


def main(build: Path, door: str, *methods: str) -> dict[str, object]:
    import torch

    torch.version.hip = "7.2.53211"
    ctypes.CDLL(str(build / "libc10_hip.so"))
    if door == "ours":
        import vllm_rocm_fixes

        vllm_rocm_fixes.prepare()
    before = dict(os.environ), list(sys.path)

    import tilelang

    answer: dict[str, object] = {
        "version": tilelang.__version__,
        "variables": sorted(k for k in before[0] | os.environ if before[0].get(k) != os.environ.get(k)),
        "path": sys.path != before[1],
    }
    extension = ctypes.CDLL(str(build / "extension.so"))
    extension.layout.restype = extension.owner.restype = ctypes.c_char_p
    answer["layout"] = extension.layout().decode()
    answer["owner"] = Path(extension.owner(b"hipMalloc").decode()).name
    sys.path.append(str(build))
    answer["python"] = importlib.import_module("hip_extension").layout()
    sys.path.remove(str(build))
    answer["sum"] = add(tilelang, torch)
    answer["children"] = {method: child(method) for method in methods}
    if door == "ours":
        answer["states"] = {guard.name: guard.state() for guard in vllm_rocm_fixes.current().guards}
    return answer


def add(tilelang, torch) -> bool:
    """Lower a kernel for the CPU, compile it with the machine's compiler, and run it."""
    import tilelang.language as T

    @T.prim_func
    def kernel(A: T.Tensor((256,), "float32"), B: T.Tensor((256,), "float32"), C: T.Tensor((256,), "float32")):
        for i in T.serial(256):
            C[i] = A[i] + B[i]

    compiled = tilelang.compile(kernel, target="c", execution_backend="cython", out_idx=[2])
    one, other = torch.arange(256, dtype=torch.float32), torch.ones(256)
    return torch.equal(compiled(one, other), one + other)


def child(method: str) -> object:
    import probe

    if method == "subprocess":
        ran = subprocess.run([sys.executable, probe.__file__], capture_output=True, text=True)
        return json.loads(ran.stdout) if ran.returncode == 0 else ran.stderr
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=probe.send, args=(theirs,))
    process.start()
    seen = ours.recv() if ours.poll(120) else "no answer"
    process.join()
    return seen


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))

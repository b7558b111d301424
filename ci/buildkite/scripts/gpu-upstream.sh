#!/usr/bin/env bash
# vLLM's own tests of what the overlay mends, in the image of that release, with the overlay.
source "$(dirname "$0")/common.sh"
need_gpu
on_gpu -w /vllm-workspace/tests "$(gpu_image)" \
  python3 -m pytest -q v1/sample/test_topk_topp_sampler.py utils_/test_import_utils.py

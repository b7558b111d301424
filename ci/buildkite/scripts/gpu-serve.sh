#!/usr/bin/env bash
# A small model, served by an unchanged `vllm serve` with AITER on; one answer; every process mended.
source "$(dirname "$0")/common.sh"
need_gpu
on_gpu -e VLLM_ROCM_USE_AITER=1 -v "$PWD/ci/buildkite/scripts:/scripts:ro" "$(gpu_image)" \
  bash /scripts/serve-and-ask.sh "${MODEL:-Qwen/Qwen3-0.6B}"

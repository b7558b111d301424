#!/usr/bin/env bash
# What the overlay claims, on the GPU of this agent.
source "$(dirname "$0")/common.sh"
need_gpu
on_gpu "$(gpu_image)" vllm-rocm-fixes verify --real --json

# shellcheck shell=bash
# Sourced by each step: stop at the first error, from the repository's top, and know whether there is an AMD GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
need_gpu() {
  if ! [ -e /dev/kfd ]; then
    echo "no AMD GPU here (no /dev/kfd): nothing to run"
    exit 0
  fi
}
# The image for steps on a GPU: the overlay on the ROCm image of a release.
gpu_image() { echo "${IMAGE:-vllm-openai-rocm-fixes:${RELEASE:-v0.23.0}}"; }
on_gpu() {
  docker run --rm --device=/dev/kfd --device=/dev/dri --group-add video --group-add render --ipc=host \
    --security-opt seccomp=unconfined --cap-add SYS_PTRACE --entrypoint "" "$@"
}

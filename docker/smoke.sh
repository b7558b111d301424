#!/bin/sh
# smoke.sh IMAGE: run an image with no network and no GPU, and see that the overlay is there and does what it says.
# RUN names the program that runs images (docker by default): RUN="podman" docker/smoke.sh IMAGE.
set -eu
image=${1:?smoke.sh takes the name of an image}
run=${RUN:-docker}
inside() { $run run --rm --network=none --entrypoint "" "$image" "$@"; }
inside vllm-rocm-fixes --version
inside vllm-rocm-fixes status --strict
inside vllm-rocm-fixes doctor
echo "smoke.sh: $image is fine without a network"

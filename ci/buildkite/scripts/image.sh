#!/usr/bin/env bash
# Both images on the base named by BASE_IMAGE, with buildah or docker; without one, on a base that the test makes.
source "$(dirname "$0")/common.sh"
make build
if [ -n "${BASE_IMAGE:-}" ] && command -v docker >/dev/null; then
  for target in plugin baked; do
    docker build -f docker/Dockerfile --target "$target" --build-arg "BASE_IMAGE=$BASE_IMAGE" -t "rocm-fixes:$target" .
  done
  docker/smoke.sh rocm-fixes:plugin
else
  make image
fi

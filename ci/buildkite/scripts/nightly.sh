#!/usr/bin/env bash
# Releases and nightlies that docs/support.md doesn't know, and an image on the newest ROCm nightly; an annotation tells.
source "$(dirname "$0")/common.sh"
annotate() { if command -v buildkite-agent >/dev/null; then buildkite-agent annotate --style "$1" --context drift; else cat; fi; }
status=0
report=$(make drift 2>&1) || status=$?
if [ "$status" -ne 0 ]; then
  # shellcheck disable=SC2016
  printf 'Something changed upstream (`make drift`):\n\n```\n%s\n```\n' "$report" | annotate warning
else
  echo "$report"
fi
if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
  BASE_IMAGE=${NIGHTLY_IMAGE:-vllm/vllm-openai-rocm:nightly} bash ci/buildkite/scripts/image.sh ||
    { echo 'The overlay does not build on the newest ROCm nightly: a verdict is unknown, or a claim fails.' | annotate error; status=1; }
else
  echo "no Docker engine here: the image on the newest nightly is not built"
fi
exit "$status"

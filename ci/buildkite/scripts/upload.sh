#!/usr/bin/env bash
# Render the steps and hand them to Buildkite; without an agent, show them.
source "$(dirname "$0")/common.sh"
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q pyyaml==6.0.4
"$venv/bin/python" ci/buildkite/render.py >"$venv/pipeline.json"
if command -v buildkite-agent >/dev/null; then buildkite-agent pipeline upload "$venv/pipeline.json"; else cat "$venv/pipeline.json"; fi

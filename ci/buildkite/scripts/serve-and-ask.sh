#!/usr/bin/env bash
# serve-and-ask.sh MODEL: inside an image, serve a model, ask once with top-k and top-p, and show the processes.
set -euo pipefail
vllm serve "$1" --port 8000 --max-model-len 2048 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server" 2>/dev/null || true' EXIT
for _ in $(seq 300); do
  kill -0 "$server" || { echo "serve-and-ask.sh: the server ended before it was ready"; exit 1; }
  curl -fsS -o /dev/null http://localhost:8000/health 2>/dev/null && break
  sleep 4
done
curl -fsS http://localhost:8000/v1/completions -H 'Content-Type: application/json' \
  -d "{\"model\": \"$1\", \"prompt\": \"The capital of France is\", \"max_tokens\": 8, \"top_k\": 20, \"top_p\": 0.9}"
echo
vllm-rocm-fixes ps

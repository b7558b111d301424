#!/usr/bin/env bash
# Tests that need no vLLM installed, on each Python that is there.
source "$(dirname "$0")/common.sh"
make unit

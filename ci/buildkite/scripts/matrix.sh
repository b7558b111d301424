#!/usr/bin/env bash
# Every release against every patch, and docs/support.md up to date.
source "$(dirname "$0")/common.sh"
make matrix
git diff --exit-code -- docs/support.md

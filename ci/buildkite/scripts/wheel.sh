#!/usr/bin/env bash
# The wheel and the sdist.
source "$(dirname "$0")/common.sh"
make build
ls -l dist

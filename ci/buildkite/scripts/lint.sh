#!/usr/bin/env bash
# Style and types.
source "$(dirname "$0")/common.sh"
make lint

#!/usr/bin/env bash
# What a start imports on the stand-in node, every release.
source "$(dirname "$0")/common.sh"
make contract

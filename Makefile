# Each command makes what it needs in .venv, once. It takes a Python from 3.11 to 3.14, gcc and a package registry.
PYTHON ?= $(or $(firstword $(foreach p,python3 python3.12 python3.13 python3.11 python3.14,$(shell \
	$(p) -c 'import sys, venv; print("$(p)" if (3, 11) <= sys.version_info < (3, 15) else "")' 2>/dev/null))),python3)
RUN := .venv/bin/python
PYTEST := $(RUN) -m pytest

.PHONY: help serve test lint unit matrix contract bench drift build clean

help:  ## list the commands
	@sed -n 's/^\([a-z]*\):.*## /  make \1  /p' $(MAKEFILE_LIST) | awk '{c=$$2; $$1=$$2=""; printf "  make %-9s %s\n", c, substr($$0, 3)}'

serve: .venv-serve  ## serve a chat model with stock vLLM and the overlay, ask it a question; ONCE=1 ends after the answer
	@$(RUN) tools/serve.py $(if $(ONCE),--once)

test: lint  ## style, types and every test
	$(PYTEST) $(ARGS)

lint: .venv-test  ## style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

.PHONY: .venv-serve .venv-test
.venv-serve:
	@$(PYTHON) tools/environment.py serve
.venv-test:
	@$(PYTHON) tools/environment.py test

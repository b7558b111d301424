# Each command makes what it needs in .venv, once. It takes a Python from 3.11 to 3.14, gcc and a package registry.
# Whatever stands in ARGS is handed on: make test ARGS="-k sampler -x"
PYTHON ?= $(or $(firstword $(foreach p,python3 python3.12 python3.13 python3.11 python3.14,$(shell \
	$(p) -c 'import sys, venv; print("$(p)" if (3, 11) <= sys.version_info < (3, 15) else "")' 2>/dev/null))),python3)
RUN := .venv/bin/python
JOBS ?= 2
script = $(if $(wildcard $(1)),$(RUN) $(1) $(ARGS),@echo "make $@: there is no $(1)" >&2; exit 1)

.PHONY: help serve test lint unit matrix contract bench drift build image clean .venv-serve .venv-test

help:  ## list the commands
	@awk -F ':.*  ## ' '/^[a-z]+:.*  ## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: .venv-serve  ## serve a chat model with stock vLLM and the overlay, ask it something; ONCE=1 ends after the answer
	@$(RUN) tools/serve.py $(if $(ONCE),--once) $(ARGS)

test: lint  ## style, types and every test; JOBS says how many test files run at a time
	$(RUN) -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: .venv-test  ## style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

unit: .venv-test  ## the tests that need no vLLM, on every Python from 3.10 to 3.14 that is here
	@echo "20 seconds for each Python, about a minute for the oldest and the newest; the first time also downloads"
	$(RUN) -m nox

matrix: .venv-test  ## every patch against every release of vLLM; writes docs/support.md
	$(call script,tests/matrix.py)

contract: .venv-test  ## start every release on the stand-in node: what is imported too early
	$(call script,tools/contract.py)

bench: .venv-test  ## what the overlay costs and saves
	$(call script,benchmarks/run.py)

drift: .venv-test  ## what has appeared on the registry that docs/support.md does not know
	$(call script,tools/drift.py)

build: .venv-test  ## the wheel and the sdist, in dist/
	@$(RUN) -m build --no-isolation >.venv/build.log 2>&1 || { cat .venv/build.log; exit 1; }
	@tail -n 1 .venv/build.log

image: build  ## both images of docker/, on a base made here: needs root, buildah and debootstrap
	$(call script,tests/image.py)

clean:  ## remove what the commands made here; downloads and the model stay in the cache
	rm -rf .venv build dist .nox .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv-serve:
	@$(PYTHON) tools/environment.py serve
.venv-test:
	@$(PYTHON) tools/environment.py test

# `make demo` and `make test` set everything up in .venv on a bare machine with Python 3.10 or later.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Pinned, so that two machines test the same; a CPU build is enough. Users take whichever torch serves their GPU.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1; sys_platform == "linux"
OTHERS ?=
# Without --no-compile byte code is written of all of torch, used or not, which takes two fifths of the time.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# Byte code of what is imported is written whatever the shell says: else every process would compile it again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test oldest newest lint docs matrix clean

demo: $(VENV)/ready
	$(BIN)/deadreckon demo

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not integration"

# The same with the oldest of what we need (triton 3.6 interprets with no newer numpy), in an environment of its own.
oldest:
	$(MAKE) .venv-oldest/ready VENV=.venv-oldest TORCH=torch==2.11.0 TRITON=triton==3.6.0 OTHERS='transformers==5.17.0 numpy<2.4'
	OMP_NUM_THREADS=1 .venv-oldest/bin/pytest -n 2 --dist worksteal -m "not integration"

# And with the newest that it is known to work with, which is what users get: with a torch for GPUs, some gigabytes.
newest:
	$(MAKE) .venv-newest/ready VENV=.venv-newest TORCH=torch==2.15.0 TRITON=triton==3.9.0 OTHERS='transformers==5.23.0'
	OMP_NUM_THREADS=1 .venv-newest/bin/pytest -n 2 --dist worksteal -m "not integration"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/mutate.py --list > /dev/null

docs: $(VENV)/docs
	$(BIN)/mkdocs build --strict

matrix:
	PYTHON=$(PYTHON) .ci/matrix

$(VENV)/docs: $(VENV)/ready
	$(INSTALL) -e '.[docs]'
	touch $@

$(VENV)/ready: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) $(TORCH) '$(TRITON)' $(foreach one,$(OTHERS),'$(one)') -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-newest build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# `make demo` and `make test` set everything up in .venv on a bare machine with Python 3.10 or later.
PYTHON ?= python3
BIN := .venv/bin
# Pinned, so that two machines test the same; a CPU build is enough. Users take whichever torch serves their GPU.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.7.1; sys_platform == "linux"

.PHONY: demo test lint docs matrix clean

demo: .venv/ready
	$(BIN)/deadreckon demo

# Byte code is written whatever the shell says: processes that tests start would compile the package again, each of them.
test: lint
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not integration"

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/docs
	$(BIN)/mkdocs build --strict

matrix:
	PYTHON=$(PYTHON) .ci/matrix

.venv/docs: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

.venv/ready: pyproject.toml Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) '$(TRITON)'
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

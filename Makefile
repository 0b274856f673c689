# Two commands on a fresh machine: make quickstart, make test. PYTHON=... chooses the interpreter, ARGS=... is passed on.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
WORKERS ?= 2

.PHONY: help quickstart test test-all check docs
.DELETE_ON_ERROR:

help:
	@echo "make quickstart  train and evaluate on real text, on a CPU"
	@echo "make test        the tests; ARGS='tests/test_layout.py -x' is passed to pytest, WORKERS=0 runs one process"
	@echo "make test-all    the tests with the slow ones"
	@echo "make check       format, lint, types"
	@echo "make docs        API reference in build/docs"

# The tunable lets glibc ask for huge pages: a tenth less time where buffers are gigabytes; ignored elsewhere.
quickstart: .venv/.installed-quickstart
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(BIN)/python -m blockrank.train +exp=quickstart $(ARGS)

test: .venv/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-all: .venv/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "slow or not slow" $(ARGS)

check: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

docs: .venv/.installed-dev
	$(BIN)/pdoc --docformat markdown --output-directory build/docs blockrank
	@echo "build/docs/index.html"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: set PYTHON=")'
	$(PYTHON) -m venv .venv

.venv/.installed-quickstart: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[quickstart]'
	@touch $@

.venv/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --editable '.[quickstart,dev]'
	@touch .venv/.installed-quickstart $@

# Two commands on a fresh machine: `make demo` and `make test`.
# Hooks and continuous integration call these same recipes.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help install demo test check format docs exact profile zoo clean

help:  ## list the recipes
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(STAMP)  ## create the environment and install the package with its development tools

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "forerun needs Python >= 3.11; name one with PYTHON=/path/to/python3.x"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

demo: $(STAMP)  ## compare plain and speculative decoding on the shipped pair
	$(BIN)/forerun demo $(ARGS)

test: check  ## static checks, then every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) $(ARGS)

check: $(STAMP)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## bring the module list of docs/architecture.md up to date
	$(BIN)/python recipes/docs/modules.py

exact: $(STAMP)  ## enumerate every verifier's output law
	$(BIN)/forerun exact $(ARGS)

profile: $(STAMP)  ## measure the shipped pair and redraw docs/performance.md (nothing else running)
	$(BIN)/forerun profile --budget-s 45 --out benchmarks/profiles/shipped-pair.json $(ARGS)
	$(BIN)/python recipes/docs/performance.py

zoo: $(STAMP)  ## retrain the shipped pair (hours; resumable): make zoo ARGS="--corpora DIR --out DIR"
	$(BIN)/python recipes/zoo/build.py $(ARGS)

clean:  ## remove the environment and every cache
	rm -rf $(VENV) dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two commands on a fresh machine: `make demo` and `make test`.
# Hooks and continuous integration call these same recipes. Rare ones are in benchmarks/Makefile.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
BASE   := $(VENV)/.base
STAMP  := $(VENV)/.installed
JOBS   ?= 2
PAIRS  := build/pairs/.made
CLIENTS := build/clients

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full repeat fuzz clients check format docs exact profile pairs soak zoo clean

help:  ## list the recipes
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

install: $(STAMP)  ## create the environment and install the package with its development tools

$(BASE): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "forerun needs Python >= 3.11; name one with PYTHON=/path/to/python3.x"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e .
	touch $@

$(STAMP): $(BASE)
	$(BIN)/python -m pip install -e '.[dev]'
	touch $@

demo: $(BASE)  ## a chat with and without a draft, and the speed of both
	$(BIN)/forerun demo $(ARGS)

test: check  ## static checks, then every kind of test on few cases
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-full: check  ## the same with every case and kernels under sanitisers (about an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "full or not full" $(ARGS)

repeat: $(STAMP)  ## every test file 20 times beside busy loops, and once with a slow clock (hours); ARGS="tests/system"
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.repeat $(ARGS)

fuzz: $(STAMP)  ## every reader against hostile inputs; SECONDS=600 for each
	FORERUN_FUZZ_SECONDS=$(or $(SECONDS),600) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/fuzz

clients: $(CLIENTS)/.installed  ## real client libraries against a served model; ARGS="litellm" for one
	$(BIN)/python -m tests.clients.run $(ARGS)

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/requirements-openai-2.txt tests/clients/requirements-structured.txt tests/clients/package.json | $(STAMP)
	$(PYTHON) -m venv $(CLIENTS)/python
	$(CLIENTS)/python/bin/pip install -r tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)/openai-2
	$(CLIENTS)/openai-2/bin/pip install -r tests/clients/requirements-openai-2.txt
	$(PYTHON) -m venv $(CLIENTS)/structured
	$(CLIENTS)/structured/bin/pip install -r tests/clients/requirements-structured.txt
	mkdir -p $(CLIENTS)/node
	cp tests/clients/package.json $(CLIENTS)/node
	npm install --prefix $(CLIENTS)/node
	touch $@

check: $(STAMP)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## bring the generated docs/models.md, docs/causes.md and docs/facts.md up to date
	$(BIN)/python recipes/docs/causes.py
	$(BIN)/python recipes/docs/models.py

exact: $(STAMP)  ## enumerate every verifier's output distribution
	$(BIN)/forerun exact $(ARGS)

profile: $(STAMP)  ## measure the shipped pair and rewrite benchmarks/profiles/README.md (nothing else running)
	$(BIN)/forerun profile --budget-s 45 --out benchmarks/profiles/code-40m.json $(ARGS)
	$(BIN)/python recipes/docs/performance.py

pairs: $(PAIRS)  ## make targets and pairs for timing, about 0.8 GB below build/pairs

$(PAIRS): benchmarks/pairs.py | $(STAMP)
	$(BIN)/python benchmarks/pairs.py --out build/pairs
	touch $@

soak: $(STAMP)  ## 10,000 random requests against plain decoding (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(ARGS)

zoo: $(STAMP)  ## retrain the shipped pair (hours; resumable): make zoo ARGS="--corpora DIR --out DIR"
	$(BIN)/python recipes/zoo/build.py $(ARGS)

clean:  ## remove the environment and every cache
	rm -rf $(VENV) dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

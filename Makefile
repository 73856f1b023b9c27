# Everything starts here: `make demo` trains, `make test` tests. Needs only Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow combinations check format clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.ready ## Train a network privately on real digits (two minutes, no network, no account)
	$(BIN)/dpbench train experiment=demo

test: $(VENV)/.ready-dev ## Run the tests (under ten minutes on two cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

combinations: $(VENV)/.ready-dev ## Train every combination of pieces and write docs/combinations.md (two minutes)
	$(BIN)/python -m dpbench.training.combinations > docs/combinations.md.new
	mv docs/combinations.md.new docs/combinations.md

test-slow: $(VENV)/.ready-dev ## Run the slow tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow

check: $(VENV)/.ready-dev ## Lint, format check and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dpbench needs Python 3.11 or later: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing dpbench into $(VENV) (PyTorch is large: a few minutes the first time)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) --editable ".[dev]"
	@touch $@

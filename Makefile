# Everything runs in .venv, which the first target that needs it builds. PYTHON chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-all lint clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[experiments,dev]'
	touch $(READY)

demo: $(READY)  ## MAML on sinusoids: trains, evaluates, plots, prints the memory table
	$(BIN)/python -m experiments.train experiment=demo

test: $(READY)  ## every test that is not marked slow
	$(BIN)/python -m pytest -m "not slow"

test-all: $(READY)  ## every test
	$(BIN)/python -m pytest

lint: $(READY)  ## formatting, lint and types, as CI runs them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache outputs multirun

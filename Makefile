# Everything runs in .venv, built by the first target that needs it. PYTHON sets the interpreter.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# One process per core, with one thread each: more threads would compete for the cores.
WORKERS ?= logical
OMP_NUM_THREADS ?= 1
# What was compiled of the tests and the library is kept, for each process and for the next time.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest --numprocesses $(WORKERS) \
	--maxprocesses 8 --dist worksteal --durations 10

.PHONY: demo test test-all mutants lint docs release-check clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[experiments,dev]'
	touch $(READY)

demo: $(READY)  ## MAML on sinusoids: trains, evaluates, plots, prints the memory table
	$(BIN)/python -m experiments.train experiment=demo

test: $(READY)  ## every test that is not marked slow: minutes on two cores
	$(PYTEST) -m "not slow"

test-all: $(READY)  ## every test
	$(PYTEST)

mutants: $(READY)  ## plants 60 bugs in a copy, one at a time, and prints which ones `make test` finds
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py record
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py run

lint: $(READY)  ## formatting, lint and types, as CI runs them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

docs: $(READY)  ## the site, in site/index.html: pages, a reference of docstrings; searched by `python -m http.server -d site`
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

release-check: docs  ## a dry run of a release: version, notes, wheel, sdist, site, placeholders
	.ci/release-check

clean:
	rm -rf .venv site build dist .pytest_cache .ruff_cache outputs multirun

# `make demo` shows the thing working; `make test` checks it, and `make slow` what takes seconds a test: budgets in
# processes of their own, workers started anew. `make docs` builds the pages under site. All set up .venv first; a second
# call is quick.
# `make soak` brings faults about at random, for ten seeds from SEED on; the name of a test that fails carries its seed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test slow soak lint bench docs clean

demo: $(VENV)/.ready
	$(BIN)/penstock demo

test: lint
	$(BIN)/pytest -m "not slow" --numprocesses auto --dist worksteal --quiet

slow: $(VENV)/.ready
	$(BIN)/pytest -m slow --numprocesses auto --dist worksteal --quiet

soak: $(VENV)/.ready
	$(BIN)/pytest -m soak --numprocesses auto --dist worksteal --timeout 1800 --quiet $(if $(SEED),--seed $(SEED))

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/.docs-ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) site

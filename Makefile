# `make demo` shows the thing working; `make test` runs the tests, and `make slow` those that take seconds each: budgets
# in processes of their own, workers started anew. `make lint` checks style and types, `make docs` builds the pages under
# site. All set up .venv first; a second call is quick.
# `make bench` measures, and renews benchmarks/results; `make figures` writes the tables and pictures of README and docs
# from there. `make dist` builds the wheel and the source archive, and tries both in empty environments.
# `make soak` brings faults about at random, for ten seeds from SEED on; the name of a test that fails carries its seed.
# It also runs all laws with examples that are new each time; elsewhere they are always the same.
# `make engines` installs Lightning, Accelerate, the Trainer, Dask and Ray, and runs the tests of training inside them.
# `make oldest` checks types and runs the tests with the oldest releases of all dependencies; `make pins` renews the
# versions that development installs use.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
EXTRA ?= dev
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
# Compiled test files and modules are kept: tests start hundreds of interpreters, which would compile them again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/pytest --numprocesses auto --dist worksteal --quiet

.PHONY: demo test slow processes soak lint types engines oldest pins bench figures docs dist clean

demo: $(VENV)/.ready
	$(BIN)/penstock demo

test: $(VENV)/.ready
	$(PYTEST) -m "not slow"

slow: $(VENV)/.ready
	$(PYTEST) -m slow

# The suites of all formats, loading, order, resuming and faults, with reader processes wherever a test does not say.
IN_PROCESSES := tests/conformance tests/states $(addprefix tests/loader/test_, loader.py multi.py skipping.py \
	iterators.py ranks.py hooks.py) $(addprefix tests/faults/test_, kill_and_resume.py bad_input.py nan.py leaving.py \
	interrupts.py never_written.py cut_and_empty.py)
processes: $(VENV)/.ready
	$(PYTEST) --processes 2 -m "not slow" -k "not billion and not hundred_times" $(IN_PROCESSES)

soak: $(VENV)/.ready
	$(PYTEST) -m soak --timeout 1800 $(if $(SEED),--seed $(SEED))
	$(PYTEST) -m hypothesis --hypothesis-profile explore

lint: types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

engines:
	$(MAKE) VENV=.venv-engines EXTRA=engines .venv-engines/.ready
	.venv-engines/bin/python -c "import accelerate, dask.array, distributed, lightning, ray.train, transformers, xarray"
	.venv-engines/bin/pytest --quiet tests/integrations
	.venv-engines/bin/pytest --quiet tests/docs/test_pages.py -k "lightning or accelerate or ray or dask"

oldest:
	$(MAKE) VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt types test

COMPILE := $(BIN)/uv pip compile pyproject.toml --quiet --no-annotate --no-header --python-version 3.11
pins: $(VENV)/.ready
	$(PIP_INSTALL) uv
	$(COMPILE) --upgrade --universal --all-extras --output-file constraints.txt
	$(COMPILE) --upgrade --resolution lowest-direct --all-extras --output-file constraints-oldest.txt

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks

figures: $(VENV)/.ready
	$(BIN)/python -m benchmarks.figures

docs: $(VENV)/.docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist:
	.ci/try-dist $(PYTHON) $(EXTRAS)

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --constraint $(CONSTRAINTS) --editable '.[$(EXTRA)]'
	touch $@

$(VENV)/.docs-ready: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --constraint $(CONSTRAINTS) --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-engines .venv-oldest site

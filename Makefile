# make demo   the main job on the embedded models, in an environment of its own
# make test   what tests need, and the tests
# make check  ruff and mypy
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := -c constraints.txt

.PHONY: demo test nightly check bench clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install -q $(CONSTRAINTS) -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) install -q $(CONSTRAINTS) -e '.[test]'
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed-test
	$(PIP) install -q $(CONSTRAINTS) -e '.[test,check]'
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/foretoken demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

nightly: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m nightly

check: $(VENV)/.installed-check
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m foretoken.bench overhead

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

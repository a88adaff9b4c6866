# make serve: set up, fetch the built-in model, serve it.   make test: set up, run the tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
FLAGS ?=
PIP = $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup serve test lint clean

setup: $(VENV)/.for-tests

$(VENV)/.for-serving: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt -e '.[serve]'
	touch $@

$(VENV)/.for-tests: $(VENV)/.for-serving
	$(PIP) install -c constraints.txt -e '.[serve,test]'
	touch $@

serve: $(VENV)/.for-serving
	$(BIN)/python launcher.py $(FLAGS)

test: setup
	$(BIN)/python -m pytest $(FLAGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info

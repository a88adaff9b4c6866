PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Further options: of the command for `serve`, `chat` and `bench`, of pytest for the tests.
FLAGS ?=
# Processes that share the tests; auto: one for each core, 8 at most.
TEST_WORKERS ?= auto
PIP = $(BIN)/python -m pip -qq --disable-pip-version-check
PYTEST = $(BIN)/python -m pytest
PARALLEL = --numprocesses $(TEST_WORKERS) --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help setup serve chat bench format lint typecheck test-unit test check page-check agents docs clean

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.for-tests ## make .venv with what serving and the tests need

$(VENV)/.for-serving: pyproject.toml constraints.txt
	@echo "installing (1/2): a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "installing (2/2): what a server needs, mostly PyTorch; this takes a minute or more"
	@$(PIP) install -c constraints.txt -e '.[serve]'
	@touch $@

$(VENV)/.for-tests: $(VENV)/.for-serving
	@echo "installing: what the tests need"
	@$(PIP) install -c constraints.txt -e '.[serve,test]'
	@touch $@

serve: $(VENV)/.for-serving ## set up, fetch the built-in model, serve it
	@$(BIN)/python launcher.py $(FLAGS)

chat: $(VENV)/.for-serving ## chat with the server that runs
	@$(BIN)/quadriga chat $(FLAGS)

bench: $(VENV)/.for-serving ## measure a server; FLAGS="--endpoint tcp://..." one that runs
	@$(BIN)/quadriga bench $(FLAGS)

format: setup ## format the code and fix what ruff can fix
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: setup ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup ## check types
	$(BIN)/mypy

test-unit: setup ## run the unit tests, on all cores
	$(PYTEST) $(PARALLEL) tests/unit $(FLAGS)

test: setup ## run every test, on all cores
	status=0; \
	$(PYTEST) $(PARALLEL) -m "not alone" $(FLAGS) || status=$$?; \
	$(PYTEST) -m alone --ignore tests/unit $(FLAGS) || status=$$?; \
	exit $$status

check: lint typecheck test-unit ## run what a commit should pass: style, types, unit tests

page-check: ## build the page again, if there is Node, and compare it with the bundle
	@if ! command -v npm >/dev/null; then echo "page-check: skipped, no npm"; \
	else cd http_proc/page/source && npm ci --ignore-scripts --silent && npm run --silent check; fi

AGENTS = @openai/codex @anthropic-ai/claude-code

agents: setup ## sessions of Codex and Claude Code, if there is npm, which installs them for a while
	@if ! command -v npm >/dev/null; then echo "agents: skipped, no npm"; else \
	set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	npm install --silent --no-audit --no-fund --prefix "$$folder" $(AGENTS); \
	AGENTS_DIR="$$folder" $(PYTEST) tests/integration/test_agent_clients.py $(FLAGS); fi

DOCS_VENV ?= .venv-docs

$(DOCS_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS_VENV)/.installed ## build the documentation's site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --clean

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) $(DOCS_VENV) build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .schemathesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

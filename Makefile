# Every target does the set-up it needs; all that is assumed is Python 3.11 or newer.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
UV     := UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-slow lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a nano model on this CPU, sample from it, write runs/demo/report.html"
	@echo "make test       the tests (about as many workers as cores)"
	@echo "make test-slow  the tests that make test leaves out"
	@echo "make lint       ruff and pyright"
	@echo "make setup      the virtual environment in $(VENV), with everything for development"

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "adlm needs Python 3.11 or newer; PYTHON=$(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv

# Two stamps: the demo needs far fewer packages than the tests.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/uv
	$(UV) -e '.[plot]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/uv
	$(UV) -e '.[dev]'
	@touch $@ $(VENV)/.demo

setup: $(VENV)/.dev

demo: $(VENV)/.demo
	env -u OMP_NUM_THREADS $(BIN)/adlm demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist worksteal --slow -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info

# Every target does the set-up it needs; all that is assumed is Python 3.11 or newer.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Every package in the version of the lock file, its hash checked, unless PIP_FIND_LINKS names builds of your own (such as
# torch for CPUs alone, which the package index does not have).
UV     := UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python \
          -c requirements.lock --build-constraint requirements.lock $(if $(PIP_FIND_LINKS),--no-verify-hashes)
export OMP_NUM_THREADS ?= 1
# Compiled modules are kept, also where the environment says otherwise: the tests start some hundred processes, and each
# would compile torch's sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-slow lint format lock dist clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a nano model on this CPU, sample from it, write runs/demo/report.html"
	@echo "make test       the tests (about as many workers as cores)"
	@echo "make test-slow  the tests that make test leaves out"
	@echo "make lint       ruff and pyright"
	@echo "make setup      the virtual environment in $(VENV), with everything for development"
	@echo "make lock       derive requirements.lock from pyproject.toml and constraints.txt"
	@echo "make dist       wheel and sdist in dist/"

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "adlm needs Python 3.11 or newer; PYTHON=$(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt uv

# Two stamps: the demo needs far fewer packages than the tests.
$(VENV)/.demo: pyproject.toml requirements.lock | $(BIN)/uv
	$(UV) -e '.[plot]'
	@touch $@

$(VENV)/.dev: pyproject.toml requirements.lock | $(BIN)/uv
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

# Versions and hashes that still fit are kept; `rm requirements.lock` first takes the newest of everything.
lock: | $(BIN)/uv
	env -u UV_FIND_LINKS $(BIN)/uv pip compile pyproject.toml --quiet --all-extras --universal --python-version 3.11 \
	  --generate-hashes -c constraints.txt --custom-compile-command "make lock" -o requirements.lock

dist: $(VENV)/.dev
	rm -rf build dist
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist src/*.egg-info

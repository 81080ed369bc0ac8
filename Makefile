# Works on a clean clone with python3 >= 3.11, pip and make.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help .venv demo test test-slow lint bench bundled

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv: $(INSTALLED)  ## install prebake and its tools into .venv, at the pinned versions

$(INSTALLED): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("prebake needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + ": make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (some minutes, the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)  ## teach the bundled model a new shape, in out/demo
	@$(BIN)/prebake demo --out out/demo

test: $(INSTALLED)  ## run the quick tests
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

test-slow: $(INSTALLED)  ## run the tests that take minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m slow --timeout 3600

lint: $(INSTALLED)  ## check style, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(INSTALLED)  ## run tests/benchmarks; each prints JSON lines
	@set -e; for script in $(filter-out %/common.py,$(sort $(wildcard tests/benchmarks/*.py))); do $(BIN)/python "$$script"; done

bundled: $(INSTALLED)  ## draw the bundled pictures and train the bundled model again (1 1/2 hours)
	@$(BIN)/python examples/make_pictures.py --out examples/bundled/pictures
	@$(BIN)/python examples/train_vae.py --out examples/bundled/model --work out/bundled
	@$(BIN)/python examples/train_unet.py --out examples/bundled/model --work out/bundled

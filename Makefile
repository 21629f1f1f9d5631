# Every target sets up what it needs first: a virtual environment in .venv, made again when pyproject.toml changes.
PYTHON ?= python3
MATRIX ?= matrices/int8.yaml
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup run test slow gpu bench lint clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1|/p' Makefile | column -t -s '|'

setup: $(STAMP) ## only the virtual environment, in .venv

run: $(STAMP) ## measure, judge and report matrices/int8.yaml (another: make run MATRIX=matrices/smoke.yaml)
	$(BIN)/kvbench run $(MATRIX) $(ARGS)

test: $(STAMP) ## all tests that need no GPU, without the slow ones; those of the report page need a Chromium (apt install chromium)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile -m "not peer and not slow" $(ARGS)

slow: $(STAMP) ## the tests that take long
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --dist loadfile -m "slow and not peer" $(ARGS)

gpu: $(STAMP) ## the tests that need a GPU, and the kernels' tests compiled
	$(BIN)/python -m pytest -q -n 8 --dist load tests/gpu tests/kernels $(ARGS)

bench: $(STAMP) ## attention kernels, FP8 linear layers and engine on a GPU (make bench ARGS="--out results")
	PYTHONPATH=kernels:. $(BIN)/python -m benchmarks.attention $(ARGS)
	PYTHONPATH=kernels:. $(BIN)/python -m benchmarks.fp8_linear $(ARGS)
	PYTHONPATH=kernels:. $(BIN)/python -m benchmarks.engine $(ARGS)

lint: $(STAMP) ## ruff (rules and format) and mypy (strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove the virtual environment and caches (not runs/)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build

$(STAMP): pyproject.toml
	@echo "Setting up .venv: a few minutes, once."
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"kvbench needs Python 3.11 or newer, this is {v[0]}.{v[1]}; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

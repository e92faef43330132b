# Each target makes .venv and installs what it needs, unless a virtual environment is active.
#   make quickstart   a learning curve in a few minutes    [SEED=0] [RUN=runs/quickstart-0]
#   make test         the tests
#   make check        ruff, pyright and the tests
#   make slow         the tests that take longer, the quickstart among them

PYTHON ?= python3
SEED ?= 0
RUN ?= runs/quickstart-$(SEED)
ifdef VIRTUAL_ENV
VENV := $(VIRTUAL_ENV)
else
VENV := .venv
endif
BIN := $(VENV)/bin
# Idle threads wait for work without burning the other core.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: quickstart test slow check install
quickstart: $(VENV)/.nanoskyrl
	$(BIN)/skyrl loop --preset quickstart --seed $(SEED) --run $(RUN)

test: $(VENV)/.nanoskyrl-dev
	$(BIN)/python -m pytest

slow: $(VENV)/.nanoskyrl-dev
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.nanoskyrl-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest

install: $(VENV)/.nanoskyrl

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: any other package that asks for it would bring a CUDA build of several gigabytes.
$(VENV)/.nanoskyrl: pyproject.toml | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.nanoskyrl-dev: $(VENV)/.nanoskyrl
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

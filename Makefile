# The only commands that people and CI use. `make help` lists them.
PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
# A plain range lets pip choose a build with gigabytes of accelerator libraries; name another build here.
TORCH ?= torch==2.13.0
ARGS ?=
NPROC ?= $(shell $(PY) -c "import torch; print(torch.cuda.device_count() or 2)")

export OMP_NUM_THREADS ?= 1

INSTALL = $(PY) -m pip install --quiet --no-build-isolation
# torch first, and only where it is missing; with setuptools there, no build environment is downloaded.
VENV_STAMP = $(VENV)/.stamp-torch

.DEFAULT_GOAL := help
.PHONY: help demo test lint style types fuzz device-check bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16
	@echo 'Variables: ARGS (passed on), NPROC (ranks), TORCH, PYTHON, VENV, PY (see the top of the Makefile)'

$(VENV_STAMP):
	@$(PYTHON) -c "import sys; assert sys.version_info >= (3, 11), 'shardwise needs Python 3.11 or newer'"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(PY) -c "import torch, setuptools" 2>/dev/null || $(PY) -m pip install --quiet "$(TORCH)" "setuptools>=77"
	@touch $@

$(VENV)/.stamp-%: pyproject.toml $(VENV_STAMP)
	$(INSTALL) -e ".[$*]"
	@touch $@

# With PY=python3 (say) the targets that only run something use that interpreter and install nothing.
ifeq ($(PY),$(VENV)/bin/python)
need = $(VENV)/.stamp-$(1)
endif

demo: $(call need,demo)  ## train a small GPT, sharded, beside its unsharded reference
	$(PY) examples/torchrun.py --standalone --nproc-per-node $(NPROC) examples/train_gpt.py --reference $(ARGS)

test: $(call need,test)  ## run all tests (ARGS="-k name" to choose)
	$(PY) -m pytest $(ARGS)

lint: style types  ## ruff and pyright

style: $(call need,test)  ## ruff
	$(PY) -m ruff check .

types: $(call need,types)  ## pyright, strict on src
	$(PY) -m pyright

fuzz: $(call need,test)  ## search the property tests for longer
	$(PY) -m pytest -m fuzz --hypothesis-profile=fuzz $(ARGS)

device-check: $(call need,test)  ## what one accelerator has to show (PY=python3 to use a machine's own torch)
	$(PY) -m benchmarks.device_check $(ARGS)

bench: $(call need,test)  ## the benchmarks, each against its peers in the same run
	$(PY) -m benchmarks $(ARGS)

clean:  ## remove what the targets made, the environment too
	rm -rf $(VENV) build dist runs .pytest_cache .hypothesis .ruff_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

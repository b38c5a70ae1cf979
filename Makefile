# Two commands are all a newcomer needs: `make serve` and `make test`. Each sets up its own virtual environment first.
#
#   make serve       serve the default model on 127.0.0.1:8000   (MODEL=..., HOST=..., PORT=..., ARGS="--flag value")
#   make test        the quick suite, under 15 minutes on two cores
#   make test-gpu    on a machine with CUDA: kernels, graphs, and whole engines on the device, under 8 minutes
#   make test-all    the quick suite, then the whole products (tests marked `full`)
#   make check       everything a change must pass: linters, types, the quick suite
#   make docs        write docs/matrix.md and the tables in other pages from what tests prove and components declare
#   make format      let ruff sort imports and repair what it can
#   make setup       only the environment; `make clean` removes it
#
# TORCH chooses the build of PyTorch, and is installed before everything else, so that nothing else chooses for you:
#   make setup TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# Builds of PyTorch for CUDA bring their own Triton; beside a CPU build this one runs the kernels in its interpreter.
TRITON ?= triton==3.6.0
VENV ?= .venv
PYTHON ?=
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.stretto-setup
# With progress bars on a terminal, silent elsewhere.
PIP_INSTALL = PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install $$([ -t 1 ] || echo --quiet)
RUN_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS)

.PHONY: help setup serve test test-all test-gpu check lint docs format clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   make/  make/p' Makefile

setup: $(STAMP)

# Written last, so that an interrupted set-up is taken up again. A second call costs nothing.
$(STAMP): pyproject.toml Makefile .ci/find-python
	@set -e; \
	if ! $(BIN)/python -c '' 2>/dev/null; then \
	  python=$$(sh .ci/find-python $(PYTHON)); \
	  echo "setup: creating $(VENV) with $$python"; \
	  rm -rf $(VENV); \
	  "$$python" -m venv $(VENV); \
	  $(PIP_INSTALL) --upgrade 'pip>=25'; \
	fi
	@echo "setup: $(TORCH) (a large download the first time)"
	@$(PIP_INSTALL) $(TORCH)
	@if [ "$$(uname -s)" = Linux ]; then \
	  $(BIN)/python -c 'import importlib.metadata as m; m.version("triton")' 2>/dev/null \
	    || $(PIP_INSTALL) $(TRITON); \
	fi
	@echo "setup: stretto and its development tools"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(STAMP)
	@echo "setup: ready"

serve: $(STAMP)
	$(BIN)/stretto serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

test: $(STAMP)
	$(RUN_TESTS) $(ARGS)

test-all: $(STAMP)
	$(RUN_TESTS)
	$(RUN_TESTS) -m full

check: lint
	$(RUN_TESTS)

# Engines of these tests run on the device; the rest of the suite has nothing of a GPU in it.
test-gpu: $(STAMP)
	STRETTO_TEST_DEVICE=cuda OMP_NUM_THREADS=2 $(BIN)/python -m pytest -q -n 8 tests/gpu tests/attn tests/ops \
	  tests/model/test_cuda.py tests/spec/test_cuda.py tests/engine/test_oracle.py tests/engine/test_behaviour.py \
	  tests/engine/test_cases.py tests/engine/test_states.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)
	TRITON_INTERPRET=0 $(BIN)/python -m stretto.cli.matrix_page
	$(BIN)/python -m stretto.model.table docs/models.md
	$(BIN)/python -m stretto.cli.flags docs/configuration.md

format: $(STAMP)
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

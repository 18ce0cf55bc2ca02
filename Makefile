# Two commands for everybody: `make demo` and `make test`. Each makes .venv on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
WORKERS ?= auto

# Beside the Triton of constraints.txt, those that the kernels for Hopper serve: where Triton is to be had.
ifeq ($(shell uname),Linux)
OTHER_TRITONS := 3.6.0 3.8.0 3.9.0
endif

.PHONY: demo test test-gpu test-tritons sanitize lint clean

demo: $(VENV)/demo-installed
	$(BIN)/ropewalk demo

# On the CPU and, compiled, for every target; then the kernels in Triton's interpreter, and those for Hopper compiled by
# other versions of Triton.
test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/ops -m "not compile"
	$(MAKE) test-tritons

test-tritons: $(OTHER_TRITONS:%=test-triton-%)
$(OTHER_TRITONS:%=test-triton-%): test-triton-%: $(VENV)/triton-%/installed
	PYTHONPATH=$(CURDIR)/$(<D) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/ops/attention/test_gluon_compilation.py

lint: $(VENV)/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror src/ropewalk/ops/*/csrc/*
	$(BIN)/mypy

# The same suite, on a GPU, with the Python that is there: no environment is made.
test-gpu:
	PYTHONPATH=src ROPEWALK_TEST_DEVICE=cuda $(PYTHON) -m pytest tests

# The CUDA kernels under NVIDIA's checkers of memory accesses and of races, over vLLM's test matrix, on a GPU. The checker
# must not save the host's backtraces: they hold Python's frames, and with them every tensor. For the short sequences
# PyTorch keeps no memory for later, so that every tensor has an end to overstep.
SANITIZE = PYTHONPATH=src ROPEWALK_TEST_DEVICE=cuda compute-sanitizer --show-backtrace device \
	--kernel-name kernel_substring=rotate_kernel --error-exitcode 1 --tool $* \
	$(PYTHON) -m pytest -p no:cacheprovider tests/ops/rope/test_rotary_embedding.py
sanitize: sanitize-memcheck sanitize-racecheck
sanitize-%:
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZE) -k "vllms_matrix and 5-11 or outside_the_table or slices_of_one"
	$(SANITIZE) -k "vllms_matrix and 2-8192"

# An environment is complete when its stamp is newer than what it was made from.
$(VENV)/demo-installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.[bench]'
	touch $@

$(VENV)/dev-installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

# The folder's name says what is in it: nothing else makes it out of date.
$(OTHER_TRITONS:%=$(VENV)/triton-%/installed): $(VENV)/triton-%/installed: | $(VENV)/dev-installed
	$(PIP) --no-deps --upgrade --target $(@D) triton==$*
	touch $@

clean:
	rm -rf $(VENV) build dist

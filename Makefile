# For everybody: `make demo`, and `make check` before a commit, `make test` before a merge, `make test-all` as CI does. Each
# makes .venv on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
WORKERS ?= auto

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Beside the Triton of constraints.txt, those that the kernels for Hopper support, where Triton is to be had.
ifeq ($(shell uname),Linux)
OLDEST_TRITON := 3.6.0
NEWER_TRITONS := 3.8.0 3.9.0
endif
OTHER_TRITONS := $(OLDEST_TRITON) $(NEWER_TRITONS)

# What runs Triton's kernels on a CPU runs in Triton's interpreter, all else without: `tests/helpers/modes.py` selects.
INTERPRETED := TRITON_INTERPRET=1 $(PYTEST) tests/ops tests/compat tests/modules tests/products
COMPILED := $(wildcard tests/ops/*/test_*compilation.py)
ONLY_IN_ALL := target or browser or docs or distribution or slow
# How many cases `make test-all` takes of tests that compile or interpret kernels; `all` takes hours on two cores.
COVER ?= most

.PHONY: demo dist url check check-tests test test-all test-newest test-oldest test-gpu products products-pack products-gpu \
	sanitize lint clean

demo: $(VENV)/demo-installed
	$(BIN)/ropewalk demo

# A URL that is given, as one word; the command line's may be empty.
GIVEN_URL = $(if $(URL)$(filter command,$(origin URL)),--url '$(subst ','\'',$(URL))')

# The wheel and the source distribution, in dist/, with the repository's URL of pyproject.toml or, once: make dist URL=https://…
dist: $(VENV)/dev-installed
	$(BIN)/python tools/dist.py $(GIVEN_URL)

# Badges, citation and BibTeX by pyproject.toml. With URL=https://… the repository's page is set there and wherever it is
# shown; with an empty URL= it is taken away.
url: $(VENV)/dev-installed
	$(BIN)/python tools/project.py $(GIVEN_URL)

# Minutes: the layers and rules, one binary of each kernel for sm_90, and a few cases of each test of kernels.
check: lint
	$(MAKE) check-tests
check-tests:
	$(PYTEST) --cover few -m "not slow and not target" tests/test_imports.py tests/test_house.py $(COMPILED)
	$(INTERPRETED) --cover few -m "not slow"

# Every test once, in one mode, but for slow ones. Of tests with many cases, some; sm_90 alone, with one Triton.
test: lint
	$(PYTEST) --cover some -m "not ($(ONLY_IN_ALL))" tests
	$(INTERPRETED) --cover some -m "not slow"

# Most cases, slow tests, all targets, all Tritons, the browser, what the documentation shows, and distributions.
test-all: lint
	$(PYTEST) --cover $(COVER) tests
	$(INTERPRETED) --cover $(COVER)
	$(MAKE) $(OLDEST_TRITON:%=test-triton-%) $(OTHER_TRITONS:%=test-few-triton-%)

# By another Triton: most cases of the kernels for Hopper, whose machine code differs; or one for sm_90 of each kernel.
ON_OTHER_TRITON = PYTHONPATH=$(CURDIR)/$(<D) $(PYTEST) tests/ops/launch/test_launcher.py
$(OTHER_TRITONS:%=test-triton-%): test-triton-%: $(VENV)/triton-%/installed
	$(ON_OTHER_TRITON) --cover $(COVER) tests/ops/attention/test_hopper_compilation.py
$(OTHER_TRITONS:%=test-few-triton-%): test-few-triton-%: $(VENV)/triton-%/installed
	$(ON_OTHER_TRITON) --cover few -m "not slow and not target" $(filter-out %test_cuda_compilation.py,$(COMPILED))

# Every pair of features of `attention`, by each backend. On this machine's CPU: by the reference, and some by Triton's
# interpreter, another part each day.
products: $(VENV)/dev-installed
	$(PYTEST) tests/products
	TRITON_INTERPRET=1 $(PYTEST) tests/products

# All of it on an H100 or H200: compile here, without a GPU, for its Python and for Triton $(OLDEST_TRITON), then run there
# with the Python that is there. PYTHON is one of the same version as that.
PACK ?= build/products.tar.xz
RECORD ?= records/products.json
products-pack: $(VENV)/triton-$(OLDEST_TRITON)/installed
	PYTHONPATH=$(CURDIR)/$(<D):src:tests $(BIN)/python tools/prove_products.py pack $(PACK) --python $(PYTHON)
products-gpu:
	PYTHONPATH=src:tests $(PYTHON) tools/prove_products.py gpu $(PACK) $(RECORD)

lint: $(VENV)/dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror src/ropewalk/ops/rope/cuda/csrc/* src/ropewalk/ops/launch/*.c
	$(BIN)/mypy

# The tests of `make check`, by another PyTorch and the Triton that belongs to it: the newest, looked for at each run, and
# the oldest that pyproject.toml promises. Each has an environment of several GB, since PyPI's builds bring CUDA along.
# PYTHON=python3.10 makes it with another Python, where there is none yet.
test-newest: VERSIONS := --upgrade --upgrade-strategy eager
test-oldest: VERSIONS := -c constraints-oldest.txt
test-newest test-oldest: test-%:
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet $(VERSIONS) -e '.[dev]'
	.venv-$*/bin/python -c "import sys, torch, triton; print(sys.version, torch.__version__, triton.__version__)"
	$(MAKE) check-tests BIN=.venv-$*/bin

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

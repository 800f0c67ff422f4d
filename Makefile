# The developer's commands. They need Python >= 3.10 with venv, g++ and make; everything else is installed into .venv.

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
VENV ?= .venv
# More options for pip, such as PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small CPU torch.
PIP_FLAGS ?=
# More options for pytest, such as PYTEST_FLAGS="-k dense".
PYTEST_FLAGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help build test demo bench lint format clean

BIN := $(VENV)/bin
RUN := $(abspath $(BIN))/python
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
BUILD := build/Release
# Compiled code and graphs are cached between runs, but never across a rebuild of the operators that they contain.
export TORCHINDUCTOR_CACHE_DIR := $(abspath build/inductor)

# Named for its torch version, so that asking for another one installs it.
TORCH := $(VENV)/.torch-$(TORCH_VERSION)
SOURCES := CMakeLists.txt pyproject.toml $(shell find cmake src torchops/*.py* test/cpp -not -name "*~")

help:
	@echo "make test    build, then run the Python and the C++ tests"
	@echo "make demo    build, then train on handwritten digits and show the memory that in-place saves"
	@echo "make bench   build, then measure the operators against PyTorch"
	@echo "make lint    check style and types;  make format  mend the style"
	@echo "make build   build and install into $(VENV), in editable mode"
	@echo "make clean   remove $(VENV) and everything built"
	@echo "Variables: PYTHON=$(PYTHON) TORCH_VERSION=$(TORCH_VERSION) VENV=$(VENV) PIP_FLAGS PYTEST_FLAGS"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 10) and sys.exit("Python >= 3.10 is needed: set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	@$(PIP) install $(PIP_FLAGS) "pip>=25.1"

$(TORCH): | $(BIN)/python
	@echo "installing torch $(TORCH_VERSION) into $(VENV)"
	@rm -f $(VENV)/.torch-*
	@$(PIP) install $(PIP_FLAGS) "torch==$(TORCH_VERSION)"
	@touch $@

# One stamp per dependency group of pyproject.toml.
$(VENV)/.group-%: pyproject.toml $(TORCH)
	@echo "installing the dependency group $*"
	@$(PIP) install $(PIP_FLAGS) --group $* "torch==$(TORCH_VERSION)"
	@touch $@

$(VENV)/.built: $(SOURCES) $(TORCH) $(VENV)/.group-test
	@echo "building"
	@rm -rf $(TORCHINDUCTOR_CACHE_DIR)
	@$(PIP) install --no-build-isolation --no-deps --editable . \
	  -C cmake.define.TORCHOPS_WERROR=ON -C cmake.define.TORCHOPS_BUILD_TESTS=ON
	@touch $@

build: $(VENV)/.built

# Every suite runs even if one before it fails. pytest's status 5 says that no test was selected.
test: build
	@failed=; \
	$(RUN) -m pytest -n 2 --dist loadgroup -m "not serial" $(PYTEST_FLAGS) | tee build/pytest.log || failed=yes; \
	{ $(RUN) -m pytest -m serial $(PYTEST_FLAGS) | tee build/pytest-serial.log; } || [ $$? -eq 5 ] || failed=yes; \
	$(abspath $(BIN))/ctest --test-dir $(BUILD) --output-on-failure | tee build/ctest.log || failed=yes; \
	echo; \
	echo "pytest:         $$(tail -n 1 build/pytest.log)"; \
	echo "pytest, serial: $$(tail -n 1 build/pytest-serial.log)"; \
	echo "ctest:          $$(grep 'tests passed' build/ctest.log || echo 'did not run')"; \
	[ -z "$$failed" ]

demo: build $(VENV)/.group-demo
	$(RUN) examples/digits.py

bench: build $(VENV)/.group-demo
	$(RUN) -m benchmarks

CXX_FILES = $(shell find src test/cpp -name "*.h" -o -name "*.cpp" -o -name "*.cu")
PY_DIRS := torchops test examples benchmarks

lint: $(VENV)/.group-lint $(VENV)/.group-test $(VENV)/.group-demo
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy

format: $(VENV)/.group-lint
	$(BIN)/ruff check --fix $(PY_DIRS)
	$(BIN)/ruff format $(PY_DIRS)
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache

# The developer's commands. They need Python >= 3.10 with venv, g++ and make; everything else is installed into .venv.

PYTHON ?= python3
TORCH_VERSION ?= 2.13.0
VENV ?= .venv
# More options for pip, such as PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" for the small CPU torch.
PIP_FLAGS ?=
# More options for pytest, such as PYTEST_FLAGS="-k dense".
PYTEST_FLAGS ?=
# More options for `python -m benchmarks run`, such as BENCH_FLAGS="-o dense --quick", and a folder for all results.
BENCH_FLAGS ?=
BENCH_OUTPUT ?=
# CUDA kernels: AUTO (where torch and the CUDA compiler allow), ON or OFF.
CUDA ?= AUTO
# GEMM kernels: FULL, or REDUCED: each operation in one type, which compiles every line of code in a fraction of the time.
KERNELS ?= FULL
# The CUDA build of torch that test-cuda-build compiles against. It needs no GPU.
CUDA_TORCH_VERSION ?= 2.14.1
# The headers of CUTLASS and, where CUDA is demanded and there is no compiler for it, PyPI's, of the CUDA of torch.
NVCC = $(if $(filter ON,$(CUDA)),$(shell PATH="$$PATH:/usr/local/cuda/bin" command -v nvcc >/dev/null || \
  echo nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl))
CUDA_TOOLS = cuda=$$($(RUN) -c "import torch; print(torch.version.cuda or '')"); \
  if [ $(CUDA) != OFF ] && [ -n "$$cuda" ]; then \
    $(PIP) install $(PIP_FLAGS) --group cuda $(NVCC:%="%==$$cuda.*") "torch==$(TORCH_VERSION)"; \
  fi
# What test-cuda-build builds (all that has CUDA in it) and runs: that the build loads and registers what it should.
# `make test` with that torch tests the rest.
CUDA_TARGETS := torchops;gemm_test;refusal_test;plan_test
CUDA_SUITE ?= $(addprefix test/test_,cuda_build.py configure.py schema.py ptx.py \
  $(addprefix opcheck.py::test_,static frozen_arguments helpers all_helpers_are_checked))

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help build test test-sanitized coverage coverage-report demo ladder ladder-gpu graph bench lint format clean wheel wheel-here gemm gemm-here release-check test-cuda-build cuda-checks gpu-build \
  test-gpu bench-gpu committed results results-gpu site ptx

BIN := $(VENV)/bin
RUN := $(abspath $(BIN))/python
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
BUILD := build/Release
GPU_BUILD := build/gpu
# Compiled code and graphs are cached between runs, but never across a rebuild of the operators that they contain.
export TORCHINDUCTOR_CACHE_DIR := $(abspath $(BUILD))/inductor

# Named for its torch version, so that asking for another one installs it.
TORCH := $(VENV)/.torch-$(TORCH_VERSION)
SOURCES := CMakeLists.txt pyproject.toml $(shell find cmake src torchops test/cpp -not -name "*~" -not -path "*/__pycache__*")
CPP_TESTS_TOO := ON
# With CHECK=ON, what need only compile, load and be right; what -O3 warns of, the builds of make test show.
CHECK ?=
CHECK_FLAGS := -C cmake.define.CMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG"
BUILD_FLAGS = --no-build-isolation --no-deps -C build-dir=$(BUILD) \
  -C cmake.define.TORCHOPS_WERROR=ON -C cmake.define.TORCHOPS_BUILD_TESTS=$(CPP_TESTS_TOO) -C cmake.define.TORCHOPS_CUDA=$(CUDA) \
  -C cmake.define.TORCHOPS_SHARE_HEADERS=ON -C cmake.define.TORCHOPS_KERNELS=$(KERNELS) \
  $(TARGETS:%=-C "build.targets=%") $(if $(CHECK),$(CHECK_FLAGS))

help:
	@echo "make test    build, then run the Python and the C++ tests"
	@echo "make demo    build, then show what the operators save in time and memory, in a picture"
	@echo "make ladder  build, then measure one operator step by step, from Python down to C++; ladder-gpu: down to CUDA"
	@echo "make bench   build, then measure the operators against PyTorch"
	@echo "make lint    check style and types;  make format  fix the style"
	@echo "make build   build and install into $(VENV), in editable mode"
	@echo "make wheel   build a wheel to hand out in dist/, for torch $(TORCH_VERSION), and test it in a bare environment"
	@echo "make gemm    build the GEMM kernels alone, which wheels can take: GEMM_LIBRARY=dist/lib/libtorchops_gemm.so"
	@echo "make release-check     the same, then the wheel of a release from it, tried as a user would install it"
	@echo "make test-sanitized    run the C++ tests and the property tests with the address and undefined-behaviour sanitizers"
	@echo "make coverage    run the tests and show which lines of C++ and Python they reach; coverage-report: what a run that was cut short reached"
	@echo "make test-cuda-build   compile and load the CUDA kernels in .venv-cuda, and test what needs no GPU"
	@echo "make test-gpu    on a machine with a GPU: build for the torch of $(PYTHON), then run the tests on CUDA"
	@echo "make bench-gpu   on a machine with a GPU: the same build, then measure it against PyTorch"
	@echo "make results     measure what benchmarks/results has of this CPU, and make the tables and pictures; results-gpu of this GPU"
	@echo "make site    build the documentation, with the API reference, into build/site"
	@echo "make ptx     compile the sigmoid kernel to build/ptx/sigmoid.ptx, and assemble it and the edited examples/ptx/*.ptx"
	@echo "make clean   remove $(VENV) and everything built"
	@echo "Variables: PYTHON=$(PYTHON) TORCH_VERSION=$(TORCH_VERSION) VENV=$(VENV) PIP_FLAGS PYTEST_FLAGS CUDA=$(CUDA)"

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

# The packages of which test_adapters.py swaps modules, and those under the name of one of them, for
# test_adapters_releases.py.
$(VENV)/.adapters: $(VENV)/.group-adapters
	@$(PIP) install $(PIP_FLAGS) --no-deps --group adapters-bare
	@rm -rf $(VENV)/releases
	@set -e; for release in boltz-community boltz-2-0-3 boltz-1-0-0; do \
	  $(PIP) install $(PIP_FLAGS) --no-deps --target $(VENV)/releases/$$release --group adapters-$$release; \
	done
	@touch $@

$(VENV)/.built: $(SOURCES) $(TORCH) $(VENV)/.group-test
	@echo "building"
	@rm -rf $(TORCHINDUCTOR_CACHE_DIR)
	@$(CUDA_TOOLS)
	@$(PIP) install --editable . $(BUILD_FLAGS)
	@touch $(VENV)/.library $@

build: $(VENV)/.built

# The same for `make demo`, sooner, since a stranger waits for it: without the C++ tests and what the tests need. `make test`
# goes on from there.
$(VENV)/.library: CPP_TESTS_TOO := OFF
# PyPI's torch is a CUDA build on any machine. Without a GPU, the demo would wait for kernels that it cannot run.
ifeq ($(origin CUDA),file)
$(VENV)/.library: CUDA = $(or $(FOUND_GPU),$(eval FOUND_GPU := $(shell $(RUN) -c \
  "import torch; print('AUTO' if torch.cuda.is_available() else 'OFF')"))$(FOUND_GPU))
endif
$(VENV)/.library: $(SOURCES) $(TORCH) | $(VENV)/.group-demo
	@echo "building"
	@rm -rf $(TORCHINDUCTOR_CACHE_DIR)
	@$(CUDA_TOOLS)
	@$(PIP) install --editable . $(BUILD_FLAGS)
	@touch $@

# The wheel that test_packaging.py examines. Made here, before the tests, because two builds in one folder break each other.
$(VENV)/.wheel: $(VENV)/.built
	@rm -rf $(BUILD)/wheel
	@$(PIP) wheel . --wheel-dir $(BUILD)/wheel $(BUILD_FLAGS)
	@touch $@

# To collect all tests only to leave all but these out takes a minute.
SERIAL_SUITE = $(shell grep -l "mark.serial" test/test_*.py)

SUMMARY = echo; echo "pytest:         $$(tail -n 1 $(1)pytest.log)"; echo "pytest, serial: $$(tail -n 1 $(1)pytest-serial.log)"; \
  echo "ctest:          $$(grep 'tests passed' $(1)ctest.log || echo 'did not run')"; [ -z "$$failed" ]

# Every suite runs even if one before it fails. pytest's status 5 says that no test was selected.
test: build $(VENV)/.wheel $(VENV)/.adapters $(VENV)/.group-demo
	@failed=; export TORCHOPS_WHEEL_DIR="$(abspath $(BUILD))/wheel"; \
	$(RUN) -m pytest -n 2 --dist loadgroup -m "not serial" $(PYTEST_FLAGS) | tee build/pytest.log || failed=yes; \
	{ $(RUN) -m pytest -m serial $(PYTEST_FLAGS) $(SERIAL_SUITE) | tee build/pytest-serial.log; } || [ $$? -eq 5 ] || failed=yes; \
	$(abspath $(BIN))/ctest --test-dir $(BUILD) -j 2 --output-on-failure | tee build/ctest.log || failed=yes; \
	$(call SUMMARY,build/)

# A wheel to hand out: built in a manylinux image where containers run, so that old systems can load it, else for systems
# like this one. auditwheel puts the oldest that it can prove into the name, and torch's libraries stay torch's:
# a process with a second OpenMP runtime or a second libc10 crashes. The image is 2026.08.15-1, by the digest that PyPA's
# cibuildwheel pins it with; release.yml has the same.
WHEEL_IMAGE ?= quay.io/pypa/manylinux_2_28_x86_64@sha256:0c87ccb5996dab6c3b7612ee4fda7b80c4ab3c44a86c2541e4a872afdf4f131b
WHEEL_PYTHON ?= /opt/python/cp312-cp312/bin/python
WHEEL_BUILD := build/wheel
# What make gemm has built, to take instead of compiling it again; a path from here.
GEMM_LIBRARY ?=
# The images set AUDITWHEEL_PLAT.
CONTAINER ?= $(if $(AUDITWHEEL_PLAT),,$(shell for c in docker podman; do $$c info >/dev/null 2>&1 && echo $$c && break; done))
TORCHS_OWN := libtorch*.so libc10*.so libcudart.so.* libgomp*.so.* libomp*.so.* libiomp5*.so

wheel gemm:
ifeq ($(CONTAINER),)
	$(MAKE) $@-here
else
	$(CONTAINER) run --rm --volume "$(CURDIR)":/src --workdir /src $(WHEEL_IMAGE) make $@-here \
	  PYTHON=$(WHEEL_PYTHON) VENV=build/wheel/venv TORCH_VERSION=$(TORCH_VERSION) PIP_FLAGS="$(PIP_FLAGS)" CUDA=$(CUDA) \
	  KERNELS=$(KERNELS) GEMM_LIBRARY=$(GEMM_LIBRARY)
endif

# The builds with CUDA 13 in the wheel of a release share one. Later CUDA runtimes run it, so the oldest one builds it.
gemm gemm-here: override CUDA := ON
gemm-here: $(TORCH) $(VENV)/.group-release
	@$(CUDA_TOOLS)
	@PATH="$(abspath $(BIN)):$$PATH"; \
	cmake -G Ninja -S . -B $(WHEEL_BUILD)/gemm -DPython_EXECUTABLE=$(RUN) -DTORCHOPS_CUDA=ON -DTORCHOPS_KERNELS=$(KERNELS); \
	cmake --build $(WHEEL_BUILD)/gemm --target torchops_gemm; \
	cmake --install $(WHEEL_BUILD)/gemm --component gemm --strip --prefix dist

wheel-here: $(TORCH) $(VENV)/.group-release
	@$(CUDA_TOOLS)
	@rm -rf $(WHEEL_BUILD)/{raw,repaired}
	@$(PIP) wheel . --no-build-isolation --no-deps --wheel-dir $(WHEEL_BUILD)/raw -C build-dir=$(WHEEL_BUILD)/torch-$(TORCH_VERSION) \
	  -C cmake.define.TORCHOPS_CUDA=$(CUDA) -C cmake.define.TORCHOPS_KERNELS=$(KERNELS) \
	  -C cmake.define.TORCHOPS_GEMM_LIBRARY=$(abspath $(GEMM_LIBRARY))
	@PATH="$(abspath $(BIN)):$$PATH" $(RUN) -m auditwheel repair $(WHEEL_BUILD)/raw/*.whl --wheel-dir $(WHEEL_BUILD)/repaired \
	  $(TORCHS_OWN:%=--exclude '%')
	TORCHOPS_WHEEL_DIR="$(abspath $(WHEEL_BUILD))/repaired" $(RUN) -m pytest --noconftest test/test_packaging.py
	@mkdir -p dist && cp $(WHEEL_BUILD)/repaired/*.whl dist/ && ls dist/*.whl

# What the release workflow does with each torch, with this one: the wheel that users get, of this build alone, as they
# meet it. Its environment has torch, the wheel and what these require, nothing else.
RELEASED := build/release
RELEASED_RUN := $(abspath $(RELEASED))/venv/bin/python
release-check: wheel
	@rm -rf $(RELEASED)
	@$(PYTHON) release/merge_wheels.py $(WHEEL_BUILD)/repaired/*.whl --output $(RELEASED)
	@$(PYTHON) -m venv $(RELEASED)/venv
	@$(RELEASED_RUN) -m pip --disable-pip-version-check --quiet install $(PIP_FLAGS) $(RELEASED)/*.whl "torch==$(TORCH_VERSION)"
	@$(RELEASED_RUN) -m pip --disable-pip-version-check check
	@cd $(RELEASED) && $(RELEASED_RUN) -m torchops && $(RELEASED_RUN) -m torchops --check

# Builds of the CPU library with other compiler flags, beside the one that is installed. The processes that tests start
# import them, too.
INSTRUMENTED = $(PIP) install . --no-build-isolation --no-deps --upgrade --target $(1)/site -C build-dir=$(1)/cmake \
  -C cmake.build-type=RelWithDebInfo -C cmake.define.CMAKE_CXX_FLAGS="$(2)" \
  -C cmake.define.TORCHOPS_BUILD_TESTS=ON -C cmake.define.TORCHOPS_CUDA=OFF
PYTEST_IN_SITE = TORCHOPS_SITE="$(abspath $(1))/site" PYTHONPATH="$(CURDIR)/test/instrumented:$(CURDIR)" $(RUN) -m pytest
# Those that run in this process with nothing but the library.
CPP_TESTS := ^(api|registration|autograd|errors)$$

# Leaks are not looked for: Python and torch keep memory until the process ends. torch's own code is not instrumented, so
# annotations of containers that cross its border are wrong, and types that it hides have no vptr to check.
SANITIZED := build/sanitized
SANITIZED_SUITE ?= test/test_properties.py test/test_properties_of_pairs.py
SANITIZE := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined
test-sanitized: $(VENV)/.group-test
	@$(call INSTRUMENTED,$(SANITIZED),$(SANITIZE))
	@failed=; export UBSAN_OPTIONS=print_stacktrace=1; \
	export ASAN_OPTIONS=detect_leaks=0:detect_container_overflow=0:strict_string_checks=1:check_initialization_order=1; \
	$(abspath $(BIN))/ctest --test-dir $(SANITIZED)/cmake --output-on-failure -R "$(CPP_TESTS)" || failed=yes; \
	cxx=$$(sed -n 's/^CMAKE_CXX_COMPILER:[^=]*=//p' $(SANITIZED)/cmake/CMakeCache.txt); \
	preload="$$($$cxx -print-file-name=libasan.so) $$($$cxx -print-file-name=libstdc++.so)"; \
	LD_PRELOAD="$$preload" $(call PYTEST_IN_SITE,$(SANITIZED)) $(SANITIZED_SUITE) $(PYTEST_FLAGS) || failed=yes; \
	[ -z "$$failed" ]

# Lines that the tests reach. One file after another, because a process writes its counters when it ends: a run that is cut
# short loses one file, and `make coverage-report` shows the others. test_packaging.py examines the wheel of another build.
COVERAGE := build/coverage
COVERAGE_SUITE ?= $(filter-out test/test_packaging.py,$(wildcard test/test_*.py))
COVERAGE_REPORT = mkdir -p $(COVERAGE)/html && export COVERAGE_FILE=$(COVERAGE)/python && $(RUN) -m coverage report && \
  $(RUN) -m coverage html --quiet --directory $(COVERAGE)/html-python && \
  $(RUN) -m gcovr --root . --filter src/ --merge-lines $(COVERAGE)/cmake --txt --html-details $(COVERAGE)/html/index.html
coverage: $(VENV)/.group-test $(VENV)/.group-coverage $(VENV)/.adapters
	@$(call INSTRUMENTED,$(COVERAGE),-O1 -g --coverage -fprofile-update=atomic)
	@find $(COVERAGE)/cmake -name "*.gcda" -delete; rm -f $(COVERAGE)/python
	@failed=; \
	$(abspath $(BIN))/ctest --test-dir $(COVERAGE)/cmake --output-on-failure -R "$(CPP_TESTS)" || failed=" ctest"; \
	for suite in $(COVERAGE_SUITE); do \
	  echo "$$suite"; \
	  COVERAGE_FILE=$(COVERAGE)/python $(call PYTEST_IN_SITE,$(COVERAGE)) -q -n 2 --dist loadgroup -m "not serial" $$suite \
	    --cov=$(COVERAGE)/site/torchops --cov-append --cov-report= $(PYTEST_FLAGS) || [ $$? -eq 5 ] || failed="$$failed $$suite"; \
	done; \
	{ $(COVERAGE_REPORT); } || failed="$$failed coverage-report"; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

coverage-report:
	@$(COVERAGE_REPORT)

demo: $(VENV)/.library $(VENV)/.group-demo
	$(RUN) examples/demo.py

# docs/ladder.md: LADDER_FLAGS=--save puts the figures where the page shows them.
LADDER_FLAGS ?=
ladder: build $(VENV)/.group-demo
	$(RUN) examples/ladder/climb.py --device cpu $(LADDER_FLAGS)

# The picture in docs/in_place_and_autograd.md. Needs the program dot of Graphviz.
graph: build $(VENV)/.group-graph
	$(RUN) examples/backward_graph.py

# A missed target is a line of a table at the end; the status is 1 when an operator of ours failed or was wrong.
BENCH = $(RUN) -m benchmarks run $(BENCH_OUTPUT:%=--output %) $(BENCH_FLAGS) || failed=", benchmarks run"; \
	$(RUN) -m benchmarks memory $(BENCH_OUTPUT:%=--output %) || failed="$$failed, benchmarks memory"
bench: build $(VENV)/.group-demo
	@failed=; \
	$(BENCH); \
	[ -z "$$failed" ]

test-cuda-build:
	$(MAKE) cuda-checks CUDA=ON KERNELS=REDUCED CHECK=ON TARGETS="$(CUDA_TARGETS)" VENV=.venv-cuda \
	  TORCH_VERSION=$(CUDA_TORCH_VERSION) BUILD=build/cuda

cuda-checks: build
	$(abspath $(BIN))/ctest --test-dir $(BUILD) --output-on-failure -R '^(refusal|plan)$$'
	$(RUN) -m pytest -n 2 --dist loadgroup -m "not serial" $(PYTEST_FLAGS) $(CUDA_SUITE)

# On a GPU machine everything is taken as it is found: the environment of $(PYTHON), which must hold torch, the groups
# test and cuda of pyproject.toml and nvcc on the path. Nothing is installed into it, and nothing is downloaded.
# Both run in the build folder, where the source folder torchops/ does not hide the package.
GPU_PATH = PYTHONPATH="$(abspath $(GPU_BUILD))/site:$(CURDIR):$$PYTHONPATH"
GPU_PYTEST = $(GPU_PATH) $(PYTHON) -m pytest -k cuda
# Tests in several processes, if there is pytest-xdist.
GPU_JOBS ?= $(shell $(PYTHON) -c "import xdist" 2>/dev/null && echo "-n 8 --dist loadgroup")

gpu-build:
	@mkdir -p $(GPU_BUILD)
	@rm -rf $(GPU_BUILD)/site
	$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --no-index --target $(GPU_BUILD)/site . \
	  -C build-dir=$(GPU_BUILD)/cmake \
	  -C cmake.define.TORCHOPS_CUDA=ON -C cmake.define.TORCHOPS_BUILD_TESTS=ON -C cmake.define.TORCHOPS_WERROR=ON \
	  -C cmake.define.TORCHOPS_SERVING_DEVICE=cuda

# The names of tests that run on the device hold "cuda".
test-gpu: gpu-build
	@failed=; cd $(GPU_BUILD); \
	$(GPU_PYTEST) $(GPU_JOBS) -m "not serial" $(PYTEST_FLAGS) $(CURDIR)/test | tee pytest.log || failed=yes; \
	{ $(GPU_PYTEST) -m serial $(PYTEST_FLAGS) $(addprefix $(CURDIR)/,$(SERIAL_SUITE)) | tee pytest-serial.log; } || [ $$? -eq 5 ] || failed=yes; \
	ctest --test-dir cmake --output-on-failure | tee ctest.log || failed=yes; \
	$(call SUMMARY)

ladder-gpu: gpu-build
	cd $(GPU_BUILD); $(GPU_PATH) $(PYTHON) $(CURDIR)/examples/ladder/climb.py --device cuda $(LADDER_FLAGS)

# BENCH_OUTPUT is a folder seen from here, and not from the build folder.
GPU_BENCH = $(PYTHON) -m benchmarks run --device cuda $(if $(BENCH_OUTPUT),--output $(abspath $(BENCH_OUTPUT))) $(BENCH_FLAGS) || failed=", benchmarks run"; \
	$(PYTHON) -m benchmarks memory --device cuda $(if $(BENCH_OUTPUT),--output $(abspath $(BENCH_OUTPUT))) || failed="$$failed, benchmarks memory"
bench-gpu: gpu-build
	@failed=; cd $(GPU_BUILD); export $(GPU_PATH); \
	$(GPU_BENCH); \
	[ -z "$$failed" ]

# All pages, and the API reference from the docstrings, whose examples are run. A host gets build/site as it is, built with
# GITHUB_REPOSITORY=<owner>/<name>: links to files that are no pages lead there, and otherwise into this folder.
SPHINX = $(RUN) -m sphinx -q -W --keep-going -c docs/site -d build/pages
site: build $(VENV)/.group-site
	$(SPHINX) -b html . build/site
	TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 $(SPHINX) -b doctest . build/doctest
	@grep -E "^ *[1-9][0-9]* tests$$" build/doctest/output.txt  # a block that sphinx does not take for an example is none

# Everything in benchmarks/results that this machine can measure, on one revision, and the tables and pictures made of it.
# A copy without a history is told it: BENCH_REVISION=<hash>, or <hash of src>,<hash of torchops>. With BENCH_OUTPUT all goes to
# another folder, and no page is written.
# What fails is named at the end, and the status is 1; the rest is measured all the same.
RESULTS = $(abspath $(or $(BENCH_OUTPUT),benchmarks/results))
MACHINE = $$($(1) -c "import torch; from benchmarks import machine as m; print(m.slug(m.describe(torch.device('$(2)'))))")
MEASURE = failed=; measure() { "$$@" || failed="$$failed, $${*:2:3}"; }

committed:
	@[ -n "$$BENCH_REVISION" ] || git diff --quiet HEAD -- src torchops || { echo "commit first: results name the revisions of src and torchops"; exit 1; }

results: BENCH_FLAGS := --device cpu
results: committed build $(VENV)/.group-demo $(VENV)/.adapters
	@$(MEASURE); here=$(RESULTS)/$(call MACHINE,$(RUN),cpu); mkdir -p $$here; \
	$(BENCH); \
	measure $(RUN) -m benchmarks gates --device cpu --json $$here/gates.json; \
	measure $(RUN) -m benchmarks triangle --device cpu --json $$here/triangle.json; \
	measure $(RUN) -m benchmarks pair_layer --device cpu --sizes 128 --tasks forward --json $$here/pair_layer.json; \
	measure $(RUN) -m benchmarks boltz --device cpu --json $$here/boltz.json; \
	measure $(RUN) examples/ladder/climb.py --device cpu --output $(RESULTS); \
	measure $(RUN) -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_ddp.py --bench --json $$here/allreduce.json; \
	$(if $(BENCH_OUTPUT),,measure $(RUN) -m benchmarks render;) \
	[ -z "$$failed" ] || { echo "failed:$${failed#,}"; exit 1; }

# dense by single calls and on a hot chip, where each contender takes four seconds.
DENSE_SINGLE := 1048576,128,128 65536,256,1024 65536,512,512 16384,1024,4096 4096,4096,4096 8192,8192,8192
DENSE_HOT := 65536,256,1024 4096,4096,4096 8192,8192,8192
DENSE_IN_REGIME = $(PYTHON) -m benchmarks run -o dense -m cuda,compile,eager --device cuda --dtype bfloat16 --output $(RESULTS)

# What takes several GPUs is measured by hand: all-reduce (docs/ring_allreduce.md) and sharded pairs (docs/sharded_pairs.md).
results-gpu: committed gpu-build ptx
	@$(MEASURE); cd $(GPU_BUILD); export $(GPU_PATH); \
	here=$(RESULTS)/$(call MACHINE,$(PYTHON),cuda); mkdir -p $$here; \
	$(GPU_BENCH); \
	measure $(DENSE_IN_REGIME) --regime single $(DENSE_SINGLE:%=--shape %); \
	measure $(DENSE_IN_REGIME) --regime hot $(DENSE_HOT:%=--shape %); \
	for name in triangle triangle_attention gates stages power trimul eight_bits boltz; do measure $(PYTHON) -m benchmarks $$name --json $$here/$$name.json; done; \
	measure $(PYTHON) -m benchmarks triangle --sections generic,dtypes --json $$here/triangle-paths.json; \
	measure $(PYTHON) -m benchmarks gates --path cublas --json $$here/gates-by-cublas.json; \
	measure $(PYTHON) -m benchmarks gates --path portable --json $$here/gates-portable.json; \
	measure $(PYTHON) -m benchmarks pair_layer --eager 384,768,1024 --compile 384,768,1024 --expert 384,768,1024 --json $$here/pair_layer.json; \
	measure $(PYTHON) $(CURDIR)/examples/ladder/climb.py --device cuda --output $(RESULTS); \
	measure $(PYTHON) $(CURDIR)/examples/models/measure.py --output $(RESULTS); \
	measure $(PYTHON) $(CURDIR)/examples/ptx/ptx_errors.py --json $$here/ptx.json; \
	$(if $(BENCH_OUTPUT),,measure $(PYTHON) -m benchmarks render;) \
	[ -z "$$failed" ] || { echo "failed:$${failed#,}"; exit 1; }

# Needs nvcc and ptxas, and neither torch nor a GPU. -v tells the registers that a kernel takes.
PTX_BUILD := build/ptx
PTX_ARCH ?= sm_90
PTXAS_FLAGS ?= -v
ptx:
	@mkdir -p $(PTX_BUILD)
	nvcc -ptx -std=c++17 -arch=compute_80 examples/ptx/sigmoid.cu -o $(PTX_BUILD)/sigmoid.ptx
	@for file in $(PTX_BUILD)/sigmoid.ptx examples/ptx/*.ptx; do \
	  echo "ptxas $$file"; \
	  ptxas -arch=$(PTX_ARCH) $(PTXAS_FLAGS) $$file -o $(PTX_BUILD)/$$(basename $$file .ptx).cubin; \
	done

CXX_FILES = $(shell find src test/cpp examples/serving examples/ladder -name "*.h" -o -name "*.cpp" -o -name "*.cu" -o -name "*.cuh")
PY_DIRS := cmake release torchops test examples benchmarks

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

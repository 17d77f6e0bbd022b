# make demo: train a small model with elastic pipelines. make test: everything that checks this checkout.
# make gpu: what needs a GPU.

PYTHON ?= python3
VENV ?= .venv
# Any build of torch from 2.11 on; one that is in the environment already is kept.
TORCH ?= torch==2.13.0
# Their models are tested behind cuts. Alone, as they ask for a build of torch with CUDA, and in a folder of their own,
# where nobody else finds them: without such a build they cannot be imported as they are.
VISION ?= torchvision==0.28.0
TIMM ?= timm==1.0.31
# In a folder of its own, too: transformers imports it, with warnings, wherever it is found.
TORCHAO ?= torchao==0.18.0
BIN := $(VENV)/bin
# Where nvcc is, CUDA code is compiled, so its machine code and the run-time compilation are checked too.
comma := ,
EXTRAS := dev$(if $(shell command -v nvcc),$(comma)cuda-check)
NATIVE := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml

# Each takes an hour at most. Which package a part belongs to is in CONTRIBUTING.md.
NIGHTLY := nightly-slow nightly-ranks nightly-composes nightly-guides nightly-order nightly-streams nightly-faults \
  nightly-build

# Whoever checks the code has its warnings as errors; whoever only builds it has another compiler, with other warnings.
test lint types native-test sanitize unit order promises older-torch mutants seeds $(NIGHTLY): export AVGPIPE_WERROR := 1

ON_GPU := benchmarks/gpu_*.py tests/runtime/test_cuda.py tests/elastic/test_cuda.py tests/avgpipe_ext/test_cuda.py \
  tests/happens_before/on_gpu.py benchmarks/one_card/*.py benchmarks/common/gpu_trace.py

# Environments with torch, one for each version of Python that wheels are made for; their torch needs no CUDA.
PYTHONS ?= $(BIN)/python

.PHONY: demo test lint types unit order promises mutants seeds native-test sanitize docs wheels wheels-test gpu one-card \
  older-installed older-torch streams packages nightly-all $(NIGHTLY) clean

demo: $(VENV)/installed
	rm -rf runs/demo
	$(BIN)/avgpipe train awd-lstm --preset tiny --stages 2 --pipelines 2 --micro-batches 4 --out runs/demo

test: $(VENV)/installed
	$(MAKE) -j2 --output-sync lint types native-test
	$(MAKE) unit order

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m tools.words
	$(BIN)/python -m tools.words --commits
	$(BIN)/clang-format --dry-run --Werror $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu')

# Programs that only a GPU runs are at least of the right types.
types: $(VENV)/installed
	$(BIN)/mypy
	$(BIN)/mypy --follow-imports silent --allow-untyped-defs --allow-untyped-calls --no-warn-return-any $(ON_GPU)

native-test: $(VENV)/installed
	$(BIN)/cmake build/native
	$(BIN)/cmake --build build/native
	$(BIN)/ctest --test-dir build/native --output-on-failure

# The C++ tests with AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(VENV)/installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/cmake -S . -B build/sanitize -G Ninja -DAVGPIPE_CUDA=0 \
	    -DAVGPIPE_SANITIZE=address,undefined
	$(BIN)/cmake --build build/sanitize
	$(BIN)/ctest --test-dir build/sanitize --output-on-failure

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# What starts no process, two at a time.
unit: $(VENV)/installed
	$(PYTEST) --part unit

# What runs several pipelines, replicas, versions or stages, as on a device with streams: is everything in order there?
order: $(VENV)/installed
	$(PYTEST) --part order --happens-before

# With real processes: a test for each promise of the guides, and each command through its entry point.
promises: $(VENV)/installed
	$(PYTEST) --part promises --dist loadfile

# Each order of the runtime removed in turn: is it missed?
mutants: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.happens_before.mutants

# Training on the simulated device in a thousand orders of each kind, and each missing order seen in some.
seeds: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulated_device.seeds --seeds 1000 --processes 2
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulated_device.seeds --mutants --seeds 20

nightly-all:
	@for part in $(NIGHTLY); do \
	  begin=$$(date +%s); $(MAKE) $$part || failed="$$failed $$part"; \
	  echo "$$part: $$(( $$(date +%s) - begin )) s"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

nightly-slow nightly-ranks nightly-composes: nightly-%: $(VENV)/installed
	$(PYTEST) --part $*

# The page of avgpipe report is opened in a browser, by a test that says so where there is none.
nightly-guides: $(VENV)/installed docs
	command -v chromium > /dev/null || (timeout 300 apt-get -q update && DEBIAN_FRONTEND=noninteractive \
	  timeout 600 apt-get -q install -y --no-install-recommends chromium fonts-dejavu-core) > /dev/null 2>&1 || \
	  echo "chromium cannot be installed: no page is opened in a browser"
	$(PYTEST) --part guides

# What `order` has no time for.
nightly-order: $(VENV)/installed
	$(PYTEST) --happens-before -m "not host" $(addprefix --part ,unit promises slow ranks composes) \
	  tests/runtime tests/checkpoint tests/systems

nightly-streams: $(VENV)/installed
	$(MAKE) --keep-going mutants seeds streams

streams: $(VENV)/installed
	$(PYTEST) --part streams

# What nobody has thought of: faults at places that a new seed draws, which is printed.
nightly-faults: $(VENV)/installed
	$(BIN)/avgpipe bench faults --seconds 600

# What leaves this machine: sanitizers, wheels where there is no compiler, an older torch, the GPU suite without a GPU.
nightly-build: $(VENV)/installed
	$(MAKE) --keep-going sanitize older-torch packages

packages: $(VENV)/installed
	$(MAKE) wheels wheels-test VARIANTS=cpu PYTHONS="$(BIN)/python $(if $(PYTHON312),$(OLDER)/bin/python)"
	$(if $(PYTHON312),$(BIN)/python tools/without_compilers.py dist/*+cpu-cp312-*.whl --python $(OLDER)/bin/python)
	$(if $(PYTHON312),OMP_NUM_THREADS=1 $(OLDER)/bin/python benchmarks/gpu_suite.py --no-build)

# One library of operators serves every torch from 2.11 on and every Python: the one built for VENV runs under an older
# torch too, a CUDA build, where the CUDA operators must be registered when nvcc was there to compile them. What is no
# operator is built for each Python.
PYTHON312 ?= $(shell for python in python3.12 "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do \
  "$$python" --version > /dev/null 2>&1 && command -v "$$python" && break; done)
OLDER := .venv-torch211
UNDER_OLDER := $(addprefix tests/,runtime/test_batch.py runtime/test_context.py runtime/test_auto.py runtime/test_mesh.py \
  avgpipe_ext/test_library.py)

ifeq ($(PYTHON312),)
older-installed older-torch:
	@echo "Python 3.12 is not here: the check with torch 2.11 is left out"
else
older-installed: $(OLDER)/installed  # some gigabytes

$(OLDER)/installed:
	$(PYTHON312) -m venv $(OLDER)
	$(OLDER)/bin/pip install -q torch==2.11.0 numpy typer rich matplotlib \
	  pytest==9.2.0 pytest-timeout==2.4.0 pytest-xdist==3.8.0 hypothesis==6.170.15
	touch $@

older-torch: $(VENV)/installed $(OLDER)/installed
	$(BIN)/cmake -S . -B build/python312 -G Ninja -DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" -DAVGPIPE_CUDA=0 \
	  -DPython_EXECUTABLE="$(abspath $(OLDER))/bin/python" -DAVGPIPE_BUILD_TESTS=OFF
	$(BIN)/cmake --build build/python312 --target _native
	PYTHONPATH=python:. OMP_NUM_THREADS=1 $(OLDER)/bin/python -m tests.avgpipe_ext.older_torch
	PYTHONPATH=python:. OMP_NUM_THREADS=1 $(OLDER)/bin/python -m pytest -m "not slow" $(UNDER_OLDER)
endif

# The documentation as a site, in build/site.
docs: $(VENV)/installed
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install -q --no-build-isolation -e '.[docs]'
	$(BIN)/mkdocs build --quiet

# The source distribution and the wheels, in dist: for CPU, and for CUDA where nvcc is.
wheels: $(VENV)/installed
	rm -rf dist
	$(BIN)/python tools/wheels.py $(addprefix --python ,$(PYTHONS)) $(if $(VARIANTS),--variants $(VARIANTS))

# Those of dist for the Python of VENV, each installed where there is no compiler, as root.
wheels-test:
	for wheel in dist/*-$$($(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl; do \
	  $(BIN)/python tools/without_compilers.py "$$wheel" --torch "$(TORCH)" || exit 1; \
	done

$(VENV)/installed: $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2> /dev/null || $(BIN)/pip install -q "$(TORCH)" numpy
	$(BIN)/pip install -q "setuptools>=77" wheel "cmake>=3.25.2" ninja "pybind11>=3"
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/pip install -q --no-build-isolation -e '.[$(EXTRAS)]'
	$(BIN)/pip install -q --no-deps --upgrade --target $(VENV)/vision "$(VISION)" "$(TIMM)"
	$(BIN)/pip install -q --no-deps --upgrade --target $(VENV)/torchao "$(TORCHAO)"
	touch $@

# With the torch of PYTHON, and nothing installed: on a machine with a GPU, everything that needs it, three quarters of an
# hour in stages. make gpu STAGE=2 runs one of them.
gpu:
	$(PYTHON) benchmarks/gpu_suite.py $(if $(STAGE),--stage $(STAGE))

# Of these, what several pipelines gain on one GPU: within nine minutes on a fresh machine, the build included.
one-card:
	$(PYTHON) benchmarks/gpu_suite.py --only configure build "one worker" quarters $(if $(OUT),--out $(OUT))

clean:
	rm -rf build dist runs $(VENV)

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
ORDERED := $(addprefix tests/runtime/test_,$(addsuffix .py,auto elastic evaluate on_ranks schedules \
    shared_batch skips spread streams warmup)) tests/checkpoint/test_checkpoint.py
NATIVE := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml

# Whoever checks the code has its warnings as errors; whoever only builds it has another compiler, with other warnings.
test lint types native-test sanitize unit order order-slow mutants slow nightly: export AVGPIPE_WERROR := 1

ON_GPU := benchmarks/gpu_*.py tests/runtime/test_cuda.py tests/elastic/test_cuda.py tests/avgpipe_ext/test_cuda.py \
  tests/happens_before/on_gpu.py

# Environments with torch, one for each version of Python that wheels are made for; their torch needs no CUDA.
PYTHONS ?= $(BIN)/python

.PHONY: demo test lint types unit order order-slow mutants slow nightly native-test sanitize docs wheels wheels-test gpu \
  clean

demo: $(VENV)/installed
	rm -rf runs/demo
	$(BIN)/avgpipe train awd-lstm --preset tiny --stages 2 --pipelines 2 --micro-batches 4 --out runs/demo

test: lint types native-test sanitize unit order

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
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

# Quick tests, two at a time.
unit: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow"

# What runs several pipelines, replicas, versions or stages, as on a device with streams: is everything in order there?
order: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --happens-before -m "not slow and not host" $(ORDERED)

# The same for all tests of the runtime, of checkpoints and of systems, the slow ones too.
order-slow: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --happens-before -m "not host" tests/runtime tests/checkpoint tests/systems

# Each order of the runtime removed in turn: is it missed?
mutants: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.happens_before.mutants

slow: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

# Training on the simulated device in a thousand orders of each kind, and each missing order seen in some.
nightly: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulated_device.seeds --seeds 1000 --processes 2
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulated_device.seeds --mutants --seeds 20

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

# With the torch of PYTHON, and nothing installed: on a machine with a GPU, everything that needs it, half an hour in six
# stages. make gpu STAGE=2 runs one of them.
gpu:
	$(PYTHON) benchmarks/gpu_suite.py $(if $(STAGE),--stage $(STAGE))

clean:
	rm -rf build dist runs $(VENV)

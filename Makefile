PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
SOURCES := $(wildcard cython_ext/*.pyx cython_ext/*.pxd cython_ext/*.h cython_ext/*.c)

.PHONY: demo test test-all test-debug test-matrix bench bench-recorded results quality style build wheel clean

# The environment: everything the project needs, pinned by constraints.txt, and the package itself.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

build: $(VENV)/.installed

demo: build
	$(BIN)/python examples/demo.py

test: build
	$(BIN)/python -m pytest -m "not slow and not demo" -n 2

test-all: build
	$(BIN)/python -m pytest -n 2

# The structures again, compiled with bounds checks into a copy of the tree.
test-debug: build
	rm -rf build/checked && mkdir -p build/checked
	cp -r setup.py pyproject.toml README.md LICENSE cython_ext hf_retrieval_assist tests build/checked
	find build/checked -name '*.so' -delete
	cd build/checked && HFRA_DEBUG=1 ../../$(BIN)/python setup.py -q build_ext --inplace
	cd build/checked && ../../$(BIN)/python -m pytest -q -m "not slow and not demo" tests/structures

# The contract of `generate` under the oldest supported transformers, beside the pinned torch.
.venv-5.17/.installed: constraints.txt pyproject.toml
	test -x .venv-5.17/bin/python || $(PYTHON) -m venv .venv-5.17
	sed 's/^transformers==.*/transformers==5.17.0/' constraints.txt > .venv-5.17/constraints.txt
	.venv-5.17/bin/python -m pip install --quiet --constraint .venv-5.17/constraints.txt pytest --editable .
	touch $@

test-matrix: build .venv-5.17/.installed
	.venv-5.17/bin/python -m pytest -q -m "not slow" tests/test_batches.py tests/test_generate_contract.py tests/test_generate_inputs.py tests/test_candidate_generator.py

# What RESULTS.md shows was written with OUT=benchmarks/results.
OUT ?= benchmarks/out
bench: build
	$(BIN)/python -m benchmarks --plot --output $(OUT)

# The two benchmarks that recorded text matters to, over recordings in TRACES.
bench-recorded: build
	$(BIN)/python -m benchmarks structures acceptance --text $(TRACES) --traces $(TRACES) --plot --output $(OUT)/recorded

# RESULTS.md's tables, from what is in benchmarks/results.
results: build
	$(BIN)/python -m benchmarks.tables

quality: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: build
	$(PIP) install --quiet build
	$(BIN)/python -m build

clean:
	rm -rf build dist *.egg-info hf_retrieval_assist/*.so

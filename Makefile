# Everything runs in .venv, which the first target that needs it sets up; later runs reuse it. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test lint format readme gpu-test gpu-record clean

BIN := .venv/bin
# A set-up is good for one pyproject.toml: another one updates the environment in place.
READY := .venv/ready-$(shell sha256sum pyproject.toml | cut -c1-12)
CUDA_SOURCES = $(shell find sglang_router_ext -name '*.cuh')
ARGS ?=

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14
	@echo "demo and test set up .venv first (SGLang and PyTorch, some 11 GB, 3 to 10 minutes once)."

demo: $(READY) ## show stock SGLang and the plugin side by side (ARGS="--json", ...)
	@$(BIN)/sglang-router-ext demo $(ARGS)

test: lint ## the CPU lane: linters, types, tests/cpu (ARGS="-k name", ...)
	@$(BIN)/python -m pytest tests/cpu $(ARGS)

lint: $(READY) ## ruff, mypy, clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run -Werror $(CUDA_SOURCES)

format: $(READY) ## rewrite Python and CUDA sources in the one style
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(CUDA_SOURCES)

readme: $(READY) ## write the generated parts of README.md
	@$(BIN)/python -m sglang_router_ext.readme README.md docs/measured.md

gpu-test: $(READY) ## tests/gpu; needs a CUDA GPU
	@$(BIN)/python -m pytest tests/gpu $(ARGS)

gpu-record: $(READY) ## check every design on this GPU, measure, record, and update README.md
	@$(BIN)/sglang-router-ext check --record
	@$(BIN)/sglang-router-ext bench --record
	@$(BIN)/sglang-router-ext bench --record --case deepseek-v3-ungrouped --case deepseek-v4.1-flash --case kimi-k2 --case glm-4.6-bf16
	@$(BIN)/sglang-router-ext demo --record
	@$(BIN)/sglang-router-ext demo --record --layers 43 --moe-intermediate 128 --in-memory
	@$(BIN)/sglang-router-ext demo --record --layers 8 --moe-intermediate 128 --in-memory --quantization fp8 --moe-runner-backend router_ext
	@$(BIN)/python -m sglang_router_ext.readme README.md docs/measured.md

clean: ## remove .venv, caches and builds
	rm -rf .venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@python=""; \
	for name in python3.11 python3.12 python3.13 python3; do \
	  if "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python="$$name"; break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "make: no Python of at least 3.11 found (tried python3.11, 3.12, 3.13, python3)" >&2; exit 1; fi; \
	echo "Setting up .venv with $$("$$python" --version): SGLang, PyTorch and the tools; 3 to 10 minutes, once."; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1 && ! "$$python" -m venv --clear .venv; then \
	  echo "make: $$python cannot create a virtual environment (Debian, Ubuntu: install python3-venv)" >&2; exit 1; \
	fi; \
	( while sleep 30 >/dev/null 2>&1; do echo "set-up: $$SECONDS s so far"; done ) & beat=$$!; \
	trap 'kill $$beat 2>/dev/null || true' EXIT; \
	$(BIN)/python -m pip install --progress-bar on -e '.[dev]'; \
	rm -f .venv/ready-*; touch $@; \
	echo "Set-up took $$SECONDS s."

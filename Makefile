# Every target sets up what it needs (see scripts/setup) and is quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help run sim test test-long test-peers check docs wheel bench clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

run: setup ## The main job: a whole RL run on this machine, until it has learnt its task
	$(BIN)/holdfast run

sim: setup ## Simulate every protocol, and show that broken ones are caught
	$(BIN)/holdfast sim --all --seeds 200
	PYTHONPATH=tests $(BIN)/python -m broken

test: check docs setup-servers setup-sdks ## What CI runs: checks, the site and all quick tests
	$(BIN)/python -m pytest -q -m "not long" -n 4 --dist loadfile --no-loadscope-reorder
	$(BIN)/holdfast sim --all --seeds 300 --fresh
	PYTHONPATH=tests $(BIN)/python -m broken --fresh --variants 4

test-long: check setup-long setup-sdks ## The full numbers: matrices, storms, thousands of seeds
	$(BIN)/python -m pytest -q --timeout 1800 -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/holdfast sim --all --seeds 2000 --fresh
	PYTHONPATH=tests $(BIN)/python -m broken

test-peers: setup ## vLLM, TransferQueue and verifiers, in environments of their own (6 GB)
	@PYTHON=$(PYTHON) scripts/setup-peers
	.venv-peers/bin/python -m pytest -q tests/peers --ignore tests/peers/test_verifiers.py \
		--ignore tests/peers/transferqueue
	@PYTHON=$(PYTHON) scripts/setup-peers transferqueue
	@set -e; for version in 0.1.8 0.1.9 0.1.10 0.1.11; do \
		echo "TransferQueue $$version"; \
		export PYTHONPATH=.venv-peers-transferqueue/versions/$$version TQ_VERSION=$$version; \
		.venv-peers-transferqueue/bin/python -m pytest -q tests/peers/transferqueue; done
	@PYTHON=$(PYTHON) scripts/setup-peers verifiers
	.venv-peers-verifiers/bin/python -m pytest -q tests/peers/test_verifiers.py
	@PYTHON=$(PYTHON) scripts/setup-peers verifiers-0.1
	.venv-peers-verifiers-0.1/bin/python -m pytest -q tests/peers/test_verifiers.py

check: setup ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: ## Build the site from docs/ and the docstrings, into site/
	@PYTHON=$(PYTHON) scripts/setup docs
	@# Not --quiet: that hides the warnings from --strict, too.
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

wheel: setup ## Build a wheel for a release, into dist/
	$(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist .

bench: setup-servers setup-proxies ## Measure; prints tables like those in docs/BENCHMARKS.md
	$(BIN)/python -m benchmarks.ledger
	$(BIN)/python -m benchmarks.weights
	$(BIN)/python -m benchmarks.transfer
	$(BIN)/python -m benchmarks.sample_queue
	$(BIN)/python -m benchmarks.rendezvous
	$(BIN)/python -m benchmarks.gateway
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.run

clean: ## Remove the virtual environment and all caches
	rm -rf $(VENV) .venv-docs .venv-sdks .venv-peers .venv-peers-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache site

.PHONY: setup setup-servers setup-sdks setup-proxies setup-long
setup:
	@PYTHON=$(PYTHON) scripts/setup packages

setup-servers: setup
	@PYTHON=$(PYTHON) scripts/setup servers

setup-proxies: setup
	@PYTHON=$(PYTHON) scripts/setup proxies

setup-long: setup
	@PYTHON=$(PYTHON) scripts/setup long

setup-sdks:
	@PYTHON=$(PYTHON) scripts/setup-sdks

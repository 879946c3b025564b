# `make demo` and `make test` install what they need into .venv and do the job.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS ?= aot,test

# Absent GPUs are compiled for with the CPU as JAX's own platform.
export JAX_PLATFORMS ?= cpu

.PHONY: demo test quick lint clean

# Train under a policy, then compare policies on a GPU that is not here.
demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

test: $(STAMP)
	$(BIN)/python -m pytest -q --numprocesses=2 --durations=10

# What a new Python or JAX is likely to break, without whole models and absent GPUs.
SLOWER := gpt attention cli training_loop benchmarks vit moe exact rewrite_foreign executor_manual \
	executor_revolve
quick: $(STAMP)
	$(BIN)/python -m pytest -q --numprocesses=2 -m "not slow and not gpu and not aot" \
		$(SLOWER:%=--ignore=tests/test_%.py)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv .venv-newest build dist .pytest_cache .ruff_cache runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/.installed-dev: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

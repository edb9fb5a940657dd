# Every target makes its environment itself: `make demo` works on a fresh machine.
# PYTHON chooses the interpreter the environment is made with, VENV where it lies.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 0
COUNT ?= 2000
# pip does not compile what it installs (--no-compile): Python keeps the byte code of each first import.
unexport PYTHONDONTWRITEBYTECODE
TRANSFORMERS_oldest := 5.21.0
TRANSFORMERS_newest := 5.24.0

.PHONY: help demo test test-all oldest newest versions clients check format parity exact bench gpu tables docs release-check clean
.DEFAULT_GOAL := help

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 16

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Making the environment in $(VENV): a minute or two, once."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "hfgen needs Python 3.10 or later; say which with make PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --editable '.[dev]'
	@touch $@

# An environment that has the packages of VENV besides its own, which come first.
PACKAGES := import sysconfig; path = sysconfig.get_path("purelib")
define on_top
$(PYTHON) -m venv $(1) && \
	$(BIN)/python -c '$(PACKAGES); print(f"import site; site.addsitedir({path!r})")' > $(1)/below && \
	mv $(1)/below "$$($(1)/bin/python -c '$(PACKAGES); print(path)')/below.pth"
endef

demo: $(VENV)/installed ## Complete code with the built-in model, beside upstream.
	@$(BIN)/hfgen demo

test: $(VENV)/installed ## Run the tests: of each, 2 cases or an eighth, which SEED chooses.
	@$(BIN)/python -m pytest --numprocesses 2 --sample 2 --sample-seed=$(SEED)

test-all: $(VENV)/installed ## Run every case of every test.
	@$(BIN)/python -m pytest --numprocesses 2

oldest: ## Run all tests, or TESTS, with the oldest transformers that passes them all.
newest: ## Run all tests, or TESTS, with the newest transformers.
oldest newest: %: $(VENV)-%/installed
	@$(VENV)-$*/bin/python -m pytest --numprocesses 2 -W default $(TESTS)  # transformers' own warnings are no errors

$(VENV)-oldest/installed $(VENV)-newest/installed: $(VENV)-%/installed: $(VENV)/installed
	@echo "Making the environment in $(VENV)-$*."
	@$(call on_top,$(VENV)-$*)
	@$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		transformers==$(TRANSFORMERS_$*) --editable .
	@touch $@

versions: $(VENV)/installed ## Run the core of the tests with each Python, transformers and torch that can be had.
	@$(BIN)/python scripts/check_versions.py

clients: $(VENV)-clients/installed ## Run client libraries (PEFT, TRL, lm_eval, …) with and without hfgen.
	@# Their warnings are theirs. What measures how long others wait runs alone.
	@$(VENV)-clients/bin/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder \
		-W default -m "not alone" tests/clients
	@$(VENV)-clients/bin/python -m pytest -W default -m alone tests/clients/test_serving*

$(VENV)-clients/installed: $(VENV)/installed
	@echo "Making the environment in $(VENV)-clients."
	@$(call on_top,$(VENV)-clients)
	@$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --editable '.[clients]'
	@# It declares older versions of rich and jiter than those that it runs with here.
	@$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --no-deps instructor docstring-parser
	@# It declares transformers before 5.3.
	@$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --no-deps kvpress cachetools fire termcolor
	@touch $@

check: $(VENV)/installed ## Check format, lint and types.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(VENV)/installed ## Format, and fix what the linter can.
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

parity: $(VENV)/installed ## Compare with upstream, caches, modes and the engine on COUNT random cases each, from SEED.
	@$(BIN)/python -m tests.parity.sweep --seed $(SEED) --count $(COUNT)
	@$(BIN)/python -m tests.parity.caches --seed $(SEED) --count $(COUNT)
	@$(BIN)/python -m tests.parity.invariants --seed $(SEED) --count $(COUNT)
	@$(BIN)/python -m tests.parity.speculation --seed $(SEED) --count $(COUNT)
	@$(BIN)/python -m tests.parity.rows --seed $(SEED) --count $(COUNT)
	@$(BIN)/python -m tests.parity.grammars --seed $(SEED)
	@$(BIN)/python -m tests.parity.engine --seed $(SEED) --count $(COUNT)

exact: $(VENV)/installed ## Compare the bits of rows in all ways to decode them, on ten families.
	@$(BIN)/python -m tests.parity.exact

bench: $(VENV)/installed ## Measure beside upstream; tables and plots in benchmarks/results.
	@$(BIN)/python -m benchmarks.overhead
	@$(BIN)/python -m benchmarks.speculation
	@$(BIN)/python -m benchmarks.speculation --optimize
	@$(BIN)/python -m benchmarks.caches
	@$(BIN)/python -m benchmarks.quantized_cache
	@$(BIN)/python -m benchmarks.grammar
	@$(BIN)/python -m benchmarks.logprobs
	@$(BIN)/python -m benchmarks.stopping
	@$(BIN)/python -m benchmarks.scheduler
	@$(BIN)/python -m benchmarks.scale
	@$(BIN)/python -m benchmarks.engine
	@$(BIN)/python -m benchmarks.execution
	@$(BIN)/python -m benchmarks.peers
	@$(BIN)/python -m benchmarks.first_call
	@$(BIN)/python -m benchmarks.sampling
	@$(BIN)/python -m benchmarks.exact
	@$(BIN)/python scripts/update_readme_tables.py

tables: $(VENV)/installed ## Write the tables of README and docs/ from benchmarks/results.
	@$(BIN)/python scripts/update_readme_tables.py

docs: $(VENV)/installed ## Build the site of docs/ in build/site; a wrong link is an error.
	@$(BIN)/python -m mkdocs build --strict

release-check: $(VENV)/installed ## Build the wheel, install it in an empty environment, run the demo from it.
	@$(BIN)/python scripts/check_release.py

gpu: $(VENV)/installed ## On a machine with a GPU: its tests, and the benchmarks beside upstream.
	@$(BIN)/python -m benchmarks.gpu

clean: ## Remove the environments and all caches.
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest $(VENV)-clients .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -prune -exec rm -rf {} +

# memfit: everything is reached from here. `make` alone lists what there is.

VENV   := .venv
BIN    := $(VENV)/bin
# The first Python on the path that is new enough; `make PYTHON=/path/to/python ...` says otherwise.
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$name && break; done)
# Modules are compiled when they are first imported, which most of these never are.
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile \
	-c requirements.lock

RUN_EXTRAS := plots,html,workloads
DEV_EXTRAS := $(RUN_EXTRAS),completion,pictures,transformers,lightning,dreams,trident,chemistry,tensorboard,dev

# The example of `make run`: the whole idea in one command.
# Waiting threads sleep, so that another program on the machine does not slow training tenfold.
RUN := OMP_WAIT_POLICY=PASSIVE $(BIN)/memfit train conve --dataset umls --output-dir runs/conve-umls --overwrite \
	--budget-fraction 0.75 --batch-size 256 --learning-rate 0.005 --learning-rate-decay 0.98 \
	--output-channels 16 --input-dropout 0.1 --feature-map-dropout 0.1 --output-dropout 0.2 \
	--num-epochs 70 --eval-every 10 --checkpoint-frequency 10

# Tests start many processes, and each would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
# One thread per process: the tests run side by side and small tensors gain nothing from more.
TEST_WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_WORKERS) --dist worksteal --durations=15

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-all check coverage format accuracy bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

run: $(VENV)/.run-stamp ## Train ConvE on UMLS inside three quarters of the memory it would take
	$(RUN)

test: $(VENV)/.dev-stamp $(VENV)/.accuracy-stamp ## Run the tests but the slow ones (add ARGS='-k name' to choose)
	@$(PYTEST) -m 'not slow' $(ARGS)

test-all: $(VENV)/.dev-stamp $(VENV)/.accuracy-stamp ## Run all tests, the slow ones among them
	@$(PYTEST) $(ARGS)

check: $(VENV)/.dev-stamp ## Run the whole gate: lint, format, types, import contract, tests
	@echo "ruff check";         $(BIN)/ruff check
	@echo "ruff format";        $(BIN)/ruff format --check
	@echo "mypy";               $(BIN)/mypy
	@echo "import contract";    $(BIN)/lint-imports --no-logo
	@echo "tests";              $(MAKE) --no-print-directory test

coverage: $(VENV)/.dev-stamp $(VENV)/.accuracy-stamp ## Say which lines and branches no test reaches (ARGS=tests/room: that)
	@$(PYTEST) --cov --cov-report=term --cov-report=html:build/coverage $(ARGS)

format: $(VENV)/.dev-stamp ## Format the code and apply the safe fixes
	@$(BIN)/ruff check --fix; $(BIN)/ruff format

# Without ROWS all rows of the repository are scored, and the page is written.
accuracy: $(VENV)/.accuracy-stamp ## Score predictions against peaks measured on GPUs (ROWS=file.jsonl: these rows)
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/score_accuracy.py $(or $(ROWS),--write-docs) $(ARGS)

bench: $(VENV)/.dev-stamp ## Run the benchmarks, one after the other, and write docs/benchmarks.md
	@for file in benchmarks/bench_*.py benchmarks/write_page.py; do \
		echo "$$file"; $(BIN)/python "$$file" || exit 1; done

clean: ## Remove what these targets made: the environment, caches and runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage \
		build runs

# pip is the last thing that venv writes, so its presence says that the environment is whole.
$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "memfit needs Python 3.11 or newer and found none on the path." \
		"Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "memfit needs Python 3.11 or \
newer, and %s is %d.%d. Name another: make PYTHON=/path/to/python3" \
		% (sys.executable, *sys.version_info[:2]))'
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run-stamp: pyproject.toml requirements.lock | $(BIN)/pip
	@echo "Installing memfit and what it needs to run (once; torch is large)"
	@$(PIP) -e '.[$(RUN_EXTRAS)]'
	@touch $@

$(VENV)/.dev-stamp: pyproject.toml requirements.lock | $(BIN)/pip
	@echo "Installing memfit and its checks (once; torch is large)"
	@$(PIP) -e '.[$(DEV_EXTRAS)]'
	@touch $(VENV)/.run-stamp $@

# Beside the packages of the environment, not among them: benchmarks/accuracy/requirements.txt.
$(VENV)/.accuracy-stamp: benchmarks/accuracy/requirements.txt | $(VENV)/.dev-stamp
	@echo "Installing the definitions of vision models (once)" >&2
	@$(PIP) --no-deps --upgrade --target $(VENV)/accuracy -r benchmarks/accuracy/requirements.txt
	@touch $@

# The README's two commands are `make demo` and `make test`. Each makes its own
# environment in .venv if there is none; nothing else has to be installed.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TEST_ARGS ?=
CRASH_ARGS ?=

.PHONY: demo test long sweeps crashes mutants peers lint types examples bench all clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## train, be stopped, resume, and compare with a run that was never stopped
	$(BIN)/python examples/demo.py

test: $(READY)  ## all tests but the long variants
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long and not sweep" $(TEST_ARGS)

long: $(READY)  ## the long variants
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long $(TEST_ARGS)

sweeps: $(READY)  ## the longest variants: every line of every life struck at
	$(BIN)/python -m pytest -n 2 --dist worksteal -m sweep $(TEST_ARGS)

crashes: $(READY)  ## 100,000 states that crashes may leave, each recovered from (CRASH_ARGS="--states 1000000")
	$(BIN)/python -m tests.crashes $(CRASH_ARGS)

mutants: $(READY)  ## the protocol with one line changed at a time: do the tests notice?
	$(BIN)/python -m tests.mutants

peers: $(READY)  ## flipped bits, kills and full disks for other libraries as well: the table in docs/guarantees.md
	$(BIN)/python benchmarks/peers.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck hooks/*.sh .ci/run

types: $(READY)
	$(BIN)/mypy

examples: $(READY)  ## each example, stopped and resumed
	$(BIN)/python -m pytest -m "not long and not sweep" tests/test_examples.py

bench: $(READY)
	$(BIN)/python benchmarks/safe_point.py
	$(BIN)/python benchmarks/save.py
	$(BIN)/python benchmarks/hook.py
	$(BIN)/python benchmarks/ranks.py

all: lint types test demo

clean:
	rm -rf .venv .venv-peers build dist demo-out elastic-out *.egg-info

# The README's two commands are `make demo` and `make test`. Each makes its own
# environment in .venv if there is none; nothing else has to be installed.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
TEST_ARGS ?=
CRASH_ARGS ?=
# Tests wait more than they work: twice as many at a time as the two cores they were measured on.
WORKERS ?= 4
# No other directory has tests that start no process: they are not even collected.
QUICK := tests/unit tests/docs tests/support tests/sweeps
# What pytest makes of the tests' assertions is kept for the next run.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest --dist worksteal

.PHONY: demo demo-s3 test quick long sweeps crashes mutants peers faults lint types examples bench bench-full bench-parts all clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## train, be stopped, resume, and compare with a run that was never stopped
	$(BIN)/python examples/demo.py

demo-s3: $(READY)  ## the same with the ckpts in S3: a real server, which is started and ended here
	$(BIN)/python examples/demo.py --s3

test: $(READY)  ## all tests, of each sweep a sample; budget: 6 minutes on two cores (TEST_ARGS="--seed=7" draws what a run of that seed drew)
	$(PYTEST) -n $(WORKERS) -m "not long and not sweep" $(TEST_ARGS)

quick: $(READY)  ## the tests that start no process; budget: 1 minute on two cores
	$(PYTEST) -n 2 -m quick $(QUICK) $(TEST_ARGS)

long: $(READY)  ## all tests with their long variants, and nothing left out of any sweep
	$(PYTEST) -n $(WORKERS) -m "not sweep" --whole $(TEST_ARGS)

sweeps: $(READY)  ## the same, a kill at every line of every life, and the crash search; each prints how long it took
	$(BIN)/python -m tests.support.crashes $(CRASH_ARGS)
	$(PYTEST) -n $(WORKERS) --whole --durations=20 $(TEST_ARGS)

crashes: $(READY)  ## 100,000 states that crashes may leave, each recovered from (CRASH_ARGS="--states 1000000")
	$(BIN)/python -m tests.support.crashes $(CRASH_ARGS)

mutants: $(READY)  ## the protocol with one line changed at a time: do the tests notice?
	$(BIN)/python -m tests.support.mutants

peers: $(READY)  ## flipped bits, kills and full disks for other libraries as well: the table in docs/guarantees.md
	$(BIN)/python benchmarks/peers.py

faults: $(READY)  ## what each fault costs an elastic job of four pods: the table in docs/faults.md; budget: 8 minutes on two cores
	$(BIN)/python benchmarks/faults.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck hooks/*.sh .ci/run

types: $(READY)
	$(BIN)/mypy

examples: $(READY)  ## each example, stopped and resumed; the demo has a command of its own
	$(PYTEST) -n 2 tests/docs/test_examples.py -k "not demo" $(TEST_ARGS)

bench: $(READY)  ## what users call, beside other libraries, on small states; budget: 3 minutes on two cores
	$(BIN)/python benchmarks/time_to_safety.py --short
	$(BIN)/python benchmarks/stall.py --short
	$(BIN)/python benchmarks/notice.py --short

bench-full: $(READY)  ## the tables in docs/benchmarks.md: about two hours on a machine that does nothing else
	$(BIN)/python benchmarks/time_to_safety.py
	$(BIN)/python benchmarks/stall.py
	$(BIN)/python benchmarks/notice.py
	$(BIN)/python benchmarks/report.py

bench-parts: $(READY)  ## parts by themselves: a restart, safe points, what grows, hooks, ranks
	$(BIN)/python benchmarks/restart.py
	$(BIN)/python benchmarks/safe_point.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/hook.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/many_ranks.py

all: lint types test demo

clean:
	rm -rf .venv .venv-peers build dist demo-out elastic-out *.egg-info

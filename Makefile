# All is installed into .venv, once, and again only when pyproject.toml changes.

# The interpreter to make .venv with. A PyTorch that it has is taken, not installed again.
PYTHON ?= python3
# How many processes run the tests; 0 runs them in this one, for a debugger.
WORKERS ?= 2
# More options for what runs, such as ARGS="-k arena" for pytest.
ARGS ?=
# The revision that bench-compare holds the working tree against.
BASE ?= HEAD

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Prints the directory that torch is imported from, if it is not older than pyproject.toml
# allows.
FIND_TORCH := import torch, pathlib; \
	print(pathlib.Path(torch.__file__).parents[1]); \
	raise SystemExit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))

.PHONY: install demo test test-gpu bench bench-compare lint format clean
.DELETE_ON_ERROR:

install: $(VENV)/.dev

demo: $(VENV)/.demo
	$(BIN)/stagehand run demo --vram-budget 12MB --verify

# A test that stands still or crashes ends the run, with what all threads were doing.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 0 \
		-o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true $(ARGS)

# In one process: timings want the device to themselves.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu -v $(ARGS)

# What the library costs the host, and virtual time; fails where a target is missed.
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks --check $(ARGS)

# The working tree against another revision: make bench-compare BASE=main~5
bench-compare: $(VENV)/.dev
	$(BIN)/python -m benchmarks.compare $(BASE) $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(VENV)/.dev
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The path file makes the interpreter's own packages importable, after those of .venv. It
# also works where the interpreter is that of another virtual environment.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	@if found=$$($(PYTHON) -c '$(FIND_TORCH)' 2>/dev/null); then \
		echo "taking the torch in $$found"; \
		echo "$$found" > "$$($(BIN)/python -c \
			'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"; \
	fi

# First and alone: other packages would pull the newest torch, with all its libraries for
# GPUs. Where a machine's package settings offer a build for CPUs, this takes it.
$(VENV)/.torch: | $(BIN)/python
	@$(BIN)/python -c '$(FIND_TORCH)' >/dev/null 2>&1 || $(PIP) install torch==2.13.0
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --editable ".[demo]"
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) install --quiet --editable ".[dev]"
	@touch $(VENV)/.demo $@

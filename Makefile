# make demo, make test, make lint: each sets up what it needs in .venv, once.
#
#   PYTHON=python3.12 make demo         another interpreter for .venv
#   PIP_FLAGS="--no-cache-dir" make demo

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint format clean

help:
	@echo "make demo    train, compress and reload a small network; writes demo-output/4-4/report.html"
	@echo "make test    lint, then all tests"
	@echo "make lint    ruff: check and format"
	@echo "make format  let ruff rewrite the code"
	@echo "make clean   remove .venv and demo-output"

demo: $(VENV)/.demo
	$(BIN)/python examples/digits.py --out demo-output

# One thread a worker: two workers that share two cores must not fight for them.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo-output

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"dkm needs Python 3.11 or later, and this is " + sys.version.split()[0] + ": make PYTHON=<a newer one>")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# $(VENV)/.demo has the extras named demo, $(VENV)/.test those named test.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: pyproject.toml | $(VENV)/.created
	@echo "Installing torch-dkm[$*] into $(VENV).  The first time this downloads PyTorch, several gigabytes."
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -e ".[$*]"
	@touch $@

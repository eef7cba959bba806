# make demo, make test, make lint, make docs: each installs what it needs into .venv, once.
#
#   PYTHON=python3.12 make demo             another interpreter for .venv
#   PIP_FLAGS="--no-cache-dir" make demo     options of pip

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test lint format docs clean

help:
	@echo "make demo    train, compress and reload a small network; writes demo-output/4-4/report.html"
	@echo "make test    lint, then all tests"
	@echo "make lint    ruff (rules and format) and mypy"
	@echo "make format  let ruff rewrite the code"
	@echo "make docs    build the documentation into site/; broken links are errors"
	@echo "make clean   remove .venv, demo-output and site"

demo: $(VENV)/.demo
	$(BIN)/python examples/digits.py --out demo-output

# One thread per worker: two workers that share two cores must not compete for them.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) demo-output site

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"dkm needs Python 3.11 or later, and this is " + sys.version.split()[0] + ": make PYTHON=<a newer one>")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# $(VENV)/.demo stands for the extras named demo in pyproject.toml, and so on.
$(VENV)/.demo $(VENV)/.test $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(VENV)/.created
	@echo "Installing torch-dkm[$*] into $(VENV).  The first time this downloads PyTorch, several gigabytes."
	$(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -e ".[$*]"
	@touch $@

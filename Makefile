# People and CI call the same targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: install quickstart test check bench docs serve clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[engine,dev]'
	touch $@

quickstart: install
	$(BIN)/tunerack quickstart

test: install check
	$(BIN)/pytest

check: install
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: install
	$(BIN)/python benchmarks/engine.py

docs: install
	$(BIN)/pytest tests/unit/test_docs.py

serve: install
	$(BIN)/tunerack up --foreground

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

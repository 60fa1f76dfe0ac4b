# `make demo` and `make test` are all a newcomer needs: each installs what it uses, and names it first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
DEV := $(VENV)/.dev

BUNDLE := src/dovetail/view/page/bundle
BUNDLE_RECORD := web/bundle.sha256
NODE_MODULES := web/node_modules/.package-lock.json
LINT := lint-ruff lint-format lint-types lint-imports lint-bundle lint-page

.PHONY: base dev env demo test torch-tests mutants coverage lint $(LINT) page bench docs picture clean system-base system-dev announce

# --- Installing --------------------------------------------------------------------------------------------------

# What `dovetail demo`, `plan`, `train` and `view` need, and nothing else.
base: system-base
	@$(MAKE) --no-print-directory $(BASE)

# What tests, benchmarks and the documentation need as well.
dev: announce system-base system-dev
	@$(MAKE) --no-print-directory $(DEV)

env: dev

# System packages only where this is root on a Debian system and something is missing; elsewhere the part that needs a
# package says so itself. README.md names every package that can be installed here.
SYSTEM_BASE = $(shell \
	PATH="$$PATH:/usr/sbin:/sbin"; \
	command -v ip >/dev/null && command -v tc >/dev/null || echo iproute2; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv)
SYSTEM_DEV = $(shell \
	PATH="$$PATH:/usr/sbin:/sbin"; \
	command -v clang >/dev/null || echo clang; \
	command -v c++ >/dev/null || echo g++; \
	test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" || echo python3-dev; \
	test -e /usr/include/bpf/bpf_helpers.h || echo libbpf-dev libbpf1; \
	command -v ping >/dev/null || echo iputils-ping; \
	test -e /usr/lib/frr/zebra || echo frr; \
	command -v chromium >/dev/null || echo chromium)

define install_system
	@missing="$(strip $(1))"; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing system packages: $$missing"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	  else echo "note: not installed: $$missing (Debian: apt-get install $$missing)"; fi; \
	fi
endef

system-base:
	$(call install_system,$(SYSTEM_BASE))

system-dev:
	$(call install_system,$(SYSTEM_DEV))

# Said before anything is installed, and only where something is missing.
announce:
	@system="$(strip $(SYSTEM_BASE) $(SYSTEM_DEV))"; \
	if [ -n "$$system" ] || [ ! -e $(DEV) ] || [ pyproject.toml -nt $(DEV) ] || [ constraints.txt -nt $(DEV) ]; then \
	  echo "This installs what is missing for tests, benchmarks and documentation:"; \
	  echo "  system packages (as root, by apt-get): $${system:-none}"; \
	  echo "  Python packages (into $(VENV), about 2.4 GB): torch and the base, with the extras of pyproject.toml:"; \
	  echo "    view (matplotlib), fabric (networkx, pyroute2, pyyaml), cluster (fastapi, uvicorn),"; \
	  echo "    examples (transformers, accelerate, lightning, ray, scikit-learn), docs (zensical),"; \
	  echo "    dev (pytest, hypothesis, ruff, mypy, import-linter, playwright)"; \
	fi

define pip_install
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '$(1)'
	@touch $@
endef

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "dovetail needs Python 3.11 or newer; set PYTHON="; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing dovetail's base packages into $(VENV) (1 GB, about a minute the first time)"
	$(call pip_install,.)

$(DEV): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing dovetail-train[dev] into $(VENV) (2.4 GB, about three minutes the first time)"
	$(call pip_install,.[dev])
	@touch $(BASE)

# --- Using -------------------------------------------------------------------------------------------------------

demo: base
	@$(BIN)/dovetail demo

# Every part runs, whatever the others found, and the sum stands at the end.
test: dev
	@$(BIN)/python tools/run_tests.py

# torch's own tests of DistributedDataParallel with dovetail's class in its place; docs/torch-tests.md has the outcomes.
torch-tests: dev
	@$(BIN)/python -m tests.torch_suite.runner

# Orderings that keep training right on an accelerator, taken away one at a time: the tests must notice. Some 20 minutes.
mutants: dev
	@$(BIN)/python -m tools.mutants

# Line coverage of what runs in the test processes themselves; CONTRIBUTING.md says what that leaves out.
coverage: dev
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --cov=dovetail --cov-report=term --cov-report=html:out/coverage \
	  tests/core tests/planning tests/simulate tests/measure tests/view tests/cli tests/train tests/emulate

# `make -k lint` goes on after the first check that fails, as `make test` does.
lint: dev $(LINT)

lint-ruff:
	@$(BIN)/ruff check .
lint-format:
	@$(BIN)/ruff format --check .
lint-types:
	@$(BIN)/mypy
lint-imports:
	@$(BIN)/lint-imports
lint-bundle:
	@sha256sum --check --strict --quiet $(BUNDLE_RECORD) \
	  || { echo "$(BUNDLE) is not what web/ builds: run make page (needs node and npm), and commit what it writes"; exit 1; }
lint-page:
	@test ! -e $(NODE_MODULES) || (cd web && npm run -s check)

# The page's script and style sheet, from web/. They are part of the repository, so that nobody needs node to see it;
# the record of what they were built from tells `make lint` when they are stale.
page: $(NODE_MODULES)
	@cd web && npm run -s build
	@LC_ALL=C sha256sum $$(find web/src -type f | LC_ALL=C sort) web/build.mjs web/package.json web/package-lock.json \
	  web/tsconfig.json $(BUNDLE)/app.css $(BUNDLE)/app.js > $(BUNDLE_RECORD)

$(NODE_MODULES): web/package.json web/package-lock.json
	@command -v npm >/dev/null || { echo "make page needs node and npm (Debian: apt-get install nodejs npm)"; exit 1; }
	@cd web && npm ci --silent
	@touch $@

# The picture at the top of README.md, from a run of the demo, and that of docs/overlap.md, predicted; light and dark.
picture: dev
	@$(BIN)/dovetail demo --timelines out/demo
	@for theme in light dark; do \
	  $(BIN)/dovetail view out/demo/ddp.json out/demo/dovetail.json --png docs/timeline-$$theme.png --theme $$theme >/dev/null || exit 1; done
	@$(BIN)/python tools/period_picture.py docs

# The documentation, from docs/ and docstrings; a link that leads nowhere fails. It reads from files, without a server.
docs: dev
	@$(BIN)/zensical build --clean --strict
	@echo "out/site/index.html"

bench: dev
	@mkdir -p out
	@for name in merge false_gains stragglers overlap precision memory burst auto partial schedule fabric cluster view; do $(BIN)/python benchmarks/$$name.py --json out/$$name.json || exit 1; done

clean:
	rm -rf $(VENV) web/node_modules out build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

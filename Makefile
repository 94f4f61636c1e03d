# make demo    the ASHA search of examples/digits on Ray, on this machine
# make check   ruff, mypy --strict, import-linter, the fast tests: under a minute
# make test    check, the slow tests and those on a real Ray; some ten minutes
# make test-all  the same, and the long ones: the deaths of nodes, machines that Ray launches, a store in S3; three quarters of an hour more
# make test-cluster  those that need clusters of several nodes, in private namespaces; needs root (and sshd, rsync)
# make test-oldest  the fast tests and the demo with the lowest versions that pyproject.toml allows, in build/oldest; 7 GB
# make test-newest  the same with the newest versions, in build/newest; 7 GB
# make test-ray  what depends on Ray's version, with the newest Ray, in build/ray-...; with another one: make test-ray RAY=2.57.1
# make test-determined  those with the real Determined 0.38.1, which it installs into build/determined; half an hour
# make bench   the benchmarks (see bench/)
# make gpu     what only a GPU shows, in eight minutes on one; without one, a dry run; bench/gpu.py says how without a network
# make docs    the site of docs/, in build/docs
# make pictures  the recording and the screenshot of README.md, from a real search; needs Chromium
# make release  sdist and wheel in dist/, built twice and checked; prints the command that uploads them
# make soak    kill -9, again and again: a sweep of 1,000 trials, then the fault matrix ten times, twice: hours on two cores
#
# Each makes .venv on first use, from constraints.txt, and again only when pyproject.toml or constraints.txt change.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := dev,ui,loggers,mcp

# The pins are those of Python 3.11, so it comes first; a name on the PATH can be a shim that does not run, so each is tried.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python3.10; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo "$$name" && break; done)

# Ray asks about usage statistics at its first start; a build must not wait for, or send, an answer.
export RAY_USAGE_STATS_ENABLED := 0

# Without bytecode pytest rewrites the asserts of all test files in every run: five seconds for each half of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo check lint types floors test-fast test-fast-half test-fast-rest test-fast-simulation test test-slow-simulation test-slow-ray test-slow-ranks test-slow-rest test-slow-browser test-all test-cluster test-oldest test-newest test-ray test-determined bench gpu docs pictures release soak clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# pip would compile 27,000 modules, one by one, in two minutes; most of them nobody imports.
$(INSTALLED): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "dray needs Python 3.10 or newer; found none. Give one: make PYTHON=/path/to/python" >&2; exit 1; fi
	@echo "installing into $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

demo: $(INSTALLED)
	@$(BIN)/dray demo
	@echo "to have dray on the path: . $(BIN)/activate"

# Two at a time; the output of each is printed when it ends.
check: $(INSTALLED)
	@$(MAKE) --no-print-directory --output-sync=target -j 2 test-fast-rest test-fast-half test-fast-simulation types floors lint

lint: $(INSTALLED)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/ruff format --check --line-length 88 README.md docs/*.md

types: $(INSTALLED)
	@$(BIN)/mypy

floors: $(INSTALLED)
	@$(BIN)/lint-imports --no-logo

# Two processes with directories of their own: each of xdist's would collect all the tests, a quarter of the time.
HALF := $(addprefix tests/,api code compat core experiment hosts observers pytorch records searchers storage training worker)
FAST := -q -m "not slow and not ray and not gpu and not cluster"

test-fast: $(INSTALLED)
	@$(MAKE) --no-print-directory --output-sync=target -j 2 test-fast-rest test-fast-half test-fast-simulation

test-fast-half: $(INSTALLED)
	@$(BIN)/python -m pytest $(FAST) $(HALF)

test-fast-rest: $(INSTALLED)
	@$(BIN)/python -m pytest $(FAST) $(addprefix --ignore=,tests/simulation $(HALF))

# On its own: what threads of earlier tests did would be part of its schedules.
test-fast-simulation: $(INSTALLED)
	@$(BIN)/python -m pytest $(FAST) tests/simulation

# Side by side, five on two cores: much of a test on a real Ray is waiting, so those begin first. A crash, also at the exit, shows
# where.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory -j 5 test-slow-ray test-slow-ranks test-fast-rest test-slow-browser test-fast-half test-slow-rest \
		types test-slow-simulation test-fast-simulation floors lint

SLOW := -q -m "(slow or ray or gpu or cluster) and not long"

# Few shares, as each collects its tests for seconds: those that share a Ray; those of ranks, docs and examples without Ray, whose
# processes fork, which no thread of the others' libraries would survive, and last those that share their server of forks; the page's;
# the rest; and the simulation.
RAYS := tests/cli tests/migration tests/ray

RANKS := tests/api tests/docs tests/examples tests/pytorch tests/training tests/code tests/core tests/serve

test-slow-ray: $(INSTALLED)
	@PYTHONFAULTHANDLER=1 $(BIN)/python -m pytest $(SLOW) $(RAYS)

test-slow-ranks: $(INSTALLED)
	@PYTHONFAULTHANDLER=1 $(BIN)/python -m pytest $(SLOW) $(RANKS)

test-slow-rest: $(INSTALLED)
	@PYTHONFAULTHANDLER=1 $(BIN)/python -m pytest $(SLOW) $(addprefix --ignore=,tests/browser tests/simulation $(RAYS) $(RANKS))

test-slow-browser: $(INSTALLED)
	@PYTHONFAULTHANDLER=1 $(BIN)/python -m pytest $(SLOW) tests/browser

test-slow-simulation: $(INSTALLED)
	@PYTHONFAULTHANDLER=1 $(BIN)/python -m pytest $(SLOW) tests/simulation

test-all: test
	@PYTHONFAULTHANDLER=1 $(BIN)/python -m pytest -q -m long --ignore=tests/simulation
	@PYTHONFAULTHANDLER=1 $(BIN)/python -m pytest -q -m long tests/simulation

test-cluster: $(INSTALLED)
	@PYTHONFAULTHANDLER=1 $(BIN)/python -m pytest -q -m cluster

# Environments without constraints.txt. uv finds or downloads these Pythons; each can also be a path. Warnings are ignored with the
# oldest versions, which call newer libraries in deprecated ways.
PYTHON_oldest ?= 3.10
PYTHON_newest ?= 3.13
RESOLUTION_oldest := --resolution lowest-direct
# Without mcp, which needs newer pydantic and typing_extensions than dray does.
EXTRAS_oldest := dev,ui,loggers
EXTRAS_newest := $(EXTRAS)
WARNINGS_oldest := -W ignore

build/oldest/.installed build/newest/.installed: build/%/.installed: pyproject.toml | $(INSTALLED)
	@echo "installing the $* versions into build/$* ..."
	@$(BIN)/python -m uv venv -q --clear --python $(PYTHON_$*) build/$*
	@$(BIN)/python -m uv pip install -q --python build/$* $(RESOLUTION_$*) --editable '.[$(EXTRAS_$*)]'
	@touch $@

test-oldest test-newest: test-%: build/%/.installed
	@build/$*/bin/python -m pytest $(FAST) $(WARNINGS_$*) $(HALF)
	@build/$*/bin/python -m pytest $(FAST) $(WARNINGS_$*) $(addprefix --ignore=,$(HALF))
	@build/$*/bin/dray demo

# An environment on top of .venv, with another Ray, and what this Ray does not run with. The tests: starts and ranks of groups,
# deaths of each kind, elastic trials, the autoscaler, jobs in pods, the server, Tune's users.
ifdef RAY
OTHER := build/ray-$(RAY)

$(OTHER)/.installed: $(INSTALLED)
	@echo "installing Ray $(RAY) into $(OTHER) ..."
	@rm -rf $(OTHER)
	@$(BIN)/python -m venv $(OTHER)
	@echo "import site; site.addsitedir('$$(realpath $(VENV)/lib/python*/site-packages)')" \
		> $$(realpath $(OTHER)/lib/python*/site-packages)/beneath.pth
	@$(OTHER)/bin/python -m pip install -qq --disable-pip-version-check --no-compile --no-deps --ignore-installed ray==$(RAY)
	@$(OTHER)/bin/python -m pip install -qq --disable-pip-version-check --no-compile --editable . 'ray[default,train,tune]==$(RAY)'
	@touch $@

test-ray: $(OTHER)/.installed
	@PYTHONFAULTHANDLER=1 $(OTHER)/bin/python -m pytest -q -k "not shared and not sharded" \
		$(addprefix tests/cluster/test_,ray_internals.py autoscaler.py pods.py) \
		$(addprefix tests/ray/test_,worker_groups.py fault_matrix.py elastic.py autoscaler.py tune.py tune_trainer.py) \
		$(addprefix tests/ray/test_server.py::test_,a_second_experiment_trains_in_the_firsts_processes \
		a_server_that_is_killed_finds_its_experiments_again)
else
test-ray: $(INSTALLED)
	@$(MAKE) --no-print-directory $@ RAY=$$($(BIN)/python -m pip index versions ray 2>/dev/null | sed -n 's/^ray (\(.*\))$$/\1/p')
endif

# What its users had beside it: the same torch as here, and what the model directories of tests/migration import.
DETERMINED := build/determined

$(DETERMINED)/.installed: constraints.txt
	@echo "installing Determined 0.38.1 into $(DETERMINED) ..."
	@rm -rf $(DETERMINED)
	@$(PYTHON) -m venv $(DETERMINED)
	@grep -E '^(torch|numpy|scikit-learn|tensorboard)==' constraints.txt > $(DETERMINED)/beside.txt
	@$(DETERMINED)/bin/python -m pip install -qq --disable-pip-version-check determined==0.38.1 -r $(DETERMINED)/beside.txt
	@touch $@

test-determined: $(INSTALLED) $(DETERMINED)/.installed
	@DETERMINED_PYTHON=$(CURDIR)/$(DETERMINED)/bin/python $(BIN)/python -m pytest -q -m determined

bench: $(INSTALLED)
	@for script in $(filter-out bench/gpu.py bench/soak.py,$(wildcard bench/[a-z]*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

gpu: $(INSTALLED)
	@$(BIN)/python bench/gpu.py

docs: $(INSTALLED)
	@$(BIN)/python docs/generate.py
	@$(BIN)/python docs/rooms.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

pictures: $(INSTALLED)
	@$(BIN)/python -m uv pip install -q --python $(BIN)/python pyte
	@$(BIN)/python docs/recording.py

# From a commit whose CHANGELOG.md has a date for this version. The tests install the wheel and run the demo from it.
release: $(INSTALLED)
	@test -z "$$(git status --porcelain)" || { echo "make release: there are changes; commit them first" >&2; git status --short; exit 1; }
	@version=$$($(BIN)/python -c 'import dray; print(dray.__version__)'); top=$$(grep -m 1 '^## ' CHANGELOG.md); \
		grep -qE "^## $${version//./\\.} \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$$" <<< "$$top" || { \
		echo "make release: CHANGELOG.md begins with '$$top', not with '## $$version (YYYY-MM-DD)'" >&2; exit 1; }
	@rm -rf dist build/release
	@git clone --quiet . build/release
	@$(BIN)/python -m hatchling build -d dist
	@cd build/release && $(CURDIR)/$(BIN)/python -m hatchling build -d dist
	@for file in dist/*; do cmp $$file build/release/$$file; done
	@$(BIN)/uv tool run twine check --strict dist/*
	@$(BIN)/python -m pytest -q tests/docs/test_installing.py tests/ray/test_sweep.py
	@ls -l --block-size=kB dist
	@echo "to upload: $(BIN)/uv tool run twine upload dist/*"

soak: $(INSTALLED)
	@$(BIN)/python bench/soak.py
	@$(BIN)/python bench/soak.py --matrix
	@$(BIN)/python bench/soak.py --matrix --sharded

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist

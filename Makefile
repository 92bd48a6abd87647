# `make demo` and `make test` set themselves up: a virtual environment in .venv, once.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

# The simulator multiplies many small matrices: the threads of a BLAS would only wait for each other.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: demo test lint format resources readme clean

demo: $(READY)
	$(RUN) -m fmha demo

# Those without a GPU side by side, a file at a time; those with one, one after the other.
test: $(READY)
	$(RUN) -m pytest tests/cpu --numprocesses auto --maxprocesses 8 --dist loadfile
	$(RUN) -m pytest tests/gpu tests/reports

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

format: $(READY)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

resources: $(READY)
	$(RUN) -m perf.resources

readme: $(READY)
	$(RUN) -m perf.report
	$(RUN) -m perf.readme

# Where the system's Python has a torch that sees a GPU, that torch is used, whatever its version: it fits the driver.
# Elsewhere the pinned one is installed.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): this downloads the CuTe DSL and torch, once."
	@if $(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then \
		$(PYTHON) -m venv --system-site-packages $(VENV) && grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt; \
	else \
		$(PYTHON) -m venv $(VENV) && cp constraints.txt $(VENV)/constraints.txt; \
	fi
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/constraints.txt --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# `make demo` and `make test` need Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where there is no NVIDIA driver, ask for the release whose CPU build pip can find. If your pip only knows a registry
# that serves CUDA builds, name PyTorch's CPU index: make demo TORCH_INDEX=URL
CONSTRAINTS := $(if $(wildcard /proc/driver/nvidia/version),,-c constraints-cpu.txt)
INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX),)

.PHONY: help demo test test-all lint install clean

help:
	@echo "make demo      tune the demo model on this machine, run it from its profile, print the table (minutes)"
	@echo "make test      every quick test"
	@echo "make test-all  the big and slow ones, too"
	@echo "make lint      ruff and mypy"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "seqmoe needs Python 3.11 or newer, this is %s: make PYTHON=/path/to/python3.11" % sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(INDEX) $(CONSTRAINTS) -e '.[dev]'
	touch $@

demo: install
	$(BIN)/python examples/demo.py

test: install
	$(BIN)/python -m pytest -m "not slow"

test-all: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build out .pytest_cache .mypy_cache .ruff_cache

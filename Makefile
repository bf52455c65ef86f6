# Two commands do everything: `make demo` and `make test`. The rest is for people who change the code.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test check bench gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): a few minutes, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

demo: setup
	$(BIN)/fastweight demo

# As many processes as there are cores, one thread each; a file's tests stay together and share what they set up.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks.cpu

# On the GPU machine, with whatever torch and Triton are installed there. Compiling takes most of the time, so many processes
# at once where pytest-xdist is installed.
gpu:
	$(PYTHON) -m pytest -m gpu $(shell $(PYTHON) -c "import importlib.util as u; print('-n 14 --dist worksteal' if u.find_spec('xdist') else '')")

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

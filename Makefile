# Everything a developer runs. Targets that need the virtual environment make it first.

# The interpreter that .venv is made with: 3.11 or newer.
PYTHON ?= python3
VENV := .venv
# Where pip finds torch, when not in its usual index: README.md, "PyTorch elsewhere".
TORCH_INDEX ?=
# Where `make stubs` writes; the drift test points it to a folder of its own.
STUBS := proto

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.installed
PROTOS := $(wildcard proto/pagemill/v1/*.proto)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo serve venv test test-slow test-simulation test-mutations check format lint types \
  contracts proto-lint stubs stub-drift figures ci-packages clean

help:  ## Print this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP)  ## Answer one question with the demo model, and show where the time went.
	$(BIN)/pagemill demo

serve: $(STAMP)  ## Serve the demo model until Ctrl-C.
	$(BIN)/pagemill serve demo

venv: $(STAMP)  ## Make .venv with everything in it. Does nothing when it is up to date.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time takes a minute or more."
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(PIP) -e '.[dev]'
	@touch $@

test: $(STAMP)  ## Run the test suite, but for what is marked slow.
	$(BIN)/python -m pytest -m 'not slow'

test-slow: $(STAMP)  ## Run the tests that take minutes.
	$(BIN)/python -m pytest -m slow --timeout 3600

test-simulation: $(STAMP)  ## Run a million simulated steps; a failure prints the line that repeats it.
	PYTHONPATH=.:proto:clients:tests $(BIN)/python -m simulation

test-mutations: $(STAMP)  ## Plant every bug of the list in a copy, and see that the tests see it.
	PYTHONPATH=.:proto:clients:tests $(BIN)/python -m mutations

check: lint types contracts proto-lint stub-drift test  ## Run all that a change must pass.

format: $(STAMP)  ## Lay the code out, and mend what ruff can mend.
	$(BIN)/ruff format -q .
	$(BIN)/ruff check --fix -q .

lint: $(STAMP)  ## Check layout and style.
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .

types: $(STAMP)  ## Check types, strictly.
	$(BIN)/mypy

contracts: $(STAMP)  ## Check who imports whom.
	PYTHONPATH=.:proto:clients $(BIN)/lint-imports

proto-lint: $(STAMP)  ## Check the protocol's style.
	cd proto && $(BIN)/buf lint

stubs: $(STAMP)  ## Generate pagemill.v1 anew. Committed; constraints.txt pins the generators.
	PATH=$(BIN):$$PATH $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=$(STUBS) \
	  --grpc_python_out=$(STUBS) --mypy_out=quiet:$(STUBS) --mypy_grpc_out=quiet:$(STUBS) $(PROTOS)

stub-drift: $(STAMP)  ## Check that the committed stubs are what `make stubs` gives.
	$(BIN)/python -m pytest tests/repo/test_stubs.py

figures: $(STAMP)  ## Draw the plots of docs/figures.md anew, which takes minutes.
	$(PIP) -e '.[figures]'
	PYTHONPATH=. $(BIN)/python bench/figures.py

ci-packages:  ## Install what the tests need from Debian (as root).
	bash docker/install_test_packages.sh

clean:  ## Remove everything that can be made again.
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Every target sets up what it needs by itself: a virtual environment in .venv, filled once by pip. Nothing is activated.
# PYTHON chooses the interpreter of a new .venv, EXTRAS what `make wheelhouse` packs beside the base (empty for the base alone),
# WHEELHOUSE the folder it packs into.
PYTHON ?= python3
EXTRAS ?= mlflow
WHEELHOUSE ?= wheelhouse

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PEERS := .venv-bench
BENCHES := log_cost log_while_sealing many_processes seal_speed torch_step disk_bytes verl_day start_cost verify_speed ls_speed full_disk tail_latency replay
REQUIREMENT := .$(if $(EXTRAS),[$(EXTRAS)])

.PHONY: help setup demo test test-slow check bench bench-peers docs wheelhouse clean

help:
	@echo "make demo        train offline, kill, resume, replay into MLflow, compare"
	@echo "make test        the tests; make test-slow those that take longer or ask the package registry"
	@echo "make check       ruff, mypy, import-linter"
	@echo "make bench       what everything costs on this machine, about ten minutes; make bench-peers the same loop in other trackers"
	@echo "make docs        write docs/cli.md from --help"
	@echo "make wheelhouse  wheels for a machine without network, in wheelhouse/"
	@echo "make setup       only the set-up that the others do by themselves"
	@echo "make clean       remove what make has made"

setup: $(READY)

demo: setup
	@$(BIN)/python -m trainer.demo

test: setup
	@$(BIN)/python -m pytest -n auto --dist worksteal

test-slow: setup
	@$(BIN)/python -m pytest -m slow

check: setup
	@$(BIN)/ruff check --quiet --output-format concise
	@$(BIN)/ruff format --check --quiet
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo --no-cache > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@echo "check: no findings"

bench: setup
	@for one in $(BENCHES); do echo "## bench/$$one.py"; $(BIN)/python bench/$$one.py || exit 1; done

bench-peers: setup $(PEERS)/ready
	@$(BIN)/python bench/peer_cost.py --python $(CURDIR)/$(PEERS)/bin/python
	@$(BIN)/python bench/disk_bytes.py --python $(CURDIR)/$(PEERS)/bin/python --peers wandb mlflow

docs: setup
	@$(BIN)/python docs/write_cli.py docs/cli.md

# pip wheel, not pip download: what a registry has only as source is built here, where a compiler is.
wheelhouse: $(BIN)/pip
	@rm -rf $(WHEELHOUSE)
	@$(BIN)/python -m pip wheel --quiet --wheel-dir $(WHEELHOUSE) --constraint constraints.txt '$(REQUIREMENT)'
	@echo "$$(ls $(WHEELHOUSE) | wc -l) wheels, $$(du -sh $(WHEELHOUSE) | cut -f1), for Python $$($(BIN)/python -c 'import platform as p; print(p.python_version(), p.system(), p.machine())')."
	@echo "Copy $(WHEELHOUSE) to the machine without network and type there:"
	@echo "pip install --no-index --find-links $(WHEELHOUSE) 'spool-sync$(if $(EXTRAS),[$(EXTRAS)])'"

clean:
	rm -rf $(VENV) $(PEERS) wheelhouse demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# pip comes last into a new environment, so one that was interrupted is begun again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, %s is %s.%s: make PYTHON=python3.x" % ("$(PYTHON)", *sys.version_info[:2]) if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing into $(VENV) (about 2 GB, some minutes; the log is $(VENV)/setup.log)"
	@$(BIN)/python -m pip install --constraint constraints.txt --editable '.[mlflow,trainer,dev]' > $(VENV)/setup.log 2>&1 \
	  || { tail -n 20 $(VENV)/setup.log; exit 1; }
	@touch $(READY)

# The trackers to compare with, and the spool itself, in an environment of their own: nothing else of the project needs them.
$(PEERS)/ready: bench/peers/requirements.txt pyproject.toml | $(BIN)/pip
	@echo "Installing into $(PEERS) (about 1 GB; the log is $(PEERS)/setup.log)"
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install --requirement bench/peers/requirements.txt --editable . > $(PEERS)/setup.log 2>&1 \
	  || { tail -n 20 $(PEERS)/setup.log; exit 1; }
	@touch $(PEERS)/ready

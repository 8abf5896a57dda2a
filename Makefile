# `make help` lists the targets. `make demo` and `make test` set everything up themselves, in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?=
VENV := .venv
ACCELERATOR ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
STAMP := $(VENV)/.installed-$(ACCELERATOR)
RUN := $(VENV)/bin/python

# A misspelt variable would otherwise be ignored.
VARIABLES := MODEL TASK SEED ALGORITHM ARGS KILLS ACCELERATOR PYTHON VENV
UNKNOWN := $(filter-out $(VARIABLES),$(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name))))
$(if $(UNKNOWN),$(error $(UNKNOWN) is not a variable of this Makefile; it has $(VARIABLES)))

# An environment that no longer holds the tested set is made again.
HEALTHY := $(shell [ ! -f $(STAMP) ] || $(RUN) -c 'from pipeline.run.versions import check_versions; check_versions()' >/dev/null 2>&1 || rm -f $(STAMP))

# Settings of the demo (jobs/demo.py). TASK is countdown, higher_lower, calculator, lookup or blocks. MODEL=smollm2 trains a
# pretrained model on sums instead. ARGS has further settings, such as ARGS='rollout.n=16 actor.optim.lr=2e-5'.
SEED ?= 1
TASK ?= countdown
MODEL ?=
ALGORITHM ?=
ARGS ?=
DEMO := slipstream.py demo $(if $(MODEL),--model $(MODEL),--task $(TASK)) --seed $(SEED) $(if $(ALGORITHM),--algorithm $(ALGORITHM)) $(ARGS)
KILLS ?= 20

.PHONY: help setup sglang-env megatron-env demo demo-model chaos test test-all test-fast lint format docs site bench wheel clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo "Variables: MODEL=$(MODEL) TASK=$(TASK) SEED=$(SEED) ALGORITHM=$(ALGORITHM) ARGS=$(ARGS) KILLS=$(KILLS) ACCELERATOR=$(ACCELERATOR) PYTHON=python3.11"

$(STAMP): requirements/$(ACCELERATOR).lock requirements/install.sh requirements/torchvision_without_cuda.py pyproject.toml
	@requirements/install.sh $(ACCELERATOR) $(VENV) $(PYTHON)

SGLANG_STAMP := .venv-sglang/.installed-sglang-$(ACCELERATOR)
$(SGLANG_STAMP): requirements/sglang-$(ACCELERATOR).lock requirements/install.sh requirements/torchvision_without_cuda.py requirements/sgl_kernel/__init__.py
	@requirements/install.sh sglang-$(ACCELERATOR) .venv-sglang $(or $(PYTHON),python3.11)

MEGATRON_STAMP := $(VENV)/.installed-megatron
$(MEGATRON_STAMP): requirements/megatron.lock requirements/install_megatron.sh $(STAMP)
	@requirements/install_megatron.sh $(VENV)

megatron-env: $(MEGATRON_STAMP) ## add Megatron-Core to .venv, for actor.strategy=megatron

sglang-env: $(SGLANG_STAMP) ## install SGLang's server into .venv-sglang, for rollout.name=sglang

setup: $(STAMP) ## install the tested set into .venv (CPU or GPU by looking at the machine)

demo: $(STAMP) ## train a tiny model and watch it get better (MODEL=smollm2, TASK=higher_lower, ALGORITHM=ppo for others)
	@$(RUN) $(DEMO)

demo-model: $(STAMP) ## puzzles, model and warm start of the demo, without the training
	@$(RUN) $(DEMO) --only-model

test: $(STAMP) $(MEGATRON_STAMP) ## the tests, without the longest, in two processes; unit tests are shown at the end
	@units=$$(mktemp); share=$$(mktemp -d); failed=0; \
	$(RUN) -m pytest -m 'not (ray or vllm or long)' --share=$$share >$$units 2>&1 & \
	trap 'kill $$! 2>/dev/null || true; rm -rf $$units $$share' EXIT; trap 'exit 130' INT; \
	$(RUN) -m pytest -m '(ray or vllm or slow) and not long' --share=$$share || failed=1; \
	wait $$! || failed=1; cat $$units; exit $$failed

chaos: $(STAMP) ## kill processes of a run at random and check what it leaves (KILLS=20)
	@$(RUN) slipstream.py demo --seed $(SEED) --only-model
	@$(RUN) -m tests.chaos --out runs/chaos-$(SEED) --seed $(SEED) --kills $(KILLS) --model models/tiny-sft-$(SEED) \
		--train data/countdown-$(SEED)/train.parquet --val data/countdown-$(SEED)/test.parquet

test-all: $(STAMP) $(MEGATRON_STAMP) ## all tests
	@$(RUN) -m pytest -m ''

test-fast: $(STAMP) $(MEGATRON_STAMP) ## unit tests: no Ray, no engine
	@$(RUN) -m pytest -m unit

lint: $(STAMP) ## ruff, mypy, spelling, and turns of phrase that may not become more
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy slipstream.py pipeline jobs benchmarks
	@$(RUN) -m codespell_lib pipeline jobs benchmarks configs docs examples README.md CONTRIBUTING.md CHANGELOG.md
	@$(RUN) -m tests.words

format: $(STAMP) ## let ruff format and fix the code
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

docs: $(STAMP) ## write docs/configuration.md from the dataclasses and tests/sentences.txt from the checks
	@$(RUN) -m tests.docs_configuration
	@$(RUN) -m pytest -q -m unit --durations=0 --write-sentences $$(grep -rlw named tests --include='test_*.py')

SITE := build/mkdocs
site: ## the pages as a site with a search, in build/site (mkdocs, in an environment of its own)
	@[ -x $(SITE)/bin/mkdocs ] || $(or $(PYTHON),python3.11) -m venv $(SITE)
	@$(SITE)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' >$(SITE)/requirements.txt
	@$(SITE)/bin/python -m pip install --quiet --requirement $(SITE)/requirements.txt
	@$(SITE)/bin/mkdocs build --strict --quiet
	@echo "build/site is ready: python3 -m http.server --directory build/site"

bench: $(STAMP) ## short measurements; docs/benchmarks.md has the commands of the others
	@for name in prompt_stream rollout engine_env; do echo "== $$name"; $(RUN) -m benchmarks.$$name; done
	@if ls runs/*/metrics.jsonl >/dev/null 2>&1; then echo "== iteration"; $(RUN) -m benchmarks.iteration runs/*/metrics.jsonl; fi

wheel: ## dist/ with the wheel, the locks and the script that installs them
	@rm -rf build/lib build/bdist.* dist
	@$(or $(PYTHON),python3) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@cp requirements/install.sh requirements/*.lock requirements/*.py dist/
	@rm -rf build/lib build/bdist.*

clean: ## remove caches and builds; data, models, runs and .venv stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

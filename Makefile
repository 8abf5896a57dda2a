# `make help` lists the targets. `make demo` and `make test` set everything up themselves, in .venv.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?=
VENV := .venv
ACCELERATOR ?= $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
STAMP := $(VENV)/.installed-$(ACCELERATOR)
RUN := $(VENV)/bin/python

# An environment that no longer holds the tested set is made again.
HEALTHY := $(shell [ ! -f $(STAMP) ] || $(RUN) -c 'from pipeline.run.versions import check_versions; check_versions()' >/dev/null 2>&1 || rm -f $(STAMP))

# Settings of the demo. TASK is countdown, higher_lower, calculator or lookup.
SEED ?= 1
TASK ?= countdown
PUZZLES ?= --template short --numbers 3 --max-number 30 --min-target 1 --max-target 60 --train 10000 --test 1000
SFT_DATA ?= --sft 23000 --sft-test 400 --sft-solution answer
SFT_STEPS_countdown := 400
SFT_STEPS_higher_lower := 2500
SFT_STEPS_calculator := 600
SFT_STEPS_lookup := 400
TINY_higher_lower := --digits 2 --hidden 128 --layers 3
SFT ?= data.train_batch_size=64 trainer.total_training_steps=$(SFT_STEPS_$(TASK)) trainer.num_workers=2 \
	optim.lr=2e-3 optim.min_lr_ratio=0 optim.weight_decay=0.1 'optim.betas=[0.9,0.98]'
COUNTDOWN := $(filter countdown,$(TASK))
PREPARE := $(if $(COUNTDOWN),$(PUZZLES) $(SFT_DATA))
TAG := $(if $(COUNTDOWN),,$(TASK)-)$(SEED)
DATA := data/$(TASK)-$(SEED)
TINY := models/tiny-$(TAG)
WARM := models/tiny-sft-$(TAG)
ALGORITHM ?=
KILLS ?= 20
# An algorithm may have an experiment of its own; the others are laid over the demo's.
OWN := $(wildcard configs/experiment/$(TASK)_cpu_$(or $(ALGORITHM),none).yaml)
EXPERIMENT := $(if $(OWN),experiment=$(basename $(notdir $(OWN))),experiment=$(TASK)_cpu $(if $(ALGORITHM),algorithm=$(ALGORITHM)))
NAME ?= $(subst _,-,$(TASK))-cpu-$(SEED)$(if $(ALGORITHM),-$(ALGORITHM))

.PHONY: help setup demo demo-model chaos test test-all test-fast lint format docs bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo "Variables: TASK=$(TASK) SEED=$(SEED) ALGORITHM=$(ALGORITHM) ACCELERATOR=$(ACCELERATOR) PYTHON=python3.11"

$(STAMP): requirements/$(ACCELERATOR).lock requirements/install.sh pyproject.toml
	@requirements/install.sh $(ACCELERATOR) $(VENV) $(PYTHON)

setup: $(STAMP) ## install the tested set into .venv (CPU or GPU by looking at the machine)

demo: $(WARM)/config.json ## train a tiny model and watch it get better (TASK=higher_lower, SEED=2, ALGORITHM=ppo for others)
	@$(RUN) -m jobs.train $(EXPERIMENT) trainer.seed=$(SEED) trainer.experiment_name=$(NAME) \
		data.train_files=$(DATA)/train.parquet data.val_files=$(DATA)/test.parquet model.path=$(WARM)

demo-model: $(WARM)/config.json ## puzzles, model and warm start of the demo, without the training

$(DATA)/sft_train.parquet: | $(STAMP)
	@$(RUN) -m jobs.prepare $(TASK) --out $(DATA) $(PREPARE) --seed $(SEED)

$(TINY)/config.json: $(DATA)/sft_train.parquet | $(STAMP)
	@rm -rf models/tiny-$(TAG)
	@$(RUN) -m jobs.tiny --out $(TINY) --data $(DATA)/sft_train.parquet --seed $(SEED) $(TINY_$(TASK))

$(WARM)/config.json: $(TINY)/config.json | $(STAMP)
	@rm -rf models/tiny-sft-$(TAG)
	@$(RUN) -m jobs.sft out=$(WARM) model.path=$(TINY) data.train_files=$(DATA)/sft_train.parquet \
		data.val_files=$(DATA)/sft_test.parquet trainer.seed=$(SEED) $(SFT)

test: $(STAMP) ## the tests, without the longest; unit tests run beside the others, and are shown at the end
	@units=$$(mktemp); failed=0; \
	$(RUN) -m pytest -m 'unit and not long' >$$units 2>&1 & \
	trap 'kill $$! 2>/dev/null || true; rm -f $$units' EXIT; trap 'exit 130' INT; \
	$(RUN) -m pytest -m 'not unit and not long' || failed=1; \
	wait $$! || failed=1; cat $$units; exit $$failed

chaos: $(WARM)/config.json ## kill processes of a run at random and check what it leaves (KILLS=20)
	@$(RUN) -m tests.chaos --out runs/chaos-$(SEED) --seed $(SEED) --kills $(KILLS) --model $(WARM) \
		--train $(DATA)/train.parquet --val $(DATA)/test.parquet

test-all: $(STAMP) ## all tests
	@$(RUN) -m pytest -m ''

test-fast: $(STAMP) ## unit tests: no Ray, no engine
	@$(RUN) -m pytest -m unit

lint: $(STAMP) ## ruff, mypy, and turns of phrase that may not become more
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy pipeline jobs benchmarks
	@$(RUN) -m tests.words

format: $(STAMP) ## let ruff format and fix the code
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

docs: $(STAMP) ## write docs/configuration.md from the dataclasses and tests/sentences.txt from the checks
	@$(RUN) -m jobs.docs_configuration
	@$(RUN) -m pytest -q -m unit --durations=0 --write-sentences $$(grep -rlw named tests --include='test_*.py')

bench: $(STAMP) ## short measurements; docs/benchmarks.md has the commands of the others
	@for name in prompt_stream rollout engine_env; do echo "== $$name"; $(RUN) -m benchmarks.$$name; done
	@if ls runs/*/metrics.jsonl >/dev/null 2>&1; then echo "== iteration"; $(RUN) -m benchmarks.iteration runs/*/metrics.jsonl; fi

clean: ## remove caches and builds; data, models, runs and .venv stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

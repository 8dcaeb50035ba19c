# On a fresh machine: `make train` or `make test`. Each first builds what it lacks in .venv.

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check --no-input -qq
# Python compiles what is imported, a small part of the packages; pip would compile all of them.
INSTALL := $(PIP) install --no-compile
CONFIG := configs/muon_vit.gin
# Some images of containers set it. Each of the hundreds of processes of the tests would then compile
# what it imports, which takes three times as long as importing it.
unexport PYTHONDONTWRITEBYTECODE

# Prints the first Python of those offered that can make a virtual environment for us.
define FIND_PYTHON
for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
		2>/dev/null || continue; \
	if "$$python" -c 'import venv, ensurepip' 2>/dev/null; then echo "$$python"; exit 0; fi; \
	echo "$$python has no venv module (on Debian: apt install python3-venv)." >&2; \
done; \
echo "Lockstep needs Python 3.11, 3.12 or 3.13 with its venv module, and" \
	"$(if $(PYTHON),PYTHON=$(PYTHON) is not one,found none). Install one, or name it:" \
	"make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1
endef

# PYTHON=... was given, and is not what the environment was made with: make it anew.
OTHER_PYTHON := $(if $(PYTHON),$(shell [ "$$($(PYTHON) -V 2>&1)" = "$$($(RUN) -V 2>&1)" ] || echo anew))

.PHONY: help train test test_all test_newest seeded_faults docs golden chaos chaos_sweep chaos_distributed fuzz_sweep power_loss laws fashion_mnist benchmarks experiments lint torch originals loggers ray s3 targets compile_targets lock wheel clean anew

help:
	@echo 'make train   train configs/muon_vit.gin (CONFIG=... another; ARGS="--set steps=100" more)'
	@echo 'make test    lint, then the short suite (ARGS="-k groups" some of it)'
	@echo '             ROOM=sweep all tests of one room; CHANGED=COMMIT all of the rooms that import what differs'
	@echo 'make test_all  lint, then all tests (forty to seventy minutes on two cores)'
	@echo 'make test_newest  the short suite with the newest versions of all packages, in .newest'
	@echo 'make seeded_faults  plant 40 faults, one at a time, and see that the short suite finds them (half an hour)'
	@echo 'make docs    build the pages in docs/_build/html; needs no network once it is installed'
	@echo 'make golden  compare all that the working tree computes with COMMIT (a quarter of an hour)'
	@echo 'make chaos   kill a run 100 times, stop it 30 times, compare its bits (ten minutes)'
	@echo 'make chaos_sweep  kill the workers of sweeps 200 times, and disturb those of two hosts in every'
	@echo '                  way at once, and kill a referee 40 times; compare every trial'
	@echo 'make chaos_distributed  kill, stop or break one of three processes, and kill one of four at seven moments'
	@echo 'make fuzz_sweep  damage files of sweeps 5,000 times, read them with every command (an hour)'
	@echo 'make power_loss  cut the power of a run after each file operation, and restart it from what is left (5 minutes)'
	@echo 'make laws    the tests of which `make test_all` takes a part: eager updates of every optimizer on'
	@echo '             explicit axes, errors of the disk in four times as many file operations, and every'
	@echo '             optimizer of matrices on nine meshes'
	@echo 'make lint    ruff and pyright'
	@echo 'make fashion_mnist  prepare the data of configs/fashion_vit.gin'
	@echo 'make benchmarks     what docs/speed.md says of speed, measured here'
	@echo 'make experiments    short forms of the studies in experiments/, compared with expected numbers'
	@echo 'make torch   add torch and optimizers for it, without which the tests that compare with them are skipped'
	@echo 'make originals  clone the repositories of authors, without which the tests of their own files are skipped'
	@echo 'make loggers  add W&B and MLflow, without which the tests of their writers are skipped'
	@echo 'make ray     add Ray, without which the tests of sweeps on a cluster of it are skipped'
	@echo 'make s3      add a server of S3, and run the tests of checkpoints in a bucket with it, too'
	@echo 'make compile_targets  compile the shipped configs for H100 and TPU v5e, and compare (half an hour)'
	@echo 'make targets  install the compilers of explain --target in .targets (2 GB)'
	@echo 'make lock    resolve the dependencies anew (needs Python 3.11, 3.12 and 3.13)'
	@echo 'make wheel   build dist/lockstep_jax-*.whl'
	@echo 'make clean   remove the environment and what was built'
	@echo 'PYTHON=...   which Python makes the environment (3.11 to 3.13)'

train: $(VENV)/.project
	$(RUN) -m trainer --config=$(CONFIG) $(ARGS)

# The tests of one room, and the examples in its docstrings.
ROOMS := $(sort $(notdir $(patsubst %/,%,$(dir $(wildcard tests/*/test_*.py)))))
OF_ROOM = $(if $(filter $(ROOM),$(ROOMS)),$(wildcard tests/$(ROOM) trainer/$(ROOM) $(ROOM)),$(error \
	there is no ROOM=$(ROOM): tests/ has $(ROOMS)))
# As many processes as there are cores, and memory for them; a file of tests stays in one process.
# Files begin in the order of their names: xdist's own order ends with single slow tests.
PYTEST := $(RUN) -m pytest -n auto --dist=loadfile --no-loadscope-reorder
RUFF := $(RUN) -m ruff check .
# pyright checks the folders TYPED, or all of them if it is empty. It takes a minute or two of one
# core: it runs beside the tests, and prints only what it finds.
PYRIGHT = PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(RUN) -m pyright --pythonpath $(RUN) $(TYPED)
LINT_AND = $(RUFF) && { $(PYRIGHT) >$(VENV)/pyright.txt 2>&1 & pyright=$$!; $(1); tests=$$?; \
	wait $$pyright || { cat $(VENV)/pyright.txt; exit 1; }; exit $$tests; }

# Half of pyright's time goes into tests/, where most of its rules are off: the short suite leaves
# tests/ out, and a room, the rooms of a change, `make test_all` and `make lint` do not.
test: TYPED := $(if $(ROOM)$(CHANGED),,lockstep optim trainer benchmarks experiments)
test: $(VENV)/.test
ifdef CHANGED
	folders=$$($(RUN) -m tests.changed $(CHANGED)) && $(call LINT_AND,$(PYTEST) $$folders $(ARGS))
else
	$(call LINT_AND,$(PYTEST) $(if $(ROOM),$(OF_ROOM),-m "not long") $(ARGS))
endif

# Not with the lock: with the newest versions that pyproject.toml allows.
test_newest:
	@python=$$($(FIND_PYTHON)) && "$$python" -m venv --clear .newest
	@$(subst $(VENV),.newest,$(INSTALL)) -e '.[test]'
	$(subst $(VENV),.newest,$(PYTEST)) -m "not long" $(ARGS)

test_all: $(VENV)/.test
	$(call LINT_AND,$(PYTEST) $(ARGS))

seeded_faults: $(VENV)/.test
	$(RUN) -m tests.seeded_faults $(ARGS)

# Every warning is an error: a dead link, a page that no table of contents has, a notebook that fails.
docs: $(VENV)/.docs
	$(RUN) -m sphinx --fresh-env --fail-on-warning --keep-going -q \
		docs docs/_build/html $(ARGS)
	@echo "The pages are in docs/_build/html/index.html."

# From the network, or from Debian's package dataset-fashion-mnist.
fashion_mnist: $(VENV)/.project
	$(RUN) -m trainer.data.prepare fashion_mnist $(ARGS)

benchmarks: $(VENV)/.project
	$(RUN) -m benchmarks.step
	$(RUN) -m benchmarks.loop
	$(RUN) -m benchmarks.start
	$(RUN) -m benchmarks.library
	$(RUN) -m benchmarks.optimizer
	$(RUN) -m benchmarks.checkpointing
	$(RUN) -m benchmarks.sharded_checkpoints
	$(RUN) -m benchmarks.nonfinite
	$(RUN) -m benchmarks.diagnostics
	$(RUN) -m benchmarks.observations
	$(RUN) -m benchmarks.gram
	$(RUN) -m benchmarks.soap
	$(RUN) -m benchmarks.optimizers
	$(RUN) -m benchmarks.inputs
	$(RUN) -m benchmarks.chunked_loss
	$(RUN) -m benchmarks.division
	$(RUN) -m benchmarks.mesh
	$(RUN) -m benchmarks.sweep
	$(RUN) -m benchmarks.report
	$(RUN) -m benchmarks.claims
	$(RUN) -m benchmarks.data_wait
	$(RUN) -m benchmarks.gpt
	$(RUN) -m benchmarks.gpu --small

experiments: $(VENV)/.project
	$(RUN) -m experiments.check $(ARGS)

golden: $(VENV)/.test
	$(RUN) -m tests.golden $(or $(COMMIT),HEAD)

chaos: $(VENV)/.test
	$(RUN) -m tests.chaos $(ARGS)

chaos_sweep: $(VENV)/.test
	$(RUN) -m tests.chaos_sweep $(ARGS)
	$(RUN) -m tests.chaos_hosts
	$(RUN) -m tests.chaos_referee

chaos_distributed: $(VENV)/.test
	CHAOS=1 $(RUN) -m pytest tests/train/test_distributed.py tests/train/test_process_meshes.py $(ARGS)

fuzz_sweep: $(VENV)/.test
	$(RUN) -m tests.sweep_fuzz $(ARGS)

power_loss: $(VENV)/.test
	$(RUN) -m tests.power_loss $(ARGS)

laws: $(VENV)/.test
	LAWS=all $(PYTEST) tests/optim/test_explicit_axes.py tests/sweep/test_sweep_faults.py \
		tests/engine/test_sharded_runs.py $(ARGS)

# In a folder of its own: beside jax, the plugin for GPUs prints a traceback where there is none.
targets: $(VENV)/.project
	@echo "Installing XLA's compilers for GPUs and TPUs in .targets."
	@$(INSTALL) --no-deps --upgrade --target .targets \
		$$($(RUN) -c 'from trainer.engine import targets; print(*targets.packages())')

compile_targets: $(VENV)/.test
	$(RUN) -m tests.compile_targets $(ARGS)

lint: $(VENV)/.test
	$(RUFF)
	$(PYRIGHT)

wheel: $(VENV)/.project
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .

lock:
	@python=$$($(FIND_PYTHON)) && "$$python" .ci/lock.py

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .compiled .pytest_cache .ruff_cache .hypothesis .targets .newest .s3

# The environment in layers: the locked packages, the project itself, what tests and pages need.
$(VENV)/.locked: requirements.lock $(OTHER_PYTHON)
	@python=$$($(FIND_PYTHON)) && "$$python" -m venv --clear $(VENV)
	@echo "Installing the locked packages in $(VENV) for $$($(RUN) -V) (about a minute)."
	@$(INSTALL) -r requirements.lock
	@touch $@

$(VENV)/.project: $(VENV)/.locked pyproject.toml
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.project requirements-test.lock
	@echo "Installing what the tests need."
	@$(INSTALL) -r requirements-test.lock
	@touch $@

$(VENV)/.docs: $(VENV)/.project requirements-docs.lock
	@echo "Installing what building the pages needs."
	@$(INSTALL) -r requirements-docs.lock
	@touch $@

# Not in the lock: 150 MB, for those who log with them. Nothing that is locked changes for it.
loggers: $(VENV)/.test
	@echo "Installing W&B and MLflow, for the tests of the writers of these names."
	@$(INSTALL) -c requirements.lock -c requirements-test.lock --editable '.[wandb,mlflow]' \
		--no-build-isolation

# Not in the lock: 300 MB, for those who have a cluster of it. Nothing that is locked changes for it.
ray: $(VENV)/.test
	@echo "Installing Ray, for the tests of sweeps on a cluster of it."
	@$(INSTALL) -c requirements.lock -c requirements-test.lock --editable '.[ray]' \
		--no-build-isolation

# In an environment of its own: it needs an older python-dateutil than the lock has.
.s3/bin/moto_server: | $(VENV)/.test
	@echo "Installing moto, a server of S3, in .s3."
	@$(RUN) -m venv --clear .s3
	@$(subst $(VENV),.s3,$(INSTALL)) flask flask-cors 'moto[s3]==5.2.5'

s3: .s3/bin/moto_server
	$(RUN) -m pytest tests/checkpoint/test_bucket.py $(ARGS)

# Not for CI: it needs the network, and clones what others wrote into a folder that git ignores.
originals: torch
	@echo "Cloning the repositories of authors' optimizers in .originals."
	@GIT_TERMINAL_PROMPT=0 $(RUN) -m tests.originals

# Not in the lock: large, and known answers only. Nothing that is locked changes for it.
torch: $(VENV)/.test
	@echo "Installing torch and optimizers for it, for the tests that compare with them."
	@$(INSTALL) -c requirements.lock -c requirements-test.lock --editable '.[torch]' \
		--no-build-isolation

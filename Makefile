# make demo | test | check | lint | bench | clean. The environment is made on first use (make setup).
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
# TORCH_BACKEND=cpu asks for the small torch; unset: torch as PyPI gives it (several GB).
TORCH_BACKEND ?=
export VIRTUAL_ENV := $(abspath $(VENV))
# Bytecode is kept whatever the shell says: without it each process that imports torch, transformers
# and peft compiles them anew, 11 s instead of 4.5 s (2 cores), and demo and tests start dozens.
unexport PYTHONDONTWRITEBYTECODE
# uv is used where it is; else it is fetched into the environment.
UV = $(shell command -v uv 2>/dev/null || echo $(abspath $(VENV))/bin/uv)
ARGS ?=

# SGLang has an environment of its own: what it pins is not what the rest is tested with. Another
# version than the pinned one (SGLANG_VERSION=0.5.22) has one beside it, and the plugin is told to try.
SGLANG_VERSION ?=
SGLANG_VENV ?= .venv-sglang$(if $(SGLANG_VERSION),-$(SGLANG_VERSION))
SGLANG_PY := $(SGLANG_VENV)/bin/python
SGLANG_PINS := -c tools/sglang/constraints.txt
SGLANG_ITSELF := $(if $(SGLANG_VERSION),sglang==$(SGLANG_VERSION),$(SGLANG_PINS) sglang)

NATIVE := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
NATIVE_TESTS := tests/cpp tests/libcuda_standin benchmarks/native

PACKAGES := $(shell find api cli lab operator sidecar simulator -name '*.py' -not -path '*/__pycache__/*')

# Kept between runs; the C++ tests use the same.
SANITIZED := build/cpp-address

.PHONY: help setup demo sglang test test-extended gpu check e2e test-sglang node test-node chart images packages soak lint bench docs proto figures constraints clean

help:
	@echo "make demo   watch the whole system do its job (ARGS=... are handed to windrow demo)"
	@echo "make test   what a change may break: units, contracts, one path of each kind (ARGS=... are handed to pytest;"
	@echo "   PASSES='--only alone' or PASSES='--but \"side by side\"': some of its passes)"
	@echo "make test-extended   what takes long and seldom breaks; .ci/run plays both (PASSES=... here too)"
	@echo "make gpu    all that a GPU has to show, within a time (ARGS='--budget 600'; docs/gpu.md)"
	@echo "make check  lint, the unit tests and the core contracts, after each change"
	@echo "make e2e    what breaks, fault by fault, on a cluster of this machine's processes, and a comparison (half an hour)"
	@echo "make sglang | test-sglang   SGLang on this machine's cores, in its own environment; its tests"
	@echo "   (SGLANG_VERSION=0.5.22: another version than the pinned one, in an environment beside it)"
	@echo "make soak   10^8 random operations on the arena with random kills (ARGS='--operations 1e7 --seed 2')"
	@echo "make node   a shell on a real Kubernetes node (root); ARGS='kubectl get pods -A' runs that instead"
	@echo "make test-node   the tests that need one; says what is missing and skips where there can be none"
	@echo "make chart   the chart against the schemas of three Kubernetes versions, and Grafana's types"
	@echo "make packages   as root: the Debian packages without which some tests skip"
	@echo "make images   the operator's image (NAMES='operator sidecar'; BASE=debian without a registry;"
	@echo "   NAMES=sglang SGLANG=REGISTRY/sglang@sha256:...: SGLang's official image with Windrow in it)"
	@echo "make docs   the site, into build/site, built strictly"
	@echo "make setup | lint | tidy | bench | proto | figures | constraints | clean"

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "windrow needs Python 3.11+: install it, or set PYTHON=..."; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "windrow needs Python 3.11+, $(PYTHON) is older: set PYTHON=..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.dependencies: $(VENV)/bin/python pyproject.toml constraints.txt
	@command -v uv >/dev/null || test -x $(VENV)/bin/uv || $(PY) -m pip install --quiet uv
	@echo "Installing Python packages (torch is several GB the first time; TORCH_BACKEND=cpu asks for the small one) ..."
	$(UV) pip install --python $(PY) $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND)) -c constraints.txt -r pyproject.toml --extra dev
	@touch $@

$(VENV)/.native: $(VENV)/.dependencies $(NATIVE) pyproject.toml
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "windrow needs a C++20 compiler: install g++ (Debian: apt-get install g++) or clang++"; exit 2; }
	@$(UV) pip uninstall --quiet --python $(PY) windrow 2>/dev/null || true  # the name it had
	PATH="$(abspath $(VENV))/bin:$$PATH" $(UV) pip install --python $(PY) --no-deps --no-build-isolation -e .
	@touch $@

setup: $(VENV)/.native

demo: setup
	$(VENV)/bin/windrow demo $(ARGS)

$(SGLANG_VENV)/.dependencies: $(VENV)/.dependencies tools/sglang/requirements.txt tools/sglang/constraints.txt
	$(UV) venv --quiet --allow-existing --python $(PY) $(SGLANG_VENV)
	$(UV) pip install --compile-bytecode --python $(SGLANG_PY) $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND)) $(SGLANG_PINS) -r tools/sglang/requirements.txt -r pyproject.toml --extra sidecar
	$(UV) pip install --compile-bytecode --python $(SGLANG_PY) --no-deps $(SGLANG_ITSELF)
	echo "$(abspath tools/sglang)" > $$($(SGLANG_PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/windrow_sgl_kernel.pth
	@touch $@

# As decode's image has it: a wheel without the laptop, whose entry point SGLang finds. Nothing native
# is compiled again.
$(SGLANG_VENV)/.windrow: $(VENV)/.native $(SGLANG_VENV)/.dependencies $(PACKAGES)
	rm -rf build/sglang-wheel
	WINDROW_WITHOUT_LAB=1 PATH="$(abspath $(VENV))/bin:$$PATH" $(UV) build --quiet --wheel --no-build-isolation --python $(PY) --out-dir build/sglang-wheel .
	@$(UV) pip uninstall --quiet --python $(SGLANG_PY) windrow 2>/dev/null || true  # its plugin would start twice
	$(UV) pip install --quiet --compile-bytecode --python $(SGLANG_PY) --no-deps --reinstall build/sglang-wheel/*.whl
	@touch $@

sglang: $(SGLANG_VENV)/.windrow

# Beside the environment, not in it: peft imports it wherever it is, a quarter of a worker's start.
$(VENV)/.quantized: $(VENV)/.dependencies constraints.txt
	$(UV) pip install --python $(PY) --target $(VENV)/quantized --no-deps -c constraints.txt bitsandbytes
	@touch $@

# Beside it as well: its tests compare with TRL in a process of their own, and nothing else needs it.
$(VENV)/.trl: $(VENV)/.dependencies constraints.txt
	$(UV) pip install --python $(PY) --target $(VENV)/trl --no-deps -c constraints.txt trl datasets dill multiprocess pandas xxhash
	@touch $@

# Beside it as well: the clients of MLflow and Weights & Biases, and what they import.
$(VENV)/.tracking: $(VENV)/.dependencies constraints.txt
	$(UV) pip install --python $(PY) --target $(VENV)/tracking --no-deps -c constraints.txt mlflow-skinny wandb \
	  cachetools cloudpickle cwevals databricks-sdk distro fastapi gitdb gitpython google-auth googleapis-common-protos \
	  importlib-metadata opentelemetry-api opentelemetry-exporter-http-transport opentelemetry-exporter-otlp-common \
	  opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-http opentelemetry-proto \
	  opentelemetry-sdk opentelemetry-semantic-conventions pyasn1 pyasn1-modules python-dotenv smmap sqlparse \
	  starlette uvicorn xxhash zipp
	@touch $@

# NVIDIA's headers of four releases, for the test that compares ours with them, side by side.
# Without a registry that has them that test is skipped.
CUDA_HEADERS := 12.6=nvidia-cuda-runtime-cu12==12.6.* 12.9=nvidia-cuda-runtime-cu12==12.9.* \
  13.0=nvidia-cuda-runtime==13.0.* newest=nvidia-cuda-runtime
$(VENV)/.cuda-headers: $(VENV)/.dependencies
	@for release in $(foreach each,$(CUDA_HEADERS),'$(each)'); do \
	  $(UV) pip install --quiet --python $(PY) --target $(VENV)/cuda-headers/$${release%%=*} --no-deps \
	    "$${release#*=}" || { echo "NVIDIA's headers cannot be had: their test is skipped"; exit 0; }; \
	done; touch $@

BESIDE_THE_ENVIRONMENT := $(VENV)/.quantized $(VENV)/.trl $(VENV)/.tracking $(VENV)/.cuda-headers
test: setup $(BESIDE_THE_ENVIRONMENT)
ifeq ($(strip $(ARGS)),)
	$(PY) tools/run_tests.py test $(PASSES)
else
	$(PY) -m pytest $(ARGS)
endif

# What takes long and an ordinary change seldom breaks; `.ci/run` plays both (CONTRIBUTING.md).
test-extended: setup $(BESIDE_THE_ENVIRONMENT)
	$(PY) tools/run_tests.py extended $(PASSES)

check: lint
	$(PY) tools/run_tests.py check

e2e: setup
	$(PY) tools/run_tests.py e2e

test-sglang: sglang
	SGLANG_VENV=$(abspath $(SGLANG_VENV)) $(if $(SGLANG_VERSION),WINDROW_SGLANG_UNTESTED=1) $(PY) $(if $(strip $(ARGS)),-m pytest $(ARGS),tools/run_tests.py sglang $(PASSES))

# Everything of the node ends with the command.
node: setup
	$(PY) -m windrow_lab.realnode $(if $(strip $(ARGS)),-- $(ARGS))

NAMES ?= operator
images:
	deploy/images/build.sh $(NAMES)

# For the tests, on a base that is made from packages: no registry is needed.
OPERATOR_IMAGE := build/images/operator.tar
$(OPERATOR_IMAGE): $(shell find api cli lab operator -name '*.py') pyproject.toml constraints.txt \
  deploy/images/build.sh deploy/images/ignore deploy/images/operator/Dockerfile
	BASE=debian ARGS= deploy/images/build.sh operator

# It brings up a node itself.
BESIDE_A_NODE := tests/node/test_up_on_a_node.py
# Status 3: this machine can run no node, and the line before says why.
test-node: setup
	@$(PY) -m windrow_lab.realnode --check; status=$$?; \
	if [ $$status -eq 3 ]; then echo "make test-node: skipped"; exit 0; fi; \
	[ $$status -eq 0 ] || exit $$status; \
	$(MAKE) $(OPERATOR_IMAGE) || exit 1; \
	$(PY) -m windrow_lab.realnode -- $(PY) -m pytest $(or $(ARGS),tests/node) || exit 1; \
	$(if $(ARGS),:,$(PY) -m pytest $(BESIDE_A_NODE))

# Every object that the chart can make, by kubeconform; the schemas come from Go's module proxy. Its
# dashboards, by TypeScript; Grafana's types come from npm.
chart: setup
	$(PY) tools/kubeconform/check_chart.py
	$(PY) tools/dashboards/check_types.py

# What tests look for and pip cannot bring: without it they say so and skip.
packages:
	tools/install_packages.sh

soak: setup
	@mkdir -p $(SANITIZED)
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake -G Ninja -S . -B $(SANITIZED) -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DWINDROW_PYTHON=OFF -DWINDROW_CPP_TESTS=ON -DWINDROW_SANITIZE=address,undefined
	PATH="$(abspath $(VENV))/bin:$$PATH" cmake --build $(SANITIZED) --target windrow_soak
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(SANITIZED)/tests/cpp/windrow_soak $(ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(filter %.cpp %.h,$(NATIVE)) $(wildcard $(addsuffix /*.cpp,$(NATIVE_TESTS)) $(addsuffix /*.h,$(NATIVE_TESTS)))
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	@$(MAKE) --no-print-directory locks

# C++, a source again when it or a header has changed: which lock guards what (windrow/mutex.h), which
# clang alone can tell (17 s of one core from nothing); and clang-tidy (70 s).
.PHONY: locks tidy
CPP := $(wildcard csrc/src/*.cpp)
CPP_HEADERS := $(wildcard csrc/include/windrow/*.h csrc/src/*.h)
ifeq ($(shell command -v clang++),)
locks:
	@echo "no clang++: the locks of csrc/ are not checked (Debian: apt-get install clang)"
else
locks: $(CPP:csrc/src/%.cpp=build/locks/%.ok)
endif
build/locks/%.ok: csrc/src/%.cpp $(CPP_HEADERS)
	@mkdir -p $(@D)
	@clang++ -std=c++20 -fsyntax-only -Wthread-safety -Werror -Icsrc/include $< && touch $@

ifeq ($(shell command -v clang-tidy),)
tidy:
	@echo "no clang-tidy: csrc/ is not looked at (Debian: apt-get install clang-tidy)"
else
tidy: $(CPP:csrc/src/%.cpp=build/tidy/%.ok)
endif
build/tidy/%.ok: csrc/src/%.cpp $(CPP_HEADERS) csrc/.clang-tidy
	@mkdir -p $(@D)
	@clang-tidy --quiet $< -- -std=c++20 -Icsrc/include 2>/dev/null && touch $@

# The tests among it are those that want a GPU: what else they need is there, or they skip.
gpu: setup
	$(PY) tools/measure_gpu.py $(ARGS)

bench: setup
	$(PY) -m benchmarks $(ARGS)

proto: setup
	$(PY) tools/generate_proto.py

# The site: build/site/index.html opens from disk. A link that leads nowhere fails it (with --quiet
# mkdocs would not count its warnings, so --strict would let them pass).
$(VENV)/.docs: $(VENV)/.dependencies pyproject.toml
	$(UV) pip install --quiet --python $(PY) -c constraints.txt -r pyproject.toml --extra docs
	@touch $@

docs: $(VENV)/.native $(VENV)/.docs
	$(PY) tools/generate_docs.py
	NO_MKDOCS_2_WARNING=true $(VENV)/bin/mkdocs build --strict
	$(PY) tools/check_site.py build/site

figures: setup
	$(PY) tools/quote_figures.py
	$(PY) -m benchmarks.harvest --docs docs/comparison.md

constraints:
	$(UV) pip compile pyproject.toml --extra dev --extra docs --extra quantized --extra trl --extra mlflow --extra wandb --python-version 3.11 --universal --no-header --no-annotate --no-emit-index-url -q -o constraints.txt

clean:
	rm -rf build dist $(VENV) .venv-sglang* .pytest_cache .ruff_cache .mypy_cache

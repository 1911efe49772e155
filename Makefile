# SPDX-License-Identifier: Apache-2.0
# Every target sets up what it needs, in .venv, from a package index alone.
# `make demo` installs what running needs; the other targets add the tools of development.

# A choice of interpreter: `make test PYTHON=/path/to/python3.12`.
PYTHON ?=
ARGS ?=
# Which of experiments/benchmarks: steps, accounting, allocation, frozen, llm,
# optimizers, strategies or zoo.
BENCH ?= steps
# Of `make test-slow`.
PART ?= 1
PARTS ?= 12
# Of `make docs-open`.
PORT ?= 8000
# The last commit that `make subjects` trusts.
SINCE ?= main
# Versions as the lock has them. Newer ones: `make test VENV=.venv-newest LOCK= PYTHON=...`.
VENV ?= .venv
LOCK ?= .ci/lock.txt
LOCKS := $(if $(LOCK),.ci/lock.txt .ci/lock-run.txt .ci/lock-release.txt)
VERSIONS := $(if $(LOCK),build/versions.txt)
PEERS := .venv-peers
TUNIX := .venv-tunix
KERAS := .venv-keras
FLOWER := .venv-flower
PY := $(VENV)/bin/python
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
PIP := $(PY) -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-slow test-llm test-keras test-flower format lint types docs docs-open
.PHONY: paper archives dist sbom audit lock subjects bench bench-peers clean rebuild
.DELETE_ON_ERROR:

help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/ready-run ## train a small private model and write its report to runs/demo
	$(PY) -m dpjax train --overwrite --out runs/demo $(ARGS)

test: $(VENV)/ready-dev ## run the tests of the guarantee, in four minutes
	$(PY) -m pytest -n auto --dist worksteal -q --durations=15 $(ARGS)

test-all: $(VENV)/ready-dev ## run all tests, also the slow ones (hours)
	$(PY) -m pytest -p tests.guards -n auto --dist worksteal -q -m "" $(ARGS)

test-slow: $(VENV)/ready-dev ## run one of twelve parts of the slow tests: PART=1 to 12
	$(PY) -m pytest -p tests.parts --part $(PART)/$(PARTS) -n auto --dist worksteal -q -m slow --durations=15 $(ARGS)

test-llm: $(TUNIX)/ready ## run Tunix's language models and their page, in an environment of their own
	$(TUNIX)/bin/python -m pytest -q -m "" -k "llm or tunix" tests/test_llm.py tests/test_llm_program.py \
	  tests/test_docs.py $(ARGS)

test-keras: $(KERAS)/ready ## run models of Keras and KerasHub and their page, in an environment of their own
	KERAS_BACKEND=jax $(KERAS)/bin/python -m pytest -q -m "" -k keras tests/test_keras.py \
	  tests/test_docs.py $(ARGS)

test-flower: $(FLOWER)/ready ## run a deployment of Flower on this machine, in an environment of its own
	$(FLOWER)/bin/python -m pytest -q -s -m "" -k "flower or flwr" tests/test_flower.py tests/test_docs.py $(ARGS)

format: $(VENV)/ready-dev ## rewrite the code in the house format
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

lint: $(VENV)/ready-dev ## check format, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

subjects: ## check that subjects of commits since SINCE have at most 72 characters
	@! git log --no-merges --format=%s $(SINCE)..HEAD | grep -E '^.{73}'

types: $(VENV)/ready-dev ## check types
	$(PY) -m pyright --pythonpath $(PY)

docs: $(VENV)/ready-dev ## build the documentation in build/docs; a warning fails it
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict -f docs/mkdocs.yml -d ../build/docs/$(VERSION)
	$(PY) docs/site_root.py build/docs
	@echo "dpjax: open build/docs/index.html, or serve it with make docs-open"

docs-open: docs ## build the documentation and serve it at 127.0.0.1:8000, or PORT=
	@echo "dpjax: open http://127.0.0.1:$(PORT)/ in a browser; Ctrl-C ends the server"
	@$(PY) -m http.server --bind 127.0.0.1 --directory build/docs $(PORT) >/dev/null

paper: $(VENV)/ready-run ## draw the paper's figures, and set it in build/paper/paper.html
	@$(PIP) install -q pypandoc_binary==1.17
	$(PY) paper/build.py
	@echo "dpjax: open build/paper/paper.html"

archives: $(VENV)/ready-run ## build wheel and sdist in dist, to the byte as any other clone of this commit
	@rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(PY) -m build -q --no-isolation --outdir dist
	@cd dist && sha256sum *

dist: archives $(VERSIONS) ## build wheel and sdist, and try both in empty environments
	@$(call try,dist/*.whl)
	@$(call try,dist/*.tar.gz)

sbom: archives $(VERSIONS) $(VENV)/ready-release ## list what the wheel installs in build/sbom.cdx.json (CycloneDX)
	@rm -rf build/sbom && $(PY) -m venv build/sbom
	@build/sbom/bin/python -m pip --disable-pip-version-check install -q $(addprefix -c ,$(VERSIONS)) dist/*.whl
	@build/sbom/bin/python -m pip --disable-pip-version-check uninstall -q -y pip setuptools
	$(PY) -m cyclonedx_py environment --pyproject pyproject.toml --output-reproducible \
	  --output-file build/sbom.cdx.json build/sbom/bin/python

audit: $(VENV)/ready-release ## compare the locked versions with the index's database of vulnerabilities
	$(PY) -m pip_audit --strict --disable-pip --require-hashes -r .ci/lock.txt

lock: $(VENV)/ready-release ## write .ci/lock*.txt: new requirements, or with ARGS=--upgrade new versions
	$(call lock,.ci/lock.txt,--extra all --extra build --extra dev --extra docs $(ARGS))
	$(call lock,.ci/lock-run.txt,--extra build --extra data --extra plots -c .ci/lock.txt)
	$(call lock,.ci/lock-release.txt,--extra release -c .ci/lock.txt)

bench: $(VENV)/ready-run ## time a training step, or with BENCH= another benchmark
	$(PY) -m experiments.benchmarks.$(BENCH) $(ARGS)

bench-peers: $(VENV)/ready-run $(PEERS)/ready ## the same, beside the peers, which it installs
	$(PY) -m experiments.benchmarks.$(BENCH) $(ARGS)

clean: ## remove the environments and the caches, keep runs/
	rm -rf $(VENV) $(PEERS) $(TUNIX) $(KERAS) $(FLOWER) build dist .pytest_cache .ruff_cache .hypothesis
	find src tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +

# --- the environment -------------------------------------------------------------------------
# A stamp is written only after everything before it has worked, so an interrupted set-up is
# simply done again. An environment that no longer runs, or that belongs to another folder (a
# moved or copied checkout), is caught here and built again.

PROBE := import importlib.util as u, os; \
  assert os.path.samefile(u.find_spec("dpjax").origin, "src/dpjax/__init__.py"); \
  tools = ["pytest", "xdist", "hypothesis", "ruff", "pyright"] * os.path.exists("$(VENV)/ready-dev"); \
  assert all(map(u.find_spec, ["pip", "jax", "jaxlib", "flax", "optax", "dp_accounting", *tools]))
ifneq ($(wildcard $(VENV)),)
  ifneq ($(shell $(PY) -I -c '$(PROBE)' 2>/dev/null && echo sound),sound)
    BROKEN := rebuild
  endif
endif

# A lock holds the hash of every file that an index has of a version, and pip refuses others. dpjax
# itself has none, so it is installed apart, by the backend of the lock.
ifneq ($(LOCK),)
  INSTALL_RUN = $(PIP) install -q --require-hashes -r .ci/lock-run.txt \
    && $(PIP) install -q --no-deps --no-build-isolation -e .
  INSTALL_DEV = $(PIP) install -q --require-hashes -r $(LOCK)
  INSTALL_RELEASE = $(PIP) install -q --require-hashes -r .ci/lock-release.txt
else
  INSTALL_RUN = $(PIP) install -q -e '.[build,data,plots]'
  INSTALL_DEV = $(PIP) install -q -e '.[dev,docs]'
  INSTALL_RELEASE = $(PIP) install -q -e '.[release]'
endif

$(VENV)/ready-run: pyproject.toml $(LOCKS) $(BROKEN)
	@$(call create)
	@echo "dpjax: installing what dpjax runs with (a minute or so, the first time)"
	@$(INSTALL_RUN)
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready-run
	@echo "dpjax: installing the tools for tests, lint, types and documentation"
	@$(INSTALL_DEV)
	@touch $@

$(VENV)/ready-release: $(VENV)/ready-run
	@echo "dpjax: installing the tools of a release"
	@$(INSTALL_RELEASE)
	@touch $@

# The versions of the lock without their hashes, for environments that need others as well.
build/versions.txt: .ci/lock.txt
	@mkdir -p build
	@sed -n 's/ *\\$$//; /^[a-zA-Z]/p' $< > $@

# `uv` solves for every platform and Python, and takes the hashes of all files of a version. The files
# that stand are what it begins with.
define lock
$(PY) -m uv pip compile -q --universal --python-version 3.11.5 --generate-hashes --no-annotate \
  --custom-compile-command 'make lock' pyproject.toml $(2) -o $(1)
endef

# The peers live apart, so that nothing of theirs can reach what users install. PyTorch comes
# first and by its number: what follows would otherwise choose the newest build for it.
$(PEERS)/ready: .ci/peers.txt | $(VENV)/ready-run
	@echo "dpjax: installing the peers in $(PEERS) (some minutes, the first time)"
	@rm -rf $(PEERS) && $(PY) -m venv $(PEERS) && echo '*' > $(PEERS)/.gitignore
	@$(PEERS)/bin/python -m pip --disable-pip-version-check install -q torch==2.13.0
	@$(PEERS)/bin/python -m pip --disable-pip-version-check install -q \
	  -c .ci/peers.txt opacus jax-privacy -e '.[data]'
	@touch $@

$(TUNIX)/ready: $(VERSIONS) | $(VENV)/ready-run
	@echo "dpjax: installing Tunix in $(TUNIX) (some minutes, the first time)"
	@rm -rf $(TUNIX) && $(PY) -m venv $(TUNIX) && echo '*' > $(TUNIX)/.gitignore
	@$(TUNIX)/bin/python -m pip --disable-pip-version-check install -q torch==2.13.0
	@$(TUNIX)/bin/python -m pip --disable-pip-version-check install -q $(addprefix -c ,$(VERSIONS)) \
	  google-tunix==0.1.7 qwix==0.1.8 transformers peft -e '.[dev,llm]'
	@touch $@

$(KERAS)/ready: $(VERSIONS) | $(VENV)/ready-run
	@echo "dpjax: installing Keras and KerasHub in $(KERAS) (some minutes, the first time)"
	@rm -rf $(KERAS) && $(PY) -m venv $(KERAS) && echo '*' > $(KERAS)/.gitignore
	@$(KERAS)/bin/python -m pip --disable-pip-version-check install -q $(addprefix -c ,$(VERSIONS)) \
	  keras==3.15.0 keras-hub==0.32.0 -e '.[dev]'
	@touch $@

# Flower and the lock ask for different versions of protobuf and others.
$(FLOWER)/ready: .ci/flower.txt | $(VENV)/ready-run
	@echo "dpjax: installing Flower in $(FLOWER) (a minute or so, the first time)"
	@rm -rf $(FLOWER) && $(PY) -m venv $(FLOWER) && echo '*' > $(FLOWER)/.gitignore
	@$(FLOWER)/bin/python -m pip --disable-pip-version-check install -q \
	  -c .ci/flower.txt pytest hypothesis beartype matplotlib -e '.[data,flower]'
	@touch $@

rebuild:

define create
set -e; \
if [ -n "$(BROKEN)" ] || [ ! -x $(PY) ]; then \
  $(call find_python); \
  echo "dpjax: creating $(VENV) with $$python"; \
  rm -rf $(VENV); "$$python" -m venv $(VENV); \
fi
endef

# Installs a file in an empty environment, and runs tests/installed.py in an empty folder: without
# the optional packages, and with them. `make dist PYTHON=/path/to/python3.13 CONSTRAINTS=FILE` does
# so with another Python and other versions.
CONSTRAINTS ?= $(VERSIONS)
define try
set -e; \
work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; \
$(or $(PYTHON),$(PY)) -m venv "$$work/env"; mkdir "$$work/empty"; \
pip() { "$$work/env/bin/python" -m pip --disable-pip-version-check install -q $(addprefix -c ,$(CONSTRAINTS)) "$$@"; }; \
try() { (cd "$$work/empty" && "$$work/env/bin/python" -I "$(CURDIR)/tests/installed.py"); }; \
for file in $(1); do \
  echo "dpjax: trying $$file in an empty environment"; \
  pip "$$file"; try; \
  pip scikit-learn pillow matplotlib; rm -rf "$$work/empty"/*; try; \
done
endef

# Takes the first Python that is new enough and can make environments; else says what was found.
define find_python
python=; found=; \
for candidate in $(if $(PYTHON),"$(PYTHON)",python3.11 python3.12 python3.13 python3.14 python3 python); do \
  command -v "$$candidate" >/dev/null 2>&1 || continue; \
  version=$$("$$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=broken; \
  if ! "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
    found="$$found $$candidate ($$version)"; \
  elif ! "$$candidate" -c 'import ensurepip, venv' 2>/dev/null; then \
    found="$$found $$candidate ($$version, without venv: on Debian or Ubuntu, install python$$version-venv)"; \
  else python=$$candidate; break; fi; \
done; \
if [ -z "$$python" ]; then \
  echo "dpjax: needs Python 3.11 or newer, with its venv module. Found:$${found:- no Python$(if $(PYTHON), at $(PYTHON))}." >&2; \
  echo "       Install one (python.org, your package manager, or conda), or name one:" >&2; \
  echo "       make $(or $(MAKECMDGOALS),test) PYTHON=/path/to/python3.12" >&2; \
  exit 1; \
fi
endef

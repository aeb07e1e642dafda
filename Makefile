# What a developer of crow does. `make` lists the targets; each makes .venv by itself on first use.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# uv when it is there, else pip. constraints.txt names all that is needed, so that nothing else is ever fetched.
UV := $(shell command -v uv 2>/dev/null)
MAKE_VENV := $(if $(UV),uv venv --quiet --python $(PYTHON),$(PYTHON) -m venv)
INSTALL := $(if $(UV),uv pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --disable-pip-version-check)

.DEFAULT_GOAL := help
.PHONY: help setup run test test-long check format schemas conformance interop interop-sdk interop-acp-check interop-gateway interop-llama interop-page soak soak-store soak-repair soak-parser soak-shown soak-compaction soak-accounts soak-wires soak-wire soak-subagents soak-bridge soak-connections soak-cluster soak-messages soak-feed soak-layers soak-children soak-replay soak-tests bench compare eval site pictures build archives registry clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12 make ... picks the interpreter (3.11 or newer) that .venv is made with."

setup: $(READY) ## make .venv with everything that the other targets need

$(READY): pyproject.toml packages/acp-check/pyproject.toml packages/crow-channels/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "$(PYTHON) is not Python 3.11 or newer; name one that is: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(MAKE_VENV) .venv || { \
	  rm -rf .venv; echo "$(PYTHON) cannot make .venv; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "installing into .venv ..."
	@$(INSTALL) --requirement constraints.txt
	@$(INSTALL) --no-build-isolation --no-deps --editable . --editable packages/acp-check --editable packages/crow-channels
	@touch $@

run: $(READY) ## show what crow does, without a key
	@$(BIN)/crow demo

# Three processes keep two cores busy, because tests also wait.
test: $(READY) ## run the tests, except those that take long
	$(BIN)/pytest -m "not long" --numprocesses 3
	cd packages/acp-check && ../../$(BIN)/pytest --numprocesses 3
	cd packages/crow-channels && ../../$(BIN)/pytest --numprocesses 3

# About 200 test functions, which take half of the time: processes killed anywhere, hostile streams, whole sessions.
test-long: $(READY)
	$(BIN)/pytest -m long --numprocesses 3

check: $(READY) ## check format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd packages/acp-check && ../../$(BIN)/mypy
	cd packages/crow-channels && ../../$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY) ## put every file into the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

schemas: $(READY) ## write the generated files below schemas/ anew
	$(BIN)/python schemas/generate.py

interop: interop-sdk interop-acp-check interop-gateway interop-llama ## try crow with published programs of others, on the loopback

# The protocol's TypeScript SDK drives crow, over stdio and over its WebSocket client: needs Node 20 and npm.
interop-sdk: $(READY)
	@mkdir -p build/interop
	@cp tests/interop/package.json tests/interop/sdk.mjs tests/interop/sdk_v2.mjs build/interop/
	npm install --prefix build/interop --no-package-lock --no-audit --no-fund --loglevel error
	CROW='["$(CURDIR)/$(BIN)/python","-m","crow"]' node --test build/interop/sdk.mjs build/interop/sdk_v2.mjs
	CROW='["$(CURDIR)/$(BIN)/python","-m","crow"]' CROW_OPTIONS='["--experimental-v2"]' node --test build/interop/sdk.mjs
	CROW_SERVE=1 CROW='["$(CURDIR)/$(BIN)/python","-m","crow"]' node --test build/interop/sdk.mjs

# acp-check against crow and against small agents on the protocol's TypeScript and Python SDKs: needs Node 20 and npm.
interop-acp-check: $(READY)
	@mkdir -p build/interop
	@cp tests/interop/package.json tests/interop/agent.mjs build/interop/
	npm install --prefix build/interop --no-package-lock --no-audit --no-fund --loglevel error
	AGENT_MJS=$(CURDIR)/build/interop/agent.mjs $(BIN)/pytest tests/interop/acp_check.py

# The LiteLLM proxy and the server of llama.cpp, in a virtual environment of their own.
SERVERS := .venv-interop
INSTALL_SERVER = test -x $(SERVERS)/bin/python || $(MAKE_VENV) $(SERVERS); $(subst $(BIN)/python,$(SERVERS)/bin/python,$(INSTALL))

$(SERVERS)/.ready:
	@echo "installing the LiteLLM proxy into $(SERVERS) ..."
	@$(INSTALL_SERVER) 'litellm[proxy]==1.106.2'
	@touch $@

$(SERVERS)/.llama:
	@echo "installing the server of llama.cpp into $(SERVERS) ..."
	@$(INSTALL_SERVER) xllamacpp==2026.10.11549 gguf==0.19.0
	@touch $@

interop-gateway: $(READY) $(SERVERS)/.ready
	CROW_GATEWAY=$(CURDIR)/$(SERVERS)/bin/litellm $(BIN)/pytest tests/interop/gateway.py

# The page of crow serve in Chromium, with PAGE_FAULTS broken connections (1000): needs Chromium.
interop-page: $(READY)
	$(BIN)/pytest -s tests/interop/page.py

# A real inference server: its own tokens, streams, parser of tool calls, limits and usage. Its model is written by the test.
interop-llama: $(READY) $(SERVERS)/.llama
	CROW_LLAMA=$(CURDIR)/$(SERVERS)/bin/python $(BIN)/pytest tests/interop/inference.py

# The official conformance suite of MCP, on Node 22 from npm. SCENARIOS="NAME ..." runs only those.
conformance: $(READY) ## run the official conformance suite of MCP against crow: needs Node and npm
	@mkdir -p build/conformance
	npm install --prefix build/conformance --no-save --no-package-lock --no-audit --no-fund --loglevel error \
	  '@modelcontextprotocol/conformance@0.2.0-alpha.12' node@22.23.3
	$(BIN)/python -m tests.interop.conformance $(SCENARIOS)

soak: soak-store soak-repair soak-parser soak-shown soak-compaction soak-accounts soak-wires soak-wire soak-subagents soak-bridge soak-connections soak-cluster soak-messages soak-feed soak-layers soak-children soak-replay soak-tests ## what takes minutes: kills, mutated streams, random sessions, hostile messages

# SOAK_S seconds (120) each, at every statement of the store and at random instants of the process.
soak-store: $(READY)
	$(BIN)/pytest --timeout 0 tests/soak/soak_kills.py

# ROUNDS random destructive lines (1000) from SEED (1), some with killed processes.
soak-layers: $(READY)
	$(BIN)/python -m tests.soak.layers $(or $(ROUNDS),1000) $(or $(SEED),1)

# ROUNDS random orders of a session and nine subagents in layers (1000) from SEED (1), with kills.
soak-children: $(READY)
	$(BIN)/python -m tests.soak.children $(or $(ROUNDS),1000) $(or $(SEED),1)

# The tests of the suite, with all cases and ten times as many examples.
soak-tests: $(READY)
	CROW_SOAK=1 $(BIN)/pytest --timeout 0 --numprocesses 2

soak-repair: $(READY)
	$(BIN)/python -m tests.soak.repair $(or $(ROUNDS),3) $(or $(SEED),1)

soak-parser: $(READY)
	$(BIN)/python -m tests.soak.parser

soak-shown: $(READY)
	$(BIN)/python -m tests.soak.shown

# POINTS decision points (1000000) from SEED (1), on all cores or PROCESSES.
soak-compaction: $(READY)
	$(BIN)/python -m tests.soak.compaction $(or $(POINTS),1000000) $(or $(SEED),1) $(PROCESSES)

# SOAK_SESSIONS sessions (1000) on the three wires in turn, the first with SOAK_SEED (1000).
soak-replay: $(READY)
	SOAK_SESSIONS=$(or $(SOAK_SESSIONS),1000) $(BIN)/pytest --timeout 0 -n 2 tests/soak/soak_replay.py tests/telemetry/test_sessions.py

# SOAK_TURNS turns (1000) with random choices from SOAK_SEED (1), at most SOAK_MINUTES minutes (40) on each wire.
soak-accounts: $(READY)
	$(BIN)/python -m tests.soak.accounts

# SOAK_TURNS turns (1000) on all wires with random choices from SOAK_SEED (1).
soak-wires: $(READY)
	$(BIN)/python -m tests.soak.wires

# SOAK_MESSAGES hostile messages (50000), SOAK_SECONDS of fuzzing (30).
soak-wire: $(READY)
	$(BIN)/pytest --timeout 0 -s tests/soak/soak_wire.py

# 1,000 random orders of ends, cancels, loads and kills.
soak-subagents: $(READY)
	$(BIN)/python -m tests.soak.subagents

# SOAK_CUTS faults (1000) of a connection to a server, from SOAK_SEED (1).
soak-bridge: $(READY)
	$(BIN)/python -m tests.soak.bridge

# CLIENTS (10000) connections to one crow serve, and as many that never finish their request.
soak-connections: $(READY)
	$(BIN)/python -m tests.soak.connections

# FAULTS faults (1000) of three crow serve on one PostgreSQL, from SEED (1). SLOW (1): how much slower the machine is.
soak-cluster: $(READY)
	$(BIN)/python -m tests.soak.cluster

# SOAK_TURNS turns (1000) with random choices from SOAK_SEED (1), with an endpoint that checks what comes back.
soak-messages: $(READY)
	$(BIN)/pytest --timeout 0 -s tests/soak/soak_messages.py

# ORDERS random orders (10000) of turns, kills, loads and broken connections, from SEED (1).
soak-feed: $(READY)
	$(BIN)/python -m tests.soak.feed $(or $(ORDERS),10000) $(or $(SEED),1)

# MkDocs with the theme Material, in a virtual environment of its own. The build fails if a link leads nowhere.
SITE := .venv-site

$(SITE)/.ready: website/requirements.txt
	@echo "installing MkDocs into $(SITE) ..."
	@test -x $(SITE)/bin/python || $(MAKE_VENV) $(SITE)
	@$(subst $(BIN)/python,$(SITE)/bin/python,$(INSTALL)) --requirement website/requirements.txt
	@touch $@

site: $(SITE)/.ready ## build the website into build/site/
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --config-file website/mkdocs.yml

pictures: $(READY) $(SITE)/.ready ## record crow for the README and the website, into docs/pictures/
	$(SITE)/bin/python website/pictures.py

bench: $(READY) ## measure everything; the figures go below build/bench/
	$(BIN)/python -m benchmarks

compare: $(READY) ## measure crow and the other agents on PATH or in CROW_COMPARE, into BENCHMARKS.md
	$(BIN)/python -m benchmarks.compare

eval: $(READY) ## measure summaries of the model at CROW_EVAL_BASE_URL
	$(BIN)/python -m benchmarks.summaries

build: $(READY) ## build the distributions into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --wheel --outdir dist packages/acp-check
	$(BIN)/python -m build --no-isolation --wheel --outdir dist packages/crow-channels

# uv fetches a relocatable Python for each platform, whose checksums it knows, and the wheels of constraints.txt.
# PLATFORMS="linux-x86_64 ..." makes only those, PYTHONS="linux-x86_64=DIR ..." names Pythons that need not be fetched,
# DOWNLOADS is the address below which the archives will be published.
FETCHER := .venv-archives

$(FETCHER)/.ready:
	@test -x $(FETCHER)/bin/python || $(MAKE_VENV) $(FETCHER)
	@$(subst $(BIN)/python,$(FETCHER)/bin/python,$(INSTALL)) uv==0.13.9
	@touch $@

archives: $(READY) $(FETCHER)/.ready ## make archives with a Python of their own, for five platforms, into dist/
	rm -rf build/archives/wheel
	$(BIN)/python -m build --no-isolation --wheel --outdir build/archives/wheel
	$(BIN)/python -m release --uv $(FETCHER)/bin/uv --wheel build/archives/wheel/*.whl --downloads '$(DOWNLOADS)' \
	  $(addprefix --platform ,$(PLATFORMS)) $(addprefix --python ,$(PYTHONS))

registry: $(READY) ## write registry/agent.json anew
	$(BIN)/python -m release.registry

clean: ## remove .venv and everything that was made
	rm -rf .venv $(SERVERS) $(SITE) $(FETCHER) dist build .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find crow packages release tests schemas -name __pycache__ -type d -prune -exec rm -rf {} +

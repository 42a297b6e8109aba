# Each target does its own set-up in .venv; only make and Python >= 3.11 are needed. Another Python: make PYTHON=... test

PYTHON ?= python3
STAGE := sh .ci/stage
BIN := .venv/bin

export PYTHON
export OMP_NUM_THREADS ?= 1
# Where the tests of the pages leave a picture of each; ignored by git.
export SCREENSHOTS ?= $(CURDIR)/build/screenshots

.PHONY: help demo test docs bench gpu-check clean

help:
	@echo "make demo    the founding case live, then two recordings of a real vLLM: which cause owns how much (ends by itself)"
	@echo "make test    style, types, layers and every test that can run here"
	@echo "make bench   what starting the command costs, beside a bare python (the other benchmarks: bench/README.md)"
	@echo "make gpu-check  on a machine with a GPU: kernels, memory, recorder and roofline measured into bench/gpu.md"
	@echo "make docs    write the generated parts of README.md"
	@echo "make clean   remove what the targets made"

demo:
	@$(STAGE) "set-up" sh .ci/venv service,engine
	@$(STAGE) "demo" $(BIN)/kvscope demo

test:
	@$(STAGE) "set-up" sh .ci/venv service,engine,lake,dev
	@$(STAGE) "style" sh -c '$(BIN)/ruff check . && $(BIN)/ruff format --check .'
	@$(STAGE) "types" $(BIN)/mypy
	@$(STAGE) "layers" $(BIN)/lint-imports
	@$(STAGE) "tests" $(BIN)/python -m pytest --durations=10 $(ARGS)
	@if [ -d "$(SCREENSHOTS)" ]; then echo "pictures of the pages: $(SCREENSHOTS)"; fi

docs:
	@$(STAGE) "set-up" sh .ci/venv service,engine,lake,dev
	@$(STAGE) "README.md" $(BIN)/python docs/readme.py

bench:
	@$(STAGE) "set-up" sh .ci/venv service,engine,lake,dev
	@$(STAGE) "start-up" $(BIN)/python bench/startup.py

gpu-check:
	@$(STAGE) "GPU check" sh .ci/gpu-check

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis demo-out build dist

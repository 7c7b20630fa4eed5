# make demo   the whole story on the shipped models, no network (first use installs what it needs)
# make test   every test
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: env demo test browser ray lint format bench show-01 show-02 show-03 show-04 show-05 show-06 show-07 clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that nothing else chooses its version
$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) -e '.[dev,view,peft]' accelerate
	touch $@

env: $(VENV)/.dev

demo: $(VENV)/.core
	$(BIN)/budwood demo

# a browser for the tests of pages, where this machine may install one; without it those tests skip and say so
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && \
	    apt-get -qq install -y --no-install-recommends chromium >/dev/null; } || \
	  echo "no chromium: tests in a browser will be skipped"

test: env browser
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: env
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src docs README.md CONTRIBUTING.md CHANGELOG.md

format: env
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

bench: env
	$(BIN)/python benchmarks/finetune.py
	$(BIN)/python benchmarks/linear.py
	$(BIN)/python benchmarks/graft.py

show-01: env
	$(BIN)/python benchmarks/show_01.py

show-02: env
	$(BIN)/python benchmarks/show_02.py

show-03: env
	$(BIN)/python benchmarks/show_03.py

show-04: env
	$(BIN)/python benchmarks/show_04.py

show-05: env
	$(BIN)/python benchmarks/show_05.py

show-07: env browser
	$(BIN)/python benchmarks/show_07.py

# Ray is an extra: what needs it is skipped by name without `make ray`
ray: env
	$(PIP) -e '.[ray]'

show-06: env
	$(BIN)/python benchmarks/show_06.py

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache

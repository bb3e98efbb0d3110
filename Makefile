# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Images of containers tell Python to keep no compiled modules. Here each process that imports torch
# would compile it anew, and the tests start hundreds: 4.0 s of a core each in place of 1.7.
export PYTHONDONTWRITEBYTECODE :=
# More processes than cores: half of what the tests take, some of them wait.
PYTEST := $(BIN)/python -m pytest -p tests.side_by_side --processes 4
# Versions of Triton that the kernels must compile with.
TRITONS ?= 3.6.0 3.7.1 3.8.0 3.9.0
# Which tests run with the newest and the oldest versions; 'not gpu' takes the slow ones, too.
ROWS ?= not gpu and not slow
PROMPT ?= Once upon a time, there was a little rabbit

.PHONY: site docs-test demo test test-rest test-slow test-newest test-oldest check lint mutants compile-matrix bench docs dist clean

demo: $(VENV)/.installed ## install tilewise and let the packaged model tell a story
	$(BIN)/tilewise generate --prompt "$(PROMPT)"

test: lint ## what a change should pass while it is made: rules, types, a part of each test's rows
	@# Types are checked beside the tests: mypy has one thread, and tests wait here and there.
	@mkdir -p .cache; $(BIN)/mypy > .cache/types.log 2>&1 & types=$$!; \
	$(PYTEST) -m 'not gpu and not slow and brief'; tests=$$?; \
	wait $$types; types=$$?; cat .cache/types.log; test $$tests = 0 -a $$types = 0

test-rest: $(VENV)/.installed-test ## the other quick tests: all must hold before a change lands
	$(PYTEST) -m 'not gpu and not slow and not brief'

test-slow: $(VENV)/.installed-test ## the rows and sweeps that make test leaves out; far longer
	$(PYTEST) -m 'slow and not gpu'

test-newest: ## types and tests with the newest version of every package, in an environment of its own
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --no-compile --upgrade --upgrade-strategy eager -e '.[test,dev,plot]'
	.venv-newest/bin/mypy
	.venv-newest/bin/python -m pytest -p tests.side_by_side --processes 4 -m '$(ROWS)'

test-oldest: ## tests with the lower bound of every package that pyproject.toml names, likewise
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	$(PYTHON) -m tests.lower_bounds > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --no-compile -c .venv-oldest/constraints.txt -e '.[test,plot]'
	.venv-oldest/bin/python -m pytest -p tests.side_by_side --processes 4 -m '$(ROWS)'

check: lint ## format, lint and types
	$(BIN)/mypy

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

mutants: $(VENV)/.installed-test ## plant the known mistakes one by one: every one must be seen
	$(BIN)/python -m tests.mutants
	$(PYTEST) -q tests/engine/test_planted_mistakes.py
	$(PYTEST) -q -m 'slow or not slow' -k 'mistake' \
	  tests/kernels/gluon/test_mutations.py tests/kernels/gluon/test_mma.py tests/kernels/gluon/test_schedules.py \
	  tests/kernels/gluon/test_fp8_emulated.py tests/kernels/gluon/test_mla.py \
	  tests/kernels/gluon/test_mla_bytes.py tests/tools/test_emulator.py \
	  tests/kernels/gluon/test_one_visible_key.py tests/kernels/gluon/test_max_logits.py

compile-matrix: $(VENV)/.installed-test ## compile every kernel with every supported Triton, without a GPU
	for version in $(TRITONS); do \
	  folder=.cache/triton-$$version; \
	  test -d $$folder/triton || $(BIN)/python -m pip install --quiet --no-deps --target $$folder triton==$$version || exit 1; \
	  echo "Triton $$version"; \
	  PYTHONPATH=$$folder $(BIN)/python -m pytest -q -m 'slow or not slow' tests/kernels/test_compile.py tests/kernels/test_sass.py || exit 1; \
	done

bench: $(VENV)/.installed-test ## measure this machine, side by side with torch
	$(BIN)/tilewise bench ops --device cpu
	$(BIN)/tilewise bench attention --device cpu
	$(BIN)/tilewise bench engine

docs: $(VENV)/.installed-test ## redraw plots and pages of docs/ from the committed results
	$(BIN)/python lab/plots/overview_plot.py
	$(BIN)/python lab/plots/attention_plots.py
	$(BIN)/python lab/plots/hopper_plots.py
	$(BIN)/python lab/plots/ampere_plots.py
	$(BIN)/python lab/plots/decode_plots.py
	$(BIN)/python lab/plots/memory_plot.py
	$(BIN)/python lab/plots/engine_plots.py
	$(BIN)/python lab/plots/simulate_plots.py
	$(BIN)/python lab/plots/swap_plots.py
	$(BIN)/python -m tools.site.results
	$(BIN)/python -m tools.site.recipes

dist: $(VENV)/.installed-test ## both archives in dist/, built twice to the same bytes, and tested
	rm -rf dist .cache/dist-again
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python -m build --no-isolation --outdir .cache/dist-again .
	for file in dist/*; do cmp $$file .cache/dist-again/$$(basename $$file) || exit 1; done
	$(BIN)/python -m pytest -q -m 'slow or not slow' tests/test_release.py tests/test_wheel.py
	test -x .cache/twine/bin/twine || { $(PYTHON) -m venv .cache/twine && .cache/twine/bin/pip install --quiet twine; }
	.cache/twine/bin/twine check --strict dist/*

site: $(VENV)/.installed-docs ## build the site of docs/ into build/site, without the network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "read it with: $(BIN)/python -m http.server --directory build/site"

docs-test: $(VENV)/.installed-docs ## build the site strictly, look at its links, run the notebooks
	$(PYTEST) -m 'not gpu' tests/tools/site tests/learn

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest build dist .cache .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tilewise needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# Of some 18,000 modules that are installed a run imports a third: Python compiles those when it does.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[test,dev,plot]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[docs]'
	touch $@

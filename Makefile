# The two commands of the README. `make demo PYTHON=python3.12` takes another interpreter.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: install demo test

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, but this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --constraint constraints.txt --editable '.[test]'
	touch $@

demo: install
	$(RUN) workflows/demo.py

test: install
	$(RUN) -m pytest

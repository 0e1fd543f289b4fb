"""The equations of the paper as code: read `equations.py` first."""

"""Checks and drawings of a data set."""

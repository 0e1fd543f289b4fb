"""Experiments: grids of runs, and their reports."""

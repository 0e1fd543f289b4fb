"""Experiments: grids of runs, and what they say."""

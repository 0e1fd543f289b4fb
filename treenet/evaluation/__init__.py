"""Evaluation: scores of splits, their origin, comparisons and tests."""

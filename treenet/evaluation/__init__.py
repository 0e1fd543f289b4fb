"""Evaluation: scores of splits, what they were made of, comparisons and tests."""

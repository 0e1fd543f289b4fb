"""Analyses of trained models: where they look, and what they do with a wrong tree."""

"""Translating with trained models: search, scores, and reading runs."""

"""Translation with trained models: search, ensembles, and translators of raw lines."""

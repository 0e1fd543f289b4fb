"""The kinds of training: their data, models, losses, metrics and scores."""

"""Shards to batches to models to scores."""

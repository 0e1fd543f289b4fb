"""Shards to batches to models to scores."""

from treeproc import __version__

__all__ = ["__version__"]

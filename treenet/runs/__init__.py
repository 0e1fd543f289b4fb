"""The folder of a run: checkpoints, recorded facts, metrics, and its mirror of an object store."""

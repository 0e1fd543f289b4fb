"""The folder of a run: checkpoints, their average, the trained model, facts, metrics, and its mirror of an object store."""

"""Run folders: checkpoints, their average, the trained model, facts, metrics, and a mirror of an object store."""

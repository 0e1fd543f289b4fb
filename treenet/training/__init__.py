"""The training engine: batches, updates, validations and checkpoints of any task, on one rank or several."""

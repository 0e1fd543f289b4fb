"""The engine of training: batches, updates, validations and checkpoints of any task, on one rank or several."""

"""Training: losses, the loop, checkpoints, Ray Train."""

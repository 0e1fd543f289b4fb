"""Training jobs: a run from its configuration to its averaged model, in this process or on Ray."""

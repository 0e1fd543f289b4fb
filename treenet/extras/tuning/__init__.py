"""A search for settings with Optuna and Ray Tune, with the same number of trials for each system."""

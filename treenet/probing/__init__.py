"""Linear probes of syntax: linear classifiers on the states of a trained encoder."""

"""Linear probes: what of the syntax of a sentence can be read off the states of a trained encoder."""

"""One page about training runs: what was run, scores, curves, and where the models look."""

"""Reports: one page about training runs, with settings, scores, curves and attention."""

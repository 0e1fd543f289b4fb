"""Loaded last by a process that others are forked from: a fork that goes through loaded modules for garbage copies them all.

That takes a fork a CPU second each time.
"""

import gc

gc.freeze()
gc.set_threshold(10_000, 10, 50)  # as in the testers

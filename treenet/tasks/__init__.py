"""The kinds of training: their data, models, losses, metrics and scores.

One more is a file of this room, a line in `registry.py`, its name and settings in `treenet/config/training.py`, and its tests.
"""

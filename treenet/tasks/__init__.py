"""The tasks of training: their data, models, losses, metrics and scores.

A new task needs a file in this room, a line in `base.py`, its name and settings in `treenet/config/tasks.py`, and tests.
"""

"""Parts that training and scoring can do without: a server, exports, loggers of other programs, learned metrics, a search for
settings.

No other room imports this one at its start. Commands do; `evaluation/learned_metrics.py` does where a metric is asked for, and
`loggers/feed.py` where the setting `loggers` names a file.
"""

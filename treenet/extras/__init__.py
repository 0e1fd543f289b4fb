"""Parts that training and scoring can do without: a server, exports, loggers of other programs, learned metrics, a search for
settings.

No other room imports this one. Commands do, and the setting `loggers` names its files.
"""

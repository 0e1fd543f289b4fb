"""What training and scoring can do without: a server, exports, loggers of other programs.

No other room imports this one. Commands do, and the setting `loggers` names its files.
"""

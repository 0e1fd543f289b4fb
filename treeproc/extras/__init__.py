"""Parts that preprocessing can do without: parsers of other packages, and the training of parsers.

No other room imports this one. `treeproc.parsers.config.PARSERS` names the parsers, and the command `train-parser` the training.
"""

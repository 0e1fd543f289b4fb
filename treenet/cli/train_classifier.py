"""`tree-attention train-classifier`: the command `train`, which without a configuration trains a classifier."""

from functools import partial

from treenet.cli import train

main = partial(train.main, sample=None, task="classification")

"""`tree-attention train-lm`: the command `train`, which without a configuration trains a masked language model."""

from functools import partial

from treenet.cli import train

# The default model of translation is none for language models.
main = partial(train.main, sample="masked_lm_sample", task="masked_lm", model={"name": "transformer"})

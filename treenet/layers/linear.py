"""Linear layers with the field's initialisation."""

from torch import nn

# The gain of queries, keys and values in torch.nn.MultiheadAttention and fairseq. If it is 1, a small model learns to read the
# source about a third later.
ATTENTION_GAIN = 2**-0.5


def build_linear(d_in: int, d_out: int, num_blocks: int = 1, gain: float = 1.0, bias: bool = True) -> nn.Linear:
    """Build a linear layer of `num_blocks` fused maps d_in -> d_out. Each map is Xavier-uniform by itself; biases are 0.

    Initialising the fused matrix as one would make its maps depend on their number.
    """
    linear = nn.Linear(d_in, num_blocks * d_out, bias=bias)
    for block in linear.weight.chunk(num_blocks):
        nn.init.xavier_uniform_(block, gain)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear

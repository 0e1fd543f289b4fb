"""Linear layers with the field's initialisation."""

from torch import nn

# Of queries, keys and values, as in torch.nn.MultiheadAttention and fairseq: with 1 a small model learns to read the source
# about a third later.
ATTENTION_GAIN = 2**-0.5


def build_linear(d_in: int, d_out: int, num_blocks: int = 1, gain: float = 1.0) -> nn.Linear:
    """A linear layer of `num_blocks` fused maps d_in -> d_out; each map is Xavier-uniform on its own, biases are 0.

    Initialising the fused matrix as one would make its maps depend on how many there are.
    """
    linear = nn.Linear(d_in, num_blocks * d_out)
    for block in linear.weight.chunk(num_blocks):
        nn.init.xavier_uniform_(block, gain)
    nn.init.zeros_(linear.bias)
    return linear

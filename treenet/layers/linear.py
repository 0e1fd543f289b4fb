"""Linear layers with the field's initialisation."""

from torch import nn


def build_linear(d_in: int, d_out: int, num_blocks: int = 1, bias: bool = True) -> nn.Linear:
    """A linear layer of `num_blocks` fused maps d_in -> d_out; each map is Xavier-uniform on its own, biases are 0.

    Initialising the fused matrix as one would shrink every map by the wrong fan-out.
    """
    linear = nn.Linear(d_in, num_blocks * d_out, bias=bias)
    for block in linear.weight.chunk(num_blocks):
        nn.init.xavier_uniform_(block)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear

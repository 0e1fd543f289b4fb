"""Weights in parts, one per rank (FSDP2), for models that do not fit into one GPU.

Every rank holds its part of all weights, gradients, moments of the optimiser and moving averages. A layer gathers its weights
from all ranks before it computes, and sums the gradient over them. So `MicroBatches` gives all ranks the same number of
micro-batches. Checkpoints hold complete tensors, as without sharding.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.nn.utils import get_total_norm

from treenet.layers.blocks import DecoderLayer, EncoderLayer
from treenet.runs.checkpoint import complete, local_part
from treenet.training.ranks import Ranks


def shard_model(model: nn.Module, ranks: Ranks, output: str, sum_dtype: torch.dtype | None) -> None:
    """Cut the weights of a model into parts, and move them to the rank's device.

    `output` is the method that computes the model's output. Transformer layers are gathered one by one, all other weights once in
    a pass. Gradients are added in `sum_dtype`, or as they are.
    """
    # Keys and values, which a decoder's layer returns for search, are views. Nothing changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    policy = MixedPrecisionPolicy(reduce_dtype=sum_dtype)
    for module in list(model.modules()):
        if isinstance(module, EncoderLayer | DecoderLayer):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    # The loss reads the table of pieces after the forward pass.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, output)  # training calls the method, also `forward`, and not the module


class ShardedGradient:
    """The gradients of a sharded model, which FSDP sums over the ranks; see `FlatGradient`."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def zero(self) -> None:
        """Begin a new gradient."""
        torch._foreach_zero_([local_part(gradient) for gradient in self._gradients()])

    def sum(self, ranks: Ranks, dtype: torch.dtype | None) -> None:
        """Do nothing: every backward pass has already added the gradients of all ranks."""

    def norm(self) -> Tensor:
        """Return the norm [] of the gradient of all ranks."""
        return complete(get_total_norm(self._gradients()))

    def finish_pass(self) -> None:
        """Release the weights that a pass without backward leaves gathered. Otherwise they would miss the next update."""
        assert isinstance(self._model, FSDPModule)
        self._model.reshard()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Let a backward pass in this context add to the gradients."""
        yield

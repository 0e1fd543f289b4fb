"""Profiles of Hypothesis: the same examples in every run, or a search for new ones (`pytest --hypothesis-profile=search`)."""

import torch
from hypothesis import HealthCheck, register_random, settings

_NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a busy machine is no failure
# What passed once passes again.
settings.register_profile("fixed", derandomize=True, max_examples=40, **_NO_CLOCK)
settings.register_profile("search", derandomize=False, max_examples=1000, print_blob=True, **_NO_CLOCK)
settings.load_profile("fixed")


def num_examples(count: int, **options: object) -> settings:
    """Return the decorator of a test with `count` examples for every 100 of the profile: 40 in `fixed`, 1,000 in `search`."""
    return settings(max_examples=max(1, count * settings().max_examples // 100), **options)


class _TorchRandom:
    """PyTorch's generator, which Hypothesis seeds before every example, as those of Python and NumPy.

    `torch.manual_seed` would also note the seed for GPUs, and takes hundreds of times as long.
    """

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.default_generator.get_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.default_generator.set_state(state)


_TORCH_RANDOM = _TorchRandom()  # Hypothesis keeps a weak reference
register_random(_TORCH_RANDOM)

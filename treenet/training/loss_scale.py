"""The factor of losses in float16, in which small gradients would become 0. It grows until a gradient is not finite."""

import torch
from torch import Tensor

FIRST_SCALE, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000  # as of torch.amp.GradScaler


class LossScale:
    """A factor on the device. It follows from the updates that were skipped, and the host does not wait for it."""

    def __init__(self, device: torch.device):
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self._updates = torch.zeros((), dtype=torch.int32, device=device)  # updates without a skip since it last changed

    def update(self, skipped: Tensor) -> None:
        """Count an update, which was skipped if `skipped` [] float32 is 1."""
        torch._amp_update_scale_(self.scale, self._updates, skipped, GROWTH, BACKOFF, INTERVAL)

    def state(self) -> tuple[float, int]:
        """Return the factor, and the updates since it last changed."""
        return self.scale.item(), int(self._updates.item())

    def load(self, state: tuple[float, int]) -> None:
        """Continue from `state`."""
        self.scale.fill_(state[0])
        self._updates.fill_(state[1])

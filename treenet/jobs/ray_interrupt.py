"""Ray Train's trainer with Ctrl-C as everywhere in Python."""

from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer


class InterruptibleTrainer(TorchTrainer):
    """A trainer whose `fit` raises KeyboardInterrupt. Ray Train's own handler ends the driver with status 1 and says nothing.

    No documentation promises the method that sets that handler, nor the controller that it gets. Where it is called no more,
    Ray's own handler stays, and the workers end with their driver.
    """

    _controller: ActorHandle | None = None

    def _register_sigint_handler(self, controller: ActorHandle) -> None:
        self._controller = controller

    def abort(self, timeout_s: float) -> None:
        """End workers and controller, where the controller is known."""
        if self._controller is not None:
            with suppress(RayError):  # the controller leaves without an answer
                ray.get(self._controller.abort.remote(), timeout=timeout_s)

"""Ray Train's trainer with the usual Ctrl-C of Python."""

from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.train.torch import TorchTrainer


class InterruptibleTrainer(TorchTrainer):
    """A trainer whose `fit` raises KeyboardInterrupt. Ray Train's own handler ends the driver with status 1 and prints nothing.

    The method that sets that handler is undocumented, and so is the controller that it gets. If Ray no longer calls it, Ray's own
    handler stays, and the workers end with their driver.
    """

    _controller: ActorHandle | None = None

    def _register_sigint_handler(self, controller: ActorHandle) -> None:
        self._controller = controller

    def abort(self, timeout_s: float) -> None:
        """End the workers and the controller, if the controller is known."""
        if self._controller is not None:
            with suppress(RayError):  # the controller exits without an answer
                ray.get(self._controller.abort.remote(), timeout=timeout_s)

"""Ray Train's trainer with the usual Ctrl-C of Python, and with workers in a room that is there already."""

from collections.abc import Sequence
from typing import Any

from ray.actor import ActorHandle
from ray.train.torch import TorchTrainer
from ray.util.placement_group import PlacementGroup, remove_placement_group

from treenet.jobs.ray_room import Room

try:
    from ray.train.v2._internal.execution.callback import WorkerGroupCallback
    from ray.train.v2._internal.execution.worker_group import placement_group_handle, worker_group
except ImportError:
    WorkerGroupCallback = placement_group_handle = worker_group = None


class InterruptibleTrainer(TorchTrainer):
    """A trainer whose `fit` raises KeyboardInterrupt. Ray Train's own handler ends the driver with status 1 and prints nothing.

    The method that sets that handler is undocumented, and so is the controller that it gets. If Ray no longer calls it, Ray's own
    handler stays, and the workers end with their driver.
    """

    controller: ActorHandle | None = None

    def _register_sigint_handler(self, controller: ActorHandle) -> None:
        self.controller = controller


def callbacks_into(room: Room) -> list:
    """Return the callbacks of Ray Train with which its workers use `room`. It is there until its owner gives it back.

    They replace undocumented names. Without them, the room is given back at once, and Ray Train asks for its own.
    """
    if hasattr(worker_group, "placement_group") and hasattr(placement_group_handle, "remove_placement_group"):
        return [_IntoRoom(room)]
    room.give_back()
    return []


if WorkerGroupCallback is not None:

    class _IntoRoom(WorkerGroupCallback):
        """In the process of Ray Train's controller, gives the room to each group of workers, instead of a new placement group.

        If workers die while they start, or a node is called back, the controller starts others by itself. Beside the room, there
        may never be place for them. Another number of workers needs another placement group, so the room is given back.
        """

        def __init__(self, room: Room):
            self._room: Room | None = room

        def before_worker_group_start(self, worker_group_context: Any) -> None:
            if (room := self._room) is None:
                return
            make = worker_group.placement_group

            def remove(group: PlacementGroup) -> None:
                if group is not room.group:
                    remove_placement_group(group)

            def placement_group(bundles: Sequence[dict], **options: Any) -> PlacementGroup:
                worker_group.placement_group = make
                if list(bundles) == list(room.bundles):
                    placement_group_handle.remove_placement_group = remove
                    return room.group
                self._room = None
                room.give_back()
                return make(bundles=bundles, **options)

            worker_group.placement_group = placement_group

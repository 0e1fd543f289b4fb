"""Room for the processes of a job on a Ray cluster: a demand that an autoscaler sees, and that ends with the driver.

A room is a placement group. While it is pending, the autoscaler starts nodes for it. It costs no process. When it is there, Ray
Train puts its workers into it, so that no other job takes the resources in between.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from treenet.config import TrainConfig
from treeproc.common.ray_internals import start_coordinator_here
from treeproc.common.ray_session import can_grow, describe_wait, sum_of
from treeproc.common.settings import UserError

# Rooms that a command asks for at a time. An autoscaler packs them into nodes, up to the largest size of its cluster.
MOST_PENDING = 64
# What a training of Ray Train takes on the head beside its room: two processes, which state no demand themselves.
ON_HEAD = ({"node:__internal_head__": 0.001, "memory": 250e6},)
# Seconds between two looks whether a room is there.
POLL_S = 0.5

# The room that a study or a search gave the training of this process, and the same until the training takes it.
_given: list["Room"] = []
_untaken: list["Room"] = []


def worker_resources(config: TrainConfig) -> dict[str, float]:
    """Return what Ray Train requests for one worker."""
    return {"GPU": 1.0} if config.use_gpu else {"CPU": 1.0}


def bundles_of(config: TrainConfig) -> list[dict[str, float]]:
    """Return the resources with which a training can begin: one bundle for each worker, or for each of `min_workers`."""
    return [worker_resources(config)] * (config.min_workers or config.workers)


@dataclass(frozen=True)
class Room:
    """A demand for `bundles`, and for others `beside` them, which may be fulfilled."""

    bundles: Sequence[dict[str, float]]
    group: PlacementGroup
    beside: Sequence[dict[str, float]] = ()

    @classmethod
    def ask(cls, bundles: Sequence[dict[str, float]], beside: Sequence[dict[str, float]] = ()) -> "Room":
        """State the demand. It ends with this driver, also if the driver is killed.

        Ray keeps a demand of a task whose process died. So a demand that replaces a given room ends with the given one, too.
        """
        name = ""
        if given := given_room():
            name, beside = given.group.id.hex(), given.beside
        return cls(bundles, placement_group([*bundles, *beside], strategy="PACK", name=name), beside)

    def node(self) -> str | None:
        """Return the node of the first bundle; None while the demand is pending."""
        facts = placement_group_table(self.group)
        return facts["bundles_to_node_id"][0] if facts.get("state") == "CREATED" else None

    def in_first_bundle(self) -> dict[str, Any]:
        """Return the options of a task that takes the resources of the first bundle."""
        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)
        needs = {"num_cpus": self.bundles[0].get("CPU", 0), "num_gpus": self.bundles[0].get("GPU", 0)}
        return needs | {"scheduling_strategy": place}

    def beside_workers(self) -> dict[str, Any]:
        """Return the options of a task that leaves the room to its workers, on the node of the first."""
        return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node() or "", soft=True)}

    def give_back(self) -> None:
        """End the demand, or free its resources, and those of the room that replaces it. More than once does no harm."""
        remove_placement_group(self.group)
        with suppress(ValueError):  # nothing replaces it
            remove_placement_group(get_placement_group(self.group.id.hex()))


@dataclass
class Rooms:
    """Demands for equal rooms. As a context manager, it ends those that were not taken."""

    bundles: Sequence[dict[str, float]]
    beside: Sequence[dict[str, float]] = ()
    _asked: list[Room] = field(default_factory=list)
    _since: float = 0.0

    def __post_init__(self) -> None:
        start_coordinator_here()

    def __enter__(self) -> "Rooms":
        return self

    def __exit__(self, *exception: object) -> None:
        self.want(0)

    def want(self, count: int) -> None:
        """Have `count` demands, at most MOST_PENDING."""
        while len(self._asked) < min(count, MOST_PENDING):
            if not self._asked:
                self._since = time.time()
            self._asked.append(Room.ask(self.bundles, self.beside))
        while len(self._asked) > count:
            self._asked.pop().give_back()

    def take(self) -> Room | None:
        """Return a room that is there now, for the caller to give back."""
        found = next((room for room in self._asked if room.node()), None)
        if found is not None:
            self._asked.remove(found)
            self._since = time.time()
        return found

    def describe(self) -> str:
        """Describe what the pending demands wait for; empty without one."""
        if not self._asked:
            return ""
        on_head = "".join(f", and {bundle['memory'] / 1e6:.0f} MB on the head" for bundle in self.beside)
        return describe_wait(self.bundles, self._since) + on_head


def refuse_more_than_there_is(config: TrainConfig) -> None:
    """Raise UserError if Ray runs in this process alone, and never has room for the workers. Clusters may get more nodes."""
    if can_grow() or not (there := ray.cluster_resources()):  # none: the node has just died, and `end_with_the_node` tells it
        return
    for kind, amount in sum_of(bundles_of(config)).items():
        if (found := there.get(kind, 0)) < amount:
            no_gpu = kind == "GPU" and not found
            remedy = "set use_gpu=false" if no_gpu else "lower workers, or set workers=0 to train without Ray"
            raise UserError(f"workers = {config.workers} need as many {kind}s, but Ray on this machine has {found:g}; {remedy}")


@contextmanager
def given_to_training(room: Room) -> Iterator[None]:
    """Let the next training of this process begin in this room."""
    _given.append(room)
    _untaken.append(room)
    try:
        yield
    finally:
        _given.clear()
        _untaken.clear()


def given_room() -> Room | None:
    """Return the room that the training of this process got; None for a training by itself."""
    return _given[-1] if _given else None


def is_in_its_room() -> bool:
    """Return whether this process is a task in the room that its training got."""
    room = given_room()
    return room is not None and get_current_placement_group() == room.group


def take_given() -> Room | None:
    """Return the room that the training of this process got, once."""
    return _untaken.pop() if _untaken else None

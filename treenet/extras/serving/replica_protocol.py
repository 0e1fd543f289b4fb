"""What the entrance expects of replicas."""

from typing import Protocol

from treenet.extras.serving.messages import Question, Served


class ReplicaLost(Exception):
    """The replica that was asked is gone."""


class NoAnswer(Exception):
    """Why a replica has no answer to a question."""


class Serving(Protocol):
    """Replicas of one model."""

    served: Served

    async def ask(self, question: Question) -> bytes:
        """Return the answer as JSON. Raises ReplicaLost or NoAnswer."""
        ...

    def running(self) -> int:
        """Return the number of replicas that run now."""
        ...

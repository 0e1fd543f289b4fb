"""Notes of the text stage about the lines of one shard. They are kept until the shards of a data set are complete."""

import hashlib
import json
import os
from dataclasses import dataclass

from treeproc.common.files import TEMPORARY_PREFIX, create
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath


@dataclass(frozen=True)
class ShardNotes:
    """Notices, as `TextNotices.parts` gives them, and dropped lines in the form of the list of all."""

    notices: dict
    dropped: bytes

    def write(self, folder: AnyPath, shard: str) -> None:
        """Write a file that is complete or not there. Raises UserError when the disk refuses.

        It is not synced. If a crash of the machine damages the file, its shard is read again.
        """
        head = json.dumps({"notices": self.notices, "sha256": hashlib.sha256(self.dropped).hexdigest()}).encode()
        if isinstance(folder, RemotePath):
            (folder / shard).write_bytes(head + b"\n" + self.dropped)
            return
        temporary = folder / f"{TEMPORARY_PREFIX}{os.getpid()}-{shard}"
        try:
            with create(temporary) as file:
                file.write(head + b"\n" + self.dropped)
                file.flush()
                os.replace(temporary, folder / shard)
        except OSError as error:
            raise UserError(
                f"cannot write {folder / shard}: {error.strerror}; free space, then run the same command again"
            ) from None


def read_notes(folder: AnyPath, shard: str) -> ShardNotes | None:
    """Read the notes of a shard; None if there are none, or damaged ones."""
    try:
        head, _, dropped = (folder / shard).read_bytes().partition(b"\n")
        facts = json.loads(head)
        complete = facts["sha256"] == hashlib.sha256(dropped).hexdigest()
        return ShardNotes(facts["notices"], dropped) if complete else None
    except (OSError, ValueError, LookupError, TypeError):
        return None

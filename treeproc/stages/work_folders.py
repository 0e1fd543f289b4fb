"""The folders in which tasks of the text stage leave what is not a shard, until the stage is complete."""

import re
import shutil
import time
from collections.abc import Mapping

from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, RemotePath
from treeproc.shards.store import fingerprint_of
from treeproc.stages.filters import FilterConfig
from treeproc.stages.input_cache import input_stamp
from treeproc.stages.text import Inputs
from treeproc.stages.text_warnings import Wanted

_WORK = ".work-"
_OURS = re.compile(rf"{re.escape(_WORK)}[0-9a-f]{{16}}")
# A change of what tasks leave in the work folder.
_VERSION = 4


def work_folder(out: AnyPath, inputs: Inputs, filters: FilterConfig, wanted: Mapping[str, Wanted]) -> AnyPath:
    """Return the work folder of a text stage: what lies in it is of these inputs, as they are now, and of these settings."""
    kinds = {side: one.kinds for side, one in wanted.items()}
    return out / f"{_WORK}{fingerprint_of(_VERSION, input_stamp(inputs), filters.identity(), kinds)}"


def remove_work(out: AnyPath) -> None:
    """Remove all work folders of a data set."""
    for work in work_folders(out):
        remove_folder(work)


def work_folders(out: AnyPath) -> list[AnyPath]:
    """Return all work folders of a data set."""
    found = out.folders() if isinstance(out, RemotePath) else out.glob(f"{_WORK}*")
    return [folder for folder in found if _OURS.fullmatch(folder.name)]


def remove_folder(work: AnyPath) -> None:
    """Remove a folder, to which a task of a job that was killed may still write for a moment."""
    if isinstance(work, RemotePath):
        return work.remove_objects()
    for _ in range(50):
        shutil.rmtree(work, ignore_errors=True)
        if not work.exists():
            return
        time.sleep(0.1)
    raise UserError(f"cannot remove {work}; remove it, and run the same command again")

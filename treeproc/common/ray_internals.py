"""Parts of Ray that its documentation does not promise, each with what holds where it is gone."""

import os
import traceback
from pathlib import Path

# Ray sets it in the process of a submitted job alone, and unpacks the job's working folder into a folder of that name.
_JOB_VARIABLE, _WORKING_FOLDERS = "RAY_JOB_CONFIG_JSON_ENV_VAR", "working_dir_files"


def in_submitted_job() -> bool:
    """Whether this process is a job of `ray job submit`, by its environment or by its working folder, a temporary copy."""
    if _JOB_VARIABLE in os.environ:
        return True
    try:
        return _WORKING_FOLDERS in Path.cwd().parts
    except FileNotFoundError:  # the folder is gone
        return False


def end_failed_start(error: Exception) -> None:
    """End the processes of a node whose start failed with `error`.

    Ray knows a node that has started; one that has not is known to the frames of the call alone, by its method that ends
    it. Without such a method they go on until this process ends.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if end := getattr(frame.f_locals.get("self"), "kill_all_processes", None):
            end(check_alive=False, allow_graceful=False)


def noted_address() -> tuple[str, int] | None:
    """Host and port that `ray start` on this machine left in a note; None without a note that can be read."""
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    try:
        host, _, port = note.read_text().strip().rpartition(":")
        return host, int(port)
    except (OSError, ValueError):
        return None

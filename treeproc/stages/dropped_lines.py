"""Why a line is not in a data set: the lists of dropped lines of its stages."""

from treeproc.common.folder_kinds import CONFIG
from treeproc.common.settings import UserError, load_settings
from treeproc.common.storage import AnyPath
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.job_report import DROPPED


def why_dropped(text: AnyPath, encoded: AnyPath, split: str, line: int) -> str | None:
    """Return why a job dropped a line, and which list of these stages says so; None if none of the lists has the line."""
    for folder, number in ((text, _line_of_files(text.parent, split, line)), (encoded, line)):
        path, wanted = folder / DROPPED, f"{split}\t{number}\t".encode()
        if path.exists():
            with path.open("rb") as file:
                if row := next((row for row in file if row.startswith(wanted)), None):
                    return f"{row.removeprefix(wanted).decode().strip()} in {path}"
    return None


def _line_of_files(data: AnyPath, split: str, line: int) -> int | None:
    """Return the number of a line in the list of the text stage; None if the settings of the data set cannot be read."""
    try:
        return load_settings(PreprocessConfig, data / CONFIG).inputs().line(split, line - 1)
    except UserError:
        return None

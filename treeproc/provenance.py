"""Which software made a file."""

import functools
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

DISTRIBUTION = "tree-attention"
_ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def software() -> dict[str, str | bool | None]:
    """Version of this software, its git commit, and whether the checkout had no changes; None where there is no checkout."""
    try:
        number = version(DISTRIBUTION)
    except PackageNotFoundError:
        number = None
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != _ROOT:  # installed, or inside another project's checkout
        return {"version": number, "commit": None, "clean": None}
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {"version": number, "commit": _git("rev-parse", "HEAD"), "clean": None if changes is None else not changes}


def _git(*arguments: str) -> str | None:
    """What git prints, without the last newline; None where it is missing or refuses."""
    try:
        found = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.rstrip("\n") if found.returncode == 0 else None

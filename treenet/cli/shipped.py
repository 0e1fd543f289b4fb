"""The shipped configurations.

    tree-attention configs           their names, and what each is for
    tree-attention configs sst5      the text of one

Other commands take a configuration by its name: --config NAME. To change one, save its text in another file.
"""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from treeproc.common.errors import UserError, shown
from treeproc.common.settings import ArgumentParser, Settings

CONFIGS = Path(__file__).parent / "configs"


def find_config(text: str) -> Path:
    """Return the file of `--config`: a path, or the name of a shipped configuration if no such file exists.

    Raises UserError if the file is missing and a shipped configuration has its name.
    """
    path = Path(text)
    if path.stem not in shipped_names() or path.exists():
        return path
    if text == path.stem:
        return CONFIGS / f"{text}.yaml"
    raise UserError(f"cannot read the configuration {text}: the file is missing; --config {path.stem} takes the shipped one")


def shipped_names() -> list[str]:
    """Return the names of the shipped configurations, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def main(argv: Sequence[str]) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.settings = Settings
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this configuration")
    name = parser.parse_intermixed_args(argv).name
    names = shipped_names()
    if name is None:
        print("\n".join(f"{one:45} {_summary(CONFIGS / f'{one}.yaml')}" for one in names))
        return
    if name not in names:
        raise UserError(f"there is no shipped configuration {shown(name)}; without a name, this command lists them")
    print((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"), end="")


def _summary(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return textwrap.shorten(first.removeprefix("#"), 100, placeholder=" ...")

"""The shipped configurations.

    tree-attention configs           their names, and what each is for
    tree-attention configs sst5      the text of one

Other commands take a configuration by its name: --config NAME. To change one, save its text in another file.
"""

import argparse
import textwrap
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from treeproc.common.command_line import ArgumentParser, Command, build_arg_parser, command
from treeproc.common.errors import UserError, quoted
from treeproc.common.settings import Settings, load_settings
from treeproc.common.storage import AnyPath

CONFIGS = Path(__file__).parent / "configs"

Given = TypeVar("Given", bound=Settings)


def find_config(text: str) -> Path:
    """Return the file of `--config`: a path, or the name of a shipped configuration if no such file exists.

    Raises UserError if there is neither. The message names the shipped configuration that the text may have meant.
    """
    path = Path(text)
    if path.exists() and not path.is_dir():
        return path
    is_name = text == path.stem
    if is_name and text in shipped_names():
        return CONFIGS / f"{text}.yaml"
    if path.stem in shipped_names():
        raise UserError(f"cannot read the configuration {text}: the file is missing; --config {path.stem} takes the shipped one")
    if path.is_dir() or not is_name:
        return path  # its reader says what is wrong
    raise UserError(f"cannot read the configuration {text}: there is no such file, and {_no_name(text)}")


def find_settings(args: argparse.Namespace, example: str, sample: Path | None = None) -> Path | None:
    """Return the configuration file of a command line; None if it has `key=value` alone.

    `example` shows settings that the command needs. `sample` is the configuration of --sample. Raises UserError if the command
    line has no settings, or both --config and --sample.
    """
    if args.sample and sample is None:
        raise UserError(f"--sample: this command has none; give settings as {example}, or --config FILE.yaml")
    if args.sample and args.config is not None:
        raise UserError("give --config FILE.yaml or --sample, not both")
    if not (args.sample or args.config or args.overrides):
        ways = [
            f"give settings as {example}",
            "--config FILE.yaml (tree-attention configs has examples)",
            *["--sample"] * bool(sample),
        ]
        raise UserError(", or ".join(ways))
    return sample if args.sample else args.config


def given_run(args: argparse.Namespace, sample: str = "train") -> AnyPath:
    """Return --out of a command that reads a run. Raises UserError if it is missing, or for --sample, which makes none."""
    if args.sample:
        raise UserError(f"--sample: this command has none; run tree-attention {sample} --sample, and give its folder as --out")
    if args.out is None:
        raise UserError("give --out RUN, the folder of a training run")
    return args.out


def on_a_run(
    doc: str | None, settings: type[Given], sample: str = "train"
) -> Callable[[Callable[[AnyPath, Given], None]], Command]:
    """Make a command of a function of a run, which is --out, and the settings."""

    def parser() -> ArgumentParser:
        return build_arg_parser(str(doc), settings, find_config=find_config, remote_out=True, reads_run=True)

    def make(run: Callable[[AnyPath, Given], None]) -> Command:
        return Command(parser, lambda args: run(given_run(args, sample), load_settings(settings, args.config, args.overrides)))

    return make


def _no_name(text: str) -> str:
    """Say that no shipped configuration has this name, and which one may be meant."""
    # A name may also be the beginning of another.
    close = get_close_matches(text, shipped_names(), 3, 0.7) or [name for name in shipped_names() if name.startswith(text)][:3]
    hint = f"did you mean {' or '.join(close)}?" if close else "tree-attention configs lists them"
    return f"there is no shipped configuration {quoted(text)}; {hint}"


def shipped_names() -> list[str]:
    """Return the names of the shipped configurations, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this configuration")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    name = args.name
    names = shipped_names()
    if name is None:
        print("\n".join(f"{one:45} {_summary(CONFIGS / f'{one}.yaml')}" for one in names))
        return
    if name not in names:
        raise UserError(_no_name(name))
    print((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"), end="")


def _summary(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return textwrap.shorten(first.removeprefix("#"), 100, placeholder=" ...")

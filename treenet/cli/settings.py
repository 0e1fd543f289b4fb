"""Look up settings: what they mean, what they take, their defaults, and what reads them.

    tree-attention settings optimizer.warmup_steps     one setting
    tree-attention settings decoding                   a section
    tree-attention settings max_tokens                 a word of another toolkit, or any word of the meanings
    tree-attention settings                            all settings

Write a setting as key=value on the command line, or into the file of --config.
"""

import argparse
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches
from pkgutil import resolve_name
from typing import NamedTuple

from treenet.cli.main import COMMANDS
from treenet.config.models import ModelConfig
from treeproc.common.command_line import ArgumentParser, command
from treeproc.common.errors import quoted
from treeproc.common.setting_facts import REQUIRED, describe_default, describe_values, list_settings
from treeproc.common.settings import UserError
from treeproc.common.synonyms import ELSEWHERE, SYNONYMS, settings_in

_WIDTH = 100


class Described(NamedTuple):
    """A setting as texts."""

    name: str
    values: str
    default: str
    meaning: str
    models: tuple[str, ...]  # names of the models that read it; empty: it is not of single models
    elsewhere: tuple[str, ...]  # words of other toolkits


def settings_of(command: str) -> list[Described]:
    """Return the settings of a command."""
    return [
        Described(
            name,
            describe_values(annotation),
            "" if default is REQUIRED else describe_default(default),
            description,
            _models(name),
            tuple(word for word in ELSEWHERE.get(name, "").split() if word != name.rpartition(".")[2]),
        )
        for name, annotation, default, description in list_settings(resolve_name(COMMANDS[command][0]).parser().settings)
    ]


def _models(name: str) -> tuple[str, ...]:
    """Return the models that read a setting of a section of single models."""
    section = f".{name}".partition(".model.")[2].partition(".")[0]
    field = ModelConfig.model_fields.get(section)
    return getattr(field.annotation, "architectures", ()) if field else ()


def _advice(word: str) -> str:
    """Return what a word of another toolkit means here; empty if it is none."""
    return SYNONYMS.get(word.lower().replace("-", "_"), "")


def find(known: Sequence[Described], word: str) -> list[Described]:
    """Return the settings of this name, of a section of it, and of the setting that another toolkit calls so.

    If there are none, return those that have the word in their names or meanings.
    """
    meant = settings_in(_advice(word))
    found = [one for one in known if f".{word}." in f".{one.name}." or any(f".{one.name}".endswith(f".{name}") for name in meant)]
    return found or [one for one in known if word.lower() in f"{one.name} {one.meaning}".lower()]


def show(one: Described, commands: Sequence[str]) -> str:
    """Return a setting as some lines for a terminal."""
    default = f"default: {one.default}" if one.default else "required"
    texts = [one.meaning, f"values: {one.values}; {default}", f"read by: {', '.join(commands)}"]
    texts += [f"models: {', '.join(one.models)}"] if one.models else []
    texts += [f"other toolkits: {', '.join(one.elsewhere)}"] if one.elsewhere else []
    return "\n".join([one.name, *(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ") for text in texts)])


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", metavar="KEY or WORD", help="show the settings of this name, section or word")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    word = args.word
    readers: dict[Described, list[str]] = {}
    for name in COMMANDS:
        for one in settings_of(name):
            readers.setdefault(one, []).append(name)
    found = [*readers] if word is None else find([*readers], word)
    advice = _advice(word or "")
    blocks = [f"{word} of other toolkits: {advice}"] if " " in advice else []
    blocks += [show(one, readers[one]) for one in found]
    if not blocks:
        names = {one.name.rpartition(".")[2]: one.name for one in readers}
        close = get_close_matches(str(word), names, 3)
        hint = f"did you mean {' or '.join(names[one] for one in close)}?" if close else "without a word, the command shows all"
        raise UserError(f"there is no setting {quoted(word)}, and no meaning has this word; {hint}")
    print("\n\n".join(blocks))

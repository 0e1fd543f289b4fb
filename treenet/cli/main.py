"""`tree-attention COMMAND ...`: finds the command and runs it. It imports only the module of that command."""

import difflib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from treeproc import __version__
from treeproc.common.errors import PROGRAM

# Commands in the order of the work, with their functions and what they do.
COMMANDS = {
    "demo": ("treenet.cli.demo:main", "the whole job on the shipped sample"),
    "preprocess": ("treenet.cli.preprocess:main", "text to trees to Arrow shards"),
    "inspect": ("treeproc.inspect:main", "the content of a data set as numbers and drawn trees"),
    "frozen-states": ("treenet.cli.frozen_states:main", "the states of a frozen pretrained encoder, computed once for many runs"),
    "verify": ("treeproc.verify:main", "check every file of a data set"),
    "train": ("treenet.cli.train:main", "train a model: for translation, a classifier, a language model"),
    "train-classifier": ("treenet.cli.train:train_classifier", "train, by default a classifier"),
    "train-lm": ("treenet.cli.train:train_lm", "train, by default a masked language model"),
    "train-parser": ("treenet.cli.train_parser:main", "train a tokeniser, a tagger and parsers on treebanks"),
    "average-checkpoints": ("treenet.cli.average_checkpoints:main", "average checkpoints of a run"),
    "evaluate": ("treenet.cli.evaluate:main", "translate a split and score it, or compare two systems"),
    "translate": ("treenet.cli.translate:main", "translate raw text"),
    "classify": ("treenet.cli.classify:main", "classify raw text"),
    "back-translate": ("treenet.cli.back_translate:main", "more training pairs, from text of the target language"),
    "align": ("treenet.cli.align:main", "align words of sentence pairs by the attention of a model"),
    "serve": ("treenet.cli.serve:main", "translate or classify over HTTP: a page, and JSON for programs"),
    "score-lm": ("treenet.cli.score_lm:main", "perplexity of a language model, and its choices in minimal pairs"),
    "export": (
        "treenet.cli.export:main",
        "a trained model for other programs: ONNX, CTranslate2, or a run folder that needs no data",
    ),
    "unsupervised-parse": ("treenet.cli.unsupervised_parse:main", "read and score the trees that a model found"),
    "probe": ("treenet.cli.probe:main", "probe an encoder for syntax"),
    "scaling": ("treenet.cli.study:scaling", "a study of models, data sizes and seeds in translation"),
    "compare-seeds": ("treenet.cli.study:compare_seeds", "a study of classifiers or language models over seeds"),
    "control": ("treenet.cli.control:main", "a positive control: does a model find a tree where a tree decides?"),
    "tune": ("treenet.cli.tune:main", "search for good settings, with the same number of trials for each system"),
    "report": ("treenet.cli.report:main", "one page about runs and studies"),
    "settings": ("treenet.cli.settings:main", "the meaning, default and range of settings, and the commands that read them"),
    "configs": ("treenet.cli.shipped:main", "list the shipped configurations, or print one"),
    "completion": ("treenet.cli.completion:main", "print a script for bash that completes commands, options and settings"),
}


def main() -> None:
    """Run the installed command `tree-attention`."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(describe_commands())
        return
    if arguments[0] == "--version":
        print(f"{PROGRAM} {__version__}")
        return
    name = arguments[0]
    if name not in COMMANDS:
        meant = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {meant[0]}?" if meant else f"{PROGRAM} --help lists the commands"
        _refuse(f"there is no command {name[:100]!r}; {hint}")
    run_command(name, arguments[1:])


def _refuse(message: str) -> NoReturn:
    from treeproc.common.command_line import run_cli
    from treeproc.common.settings import UserError

    def refuse(argv: Sequence[str]) -> None:
        raise UserError(message)

    run_cli(refuse)
    raise AssertionError("run_cli ends the process")


def describe_commands() -> str:
    """Return the text of `tree-attention --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    usage = f"usage: {PROGRAM} COMMAND ...\n       {PROGRAM} COMMAND --help\n       {PROGRAM} --version"
    begin = f"Begin with `{PROGRAM} demo`, which takes some minutes. COMMAND --help has examples and all settings."
    return "\n".join([usage, "", "Tree-structured attention with hierarchical accumulation.", "", "commands:", *lines, "", begin])


def run_command(name: str, arguments: list[str]) -> None:
    """Run a command of `COMMANDS` in this process."""
    sys.argv = [f"{PROGRAM} {name}", *arguments]
    with _first_word(name):
        from treeproc.common.command_line import run_cli

    def run(argv: Sequence[str]) -> None:
        with _first_word(name):
            command = resolve_name(COMMANDS[name][0])
        command(argv)

    run_cli(run)


def run_script(path: str) -> None:
    """Run the command of a script in `workflows/`."""
    run_command(command_of(Path(path).stem), sys.argv[1:])


def command_of(script: str) -> str:
    """Return the command of a script in `workflows/`: its name, with hyphens. `train_wmt` is a second script of `train`."""
    return "train" if script == "train_wmt" else script.replace("_", "-")


@contextmanager
def _first_word(name: str) -> Iterator[None]:
    """Show on a terminal that a command is being loaded, before anything of it is."""
    screen = sys.stderr
    if screen is None or "--quiet" in sys.argv or not screen.isatty():
        yield
        return
    screen.write(f"\r{name}: loading ...\x1b[K")
    screen.flush()
    try:
        yield
    finally:
        screen.write("\r\x1b[K")
        screen.flush()

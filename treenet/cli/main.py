"""`tree-attention COMMAND ...`: finds the command and runs it. It imports only the module of that command."""

import difflib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from treeproc import __version__
from treeproc.common.command_names import PROGRAM, command_of

# In a log, imports that are over sooner than this are not worth a line.
LOADING_S = 10.0
# Commands in the order of the work, with their modules and what they do.
COMMANDS = {
    "demo": ("treenet.cli.demo", "the whole job on the shipped sample"),
    "preprocess": ("treenet.cli.preprocess", "text to trees to Arrow shards"),
    "inspect": ("treeproc.inspect", "the content of a data set as numbers and drawn trees"),
    "verify": ("treeproc.verify", "check every file of a data set"),
    "train": ("treenet.cli.train", "train a model: for translation, a classifier, a language model"),
    "train-classifier": ("treenet.cli.train_classifier", "train, by default a classifier"),
    "train-lm": ("treenet.cli.train_lm", "train, by default a masked language model"),
    "train-parser": ("treenet.cli.train_parser", "train a tokeniser, a tagger and parsers on treebanks"),
    "average-checkpoints": ("treenet.cli.average_checkpoints", "average checkpoints of a run"),
    "evaluate": ("treenet.cli.evaluate", "translate a split and score it, or compare two systems"),
    "translate": ("treenet.cli.translate", "translate raw text"),
    "classify": ("treenet.cli.classify", "classify raw text"),
    "back-translate": ("treenet.cli.back_translate", "more training pairs, from text of the target language"),
    "align": ("treenet.cli.align", "align words of sentence pairs by the attention of a model"),
    "serve": ("treenet.cli.serve", "translate over HTTP: a page, and JSON for programs"),
    "score-lm": ("treenet.cli.score_lm", "perplexity of a language model, and its choices in minimal pairs"),
    "export": ("treenet.cli.export", "a trained model for other programs: ONNX, CTranslate2, or a run folder that needs no data"),
    "unsupervised-parse": ("treenet.cli.unsupervised_parse", "read and score the trees that a model found"),
    "probe": ("treenet.cli.probe", "probe an encoder for syntax"),
    "scaling": ("treenet.cli.scaling", "a study of models, data sizes and seeds in translation"),
    "compare-seeds": ("treenet.cli.compare_seeds", "a study of classifiers over seeds"),
    "control": ("treenet.cli.control", "a positive control: does a model find a tree where a tree decides?"),
    "tune": ("treenet.cli.tune", "search for good settings, with the same number of trials for each system"),
    "report": ("treenet.cli.report", "one page about runs and studies"),
    "configs": ("treenet.cli.shipped", "list the shipped configurations, or print one"),
    "completion": ("treenet.cli.completion", "print a script for bash that completes commands, options and settings"),
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
    name = command_of(arguments[0].replace("-", "_"))  # messages in a checkout name scripts: train_wmt is the command train
    if name not in COMMANDS:
        meant = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {meant[0]}" if meant else f"{PROGRAM} --help lists the commands"
        _refuse(f"there is no command {name[:100]!r}; {hint}")
    run_command(name, arguments[1:])


def _refuse(message: str) -> NoReturn:
    from treeproc.common.settings import UserError, run_cli  # here, as below

    def refuse(argv: Sequence[str]) -> None:
        raise UserError(message)

    run_cli(refuse)
    raise AssertionError("run_cli ends the process")


def describe_commands() -> str:
    """Return the text of `tree-attention --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    usage = f"usage: {PROGRAM} COMMAND ...\n       {PROGRAM} COMMAND --help\n       {PROGRAM} --version"
    return "\n".join([usage, "", "Tree-structured attention with hierarchical accumulation.", "", "commands:", *lines])


def run_command(name: str, arguments: list[str]) -> None:
    """Run a command of `COMMANDS` in this process, as its script in `workflows/` would."""
    sys.argv = [f"{PROGRAM} {name}", *arguments]  # by this name, messages know that the command is installed
    _run(name)


def run_script(path: str) -> None:
    """Run the command of a script in `workflows/`."""
    _run(command_of(Path(path).stem))


def _run(name: str) -> None:
    from treeproc.common.settings import run_cli  # here, because it imports pydantic, which `--help` does not need

    run_cli(lambda argv: _load(name, argv).main(argv))


def _load(name: str, arguments: Sequence[str]) -> ModuleType:
    """Import the module of a command. On a busy machine, PyTorch and other libraries take a minute: then a line tells so."""
    from treeproc.common.progress import phase

    asks_for_help = {"-h", "--help"} & {*arguments}
    with nullcontext() if asks_for_help else phase(f"loading the libraries of {name}", after=LOADING_S):
        return import_module(COMMANDS[name][0])

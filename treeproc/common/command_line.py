"""Command lines: arguments of commands, their end with one line for every mistake, and standard streams that the caller closed.

The caller closes streams with `2>&-`, or as some services do.
"""

import argparse
import atexit
import errno
import gc
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from treeproc.common.errors import (
    CommandEnded,
    UserError,
    describe_missing,
    importing,
    one_line,
    quoted,
    running_command,
)
from treeproc.common.files import way_out
from treeproc.common.interrupts import careful_interrupts
from treeproc.common.messages import choose_messages, messages_shown, phase, warn
from treeproc.common.ray_session import FAILED, describe_ray_failure
from treeproc.common.setting_errors import explain_unknown, nearest
from treeproc.common.setting_facts import describe_fields
from treeproc.common.settings import Settings
from treeproc.common.storage import AnyPath, RemotePath, as_path
from treeproc.common.store_requests import tell_repeats

# Commands and options whose result is what they print.
_PRINTING_COMMANDS, _PRINTING_OPTIONS = {"configs", "inspect", "settings"}, {"--dry-run", "--help", "-h"}
_output_is_lost = False
# Errors of the file system that a user can resolve.
_REFUSED = [
    "ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EEXIST", "ENOTDIR", "EISDIR", "ENOENT", "ENAMETOOLONG", "ELOOP",
    "ENOTEMPTY", "EBUSY", "ETXTBSY", "EINVAL", "EIO", "ENODEV", "ENXIO", "EXDEV", "EMLINK", "EMFILE", "ENFILE", "ENOMEM",
    "ESTALE", "EOPNOTSUPP",
]  # fmt: skip
_REFUSALS = {getattr(errno, name) for name in _REFUSED}
# In a log, imports that are over sooner than this are not worth a line.
LOADING_S = 10.0
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + SIGINT, 128 + SIGPIPE


@contextmanager
def loading() -> Iterator[None]:
    """Tell that a command loads its libraries: on a busy machine, PyTorch takes a minute. For the imports after the settings."""
    with phase(f"loading the libraries of {running_command()}", after=LOADING_S), importing():
        yield


def split_arguments(cls: type[Settings], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (paths, `key=value` settings) of a command that takes both. A path may have "=" in it, as `runs/lr=0.1`."""

    def is_path(argument: str) -> bool:
        key, equals, _ = argument.partition("=")
        if not equals or "/" in key:
            return True
        return key.partition(".")[0] not in cls.model_fields and os.path.exists(argument)

    paths = [argument for argument in arguments if is_path(argument)]
    return paths, [argument for argument in arguments if argument not in paths]


@dataclass(frozen=True)
class Command:
    """A command. Called with the words after its name, it parses and runs them. `parser` knows its options and settings."""

    parser: Callable[[], "ArgumentParser"]
    run: Callable[[argparse.Namespace], None]

    def __call__(self, argv: Sequence[str]) -> None:
        self.run(self.parser().parse_intermixed_args(argv))


def command(parser: Callable[[], "ArgumentParser"]) -> Callable[[Callable[[argparse.Namespace], None]], Command]:
    """Make a command of a function of parsed arguments."""
    return partial(Command, parser)


class ArgumentParser(argparse.ArgumentParser):
    """A wrong command line is a UserError like any other mistake."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        messages = self.add_mutually_exclusive_group()
        messages.add_argument("--quiet", action="store_true", help="only results, warnings and errors; no progress")
        messages.add_argument("-v", "--verbose", action="store_true", help="also details, and the time of each message")

    settings: type[Settings] = Settings
    without_config: Mapping[str, Any] = MappingProxyType({})

    def options(self) -> list[str]:
        """Return the options with two hyphens."""
        return [option for option in self._option_string_actions if option.startswith("--")]

    def parse_intermixed_args(self, args: Sequence[str]) -> Any:  # type: ignore[override]  # no default, and no namespace
        """Parse as argparse does, but if a setting is written as an option, the message shows the right form."""
        for place, arg in enumerate(args):
            if "\0" in arg or any("\ud800" <= c <= "\udfff" for c in arg):  # Python's form of bytes that are not UTF-8
                raise UserError(f"{quoted(arg)} on the command line must be text in UTF-8 without NUL bytes")
            if arg == "--":
                break
            if arg.startswith("-") and f"-{arg.partition('=')[0]}" in self.options():
                raise UserError(f"there is no option {quoted(arg)}; write -{one_line(arg)}")
            name, equals, value = arg.removeprefix("--").partition("=")
            if arg.startswith("--") and not any(option.startswith(f"--{name}") for option in self._option_string_actions):
                following = args[place + 1] if len(args) > place + 1 and "=" not in args[place + 1] else "VALUE"
                raise UserError(
                    f"there is no option {quoted(arg)}; "
                    f"{self._as_setting(name.replace('-', '_'), value if equals else following) or '--help lists the options'}"
                )
        found = super().parse_intermixed_args(args)
        choose_messages(quiet=found.quiet, verbose=found.verbose)
        return found

    def _as_setting(self, key: str, value: str) -> str:
        """Return how the command line has a setting that is written as an option; empty if there is no such setting."""
        advice = explain_unknown(self.settings, key)
        names = nearest(self.settings, key) if advice.endswith("?") else []
        advice = f"write {names[0]}={value}" if names else advice
        return f"settings are written key=value; {advice}" if advice else ""

    def format_help(self) -> str:
        """Describe the settings too. That takes 15 ms, which commands without --help do not need."""
        if self.settings is not Settings:
            fields = describe_fields(self.settings, self.without_config)
            self.epilog = f"settings (in the --config file, or as key=value):\n{fields}"
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists the options")


def any_path(text: str, option: str = "--out") -> AnyPath:
    """Return the folder or place in an object store of an option of a command line. Raises UserError for an empty name."""
    if not text.strip():
        raise UserError(f"{option} must name a folder, but is empty")
    return as_path(text)


def local_path(text: str, option: str = "--out") -> Path:
    """Return the folder of an option of a command line. Raises UserError for an empty name, or one in an object store."""
    path = any_path(text, option)
    if isinstance(path, RemotePath):
        raise UserError(f"{path}: must be a local path here; only data sets, training runs and studies may be in an object store")
    return path


def build_arg_parser(
    description: str,
    settings: type[Settings],
    *,
    find_config: Callable[[str], Path] = Path,
    remote_out: bool = False,
    reads_run: bool = False,
    has_sample: bool = False,
    continues: bool = True,
    without_config: Mapping[str, Any] = MappingProxyType({}),
) -> ArgumentParser:
    """Build the command line that every workflow shares: --config, --out, --sample and overrides.

    `find_config` gives the file that a value of --config names. With `remote_out`, --out may be in an object store. With
    `reads_run`, --out is the run that the command reads. `has_sample` shows --sample in the help. `continues` says whether the
    same command continues in --out, or makes its results again. The help shows the settings that hold `without_config`.
    """
    parser = ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    config_help = "settings of the command: a file, or the name of a shipped configuration (tree-attention configs)"
    parser.add_argument("--config", type=find_config, metavar="FILE.yaml", help=config_help)
    parser.settings, parser.without_config = settings, without_config
    out_path = any_path if remote_out else local_path
    again = "continues there" if continues else "makes them again"
    metavar, out_help = "DIR", f"folder for the results; the same command {again}"
    if reads_run:
        metavar, out_help = "RUN", "folder of a training run"
    parser.add_argument("--out", type=out_path, metavar=metavar, help=out_help)
    parser.add_argument("--sample", action="store_true", help="run on the shipped sample" if has_sample else argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change single settings")
    return parser


def run_cli(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main(argv)`; a UserError becomes one line on standard error and exit status 2.

    So does a refusal of the file system. A failure of Ray ends with status 1. `CommandEnded` brings its own status. Ctrl-C and a
    reader that leaves (`| head`) end with the status of their signal. Closed standard streams are opened on the null device.
    """
    open_lost_streams()
    atexit.register(gc.freeze)  # at its end, Python looks for garbage in PyTorch's modules twice, which takes 0.4 s
    with messages_shown(), careful_interrupts():
        try:
            note_lost_output(sys.argv[1:])
            main(sys.argv[1:])
            tell_repeats()
            sys.stdout.flush()
        except UserError as error:
            warn(f"error: {error}")  # once more: a worker may have made it
            sys.exit(2)
        except CommandEnded as end:
            if str(end):
                warn(str(end))
            sys.exit(end.status)
        except KeyboardInterrupt:
            warn("interrupted; to go on, run the same command again")
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            sys.exit(PIPE_CLOSED)
        except ModuleNotFoundError as error:
            if not (reason := describe_missing(error)):
                raise
            warn(f"error: {reason}")
            sys.exit(2)
        except Exception as error:
            failure = describe_ray_failure(error)
            if not (reason := failure or describe_refusal(error)):
                raise
            warn(f"error: {reason if _flush_output() else f'cannot write standard output: {reason}'}")
            sys.exit(FAILED if failure else 2)
        finally:
            _flush_output()


def _flush_output() -> bool:
    """Write what standard output still holds; return False, and drop it, if that fails: else Python complains at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def describe_refusal(error: Exception) -> str | None:
    """Return the message for a user when the file system or the memory fails; None for an error that no user can resolve."""
    if not isinstance(error, OSError | MemoryError | RuntimeError):
        return None
    # PyTorch has no type of its own for the memory of a CPU.
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error) or "out of memory" in str(error):
        message = one_line(str(error), 200)
        return f"out of memory{f' ({message})' if message else ''}; choose smaller sizes, or a machine with more memory"
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # of pathlib, before Python 3.13
        return one_line(f"{error}; check the name of the path")
    if not isinstance(error, OSError) or error.errno not in _REFUSALS:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return one_line(f"{where}{error.strerror}; {way_out(error)}")


def open_lost_streams() -> None:
    """Open the null device under the numbers of the closed streams, buffer standard output, and let it write every character.

    Otherwise, the next file that the command opens would get the number of a closed stream, and messages of libraries would go
    into that file.
    """
    global _output_is_lost
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number, which is this one
    _output_is_lost = sys.stdout is None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):  # PYTHONUNBUFFERED: a full disk would cut text silently
        buffer = open(sys.stdout.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(buffer, sys.stdout.encoding, sys.stdout.errors, line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that its encoding lacks would end the command with a traceback
        sys.stdout.reconfigure(errors="backslashreplace")


def check_output(hint: str = "") -> None:
    """Raise UserError if standard output, to which the result goes, was closed. The hint is another way out."""
    if _output_is_lost:
        raise UserError(f"standard output is closed, but the result goes there; open it{hint and f', or {hint}'}")


def note_lost_output(arguments: list[str]) -> None:
    """Refuse a closed standard output for a command that only prints; for others, tell that they print nothing."""
    if not _output_is_lost:
        return
    if running_command() in _PRINTING_COMMANDS or _PRINTING_OPTIONS & {*arguments}:
        check_output()
    warn("note: standard output is closed, so the command does not show what it prints there")

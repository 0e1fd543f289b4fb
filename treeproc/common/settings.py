"""Strict settings: pydantic models read from YAML 1.2 files and `key=value` overrides.

Every mistake a user can make becomes a `UserError` with one line; `run_cli` prints it and leaves
with status 2. Nothing here knows what the settings are about.
"""

import argparse
import errno
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, ValidationInfo, field_validator

from treeproc.common.command_names import advise, as_called, command_runs, from_python, note_command
from treeproc.common.errors import CommandEnded, UserError, one_line, quoted
from treeproc.common.extras import describe_missing
from treeproc.common.messages import choose_messages, messages_shown, warn
from treeproc.common.ray_failures import FAILED, describe_ray_failure
from treeproc.common.ray_internals import in_submitted_job
from treeproc.common.setting_errors import COMMAND_LINE, describe_error, explain_unknown, has_setting, nearest
from treeproc.common.standard_streams import note_lost_output, open_lost_streams
from treeproc.common.storage import AnyPath, RemotePath, as_path
from treeproc.common.store_requests import tell_repeats
from treeproc.common.yaml_reader import MOST_BYTES, read_yaml


class SettingsError(UserError, ValueError):
    """A mistake in settings that are made by a call in Python. It is also a ValueError, as pydantic's own error."""


if TYPE_CHECKING:  # type checkers read the fields as the arguments of a call
    from pydantic._internal._model_construction import ModelMetaclass as _Checked
else:

    class _Checked(type(BaseModel)):
        """Mistakes in a call raise UserError, as mistakes in a file do."""

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                with from_python():
                    raise SettingsError(describe_error(error, cls, cls.__name__)) from None


class Settings(BaseModel, metaclass=_Checked):
    """Base of all settings: unknown keys are refused, values do not change after checking."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
    # Dotted names of dicts, each with the dict whose keys it repeats. If the command line replaces the second one, the entries
    # of the first one in a file may name keys that are gone.
    names_of: ClassVar[Mapping[str, str]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _check_plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` as a number, though Python counts it as 1, and numbers that need more than 64 bits."""
        assert info.field_name is not None  # it checks fields, not whole settings
        annotation = cls.model_fields[info.field_name].annotation
        if isinstance(value, str) and _is_list_of_paths(annotation):
            value = [value]
        values = [value, *value] if isinstance(value, list | tuple) else [value]
        if isinstance(value, dict) and any(get_origin(one) is dict for one in (annotation, *get_args(annotation))):
            values += [*value, *value.values()]
        for one in values:
            if one == "" and _mentions(annotation, Path):
                raise ValueError("must be a path, but is empty")
            if isinstance(one, bool) and not _mentions(annotation, bool, Any):
                raise ValueError(f"must not be a truth value, but is {str(one).lower()}")
            if isinstance(one, int) and abs(one) >= 2**63:
                raise ValueError(f"must be a number of at most 64 bits, but is {quoted(one)}")
        return value


def _mentions(annotation: Any, *types: Any) -> bool:
    """Return whether one of the types is part of an annotation."""
    return any(annotation is one for one in types) or any(_mentions(part, *types) for part in get_args(annotation))


def _is_list_of_paths(annotation: Any) -> bool:
    """Return whether an annotation takes a list of paths and nothing else. One path is then a list of one."""
    members = (
        [one for one in get_args(annotation) if one is not type(None)] if type(None) in get_args(annotation) else [annotation]
    )
    return len(members) == 1 and get_origin(members[0]) in (list, tuple) and _mentions(members[0], Path)


SettingsT = TypeVar("SettingsT", bound=Settings)


_MOST_SECTIONS = 20


def _apply_override(values: dict, override: str) -> str:
    """Put the value of `key=value` into its place. Returns the dotted key."""
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(
            "; ".join(filter(None, [f"{quoted(override)} must have the form key=value", advise("--help lists the keys")]))
        )
    *parents, last = key.split(".")
    if len(parents) > _MOST_SECTIONS:
        raise UserError(f"override {quoted(override)}: no setting has so many sections in its name")
    target = values
    for name in parents:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            raise UserError(f"override {quoted(override)}: {quoted(name)} is a single value, and has no keys")
    target[last] = read_yaml(text, f"override {quoted(override)}")
    return key


def build_settings(cls: type[SettingsT], values: dict, where: str, overridden: Sequence[str] = ()) -> SettingsT:
    """Check `values` against `cls`. Raises UserError with the path of the first bad field and where it came from.

    That is `where`, or the command line for the dotted keys in `overridden`.
    """
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise UserError(describe_error(error, cls, where, overridden)) from None


def load_settings(cls: type[SettingsT], path: AnyPath | None, overrides: Sequence[str] = (), **values: Any) -> SettingsT:
    """Read settings from a YAML file, then `values`, then dotted `key=value` overrides."""
    merged: dict = {}
    where = COMMAND_LINE
    if path is not None:
        where = str(path)
        try:
            with as_path(path).open("rb") as file:
                text = file.read(MOST_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the configuration {path}: {getattr(error, 'strerror', None) or error}") from None
        merged = read_yaml(text, where) or {}
        if not isinstance(merged, dict):
            raise UserError(f"{path}: must hold keys and values, but is a {type(merged).__name__}")
    merged.update(values)
    keys = [_apply_override(merged, override) for override in overrides]
    for name, named in cls.names_of.items():
        if named in keys and not any(key == name or key.startswith(f"{name}.") for key in keys):
            _keep_names(merged, name, named)
    return build_settings(cls, merged, where, keys)


def _keep_names(values: dict, name: str, named: str) -> None:
    """Leave only those entries in the dict `name` of a file whose keys are in the dict `named`, which the command line gave."""
    section, _, last = name.rpartition(".")
    inner, given = _value_at(values, section), _value_at(values, named)
    if isinstance(inner, dict) and isinstance(inner.get(last), dict) and isinstance(given, dict):
        inner[last] = {key: value for key, value in inner[last].items() if key in given}


def _value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key; None if there is none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def split_arguments(cls: type[Settings], arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (paths, `key=value` settings) of a command that takes both. A path may have "=" in it, as `runs/lr=0.1`."""

    def is_path(argument: str) -> bool:
        key, equals, _ = argument.partition("=")
        if not equals or "/" in key:
            return True
        return key.partition(".")[0] not in cls.model_fields and os.path.exists(argument)

    paths = [argument for argument in arguments if is_path(argument)]
    return paths, [argument for argument in arguments if argument not in paths]


def dump_settings(settings: Settings) -> str:
    """Return the settings as YAML text that `load_settings` reads back to an equal object."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the lines `key: old -> new` for everything that differs between two nested dicts."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(old) + [key for key in new if key not in old]
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


class SettingFacts(NamedTuple):
    """What users must know of one setting."""

    name: str  # of a nested setting dotted; NAME stands for a key that the user chooses
    annotation: Any
    default: Any  # REQUIRED where there is none
    description: str


REQUIRED = object()


def list_settings(cls: type[Settings], prefix: str = "") -> Iterator[SettingFacts]:
    """Yield all settings, nested ones with dotted names."""
    for name, field in cls.model_fields.items():
        inner: Any = field.annotation
        if _is_settings(inner):
            yield from list_settings(inner, f"{prefix}{name}.")
            continue
        default = REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        yield SettingFacts(f"{prefix}{name}", inner, default, field.description or "")
        if get_origin(inner) is dict and _is_settings(get_args(inner)[1]):
            yield from list_settings(get_args(inner)[1], f"{prefix}{name}.NAME.")


def describe_fields(cls: type[Settings]) -> str:
    """Return one line for each setting, for `--help`."""
    lines = []
    for name, _, default, description in list_settings(cls):
        lines.append(f"  {name}: {description} ({'required' if default is REQUIRED else f'default {describe_default(default)}'})")
    return "\n".join(lines)


def describe_default(value: object) -> str:
    """Return a default as YAML has it, in one line."""
    plain = TypeAdapter(Any).dump_python(value, mode="json", exclude_defaults=True)
    return yaml.safe_dump(plain, default_flow_style=True, width=math.inf, sort_keys=False).removesuffix("...\n").strip()


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def refuse_relative_in_job(paths: Mapping[str, AnyPath]) -> None:
    """Refuse relative paths in a job of `ray job submit`, whose working folder is a temporary copy that is lost.

    Raises UserError for the first of the named paths that is relative.
    """
    if not in_submitted_job():
        return
    for name, path in paths.items():
        if not path.is_absolute():
            raise UserError(
                f"{name} must be an absolute path in a submitted job, but is {path}: "
                "a job runs in a temporary copy of the working folder"
            )


class _ParserWanted(tuple):
    """Arguments that ask a command for its parser."""


class _ParserFound(Exception):
    """The answer to `_ParserWanted`."""

    def __init__(self, parser: "ArgumentParser"):
        self.parser = parser


def parser_of(main: Callable[[Sequence[str]], None]) -> "ArgumentParser":
    """Return the parser of a command, whose options and settings it knows. Raises UserError if the command lacks a package."""
    try:
        main(_ParserWanted())
    except _ParserFound as found:
        return found.parser
    raise AssertionError(f"{main.__module__} does not give its arguments to ArgumentParser")


class ArgumentParser(argparse.ArgumentParser):
    """A wrong command line is a UserError like any other mistake."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        messages = self.add_mutually_exclusive_group()
        messages.add_argument("--quiet", action="store_true", help="only results, warnings and errors; no progress")
        messages.add_argument("-v", "--verbose", action="store_true", help="also details, and the time of each message")

    settings: type[Settings] = Settings
    reads_out = False  # --out is a folder that the command reads

    def options(self) -> list[str]:
        """Return the options with two hyphens."""
        return [option for option in self._option_string_actions if option.startswith("--")]

    def parse_intermixed_args(  # type: ignore[override]  # one signature for overloads that differ in their namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> Any:
        """Parse as argparse does, but if a setting is written as an option, the message shows the right form."""
        args = sys.argv[1:] if args is None else args
        if isinstance(args, _ParserWanted):
            raise _ParserFound(self)
        note_command([one for one in self.options() if one != "--out" or not self.reads_out], partial(has_setting, self.settings))
        for place, arg in enumerate(args):
            if "\0" in arg or any("\ud800" <= c <= "\udfff" for c in arg):  # Python's form of bytes that are not UTF-8
                raise UserError(f"{quoted(arg)} on the command line must be text in UTF-8 without NUL bytes")
            if arg == "--":
                break
            name, equals, value = arg.removeprefix("--").partition("=")
            if arg.startswith("--") and not any(option.startswith(f"--{name}") for option in self._option_string_actions):
                following = args[place + 1] if len(args) > place + 1 and "=" not in args[place + 1] else "VALUE"
                raise UserError(
                    f"there is no option {quoted(arg)}; "
                    f"{self._as_setting(name.replace('-', '_'), value if equals else following) or '--help lists the options'}"
                )
        found = super().parse_intermixed_args(args, namespace)
        choose_messages(quiet=found.quiet, verbose=found.verbose)
        return found

    def _as_setting(self, key: str, value: str) -> str:
        """Return how the command line has a setting that is written as an option; empty if there is no such setting."""
        advice = explain_unknown(self.settings, key)
        names = nearest(self.settings, key) if advice.endswith("?") else []
        advice = f"write {names[0]}={value}" if names else advice
        return f"settings are written key=value; {advice}" if advice else ""

    def format_help(self) -> str:
        return as_called(super().format_help())

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
) -> ArgumentParser:
    """Build the command line that every workflow shares: --config, --out, --sample and overrides.

    `find_config` gives the file that a value of --config names. With `remote_out`, --out may be in an object store. With
    `reads_run`, --out is the run that the command reads. `has_sample` shows --sample in the help.
    """
    parser = ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="settings (in the --config file, or as key=value):\n" + describe_fields(settings),
    )
    config_help = "settings of the command: a file, or the name of a shipped configuration (workflows/configs)"
    parser.add_argument("--config", type=find_config, metavar="FILE.yaml", help=config_help)
    parser.settings, parser.reads_out = settings, reads_run
    out_path = any_path if remote_out else local_path
    metavar, out_help = "DIR", "folder for the results; the same command continues there"
    if reads_run:
        metavar, out_help = "RUN", "folder of a training run"
    parser.add_argument("--out", type=out_path, metavar=metavar, help=out_help)
    parser.add_argument("--sample", action="store_true", help="run on the shipped sample" if has_sample else argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change single settings")
    return parser


# Errors of the file system that a user can resolve.
_REFUSED = [
    "ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EEXIST", "ENOTDIR", "EISDIR", "ENOENT", "ENAMETOOLONG", "ELOOP",
    "ENOTEMPTY", "EBUSY", "ETXTBSY", "EINVAL", "EIO", "ENODEV", "ENXIO", "EXDEV", "EMLINK", "EMFILE", "ENFILE", "ENOMEM",
    "ESTALE", "EOPNOTSUPP",
]  # fmt: skip
_REFUSALS = {getattr(errno, name) for name in _REFUSED}
_OF_NAMES = {errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + SIGINT, 128 + SIGPIPE


def run_cli(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main(argv)`; a UserError becomes one line on standard error and exit status 2.

    So does a refusal of the file system. A failure of Ray ends with status 1. `CommandEnded` brings its own status. Ctrl-C and a
    reader that leaves (`| head`) end with the status of their signal. Closed standard streams are opened on the null device.
    """
    open_lost_streams()
    with command_runs(), messages_shown():
        try:
            note_lost_output(sys.argv[1:])
            main(sys.argv[1:])
            tell_repeats()
        except UserError as error:
            warn(as_called(f"error: {error}"))  # once more: a worker may have made it
            sys.exit(2)
        except CommandEnded as end:
            if str(end):
                warn(as_called(str(end)))
            sys.exit(end.status)
        except KeyboardInterrupt:
            warn("interrupted; the same command continues")
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
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
            warn(f"error: {reason}")
            sys.exit(FAILED if failure else 2)


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
    hint = "check the name of the path" if error.errno in _OF_NAMES else advise("free space", "choose another --out")
    return one_line(f"{where}{error.strerror}; {hint}")

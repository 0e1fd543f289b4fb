"""Strict settings: pydantic models read from YAML 1.2 files and `key=value` overrides.

Every mistake a user can make becomes a `UserError` with one line; `run_cli` prints it and leaves
with status 2. Nothing here knows what the settings are about.
"""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from treeproc.errors import UserError
from treeproc.storage import AnyPath, RemotePath, as_path


class Settings(BaseModel):
    """Base of all settings: unknown keys are refused, values do not change after checking."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


SettingsT = TypeVar("SettingsT", bound=Settings)


class _Yaml12Loader(yaml.SafeLoader):
    """YAML 1.2 core schema: `5e-4` is a number, `no` and `off` are strings, duplicate keys are errors."""

    yaml_implicit_resolvers: ClassVar[dict] = {}

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_decimal(self, node):
        """`010` is ten; PyYAML's own constructor reads octal."""
        return int(self.construct_scalar(node))


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
):
    _Yaml12Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Yaml12Loader.add_constructor("tag:yaml.org,2002:int", _Yaml12Loader.construct_decimal)


def read_yaml(text: str, where: str) -> Any:
    """Parse YAML 1.2. Raises UserError naming `where` and the line of a syntax error."""
    try:
        return yaml.load(text, Loader=_Yaml12Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an integer of thousands of digits
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(f"{where}{line}: not valid YAML: {problem}") from None


def _apply_override(values: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"override {override!r} must have the form key=value, for example model.d_model=256")
    *parents, last = key.split(".")
    target = values
    for name in parents:
        target = target.setdefault(name, {})
        if not isinstance(target, dict):
            raise UserError(f"override {override!r}: {name!r} has no keys of its own")
    target[last] = read_yaml(text, f"override {override!r}")


def build_settings(cls: type[SettingsT], values: dict, where: str) -> SettingsT:
    """Check `values` against `cls`. Raises UserError with the path of the first bad field."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            message = "unknown key; see --help for the keys there are"
        else:
            message = first["msg"].removeprefix("Value error, ")
            if first["type"] not in ("missing", "value_error"):
                message += f", but is {first['input']!r}"
        raise UserError(f"{where}: {path + ': ' if path else ''}{message}") from None


def load_settings(cls: type[SettingsT], path: AnyPath | None, overrides: Sequence[str] = (), **values: Any) -> SettingsT:
    """Read settings from a YAML file, then `values`, then dotted `key=value` overrides."""
    merged: dict = {}
    where = "settings"
    if path is not None:
        where = str(path)
        try:
            text = as_path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the configuration {path}: {getattr(error, 'strerror', error)}") from None
        merged = read_yaml(text, where) or {}
        if not isinstance(merged, dict):
            raise UserError(f"{path}: must hold keys and values, but is a {type(merged).__name__}")
    merged.update(values)
    for override in overrides:
        _apply_override(merged, override)
    return build_settings(cls, merged, where)


def dump_settings(settings: Settings) -> str:
    """The settings as YAML text that `load_settings` reads back to an equal object."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Lines `key: old -> new` for everything that differs between two nested dicts."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(old) + [key for key in new if key not in old]
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


def describe_fields(cls: type[Settings], prefix: str = "") -> str:
    """One line per field of the settings, nested ones dotted, for `--help`."""
    lines = []
    for name, field in cls.model_fields.items():
        inner = field.annotation
        if _is_settings(inner):
            lines.append(describe_fields(inner, f"{prefix}{name}."))
            continue
        default = "required" if field.is_required() else f"default {field.get_default(call_default_factory=True)}"
        lines.append(f"  {prefix}{name}: {field.description or ''} ({default})")
        if get_origin(inner) is dict and _is_settings(get_args(inner)[1]):
            lines.append(describe_fields(get_args(inner)[1], f"{prefix}{name}.NAME."))
    return "\n".join(lines)


def _is_settings(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Settings)


def refuse_relative_in_job(paths: Mapping[str, AnyPath]) -> None:
    """In a job of `ray job submit` the working folder is a temporary copy: what is written there is lost.

    Raises UserError for the first of the named paths that is relative.
    """
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in os.environ:
        return
    for name, path in paths.items():
        if not path.is_absolute():
            raise UserError(
                f"{name} must be an absolute path in a submitted job, but is {path}: "
                "a job runs in a temporary copy of the working folder"
            )


class ArgumentParser(argparse.ArgumentParser):
    """A wrong command line is a UserError like any other mistake."""

    def error(self, message: str):
        raise UserError(f"{message}; --help lists what there is")


def _local_path(text: str) -> Path:
    path = as_path(text)
    if isinstance(path, RemotePath):
        raise UserError(f"{path}: must be a local path here; data sets and training runs may lie in an object store")
    return path


def build_arg_parser(description: str, settings: type[Settings], *, remote_out: bool = False) -> argparse.ArgumentParser:
    """The command line that every workflow shares: --config, --out, --sample and overrides.

    With `remote_out` the results may go to an object store.
    """
    parser = ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="settings (in the --config file, or as key=value):\n" + describe_fields(settings),
    )
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings of the run; workflows/configs has examples")
    out_path = as_path if remote_out else _local_path
    parser.add_argument("--out", type=out_path, metavar="DIR", help="folder for the results; the same command continues there")
    parser.add_argument("--sample", action="store_true", help="run on the sample that is shipped with the project")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change single settings")
    return parser


# What the file system refuses, and a user can mend.
_REFUSED = ["ENOSPC", "EDQUOT", "EFBIG", "EACCES", "EPERM", "EROFS", "EEXIST", "ENOTDIR", "EISDIR"]
_REFUSALS = {getattr(errno, name) for name in _REFUSED}
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + SIGINT, 128 + SIGPIPE


def run_cli(main: Callable[[Sequence[str]], None]) -> None:
    """Run `main(argv)`; a UserError becomes one line on standard error and exit status 2.

    So does a refusal of the file system. Ctrl-C and a reader that leaves (`| head`) end with the status of their signal.
    """
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
        sys.exit(PIPE_CLOSED)
    except OSError as error:
        if not (reason := describe_refusal(error)):
            raise
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(2)


def describe_refusal(error: OSError) -> str | None:
    """What a user is told when the file system refuses to write; None for an error that no user can mend."""
    if error.errno not in _REFUSALS:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}; free space, or choose another --out"

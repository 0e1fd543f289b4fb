"""YAML 1.2, overrides, and the one line that every mistake gets."""

import errno
import os
import shlex
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, PositiveInt

from treeproc.common.command_line import build_arg_parser, run_cli
from treeproc.common.setting_facts import describe_default, describe_values, list_settings
from treeproc.common.settings import (
    Effect,
    Settings,
    UserError,
    differences,
    dump_settings,
    is_below,
    keys_with,
    load_settings,
    read_yaml,
    settings_with,
)
from treeproc.common.storage import DataPath, as_path

ALIAS_BOMB = "a0: &a0 [x,x,x,x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
NO_MEMORY = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")


class Inner(Settings):
    rate: float = Field(0.1, gt=0, description="a rate")


class Outer(Settings):
    name: str = Field(description="a name")
    steps: int = Field(5, description="a number")
    inner: Inner = Field(Inner(), description="all rates")
    files: list[DataPath] = Field([], description="files")
    folder: Path | None = Field(None, description="a folder")
    places: tuple[Path, ...] = Field((), description="folders")
    size: PositiveInt | Literal["auto"] | None = Field(None, description="a size")
    way: Literal["l", "r"] = "l"
    none: Literal[0] | None = Field(None, description="0: off; unset: on")
    ends: tuple[float, float] = (0.0, 1.0)


class Named(Settings):
    outer: dict[str, Outer] = Field({}, description="many")
    more: dict[str, Inner] | None = None


def test_yaml_is_version_1_2():
    values = read_yaml("a: 5e-4\nb: no\nc: off\nd: true\ne: 1.5\nf: 010\ng: ~\nh: 12:30\ni: 0x10\nj: -3\nk: .5\nl:", "x")
    assert values == {
        "a": 5e-4, "b": "no", "c": "off", "d": True, "e": 1.5, "f": 10, "g": None, "h": "12:30",
        "i": "0x10", "j": -3, "k": 0.5, "l": None,
    }  # fmt: skip


@given(st.text("0123456789+-.eExno_:~#", max_size=6) | st.text(max_size=6).filter(lambda text: text.isprintable()))
def test_a_text_is_dumped_as_the_text_that_it_is(text):
    settings = Named.model_construct(outer={text: Outer(name=text)})
    assert read_yaml(dump_settings(settings), "x")["outer"] == {text: Outer(name=text).model_dump(mode="json") | {"ends": [0, 1]}}


def test_a_tag_on_an_empty_text_is_one_line():
    with pytest.raises(UserError, match="^x: not valid YAML"):
        read_yaml('a: !!float ""', "x")


def test_file_then_overrides(tmp_path):
    (tmp_path / "c.yaml").write_text("name: no\ninner:\n  rate: 5e-4\n")
    settings = load_settings(Outer, tmp_path / "c.yaml", ["steps = 7", "inner.rate=1e-3"])
    assert settings == Outer(name="no", steps=7, inner=Inner(rate=1e-3))
    (tmp_path / "d.yaml").write_text(dump_settings(settings))
    assert load_settings(Outer, tmp_path / "d.yaml") == settings


def test_one_path_is_a_list_of_one():
    assert load_settings(Outer, None, ["name=a", "files=x"]).files == [Path("x")]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("name: a\nsteps: many\n", [], r"c.yaml: steps: .*'many'"),
        ("name: a\nstep: 1\n", [], r"c.yaml: step: unknown key; did you mean steps\?"),
        ("name: a\nrate: 1\n", [], r"c.yaml: rate: unknown key; did you mean inner.rate\?"),
        ("name: a\ninner: {rat: 1}\n", [], r"c.yaml: inner.rat: unknown key; did you mean inner.rate\?"),
        ("name: a\n", ["inner.rat=1"], r"^the command line: inner.rat: unknown key; did you mean inner.rate\?"),
        ("name: a\n", ["qqq=1"], r"^the command line: qqq: unknown key; --help lists all keys$"),
        ("name: a\n", ["steps=true"], r"^the command line: steps: must not be a truth value, but is true"),
        ("name: a\n", ["steps=99999999999999999999"], r"steps: must be a number of at most 64 bits"),
        ("name: a\n", ["size=some"], r"size: must be a valid integer or 'auto' or null, but is 'some' \(a size\)$"),
        ("name: a\n", ["size=0"], r"^the command line: size: must be greater than 0 or 'auto' or null, but is 0 \(a size\)$"),
        ("name: a\n", ["way=x"], r"^the command line: way: must be 'l' or 'r', but is 'x'$"),
        ("name: a\n", ["none=1"], r"^the command line: none: must be 0 or null, but is 1 \(0: off; unset: on\)$"),
        ("name: a\n", ["folder=''"], r"^the command line: folder: must be a path, but is empty"),
        ("name: a\n", ["files=3"], r"^the command line: files: must be a list, but is 3$"),
        ("name: a\n", ["files=[x, '']"], r"^the command line: files: must be a path, but is empty"),
        ("name: a\n", ["inner.rate=-1"], r"^the command line: inner.rate: .*-1"),
        ('name: a\n"b\\nc": 1\n', [], r"c.yaml: b c: unknown key"),
        ("name: a\nsteps: " + "x" * 900_000, [], r"c.yaml: steps: .*'xxx.*\.\.\.x*'$"),
        ("name: !!python/object:os.system a\n", [], r"c.yaml, line 1: .*os.system' is not allowed; write the value without it"),
        ("name: !!bool x\n", [], r"c.yaml: not valid YAML"),
        ("name: !!timestamp x\n", [], r"c.yaml, line 1: .*timestamp"),
        ('name: "\\0"\n', [], r"c.yaml, line 1: .*NUL byte"),
        ('name: "\\ud800"\n', [], r"c.yaml, line 1: .*half of a character"),
        ("name: " + "[" * 3000 + "]" * 3000, [], r"c.yaml, line 1: .*nested deeper than 40"),
        (ALIAS_BOMB, [], r"c.yaml, line \d+: .*more than 50,000 values"),
        ("name: &a [*a]\n", [], r"c.yaml, line 1: .*contains itself"),
        ("#" * 2_000_000, [], r"c.yaml: .*at most 1,048,576 bytes"),
        ("name: a\ninner: {rate: -1}\n", [], r"inner.rate: .*greater than 0.*-1"),
        ("name: a\n", ["ends=[0.5]"], r"^the command line: ends: must be 2 values, but is \[0.5\]$"),
        ("name: a\nends: [1, 2, 3]\n", [], r"^.*c.yaml: ends: .*2 items.*$"),
        ("steps: 1\n", [], r"name: is missing \(a name\); write name=\.\.\. on the command line"),
        ("name: [\n", [], r"c.yaml, line 2: not valid YAML"),
        ("name: a\nname: b\n", [], r"line 2: .*'name' occurs twice"),
        ("- a\n", [], r"must hold keys and values"),
        ("name: a\n", ["steps"], r"key=value"),
        ("name: a\n", ["ends=[1,"], r"^override 'ends=\[1,': lacks its closing bracket; write it without blanks, or in quot"),
        ("name: a\n", ["folder=s3://b/h"], r"^the command line: folder: must be a local path, but is a URI \(s3://...\)"),
        ("name: a\nfolder: HTTP://k:v@b/h\n", [], r"c.yaml: folder: must be a local path, but is a URI \(http://...\)"),
        ("name: a\n", ["places=[x,s3://b/h]"], r"^the command line: places: must be a local path, but is a URI"),
        ("name: a\n", ["inner=x"], r"^the command line: inner: must be settings, such as inner.rate, but is 'x'$"),
        ("name: a\n", ["steps.x=1"], r"steps"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, text, overrides, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_settings(Outer, tmp_path / "c.yaml", overrides)
    assert "\n" not in str(error.value) and len(f"error: {error.value}") <= 500


@pytest.mark.parametrize("value", ["w/exp #2", "#1.txt", 'it\'s # "a" \\ b'])
def test_a_value_that_yaml_would_cut_is_refused_with_one_that_reads_whole(value):
    with pytest.raises(UserError, match=r"^override 'name=.* is a comment in YAML; leave it out, or give ") as error:
        load_settings(Outer, None, [f"name={value}"])
    (remedy,) = shlex.split(str(error.value).partition("in quotation marks, as ")[2])
    assert load_settings(Outer, None, [remedy]).name == value


@pytest.mark.parametrize("value", ["w/exp#2", "'w/exp #2'", '"a # b"', "|\n  a # b", "# a\n'b'"])
def test_a_value_without_a_comment_behind_it_is_read(value):
    assert load_settings(Outer, None, [f"name={value}"]).name == read_yaml(value, "")


@pytest.mark.parametrize("value", ["[x #1, y]", "[x] # y", "[x, y #z]"])
def test_a_comment_behind_or_in_a_list_is_refused(value):
    with pytest.raises(UserError, match=r"is a comment in YAML; .* as 'files=\[\"a #b\", c\]'$"):
        load_settings(Outer, None, ["name=a", f"files={value}"])
    assert load_settings(Outer, None, ["name=a", 'files=["x #1", \'#y\', "a"]']).files == [Path("x #1"), Path("#y"), Path("a")]


def test_uris_and_names_with_colons_stay_what_they_are():
    found = load_settings(Outer, None, ["name=s3://b/h", "files=[s3://b/h]", "folder=s3/b:c", "places=s3/b"])
    assert found.name == "s3://b/h" and found.files == [as_path("s3://b/h")]
    assert found.folder == Path("s3/b:c") and found.places == (Path("s3/b"),)


def test_missing_file():
    with pytest.raises(UserError, match="cannot read the configuration nowhere.yaml"):
        load_settings(Outer, "nowhere.yaml")


def test_differences_are_named():
    assert differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}, "d": 4}) == ["b.c: 2 -> 3", "d: None -> 4"]


@pytest.mark.parametrize("name", ["outer.a.inner", "more.a"])
def test_an_unknown_key_may_mean_one_beside_it(name):
    with pytest.raises(UserError, match=rf"{name}\.rat: unknown key; did you mean {name}\.rate\?"):
        load_settings(Named, None, [f"{name}.rat=1"])


def test_help_has_every_field():
    text = build_arg_parser("What it does.", Outer, has_sample=True).format_help()
    for words in ("name: a name (required)", "steps: a number (default 5)", "inner.rate: a rate (default 0.1)", "--sample"):
        assert words in text
    assert text.index("inner: all rates") < text.index("inner.rate:")
    assert "outer.NAME.inner: all rates" in build_arg_parser("What it does.", Named).format_help()


def test_help_has_the_defaults_without_a_configuration_and_what_a_second_command_does():
    text = build_arg_parser("What it does.", Outer, without_config={"steps": 7, "inner": {"rate": 0.2}}).format_help()
    assert "steps: a number (default 5; without a configuration, 7)" in text
    assert "inner.rate: a rate (default 0.1; without a configuration, 0.2)" in text
    for continues, words in ((True, "the same command continues there"), (False, "the same command makes them again")):
        text = build_arg_parser("What it does.", Outer, continues=continues).format_help()
        assert words in " ".join(text.split())


def test_help_of_a_command_that_reads_a_run():
    text = build_arg_parser("What it does.", Outer, reads_run=True).format_help()
    assert "--sample" not in text and "--out RUN" in text and "folder of a training run" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ((), "[]"),
        ("a b", "a b"),
        (Path("a/b"), "a/b"),
        ({"x": Inner(rate=0.5)}, "{x: {rate: 0.5}}"),
        ((0.001, 2), "[0.001, 2]"),
    ],
)
def test_defaults_are_shown_as_yaml(value, text):
    assert describe_default(value) == text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--steps", "10"], r"no option '--steps'; .* write steps=10"),
        (["--step=10"], r"no option '--step=10'; .* write steps=10"),
        (["--rate", "1"], r"write inner.rate=1"),
        (["-out", "x"], r"^there is no option '-out'; write '?--out'?$"),
        (["--qqq"], r"no option '--qqq'; --help lists"),
        (["name=a\udcff"], r"must be text in UTF-8"),
        (["name=a\0"], r"must be text in UTF-8"),
        (["--out", ""], r"--out must name a folder, but is empty"),
    ],
)
def test_a_wrong_command_line(argv, message):
    with pytest.raises(UserError, match=message) as error:
        build_arg_parser("What it does.", Outer).parse_intermixed_args(argv)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.ENOENT, errno.ELOOP, errno.ENOSPC, errno.EACCES])
def test_errors_of_the_file_system_give_one_line(number, capsys):
    def main(argv):
        raise OSError(number, os.strerror(number), "a" * 5000)

    with pytest.raises(SystemExit) as end:
        run_cli(main)
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.startswith("error: aaa") and os.strerror(number) in message
    assert message.count("\n") == 1 and len(message) <= 501


def test_a_link_to_itself_is_one_line(tmp_path, capsys):
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(SystemExit) as end:
        run_cli(lambda argv: (tmp_path / "out").resolve(strict=True))
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.startswith("error: ") and str(tmp_path / "out") in message and message.count("\n") == 1


@pytest.mark.parametrize("error", [MemoryError(), NO_MEMORY])
def test_memory_that_is_not_there_is_one_line(error, capsys):
    def main(argv):
        raise error

    with pytest.raises(SystemExit) as end:
        run_cli(main)
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: out of memory")


def test_an_error_keeps_its_begin_and_its_end():
    error = UserError("a.yaml, line 3:\n" + "x " * 1000 + "\x1b[31m; do this")
    assert str(error).startswith("a.yaml, line 3: x x") and str(error).endswith("x \\x1b[31m; do this")
    assert len(f"error: {error}") <= 500


class MarkedSection(Settings):
    """A section of a run's settings."""

    width: int = 1
    threads: Annotated[int, Effect.NONE] = 1


class MarkedSettings(Settings):
    """Settings of a run, of which some change no result."""

    steps: Annotated[int, Effect.PROGRESS] = 1
    section: MarkedSection = MarkedSection()
    other: MarkedSection | None = None
    search: Annotated[MarkedSection, Effect.PROGRESS] = MarkedSection()


def test_a_setting_says_itself_what_it_changes():
    assert keys_with(MarkedSettings, Effect.NONE) == ("section.threads", "other.threads", "search.threads")
    lasting = keys_with(MarkedSettings, Effect.NONE, Effect.PROGRESS)
    assert lasting == ("steps", "section.threads", "other.threads", "search")
    assert is_below("search.width", lasting) and is_below("steps", lasting) and not is_below("section.width", lasting)
    assert not is_below("searching", lasting)
    kept = MarkedSettings(other=MarkedSection()).model_dump(exclude=settings_with(MarkedSettings, Effect.NONE, Effect.PROGRESS))
    assert kept == {"section": {"width": 1}, "other": {"width": 1}}


class Ranges(Settings):
    """Types and bounds as settings have them."""

    share: float = Field(0.5, ge=0, lt=1)
    size: PositiveInt | None = None
    count: int | None = Field(None, ge=20, le=2**20)
    seed: int = Field(1, lt=2**63, ge=0)
    sizes: tuple[Annotated[int, Field(gt=0, le=1000)], ...] = (1,)
    pair: tuple[float, float] = (0.9, 0.98)
    place: DataPath | None = None
    kind: Literal["a", "b"] | PositiveInt = "a"
    inner: Inner | None = None
    choice: Inner = Inner()


def test_ranges_are_described_as_users_write_values():
    assert {facts.name: describe_values(facts.annotation) for facts in list_settings(Ranges)} == {
        "share": "number ≥ 0 and < 1",
        "size": "integer > 0 or null",
        "count": "integer ≥ 20 and ≤ 1,048,576 or null",
        "seed": "integer ≥ 0 and < 2^63",
        "sizes": "list of integer > 0 and ≤ 1,000",
        "pair": "list of 2: number",
        "place": "path or URI or null",
        "kind": "a, b or integer > 0",
        "inner": "mapping or null",
        "choice.rate": "number > 0",
    }

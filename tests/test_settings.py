"""YAML 1.2, overrides, and the one line that every mistake gets."""

import pytest
from pydantic import Field

from treeproc.settings import Settings, UserError, build_arg_parser, differences, dump_settings, load_settings, read_yaml


class Inner(Settings):
    rate: float = Field(0.1, gt=0, description="a rate")


class Outer(Settings):
    name: str = Field(description="a name")
    steps: int = Field(5, description="a number")
    inner: Inner = Inner()


def test_yaml_is_version_1_2():
    values = read_yaml("a: 5e-4\nb: no\nc: off\nd: true\ne: 1.5\nf: 010\ng: ~\nh: 12:30\ni: 0x10\nj: -3\nk: .5\nl:", "x")
    assert values == {
        "a": 5e-4, "b": "no", "c": "off", "d": True, "e": 1.5, "f": 10, "g": None, "h": "12:30",
        "i": "0x10", "j": -3, "k": 0.5, "l": None,
    }  # fmt: skip


def test_file_then_overrides(tmp_path):
    (tmp_path / "c.yaml").write_text("name: no\ninner:\n  rate: 5e-4\n")
    settings = load_settings(Outer, tmp_path / "c.yaml", ["steps=7", "inner.rate=1e-3"])
    assert settings == Outer(name="no", steps=7, inner=Inner(rate=1e-3))
    (tmp_path / "d.yaml").write_text(dump_settings(settings))
    assert load_settings(Outer, tmp_path / "d.yaml") == settings


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("name: a\nsteps: many\n", [], r"c.yaml: steps: .*'many'"),
        ("name: a\nstep: 1\n", [], r"c.yaml: step: unknown key"),
        ("name: a\ninner: {rate: -1}\n", [], r"inner.rate: .*greater than 0.*-1"),
        ("steps: 1\n", [], r"name: Field required"),
        ("name: [\n", [], r"c.yaml, line 2: not valid YAML"),
        ("name: a\nname: b\n", [], r"line 2: .*'name' occurs twice"),
        ("- a\n", [], r"must hold keys and values"),
        ("name: a\n", ["steps"], r"key=value"),
        ("name: a\n", ["steps.x=1"], r"steps"),
    ],
)
def test_mistakes_are_one_line(tmp_path, text, overrides, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_settings(Outer, tmp_path / "c.yaml", overrides)
    assert "\n" not in str(error.value)


def test_missing_file():
    with pytest.raises(UserError, match="cannot read the configuration nowhere.yaml"):
        load_settings(Outer, "nowhere.yaml")


def test_differences_are_named():
    assert differences({"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 3}, "d": 4}) == ["b.c: 2 -> 3", "d: None -> 4"]


def test_help_has_every_field():
    text = build_arg_parser("What it does.", Outer).format_help()
    for words in ("name: a name (required)", "steps: a number (default 5)", "inner.rate: a rate (default 0.1)", "--sample"):
        assert words in text

"""The stream of parts of a command on lines, with a worker that counts words: order, kept parts, messages, limits."""

import json
import shutil
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from treenet.evaluation.settings import ClassifyLinesSettings
from treenet.translation.line_translator import Translated, gather, rounded
from treenet.translation.settings import LineSettings, TranslateSettings
from treenet.translation.translate_job import PartStore, answer_lines, translate_lines
from treeproc.common.files import read_json
from treeproc.common.settings import UserError
from treeproc.online.raw_lines import EncodedLine


class Counter:
    """Writes the number and the words of each line. `bad` has a problem, `odd` a note, `both` both; `old` is told once."""

    result, done = "count", "counted"
    made: ClassVar[list[tuple]] = []
    asked: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, settings, runs):
        self.made.append((settings, runs))

    def __call__(self, lines, first):
        self.asked.append((first, len(lines)))
        return self._count(lines, first, "")

    def explain(self, lines, first):
        return self._count(lines, first, "words: ")

    def describe(self):
        return "counts words"

    def _count(self, lines, first, words):
        encoded = [EncodedLine(x, problem="P" * (x in ("bad", "both")), note="N" * (x in ("odd", "both"))) for x in lines]
        notices = {"old": "has old words", "older": "has older ones"} if "old" in lines else {}
        counts = [len(line.split()) for line in lines]
        numbered = list(enumerate(encoded, start=first + 1))
        return gather(numbered, counts, lambda n, line, count: f"{words}{n}:{count}:{line.source}\n", notices)


@pytest.fixture(autouse=True)
def nothing_asked():
    Counter.made, Counter.asked = [], []


@pytest.fixture
def run(tmp_path, data) -> Path:
    """A folder with what the kept parts depend on."""
    shutil.copytree(data / "encoded", tmp_path / "data" / "encoded")
    for name in ("averaged", "checkpoints/step_00000007"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "meta.json").write_text(name)
    (tmp_path / "run" / "config.yaml").write_text(f"seed: 1\ndata: {tmp_path / 'data'}\n")
    return tmp_path / "run"


def count(lines, runs=(), *, name="in.txt", total=None, unit="line", **settings) -> None:
    translate_lines(lines, TranslateSettings(**settings), runs, name=name, total=total, unit=unit, worker=Counter)


def test_the_output_has_the_order_of_the_lines_whatever_the_parts(tmp_path, capsysbinary):
    lines = [f"a{' b' * (n % 3)}" for n in range(7)]
    expected = "".join(f"{n}:{1 + (n - 1) % 3}:{line}\n" for n, line in enumerate(lines, 1)).encode()
    for size, parts in ((1, [(n, 1) for n in range(7)]), (3, [(0, 3), (3, 3), (6, 1)]), (7, [(0, 7)]), (8, [(0, 7)])):
        Counter.asked.clear()
        count(iter(lines), lines_at_once=size)
        assert Counter.asked == parts
        captured = capsysbinary.readouterr()
        assert (captured.out, captured.err) == (expected, b"counts words\n")
        count(lines, output=tmp_path / "out.txt", lines_at_once=size)
        assert (tmp_path / "out.txt").read_bytes() == expected and capsysbinary.readouterr().out == b""
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]
    with pytest.raises(UserError, match=r"^in\.txt is empty, but must have one sentence a line$"):
        count([])


def test_messages_are_sorted_by_line_and_the_last_one_lists_at_most_ten_lines(capsysbinary):
    count(["odd", "old", "bad", "both", "old", "a"], lines_at_once=3, unit="pair")
    assert capsysbinary.readouterr().err.decode().splitlines() == [
        "counts words",
        "warning: in.txt: has old words",
        "warning: in.txt: has older ones",
        "warning: in.txt, pair 1: N",
        "warning: in.txt, pair 3: P; its count is empty",
        "warning: in.txt, pair 4: P; its count is empty",  # the problem says why; its note says no more
        "warning: 2 of 6 pairs have no count: 3, 4",
    ]
    for bad, shown in ((1, "2"), (10, "2, 3, 4, 5, 6, 7, 8, 9, 10, 11"), (11, "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...")):
        count(["a", *["bad"] * bad, *["a"] * (2000 - bad)], lines_at_once=500, total=5)
        assert capsysbinary.readouterr().err.decode().splitlines()[-1] == (
            f"warning: {bad} of 2,001 lines have no count: {shown}"
        )


@pytest.mark.parametrize(
    ("given", "total", "size", "is_shown"),
    [
        (100, None, 1000, False),
        (101, None, 1000, True),
        (101, None, 100, False),  # the first part alone is known
        (3, 100, 1000, False),
        (3, 101, 1000, True),
        (101, 3, 1000, False),
    ],
)
def test_long_inputs_alone_get_a_progress_report(given, total, size, is_shown, capsysbinary):
    count(["a"] * given, total=total, lines_at_once=size, unit="pair")
    told = [line for line in capsysbinary.readouterr().err.decode().splitlines() if line != "counts words"]
    assert len(told) == is_shown and all(line.startswith("counted") and "pairs" in line and str(given) in line for line in told)


def test_kept_parts_are_found_again_for_the_same_lines_settings_and_runs_alone(tmp_path, run, capsysbinary):
    """The worker fails at line 7, so what came before is kept."""
    lines, output = ["a", "bad", "odd b", "old", "a b c", "a"], tmp_path / "out.txt"

    def given(changed):
        yield from changed
        raise UserError("as if the input had broken off")

    def asked(changed=lines, runs=(run,), **settings) -> tuple[list[int], list[str]]:
        Counter.asked.clear()
        capsysbinary.readouterr()
        with pytest.raises(UserError, match="broken off"):
            count(given(changed), runs, **{"output": output, "lines_at_once": 2} | settings)
        return [first for first, _ in Counter.asked], capsysbinary.readouterr().err.decode().splitlines()

    first, messages = asked()
    assert first == [0, 2, 4] and sorted(path.name for path in (tmp_path / "out.txt.parts").iterdir()) == [
        "1.json", "3.json", "5.json",
    ]  # fmt: skip
    messages.remove("counts words")
    # The same messages, and no model is loaded before all kept parts are out.
    Counter.made.clear()
    assert asked() == ([], messages + ["6 lines are counted already; the command continues after them"][1:])
    assert not Counter.made
    for changes, expected in [
        ({"workers": 0, "use_gpu": True, "decoding": {"max_tokens": 9}}, []),  # none of them changes a result
        ({"decoding": {"beam_size": 5}}, [0, 2, 4]),  # the default, but the run may have another value
        ({"decoding": {"beam_size": 5}}, []),
        ({"nbest": 2}, [0, 2, 4]),
        ({"checkpoint": "7"}, [0, 2, 4]),
        ({"changed": [*lines[:3], "b", *lines[4:]]}, [0, 2, 4]),
        ({}, [2, 4]),  # what comes after a part that is missing is not looked for
        ({"runs": (run, run)}, [0, 2, 4]),
        ({"runs": ()}, [0, 2, 4]),
        ({"lines_at_once": 3}, [0, 3]),
        ({}, [0, 2, 4]),
    ]:
        assert asked(**changes)[0] == expected, changes
    index = run.parent / "data" / "encoded" / "index.json"
    index.write_text(json.dumps(read_json(index) | {"fingerprint": "made again"}))
    assert asked()[0] == [0, 2, 4] and asked()[0] == []
    for file in ("config.yaml", "averaged/meta.json"):
        (run / file).write_text("other")
        assert asked()[0] == [0, 2, 4] and asked()[0] == []
    (run / "config.yaml").unlink()
    assert asked()[0] == [0, 2, 4]
    stored = json.loads((tmp_path / "out.txt.parts" / "3.json").read_text())
    for damaged in ("{", "[]", "3", json.dumps(stored | {"more": 1}), json.dumps({"key": stored["key"]}),
                    json.dumps(stored | {"notes": [1]}), json.dumps(stored | {"key": "other"})):  # fmt: skip
        (tmp_path / "out.txt.parts" / "3.json").write_text(damaged)
        assert asked()[0] == [2, 4], damaged
    assert not output.exists()


def test_a_command_goes_on_after_its_kept_parts_and_removes_them_at_the_end(tmp_path, run, capsysbinary):
    lines, output = ["a b", "bad", "c", "odd", "d e f", "bad", "g"], tmp_path / "out.txt"
    count(lines, [run], output=output, lines_at_once=2)
    expected, complete = output.read_bytes(), capsysbinary.readouterr().err.decode().splitlines()
    output.write_text("an earlier one")
    store = PartStore(output, TranslateSettings(output=output, lines_at_once=2), [run])
    worker = Counter(None, None)
    for first in (0, 2, 6):  # the third part is missing
        assert store.find(lines[first : first + 2], first) is None
        store.keep(lines[first : first + 2], first, worker(lines[first : first + 2], first))
    assert store.find(lines[2:4], 2) == Translated(2, "3:1:c\n4:1:odd\n", [], [(4, "N")], {})
    assert store.find(lines[2:4], 0) is store.find(lines[2:3], 2) is None
    parts = tmp_path / "out.txt.parts"
    for name in ("a.json", "notes.txt"):
        (parts / name).write_text("of somebody else")
    (parts / ".tmp-1-3.json").write_text("")
    Counter.asked.clear()
    count(lines, [run], output=output, lines_at_once=2)
    assert Counter.asked == [(4, 2), (6, 1)] and output.read_bytes() == expected
    told = capsysbinary.readouterr().err.decode().splitlines()
    assert told == [*complete[1:3], "4 lines are counted already; the command continues after them", complete[0], *complete[3:]]
    assert complete[-1] == "warning: 2 of 7 lines have no count: 2, 6"
    assert sorted(path.name for path in parts.iterdir()) == ["a.json", "notes.txt"]
    for path in parts.iterdir():
        path.unlink()
    store.remove()
    assert not parts.exists()


def test_a_place_that_refuses_parts_is_one_error(tmp_path):
    (tmp_path / "out.txt.parts").write_text("in the way")
    with pytest.raises(UserError, match=r"^cannot write .*out\.txt\.parts: File exists; choose another output$"):
        count(["a"], output=tmp_path / "out.txt")


def test_a_device_gets_the_output_without_kept_parts(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    count(["a", "b"], output=tmp_path / "null", lines_at_once=1)
    assert [path.name for path in tmp_path.iterdir()] == ["null"]


@pytest.mark.parametrize("explain", [False, True])
def test_every_typed_line_is_answered_before_the_next_one(explain, capsysbinary):
    expected = ["1:1:a", "2:2:old b", "3:1:bad", "4:1:old"]
    seen = []

    def typed():
        assert Counter.made, "the models are loaded before anything is asked"
        for line in ("a", "old b", "bad", "old"):
            yield line
            sys.stdout.buffer.flush()
            seen.append(capsysbinary.readouterr())

    answer_lines(typed(), TranslateSettings(), [], name="/dev/stdin", explain=explain, worker=Counter)
    words = "words: " * explain
    assert [one.out.decode() for one in seen] == [f"{words}{line}\n" for line in expected]
    assert [one.err.decode().splitlines() for one in seen] == [
        ["counts words"],
        [],
        ["warning: /dev/stdin, line 3: P; its count is empty"],
        ["warning: /dev/stdin: has old words", "warning: /dev/stdin: has older ones"],
    ]
    assert Counter.asked == [] if explain else Counter.asked == [(n, 1) for n in range(4)]


def test_workers_alone_need_ray(monkeypatch, capsysbinary):
    monkeypatch.setitem(sys.modules, "ray", None)
    count(["a"])
    assert capsysbinary.readouterr().out == b"1:1:a\n"
    with pytest.raises(UserError, match=r"^workers=2 needs ray, .*; or leave workers out to work in this process$"):
        count(["a"], workers=2)


def test_a_failed_worker_is_told_with_a_setting_of_its_command(monkeypatch):
    from treenet.translation import ray_translate  # here: it imports Ray

    def fail(reference):
        raise ray_translate.ray.exceptions.RayError("killed")

    monkeypatch.setattr(ray_translate.ray, "get", fail)
    for settings, remedy in ((TranslateSettings(), "lower decoding.max_tokens"), (ClassifyLinesSettings(), "give fewer workers")):
        with pytest.raises(UserError, match=f"^a worker failed: killed; if memory was short, {remedy}$"):
            ray_translate._result(None, settings)


def test_an_actor_returns_errors_of_the_user_as_text():
    from treenet.translation.ray_translate import _Actor  # here: it imports Ray

    class Refusing(Counter):
        def __init__(self, settings, runs):
            raise UserError("no such run")

    class Failing(Counter):
        def __call__(self, lines, first):
            raise UserError("not finite")

    assert _Actor(Refusing, TranslateSettings(), []).describe() == ("", "no such run")
    good, failing = (_Actor(worker, TranslateSettings(), []) for worker in (Counter, Failing))
    assert good.describe() == failing.describe() == ("counts words", "")
    assert good.translate(["a b"], 4) == (Translated(1, "5:2:a b\n", [], [], {}), "")
    assert failing.translate(["a b"], 4) == (None, "not finite")


def test_defaults_and_limits_of_the_settings():
    settings = TranslateSettings()
    assert (settings.nbest, settings.max_leaves, settings.lines_at_once, settings.workers) == (1, 1000, 1000, 0)
    assert not any((settings.scores, settings.compile, settings.use_gpu, settings.json_lines, settings.ensemble))
    assert settings.checkpoint == "averaged" and settings.checkpoints == ["averaged"]
    assert TranslateSettings(checkpoint=["7", "8"]).checkpoints == ["7", "8"]
    with pytest.raises(NotImplementedError):
        _ = LineSettings().checkpoints
    for wrong in ({"workers": -1}, {"nbest": 0}, {"lines_at_once": 0}, {"max_leaves": 0}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            TranslateSettings(**wrong)


def test_figures_have_six_digits_and_json_has_no_infinity():
    assert [rounded(x) for x in (-1.23456789, 2.0, float("inf"), -float("inf"), float("nan"))] == [
        -1.234568, 2.0, None, None, None,
    ]  # fmt: skip

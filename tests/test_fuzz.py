"""The rules and oracles of the fuzzer, and a short run of it. The long run is benchmarks/fuzz_inputs.py."""

import json
from random import Random

import fuzz_inputs
import pytest
from commands import run_here
from fuzz_api import CALLS, fuzz_api
from fuzz_cases import FuzzCase, settings_class
from fuzz_commands import everything, judge
from fuzz_mutations import damage_file, misspelt, override, yaml_text
from fuzz_oracles import data_set, silent_loss
from fuzz_server import fuzz_server
from fuzz_world import ALL_COMMANDS, configurations, main_of, write_inputs

from treeproc.common.settings import UserError, load_settings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", fuzz_inputs.KINDS)
def test_readers_on_garbage(kind):
    report = fuzz_inputs.fuzz(kind, 300, first_seed=2)
    assert report["examples"] >= 300 and report["refused"] > 0 and report["rows"] > 0


@pytest.mark.parametrize("message", ["a problem", "fuzz, line 3: two\nlines"])
def test_the_fuzzer_takes_no_other_message(message):
    def refuse():
        error = UserError("")
        error.args = (message,)  # as it comes: UserError itself makes one line of it
        raise error

    with pytest.raises(AssertionError, match="not a one-line message"):
        fuzz_inputs.read_or_refuse(refuse)


def test_every_fuzzed_command_is_there():
    assert all(callable(main_of(name)) for name in ALL_COMMANDS)


@pytest.mark.parametrize("workflow", ["preprocess", "train_wmt", "train_parser", "translate", "scaling"])
def test_settings_on_garbage(workflow, tmp_path):
    cls, values = settings_class(workflow), configurations(tmp_path / "inputs", tmp_path)[workflow]
    refused = 0
    for seed in range(36):
        random = Random(f"{seed} {workflow}")
        overrides = [override(random, cls) if seed % 2 else misspelt(random, cls)] if seed % 3 else []
        (tmp_path / "config.yaml").write_bytes(yaml_text(random, cls, values))
        try:
            load_settings(cls, tmp_path / "config.yaml", overrides)
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and len(f"error: {error}") <= 500
    assert 12 < refused < 36


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "config.yaml", "train.mrg", "model.pt"])
def test_a_case_is_the_same_whenever_it_is_asked_for(tmp_path, name):
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / name).write_text('{"step": 1, "files": {"a": [1, 2]}}')
        done = damage_file(Random(name), folder / name)
        found.append((done, [(path.name, path.is_file() and path.read_bytes()) for path in folder.iterdir()]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("status", "seconds", "errors", "faults"),
    [
        (0, 1, "warning: x\ntrain: 1/2 steps\n", []),
        (2, 1, "train: 1/2 steps\nerror: x\n", []),
        (2, 1, "error: x\nand more\n", ["not one line"]),
        (2, 1, "", ["not one line"]),
        (2, 1, f"error: {'x' * 500}\n", ["long line"]),
        (1, 1, "Traceback (most recent call last)\n", ["traceback", "other status"]),
        (-1, 61, "", ["late"]),
        (-11, 1, "", ["other status"]),
    ],
)
def test_the_rules_for_commands(tmp_path, status, seconds, errors, faults):
    case = FuzzCase("settings", "evaluate", [], tmp_path, [tmp_path / "out"], "")
    before = everything(tmp_path, case.may_change())
    (tmp_path / "out").mkdir()
    assert judge(case, status, seconds, errors, "", before) == faults
    (tmp_path / "other").touch()
    assert "written elsewhere" in judge(case, status, seconds, errors, "", before)


def test_nothing_gets_past_the_door_of_the_server():
    figures, past = fuzz_server(500)
    assert past == [] and figures["done"] > 20 and figures["inputs"] > 10_000


def test_the_library_refuses_arguments_or_is_right():
    figures, wrong = fuzz_api(150)
    assert wrong == [] and min(figures["done"], figures["refused"]) > 30 * len(CALLS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small data set with trees, and its inputs."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_inputs(folder / "inputs")
    values = configurations(folder / "inputs", folder)["preprocess"]
    (folder / "config.json").write_text(json.dumps(values))
    done = run_here("preprocess.py", "--config", folder / "config.json", "--out", folder / "data", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_oracle_agrees_with_a_right_data_set(made):
    assert list(data_set(made / "data", {})) == []


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ((" the)", " a)"), "source is"),  # a word
        (("(NP", "(VP"), "the tree has"),  # a label
        (("(NN ", "(JJ "), "tags"),
    ],
)
def test_the_oracle_sees_what_is_not_that_of_the_input(made, change, lost):
    truth = {str(path): [(path.name, path.read_bytes())] for path in (made / "inputs").glob("*.mrg")}
    place = str(made / "inputs" / "train.mrg")
    truth[place] = [("train.mrg", truth[place][0][1].replace(*(part.encode() for part in change)))]
    assert any(lost in text for text in data_set(made / "data", truth))


def test_the_oracle_sees_rows_that_did_not_come_out(made):
    inputs = [made / "inputs" / f"valid.{end}" for end in ("mrg", "de")]
    truth = {str(path): [(path.name, path.read_bytes() + more)] for path, more in zip(inputs, (b"(NN x)\n", b"x\n"), strict=True)}
    assert list(data_set(made / "data", truth)) == ["valid: 13 rows in, 12 out and 0 dropped"]


@pytest.mark.parametrize("name", ["labels.txt", "pos_tags.txt"])
def test_the_oracle_sees_names_that_are_shifted(made, name):
    path = made / "data" / "encoded" / "vocab" / name
    before = path.read_bytes()
    try:
        path.write_bytes(before.replace(b"<unk>\n", b"<unk>\nA\n"))
        assert list(data_set(made / "data", {}))
    finally:
        path.write_bytes(before)


def test_an_oracle_that_cannot_read_a_result_says_so(tmp_path):
    case = FuzzCase("input files", "preprocess", ["--out", "nothing"], tmp_path, [], "")
    assert "cannot read" in silent_loss(case, "", "")[0]


@pytest.mark.parametrize(
    ("tells", "notice", "is_fault"),
    [
        ("seem shifted", "warning: source and target seem shifted: ...", False),
        ("seem shifted", "warning: HTML tags, which are read as text: ...", True),
        ("seem shifted", "", True),
        ("", "", False),
        ("", "warning: HTML tags, which are read as text: ...", True),
    ],
)
def test_the_oracle_sees_missing_and_wrong_notices(tmp_path, tells, notice, is_fault):
    case = FuzzCase("pairs", "verify", [], tmp_path, [], "", tells=tells)
    lost = silent_loss(case, "", f"text: 1,000/1,000 examples (100.0%), elapsed 0:00\n{notice}\n")
    assert [text.startswith("wanted a notice") for text in lost] == [True] * is_fault

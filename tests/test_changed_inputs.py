"""Inputs that change between a job that was killed and the next one."""

import json
import shutil
from functools import partial

import pytest
from folder_store import store  # noqa: F401

from treeproc.common.folder_kinds import DATA_SET, mark_folder
from treeproc.common.provenance import read_sessions
from treeproc.common.settings import UserError, dump_settings
from treeproc.common.storage import RemotePath, as_path
from treeproc.common.store_requests import StoreRefuses, ask
from treeproc.shards.store import read_index, write_index, write_shard
from treeproc.stages import parse_and_encode, text_blocks
from treeproc.stages import preprocess as stages
from treeproc.stages.filters import FilterConfig
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.stages.run_jobs import previous_index
from treeproc.verify import advice, verify


class Killed(BaseException):
    """The job ends here."""


def job(folder, out, **changes) -> None:
    values = {
        "splits": {"train": {"source": [folder / "en"], "target": [folder / "de"]}},
        "parser": {"name": "words"}, "subwords": {"vocab_size": 300}, "rows_per_shard": 4, "workers": 0,
    }  # fmt: skip
    preprocess(PreprocessConfig.model_validate(values | changes), folder / out)


def write_inputs(folder, count: int, word: str = "dog") -> None:
    for side in ("en", "de"):
        (folder / side).write_text("".join(f"the {word} number {i} sees a cat .\n" for i in range(count)), encoding="utf-8")


def files(data) -> dict:
    return {
        str(path.relative_to(data)): path.read_bytes()
        for path in data.rglob("*")
        if path.is_file() and path.name not in ("provenance.json", "inputs.json", ".lock")
    }


def kill_after(count: int, stage, monkeypatch) -> list[str]:
    """Let a job end when it has written `count` shards of a stage, which is a module. Returns their names."""
    written = []

    def killed(folder, name, *arguments, **options):
        if len(written) == count:
            raise Killed
        written.append(name)
        return write_shard(folder, name, *arguments, **options)

    monkeypatch.setattr(stage, "write_shard", killed)
    return written


def test_a_text_stage_that_was_killed_takes_the_new_inputs_and_leaves_nothing_of_the_old(tmp_path, monkeypatch):
    write_inputs(tmp_path, 20)
    written = kill_after(3, text_blocks, monkeypatch)
    with pytest.raises(Killed):
        job(tmp_path, "data")
    monkeypatch.undo()
    assert written == [f"train-0000{i}-of-00005.arrow" for i in range(3)]
    write_inputs(tmp_path, 14)
    job(tmp_path, "data")
    job(tmp_path, "fresh")
    assert files(tmp_path / "data") == files(tmp_path / "fresh")


def kill_before_the_first_shard(folder, monkeypatch) -> None:
    """Leave the work of a job that had checked its inputs."""
    write_inputs(folder, 8)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(0, text_blocks, patch)
        job(folder, "data")


def test_a_refused_command_leaves_the_work_of_a_killed_job(tmp_path, monkeypatch):
    kill_before_the_first_shard(tmp_path, monkeypatch)
    before = files(tmp_path / "data")
    assert any(name.endswith("checked.json") for name in before)
    with pytest.raises(UserError, match="belongs to other settings .*rows_per_shard: 4 -> 2"):
        job(tmp_path, "data", rows_per_shard=2)
    assert files(tmp_path / "data") == before


def test_a_damaged_note_of_a_killed_job_names_its_own_way_out(tmp_path, monkeypatch):
    kill_before_the_first_shard(tmp_path, monkeypatch)
    (note,) = (tmp_path / "data").glob(".work-*/checked.json")
    note.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=f"cannot read {note}: .*; remove it and run the same command again"):
        job(tmp_path, "data")
    note.unlink()
    job(tmp_path, "data")
    job(tmp_path, "fresh")
    assert files(tmp_path / "data") == files(tmp_path / "fresh")


def test_notes_of_other_classes_are_not_those_of_a_finished_shard(tmp_path, monkeypatch):
    (tmp_path / "rows").write_text("VBZ\tthe dog\nVBP\tthe dogs\n" * 6, encoding="utf-8")

    def classes(labels, out, most=9):
        kill_after(most, text_blocks, monkeypatch)
        values = {"splits": {"train": {"source": [tmp_path / "rows"]}}, "format": "agreement", "labels": labels}
        values |= {"parser": {"name": "words"}, "subwords": {"vocab_size": None}, "rows_per_shard": 4, "workers": 0}
        preprocess(PreprocessConfig.model_validate(values), tmp_path / out)

    for labels, most in (({0: 0, 1: 1}, 2), ({0: 0}, 0)):  # the second leaves notes of a shard that stays
        with pytest.raises(Killed):
            classes(labels, "data", most)
    classes({0: 0, 1: 1}, "data")
    classes({0: 0, 1: 1}, "fresh")
    assert files(tmp_path / "data") == files(tmp_path / "fresh")


def test_a_finished_text_stage_refuses_other_inputs_and_stays(tmp_path):
    write_inputs(tmp_path, 8)
    job(tmp_path, "data")
    before = files(tmp_path / "data")
    write_inputs(tmp_path, 8, word="wolf")
    with pytest.raises(UserError, match="the text of train differs from the text of .*; choose another --out"):
        job(tmp_path, "data")
    assert files(tmp_path / "data") == before


def test_shards_of_another_version_of_the_parser_are_made_again_and_said(tmp_path, monkeypatch, caplog):
    write_inputs(tmp_path, 12)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_after(2, parse_and_encode, patch)
        patch.setattr(stages, "describe_parser", lambda config: {"name": "words", "library": "stanza 1.0"})
        job(tmp_path, "data")
    for out, said in (
        ("data", ["warning: parse: 2 of 3 shards are not finished, damaged or of another input, parser or settings"]),
        ("fresh", []),
    ):
        caplog.clear()
        job(tmp_path, out)
        assert [one.message.split(";")[0] for one in caplog.records if "made again" in one.message] == said
    assert files(tmp_path / "data") == files(tmp_path / "fresh")


def test_another_version_of_the_parser_leaves_finished_trees_alone(tmp_path):
    """There may be runs of them, and controls over them."""
    write_inputs(tmp_path, 8)
    job(tmp_path, "data")
    index = tmp_path / "data" / "parsed" / "index.json"
    index.write_text(json.dumps(there := json.loads(index.read_text()) | {"parser": {"name": "words", "library": "stanza 1.0"}}))
    before = files(tmp_path / "data")
    (tmp_path / "data" / "encoded" / "lengths.arrow").write_bytes(b"damaged")
    with pytest.raises(UserError, match="parsed was made by another parser .*library: 'stanza 1.0' -> None.*; restore that one"):
        job(tmp_path, "data")
    assert json.loads(index.read_text()) == there
    (tmp_path / "data" / "encoded" / "lengths.arrow").write_bytes(before["encoded/lengths.arrow"])
    assert files(tmp_path / "data") == before


def test_a_data_set_whose_near_copies_had_another_rule_stays(tmp_path, monkeypatch):
    """Its runs would be those of other data."""
    write_inputs(tmp_path, 8)
    for side in ("en", "de"):
        (tmp_path / f"valid.{side}").write_text("The dog, number 3, sees a cat!\n")
    train, valid = ({"source": [tmp_path / f"{name}en"], "target": [tmp_path / f"{name}de"]} for name in ("", "valid."))
    make = partial(job, tmp_path, "data", splits={"train": train, "valid": valid}, filters={"drop_leaks": True})
    identity = FilterConfig.identity
    with monkeypatch.context() as version:
        version.setattr(FilterConfig, "identity", lambda config, earlier=False: identity(config, earlier=True))
        make()
    before = files(tmp_path / "data")
    assert read_index(tmp_path / "data" / "text")["totals"]["train"]["rows"] == 7
    make()
    assert files(tmp_path / "data") == before


@pytest.mark.parametrize("stage", ["text", "parsed", "encoded"])
def test_an_index_of_another_form_is_made_again(tmp_path, stage):
    """The message of every reader says: run the job again."""
    write_inputs(tmp_path, 8)
    job(tmp_path, "data")
    before, path = files(tmp_path / "data"), tmp_path / "data" / stage / "index.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    without = {name: value for name, value in whole.items() if name != "totals"}
    for damaged in (without, whole | {"shards": [whole["shards"][0] | {"sha256": "?"}]}, whole | {"columns": 3}):
        path.write_text(json.dumps(damaged), encoding="utf-8")
        with pytest.raises(UserError, match="run tree-attention preprocess again"):
            read_index(path.parent)
        job(tmp_path, "data")
        assert files(tmp_path / "data") == before
    path.write_text(json.dumps(whole | {"schema_version": 2}), encoding="utf-8")
    with pytest.raises(UserError, match="schema version must be 1, but is 2; run tree-attention preprocess into a new folder"):
        job(tmp_path, "data")


def test_a_damaged_index_over_a_vocabulary_from_elsewhere_is_made_again(tmp_path):
    write_inputs(tmp_path, 8)
    job(tmp_path, "data")
    values = {"splits": {"test": {"source": [tmp_path / "en"], "target": [tmp_path / "de"]}}, "vocab_from": tmp_path / "data"}
    config = PreprocessConfig.model_validate(values | {"workers": 0})
    preprocess(config, tmp_path / "more")
    before = files(tmp_path / "more")
    (tmp_path / "more" / "encoded" / "index.json").write_text("{", encoding="utf-8")
    preprocess(config, tmp_path / "more")
    assert files(tmp_path / "more") == before


@pytest.mark.parametrize("stage", ["text", "parsed"])
def test_a_damaged_data_set_gives_no_trees_to_another(tmp_path, stage):
    write_inputs(tmp_path, 8)
    job(tmp_path, "data")
    config = PreprocessConfig.model_validate({"parsed": tmp_path / "data", "subwords": {"vocab_size": 300}, "workers": 0})
    preprocess(config, tmp_path / "again")
    shard = tmp_path / "data" / stage / "train-00001-of-00002.arrow"
    shard.write_bytes(shard.read_bytes().replace(b"sees", b"seXs"))
    with pytest.raises(UserError, match=f"parsed: {shard} is missing or damaged; .* --out {tmp_path / 'data'} makes it again"):
        preprocess(config, tmp_path / "third")
    assert not (tmp_path / "third").exists()
    report = verify(tmp_path / "again")
    assert [problem.path for problem in report.problems] == [shard]
    assert advice(report, tmp_path / "again").endswith(f"--config {tmp_path / 'data' / 'config.yaml'} --out {tmp_path / 'data'}")
    job(tmp_path, "data")
    preprocess(config, tmp_path / "third")
    assert files(tmp_path / "third") == files(tmp_path / "again")
    write_inputs(tmp_path, 9)  # half of another data set, copied over this one
    job(tmp_path, "other")
    shutil.rmtree(tmp_path / "data" / stage)
    shutil.copytree(tmp_path / "other" / stage, tmp_path / "data" / stage)
    with pytest.raises(
        UserError, match=f"data/{stage} is not the stage that {tmp_path / 'data'}/encoded was made of; restore it"
    ):
        preprocess(config, tmp_path / "fourth")
    assert not (tmp_path / "fourth").exists()


def test_the_index_of_a_store_that_refuses_is_not_damaged(store):  # noqa: F811
    folder = as_path("s3://bucket/data/text")
    write_index(folder, [], inputs={})
    assert previous_index(folder, "inputs") is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemotePath, "read_bytes", lambda path: ask(path, refuses))
        with pytest.raises(StoreRefuses):
            previous_index(folder, "inputs")


def refuses() -> bytes:
    raise OSError("AWS Error ACCESS_DENIED")


def test_bad_input_removes_no_settings_and_no_record_that_were_there(tmp_path):
    write_inputs(tmp_path, 8)
    bad = PreprocessConfig.model_validate(
        {
            "splits": {"train": {"source": [tmp_path / "en"], "target": [tmp_path / "short"]}},
            "parser": {"name": "words"},
            "workers": 0,
        }
    )
    (tmp_path / "short").write_text("one line\n", encoding="utf-8")
    own = tmp_path / "own"
    mark_folder(own, DATA_SET)
    own.joinpath("config.yaml").write_text("# notes of the user\n" + dump_settings(bad), encoding="utf-8")
    before = files(own)
    with pytest.raises(UserError, match="has 8 lines, but"):
        preprocess(bad, own)
    assert files(own) == before and {path.name for path in own.iterdir()} - {".lock"} == {".kind", "config.yaml"}
    job(tmp_path, "data")
    again = tmp_path / "again"
    preprocess(
        PreprocessConfig.model_validate({"parsed": tmp_path / "data", "subwords": {"vocab_size": 300}, "workers": 0}), again
    )
    shutil.copy(again / "provenance.json", own)
    for folder, message in ((own, "has 8 lines, but"), (again, "belongs to other settings .*parsed: ")):
        before, sessions = files(folder), read_sessions(folder)
        with pytest.raises(UserError, match=message):
            preprocess(bad, folder)
        assert files(folder) == before and read_sessions(folder) == sessions and len(sessions) == 1

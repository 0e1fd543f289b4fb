"""No command writes into a folder of another kind, replaces a file that is not ours, or writes over what it reads."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from commands import run_here
from folder_store import store  # noqa: F401 (a fixture)
from search_runs import write_run, write_vocabulary
from toydata import write_toy_data
from toylabels import make_rows, write_labelled

from treenet.cli.shipped import CONFIGS
from treenet.cli.synthetic_pairs import BackTranslateConfig
from treenet.config import TrainConfig
from treenet.experiments.seeds import SeedsConfig
from treenet.experiments.settings import ScalingConfig
from treenet.runs.exported_run import export_run
from treenet.runs.loading import load_run
from treeproc.common import folder_kinds as kinds
from treeproc.common.files import create, locked_entry, remove_leftovers, temporary_beside
from treeproc.common.folder_kinds import claim_folder, claim_output, kind_of, mark_folder
from treeproc.common.settings import Settings, UserError, dump_settings, load_settings
from treeproc.common.storage import RemotePath
from treeproc.extras.parser_training.config import TrainParserConfig
from treeproc.online.input_files import refuse_output_name
from treeproc.shards.store import read_index
from treeproc.stages.preprocess import PreprocessConfig, sample_splits
from treeproc.stages.text_work import remove_work

PARSER = load_settings(TrainParserConfig, CONFIGS / "parser_en.yaml")

# The kind of each folder of `world`. A killed command left the second of a kind.
FOLDERS = {
    "data": kinds.DATA_SET,
    "data_begun": kinds.DATA_SET,
    "states": kinds.STATES,
    "run": kinds.RUN,
    "run_begun": kinds.RUN,
    "export": kinds.EXPORT,
    "scaling": kinds.SCALING,
    "seeds": kinds.SEEDS,
    "search": kinds.SEARCH,
    "back_translation": kinds.BACK_TRANSLATION,
    "parser": kinds.PARSER,
    "demo": kinds.DEMO,
    "report": kinds.REPORT,
    "comparison": kinds.COMPARISON,
    "control": kinds.CONTROL,
}


def write(path: Path, content: str = "content\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def config(folder: Path, settings: Settings) -> Path:
    return write(folder / "config.yaml", dump_settings(settings)).parent


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder of each kind, and text. Nothing that a test does changes any of them."""
    root = tmp_path_factory.mktemp("kinds")
    data = config(write_vocabulary(root / "data"), preprocessing := PreprocessConfig(splits=sample_splits(), workers=0))
    write(root / "states" / "states.json", '{"encoder_sha256": ""}')
    write_toy_data(root / "pairs")
    write_labelled(root / "classes", {split: make_rows(9) for split in ("train", "valid", "test")})
    run = write_run(root / "run", data, name="transformer")
    write_run(root / "other", data, name="transformer")
    for name in ("checkpoints/step_00000007/meta.json", "tensorboard/events", "scores.json", "translations.test.txt"):
        write(run / name, "{}")
    training = load_settings(TrainConfig, CONFIGS / "sample.yaml", [f"data={data}", "workers=0"])
    export_run(load_run(run), root / "export")
    values = training.model_dump(mode="json")
    for name, settings in {"scaling": ScalingConfig(**values), "seeds": SeedsConfig(**values)}.items():
        write(config(root / name, settings) / "ledger.json", '{"cells": {}}')
        config(root / name / "cells" / "one", training)
    write(root / "search" / "trials.json", '{"systems": {}}')
    settings = BackTranslateConfig(data=data, text=[root / "text.de"])
    write(config(root / "back_translation", settings) / "made.json", "{}")
    write(config(root / "parser", PARSER) / "models" / "pos.pt")
    write(root / "demo" / "report.txt")
    config(root / "demo" / "data", preprocessing)
    config(root / "demo" / "tree_transformer", training)
    write(root / "control" / "control.json", '{"verdict": ""}')
    for name in ("report.json", "index.html", "figures/a.png"):
        write(root / "report" / name, "{}")
    write(root / "comparison" / "comparison.json", '{"system_origin": ""}')
    for name in ("text.en", "text.de"):
        write(root / name, "ba de\n")
    inner = {"scaling/cells/one": kinds.RUN, "seeds/cells/one": kinds.RUN, "demo/data": kinds.DATA_SET}
    for name, kind in (FOLDERS | inner).items():
        mark_folder(root / name, kind)
    return root


def content(folder: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def commands(root: Path) -> dict[str, tuple[str, list[object], set[kinds.Kind]]]:
    """Each writing command: its script, its arguments without --out, and the kinds of folders that it may write to."""
    data, run, both = f"data={root / 'data'}", root / "run", [root / "text.de", root / "text.de"]
    pairs, classes = (f"data={root / name}" for name in ("pairs", "classes"))
    results = {kinds.RUN, kinds.EXPORT}
    compare = ["--compare", *both, f"references={root / 'text.de'}"]
    hypotheses = [f"hypotheses={root / 'text.de'}", f"references={root / 'text.de'}"]
    return {
        "preprocess": ("preprocess.py", ["--sample", "workers=0"], {kinds.DATA_SET}),
        "train": ("train_wmt.py", ["--sample", data, "workers=0"], {kinds.RUN}),
        "train-lm": ("train_lm.py", ["--sample", data, "workers=0"], {kinds.RUN}),
        "train-classifier": ("train_classifier.py", ["--config", "sst5", data, "workers=0"], {kinds.RUN}),
        "frozen-states": ("frozen_states.py", [data, f"encoder={root}", "workers=0"], {kinds.STATES}),
        "train-parser": ("train_parser.py", ["--config", "parser_en"], {kinds.PARSER}),
        "scaling": ("scaling.py", ["--sample", pairs, "workers=0"], {kinds.SCALING}),
        "records": ("scaling.py", ["--sample", pairs, "workers=0", "--out", root / "new"], set()),
        "compare-seeds": ("compare_seeds.py", ["--config", "seeds_sst5", classes, "workers=0"], {kinds.SEEDS}),
        "tune": ("tune.py", ["--sample", data, "workers=0"], {kinds.SEARCH}),
        "back-translate": ("back_translate.py", [data, f"text=[{root / 'text.de'}]", "workers=0"], {kinds.BACK_TRANSLATION}),
        "export": ("export.py", [root / "other"], {kinds.EXPORT}),
        "report": ("report.py", [run], {kinds.REPORT}),
        "control": ("control.py", [], {kinds.CONTROL}),
        "demo": ("demo.py", ["workers=0"], {kinds.DEMO}),
        "compare": ("evaluate.py", compare, {kinds.COMPARISON, *results}),
        "hypotheses": ("evaluate.py", hypotheses, results),
        "evaluate": ("evaluate.py", [], results),
        "average-checkpoints": ("average_checkpoints.py", [], results),
        "probe": ("probe.py", [], results),
        "score-lm": ("score_lm.py", [], results),
        "unsupervised-parse": ("unsupervised_parse.py", [], results),
    }


def refusal(script: str, *arguments: object) -> str:
    """The one line of a command that refuses."""
    done = run_here(script, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done
    [line] = done.stderr.splitlines()
    return line


def test_settings_that_do_not_fit_leave_no_folder(world, tmp_path):
    for script, arguments, said in (
        ("tune.py", [f"data={world / 'data'}", "tune.space={foo: {low: 1, high: 2}}"], "foo"),
        ("back_translate.py", [f"data={world / 'classes'}", f"text=[{world / 'text.de'}]"], "text/index.json is missing"),
    ):
        assert said in refusal(script, "--out", tmp_path / "out", *arguments, "workers=0")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", commands(Path()))
def test_no_command_writes_into_a_folder_of_another_kind(world, name):
    script, arguments, own = commands(world)[name]
    before = content(world)
    option = "--records" if name == "records" else "--out"
    for kind in set(kinds.KINDS) - own:
        folder = world / next(name for name, one in FOLDERS.items() if one is kind)
        line = refusal(script, option, folder, *arguments)
        assert f"{folder} is {kind.name}, and this command would write" in line and f"another {option}" in line
    assert content(world) == before


@pytest.mark.parametrize("name, kind", FOLDERS.items())
def test_the_same_command_continues_in_its_folder(world, name, kind):
    assert kind_of(world / name) is kind
    claim_folder(world / name, kind)


PLACES = [
    ("data", "encoded"),
    ("data", "text/more"),
    ("data", ".work-1"),
    ("states", "shards"),
    ("run", "checkpoints"),
    ("run", "averaged"),
    ("run_begun", "tensorboard/run"),
    ("export", "data"),
    ("scaling", "cells"),
    ("seeds", "cells/one/checkpoints"),
    ("back_translation", "real"),
    ("parser", "models"),
    ("report", "figures"),
]


@pytest.mark.parametrize("folder, place", PLACES)
def test_nothing_lies_where_another_folder_has_its_own_files(world, tmp_path, folder, place):
    before = content(world)
    (tmp_path / "link").symlink_to(world / folder)
    for path in (world / folder / place, tmp_path / "link" / place):
        for script, arguments in (("preprocess.py", ["--sample", "workers=0"]), ("report.py", [world / "run"])):
            assert "is a place for files of" in refusal(script, "--out", path, *arguments)
        with pytest.raises(UserError, match="output: .* is a place for files of .*; choose another output"):
            claim_output(path, {})
    assert content(world) == before


def test_folders_inside_others_are_for_their_kind_alone(world):
    claim_folder(world / "scaling" / "cells" / "new", kinds.RUN)
    claim_folder(world / "scaling" / "cells" / "one", kinds.RESULTS)
    claim_folder(world / "back_translation" / "data", kinds.DATA_SET)
    claim_folder(world / "data" / "experiments", kinds.RUN)
    claim_folder(world / "run" / "report", kinds.REPORT)
    claim_output(world / "scaling" / "cells" / "one" / "out.txt", {})
    claim_output(world / "run" / "translations.txt", {})
    for place, kind in (("scaling/cells/new", kinds.REPORT), ("back_translation/data", kinds.RUN), ("demo/data", kinds.RUN)):
        with pytest.raises(UserError, match="is a place for files of"):
            claim_folder(world / place, kind)


def test_a_folder_of_another_kind_is_no_data_set(world):
    for name, kind in FOLDERS.items():
        if kind is not kinds.DATA_SET and not (world / name / "encoded" / "index.json").exists():
            with pytest.raises(UserError, match=f"{name} is {kind.name}; give a data set of tree-attention preprocess$"):
                read_index(world / name / "encoded")


def test_a_file_is_no_folder_and_a_folder_no_file(tmp_path):
    """The message comes before any work, with a remedy that the command takes."""
    file = write(tmp_path / "file")
    for out in (file, file / "below"):
        done = run_here("frozen_states.py", "--out", out, f"data={tmp_path}", f"encoder={tmp_path}", "workers=0")
        wanted = f"error: --out: {file} is a file, but must be a folder; choose another --out\n"
        assert (done.returncode, done.stderr) == (2, wanted)
    with pytest.raises(
        UserError, match=f"^output: there is no folder {tmp_path}/none for this file; make it, or choose another output$"
    ):
        claim_output(tmp_path / "none" / "classes", {})
    with pytest.raises(UserError, match=f"^output: there is no folder {file} for this file; make it, or choose another output$"):
        claim_output(file / "classes", {})
    with pytest.raises(UserError, match="^--plot: .* is a folder; give the name of a file$"):
        claim_output(tmp_path, {}, "--plot")
    (tmp_path / "link").symlink_to(tmp_path / "none" / "classes")
    with pytest.raises(UserError, match=f"there is no folder {tmp_path}/none for this file"):
        claim_output(tmp_path / "link", {})


@pytest.mark.parametrize(
    "name, file",
    [
        ("preprocess", "config.yaml"),
        ("preprocess", "text/mine.txt"),
        ("train", "config.yaml"),
        ("train", "checkpoints/step_00000100/pytorch_model.bin"),
        ("train", "ray/mine.txt"),
        ("train-parser", "models/mine.pt"),
        ("scaling", "config.yaml"),
        ("compare-seeds", "comparison.json"),
        ("tune", "best-of-all.yaml"),
        ("back-translate", "train.source"),
        ("back-translate", "data/mine.txt"),
        ("report", "index.html"),
        ("report", "figures/mine.png"),
        ("demo", "learning_curves.png"),
        ("control", "data/mine.txt"),
        ("compare", "comparison.json"),
    ],
)
def test_files_that_are_not_ours_are_not_replaced(world, tmp_path, name, file):
    script, arguments, _ = commands(world)[name]
    write(tmp_path / file, "model: of another program\n")
    before = content(tmp_path)
    line = refusal(script, "--out", tmp_path, *arguments)
    assert f"{tmp_path / file.partition('/')[0]} is there already, but no .kind says that it is of" in line
    assert "; choose another --out, or, if it is, write " in line
    assert content(tmp_path) == before


def test_empty_folders_hold_nothing_to_lose(tmp_path):
    for name in ("text", "checkpoints/step_00000005", "figures"):
        (tmp_path / name).mkdir(parents=True)
    for kind in (kinds.DATA_SET, kinds.RUN, kinds.REPORT):
        claim_folder(tmp_path, kind)


@pytest.mark.parametrize("marker", ["", "a folder\n", "\xff" * 1000])
def test_a_folder_whose_marker_is_damaged_has_none(tmp_path, marker):
    write(tmp_path / "config.yaml", "max_steps: 3\n")
    write(tmp_path / kinds.MARKER, marker)
    assert kind_of(tmp_path) is None
    with pytest.raises(UserError, match="config.yaml is there already, but no .kind says that it is of a training run"):
        claim_folder(tmp_path, kinds.RUN)


def test_a_marker_stays(tmp_path):
    """Also that of a run into which another command writes its comparison."""
    mark_folder(tmp_path / "new" / "run", kinds.RUN)
    assert (tmp_path / "new" / "run" / ".kind").read_text() == "a training run\n"
    mark_folder(tmp_path / "new" / "run", kinds.COMPARISON)
    assert kind_of(tmp_path / "new" / "run") is kinds.RUN
    with pytest.raises(UserError, match="^cannot make the folder .*: Not a directory; choose another --out$"):
        mark_folder(write(tmp_path / "file") / "below", kinds.RUN)


def test_data_sets_and_runs_without_a_marker_are_read_and_get_results(world, tmp_path):
    for name in ("data", "run"):
        shutil.copytree(world / name, tmp_path / name, ignore=shutil.ignore_patterns(kinds.MARKER))
    assert read_index(tmp_path / "data" / "encoded") == read_index(world / "data" / "encoded")
    load_run(tmp_path / "run")
    claim_folder(tmp_path / "run", kinds.RESULTS)
    mark_folder(tmp_path / "study", kinds.SCALING)  # whose cells may come from another machine, file by file
    shutil.copytree(tmp_path / "run", tmp_path / "study" / "cells" / "one")
    claim_folder(tmp_path / "study" / "cells" / "one", kinds.RUN)
    with pytest.raises(UserError, match="one/config.yaml is there already"):
        claim_folder(tmp_path / "study" / "cells" / "one", kinds.COMPARISON)
    for name, kind in (("data", kinds.DATA_SET), ("run", kinds.RUN), ("run", kinds.COMPARISON)):
        with pytest.raises(UserError, match=f"{name}/.* is there already, but no .kind .*; choose another --out, or") as error:
            claim_folder(tmp_path / name, kind)
        assert str(error.value).endswith(f", or, if it is, write {kind.name!r} into {tmp_path / name / '.kind'}")
    (tmp_path / "data" / ".kind").write_text(kinds.DATA_SET.name)
    claim_folder(tmp_path / "data", kinds.DATA_SET)


@pytest.mark.parametrize("files", [[], ["notes.txt"], [".lock"], [".lock", "provenance.json", ".work-0123456789abcdef/a"]])
def test_other_folders_may_be_written_to(tmp_path, files):
    for name in files:
        write(tmp_path / name)
    for kind in (kinds.DATA_SET, kinds.RUN, kinds.REPORT, kinds.BACK_TRANSLATION, kinds.RECORDS, kinds.RESULTS):
        claim_folder(tmp_path, kind)
    claim_folder(tmp_path / "missing", kinds.RUN)
    assert sorted(content(tmp_path)) == sorted(files)


def test_folders_in_a_store_are_claimed_too(world, tmp_path, store):  # noqa: F811
    for name in ("data", "data_begun", "run", "run_begun"):
        shutil.copytree(world / name, tmp_path / "store" / "bucket" / name)
    write(tmp_path / "store" / "bucket" / "foreign" / "config.yaml", "model: 5\n")
    before, bucket = content(tmp_path / "store"), RemotePath("s3", "bucket")
    for out, arguments, message in (
        (bucket / "data", ["train_wmt.py", "--sample"], "is a data set, and this command would write a training run there"),
        (bucket / "data_begun", ["train_wmt.py", "--sample"], "is a data set, and"),
        (bucket / "run", ["preprocess.py", "--sample"], "is a training run, and this command would write a data set there"),
        (bucket / "run_begun", ["preprocess.py", "--sample"], "is a training run, and"),
        (bucket / "run" / "checkpoints", ["preprocess.py", "--sample"], "is a place for files of a training run"),
        (
            bucket / "foreign",
            ["train_wmt.py", "--sample"],
            "config.yaml is there already, but no .kind says that it is of a training run",
        ),
        (bucket / "data", ["evaluate.py"], "is a data set, and this command would write results of a run there"),
    ):
        more = [f"data={world / 'data'}"] if "train" in arguments[0] else []
        assert message in refusal(
            arguments[0], "--out", out, *arguments[1:], *more, *([] if "eval" in arguments[0] else ["workers=0"])
        )
    with pytest.raises(UserError, match="is a place for files of a data set"):
        claim_output(bucket / "data" / "encoded" / "index.json", {})
    with pytest.raises(UserError, match="output must be another file than input"):
        claim_output(bucket / "text", {"input": RemotePath("s3", "bucket/text")})
    claim_folder(bucket / "run", kinds.RUN)
    claim_folder(bucket / "new", kinds.RUN)
    assert content(tmp_path / "store") == before
    mark_folder(bucket / "new", kinds.RUN)
    assert kind_of(bucket / "new") is kinds.RUN and len(content(tmp_path / "store")) == len(before) + 1


@pytest.mark.parametrize("as_what", ["itself", "link", "hard link", "other spelling"])
@pytest.mark.parametrize("name", ["input", "score", "prefix"])
def test_translate_never_writes_over_its_input(world, tmp_path, as_what, name):
    text, other = write(tmp_path / "text.en", "ba de\n"), write(tmp_path / "other.en", "ba de\n")
    output = tmp_path / "output"
    if as_what == "link":
        output.symlink_to(text)
    elif as_what == "hard link":
        os.link(text, output)
    else:
        output = text if as_what == "itself" else tmp_path / "missing" / ".." / "text.en"
        (tmp_path / "missing").mkdir()
    inputs = [f"input={text}"] if name == "input" else [f"input={other}", f"{name}={text}"]
    line = refusal("translate.py", "--out", world / "run", *inputs, f"output={output}")
    assert f"output must be another file than {name}, which it would replace, but both are {text}" in line
    assert text.read_text() == "ba de\n" and not list(tmp_path.glob("*.parts"))


def test_classify_never_writes_over_its_input(world, tmp_path):
    files = {name: write(tmp_path / name, "ba de\n") for name in ("input", "trees")}
    for name, path in files.items():
        line = refusal("classify.py", "--out", world / "run", *(f"{n}={p}" for n, p in files.items()), f"output={path}")
        assert f"output must be another file than {name}" in line
    assert all(path.read_text() == "ba de\n" for path in files.values())


def test_align_never_writes_over_its_input(world, tmp_path):
    files = {name: write(tmp_path / name, "ba de\n") for name in ("input", "target", "references")}
    arguments = [f"{name}={path}" for name, path in files.items()]
    for name, path in files.items():
        line = refusal("align.py", "--out", world / "run", *arguments, f"output={path}")
        assert f"output must be another file than {name}" in line
    assert all(path.read_text() == "ba de\n" for path in files.values())


@pytest.mark.parametrize(
    "place",
    [
        "run/config.yaml",
        "run/translations.test.txt",
        "run/nll.test.tsv",
        "data/encoded/index.json",
        "data/.lock",
        "seeds/ledger.json",
        "export/export.json",
    ],
)
def test_single_files_are_not_written_over_those_of_a_folder(world, place):
    before = content(world)
    for script, inputs in (("translate.py", ["input"]), ("classify.py", ["input"]), ("align.py", ["input", "target"])):
        given = [f"{name}={world / 'text.en'}" for name in inputs]
        line = refusal(script, "--out", world / "run", *given, f"output={world / place}")
        assert "output: " in line and "is a place for files of" in line
    assert content(world) == before


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("o.gz", [], "is written as plain text; leave out .gz, or write to standard output and pack that"),
        ("o.jsonl.xz", ["json_lines=true"], "is written as plain text; leave out .xz, or write to standard output and pack that"),
        ("o.csv", [], "is named as a table (csv), but the command writes lines of text; choose another name"),
        (
            "o.tsv",
            ["json_lines=true"],
            "is named as a table (tsv), but the command writes a table (jsonl); choose another name",
        ),
    ],
)
def test_no_output_has_a_name_that_promises_another_content(world, tmp_path, name, options, message):
    for script, inputs in (("translate.py", ["input"]), ("align.py", ["input", "target"])):
        given = [f"{one}={world / 'text.en'}" for one in inputs]
        line = refusal(script, "--out", world / "run", *given, *options, f"output={tmp_path / name}")
        assert line == f"error: output: {tmp_path / name} {message}"
    assert not list(tmp_path.iterdir())


def test_names_of_outputs_that_promise_nothing_else_are_taken(tmp_path):
    os.mkfifo(tmp_path / "pipe.gz")
    for name, form in (
        ("o.de", None), ("o.tsv", None), ("o", "csv"), ("o.csv", "csv"), ("o.json", "jsonl"), ("o.txt", "jsonl"),
        ("pipe.gz", None),
    ):  # fmt: skip
        refuse_output_name(tmp_path / name, form)
    with pytest.raises(UserError, match=r"is named as a table \(jsonl\), but the command writes a table \(csv\)"):
        refuse_output_name(tmp_path / "x.jsonl", "csv")


def test_a_command_removes_only_its_own_files(world, tmp_path):
    write(tmp_path / "output.parts" / "notes.json")
    done = run_here("translate.py", "--out", world / "run", f"input={world / 'text.en'}", f"output={tmp_path / 'output'}")
    assert done.returncode == 0, done.stderr
    for name in (".work-notes/a", ".work-0123456789abcdef/a", ".tmp-download/a", temporary_beside(tmp_path / "output").name):
        write(tmp_path / name)
    remove_work(tmp_path)
    claim_folder(tmp_path, kinds.REPORT)
    assert sorted(content(tmp_path)) == [".tmp-download/a", ".work-notes/a", "output", "output.parts/notes.json"]


def test_leftovers_of_dead_processes_are_removed_and_those_of_others_stay(tmp_path):
    for name in (".tmp-1-text.translated", ".tmp-12-averaged/model", ".tmp-99999-provenance.json"):
        write(tmp_path / name)
    with create(tmp_path / ".tmp-1-scores.json") as file:
        file.write(b"half")
        (tmp_path / ".tmp-2-averaged").mkdir()
        with locked_entry(tmp_path / ".tmp-2-averaged"):
            claim_folder(tmp_path, kinds.RUN)
            assert {path.name for path in tmp_path.iterdir()} == {".tmp-1-scores.json", ".tmp-2-averaged"}
    remove_leftovers(tmp_path, "averaged")
    assert [path.name for path in tmp_path.iterdir()] == [".tmp-1-scores.json"]
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())

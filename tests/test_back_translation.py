"""Back-translation: the mixture against lists, an interrupted command against an undisturbed one, refusals."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from treenet.cli import back_translate
from treenet.cli.back_translate import BackTranslation, claim, main
from treenet.cli.synthetic_pairs import MADE, BackTranslateConfig, mix, sample_lines, synthetic_pairs
from treenet.config.training import BatchConfig
from treenet.data.hashed_sampling import read_corpora
from treenet.jobs import train_run
from treenet.translation import translate_job
from treeproc.common.folder_kinds import BACK_TRANSLATION, kind_of
from treeproc.common.settings import UserError, load_settings
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess

pytestmark = pytest.mark.slow

RUN = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "optimizer": {"learning_rate": 5e-3, "warmup_steps": 10},
    "batch": {"max_tokens": 600},
    "max_steps": 6,
    "checkpoint_every": 3,
    "validate_every": 3,
    "workers": 0,
}


# What is refused on a machine without a GPU.
NO_GPU = [] if torch.cuda.is_available() else [(["backward.use_gpu=true"], "backward.use_gpu=true needs a GPU")]


def sample(name: str, count: int, skip: int = 0) -> list[str]:
    return gzip.decompress((SAMPLE / name).read_bytes()).decode().split("\n")[skip : skip + count]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data set of 40 pairs, and text of the target language with an empty line beside it."""
    folder = tmp_path_factory.mktemp("pairs")
    splits: dict = {}
    for split, count in (("train", 40), ("valid", 6)):
        for side, language in (("source", "en"), ("target", "de")):
            path = folder / f"{split}.{language}"
            path.write_text("\n".join(sample(f"{split}.{language}.gz", count)) + "\n", encoding="utf-8")
            splits.setdefault(split, {})[side] = [str(path)]
    settings = {"parser": {"name": "words"}, "subwords": {"vocab_size": 400}, "tree": {"tree_source": "balanced"}, "workers": 0}
    filters = {"drop_damaged": False}  # a model that has hardly learned writes any bytes
    preprocess(PreprocessConfig(splits=splits, filters=filters, **settings), folder / "data")
    (folder / "text.de").write_text("\n".join([*sample("train.de.gz", 30, 40), "", "Ja."]) + "\n", encoding="utf-8")
    return folder / "data"


def arguments(data: Path, out: Path, *overrides: str) -> list[str]:
    settings = [f"data={data}", f"text=[{data.parent / 'text.de'}]", "workers=0", "ratio=0.5"]
    trained = [] if any(override.startswith("run=") for override in overrides) else [f"backward={json.dumps(RUN)}"]
    return ["--out", str(out), *settings, *trained, *overrides]


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed")
    main(arguments(data, out))
    return out


def content(out: Path) -> dict[str, bytes]:
    """The files of the pairs and of the shards."""
    patterns = ("*.source", "*.target", "text.*", "data/*/*.arrow", "data/*/vocab/*")
    paths = [path for pattern in patterns for path in out.glob(pattern)]
    return {str(path.relative_to(out)): path.read_bytes() for path in paths}


def test_real_and_synthetic_pairs_with_tags_and_trees(data, undisturbed, capsys):
    rows = [row for shard in SplitShards(undisturbed / "data" / "text", "train") for row in shard.rows()]
    real = [(row["source"], row["target"]) for shard in SplitShards(data / "text", "train") for row in shard.rows()]
    tagged = [row for row in rows if row["source"].startswith("<bt> ")]
    assert [(row["source"], row["target"]) for row in rows if row not in tagged] == real
    chosen = (undisturbed / "text.target").read_text().splitlines()
    lines = [line for line in (data.parent / "text.de").read_text().splitlines() if line]
    assert len(chosen) == 20 and chosen == [line for n, line in enumerate(lines) if (n + 1) * 20 // 31 > n * 20 // 31]
    translated = [line.strip() for line in (undisturbed / "text.translated").read_text().split("\n")[:-1]]
    pairs = [(f"<bt> {source}", target) for source, target in zip(translated, chosen, strict=True) if source]
    assert pairs and [(row["source"], row["target"]) for row in tagged] == pairs
    index = read_index(undisturbed / "data" / "encoded")
    assert index["parser_settings"]["tags"] == ["<bt>"] and index["tree_settings"]["tree_source"] == "balanced"
    words = [row["words"]["text"] for shard in SplitShards(undisturbed / "data" / "parsed", "train") for row in shard.rows()]
    assert sum(row[0] == "<bt>" for row in words) == len(pairs)
    again = content(undisturbed)
    kills = [
        "text.translated",
        "real/train.source",
        "backward/run.json",
        "data/provenance.json",
        "data/encoded/vocab/pieces.model",
    ]
    left = [undisturbed / name.replace(one := Path(name).name, f".tmp-1-{one}") for name in kills]
    for path in left:
        path.write_text("half")
    (undisturbed / "data" / "encoded" / "vocab" / "fingerprint.txt").unlink()
    main(arguments(data, undisturbed))
    assert content(undisturbed) == again and "20 of 31" not in capsys.readouterr().err
    assert not [path for path in left if path.exists()]


def test_more_pairs_than_training_shuffles_at_once_are_mixed_in_one_file(data, undisturbed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(back_translate, "WINDOW_ROWS", 59)
    main(arguments(data, tmp_path, f"run={undisturbed / 'backward'}"))
    assert "batch.corpora" not in capsys.readouterr().out and not (tmp_path / "synthetic.source").exists()
    lines, tagged = (
        (tmp_path / "train.source").read_text().splitlines(),
        (undisturbed / "synthetic.source").read_text().splitlines(),
    )
    assert lines[:3] == [*(undisturbed / "real" / "train.source").read_text().splitlines()[:2], tagged[0]]
    assert len(lines) == 40 + len(tagged)


def test_synthetic_pairs_can_have_a_weight(undisturbed):
    corpora = load_settings(BatchConfig, None, ["corpora={synthetic.source: 0.5}"]).corpora
    found, pairs = read_corpora(undisturbed / "data", corpora), len((undisturbed / "synthetic.source").read_text().splitlines())
    assert [Path(file).name for file in found.files] == ["train.source", "synthetic.source"]
    assert found.examples.tolist() == [40, pairs] and found.weights.tolist() == [1, 0.5]


def test_every_file_belongs_to_its_folder(undisturbed):
    for name, kind in {".": BACK_TRANSLATION, **BACK_TRANSLATION.inner}.items():
        names = [path.name for path in (undisturbed / name).iterdir()]
        assert names and kind_of(undisturbed / name) is kind and [one for one in names if not kind.owns(one)] == []


@pytest.mark.parametrize(
    "pairs, name, d_model, layers",
    [(1_300, "sample", 128, 2), (29_000, "multi30k_en_de", 128, 4), (160_000, "iwslt14_en_de", 512, 6)],
)
def test_the_sizes_of_the_default_model_go_by_the_number_of_pairs(data, tmp_path, pairs, name, d_model, layers):
    settings = {"data": data, "text": [data.parent / "text.de"], "workers": 0}
    work = back_translate.BackTranslation(back_translate.BackTranslateConfig(**settings), tmp_path)
    work._splits = {"train": {"rows": pairs}}
    model, (sizes, why) = work._backward_config().model, work._default_sizes()
    assert (model.name, model.d_model, model.num_encoder_layers) == ("transformer", d_model, layers)
    assert sizes["d_model"] == d_model and why == f"as in the configuration {name}, because there are {pairs:,} pairs"
    given = back_translate.BackTranslation(
        back_translate.BackTranslateConfig(**settings, backward={"model": {"d_model": 64}}), tmp_path
    )
    assert given._backward_config().model.d_model == 64 and "d_model" not in given._default_sizes()[0]


def test_a_folder_that_began_with_other_sizes_keeps_them(data, undisturbed):
    values = {name: value for name, value in RUN.items() if name != "model"}
    config = back_translate.BackTranslateConfig(data=data, text=[data.parent / "text.de"], backward=values, workers=0)
    assert back_translate.BackTranslation(config, undisturbed)._backward_config().model.d_model == 16


class Cut(Exception):
    """Stands for a kill."""


def test_tags_that_the_backward_model_writes_are_no_words(tmp_path, monkeypatch):
    """The filters of the real pairs have read them without their tags."""
    sides = {"source": ["<2de> ein Hund da"] * 9, "target": ["one dog"] * 9}
    splits: dict = {}
    for split in ("train", "valid"):
        for side, lines in sides.items():
            (tmp_path / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines))
            splits.setdefault(split, {})[side] = [tmp_path / f"{split}.{side}"]
    settings = {"parser": {"name": "words", "tags": ["<2de>"]}, "subwords": {"vocab_size": None}, "workers": 0}
    filters = {"max_ratio": 1.5}
    preprocess(
        PreprocessConfig(splits=splits, filters=filters, tree={"tree_source": "flat"}, **settings), data := tmp_path / "data"
    )

    def train(*given):
        raise Cut

    monkeypatch.setattr(train_run, "run_training", train)
    overrides = [f"data={data}", f"text=[{tmp_path / 'train.target'}]", "tag=null", "workers=0", f"backward={json.dumps(RUN)}"]
    with pytest.raises(Cut):
        main(["--out", str(tmp_path / "out"), *overrides])
    assert read_index(tmp_path / "out" / "backward_data" / "text")["totals"]["train"]["rows"] == 9


def test_cut_after_every_step_the_same_command_goes_on(data, undisturbed, tmp_path, monkeypatch):
    """Each function ends its work once, and the command ends before it records it."""
    cut: list[str] = []

    def once(name: str, do: Callable) -> Callable:
        def cut_off(*given, **named):
            result = do(*given, **named)
            if cut.count(name) < (2 if name == "preprocess" else 1):
                cut.append(name)
                raise Cut
            return result

        return cut_off

    steps = ("write_pairs", "run_training", "sample_lines", "translate_lines", "preprocess")
    later = {"run_training": train_run, "translate_lines": translate_job}  # imported where they are used
    for name in steps:
        module = later.get(name, back_translate)
        monkeypatch.setattr(module, name, once(name, getattr(module, name)))
    for _ in range(10):
        try:
            main(arguments(data, tmp_path))
            break
        except Cut:
            continue
    assert sorted(cut) == sorted([*steps, "preprocess"])
    assert content(tmp_path) == content(undisturbed)


def test_a_finished_run_and_no_tag(data, undisturbed, tmp_path, monkeypatch):
    seen, translate = [], translate_job.translate_lines

    def with_one_run(lines, settings, runs, *more, **named):
        seen.extend(runs)
        translate(lines, settings, runs[:1], *more, **named)

    monkeypatch.setattr(translate_job, "translate_lines", with_one_run)
    run = undisturbed / "backward"
    main(arguments(data, tmp_path, f"run={run}", "tag=null", f"translate.ensemble=[{data}]"))
    assert seen == [run, data], "the ensemble is given on"
    assert not (tmp_path / "backward").exists()
    assert (tmp_path / "text.translated").read_bytes() == (undisturbed / "text.translated").read_bytes()
    plain = (undisturbed / "synthetic.source").read_text().replace("<bt> ", "")
    assert (tmp_path / "synthetic.source").read_text() == plain
    monkeypatch.setattr(train_run, "run_training", None)  # whatever trains fails
    with pytest.raises(UserError, match=r"belongs to other settings \(run: .*backward -> null\)"):
        main(arguments(data, tmp_path, "tag=null", f"translate.ensemble=[{data}]", "backward={}"))


def test_targets_of_valid_in_the_text_are_told(data, undisturbed, tmp_path, caplog):
    """The model would learn them, and the tag hides their sources from filters.drop_leaks."""
    first, second = sample("valid.de.gz", 2)
    (tmp_path / "text.de").write_text("\n".join([first.upper(), "Ja.", second, "..."]) + "\n", encoding="utf-8")
    for text, count in ((tmp_path / "text.de", 2), (data.parent / "text.de", 0)):
        settings = [f"data={data}", f"text=[{text}]", f"run={undisturbed / 'backward'}", "ratio=1"]
        out = tmp_path / str(count)
        out.mkdir()
        caplog.clear()
        BackTranslation(load_settings(BackTranslateConfig, None, settings), out)._choose_text()
        told = [message for message in caplog.messages if "targets of valid or test" in message]
        assert len(told) == bool(count) and all(f"warning: {count} of 4 chosen lines" in message for message in told)


def test_translations_of_another_zip_of_the_same_name_are_not_taken(data, undisturbed, tmp_path, monkeypatch):
    def copy(lines, settings, *more, **named):
        shutil.copy(undisturbed / "text.translated", settings.output)

    monkeypatch.setattr(translate_job, "translate_lines", copy)
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "cache"))
    run, packed = tmp_path / "run", tmp_path / "run.zip"
    shutil.copytree(undisturbed / "backward", run)
    shutil.make_archive(str(tmp_path / "run"), "zip", run)
    main(arguments(data, tmp_path / "out", f"run={packed}"))
    meta = run / "averaged" / "meta.json"
    meta.write_text(meta.read_text().replace("{", '{"of": "another training",', 1))
    shutil.make_archive(str(tmp_path / "run"), "zip", run)
    with pytest.raises(UserError, match="holds the step 'translations' of other data or settings"):
        main(arguments(data, tmp_path / "out", f"run={packed}"))


def test_lower_cased_tags_of_a_backward_model_are_tags(tmp_path):
    for name, lines in {
        "translated": ["<2en> ein hund", "", "<2de>", "<2EN> ein <2en>", "kein", "<2εσ> kein"],
        "text": list("abcdef"),
    }.items():
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    found = synthetic_pairs(tmp_path / "translated", tmp_path / "text", None, ["<2EN>", "<2de>", "<2ΕΣ>"])
    assert list(found) == [("<2EN> ein hund", "a"), ("<2de>", "c"), ("<2EN> ein <2en>", "d"), ("kein", "e"), ("<2ΕΣ> kein", "f")]


@pytest.mark.parametrize("num_synthetic", [0, 1, 3, 10, 25])
def test_synthetic_pairs_are_spread_evenly(num_synthetic):
    real, synthetic = [("r", str(n)) for n in range(10)], [("s", str(n)) for n in range(num_synthetic)]
    mixed = list(mix(iter(real), 10, iter(synthetic), num_synthetic))
    assert [pair for pair in mixed if pair[0] == "r"] == real and [pair for pair in mixed if pair[0] == "s"] == synthetic
    before = [sum(pair[0] == "s" for pair in mixed[: mixed.index(pair)]) for pair in real]
    assert all(abs(count - n * num_synthetic / 10) < 1 for n, count in enumerate(before))


def test_refusals(data, undisturbed, tmp_path):
    for overrides, message in (
        (["ratio=2"], r"belongs to other settings \(ratio: 0.5 -> 2.0\)"),
        (["translate.nbest=3"], "translate.nbest: this command chooses the lines and what is written"),
        ([f"translate.prefix={data.parent / 'text.de'}"], "translate.prefix: this command chooses the lines"),
        ([f"backward.data={data}"], "backward.data: this command makes that data set"),
        (["tag=bt"], "tag"),
        ([f"text=[{undisturbed / 'text.target'}]"], "text: .*text.target is a file that this command writes into --out"),
        (["backward.model=5"], "backward.model must be a section of settings, but is 5"),
    ):
        with pytest.raises(UserError, match=message):
            main(arguments(data, undisturbed, *overrides))
    (tmp_path / "other.de").write_text("Etwas anderes.\n")
    with pytest.raises(UserError, match=r"holds the step 'text' of other data or settings"):
        main(arguments(data, undisturbed, f"text=[{tmp_path / 'other.de'}]"))
    (tmp_path / "empty.de").write_text("\n \n")
    with pytest.raises(UserError, match="there is no line with text"):
        sample_lines([tmp_path / "empty.de"], 3, tmp_path / "out")
    with pytest.raises(UserError, match="a.csv must have one text a line"):
        sample_lines([tmp_path / "empty.de", tmp_path / "a.csv"], 3, tmp_path / "out")


def test_settings_of_the_backward_model_may_be_corrected_until_its_first_checkpoint(data, undisturbed, tmp_path):
    out = tmp_path / "out"
    (out / "backward").mkdir(parents=True)
    (out / MADE).write_text("{}")
    configs = [
        load_settings(BackTranslateConfig, None, arguments(data, out, f"backward.optimizer.label_smoothing={value}")[2:])
        for value in (0.1, 0.2)
    ]
    for config in (*configs, configs[0]):
        claim(config, out)
    shutil.copytree(undisturbed / "backward" / "checkpoints", out / "backward" / "checkpoints")
    with pytest.raises(UserError, match=r"belongs to other settings \(backward.optimizer.label_smoothing: 0.1 -> 0.2\)"):
        claim(configs[1], out)


@pytest.mark.parametrize("key", ["run={}", "translate.ensemble=[{}]"])
def test_a_run_of_the_wrong_direction_is_refused(data, undisturbed, tmp_path, key):
    """Its own data set has the lines in the same order, also with other trees or pieces."""
    forward = shutil.copytree(undisturbed / "backward", tmp_path / "forward")
    other = tmp_path / "other"
    preprocess(PreprocessConfig(parsed=data, subwords={"vocab_size": 420}, tree={"tree_source": "flat"}, workers=0), other)
    config = forward / "config.yaml"
    config.write_text(config.read_text().replace(str(undisturbed / "backward_data"), str(other)))
    with pytest.raises(UserError, match="forward translates the source of .* to its target; give a run"):
        main(arguments(data, tmp_path / "out", f"run={undisturbed / 'backward'}", key.format(forward)))
    assert not (tmp_path / "out" / "config.yaml").exists()
    index = json.loads((other / "encoded" / "index.json").read_text())
    index["tree_settings"]["side"] = "target"
    (other / "encoded" / "index.json").write_text(json.dumps(index))
    given = arguments(data, tmp_path / "out", f"run={undisturbed / 'backward'}", key.format(forward))[2:]
    BackTranslation(load_settings(BackTranslateConfig, None, given), tmp_path / "out")  # reads the targets: the right direction


# Only the reader of the translation refuses them.
JSON_LINES = (
    b'{"a": "Ja."}\n' * 3,
    r"^text: .*/text.de: expected a text, but found a JSON object: .*; write its texts to a file of",
)


def test_what_cannot_work_is_refused_before_the_training_and_can_be_corrected(data, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(train_run, "run_training", None)  # whatever trains fails
    out, text = tmp_path / "out", tmp_path / "text.de"
    pairs = {side: [data.parent / f"train.{language}"] for side, language in (("source", "en"), ("target", "de"))}
    train_alone, test_alone = tmp_path / "train_alone", tmp_path / "test_alone"
    preprocess(load_settings(PreprocessConfig, data / "config.yaml", splits={"train": pairs}, workers=0), train_alone)
    preprocess(PreprocessConfig(vocab_from=data, splits={"test": pairs}, workers=0), test_alone)
    for overrides, message in (
        ([f"data={undisturbed / 'data'}", "tag=<bt2>"], r"have tags already \(<bt>\), and a line has one at most; give tag=null"),
        (["backward.modle.name=transformer"], "backward: modle"),
        (["backward.task=masked_lm"], "backward.task must be translation, but is masked_lm"),
        (["backward.model.name=tree_transformer"], "tree_transformer reads trees of the target language; give its parser"),
        (["translate.decoding.top_k=5"], "top_k needs method = sampling or mbr"),
        *NO_GPU,
        (
            ["backward_parser={name: shipped, language: de}"],
            "choose one of these: backward_parser.dependencies=true backward_parser.constituency=false",
        ),
        (
            [f"data={train_alone}", "backward.average=best"],
            "^backward.average: best needs validations, .* has no split valid; add one, or set backward.average=last",
        ),
        ([f"data={test_alone}"], "has no train split, to which the new pairs are added"),
        ([f"run={undisturbed / 'backward'}", f"backward={json.dumps(RUN)}"], "run is a finished model, so none is trained"),
    ):
        with pytest.raises(UserError, match=message):
            main(arguments(data, out, *overrides))
        assert not (out / "config.yaml").exists() and not (out / "real").exists()
    for content, message in ((b"\n \n", "there is no line with text"), (b"Ja.\n\xff\n", "text.de, line 2: .*UTF-8"), JSON_LINES):
        text.write_bytes(content)
        with pytest.raises(UserError, match=message):
            main(arguments(data, out, f"text=[{text}]"))
    with pytest.raises(UserError, match=rf"choose another --out, with run={undisturbed / 'backward'} to keep its backward model"):
        main(arguments(data, undisturbed, "translate.decoding.beam_size=2"))

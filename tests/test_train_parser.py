"""A tiny treebank through the whole training of a parser: killed, continued, refused, and used by preprocess.py.

The treebank is made of 200 lines of the shipped sample, parsed by the shipped models; its arcs follow from its trees.
"""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import run_here
from conftest import REPOSITORY
from pictures import pictures
from waiting import wait_for

from treeproc.common.settings import UserError, load_settings
from treeproc.extras.parser_training.config import TrainParserConfig
from treeproc.extras.parser_training.job import _claim, read_treebanks, train_parser
from treeproc.extras.parser_training.results import write_card, write_curves
from treeproc.parsers import ParserConfig, build_parser, describe_parser, find_models
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, read_index
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess
from treeproc.trees.scores import score
from treeproc.trees.spans import SpanTree, read_brackets

pytestmark = [pytest.mark.slow, pytest.mark.long]

LANGUAGE = "xx-toy"
NAMES = ("tokenizer", "pos", "constituency", "depparse")


def arcs_of(tree: SpanTree, num_words: int) -> list[tuple[int, str]]:
    """Governor and relation of every word: the last word of the smallest phrase that does not end with it."""
    out = []
    for word in range(num_words):
        above = [k for k in range(len(tree)) if tree.starts[k] <= word < tree.ends[k] - 1]
        smallest = min(above, key=lambda k: tree.ends[k] - tree.starts[k], default=None)
        out.append((-1, "root") if smallest is None else (tree.ends[smallest] - 1, tree.labels[smallest].lower()))
    return out


def conllu(line: str, words: dict, tags: list[str], arcs: list[tuple[int, str]]) -> str:
    rows = [f"# text = {line}"]
    ends = [*words["start_char"][1:], -1]
    for i, (word, tag, (governor, relation)) in enumerate(zip(words["text"], tags, arcs, strict=True)):
        misc = "SpaceAfter=No" if words["end_char"][i] == ends[i] else "_"
        rows.append(f"{i + 1}\t{word}\t_\t{tag[:2]}\t{tag}\t_\t{governor + 1}\t{relation}\t_\t{misc}")
    return "\n".join(rows) + "\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The treebank, and a configuration that trains for seconds."""
    folder = tmp_path_factory.mktemp("toy")
    lines = gzip.decompress((SAMPLE / "train.en.gz").read_bytes()).decode().split("\n")
    lines = lines[:: len(lines) // 200][:200]
    brackets, sentences = [], []
    for line, parsed in zip(lines, build_parser(ParserConfig(name="shipped", device="cpu")).parse(lines), strict=True):
        _, tags, tree = read_brackets(parsed.trees[0])
        brackets.append(parsed.trees[0] + "\n")
        sentences.append(conllu(line, parsed.words, tags, arcs_of(tree, len(tags))))
    for name, step in (("toy", 1), ("short", 4)):
        (folder / f"{name}.mrg").write_text("".join(brackets[::step]))
        (folder / f"{name}.conllu.gz").write_bytes(gzip.compress("".join(sentences[::step]).encode()))
    fit = {"epochs": 8, "evaluations": 2, "learning_rate": 0.01, "average": 0.9}
    config = {
        "language": LANGUAGE,
        "treebanks": {
            "toy": {
                "brackets": {"train": [str(folder / "toy.mrg")]},
                "conllu": {"train": [str(folder / "toy.conllu.gz")]},
                "attribution": "sentences of Tatoeba",
            }
        },
        "hold_out": 10,
        "tokenizer": {"batch_chars": 500, "dropout": 0.1, "fit": fit | {"epochs": 6}},
        "pos": {"hidden_dim": 32, "batch_words": 300, "fit": fit | {"epochs": 12}},
        "constituency": {"hidden_size": 32, "batch_words": 200, "fit": fit | {"epochs": 14}},
        "depparse": {"hidden_dim": 32, "batch_words": 300, "fit": fit},
    }
    (folder / "toy.yaml").write_text(yaml.safe_dump(config))
    return folder


def load(folder: Path, *overrides: str) -> TrainParserConfig:
    return load_settings(TrainParserConfig, folder / "toy.yaml", overrides)


@pytest.fixture(scope="module")
def trained(folder) -> Path:
    """OUT of a run that nothing disturbed."""
    train_parser(load(folder), folder / "whole")
    return folder / "whole"


def kill_when(folder: Path, out: Path, reached: Callable[[], bool]) -> None:
    """Start the command and kill it as soon as `reached`."""
    command = [sys.executable, str(REPOSITORY / "workflows/train_parser.py"), "--config", str(folder / "toy.yaml")]
    with open(folder / "log", "w") as log:
        # Other threads than in the undisturbed run: the command sets its own number.
        env = {**os.environ, "OMP_NUM_THREADS": "2"}
        process = subprocess.Popen([*command, "--out", str(out)], stdout=log, stderr=log, env=env)
        try:
            wait_for(reached, process, 250, folder / "log")
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.cluster
def test_a_killed_run_ends_as_an_undisturbed_one(folder, trained):
    out = folder / "killed"
    # As a model is finished, so that another process makes the first weights of the next, and in the middle of a fit.
    kill_when(folder, out, (out / "models/tokenizer.pt").exists)
    assert not (out / "training/pos/checkpoint.pt").exists()
    kill_when(folder, out, (out / "training/constituency/checkpoint.pt").exists)
    assert not (out / "models/constituency.pt").exists()
    train_parser(load(folder), out)
    for path in (trained / "models").glob("*.pt"):
        assert path.read_bytes() == (out / "models" / path.name).read_bytes(), path.name
    assert (out / "models/scores.json").read_bytes() == (trained / "models/scores.json").read_bytes()
    for name in NAMES:
        steps = [json.loads(line)["step"] for line in (out / f"training/{name}/metrics.jsonl").read_text().splitlines()]
        assert steps == sorted(set(steps))


def test_the_models_have_learnt(trained):
    scores = json.loads((trained / "models/scores.json").read_text())["treebanks"]["toy"]["valid"]
    brackets = scores["brackets"]
    assert brackets["sentences"] > 10 and brackets["predicted_tags"]["failed"] == 0
    assert scores["tokens"]["f1"] > 90 and scores["tags"]["xpos"] > 50
    assert brackets["predicted_tags"]["labelled"]["f1"] > 40
    assert brackets["gold_tags"]["labelled"]["f1"] > 40
    assert scores["arcs"]["uas"] > 60 and scores["arcs"]["uas"] >= scores["arcs"]["las"] > 40


def test_the_card_and_the_curves(trained):
    card = (trained / "models/README.md").read_text()
    assert "- toy: sentences of Tatoeba" in card and "| toy valid |" in card and f"'{LANGUAGE}'" in card
    assert all(f"`{name}.pt`" in card for name in NAMES)
    with pictures():
        write_curves(trained / "training", NAMES, trained / "curves.png")
    assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_the_card_has_the_scores_of_the_last_part_of_each_treebank(language, tmp_path):
    """The cards are those of the shipped models, whose scores.json has all parts."""
    shipped = REPOSITORY / "treeproc/models" / language
    config = load_settings(TrainParserConfig, REPOSITORY / f"workflows/configs/parser_{language}.yaml")
    scores = json.loads((shipped / "scores.json").read_text())
    write_card(tmp_path, config, [], scores)
    tables = [card.read_text().split("## Scores")[1].split("## ")[0] for card in (tmp_path / "README.md", shipped / "README.md")]
    assert tables[0] == tables[1]
    parts = [f"{name} {'test' if 'test' in splits else 'valid'}" for name, splits in scores["treebanks"].items()]
    assert re.findall(r"^\| (\w+ \w+) \|", tables[0], re.MULTILINE) == parts


@pytest.mark.cluster
def test_a_model_that_is_made_again_has_the_same_bytes(folder, trained):
    """So data sets that it parsed stay those of this parser. The new process hashes strings differently."""
    path = trained / "models/constituency.pt"
    before = path.read_bytes()
    path.unlink()
    command = [sys.executable, str(REPOSITORY / "workflows/train_parser.py"), "--config", str(folder / "toy.yaml")]
    subprocess.run([*command, "--out", str(trained)], check=True, capture_output=True)
    assert path.read_bytes() == before


def test_a_finished_run_does_nothing(folder, trained):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*.pt")}
    train_parser(load(folder, "title=Another title"), trained)
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*.pt")} == before
    assert (trained / "models/README.md").read_text().startswith("# Another title\n")


def test_other_settings_and_other_trees_are_refused(folder, trained):
    with pytest.raises(UserError, match=r"other settings or treebanks \(pos.hidden_dim: 32 -> 33; seed: 1 -> 2\)"):
        train_parser(load(folder, "pos.hidden_dim=33", "seed=2"), trained)
    text = (folder / "toy.mrg").read_text()
    (folder / "other.mrg").write_text(text.replace("NP", "XP", 1))
    with pytest.raises(UserError, match=r"\(the text of toy brackets (train|valid)\)"):
        train_parser(load(folder, f"treebanks.toy.brackets.train=[{folder / 'other.mrg'}]"), trained)
    # The same trees in another place are the same.
    (folder / "copy.mrg").write_text(text)
    train_parser(load(folder, f"treebanks.toy.brackets.train=[{folder / 'copy.mrg'}]"), trained)


def test_a_folder_of_treebanks_may_move(folder, tmp_path):
    def config(place: str) -> TrainParserConfig:
        return TrainParserConfig(treebank=tmp_path / place, language="xx")

    for name in ("old", "out"):
        (tmp_path / name).mkdir()
    shutil.copy(folder / "toy.conllu.gz", tmp_path / "old" / "xx_toy-ud-train.conllu.gz")
    _claim(config("old"), {"toy": "x"}, tmp_path / "out")
    (tmp_path / "out" / "training" / "pos").mkdir(parents=True)
    (tmp_path / "old").rename(tmp_path / "new")
    _claim(config("new"), {"toy": "x"}, tmp_path / "out")
    with pytest.raises(UserError, match="the text of toy"):
        _claim(config("new"), {"toy": "y"}, tmp_path / "out")


def test_another_order_of_treebanks_is_refused(tmp_path):
    """The batches name sentences by their numbers. The order of files and splits does not matter."""
    texts = {f"{name} {part}": part for name in ("b", "a") for part in ("brackets train", "conllu train")} | {"unlabelled": "x"}
    config = TrainParserConfig(treebank=tmp_path, language="xx")
    _claim(config, texts, tmp_path)
    before = (tmp_path / "run.json").read_bytes()
    (tmp_path / "training" / "pos").mkdir(parents=True)
    with pytest.raises(UserError, match=r"settings or treebanks \(the order of treebanks: b, a -> a, b\); choose another --out"):
        _claim(config, dict(sorted(texts.items())), tmp_path)
    assert (tmp_path / "run.json").read_bytes() == before
    _claim(config, {name: texts[name] for name in sorted(texts, key=lambda name: (name[0] != "b", name[::-1]))}, tmp_path)


def test_bad_treebanks_are_one_line(folder, tmp_path):
    (folder / "bad.mrg").write_text((folder / "toy.mrg").read_text() + "(ROOT (S (NN a))\n")
    override = f"treebanks.toy.brackets.train=[{folder / 'bad.mrg'}]"
    run = run_here("train_parser.py", "--config", folder / "toy.yaml", "--out", tmp_path / "out", override)
    assert run.returncode == 2
    assert run.stderr == f"error: {folder / 'bad.mrg'}, line 201: 1 bracket(s) of this tree are not closed\n"
    assert not (tmp_path / "out").exists()


def test_one_format_alone(folder, tmp_path, caplog):
    """Brackets alone give no arcs, CoNLL-U alone no constituents; a line says so."""
    caplog.set_level("INFO", logger="treeproc")
    fits = [f"{name}.fit.epochs=1" for name in NAMES]
    sides = {"brackets": ("mrg", "depparse: left out, because no treebank has CoNLL-U with arcs in train"),
             "conllu": ("conllu.gz", "constituency: left out, because no treebank has brackets in train")}  # fmt: skip
    for side, (suffix, line) in sides.items():
        caplog.clear()
        treebanks = f"treebanks={{toy: {{attribution: '', {side}: {{train: [{folder / 'short'}.{suffix}]}}}}}}"
        models = train_parser(load(folder, treebanks, *fits), tmp_path / side)
        assert line in caplog.messages
        missing = {line.partition(":")[0]} | ({"vectors"} if side == "conllu" else set())
        assert {path.stem for path in models.glob("*.pt")} == {*NAMES, "vectors"} - missing
    with pytest.raises(UserError, match=r"parser.models: .* has no constituency.pt"):
        find_models(ParserConfig(models=tmp_path / "conllu/models"))
    with pytest.raises(UserError, match=r"parser.models: .* has no depparse.pt"):
        find_models(ParserConfig(models=tmp_path / "brackets/models", dependencies=True))


def test_a_share_of_lower_case_that_takes_no_sentence(folder, tmp_path, caplog):
    """The treebank in lower case then has only valid and test; and its CoNLL-U has only test, with the sentences of train."""
    fits = [f"{name}.fit.epochs=1" for name in NAMES]
    toy = f"{{attribution: '', brackets: {{train: [{folder / 'short.mrg'}]}}, conllu: {{test: [{folder / 'short.conllu.gz'}]}}}}"
    config = load(folder, "lower_case=0.0001", f"treebanks={{toy: {toy}}}", *fits)
    train = {re.sub(r"\W", "", "".join(tree.words)).lower() for tree in read_treebanks(config)[0].trees["train"]}
    caplog.clear()
    models = train_parser(config, tmp_path / "out")
    assert {path.stem for path in models.glob("*.pt")} == {"tokenizer", "pos", "constituency", "vectors"}
    texts = re.findall("# text = (.*)", gzip.decompress((folder / "short.conllu.gz").read_bytes()).decode())
    seen = sum(re.sub(r"\W", "", text).lower() in train for text in texts)
    assert 0 < seen < len(texts) == 50
    (note,) = (one for one in caplog.messages if "are in train too" in one)
    assert note.startswith(f"note: toy: {seen} of 50 sentences of test ({seen / 50:.1%}) are in train too, except for case")
    scores = json.loads((models / "scores.json").read_text())["treebanks"]
    assert {name: list(parts) for name, parts in scores.items()} == {"toy": ["valid", "test"], "toy_lower": ["valid", "test"]}


def test_the_command_proposes_what_preprocess_takes(folder, trained, tmp_path):
    """The models of a training without a parser have no use yet."""
    config = folder / "toy.yaml"
    short = f"treebanks={{toy: {{attribution: '', conllu: {{train: [{folder / 'short.conllu.gz'}]}}}}}}"
    settings = [short, "models=[tokenizer]", "tokenizer.fit.epochs=1"]
    alone = run_here("train_parser.py", "--config", config, "--out", tmp_path, *settings)
    whole = run_here("train_parser.py", "--config", config, "--out", trained)
    assert alone.stdout.splitlines()[-1].endswith(
        "tree-attention preprocess needs tokenizer.pt, pos.pt, and constituency.pt or depparse.pt"
    )
    assert whole.stdout.splitlines()[-1].endswith(f"parser.models={trained / 'models'} parser.language={LANGUAGE}")


def test_preprocess_takes_the_models(trained, tmp_path):
    parser = {"models": trained / "models", "language": LANGUAGE, "dependencies": True, "device": "cpu"}
    (tmp_path / "a.en").write_text("".join(f"Tom said that he has {n} dogs.\n" for n in range(40)))
    (tmp_path / "a.de").write_text("".join(f"Tom sagte, er habe {n} Hunde.\n" for n in range(40)))
    splits = {"train": {"source": [tmp_path / "a.en"], "target": [tmp_path / "a.de"]}}
    config = PreprocessConfig(splits=splits, parser=parser, subwords={"vocab_size": 300}, workers=0)
    index = preprocess(config, tmp_path / "data")
    parsed = read_index(tmp_path / "data/parsed")
    assert parsed["parser"]["models"]["origin"] == "trained" and set(parsed["parser"]["models"]["files"]) == {
        "tokenize", "pos", "constituency", "depparse", "vectors",
    }  # fmt: skip
    assert str(trained) not in json.dumps(index["parser"])
    row = Shard(tmp_path / "data/parsed", ShardRecord(**parsed["shards"][0])).row(0)
    assert row["parse_status"] == "parsed" and len(row["arcs"]["governor"]) == len(row["words"]["text"]) > 5
    # The folder may move, and a job continues; other models are another parser.
    moved = tmp_path / "moved"
    os.rename(trained / "models", moved)
    try:
        again = config.model_copy(update={"parser": ParserConfig(**parser | {"models": moved})})
        assert preprocess(again, tmp_path / "data")["fingerprint"] == index["fingerprint"]
    finally:
        os.rename(moved, trained / "models")
    assert describe_parser(config.parser) != describe_parser(ParserConfig(name="shipped", language="en", device="cpu"))


def test_the_parser_gives_what_was_scored(folder, trained):
    """F1 of lines parsed from raw text, against the shipped models' trees: the models are really those of the folder."""
    text = gzip.decompress((folder / "toy.conllu.gz").read_bytes()).decode()
    lines = [line[9:] for line in text.split("\n") if line.startswith("# text = ")]
    parser = build_parser(ParserConfig(models=trained / "models", language=LANGUAGE, device="cpu"))
    parsed = parser.parse(lines)
    gold = [read_brackets(line) for line in (folder / "toy.mrg").read_text().splitlines()]
    same = [(g, p) for g, p in zip(gold, parsed, strict=True) if g[0] == p.words["text"]]
    assert len(same) > 120
    assert score([g[1:] for g, _ in same], [read_brackets(p.trees[0])[2] for _, p in same]).f1 > 0.5

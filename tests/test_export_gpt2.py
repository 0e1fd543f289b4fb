"""Causal language models as GPT-2: `transformers` gives the logits of the model, and the pieces of the job."""

import json
import shlex
import subprocess
import zipfile
from pathlib import Path

import exported_pieces
import pyarrow as pa
import pytest
import torch
from commands import run_installed_here
from conftest import REPOSITORY
from hypothesis import given, settings
from hypothesis import strategies as st
from search_runs import SEARCH_WORDS, write_run, write_vocabulary
from tokenizers import Tokenizer

from treenet.cli import export
from treenet.data.batch import TreeBatch
from treenet.extras.export.gpt2_files import tokenizer_of
from treenet.runs.loading import load_model
from treeproc.common.settings import UserError
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID
from treeproc.subwords import SubwordConfig, Subwords, train_pieces

pytestmark = pytest.mark.slow
SMALL = ("d_model=16", "d_ff=32", "num_heads=2", "num_encoder_layers=1")


def pieces_of(subwords: Subwords, line: str) -> list[int]:
    return subwords.encode_lines(pa.array([line]))[0].tolist()


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with a run of two layers and its export."""
    world = tmp_path_factory.mktemp("gpt2")
    data = write_vocabulary(world / "data")
    write_run(world / "run", data, name="causal_transformer", task="causal_lm", norm="pre", num_encoder_layers=2)
    export.main([str(world / "run"), "--out", str(world / "out"), "--to", "gpt2", "max_positions=40"])
    return world


def test_transformers_computes_the_logits_of_the_model(exported):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported / "out")
    theirs = AutoModelForCausalLM.from_pretrained(exported / "out").eval()
    ours = load_model(exported / "run")
    subwords = Subwords(ours.data / "encoded" / "vocab" / "pieces.model")
    lines = ["ba de", "gu ki bo da", "ke", " ".join(SEARCH_WORDS[:10])]
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    rows = [[BOS_ID, *pieces_of(subwords, line)] for line in lines]
    assert [row[: len(mine)] for row, mine in zip(batch.input_ids.tolist(), rows, strict=True)] == rows
    assert tokenizer.batch_decode(batch.input_ids, skip_special_tokens=True) == lines
    ids, none = batch.input_ids, batch.input_ids[:, :0]
    assert int((ids == PAD_ID).sum()) and theirs.config.eos_token_id == EOS_ID
    with torch.no_grad():
        states, _ = ours.model(TreeBatch(ids[:, 0], none, none == 0, none, none == 0, None, ids, ids))
        expected, found = ours.model.encoder.embedding.logits(states), theirs(**batch).logits
    real = batch.attention_mask.bool()
    assert expected[real].std() > 0.1
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)


_TEXT = "The children do not sleep . A child, who laughs, can't stop laughing . Überall schläft ein Kind ; naïve cafés ."


@pytest.mark.parametrize("lowercase", [False, True])
def test_the_tokenizer_has_the_pieces_of_sentencepiece(lowercase, tmp_path):
    model = train_pieces(dict.fromkeys(_TEXT.split(), 3), SubwordConfig(vocab_size=330, lowercase=lowercase))
    (tmp_path / "pieces.model").write_bytes(model)
    subwords = Subwords(tmp_path / "pieces.model")
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_of(model)))

    @given(st.lists(st.sampled_from([*_TEXT.split(), "laughed", "NAÏVE", "日本", "\U0001f600", "x"]), min_size=1).map(" ".join))
    @settings(max_examples=50)
    def check(line: str) -> None:
        assert tokenizer.encode(line).ids == [BOS_ID, *pieces_of(subwords, line)]

    check()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"norm": "post"}, "GPT-2 is a causal_transformer with pre-norm, but the run has post-norm"),
        ({"name": "transformer_grammar"}, "GPT-2 is a causal_transformer with pre-norm, but the run is transformer_grammar"),
    ],
)
def test_other_models_are_refused_in_a_line(options, problem, tmp_path):
    data = write_vocabulary(tmp_path / "data")
    write_run(tmp_path / "run", data, **({"name": "causal_transformer", "task": "causal_lm"} | options))
    with pytest.raises(UserError, match=problem):
        export.main([str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--to", "gpt2"])
    assert not (tmp_path / "out").exists()


def test_the_page_leads_from_running_text_to_gpt2(tmp_path, monkeypatch, capsys):
    """The commands of docs/training.md on tiny text, with less training; then the pieces of the export."""
    page = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
    block = page.partition("**From running text**")[2].partition("```bash\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    text = " = = = Cats = = = \nThe cat sees a dog. It runs!\n = = = Dogs = = = \n*MOT:\tA dog sees the cat. They run.\n" * 3
    for folder, kind in (("train_10M", "train"), ("dev", "dev")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"a.{kind}").write_text(text)
    pair = {"sentence_good": "The cat runs.", "sentence_bad": "The cat run.", "UID": "u", "linguistics_term": "t", "field": "f"}
    with zipfile.ZipFile("BLiMP.zip", "w") as file:
        file.writestr("u.jsonl", json.dumps(pair))
    less = {"preprocess": ["workers=0", "subwords.vocab_size=300"], "train-lm": [f"model.{name}" for name in SMALL]}
    less["train-lm"] += ["workers=0", "max_steps=2", "checkpoint_every=1", "validate_every=2"]
    clean, *commands = block.splitlines()
    subprocess.run(clean, shell=True, check=True)
    assert (tmp_path / "dev" / "a.dev").read_text() == "\nThe cat sees a dog. It runs!\n\nA dog sees the cat. They run.\n" * 3
    for line in commands:
        _, command, *words = shlex.split(line)
        done = run_installed_here(command, *words, *less.get(command, ()))
        assert done.returncode == 0, (line, done.stderr)
    scores = json.loads((tmp_path / "runs" / "gpt2" / "scores.json").read_text())
    assert scores["valid"]["num_examples"] == 12 and scores["pairs-blimp"]["num_pairs"] == 1
    assert "GPT2LMHeadModel" in (tmp_path / "GPT2" / "config.json").read_text()
    monkeypatch.setattr("sys.argv", ["exported_pieces.py", "runs/gpt2", "GPT2", "BLiMP.zip"])
    capsys.readouterr()
    exported_pieces.main()
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["metric"] for one in figures] == ["differ", "pair_accuracy", "pair_accuracy", "changed"]
    assert figures[0]["value"] in (0, 0.5, 1) and figures[1]["value"] == scores["pairs-blimp"]["pair_accuracy"]

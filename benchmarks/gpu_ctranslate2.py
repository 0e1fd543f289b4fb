"""The search of CTranslate2 over the weights of a plain model, for benchmarks/gpu.py."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from search import BEAM_SIZE, TARGET_PIECES

from treenet.config import ModelConfig
from treenet.data.batch import TreeBatch
from treenet.extras.export.ctranslate2_files import write_model
from treenet.models import Seq2Seq
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID

NAMES = {PAD_ID: "<pad>", UNK_ID: "<unk>", BOS_ID: "<s>", EOS_ID: "</s>"}


def name_of(piece: int) -> str:
    return NAMES.get(piece, f"p{piece}")


def ctranslate2_searcher(model: Seq2Seq, sizes: ModelConfig, batch: TreeBatch, half: bool) -> Callable[[], None]:
    """Return the search of CTranslate2, of as many steps as ours, with weights in bf16 if `half`. Raises ImportError without it.

    Its hypotheses have a piece instead of EOS at the end, which costs as much.
    """
    import ctranslate2

    device, steps = batch.leaf_pieces.device, TARGET_PIECES + 1
    run = SimpleNamespace(model=model.cpu(), config=SimpleNamespace(model=sizes), processor=SimpleNamespace(id_to_piece=name_of))
    with tempfile.TemporaryDirectory(prefix="ctranslate2-") as folder:
        write_model(run, Path(folder) / "model", 512, "none")
        translator = ctranslate2.Translator(
            f"{folder}/model",
            device=device.type,
            compute_type="bfloat16" if half else "float32",
            intra_threads=torch.get_num_threads(),
        )
    model.to(device)
    lengths = (~batch.leaf_pad_mask).sum(1).tolist()
    sources = [[name_of(piece) for piece in row[:n]] for row, n in zip(batch.leaf_pieces.tolist(), lengths, strict=True)]

    def search() -> None:
        found = translator.translate_batch(
            sources, beam_size=BEAM_SIZE, min_decoding_length=steps, max_decoding_length=steps, max_batch_size=0
        )
        assert all(len(result.hypotheses[0]) == steps for result in found)

    return search

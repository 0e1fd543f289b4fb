"""Pieces of an export to GPT-2 beside those of the job, on minimal pairs: how many sentences differ, and what accuracy becomes.

    python benchmarks/exported_pieces.py RUN EXPORT BLiMP.zip --every 10

EXPORT is the folder of `tree-attention export RUN --out EXPORT --to gpt2`. The job's pieces lie inside the parser's words; the
tokenizer of the export reads the raw sentence. The run scores both. Only every n-th pair counts with `--every`.

One JSON line per figure. `differ` is the share of sentences with other pieces; `pair_accuracy` is that of all pairs, with the
job's pieces (`words`) and with the export's (`raw`). `changed` is the share of pairs that are right with one of them alone.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from measure import emit
from tokenizers import Tokenizer

from treenet.evaluation.minimal_pairs import open_pairs
from treenet.evaluation.prefix_trees import reads_prefix_trees, score_pieces
from treenet.evaluation.settings import ScoreLMSettings
from treenet.runs.loading import load_model
from treeproc.online.minimal_pairs import encode_pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("export", type=Path)
    parser.add_argument("blimp", type=Path)
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run, given = load_model(args.run), open_pairs(ScoreLMSettings(blimp=args.blimp, every=args.every))
    if given is None or not reads_prefix_trees(run.model):
        parser.error(f"{args.run} must be a run of a causal model")
    encoded = encode_pairs(given.pairs, run.data, reads_trees=False, words_only=True)
    words = [row["leaves"]["piece"].tolist() for row, _ in encoded]
    tokenizer = Tokenizer.from_file(str(args.export / "tokenizer.json"))
    lines = [sentence for pair in given.pairs for sentence in pair.sentences]
    raw = [one.ids for one in tokenizer.encode_batch(lines, add_special_tokens=False)]
    emit("exported_pieces", args.run.name, "differ", float(np.mean([a != b for a, b in zip(words, raw, strict=True)])))
    right = {}
    for form, pieces in (("words", words), ("raw", raw)):
        nll = np.zeros(len(pieces))
        for number, scores in score_pieces(run.model, pieces):
            nll[number] = math.fsum(scores.nll)
        right[form] = nll[::2] < nll[1::2]
        emit("exported_pieces", args.run.name, "pair_accuracy", float(right[form].mean()), pieces=form, pairs=len(given.pairs))
    emit("exported_pieces", args.run.name, "changed", float((right["words"] != right["raw"]).mean()))


if __name__ == "__main__":
    main()

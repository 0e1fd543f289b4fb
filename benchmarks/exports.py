"""CTranslate2, in float32 and in int8, against our beam search: the same translations, BLEU, CPU time.

    python benchmarks/exports.py RUN DATA                     # as in docs/results/search.md
    python benchmarks/exports.py RUN DATA --split valid --rounds 1

RUN is a run of the plain Transformer, DATA its data set; that of a demo is enough. All programs have one thread and take turns.
One JSON line per figure, for each beam size. `same` is the share of lines with our translation, `bleu` is that of the split.
`time_ratio` is our CPU time over that of the program, the median of the rounds. `patience2` searches in float32
until twice as many hypotheses are finished. `log_prob` is the largest difference of a log-probability of a reference's piece.
`same_pieces` is the share of lines that sentencepiece alone cuts as our parsers do.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ctranslate2
import torch
from measure import emit
from sacrebleu.metrics import BLEU

from treenet.data.splits import read_references, read_split
from treenet.extras.export.ctranslate2_files import export_ctranslate2
from treenet.layers.backend import keep_freed_memory
from treenet.runs.loading import LoadedRun, load_run
from treenet.translation.translate import score_examples, translate_examples

BEAMS = (1, 5)
FORMS = {"float32": "none", "int8": "int8"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--split", default="test")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as our commands do
    run = load_run(args.run, data=args.data)
    rows, references = list(read_split(args.data, "encoded", args.split)), read_references(args.data, args.split)
    with tempfile.TemporaryDirectory() as folder:
        translators = {}
        for form, quantization in FORMS.items():
            export_ctranslate2(run, out := Path(folder) / form, 1024, quantization)
            translators[form] = ctranslate2.Translator(str(out), inter_threads=1, intra_threads=1, compute_type=form)
        compare(run, rows, references, translators, args.rounds)
    lines = [text["source"] for text in read_split(args.data, "text", args.split)]
    cut = [run.processor.encode(line) == row["leaves"]["piece"].tolist() for line, row in zip(lines, rows, strict=True)]
    emit("exports", "pieces", "same_pieces", sum(cut) / len(cut), lines=len(cut))


def compare(run: LoadedRun, rows: list[dict], references: list[str], translators: dict, rounds: int) -> None:
    """Print the figures of all programs."""
    sources = pieces_of(run, [row["leaves"]["piece"] for row in rows])
    targets = pieces_of(run, [row["tgt_pieces"] for row in rows])
    ours = [one.token_log_probs for one in score_examples(run.model, rows, run.config.decoding)]
    for form, translator in translators.items():
        theirs = [one.log_probs for one in translator.score_batch(sources, targets)]
        worst = max(abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))
        emit("exports", form, "log_prob", worst)
    for beam in BEAMS:
        programs = {"ours": lambda: search(run, rows, beam)}  # noqa: B023
        for form, translator in translators.items():
            programs[form] = lambda translator=translator: translate(run, translator, sources, beam)  # noqa: B023
        if beam > 1:
            programs["patience2"] = lambda: translate(run, translators["float32"], sources, beam, patience=2)  # noqa: B023
        seconds: dict[str, list[float]] = {name: [] for name in programs}
        found = {}
        for _ in range(rounds):
            for name, program in programs.items():
                found[name], spent = timed(program)
                seconds[name].append(spent)
        for name, translated in found.items():
            texts = [run.processor.decode_pieces(pieces) for pieces in translated]
            emit("exports", name, "bleu", BLEU().corpus_score(texts, [references]).score, beam=beam)
            if name != "ours":
                same = sum(a == b for a, b in zip(translated, found["ours"], strict=True))
                emit("exports", name, "same", same / len(rows), beam=beam, lines=len(rows))
                ratios = sorted(a / b for a, b in zip(seconds["ours"], seconds[name], strict=True))
                spread = {"least": round(ratios[0], 2), "most": round(ratios[-1], 2)}
                emit("exports", name, "time_ratio", statistics.median(ratios), beam=beam, **spread)


def pieces_of(run: LoadedRun, ids: list) -> list[list[str]]:
    """Names of pieces."""
    return [[run.processor.id_to_piece(int(piece)) for piece in row] for row in ids]


def search(run: LoadedRun, rows: list[dict], beam: int) -> list[list[str]]:
    """Our translations."""
    decoding = run.config.decoding.model_copy(update={"beam_size": beam})
    return pieces_of(run, [best.ids for [best] in translate_examples(run.model, rows, decoding)])


def translate(
    run: LoadedRun, translator: ctranslate2.Translator, sources: list[list[str]], beam: int, patience: float = 1
) -> list[list[str]]:
    """Translations of CTranslate2, with the batches, limits and length penalty of ours as far as it has them."""
    decoding = run.config.decoding
    longest = max(map(len, sources))
    results = translator.translate_batch(
        sources,
        beam_size=beam,
        patience=patience,
        length_penalty=decoding.length_penalty,
        max_batch_size=decoding.max_tokens,
        batch_type="tokens",
        max_decoding_length=int(longest * decoding.max_length_factor) + decoding.max_length_offset,
    )
    return [result.hypotheses[0] for result in results]


def timed(program: Callable[[], list]) -> tuple[list, float]:
    """The result, and the CPU seconds of all threads."""
    began = time.process_time()
    return program(), time.process_time() - began


if __name__ == "__main__":
    main()

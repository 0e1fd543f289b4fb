"""Parsing with Stanza's models: this project's fast path against Stanza's own pipeline, same models, same trees.

    python benchmarks/preprocess.py --captions multi30k/train.en.gz --wmt wmt_sample/src-train-case.txt.gz
    python benchmarks/preprocess.py --quick     # 400 lines of the shipped sample, 60 of them plain, one round
    python tests/character_models.py OUT        # models of the sizes of Stanza's published ones, with the shipped parser's trees
    STANZA_RESOURCES_DIR=OUT python benchmarks/preprocess.py --quick --plain 20

Models are Stanza's own if they are installed, else the shipped ones.

One JSON line per figure. `plain` is one `nlp(line)` per line, on every n-th line (`--plain` of them): its cost per line
does not depend on how many there are. `bulk` is Stanza's own call on all lines, at the fastest of the batch sizes of
BULK_BATCHES on a tenth of them, once as `nlp(list of texts)` and once as `nlp.bulk_process(list of Documents)`. Ratios
are sentences per CPU second over sentences per CPU second, in one process on one thread, rounds in turn, the best round
of each. `different_trees` counts lines whose words, tags or trees are not those of Stanza's bulk call, `plain_differs`
those of the bulk call that are not those of the plain one. `two_actors_to_one` is wall time: two processes with half
of the lines each against one with all. `batch_curve` gives sentences per CPU second by `batch_words`, and
`tag_parse_to_models` is tagging and parsing of given words by the shipped models against those of another folder.
"""

import argparse
import gzip
import html
import multiprocessing
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import stanza
import torch
from measure import emit

from treeproc.parsers import Given, ParsedLine, ParserConfig, build_parser, find_models
from treeproc.parsers.stanza_parser import span_tree, stanza_options
from treeproc.readers import read_lines
from treeproc.stages.preprocess import SAMPLE
from treeproc.trees.spans import write_brackets

CONFIG = ParserConfig(device="cpu")
BULK_BATCHES = (50, 128, 256, 512)
CURVE = (512, 1024, 2048, 4096, 8192, 16384)


def read_captions(path: str | Path, count: int) -> list[str]:
    """Return the first lines of a file of captions, stripped, without empty ones."""
    return [line for line in islice(read_lines([Path(path)]), count) if line]


def read_wmt(path: str, count: int) -> list[str]:
    """Lines of the WMT sample: escapes undone, case restored from the factors; none above the parser's limit of words."""
    change = {"C": str.capitalize, "U": str.upper}
    out: list[str] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            pairs = [word.rpartition("-|-") for word in line.split()]
            words = [change.get(case, str)(html.unescape(word)) for word, _, case in pairs]
            if 0 < len(words) <= CONFIG.max_words * 2 // 3:
                out.append(" ".join(words))
            if len(out) == count:
                break
    return out


def build_pipeline(batch: int | None) -> stanza.Pipeline:
    """Stanza as its manual says; `batch` None leaves its default batch sizes."""
    sizes = {} if batch is None else {"pos_batch_size": batch, "constituency_batch_size": batch, "tokenize_batch_size": batch}
    return stanza.Pipeline(**stanza_options(CONFIG, find_models(CONFIG)), **sizes)


def of_sentence(sentence) -> tuple[str, str, str]:
    """Words, tags and brackets of a sentence of Stanza's."""
    words, tags = [word.text for word in sentence.words], [word.xpos for word in sentence.words]
    return " ".join(words), " ".join(tags), write_brackets(span_tree(sentence.constituency), words, tags)


def of_line(parsed: ParsedLine) -> tuple[str, str, str]:
    """Return words, tags and brackets of a line parsed by this project."""
    return " ".join(parsed.words["text"]), " ".join(parsed.words["pos_tag"]), parsed.trees[0]


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU time of this process."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def bulk_calls(pipelines: dict[int, stanza.Pipeline], lines: Sequence[str]) -> dict[str, Callable[[], list]]:
    """Stanza's bulk calls by name, of pipelines by batch size; each returns the sentences, one per line."""

    def as_documents(nlp) -> list:
        documents = nlp.bulk_process([stanza.Document([], text=line) for line in lines])
        return [sentence for document in documents for sentence in document.sentences]

    calls = {f"texts, batch {batch}": lambda nlp=nlp: nlp(list(lines)).sentences for batch, nlp in pipelines.items()}
    return calls | {f"documents, batch {batch}": lambda nlp=nlp: as_documents(nlp) for batch, nlp in pipelines.items()}


def run_case(name: str, lines: list[str], options: argparse.Namespace) -> None:
    """Measure and print one case."""
    few = lines[:: max(1, len(lines) // options.plain)]
    pipelines = {batch: build_pipeline(batch) for batch in BULK_BATCHES}
    tenth = bulk_calls(pipelines, lines[::10])
    times = {key: min(cpu_seconds(call) for _ in range(2)) for key, call in tenth.items()}
    best = min(times, key=times.get)
    bulk, plain, ours = bulk_calls(pipelines, lines)[best], build_pipeline(None), build_parser(CONFIG)
    results: dict[str, list] = {}

    def keep(key: str, call: Callable[[], list]) -> Callable[[], None]:
        return lambda: results.update({key: call()})

    calls = {
        "ours": (keep("ours", lambda: ours.parse(lines)), len(lines)),
        "bulk": (keep("bulk", bulk), len(lines)),
        "plain": (keep("plain", lambda: [plain(line).sentences[0] for line in few]), len(few)),
    }
    ours.parse(lines[:50])
    rates = {key: 0.0 for key in calls}
    for _ in range(options.rounds):
        for key, (call, count) in calls.items():
            rates[key] = max(rates[key], count / cpu_seconds(call))
    words = sum(len(parsed.words["text"]) for parsed in results["ours"])
    facts = {"lines": len(lines), "distinct_lines": len(set(lines)), "words_per_line": round(words / len(lines), 1)}
    emit("preprocess", name, "sentences_per_cpu_second", rates["ours"], **facts)
    emit("preprocess", name, "ratio_to_plain", rates["ours"] / rates["plain"], plain_per_cpu_second=round(rates["plain"], 1))
    emit("preprocess", name, "ratio_to_bulk", rates["ours"] / rates["bulk"], bulk_per_cpu_second=round(rates["bulk"], 1), at=best)
    by_line = dict(zip(lines, map(of_sentence, results["bulk"]), strict=True))
    different = [line for line, parsed in zip(lines, results["ours"], strict=True) if of_line(parsed) != by_line[line]]
    emit("preprocess", name, "different_trees", len(different), examples=different[:2])
    emit(
        "preprocess",
        name,
        "plain_differs",
        sum(of_sentence(s) != by_line[line] for line, s in zip(few, results["plain"], strict=True)),
    )


def run_models(name: str, lines: list[str], folder: Path, rounds: int) -> None:
    """Tagging and parsing of the same words by the shipped models and by those of another folder, rounds in turn."""
    parsers = [build_parser(CONFIG), build_parser(CONFIG.model_copy(update={"models": folder}))]
    words = [{key: parsed.words[key] for key in ("text", "start_char", "end_char")} for parsed in parsers[0].parse(lines)]
    given = [Given(words=of_line) for of_line in words]
    seconds = [[cpu_seconds(lambda parser=parser: parser.parse(lines, given)) for parser in parsers] for _ in range(rounds)]
    rates = [len(lines) / min(times) for times in zip(*seconds, strict=True)]
    emit("preprocess", name, "tag_parse_to_models", rates[0] / rates[1], shipped=round(rates[0]), other=round(rates[1]))


def run_curve(name: str, lines: list[str]) -> None:
    """Sentences per CPU second by batch size."""
    for batch_words in CURVE:
        parser = build_parser(CONFIG.model_copy(update={"batch_words": batch_words}))
        best = min(cpu_seconds(lambda parser=parser: parser.parse(lines)) for _ in range(2))
        emit("preprocess", name, "batch_curve", len(lines) / best, batch_words=batch_words)


def _actor(lines: list[str], ready, go, seconds) -> None:
    parser = build_parser(CONFIG)
    parser.parse(lines[:50])
    ready.release()
    go.wait()
    begin = time.perf_counter()
    parser.parse(lines)
    seconds.put(time.perf_counter() - begin)


def _wall_seconds(parts: list[list[str]]) -> float:
    """Time until the slowest of one process per part is done, without the start."""
    context = multiprocessing.get_context("spawn")
    ready, go, seconds = context.Semaphore(0), context.Event(), context.Queue()
    actors = [context.Process(target=_actor, args=(part, ready, go, seconds)) for part in parts]
    for actor in actors:
        actor.start()
    for _ in actors:
        ready.acquire()
    go.set()
    slowest = max(seconds.get() for _ in actors)
    for actor in actors:
        actor.join()
    return slowest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", metavar="FILE.gz", help="captions, one a line: case parse_captions")
    parser.add_argument("--wmt", metavar="FILE.gz", help="WMT lines with case factors: case parse_wmt")
    parser.add_argument("--quick", action="store_true", help="case parse_sample, on lines of the shipped sample; under 50 s")
    parser.add_argument("--sentences", type=int, help="lines of a case; default 5,000 captions, 2,000 of WMT, 400 of the sample")
    parser.add_argument("--plain", type=int, help="lines of Stanza's own pipeline; default 250, with --quick 60")
    parser.add_argument("--rounds", type=int, help="interleaved rounds; default 2, with --quick 1")
    parser.add_argument("--models", type=Path, metavar="DIR", help="also tag_parse_to_models, against the models of this folder")
    parser.add_argument("--curve", action="store_true", help="also the batch_curve, on 2,000 lines at most")
    parser.add_argument("--actors", action="store_true", help="also two_actors_to_one; wants two idle cores")
    options = parser.parse_args()
    if not (options.quick or options.captions or options.wmt):
        parser.error("give --captions or --wmt, or --quick for the shipped sample")
    options.plain = options.plain or (60 if options.quick else 250)
    options.rounds = options.rounds or (1 if options.quick else 2)
    torch.set_num_threads(1)
    cases = {}
    if options.quick:
        cases["parse_sample"] = read_captions(SAMPLE / "train.en.gz", options.sentences or 400)
    if options.captions:
        cases["parse_captions"] = read_captions(options.captions, options.sentences or 5000)
    if options.wmt:
        cases["parse_wmt"] = read_wmt(options.wmt, options.sentences or 2000)
    for name, lines in cases.items():
        run_case(name, lines, options)
        if options.models:
            run_models(name, lines, options.models, options.rounds)
        if options.curve:
            run_curve(name, lines[:2000])
        if options.actors:
            one, two = _wall_seconds([lines]), _wall_seconds([lines[::2], lines[1::2]])
            emit("preprocess", name, "two_actors_to_one", one / two)


if __name__ == "__main__":
    main()

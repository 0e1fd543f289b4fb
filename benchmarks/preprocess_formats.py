"""CPU time of the text stage for an example of each format: in one process, and in tasks where the format can be cut.

    python benchmarks/preprocess_formats.py                      # 50,000 examples of each format
    python benchmarks/preprocess_formats.py --examples 2000      # in seconds

The words are those of the shipped sample. The tasks run one after the other in this process, without Ray. Prints JSON lines.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measure import emit
from preprocess_million import numbered, read_pairs
from preprocess_text import FILTERS
from text_steps import Here

from treeproc.stages.cut_inputs import bytes_that_can_be_cut
from treeproc.stages.inputs import Inputs, SplitFiles
from treeproc.stages.job_report import DROPPED, line_list
from treeproc.stages.text_warnings import TextNotices
from treeproc.stages.text_work import TextWork

ROWS_PER_SHARD = 2000


def brackets(words: list[str]) -> str:
    """Right-branching, one tree a line."""
    return "".join(f"(X (NN {word.translate({40: 45, 41: 45})}) " for word in words) + "(X (NN .))" + ")" * len(words)


def sentiment(words: list[str]) -> str:
    return brackets(words).replace("(X", "(2").replace("(NN", "(3")


def conllu(words: list[str]) -> str:
    return "".join(f"{i}\t{word}\t_\tNOUN\tNN\t_\t{i - 1}\tdep\t_\t_\n" for i, word in enumerate(words, start=1))


# Of each format: the source line of an example, what stands before and after all, and the target line of a pair.
SOURCES: dict[str, tuple[Callable[[list[str]], str], str, str]] = {
    "parallel": (" ".join, "", ""),
    "brackets": (brackets, "", ""),
    "sst": (sentiment, "", ""),
    "conllu": (conllu, "", ""),
    "agreement": (lambda words: "VBZ\t" + " ".join(words), "", ""),
    "linzen": (lambda words: "\t".join([" ".join(words), "VBZ", str(len(words))]), "sentence\tverb_pos\tverb_index\n", ""),
    "sick": (lambda words: "\t".join([" ".join(words), " ".join(words[::-1]), "3.5"]),
             "sentence_A\tsentence_B\trelatedness_score\n", ""),
    "sgm": (lambda words: f'<seg id="{words[0]}">{" ".join(words)}</seg>', '<doc docid="a">\n', "</doc>\n"),
    "iwslt_xml": (" ".join, "<url>a</url>\n", ""),
}  # fmt: skip
NAMES = (*SOURCES, "imdb")
WITH_TARGET = ("parallel", "brackets", "conllu", "sgm", "iwslt_xml")


def reviews(folder: Path, pairs: list[tuple[str, str]], examples: int) -> Path:
    """A folder with a file for each example."""
    for number in range(examples):
        path = folder / ("neg", "pos")[number % 2] / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number} {numbered(pairs, number)[0]}\n", encoding="utf-8")
    return folder


def inputs_of(folder: Path, name: str, examples: int) -> Inputs:
    """Write so many examples of a format."""
    pairs = [pair for pair in read_pairs(None) if all(pair)]
    if name == "imdb":
        return Inputs({"train": SplitFiles(source=[reviews(folder / "reviews", pairs, examples)])}, name, "none", None)
    line, before, after = SOURCES[name]
    sides: dict[str, list[Path]] = {}
    for side, key in enumerate(("source", "target")[: 1 + (name in WITH_TARGET)]):
        write = line if side == 0 or name == "sgm" else " ".join
        path = folder / f"{key}{'.sgm' if name == 'sgm' else ''}"
        with open(path, "w", encoding="utf-8") as file:
            file.write(before if side == 0 or name == "sgm" else "")
            for number in range(examples):
                words = [str(number), *numbered(pairs, number)[side].split()]
                file.write(write(words) + "\n")
            file.write(after)
        sides[key] = [path]
    return Inputs({"train": SplitFiles(**sides)}, name, "none", None)


def run(out: Path, inputs: Inputs, work: TextWork) -> int:
    """Do the text stage. Returns the number of examples."""
    count = sum(work.counts().values())
    work.digests()
    with line_list(out / "text" / DROPPED, "split", "line", "reason") as dropped:
        for _ in work.write("benchmark", ROWS_PER_SHARD, TextNotices({}, inputs.line), dropped):
            pass
    return count


def measure(name: str, examples: int, folder: Path) -> None:
    """Print the microseconds of an example, in one process, and in tasks and the driver."""
    inputs = inputs_of(folder, name, examples)
    figure = partial(emit, "preprocess_formats", name)
    (folder / "here" / "text").mkdir(parents=True)
    began = time.process_time()
    rows = run(folder / "here", inputs, TextWork(folder / "here", inputs, FILTERS, {}))
    figure("one_process_microseconds", (time.process_time() - began) / rows * 1e6, rows=rows)
    if bytes_that_can_be_cut(inputs):
        there, jobs = folder / "there", Here()
        (there / "text").mkdir(parents=True)
        began = time.process_time()
        run(there, inputs, TextWork(there, inputs, FILTERS, {}, lambda folder: jobs))
        tasks = sum(sum(step.tasks_s) for step in jobs.steps)
        figure("tasks_microseconds", tasks / rows * 1e6)
        figure("driver_microseconds", (time.process_time() - began - tasks) / rows * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=50_000, help="of each format (default %(default)s)")
    options = parser.parse_args()
    for name in NAMES:
        with tempfile.TemporaryDirectory() as folder:
            measure(name, options.examples, Path(folder))


if __name__ == "__main__":
    main()

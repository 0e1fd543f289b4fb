"""Forty mistakes of new users, each with the one line that it should get: `python benchmarks/mistakes.py [number ...]`.

Each command runs as a process, in a folder with small text files, data sets and runs. A right answer is one line that holds the
expected words, exit status 2, and no traceback. Where a command works but something is odd, the line is a warning or a note.
"""

import csv
import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SAMPLE = Path(__file__).resolve().parent.parent / "treeproc" / "sample"
COMMAND = [sys.executable, "-c", "from treenet.cli.main import main; main()"]
PAIRS = 500
DATA = (
    "splits.train.source=[a.en] splits.train.target=[a.de] splits.valid.hold_out=10 splits.test.source=[test.en] "
    "splits.test.target=[test.de] subwords.vocab_size=500 workers=0"
)
TINY = "model.d_model=16 model.d_ff=16 model.num_heads=2 workers=0 max_steps=4 validate_every=2 checkpoint_every=2"
LABELLED = (
    "splits.train.source=[a.csv] splits.valid.hold_out=10 splits.test.source=[test.csv] subwords.vocab_size=500 workers=0 "
    "format=labelled labelled.text=text labelled.label=genre"
)


class Mistake(NamedTuple):
    made: str  # what the user did
    command: str
    says: str  # a regular expression that the line holds
    status: int = 2


MISTAKES = (
    # Text
    Mistake("a file that is not there", f"preprocess --out x {DATA} splits.train.source=[b.en]", r"b\.en.*No such file"),
    Mistake("files of other lengths", f"preprocess --out x {DATA} splits.train.target=[short.de]", "500.*499|499.*500"),
    Mistake("an empty file", f"preprocess --out x {DATA} splits.train.source=[empty]", "empty|no line"),
    Mistake("Latin-1", f"preprocess --out x {DATA} splits.train.target=[latin1.de]", r"latin1\.de.*line \d+.*UTF-8"),
    Mistake("a file that was cut", f"preprocess --out x {DATA} splits.train.source=[cut.gz]", r"cut\.gz.*(cut|ends|damaged)"),
    Mistake("pairs shifted by one", f"preprocess --out x {DATA} splits.train.target=[shifted.de]", "shift", 0),
    Mistake("text of web pages", f"preprocess --out y {DATA} splits.train.source=[html.en]", "<br", 0),
    Mistake("a British spelling", f"preprocess --out x {DATA} tree.binarise=right", "tree.binarize"),
    Mistake("a value that is none", f"preprocess --out x {DATA} tree.binarize=yes", "left|right"),
    Mistake("a parser that is not installed", f"preprocess --out x {DATA} parser.name=benepar", "benepar.*(pip install|path)"),
    Mistake("a language without a parser", f"preprocess --out x {DATA} parser.language=eo", "eo.*(train|models|language)"),
    Mistake("more pieces than the text has", f"preprocess --out x {DATA} subwords.vocab_size=50000", "vocab_size"),
    Mistake("no folder", f"preprocess {DATA}", "--out"),
    Mistake("a folder that is a run", f"preprocess --out t {DATA}", "t .*(run|training)"),
    Mistake("a column that is not there", f"preprocess --out x {LABELLED} labelled.text=txt", "txt.*text"),
    Mistake("a row without a label", f"preprocess --out x {LABELLED} splits.train.source=[hole.csv]", r"hole\.csv.*(row|line) 5"),
    Mistake("given trees without trees", f"preprocess --out x {DATA} parser.name=given", "parser.name|format"),
    # Training
    Mistake("no data", f"train --out x {TINY}", r"data=\S+"),
    Mistake("data in a folder that is not there", f"train --out x data=dd {TINY}", "dd is not a folder"),
    Mistake("text as data", f"train --out x data=raw {TINY}", "raw.*preprocess"),
    Mistake("a model with a slip of the pen", f"train --out x data=d {TINY} model.name=tree_transfomer", "tree_transformer"),
    Mistake("another task", f"train --out x data=d {TINY} task=classification", "label|class"),
    Mistake("another model in a folder", f"train --out t data=d {TINY} model.d_model=32", "d_model.*16.*32|d_model.*32.*16"),
    Mistake("a GPU that is not there", f"train --out x data=d {TINY} use_gpu=true", "use_gpu=false"),
    Mistake("heads that do not divide", f"train --out x data=d {TINY} model.num_heads=3", "num_heads|d_model"),
    Mistake("batches shorter than a sentence", f"train --out x data=d {TINY} batch.max_tokens=4", "max_tokens"),
    Mistake("weights of another size", f"train --out x data=d {TINY} model.d_model=32 init=t", "not taken: .* has shape", 0),
    Mistake("a configuration that is not there", f"train --out x --config sampel data=d {TINY}", "sample"),
    Mistake("a path of the configuration's folder", f"train --out x --config conf/mine.yaml {TINY}", "conf/|folder"),
    Mistake("a hub name, no network", f"train --out x data=c {TINY} task=classification model.pretrained.folder=acme/tiny",
            "acme/tiny.*(download|hf |fetch)"),
    # Use
    Mistake("translation with a classifier", "translate --out k input=a.en", "classif"),
    Mistake("classes of a translator", "classify --out t input=a.en", "translat"),
    Mistake("an input that is not there", "translate --out t input=b.en", r"b\.en"),
    Mistake("a run that is not there", "translate --out tt input=a.en", "tt"),
    Mistake("a table for a run of plain lines", "translate --out t input=a.csv", r"a\.csv.*(CSV|csv|column)"),
    Mistake("a table without the run's column", "classify --out k input=other.csv", r"other\.csv.*text"),
    Mistake("a beam of nothing", "translate --out t input=a.en decoding.beam_size=0", "beam_size.*(1|greater|least)"),
    Mistake("scores of other test sets", "evaluate --compare t u", "(other|same|different).*(data|test|sentences)"),
    Mistake("a data set that was moved", "evaluate --out moved", "moved|data="),
    Mistake("a line that was dropped", "inspect d --line 3", "dropped it, empty_source"),
)  # fmt: skip


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *command.split()], cwd=folder, input="", capture_output=True, text=True)


def make_world(folder: Path) -> None:
    """Write text with mistakes, then make a data set `d` and a run `t` of translation, and `c` and `k` of classification."""
    all_english, all_german = (
        gzip.decompress((SAMPLE / f"train.{side}.gz").read_bytes()).decode().splitlines()[: PAIRS + 60] for side in ("en", "de")
    )
    all_english[2] = ""  # a filter drops it

    def text(name: str, lines: list[str], encoding: str = "utf-8") -> None:
        (folder / name).write_bytes("".join(line + "\n" for line in lines).encode(encoding, errors="replace"))

    for name, start, end in (("test", PAIRS, PAIRS + 30), ("valid", PAIRS + 30, PAIRS + 60), ("a", 0, PAIRS)):
        english, german = all_english[start:end], all_german[start:end]
        text(f"{name}.en", english)
        text(f"{name}.de", german)
    text("short.de", german[:-1])
    text("shifted.de", [*german[1:], german[0]])
    text("latin1.de", german, "latin-1")
    text("html.en", [f"{line}<br />" for line in english])
    text("empty", [])
    (folder / "cut.gz").write_bytes(gzip.compress("\n".join(english).encode())[:-200])
    (folder / "raw").mkdir()
    text("raw/train.en", english)
    rows = [{"id": i, "text": line, "genre": "short" if len(line) < 30 else "long"} for i, line in enumerate(english) if i != 2]
    for name, changes in (("a.csv", {}), ("test.csv", {}), ("hole.csv", {"genre": ""}), ("other.csv", None)):
        with open(folder / name, "w", newline="") as file:
            found = [dict(row) for row in rows]
            if changes is None:
                found = [{"id": row["id"], "sentence": row["text"]} for row in found]
            else:
                found[3] |= changes
            writer = csv.DictWriter(file, found[0])
            writer.writeheader()
            writer.writerows(found)
    (folder / "conf").mkdir()
    (folder / "conf" / "mine.yaml").write_text("data: dd\n")
    for command in (
        f"preprocess --out d {DATA}",
        f"train --out t data=d {TINY}",
        f"preprocess --out c {LABELLED}",
        f"train --out k data=c task=classification {TINY}",
        f"preprocess --out e {DATA} splits.test.source=[valid.en] splits.test.target=[valid.de]",
        f"train --out u data=e {TINY}",
        "evaluate --out t",
        "evaluate --out u",
        f"train --out moved data=e {TINY}",
    ):
        if (done := run(command, folder)).returncode:
            raise AssertionError(f"status {done.returncode}, not 0: {(done.stderr + done.stdout)[-1500:]}")
    (folder / "e").rename(folder / "elsewhere")


def answer(mistake: Mistake, folder: Path) -> str:
    """Return "" if the mistake gets its line, else what is wrong."""
    done = run(mistake.command, folder)
    said = done.stderr + (done.stdout if mistake.status == 0 else "")
    shutil.rmtree(folder / "x", ignore_errors=True)
    lines = [line for line in said.splitlines() if re.search(mistake.says, line)]
    errors = sum(line.startswith("error:") for line in said.splitlines())
    faults = [
        f"status {done.returncode}" * (done.returncode != mistake.status),
        "a traceback" * ("Traceback" in said),
        f"{errors} lines of errors" * (errors != (mistake.status == 2)),
        f"no line has {mistake.says!r}" * (not lines),
    ]
    return "; ".join(filter(None, faults)) + ("" if not any(faults) else f": {said[-600:]}")


def main() -> None:
    chosen = [int(number) for number in sys.argv[1:]] or range(1, len(MISTAKES) + 1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_world(folder)
        wrong = {}
        for number in chosen:
            mistake = MISTAKES[number - 1]
            if fault := answer(mistake, folder):
                wrong[number] = fault
            print(
                json.dumps({"number": number, "made": mistake.made, "right": number not in wrong, "fault": wrong.get(number, "")})
            )
        print(f"{len(chosen) - len(wrong)} of {len(chosen)} mistakes get their line")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""What the text stage says about healthy corpora and about damaged copies of them: rates of detectors, and of misaligned pairs.

    python benchmarks/damaged_text.py                                         # the shipped sample
    python benchmarks/damaged_text.py --data ../shared/data                   # every corpus there too, whole
    python benchmarks/damaged_text.py --data ../shared/data --lines 400 --pairs    # 400 pairs of three places in each

`rate` is the share of the lines that a detector finds, and `told` whether the command warns. Of pairs, `told` counts how many of
the copies get a notice, and `least` is the number of pairs in each. Prints JSON lines; the last counts false alarms.
"""

import argparse
import base64
import gzip
import json
import lzma
import re
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from html.entities import codepoint2name
from pathlib import Path

import numpy as np

from treeproc.readers.treebanks import read_trees
from treeproc.stages.line_rules import DAMAGE
from treeproc.stages.pair_notices import pair_problems, windows
from treeproc.stages.text_warnings import SideNotices, Wanted, is_noticed

SAMPLE = Path(__file__).resolve().parent.parent / "treeproc" / "sample"
_AT_ONCE = 10_000
_NOT_IN_CP1252 = (0x81, 0x8D, 0x8F, 0x90, 0x9D)
_LATIN_AS_CYRILLIC = str.maketrans("aceopxy", "асеорху")

Pair = tuple[list[str], list[str]]


def _named(text: str) -> str:
    return "".join(f"&{codepoint2name[ord(c)]};" if ord(c) > 127 and ord(c) in codepoint2name else c for c in text)


def _as_cp1252(text: str) -> str:
    return "".join(chr(code) if code in _NOT_IN_CP1252 else bytes([code]).decode("cp1252") for code in text.encode())


DAMAGES: dict[str, Callable[[int, str], str]] = {
    "miscoded": lambda _, line: _as_cp1252(line),
    "entities": lambda _, line: _named(line),
    "markup": lambda _, line: f"<p>{line}</p>",
    "codes": lambda _, line: line.encode("ascii", "backslashreplace").decode(),
    "percent": lambda _, line: urllib.parse.quote(line),
    "base64": lambda _, line: base64.b64encode(line.encode()).decode(),
    "columns": lambda place, line: f"{place} ||| {line}",
    "lost": lambda _, line: line.encode("ascii", "replace").decode(),
    "scripts": lambda place, line: line.translate(_LATIN_AS_CYRILLIC) if place % 10 == 0 else line,
}  # fmt: skip


def read(path: Path) -> list[str]:
    """Return the lines of a plain or compressed file."""
    opened = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    with opened(path, "rt", encoding="utf-8", newline="\n") as file:
        return file.read().removesuffix("\n").split("\n")


def corpora(data: Path | None) -> Iterator[tuple[str, Pair]]:
    """Yield the name and the two sides of every parallel corpus."""
    for split in ("train", "valid", "test"):
        yield f"sample_{split}", (read(SAMPLE / f"{split}.en.gz"), read(SAMPLE / f"{split}.de.gz"))
    if data is None:
        return
    for language in ("deu", "fra"):
        rows = [line.split("\t") for line in read(data / f"tatoeba/{language}-eng.tsv.gz")]
        yield f"tatoeba_{language}", ([row[0] for row in rows], [row[1] for row in rows])
    named = {"multi30k": ("de", "fr"), "europarl_20k": ("de",), "iwslt14_part": ("de",), "kftt": ("ja",)}
    for folder, languages in named.items():
        for language in languages:
            for path in sorted((data / folder).glob(f"*.{language}.*z")):
                name = path.name.removesuffix(path.suffix).removesuffix(f".{language}")
                yield f"{folder}_{name}_{language}", (read(path.with_name(f"{name}.en{path.suffix}")), read(path))
    for split in ("train", "val"):
        factors = read(data / f"wmt_sample/src-{split}-case.txt.gz")
        yield f"wmt_{split}", ([re.sub(r"-\|-\S+", "", line) for line in factors], read(data / f"wmt_sample/targ-{split}.txt.gz"))
    of = {code: _conllu(data / f"ud_pud/{code}_pud-ud-test.conllu") for code in ("en", "de", "fr", "es")}
    for left, right in (("en", "de"), ("en", "fr"), ("de", "es")):
        yield f"pud_{left}_{right}", (of[left], of[right])
    sick = [line.split("\t") for line in read(data / "sick/SICK_train.txt.gz")[1:]]
    similar = [row for row in sick if float(row[3]) >= 4]
    yield "sick_paraphrases", ([row[1] for row in similar], [row[2] for row in similar])


def _conllu(path: Path) -> list[str]:
    return [line.removeprefix("# text = ") for line in read(path) if line.startswith("# text = ")]


def texts(data: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the lines of every corpus of one side."""
    for path in sorted(data.glob("ud_*/*.conllu.gz")) + sorted(data.glob("gum/*.conllu.gz")):
        yield path.name.split(".")[0], _conllu(path)
    for path in [*sorted((data / "sst").glob("*.txt")), data / "masc/masc.mrg.gz"]:
        yield f"{path.parent.name}_{path.name.split('.')[0]}", [row["source"] for row in read_trees(iter(read(path)), "")]
    for path in sorted((data / "linzen").glob("numpred*")):
        yield path.name, [line.split("\t")[1] for line in read(path)]


def side_facts(lines: Sequence[str]) -> dict:
    """Return the facts about the lines of a side, as the text stage does."""
    notices = SideNotices(Wanted(DAMAGE))
    for first in range(0, len(lines), _AT_ONCE):
        notices.add(lines[first : first + _AT_ONCE], lambda place: place + 1)
    return notices.facts()


def kinds_told(pair: Pair) -> list[str]:
    """Return the kinds of notices about pairs."""
    places = windows(len(pair[0]))
    return [kind for _, kind, *_ in pair_problems(*([side[place] for place in places] for side in pair))]


def copies(pair: Pair, seed: int) -> Iterator[tuple[str, str, Pair]]:
    """Yield healthy and damaged copies of pairs: name, the kind of notice that is right, the copy."""
    source, target = pair
    order = np.random.default_rng(seed).permutation(len(target)).tolist()
    middle = len(target) // 2
    yield "aligned", "", pair
    yield "swapped", "", (target, source)
    yield "lower_case", "", ([line.lower() for line in source], [line.lower() for line in target])
    yield "tokens", "", tuple([" ".join(re.findall(r"\w+|[^\w\s]", line)) for line in side] for side in pair)
    for lines in (1, 2, 3):
        yield f"shifted_{lines}", "shifted", (source, target[lines:] + target[:lines])
    yield "shifted_from_middle", "shifted", (source, target[:middle] + target[middle + 1 :] + target[middle : middle + 1])
    yield "shuffled", "unrelated", (source, [target[place] for place in order])
    yield "equal", "equal", (source, source)
    yield "constant", "constant", (source, target[:1] * len(source))


def cuts(pair: Pair, lines: int | None) -> Iterator[Pair]:
    """Yield the whole corpus, or its first, middle and last lines."""
    rows = len(pair[0])
    starts = [0] if lines is None else sorted({0, (rows - lines) // 2, rows - lines})
    for start in starts if lines is None or rows >= lines else ():
        yield tuple(side[start : start + (lines or rows)] for side in pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of corpora, ../shared/data")
    parser.add_argument("--lines", type=int, help="so many pairs of the beginning, the middle and the end of each corpus")
    parser.add_argument("--pairs", action="store_true", help="misaligned pairs alone, without the damage of lines")
    options = parser.parse_args()
    false, seen, all_copies, sizes = 0, Counter(), Counter(), []

    def side(name: str, lines: list[str], damaged: bool) -> int:
        facts, alarms = side_facts(lines), 0
        for kind in DAMAGE:
            told = is_noticed(kind, facts)
            alarms += told
            figures = {"rate": round(facts[kind]["count"] / len(lines), 5), "told": told}
            if damaged:
                broken = side_facts([DAMAGES[kind](place, line) for place, line in enumerate(lines)])
                figures |= {
                    "damaged_rate": round(broken[kind]["count"] / len(lines), 4),
                    "damaged_told": is_noticed(kind, broken),
                }
            emit(name, kind, **figures)
        return alarms

    for name, pair in corpora(options.data):
        if not options.pairs:
            false += sum(side(f"{name}_{place}", lines, damaged=len(lines) <= 30_000) for place, lines in enumerate(pair))
        for part in cuts(pair, options.lines):
            sizes.append(len(part[0]))
            for copy, right, changed in copies(part, len(sizes)):
                told = kinds_told(changed)
                is_right = right in told if right else not told
                false += not right and not is_right
                seen[copy] += is_right
                all_copies[copy] += 1
                if not is_right:
                    emit(name, copy, told=told, expected=right, pairs=len(changed[0]))
    if options.data and not options.pairs:
        false += sum(side(name, lines, damaged=False) for name, lines in texts(options.data))
    for copy, count in all_copies.items():
        emit("pairs", copy, right=seen[copy], of=count, least=min(sizes))
    emit("all", "false_alarms", count=false)


def emit(case: str, metric: str, **figures: object) -> None:
    print(json.dumps({"benchmark": "damaged_text", "case": case, "metric": metric, **figures}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()

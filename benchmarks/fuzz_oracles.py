"""What accepted commands of the fuzzer must have made, by readers and checks that share no code with the project.

Everything here is slow and obvious: whole files, lists, recursion. `silent_loss` lists what is wrong.
"""

import bz2
import gzip
import json
import lzma
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import sentencepiece
import yaml
from tiny_tokenizers import other_pieces

Texts = list[tuple[str, bytes]]  # the files that an input stands for, by name
_UNPACK = ((b"\x1f\x8b", gzip.decompress), (b"BZh", bz2.decompress), (b"\xfd7zXZ\0", lzma.decompress))
_ESCAPES = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}", "\\/": "/", "\\*": "*"}


def texts(path: str, truth: dict[str, Texts]) -> Texts:
    """Return the plain texts of an input. `truth` has those of archives and of odd names, as they were before the damage."""
    if path in truth:
        return truth[path]
    content = Path(path).read_bytes()
    for magic, unpack in _UNPACK:
        if content.startswith(magic):
            content = unpack(content)
            break
    return [(path, content)]


def lines(content: bytes) -> list[str]:
    """Return the lines: only a line feed ends one. They have no outer white space."""
    found = content.decode().removeprefix("\ufeff").split("\n")
    return [line.strip() for line in (found if found[-1] else found[:-1])]


def trees(text: str) -> list[Any]:
    """Return the trees of brackets as [label, children], where the only child of a word's bracket is the word."""
    stack: list[list] = [["", []]]
    tokens = re.findall(r"[()]|[^()\s]+", text, re.ASCII)
    for before, token in zip(["", *tokens], tokens, strict=False):
        if token == "(":
            stack.append(["", []])
        elif token == ")":
            done = stack.pop()
            stack[-1][1].append(done)
        elif before == "(":
            stack[-1][0] = token
        elif len(stack) > 1:
            stack[-1][1].append(token)
        elif token.strip():
            raise ValueError(f"{token} stands outside of brackets")
    return stack[0][1]


def leaves(tree: Any, keep_empty: bool = False) -> list[tuple[str, str]]:
    """Return (tag, word) of all words. A corpus has no traces and other empty elements."""
    if tree[1] and isinstance(tree[1][0], str):
        return [] if tree[0] == "-NONE-" and not keep_empty else [(tree[0], tree[1][0])]
    return [leaf for child in tree[1] for leaf in leaves(child, keep_empty)]


def nodes(tree: Any, first: int = 0, keep_empty: bool = False) -> list[tuple[str, int, int]]:
    """Return (label, first word, last word + 1) of all brackets above those of words, top down."""
    if tree[1] and isinstance(tree[1][0], str):
        return []
    found, at = [], first
    for child in tree[1]:
        found += nodes(child, at, keep_empty)
        at += len(leaves(child, keep_empty))
    return [(tree[0], first, at), *found] if at > first else []


def normal_nodes(found: list[tuple[str, int, int]], collapse: bool) -> list[tuple[str, int, int]]:
    """Return the nodes of a tree in the normal form of docs/data-format.md."""
    out = []
    for place, (label, start, end) in enumerate(found):
        plain = label if label.startswith("-") else re.split(r"(?<=.)[-=|]", label, maxsplit=1)[0]
        below = found[place + 1 : place + 2]
        is_chained = bool(below) and below[0][1:] == (start, end)
        if not (is_chained and (collapse or plain in ("ROOT", "TOP", "VROOT", ""))):
            out.append((plain or "X", start, end))
    return out or [("X", 0, 1)]


def _bracket_rows(content: bytes) -> Iterator[dict]:
    for tree in trees("\n".join(lines(content))):
        words = leaves(tree)
        plain = [_ESCAPES.get(word, re.sub(r"\\([/*])", r"\1", word)) for _, word in words]
        plain = [re.sub(r"-[LR][RSC]B-", lambda match: _ESCAPES[match[0]], word) for word in plain]
        # Unicode's blanks in a tag become underscores.
        yield {"source": " ".join(plain), "tags": [re.sub(r"\s", "_", tag) or "_" for tag, _ in words], "nodes": nodes(tree)}


def _sentiment_rows(content: bytes) -> Iterator[dict]:
    for row in _bracket_rows(content):
        if not row["nodes"]:
            row["nodes"] = [(row["tags"][0], 0, 1)]
        classes = [int(label) for label, _, _ in row["nodes"]]
        yield row | {
            "nodes": [("X", start, end) for _, start, end in row["nodes"]],
            "tags": ["X"] * len(row["tags"]),
            "label": classes[0],
            "node_labels": classes,
            "leaf_labels": list(map(int, row["tags"])),
        }


def _conllu_rows(content: bytes) -> Iterator[dict]:
    for block in filter(None, re.split(r"\n\n+", "\n".join(lines(content)).strip("\n"))):
        given = re.findall(r"^#\s*text\s*=[^\S\n]?(.*)$", block, re.MULTILINE)
        rows = [line.split("\t") for line in block.split("\n") if not line.startswith("#")]
        rows = [row for row in rows if "." not in row[0]]
        if not rows:
            continue
        ranges = [list(map(int, row[0].split("-"))) for row in rows if "-" in row[0]]
        inside = {number for first, last in ranges for number in range(first, last + 1)}
        surface = [row for row in rows if "-" in row[0] or int(row[0]) not in inside]
        made = "".join(row[1].strip() + " " * ("SpaceAfter=No" not in row[9].split("|")) for row in surface).strip()
        arcs = None if ranges else [(int(row[6]) - 1, row[7]) for row in rows]
        yield {"source": given[-1].strip() if given else made, "arcs": arcs}


def _unescaped(text: str) -> str:
    """Return the text with the characters that XML's five entities and numbers stand for."""

    def character(match: re.Match) -> str:
        name = match[1]
        if not name.startswith("#"):
            return {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}[name]
        code = int(name[2:], 16) if name[1] == "x" else int(name[1:])
        return chr(code) if code < 0xD800 or 0xE000 <= code < 0x110000 else match[0]

    return re.sub(r"&(amp|lt|gt|quot|apos|#[0-9]{1,7}|#x[0-9a-fA-F]{1,6});", character, text)


def _line_rows(content: bytes) -> Iterator[dict]:
    return ({"source": line} for line in lines(content))


def _segment_rows(content: bytes) -> Iterator[dict]:
    for segment in re.findall(r"<seg\b[^<>\n]*>(.*?)</seg\b[^<>\n]*>", "\n".join(lines(content)), re.DOTALL | re.IGNORECASE):
        yield {"source": " ".join(_unescaped(segment).split())}


def _talk_rows(content: bytes) -> Iterator[dict]:
    if re.search(rb"<seg\b[^<>]*\bid", content, re.IGNORECASE):
        yield from _segment_rows(content)
        return
    for line in lines(content):
        if not re.match(r"</?(doc|url|keywords|speaker|talkid|reviewer|translator|\?xml|mteval|srcset|refset)\b", line, re.I):
            text = re.sub(r"</?(title|description)>", "", line, flags=re.IGNORECASE)
            yield {"source": _unescaped(text).strip()}


def _prefix_rows(content: bytes) -> Iterator[dict]:
    for line in lines(content):
        tag, _, prefix = line.partition("\t")
        yield {"source": " ".join(prefix.split()), "label": ["VBZ", "VBP"].index(tag)}


def _table_rows(content: bytes) -> Iterator[dict]:
    header, *rows = ([field.strip('"') for field in line.split("\t")] for line in lines(content))
    for row in rows:
        values = dict(zip(header, row, strict=False))
        words = values["sentence"].split()[: int(values["verb_index"]) - 1]
        yield {"source": " ".join(words), "label": ["VBZ", "VBP"].index(values["verb_pos"])}


def _score_rows(content: bytes) -> Iterator[dict]:
    header, *rows = (line.split("\t") for line in lines(content))
    for row in rows:
        values = dict(zip(header, row, strict=True))
        for column in ("sentence_A", "sentence_B"):
            yield {"source": values[column], "score": float(values["relatedness_score"])}


ROWS = {
    "parallel": _line_rows, "sgm": _segment_rows, "iwslt_xml": _talk_rows, "brackets": _bracket_rows, "sst": _sentiment_rows,
    "conllu": _conllu_rows, "agreement": _prefix_rows, "linzen": _table_rows, "sick": _score_rows,
}  # fmt: skip


def _reviews(files: Texts) -> Iterator[dict]:
    for name, content in files:
        kind = Path(name).parent.name
        if kind in ("pos", "neg") and name.endswith(".txt"):
            yield {"source": re.sub(r"(<br\s*/?>|\n|\r)+", " ", "\n".join(lines(content))).strip(), "label": int(kind == "pos")}


def expected_rows(form: str, files: dict, truth: dict[str, Texts]) -> list[dict]:
    """Return the rows that the files of a split stand for, by their order."""
    source = [text for path in files["source"] for text in texts(path, truth)]
    rows = list(_reviews(source)) if form == "imdb" else [row for _, content in source for row in ROWS[form](content)]
    if target := [text for path in files.get("target") or () for text in texts(path, truth)]:
        other = ROWS[form] if form in ("sgm", "iwslt_xml") else _line_rows
        side = [row["source"] for _, content in target for row in other(content)]
        rows = [{**row, "target": line} for row, line in zip(rows, side, strict=True)]
    return rows


def _is_visible(character: str) -> bool:
    return unicodedata.category(character)[0] not in "ZC" and character not in "\u2800\u3164\ufe0f\u034f"


def _split_rows(folder: Path, split: str) -> list[dict]:
    return [row for path in sorted(folder.glob(f"{split}-*.arrow")) for row in pa.ipc.open_file(path).read_all().to_pylist()]


@dataclass
class _Vocabulary:
    reader: Any
    writer: Any
    labels: list[str]
    tags: list[str]

    @classmethod
    def load(cls, folder: Path) -> "_Vocabulary":
        models = [path for path in (folder / "pieces.model", folder / "pieces.tgt.model") if path.exists()]
        pieces = [sentencepiece.SentencePieceProcessor(model_file=str(path)) for path in models]
        return cls(pieces[0], pieces[-1], *(_names(folder / name) for name in ("labels.txt", "pos_tags.txt")))


def _names(path: Path) -> list[str]:
    return path.read_bytes().decode().split("\n")[:-1]


def data_set(data: Path, truth: dict[str, Texts]) -> Iterator[str]:
    """Yield what a data set has lost or changed, compared with its inputs, by the settings that it records."""
    config = yaml.safe_load((data / "config.yaml").read_text())
    given = {path for files in config["splits"].values() for side in ("source", "target") for path in files.get(side) or ()}
    if lost := truth.keys() - given:
        yield f"other input files than {sorted(lost)}"
    if config["tokenized"] != "none" or config["parsed"] or any(split.get("hold_out") for split in config["splits"].values()):
        return
    indices = {stage: json.loads((data / stage / "index.json").read_text()) for stage in ("text", "encoded")}
    _, *dropped = ((data / "text" / "dropped.tsv").read_text(encoding="utf-8")).splitlines()
    reasons = {(split, int(line) - 1): reason for split, line, reason in (entry.split("\t") for entry in dropped)}
    fast = data / "encoded" / "vocab" / "tokenizer.json"
    vocabulary = None if fast.exists() else _Vocabulary.load(fast.parent)
    for split, files in config["splits"].items():
        wanted = expected_rows(config["format"], files, truth)
        if config.get("normalization") == "nfc":
            sides = [
                {side: unicodedata.normalize("NFC", row[side]) for side in ("source", "target") if side in row} for row in wanted
            ]
            wanted = [row | side for row, side in zip(wanted, sides, strict=True)]
        rows = {stage: _split_rows(data / stage, split) for stage in ("text", "encoded")}
        for stage, found in rows.items():
            if indices[stage]["totals"].get(split, {"rows": 0})["rows"] != len(found):
                yield f"{split}: the index of {stage} counts other rows than its shards hold"
        kept = [row["example_id"] for row in rows["text"]]
        gone = [number for name, number in reasons if name == split]
        if sorted(kept + gone) != list(range(len(wanted))):
            yield f"{split}: {len(wanted)} rows in, {len(kept)} out and {len(gone)} dropped"
            return
        if Counter(reason for (name, _), reason in reasons.items() if name == split) != Counter(
            indices["text"]["dropped"][split]
        ):
            yield f"{split}: the index counts other dropped rows than the list"
        if [row["example_id"] for row in rows["encoded"]] != kept:
            yield f"{split}: encoded rows are not those of the text"
            return
        for number in gone:
            reason, row = reasons[split, number], wanted[number]
            if reason.startswith("empty_") and any(map(_is_visible, row[reason.removeprefix("empty_")])):
                yield f"{split} {number}: dropped as {reason}, but it has text"
        for text, encoded in zip(rows["text"], rows["encoded"], strict=True):
            row, where = wanted[text["example_id"]], f"{split} {text['example_id']}"
            yield from _text_row(where, config, row, text)
            if vocabulary:
                yield from _encoded_row(where, config, row, text, encoded, vocabulary)
            elif other := other_pieces(fast, row["source"], encoded["leaves"]):
                yield f"{where}: {other}"


def _text_row(where: str, config: dict, row: dict, text: dict) -> Iterator[str]:
    for name in ("source", "target", "score", "leaf_labels", "node_labels", "label"):
        wanted = row.get(name)
        if name in ("label", "leaf_labels", "node_labels") and config["labels"] and wanted is not None:
            classes = config["labels"]
            wanted = classes[wanted] if name == "label" else [classes.get(value, -1) for value in wanted]
        if name in text and text[name] != wanted:
            yield f"{where}: {name} is {text[name]!r:.60}, but was {wanted!r:.60}"
    if row.get("arcs") and [(arc["governor"], arc["deprel"]) for arc in text["arcs"]] != row["arcs"]:
        yield f"{where}: other arcs"


def _encoded_row(where: str, config: dict, row: dict, text: dict, encoded: dict, vocabulary: "_Vocabulary") -> Iterator[str]:
    side, model, writer = config["tree"]["side"], vocabulary.reader, vocabulary.writer
    labels, tags = vocabulary.labels, vocabulary.tags
    pieces = [leaf["piece"] for leaf in encoded["leaves"]]
    sides = [(side, model, pieces)]
    if "tgt_pieces" in encoded:
        sides.append(({"source": "target", "target": "source"}[side], writer, encoded["tgt_pieces"]))
    for name, processor, ids in sides:
        wanted = row[name].replace("\u2581", " ")
        wanted = "".join(map(str.lower, wanted)) if config["subwords"]["lowercase"] else wanted
        if any(number >= len(processor) for number in ids) or processor.decode(ids) != wanted:
            yield f"{where}: the pieces of {name} do not spell it: {row[name]!r:.60}"
    for name in ("label", "score"):
        if name in encoded and encoded[name] != text[name]:
            yield f"{where}: encoded {name} is {encoded[name]}, but was {text[name]}"
    if max((node["label"] for node in encoded["nodes"]), default=0) >= len(labels):
        yield f"{where}: a node's label is not in labels.txt"
    elif max((leaf["pos_tag"] for leaf in encoded["leaves"]), default=0) >= len(tags):
        yield f"{where}: a tag is not in pos_tags.txt"
    elif "nodes" in row and side == "source" and config["parser"]["name"] == "given":
        yield from _tree_row(where, config["tree"], row, encoded, labels, tags)


def _tree_row(where: str, tree: dict, row: dict, encoded: dict, labels: list[str], tags: list[str]) -> Iterator[str]:
    words = [leaf["word_index"] for leaf in encoded["leaves"]]
    if words != sorted(words) or set(words) != set(range(len(row["tags"]))):
        yield f"{where}: {len(set(words))} words, but the tree has {len(row['tags'])}"
        return
    found_tags = {leaf["word_index"]: tags[leaf["pos_tag"]] for leaf in encoded["leaves"]}
    # Names that training data does not have are unknown.
    wrong = [tag for place, tag in enumerate(row["tags"]) if found_tags[place] != (tag if tag in tags else "<unk>")]
    if wrong and where.startswith("train"):
        yield f"{where}: tags {list(found_tags.values())!r:.60}, but were {row['tags']!r:.60}"
    if tree["tree_source"] != "parsed" or tree["binarize"] != "none":
        return
    wanted = Counter(normal_nodes(row["nodes"], tree["collapse_unary"]))
    found: Counter = Counter()
    for node, span in zip(encoded["nodes"], encoded["spans"], strict=True):
        name, start, end = labels[node["label"]], span["start"], span["end"]
        if name.startswith("POS=") and words[start] == words[end - 1]:
            continue
        cut = [words[start - 1]] if start else []
        cut += [words[end]] if end < len(words) else []
        if (start and words[start - 1] == words[start]) or (end < len(words) and words[end - 1] == words[end]):
            yield f"{where}: a node cuts a word"
        found[name, words[start], words[end - 1] + 1] += 1
    known = Counter()
    for (label, start, end), count in wanted.items():
        known[label if label in labels or where.startswith("train") else "<unk>", start, end] += count
    if found != known:
        more, less = sorted((found - known).elements()), sorted((known - found).elements())
        yield f"{where}: the tree has {more!r:.80}, but had {less!r:.80}"


def results(workflow: str, out: Path, output: str) -> Any:
    """Return the figures that a command computed, which are the same whenever it accepts its inputs, or None."""
    if workflow in ("train_wmt", "train_classifier", "train_lm"):
        found = {}
        for entry in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
            if entry["step"] <= 4 and entry["event"] in ("train", "valid"):
                found[f"{entry['event']} {entry['step']}"] = entry["loss"]
        return found
    if workflow == "translate":
        return output.splitlines()
    files = {"evaluate": "scores.json", "probe": "probes.json", "score_lm": "scores.json", "unsupervised_parse": "scores.json"}
    return numbers(json.loads((out / files[workflow]).read_text())) if workflow in files else None


def numbers(value: Any) -> Any:
    """Return the numbers of a JSON value with their keys, without those of times, settings and the software."""
    if isinstance(value, dict):
        parts = {key: numbers(part) for key, part in value.items() if key not in ("software", "asked") and "second" not in key}
        return {key: part for key, part in parts.items() if part not in (None, {}, [])}
    if isinstance(value, list):
        return list(map(numbers, value))
    return value if isinstance(value, float | int) and not isinstance(value, bool) else None


def silent_loss(case: Any, output: str, errors: str) -> list[str]:
    """Return what an accepted command lost or changed, by the oracle of its kind. A crash of the oracle is a finding too."""
    out = case.folder / ([""] + [value for option, value in pairwise(case.argv) if option == "--out"])[-1]
    try:
        if {"--dry-run", "--help"} & set(case.argv):
            return []
        told = "\n".join(re.findall(r"^warning: .*", errors, re.MULTILINE))
        if case.tells is not None and (case.tells not in told or (told and not case.tells)):
            return [f"wanted a notice with {case.tells!r}, found {told!r:.300}"]
        if changed := [name for name, wanted in case.same.items() if (out / name).read_bytes() != wanted.read_bytes()]:
            return [f"other {changed} than without the damage"]
        if case.workflow == "preprocess":
            return list(islice(data_set(out, case.truth), 9))
        if case.workflow in ("translate", "align") and case.lines is not None:
            written = [arg.removeprefix("output=") for arg in case.argv if arg.startswith("output=")]
            found = (case.folder / yaml.safe_load(written[-1])).read_bytes().count(b"\n") if written else output.count("\n")
            if found != case.lines:
                return [f"{case.lines} lines in, {found} out"]
        if case.reference is not None:
            found, wanted = results(case.workflow, out, output), json.loads(case.reference.read_text()).get(case.workflow)
            return [f"{found!r:.300}, but without the damage {wanted!r:.300}"] if found != wanted else []
    except Exception as error:
        return [f"the oracle cannot read it: {error!r}"]
    return []

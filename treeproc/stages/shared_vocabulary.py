"""Data sets that take their vocabulary, and the settings that they leave open, from the data set `vocab_from`."""

from collections.abc import Collection, Mapping

from treeproc.common.settings import UserError, differences, read_yaml
from treeproc.common.storage import AnyPath, as_path
from treeproc.shards.store import read_index, stage_folder

# Settings of the reading of files and of the parse, which the folder of the text and parsed stage knows; and of encoding.
_OF_TEXT = ("format", "tokenized", "normalization", "labels", "labelled", "parser", "target_parser")
_OF_ENCODING = ("subwords", "tree")
# Settings of trees that make a control of the same words: scores are known for what they are.
_CONTROL = {"tree_source", "seed"}
# Settings that trees of arcs alone have.
_OF_ARCS = {"phrases", "phrase_labels"}


def borrow_settings(values: Mapping) -> dict:
    """Complete the settings of a job as a user gives them: the data set `vocab_from` gives those that are left open.

    Raises UserError when that data set has no settings.
    """
    out = dict(values)
    own_text = not values.get("parsed")  # with `parsed`, text and trees are those of a third data set
    wanted = [*(_OF_TEXT if own_text else ()), *_OF_ENCODING]
    if all(name in values for name in wanted):
        return out
    data = as_path(values["vocab_from"]).absolute()
    there = _read_settings(data)
    if (there.get("subwords") or {}).get("tokenizer"):
        there["subwords"] = {"tokenizer": str(data / "encoded" / "vocab")}  # its own copy
    if own_text:
        there |= {name: value for name, value in _read_settings(stage_folder(data, "text").parent).items() if name in _OF_TEXT}
        if there.get("tokenized") == "moses":
            # Data sets that were made before this was a setting have tokens as they are.
            for name in ("parser", "target_parser"):
                if there.get(name):
                    there[name] = {"treebank_words": False} | there[name]
        for name in ("parser", "target_parser"):
            if isinstance(there.get(name), dict):  # a data set does not decide who reads the text
                there[name] = {key: value for key, value in there[name].items() if key != "endpoint"}
        if values.get("format", there.get("format")) != there.get("format"):
            for name in ("labels", "labelled"):  # the classes of other files
                there.pop(name, None)
    for name in wanted:
        if name in there:
            out[name] = _merged(there[name], values[name]) if name in values else there[name]
    return out


def _merged(base: object, own: object) -> object:
    return base | own if isinstance(base, dict) and isinstance(own, dict) else own


def _read_settings(folder: AnyPath) -> dict:
    path = folder / "config.yaml"
    try:
        values = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"vocab_from: cannot read {path}; give the folder of a finished data set")
    return values


def check_reuse(
    data: AnyPath, *, parser: Mapping, subwords: Mapping, tree: Mapping, normalization: str, columns: Collection[str]
) -> Mapping:
    """Return the index of the encoded stage of `data`, the data set whose vocabulary is taken.

    `parser` describes the parser of the leaves' side; `columns` are those of the encoded shards to come. Raises UserError if
    a model would read examples of the two data sets differently: their scores would mean nothing.
    """
    index = read_index(data / "encoded")
    trees = index["tree_settings"], tree
    ignored = _CONTROL if all("phrases" in side for side in trees) else _CONTROL | _OF_ARCS
    for name, theirs, own in (
        ("parser", index["parser"], parser),
        ("subwords", index["subword_settings"], subwords),
        ("", {"normalization": index.get("normalization", "none")}, {"normalization": normalization}),
        ("tree", *({k: v for k, v in side.items() if k not in ignored} for side in trees)),
    ):
        if changed := differences(theirs, dict(own), name):
            raise UserError(
                f"vocab_from: {data} was made with other settings ({'; '.join(changed)}), so scores of its models would mean "
                "nothing; leave these settings out, or install that parser"
            )
    if missing := [name for name in index["columns"] if name not in columns]:
        hint = "; give splits.NAME.target" if "tgt_pieces" in missing else ""
        raise UserError(f"vocab_from: the examples of {data} have {', '.join(missing)}, but those of these splits do not{hint}")
    return index


def check_extension(data: AnyPath, *, subwords: Mapping) -> None:
    """Raise UserError if new pieces cannot follow those of the data set `data`."""
    if changed := differences(read_index(data / "encoded")["subword_settings"], dict(subwords), "subwords"):
        raise UserError(
            f"vocab_from: {data} was made with other settings ({'; '.join(changed)}), but new pieces can only follow the same "
            "settings; leave these settings out"
        )
    if "tokenizer" in subwords:
        raise UserError(f"new_pieces: {data} has the pieces of a pretrained tokenizer, which cannot grow; leave new_pieces out")
    if not subwords["joint"]:
        raise UserError(f"new_pieces: {data} has a vocabulary for each side (subwords.joint=false); only joint ones can grow")

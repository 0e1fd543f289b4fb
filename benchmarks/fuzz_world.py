"""The inputs of fuzzed commands: small data sets, runs, studies and parser models, made by the workflows."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from random import Random

import yaml
from fuzz_oracles import results
from tiny_tokenizers import FAMILIES, write_tokenizer

from treenet.cli.main import COMMANDS, command_of

REPOSITORY = Path(__file__).resolve().parent.parent

WORKFLOWS = (
    "preprocess", "train_wmt", "train_classifier", "train_lm", "train_parser", "evaluate", "translate", "probe", "report",
    "scaling", "compare_seeds", "average_checkpoints", "unsupervised_parse", "score_lm", "align", "export", "back_translate",
)  # fmt: skip
ALL_COMMANDS = (*WORKFLOWS, "verify", "inspect")

_WORDS = ["the", "old", "man", "saw", "a", "dog", "in", "park", "she", "likes", "cats", "and", "birds", "today", "very", "much"]
# Formats, and the end of the names of their inputs: source and target.
ENDS = {
    "parallel": ("en", "de"), "sgm": ("en.sgm", "de.sgm"), "iwslt_xml": ("en.sgm", "de.sgm"), "brackets": ("mrg", "de"),
    "sst": ("sst", ""), "conllu": ("conllu", ""), "agreement": ("agreement", ""), "linzen": ("linzen", ""), "sick": ("sick", ""),
}  # fmt: skip
TINY = {
    "model": {"d_model": 16, "d_ff": 16, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 1},
    "batch": {"max_tokens": 128},
    "optimizer": {"warmup_steps": 2},
    "max_steps": 4,
    "validate_every": 2,
    "checkpoint_every": 2,
    "log_every": 1,
    "workers": 0,
}


def main_of(name: str) -> Callable[[Sequence[str]], None]:
    """Return the function of a command by the name of its script."""
    return resolve_name(COMMANDS[command_of(name)][0])


def _tree(random: Random, words: list[str]) -> str:
    if len(words) == 1:
        return f"({random.choice(['DT', 'NN', 'VBD'])} {words[0]})"
    middle = random.randrange(1, len(words))
    return f"({random.choice(['S', 'NP', 'VP'])} {_tree(random, words[:middle])} {_tree(random, words[middle:])})"


def _sentiment(random: Random, words: list[str]) -> str:
    if len(words) == 1:
        return f"({random.randrange(5)} {words[0]})"
    middle = random.randrange(1, len(words))
    return f"({random.randrange(5)} {_sentiment(random, words[:middle])} {_sentiment(random, words[middle:])})"


def _conllu(random: Random, words: list[str]) -> str:
    rows = [f"{i}\t{word}\t_\tNOUN\tNN\t_\t{random.randrange(i > 1, i)}\tdep\t_\t_" for i, word in enumerate(words, start=1)]
    return "\n".join(rows) + "\n"


def write_inputs(folder: Path) -> None:
    random = Random(1)
    folder.mkdir()
    for split, count in (("train", 60), ("valid", 12), ("test", 12)):
        lines = [random.choices(_WORDS, k=random.randint(2, 7)) for _ in range(count)]
        contents = {
            "mrg": [f"(ROOT {_tree(random, words)})" for words in lines],
            "de": [" ".join(reversed(words)) for words in lines],
            "en": [" ".join(words) for words in lines],
            "sst": [_sentiment(random, words) for words in lines],
            "conllu": [_conllu(random, words) for words in lines],
            "agreement": [f"{random.choice(['VBZ', 'VBP'])}\t{' '.join(words)}" for words in lines],
            "linzen": ["sentence\tverb_pos\tverb_index", *(f"{' '.join(words)}\tVBZ\t{len(words)}" for words in lines)],
            "sick": [
                "sentence_A\tsentence_B\trelatedness_score",
                *(f"{' '.join(words)}\t{words[0]}\t{random.randrange(10, 50) / 10}" for words in lines),
            ],
        }
        for side in ("en", "de"):
            rows = [f'<seg id="{number}">{line}</seg>' for number, line in enumerate(contents[side], start=1)]
            contents[f"{side}.sgm"] = ['<doc docid="d">', *rows, "</doc>"]
        for end, texts in contents.items():
            (folder / f"{split}.{end}").write_text("".join(f"{text}\n" for text in texts))


def configurations(inputs: Path, world: Path) -> dict[str, dict]:
    """Return a valid configuration for every workflow, with paths below the folders of inputs and of earlier outputs."""
    subwords, tree = {"vocab_size": 290}, {"tree_source": "parsed"}
    splits = {s: {"source": [str(inputs / f"{s}.mrg")], "target": [str(inputs / f"{s}.de")]} for s in ("train", "valid", "test")}
    classes = {split: {"source": [str(inputs / f"{split}.sst")]} for split in ("train", "valid", "test")}
    filters = {"drop_duplicates": False, "drop_overlap": "none"}
    data = {
        "format": "brackets",
        "parser": {"name": "given"},
        "splits": splits,
        "subwords": subwords,
        "tree": tree,
        "filters": filters,
        "rows_per_shard": 30,
        "workers": 0,
    }
    fit = {"epochs": 1, "evaluations": 1}
    treebank = {"conllu": {"train": [str(inputs / "train.conllu")], "valid": [str(inputs / "valid.conllu")]}}
    lm = {"model": {**TINY["model"], "name": "constituent_transformer"}, "task": "masked_lm"}
    classification = {"task": "classification", "data": str(world / "classes")}
    pairs = {"data": str(world / "pairs")}
    plain = {s: {"source": [str(inputs / f"{s}.en")], "target": [str(inputs / f"{s}.de")]} for s in ("train", "valid", "test")}
    return {
        "preprocess": data,
        "preprocess_classes": {**data, "format": "sst", "splits": classes},
        "preprocess_plain": {
            **data,
            "format": "parallel",
            "splits": plain,
            "parser": {"name": "words"},
            "tree": {"tree_source": "balanced"},
        },
        "train_wmt": {**TINY, **pairs},
        "train_classifier": {**TINY, **classification},
        "train_lm": {**TINY, **lm, **pairs},
        "scaling": {**TINY, **pairs, "max_steps": 2, "grid": {"fractions": [0.5, 1.0], "seeds": [1], "bootstrap_samples": 20}},
        "compare_seeds": {**TINY, **classification, "max_steps": 2, "grid": {"seeds": [1]}},
        "train_parser": {
            "language": "xx",
            "treebanks": {"toy": treebank},
            "models": ["tokenizer", "pos"],
            "tokenizer": {"hidden_dim": 8, "fit": fit},
            "pos": {"hidden_dim": 8, "fit": fit},
        },
        "evaluate": {"target_language": "de", "decoding": {"beam_size": 2}},
        "translate": {"input": str(inputs / "test.en"), "trees": str(inputs / "test.mrg"), "decoding": {"beam_size": 2}},
        "probe": {"train_sentences": 30, "max_iterations": 3, "l2": [0.1]},
        "report": {"runs": [str(world / "run")], "sentences": 1, "bootstrap_samples": 20},
        "average_checkpoints": {"last": 1},
        "unsupervised_parse": {"parsing": {"min_layer": 0}},
        "score_lm": {"split": "valid"},
        "align": {name: str(inputs / f"test.{end}") for name, end in (("input", "en"), ("target", "de"), ("trees", "mrg"))},
        "export": {"to": "safetensors", "checkpoint": "averaged"},
        "back_translate": {
            "data": str(world / "plain"),
            "text": [str(inputs / "test.de")],
            "backward": TINY,
            "workers": 0,
            "translate": {"workers": 0, "decoding": {"beam_size": 1}},
        },
    }


def build_world(folder: Path) -> None:
    """Build inputs, data sets, runs, studies, parser models, an export and a back-translation; and the results of commands."""
    write_inputs(folder / "inputs")
    configs = configurations(folder / "inputs", folder)
    made = {
        "pairs": ("preprocess", "preprocess", []),
        "classes": ("preprocess", "preprocess_classes", []),
        "plain": ("preprocess", "preprocess_plain", []),
        "run": ("train_wmt", "train_wmt", []),
        "other": ("train_wmt", "train_wmt", ["seed=2"]),
        "classifier": ("train_classifier", "train_classifier", []),
        "lm": ("train_lm", "train_lm", []),
        "study": ("scaling", "scaling", []),
        "seeds": ("compare_seeds", "compare_seeds", []),
        "parser": ("train_parser", "train_parser", []),
        "synthetic": ("back_translate", "back_translate", []),
    }
    for name, (workflow, config, more) in made.items():
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(configs[config]))
        _call(workflow, ["--config", str(path), "--out", str(folder / name), *more])
    shutil.copytree(folder / "run", folder / "continued")
    _call("train_wmt", ["--config", str(folder / "run.yaml"), "--out", str(folder / "continued"), "max_steps=6"])
    for family in FAMILIES:
        write_tokenizer(folder / "tokenizers" / family, family)
    _call("report", ["--out", str(folder / "page"), str(folder / "run"), "sentences=1", "bootstrap_samples=20"])
    _call("export", [str(folder / "run"), "--out", str(folder / "exported")])
    output, reads = "", {"evaluate": "run", "probe": "run", "unsupervised_parse": "lm", "score_lm": "lm", "translate": "run"}
    for workflow, name in reads.items():
        path = folder / f"{workflow}.yaml"
        path.write_text(yaml.safe_dump(configs[workflow]))
        output = _call(workflow, ["--config", str(path), "--out", str(folder / name)])
    made_in = {"train_wmt": "run", "train_classifier": "classifier", "train_lm": "lm", **reads}
    found = {workflow: results(workflow, folder / name, output) for workflow, name in made_in.items()}
    (folder / "results.json").write_text(json.dumps(found))
    (folder / "done.json").write_text(json.dumps(sorted(path.name for path in folder.iterdir())))


def _call(workflow: str, argv: list[str]) -> str:
    """Run a command that must succeed. Returns its standard output."""
    output = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(output):
        try:
            main_of(workflow)(argv)
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{workflow} {' '.join(argv)} ended with {end.code}") from None
    output.seek(0)
    return output.read()

"""A positive control: does a model find a tree where a tree decides?

    tree-attention control
    tree-attention control all=true --out runs/control_all
    tree-attention control rung=b --out runs/control_b --records RECORDS

Run it before you trust a result "the tree does not help". It writes small corpora, and trains systems with the right trees, with
trees of other sentences and without trees. It prints a table and a verdict. The default takes about five minutes on two cores.
The same command continues. The exit status is 0 if the control passed, and 1 if it failed.
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treenet.cli.shipped import find_config
from treenet.data.splits import read_split
from treenet.experiments.control_data import Corpus, reversed_phrases, write_lines
from treenet.experiments.control_trees import Tree, tree_of
from treenet.experiments.ledger import Ledger
from treenet.experiments.settings import ControlSettings
from treenet.experiments.study_grid import add_records_option
from treeproc.common.command_line import ArgumentParser, build_arg_parser, command, loading
from treeproc.common.errors import CommandEnded, require
from treeproc.common.files import atomic_write, json_bytes, read_text
from treeproc.common.folder_kinds import CONTROL, claim_folder, mark_folder
from treeproc.common.settings import UserError, load_settings, refuse_relative_in_job
from treeproc.readers import read_lines
from treeproc.shards.schema import SPLIT_WORD_PREFIX
from treeproc.stages.preprocess import PreprocessConfig, preprocess, sample_splits
from treeproc.trees.scores import BracketScore, score_sentence
from treeproc.trees.spans import SpanTree, read_brackets

if TYPE_CHECKING:
    from treenet.experiments.control import System

RESULT = "control.json"


def _parser() -> ArgumentParser:
    parser = build_arg_parser(__doc__, ControlSettings, find_config=find_config)
    add_records_option(parser)
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    if args.sample:
        raise UserError("--sample: this command has none; leave it out, the command makes its own data")
    settings = load_settings(ControlSettings, args.config, args.overrides)
    out = args.out or Path("runs") / f"control_{'all' if settings.all else settings.rung}"
    refuse_relative_in_job({"--out": out, "--records": args.records or out})
    require(("matplotlib", "scipy", *(["stanza"] if settings.rung == "c" else [])), "the control")
    out, records = out.resolve(), args.records and args.records.resolve()
    claim_folder(out, CONTROL)
    with loading():
        from treenet.experiments.control import draw_corpora, studies_of, systems_of  # here, as below, because it loads PyTorch
        from treenet.experiments.control_table import build_result, format_result
        from treenet.experiments.study import run_study

    systems = systems_of(settings)
    mark_folder(out, CONTROL)
    print(f"data sets in {out / 'data'}", flush=True)
    corpora = parse_and_reverse(settings, out / "data") if settings.rung == "c" else draw_corpora(settings)
    make_data(systems, corpora, settings, out / "data")
    found = {}
    for name, study in studies_of(settings, out, records):
        run_study(study)
        found[name] = study.recording.read_all(Ledger.read(study.out), study.out)
    f1 = measure_trees(systems, out / "data") if settings.rung == "c" else {}
    result = build_result(settings, systems, corpora, found, f1)
    content = {"found": result.found, "verdict": result.verdict, "rows": [asdict(row) for row in result.rows]}
    atomic_write(out / RESULT, json_bytes(content))
    print(f"\n{format_result(settings, result)}\n\n{out / RESULT}")
    if not result.found:
        raise CommandEnded(1, "")


def make_data(systems: "Sequence[System]", corpora: Mapping[str, Corpus], settings: ControlSettings, folder: Path) -> None:
    """Write the corpora and preprocess them: one data set for each corpus, and one for each kind of control trees."""
    for name, corpus in corpora.items():
        values = corpus.write(folder / "text" / name)
        preprocess(load_settings(PreprocessConfig, None, **values, workers=0), folder / name)
    for system in systems:
        if system.data != system.corpus:
            base = corpora[system.corpus]
            tree = {**base.tree, "tree_source": system.tree_source, "seed": settings.data_seed}
            values = {"parsed": str(folder / system.corpus), "tree": tree, "subwords": base.subwords, "workers": 0}
            preprocess(load_settings(PreprocessConfig, None, **values), folder / system.data)


def parse_and_reverse(settings: ControlSettings, folder: Path) -> dict[str, Corpus]:
    """Parse English lines of the shipped sample, and return the corpora of rung c that are made of the trees."""
    from treenet.experiments.control import DAMAGE

    splits = {}
    for split, files in sample_splits().items():
        path = folder / "text" / "english" / f"{split}.txt"
        wanted = settings.split_sizes[split]
        lines = list(itertools.islice(read_lines([Path(files["source"][0])]), wanted))
        if split == "train" and len(lines) < wanted:
            raise UserError(f"sizes: rung c reads the shipped sample, which has {len(lines):,} lines, not {wanted:,}")
        write_lines(path, lines)
        splits[split] = {"source": [str(path)], "target": [str(path)]}
    values: dict[str, Any] = {
        "splits": splits,
        "parser": {"name": "shipped", "language": "en"},
        "subwords": {"vocab_size": 2000},
        "workers": 0,
    }
    preprocess(load_settings(PreprocessConfig, None, **values), folder / "english")
    parsed = {split: [_read_parse(row) for row in read_split(folder / "english", "parsed", split)] for split in splits}
    shares = {"labels": 0.0, **DAMAGE}
    return {name: reversed_phrases(parsed, share, settings.data_seed) for name, share in shares.items()}


def _read_parse(row: Mapping) -> tuple[Sequence[str], Sequence[str], Tree]:
    _, tags, spans = read_brackets(row["trees"][0])
    return row["words"]["text"], tags, tree_of(spans)


def measure_trees(systems: "Sequence[System]", folder: Path) -> dict[str, float]:
    """Return the unlabelled F1 of the test trees of each data set, in per cent, against those that made the target."""
    gold = _test_trees(folder / systems[0].data)
    found = {}
    for data in dict.fromkeys(system.data for system in systems):
        pairs = zip(gold, _test_trees(folder / data), strict=True)
        scores = (score_sentence([""] * max(right.ends), right, given, labelled=False) for right, given in pairs)
        found[data] = 100 * sum(scores, BracketScore()).f1
    return found


def _test_trees(data: Path) -> list[SpanTree]:
    """Return the test trees over pieces, without the nodes of split words."""
    labels = read_text(data / "encoded" / "vocab" / "labels.txt", "restore it").split("\n")
    trees = []
    for row in read_split(data, "encoded", "test"):
        names = [labels[label] for label in row["nodes"]["label"]]
        kept = [place for place, name in enumerate(names) if not name.startswith(SPLIT_WORD_PREFIX)]
        columns = (names, row["spans"]["start"], row["spans"]["end"])
        trees.append(SpanTree(*([column[place] for place in kept] for column in columns)))
    return trees

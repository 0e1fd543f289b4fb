"""Run the whole job on the shipped sample: parse, train two models, translate, score, and show examples.

    tree-attention demo

It takes some minutes on two cores. After an interruption, the same command continues.
"""

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from treenet.cli.shipped import CONFIGS, find_config
from treenet.config import TrainConfig
from treenet.data.splits import read_split
from treenet.evaluation.settings import EvaluateSettings
from treenet.runs.metrics_log import plot_curves, read_metrics
from treenet.runs.result_entries import SCORES
from treenet.tasks.translation_metrics import MAIN, SECOND
from treeproc.common.command_line import build_arg_parser, command, loading
from treeproc.common.errors import PROGRAM, CommandEnded, require, rewording
from treeproc.common.files import atomic_write
from treeproc.common.folder_kinds import DEMO, claim_folder, mark_folder
from treeproc.common.messages import tell
from treeproc.common.settings import Settings, UserError, load_settings
from treeproc.shards.schema import SPLITS
from treeproc.shards.store import read_index
from treeproc.stages.encode import RowEncoder
from treeproc.stages.inputs import SplitFiles, TreeConfig
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess, sample_splits
from treeproc.trees.spans import draw

if TYPE_CHECKING:
    from treenet.jobs.train_run import RunSummary

MODELS = ("tree_transformer", "transformer")
TITLES = {"tree_transformer": "Tree Transformer", "transformer": "Transformer"}
# Measured: docs/results/demo.md.
ONE_SEED = """One seed and minutes of training: a check that the system works, not a comparison of models.
The same Transformer scored BLEU 22.05 on one kind of processor and 22.67 on another, so less than one BLEU means nothing."""
NEXT = """
Translate your own sentence:
  echo 'Where is my dog?' | tree-attention translate --out {run}
See scores, learning curves, trees and attention on one page:
  tree-attention report --out {page} {runs}
Train on your own text, here with every hundredth pair for validation:
  tree-attention preprocess --out data splits.train.source=FILE splits.train.target=FILE splits.valid.hold_out=100
  tree-attention train --sample --out run data=data"""


class DemoSettings(Settings):
    """Settings of the demo. Everything else is in the configurations sample_data and sample."""

    splits: dict[str, SplitFiles] | None = Field(None, description="other files of train, valid and test; unset, the sample")
    vocab_size: PositiveInt | None = Field(None, description="pieces; unset, as in the configuration sample_data")
    max_steps: PositiveInt | None = Field(None, description="updates of each model; unset, as in the configuration sample")
    checkpoint_every: PositiveInt | None = Field(
        None, description="updates between checkpoints; unset, as in the configuration sample"
    )
    log_every: PositiveInt | None = Field(None, description="updates between metric lines; unset, as in the configuration sample")
    workers: int | None = Field(
        None,
        ge=0,
        description="Ray Train workers; 0: all in this process, without Ray; unset, as in the configuration sample",
    )
    sentences: PositiveInt = Field(10, description="test sentences to show")


def train(name: str, settings: DemoSettings, out: Path) -> "RunSummary":
    """Train one model on the demo's data set. The models differ only in `model.name`."""
    from treenet.jobs.train_run import run_training  # here, as below, because it loads PyTorch

    overrides = [f"data={out / 'data'}", f"model.name={name}"]
    overrides += [
        f"{key}={value}"
        for key in ("max_steps", "checkpoint_every", "log_every", "workers")
        if (value := getattr(settings, key)) is not None
    ]
    return run_training(load_settings(TrainConfig, CONFIGS / "sample.yaml", overrides), out / name)


def evaluate(out: Path) -> dict[str, dict]:
    """Return the scores of the test split by row of the table."""
    from treenet.evaluation.evaluate import evaluate_run

    print(f"\n{ONE_SEED}", flush=True)
    tree, plain = (out / name for name in MODELS)
    rows = {
        "Tree Transformer": (tree, EvaluateSettings()),
        "Transformer": (plain, EvaluateSettings()),
        "Tree Transformer, random trees": (tree, EvaluateSettings(random_trees=True)),
        "Tree Transformer, untrained": (tree, EvaluateSettings(untrained=True)),
    }
    scores = {}
    for title, (run, settings) in rows.items():
        name, scores[title] = evaluate_run(run, settings)
        scores[title]["translations"] = (run / f"translations.{name}.txt").read_text(encoding="utf-8").split("\n")[:-1]
        print(f"  {title}: BLEU {scores[title][MAIN]:.2f}", flush=True)
    return scores


def score_table(scores: dict[str, dict], runs: "dict[str, RunSummary]") -> str:
    """Return a table of the models side by side, and the meaning of its numbers."""
    from treenet.runs.result_provenance import describe_origin

    lines = [ONE_SEED, "", f"{'model':34}{'parameters':>12}{'BLEU':>8}{'chrF':>8}{'valid nll':>11}"]
    for title, row in scores.items():
        run = next((runs[name] for name in MODELS if TITLES[name] == title), None)
        nll = f"{run.valid_nll:.3f}" if run and run.valid_nll is not None else ""
        parameters = f"{run.parameters:,}" if run else ""
        lines.append(f"{title:34}{parameters:>12}{row[MAIN]:>8.2f}{row[SECOND]:>8.2f}{nll:>11}")
    first, random = scores["Tree Transformer"]["translations"], scores["Tree Transformer, random trees"]["translations"]
    changed = sum(a != b for a, b in zip(first, random, strict=True))
    lines.append(f"\nOther trees over the same words change {changed} of {len(first)} translations.")
    lines.append(f"Both models saw the same batches; test BLEU {scores['Transformer'][f'{MAIN}_signature']}")
    lines += [f"{title}: {describe_origin(row)}" for title, row in scores.items()]
    return "\n".join(lines)


def examples(scores: dict[str, dict], out: Path, count: int) -> str:
    """Return test sentences with their trees, translations and references."""
    data = out / "data"
    encoder = RowEncoder(data / "encoded" / "vocab", TreeConfig.model_validate(read_index(data / "encoded")["tree_settings"]))
    blocks: list[str] = []
    lines = zip(read_split(data, "text", "test"), read_split(data, "parsed", "test"), strict=True)
    for (text, parsed), tree, plain in zip(
        lines, scores["Tree Transformer"]["translations"], scores["Transformer"]["translations"], strict=True
    ):
        if len(blocks) == count:
            break
        tags, word_tree = encoder.word_tree(parsed)
        blocks.append(
            f"line              {text['example_id'] + 1}\n"
            f"source            {text['source']}\n{indent(draw(word_tree, parsed['words']['text'], tags), ' ' * 18)}\n"
            f"Tree Transformer  {tree}\nTransformer       {plain}\nreference         {text['target']}"
        )
    return "\n\n".join(blocks)


@command(lambda: build_arg_parser(__doc__, DemoSettings, find_config=find_config))
def main(args: argparse.Namespace) -> None:
    if args.sample:
        raise UserError("--sample: this command has none; leave it out, the demo runs on the sample")
    settings = load_settings(DemoSettings, args.config, args.overrides)
    if settings.splits and set(settings.splits) != set(SPLITS):
        raise UserError(f"splits: must be {', '.join(SPLITS)}, but are {', '.join(settings.splits)}")
    out = (args.out or Path("demo-output")).absolute()
    claim_folder(out, DEMO)
    started = time.monotonic()
    require(("stanza", "matplotlib", *([] if settings.workers == 0 else ["ray"])), "the demo")
    with loading():
        from treenet.jobs.train_run import STOPPED_BY_SIGTERM

    mark_folder(out, DEMO)
    tell(f"1/4  sentences to trees to shards, in {out / 'data'}")
    overrides = [f"subwords.vocab_size={settings.vocab_size}"] if settings.vocab_size else []
    overrides += ["workers=0"] if settings.workers == 0 else []
    splits = {k: v.model_dump() for k, v in settings.splits.items()} if settings.splits else sample_splits()
    config = load_settings(PreprocessConfig, CONFIGS / "sample_data.yaml", overrides, splits=splits)
    with rewording({"subwords.vocab_size": "vocab_size"}):
        print(summary(preprocess(config, out / "data"), out / "data"), flush=True)
    runs = {}
    for number, name in enumerate(MODELS, start=2):
        tell(f"\n{number}/4  train the {TITLES[name]}, in {out / name}")
        runs[name] = train(name, settings, out)
        if not runs[name].finished:
            raise CommandEnded(STOPPED_BY_SIGTERM, "stopped before the end; the same command continues")
    tell("\n4/4  translate and score the test split")
    scores = evaluate(out)

    report = f"{examples(scores, out, settings.sentences)}\n\n{score_table(scores, runs)}\n"
    atomic_write(out / "report.txt", report.encode())
    print(f"\n{report}")
    print(f"shards             {out / 'data'}")
    for name in MODELS:
        print(f"{TITLES[name]:18} {out / name}: averaged/model.safetensors, {SCORES}, translations.test.txt, metrics.jsonl")
    curves = {TITLES[name]: read_metrics(out / name) for name in MODELS}
    print(f"learning curves    {plot_curves(curves, out / 'learning_curves.png', 'Shipped sample, one seed')}")
    print(f"this report        {out / 'report.txt'}")
    run, page = (shlex.quote(str(out / name)) for name in (MODELS[0], "page"))
    if shutil.which(PROGRAM) is None:
        print(f"\nOnce in each shell: source {shlex.quote(f'{sys.prefix}/bin/activate')}")
    print(NEXT.format(run=run, page=page, runs=shlex.join(str(out / name) for name in MODELS)))
    print(f"\ndone in {(time.monotonic() - started) / 60:.1f} minutes")

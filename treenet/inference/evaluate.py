"""Translate a split of an encoded data set with a trained model and score it against the references."""

from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import Field

from treenet.config import DecodingConfig
from treenet.inference.metrics import compute_scores
from treenet.inference.run import AVERAGED, LoadedRun, load_run
from treenet.inference.search import Hypothesis
from treenet.inference.shuffle import shuffle_tree
from treenet.inference.translate import detokenize, read_references, read_split, translate_examples
from treeproc.files import atomic_write, json_bytes, read_json
from treeproc.settings import Settings, UserError
from treeproc.shards import check_hashes, read_index
from treeproc.storage import DataPath

SCORES = "scores.json"


class EvaluateSettings(Settings):
    """What to translate and how."""

    split: str = Field("test", description="split of the data set to translate")
    data: DataPath | None = Field(None, description="another data set of the same vocabulary; unset, the one of the run")
    checkpoint: str = Field(
        AVERAGED, coerce_numbers_to_str=True, description="'averaged', the number of a step, or the path of a checkpoint folder"
    )
    untrained: bool = Field(False, description="a baseline: the weights of the run's seed before the first update")
    shuffle_trees: bool = Field(
        False, description="a control: every sentence gets a random tree of another shape over its own leaves"
    )
    seed: int = Field(1, ge=0, description="seed of shuffle_trees")
    use_gpu: bool = Field(False, description="translate on the GPU")
    decoding: DecodingConfig = Field(DecodingConfig(), description="beam search; what is not set here is as in the run")


def decoding_of(chosen: DecodingConfig, run: LoadedRun) -> DecodingConfig:
    """The run's decoding settings, with what the user set in their place."""
    chosen = {name: getattr(chosen, name) for name in chosen.model_fields_set}
    return run.config.decoding.model_copy(update=chosen)


def result_name(settings: EvaluateSettings, run: LoadedRun) -> str:
    """Name of the result in file names and scores.json: the split, and what is not the run's own.

    So that a baseline or a control never takes the place of the score of the run.
    """
    parts = [settings.split]
    if run.checkpoint != AVERAGED:
        parts.append(run.checkpoint)
    if not run.own_data:
        parts.append(run.data.resolve().name)
    if settings.shuffle_trees:
        parts.append(f"shuffled_trees_{settings.seed}")
    return ".".join(parts)


def translate_split(run: LoadedRun, settings: EvaluateSettings, *, num_best: int = 1) -> Iterator[list[Hypothesis]]:
    """Hypotheses of every example of `settings.split`, best first, in example order."""
    examples = read_split(run.data, "encoded", settings.split)
    if settings.shuffle_trees:
        examples = (shuffle_tree(example, settings.seed) for example in examples)
    device = next(run.model.parameters()).device
    return translate_examples(run.model, examples, decoding_of(settings.decoding, run), num_best=num_best, device=device)


def evaluate_run(folder: Path, settings: EvaluateSettings) -> tuple[str, dict]:
    """Write `translations.NAME.txt` and the entry NAME of `scores.json` into the run folder.

    Returns NAME and its scores. Raises UserError when the folder is no run, or run and data do not fit.
    """
    if settings.use_gpu and not torch.cuda.is_available():
        raise UserError("use_gpu=true needs a GPU, but there is none; leave it out")
    device = "cuda" if settings.use_gpu else "cpu"
    run = load_run(folder, checkpoint=settings.checkpoint, data=settings.data, untrained=settings.untrained, device=device)
    check_hashes(run.data / "encoded", settings.split)
    _read_scores(folder)  # before hours of search, not after
    references = read_references(run.data, settings.split)
    lines = [detokenize(run.processor, found[0]) for found in translate_split(run, settings)]

    name = result_name(settings, run)
    index = read_index(run.data / "encoded")
    scores = {
        **compute_scores(lines, references),
        "split": settings.split,
        "checkpoint": run.checkpoint,
        "shuffle_trees": settings.shuffle_trees,
        "decoding": decoding_of(settings.decoding, run).model_dump(),
        "data": {key: value for key, value in index.items() if key.endswith("fingerprint")},
    }
    atomic_write(folder / f"translations.{name}.txt", "".join(f"{line}\n" for line in lines).encode())
    atomic_write(folder / SCORES, json_bytes({**_read_scores(folder), name: scores}))
    return name, scores


def _read_scores(folder: Path) -> dict:
    path = folder / SCORES
    return read_json(path, "remove it and run the same command again") if path.exists() else {}


def format_scores(everything: dict[str, dict]) -> str:
    """A small table, one line per result."""
    width = max(len("result"), *map(len, everything))
    rows = [f"{'result':{width}}  {'BLEU':>6}  {'chrF':>6}  {'lines':>7}"]
    rows += [f"{name:{width}}  {s['bleu']:6.2f}  {s['chrf']:6.2f}  {s['num_examples']:7d}" for name, s in everything.items()]
    return "\n".join(rows)

"""The model card of an exported run: README.md with the YAML head that Hugging Face reads, and text for people."""

import json
from collections.abc import Iterator, Mapping

from treenet.runs.loading import LoadedModel
from treenet.runs.run_json import read_facts
from treenet.runs.run_results import read_scores
from treenet.tasks.registry import build_task
from treenet.tasks.translation_metrics import HUB_NAMES, METRIC_TITLES
from treeproc.common.provenance import describe_packages, describe_software, packages, read_sessions, software
from treeproc.shards.store import describe_trees, read_index

PARSER_FOLDER = "parser"  # below the data of an exported run: where its parser's own models belong
_PIPELINES = {"translation": "translation", "classification": "text-classification", "masked_lm": "fill-mask"}
# The scores of a card with their titles, and their names on Hugging Face if they have one there.
_PERCENT = {
    "accuracy": ("accuracy", "accuracy"),
    "macro_f1": ("macro F1", "f1"),
    "binary_accuracy": ("accuracy of two classes", ""),
    "phrase_accuracy": ("accuracy of phrases", ""),
    "pair_accuracy": ("right in minimal pairs", ""),
}
_PLAIN = {name: (title, HUB_NAMES.get(name, "")) for name, title in METRIC_TITLES.items()} | {
    "pearson": ("Pearson's r", "pearsonr"),
    "spearman": ("Spearman's rho", "spearmanr"),
    "mse": ("mean squared error", "mse"),
    "perplexity": ("perplexity per piece", "perplexity"),
    "word_perplexity": ("perplexity per word", ""),
    "pseudo_perplexity": ("pseudo-perplexity per piece", ""),
    "nll": ("nll per target", ""),
}
_HEADER = """\
---
language:
- {language}
# license: add a line such as "license: cc-by-4.0"
library_name: tree-attention
{pipeline}tags:
- {model}
- {task}
{metrics}---

# {name}

{kind} of {parameters:,} parameters, trained with [tree-attention](#training).

{use}
"""


def model_card(run: LoadedModel, name: str) -> bytes:
    """Return the card of a run that is exported as the folder `name`. The license is left to who publishes it."""
    index, scores = read_index(run.data / "encoded"), list(_scores(run))
    metrics = sorted({metric for _, _, metric, _, _ in scores if metric})
    pipeline = _PIPELINES.get(run.config.task)
    header = _HEADER.format(
        language=json.dumps(index.get("parser_settings", {}).get("language", "en")),
        pipeline=f"pipeline_tag: {pipeline}\n" if pipeline else "",
        model=run.config.model.name,
        task=run.config.task,
        metrics="".join(["metrics:\n", *(f"- {metric}\n" for metric in metrics)]) if metrics else "",
        name=name,
        kind=f"A `{run.config.model.name}` for the task `{run.config.task}`",
        parameters=sum(parameter.numel() for parameter in run.model.parameters()),
        use=_use(run, name, index),
    )
    parts = [header, _table("Scores", ("result", "score", "value", "95 % interval"), [(a, b, c, d) for a, b, _, c, d in scores])]
    parts += [_table("Data", ("", ""), _data(run, index)), _table("Training", ("", ""), _training(run))]
    return "\n".join(filter(None, parts)).encode()


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows] if rows else []
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(line)} |" for line in cells), ""]) if rows else ""


def _use(run: LoadedModel, name: str, index: Mapping) -> str:
    """Return the lines that load the model and use it."""
    call = {"translation": "translate", "classification": "classify"}.get(run.config.task)
    if call is None:
        command = {"evaluate.py": "evaluate", "score_lm.py": "score-lm"}[build_task(run.config).scorer]
        made = f"# preprocess.py makes DATA with vocab_from={name}/data"
        return f"```bash\ntree-attention {command} --out {name} data=DATA  {made}\n```"
    given = ', trees=["(S (NP (DT A) (NN sentence)) (. .))"]' if index.get("parser_settings", {}).get("name") == "given" else ""
    return f'```python\nimport treenet\n\nrun = treenet.from_pretrained("{name}")\nrun.{call}(["A sentence ."]{given})\n```'


def _scores(run: LoadedModel) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield result, title, name on Hugging Face, value and interval of the scores of these weights in the run folder."""
    for result, entry in read_scores(run.run).items():
        if entry.get("weights_sha256") != run.weights_sha256:
            continue
        for factor, known in ((100, _PERCENT), (1, _PLAIN)):
            for key, (title, metric) in known.items():
                if isinstance(value := entry.get(key), int | float):
                    ends = entry.get(f"{key}_interval") or ()
                    shown = " to ".join(f"{factor * end:.2f}" for end in ends)
                    digits = 2 if factor == 100 or key in METRIC_TITLES else 4
                    yield result, title, metric, f"{factor * value:.{digits}f}", shown


def _data(run: LoadedModel, index: Mapping) -> list[tuple[str, ...]]:
    facts = read_facts(run.run)
    rows = [("data set", f"`{run.config.data.name}`, fingerprint `{facts['data_fingerprint']}`")]
    rows += [("training examples", f"{facts['examples']:,}")] if "examples" in facts else []
    rows += [("vocabulary", f"{index['num_pieces']:,} pieces, fingerprint `{index['vocab_fingerprint']}`")]
    rows += [("trees", describe_trees(dict(index)))] if index.get("tree_source") else []
    return [*rows, *_parser(index.get("parser") or {})]


def _parser(parser: Mapping) -> Iterator[tuple[str, str]]:
    """Yield the parser of a data set, its hashes, and how to get it."""
    if not parser:
        return
    models = parser.get("models")
    files = models.get("files", {}) if isinstance(models, dict) else {}
    yield "parser", ", ".join(str(parser[name]) for name in ("name", "library", "language") if parser.get(name))
    for name, sha256 in files.items():
        yield f"parser, {name}", f"sha256 begins with `{sha256}`"
    origin = models.get("origin") if isinstance(models, dict) else ""
    language = parser.get("language", "en")
    own = f"copy the files of its models into `data/{PARSER_FOLDER}`"
    yield (
        "to get it",
        {
            "shipped": "it comes with tree-attention",
            "installed": f"`python -c \"import stanza; stanza.download('{language}')\"`",
            "trained": own,
        }.get(str(origin))
        or {
            "given": "nothing parses: give the trees of your lines",
            "words": "nothing parses: lines are split at blanks",
            "corenlp": "start its server, and set CORENLP_ENDPOINT",
            "spacy": "install the package and its pipeline",
        }.get(str(parser.get("name")), f"install the package, and {own}"),
    )


def _training(run: LoadedModel) -> list[tuple[str, ...]]:
    """Return the software of the training, where the run recorded it, and that of the export."""
    trained = [session for session in read_sessions(run.run) if session.command == "train"]
    rows = [("trained with", f"{describe_software(one.software)}; {describe_packages(one.packages)}") for one in trained[-1:]]
    return [
        *rows,
        ("exported with", f"{describe_software(software())}; {describe_packages(packages())}"),
        ("weights", f"`{run.checkpoint}`, sha256 `{run.weights_sha256}`"),
    ]

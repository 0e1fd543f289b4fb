"""Exported models: folders with all that they need, and export.json with what they are and where they come from.

An exported run needs neither its data set nor its checkpoints: it has weights in safetensors, settings, vocabulary and a model
card. It is a run folder that every machine may read, so it names no place of the machine that made it.

The card is README.md with the YAML head that Hugging Face reads, and text for people.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treenet.config import TrainConfig
from treenet.runs.checkpoint import AVERAGED, FROZEN, META, WEIGHTS, publish, publish_folder, read_meta
from treenet.runs.checkpoint_io import copy_weights
from treenet.runs.identity import identity, list_changes
from treenet.runs.loading import CARD, HELD_DATA, Exported, LoadedModel
from treenet.runs.result_entries import RESULTS_LOCK, read_scores
from treenet.runs.run_folder import EXPORT_FACTS, read_facts
from treenet.runs.run_folder import FACTS as RUN_FACTS
from treenet.tasks.base import build_task
from treenet.tasks.scores import SCORES, interval_of
from treeproc.common.files import file_sha256, json_bytes, read_json
from treeproc.common.folder_kinds import CONFIG, EXPORT, claim_folder
from treeproc.common.hub import name_elsewhere
from treeproc.common.provenance import describe_packages, describe_software, packages, read_sessions, software
from treeproc.common.settings import UserError, dump_settings
from treeproc.common.storage import inside
from treeproc.online.input_files import HELD_FORM, form_of
from treeproc.online.line_encoder import learned_kinds
from treeproc.shards.schema import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from treeproc.shards.store import describe_trees, read_index, side_of, vocabulary_files

# The fields of an index that name shards, which an export leaves behind.
_OF_SHARDS = ("shards", "parts", "totals", "files", "dropped", "stages", "train_files")
_LISTED = 10  # of files in a message
# The keys of settings and facts whose values are places on a machine, also behind a dot.
_PLACES = ("data", "init", "folder", "file", "package", "_name_or_path")


def write_export(
    out: Path, run: LoadedModel, form: str, fill: Callable[[Path], Sequence[str]], option: str = "--out", **facts: object
) -> None:
    """Write the folder `out`: what `fill` writes into a temporary folder, and export.json. It returns the names of its files.

    An earlier export in `out` is replaced. Raises UserError if `out`, which `option` names, holds anything else, or if the disk
    refuses.
    """
    out = out.resolve()
    claim_folder(out, EXPORT, option=option)
    facts_there = out / EXPORT_FACTS
    there = read_json(facts_there, f"choose another {option}", Exported).get("format", form) if facts_there.is_file() else form
    if there != form:
        raise UserError(f"{out} holds an export in the format {there}, but this one is in {form}; choose another {option}")
    _own_files(out, option)
    index = read_index(run.data / "encoded")
    meta = {
        "format": form,
        "task": run.config.task,
        "model": without_places(run.config.model.model_dump(mode="json")),
        "checkpoint": run.checkpoint,
        "weights_sha256": run.weights_sha256,
        "vocab_fingerprint": index["vocab_fingerprint"],
        "special_pieces": {"pad": PAD_ID, "unk": UNK_ID, "bos": BOS_ID, "eos": EOS_ID},
        "decoding": run.config.decoding.model_dump(mode="json", exclude={"max_tokens"}),
        "parser": index.get("parser"),
        "normalization": index.get("normalization", "none"),
        "software": software(),
        **facts,
    }
    publish_folder(out, fill, meta, EXPORT_FACTS, lambda folder: _remove(folder, option))


def _own_files(out: Path, option: str) -> list[Path]:
    """Return the files of an earlier export in `out`, its facts last; none if `out` is free.

    Raises UserError if `out` is anything else, or if it has a file or an empty folder that the export did not record. So too for
    a model card that was edited.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return []
    if not (out / EXPORT_FACTS).is_file():
        raise UserError(f"{out} must be a new folder or an earlier export, but is something else; choose another {option}")
    recorded = read_json(out / EXPORT_FACTS, f"choose another {option}", Exported)["files"]
    own = [*(Path(str(inside(out, name))) for name in (*recorded, RESULTS_LOCK)), out / EXPORT_FACTS]
    kept = {folder for path in own for folder in path.parents}
    if added := [path for path in sorted(out.rglob("*")) if path not in own and path not in kept]:
        names = [str(path.relative_to(out)) for path in added if path.parent not in added]
        listed = ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else "")
        move = "move it" if len(names) == 1 else "move them"
        raise UserError(
            f"{out} is an earlier export, but has {listed} too, which would be lost; {move}, or choose another {option}"
        )
    if (out / CARD).is_file() and file_sha256(out / CARD) != recorded[CARD]["sha256"]:
        raise UserError(f"{out / CARD} was edited and would be lost; move it, or choose another {option}")
    return own


def _remove(out: Path, option: str) -> None:
    """Remove an earlier export, file by file, so that nothing else can be lost. export.json, which marks it, is last."""
    own = _own_files(out, option)
    for path in own[:-1]:
        path.unlink(missing_ok=True)
    for folder in sorted({folder for path in own for folder in path.parents if out in folder.parents}, reverse=True):
        if folder.exists():  # unless a kill came after its removal
            folder.rmdir()
    if own:
        own[-1].unlink()
        out.rmdir()


def read_vocabulary(run: LoadedModel) -> dict[str, bytes]:
    """Return the files of the vocabulary of a run by their names below DATA/encoded: pieces, labels, tags."""
    folder = run.data / "encoded"
    return {name: (folder / name).read_bytes() for name in vocabulary_files(folder)}


def export_run(run: LoadedModel, out: Path, option: str = "--out") -> None:
    """Write a run folder that `load_run` and all commands read: `out`, with the vocabulary in `out`/data, and a model card.

    The weights are those that `run` was loaded from, byte for byte, and in the same file the frozen ones. Raises UserError as
    `write_export` does, and for a model without trained weights.
    """
    if run.weights is None:
        raise UserError(f"{run.run} was loaded without trained weights, so there is nothing to write; load a checkpoint")
    if changes := list_changes(identity(run.config, read_facts(run.run)), read_meta(run.weights)):
        raise UserError(f"{run.weights} has weights of another run ({'; '.join(changes[:5])}); give that run, with its settings")
    weights, held = run.weights, f"{HELD_DATA}/encoded"
    meta = {name: value for name, value in read_meta(weights).items() if name not in ("files", "sha256", FROZEN)}
    config = TrainConfig.model_validate(without_places(run.config.model_dump(mode="json", exclude={"frozen_states"})))
    vocabulary = read_vocabulary(run)
    held_card = run.run / CARD  # of an exported run, perhaps edited

    def fill(folder: Path) -> list[str]:
        (folder / held / "vocab").mkdir(parents=True)
        (folder / CONFIG).write_text(dump_settings(config.model_copy(update={"data": Path(HELD_DATA)})), "utf-8")
        (folder / RUN_FACTS).write_bytes(json_bytes(without_places(read_facts(run.run))))
        publish(folder / AVERAGED, {WEIGHTS: lambda path: copy_weights(weights, path)}, without_places(meta))
        (folder / held / "index.json").write_bytes(json_bytes(_held_index(run, vocabulary)))
        for name, content in vocabulary.items():
            (folder / held / name).write_bytes(content)
        (folder / CARD).write_bytes(held_card.read_bytes() if held_card.is_file() else model_card(run, out.resolve().name))
        names = [CARD, CONFIG, RUN_FACTS, f"{AVERAGED}/{WEIGHTS}", f"{AVERAGED}/{META}", f"{held}/index.json"]
        return [*names, *(f"{held}/{name}" for name in vocabulary)]

    write_export(out, run, "safetensors", fill, option)


def without_places(value: Any) -> Any:
    """Return settings or facts with the last part alone of every path in them; names of the hub stay."""
    if isinstance(value, dict):
        return {
            name: name_elsewhere(one) if isinstance(one, str) and name.split(".")[-1] in _PLACES else without_places(one)
            for name, one in value.items()
        }
    return [without_places(one) for one in value] if isinstance(value, list | tuple) else value


def _held_index(run: LoadedModel, vocabulary: Mapping[str, bytes]) -> dict:
    """Return the index of a data set as that of one without rows: its vocabulary, and the settings of its making.

    Its parser looks for trained models in the data set itself, and for a server where CORENLP_ENDPOINT says.
    """
    index = without_places({name: value for name, value in read_index(run.data / "encoded").items() if name not in _OF_SHARDS})
    settings = index.get("parser_settings", {})
    if settings.get("models"):
        settings["models"] = PARSER_FOLDER
    settings.pop("endpoint", None)
    files = {name: hashlib.sha256(content).hexdigest() for name, content in vocabulary.items()}
    return {**index, HELD_FORM: form_of(run.data).facts(), "totals": {}, "shards": [], "files": files}


PARSER_FOLDER = "parser"  # below the data of an exported run: where its parser's own models belong
_PIPELINES = {"translation": "translation", "classification": "text-classification", "masked_lm": "fill-mask"}
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
        command = build_task(run.config).scorer
        made = f"# preprocess.py makes DATA with vocab_from={name}/data"
        return f"```bash\ntree-attention {command} --out {name} data=DATA  {made}\n```"
    line = "A sentence." if "tokens" in learned_kinds(run.data, side_of(index)) else "A sentence ."
    given = ', trees=["(S (NP (DT A) (NN sentence)) (. .))"]' if index.get("parser_settings", {}).get("name") == "given" else ""
    return f'```python\nimport treenet\n\nrun = treenet.from_pretrained("{name}")\nrun.{call}(["{line}"]{given})\n```'


def _scores(run: LoadedModel) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield result, title, name on Hugging Face, value and interval of the scores of these weights in the run folder."""
    for result, entry in read_scores(run.run).items():
        if entry.get("weights_sha256") != run.weights_sha256:
            continue
        for name, score in SCORES.items():
            if isinstance(value := entry.get(name), int | float):
                yield result, score.title, score.hub, score.show(value), score.show_ends(interval_of(entry, name))


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

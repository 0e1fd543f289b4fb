"""The job of parser training: from treebanks to models for `preprocess.py`, in stages that the same command continues.

The job writes these files:

    OUT/config.yaml, run.json   settings, and hashes of what was read
    OUT/training/MODEL/         checkpoint and metrics of one model
    OUT/training/taggings.json  the tagger's taggings of the training trees
    OUT/models/                 the result: MODEL.pt, what Stanza asks for beside them, scores.json, curves.png, README.md
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from treeproc.common.files import MADE_AGAIN, atomic_write, file_sha256, json_bytes, locked, read_json, remove_leftovers
from treeproc.common.folder_kinds import PARSER, claim_folder, mark_folder
from treeproc.common.messages import warn
from treeproc.common.settings import UserError, differences, dump_settings, load_settings, refuse_relative_in_job
from treeproc.extras.parser_training.config import MODELS, ModelName, TrainParserConfig
from treeproc.extras.parser_training.constituency import ConstituencyLearner, TaggedTree, build_model, write_vectors
from treeproc.extras.parser_training.corpus import (
    LEARNT_SPLITS,
    Treebank,
    read_treebank,
    seen_in_train,
    tagged,
    tagged_splits,
    texts,
    with_arcs,
)
from treeproc.extras.parser_training.dependency import DependencyLearner
from treeproc.extras.parser_training.layers import plain_words
from treeproc.extras.parser_training.loop import Learner, fit
from treeproc.extras.parser_training.results import evaluate, load_models, tag_words, write_card, write_curves
from treeproc.extras.parser_training.tagger import Source, TaggerLearner
from treeproc.extras.parser_training.tokenizer import Spaced, TokenizerLearner
from treeproc.extras.parser_training.treebank import Tagged
from treeproc.parsers.lines import Tags
from treeproc.parsers.model_files import VECTORS
from treeproc.readers.numbered_lines import read_lines

logger = logging.getLogger(__name__)

_SENTENCES_OF_VALID = 500
_NEEDS = {
    "tokenizer": "text",
    "pos": "tags (XPOS, if any treebank has it)",
    "constituency": "brackets",
    "depparse": "CoNLL-U with arcs",
}


def train_parser(config: TrainParserConfig, out: Path) -> Path:
    """Run the training in folder `out`, or its remaining stages. Returns the folder of the models.

    Raises UserError for bad treebanks before any training, and for a folder of other settings or other treebanks.
    """
    refuse_relative_in_job({"--out": out, **{f"treebanks: {path}": path for path in _paths(config)}})
    claim_folder(out, PARSER)
    treebanks = read_treebanks(config)
    unlabelled = hashlib.sha256("\n".join(read_lines(config.unlabelled)).encode()).hexdigest()[:16]
    plan = possible_models(config, treebanks)
    out = out.absolute()
    # Before the first weights: the word vectors of a continued run must have the sums of an undisturbed one.
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    mark_folder(out, PARSER)
    with locked(out):
        digests = {name: digest for treebank in treebanks for name, digest in treebank.digests().items()}
        _claim(config, digests | {"unlabelled": unlabelled}, out)
        (out / "models").mkdir(exist_ok=True)
        remove_leftovers(out / "models")
        atomic_write(out / "models" / "resources.json", b"{}\n")  # Stanza's loader wants a list of models
        job = _Job(config, treebanks, out)
        for name in plan:
            job.train(name)
        job.finish()
    return out / "models"


def describe(config: TrainParserConfig) -> str:
    """Describe the dry run of a training: its models and the sizes of their data. Raises UserError as the training would."""
    treebanks = read_treebanks(config)
    lines = [
        f"  {treebank.name}: {split} {part['words']:,} words in {part['sentences']:,} sentences with {kind}"
        for treebank in treebanks
        for kind, splits in treebank.counts().items()
        for split, part in splits.items()
    ]
    models = ", ".join(possible_models(config, treebanks))
    return "\n".join(["dry run: the command writes nothing to --out", *lines, f"  models: {models}"])


def _paths(config: TrainParserConfig) -> list[Path]:
    files = [files for treebank in config.all_treebanks().values() for files in (treebank.brackets, treebank.conllu)]
    return [path for one in files for path in one.paths()] + config.unlabelled


def read_treebanks(config: TrainParserConfig) -> list[Treebank]:
    """Read all treebanks. Raises UserError with file and line."""
    found = [read_treebank(name, treebank, config.hold_out) for name, treebank in config.all_treebanks().items()]
    for line in seen_in_train(found):
        warn(f"note: {line}; scores on them are higher than on new text")
    if config.tags == "upos":
        for treebank in found:
            treebank.drop_xpos()
    lower = [treebank.lower_cased(config.lower_case) for treebank in found] if config.lower_case else []
    for treebank, low in zip(found, lower, strict=False):
        if low.name in {other.name for other in found}:
            raise UserError(f"treebanks.{low.name}: is the name of {treebank.name} in lower case; rename it, or set lower_case=0")
    return [*found, *lower]


def possible_models(config: TrainParserConfig, treebanks: Sequence[Treebank]) -> list[ModelName]:
    """Return the requested models that can be learnt, and one line with the reason for every other one.

    Raises UserError if no model can be learnt.
    """
    tags = tagged_splits(treebanks)
    why_not: dict[str, str] = {}
    for split in LEARNT_SPLITS[::-1]:
        found = {
            "tokenizer": [t for t in treebanks if t.sentences.get(split) or t.trees.get(split)],
            "pos": [t for t in treebanks if tags[split][t.name]],
            "constituency": [t for t in treebanks if t.trees.get(split)],
            "depparse": [t for t in treebanks if with_arcs(t, split)],
        }
        why_not |= {name: f"no treebank has {_NEEDS[name]} in {split}" for name in MODELS if not found[name]}
    if "pos" in why_not:
        why_not |= dict.fromkeys(("constituency", "depparse"), why_not["pos"])
    for name in config.models:
        if name in why_not:
            logger.info("%s: left out, because %s", name, why_not[name])
    plan = [name for name in MODELS if name in config.models and name not in why_not]
    if not plan:
        raise UserError(f"models: no model can be trained: {'; '.join(f'{name}: {why_not[name]}' for name in config.models)}")
    if not any("train" in treebank.sentences for treebank in treebanks) and "tokenizer" in plan:
        logger.info("tokenizer: no treebank has CoNLL-U, so the text comes from the brackets, with the blanks of English text")
    return plan


def _claim(config: TrainParserConfig, digests: dict[str, str], out: Path) -> None:
    """Write config.yaml and run.json, or refuse if the folder has others. Files may move, but their content may not change.

    Settings of a model may change until its training begins. Other settings may change until the first training begins.
    """
    begun = [name for name in MODELS if (out / "training" / name).exists()]
    if begun:
        hint = "restore it, or choose another --out"
        old, new = (_learnt(c) for c in (load_settings(TrainParserConfig, out / "config.yaml"), config))
        fixed = [name for name in new if name not in MODELS or name in begun]
        changed = [line for name in fixed for line in differences(old[name], new[name], name)]
        texts = read_json(out / "run.json", hint)["texts"]
        read = differences(texts, digests)
        changed += [f"the text of {line.partition(':')[0]}" for line in read]
        then, now = (list(dict.fromkeys(name.rsplit(" ", 2)[0] for name in one if " " in name)) for one in (texts, digests))
        if not read and then != now:  # batches have sentences by their numbers over all treebanks
            changed.append(f"the order of treebanks: {', '.join(then)} -> {', '.join(now)}")
        if changed:
            raise UserError(
                f"{out} holds a training with other settings or treebanks ({'; '.join(changed)}); choose another --out, or give "
                "the old ones"
            )
    atomic_write(out / "config.yaml", dump_settings(config).encode())
    atomic_write(out / "run.json", json_bytes({"texts": digests}))


def _learnt(config: TrainParserConfig) -> dict:
    """Return the settings that determine the models, beside the content of the treebanks."""
    values = config.model_dump(mode="json", exclude={"title", "licence", "models", "unlabelled", "treebank"})
    values["treebanks"] = {name: {"weights": one.weights} for name, one in config.treebanks.items() if one.weights}
    return values


@dataclass
class _Job:
    config: TrainParserConfig
    treebanks: list[Treebank]
    out: Path

    @property
    def models(self) -> Path:
        return self.out / "models"

    def train(self, name: ModelName) -> None:
        """Train one model, or continue, unless its file exists."""
        file = self.models / f"{name}.pt"
        if file.exists():
            logger.info("%s: finished already", name)
            return
        learner: Learner = getattr(self, f"_{name}_learner")()
        best = fit(learner, self.out / "training" / name, getattr(self.config, name).fit, self.config.seed)
        learner.save(file)
        logger.info("%s: %s", name, ", ".join(f"{key} {value:.2f}" for key, value in best.items()))

    def finish(self) -> None:
        """Write scores, curves and card of the existing models."""
        scores = self.models / "scores.json"
        files = {name: self.models / f"{name}.pt" for name in MODELS}
        trained = {name: file_sha256(path) for name, path in files.items() if path.exists()}
        found = read_json(scores, MADE_AGAIN, needed=["models"]) if scores.exists() else {}
        if found.get("models") != trained:
            results = evaluate(self.models, list(trained), self.treebanks, self.config.language)
            found = {"models": trained, "treebanks": results}
            atomic_write(scores, json_bytes(found))
        write_curves(self.out / "training", list(trained), self.models / "curves.png")
        write_card(self.models, self.config, self.treebanks, found)

    def _tokenizer_learner(self) -> Learner:
        # Raw text if there is any: text made from brackets lacks the original spacing and punctuation.
        teachers = [t for t in self.treebanks if "train" in t.sentences] or self.treebanks
        found = {split: {t.name: _spaced(t, split) for t in teachers} for split in LEARNT_SPLITS}
        train, valid = ({name: lines for name, lines in part.items() if lines} for part in found.values())
        dev = {name: _some(lines) for name, lines in valid.items()}
        return TokenizerLearner(list(train.values()), dev, self.config.tokenizer, self.config.seed)

    @cached_property
    def _tagged(self) -> dict[str, dict[str, list[Tagged]]]:
        return tagged_splits(self.treebanks)

    def _pos_learner(self) -> TaggerLearner:
        train, valid = self._tagged["train"], self._tagged["valid"]
        for t in self.treebanks:
            if tagged(t, "train") and not train[t.name]:
                logger.info("pos: %s is left out, because it has no XPOS, but other treebanks do", t.name)
        sources = [Source(train[t.name], t.weights.get("pos", 1.0)) for t in self._tagged_treebanks()]
        dev = {name: _some(found) for name, found in valid.items() if found}
        return TaggerLearner(sources, dev, self.config.pos, self.config.seed, self._unlabelled())

    def _unlabelled(self) -> Iterator[list[str]]:
        return map(plain_words, read_lines(self.config.unlabelled))

    def _tagged_treebanks(self) -> list[Treebank]:
        """Return the treebanks that the tagger learns from."""
        return [t for t in self.treebanks if self._tagged["train"][t.name]]

    def _predicted(self, sentences: Sequence[Sequence[str]]) -> list[Tags]:
        """Return (UPOS, XPOS) from the trained tagger."""
        return tag_words(load_models(self.models, ["pos"], self.config.language), sentences)

    def _constituency_learner(self) -> Learner:
        settings, seed = self.config.constituency, self.config.seed
        trees = [tree for t in self.treebanks for tree in t.trees.get("train", [])]
        weights = [t.weights.get("constituency", 1.0) for t in self.treebanks for _ in t.trees.get("train", [])]
        taggings = self._taggings()
        others = [own for t in self.treebanks if t.trees.get("train") for own in zip(*taggings[t.name], strict=True)]
        train = [TaggedTree(tree.words, [tree.tags, *own], tree.spans) for tree, own in zip(trees, others, strict=True)]
        held = [tree for t in self.treebanks for tree in _some(t.trees.get("valid", []))]
        predicted = self._predicted([tree.words for tree in held])
        # Parsed with the first tagging, scored without the punctuation of the last.
        dev = [
            TaggedTree(tree.words, [[xpos for _, xpos in tags], tree.tags], tree.spans)
            for tree, tags in zip(held, predicted, strict=True)
        ]
        vectors = self.models / VECTORS
        if not vectors.exists():
            words = [tree.words for tree in trees] + [s.words for t in self.treebanks for s in t.sentences.get("train", [])]
            write_vectors(vectors, [*words, *self._unlabelled()])
        torch.manual_seed(seed)
        model = build_model(train, settings, vectors, self.config.language)
        return ConstituencyLearner(model, train, dev, settings, seed, weights)

    def _taggings(self) -> dict[str, list[list[list[str]]]]:
        """Return tags of the training trees by treebank, with about as many errors as the tagger makes on valid."""
        path = self.out / "training" / "taggings.json"
        if not path.exists():
            learner = self._pos_learner()
            # It is finished, so this loads the weights.
            fit(learner, self.out / "training" / "pos", self.config.pos.fit, self.config.seed)
            scores = learner.evaluate()
            taggings = {}
            for number, t in enumerate(self._tagged_treebanks()):
                if t.trees.get("train"):
                    accuracy = scores[f"{t.name}_xpos"]
                    logger.info("taggings: %s, with %.1f%% right", t.name, accuracy)
                    copies = learner.noisy_tags(number, accuracy, self.config.taggings)
                    rows = {tuple(s.words): i for i, s in enumerate(self._tagged["train"][t.name])}
                    at = [rows[tuple(tree.words)] for tree in t.trees["train"]]
                    taggings[t.name] = [[copy[i] for i in at] for copy in copies]
            atomic_write(path, json.dumps(taggings).encode())
        return read_json(path, MADE_AGAIN)

    def _depparse_learner(self) -> Learner:
        train = [s for t in self.treebanks for s in with_arcs(t, "train")]
        valid = [s for t in self.treebanks for s in _some(with_arcs(t, "valid"))]
        tags = self._predicted([s.words for s in valid])
        dev = [replace(s, upos=[u for u, _ in own], xpos=[x for _, x in own]) for s, own in zip(valid, tags, strict=True)]
        return DependencyLearner(train, dev, self.config.depparse, self.config.seed, self._unlabelled())


def _some(items: list) -> list:
    """Return at most so many items, evenly spaced. They are enough to select weights, and give treebanks similar weight."""
    return items[:: -(-len(items) // _SENTENCES_OF_VALID)] if items else items


def _spaced(treebank: Treebank, split: str) -> list[Spaced]:
    out = []
    for text, tokens in texts(treebank, split):
        nexts = [start for start, _ in tokens[1:]] + [-1]
        out.append(Spaced([text[a:b] for a, b in tokens], [end != start for (_, end), start in zip(tokens, nexts, strict=True)]))
    return out

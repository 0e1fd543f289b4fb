"""The scores of trained models on the valid and test parts of every treebank, with the code of `preprocess.py`."""

from collections.abc import Sequence
from pathlib import Path

from treeproc.common.progress import Progress
from treeproc.extras.parser_training.corpus import Treebank, tagged, texts, with_arcs
from treeproc.extras.parser_training.treebank import Sentence, Tree
from treeproc.parsers.config import ParserConfig
from treeproc.parsers.documents import Tags
from treeproc.parsers.model_files import ModelFiles, trained_files
from treeproc.parsers.stanza_parser import Processors, load_processors
from treeproc.trees.bracket_scores import BracketScore, score, score_by_length
from treeproc.trees.dependency_scores import attachment, span_f1, tag_accuracy

BATCH_WORDS = 4096
_BATCH_CHARS = 4 * BATCH_WORDS


def evaluate(folder: Path, models: Sequence[str], treebanks: Sequence[Treebank], language: str) -> dict:
    """Compute scores in percent, {treebank: {split: {...}}}.

    tokens: precision, recall, f1 of tokens in raw sentences. tags: UPOS and XPOS accuracy. brackets: with the treebank's tags
    (gold_tags) and with predicted ones (predicted_tags). arcs: with predicted tags; `words` excludes punctuation. All except
    tokens use the treebank's words.
    """
    processors = load_models(folder, models, language)
    jobs = [(treebank, split) for treebank in treebanks for split in ("valid", "test")]
    out: dict[str, dict] = {}
    with Progress("scores", len(jobs), unit="parts") as progress:
        for treebank, split in jobs:
            if results := _evaluate_split(processors, treebank, split):
                out.setdefault(treebank.name, {})[split] = results
            progress.update()
    return out


def load_models(folder: Path, models: Sequence[str], language: str) -> Processors:
    """Load the named models of a folder."""
    files = {name: path for name, path in trained_files(folder).items() if path.stem in models}
    return load_processors(ParserConfig(language=language, device="cpu"), ModelFiles("trained", folder, files))


def _evaluate_split(processors: Processors, treebank: Treebank, split: str) -> dict:
    out = {}
    if processors.tokenizer and treebank.sentences.get(split):
        out["tokens"] = _tokens(processors, treebank, split)
    if processors.tagger and (found := tagged(treebank, split)):
        tags = _tag(processors, [s.words for s in found])
        out["tags"] = {
            name: _percent(tag_accuracy([getattr(s, name) for s in pairs], [[t[column] for t in tags[i]] for i in at]).value)
            for column, name in enumerate(("upos", "xpos"))
            if (at := [i for i, s in enumerate(found) if getattr(s, name)]) and (pairs := [found[i] for i in at])
        }
    if processors.parser and (trees := treebank.trees.get(split)):
        out["brackets"] = _brackets(processors, trees)
    if processors.arcs and processors.tagger and (sentences := with_arcs(treebank, split)):
        out["arcs"] = _arcs(processors, sentences)
    return out


def _tag(processors: Processors, sentences: Sequence[Sequence[str]]) -> list[Tags]:
    return processors.tagger.tag(sentences, BATCH_WORDS)[0]


def _tokens(processors: Processors, treebank: Treebank, split: str) -> dict[str, float]:
    wanted = texts(treebank, split)
    found = processors.tokenizer.tokenize([text.text for text in wanted], _BATCH_CHARS)
    spans = [[(token.start, token.end) for sentence in line for token in sentence] for line in found]
    names = ("precision", "recall", "f1")
    return dict(zip(names, map(_percent, span_f1([text.tokens for text in wanted], spans)), strict=True))


def _brackets(processors: Processors, trees: Sequence[Tree]) -> dict:
    gold = [(tree.tags, tree.spans) for tree in trees]
    out = {"sentences": len(trees), "words": sum(len(tree.words) for tree in trees)}
    taggings = {"gold_tags": [tree.tags for tree in trees]}
    if processors.tagger:
        column = 1 if processors.uses_xpos else 0
        taggings["predicted_tags"] = [[tag[column] for tag in s] for s in _tag(processors, [tree.words for tree in trees])]
    for name, tags in taggings.items():
        tagged_words = [list(zip(tree.words, own, strict=True)) for tree, own in zip(trees, tags, strict=True)]
        parsed = processors.parser.parse(tagged_words, BATCH_WORDS)
        out[name] = {
            "labelled": _describe(score(gold, parsed)),
            "unlabelled": _describe(score(gold, parsed, labelled=False)),
            "by_length": {length: _describe(part) for length, part in score_by_length(gold, parsed).items() if part.sentences},
            "failed": sum(tree is None for tree in parsed),
        }
    return out


def _describe(score: BracketScore) -> dict[str, float | int]:
    names = ("precision", "recall", "f1", "exact_match")
    return {"sentences": score.sentences} | {name: _percent(getattr(score, name)) for name in names}


def _arcs(processors: Processors, sentences: Sequence[Sentence]) -> dict:
    words = [s.words for s in sentences]
    parsed = processors.arcs.parse(words, _tag(processors, words), BATCH_WORDS)
    gold = [(s.governors, s.deprels) for s in sentences]
    found = [([governor for governor, _ in arcs], [relation for _, relation in arcs]) for arcs in parsed]
    every = attachment(gold, found)
    without = attachment(gold, found, [s.upos for s in sentences])
    return {
        "sentences": len(sentences),
        "uas": _percent(every.unlabelled.value),
        "las": _percent(every.labelled.value),
        "uas_words": _percent(without.unlabelled.value),
        "las_words": _percent(without.labelled.value),
    }


def _percent(value: float) -> float:
    return round(100 * value, 2)

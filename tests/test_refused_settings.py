"""What a user is told about settings that are wrong, or do not go together: who reads them, the settings, the message."""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from commands import main_of
from hostile_files import one_line
from model_cases import VOCAB
from toyruns import TINY_RUN

from treenet.config import ClassifierConfig, MaskedLMConfig, ModelConfig, PhraseConfig, RelationsConfig, TrainConfig
from treenet.evaluation.settings import EvaluateSettings, ParseSettings, ScoreLMSettings
from treenet.experiments.settings import ControlSettings, ScalingConfig
from treenet.experiments.study_grid import study_cells
from treenet.extras.tuning.trials import Trials, TuningConfig
from treenet.models import VocabSizes
from treenet.models.registry import build_causal_lm, build_classifier, build_model
from treenet.translation.settings import TranslateSettings
from treeproc.common.settings import Settings, UserError, load_settings
from treeproc.extras.parser_training.config import TrainParserConfig
from treeproc.extras.parser_training.corpus import Files, TreebankConfig
from treeproc.extras.parser_training.treebank import Retag
from treeproc.parsers import describe_parser
from treeproc.parsers.config import ParserConfig
from treeproc.stages.config import PreprocessConfig
from treeproc.stages.preprocess import check_settings

SIZES = {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 2, "num_decoder_layers": 2}


def settings(cls: type[Settings], use: Callable = lambda config: None, **given) -> Callable[[list[str]], object]:
    """Read settings of a class as a command does, and give them to its next function."""
    return lambda overrides: use(load_settings(cls, None, overrides, **deepcopy(given)))


def classifier(**given) -> Callable[[list[str]], object]:
    """Build a classifier that learns the classes of all phrases."""
    return settings(ModelConfig, lambda config: build_classifier(config, VOCAB, ClassifierConfig(**given), 3), **SIZES)


SCALING = {**TINY_RUN, "data": "data", "grid": {"fractions": [0.3, 1.0], "seeds": [1, 2]}}
PHRASES = {"name": "multi_granularity", "phrases": {"ngrams": [2], "levels": [1], "chunk_size": 2}}
TEXT = {"splits": {"train": {"source": ["a"]}}}

REFUSED: dict[Callable[[list[str]], object], dict[str, str]] = {
    settings(TrainConfig, data="x"): {
        "lr=1": r"^the command line: lr: unknown key; did you mean optimizer\.learning_rate\?",
        "optim.lr=1": r"^the command line: optim: unknown key; did you mean optimizer\.learning_rate\?",
        "epochs=3": "^the command line: epochs: unknown key; training counts updates, not epochs: set max_steps",
        "batch_size=64": "^the command line: batch_size: unknown key; a batch counts pieces, not sentences: set batch.max_tokens",
        "device=cuda": "^the command line: device: unknown key; write use_gpu=true to compute on a GPU",
        "optim=adam": "^the command line: optim: unknown key; the optimiser is Adam; set optimizer.learning_rate, ",
        "num_beams=4": r"^the command line: num_beams: unknown key; did you mean decoding\.beam_size\?",
        "model.hidden_size=4": r"^the command line: model\.hidden_size: unknown key; did you mean model\.d_model\?",
    },
    settings(TranslateSettings): {
        "num_beams=4": r"^the command line: num_beams: unknown key; did you mean decoding\.beam_size\?",
        "score=a prefix=b must_not_appear=c": "nothing is searched; leave out prefix, must_not_appear$",
        "score=a must_appear=b": "score takes translations as they are, and nothing is searched; leave out must_appear$",
        "checkpoint=[]": "checkpoint: must name a checkpoint, for example averaged$",
    },
    settings(TrainConfig, **TINY_RUN, data="data"): {
        "sampling.bpe_dropout=0.1 task=masked_lm": "sampling needs task = 'translation', but task is 'masked_lm'",
        "sampling.sides=source": "sides = 'source' needs bpe_dropout, for example 0.1, but it is 0",
        "optimizer.learning_rate=.nan": r"optimizer\.learning_rate: .*number",
        "compile=true checkpoint_activations=true": "compile must be false if checkpoint_activations is true",
        "precision=fp16": "precision = 'fp16' needs use_gpu = true",
        "optimizer.decay_steps=10": "decay_steps must be more than warmup_steps = 10, but is 10",
        "optimizer.decay_steps=15": "max_steps must be at most optimizer.decay_steps = 15, where the rate is 0, but is 20",
        "valid_metric=bleu task=classification": "needs task = 'translation', but task is 'classification'",
        "valid_metric=bleu shard_weights=true compile=false": "must be nll where shard_weights is true",
        "valid_metric=nll valid_metric_every=2": "valid_metric_every needs another valid_metric than 'nll'",
        "decoding.top_k=3": "top_k needs method = sampling or mbr, but the method is beam",
        "decoding.method=sampling decoding.mbr_samples=8": "mbr_samples needs method = mbr, but the method is sampling",
        "decoding={method: sampling, diversity_groups: 5}": "diversity_groups needs method = beam, but the method is sampling",
        "decoding.method=mbr decoding.coverage_penalty=0.2": "coverage_penalty needs method = beam, but the method is mbr",
        "decoding.diversity_groups=3": "beam_size must be a multiple of diversity_groups = 3, but is 5",
        "decoding.diversity_strength=2": "diversity_strength needs diversity_groups of at least 2",
        "decoding.diversity_strength=1.0e+308": "diversity_strength: must be less than or equal to 1000000",  # an overflow
    },
    settings(ModelConfig, lambda config: build_model(config, VOCAB), **SIZES): {
        "name=tree_former": "one of .*transformer, .*tree_transformer, but is tree_former",
        "name=bilstm norm=pre": "model.norm is for models of Transformer layers, but model.name is bilstm",
        "name=on_lstm_hybrid hybrid.cell=lstm hybrid.short_cut=false num_encoder_layers=1": (
            "num_recurrent_layers must be less than model.num_encoder_layers = 1, because the other"
        ),
        "name=on_lstm_hybrid hybrid={cell: lstm, short_cut: false, num_recurrent_layers: 2}": (
            "num_recurrent_layers must be less than model.num_encoder_layers = 2, because the other"
        ),
    },
    settings(ModelConfig, lambda config: build_model(config, VOCAB), **SIZES | {"num_heads": 4}, **PHRASES): {
        "phrases.ngrams=[2,3] phrases.levels=[1,2]": "1 to 3 granularities together, but name 4",
        "phrases={ngrams: [], levels: [], tag_loss: 0}": "but name 0",
        "phrases.num_layers=3": "model.phrases.num_layers must be at most model.num_encoder_layers = 2, but is 3",
        "phrases.chunk_size=3": "chunk_size of an ON-LSTM .* must divide its width 4, and be smaller, but is 3",
    },
    settings(ModelConfig, lambda config: build_model(config, VocabSizes(9, 9)), **SIZES, name="relation_transformer"): {
        "relations.label_head=deprel": "label_head: is deprel, but the data set has no list of such labels",
    },
    classifier(): {
        "name=lstm": r"model\.name must be one of bilstm, .*, but is lstm instead",
        "name=linearized_transformer": r"classifier\.supervision must be root, because .* = linearized_transformer reads",
        "name=relation_transformer relations.tree_distance.clip=3": (
            r"supervision must be root, because model\.name = relation_transformer reads dependencies"
        ),
        "source_word_dropout=0.1": "model.source_word_dropout is for translation",
    },
    classifier(pooling="mean"): {
        "name=tree_transformer": r"classifier\.pooling must be own .* set classifier\.supervision=root",
    },
    settings(ModelConfig, lambda config: build_causal_lm(config, VOCAB), **SIZES): {
        "name=causal_transformer decoder_layer_drop=0.1": "model.decoder_layer_drop is for models with a decoder",
        "name=causal_transformer tree_reg.layer=3": "at most model.num_encoder_layers = 2, but is 3",
        "name=causal_transformer tree_reg.heads=3": "num_heads = 2",
        "name=transformer": "model.name must be one of causal_transformer, transformer_grammar",
    },
    settings(RelationsConfig): {
        "sequence.clip=0": "decoder needs sequence.clip, for example 16, but it is 0; set decoder=false",
    },
    settings(PhraseConfig): {
        "ngrams=[2,2]": r"ngrams must all be different, but are \[2, 2\]",
        "levels=[]": "tag_loss must be 0 without levels, .* but is 1",
    },
    settings(MaskedLMConfig): {"mask=0.9 random=0.2": r"mask \+ random must be at most 1, but is 1.1"},
    settings(ControlSettings, rung="b"): {
        "all=true": "all: only rung a has trees in every form, but rung is b",
        "words=4": "words: is for rung a, but rung is b",
        "words=9": "words: must be less than or equal to 8, but is 9",
        "sizes=[5,5]": "must hold every value once",
        "training.seed=3": "training: leave seed out",
        "rung=a all=true words=2": "words must be at least 3 with all, but is 2",  # whose bound would be 0
    },
    settings(ScalingConfig, lambda config: study_cells(config, Path("out")), **SCALING): {
        "grid.fractions=[0.1,0.1]": "must hold every value once",
        "grid.fractions=[0.1,0.1000000001]": r"must hold every value once, but is \['0.1', '0.1'\]",
        "grid.models={transformer: {batch: null}}": r"models\.transformer\.batch must be a section, .*, but is None",
        "grid.sizes={0.3: {batch: 3}}": r"sizes\.0\.3\.batch must be a section, .*, but is 3",
        "grid.fractions=[1.5]": r"grid\.fractions\.0: must be less than or equal to 1",
        "grid.seeds=[]": r"grid\.seeds",
        "grid.baseline=lstm": "baseline must be one of tree_transformer, transformer, but is lstm",
        "grid.models={a/b: {}} grid.baseline=a/b": "must be letters, digits",
        "grid.models={transformer: {seed: 3}}": "leave seed, batch.fraction and batch.subset out",
        "grid.models={transformer: {batch: {subset: by_seed}}}": "batch.subset is for all models",
        "grid.models={transformer: {model: {nme: 3}}}": r"grid\.models\.transformer: model\.nme: unknown key",
        "grid.split=dev": "has no split 'dev'; there are: train, valid, test",
        "grid.sizes={0.5: {max_steps: 3}}": r"sizes: 0\.5 must be one of fractions = \[0\.3, 1\.0\]",
        "grid.sizes={0.3: {model: {}}}": r"sizes\.0\.3: leave seed, data, model, batch\.fraction and batch\.subset out",
        "grid.sizes={0.3: {max_step: 3}}": "max_step: unknown key",
        "lr_scale={encoder.*: 0.1} grid.models.transformer={lr_scale: {encodr.*: null}}": (
            "grid.models.transformer: lr_scale.encodr.*: must be a valid number, but is None"
        ),
    },
    settings(TuningConfig, lambda config: Trials(Path("out"), config, "transformer"), **TINY_RUN, data="data"): {
        "tune.space={model.dropout: {choices: [0.1], low: 0}}": "give choices, or low and high, not both",
        "tune.space={model.dropout: {low: 0.3, high: 0.3}}": "give choices, or low and a larger high",
        "tune.space={model.dropout: {low: 0, high: 0.3, scale: log}}": "a log scale needs a low above 0",
        "tune.space={model.dropout: {choices: [0.1, 0.1]}}": "must hold every value once",
        "tune.space={model.dropout: {choices: [0.1, 0.2], scale: log}}": "scale: is of numbers from low to high; leave it out",
        "tune.grace_steps=99999999": "tune.grace_steps must be at most max_steps = ",
        "tune.space={model.phrases.ngrams: {choices: [[2], [2, 3]]}}": (
            r"choices must be single values, but one is \[2\]; give tune.systems one of them each"
        ),
        "tune.space={seed: {choices: [1, 2]}}": "space.seed: trials differ in no such setting",
        "tune.space={masked_lm.rate: {low: 0.1, high: 0.3}}": "space.masked_lm.rate: trials differ in no such setting",
        "tune.space={decoding.beam_size: {low: 1, high: 5}}": "space.decoding.beam_size: does not change the training",
        "tune.systems={a: {}, b: {max_steps: 60}}": "systems.b.max_steps: trials differ in no such setting",
        "tune.space={model.name: {choices: [transformer]}}": "systems.tree_transformer sets model.name, which the space draws",
        "tune.systems={a/b: {}}": "systems: a name is part of a folder's",
        "tune.more_trials={other: 3}": "more_trials must be of tree_transformer, transformer",
        "tune.space={model.dropot: {choices: [0.1, 0.2]}}": "tune.systems.transformer with model.dropot=0.1.*model.dropot",
    },
    settings(PreprocessConfig): {
        "source_lang=de": r"^the command line: source_lang: unknown key; did you mean parser\.language\?",
        "device=cpu": r"^the command line: device: unknown key; did you mean parser\.device or target_parser\.device\?",
        "format=sst labels={0: 0, 4: -1}": "labels: a class of the data set must be a number from 0 to 127, but one is -1",
        "format=sst labels={0: 0, 4: 128}": "labels: a class of the data set must be a number from 0 to 127, but one is 128",
        "vocab_from=2024": "^the command line: vocab_from: must be a path or a URI, but is .*; write ./NAME for a",
        "vocab_from=[a]": "^the command line: vocab_from: must be a path or a URI, but is .*; write ./NAME for a",
        "rows_per_shard=0": "^the command line: rows_per_shard: must be greater than 0 or 'auto', but is 0",
        "rows_per_shard=-1": "^the command line: rows_per_shard: must be greater than 0 or 'auto', but is -1",
        "rows_per_shard=1.5": "^the command line: rows_per_shard: must be a valid integer or 'auto', but is 1.5",
        "rows_per_shard=some": "^the command line: rows_per_shard: must be a valid integer or 'auto', but is 'some'",
        "rows_per_shard=null": "^the command line: rows_per_shard: must be a valid integer or 'auto', but is None",
        "parser.tags=[2de]": "parser.tags.0: String should match pattern .*, but is .2de.",
        "parser.tags=['<a b>']": "parser.tags.0: String should match pattern .*, but is .<a b>.",
        "parser.tags=[<2de>] parser.name=given": "needs a parser that finds the words of a line",
        "parser.tags=[<2de>] tokenized=moses": "needs text whose words the parser finds",
        "parser.tags=[<2de>] format=agreement": "parser.tags: needs text whose words the parser finds",
        "target_parser.tags=[<2de>] tokenized=moses": "target_parser.tags: needs text whose words the parser finds",
        "target_parser.treebank_words=true": "target_parser.treebank_words: needs tokenized: moses",
        "parser.tags=[<2de>,<2fr>,<2DE>,<2FR>] subwords.lowercase=true": (
            "parser.tags: <2DE> and <2de> are one piece with subwords.lowercase"
        ),
    },
    settings(PreprocessConfig, check_settings, **TEXT, format="text"): {
        "format=parallel": "format parallel needs target files, .*; for text without translations, set format=text$",
        "format=sst splits.train.target=b": "format sst takes no target files",
        "format=conllu splits.valid={source: a, target: b}": "in all splits",
        "format=sst tokenized=moses": "tokenized: must be none for format sst",
        "format=parallel splits.train.target=b labels={0: 1}": "labels: format parallel has no labels",
        "format=sst splits={train: {hold_out: 5}}": "hold_out can make only the valid split",
        "format=sst splits={train: {}}": "must have either source files or hold_out",
        "format=sick filters.drop_leaks=true": "drop_leaks must be false",
        "format=imdb labelled.text=x": "labelled: is for format labelled, but format is imdb",
        "splits={test: {source: a}}": (
            "splits: must be train, and any of valid, test and other names, but are 'test'; vocab_from=DATA"
        ),
        "splits.vald.source=a": "splits.vald: did you mean valid?",
        "splits.Test.source=a": "splits: a name must have at most 50 characters, of a to z, 0 to 9 and _, but is 'Test'",
        "splits={train: {source: a}, ../x: {source: b}}": "but is '../x'",
    },
    settings(PreprocessConfig, **TEXT, format="labelled"): {
        "labelled.classes=[x]": "labelled.classes: must be at least two names that differ",
        "labelled.classes=[x,x]": "labelled.classes: must be at least two names that differ",
        'labelled.classes=[x,"a\\tb"]': "labelled.classes: the name .* has a tab or a line end",
        "labelled.text=label": "labelled: label and text must be two columns, but both are 'label'",
        "labels={0: 1}": "labels: classes of format labelled have names",
        "labelled.second_text=text": "second_text must be another column than label and text, but is .text.",
        "labelled.second_text=b splits.valid.hold_out=2": (
            "hold_out: would separate the two sentences of a pair of format labelled"
        ),
    },
    settings(ParserConfig): {
        "name=shipped constituency=false": "constituency: false needs dependencies: true, and name: stanza, shipped",
        "name=spacy": "gives only arcs; set package, constituency: false",
        "name=spacy package='x y'": "must be the name of an installed spaCy pipeline",
        "name=benepar": "needs the path of its model",
        "name=benepar models=x dependencies=true": "set package",
        "name=benepar models=x dependencies=true package=x constituency=false": "constituency: false needs",
        "name=stanza package=en_core_web_sm": "package: needs name: spacy, benepar or supar",
        "name=spacy models=x": "models: needs name: stanza, shipped, benepar or supar",
        "given_labels=parsed": "choose|needs name: (given|stanza)",
        "name=given split_sentences=true": "choose|needs name: (given|stanza)",
        "name=words dependencies=true": "choose|needs name: (given|stanza)",
        "name=corenlp models=somewhere": "choose|needs name: (given|stanza)",
    },
    settings(ParserConfig, scores=True): {
        "name=corenlp": "scores: needs name: shipped or stanza, and constituency: true, but name is corenlp",
        "name=given given_labels=parsed": "but name is given; leave scores out",
        "name=words": "but name is words",
        "name=spacy package=en constituency=false dependencies=true": "but name is spacy|constituency is false",
        "name=benepar models=m": "but name is benepar",
        "name=supar models=m": "but name is supar",
        "name=shipped constituency=false dependencies=true": "constituency is false",
    },
    settings(ParserConfig, describe_parser): {
        "language=de": "no constituency parser for 'de'; shipped languages: en; install Stanza's own",
        "language=hu": "models that .*train.* on a treebank; .* or words with a control tree",
        "language=fr": (
            "Stanza publishes none; parser.name=corenlp has one; choose .*: parser.dependencies=true parser.constituency=false, "
            "for trees of arcs .shipped: de en fr.*parser.name=given with .*, or words"
        ),
        "language=nl dependencies=true constituency=false": (
            "no dependency parser for 'nl'; shipped .*; choose one of these: parser.name=stanza: install Stanza's own"
        ),
        "language=xx dependencies=true constituency=false": (
            "no dependency parser for 'xx'; .* Stanza publishes none; models that .*train.* on a treebank"
        ),
        "models=/nowhere": ("/nowhere has no tokenizer.pt, pos.pt, constituency.pt, vectors.pt; give the folder OUT/models"),
        "name=corenlp language=pt": "CoreNLP has no constituency parser for 'pt'",
        "name=corenlp endpoint=http://localhost:1": r"no server answers at .* and \$CORENLP_HOME holds no CoreNLP",
        **({} if torch.cuda.is_available() else {"device=cuda": "PyTorch sees no GPU"}),
    },
    settings(EvaluateSettings): {
        "untrained=true checkpoint=2": "checkpoint: untrained weights are those before the first update; leave one of",
        "seed=2": "seed: is of random_trees; leave it out",
        "bertscore.layer=17 bertscore.idf=true": "bertscore: needs bertscore.model; give it, or leave bertscore out",
        "comet.encoder=x": "comet: needs comet.model; give it, or leave comet out",
    },
    settings(ParseSettings): {
        "split=valid treebank=[wsj/23]": "split: is of the data set, but treebank gives other sentences; leave it out",
    },
    settings(ScoreLMSettings): {
        "pairs.good=sentence_good": r"pairs: needs pairs.files; give them, or leave pairs out",
        "blimp=b.zip pairs.by=[UID]": "pairs: needs pairs.files",
        "blimp=b.zip split=valid": "split: is of the data set, but this command reads other sentences; leave it out",
        "surprisal=a.txt split=test": "split: is of the data set",
    },
    settings(TrainParserConfig): {
        "seed=10000000000000": "seed: must be less than 8796093022208",
        "tags=upos treebanks={a: {brackets: {train: x}}, b: {conllu: {train: y}}}": "a has those of brackets.*; set tags=both",
        "seed=1": "must have either treebanks, with at least one, or treebank, a folder",
        "treebank=x treebanks.a.conllu.train=y": "must have either treebanks, with at least one, or treebank, a folder",
    },
    settings(Files): {
        "train=a sentences=b": "either train files, or documents, or sentences",
        "sentences=a test=b": "sentences make valid and test themselves",
    },
    settings(TreebankConfig): {"brackets.sentences=a conllu.sentences=b": "would split brackets and conllu differently"},
    settings(Retag): {"tag=NN words=( to=X": r"must be a regular expression, but '\(' is none: missing \)"},
}
# Options and settings of commands, in a folder with the file h.
REFUSED_COMMANDS = {
    "evaluate.py": {
        "hypotheses=h": "needs references; give data=DATA, references=FILE, or the folder of a run",
        "--compare h h": "two files need references",
        "--compare h h hypotheses=h": "leave hypotheses out",
        "hypotheses=h references=h data=d": "leave data out, or references",
        "--out a references=h": "needs hypotheses=FILE or --compare",
        "--out a target_language=German": "target_language: String should match pattern",
        "--out a buckets.depth=[4,2]": "must be ascending numbers",
        "--out a compare.num=3": "compare: needs --compare A B; give it, or leave compare out",
        "--out a --sample": "--sample: this command has none",
    },
    "control.py": {"--sample": "--sample: this command has none; leave it out"},
    "demo.py": {"--sample": "--sample: this command has none; leave it out"},
    "frozen_states.py": {"--sample --out a data=d encoder=e": "this command has no --sample"},
}


@pytest.mark.parametrize(
    ("read", "line", "message"),
    [pytest.param(read, line, said, id=line) for read, rows in REFUSED.items() for line, said in rows.items()],
)
def test_settings_are_refused(read, line, message, data, tmp_path, monkeypatch):
    monkeypatch.chdir(data.parent)
    monkeypatch.setenv("STANZA_RESOURCES_DIR", str(tmp_path))
    monkeypatch.delenv("CORENLP_HOME", raising=False)
    with pytest.raises(UserError, match=message) as error:
        read(re.split(r" (?=[\w.]+=)", line))  # values may have blanks
    one_line(error.value)


@pytest.mark.parametrize(
    ("script", "line", "message"), [(script, *row) for script, rows in REFUSED_COMMANDS.items() for row in rows.items()]
)
def test_options_are_refused(script, line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("h").write_text("a\n")
    with pytest.raises(UserError, match=message) as error:
        main_of(script)(line.split())
    one_line(error.value)

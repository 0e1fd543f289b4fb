"""Back-translation (Sennrich et al., 2016): more training pairs, from text of the target language.

    tree-attention back-translate --out OUT data=DATA text=[news.de.gz] ratio=2
    tree-attention back-translate --out OUT data=DATA text=[news.de.gz] run=RUN      RUN translates target to source

DATA is a finished data set of pairs. The command trains a model on its pairs in the other direction, unless `run` names one. It
translates the text, and puts the tag <bt> before each translation (Caswell et al., 2019). Then it preprocesses real and synthetic
pairs together, with the settings of DATA, into OUT/data. So synthetic sources get trees too. batch.corpora of a training weights
the synthetic pairs.

After an interruption, the same command continues.
"""

import argparse
import math
import shlex
from pathlib import Path
from typing import Any

from treenet.cli.shipped import CONFIGS, find_config
from treenet.cli.synthetic_pairs import (
    MADE,
    SIDES,
    BackTranslateConfig,
    MadeFiles,
    mix,
    pair_files,
    read_pairs,
    sample_lines,
    synthetic_pairs,
    write_pairs,
)
from treenet.config import OPERATIONAL, TrainConfig
from treenet.runs.checkpoint import AVERAGED, META
from treenet.runs.run_folder import FACTS, checkpoint_path, is_packed_run, unpack_run
from treenet.translation.settings import TranslateSettings
from treeproc.common.command_line import build_arg_parser, command, loading
from treeproc.common.errors import CommandEnded, quoted, rewording
from treeproc.common.files import atomic_write, file_sha256, locked, remove_leftovers
from treeproc.common.folder_kinds import BACK_TRANSLATION, claim_folder, is_same_file, mark_folder
from treeproc.common.messages import tell, warn
from treeproc.common.settings import (
    Effect,
    UserError,
    build_settings,
    differences,
    dump_settings,
    is_below,
    load_settings,
    refuse_relative_in_job,
    settings_with,
)
from treeproc.common.storage import AnyPath
from treeproc.online.input_files import read_raw_lines
from treeproc.parsers import ParserConfig, describe_parser
from treeproc.readers import read_lines
from treeproc.shards.schema import WINDOW_ROWS
from treeproc.shards.store import read_index, side_of, stage_folder
from treeproc.stages.job_report import summary
from treeproc.stages.keys import normalised
from treeproc.stages.preprocess import PreprocessConfig, preprocess

SYNTHETIC = "synthetic"
# The sizes of the default backward model are those of a shipped configuration: of the first that is for so few pairs.
_SIZES_FOR = ((20_000, "sample"), (100_000, "multi30k_en_de"), (1_000_000, "iwslt14_en_de"), (math.inf, "wmt14_en_de_base"))
# The files of text and pairs in OUT.
_OWN_TEXT = ("text.target", "text.translated", *(f"{name}.{side}" for name in ("train", SYNTHETIC) for side in SIDES))
_SIZES = ("d_model", "d_ff", "num_heads", "num_encoder_layers", "num_decoder_layers", "dropout")


class BackTranslation:
    """The steps of a back-translation in the folder `out`. Each step makes what is missing."""

    def __init__(self, config: BackTranslateConfig, out: Path):
        self.config, self.out, self.made = config, out, MadeFiles(out)
        index = read_index(stage_folder(config.data, "text"))
        parsed = load_settings(PreprocessConfig, stage_folder(config.data, "text").parent / "config.yaml")
        own = load_settings(PreprocessConfig, config.data / "config.yaml")
        if set(index["columns"]) != {"example_id", "source", "target"}:
            raise UserError(f"{config.data} must hold pairs of plain text, but its columns are {', '.join(index['columns'])}")
        if "train" not in index["totals"]:
            raise UserError(f"{config.data} has no train split, to which the new pairs are added; choose a data set that has one")
        if own.tree.side == "target":
            raise UserError(f"{config.data} has trees of the target side; choose a data set with tree.side=source")
        self._splits, self._fingerprint = index["totals"], index["fingerprint"]
        self._settings: dict[str, Any] = {
            "parser": parsed.parser,
            "target_parser": parsed.target_parser,
            "filters": parsed.filters,
            "normalization": parsed.normalization,
            "subwords": own.subwords,
            "tree": own.tree,
            "workers": config.workers,
        }
        if config.tag and parsed.parser.tags:
            raise UserError(
                f"tag: lines of {config.data} have tags already ({', '.join(parsed.parser.tags)}), and a line has one at most; "
                "give tag=null: the backward model then writes the tags of its pairs"
            )
        for path in config.text:
            if any(is_same_file(path, out / name) for name in _OWN_TEXT):
                raise UserError(f"text: {path} is a file that this command writes into --out; choose another --out")
        with loading():
            from treenet.layers.backend import choose_device  # here, as below, because it loads PyTorch

        if config.translate.workers == 0:
            choose_device(config.translate.use_gpu)
        if config.run is None:  # refusals come before the work
            backward = self._backward_config()
            if not (out / "backward" / AVERAGED).is_dir():
                with rewording({"use_gpu": "backward.use_gpu"}):
                    choose_device(backward.use_gpu and backward.workers == 0)
            if config.backward_parser is not None:
                with rewording({"parser.": "backward_parser."}):
                    describe_parser(config.backward_parser)
        self._refuse_forward_runs()

    def _backward_config(self) -> TrainConfig:
        """Return the settings of the backward model. Raises UserError if it could not translate, before it is trained."""
        given = self.config.backward.get("model", {})
        if not isinstance(given, dict):
            raise UserError(f"backward.model must be a section of settings, but is {quoted(given)}")
        model = {"name": "transformer"} | self._default_sizes()[0] | given
        backward = build_settings(TrainConfig, self.config.backward | {"data": self._backward_data, "model": model}, "backward")
        if backward.task != "translation":
            raise UserError(f"backward.task must be translation, but is {backward.task}")
        from treenet.data.input_kinds import LEAVES
        from treenet.jobs.train_job import check_validations
        from treenet.tasks.base import build_task
        from treenet.translation.translate import change_decoding

        if build_task(backward).reads is not LEAVES and self.config.backward_parser is None:
            raise UserError(
                f"backward.model.name: {backward.model.name} reads trees of the target language; give its parser as "
                "backward_parser={name: shipped, language: LANGUAGE}"
            )
        change_decoding(backward.decoding, self.config.translate.decoding)
        with rewording({"average": "backward.average", "patience": "backward.patience"}):
            check_validations(backward, self.config.data, self._splits)
        return backward

    def _refuse_forward_runs(self) -> None:
        """Raise UserError for a given run that learned from the pairs of `data`, and so translates source to target."""
        from treenet.runs.loading import data_of

        text = read_index(self.config.data / "encoded")["text_fingerprint"]
        for run in (self.config.run, *self.config.translate.ensemble):
            if run is None:
                continue
            folder = _folder_of(run)
            if not (folder / FACTS).exists():
                continue  # it is refused where it is loaded, as is one whose data set is gone
            encoded = data_of(folder, load_settings(TrainConfig, folder / "config.yaml")) / "encoded"
            there = read_index(encoded) if (encoded / "index.json").exists() else {}
            if there.get("text_fingerprint") == text and side_of(there) == "source":
                raise UserError(
                    f"{run} translates the source of {self.config.data} to its target; give a run of the other direction, or "
                    "leave run out: the command trains one"
                )

    def _default_sizes(self) -> tuple[dict[str, float], str]:
        """Return the sizes of the backward model that no setting gives, and where they come from."""
        begun, pairs = self.out / "backward" / "config.yaml", self._splits["train"]["rows"]
        name = next(name for most, name in _SIZES_FOR if pairs < most)
        config = load_settings(TrainConfig, begun if begun.exists() else CONFIGS / f"{name}.yaml", [f"data={self.config.data}"])
        why = "as it began" if begun.exists() else f"as in the configuration {name}, because there are {pairs:,} pairs"
        given = self.config.backward.get("model", {})
        return {name: getattr(config.model, name) for name in _SIZES if name not in given}, why

    @property
    def _backward_data(self) -> Path:
        return self.out / "backward_data"

    def __call__(self) -> dict:
        """Run the steps. Returns the index of the encoded stage of OUT/data."""
        self._write_real()
        text = self._choose_text()
        run = self.config.run or self._train_backward()
        tell("3/4  translate the text")
        translations = self._translate([run, *self.config.translate.ensemble], text)
        tell("4/4  preprocess real and synthetic pairs")
        splits = {split: [self._files(split)] for split in self._splits} | {"train": self._choose_train(text, translations)}
        parser = self._settings["parser"]
        if self.config.tag:
            parser = parser.model_copy(update={"tags": sorted([*parser.tags, self.config.tag])})
        return preprocess(self._preprocessing(splits, parser=parser), self.out / "data")

    def _preprocessing(self, splits: dict[str, list[list[Path]]], **settings: object) -> PreprocessConfig:
        """Return the settings of a data set, from pairs of files for each split."""
        paths = {split: dict(zip(SIDES, map(list, zip(*files, strict=True)), strict=True)) for split, files in splits.items()}
        return PreprocessConfig(splits=paths, **self._settings | settings)

    def _files(self, split: str) -> list[Path]:
        return pair_files(self.out / "real", split)

    def _write_real(self) -> None:
        (self.out / "real").mkdir(exist_ok=True)
        remove_leftovers(self.out / "real")
        for split in self._splits:
            if not self.made.has(f"real {split}", self._files(split), self._fingerprint):
                write_pairs(read_pairs(self.config.data, split), self._files(split))
                self.made.add(f"real {split}", self._files(split), self._fingerprint)

    def _train_backward(self) -> Path:
        """Train the model from target to source."""
        splits = {split: [self._files(split)[::-1]] for split in self._splits if split in ("train", "valid")}
        parser, tree = self.config.backward_parser, self._settings["tree"].model_dump()
        if parser is None:
            parser, tree = ParserConfig(name="words"), tree | {"tree_source": "flat"}
        elif not parser.constituency and self._settings["tree"].of_constituents:
            tree |= {"tree_source": "dependencies"}
        if parser.scores is False:
            tree |= {"min_parse_score": None, "min_parse_score_in": "train"}
        tell("1/4  preprocess the pairs in the other direction")
        swapped = {"source_script": "target_script", "target_script": "source_script"}
        filters = self._settings["filters"].model_dump()
        filters |= {name: filters[other] for name, other in swapped.items()}
        if self._settings["parser"].tags:  # in front of targets here, where these filters would take them for words
            filters |= dict.fromkeys(("max_ratio", *swapped))
        settings = {"parser": parser, "target_parser": None, "tree": tree, "filters": filters}
        preprocess(self._preprocessing(splits, **settings), self._backward_data)
        tell("2/4  train the model from target to source")
        sizes, why = self._default_sizes()
        if sizes:
            values = " ".join(f"backward.model.{name}={value}" for name, value in sizes.items())
            tell(f"  {values}: {why}; give others to change them")
        from treenet.jobs.train_run import STOPPED_BY_SIGTERM, describe_run, run_training

        try:
            summary_of_run = run_training(self._backward_config(), self.out / "backward")
        except UserError as error:
            raise UserError(f"the backward model, whose settings begin with backward.: {error}") from None
        if not summary_of_run.finished:
            raise CommandEnded(STOPPED_BY_SIGTERM, "stopped before the end; the same command continues")
        tell(describe_run(summary_of_run))
        return self.out / "backward"

    def _choose_text(self) -> Path:
        """Return the file of the lines to translate. A text that cannot be read is refused before hours of training."""
        config, text = self.config, self.out / "text.target"
        wanted = max(1, round(config.ratio * self._splits["train"]["rows"]))
        inputs = [wanted, [file_sha256(path) for path in config.text]]
        if not self.made.has("text", [text], *inputs):
            chosen, total = sample_lines(config.text, wanted, text)
            try:
                next(read_raw_lines(text, None, None), None)  # as the translation reads it
            except UserError as error:
                why = str(error).removeprefix(str(text)).removeprefix(", line 1").removeprefix(":").strip()
                raise UserError(f"text: {', '.join(map(str, config.text))}: {why}") from None
            tell(f"  {chosen:,} of {total:,} lines of text, for {wanted:,} synthetic pairs")
            self._tell_references(text, chosen)
            self.made.add("text", [text], *inputs)
        return text

    def _tell_references(self, text: Path, chosen: int) -> None:
        """Warn of lines of the text that are targets of valid or test."""
        pairs = (pair for split in self._splits if split != "train" for pair in read_pairs(self.config.data, split))
        references = {key for _, target in pairs for key in normalised([target])} - {""}
        found = [line for line in read_lines([text]) if normalised([line])[0] in references]
        if found:
            warn(
                f"warning: {len(found):,} of {chosen:,} chosen lines of text are targets of valid or test too, except for case, "
                f"punctuation and blanks, so scores may be too high; for example {quoted(found[0])}; remove them from the text, "
                "and choose another --out"
            )

    def _translate(self, runs: list[AnyPath], text: Path) -> Path:
        """Return the file of the translations of `text`."""
        config, translations = self.config, self.out / "text.translated"
        folders = list(map(_folder_of, runs))
        weights = [checkpoint_path(folder, name) / META for folder in folders for name in config.translate.checkpoints]
        inputs = [
            file_sha256(text),
            config.translate.model_dump(mode="json", exclude=settings_with(TranslateSettings, Effect.NONE)),
        ]
        inputs += [path.read_text(encoding="utf-8") for path in weights if path.exists()]
        if not self.made.has("translations", [translations], *inputs):
            settings = config.translate.model_copy(update={"output": translations})
            from treenet.translation.translate_job import translate_lines

            total = sum(1 for _ in read_raw_lines(text, None, None))
            lines = read_raw_lines(text, None, None)
            translate_lines(lines, settings, runs, name=str(text), total=total)
            self.made.add("translations", [translations], *inputs)
        return translations

    def _choose_train(self, text: Path, translations: Path) -> list[list[Path]]:
        """Return the files of the training pairs: real ones, then synthetic ones.

        They are one file, evenly mixed, if training cannot shuffle all of them at once.
        """
        tag, num_real, real = self.config.tag, self._splits["train"]["rows"], self._files("train")
        own_tags = self._settings["parser"].tags
        inputs = [self._fingerprint, file_sha256(text), file_sha256(translations), tag]
        count = sum(1 for _ in synthetic_pairs(translations, text, tag))
        if not count:
            raise UserError(f"{translations} has no translation; is the backward model trained?")
        is_mixed = num_real + count > WINDOW_ROWS
        step, name = ("mixture", "train") if is_mixed else ("synthetic pairs", SYNTHETIC)
        files = pair_files(self.out, name)
        if not self.made.has(step, files, *inputs):
            synthetic = synthetic_pairs(translations, text, tag, own_tags)
            pairs = mix(read_pairs(self.config.data, "train"), num_real, synthetic, count) if is_mixed else synthetic
            write_pairs(pairs, files)
            lines = sum(1 for _ in read_raw_lines(text, None, None))
            left_out = f"; {lines - count:,} lines without a translation are left out" if lines > count else ""
            tell(f"  {num_real:,} real and {count:,} synthetic pairs{left_out}")
            self.made.add(step, files, *inputs)
        return [files] if is_mixed else [real, files]


def _folder_of(run: AnyPath) -> AnyPath:
    """Return the folder of a run, which a zip is unpacked into."""
    return unpack_run(run) if is_packed_run(run) else run


def claim(config: BackTranslateConfig, out: Path) -> None:
    """Write OUT/config.yaml. Raises UserError if a step was made with other settings."""
    path = out / "config.yaml"
    if path.exists() and (out / MADE).exists():
        before = load_settings(BackTranslateConfig, path)
        old, new = (
            one.model_dump(mode="json", exclude=settings_with(BackTranslateConfig, Effect.NONE)) for one in (before, config)
        )
        begun = (out / "backward" / AVERAGED).is_dir() or any((out / "backward" / "checkpoints").glob("step_*"))
        changed = [
            line
            for line in differences(old, new)
            if not line.startswith("backward.")
            or (begun and not is_below(line.partition(":")[0].removeprefix("backward."), OPERATIONAL))
        ]
        if before.run and not config.run and MadeFiles(out).began("translations"):  # hours before those are compared
            changed.append(f"run: {before.run} -> null")
        if changed:
            trained = out / "backward" / AVERAGED
            keep = f", with run={trained.parent} to keep its backward model" if trained.is_dir() else ""
            raise UserError(
                f"{out} belongs to other settings ({'; '.join(changed)}); choose another --out{keep}, or give the old settings"
            )
    atomic_write(path, dump_settings(config).encode())


@command(lambda: build_arg_parser(__doc__, BackTranslateConfig, find_config=find_config))
def main(args: argparse.Namespace) -> None:
    if args.out is None or args.sample:
        raise UserError("give --out DIR, data=DATA and text=[FILE] (this command has no --sample)")
    config = load_settings(BackTranslateConfig, args.config, args.overrides)
    paths = {"--out": args.out, "data": config.data, "run": config.run} | {f"text.{i}": p for i, p in enumerate(config.text)}
    paths |= {f"translate.ensemble.{i}": path for i, path in enumerate(config.translate.ensemble)}
    refuse_relative_in_job(paths)
    out = args.out.absolute()
    claim_folder(out, BACK_TRANSLATION)
    work = BackTranslation(config, out)  # it refuses settings that do not fit, which leave no folder
    mark_folder(out, BACK_TRANSLATION)
    with locked(out):
        claim(config, out)
        index = work()
    print(summary(index, out / "data"))
    print(f"  train: tree-attention train --config FILE.yaml --out RUN data={shlex.quote(str(out / 'data'))}")
    if (out / f"{SYNTHETIC}.source").exists():
        print(f"  synthetic pairs half as often: 'batch.corpora={{{SYNTHETIC}.source: 0.5}}'")

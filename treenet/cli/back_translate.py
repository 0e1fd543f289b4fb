"""Back-translation (Sennrich et al., 2016): more training pairs, from text of the target language.

    python workflows/back_translate.py --out OUT data=DATA text=[news.de.gz] ratio=2
    python workflows/back_translate.py --out OUT data=DATA text=[news.de.gz] run=RUN      RUN translates target to source

DATA is a finished data set of pairs. The command trains a model on its pairs in the other direction, unless `run` names one. It
translates the text, and puts the tag <bt> before each translation (Caswell et al., 2019). Then it preprocesses real and synthetic
pairs together, with the settings of DATA, into OUT/data. So synthetic sources get trees too.

After an interruption, the same command continues.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from treenet.cli.made_files import MadeFiles
from treenet.cli.shipped import find_config
from treenet.cli.synthetic_pairs import mix, pair_files, read_pairs, sample_lines, synthetic_pairs, write_pairs
from treenet.config import TrainConfig
from treenet.jobs.train_run import STOPPED_BY_SIGTERM, describe_run, run_training
from treenet.runs.checkpoint import META
from treenet.runs.chosen_checkpoint import checkpoint_path
from treenet.translation.line_translator import TranslateSettings
from treenet.translation.translate_job import translate_lines
from treeproc.common.command_names import as_called
from treeproc.common.errors import CommandEnded
from treeproc.common.files import atomic_write, file_sha256, locked
from treeproc.common.setting_effects import Effect, excluded
from treeproc.common.settings import (
    Settings,
    UserError,
    build_arg_parser,
    build_settings,
    differences,
    dump_settings,
    load_settings,
    refuse_relative_in_job,
)
from treeproc.common.storage import AnyPath, DataPath
from treeproc.job.job_report import summary
from treeproc.job.preprocess import PreprocessConfig, preprocess
from treeproc.online.raw_lines import RawLineEncoder, read_raw_lines
from treeproc.parsers import ParserConfig
from treeproc.parsers.config import TAG_FORM
from treeproc.shards.store import read_index, stage_folder

# What this command decides itself.
_OWN = ("input", "trees", "score", "output", "nbest", "scores", "json_lines")


class BackTranslateConfig(Settings):
    """Settings of back-translation."""

    data: Annotated[DataPath, Effect.NONE] = Field(description="finished data set of real pairs, of workflows/preprocess.py")
    text: Annotated[list[DataPath], Effect.NONE] = Field(
        min_length=1, description="text of the target language, one sentence a line, plain or .gz"
    )
    ratio: float = Field(1.0, gt=0, description="synthetic pairs for each real pair; fewer if the text has fewer lines")
    tag: Annotated[str, Field(pattern=TAG_FORM)] | None = Field(
        "<bt>", description="first word of synthetic sources, a leaf that no parser reads; null: none"
    )
    run: Annotated[DataPath | None, Effect.NONE] = Field(
        None, description="finished run that translates target to source; null: the command trains one in OUT/backward"
    )
    backward: dict[str, Any] = Field(
        {}, description="settings of that training, as for workflows/train_wmt.py; the default model is a transformer"
    )
    backward_parser: ParserConfig | None = Field(
        None, description="parser of the target language, for a backward model that reads trees; null: none"
    )
    translate: TranslateSettings = Field(TranslateSettings(), description="translation, as for workflows/translate.py")
    workers: Annotated[Literal[0] | None, Effect.NONE] = Field(
        None, description="0: preprocess in this process, without Ray; unset: as many Ray actors as there is room for"
    )

    @model_validator(mode="after")
    def _check_translate(self):
        if chosen := [name for name in _OWN if getattr(self.translate, name) != getattr(TranslateSettings(), name)]:
            raise ValueError(f"translate.{chosen[0]}: this command chooses it; leave it out")
        if "data" in self.backward:
            raise ValueError("backward.data: this command makes that data set; leave it out")
        return self


class BackTranslation:
    """The steps of a back-translation in the folder `out`. Each step makes what is missing."""

    def __init__(self, config: BackTranslateConfig, out: Path):
        self.config, self.out, self.made = config, out, MadeFiles(out)
        index = read_index(stage_folder(config.data, "text"))
        parsed = load_settings(PreprocessConfig, stage_folder(config.data, "text").parent / "config.yaml")
        own = load_settings(PreprocessConfig, config.data / "config.yaml")
        if set(index["columns"]) != {"example_id", "source", "target"}:
            raise UserError(f"{config.data} must hold pairs of plain text, but its columns are {', '.join(index['columns'])}")
        if own.tree.side == "target":
            raise UserError(f"{config.data} has trees of the target side; choose a data set with tree.side=source")
        self._splits, self._fingerprint = index["totals"], index["fingerprint"]
        self._settings: dict[str, Any] = {
            "parser": parsed.parser,
            "target_parser": parsed.target_parser,
            "filters": parsed.filters,
        }
        self._settings |= {"filters": parsed.filters, "subwords": own.subwords, "tree": own.tree, "workers": config.workers}
        if config.tag in parsed.parser.tags:
            raise UserError(f"tag: {config.tag} is a tag of {config.data} already; choose another one, or null")

    def __call__(self) -> dict:
        """Run the steps. Returns the index of the encoded stage of OUT/data."""
        self._write_real()
        run = self.config.run or self._train_backward()
        print("3/4  translate the text", flush=True)
        text, translations = self._translate(run)
        print("4/4  preprocess real and synthetic pairs", flush=True)
        splits = {split: self._files(split) for split in self._splits} | {"train": self._mix(text, translations)}
        parser = self._settings["parser"]
        if self.config.tag:
            parser = parser.model_copy(update={"tags": sorted([*parser.tags, self.config.tag])})
        return preprocess(self._preprocessing(splits, parser=parser), self.out / "data")

    def _preprocessing(self, splits: dict[str, list[Path]], **settings: object) -> PreprocessConfig:
        paths = {split: {"source": [source], "target": [target]} for split, (source, target) in splits.items()}
        return PreprocessConfig(splits=paths, **self._settings | settings)

    def _files(self, split: str) -> list[Path]:
        return pair_files(self.out / "real", split)

    def _write_real(self) -> None:
        (self.out / "real").mkdir(exist_ok=True)
        for split in self._splits:
            if not self.made.has(f"real {split}", self._files(split), self._fingerprint):
                write_pairs(read_pairs(self.config.data, split), self._files(split))
                self.made.add(f"real {split}", self._files(split), self._fingerprint)

    def _train_backward(self) -> Path:
        """Train the model from target to source."""
        splits = {split: self._files(split)[::-1] for split in self._splits if split in ("train", "valid")}
        parser, tree = self.config.backward_parser, self._settings["tree"].model_dump()
        if parser is None:
            parser, tree = ParserConfig(name="words"), tree | {"tree_source": "flat"}
        print("1/4  preprocess the pairs in the other direction", flush=True)
        data = self.out / "backward_data"
        swapped = {"source_script": "target_script", "target_script": "source_script"}
        filters = self._settings["filters"].model_dump()
        filters |= {name: filters[other] for name, other in swapped.items()}
        preprocess(self._preprocessing(splits, parser=parser, target_parser=None, tree=tree, filters=filters), data)
        print("2/4  train the model from target to source", flush=True)
        values = self.config.backward | {"data": data, "model": {"name": "transformer"} | self.config.backward.get("model", {})}
        summary_of_run = run_training(build_settings(TrainConfig, values, "backward"), self.out / "backward")
        if not summary_of_run.finished:
            raise CommandEnded(STOPPED_BY_SIGTERM, "stopped before the end; the same command continues")
        print(describe_run(summary_of_run), flush=True)
        return self.out / "backward"

    def _translate(self, run: AnyPath) -> tuple[Path, Path]:
        """Return the files of the chosen lines and of their translations."""
        config, text, translations = self.config, self.out / "text.target", self.out / "text.translated"
        wanted = max(1, round(config.ratio * self._splits["train"]["rows"]))
        inputs = [wanted, [file_sha256(path) for path in config.text]]
        if not self.made.has("text", [text], *inputs):
            chosen, total = sample_lines(config.text, wanted, text)
            print(f"  {chosen:,} of {total:,} lines of text, for {wanted:,} synthetic pairs", flush=True)
            self.made.add("text", [text], *inputs)
        weights = [(checkpoint_path(run, name) / META) for name in config.translate.checkpoints]
        inputs = [file_sha256(text), config.translate.model_dump(mode="json", exclude=excluded(TranslateSettings, Effect.NONE))]
        inputs += [path.read_text(encoding="utf-8") for path in weights if path.exists()]
        if not self.made.has("translations", [translations], *inputs):
            settings = config.translate.model_copy(update={"output": translations})
            total = sum(1 for _ in read_raw_lines(text, None, None))
            lines = read_raw_lines(text, None, None)
            translate_lines(lines, settings, [run], RawLineEncoder, name=str(text), total=total)
            self.made.add("translations", [translations], *inputs)
        return text, translations

    def _mix(self, text: Path, translations: Path) -> list[Path]:
        """Return the files of real and synthetic pairs."""
        files, tag = pair_files(self.out, "train"), self.config.tag
        inputs = [self._fingerprint, file_sha256(text), file_sha256(translations), tag]
        if not self.made.has("mixture", files, *inputs):
            count = sum(1 for _ in synthetic_pairs(translations, text, tag))
            if not count:
                raise UserError(f"{translations} has no translation; is the backward model trained?")
            real, num_real = read_pairs(self.config.data, "train"), self._splits["train"]["rows"]
            write_pairs(mix(real, num_real, synthetic_pairs(translations, text, tag), count), files)
            lines = sum(1 for _ in read_raw_lines(text, None, None))
            left_out = f"; {lines - count:,} lines without a translation are left out" if lines > count else ""
            print(f"  {num_real:,} real and {count:,} synthetic pairs{left_out}", flush=True)
            self.made.add("mixture", files, *inputs)
        return files


def claim(config: BackTranslateConfig, out: Path) -> None:
    """Write OUT/config.yaml. Raises UserError if the folder is of other settings."""
    path = out / "config.yaml"
    if path.exists():
        old, new = (
            one.model_dump(mode="json", exclude=excluded(BackTranslateConfig, Effect.NONE))
            for one in (load_settings(BackTranslateConfig, path), config)
        )
        if changed := differences(old, new):
            raise UserError(
                f"{out} belongs to other settings ({'; '.join(changed)}); choose another --out, or give the old settings"
            )
    atomic_write(path, dump_settings(config).encode())


def main(argv: Sequence[str]) -> None:
    args = build_arg_parser(__doc__, BackTranslateConfig, find_config=find_config).parse_intermixed_args(argv)
    if args.out is None or args.sample:
        raise UserError("give --out DIR, data=DATA and text=[FILE] (this command has no --sample)")
    config = load_settings(BackTranslateConfig, args.config, args.overrides)
    paths = {"--out": args.out, "data": config.data, "run": config.run} | {f"text.{i}": p for i, p in enumerate(config.text)}
    refuse_relative_in_job({name: path for name, path in paths.items() if path is not None})
    logging.basicConfig(format="%(message)s")
    logging.getLogger("treeproc").setLevel(logging.INFO)
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        claim(config, out)
        index = BackTranslation(config, out)()
    print(summary(index, out / "data"))
    print(as_called(f"  train: python workflows/train_wmt.py --config FILE.yaml --out RUN data={out / 'data'}"))

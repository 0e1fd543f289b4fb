"""A run that needs neither its data set nor its checkpoints: weights in safetensors, settings and vocabulary."""

import shutil
from pathlib import Path

from treenet.extras.export.folder import index_without_shards, read_vocabulary, write_export
from treenet.runs.checkpoint import AVERAGED, META, WEIGHTS, publish, read_meta
from treenet.runs.chosen_checkpoint import checkpoint_folder
from treenet.runs.loading import HELD_DATA, LoadedRun
from treenet.runs.run_json import FACTS
from treeproc.common.files import json_bytes
from treeproc.common.settings import dump_settings


def export_run(run_dir: Path, run: LoadedRun, out: Path, checkpoint: str) -> None:
    """Write a run folder that `load_run` and all commands read that translate: `out`, with the vocabulary in `out`/data.

    The weights are a copy, byte for byte, of those of `checkpoint`. Raises UserError as `write_export` does.
    """
    weights, held = checkpoint_folder(run_dir, checkpoint), f"{HELD_DATA}/encoded"
    meta = {name: value for name, value in read_meta(weights).items() if name not in ("files", "sha256")}

    def fill(folder: Path) -> list[str]:
        (folder / held / "vocab").mkdir(parents=True)
        (folder / "config.yaml").write_text(dump_settings(run.config.model_copy(update={"data": Path(HELD_DATA)})), "utf-8")
        shutil.copyfile(run_dir / FACTS, folder / FACTS)
        publish(folder / AVERAGED, {WEIGHTS: lambda path: shutil.copyfile(weights / WEIGHTS, path)}, meta)
        (folder / held / "index.json").write_bytes(json_bytes(index_without_shards(run)))
        vocabulary = {f"{held}/{name}": content for name, content in read_vocabulary(run).items()}
        for name, content in vocabulary.items():
            (folder / name).write_bytes(content)
        return ["config.yaml", FACTS, f"{AVERAGED}/{WEIGHTS}", f"{AVERAGED}/{META}", f"{held}/index.json", *vocabulary]

    write_export(out, run, "safetensors", fill)

"""`tree-attention verify DATA`: reads every file and every row of a data set, and lists every problem.

To repair damaged and missing files, run the job again. It does not repair a row that breaks a rule although the hash of its file
is right, because the row was written that way. The command uses all cores of the machine, or a Ray cluster with `--ray`.
"""

import argparse
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from treeproc.common.command_line import ArgumentParser, command, run_cli
from treeproc.common.errors import CommandEnded, printable
from treeproc.common.messages import Progress
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath, as_path
from treeproc.inspection.checks import Problem, StageFindings
from treeproc.inspection.shard_verifier import STAGES, ShardVerifier, file_problem, schema_facts
from treeproc.shards.lengths import SIZE_COUNTS
from treeproc.shards.shard import Shard, check_stage
from treeproc.shards.store import Index, read_index, stage_folder
from treeproc.stages.run_jobs import run_here
from treeproc.subwords import LabelVocab, load_pieces

# Processes cost a second or two.
_FEW_ROWS = 20_000


@dataclass
class Verification:
    """The result of a verification: numbers of shards and rows read, and the problems found."""

    problems: list[Problem] = field(default_factory=list)
    shards: int = 0
    rows: int = 0


def stage_folders(data: AnyPath) -> dict[str, AnyPath]:
    """Return the folders of the stages; below `data` when the encoded stage has no index."""
    try:
        return {stage: stage_folder(data, stage) for stage in STAGES}
    except UserError:
        return {stage: data / stage for stage in STAGES}


def verify(data: AnyPath, *, on_ray: bool = False) -> Verification:
    """Check all stages of a data set, on all cores or on a Ray cluster. Raises UserError if `data` holds none."""
    folders = stage_folders(data)
    if not any(folder.exists() for folder in folders.values()):
        raise UserError(f"{data} is not a data set; give the --out folder of tree-attention preprocess")
    report = Verification()
    indices: dict[str, Index] = {}
    for stage, folder in folders.items():
        try:
            index = read_index(folder)
            index.records()  # a part may be damaged
            indices[stage] = index
        except UserError as error:
            report.problems.append(Problem(folder / "index.json", str(error).removeprefix(f"{folder / 'index.json'} ")))
    for stage in indices if "encoded" in indices else ():
        if folders[stage] != data / stage:  # those of `parsed`, which may be another data set now
            try:
                check_stage(data, stage)
            except UserError as error:
                report.problems.append(Problem(data / "encoded", str(error), mendable=False))
    stages = {stage: StageFindings(folders[stage], index.records()) for stage, index in indices.items()}
    with Progress("verify", sum(stage.rows for stage in stages.values()), unit="rows") as progress:
        _verify_shards(data if on_ray else None, indices, stages, progress)
        for name, findings in stages.items():
            report.problems += findings.problems(indices[name].get("files", {}))
            findings.note_hashes()
            report.shards += len(findings.records)
            report.rows += findings.rows
        if "encoded" in stages:
            report.problems += stages["encoded"].sizes_problems(_has_counts(indices))
        progress.update(0, f"{len(report.problems):,} problems")  # with those of files that are no shards
    return report


def _verify_shards(
    on_ray: AnyPath | None, indices: Mapping[str, Index], stages: Mapping[str, StageFindings], progress: Progress
) -> None:
    """Verify the shards. `on_ray` is a folder that all nodes of the cluster must see."""
    arguments = {
        "folders": {name: stage.folder for name, stage in stages.items()},
        "columns": {name: index.get("columns") for name, index in indices.items()},
        "first": {name: _first_schema(stage) for name, stage in stages.items()},
        "sizes": _vocabulary_sizes(stages["encoded"].folder, indices["encoded"]) if "encoded" in stages else {},
        "shard_rows": stages["encoded"].shard_rows() if _has_counts(indices) else None,
    }
    names = list(dict.fromkeys(name for stage in stages.values() for name in stage.places))
    jobs, processes = [_job(name, stages) for name in names], len(os.sched_getaffinity(0))
    if on_ray is not None:
        from treeproc.common.ray_session import start_ray  # whoever needs no Ray does not load it
        from treeproc.stages.ray_job import run_on_ray

        start_ray(instead="or leave --ray out")
        results = run_on_ray(ShardVerifier, arguments, jobs, folder=on_ray)
    else:
        many = sum(stage.rows for stage in stages.values()) > _FEW_ROWS
        results = run_here(ShardVerifier, arguments, jobs, processes if many else 1, "verified shards")
    problems = 0
    for number, result in results:
        counts = [stages[name].add(names[number], facts) for name, facts in result.items()]
        problems += sum(found for _, found in counts)
        progress.update(sum(rows for rows, _ in counts), f"{problems:,} problems")


def _has_counts(indices: Mapping[str, Index]) -> bool:
    return "encoded" in indices and SIZE_COUNTS in indices["encoded"].get("files", {})


def _job(name: str, stages: Mapping[str, StageFindings]) -> dict:
    """Return the job of `ShardVerifier` for the shards of one name."""
    job: dict = {"start": 0}
    for stage, findings in stages.items():
        if name in findings.places:
            place = findings.places[name]
            job[stage] = findings.records[place]
            job["start"] = findings.starts[place]  # of the last stage, which is the encoded one where lengths are compared
    return job


def _first_schema(stage: StageFindings) -> list[list[str]] | None:
    """Return the schema of the first sound shard, which all others must have."""
    for record in stage.records:
        with suppress(UserError):
            if not file_problem(stage.folder, record):
                return schema_facts(Shard(stage.folder, record))
    return None


def _vocabulary_sizes(folder: AnyPath, index: dict) -> dict[str, int]:
    """Return the upper bounds of ids. They are from the index when a vocabulary file is damaged, which is reported elsewhere."""
    sizes = {"pieces": index["num_pieces"], "labels": index["num_labels"], "pos_tags": 1 << 15}
    sizes |= {"classes": index["num_classes"]} if "num_classes" in index else {}
    try:
        vocab = folder / "vocab"
        found = {name: len(LabelVocab.load(vocab / f"{name}.txt")) for name in ("labels", "pos_tags")}
        return sizes | found | {"pieces": len(load_pieces(vocab))}
    except (OSError, ValueError, UserError):
        return sizes


def advice(report: Verification, data: AnyPath) -> str:
    """Return the last line: what to do."""
    read = f"{report.shards:,} shards, {report.rows:,} rows read"
    if not report.problems:
        return f"{read}: no problem found"
    files = len(Counter(problem.path for problem in report.problems))
    found = f"{read}: {len(report.problems):,} problems in {files} files"
    if all(problem.mendable for problem in report.problems):
        owners = [f.parent for f in stage_folders(data).values() if any(str(p.path).startswith(f"{f}/") for p in report.problems)]
        jobs = [f"tree-attention preprocess --config {owner / 'config.yaml'} --out {owner}" for owner in dict.fromkeys(owners)]
        return f"{found}; run the job again, which makes only the damaged files: {' && '.join(jobs)}"
    return f"{found}; some wrong rows have the right hash, so the job wrote them like this: run it into a new --out"


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="tree-attention verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=as_path, metavar="DATA", help="a data set of tree-attention preprocess: a folder or a URI")
    parser.add_argument("--ray", action="store_true", help="on Ray; every node of a cluster must see DATA")
    return parser


@command(_parser)
def main(args: argparse.Namespace) -> None:
    data, report = args.data, verify(args.data, on_ray=args.ray)
    for problem in report.problems:
        print(printable(str(problem)))
    print(advice(report, data))
    if report.problems:
        raise CommandEnded(2)


if __name__ == "__main__":
    run_cli(main)

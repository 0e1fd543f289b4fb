"""The dry run of a preprocessing job: its work and time, estimated from the text stage and a few hundred parsed sentences."""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from treeproc.common.messages import format_seconds, phase
from treeproc.common.ray_session import start_ray, there_is_a_cluster
from treeproc.parsers import describe_in_words
from treeproc.shards.shard import Shard
from treeproc.shards.store import ShardRecord, write_shard
from treeproc.stages.job_report import count_lines, fallbacks
from treeproc.stages.parse_and_encode import ParseShard
from treeproc.stages.preprocess import PreprocessConfig, text_alone

_PROBE_ROWS = 500


def dry_run(config: PreprocessConfig, begun: Mapping | None = None) -> str:
    """Filter all input into a temporary folder, parse a sample of it, and report.

    `begun` has the settings of a data set that the job continues. Raises UserError as the job would.
    """
    config = config.settled(begun)
    with tempfile.TemporaryDirectory(prefix="tree-attention-") as name:
        folder = Path(name)
        config, parser, records = text_alone(config, folder)
        probe = write_probe(folder, records)
        started = time.monotonic()
        with phase("loading the parser"):
            worker = ParseShard(folder, config.parser, config.target_parser)
        loaded = time.monotonic()
        (folder / "parsed").mkdir()
        with phase("parsing a sample"):
            parsed = worker(text=probe, fingerprint="probe")
        seconds = time.monotonic() - loaded
    actors, where = _workers(config)
    actors = min(actors, len(records))
    rate = probe.rows / seconds
    total = sum(record.rows for record in records)
    failures = fallbacks(parsed.counts)
    expected = total / (rate * actors) + loaded - started
    lines = [
        "dry run: the command writes nothing to --out",
        *count_lines(records),
        f"  parser: {describe_in_words(parser)}",
        f"  plan: {len(records):,} shards of up to {config.rows_per_shard:,} input examples, {actors} at a time {where}",
        f"  probe: {probe.rows:,} examples in {seconds:.1f} s, {rate:,.1f} examples/s by one worker, {failures} without a parse",
        f"  parsing takes about {expected / 3600:.2f} hours ({format_seconds(expected)})",
    ]
    return "\n".join(lines)


def _workers(config: PreprocessConfig) -> tuple[int, str]:
    """Return the number of shards that the job would process at a time, and the place. Asks Ray only where there is a cluster."""
    if config.workers == 0:
        return 1, "in this process"
    if there_is_a_cluster():
        from treeproc.stages.ray_job import actor_pool  # a dry run on one machine must not load Ray

        start_ray()
        return actor_pool(config.parser.gpus_per_actor), "on the Ray cluster"
    if config.parser.gpus_per_actor and config.parser.torch_device().type == "cuda":
        import torch

        return torch.cuda.device_count() // config.parser.gpus_per_actor, "on this machine's GPUs"
    return len(os.sched_getaffinity(0)), "on this machine's cores"


def write_probe(folder: Path, records: Sequence[ShardRecord]) -> ShardRecord:
    """Write one shard of rows that lie evenly over all shards, so that their lengths are those of the whole."""
    total = sum(record.rows for record in records)
    wanted = {i * total // min(total, _PROBE_ROWS) for i in range(min(total, _PROBE_ROWS))}
    rows, schema, before = [], None, 0
    for record in records:
        places = [place - before for place in range(before, before + record.rows) if place in wanted]
        before += record.rows
        if places:
            shard = Shard(folder / "text", record)
            schema = shard.schema
            rows += [shard.row(place) for place in places]
    return write_shard(folder / "text", "probe.arrow", rows, schema, split="train", index=0, fingerprint="probe")

"""Text stage and vocabulary: in one process, and on Ray with one actor and with two; memory and time of the driver.

    python benchmarks/preprocess_text.py                 # 1 and 4 million pairs, two rounds of each way, in turn
    python benchmarks/preprocess_text.py --quick         # 40,000 pairs, one round
    python benchmarks/preprocess_text.py --shares        # CPU time of tasks and driver, without Ray
    python benchmarks/preprocess_text.py --empty 64      # only the driver's time a job of empty work, up to 64 actors

The pairs are those of preprocess_million.py. Every run is a separate process, with an
embedded Ray of as many CPUs as actors. `rows_per_second` is by the wall clock, which shows other work of the machine too;
`cpu_microseconds_per_row` is the CPU time of actors and driver, `driver_cpu_s` that of the driver. Prints JSON lines.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from preprocess_million import read_pairs, write_inputs

from treeproc.job.ray_job import _packed, _unpacked
from treeproc.job.text_on_ray import TextOnRay, remove_work, work_folder
from treeproc.job.text_work import TextHere, TextWork
from treeproc.parsers import ParserConfig
from treeproc.shards.shard_size import auto_rows_per_shard
from treeproc.shards.store import ShardRecord
from treeproc.stages.encode import TreeConfig
from treeproc.stages.filters import FilterConfig
from treeproc.stages.line_lists import DROPPED, line_list
from treeproc.stages.notices import TextNotices, Wanted
from treeproc.stages.parse import ParseShard
from treeproc.stages.running import run_here
from treeproc.stages.text import Inputs, SplitFiles
from treeproc.stages.vocabulary import count_vocabulary
from treeproc.subwords import SubwordConfig

FILTERS = FilterConfig(drop_duplicates=True, drop_overlap="source")
WANTED = {"source": Wanted(("escapes", "tokens", "placeholders", "sentences"), "en")}


def emit(case: str, metric: str, value: float, **more: object) -> None:
    print(
        json.dumps({"benchmark": "preprocess_text", "case": case, "metric": metric, "value": round(value, 2), **more}), flush=True
    )


def inputs_of(folder: Path) -> Inputs:
    files = SplitFiles(source=[folder / "source"], target=[folder / "target"])
    return Inputs({"train": files, "valid": SplitFiles(hold_out=1000)}, "parallel", "none", None)


class Usage:
    """Runs jobs in `actors` actors, and adds up the resources that they use."""

    def __init__(self, actors: int, folder: Path):
        import ray

        os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
        for try_again in (True, True, False):  # Ray may not start in time on a busy machine
            try:
                ray.init(address="local", num_cpus=actors, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
                break
            except Exception:
                ray.shutdown()
                if not try_again:
                    raise
        self.cpu_s, self._folder = 0.0, folder
        for _ in self(Empty, {}, [{"number": number} for number in range(2 * actors)]):  # Ray starts its processes
            pass
        self.cpu_s = 0.0

    def __call__(self, worker: type, arguments: dict, jobs: list[dict]) -> Iterator[tuple[int, object]]:
        from treeproc.job.ray_job import run_jobs

        return run_jobs(worker, arguments, jobs, folder=self._folder, count_usage=self._count)

    def _count(self, usage: dict) -> None:
        self.cpu_s += usage["cpu_s"]


class Empty:
    """A worker without work."""

    def __call__(self, number: int) -> int:
        return number


class Shares:
    """Runs jobs in this process, and keeps their CPU time apart from that of the driver."""

    def __init__(self) -> None:
        self.cpu_s, self.jobs = 0.0, 0

    def __call__(self, worker: type, arguments: dict, jobs: list[dict]) -> Iterator[tuple[int, object]]:
        self.jobs += len(jobs)
        began = time.process_time()
        built = worker(**arguments) if jobs else None
        for number, job in enumerate(jobs):
            result = json.loads(json.dumps(_packed(built(**_through_json(job)))))
            self.cpu_s += time.process_time() - began
            yield number, _unpacked(result)
            began = time.process_time()


def _through_json(job: dict) -> dict:
    packed = json.loads(json.dumps({name: _packed(value) for name, value in job.items()}))
    return {name: _unpacked(value) for name, value in packed.items()}


def shares(folder: Path, out: Path) -> None:
    """Print the CPU time of tasks and of the driver, without Ray's own: by the clock of one process."""
    for case, work in (("text", text), ("vocabulary", vocabulary)):
        run = Shares()
        found = work(folder, run, out)
        rows = found["rows"]
        emit(f"{case}_{rows}_tasks", "cpu_microseconds_per_row", run.cpu_s / rows * 1e6, jobs=run.jobs)
        emit(f"{case}_{rows}_driver", "cpu_microseconds_per_row", (found["driver_cpu_s"] - run.cpu_s) / rows * 1e6)
        if case == "text":
            parse(out)
        else:
            emit(f"vocabulary_{rows}", "distinct_words", found["distinct_words"])


def text(folder: Path, usage: Usage | Shares | None, out: Path) -> dict:
    """One run of the text stage."""
    inputs = inputs_of(folder)
    began, cpu = time.monotonic(), time.process_time()
    (out / "text").mkdir(parents=True)
    work: TextWork = TextHere(out / "text", inputs, FILTERS)
    if usage:
        work = TextOnRay(out, work_folder(out, inputs, FILTERS, WANTED), inputs, FILTERS, WANTED, usage)
    rows = sum(work.counts().values())
    work.digests()
    checked = time.monotonic()
    with line_list(out / "text" / DROPPED, "split", "line", "reason") as dropped:
        notices = TextNotices(WANTED, inputs.line)
        shards = len(list(work.write("benchmark", auto_rows_per_shard(rows), notices, dropped)))
        notices.facts()
    remove_work(out)
    return figures(rows, began, cpu, usage) | {"shards": shards, "check_s": checked - began}


def figures(rows: int, began: float, cpu: float, usage: Usage | Shares | None) -> dict:
    """What a run took."""
    seconds, driver = time.monotonic() - began, time.process_time() - cpu
    return {
        "rows": rows,
        "rows_per_second": rows / seconds,
        "cpu_microseconds_per_row": (driver + (usage.cpu_s if usage else 0.0)) / rows * 1e6,
        "driver_cpu_s": driver,
        "driver_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def vocabulary(folder: Path, usage: Usage | Shares | None, data: Path) -> dict:
    """One run of the counting of words, of the whole split or of four million lines of it."""
    stages = ([ShardRecord(**json.loads(path.read_bytes())) for path in sorted((data / name).glob("train-*.json"))]
              for name in ("text", "parsed"))  # fmt: skip
    began, cpu = time.monotonic(), time.process_time()
    records = list(stages)
    counts = count_vocabulary(data, *records, SubwordConfig(), TreeConfig(tree_source="right"), usage or run_here)
    rows = sum(record.rows for record in records[0])
    return figures(rows, began, cpu, usage) | {"distinct_words": len(counts.words["source"])}


def parse(data: Path) -> None:
    """Parse words of all text shards, without a parser."""
    worker = ParseShard(data, ParserConfig(name="words"))
    (data / "parsed").mkdir()
    for path in sorted((data / "text").glob("train-*.json")):
        worker(ShardRecord(**json.loads(path.read_bytes())), "benchmark")


def empty(actors: int, jobs: int, folder: Path) -> None:
    """Return the driver's CPU time per job without work."""
    usage = Usage(actors, folder)
    began, cpu = time.monotonic(), time.process_time()
    assert len(list(usage(Empty, {}, [{"number": number} for number in range(jobs)]))) == jobs
    case = f"empty_work_{actors}_actors"
    emit(case, "driver_cpu_milliseconds_per_job", (time.process_time() - cpu) / jobs * 1e3, jobs=jobs)
    emit(case, "wall_milliseconds_per_job", (time.monotonic() - began) / jobs * 1e3)


def once(case: str, folder: Path, actors: int, out: Path) -> None:
    """Run once in a separate process, with its figures on standard output."""
    if case == "empty":
        return empty(actors, 1000, folder)
    usage = Usage(actors, folder) if actors else None
    print(json.dumps({"text": text, "vocabulary": vocabulary}[case](folder, usage, out)))


def run(case: str, folder: Path, actors: int, out: Path) -> dict:
    """Return the figures of one run in a separate process."""
    command = [sys.executable, __file__, "--once", case, str(folder), str(actors), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"RAY_ADDRESS": "local"})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "text").iterdir()}


def measure(count: int, rounds: int, scratch: Path | None) -> None:
    """Print the figures of all ways, in turn, over `count` pairs."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="text-") as name:
        folder = Path(name)
        write_inputs(folder, read_pairs(None), count)
        runs: dict[int, list[dict]] = {0: [], 1: [], 2: []}
        for number in range(rounds):
            for actors in runs:
                out = folder / f"{actors}-{number}"
                runs[actors].append(run("text", folder, actors, out))
                if contents(out) != contents(folder / "0-0"):
                    raise SystemExit(f"the text stage of {actors} actors has other bytes than that of one process")
        report(f"text_{count}", runs)
        parse(folder / "0-0")
        runs = {0: [], 1: [], 2: []}
        for _ in range(rounds):
            for actors in runs:
                runs[actors].append(run("vocabulary", folder, actors, folder / "0-0"))
        report(f"vocabulary_{count}", runs)


def report(case: str, runs: dict[int, list[dict]]) -> None:
    """Print the best of every figure, and the figures of all rounds, by number of actors; 0 is one process without Ray."""
    for actors, rounds in runs.items():
        for metric in rounds[0]:
            pick = max if metric == "rows_per_second" else min
            values = [one[metric] for one in rounds]
            emit(f"{case}_{actors}_actors", metric, pick(values), rounds=[round(value, 2) for value in values])
    one, two = (max(one["rows_per_second"] for one in runs[actors]) for actors in (1, 2))
    emit(case, "two_actors_to_one", two / one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 4_000_000], help="numbers of pairs")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each way (default %(default)s)")
    parser.add_argument("--empty", type=int, help="measure empty work alone, with 1, 4, 16, ... up to so many actors")
    parser.add_argument("--scratch", type=Path, help="folder for the data, about 2 GB for 4 million pairs")
    parser.add_argument("--shares", action="store_true", help="without Ray: CPU time of tasks and of the driver")
    parser.add_argument("--quick", action="store_true", help="40,000 pairs, one round")
    parser.add_argument("--once", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        case, folder, actors, out = options.once
        once(case, Path(folder), int(actors), Path(out))
    elif options.empty:
        with tempfile.TemporaryDirectory() as name:
            for actors in (4**i for i in range(8) if 4**i <= options.empty):
                subprocess.run([sys.executable, __file__, "--once", "empty", name, str(actors), name], check=True)
    elif options.shares:
        for count in options.sizes:
            with tempfile.TemporaryDirectory(dir=options.scratch) as name:
                write_inputs(Path(name), read_pairs(None), count)
                shares(Path(name), Path(name) / "data")
    else:
        for count in [40_000] if options.quick else options.sizes:
            measure(count, 1 if options.quick else options.rounds, options.scratch)


if __name__ == "__main__":
    main()

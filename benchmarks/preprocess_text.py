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
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from preprocess_million import read_pairs, write_inputs
from text_steps import Empty, Here, OnRay, two_to_one

from treeproc.parsers import ParserConfig
from treeproc.shards.schema import auto_rows_per_shard
from treeproc.shards.store import ShardRecord
from treeproc.stages.filters import FilterConfig
from treeproc.stages.inputs import Inputs, SplitFiles, TreeConfig
from treeproc.stages.job_report import DROPPED, line_list
from treeproc.stages.parse_and_encode import ParseShard
from treeproc.stages.run_jobs import run_here
from treeproc.stages.text_warnings import TextNotices, Wanted
from treeproc.stages.text_work import TextWork, remove_work
from treeproc.stages.vocabulary import TrainSplit, count_vocabulary
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


def shares(folder: Path, out: Path) -> None:
    """Print the CPU time of tasks and of the driver, without Ray's own: by the clock of one process."""
    for case, work in (("text", text), ("vocabulary", vocabulary)):
        run = Here()
        found = work(folder, run, out)
        name, driver_s = f"{case}_{found['rows']}", found["driver_cpu_s"] - found["tasks_cpu_s"]
        jobs = sum(step.jobs for step in run.steps)
        emit(f"{name}_tasks", "cpu_microseconds_per_row", found["tasks_cpu_s"] / found["rows"] * 1e6, jobs=jobs)
        emit(f"{name}_driver", "cpu_microseconds_per_row", driver_s / found["rows"] * 1e6)
        emit(name, "two_to_one_by_cpu", two_to_one(run.steps, driver_s))
        if case == "text":
            parse(out)
        else:
            emit(name, "distinct_words", found["distinct_words"])


def text(folder: Path, run: OnRay | Here | None, out: Path) -> dict:
    """One run of the text stage."""
    inputs = inputs_of(folder)
    began, cpu = time.monotonic(), time.process_time()
    (out / "text").mkdir(parents=True)
    work = TextWork(out, inputs, FILTERS, WANTED, (lambda folder: run) if run else None)
    rows = sum(work.counts().values())
    work.digests()
    checked = time.monotonic()
    with line_list(out / "text" / DROPPED, "split", "line", "reason") as dropped:
        notices = TextNotices(WANTED, inputs.line)
        shards = len(list(work.write("benchmark", auto_rows_per_shard(rows), notices, dropped)))
        notices.facts()
    remove_work(out)
    return figures(rows, began, cpu, run) | {"shards": shards, "check_s": checked - began}


def figures(rows: int, began: float, cpu: float, run: OnRay | Here | None) -> dict:
    """What a run took."""
    seconds, driver = time.monotonic() - began, time.process_time() - cpu
    found = {"rows": rows, "rows_per_second": rows / seconds, "driver_cpu_s": driver, "driver_peak_mib": peak_mib()}
    steps = run.steps if run else []
    tasks = sum(sum(step.tasks_s) for step in steps)
    found["cpu_microseconds_per_row"] = (driver + (tasks if isinstance(run, OnRay) else 0.0)) / rows * 1e6
    if steps:
        found["tasks_cpu_s"] = tasks
    if isinstance(run, OnRay):
        found["two_to_one_by_cpu"] = two_to_one(steps, driver)
        found["seconds_outside_of_steps"] = seconds - sum(step.seconds for step in steps)
        for step in steps:
            found[f"step_{step.worker}_seconds"] = found.get(f"step_{step.worker}_seconds", 0.0) + step.seconds
    return found


def peak_mib() -> float:
    """Peak resident memory of this program. `ru_maxrss` also covers the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def vocabulary(folder: Path, run: OnRay | Here | None, data: Path) -> dict:
    """One run of the counting of words, of the whole split or of four million lines of it."""
    stages = ([ShardRecord(**json.loads(path.read_bytes())) for path in sorted((data / name).glob("train-*.json"))]
              for name in ("text", "parsed"))  # fmt: skip
    began, cpu = time.monotonic(), time.process_time()
    records = list(stages)
    counts = count_vocabulary(TrainSplit(data, *records, SubwordConfig(), TreeConfig(tree_source="right"), run or run_here))
    rows = sum(record.rows for record in records[0])
    return figures(rows, began, cpu, run) | {"distinct_words": len(counts.words["source"])}


def parse(data: Path) -> None:
    """Parse words of all text shards, without a parser."""
    worker = ParseShard(data, ParserConfig(name="words"))
    (data / "parsed").mkdir()
    for path in sorted((data / "text").glob("train-*.json")):
        worker(ShardRecord(**json.loads(path.read_bytes())), "benchmark")


def empty(actors: int, jobs: int, folder: Path) -> None:
    """Return the driver's CPU time per job without work."""
    run = OnRay(actors, folder)
    began, cpu = time.monotonic(), time.process_time()
    assert len(list(run(Empty, {}, [{"number": number} for number in range(jobs)]))) == jobs
    case = f"empty_work_{actors}_actors"
    emit(case, "driver_cpu_milliseconds_per_job", (time.process_time() - cpu) / jobs * 1e3, jobs=jobs)
    emit(case, "wall_milliseconds_per_job", (time.monotonic() - began) / jobs * 1e3)


def once(case: str, folder: Path, actors: int, out: Path) -> None:
    """Run once in a separate process, with its figures on standard output."""
    if case == "empty":
        return empty(actors, 1000, folder)
    run = OnRay(actors, folder) if actors else None
    print(json.dumps({"text": text, "vocabulary": vocabulary}[case](folder, run, out)))


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

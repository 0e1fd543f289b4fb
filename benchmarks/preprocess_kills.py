"""Kills of `workflows/preprocess.py` at random moments: the job runs again, and its files must be those of an undisturbed one.

    python benchmarks/preprocess_kills.py              # 30 kills, about 12 minutes on two cores
    python benchmarks/preprocess_kills.py --quick      # 3 kills

A job over the shipped sample runs once undisturbed. Then it runs repeatedly into another folder. SIGKILL hits the driver, its
process group, or one Ray actor that parses or encodes. The next run starts at once, beside the remaining processes of the one
before. When a folder is finished, it is compared, and another one begins, until all kills are done. At last, files are damaged.
`python -m treeproc.verify` must name them, and another run must repair them.

It prints one JSON line per figure, and one line per kill on standard error. The exit status is 1 if any byte differs, if a job
fails without a kill, or if damage is not found or not repaired. `moments` counts kills by the stage in which actors worked.
"other" means that there were no actors: start, text stage, vocabulary.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kills import KINDS, LIMIT_S, Workflow, kill, lives, wait_for, workers_of
from measure import emit
from preprocess_million import REPOSITORY, read_pairs

from treeproc.common.provenance import PROVENANCE

ACTOR = "MapWorker"  # Ray Data's actors, which do shards
STAGES = ("text", "parsed", "encoded")
ANY_TIME = 0.2  # this share of the kills falls between the start of a run and about its first shard
SHARE = 0.25  # the others fall after another shard, within this share of the seconds of a stage


def shards_of(data: Path, *stages: str) -> dict[Path, int]:
    """Return finished shards and their times of writing."""
    found = {}
    for stage in stages or STAGES:
        for sidecar in (data / stage).glob("*-of-*.json"):
            try:
                found[sidecar] = sidecar.with_suffix(".arrow").stat().st_mtime_ns
            except FileNotFoundError:
                continue
    return found


def contents(data: Path) -> dict[str, bytes]:
    """Return every file of a data set except its lock and its provenance."""
    paths = [path for path in data.rglob("*") if path.is_file() and path.name not in (".lock", PROVENANCE)]
    return {str(path.relative_to(data)): path.read_bytes() for path in paths}


def different(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


@dataclass
class JobKiller:
    """Kills jobs at random, and counts its kills."""

    job: Workflow
    random: random.Random
    ready_s: float  # from the start of the undisturbed run to its first parsed shard
    stage_s: dict[str, float]  # from the first to the last shard of the undisturbed run
    kills: list[str]  # remaining kills, taken from the end
    begin: float = field(default_factory=time.monotonic)
    run_begin: float = 0.0
    done: Counter = field(default_factory=Counter)
    failed: int = 0
    written_again: int = 0

    def disturb(self, data: Path) -> None:
        """Run the job until it is finished or no kill is left."""
        finished: dict[Path, int] = {}
        while self.kills:
            self.run_begin = time.time()
            with self.job.run(data) as driver:
                while self.kills and driver.poll() is None:
                    if moment := self._wait(driver, data):
                        now = shards_of(data)
                        self._count_again(finished, now)
                        finished = now
                        self._kill(driver, moment, data)
                if driver.poll() is None:  # the last kill was a worker's
                    driver.wait(LIMIT_S)
            if driver.returncode == 0:
                break
            if driver.returncode > 0:
                self.failed += 1
                print(f"the job ended with status {driver.returncode}:\n{self.job.log()}", file=sys.stderr)
        self.job.finish(data)
        self._count_again(finished, shards_of(data))

    def _count_again(self, before: dict[Path, int], now: dict[Path, int]) -> None:
        self.written_again += sum(now.get(path) != stamp for path, stamp in before.items())

    def _wait(self, driver: subprocess.Popen, data: Path) -> str:
        """Wait for the next moment. Returns its name, or an empty text if the job has ended."""

        def at_work() -> list[int]:
            return workers_of(driver.pid, ACTOR)

        if not at_work() and self.random.random() < ANY_TIME:
            delay = self.random.uniform(0.2, self.ready_s)
        else:
            if not wait_for(driver, at_work):
                return ""
            before = {stage: len(shards_of(data, stage)) for stage in self.stage_s}
            if not wait_for(driver, lambda: any(len(shards_of(data, stage)) > n for stage, n in before.items())):
                return ""
            delay = self.random.uniform(0, SHARE * self.stage_s[self._stage(data)])
        if not lives(driver, delay):
            return ""
        if self.kills[-1] == "worker" and not wait_for(driver, at_work):
            return ""
        return self._stage(data) if at_work() else "other"

    def _stage(self, data: Path) -> str:
        """Return the stage in which the actors of this run work."""
        index = data / "parsed" / "index.json"
        return "encoded" if index.exists() and index.stat().st_mtime > self.run_begin else "parsed"

    def _kill(self, driver: subprocess.Popen, moment: str, data: Path) -> None:
        what = self.kills[-1]
        if not kill(what, driver, workers_of(driver.pid, ACTOR), self.random):
            return
        self.kills.pop()
        self.done[what, moment] += 1
        number, seconds = sum(self.done.values()), time.monotonic() - self.begin
        shards = ", ".join(f"{len(shards_of(data, stage))} {stage}" for stage in STAGES)
        print(f"kill {number} at {seconds:.1f} s: {what}, {moment}; {data.name} has {shards}", file=sys.stderr, flush=True)


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGES = {"flipped_byte": flip, "truncated": truncate, "missing": remove}


def verify(data: Path) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "treeproc.verify", str(data)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)


def damage(job: Workflow, data: Path, whole: dict[str, bytes], rng: random.Random, quick: bool) -> bool:
    """Damage a shard of every stage and the vocabulary in every way. Returns whether all damage is found and repaired."""
    cases = {}
    for what in DAMAGES:
        for stage in STAGES:
            cases[what, stage] = rng.choice(sorted((data / stage).glob("*-of-*.arrow")))
        cases[what, "vocabulary"] = data / "encoded" / "vocab" / "pieces.model"
    rounds = [[case for case in cases if case[0] == what] for what in DAMAGES]
    if quick:
        rounds = [[("flipped_byte", "text"), ("truncated", "parsed"), ("missing", "encoded"), ("flipped_byte", "vocabulary")]]
    good = not verify(data).returncode
    for group in rounds:
        for case in group:
            DAMAGES[case[0]](cases[case], rng)
        report = verify(data)
        job.finish(data)
        wrong = different(whole, contents(data))
        for case in group:
            name = str(cases[case].relative_to(data))
            found, healed = report.returncode == 2 and f"{data / name}: " in report.stdout, name not in wrong
            emit("preprocess_kills", "_".join(case), "found_and_healed", int(found and healed), file=name)
            good &= found
        good &= not wrong
    emit("preprocess_kills", "healed", "verified", int(not verify(data).returncode))
    return good


def write_job(folder: Path, shards: int, rows: int) -> Path:
    """Write inputs of `shards` shards, every tenth in the valid split, and the settings of the job."""
    pairs = [(" ".join(source.split()), target) for source, target in read_pairs(None)]
    held = max(1, shards // 10)
    splits = {"valid": pairs[: held * rows], "train": pairs[held * rows : shards * rows]}
    if len(pairs) < shards * rows:
        raise SystemExit(f"--shards must be at most {len(pairs) // rows}, the shipped sample has no more, but is {shards}")
    files = {}
    for split, chosen in splits.items():
        files[split] = {side: [str(folder / f"{split}.{side}")] for side in ("source", "target")}
        for i, side in enumerate(("source", "target")):
            (folder / f"{split}.{side}").write_text("".join(pair[i] + "\n" for pair in chosen), encoding="utf-8")
    settings = {"splits": files, "parser": {"name": "shipped"}, "subwords": {"vocab_size": 1000}, "rows_per_shard": rows}
    path = folder / "data.yaml"
    path.write_text(json.dumps(settings))
    return path


def measure(folder: Path, scratch: Path, options: argparse.Namespace) -> bool:
    """Print all figures. Returns whether all is correct."""
    figure, rng = partial(emit, "preprocess_kills"), random.Random(options.seed)
    job = Workflow("preprocess.py", write_job(folder, options.shards, options.rows), scratch)
    begin = time.time()
    seconds = job.finish(folder / "undisturbed")
    whole = contents(folder / "undisturbed")
    stamps = {stage: [t / 1e9 for t in shards_of(folder / "undisturbed", stage).values()] for stage in STAGES}
    figure("undisturbed", "seconds", seconds, shards=len(stamps["encoded"]), files=len(whole))
    kinds = [KINDS[i % len(KINDS)] for i in range(options.kills)]
    rng.shuffle(kinds)
    ready, lasted = min(stamps["parsed"]) - begin, {name: max(stamps[name]) - min(stamps[name]) for name in STAGES[1:]}
    killer = JobKiller(job, rng, ready, lasted, kinds)
    good, data, folders = True, folder / "killed-0", 0
    while killer.kills:
        data = folder / f"killed-{folders}"
        folders += 1
        killer.disturb(data)
        wrong = different(whole, contents(data))
        good &= not wrong
        figure(data.name, "different_files", len(wrong), **({"names": wrong[:5]} if wrong else {}))
    for kind in KINDS:
        moments = {moment: count for (what, moment), count in sorted(killer.done.items()) if what == kind}
        figure(kind, "kills", sum(moments.values()), moments=moments)
    figure("all", "kills", sum(killer.done.values()), folders=folders, seconds=round(time.monotonic() - killer.begin, 1))
    figure("all", "jobs_failed_after_worker_kill", killer.failed)
    figure("all", "finished_shards_written_again", killer.written_again)
    figure("all", "processes_left_by_killed_jobs", job.left)
    good &= damage(job, data, whole, rng, options.quick)
    job.end()
    figure("all", "passed", int(good and not killer.failed))
    return good and not killer.failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="how many processes to kill (default %(default)s)")
    parser.add_argument("--shards", type=int, default=40, help="shards of a stage (default %(default)s)")
    parser.add_argument("--rows", type=int, default=200, help="pairs of a shard (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed and when (default %(default)s)")
    parser.add_argument("--out", type=Path, help="new folder, which is kept, for the data sets (default: a temporary one)")
    parser.add_argument("--quick", action="store_true", help="3 kills, 8 shards of 50 pairs, four files damaged together")
    options = parser.parse_args()
    if options.quick:
        options.kills, options.shards, options.rows = 3, 8, 50
    # Ray's sockets need a short path.
    scratch, folder = Path(tempfile.mkdtemp(prefix="kills-")), options.out
    try:
        if folder is None:
            folder = scratch / "data"
        folder.mkdir(parents=True)
        sys.exit(not measure(folder.absolute(), scratch, options))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Processes of a training that stop answering (SIGSTOP), and slow trainings in which nothing hangs: how each goes on.

    python benchmarks/stops.py                       # all rows, for hours
    python benchmarks/stops.py --rows 0 1 2 30       # these rows alone
    python benchmarks/stops.py --list                # the rows with their numbers

`workflows/train.py` trains on two Ray workers, in a folder or in a store (moto's S3). A row stops one process at a moment, with
limits that are shorter than the defaults (LIMITS). New workers must continue; after SIGTERM, the command must end with 143.
Rows that need no SIGTERM share one command. A healthy row stops nothing, or everything for a time; there, the limits must end
nothing.

It prints one JSON line per row, with the load of the machine. The exit status is 1 if a row has another outcome.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray
from measure import emit
from object_store import slow_store
from training_data import write_captions

from treenet.jobs.ray_room import Room
from treenet.jobs.ray_watch import Beat
from treenet.runs.metrics_log import read_metrics
from treeproc.common.ray_internals import store_of_keys
from treeproc.common.ray_session import start_ray
from treeproc.common.storage import AnyPath, as_path

REPOSITORY = Path(__file__).resolve().parent.parent
LIMITS = {"start_s": 900, "update_s": 40, "stop_s": 80}
START_S = 300  # where a worker is stopped in its start
# Settings of rows with a command of their own. A long validation takes longer than an update may take.
OWN: dict[str, tuple[str, ...]] = {
    "the end": ("max_steps=300",),
    "compiling": ("compile=true",),
    "everything for 120 s of a start": (),
    "the start": (),
    "load 40": (),
    "start": (f"watch.start_s={START_S}",),
    "a long validation": ("model.d_model=768", "model.num_encoder_layers=4", "validate_every=10", "watch.update_s=15"),
}
LATE_S = 1_800  # a row that takes longer has hung
WORKER, CONTROLLER = "RayTrainWorker", "TrainController"
SETTINGS = {
    "model": {"d_model": 16, "d_ff": 32, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1},
    "batch": {"max_tokens": 256},
    "max_steps": 100_000,
    "validate_every": 300,
    "checkpoint_every": 100,
    "log_every": 5,
    "workers": 2,
    "loggers": [],
    "watch": LIMITS,
}


@dataclass(frozen=True)
class Row:
    """A row of the table: what is stopped, when, and what must follow. Rank numbers are names of processes, too."""

    process: str
    moment: str
    place: str
    expected: str

    @property
    def ends(self) -> bool:
        return self.expected == "143"


def rows() -> list[Row]:
    """Return 30 stops and 20 healthy rows."""
    found = []
    for place in ("local", "s3"):
        plan = [("rank 1", "update"), ("rank 0", "validation"), ("rank 1", "checkpoint"), ("SynchronizationActor", "update")]
        plan += [("PreemptionWatcher", "update"), ("rank 0", "update"), ("rank 1", "validation"), ("rank 0", "checkpoint")]
        plan += [("a worker", "start"), ("PlacementGroupCleaner", "update")]
        found += [Row(process, moment, place, "continues") for process, moment in plan]
        after = [("rank 1", "update"), (CONTROLLER, "update"), ("a worker", "start"), ("rank 0", "validation")]
        found += [Row(process, f"{moment}, then SIGTERM", place, "143") for process, moment in after]
        found.append(Row(CONTROLLER, "the end", place, "continues"))
    healthy = ["load 40", "the start", "everything for 600 s", "a long validation", "a room after 300 s", "compiling"]
    places = ["local", "s3", "slow s3"]
    plan = [(what, place) for place in places for what in healthy]
    plan += [("everything for 120 s of a start", place) for place in places[:2]]
    return found + [Row("nothing", what, place, "undisturbed") for what, place in plan]


class Training:
    """A command that trains, and its processes."""

    def __init__(self, out: AnyPath, data: Path, folder: Path, address: str, *overrides: str):
        self.out, self.log = out, folder / "log"
        command = [sys.executable, str(REPOSITORY / "workflows" / "train.py"), "--config", str(folder / "train.yaml")]
        env = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self.before = set(processes())
        with open(self.log, "w") as log:
            options = {"stdout": log, "stderr": log, "env": env}
            self.driver = subprocess.Popen([*command, "--out", str(out), f"data={data}", *overrides], **options)

    def step(self) -> int:
        return max((line["step"] for line in read_metrics(self.out)), default=0)

    def validations(self) -> list[float]:
        """Return the seconds of each."""
        return [line["seconds"] for line in read_metrics(self.out) if line["event"] == "valid"]

    def beats(self) -> list[Beat]:
        """Return the last beats of the two ranks of the newest group."""
        values = [store_of_keys()[1](f"{self.out}/{rank}") for rank in range(2)]
        beats = [Beat(*json.loads(value)) for value in values if value]
        return beats if len({beat.group for beat in beats}) == 1 and len(beats) == 2 else []

    def group(self) -> str:
        return next((beat.group for beat in self.beats()), "")

    def find(self, name: str, moment: str) -> int:
        """Wait for the moment, and return the process."""
        if name.startswith("rank"):
            rank, phase = int(name[-1]), {"validation": "validating"}.get(moment, "update")
            beat = self.until(
                lambda: next((beat for beat in self.beats()[rank:] if beat.phase == phase and beat.updates > 10), None)
            )
            if moment == "checkpoint":
                self.until(lambda: any((self.out / "checkpoints").glob(".tmp-*")) or not isinstance(self.out, Path), pause=0.001)
            return beat.process
        if moment != "start":
            self.until(lambda: any(beat.updates > 10 for beat in self.beats()))
        title = {"a worker": WORKER}.get(name, name)
        pids = self.until(lambda: [pid for pid, text in processes().items() if text.startswith(f"ray::{title}")])
        return max(set(pids) - self.before or pids)

    def until(self, condition: Callable, seconds: float = LATE_S, pause: float = 0.2):
        end = time.monotonic() + seconds
        while not (found := condition()):
            if self.driver.poll() is not None or time.monotonic() > end:
                raise TimeoutError(self.log.read_text()[-1500:])
            time.sleep(pause)
        return found

    def end(self) -> None:
        if self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()


def processes() -> dict[int, str]:
    """Return the command lines of Ray's processes that this benchmark started."""
    found, mark = {}, f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (place / "environ").read_bytes().split(b"\0"):
                found[int(place.name)] = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def stop(training: Training, row: Row) -> tuple[str, float]:
    """Stop the process of a row. Returns the outcome and its seconds."""
    moment = row.moment.partition(",")[0]
    pid = training.find(row.process, moment)
    os.kill(pid, signal.SIGSTOP)
    began, groups = time.monotonic(), training.group()
    if row.ends:
        time.sleep(5)
        training.driver.send_signal(signal.SIGTERM)
        began = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            training.driver.wait(LATE_S)
        return str(training.driver.returncode), time.monotonic() - began
    step = training.step()
    if row.process in (WORKER, "rank 0", "rank 1", "SynchronizationActor", "a worker"):
        training.until(lambda: training.group() not in ("", groups))
        training.until(lambda: any(beat.updates > 10 for beat in training.beats()))
        return "continues", time.monotonic() - began
    training.until(lambda: training.step() > step + 100 or training.group() != groups)
    return "continues", time.monotonic() - began


def healthy(training: Training, row: Row) -> tuple[str, float]:
    """Wait until a slow part of a training is over, in which nothing hangs."""
    began, said = time.monotonic(), len(training.log.read_text())
    if row.moment.startswith("a room"):
        held = Room.ask([{"CPU": 1.0}] * 2)
        time.sleep(300)
        held.give_back()
    elif row.moment.startswith("everything"):
        if row.moment.endswith("start"):
            training.find("a worker", "start")
        else:
            training.until(lambda: training.step() > 20)
        everything = " ".join(map(str, {*processes(), os.getpid()}))  # this process, too, because Ray has stopped
        stop_all = f"kill -STOP {everything}; sleep {row.moment.split()[2]}; kill -CONT {everything}"
        subprocess.run(["sh", "-c", stop_all], check=False)
    elif row.moment == "a long validation":
        count = len(training.validations())
        training.until(lambda: len(training.validations()) > count)
        print(f"validations of {training.validations()} s", file=sys.stderr)
    elif row.moment == "load 40":
        training.until(lambda: training.step() > 20)
    with busy(40 * (row.moment == "load 40")):
        time.sleep(120 * (row.moment == "load 40"))
        step = training.step()
        training.until(lambda: training.step() > step + 20)
    is_ended = "the command ends the workers\n" in training.log.read_text()[said:]
    return "ended" if is_ended else "undisturbed", time.monotonic() - began


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many processes busy, in another session, like those of another user."""
    command = f"for _ in $(seq {count}); do (while :; do :; done) & done; wait"
    loops = subprocess.Popen(["bash", "-c", command], start_new_session=True)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(loops.pid, signal.SIGKILL)
        loops.wait()


@contextmanager
def cluster_of(place: str, folder: Path) -> Iterator[tuple[str, AnyPath]]:
    """Start a Ray for all rows of a place. Yields its address, and where runs go."""
    with slow_store(folder, 5.0 * place.startswith("slow")):
        os.environ |= {"RAY_ADDRESS": "local", "RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}
        start_ray()
        try:
            yield ray.get_runtime_context().gcs_address, as_path("s3://bucket") if place.endswith("s3") else folder
        finally:
            ray.shutdown()


def measure(chosen: Sequence[int], scratch: Path) -> bool:
    """Print the rows. Returns whether each has the expected outcome."""
    data, all_rows, passed = write_captions(scratch / "data", rows=12_000, num_pieces=500), rows(), True
    for place in dict.fromkeys(all_rows[number].place for number in chosen):
        folder = scratch / place.replace(" ", "_")
        folder.mkdir()
        (folder / "train.yaml").write_text(json.dumps(SETTINGS))
        with cluster_of(place, folder) as (address, out):
            training: Training | None = None
            for number in [number for number in chosen if all_rows[number].place == place]:
                row, outcome, seconds = all_rows[number], "hung", 0.0
                own = OWN.get(row.moment)
                try:
                    if training and own is not None:
                        training.end()
                    if own is not None or not training:
                        training = Training(out / f"run{number}", data, folder, address, *(own or ()))
                    outcome, seconds = (healthy if row.process == "nothing" else stop)(training, row)
                except TimeoutError as error:
                    print(error, file=sys.stderr)
                if row.ends or own is not None or outcome == "hung":
                    training.end()
                    training = None
                facts = {"moment": row.moment, "place": place, "outcome": outcome, "load": round(os.getloadavg()[0])}
                emit("stops", f"{number} {row.process}", "seconds", round(seconds), **facts)
                passed &= outcome == row.expected
            if training:
                training.end()
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(rows())), help="numbers of rows (default: all)")
    parser.add_argument("--list", action="store_true", help="print the rows")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{number} {row}" for number, row in enumerate(rows())))
        return
    scratch = Path(tempfile.mkdtemp(prefix="stops-"))  # Ray's sockets need a short path
    os.environ["RAY_TMPDIR"] = str(scratch)
    try:
        sys.exit(not measure(options.rows, scratch))
    finally:
        for pid in processes():
            if pid != os.getpid():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Rates and times left of the last minute, and the names of what is under way before anything can be counted."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from treeproc.common import messages
from treeproc.common.messages import Progress, Rate, format_seconds, phase
from treeproc.common.provenance import Recorder
from treeproc.shards.store import ShardRecord
from treeproc.stages.run_jobs import StageWork, make_shards

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parent.parent


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def shown(progress: Progress) -> tuple[float, str | None]:
    """Rate and time left of the line."""
    line = progress.line()
    left = re.search(r"left ([\d:]+)", line)
    return float(re.search(r"([\d,.]+) \w+/s", line)[1].replace(",", "")), left and left[1]


def test_the_rate_is_of_the_last_minute():
    """Ten times slower for two minutes, as while caches fill: a minute later that is forgotten."""
    clock = Clock()
    with Progress("train", 1500, unit="steps", stream=io.StringIO(), interval=1e6, clock=clock) as progress:
        for _ in range(120):
            clock.now += 1
            progress.update(1)
        assert shown(progress) == (1.0, "23:00")
        for _ in range(61):
            clock.now += 1
            progress.update(10)
        rate, left = shown(progress)
        assert rate == pytest.approx(10.0, abs=0.2) and left == format_seconds((1500 - 730) / 10)


def test_the_rate_leaves_out_earlier_work_and_the_start():
    clock = Clock()
    with Progress("train", 1000, unit="steps", initial=500, stream=io.StringIO(), interval=1e6, clock=clock) as progress:
        assert shown(progress) == (0.0, None)
        clock.now += 40  # other processes start
        progress.began(seconds_ago=5)
        progress.update(50)
        assert shown(progress) == (10.0, "0:45") and "550/1,000" in progress.line() and "elapsed 0:40" in progress.line()


def test_work_in_large_parts_has_the_rate_of_the_parts_that_are_done():
    """A shard of 2,000 examples every five minutes."""
    clock = Clock()
    with Progress("parse", 8000, unit="examples", stream=io.StringIO(), interval=1e6, clock=clock) as progress:
        for part in range(1, 4):
            clock.now += 300
            progress.update(2000)
            assert shown(progress) == (pytest.approx(2000 / 300, abs=0.05), format_seconds((4 - part) * 300)), part
        clock.now += 150  # nothing is done yet: not 0, and not more than before
        assert shown(progress)[0] == pytest.approx(2000 / 450, abs=0.05)


def test_a_rate_keeps_few_samples_however_often_it_is_told():
    rate = Rate(0.0, 0)
    for i in range(1, 100_001):
        rate.add(i / 100, i)
    assert len(rate._samples) < 100 and rate.per_second(1000.0) == pytest.approx(100.0)


def run_phase(seconds: float, after: float, stream) -> None:
    code = (
        "import sys, time; from treeproc.common.messages import phase\n"
        "with phase('loading the model', after=float(sys.argv[2])): time.sleep(float(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(seconds), str(after)]
    subprocess.run(command, check=True, cwd=REPOSITORY, stderr=stream, timeout=100)


def test_a_phase_is_a_line_in_a_log_where_it_takes_long(tmp_path):
    for seconds, after, message in ((0.0, 60, ""), (1.0, 0.05, "loading the model ...\n")):
        with open(tmp_path / "log", "w") as log:
            run_phase(seconds, after, log)
        assert (tmp_path / "log").read_text() == message


def test_a_phase_is_seen_at_once_on_a_terminal_and_leaves_nothing():
    ours, theirs = pty.openpty()
    run_phase(0.0, 60, theirs)
    os.close(theirs)
    assert os.read(ours, 1000) == b"\rloading the model ...\x1b[K\r\x1b[K"
    os.close(ours)


def wait_for_lines(stream: io.StringIO, count: int, end: str = "") -> None:
    """Wait until a thread has written so many lines that end so."""
    wait_for(lambda: stream.getvalue().count(f"{end}\n") >= count, seconds=60)


def test_a_phase_inside_a_progress_is_part_of_its_line():
    stream = io.StringIO()
    with Progress("parse", 10, unit="rows", interval=0.05, stream=stream) as progress:
        with phase("starting Ray", after=0):
            with phase("looking at the cluster"):
                assert progress.line().endswith(", looking at the cluster")
            wait_for_lines(stream, 2, ", starting Ray")
        progress.update(10)
    lines = stream.getvalue().splitlines()
    assert all(line.startswith("parse: 0/10 rows") for line in lines if line.endswith(", starting Ray"))
    assert "starting Ray" not in lines[-1]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_bar_on_a_terminal_has_the_same_rate_and_names_the_phase():
    clock, terminal = Clock(), Terminal()
    with Progress("parse", 1000, unit="rows", stream=terminal, clock=clock) as progress:
        with phase("starting Ray"):
            assert "starting Ray" in terminal.getvalue().split("\r")[-1]
        clock.now += 1000
        progress.began(seconds_ago=2)
        progress.update(100, postfix="all well")
    last = terminal.getvalue().split("\r")[-1]
    assert "100/1000" in last and "00:18" in last and "50.00rows/s" in last and "all well" in last and "Ray" not in last


def test_a_log_says_that_the_first_shard_is_under_way(tmp_path):
    """A shard may take minutes, and the count moves only when one ends."""
    seen, folder = [], tmp_path / "parsed"
    folder.mkdir()

    class Worker:
        def __init__(self):
            seen.append(messages._shown[-1].line())

        def __call__(self, shard):
            seen.append(messages._shown[-1].line())
            return shard

    shards = [ShardRecord(f"train-{number}.arrow", "train", number, rows, 0, "", "") for number, rows in enumerate((2000, 1152))]
    work, jobs = StageWork("parse", "loading the parser", Worker, {}), [{"shard": shard} for shard in shards]
    record = Recorder(tmp_path, "test")
    assert list(make_shards(work, folder, shards, ["", ""], jobs, in_this_process=True, record=record)) == shards
    loading, first, second = seen
    assert "0/3,152" in loading and loading.endswith(", loading the parser")
    assert "0/3,152" in first and first.endswith(", in the first shard, of 2,000 examples")
    assert "2,000/3,152" in second and "first shard" not in second

"""workflows/slurm: jobs of a real Slurm of two nodes, which go on where a signal stopped them.

test_cluster_config.py checks what the scripts name.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import run_here
from test_preprocess import config_of, snapshot, text  # noqa: F401 (a fixture)
from test_scaling import STUDY
from toydata import write_toy_data
from toyruns import losses, train_ranks
from training_jobs import tiny_config

from treenet.experiments.ledger import INTERRUPTED, Ledger
from treenet.runs.checkpoint import checkpoint_step, latest_checkpoint
from treenet.runs.metrics_log import read_metrics
from treeproc.common.provenance import read_sessions
from treeproc.common.settings import dump_settings
from treeproc.stages.preprocess import preprocess

pytestmark = pytest.mark.slow

SLURM = Path(__file__).resolve().parent.parent / "workflows" / "slurm"
FILES = sorted(path.name for path in SLURM.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_bash_reads_the_files(name):
    checked = subprocess.run(["bash", "-n", SLURM / name], capture_output=True, text=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed: apt-get install shellcheck")
def test_shellcheck_finds_nothing():
    files = [f"workflows/slurm/{name}" for name in FILES]
    checked = subprocess.run(["shellcheck", *files], capture_output=True, text=True, cwd=SLURM.parent.parent)
    assert checked.returncode == 0, checked.stdout


# Programs of Slurm and Ray, as far as a job of one node needs them.
PROGRAMS = {
    "ray": "",
    "srun": 'mkdir -p "$RAY_FOLDER/head"; echo here > "$RAY_FOLDER/head/ray_current_cluster"\n'
    'until [[ -e $RAY_FOLDER/../over ]]; do sleep 0.1; done',
    "scancel": 'touch "$RAY_FOLDER/../over"',
    "squeue": '[[ $* == *State* ]] && echo "RUNNING "',
    "scontrol": 'echo "scontrol $*"',
}  # fmt: skip


def test_sigterm_between_the_start_of_ray_and_that_of_the_command_reaches_it():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short one, for RAY_FOLDER
        for name, lines in PROGRAMS.items():
            Path(folder, name).write_text(f"#!/usr/bin/env bash\n{lines}\n")
            Path(folder, name).chmod(0o755)
        job = f"""
            source {SLURM / "ray.sh"}
            set -o functrace
            trap '[[ $BASH_COMMAND != RAY_ADDRESS=* ]] || kill -TERM $BASHPID' DEBUG
            run_with_ray sleep 60
        """
        facts = {"NNODES": 1, "JOB_ID": 1, "TMPDIR": folder, "CPUS_PER_TASK": 1}
        environment = {**os.environ, **{f"SLURM_{name}": str(fact) for name, fact in facts.items()}, "SLURMD_NODENAME": "here"}
        environment["PATH"] = f"{folder}:{os.environ['PATH']}"
        began = time.monotonic()
        done = subprocess.run(["bash", "-c", job], env=environment, capture_output=True, text=True, timeout=100)
        assert done.returncode == 143 and "scontrol requeue 1" in done.stdout, done
        assert time.monotonic() - began < 30


def changed(
    name: str,
    folder: Path,
    command: str,
    *,
    sbatch: str = "--nodes=2 --cpus-per-task=1",
    path: Path | str = Path(sys.executable).parent,
) -> Path:
    """A copy of a script with its four lines changed, as a user would."""
    lines = (SLURM / f"{name}.sbatch").read_text().splitlines()
    first, second = (number for number, line in enumerate(lines) if line.startswith("# CHANGE"))
    assert lines[first + 1].startswith("#SBATCH --partition") and lines[first + 2].startswith("#SBATCH --nodes")
    assert lines[second + 1].startswith("export PATH=") and lines[second + 2].startswith("run_with_ray python")
    lines[first + 1 : first + 3] = ["#SBATCH --partition=test --time=20", f"#SBATCH {sbatch}"]
    lines[second + 1 : second + 3] = [f"export PATH={path}:$PATH", f"run_with_ray {command}"]
    copy = folder / f"{name}.sbatch"
    copy.write_text("\n".join(lines) + "\n")
    return copy


# Jobs. Every process that is started here is one of this Slurm, and ends with it.

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 Gres=gpu:1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 Gres=gpu:1
PartitionName=test Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


class Slurm:
    """A controller and two nodes on this machine."""

    def __init__(self, folder: Path):
        self.folder, self.logs, self.scratch = folder, folder / "logs", folder / "scratch"
        for path in (self.logs, self.scratch, folder / "state"):
            path.mkdir()
        with ExitStack() as stack:
            servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [server.getsockname()[1] for server in servers]
        self._configuration = CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports)
        (folder / "slurm.conf").write_text(self._configuration)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")  # Slurm and Ray count GPUs, and nothing uses them
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        # The scripts ask for nothing of the environment but their scratch folder and the code of this checkout.
        code = {"PYTHONPATH": str(SLURM.parent.parent), "SLURM_TMPDIR": str(self.scratch)}
        self.environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | code
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")

    def start(self) -> None:
        munge = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed", "key-file": "key"}
        self._run("munged", "--force", *(f"--{option}={self.folder}/munge.{name}" for option, name in munge.items()))
        self._run("slurmctld", "-i")
        for name in ("n1", "n2"):
            self._run("slurmd", "-N", name)
        self.wait(lambda: self._run("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"], 60)

    def stop(self) -> None:
        subprocess.run(["scancel", "--user=root"], env=self.environment, check=False)
        self.wait(lambda: not self._run("squeue", "--noheader"), 60)
        for name in ("slurmd-n1", "slurmd-n2", "slurmctld", "munge"):
            if (pid := self.folder / f"{name}.pid").exists():
                process = Path("/proc", pid.read_text().strip())
                os.kill(int(process.name), signal.SIGTERM)
                self.wait(lambda process=process: not process.exists(), 30)

    def _run(self, *command: str) -> str:
        run = subprocess.run(command, env=self.environment, capture_output=True, text=True, cwd=SLURM.parent.parent)
        assert run.returncode == 0, f"{command}: {run.stdout}{run.stderr}"
        return run.stdout

    def submit(self, script: Path) -> str:
        return self._run("sbatch", "--parsable", f"--output={self.logs}/%j", str(script)).strip()

    def signal(self, job: str) -> None:
        """What Slurm does some time before the limit (`--signal=B:TERM@...`)."""
        self._run("scancel", "--batch", "--signal=TERM", job)

    def preempt(self, grace_s: int, parameters: str = "") -> None:
        """Submit a job that needs both nodes and goes before all others, which get so many seconds to end."""
        (self.folder / "slurm.conf").write_text(self._configuration + parameters)
        self._run("scontrol", "reconfigure")
        self._run("scontrol", "update", "partition=test", f"GraceTime={grace_s}")
        self._run("sbatch", "--partition=urgent", "--nodes=2", "--cpus-per-task=2", "--output=/dev/null", "--wrap=true")

    def change_node(self, name: str, state: str) -> None:
        self._run("scontrol", "update", f"NodeName={name}", f"State={state}", "Reason=test")

    def cancel(self, job: str) -> None:
        self._run("scancel", job)

    def state(self, job: str) -> str:
        return re.search(r"JobState=(\S+)", self._run("scontrol", "show", "job", job))[1]

    def restarts(self, job: str) -> int:
        return int(re.search(r"Restarts=(\d+)", self._run("scontrol", "show", "job", job))[1])

    def wait_for_restart(self, job: str, seconds: float = 60) -> None:
        """Wait until the job is back in the queue, with nothing left on the nodes, and take it out."""
        self.wait(lambda: self.restarts(job) == 1 and self.state(job) == "PENDING", seconds, job)
        self.cancel(job)
        self.end(job)

    def said(self, job: str) -> str:
        return (self.logs / job).read_text()

    def wait(self, condition: Callable[[], object], seconds: float, job: str = "") -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and not (job and self.state(job) == "FAILED"), job and self.said(job)
            time.sleep(0.2)

    def end(self, job: str) -> str:
        """The state in which the job ends. Then nothing of its Ray is left."""
        self.wait(lambda: self.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), 900, job)
        assert not list(self.scratch.iterdir()) and not self.processes(str(self.scratch)), self.said(job)
        return self.state(job)

    def processes(self, *parts: str) -> list[int]:
        """The processes with all these parts in their command."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if all(part in command for part in parts):
                found.append(int(folder.name))
        return found


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    if missing := [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]:
        pytest.skip(f"no {missing[0]} here: apt-get install slurm-wlm")
    if os.geteuid():
        pytest.skip("only root can start the nodes of Slurm")
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:  # a short name: it has sockets
        cluster = Slurm(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_preprocessing_goes_on_and_gives_the_same_bytes(slurm, text, tmp_path):  # noqa: F811
    config, out = config_of(text, rows_per_shard=5), tmp_path / "data"
    (tmp_path / "config.yaml").write_text(dump_settings(config))
    command = f"python workflows/preprocess.py --config {tmp_path}/config.yaml --out {out}"
    job = slurm.submit(changed("preprocess", tmp_path, command))
    slurm.wait(lambda: list((out / "parsed").glob("train-*.json")), 600, job)
    slurm.signal(job)
    slurm.wait(lambda: slurm.restarts(job) == 1, 200, job)
    first = {path: path.stat().st_mtime_ns for path in (out / "parsed").glob("train-*.json")}
    assert not (out / "encoded" / "index.json").exists()
    assert slurm.end(job) == "COMPLETED", slurm.said(job)
    preprocess(config.model_copy(update={"workers": 0}), tmp_path / "undisturbed")
    assert snapshot(out) == snapshot(tmp_path / "undisturbed")
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in first.items()), "a finished shard was done again"


LIGHT_RAY = f"""#!{sys.executable}
import sys
from contextlib import ExitStack
from socket import create_server
from ray._private import utils
from ray.scripts.scripts import main
utils.get_dashboard_dependency_error = lambda: ImportError("left out")
with ExitStack() as stack:
    servers = [stack.enter_context(create_server(("", 0))) for _ in range(3)]
    ports = [server.getsockname()[1] for server in servers]
names = ("dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
sys.argv += [f"--{{name}}-port={{port}}" for name, port in zip(names, ports)]
main()
"""


def with_light_nodes(folder: Path) -> str:
    """The folders of `python` and of a `ray` with lighter agents, for which it waits less.

    A busy machine may not start the usual ones within the 15 seconds that Ray gives them.
    """
    (folder / "ray").write_text(LIGHT_RAY)
    (folder / "ray").chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}"


@pytest.mark.cluster
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nodes", [1, 2])
def test_training_that_is_preempted_twice_has_the_same_weights(slurm, tmp_path, nodes):
    """Each time, it saves in its grace time. It prints the seconds from the preemption to the requeue."""
    settings = ("max_steps=2000", "checkpoint_every=500", "validate_every=500", "log_every=10")
    config, run = tiny_config(write_toy_data(tmp_path / "toy" / "data"), "workers=2", *settings), tmp_path / "run"
    (tmp_path / "config.yaml").write_text(dump_settings(config))
    command = f"python workflows/train_wmt.py --config {tmp_path}/config.yaml --out {run}"
    sbatch = f"--nodes={nodes} --cpus-per-task={2 // nodes}"
    job, saved = slurm.submit(changed("train", tmp_path, command, sbatch=sbatch, path=with_light_nodes(tmp_path))), [0]
    for preempted in (1, 2):
        slurm.wait(lambda: any(step > saved[-1] + 50 for step, _ in losses(run)), 600, job)
        began = time.monotonic()
        slurm.preempt(120)
        slurm.wait(lambda preempted=preempted: slurm.restarts(job) == preempted, 200, job)
        saved.append(checkpoint_step(latest_checkpoint(run)))
        print(f"preempted: {time.monotonic() - began:.0f} s, update {saved[-1]}")
        assert saved[-1] % 500 and slurm.said(job).count("the same command continues") == preempted, slurm.said(job)
    assert slurm.end(job) == "COMPLETED" and slurm.restarts(job) == 2, slurm.said(job)
    train_ranks(2, config.model_copy(update={"workers": 0}), tmp_path / "undisturbed")
    assert losses(run) == losses(tmp_path / "undisturbed")
    weights = [latest_checkpoint(folder) / "model.safetensors" for folder in (run, tmp_path / "undisturbed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [session.did["from update"] for session in read_sessions(run)] == saved


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_a_study_goes_on_and_has_the_same_results(slurm, tmp_path):
    models = {"tree_transformer": {}, "transformer": {"model": {"name": "transformer"}}}
    grid = {"fractions": [1.0], "seeds": [1], "models": models}
    config = STUDY | {"max_steps": 2000, "checkpoint_every": 2000, "validate_every": 2000, "log_every": 10, "grid": grid}
    config["data"] = str(write_toy_data(tmp_path / "toy" / "data"))
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command, out = ["--config", tmp_path / "config.yaml", "--out"], tmp_path / "study"
    job = slurm.submit(changed("study", tmp_path, f"python workflows/scaling.py {shlex.join(map(str, command))} {out} workers=1"))
    cells = [out / "cells" / f"{model}-1-seed1" for model in models]
    slurm.wait(lambda: all(len(read_metrics(cell)) > 2 for cell in cells), 600, job)
    slurm.signal(job)
    slurm.wait(lambda: slurm.restarts(job) == 1, 200, job)
    assert [entry.status for entry in Ledger.read(out).entries.values()] == [INTERRUPTED] * 2
    assert slurm.end(job) == "COMPLETED", slurm.said(job)
    run = run_here("scaling.py", *command, tmp_path / "undisturbed")
    assert run.returncode == 0, run.stderr
    for cell in cells:
        other = tmp_path / "undisturbed" / "cells" / cell.name
        assert losses(cell) == losses(other) and losses(cell)[-1][0] == 2000
        for name in ("averaged/model.safetensors", "translations.test.txt"):
            assert (cell / name).read_bytes() == (other / name).read_bytes()


# What the scripts do around Ray. In place of Ray, a process that leaves its note and waits, so that a job takes seconds.

RAY = f"""#!{sys.executable}
import os, sys, time
from pathlib import Path
[folder] = [argument.partition("=")[2] for argument in sys.argv if argument.startswith("--temp-dir=")]
Path(folder).mkdir(parents=True)
Path(folder, "pid").write_text(str(os.getpid()))
Path(folder, "ray_current_cluster").write_text("127.0.0.1:1")
time.sleep(1000)
"""
# Saves after SIGTERM, if Ray still runs.
COMMAND = """
trap 'sleep 3; kill -0 $(< $RAY_FOLDER/head/pid) || exit 1; touch {folder}/saved; exit 143' TERM
touch {folder}/began
sleep 1000 & wait
"""


def with_light_ray(folder: Path, command: str, sbatch: str = "") -> Path:
    (folder / "ray").write_text(RAY)
    (folder / "ray").chmod(0o755)
    (folder / "command.sh").write_text(command)
    sbatch = f"--nodes=1 --cpus-per-task=1 {sbatch}"
    return changed("train", folder, f"bash {folder}/command.sh", sbatch=sbatch, path=folder)


def test_a_job_of_an_array_leaves_the_others_alone(slurm, tmp_path):
    """The last job of an array has the number of the array. Its steps would get few variables here, as with `--export=NONE`."""
    command = f"echo $RAY_ADDRESS; until [[ $SLURM_ARRAY_TASK_ID == 2 || -e {tmp_path}/go ]]; do sleep 0.2; done"
    array = slurm.submit(with_light_ray(tmp_path, command, "--array=1-2 --export=SLURM_TMPDIR"))
    slurm.wait(lambda: slurm.state(f"{array}_2") not in ("PENDING", "RUNNING", "COMPLETING"), 60)
    assert slurm.state(f"{array}_2") == "COMPLETED" and "127.0.0.1:1" in slurm.said(array), slurm.said(array)
    slurm.wait(lambda: slurm.processes(str(slurm.scratch), "--head"), 60)
    time.sleep(1)
    assert slurm.processes(str(slurm.scratch), "--head"), "Ray of the other job was ended"
    (tmp_path / "go").touch()
    assert slurm.end(f"{array}_1") == "COMPLETED"


@pytest.mark.parametrize("status, state", [(143, "PENDING"), (1, "FAILED")])
def test_only_what_sigterm_ended_starts_again(slurm, tmp_path, status, state):
    job = slurm.submit(with_light_ray(tmp_path, f"trap 'exit {status}' TERM; touch {tmp_path}/began; sleep 1000 & wait"))
    slurm.wait(lambda: (tmp_path / "began").exists(), 60)
    slurm.signal(job)
    slurm.wait(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"), 60)
    assert (slurm.state(job), slurm.restarts(job)) == (state, int(status == 143)), slurm.said(job)
    slurm.cancel(job)
    slurm.end(job)


@pytest.mark.parametrize(
    "grace_s, parameters, command, saved",
    [
        (0, "", COMMAND, False),  # Slurm puts it back into the queue at once
        (10, "", COMMAND, True),
        (30, "", COMMAND, True),
        (30, "SlurmctldParameters=preempt_send_user_signal", COMMAND, True),  # to the script, not to its steps
        (10, "", COMMAND.replace("sleep 3", "sleep 100"), False),
        (30, "", COMMAND.replace("sleep 3", "exit 1"), False),
    ],
)
def test_a_preempted_job_saves_if_there_is_time_and_starts_again(slurm, tmp_path, grace_s, parameters, command, saved):
    job = slurm.submit(with_light_ray(tmp_path, command.format(folder=tmp_path), "--nodes=2"))
    slurm.wait(lambda: (tmp_path / "began").exists(), 60)
    slurm.preempt(grace_s, parameters)
    slurm.wait_for_restart(job)
    assert not saved or (tmp_path / "saved").exists(), slurm.said(job)


def test_a_job_that_is_preempted_before_ray_runs_starts_again(slurm, tmp_path):
    script = with_light_ray(tmp_path, "sleep 1000")
    (tmp_path / "ray").write_text(RAY.replace("ray_current_cluster", "no_note"))
    job = slurm.submit(script)
    slurm.wait(lambda: slurm.processes(str(slurm.scratch), "--head"), 60)
    slurm.preempt(30)
    slurm.wait_for_restart(job)


@pytest.mark.cluster
def test_a_job_that_does_not_end_before_its_limit_starts_again(slurm, tmp_path):
    """Slurm sends the signal of train.sbatch at once, because the whole job has less time than it names."""
    job = slurm.submit(with_light_ray(tmp_path, "trap '' TERM; sleep 1000", "--time=1"))
    slurm.wait_for_restart(job, 150)
    assert "did not end after SIGTERM" in slurm.said(job)


def test_a_job_whose_node_dies_starts_again(slurm, tmp_path):
    job = slurm.submit(with_light_ray(tmp_path, COMMAND.format(folder=tmp_path), "--nodes=2"))
    slurm.wait(lambda: (tmp_path / "began").exists(), 60)
    slurm.change_node("n2", "DOWN")
    try:
        slurm.wait_for_restart(job)
    finally:
        slurm.change_node("n2", "RESUME")


def test_a_job_whose_time_is_over_before_ray_runs_ends(slurm, tmp_path):
    """Back in the queue, it would meet the same signal again and again."""
    script = with_light_ray(tmp_path, "sleep 1000")
    (tmp_path / "ray").write_text(RAY.replace("ray_current_cluster", "no_note"))
    job = slurm.submit(script)
    slurm.wait(lambda: slurm.processes(str(slurm.scratch), "--head"), 60)
    slurm.signal(job)
    slurm.wait(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"), 120)
    assert slurm.end(job) == "FAILED" and "SIGTERM came before Ray had started" in slurm.said(job), slurm.said(job)


def test_a_long_folder_is_not_used_for_sockets(slurm, tmp_path, monkeypatch):
    monkeypatch.setitem(slurm.environment, "SLURM_TMPDIR", str(tmp_path))
    job = slurm.submit(with_light_ray(tmp_path, "echo $RAY_FOLDER"))
    assert slurm.end(job) == "COMPLETED" and slurm.said(job).startswith("/tmp/ray-"), slurm.said(job)
    assert not Path(slurm.said(job).split()[0]).exists()
    session = "session_2026-11-25_22-20-24_454465_4194304"  # the longest name
    assert len(f"{'x' * 24}/ray-XXXXXX/worker/{session}/sockets/plasma_store") <= 107


COUNT = """
import time
import ray
ray.init(logging_level="ERROR", log_to_driver=False)
before = None
while True:
    now = [node["Alive"] for node in ray.nodes()]
    if now != before:
        print(now, *map(ray.cluster_resources().get, ("CPU", "GPU")), flush=True)
    before = now
    time.sleep(0.5)
"""


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_a_node_whose_ray_dies_comes_back_and_a_cancelled_job_does_not(slurm, tmp_path):
    (tmp_path / "count.py").write_text(COUNT)
    nodes = "--nodes=2 --gpus-per-node=1 --cpus-per-task=1"
    job = slurm.submit(changed("train", tmp_path, f"python {tmp_path}/count.py", sbatch=nodes))
    slurm.wait(lambda: (slurm.logs / job).exists() and "[True, True] 2.0 2.0" in slurm.said(job), 600, job)
    [raylet] = slurm.processes(str(slurm.scratch), "/worker/", "raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    slurm.wait(lambda: re.search(r"\[.*False.*\] 2\.0 2\.0", slurm.said(job)), 600, job)
    slurm.cancel(job)
    assert slurm.end(job) == "CANCELLED" and slurm.restarts(job) == 0, slurm.said(job)

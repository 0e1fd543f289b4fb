"""Shared by all tests: repository paths, threads, the command line as a user has it."""

import gc
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import hypothesis_profiles  # noqa: F401 (loads the profile of all tests)
import jinja2
import numpy as np
import pytest
import torch
from commands import ForkedServer, ForkedTester, forked_trial, start_forkserver
from data_beside import DATA
from execnet import gateway_io
from pictures import pictures
from scheduling import pytest_xdist_make_scheduler  # noqa: F401 (a hook)
from toydata import write_toy_data

from treenet.data import loader_processes
from treeproc.common import trial
from treeproc.common.messages import messages_shown
from treeproc.common.provenance import software
from treeproc.parsers import ParserConfig, model_files, stanza_parser
from treeproc.parsers.model_files import SHIPPED_MODELS

REPOSITORY = Path(__file__).resolve().parent.parent

# Sums come out differently with other numbers of threads; one in this process, one in those that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# PyTorch's own function also notes where it was called, for GPUs that a build for CPUs does not have: a millisecond each time.
if not torch.cuda.is_available():
    torch.manual_seed = torch.default_generator.manual_seed
# Compilations and exports trace faster: SymPy's default cache of 1,000 expressions is too small for them.
os.environ["SYMPY_CACHE_SIZE"] = "100000"
# Whoever asks for GPUs before a fork takes them from the processes after it, unless it asks the driver's library.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# A cluster that happens to run on this machine is none of the tests' business.
os.environ.setdefault("RAY_ADDRESS", "local")
# Copies of objects and notes of hashes are this run's own.
os.environ["TREE_ATTENTION_CACHE"] = (_cache := tempfile.TemporaryDirectory(prefix="tree-attention-cache-")).name
# A function shows a test the messages that it shows in a command, without the progress of preprocessing.
_messages = messages_shown()
_messages.__enter__()
logging.getLogger("treeproc").setLevel(logging.WARNING)
logging.getLogger("treeproc.common.messages").setLevel(logging.INFO)
# pytest listens to loggers that do not propagate. This one describes each step of a compilation as soon as anybody listens.
logging.getLogger("torch.__trace").propagate = True


# A shipped parser is built in a CPU second, by hundreds of tests. Those in a process share its steps, and what its files hold.
def _once_if_shipped(module: ModuleType, name: str, files: Callable[..., Iterable[Path]]) -> None:
    """Let a function of a module return again what it returned for the same arguments, if it reads shipped files alone."""
    function, known = getattr(module, name), {}

    def call(*arguments: Any) -> Any:
        read = [path.resolve() for path in files(*arguments)]  # folders of tests have links to shipped files
        if not all(path.is_relative_to(SHIPPED_MODELS.resolve()) for path in read):
            return function(*arguments)
        key = (*read, *(one.model_dump_json() for one in arguments if isinstance(one, ParserConfig)))
        if key not in known:
            known[key] = function(*arguments)
        return known[key]

    setattr(module, name, call)


_once_if_shipped(stanza_parser, "load_processors", lambda config, models: models.read().values())
for _module, _name in ((stanza_parser, "load_archive"), (model_files, "check_archive"), (model_files, "file_sha256")):
    _once_if_shipped(_module, _name, lambda path, *hint: [path])
# Dozens of pages of reports have the same templates.
_compile, _compiled = jinja2.Environment.compile, {}
jinja2.Environment.compile = lambda pages, *text: _compiled.get(text) or _compiled.setdefault(text, _compile(pages, *text))
# Ray's workers are nice to other processes, and get next to nothing where these are busy.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray ends a worker that has been idle for a second if it has more workers than cores, and starts another for the next task.
os.environ.setdefault("RAY_num_workers_soft_limit", "20")
# A shell's background jobs ignore Ctrl-C, and so do the processes that they start; tests that interrupt a process need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Fork the processes of pytest-xdist, and those that tests start, from one that has loaded libraries."""
    from toyruns import LIBRARIES, LIBRARIES_OF_TESTS

    start_forkserver([*LIBRARIES, *LIBRARIES_OF_TESTS])
    gateway_io.create_io = ForkedTester


def pytest_configure(config: pytest.Config) -> None:
    """Fork trials of files and processes of Ray too, where the process to fork from is there anyway.

    `own_trials` and `own_workers` are the fixtures against it.
    """
    if hasattr(config, "workerinput"):
        from forked_ray import fork_processes_of_ray

        config.add_cleanup((folder := tempfile.TemporaryDirectory(prefix="forks-")).cleanup)
        fork_processes_of_ray(Path(folder.name))
        trial.subprocess = SimpleNamespace(**vars(subprocess) | {"run": forked_trial})


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """Let each process of pytest-xdist begin with other modules: Python compiles a module only for the first one."""
    report = yield
    if isinstance(collector, pytest.Dir) and (worker := getattr(collector.config, "workerinput", None)):
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector: it would go through all modules and tests again and again, also later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 50)  # the default of 700 objects takes 2 % of the tests' time
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, do not even load the modules that are slow as a whole."""
    if config.getoption("markexpr") != "quick" or collection_path.suffix != ".py":
        return None
    return (
        bool(re.search(r"^pytestmark = (\[\s*)?pytest\.mark\.(slow|cluster)\b", collection_path.read_text(), re.MULTILINE))
        or None
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the long modules, mark quick tests, and leave out the tests of real data where there is none."""
    # So no process ends long after the others. The tests of a module stay together, or its fixtures would be made twice.
    long, slow = ({item.path for item in items if item.get_closest_marker(mark)} for mark in ("long", "slow"))
    items.sort(key=lambda item: (item.path not in long, item.path not in slow, item.path))
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "cluster", "data"))):
            item.add_marker("quick")
    if not DATA.is_dir():
        beside = [item for item in items if item.get_closest_marker("data")]
        config.hook.pytest_deselected(items=beside)
        items[:] = [item for item in items if not item.get_closest_marker("data")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test, with the fixtures that it makes, begins with the same random numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_in_quick_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("quick"):
        software()  # asks git for the commit, once in a process; what a quick test records needs it

        def refuse(*arguments, **options):
            pytest.fail("a quick test started a process: mark it, or its module, with pytest.mark.slow")

        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        monkeypatch.setattr(trial, "subprocess", subprocess)


@pytest.fixture(scope="module", autouse=True)
def _no_ray_after_a_module() -> Iterator[None]:
    """Ray takes 6 % of a core while nothing runs on it: as much in a minute as its start."""
    yield
    if (ray := sys.modules.get("ray")) and ray.is_initialized():
        ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def _no_repeated_requests_of_an_earlier_module() -> None:
    """A busy machine can repeat a request to a store. Commands tell how many, at their end."""
    if store_requests := sys.modules.get("treeproc.common.store_requests"):
        store_requests._repeats = 0


@pytest.fixture
def one_core_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that starts in the test has one core: a process each for what it runs, which takes seconds to start."""
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 1}')


@pytest.fixture
def forked_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader processes of the test do not start a program. `test_loader_processes.py` tests the program."""
    names = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired, "Popen": ForkedServer}
    monkeypatch.setattr(loader_processes, "subprocess", SimpleNamespace(**names))


@pytest.fixture
def own_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of files start a program, as those of users do."""
    monkeypatch.setattr(trial, "subprocess", subprocess)


@pytest.fixture
def own_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray of this test alone starts programs as workers, as those of users do. Its agents are forks: Ray waits 15 seconds."""
    import forked_ray
    import ray
    from ray._private import services

    ray.shutdown()
    monkeypatch.setattr(services, "start_raylet", getattr(services.start_raylet, "__wrapped__", services.start_raylet))
    agents = [forked_ray.python, "-u"]
    monkeypatch.setattr(services, "_build_python_executable_command_memory_profileable", lambda *arguments: agents)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy data set. Modules that need another one have a fixture of this name."""
    return write_toy_data(tmp_path_factory.mktemp("toy") / "data")


@pytest.fixture
def rendered() -> Iterator[None]:
    """The test looks at pictures, which `tests/pictures.py` leaves empty in others."""
    with pictures():
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def run_workflow():
    """Run `python workflows/NAME ARGS...` to its end; returns the completed process with its output."""

    def run(name: str, *args: object, **options) -> subprocess.CompletedProcess:
        command = [sys.executable, str(REPOSITORY / "workflows" / name), *map(str, args)]
        options.setdefault("env", os.environ.copy())
        return subprocess.run(command, capture_output=True, text=True, timeout=280, **options)

    return run

"""Which process runs which module: pytest-xdist's `--dist loadfile`, which goes on when a process dies."""

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class Scheduling(LoadFileScheduling):
    """Give out again only what a dead process has not run. pytest-xdist 3.8 gives out all, and waits for ever at the end."""

    def remove_node(self, node: WorkerController) -> str | None:
        modules = self.assigned_work.pop(node)
        waiting = [(module, test) for module, tests in modules.items() for test, ended in tests.items() if not ended]
        if not waiting:
            return None
        module, died_in = waiting[0]
        modules[module][died_in] = True  # it has failed
        self.workqueue.update((module, tests) for module, tests in modules.items() if not all(tests.values()))
        for other in self.assigned_work:
            self._reschedule(other)
        return died_in

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # it is new, and still collects
        super()._reschedule(node)
        # A process begins with a test when it knows the next one.
        if self.workqueue and self._pending_of(self.assigned_work[node]) == 1:
            super()._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None

"""A job that kills its process of a pool. The process imports this module, and nothing else of the tests."""

import os
import signal


def kill_this_process(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)

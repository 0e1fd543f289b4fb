"""Connect to a Ray cluster or start an embedded one: the same for preprocessing and training."""

import logging
import os
import signal
import threading

import ray


def start_ray() -> None:
    """Connect to the cluster of a submitted job (RAY_ADDRESS), else start Ray inside this process.

    Workers' own output stays in Ray's logs: the jobs report progress themselves. The caller's SIGTERM
    handler is kept, which `ray.init` replaces by its own.
    """
    if ray.is_initialized():
        return
    options: dict = {"logging_level": logging.ERROR, "log_to_driver": False}
    if "RAY_ADDRESS" not in os.environ:
        options["include_dashboard"] = False
        # Ray's C++ side writes notes about its own actors to the terminal.
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if threading.current_thread() is not threading.main_thread():
        ray.init(**options)
        return
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(**options)
    signal.signal(signal.SIGTERM, handler)

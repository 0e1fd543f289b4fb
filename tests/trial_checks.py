"""Checks that pass a limit, for another process. It imports only this file."""

import os


def allocates(argument: bytes) -> None:
    bytearray(1 << 30)


def hangs(argument: bytes) -> None:
    while True:
        pass


def dies(argument: bytes) -> None:
    os.abort()

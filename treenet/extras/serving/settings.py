"""Settings of the server: where it listens, who may ask, what a request may hold, how requests are batched."""

import ipaddress
import os
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from treenet.config import DecodingConfig
from treenet.runs.checkpoint import AVERAGED
from treenet.runs.run_folder import Checkpoint
from treeproc.common.settings import Effect, Settings, UserError
from treeproc.common.storage import AnyPath, DataPath

# A token that a person or a program can guess protects nothing.
_SHORTEST_TOKEN, _LONGEST_TOKEN = 16, 4096


class ServeSettings(Settings):
    """Settings of serve.py."""

    host: str = Field("127.0.0.1", description="address to listen at; one that other machines reach needs a token")
    port: int = Field(8000, ge=0, le=65535, description="port to listen at; 0 takes a free one")
    token_file: Annotated[DataPath | None, Effect.NONE] = Field(
        None, description="file that holds the token; clients send it as 'Authorization: Bearer TOKEN'"
    )
    token_variable: str | None = Field(None, description="environment variable that holds the token, instead of a file")
    checkpoint: Checkpoint = AVERAGED
    replicas: PositiveInt = Field(1, description="processes that parse and translate; each takes one CPU")
    use_gpu: bool = Field(False, description="translate on GPUs, one for each replica")
    batch_requests: PositiveInt = Field(
        32, description="requests that a replica parses and translates together at most; 1: no batches"
    )
    batch_wait_ms: NonNegativeInt = Field(5, description="milliseconds that a replica waits for more requests of a batch")
    waiting_requests: PositiveInt = Field(256, description="most accepted requests without an answer yet; more get status 503")
    timeout_s: PositiveFloat = Field(
        120,
        description="seconds for a request, from its first byte to its answer; then status 503. A client has the same time to "
        "send its request, and again to receive the answer",
    )
    request_bytes: PositiveInt = Field(1 << 20, description="most bytes of a request; larger ones get status 413")
    request_lines: PositiveInt = Field(100, description="most lines of a request")
    line_characters: PositiveInt = Field(2000, description="most characters of a line")
    line_words: PositiveInt = Field(300, description="most words of a line")
    line_phrases: PositiveInt = Field(
        10, description="most phrases of a line in must_appear, and most strings in must_not_appear"
    )
    max_leaves: PositiveInt = Field(1000, description="most pieces of a line; the server does not translate longer lines")
    attention_numbers: PositiveInt = Field(1_000_000, description="most attention weights in an answer; further lines have none")
    decoding: DecodingConfig = Field(DecodingConfig(), description="beam search; what is not set here is as in the run")

    @property
    def is_local(self) -> bool:
        """Return whether only this machine reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def read_token(settings: ServeSettings) -> str | None:
    """Return the token that clients must send; None if the server is local and no token is set.

    Raises UserError if a token is missing, cannot be read, or is too short.
    """
    if settings.token_file is not None and settings.token_variable is not None:
        raise UserError("give token_file or token_variable, not both")
    if settings.token_file is not None:
        where, text = str(settings.token_file), _read_file(settings.token_file)
    elif settings.token_variable is not None:
        where, text = f"the variable {settings.token_variable}", os.environ.get(settings.token_variable, "")
    elif settings.is_local:
        return None
    else:
        raise UserError(
            f"host={settings.host} can be reached by other machines: give token_file=FILE or token_variable=NAME, or leave "
            "host out"
        )
    token = text.strip()
    if not (_SHORTEST_TOKEN <= len(token) <= _LONGEST_TOKEN and token.isascii() and token.isprintable() and " " not in token):
        raise UserError(
            f"{where} must hold a token of {_SHORTEST_TOKEN} to {_LONGEST_TOKEN} ASCII characters without blanks; make one: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


def _read_file(path: AnyPath) -> str:
    try:
        with path.open("rb") as file:
            return file.read(2 * _LONGEST_TOKEN).decode("ascii", errors="replace")
    except OSError as error:
        raise UserError(f"token_file={path} cannot be read: {error.strerror}") from None

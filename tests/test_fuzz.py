"""Readers on garbage: rows or a one-line error with file and line. The long run is benchmarks/fuzz_inputs.py."""

import sys
from pathlib import Path

import pytest

from treeproc.settings import UserError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import fuzz_inputs


@pytest.mark.parametrize("kind", fuzz_inputs.KINDS)
def test_readers_on_garbage(kind):
    report = fuzz_inputs.fuzz(kind, 1000, first_seed=2)
    assert report["examples"] >= 1000 and report["refused"] > 0 and report["rows"] > 0


@pytest.mark.parametrize("message", ["a problem", "fuzz, line 3: two\nlines"])
def test_the_fuzzer_takes_no_other_message(message):
    def refuse():
        raise UserError(message)

    with pytest.raises(AssertionError, match="not a one-line message"):
        fuzz_inputs.read_or_refuse(refuse)

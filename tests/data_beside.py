"""The folder of real data beside the repository, which a clone has not: its licences let nobody copy it."""

from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

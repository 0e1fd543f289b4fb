"""Pictures are built in every test, and rendered only in those that look at one: rendering took a tenth of all CPU seconds."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from matplotlib.figure import Figure

_render = Figure.savefig
_wanted = False


def _save(figure: Figure, place: Any, **options: Any) -> None:
    """Write an empty picture to a buffer, unless pictures are wanted. Files of benchmarks are always rendered."""
    if _wanted or not isinstance(place, io.BytesIO | io.StringIO):
        _render(figure, place, **options)
    elif isinstance(place, io.StringIO):
        place.write("<svg></svg>")
    else:
        place.write(b"<svg></svg>" if options["format"] == "svg" else b"")


Figure.savefig = _save  # type: ignore[method-assign]


@contextmanager
def pictures() -> Iterator[None]:
    """Render the pictures that are saved meanwhile."""
    global _wanted
    before, _wanted = _wanted, True
    try:
        yield
    finally:
        _wanted = before

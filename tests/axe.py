"""axe-core in the browser of tests: it finds what hinders people who use a keyboard, a screen reader or large letters."""

import os
from pathlib import Path

from browser import Browser

AXE = Path(os.environ.get("AXE") or Path(__file__).resolve().parent.parent / ".axe/node_modules/axe-core/axe.min.js")
NO_AXE = "" if AXE.is_file() else "needs axe-core: make axe"
# A phone, and a desktop.
WIDTHS = (320, 1280)


def violations(window: Browser, width: int) -> list[str]:
    """Return the findings of axe on the page at this width, light and dark, with all details open."""
    window.resize(width, 900, phone=width < 500)
    window.run("document.querySelectorAll('details').forEach((d) => d.open = true);")
    window.run(AXE.read_text(encoding="utf-8"))
    found = []
    for scheme in ("dark", "light"):
        window.prefer(scheme)
        result = window.run("return axe.run(document, {resultTypes: ['violations']});")
        assert len(result["passes"]) > 5  # it looked at the page
        for rule in result["violations"]:
            found += [f"{scheme}, {rule['id']}: {rule['help']}: {node['html'][:200]}" for node in rule["nodes"]]
    return found

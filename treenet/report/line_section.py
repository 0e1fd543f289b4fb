"""The section of all sentences: controls that sort and filter, and a list that the script of the page fills."""

from html import escape

from treenet.report.lines import Lines
from treenet.report.markup import paragraph, tag
from treenet.report.report_model import Page

# Values of the script, and what they are called. Those of `change` are left out where there is one system.
_ORDERS = (
    ("change-down", "change in chrF, gains first"),
    ("change-up", "change in chrF, losses first"),
    ("change-size", "change in chrF, largest first"),
    ("chrf-up", "chrF, lowest first"),
    ("chrf-down", "chrF, highest first"),
    ("words-down", "words, most first"),
    ("words-up", "words, fewest first"),
    ("depth-down", "depth, deepest first"),
    ("depth-up", "depth, flattest first"),
    ("line-up", "line"),
)


def show_lines(page: Page) -> list[str]:
    """Show a form, an empty list, and the data of the script in `page.lines`."""
    lines = page.report.scored.lines
    if lines is None:
        return []
    pictures = [views[0].line for views in page.report.inside.views.values()]
    page.lines = lines.to_json() | {"pictures": pictures}
    paired = lines.baseline is not None
    said = f"All {lines.total:,} sentences of {page.report.split}"
    if len(lines.line) < lines.total:
        said = f"{len(lines.line):,} of the {lines.total:,} sentences of {page.report.split}"
        said += ", those whose translations differ most in chrF," if paired else ", the first ones,"
        said += " so that this page stays small"
    out = [
        paragraph(f"{said}. chrF is the score of the single sentence. Depth is that of its tree in the data of {lines.measured}.")
    ]
    if paired:
        right, wrong = tag("mark", "so", class_="right"), tag("mark", "so", class_="wrong")
        legend = f"Marks show words in which the two translations differ: {right} if the reference has the word, {wrong} if not."
    else:
        legend = f"Marks show words that the reference does not have: {tag('mark', 'so', class_='wrong')}."
    out.append(tag("p", legend))
    out.append(tag("form", _controls(lines), class_="filters", aria_label="Sort and filter sentences"))
    out.append(tag("p", "", class_="note count", role="status"))
    out.append(tag("ol", "", class_="lines", aria_label="Sentences"))
    out.append(tag("p", tag("button", "Show more", type="button", class_="more", hidden="")))
    out.append(tag("noscript", paragraph("The list needs JavaScript; translations are in the run folders.")))
    return out


def _controls(lines: Lines) -> str:
    paired = lines.baseline is not None
    out = ""
    others = [place for place in range(len(lines.systems)) if place != lines.baseline]
    if len(others) > 1:
        options = "".join(tag("option", escape(lines.systems[place]), value=place) for place in others)
        out += tag("label", "system" + tag("select", options, name="system"))
    orders = [(value, name) for value, name in _ORDERS if paired or not value.startswith("change")]
    out += tag("label", "sort by" + tag("select", "".join(tag("option", name, value=v) for v, name in orders), name="order"))
    ranges = (("change", "change in chrF" if paired else "chrF"), ("words", "words"), ("depth", "depth"))
    for name, title in ranges:
        content = tag("legend", title)
        for end, word in (("from", "at least"), ("to", "at most")):
            content += f'<input type="number" step="any" name="{name}-{end}" placeholder="{word}" aria-label="{title}, {word}">'
        out += tag("fieldset", content)
    out += '<label>text<input type="search" name="text" placeholder="in any line"></label>'
    return out + tag("button", "Clear", type="reset")

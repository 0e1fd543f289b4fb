"""The sections of sentences: the list of all of them, and pictures of some with a tree and the weights of attention."""

import base64
from html import escape

import numpy as np

from treenet.report.figures import shade
from treenet.report.lines import Lines
from treenet.report.markup import paragraph, tag
from treenet.report.report_model import Page, links
from treenet.report.sentence_views import END, WORD_START, View, draw_svg, lay_out, piece_text

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


def show_sentences(page: Page) -> list[str]:
    report = page.report
    if not report.inside.views:
        return []
    out = [
        paragraph(
            "Choose a target token: point at it, tap it, or use the arrow keys. The shade of a leaf or a phrase is the attention "
            "that it gets from the token; the number below is in %. Translations are those of the models. The weights are "
            "those with which the model predicts the token. The choice beside the heads shows the encoder's self-attention "
            "instead."
        ),
        tag("div", "".join(_swatch(share) for share in (0.01, 0.05, 0.2, 0.5, 1)), class_="swatches", aria_hidden="true"),
    ]
    if report.inside.left_out:
        out.append(paragraph(f"{report.inside.left_out} more sentences are left out to keep this page small."))
    if report.inside.without_encoder:
        message = f"The encoder's attention of {report.inside.without_encoder} sentences is left out to keep this page small."
        out.append(paragraph(message))
    for views in report.inside.views.values():
        first = views[0]
        pairs = [("source", first.source), ("reference", first.reference)]
        content = "".join(tag("dt", title) + tag("dd", escape(value)) for title, value in pairs)
        out.append(tag("h3", f"Line {first.line} of {escape(report.split)}", id=f"line-{first.line}"))
        out.append(tag("dl", content, class_="text"))
        out += [_view(page, view) for view in views]
    return out


def _swatch(share: float) -> str:
    fills = (
        f'<i style="background: color-mix(in srgb, var(--{kind}) {100 * shade(share):.0f}%, var(--page))"></i>'
        for kind in ("leaf", "node")
    )
    return tag("span", "".join(fills) + f"{100 * share:.0f} %")


def _view(page: Page, view: View) -> str:
    layers, heads, targets, positions = view.weights.shape
    number_ = len(page.views)
    tokens = [piece_text(piece) for piece in view.tokens[:-1]] + ["end of sentence"]
    leaves = [piece_text(piece) for piece in view.leaves]
    layout = lay_out(view)
    names = leaves + [f"{box.text}\t{box.phrase}" for box in layout.boxes[len(leaves) :]]
    page.views.append(
        {
            "layers": layers,
            "heads": heads,
            "positions": positions,
            "leaves": len(leaves),
            "tokens": tokens,
            "names": names,
            "weights": pack(view.weights),
            "encoder": view.self_weights is not None
            and {"layers": view.self_weights.shape[0], "weights": pack(view.self_weights)},
        }
    )
    words: list[list[str]] = []  # buttons of a word stay on one line
    for place, piece in enumerate(view.tokens[:-1]):
        if not place or piece.startswith(WORD_START):
            words.append([])
        words[-1].append(_token(place, tokens[place]))
    words = [[_token(-1, "all tokens", "aside")], *words, [_token(targets - 1, END, "aside")]]
    buttons = [tag("span", "".join(word), class_="word") for word in words]
    label = f"{view.run}, line {view.line}"
    selects = _select("layer", layers, label) + _select("head", heads, label)
    if view.self_weights is not None:
        choice = tag("option", "decoder, to the source", value="decoder") + tag("option", "encoder, within it", value="encoder")
        selects += tag("label", "attention of" + tag("select", choice, class_="source", aria_label=f"attention of {label}"))
    title = f'{escape(view.run)} <span class="p">chrF of this sentence {view.chrf:.1f}; {links(view.figure)}</span>'
    what = "Parse tree of the source" if view.labels else "Leaves of the source"
    tree = tag("div", draw_svg(layout, f"{what}: {view.source}"), class_="box", tabindex=0, role="group", aria_label=what)
    tokens_ = tag("div", " ".join(buttons), class_="tokens", role="radiogroup", aria_label=f"Target tokens of {label}")
    beside = tag("div", tokens_ + tag("div", "", class_="readout", aria_live="polite"), class_="beside")
    content = tag("header", tag("h4", title) + tag("div", selects, class_="controls"))
    content += tag("div", tree + beside, class_="picture")
    return tag("figure", content, class_="attention", data_view=number_, data_line=view.line, aria_label=label)


def _token(place: int, piece: str, classes: str = "") -> str:
    more = {"class_": classes} if classes else {}
    checked = str(place == -1).lower()
    return tag("button", escape(piece), type="button", role="radio", aria_checked=checked, data_t=place, **more)


def _select(what: str, count: int, label: str) -> str:
    options = tag("option", "mean", value=-1) + "".join(tag("option", str(i + 1), value=i) for i in range(count))
    return tag("label", what + tag("select", options, aria_label=f"{what} of {label}"))


def pack(weights: np.ndarray) -> str:
    """Pack weights between 0 and 1 as base64 of little-endian 16-bit numbers; page.js reads them."""
    return base64.b64encode(np.rint(weights * 65535).astype("<u2").tobytes()).decode()

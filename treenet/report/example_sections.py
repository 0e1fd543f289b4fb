"""The sections of examples: scores and examples of classifiers; all sentences, and some with their tree and attention."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from treenet.data.splits import read_sources, read_split
from treenet.report.figures import shade
from treenet.report.lines import Lines
from treenet.report.markup import TableCell, number, paragraph, show_status, tag, text
from treenet.report.report_inputs import Missing, ReportRun, own_index
from treenet.report.report_model import Page, links
from treenet.report.sentence_views import END, WORD_START, View, draw_svg, lay_out, piece_text
from treenet.report.settings import ReportSettings
from treenet.runs.run_results import parse_columns, predictions_path, read_predictions
from treenet.tasks.learning import find_unlearned, say_unlearned
from treeproc.common.settings import UserError
from treeproc.shards.store import class_names

CLASSIFICATION = "classification"
_MOST_CLASSES = 20  # of a confusion matrix on a page
_SCORES = {"accuracy": "accuracy, %", "macro_f1": "macro F1, %", "binary_accuracy": "two classes, %"}


@dataclass(frozen=True)
class ClassExample:
    """An example of the split: its line, text, class, and the class that each run predicts, by name of the run."""

    line: int
    text: str
    label: str
    predicted: dict[str, str]


def choose_class_examples(runs: Sequence[ReportRun], settings: ReportSettings) -> list[ClassExample]:
    """Return the chosen examples, or those in which predictions differ most from each other, and then from the class.

    Runs whose scores are stale, or of another text than the first run's, take no part. There is none without their data
    set or its text, or of pairs. Raises UserError for a line that the split does not have.
    """
    split = settings.split  # or another result of one, as test.last
    there = [run for run in runs if split in run.scores and not run.statuses[split].changed and own_index(run)]
    there = [run for run in there if run.scores[split].get("own_data", True)]
    there = [run for run in there if run.fingerprints.get("text_fingerprint") == there[0].fingerprints.get("text_fingerprint")]
    index = own_index(there[0]) if there else None
    if index is None or index.get("pairs"):
        return []
    data, of = there[0].data, there[0].scores[split].get("split", split)
    try:
        numbers = [row["example_id"] for row in read_split(data, "text", of)]
        texts = dict(zip(numbers, read_sources(data, of), strict=True))
    except UserError as error:
        there[0].missing.append(Missing(f"no examples: {error}"))
        return []
    names = class_names(index)
    rows = {run.name: _predictions(run, split, set(texts), len(names)) for run in there}
    first = rows[there[0].name]
    if settings.lines:
        numbers = [line - 1 for line in settings.lines]
        if missing := [number + 1 for number in numbers if number not in first]:
            raise UserError(f"lines: {split} has no line {missing[0]}")
    else:

        def doubt(example: int) -> tuple[int, int]:
            found = [own[example][1] for own in rows.values()]
            return -len(set(found)), -sum(one != first[example][0] for one in found)

        wrong = [one for one in first if any(own[one][1] != first[one][0] for own in rows.values())]
        numbers = sorted(wrong, key=lambda one: (*doubt(one), one))[: settings.sentences]
    return [
        ClassExample(one + 1, texts[one], names[first[one][0]], {name: names[own[one][1]] for name, own in rows.items()})
        for one in numbers
    ]


def _predictions(run: ReportRun, result: str, examples: set[int], num_classes: int) -> dict[int, tuple[int, int]]:
    """Return class and predicted class by example. Raises UserError for a file of other examples or classes."""
    path, hint = predictions_path(run.folder, result), f"run {run.statuses[result].command}"
    columns = {"example_id": int, "label": int, "predicted": int}
    numbers, *classes = parse_columns(read_predictions(run.folder, result, hint), path, columns, hint)
    found = dict(zip(numbers, zip(*classes, strict=True), strict=True))
    if found.keys() != examples or max(map(max, found.values())) >= num_classes:
        raise UserError(f"{path} is damaged: its examples or classes are not those of {run.data}; {hint}")
    return found


def show_classes(page: Page) -> list[str]:
    """Return the table of scores, and the confusion matrix of each run on the split."""
    split = page.report.split
    scored = [(run, result, entry) for run in page.report.runs for result, entry in run.scores.items() if "accuracy" in entry]
    if not scored:
        return []
    shown = {key: title for key, title in _SCORES.items() if any(key in entry for *_, entry in scored)}
    head = [text("run"), text("result"), TableCell("examples", "n")]
    for title in shown.values():
        head += [TableCell(title, "n"), TableCell("95 %", "n")]
    rows = []
    for run, result, entry in scored:
        cells = [text(run.name), text(result + show_status(run.statuses[result])), number(entry.get("num_examples"))]
        for key in shown:
            interval = entry.get(f"{key}_interval")
            cells.append(number(100 * entry[key] if key in entry else None, ".2f"))
            cells.append(TableCell("{:.2f} to {:.2f}".format(*(100 * end for end in interval)) if interval else "–", "n"))
        rows.append(cells)
    said = "Scores of the runs. The intervals hold for other examples, and not for other seeds of training."
    out = [page.table(said, head, rows)]
    unlearned = find_unlearned({f"{run.name}, {result}": entry for run, result, entry in scored})
    out += [paragraph(f"{line}.", class_="note") for line in say_unlearned(unlearned)]
    for run, result, entry in scored:
        names, matrix = entry.get("classes"), entry.get("confusion")
        if result == split and matrix and names and len(names) <= _MOST_CLASSES:
            head = [text("class"), *(TableCell(text(name).content, "n") for name in names)]
            cells = [[text(name), *(number(count) for count in row)] for name, row in zip(names, matrix, strict=True)]
            out.append(page.table(f"{run.name} on {split}: examples by class (row) and predicted class (column).", head, cells))
    out.append(
        paragraph(
            "evaluate --compare tests two of these runs; a test over seeds needs the folder of compare-seeds.", class_="note"
        )
    )
    return out


def show_class_examples(page: Page) -> str:
    """Return a table of examples with the predictions of the runs."""
    examples = page.report.scored.examples
    if not examples:
        return ""
    names = list(examples[0].predicted)
    rows = [
        [number(one.line), TableCell(text(one.text).content, "wrap"), text(one.label), *(text(one.predicted[n]) for n in names)]
        for one in examples
    ]
    said = f"Lines of {page.report.split} and their predicted classes. By default, they are lines on which a run is wrong."
    return page.table(said, [TableCell("line", "n"), text("text"), text("class"), *map(text, names)], rows)


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
    page.lines = vars(lines) | {"pictures": pictures}
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

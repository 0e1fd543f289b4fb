"""Figures of a report: as PNG and SVG files, and as SVG for the page that follows its light or dark scheme."""

import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import matplotlib.colors
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from treenet.analysis.attention_stats import Group
from treenet.report.sentence_views import BOX_HEIGHT, FONT_SIZE, TreeLayout, View
from treeproc.common.files import atomic_write

# Colours of the light scheme; on the page each is a variable of page.css with a twin in the dark scheme.
SERIES = ("#2a6f97", "#c8611a", "#3f7d45", "#7a5195", "#b8405e", "#7d6608")
INK, FAINT, LINE, LEAF, NODE = "#1d2026", "#6b7078", "#d9d7d0", "#4f9bc6", "#eb9a45"
_VARIABLES = {INK: "ink", FAINT: "faint", LINE: "line", **{color: f"s{i}" for i, color in enumerate(SERIES)}, "#ffffff": "page"}
# For scripts that DejaVu lacks, where they are installed.
_MORE_FONTS = ("Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "Droid Sans Fallback", "Noto Sans Devanagari")
# A chart on a phone: its width in inches, the characters of an axis label on a line, and ticks of the x axis.
_NARROW, _NARROW_LABEL, _NARROW_AXIS, _NARROW_TICKS = 3.4, 44, 28, 4
# Labels with less attention than those in the picture go together.
_MOST_LABELS = 12
OTHERS = "others"


@contextmanager
def style() -> Iterator[None]:
    """Apply the settings under which every figure of a report is drawn and saved."""
    with matplotlib.rc_context(
        {
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
            **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), FAINT),
            **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "#ffffff"),
            **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.6),
            **dict.fromkeys(("font.size", "axes.titlesize"), 9),
            **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
            "font.family": ["DejaVu Sans", *(font for font in _MORE_FONTS if font in font_manager.get_font_names())],
            "text.parse_math": False,  # a dollar is a dollar
            "axes.prop_cycle": cycler(color=SERIES),
            "grid.color": LINE,
            "svg.fonttype": "none",
        }
    ):
        yield


def save_figure(figure: Figure, folder: Path, name: str) -> None:
    """Write NAME.png and NAME.svg into `folder`. Call it inside `style()`."""
    png, svg = io.BytesIO(), io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(png, format="png", dpi=160)
        with _as_laid_out(figure):
            figure.savefig(svg, format="svg", metadata={"Date": None})
    atomic_write(folder / f"{name}.png", png.getvalue())
    atomic_write(folder / f"{name}.svg", svg.getvalue().encode())


def save_chart(figure: Figure, folder: Path, name: str) -> str:
    """Save as `save_figure` does; returns the SVG of the page: the chart, also for a narrow screen. The figure is changed."""
    save_figure(figure, folder, name)
    with _as_laid_out(figure):
        wide = _draw_inline(figure, name)
    _make_narrow(figure)
    return wide + _draw_inline(figure, f"{name}-narrow", "chart narrow")


@contextmanager
def _as_laid_out(figure: Figure) -> Iterator[None]:
    """Keep the layout of the last picture meanwhile: to lay a figure out takes a third of the time."""
    layout = figure.get_layout_engine()
    figure.set_layout_engine("none")
    yield
    figure.set_layout_engine(layout)


def _draw_inline(figure: Figure, name: str, classes: str = "chart wide") -> str:
    inline = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(inline, format="svg", metadata={"Date": None}, transparent=True)
    return inline_svg(inline.getvalue(), name, classes)


def _make_narrow(figure: Figure) -> None:
    """Give a figure the width of a phone, letters as large as before: legends below the axes, labels in lines, fewer ticks."""
    entries: dict[str, matplotlib.artist.Artist] = {}
    for axes in figure.axes:
        if legend := axes.get_legend():
            entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
            legend.remove()
        axes.set_xlabel(textwrap.fill(axes.get_xlabel(), _NARROW_AXIS))
        for place in ("left", "center"):
            axes.set_title(textwrap.fill(axes.get_title(place), _NARROW_AXIS), loc=place, color=FAINT)
        if isinstance(axes.xaxis.get_major_locator(), MaxNLocator):
            axes.xaxis.set_major_locator(MaxNLocator(_NARROW_TICKS, steps=[1, 2, 2.5, 5, 10]))
    height = min(figure.get_figheight(), 4.2) if len(figure.axes) > 1 else figure.get_figheight()
    if entries:
        labels = [textwrap.fill(label, _NARROW_LABEL) for label in entries]
        height += 0.17 * sum(label.count("\n") + 1 for label in labels)
        figure.legend(list(entries.values()), labels, loc="outside lower left", fontsize=8)
    figure.set_size_inches(_NARROW, height)


def inline_svg(text: str, name: str, classes: str) -> str:
    """Return an SVG of matplotlib as a part of a page: no prologue, no style for the whole page, its own ids, colours by name."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    used = set(re.findall(r"#([\w-]+)[\")]", text))
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)  # the font of the page
    # A hundredth of a pixel is enough, and a tenth of the page less.
    text = re.sub(r"<[^>]*>", lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0].replace("\n", " ")), text)
    text = re.sub(r">\s+<", "><", text)
    return re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', rf'<svg class="{classes}" viewBox="\1" role="img">', text, count=1)


def name_rows(axes: Axes, places: ArrayLike, names: Sequence[str]) -> None:
    """Name the rows of a chart, and draw lines for the numbers below them."""
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def begin_rows(names: Sequence[str], series: int, title: str, value: str) -> tuple[Figure, Axes, list[np.ndarray]]:
    """Begin a chart of `value` with a row a name, the first on top. Also return the places of each series in the rows."""
    figure = Figure(figsize=(7.2, 0.9 + len(names) * max(0.32, 0.15 * series)), layout="constrained")
    axes, rows = figure.add_subplot(), np.arange(len(names))[::-1]
    name_rows(axes, rows, names)
    axes.set(xlabel=value, ylim=(-0.6, len(names) - 0.4))
    axes.set_title(title, loc="left", color=FAINT)  # beside the rows it would be longer than they are high
    return figure, axes, [rows + (0.6 / series) * ((series - 1) / 2 - order) for order in range(series)]


def run_colors(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each run, which is the same in all figures."""
    return {name: SERIES[number % len(SERIES)] for number, name in enumerate(names)}


def draw_groups(stats: Mapping[str, Sequence[Group]], colors: Mapping[str, str], axis: str) -> Figure:
    """Draw bars of attention by kind of position for each run, and a stroke where even attention would be."""
    names = group_names(list(stats.values()))
    figure = Figure(figsize=(7.2, 0.9 + 0.3 * len(names) * max(1, 0.55 * len(stats))), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / max(1, len(stats))
    places = np.arange(len(names))[::-1]
    for number, (run, groups) in enumerate(stats.items()):
        found = gather(groups, names)
        at = places + (len(stats) / 2 - number - 0.5) * height
        shares = [100 * found[name].mass.mean() if name in found else 0 for name in names]
        spread = [100 * found[name].mass.std() if name in found else 0 for name in names]
        stroke = {"lw": 0.8, "ecolor": FAINT}
        axes.barh(at, shares, 0.82 * height, color=colors[run], label=run, xerr=spread, error_kw=stroke)
        even = [100 * found[name].even if name in found else np.nan for name in names]
        label = "even attention" if number == len(stats) - 1 else None
        axes.plot(even, at, "|", ms=20 * height + 4, mew=1.6, color=INK, label=label)
    axes.set(xlabel="share of attention, % (mean and deviation over layers and heads)", ylabel=axis, xlim=(0, None))
    name_rows(axes, places, names)
    axes.legend(loc="lower right")
    return figure


def group_names(stats: Sequence[Sequence[Group]]) -> list[str]:
    """Return the names that any run has, those with the most attention in any of them first where there are too many."""
    most: dict[str, float] = {}
    for groups in stats:
        for group in groups:
            most[group.name] = max(most.get(group.name, 0), group.mass.mean())
    if all(name.isdigit() for name in most):
        return sorted(most, key=int)
    ranked = sorted(most, key=lambda name: (-most[name], name))
    return ranked if len(ranked) <= _MOST_LABELS + 1 else [*ranked[:_MOST_LABELS], OTHERS]


def gather(groups: Sequence[Group], names: Sequence[str]) -> dict[str, Group]:
    """Gather groups by name; add up those that `names` lacks as OTHERS."""
    found = {group.name: group for group in groups if group.name in names}
    rest = [group for group in groups if group.name not in names]
    if rest:
        mass = sum((group.mass for group in rest[1:]), rest[0].mass)
        found[OTHERS] = Group(OTHERS, sum(group.positions for group in rest), mass, sum(group.even for group in rest))
    return found


def draw_tree(view: View, layout: TreeLayout) -> Figure:
    """Draw the tree of a sentence, shaded by the attention of all target positions, layers and heads together."""
    shares = view.weights.mean(axis=(0, 1, 2))
    inch = 1 / 90  # a box of 28 pixels is 0.31 inches high
    figure = Figure(figsize=(layout.width * inch, layout.height * inch))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, layout.width), ylim=(layout.height, 0))
    axes.set_axis_off()
    for line in layout.corners():
        axes.plot(*zip(*line, strict=True), color=FAINT, lw=0.7, zorder=1)
    points = 72 * inch
    for box, share in zip(layout.boxes, shares, strict=True):
        corner = (box.x - box.half, box.y - BOX_HEIGHT / 2)
        outline = f"round,pad=0,rounding_size={3 if box.is_leaf else 9}"
        shaded = *matplotlib.colors.to_rgb(LEAF if box.is_leaf else NODE), shade(share)
        for fill in ("#ffffff", shaded):
            axes.add_patch(FancyBboxPatch(corner, 2 * box.half, BOX_HEIGHT, outline, ec=LINE, lw=0.7, zorder=2, fc=fill))
        axes.text(box.x, box.y - 1.5, box.text, size=FONT_SIZE * points, ha="center", va="baseline", zorder=3)
        axes.text(box.x, box.y + 10, share_text(share), size=8.5 * points, ha="center", color=FAINT, zorder=3)
    return figure


def shade(share: float) -> float:
    """Return the opacity of a share; the square root keeps small ones apart. page.js and sentences.html have the same."""
    return float(np.sqrt(share))


def share_text(share: float) -> str:
    """Return a share in per cent as it stands under a leaf or node; nothing below half a per cent. page.js has the same."""
    percent = 100 * share
    return "" if percent < 0.5 else f"{percent:.0f}" if percent >= 9.5 else f"{percent:.1f}"

"""What the report's figures are drawn with: canvases, axes over lengths, legends, one style for each group.

Every picture is as wide as a page of text, so that its letters can be read on a phone and in a paper. One colour per
encoding, SSMax dashed, in all of them."""

import logging
import math
import warnings

import matplotlib

matplotlib.use("Agg")
import matplotlib.font_manager
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D

from report_runs import describe

WIDTH = 6.4  # inches
GREY, INK = "#6b6b6b", "#222222"
DOTS = (0, (1, 1.5))
HEAT = "cividis"  # readable with any colour vision and in grey

logging.getLogger("matplotlib").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="Glyph .* missing")
_installed = {f.name for f in matplotlib.font_manager.fontManager.ttflist}
_others = [f for f in ("Noto Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "WenQuanYi Zen Hei") if f in _installed]
plt.rcParams.update(
    {
        "font.family": ["DejaVu Sans"] + _others,
        "font.size": 10,
        "axes.titlesize": 9,
        "axes.labelsize": 10,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "legend.handlelength": 3.2,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#444444",
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": "#e4e4e4",
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
    }
)


class Figure:
    """slug: the PNG's name; header and rows: the numbers drawn."""

    def __init__(self, slug, title, caption, fig, header, rows):
        self.slug, self.title, self.caption, self.fig, self.header, self.rows = slug, title, caption, fig, header, rows


# ---- what figures are made of ----------------------------------------------------------------------------------------


def text(s):
    """Text for matplotlib, where a dollar begins a formula."""
    return str(s).replace("$", r"\$")


def canvas(title, groups, height, rows=1, columns=1, xlabel="", **kwargs):
    """Axes with a title above and, below, what was trained, how long and with which seeds. Heights are in inches."""
    below = 0.4 if xlabel else 0.25
    height += below
    fig, axes = plt.subplots(rows, columns, figsize=(WIDTH, height), squeeze=False, layout="constrained", **kwargs)
    fig.get_layout_engine().set(rect=(0, below / height, 1, 1 - below / height))
    fig.suptitle(text(title), x=0.01, ha="left", fontsize=12, fontweight="bold")
    line = describe(groups)
    fig.text(
        0.01, 0.06 / height, text(line), fontsize=7 if len(line) < 110 else 6 if len(line) < 130 else 5, color=GREY
    )
    fig.text(0.5, 0.24 / height, xlabel, fontsize=10, ha="center")
    return fig, axes


def one_axes(title, groups, height):
    fig, axes = canvas(title, groups, height)
    return fig, axes[0, 0]


def panels(title, groups, n, height, widest, xlabel, **kwargs):
    """n axes that share x; those without another below them show its numbers."""
    columns = min(widest, n if n <= 3 else 2 if n == 4 else 3 if n <= 6 else 4 if n <= 12 else 6)
    rows = math.ceil(n / columns)
    fig, axes = canvas(title, groups, 0.55 + height * rows, rows, columns, xlabel, sharex=True, **kwargs)
    for i, ax in enumerate(axes.flat):
        if i >= n:
            ax.axis("off")
        elif i + columns >= n:
            ax.tick_params(labelbottom=True)
    return fig, list(axes.flat)[:n]


def panel_title(ax, words, color=INK):
    fits = 60 / ax.get_subplotspec().get_gridspec().ncols  # letters
    ax.set_title(
        text(words), loc="left", color=color, fontweight="bold", fontsize=max(5, 9 * min(1, fits / max(1, len(words))))
    )


def color_bar(fig, label, norm, cmap, **kwargs):
    shrink = min(1, 2.4 / fig.get_size_inches()[1])
    bar = fig.colorbar(
        matplotlib.cm.ScalarMappable(norm, cmap),
        ax=fig.axes,
        location="right",
        shrink=shrink,
        aspect=18,
        pad=0.02,
        **kwargs,
    )
    bar.set_label(label)


def margin_note(ax, y, words):
    """A horizontal line, named at its right end outside the axes."""
    ax.axhline(y, color="#999999", linewidth=1, linestyle=DOTS)
    ax.annotate(
        words,
        (1, y),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=GREY,
    )


def style(g, marker=True):
    return dict(
        color=g.color,
        linestyle=g.dashes,
        marker=g.marker if marker else None,
        markeredgecolor=g.color,
        markerfacecolor="white" if g.ssmax else g.color,
        label=text(g.label),
    )


def legend(ax, groups, handles, below):
    """Below the axes: without SSMax on the left, with it on the right."""
    sides = [[h for g, h in zip(groups, handles) if g.ssmax == ssmax] for ssmax in (False, True)]
    if all(sides):
        for side in sides:
            side += [Line2D([], [], linestyle="none", label=" ")] * (max(map(len, sides)) - len(side))
    ax.legend(
        handles=sides[0] + sides[1],
        loc="upper left",
        bbox_to_anchor=(0, -below),
        ncol=2 if len(groups) > 1 else 1,
        borderaxespad=0,
        columnspacing=1.5,
    )


def legend_height(groups):
    plain = sum(not g.ssmax for g in groups)
    rows = max(plain, len(groups) - plain) if 0 < plain < len(groups) else math.ceil(len(groups) / 2)
    return 0.21 * rows


def length_text(n):
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n:,}"


def length_axis(ax, lengths, groups):
    """Log axis with the lengths used as ticks, the trained one marked."""
    ax.set_xscale("log", base=2)
    lengths = sorted(set(lengths))
    trained = sorted({g.seq_len for g in groups if g.seq_len})
    shown = lengths if len(lengths) <= 11 else lengths[:: math.ceil(len(lengths) / 11)]
    one = trained[0] if len(trained) == 1 else None
    ax.set_xticks(shown, [length_text(n) + (f"\n{n / one:.3g}×" if one else "") for n in shown])
    ax.minorticks_off()
    if len(lengths) == 1:
        ax.set_xlim(lengths[0] / 2, lengths[0] * 2)
    for t in trained:
        ax.axvline(t, color="#999999", linewidth=1, linestyle=DOTS, zorder=1)
        ax.annotate(
            "trained length",
            (t, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, 2),
            textcoords="offset points",
            fontsize=8,
            color=GREY,
        )
    ax.set_xlabel("length in tokens" + (" (× the training length)" if one else ""))


def band(ax, g, xs, means, spread, **kwargs):
    ax.plot(xs, means, zorder=3, **style(g), **kwargs)
    shade(ax, g, xs, means, spread)


def shade(ax, g, xs, means, spread):
    if np.isfinite(spread).any():
        ax.fill_between(xs, np.array(means) - spread, np.array(means) + spread, color=g.color, alpha=0.15, linewidth=0)


def bar(ax, y, g, value, spread):
    """A horizontal bar, hatched with SSMax; spread may be NaN."""
    ax.barh(
        y,
        value,
        color="white" if g.ssmax else g.color,
        edgecolor=g.color,
        hatch="////" if g.ssmax else None,
        height=0.66,
        xerr=spread if math.isfinite(spread) else None,
        ecolor=INK,
        capsize=2,
    )


def of_seed(g):
    return f" Of seed {g.runs[0].seed}." if len(g.runs) > 1 else ""

"""Figures of evaluation, loss and speed. Each function takes groups and gives Figures: a picture, how to read it, and
the numbers in it."""

import math

import matplotlib
import numpy as np
from matplotlib.lines import Line2D

from report_canvas import (
    DOTS,
    Figure,
    HEAT,
    INK,
    band,
    bar,
    color_bar,
    legend,
    legend_height,
    length_axis,
    length_text,
    margin_note,
    one_axes,
    panel_title,
    panels,
    shade,
    style,
    text,
)
from report_runs import deviation, get, human, mean, number

# ---- evaluation ------------------------------------------------------------------------------------------------------

BANDS = "Bands: ± one standard deviation over the seeds; where there is one seed, ± one standard error over its items."


def over_length(groups, suite, metric, error, slug, title, ylabel, caption, chance=None, log=False):
    """Lines of a suite's metric against the length."""
    found = [(g, g.by_length(suite, metric, error)) for g in groups]
    found = [(g, rows) for g, rows in found if rows]
    if not found:
        return []
    groups = [g for g, _ in found]
    fig, ax = one_axes(title, groups, 3.6 + legend_height(groups))
    for g, rows in found:
        spread = np.array([sd if math.isfinite(sd) else se for _, _, sd, se, _ in rows])
        band(ax, g, [r[0] for r in rows], [r[1] for r in rows], spread, clip_on=False)
    values = [r[1] for _, rows in found for r in rows]
    if not log:
        ax.set_ylim(-0.02, 1.02)
    elif max(values) > 8 * min(values):
        ax.set_yscale("log")
        ax.set_ylim(min(values) / 1.25, max(values) * 1.25)
        ax.yaxis.set_major_locator(matplotlib.ticker.LogLocator(10, (1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        ax.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    if chance is not None:
        margin_note(ax, chance, "chance")
    length_axis(ax, [row[0] for _, rows in found for row in rows], groups)
    ax.set_ylabel(ylabel)
    legend(ax, groups, [Line2D([], [], **style(g)) for g in groups], 0.27)
    rows = [[g.label, *row] for g, rows in found for row in rows]
    header = ["encoding", "length", ylabel, "sd over seeds", "standard error", "seeds"]
    return [Figure(slug, title, f"{caption} {BANDS}", fig, header, rows)]


def passkey(groups):
    chances = [
        number(x.get("chance"))
        for g in groups
        for r in g.runs
        for x in r.results("passkey")
    ]
    chance = mean(chances)
    return over_length(
        groups,
        "passkey",
        "accuracy",
        "stderr",
        "passkey",
        "Passkey: all five digits right",
        "accuracy",
        "Share of items whose five digits are each the most likely next token, the key standing at depths spread "
        "evenly over the text.",
        chance if math.isfinite(chance) else None,
    ) + over_length(
        groups,
        "passkey",
        "digit_accuracy",
        "digit_stderr",
        "passkey_digits",
        "Passkey: digits right",
        "accuracy per digit",
        "Share of single digits that are right; one in ten is chance.",
        0.1,
    )


def perplexity(groups):
    return over_length(
        groups,
        "perplexity",
        "perplexity",
        "none",
        "perplexity",
        "Perplexity against length",
        "perplexity",
        "Over non-overlapping windows of each length.",
        None,
        True,
    )


def depth_cells(g):
    """(length, depth) -> (mean share of digits right, runs)."""
    cells = {}
    for r in g.runs:
        for result in r.results("passkey"):
            for d in result.get("by_depth") or []:
                value, depth = number(d.get("digit_accuracy")), number(d.get("depth"))
                if math.isfinite(value) and math.isfinite(depth):
                    cells.setdefault((int(number(result.get("length"))), depth), []).append(value)
    return {k: (mean(v), len(v)) for k, v in cells.items()}


def length_grid(cells, lengths, rows, row_of):
    """Cells averaged into row row_of(key) of their length; NaN where nothing was measured."""
    grid = [[[] for _ in lengths] for _ in range(rows)]
    for (n, key), (value, _) in cells.items():
        grid[row_of(key)][lengths.index(n)].append(value)
    return np.array([[mean(cell) for cell in row] for row in grid])


def length_maps(groups, cells, title, rows, row_of, ticks, height):
    """rows x length, a panel for each group with cells, those of an encoding side by side; ticks: {row: its name}."""
    lengths = sorted({n for c in cells.values() for n, _ in c})
    fig, axes = panels(title, groups, len(groups), height, 2, "length in tokens", sharey=True)
    for ax, g in zip(axes, groups):
        ax.set_facecolor("#eeeeee")
        grid = length_grid(cells[g.label], lengths, rows, row_of)
        ax.imshow(grid, aspect="auto", cmap=HEAT, vmin=0, vmax=1, interpolation="nearest")
        ax.grid(False)
        panel_title(ax, g.label, g.color)
        step = math.ceil(len(lengths) / (11 if len(groups) == 1 else 5))
        ax.set_xticks(range(0, len(lengths), step), [length_text(n) for n in lengths[::step]])
        ax.set_yticks(list(ticks), [text(t) for t in ticks.values()])
        if g.seq_len in lengths:
            ax.axvline(lengths.index(g.seq_len) + 0.5, color="#ffffff", linewidth=1.2, linestyle=(0, (2, 2)))
    return fig


def with_cells(groups, cells):
    """The groups that have some, those of an encoding side by side."""
    place = lambda g: groups.index(next(x for x in groups if x.color == g.color))
    return sorted((g for g in groups if cells[g.label]), key=place)


def depth_maps(groups):
    """Depth x length."""
    cells = {g.label: depth_cells(g) for g in groups}
    groups = with_cells(groups, cells)
    if not groups:
        return []
    depths = sorted({d for c in cells.values() for _, d in c})
    if len(depths) > 25:
        depths = [i / 10 for i in range(11)]
    ticks = {k: f"{100 * depths[k]:.0f} %" for k in sorted({0, len(depths) // 2, len(depths) - 1})}
    nearest = lambda d: min(range(len(depths)), key=lambda k: abs(depths[k] - d))
    title = "Where in the text the key is found"
    fig = length_maps(groups, cells, title, len(depths), nearest, ticks, 2.7 if len(groups) < 3 else 1.5)
    fig.supylabel("depth of the key", fontsize=10)
    color_bar(fig, "digits right", matplotlib.colors.Normalize(0, 1), HEAT)
    rows = [[g.label, n, d, v, k] for g in groups for (n, d), (v, k) in sorted(cells[g.label].items())]
    return [
        Figure(
            "passkey_depth",
            title,
            "Share of digits right by length and by how deep in the text the key stands (top: at its beginning), over "
            "the seeds. Right of the dashed line the text is longer than in training.",
            fig,
            ["encoding", "length", "depth", "digits right", "seeds"],
            rows,
        )
    ]


def needles(groups):
    """RULER's tasks, their mean against the length and each by itself."""
    cells = {g.label: g.cells("niah", ("length", "task"), "accuracy") for g in groups}
    groups = with_cells(groups, cells)
    if not groups:
        return []
    tasks = list(dict.fromkeys(task for c in cells.values() for _, task in c))
    named = f"of {', '.join(map(str, tasks))}" if len(tasks) < 4 else f"over {len(tasks)} tasks"
    mean_figure = over_length(
        groups,
        "niah",
        "accuracy",
        "stderr",
        "niah",
        "Needles in a haystack",
        "score",
        f"RULER's mean score {named}: the share of the needles asked for that the answer holds.",
    )
    title = "Needles in a haystack, by task"
    fig = length_maps(
        groups, cells, title, len(tasks), tasks.index, dict(enumerate(tasks)), 0.6 + 0.17 * len(tasks)
    )
    color_bar(fig, "score", matplotlib.colors.Normalize(0, 1), HEAT)
    rows = [[g.label, n, task, v, k] for g in groups for (n, task), (v, k) in cells[g.label].items()]
    caption = "Score of each task by length, over the seeds. Right of the dashed line the text is longer than in training."
    return mean_figure + [
        Figure("niah_tasks", title, caption, fig, ["encoding", "length", "task", "score", "seeds"], rows)
    ]


def choices(groups):
    """A figure for each file of multiple-choice items: bars of acc_norm, points of acc."""
    suites = sorted({s for g in groups for r in g.runs for s in r.suites if s == "choice" or s.startswith("choice-")})
    return [f for suite in suites for file in choice_files(groups, suite) for f in choice_figure(groups, suite, file)]


def choice_files(groups, suite):
    return list(dict.fromkeys(str(x.get("file")) for g in groups for r in g.runs for x in r.results(suite)))


def choice_figure(groups, suite, file):
    of_file = lambda g: [x for r in g.runs for x in r.results(suite) if str(x.get("file")) == file]
    found = [(g, of_file(g)) for g in groups]
    found = [(g, results) for g, results in found if results]
    groups = [g for g, _ in found]
    title = f"Multiple choice: {file}" + (f" ({suite[len('choice-'):]})" if suite != "choice" else "")
    fig, ax = one_axes(title, groups, 1.2 + 0.3 * len(found))
    rows = []
    for i, (g, results) in enumerate(found):
        values = {k: [number(x.get(k)) for x in results] for k in ("acc_norm", "acc", "chance")}
        spread = deviation(values["acc_norm"]) if len(results) > 1 else number(results[0].get("acc_norm_stderr"))
        bar(ax, i, g, mean(values["acc_norm"]), spread)
        ax.plot(mean(values["acc"]), i, marker="o", color="white", markeredgecolor=INK, markersize=5, zorder=4)
        rows.append([g.label, *(mean(values[k]) for k in ("acc_norm", "acc", "chance")), spread, len(results)])
    chance = mean([row[3] for row in rows])
    if math.isfinite(chance):
        ax.axvline(chance, color="#999999", linewidth=1, linestyle=DOTS, zorder=1)
        ax.annotate(
            "chance", (chance, 1), xycoords=("data", "axes fraction"), xytext=(3, 2), textcoords="offset points", fontsize=8
        )
    ax.set_yticks(range(len(found)), [text(g.label) for g, _ in found])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of items right")
    caption = (
        "Bars: the answer likeliest per character (acc_norm), ± one standard deviation over the seeds or, with one seed, "
        "one standard error; circles: the likeliest answer (acc). Hatched with SSMax."
    )
    header = ["encoding", "acc_norm", "acc", "chance", "±", "seeds"]
    return [Figure(f"{suite}_{file}", title, caption, fig, header, rows)]


# ---- loss and speed --------------------------------------------------------------------------------------------------


def smooth_losses(run):
    """step -> (tokens, loss averaged over the hundredth of the run before it), thinned to 200 points."""
    values = [number(s.get("loss")) for s in run.steps]
    n = len(values)
    width = max(1, n // 100)
    chosen = sorted({round(i * (n - 1) / 199) for i in range(200)}) if n > 200 else range(n)
    return {
        run.steps[i].get("step", i): (
            number(run.steps[i].get("tokens", i)),
            mean(values[max(0, i - width + 1) : i + 1]),
        )
        for i in chosen
    }


def val_losses(run):
    per_step = get(run.config, "train", "tokens_per_step", default=1)
    return {v["step"]: (v["step"] * per_step, number(v.get("loss"))) for v in run.vals if "step" in v}


def curve(g, pick):
    """Steps that all runs have, with tokens, mean loss and its deviation over the runs; None if there are none."""
    runs = [r for r in map(pick, g.runs) if r]
    steps = sorted(set.intersection(*map(set, runs))) if runs else []
    if not steps:
        return None
    losses_at = [[r[s][1] for r in runs] for s in steps]
    return (
        steps,
        [runs[0][s][0] for s in steps],
        [mean(v) for v in losses_at],
        np.array([deviation(v) for v in losses_at]),
    )


def loss_figure(groups, slug, title, pick, caption, markers):
    found = [(g, curve(g, pick)) for g in groups]
    found = [(g, c) for g, c in found if c]
    if not found:
        return []
    groups = [g for g, _ in found]
    fig, ax = one_axes(title, groups, 3.5 + legend_height(groups))
    rows, late = [], []
    for g, (steps, tokens, means, spread) in found:
        x = np.array(tokens) / 1e6
        ax.plot(x, means, **{**style(g, markers and len(x) <= 40), "markersize": 4})
        shade(ax, g, x, means, spread)
        late += [m for m in means[max(len(means) > 3, len(means) // 10) :] if math.isfinite(m)]
        rows += [[g.label, s, int(t), m, d, len(g.runs)] for s, t, m, d in zip(steps, tokens, means, spread)]
    if late and max(late) > min(late):  # the fall of the first steps would flatten all the rest
        margin = 0.06 * (max(late) - min(late))
        ax.set_ylim(min(late) - margin, max(late) + margin)
    ax.set_xlabel("tokens (millions)")
    ax.set_ylabel("loss (nats a token)")
    legend(ax, groups, [Line2D([], [], **style(g, markers)) for g in groups], 0.2)
    if any(len(g.runs) > 1 for g in groups):
        caption += " Bands: ± one standard deviation over the seeds."
    return [Figure(slug, title, caption, fig, ["encoding", "step", "tokens", "loss", "sd over seeds", "seeds"], rows)]


def losses(groups):
    return loss_figure(
        groups, "loss_val", "Validation loss", val_losses, "Mean over all validation tokens.", True
    ) + loss_figure(
        groups,
        "loss_train",
        "Training loss",
        smooth_losses,
        "Each point is the mean over the hundredth of the run before it.",
        False,
    )


def speed(groups):
    found = [(g, g.speeds()) for g in groups]
    found = [(g, v) for g, v in found if v]
    if not found:
        return []
    groups = [g for g, _ in found]
    title = "Training speed"
    fig, ax = one_axes(title, groups, 1.0 + 0.3 * len(found))
    rows = []
    for i, (g, v) in enumerate(found):
        m, sd = mean(v), deviation(v)
        shares = [s for r in g.runs for s in (number(x.get("mfu")) for x in r.steps) if math.isfinite(s)]
        mfu = float(np.median(shares)) if shares else math.nan
        bar(ax, i, g, m / 1000, sd / 1000)
        ax.annotate(
            human(m) + (f" · {100 * mfu:.0f} %" if math.isfinite(mfu) else ""),
            ((m + (sd if math.isfinite(sd) else 0)) / 1000, i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        rows.append([g.label, m, sd, mfu, len(v)])
    ax.set_yticks(range(len(found)), [text(g.label) for g in groups])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, ax.get_xlim()[1] * 1.25)
    ax.set_xlabel("thousand tokens a second")
    return [
        Figure(
            "speed",
            title,
            "Median over the steps of a run, mean over the seeds; hatched with SSMax. In percent, where measured: the "
            "share of the machine's own matrix-multiply speed.",
            fig,
            ["encoding", "tokens/s", "sd over seeds", "utilization", "runs"],
            rows,
        )
    ]

"""Figures of what the priors, SSMax and the attention of a trained model look like. As in report_figures.py, each
function takes groups and gives Figures."""

import math

import matplotlib
import numpy as np
from matplotlib.lines import Line2D

from report_canvas import (
    DOTS,
    Figure,
    HEAT,
    INK,
    canvas,
    color_bar,
    legend,
    legend_height,
    length_text,
    margin_note,
    of_seed,
    one_axes,
    panel_title,
    panels,
    style,
    text,
)
from report_runs import get, mean, number

# ---- priors ----------------------------------------------------------------------------------------------------------

DISTANCES = (0, 1, 8, 64, 512, 4096)


def bam_bias(alpha, beta, mu, d):
    """DESIGN §2.3: -e^alpha (|d + mu'| + 1e-5)^beta with mu' = e^mu - e^-mu, at least -1e30."""
    with np.errstate(over="ignore"):
        return np.maximum(-np.exp(alpha) * (np.abs(d + math.exp(mu) - math.exp(-mu)) + 1e-5) ** beta, -1e30)


def head_class(beta):
    """Far-looking heads do not prefer near keys; heavy-tailed priors fall slower than an exponential one."""
    return "far-looking" if beta <= 0 else "heavy-tailed" if beta < 1 else "local"


def prior_curves(g):
    run = g.runs[0]
    alpha, beta, mu = (run.thetas(t) for t in ("theta_alpha", "theta_beta", "theta_mu"))
    if not beta or not alpha:
        return []
    layers = sorted({l for l, _ in beta})
    far = max(64, 16 * run.seq_len)
    d = np.unique(np.round(np.geomspace(1, far, 160)))
    title = f"Learned priors: {g.label}"
    fig, axes = panels(title, [g], len(layers), 1.75 if len(layers) < 7 else 1.3, 6, "distance in tokens", sharey=True)
    low, high = min(beta.values()), max(beta.values())
    norm = matplotlib.colors.Normalize(low - 0.01, high + 0.15 * (high - low) + 0.01)  # without the palest end
    ticks = [n for n in (1, 16, 256, 4096, 65536) if n <= far]
    rows = []
    for ax, l in zip(axes, layers):
        for h, b in sorted((h, b) for (layer, h), b in beta.items() if layer == l):
            a, m = alpha[(l, h)], mu.get((l, h), 0.0)
            ax.plot(d, bam_bias(a, b, m, d), color=matplotlib.colormaps["viridis"](norm(b)), linewidth=1.4)
            rows.append([l, h, a, b, m, head_class(b)] + [float(bam_bias(a, b, m, float(x))) for x in DISTANCES])
        panel_title(ax, f"layer {l}")
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [length_text(n) for n in ticks])
        ax.minorticks_off()
        ax.set_ylim(-12.5, 0.5)
        if run.seq_len:
            ax.axvline(run.seq_len, color="#999999", linewidth=1, linestyle=DOTS)
    fig.supylabel("bias", fontsize=10)
    color_bar(fig, "θβ of the head", norm, "viridis")
    scaled = " SSMax multiplies it by s·ln n." if g.ssmax else ""
    return [
        Figure(
            f"priors_{g.label}",
            title,
            "What each head adds to its logits by distance d, −e^θα·d^θβ, a line a head; below −12 a key counts for "
            f"next to nothing.{scaled} Dotted: the training length.{of_seed(g)}",
            fig,
            ["layer", "head", "θα", "θβ", "θμ", "class"] + [f"bias at {x}" for x in DISTANCES],
            rows,
        )
    ]


def course(slug, title, caption, groups, shown):
    """shown: [(panel's title, its colour, run, name of the scalar)]; a line for each head over the steps, by layer."""
    layers = max(l for _, _, run, name in shown for l, _ in run.thetas(name)) + 1
    colors = matplotlib.colors.ListedColormap(
        [matplotlib.colormaps["viridis"](x) for x in np.linspace(0.85, 0, layers)]
    )
    norm = matplotlib.colors.BoundaryNorm(np.arange(layers + 1) - 0.5, layers)
    fig, axes = panels(title, groups, len(shown), 2.2 if len(shown) < 4 else 1.6, 3, "step")
    rows = []
    for ax, (heading, color, run, name) in zip(axes, shown):
        steps = [number(e.get("step")) for e in run.priors]
        values = [run.thetas(name, i) for i in range(len(steps))]
        keys = sorted(values[-1])
        for l, h in keys:
            ax.plot(
                steps,
                [v.get((l, h), math.nan) for v in values],
                color=colors(l),
                linewidth=1.1,
                alpha=0.9 if len(keys) < 100 else 0.4,
            )
        panel_title(ax, heading, color)
        for i in sorted({round(i * (len(steps) - 1) / 9) for i in range(10)}):
            for l in range(layers):
                own = [v for (layer, _), v in values[i].items() if layer == l and math.isfinite(v)]
                if own:
                    rows.append([heading, l, int(steps[i]), min(own), mean(own), max(own)])
    color_bar(fig, "layer", norm, colors, ticks=range(0, layers, max(1, layers // 6)))
    return Figure(
        slug, title, caption, fig, ["panel", "layer", "step", "least head", "mean of heads", "greatest head"], rows
    )


def prior_course(g):
    run, shown = g.runs[0], []
    for name, symbol in (("theta_alpha", "θα"), ("theta_beta", "θβ"), ("theta_mu", "θμ")):
        if len(run.priors) > 1 and run.thetas(name) and (name != "theta_mu" or run.thetas(name) != run.thetas(name, 0)):
            shown.append((symbol, g.color, run, name))
    if not shown:
        return []
    caption = f"A line a head, coloured by layer.{of_seed(g)}"
    return [course(f"course_{g.label}", f"Course of the priors: {g.label}", caption, [g], shown)]


def ssmax_course(groups):
    groups = [g for g in groups if len(g.runs[0].priors) > 1 and g.runs[0].thetas("s")]
    if not groups:
        return []
    shown = [(g.label, g.color, g.runs[0], "s") for g in groups]
    return [
        course(
            "course_s", "Course of SSMax's s", f"A line a head, coloured by layer.{of_seed(groups[0])}", groups, shown
        )
    ]


def beta_histogram(groups):
    found = [(g, [b for r in g.runs for b in r.thetas("theta_beta").values()]) for g in groups]
    found = [(g, b) for g, b in found if b]
    if not found:
        return []
    groups = [g for g, _ in found]
    starts = [[b for r in g.runs for b in r.thetas("theta_beta", 0).values()] for g in groups]
    every = [b for _, betas in found for b in betas] + [b for s in starts for b in s] + [0, 1]
    bins = np.linspace(min(every) - 0.15, max(every) + 0.15, 31)
    title = "Distribution of θβ over layers and heads"
    fig, axes = canvas(title, groups, 1.0 + 1.5 * len(found), len(found), 1, sharex=True)
    rows = []
    for (ax,), (g, betas), start in zip(axes, found, starts):
        counts, begun = np.histogram(betas, bins)[0], np.histogram(start, bins)[0]
        top = max(counts)
        ax.hist(betas, bins, color=g.color, alpha=0.8)
        ax.plot(start, [1.12 * top] * len(start), linestyle="none", marker="v", color=INK, label="value at the start")
        ax.set_ylim(0, top * 1.55)
        panel_title(ax, g.label, g.color)
        ax.set_ylabel("heads")
        ax.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, integer=True))
        for x in (0, 1):
            ax.axvline(x, color="#777777", linewidth=1, linestyle=DOTS)
        for x, kind, side in (
            (-0.02, "far-looking", "right"),
            (0.5, "heavy-tailed", "center"),
            (1.02, "local", "left"),
        ):
            share = 100 * sum(head_class(b) == kind for b in betas) / len(betas)
            ax.text(x, 1.5 * top, f"{kind} {share:.0f} %", ha=side, va="top", fontsize=8, color=INK)
        rows += [
            [g.label, float(bins[i]), float(bins[i + 1]), int(counts[i]), int(begun[i])]
            for i in range(len(counts))
            if counts[i] or begun[i]
        ]
    axes[-1, 0].set_xlabel("θβ")
    axes[0, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, handlelength=1)
    return [
        Figure(
            "theta_beta",
            title,
            "θβ ≤ 0: the head does not prefer near keys (far-looking); below 1 its prior falls slower than "
            "exponentially (heavy-tailed); from 1 on it is local. All seeds together.",
            fig,
            ["encoding", "θβ from", "to", "heads", "heads at the start"],
            rows,
        )
    ]


def ssmax_scales(groups):
    groups = [g for g in groups if any(r.thetas("s") for r in g.runs)]
    if not groups:
        return []
    title = "SSMax scale s per head"
    fig, ax = one_axes(title, groups, 3.4 + legend_height(groups))
    layers = max(l for g in groups for r in g.runs for l, _ in r.thetas("s")) + 1
    rows = []
    for i, g in enumerate(groups):
        off = 0.8 * ((i + 0.5) / len(groups) - 0.5)
        for l in range(layers):
            values = [(r.seed, h, v) for r in g.runs for (layer, h), v in sorted(r.thetas("s").items()) if layer == l]
            ax.plot(
                [l + off] * len(values),
                [v for _, _, v in values],
                linestyle="none",
                marker=g.marker,
                markersize=3.5,
                markeredgewidth=0.9,
                markerfacecolor="white",
                markeredgecolor=g.color,
            )
            m = mean([v for _, _, v in values])
            ax.plot([l + off - 0.35 / len(groups), l + off + 0.35 / len(groups)], [m, m], color=g.color, linewidth=2.2)
            rows += [[g.label, seed, l, h, v] for seed, h, v in values]
    margin_note(ax, 1, "start")
    for l in range(1, layers):
        ax.axvline(l - 0.5, color="#e4e4e4", linewidth=0.8)
    ax.grid(axis="x", visible=False)
    ax.set_xticks(range(0, layers, max(1, layers // 12)))
    ax.set_xlabel("layer")
    ax.set_ylabel("s")
    marks = [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=g.marker,
            markerfacecolor="white",
            markeredgecolor=g.color,
            label=text(g.label),
        )
        for g in groups
    ]
    legend(ax, groups, marks, 0.2)
    return [
        Figure(
            "ssmax_s",
            title,
            "A mark for each head and seed, a bar for their mean in the layer. The logits of a query that sees n keys "
            "are multiplied by s·ln n.",
            fig,
            ["encoding", "seed", "layer", "head", "s"],
            rows,
        )
    ]


# ---- attention, from what `bam inspect` says of a prompt, kept as eval/inspect.json ---------------------------------


def inspected_heads(g):
    """(layer, head) -> the head's object in the first run that was inspected with a prompt."""
    for r in g.runs:
        heads = {
            (int(l["layer"]), int(h["head"])): h
            for l in get(r.suites.get("inspect"), "layers", default=[])
            for h in l.get("heads") or []
            if "layer" in l and "head" in h
        }
        if any("span_mass" in h or "mass_by_distance" in h for h in heads.values()):
            return heads
    return {}


def span_attention(groups):
    """Attention on the marked words of the prompt, layer x head, a panel for each group."""
    mass = {g.label: {k: number(h.get("span_mass")) for k, h in inspected_heads(g).items()} for g in groups}
    groups = [g for g in groups if any(map(math.isfinite, mass[g.label].values()))]
    if not groups:
        return []
    title = "Attention on the pass key"
    fig, axes = panels(title, groups, len(groups), 2.4 if len(groups) < 3 else 1.7, 3, "head", sharey=True)
    top = max(v for g in groups for v in mass[g.label].values() if math.isfinite(v))
    for ax, g in zip(axes, groups):
        layers, heads = (max(k[i] for k in mass[g.label]) + 1 for i in (0, 1))
        grid = np.array([[mass[g.label].get((l, h), math.nan) for h in range(heads)] for l in range(layers)])
        ax.set_facecolor("#eeeeee")
        ax.imshow(grid, aspect="auto", cmap=HEAT, vmin=0, vmax=top, interpolation="nearest")
        ax.grid(False)
        panel_title(ax, g.label, g.color)
        ax.set_xticks(range(0, heads, max(1, heads // 8)))
        ax.set_yticks(range(0, layers, max(1, layers // 6)))
    fig.supylabel("layer", fontsize=10)
    color_bar(fig, "attention mass", matplotlib.colors.Normalize(0, top), HEAT)
    rows = [
        [g.label, l, h, v, number(inspected_heads(g)[(l, h)].get("entropy"))]
        for g in groups
        for (l, h), v in sorted(mass[g.label].items())
    ]
    return [
        Figure(
            "attention_key",
            title,
            "Share of the last token's attention that falls on the marked words of the prompt.",
            fig,
            ["encoding", "layer", "head", "mass on the key", "entropy"],
            rows,
        )
    ]


def distance_attention(groups):
    """Attention by distance: the mean over all heads, and the layer's head that looks farthest in the table."""
    found = []
    for g in groups:
        bins = {}
        for h in inspected_heads(g).values():
            for b in h.get("mass_by_distance") or []:
                bins.setdefault((number(b.get("from")), number(b.get("to"))), []).append(number(b.get("mass")))
        if bins:
            found.append((g, [(low, high, mean(v), max(v)) for (low, high), v in sorted(bins.items())]))
    if not found:
        return []
    groups = [g for g, _ in found]
    title = "Attention by distance"
    fig, ax = one_axes(title, groups, 3.5 + legend_height(groups))
    for g, bins in found:
        ax.plot(
            [max(0.7, math.sqrt(max(low, 0.5) * max(low, high - 1, 0.5))) for low, high, _, _ in bins],
            [m for _, _, m, _ in bins],
            **style(g),
        )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: length_text(int(x)) if x >= 1 else "0")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("distance in tokens")
    ax.set_ylabel("attention mass, mean of heads")
    legend(ax, groups, [Line2D([], [], **style(g)) for g in groups], 0.2)
    rows = [[g.label, int(low), int(high), m, top] for g, bins in found for low, high, m, top in bins]
    return [
        Figure(
            "attention_distance",
            title,
            "Where the last token of the prompt looks: mass in bins of distance, mean over all heads.",
            fig,
            ["encoding", "distance from", "to", "mass, mean of heads", "mass, greatest head"],
            rows,
        )
    ]

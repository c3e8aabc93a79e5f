#!/usr/bin/env python3
"""Pictures of runs: report.html, which holds all it needs, and a PNG file for each figure.

    scripts/report.py RUN_OR_COMPARISON... -o OUT [--title TEXT]

Exit codes as bam's: 2 usage, 3 no runs there or unreadable, 1 anything else. Needs python3-matplotlib."""

import argparse
import base64
import html
import importlib.util
import math
import os
import re
import sys

if importlib.util.find_spec("matplotlib") is None:
    system = "/usr/bin/python3"  # where Debian's python3-matplotlib is found, whatever python3 is first on the PATH
    if (
        os.path.exists(system)
        and not os.path.samefile(sys.executable, system)
        and not os.environ.get("BAM_REPORT_RETRY")
    ):
        os.environ["BAM_REPORT_RETRY"] = "1"
        os.execv(system, [system] + sys.argv)
    sys.exit("report.py: needs matplotlib: scripts/install_deps.sh report, or apt-get install python3-matplotlib")

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
import matplotlib.pyplot as plt  # noqa: E402
import report_figures as figures_of  # noqa: E402
import report_priors as priors_of  # noqa: E402
from report_canvas import length_text  # noqa: E402
from report_runs import (
    ReportError,
    describe,
    deviation,
    find_runs,
    get,
    human,
    list_text,
    make_groups,
    mean,  # noqa: E402
    model_text,
    read_json,
)

STYLE = """
:root { --ink: #1c1c1c; --soft: #5c5c5c; --line: #dddddd; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink);
       background: #fff; margin: 0 auto; max-width: 1240px; padding: 16px 20px 60px; }
h1 { font-size: 1.7em; line-height: 1.2; margin: 0.4em 0 0.2em; overflow-wrap: anywhere; }
h2 { font-size: 1.25em; margin: 2em 0 0.4em; padding-bottom: 0.2em; border-bottom: 2px solid var(--line); }
p, li { max-width: 75ch; }
.soft { color: var(--soft); }
nav { margin: 1em 0; }
nav a { display: inline-block; margin-right: 1em; }
a { color: #0057a0; }
.note { border-left: 4px solid #E69F00; background: #fdf6e7; padding: 0.6em 1em; }
.bad { border-left: 4px solid #D55E00; background: #fdeee6; padding: 0.6em 1em; }
.figures { columns: 500px 2; column-gap: 36px; margin-top: 1em; }
figure { margin: 0 0 28px; max-width: 640px; break-inside: avoid; }
figure img { width: 100%; height: auto; display: block; }
figcaption { font-size: 0.9em; color: var(--soft); margin-top: 0.4em; }
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-size: 0.88em; font-variant-numeric: tabular-nums; }
th, td { padding: 0.28em 0.7em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #999; vertical-align: bottom; }
td.best { font-weight: 700; }
details { margin-top: 0.3em; font-size: 0.95em; }
details .scroll { max-height: 22em; overflow: auto; }
summary { cursor: pointer; color: #0057a0; font-size: 0.9em; }
.key { display: inline-block; width: 1.9em; height: 0; border-top: 3px solid; vertical-align: middle;
       margin-right: 0.5em; }
code { font-size: 0.92em; overflow-wrap: anywhere; }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  nav, details:not([open]) { display: none; }
  .figures { columns: auto; }
  figure { break-inside: avoid; margin: 0 auto 14pt; max-width: 15cm; }
  h2 { break-after: avoid; }
  .scroll, details .scroll { overflow: visible; max-height: none; }
  body > .scroll { break-inside: avoid; }
  table { font-size: 8pt; }
  th, td { padding: 1pt 3pt; }
}
"""


def cell(x):
    """A number as text, four digits at most that mean something."""
    if x is None or isinstance(x, float) and math.isnan(x):
        return "–"
    if isinstance(x, float):
        return (
            "0"
            if x == 0
            else f"{x:.4f}" if 0.001 <= abs(x) < 100 else f"{x:.1f}" if 100 <= abs(x) < 1e7 else f"{x:.4g}"
        )
    return str(x)


def table(header, rows, best=None):
    """best: {(row, column)} set in bold."""
    out = (
        ["<div class=scroll><table><thead><tr>"]
        + [f"<th>{html.escape(str(h))}</th>" for h in header]
        + ["</tr></thead><tbody>"]
    )
    for i, row in enumerate(rows):
        out.append("<tr>")
        for j, x in enumerate(row):
            mark = " class=best" if best and (i, j) in best else ""
            out.append(f"<td{mark}>{x if isinstance(x, Markup) else html.escape(cell(x))}</td>")
        out.append("</tr>")
    return "".join(out) + "</tbody></table></div>"


class Markup(str):
    """Already HTML."""


def labelled(g):
    line = "dashed" if g.ssmax else "solid"
    return Markup(
        f'<span class=key style="border-top-color:{g.color};border-top-style:{line}"></span>{html.escape(g.label)}'
    )


def spread_text(values, digits):
    m, sd = mean(values), deviation(values)
    if math.isnan(m):
        return "–"
    return f"{m:.{digits}f}" + (f" ± {sd:.{digits}f}" if math.isfinite(sd) else "")


def some_lengths(groups, suite, metric):
    """At most eight of the lengths a suite was done at, as powers of two of the training length where it can be."""
    lengths = sorted({row[0] for g in groups for row in g.by_length(suite, metric)})
    return lengths if len(lengths) <= 8 else [lengths[round(i * (len(lengths) - 1) / 7)] for i in range(8)]


def value_table(groups, columns):
    """columns: (heading, text of each group, values to find the best of or None, whether more is better)."""
    best = set()
    for j, (_, _, values, more) in enumerate(columns):
        finite = [v for v in values or [] if math.isfinite(v)]
        if len(finite) > 1 and min(finite) < max(finite):
            top = max(finite) if more else min(finite)
            best |= {(i, j + 1) for i, v in enumerate(values) if v == top}
    rows = [[labelled(g)] + [texts[i] for _, texts, _, _ in columns] for i, g in enumerate(groups)]
    return table(["encoding"] + [heading for heading, _, _, _ in columns], rows, best)


def summary(groups):
    columns = [
        ("seeds", [list_text([str(s) for s in g.seeds], 5) for g in groups], None, None),
        ("tokens", [human(g.tokens) for g in groups], None, None),
    ]
    if any(g.final_val() for g in groups):
        columns.append(
            (
                "validation loss",
                [spread_text(g.final_val(), 3) for g in groups],
                [round(mean(g.final_val()), 3) for g in groups],
                False,
            )
        )
    if any(g.speeds() for g in groups):
        columns.append(("tokens/s", [human(mean(g.speeds())) if g.speeds() else "–" for g in groups], None, None))
    return value_table(groups, columns)


def suite_table(groups, suite, metric, more):
    groups = [g for g in groups if g.by_length(suite, metric)]
    trained = {g.seq_len for g in groups}
    columns = []
    for n in some_lengths(groups, suite, metric):
        found = [next((r for r in g.by_length(suite, metric) if r[0] == n), None) for g in groups]
        times = f" ({n / max(trained):.3g}×)" if len(trained) == 1 and max(trained) else ""
        texts = ["–" if r is None else f"{r[1]:.2f}" + (f" ± {r[2]:.2f}" if math.isfinite(r[2]) else "") for r in found]
        columns.append(
            (length_text(n) + times, texts, [math.nan if r is None else round(r[1], 2) for r in found], more)
        )
    return value_table(groups, columns) if columns else ""


def flatten(tree, path=""):
    if isinstance(tree, dict) and tree:
        return {
            k: v for key, below in tree.items() for k, v in flatten(below, f"{path}.{key}" if path else key).items()
        }
    return {path: tree}


def differences(groups):
    """Config keys that are not the same in all groups."""
    flat = [
        {k: v for k, v in flatten(g.runs[0].config).items() if k not in ("run.name", "run.out", "run.seed")}
        for g in groups
    ]
    keys = [k for k in dict.fromkeys(k for f in flat for k in f) if len({repr(f.get(k)) for f in flat}) > 1]
    if not keys:
        return ""
    rows = [[labelled(g)] + [str(f.get(k)) for k in keys] for g, f in zip(groups, flat)]
    return "<p>All other settings are the same in all of them.</p>" + table(["encoding"] + keys, rows)


def corpus_note(groups):
    made = {r.made_by() for g in groups for r in g.runs}
    commands = sorted(m for m in made if m and m.startswith("bam make-corpus"))
    if not commands:
        return ""
    lengths = list_text([str(g.seq_len) for g in groups])
    return (
        f"<p class=note><b>Trained on made-up documents.</b> Unlike in the paper, these models are trained on "
        f"documents written by <code>{html.escape(commands[0])}</code>, many of which state a pass key and ask for it "
        f"as the evaluation does. No document is longer than {html.escape(lengths)} tokens, and the keys asked for in the "
        f"evaluation occur in none. So only the length (and the key) is new at evaluation: the pictures show how far "
        f"an encoding reads, not how a model comes to read.</p>"
    )


def comparison_notes(paths):
    """What `bam compare` wrote beside its runs: failures, and what shows that the runs differ in the encoding only."""
    out = []
    for path in paths:
        data = read_json(os.path.join(path, "compare.json"))
        for name, why in (get(data, "failed", default={}) or {}).items():
            out.append(
                f"<p class=bad><b>{html.escape(str(name))} failed</b> and is not, or not wholly, in the pictures: "
                f"{html.escape(str(why))}</p>"
            )
        parts = get(data, "proof", "parts", default=[])
        if parts:
            rows = [
                [
                    p.get("name"),
                    p.get("trained"),
                    ", ".join(f"{k} × {v}" for k, v in (p.get("own_parameters") or {}).items()) or "none",
                ]
                for p in parts
            ]
            out.append(
                "<details><summary>Parameters of each run and hashes of what they share</summary>"
                + table(["run", "trained parameters", "of its own"], rows)
            )
            for seed, h in (get(data, "proof", "seeds", default={}) or {}).items():
                out.append(
                    f"<p>Seed {html.escape(str(seed))}: shared initial weights "
                    f"<code>{html.escape(str(h.get('shared_weights_xxh64')))}</code>, "
                    f"token rows <code>{html.escape(str(h.get('rows_xxh64')))}</code>, the same for all.</p>"
                )
            out.append("</details>")
    return "".join(out)


def figure_html(f, png):
    data = base64.b64encode(png).decode()
    title = html.escape(f.title)
    return (
        f'<figure id="{html.escape(f.slug)}"><img alt="{title}" src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(f.caption)}</figcaption>"
        f"<details><summary>The numbers ({len(f.rows)} rows)</summary>{table(f.header, f.rows)}</details></figure>"
    )


def file_name(slug, taken):
    name = re.sub(r"[^a-z0-9]+", "-", slug.lower()).strip("-") or "figure"
    while name in taken:
        name += "-2"
    taken.add(name)
    return name


def write(path, data):
    partial = path + ".partial"
    with open(partial, "wb") as f:
        f.write(data)
    os.replace(partial, path)


def of_each(make):
    return lambda groups: [f for g in groups for f in make(g)]


SECTIONS = [
    ("passkey", "Reading beyond the training length", [figures_of.passkey, figures_of.depth_maps]),
    ("niah", "Needles in a haystack", [figures_of.needles]),
    ("choice", "Multiple choice", [figures_of.choices]),
    ("perplexity", "Perplexity", [figures_of.perplexity]),
    ("loss", "Loss", [figures_of.losses]),
    (
        "priors",
        "Learned priors",
        [
            priors_of.beta_histogram,
            of_each(priors_of.prior_curves),
            of_each(priors_of.prior_course),
            priors_of.ssmax_scales,
            priors_of.ssmax_course,
        ],
    ),
    ("attention", "Attention", [priors_of.span_attention, priors_of.distance_attention]),
    ("speed", "Speed", [figures_of.speed]),
]
TABLES = {
    "passkey": ("passkey", "accuracy", True),
    "niah": ("niah", "accuracy", True),
    "perplexity": ("perplexity", "perplexity", False),
}  # above the figures


def build(paths, out, title, dpi):
    runs = find_runs(paths)
    groups = make_groups(runs)
    os.makedirs(out, exist_ok=True)
    taken, body, nav = set(), [], []
    for anchor, heading, makers in SECTIONS:
        figures = [f for make in makers for f in make(groups)]
        if not figures:
            continue
        nav.append(f'<a href="#{anchor}">{html.escape(heading)}</a>')
        body.append(f'<h2 id="{anchor}">{html.escape(heading)}</h2>')
        if anchor in TABLES:
            body.append(suite_table(groups, *TABLES[anchor]))
        body.append("<div class=figures>")
        for f in figures:
            f.slug = file_name(f.slug, taken)
            path = os.path.join(out, f.slug + ".png")
            f.fig.savefig(path + ".partial", format="png", dpi=dpi, metadata={"Software": None})
            plt.close(f.fig)
            os.replace(path + ".partial", path)
            with open(path, "rb") as png:
                body.append(figure_html(f, png.read()))
        body.append("</div>")
    missing = [g.label for g in groups if not any(r.suites for r in g.runs)]
    if missing:
        body.append(
            f"<p class=soft>Not evaluated yet (<code>bam eval RUN</code> does it): "
            f"{html.escape(list_text(missing, 12))}.</p>"
        )
    if any(not r.steps for r in runs):
        body.append(
            "<p class=soft>Without any training step so far: "
            + html.escape(list_text([r.name for r in runs if not r.steps], 12))
            + ".</p>"
        )
    if len(groups) > 1:
        nav.append('<a href="#settings">What differs</a>')
        body.append(f"<h2 id=settings>What differs between them</h2>{differences(groups)}{comparison_notes(paths)}")
    models = "".join(f"<li>{html.escape(m)}</li>" for m in dict.fromkeys(model_text(r) for r in runs))
    title = title or (runs[0].name if len(groups) == 1 else f"{len(groups)} encodings compared")
    page = (
        f"<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p class=soft>{html.escape(describe(groups))}</p><nav>{' '.join(nav)}</nav>"
        f"{corpus_note(groups)}{summary(groups)}"
        f"<p class=soft>± is one standard deviation over the seeds. × is times the training length. Bold: the best of "
        f"a column.</p>"
        f"<details><summary>The models</summary><ul>{models}</ul></details>{''.join(body)}</body></html>\n"
    )
    write(os.path.join(out, "report.html"), page.encode("utf-8", "replace"))
    return len(groups), len(taken)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="report.py", description="Pictures of runs: report.html and PNG files.")
    parser.add_argument(
        "paths", nargs="+", metavar="DIR", help="run directories, or directories with runs below (bam compare's)"
    )
    parser.add_argument(
        "-o", "--out", help="directory for report.html and the PNG files (default: DIR/report of the first)"
    )
    parser.add_argument("--title", default="", help="heading of the report")
    parser.add_argument(
        "--dpi", type=int, default=200, help="dots an inch of the pictures, which are 6.4 inches wide (default: 200)"
    )
    a = parser.parse_args(arguments)
    if not 20 <= a.dpi <= 1200:
        parser.error(f"--dpi is {a.dpi}, expected 20 to 1200")
    out = a.out or os.path.join(a.paths[0], "report")
    try:
        groups, figures = build(a.paths, out, a.title, a.dpi)
    except ReportError as e:
        print(f"report.py: {e}", file=sys.stderr)
        return 3
    except OSError as e:
        print(f"report.py: {e.filename}: {e.strerror}", file=sys.stderr)
        return 1
    print(f"{os.path.join(out, 'report.html')}: {groups} encoding{'s' if groups != 1 else ''}, {figures} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a report is made from: run directories (DESIGN §3) read into Runs, and Runs that differ in their seed only
joined into Groups.

Nothing here draws. Missing or torn parts of a run are left out; only a directory without any run.json is an error."""

import json
import math
import os
import statistics

ENCODINGS = {  # name -> (label, colour of Okabe and Ito's palette, marker)
    "bam": ("BAM", "#0072B2", "o"),
    "rope": ("RoPE", "#D55E00", "s"),
    "alibi": ("ALiBi", "#009E73", "^"),
    "sinusoidal": ("Sinusoidal", "#CC79A7", "D"),
    "nope": ("NoPE", "#5A5A5A", "v"),
}
FURTHER_MARKERS = ["P", "X", "*", "h", "<", ">"]  # for a second, third ... group of the same encoding


class ReportError(Exception):
    """One line for the user."""


def read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (OSError, ValueError):
        return None


def read_events(path):
    """metrics.jsonl as {event: {step: object}}: a step's last line counts, torn lines and unknown ones do not."""
    events = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            lines = f.read().split("\n")
    except OSError:
        return events
    for line in lines:
        try:
            e = json.loads(line)
        except ValueError:
            continue
        if isinstance(e, dict) and isinstance(e.get("event"), str):
            step = e.get("step", 0)
            events.setdefault(e["event"], {})[step if isinstance(step, int) else 0] = e
    return events


def number(x):
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else math.nan


def get(tree, *keys, default=None):
    for k in keys:
        tree = tree.get(k) if isinstance(tree, dict) else None
    return default if tree is None else tree


class Run:
    def __init__(self, directory):
        self.directory = directory
        self.config = read_json(os.path.join(directory, "run.json"))
        if not isinstance(self.config, dict):
            raise ReportError(f"{directory}/run.json: not a JSON object, expected a resolved config")
        c = self.config
        self.name = str(get(c, "run", "name", default=os.path.basename(os.path.abspath(directory))))
        self.seed = get(c, "run", "seed", default=0)
        self.encoding = str(get(c, "model", "position", "encoding", default="?"))
        self.ssmax = bool(get(c, "model", "position", "ssmax", default=False))
        self.seq_len = int(get(c, "train", "seq_len", default=0))
        self.events = read_events(os.path.join(directory, "metrics.jsonl"))
        self.steps = [self.events["step"][s] for s in sorted(self.events.get("step", {}))]
        self.vals = [self.events["val"][s] for s in sorted(self.events.get("val", {}))]
        self.priors = [e for _, e in sorted(self.events.get("priors", {}).items()) if isinstance(e.get("layers"), list)]
        self.suites = {}  # file stem -> object
        folder = os.path.join(directory, "eval")
        for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
            data = read_json(os.path.join(folder, file)) if file.endswith(".json") else None
            if isinstance(data, dict):
                self.suites[file[:-5]] = data

    @property
    def tokens(self):
        return int(number(self.steps[-1].get("tokens", 0)) if self.steps else 0)

    @property
    def parameters(self):
        for kind in ("start", "resume"):
            for e in self.events.get(kind, {}).values():
                if e.get("parameters"):
                    return int(e["parameters"])
        return None

    def results(self, suite):
        return [x for x in get(self.suites.get(suite), "results", default=[]) if isinstance(x, dict)]

    def thetas(self, name, event=-1):
        """(layer, head) -> value of "theta_beta", "s", ... at a priors event; empty if it is not trained there."""
        values = {}
        if self.priors:
            for layer in self.priors[event]["layers"]:
                for h, v in enumerate(layer.get(name) or []):
                    values[(int(layer.get("layer", 0)), h)] = number(v)
        return values

    def made_by(self):
        """The command that made the training data up, or "" for text; None if its dataset.json is not to be found."""
        for pattern in get(self.config, "data", "train", default=[]):
            base = os.path.abspath(self.directory)
            for _ in range(6):  # the pattern is relative to where `bam train` was started
                for root in (os.getcwd(), base):
                    for folder in (os.path.join(root, pattern), os.path.dirname(os.path.join(root, pattern))):
                        data = read_json(os.path.join(folder, "dataset.json"))
                        if isinstance(data, dict):
                            return str(data.get("source", ""))
                base = os.path.dirname(base)
        return None

    def signature(self):
        """The config without what may differ between seeds of one variant."""
        c = json.loads(json.dumps(self.config))
        for section, keys in {
            "run": ("name", "out", "seed", "threads", "device"),
            "train": ("micro_batch",),
            "eval": None,
        }.items():
            if keys is None:
                c.pop(section, None)
            else:
                for k in keys:
                    get(c, section, default={}).pop(k, None)
        return json.dumps(c, sort_keys=True)


def mean(values):
    values = [v for v in values if math.isfinite(v)]
    return statistics.fmean(values) if values else math.nan


def deviation(values):
    """Sample standard deviation; NaN for fewer than two values."""
    values = [v for v in values if math.isfinite(v)]
    return statistics.stdev(values) if len(values) > 1 else math.nan


class Group:
    """Runs of one variant: they differ in the seed."""

    def __init__(self, runs):
        self.runs = sorted(runs, key=lambda r: (str(r.seed), r.name))
        first = self.runs[0]
        self.encoding, self.ssmax, self.seq_len = first.encoding, first.ssmax, first.seq_len
        self.variant = self.encoding + ("_ssmax" if self.ssmax else "")
        label, self.color, self.marker = ENCODINGS.get(self.encoding, (self.encoding, "#000000", "."))
        self.label = label + (" + SSMax" if self.ssmax else "")
        self.dashes = (0, (4, 2)) if self.ssmax else "solid"
        self.name = os.path.commonprefix([r.name for r in self.runs]) if len(self.runs) > 1 else first.name
        for r in self.runs:  # "rope-s42" -> "rope"
            suffix = f"-s{r.seed}"
            if r.name.endswith(suffix):
                self.name = r.name[: -len(suffix)]

    @property
    def seeds(self):
        return [r.seed for r in self.runs]

    @property
    def tokens(self):
        return max(r.tokens for r in self.runs)

    def final_val(self):
        return [number(r.vals[-1].get("loss")) for r in self.runs if r.vals]

    def speeds(self):
        """Median tokens/s of each run, the first step (warming up) left out."""
        rates = [[number(s.get("tok_per_s")) for s in r.steps[1:] or r.steps] for r in self.runs]
        return [statistics.median(v) for v in ([x for x in rate if math.isfinite(x)] for rate in rates) if v]

    def by_length(self, suite, metric, error="stderr"):
        """[(length, mean, sd over runs, standard error of a single run, runs)] of a summary's results. Of several
        results of a run at one length (tasks) the mean counts."""
        found = {}
        for r in self.runs:
            of_run = {}
            for result in r.results(suite):
                if math.isfinite(number(result.get(metric))):
                    of_run.setdefault(int(number(result.get("length"))), []).append(result)
            for length, results in of_run.items():
                stderr = math.sqrt(sum(number(x.get(error)) ** 2 for x in results)) / len(results)
                found.setdefault(length, []).append((mean([number(x[metric]) for x in results]), stderr))
        rows = []
        for length, of_runs in sorted(found.items()):
            values = [value for value, _ in of_runs]
            stderr = of_runs[0][1] if len(of_runs) == 1 else math.nan
            rows.append((length, mean(values), deviation(values), stderr, len(values)))
        return rows

    def cells(self, suite, keys, metric):
        """The values of keys -> (mean over the runs, runs)."""
        found = {}
        for r in self.runs:
            for result in r.results(suite):
                if math.isfinite(number(result.get(metric))):
                    found.setdefault(tuple(result.get(k) for k in keys), []).append(number(result[metric]))
        return {k: (mean(v), len(v)) for k, v in found.items()}


def find_runs(paths):
    """Run directories at or below the paths, each once, in the order of the paths."""
    found = {}
    for path in paths:
        if not os.path.isdir(path):
            raise ReportError(f"{path}: no such directory, expected a run or the directory of a comparison")
        before = len(found)
        for folder, below, files in os.walk(path, followlinks=True):
            depth = os.path.relpath(folder, path).count(os.sep)
            below[:] = sorted(below) if depth < 3 else []
            if "run.json" in files:
                found.setdefault(os.path.realpath(folder), folder)
                below[:] = []
        if len(found) == before:
            raise ReportError(f"{path}: no run.json in it or below, expected a run or the directory of a comparison")
    return [Run(folder) for folder in found.values()]


def make_groups(runs):
    """In the order of ENCODINGS, first without SSMax; of several groups of one encoding the plainly named one leads."""
    by_signature = {}
    for r in runs:
        by_signature.setdefault(r.signature(), []).append(r)
    order = list(ENCODINGS)
    groups = [Group(g) for g in by_signature.values()]
    groups.sort(
        key=lambda g: (
            g.ssmax,
            order.index(g.encoding) if g.encoding in order else len(order),
            g.name != g.variant,
            g.name,
        )
    )
    for g in groups:
        like = [x for x in groups if x.variant == g.variant]
        place = like.index(g)
        if place > 0:
            g.marker = FURTHER_MARKERS[(place - 1) % len(FURTHER_MARKERS)]
            g.dashes = (0, (4, 2, 1, 2)) if g.ssmax else (0, (12, 1.5))
        if len(like) > 1 and g.name != g.variant:
            g.label += f" ({g.name})"
    seen = {}
    for g in groups:  # names alike, too
        seen[g.label] = seen.get(g.label, 0) + 1
        if seen[g.label] > 1:
            g.label += f" #{seen[g.label]}"
    return groups


def human(n):
    """1234567 -> "1.23 M"."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= limit:
            return f"{n / limit:.3g} {unit}"
    return f"{n:g}"


def model_text(run):
    m = get(run.config, "model", default={})
    shape = f"{m.get('n_layers', '?')} layers × {m.get('dim', '?')}, {m.get('n_heads', '?')} heads"
    text = f"{m.get('preset') or 'model'}: {shape}"
    return text + (f", {human(run.parameters)} parameters" if run.parameters else "")


def list_text(items, limit=3):
    items = list(dict.fromkeys(items))
    return ", ".join(items) if len(items) <= limit else f"{', '.join(items[:limit - 1])} … ({len(items)})"


def describe(groups):
    """The line under every figure: model, tokens, seeds."""
    runs = [r for g in groups for r in g.runs]
    models = list(dict.fromkeys(model_text(r).split(",")[0] + "," + model_text(r).split(",")[1] for r in runs))
    tokens = list_text([human(r.tokens) for r in runs])
    lengths = list_text([str(r.seq_len) for r in runs])
    seeds = list_text([str(s) for s in sorted({s for g in groups for s in g.seeds}, key=str)], 5)
    models = " | ".join(models[:2]) + (" …" if len(models) > 2 else "")
    return f"{models} · trained on {tokens} tokens at length {lengths} · seed{'' if seeds.isdigit() else 's'} {seeds}"

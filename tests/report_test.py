"""scripts/report.py on run directories made up here: numbers in tables, files, odd names, missing and torn parts, bad
use.

Run by report_test.cpp; prints unittest's verdict. Made-up curves follow simple formulas so that means are known."""

import contextlib
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import unittest
import warnings

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts", "report.py")
sys.path.insert(0, os.path.dirname(SCRIPT))
report_script = importlib.import_module("report")
T, HEADS, LAYERS = 128, 4, 3


def write_json(path, data):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(data, f)


def accuracy(encoding, ssmax, length, seed):
    """How far this made-up encoding reads."""
    reach = {"nope": 0.3, "sinusoidal": 0.5, "rope": 2, "alibi": 6, "bam": 24}[encoding] * (
        8 if ssmax and encoding == "bam" else 1.3 if ssmax else 1
    )
    return round(min(1.0, max(0.0, 1.15 / (1 + (length / T / reach) ** 2) - 0.02 * (seed % 3))) * 20) / 20


def config(name, encoding, ssmax, seed, data="data", **bam):
    return {
        "run": {"name": name, "out": "runs", "seed": seed, "device": "cpu", "dtype": "fp32", "threads": 2},
        "model": {
            "preset": "nano",
            "dim": 64,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "vocab_size": 325,
            "position": {
                "encoding": encoding,
                "ssmax": ssmax,
                "bam": {"init_alpha": bam.get("alpha", -1), "init_beta": bam.get("beta", [-0.5, 1])},
            },
        },
        "data": {"train": [data + "/train_*.bin"]},
        "train": {"seq_len": T, "tokens_per_step": 4096, "micro_batch": 8, "steps": 300},
    }


def make_run(
    root,
    name,
    encoding,
    ssmax=False,
    seed=42,
    lengths=(128, 256, 512, 1024, 2048, 4096, 8192),
    steps=300,
    evaluated=True,
    **bam,
):
    folder = os.path.join(root, name)
    write_json(os.path.join(folder, "run.json"), config(name, encoding, ssmax, seed, **bam))
    offset = {"nope": 0.3, "sinusoidal": 0.2, "rope": 0.05, "alibi": 0.08, "bam": 0.0}[encoding]
    wave = lambda i: 0.03 * math.sin(12.9 * i + seed)
    lines = [{"event": "start", "step": 0, "parameters": 753000 + 8 * HEADS * ssmax}]
    for s in range(1, steps + 1):
        loss = 1.2 + offset + 0.02 * (seed % 3) + 4.6 * math.exp(-s / 25) + wave(s)
        lines.append(
            {
                "event": "step",
                "step": s,
                "loss": None if s == 7 else loss,
                "grad_norm": 1.0,
                "lr": 1e-3,
                "tokens": 4096 * s,
                "tok_per_s": 20000 + 500 * wave(3 * s) + 100 * (seed % 3),
                "mfu": 0.31 if s > 10 else None,
            }
        )
        if s % 25 == 0:
            lines.append(
                {"event": "val", "step": s, "loss": 1.25 + offset + 0.02 * (seed % 3) + 4.6 * math.exp(-s / 25)}
            )
        if s % 20 == 0 or s == 1:
            layers = []
            for l in range(LAYERS):
                layer = {"layer": l}
                if encoding == "bam":
                    low, high = bam.get("beta", [-0.5, 1])
                    layer["theta_beta"] = [
                        low + (high - low) * h / (HEADS - 1) + 0.001 * s * math.sin(3 * h + l + seed) * 0.8
                        for h in range(HEADS)
                    ]
                    layer["theta_alpha"] = [
                        bam.get("alpha", -1) + 0.001 * s * math.cos(2 * h + l) for h in range(HEADS)
                    ]
                    layer["theta_mu"] = [0.0] * HEADS
                if ssmax:
                    layer["s"] = [1 + 0.0008 * s * math.sin(h + 2 * l + seed) for h in range(HEADS)]
                layers.append(layer)
            if encoding == "bam" or ssmax:
                lines.append({"event": "priors", "step": s, "layers": layers})
    with open(os.path.join(folder, "metrics.jsonl"), "w", encoding="utf-8") as f:
        f.write(
            json.dumps({"event": "step", "step": 1, "loss": 99.0, "tokens": 4096, "tok_per_s": 1.0}) + "\n"
        )  # written again below
        f.write('{"event":"step","step":2,"lo\n')  # torn
        for line in lines:
            f.write(json.dumps(line) + "\n")
        f.write('{"event":"step","ste')
    if not evaluated:
        return folder
    passkey, perplexity = [], []
    for n in lengths:
        a = accuracy(encoding, ssmax, n, seed)
        depth = [
            {
                "depth": i / 19,
                "samples": 1,
                "correct": int(i < 20 * a),
                "digit_accuracy": 1.0 if i < 20 * a else 0.2 * (i % 3),
            }
            for i in range(20)
        ]
        passkey.append(
            {
                "length": n,
                "reached_tokens": n - 5,
                "samples": 20,
                "accuracy": a,
                "stderr": math.sqrt(a * (1 - a) / 19),
                "digit_accuracy": sum(d["digit_accuracy"] for d in depth) / 20,
                "digit_stderr": 0.03,
                "chance": 1e-5,
                "by_depth": depth,
            }
        )
        nll = (
            1.3
            + offset
            + 0.12
            * max(0, math.log2(n / T))
            * {"nope": 4, "sinusoidal": 6, "rope": 5, "alibi": 0.2, "bam": 0.1}[encoding]
            / (2 if ssmax else 1)
        )
        perplexity.append(
            {
                "length": n,
                "variant": "windows",
                "nll": nll,
                "stderr": 0.01,
                "perplexity": math.exp(nll),
                "tokens": 65536,
            }
        )
    head = {"format": "bam-eval", "version": 1, "model": {}, "trained_length": T}
    write_json(
        os.path.join(folder, "eval", "passkey.json"),
        {**head, "suite": "passkey", "variant": "paper", "results": passkey},
    )
    write_json(
        os.path.join(folder, "eval", "perplexity.json"),
        {**head, "suite": "perplexity", "variant": "windows", "results": perplexity},
    )
    niah = [
        {"task": task, "length": n, "samples": 10, "accuracy": accuracy(encoding, ssmax, n, seed) / share, "stderr": 0.03}
        for task, share in (("single_1", 1), ("multikey_3", 2))
        for n in lengths
    ]
    write_json(os.path.join(folder, "eval", "niah.json"), {**head, "suite": "niah", "variant": "", "results": niah})
    right = {"acc": 0.3 + 0.01 * (seed % 3), "acc_stderr": 0.02, "acc_norm": 0.35, "acc_norm_stderr": 0.02}
    choice = [{"file": f, "samples": 50, **right, "chance": 0.25} for f in ("arc_easy", "odd $name")]
    write_json(os.path.join(folder, "eval", "choice.json"), {**head, "suite": "choice", "results": choice})
    heads = lambda l: [
        {
            "head": h,
            "span_mass": 0.9 * (h == l) if encoding == "bam" else 0.05,
            "entropy": 1.5,
            "mass_by_distance": [
                {"from": 2**i // 2, "to": 2**i, "mass": 0.5 ** (i + 1) if h else 0.125} for i in range(8)
            ],
        }
        for h in range(HEADS)
    ]
    write_json(
        os.path.join(folder, "eval", "inspect.json"),
        {"format": "bam-inspect", "version": 1, "layers": [{"layer": l, "heads": heads(l)} for l in range(LAYERS)]},
    )
    return folder


def make_comparison(root, seeds=(42, 43, 44), **kwargs):
    for encoding in ("nope", "sinusoidal", "rope", "alibi", "bam"):
        for ssmax in (False, True):
            for seed in seeds:
                make_run(
                    os.path.join(root, "runs"),
                    f"{encoding}{'_ssmax' if ssmax else ''}-s{seed}",
                    encoding,
                    ssmax,
                    seed,
                    **kwargs,
                )
    write_json(
        os.path.join(root, "compare.json"),
        {
            "failed": {"rope-s45": "exit 4: loss is NaN at step 3"},
            "proof": {
                "parts": [
                    {
                        "name": "bam-s42",
                        "trained": 753000,
                        "own_parameters": {"layers.*.attention.prior.theta_alpha": 12},
                    }
                ],
                "seeds": {"42": {"shared_weights_xxh64": "aa55", "rows_xxh64": "bb66"}},
            },
        },
    )


class Result:
    """What a call of report.py gave."""


def report(*paths, out):
    r, printed, errors = Result(), io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Glyph")
        r.returncode = report_script.main([*paths, "-o", out, "--dpi", "40"])
    r.stdout, r.stderr = printed.getvalue(), errors.getvalue()
    return r


class Report(unittest.TestCase):
    def setUp(self):
        self.temp = tempfile.TemporaryDirectory()
        self.root = self.temp.name
        self.out = os.path.join(self.root, "out")

    def tearDown(self):
        self.temp.cleanup()

    def page(self, *paths):
        r = report(*paths, out=self.out)
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertEqual(r.stderr, "")
        with open(os.path.join(self.out, "report.html"), encoding="utf-8") as f:
            return f.read()

    def pictures(self):
        return sorted(f for f in os.listdir(self.out) if f.endswith(".png"))

    def rows(self, page, figure):
        """The table behind a figure as lists of cells."""
        body = page[page.index(f'<figure id="{figure}">') :]
        body = body[: body.index("</figure>")]
        return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)[1:]]

    def test_comparison(self):
        make_comparison(self.root, seeds=(42, 43))
        page = self.page(self.root)
        self.assertEqual(
            self.pictures(),
            sorted(
                f + ".png"
                for f in (
                    "passkey",
                    "passkey-digits",
                    "passkey-depth",
                    "perplexity",
                    "niah",
                    "niah-tasks",
                    "choice-arc-easy",
                    "choice-odd-name",
                    "loss-val",
                    "loss-train",
                    "theta-beta",
                    "priors-bam",
                    "priors-bam-ssmax",
                    "ssmax-s",
                    "course-bam",
                    "course-bam-ssmax",
                    "course-s",
                    "attention-key",
                    "attention-distance",
                    "speed",
                )
            ),
        )
        self.assertEqual(next(r for r in self.rows(page, "attention-key") if r[:3] == ["BAM", "1", "1"])[3], "0.9000")
        rows = self.rows(page, "passkey")
        self.assertEqual(len(rows), 10 * 7)
        expected = (accuracy("rope", False, 256, 42) + accuracy("rope", False, 256, 43)) / 2
        row = next(r for r in rows if r[0] == "RoPE" and r[1] == "256")
        self.assertEqual(float(row[2]), round(expected, 4))
        self.assertEqual(row[-1], "2")
        # the mean over tasks of each run, then over runs; and each task by itself
        row = next(r for r in self.rows(page, "niah") if r[0] == "RoPE" and r[1] == "256")
        self.assertAlmostEqual(float(row[2]), 0.75 * expected, delta=1e-4)
        self.assertEqual(row[-1], "2")
        row = next(r for r in self.rows(page, "niah-tasks") if r[:3] == ["RoPE", "256", "multikey_3"])
        self.assertAlmostEqual(float(row[3]), expected / 2, delta=1e-4)
        row = self.rows(page, "choice-odd-name")[0]
        self.assertEqual(row[1:4], ["0.3500", f"{0.3 + 0.01 * 1 / 2:.4f}", "0.2500"])
        # a step's last line counts (99 was written over) and null is no number
        first = next(r for r in self.rows(page, "loss-train") if r[0] == "BAM" and r[1] == "1")
        self.assertAlmostEqual(
            float(first[3]),
            1.2 + 0.02 * (0 + 1) / 2 + 4.6 * math.exp(-1 / 25) + 0.03 * (math.sin(12.9 + 42) + math.sin(12.9 + 43)) / 2,
            places=3,
        )
        self.assertTrue("rope-s45 failed" in page)
        self.assertTrue("bb66" in page)
        self.assertTrue("10 encodings compared" in page)
        self.assertFalse("http://" in page)
        self.assertFalse("https://" in page)
        self.assertEqual(page.count("data:image/png;base64,"), len(self.pictures()))
        self.assertTrue("42, 43" in page)

    def test_priors_follow_the_formula(self):
        run = make_run(self.root, "bam-s42", "bam", evaluated=False)
        rows = self.rows(self.page(run), "priors-bam")
        self.assertEqual(len(rows), LAYERS * HEADS)
        for layer, head, alpha, beta, mu, kind, *bias in rows:
            self.assertEqual(
                kind, "far-looking" if float(beta) <= 0 else "heavy-tailed" if float(beta) < 1 else "local"
            )
            for d, b in zip((0, 1, 8, 64, 512, 4096), bias):
                expected = -math.exp(float(alpha)) * (d + 1e-5) ** float(beta)
                self.assertAlmostEqual(float(b) / expected, 1, delta=0.01 + 0.0001 / abs(expected))

    def test_one_length_and_no_evaluation(self):
        make_run(self.root, "rope", "rope", lengths=(128,))
        make_run(self.root, "alibi", "alibi", evaluated=False)
        page = self.page(os.path.join(self.root, "rope"), os.path.join(self.root, "alibi"))
        self.assertEqual(len(self.rows(page, "passkey")), 1)
        self.assertTrue("Not evaluated yet" in page)
        self.assertEqual(len(self.rows(page, "speed")), 2)

    def test_run_that_has_just_begun(self):
        folder = os.path.join(self.root, "new")
        write_json(os.path.join(folder, "run.json"), config("new", "bam", True, 1))
        page = self.page(folder)
        self.assertTrue("Without any training step" in page)
        self.assertEqual(self.pictures(), [])

    def test_odd_names(self):
        name = "ключ & $key$ <b>é 鍵"
        make_run(self.root, name, "bam", True, steps=30, evaluated=False)
        make_run(self.root, "plain", "bam", True, steps=30, evaluated=False, alpha=0, beta=[0, 0.1])
        page = self.page(self.root)
        self.assertTrue("ключ &amp; $key$ &lt;b&gt;é 鍵" in page)
        self.assertFalse("<b>é" in page)
        self.assertIn("priors-bam-ssmax-plain.png", self.pictures())

    def test_says_what_it_was_trained_on(self):
        command = "bam make-corpus --tokens 1000 --val-tokens 0 --seq-len 128 --seed 1"
        make_run(os.path.join(self.root, "runs"), "rope", "rope", steps=5, evaluated=False)
        self.assertFalse("made-up documents" in self.page(self.root))
        write_json(os.path.join(self.root, "data", "dataset.json"), {"format": "bam-dataset", "source": command})
        page = self.page(self.root)
        self.assertTrue("Unlike in the paper" in page)
        self.assertTrue(command in page)
        write_json(os.path.join(self.root, "data", "dataset.json"), {"format": "bam-dataset"})
        self.assertFalse("Unlike in the paper" in self.page(self.root))

    def test_same_input_same_bytes(self):
        run = make_run(self.root, "rope", "rope", steps=40)
        self.assertEqual(self.page(run), self.page(run))

    def test_bad_use(self):
        empty = os.path.join(self.root, "empty")
        os.makedirs(empty)
        bad = os.path.join(self.root, "bad")
        os.makedirs(bad)
        with open(os.path.join(bad, "run.json"), "w") as f:
            f.write("[1]")
        for path, words in (
            (empty, "no run.json"),
            (os.path.join(self.root, "none"), "no such directory"),
            (bad, "not a JSON object"),
        ):
            r = report(path, out=self.out)
            self.assertEqual(r.returncode, 3)
            self.assertEqual(len(r.stderr.strip().split("\n")), 1)
            self.assertIn(words, r.stderr)
            self.assertIn(path, r.stderr)
        self.assertEqual(
            subprocess.run([sys.executable, SCRIPT, empty, "-o", self.out], capture_output=True).returncode, 3
        )
        self.assertEqual(
            subprocess.run([sys.executable, SCRIPT, empty, "--dpi", "0"], capture_output=True).returncode, 2
        )


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""Training speed of bam and of PyTorch on this CPU, side by side in one run (needs torch and numpy: pip install torch numpy).

First both compute the same: a small model of each variant is loaded from what bam wrote, and the losses and gradient norms of its first
steps are compared in fp32 (--check does only that). Then whole training steps on random tokens are timed in turns, bam, PyTorch, bam,
PyTorch ..., each in its own process with the same threads, tokens a step and optimizer. PyTorch gets its best case: the fastest of several
micro-batches, and the faster of eager and torch.compile. Real-time priority keeps other processes out:

    chrt -r 1 python3 scripts/bench/pytorch_side_by_side.py
"""
import argparse
import json
import math
import os
import platform
import resource
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import time

try:
    import numpy
    import torch

    from pytorch_model import PRESETS, VARIANTS, Trainer, load
except ImportError as e:
    sys.exit(f"pytorch_side_by_side.py: no module {e.name}: pip install torch numpy")

# Large blocks stay with the process, in huge pages: PyTorch's eager mode gains by it, and bam does the same itself.
MEMORY_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


class Failed(Exception):
    pass


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_bam(arguments, *options):
    # Through a shell: a process's peak memory begins with that of the one it was started from, and this one holds PyTorch.
    r = subprocess.run(["sh", "-c", '"$0" "$@"; exit $?', arguments.bam, *options], capture_output=True, text=True)
    if r.returncode:
        said = (r.stderr.strip() or r.stdout.strip() or f"exit {r.returncode}").splitlines()[-1]
        raise Failed(f"{' '.join([arguments.bam, *options])}: {said}")
    return r.stdout


# ---- the same numbers -----------------------------------------------------------------------------------------------

CHECK = dict(dim=48, n_layers=2, n_heads=4, ffn_hidden=80, vocab_size=101)
CHECK_T, CHECK_ROWS, CHECK_STEPS, CHECK_LR = 40, 6, 8, 3e-3
TOLERANCE = 1e-4


def write_shard(path, tokens):
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + tokens.astype("<u2").tobytes())


def bam_steps(arguments, directory, variant, name, steps, lr):
    """Trains and returns the run directory. With lr 0 its checkpoint holds the initial weights."""
    config = {
        "run": {"name": name, "out": directory, "device": "cpu", "dtype": "fp32", "threads": arguments.threads},
        "model": dict(CHECK, position={"bam": {"init_alpha": -1, "init_beta": [-0.5, 1]}}),
        "data": {"train": [os.path.join(directory, "train.bin")], "separator": None, "document_mask": False, "shuffle": False},
        "train": {"seq_len": CHECK_T, "tokens_per_step": CHECK_T * CHECK_ROWS, "steps": steps, "optimizer": {"name": "radam", "lr": lr},
                  "val_every": 0, "checkpoint_every": steps}}
    path = os.path.join(directory, name + ".json")
    with open(path, "w") as f:
        json.dump(config, f)
    run_bam(arguments, "train", path, "--pe", variant)
    return os.path.join(directory, name)


def check(arguments, variant):
    """The largest difference of a loss, and the largest relative one of a gradient norm, over the first steps."""
    with tempfile.TemporaryDirectory() as directory:
        n = CHECK_T * CHECK_ROWS * CHECK_STEPS + 1
        tokens = numpy.random.default_rng(1).integers(0, CHECK["vocab_size"], n)
        write_shard(os.path.join(directory, "train.bin"), tokens)
        start = bam_steps(arguments, directory, variant, "start", 1, 0)
        run = bam_steps(arguments, directory, variant, "run", CHECK_STEPS, CHECK_LR)
        with open(os.path.join(run, "metrics.jsonl")) as f:
            expected = [e for e in map(json.loads, f) if e["event"] == "step"]
        shape = [CHECK[k] for k in ("dim", "n_layers", "n_heads", "ffn_hidden")]
        trainer = Trainer(shape, CHECK["vocab_size"], CHECK_T, variant, lr=CHECK_LR)
        load(trainer.model, os.path.join(start, "checkpoints", "step_00000001"))
        rows = torch.from_numpy(numpy.stack([tokens[i:i + CHECK_T + 1] for i in range(0, n - 1, CHECK_T)]))
        loss_error = norm_error = 0.0
        for k, e in enumerate(expected):
            factor = 0.1 + 0.9 * (1 + math.cos(math.pi * k / CHECK_STEPS)) / 2
            loss, norm = trainer.step(rows[k * CHECK_ROWS:(k + 1) * CHECK_ROWS], 4, CHECK_LR * factor)
            loss_error = max(loss_error, abs(loss - e["loss"]))
            norm_error = max(norm_error, abs(norm / e["grad_norm"] - 1))
        first, last = expected[0]["loss"], expected[-1]["loss"]
        print(f"{variant}: losses of {len(expected)} steps ({first:.4f} to {last:.4f}) differ by at most {loss_error:.1e}, "
              f"gradient norms by {norm_error:.1e} of themselves",
              file=sys.stdout if arguments.check else sys.stderr, flush=True)
        if len(expected) != CHECK_STEPS or not loss_error <= TOLERANCE or not norm_error <= TOLERANCE:
            raise Failed(f"{variant}: bam and PyTorch differ by more than {TOLERANCE:g}: they do not train the same model")


# ---- PyTorch's side, in its own process -----------------------------------------------------------------------------


def available_bytes():
    with open("/proc/meminfo") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))


def fastest_micro_batch(trainer, candidates, random_rows, rows, longest_step):
    """Seconds a row of forward and backward, for each number of rows that fits in memory."""
    seconds, before = {}, peak_bytes()
    for n in candidates:
        for _ in range(2):  # the first warms up, or compiles
            part = random_rows(n)
            begin = time.perf_counter()
            trainer.accumulate(part, rows * part.shape[1])
            seconds[n] = (time.perf_counter() - begin) / n
            if seconds[n] * rows > longest_step and not trainer.compiled:
                break
        grown, before = peak_bytes() - before, peak_bytes()
        if 3 * grown > available_bytes() or seconds[n] > 1.1 * min(seconds.values()):
            break
    trainer.optimizer.zero_grad()
    return seconds


def worker(o):
    reply_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no reply
    with open("/proc/self/oom_score_adj", "w") as f:
        f.write("1000")  # where memory ends, this process does, and no other
    torch.set_num_threads(o["threads"])
    torch.manual_seed(1)
    T, rows, vocab_size = o["seq_len"], o["rows"], o["vocab_size"]
    trainer, micro_batch = None, 0

    def random_rows(n):
        return torch.randint(0, vocab_size, (n, T + 1))

    def tune(candidates):
        nonlocal trainer, micro_batch
        trainer = Trainer(PRESETS[o["model"]], vocab_size, T, o["variant"], o["dtype"], o["compiled"])
        seconds = fastest_micro_batch(trainer, candidates, random_rows, rows, o["longest_step"])
        micro_batch = min(seconds, key=seconds.get)
        return {"micro_batch": micro_batch, "seconds_a_row": seconds}

    def steps(n):
        seconds = []
        for _ in range(n):
            part = random_rows(rows)
            begin = time.perf_counter()
            trainer.step(part, micro_batch)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    for line in sys.stdin:
        command, argument = json.loads(line)
        try:
            reply = {"tune": tune, "steps": steps}[command](argument)
        except Exception as e:  # whatever the compiler or the allocator says: one line for the other side
            reply = {"error": f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else ''}"}
        reply_to.write(json.dumps(reply | {"peak_bytes": peak_bytes()}) + "\n")
        reply_to.flush()


class Worker:
    def __init__(self, arguments, variant, dtype, compiled):
        o = dict(model=arguments.model, variant=variant, dtype=dtype, compiled=compiled, threads=arguments.threads,
                 vocab_size=arguments.vocab_size, seq_len=arguments.seq_len, rows=arguments.tokens // arguments.seq_len,
                 longest_step=arguments.longest_step)
        environment = os.environ | (MEMORY_ENVIRONMENT if not arguments.plain_malloc else {}) | {"OMP_NUM_THREADS": str(arguments.threads)}
        errors = None if arguments.verbose else subprocess.DEVNULL
        self.process = subprocess.Popen([sys.executable, __file__, "--worker", json.dumps(o)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        self.peak_bytes = 0

    def ask(self, command, argument, limit=None):
        try:
            self.process.stdin.write(json.dumps([command, argument]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died: why is said below
        if not select.select([self.process.stdout], [], [], limit)[0]:
            raise Failed(f"no answer within {limit} s")
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise Failed("killed: out of memory, most likely" if code == -9 else f"died (exit {code})")
        reply = json.loads(line)
        self.peak_bytes = reply["peak_bytes"]
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    def close(self):
        self.process.kill()
        self.process.wait()


# ---- in turns -------------------------------------------------------------------------------------------------------


def open_torch(arguments, variant, dtype):
    """Workers by mode, each with its fastest micro-batch, and for a mode that does not work, why."""
    workers, notes, micro_batch, slow = {}, {}, {}, {}
    rows = arguments.tokens // arguments.seq_len
    for mode in ("eager", "compiled"):
        if mode == "compiled" and not arguments.compile_seconds:
            notes[mode] = "not asked for"
            continue
        w = Worker(arguments, variant, dtype, mode == "compiled")
        try:
            candidates = [n for n in arguments.micro_batches if n <= rows]
            if mode == "compiled" and micro_batch:
                candidates = [n for n in candidates if n >= micro_batch["eager"]][:2]  # each shape is compiled anew
            reply = w.ask("tune", candidates, arguments.compile_seconds if mode == "compiled" else None)
            n = micro_batch[mode] = reply["micro_batch"]
            seconds = reply["seconds_a_row"][str(n)] * rows
            if seconds <= arguments.longest_step:
                workers[mode] = w
                continue
            slow[mode] = arguments.tokens / seconds
            notes[mode] = f"a step would take {seconds:.0f} s: only forward and backward of {n} rows were timed"
            w.close()
        except Failed as e:
            notes[mode] = str(e)
            w.close()
    return workers, notes, micro_batch, slow


def compare(arguments, variant, dtype):
    workers, notes, micro_batch, slow = open_torch(arguments, variant, dtype)
    rates = {"bam": [], "eager": [], "compiled": []}
    peaks, utilization = {}, []
    try:
        for number in range(arguments.rounds):
            report = json.loads(run_bam(arguments, "bench", "train", "--model", arguments.model, "--pe", variant, "--dtype", dtype,
                                        "--vocab-size", str(arguments.vocab_size), "--seq-len", str(arguments.seq_len),
                                        "--tokens", str(arguments.tokens), "--steps", str(arguments.steps),
                                        "--threads", str(arguments.threads), "--device", "cpu", "--json"))
            rates["bam"].append(report["tok_per_s"])
            utilization.append(report["utilization"])
            peaks["bam"] = report["peak_bytes"]
            for mode, w in list(workers.items()):
                try:
                    seconds = w.ask("steps", arguments.steps + (number == 0))["seconds"][-arguments.steps:]
                except Failed as e:
                    notes[mode] = f"round {number + 1}: {e}"
                    rates[mode] = []  # it is compared in all rounds or in none
                    workers.pop(mode).close()
                    continue
                rates[mode].append(arguments.tokens / statistics.median(seconds))
                peaks[mode] = w.peak_bytes
            for mode, rate in slow.items():
                rates[mode].append(rate)
            print(f"  {variant} {dtype} round {number + 1}: " + ", ".join(f"{k} {v[-1]:.1f}" for k, v in rates.items() if v) + " tok/s",
                  file=sys.stderr, flush=True)
    finally:
        for w in workers.values():
            w.close()
    result = {"variant": variant, "dtype": dtype, "micro_batch": micro_batch, "notes": notes, "rates": rates, "peak_bytes": peaks,
              "bam_utilization": statistics.median(utilization),
              "tok_per_s": {k: statistics.median(v) for k, v in rates.items() if v}}
    timed = [mode for mode in ("eager", "compiled") if rates[mode]]
    if timed:
        fastest = max(timed, key=lambda mode: result["tok_per_s"][mode])
        result |= {"fastest": fastest, "ratio": statistics.median(b / t for b, t in zip(rates["bam"], rates[fastest]))}
    return result


def cpu_name():
    with open("/proc/cpuinfo") as f:
        lines = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in f)}
    flags = [x for x in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if x in lines.get("flags", "").split()]
    return f"{lines.get('model name', platform.machine())} ({flags[0] if flags else 'no AVX2'}), {len(os.sched_getaffinity(0))} cores"


def gib(n):
    return f"{n / 2**30:.1f}" if n else "-"


def print_table(arguments, results):
    print(f"\n{arguments.model}, vocabulary {arguments.vocab_size}, T {arguments.seq_len}, {arguments.tokens} tokens a step, "
          f"{arguments.threads} threads, {cpu_name()}, PyTorch {torch.__version__}, {time.strftime('%Y-%m-%d', time.gmtime())}: "
          f"median of {arguments.rounds} rounds\n")
    columns = ["variant", "dtype", "bam tok/s", "utilization", "PyTorch eager", "compiled", "ratio", "peak GiB: bam", "eager", "compiled"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for r in results:
        rate = lambda k: f"{r['tok_per_s'][k]:,.0f}" if k in r["tok_per_s"] else "-"
        cells = [r["variant"], r["dtype"], rate("bam"), f"{100 * r['bam_utilization']:.0f} %", rate("eager"), rate("compiled"),
                 f"{r['ratio']:.2f}" if "ratio" in r else "-", *(gib(r["peak_bytes"].get(k)) for k in ("bam", "eager", "compiled"))]
        print("| " + " | ".join(cells) + " |")
    for variant in dict.fromkeys(r["variant"] for r in results):
        of = [r for r in results if r["variant"] == variant]
        timed = [r for r in of if "fastest" in r]
        if len(timed) > 1:
            ours = max(of, key=lambda r: r["tok_per_s"]["bam"])
            theirs = max(timed, key=lambda r: r["tok_per_s"][r["fastest"]])
            their_rate = theirs["tok_per_s"][theirs["fastest"]]
            print(f"{variant}, each in its faster dtype: bam {ours['dtype']} {ours['tok_per_s']['bam']:,.0f}, PyTorch {theirs['dtype']} "
                  f"{theirs['fastest']} {their_rate:,.0f} tok/s, ratio {ours['tok_per_s']['bam'] / their_rate:.2f}")
    for r in results:
        for mode, note in r["notes"].items():
            print(f"{r['variant']} {r['dtype']} {mode}: {note}")


def parse_arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: [n for n in text.split(",") if n]
    p.add_argument("--model", default="l12", choices=PRESETS)
    p.add_argument("--variants", type=names, default=["nope", "bam", "bam_ssmax"], help="of " + ", ".join(VARIANTS))
    p.add_argument("--dtype", type=names, default=["fp32", "bf16"], help="fp32, bf16 or both")
    p.add_argument("--seq-len", type=int, default=512)
    p.add_argument("--vocab-size", type=int, default=32768)
    p.add_argument("--tokens", type=int, default=8192, help="tokens a step")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=3, help="steps a round: their median counts")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--micro-batches", type=lambda s: [int(n) for n in names(s)], default=[1, 2, 4, 8, 16], help="rows that PyTorch tries")
    p.add_argument("--compile-seconds", type=float, default=600, help="limit for torch.compile, 0: eager only")
    p.add_argument("--longest-step", type=float, default=180,
                   help="where PyTorch needs more seconds a step (bf16 without instructions for it), one micro-batch tells its speed")
    p.add_argument("--plain-malloc", action="store_true", help="leave the allocator of PyTorch's processes as it is")
    p.add_argument("--bam", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../build/bam"))
    p.add_argument("--check", action="store_true", help="only compare losses and gradient norms")
    p.add_argument("--json", action="store_true", help="results as JSON")
    p.add_argument("--verbose", action="store_true", help="show what PyTorch prints")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    a = p.parse_args()
    for given, allowed in ((a.variants, VARIANTS), (a.dtype, ("fp32", "bf16"))):
        for n in given:
            if n not in allowed:
                raise Failed(f"{n}: expected one of {', '.join(allowed)}")
    if min(a.seq_len, a.vocab_size, a.rounds, a.steps, a.threads, *a.micro_batches) < 1 or a.tokens % a.seq_len:
        raise Failed(f"--tokens {a.tokens} in rows of --seq-len {a.seq_len}: expected whole rows, and no count below 1")
    a.bam = os.path.normpath(a.bam)
    if not a.worker and not os.access(a.bam, os.X_OK):
        raise Failed(f"{a.bam}: no such program: make, or give --bam")
    return a


def main():
    arguments = parse_arguments()
    if arguments.worker:
        return worker(json.loads(arguments.worker))
    torch.set_num_threads(arguments.threads)
    for variant in arguments.variants:
        check(arguments, variant)
    if arguments.check:
        return
    results = [compare(arguments, v, d) for v in arguments.variants for d in arguments.dtype]
    if arguments.json:
        print(json.dumps({"machine": cpu_name(), "pytorch": torch.__version__, "model": arguments.model, "seq_len": arguments.seq_len,
                          "tokens_per_step": arguments.tokens, "threads": arguments.threads, "results": results}, indent=2))
    else:
        print_table(arguments, results)


if __name__ == "__main__":
    try:
        main()
    except Failed as e:
        sys.exit(f"pytorch_side_by_side.py: {e}")
    except KeyboardInterrupt:
        sys.exit(130)

#!/usr/bin/env python3
"""Makes tests/data/oracle_*: what PyTorch's autograd and optimizers compute, in double, from the formulas of DESIGN section 2.

Only for whoever changes those formulas: the product and its tests need no Python. Run with torch and numpy installed:
    python3 tests/oracle/make_expected.py tests/data
The directories have the layout of the goldens: config.json, model.safetensors, train.json, plain|docmask.safetensors.
"""
import json
import math
import os
import struct
import sys

import torch
from torch.nn.functional import cross_entropy, silu

torch.set_default_dtype(torch.float64)
EPSILON, FLOOR = 1e-5, -1e30


def model(variant, **position):
    encoding = variant.removesuffix("_ssmax")
    return dict(dim=12, n_layers=2, n_heads=3, n_kv_heads=3, ffn_hidden=10, vocab_size=13, norm_eps=1e-5,
                tie_embeddings=False, position=dict(encoding=encoding, ssmax=variant.endswith("_ssmax"), **position))


def bam(scope="layer", train_mu=False):
    return dict(scope=scope, train_alpha=True, train_beta=True, train_mu=train_mu)


RADAM = dict(name="radam", lr=0.01, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1)
ADAMW = dict(name="adamw", lr=0.005, betas=[0.8, 0.99], eps=1e-6, weight_decay=0.2, prior_lr=0.02)
COSINE = dict(name="cosine", warmup_steps=2, final_fraction=0.1)
END, START = dict(id=2, position="end"), dict(id=2, position="start")

# Five variants that the goldens lack, each with other options too.
CASES = {
    "nope_ssmax": (model("nope_ssmax") | dict(n_kv_heads=1), RADAM, COSINE, END, "document"),
    "sinusoidal_ssmax": (model("sinusoidal_ssmax", sinusoidal=dict(theta=10000.0, variant="vaswani")), ADAMW, COSINE, END, "document"),
    "rope": (model("rope", rope=dict(theta=500000.0, layout="half")) | dict(n_kv_heads=1), RADAM, dict(name="constant"), START, "row"),
    "alibi_ssmax": (model("alibi_ssmax", ssmax_order="scale_scores") | dict(tie_embeddings=True), ADAMW, dict(name="constant"), END, "row"),
    "bam": (model("bam", bam=bam("global", True)), ADAMW, dict(name="linear", warmup_steps=0, final_fraction=0.2), START, "document"),
    "bam_ssmax": (model("bam_ssmax", ssmax_order="scale_scores", bam=bam(train_mu=True)), ADAMW, COSINE, END, "document"),
}
T, ROWS, STEPS, CLIP = 17, 3, 8, 0.5


def parameter_shapes(m):
    C, D, F, V, H, K = m["dim"], m["dim"] // m["n_heads"], m["ffn_hidden"], m["vocab_size"], m["n_heads"], m["n_kv_heads"]
    shapes = {"tok_embeddings.weight": (V, C), "norm.weight": (C,)}
    if not m["tie_embeddings"]:
        shapes["output.weight"] = (V, C)
    thetas = [f"prior.theta_{t}" for t in ("alpha", "beta", "mu")] if m["position"]["encoding"] == "bam" else []
    for l in range(m["n_layers"]):
        for name, shape in {"attention_norm.weight": (C,), "ffn_norm.weight": (C,), "attention.wq.weight": (H * D, C),
                            "attention.wk.weight": (K * D, C), "attention.wv.weight": (K * D, C), "attention.wo.weight": (C, H * D),
                            "feed_forward.w1.weight": (F, C), "feed_forward.w2.weight": (C, F), "feed_forward.w3.weight": (F, C)}.items():
            shapes[f"layers.{l}.{name}"] = shape
        if m["position"]["ssmax"]:
            shapes[f"layers.{l}.attention.seq_scale"] = (H,)
        if thetas and m["position"]["bam"]["scope"] == "layer":
            shapes |= {f"layers.{l}.attention.{t}": (H,) for t in thetas}
    if thetas and m["position"]["bam"]["scope"] == "global":
        shapes |= {t: (H,) for t in thetas}
    return shapes


def initial(m, generator):
    weights = {}
    for name, shape in parameter_shapes(m).items():
        x = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            x = x if name == "tok_embeddings.weight" and not m["tie_embeddings"] else x / math.sqrt(shape[1])
        elif "theta_" in name:
            middle = {"alpha": -0.5, "beta": 0.5, "mu": 0.8}[name.split("_")[-1]]
            x = (0.1 if name.endswith("mu") else 0.3) * x + middle  # mu stays away from 0, where |d + mu| has its kink
        else:
            x = 1 + 0.2 * x
        weights[name] = x.float().double().requires_grad_()
    return weights


def norm(x, w, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w


def rope(x, positions, p):  # x (B, H, T, D)
    D = x.shape[-1]
    angle = positions[:, None, :, None] * p["theta"] ** (-2.0 * torch.arange(D // 2) / D)
    first, second = (x[..., : D // 2], x[..., D // 2:]) if p["layout"] == "half" else (x[..., 0::2], x[..., 1::2])
    a, b = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    return torch.cat([a, b], -1) if p["layout"] == "half" else torch.stack([a, b], -1).flatten(-2)


def sinusoids(positions, C, p):
    c = torch.arange(C)
    exponent = 2.0 * (c // 2) / C
    if p["variant"] == "bam":
        exponent = exponent + (c % 2) / C
    angle = positions[..., None] * p["theta"] ** -exponent
    return torch.where(c % 2 == 0, angle.sin(), angle.cos())


def alibi_slopes(H):
    def power(n):
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    c = 2 ** int(math.floor(math.log2(H)))
    return torch.tensor((power(c) + power(2 * c)[0::2])[:H])


def prior(m, w, layer, d):  # (H, T, T)
    encoding = m["position"]["encoding"]
    if encoding == "alibi":
        return -alibi_slopes(m["n_heads"])[:, None, None] * d
    if encoding != "bam":
        return torch.zeros(())
    at = "prior." if m["position"]["bam"]["scope"] == "global" else f"layers.{layer}.attention.prior."
    alpha, beta, mu = (w[at + "theta_" + t][:, None, None] for t in ("alpha", "beta", "mu"))
    return (-alpha.exp() * ((d + 2 * torch.sinh(mu)).abs() + EPSILON) ** beta).clamp(min=FLOOR)


def attention(m, w, layer, x, mask, positions):
    B, N, C = x.shape
    p, H, K, D = m["position"], m["n_heads"], m["n_kv_heads"], C // m["n_heads"]
    at = f"layers.{layer}.attention."
    q, k, v = ((x @ w[at + n + ".weight"].T).view(B, N, heads, D).transpose(1, 2) for n, heads in (("wq", H), ("wk", K), ("wv", K)))
    if p["encoding"] == "rope":
        q, k = rope(q, positions, p["rope"]), rope(k, positions, p["rope"])
    k, v = k.repeat_interleave(H // K, 1), v.repeat_interleave(H // K, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    distance = (torch.arange(N)[:, None] - torch.arange(N)).clamp(min=0).double()
    bias = prior(m, w, layer, distance)
    c = 1.0
    if p["ssmax"]:
        c = w[at + "seq_scale"][None, :, None, None] * mask.sum(-1).double().log()[:, None, :, None]
    order = p.get("ssmax_order") or ("scale_scores" if p["encoding"] == "alibi" else "scale_bias")
    logits = c * (scores + bias) if order == "scale_bias" else c * scores + bias
    weights = logits.masked_fill(~mask[:, None], -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(B, N, C) @ w[at + "wo.weight"].T


def forward(m, w, ids, mask, positions):
    x = w["tok_embeddings.weight"][ids]
    if m["position"]["encoding"] == "sinusoidal":
        x = x + sinusoids(positions, m["dim"], m["position"]["sinusoidal"])
    for l in range(m["n_layers"]):
        at, eps = f"layers.{l}.", m["norm_eps"]
        x = x + attention(m, w, l, norm(x, w[at + "attention_norm.weight"], eps), mask, positions)
        n = norm(x, w[at + "ffn_norm.weight"], eps)
        x = x + (silu(n @ w[at + "feed_forward.w1.weight"].T) * (n @ w[at + "feed_forward.w3.weight"].T)) @ w[at + "feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"], m["norm_eps"]) @ w.get("output.weight", w["tok_embeddings.weight"]).T


def batch(tokens, separator, positions, docmask):
    ids = torch.stack([tokens[r * T: r * T + T] for r in range(ROWS)])
    targets = torch.stack([tokens[r * T + 1: r * T + T + 1] for r in range(ROWS)])
    is_separator = (ids == separator["id"]).long()
    document = is_separator.cumsum(-1) - (is_separator if separator["position"] == "end" else 0)
    causal = torch.ones(T, T).tril().bool()[None].expand(ROWS, T, T)
    if not docmask:
        return ids, targets, causal, torch.arange(T).expand(ROWS, T).double()
    mask = causal & (document[:, :, None] == document[:, None, :])
    place = torch.arange(T).expand(ROWS, T)
    return ids, targets, mask, (mask.sum(-1) - 1 if positions == "document" else place).double()


def schedule_factor(s, k):
    W, f = s.get("warmup_steps", 0), s.get("final_fraction", 0.1)
    if k <= W:
        return k / W
    q = (k - 1 - W) / (STEPS - W)
    return {"constant": 1.0, "linear": 1 - (1 - f) * q, "cosine": f + (1 - f) * (1 + math.cos(math.pi * q)) / 2}[s["name"]]


def make_optimizer(o, w, trained):
    def part(keep):
        return [w[n] for n in trained if keep(n)]
    theta = lambda n: "theta_" in n
    groups = [dict(params=part(lambda n: w[n].dim() == 2), weight_decay=o["weight_decay"], base=o["lr"]),
              dict(params=part(lambda n: w[n].dim() == 1 and not theta(n)), weight_decay=0.0, base=o["lr"]),
              dict(params=part(theta), weight_decay=0.0, base=o.get("prior_lr", o["lr"]))]
    options = dict(lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"])
    groups = [g for g in groups if g["params"]]
    if o["name"] == "adamw":
        return torch.optim.AdamW(groups, **options)
    return torch.optim.RAdam(groups, decoupled_weight_decay=True, **options)


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, x in tensors.items():
        raw = x.detach().to(torch.int32 if name == "tokens" else torch.float32).contiguous().numpy().tobytes()
        header[name] = dict(dtype="I32" if name == "tokens" else "F32", shape=list(x.shape), data_offsets=[len(data), len(data) + len(raw)])
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def run(m, weights, tokens, optimizer, schedule, separator, positions, docmask):
    w = {n: x.detach().clone().requires_grad_() for n, x in weights.items()}
    trained = [n for n in w if not (n.endswith("theta_mu") and not m["position"]["bam"]["train_mu"])]
    ids, targets, mask, places = batch(tokens, separator, positions, docmask)
    steps = make_optimizer(optimizer, w, trained)
    out, losses, norms = dict(tokens=tokens), [], []
    for k in range(1, STEPS + 1):
        steps.zero_grad()
        logits = forward(m, w, ids, mask, places)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if k == 1:
            out |= dict(logits=logits, loss=loss[None]) | {"grad." + n: w[n].grad.clone() for n in trained}
        losses.append(loss.detach())
        norms.append(torch.nn.utils.clip_grad_norm_([w[n] for n in trained], CLIP))
        for group in steps.param_groups:
            group["lr"] = group["base"] * schedule_factor(schedule, k)
        steps.step()
    return out | dict(losses=torch.stack(losses), grad_norms=torch.stack(norms)) | {"final." + n: x for n, x in w.items()}


def main(root):
    for number, (variant, (m, optimizer, schedule, separator, positions)) in enumerate(CASES.items()):
        folder = os.path.join(root, "oracle_" + variant)
        os.makedirs(folder, exist_ok=True)
        generator = torch.Generator().manual_seed(100 + number)
        weights = initial(m, generator)
        tokens = torch.randint(0, m["vocab_size"] - 2, (ROWS * T + 1,), generator=generator)  # two ids never occur
        tokens[torch.rand(tokens.shape, generator=generator) < 0.2] = separator["id"]
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(dict(format="bam-model", version=1, model=m), f, indent=1)
        with open(os.path.join(folder, "train.json"), "w") as f:
            json.dump(dict(seq_len=T, rows=ROWS, separator=separator, positions=positions, shuffle=False, steps=STEPS, dtype="fp32",
                           optimizer=optimizer, schedule=schedule, grad_clip=CLIP), f, indent=1)
        write_safetensors(os.path.join(folder, "model.safetensors"), weights)
        for docmask in (False, True):
            expected = run(m, weights, tokens, optimizer, schedule, separator, positions, docmask)
            write_safetensors(os.path.join(folder, "docmask.safetensors" if docmask else "plain.safetensors"), expected)


if __name__ == "__main__":
    main(sys.argv[1])

"""bam's decoder and training step as a PyTorch user would write them: the other side of pytorch_side_by_side.py.

Everything is PyTorch's own: nn.Linear, nn.RMSNorm, F.scaled_dot_product_attention, autocast, clip_grad_norm_, optim.RAdam. The encodings
are nope and bam with and without Scalable-Softmax; a prior is a bias of (heads, T, T), through which its parameters get their gradients.
"""
import json
import math
import os
import struct

import torch
import torch.nn.functional as F
from torch import nn

VARIANTS = ("nope", "nope_ssmax", "bam", "bam_ssmax")
# preset: width, layers, heads, hidden width of the feed-forward part
PRESETS = {"nano": (128, 4, 8, 256), "l6": (512, 6, 16, 1024), "l8": (768, 8, 16, 1536), "l12": (768, 12, 16, 1536)}


class Positions(nn.Module):
    """What attention needs of T positions: made once, shared by the layers."""

    def __init__(self, T):
        super().__init__()
        place = torch.arange(T)
        distance = (place[:, None] - place).clamp(min=0).float()
        self.register_buffer("log_distance", (distance + 1e-5).log(), persistent=False)  # (T, T)
        self.register_buffer("future", place[:, None] < place, persistent=False)  # (T, T)
        self.register_buffer("log_n", (place + 1.0).log()[:, None], persistent=False)  # (T, 1)


class Attention(nn.Module):
    def __init__(self, dim, heads, variant):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.theta_alpha = self.theta_beta = self.seq_scale = None
        if variant.startswith("bam"):
            self.theta_alpha = nn.Parameter(torch.zeros(heads, 1, 1))
            self.theta_beta = nn.Parameter(torch.zeros(heads, 1, 1))
        if variant.endswith("_ssmax"):
            self.seq_scale = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x, p):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        bias = None
        if self.theta_alpha is not None:  # (heads, T, T)
            bias = -torch.exp(self.theta_alpha + self.theta_beta * p.log_distance).clamp(max=1e30)
        if self.seq_scale is not None:
            scale = self.seq_scale * p.log_n  # (heads, T, 1)
            q = (q * scale).to(v.dtype)
            bias = None if bias is None else scale * bias
        if bias is not None:
            bias = bias.masked_fill(p.future, -math.inf).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, dim, heads, ffn, variant):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads, variant)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.w13 = nn.Linear(dim, 2 * ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)

    def forward(self, x, p):
        x = x + self.attention(self.attention_norm(x), p)
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, -1)
        return x + self.w2(F.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, shape, vocab_size, T, variant):
        super().__init__()
        dim, layers, heads, ffn = shape
        self.positions = Positions(T)
        self.embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, heads, ffn, variant) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, ids, targets):
        """The sum of the losses of all targets."""
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x, self.positions)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


class Trainer:
    """Steps of bam's recipe: RAdam with decoupled decay of matrices, global-norm clip 1, gradients of micro-batches summed."""

    def __init__(self, shape, vocab_size, T, variant, dtype="fp32", compiled=False, lr=1e-3):
        self.model = Decoder(shape, vocab_size, T, variant)
        self.dtype, self.compiled = dtype, compiled
        self.parameters = list(self.model.parameters())
        matrix = [p for p in self.parameters if p.dim() == 2]
        rest = [p for p in self.parameters if p.dim() != 2]
        self.optimizer = torch.optim.RAdam([{"params": matrix, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=lr,
                                           betas=(0.9, 0.95), eps=1e-8, decoupled_weight_decay=True, foreach=True)
        self.loss = torch.compile(self.model, dynamic=False) if compiled else self.model

    def accumulate(self, rows, targets):
        """Adds the gradients of rows (n, T + 1) of a step that has so many targets; their share of its mean loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16"):
            loss = self.loss(rows[:, :-1], rows[:, 1:]) / targets
        loss.backward()
        return loss.item()

    def step(self, rows, micro_batch, lr=None):
        """Mean loss and gradient norm before clipping."""
        targets = rows.shape[0] * (rows.shape[1] - 1)
        loss = sum(self.accumulate(part, targets) for part in rows.split(micro_batch))
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True).item()
        for group in self.optimizer.param_groups if lr is not None else ():
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm


def read_safetensors(path):
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = bytearray(f.read())
    header.pop("__metadata__", None)
    return {name: torch.frombuffer(data, dtype=torch.float32, count=math.prod(t["shape"]), offset=t["data_offsets"][0]).view(t["shape"])
            for name, t in header.items()}


@torch.no_grad()
def load(model, directory):
    """Copies the fp32 weights of a bam model directory."""
    w = read_safetensors(os.path.join(directory, "model.safetensors"))

    def put(to, *names):
        to.copy_(torch.cat([w.pop(n) for n in names]).view(to.shape))

    put(model.embeddings.weight, "tok_embeddings.weight")
    put(model.norm.weight, "norm.weight")
    put(model.output.weight, "output.weight")
    for i, layer in enumerate(model.layers):
        at, a = f"layers.{i}.", layer.attention
        put(layer.attention_norm.weight, at + "attention_norm.weight")
        put(layer.ffn_norm.weight, at + "ffn_norm.weight")
        put(a.qkv.weight, *(f"{at}attention.w{x}.weight" for x in "qkv"))
        put(a.wo.weight, at + "attention.wo.weight")
        put(layer.w13.weight, at + "feed_forward.w1.weight", at + "feed_forward.w3.weight")
        put(layer.w2.weight, at + "feed_forward.w2.weight")
        if a.theta_alpha is not None:
            put(a.theta_alpha, at + "attention.prior.theta_alpha")
            put(a.theta_beta, at + "attention.prior.theta_beta")
            if w.pop(at + "attention.prior.theta_mu").any():
                raise ValueError("theta_mu is not 0: this model has bam's prior at its default location only")
        if a.seq_scale is not None:
            put(a.seq_scale, at + "attention.seq_scale")
    if w:
        raise ValueError(f"{directory}: not understood: {', '.join(w)}")

"""Layers of Llama 3 8B's shape, and a training step of them on one process and, sharded, on all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ropewalk.bench.attention.cases import BASE
from ropewalk.bench.parallel.cases import ParallelCase
from ropewalk.ops.attention.api import attention
from ropewalk.parallel import SequenceLayout, context_parallel, shard_sequence
from ropewalk.schemes import Rope

VOCABULARY = 1024  # small: neither the table nor a head should cost anything
LAYERS = 4


class Layer(nn.Module):
    """Attention and a gated MLP, each after an RMS norm."""

    def __init__(self, case: ParallelCase) -> None:
        super().__init__()
        self.heads, self.head_dim = [case.q_heads, case.k_heads, case.k_heads], case.head_dim
        width = case.q_heads * case.head_dim
        inner = int(3.5 * width)  # Llama 3 8B's
        self.norm, self.norm_of_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * case.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (1, T, width) with both added."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        x = x + self.out(attention(q, k, v, position=Rope(BASE), causal=True).flatten(2))
        gate, up = self.up(self.norm_of_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def training_step(
    case: ParallelCase, mesh: DeviceMesh, device: torch.device, sharded: bool, seed: int
) -> Callable[[], Tensor]:
    """Make the step of a whole model, or of its shard under FSDP2; it returns this process's part of the loss."""
    torch.manual_seed(seed)
    width = case.q_heads * case.head_dim
    with device:
        layers = [Layer(case) for _ in range(LAYERS)]
        table, head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        model: Any = nn.Sequential(table, *layers, nn.RMSNorm(width), head).to(case.torch_dtype)
    text = torch.randint(VOCABULARY, (1, case.tokens + 1), generator=torch.Generator().manual_seed(seed)).to(device)
    tokens, labels, layout = text[:, :-1], text[:, 1:], SequenceLayout(mesh, case.tokens, case.kind)
    if sharded:
        for layer in (*layers, model):
            fully_shard(layer, mesh=mesh)
        tokens = shard_sequence(tokens, layout)
        labels = shard_sequence(labels, layout).masked_fill(~layout.valid, -100)
    scale = layout.size if sharded else 1  # FSDP averages over the ranks
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> Tensor:
        with context_parallel(layout) if sharded else nullcontext():
            logits = model(tokens)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (total / case.tokens * scale).backward()
        optimiser.step()
        optimiser.zero_grad()
        return total.detach().float() / case.tokens

    return step

"""Layers of Llama 3 8B's shape, and a training step of them on one process and, sharded, on all."""

from __future__ import annotations

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
_MLP = 3.5  # Llama 3 8B's inner width, over the width


class Layer(nn.Module):
    """Attention and a gated MLP, each after an RMS norm."""

    def __init__(self, case: ParallelCase) -> None:
        super().__init__()
        self.case = case
        width, inner = case.q_heads * case.head_dim, int(_MLP * case.q_heads * case.head_dim)
        self.norm, self.norm_of_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (case.q_heads + 2 * case.k_heads) * case.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (1, T, width) with both added."""
        case = self.case
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, case.head_dim))
        q, k, v = heads.split([case.q_heads, case.k_heads, case.k_heads], dim=2)
        x = x + self.out(attention(q, k, v, position=Rope(BASE), causal=True).flatten(2))
        gate, up = self.up(self.norm_of_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Trainee:
    """A model, its optimiser and its tokens: whole ones, or a shard of them under FSDP2."""

    def __init__(self, case: ParallelCase, mesh: DeviceMesh, device: torch.device, sharded: bool, seed: int) -> None:
        torch.manual_seed(seed)
        width = case.q_heads * case.head_dim
        with device:
            layers = [Layer(case) for _ in range(LAYERS)]
            table, head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
            model = nn.Sequential(table, *layers, nn.RMSNorm(width), head)
        self.model: Any = model.to(case.torch_dtype)
        text = torch.randint(VOCABULARY, (1, case.tokens + 1), generator=torch.Generator().manual_seed(seed)).to(device)
        self.tokens, self.labels, self.count = text[:, :-1], text[:, 1:], case.tokens
        self.layout: SequenceLayout | None = None
        self.scale = 1.0
        if sharded:
            self.layout = layout = SequenceLayout(mesh, case.tokens, case.kind)
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            self.tokens = shard_sequence(self.tokens, layout)
            self.labels = shard_sequence(self.labels, layout).masked_fill(~layout.valid, -100)
            self.scale = float(layout.size)  # FSDP averages over the ranks
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step(self) -> Tensor:
        """Train once, and return this process's part of the loss."""
        if self.layout is None:
            logits = self.model(self.tokens)
        else:
            with context_parallel(self.layout):
                logits = self.model(self.tokens)
        total = F.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), ignore_index=-100, reduction="sum")
        (total / self.count * self.scale).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return total.detach().float() / self.count

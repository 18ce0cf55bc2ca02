"""What a sharded call asks of the host, on a stub of GPUs: rank 0 of four, whose group exchanges nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers import stub_gpu
from ropewalk import Rope
from ropewalk.ops.launch import kinds
from ropewalk.parallel import SequenceLayout, api, context_parallel_attention, gathered
from ropewalk.parallel.transport import SymmetricMemory

RANKS, T, H, K, D = 4, 512, 32, 8, 128


class OwnMemory(SymmetricMemory):
    """Symmetric memory whose peers are tensors of this process."""

    def _meet(self) -> None:
        pass

    def _copy(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        for target, source in copies:
            target.copy_(source)
        return lambda: None

    def _allocate(self, n_bytes: int) -> list[torch.Tensor]:
        return [torch.zeros(n_bytes, dtype=torch.uint8) for _ in range(self.size)]


def count(method: str) -> dict[str, int]:
    """Count what forward and backward of a call ask for, once they are planned.

    operators: those of PyTorch that no other one calls, and copies among them; calls: of functions of Python, the least
    of eight counts, which differ by some 20.
    """
    kinds.on_cpu = True
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    layout = SequenceLayout(dist.group.WORLD, T)
    memory = OwnMemory(layout)
    gathered.transport_of = lambda _: memory  # type: ignore[assignment, return-value]
    api.needs_agreement = lambda *_: False  # type: ignore[assignment]
    api.agree = lambda *_: None  # type: ignore[assignment]
    q, k, v, grad = (torch.randn(1, layout.n_local, heads, D, dtype=torch.bfloat16) for heads in (H, K, K, H))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    position = Rope()

    def call() -> None:
        out = context_parallel_attention(*leaves, layout=layout, method=method, position=position, causal=True)
        torch.autograd.grad(out, leaves, grad)

    for _ in range(4):
        call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    outermost = [
        x.name
        for x in profile.events()
        if x.name.startswith("aten::") and not (x.cpu_parent and x.cpu_parent.name.startswith("aten::"))
    ]
    exchanges = sum(x.name.startswith("c10d::") for x in profile.events())
    calls = min(stub_gpu.python_calls(call) for _ in range(8))
    return {
        "operators": len(outermost),
        "copies": outermost.count("aten::copy_"),
        "exchanges": exchanges,
        "calls": calls,
    }

"""Cases of the benchmark of context parallelism, and their tensors.

Letters: T tokens, H query heads, K key heads, D head dim, n ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.bench.attention.cases import AttentionCase
from ropewalk.bench.attention.settings import SETTINGS
from ropewalk.ops.attention.api import attention
from ropewalk.parallel import SequenceLayout

MODES = {"train": "forward and backward on all processes"}
LLAMA = "llama"  # the setting of a case that trains layers of a model
_K = 1 << 10


@dataclass(frozen=True)
class ParallelCase:
    """One causal call over a whole sequence, B = 1, and how it is sharded; or training steps of a model."""

    name: str
    tokens: int
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    setting: str = "rope"  # of attention's benchmark, or `LLAMA`
    window: int | None = None
    far_window: int | None = None  # of ReRoPE
    shortest: int | None = None  # packed documents have seeded lengths, uniform from here …
    longest: int | None = None  # … to here
    kind: str = "zigzag"  # of the layout
    method: str | None = None
    peers: bool = True  # whether others are timed beside
    modes: ClassVar[tuple[str, ...]] = tuple(MODES)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def description(self) -> str:
        parts = [f"T{self.tokens} H{self.q_heads}/{self.k_heads} D{self.head_dim}, {self.dtype}, {self.setting}"]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"documents of {self.shortest} to {self.longest}"] if self.shortest else []
        return ", ".join([*parts, self.kind, *([self.method] if self.method else [])])


# The most important ones first: a run may be stopped.
CASES: tuple[ParallelCase, ...] = (
    ParallelCase("gqa-16k", 16 * _K),
    ParallelCase("gqa-64k", 64 * _K),
    ParallelCase("gqa-128k", 128 * _K),
    ParallelCase("mha-16k", 16 * _K, k_heads=32),
    ParallelCase("packed-256k", 256 * _K, shortest=_K, longest=64 * _K, kind="balanced"),
    ParallelCase("window-128k", 128 * _K, window=4096),
    ParallelCase("alibi-64k", 64 * _K, setting="alibi"),
    ParallelCase("rerope-64k", 64 * _K, setting="rerope", far_window=4096),
    ParallelCase("exposb-64k", 64 * _K, setting="exposb-bands-learned"),
    ParallelCase("llama-64k", 64 * _K, setting=LLAMA),
    ParallelCase("mha-64k", 64 * _K, k_heads=32),
    ParallelCase("ulysses-64k", 64 * _K, method="ulysses", peers=False),
    ParallelCase("ring-128k", 128 * _K, method="ring", peers=False),
    ParallelCase("d64-64k", 64 * _K, head_dim=64),
    ParallelCase("packed-short", 128 * _K, shortest=128, longest=4096, kind="balanced"),
    ParallelCase("gqa-256k", 256 * _K, peers=False),
)


def shrink(case: ParallelCase, tokens: int) -> ParallelCase:
    """Return the case with fewer tokens, and windows and documents in proportion."""
    if case.tokens <= tokens:
        return case
    sizes = {name: getattr(case, name) for name in ("window", "far_window", "shortest", "longest")}
    scaled = {name: max(1, size * tokens // case.tokens) for name, size in sizes.items() if size is not None}
    return replace(case, tokens=tokens, **scaled)


def quick(case: ParallelCase, device: torch.device) -> ParallelCase:
    """Return the case at a size that takes seconds, also on a CPU. GPUs build the kernels of the whole case."""
    if device.type == "cuda":
        return shrink(case, 16 * _K)
    k_heads = 4 if case.q_heads == case.k_heads else 2
    return replace(shrink(case, 96), q_heads=4, k_heads=k_heads, head_dim=16, dtype="float32")


@dataclass(frozen=True)
class Inputs:
    """The whole tensors of a case, the same on each rank, and how they are sharded. (1, T, heads, D)."""

    case: ParallelCase
    layout: SequenceLayout
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor  # of the output
    parameters: tuple[Tensor, ...]  # of the setting, float32; those that it learns require gradients

    @property
    def learned(self) -> tuple[Tensor, ...]:
        return self.parameters if SETTINGS[self.case.setting].learned else ()

    def keywords(self, parameters: tuple[Tensor, ...] | None = None) -> dict[str, Any]:
        """Return the call's keywords for one process, of other parameters where they are given."""
        case: Any = self.case
        own = SETTINGS[case.setting].keywords_of(case, *(self.parameters if parameters is None else parameters))
        return {**own, "causal": True, "window": case.window}

    def whole(self, *qkv: Tensor, run: Any = attention, **keywords: Any) -> Any:
        """Run a call of the whole sequence, packed where it has documents."""
        if self.layout.cu_seqlens is None:
            return run(*qkv, **keywords)
        bounds = self.layout.cu_seqlens.int()
        packed = {"layout": "thd", "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        result = run(*(x[0] for x in qkv), **keywords, **packed)
        return result[None] if isinstance(result, Tensor) else result


def make_inputs(case: ParallelCase, mesh: Any, device: torch.device, seed: int) -> Inputs:
    """Draw the tensors of a case, and the bounds of its documents, of which the last one ends with the sequence."""
    bounds = None
    if case.shortest is not None and case.longest is not None:
        shape, drawn = (case.tokens // case.shortest + 1,), torch.Generator().manual_seed(seed)
        ends = torch.randint(case.shortest, case.longest + 1, shape, generator=drawn).cumsum(0)
        bounds = F.pad(ends.clamp(max=case.tokens).unique(), (1, 0)).int()
    layout, generator = SequenceLayout(mesh, case.tokens, case.kind, bounds), torch.Generator(device).manual_seed(seed)
    q, k, v, grad = (
        torch.randn(1, case.tokens, heads, case.head_dim, generator=generator, device=device, dtype=case.torch_dtype)
        for heads in (case.q_heads, case.k_heads, case.k_heads, case.q_heads)
    )
    setting = SETTINGS[case.setting]
    whole = AttentionCase(case.name, 1, case.tokens, case.q_heads, case.k_heads, case.head_dim, True, dtype=case.dtype)
    parameters = tuple(x.to(device).requires_grad_(setting.learned) for x in setting.draw(whole))
    return Inputs(case, layout, q, k, v, grad, parameters)

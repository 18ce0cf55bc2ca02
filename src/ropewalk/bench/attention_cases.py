"""The attentions that are measured and tested, as data.

Shape letters: B batch, T tokens, H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.positions import Alibi, ExpoSB, NoPosition, PositionScheme, Rope, alibi_slopes

MODES = {
    "fwd": "the kernels alone, forward",
    "bwd": "the kernels alone, backward",
    "train": "RoPE, attention and both their backwards",
    "schemes-fwd": "position schemes in the kernel, forward",
    "schemes-bwd": "position schemes in the kernel, backward",
    "memory": "bytes held at the peak of RoPE, attention and both their backwards",
}
_KERNELS = ("fwd", "bwd", "train")
_PRODUCTS = {"fwd": 1.0, "bwd": 2.5, "train": 3.5}  # of the forward's two, by direction
BASE = 10000.0


@dataclass(frozen=True)
class AttentionCase:
    """One self-attention: shapes, what a query attends, and what is measured of it."""

    name: str
    batch: int
    tokens: int
    q_heads: int
    k_heads: int
    head_dim: int
    causal: bool = False
    padded: bool = False  # key lengths drawn from T/2 … T, one for each batch row
    dtype: str = "bfloat16"
    modes: tuple[str, ...] = _KERNELS

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch's."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.q_heads // self.k_heads

    @property
    def description(self) -> str:
        """The shape and the mask in words."""
        heads = f"{self.q_heads}" if self.group == 1 else f"{self.q_heads}/{self.k_heads}"
        mask = "causal" if self.causal else "full"
        padding = ", key lengths from T/2 to T" if self.padded else ""
        return f"B{self.batch} T{self.tokens} H{heads} D{self.head_dim}, {self.dtype}, {mask}{padding}"

    def draw_key_lengths(self, seed: int = 0) -> Tensor | None:
        """The lengths of a padded case, (B,), int32, on the CPU: the same on every device."""
        if not self.padded:
            return None
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.tokens // 2, self.tokens + 1, (self.batch,), generator=generator, dtype=torch.int32)

    def flops(self, mode: str, seed: int = 0) -> float:
        """Operations: forward 4·B·H·T²·D, half of it when causal, a row's key length for one T where there are lengths.

        A backward counts 2.5 times that, and forward and backward 3.5 times, whatever an implementation computes twice.
        """
        lengths = self.draw_key_lengths(seed)
        keys = self.batch * self.tokens if lengths is None else int(lengths.sum())
        forward = 4 * self.q_heads * self.tokens * keys * self.head_dim / (2 if self.causal else 1)
        return forward * _PRODUCTS[mode.rpartition("-")[2]]

    def training_bytes(self) -> int:
        """Of q, k, v, out, the gradients of all four, and rotated q and k: what training cannot do without."""
        q, k = (self.batch * self.tokens * heads * self.head_dim for heads in (self.q_heads, self.k_heads))
        return (5 * q + 5 * k) * self.torch_dtype.itemsize


_SCHEMES = (*_KERNELS, "schemes-fwd", "schemes-bwd")

CASES: tuple[AttentionCase, ...] = (
    AttentionCase("causal-16k-d128", 1, 16384, 32, 32, 128, causal=True),
    AttentionCase("full-4k-d128", 4, 4096, 32, 32, 128),
    AttentionCase("causal-4k-d128", 4, 4096, 32, 32, 128, causal=True, modes=_SCHEMES),
    AttentionCase("gqa-8k-d128", 2, 8192, 32, 8, 128, causal=True),
    AttentionCase("causal-2k-d128", 8, 2048, 32, 32, 128, causal=True),
    AttentionCase("causal-8k-d64", 1, 8192, 32, 32, 64, causal=True, modes=_SCHEMES),  # document 001's shape
    AttentionCase("full-4k-d64", 4, 4096, 32, 32, 64),
    AttentionCase("bert-512", 32, 512, 12, 12, 64),
    AttentionCase("bert-512-lengths", 32, 512, 12, 12, 64, padded=True, modes=("train",)),
    AttentionCase("memory-64k", 1, 65536, 8, 8, 128, causal=True, modes=("memory",)),
)

# A scheme by name, for q with so many heads.
SCHEMES: dict[str, Callable[[int], PositionScheme]] = {
    "none": lambda heads: NoPosition(),
    "rope": lambda heads: Rope(BASE),
    "alibi": lambda heads: Alibi(alibi_slopes(heads)),
    "exposb": lambda heads: ExpoSB(),
    "exposb-decay": lambda heads: ExpoSB(distance_decay=True),
}


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The tensors of a case; those of tokens are (B, T, H, D) in memory, as projections leave them."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    key_lengths: Tensor | None  # (B,), int32
    cos: Tensor  # (T, R/2), float32
    sin: Tensor

    def leaves(self) -> list[Tensor]:
        """q, k and v as they are in memory, each a leaf that wants its gradient."""
        return [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]


def make_attention_inputs(case: AttentionCase, device: torch.device, seed: int = 0) -> AttentionInputs:
    """Draw the tensors of a case."""
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v, grad = (
        torch.randn(case.batch, case.tokens, heads, case.head_dim, generator=generator, device=device).to(
            case.torch_dtype
        )
        for heads in (case.q_heads, case.k_heads, case.k_heads, case.q_heads)
    )
    lengths = case.draw_key_lengths(seed)
    inv_freq, _ = inverse_frequencies("default", case.head_dim, BASE)
    cos, sin = rope_table(case.tokens, inv_freq, device=device)
    return AttentionInputs(q, k, v, grad, None if lengths is None else lengths.to(device), cos, sin)

"""The cases of the rotation's benchmark and tests: shapes of models and of other libraries' benchmarks.

Shape letters: B batch, T tokens, H heads, D head dim, R rotary dim (R/2 pairs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ropewalk.frequencies import inverse_frequencies, rope_table

MODES = {
    "fwd": "the rotation of q and k, forward",
    "bwd": "the gradients of q and k",
    "decode": "the rotation of one token for each sequence",
}
_TABLE_ROWS = 32768  # of a table into which positions point


@dataclass(frozen=True)
class Case:
    """One rotation of q and k: shapes, convention, and the place of the result."""

    name: str
    batch: int
    tokens: int  # of one batch row; for layout "thd" the total
    q_heads: int
    k_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    base: float = 10000.0
    rotary_dim: int | None = None  # None: the whole head
    layout: str = "bthd"
    # "index", "offsets": (B,), "tokens": one for each token, "ordered": the same in order, or "axes": three for each
    positions: str = "index"
    sequences: tuple[int, ...] = ()  # the lengths of the packed sequences, for layout "thd" without positions
    interleaved: bool = False
    inplace: bool = False
    modes: tuple[str, ...] = ("fwd", "bwd")
    norm_offset: float | None = None  # added to the weights of a norm; None: no norm
    source: str = "dense"  # "fused": q and k are slices of one projection; "gated": a head of q lies beside its gate

    @property
    def description(self) -> str:
        positions = "packed sequences" if self.sequences else f"positions by {self.positions}"
        shape = f"B{self.batch} T{self.tokens} H{self.q_heads}/{self.k_heads} D{self.head_dim} R{self.width}"
        return f"{shape}, {self.dtype}, {self.layout}, {positions}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def width(self) -> int:  # R
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def elements(self) -> int:  # of q and k together
        return self.batch * self.tokens * (self.q_heads + self.k_heads) * self.head_dim

    def bytes_of(self, mode: str) -> int:
        """Count q and k read once and written once, in bytes; the backward of a norm reads them once more."""
        times = 3 if mode == "bwd" and self.norm_offset is not None else 2
        return times * self.elements * self.torch_dtype.itemsize

    def shape(self, heads: int) -> tuple[int, ...]:
        sizes = {"b": self.batch, "t": self.tokens, "h": heads, "d": self.head_dim}
        return tuple(sizes[letter] for letter in self.layout)


def _forms(case: Case, *pairings: bool) -> list[Case]:
    return [replace(case, interleaved=x, inplace=place) for x in pairings or (False, True) for place in (False, True)]


_LLAMA3_8B = Case("llama3-8b", 2, 8192, 32, 8, 128, base=500000.0)
_PACKED = replace(_LLAMA3_8B, name="llama3-8b-thd", batch=1, tokens=16384, layout="thd")
_DECODE = Case("decode-1", 1, 1, 32, 8, 128, base=500000.0, positions="offsets", modes=("decode",))
_DECODE_64 = replace(_DECODE, name="decode-64", batch=64)
CASES: tuple[Case, ...] = (
    *_forms(_LLAMA3_8B),
    *_forms(Case("llama3-70b", 1, 16384, 64, 8, 128, base=500000.0)),
    *_forms(Case("bert-base", 32, 512, 12, 12, 64), False),  # the shape; BERT itself learns its positions
    *_forms(Case("qwen3-8b", 1, 32768, 32, 8, 128, base=1e6), False),
    *_forms(Case("gemma3-27b", 1, 8192, 32, 16, 128, base=1e6), False),
    # The part that rotates: 64 features of each of 128 query heads, and of one key that all of them share.
    *_forms(Case("deepseek-mla", 1, 8192, 128, 1, 64), True),
    *_forms(Case("rerope-8k", 1, 8192, 32, 32, 64)),
    *_forms(Case("api-4x512", 4, 512, 8, 8, 64)),
    *_forms(Case("vllm-4096-fp32", 1, 4096, 32, 16, 128, "float32", layout="thd", positions="tokens")),
    *_forms(replace(_LLAMA3_8B, name="llama3-8b-positions", positions="tokens"), False),
    *_forms(replace(_PACKED, sequences=(5003, 1, 3180, 8192, 8)), False),
    *_forms(replace(_LLAMA3_8B, name="llama3-8b-bhtd", layout="bhtd"), False),
    Case("glm4-9b-partial", 1, 8192, 32, 2, 128, rotary_dim=64, interleaved=True),
    *_forms(replace(_DECODE, modes=("decode", "bwd"))),  # backward for what one token costs the host
    *_forms(_DECODE_64),
    *_forms(replace(_DECODE, name="decode-256", batch=256), False),
    *_forms(replace(_DECODE_64, name="decode-64-positions", positions="tokens"), False),
)
# One shape at every length, to see which implementation is for which.
SWEEP: tuple[Case, ...] = tuple(
    replace(_LLAMA3_8B, name=f"tokens-{2**i}", batch=1, tokens=2**i, interleaved=interleaved, inplace=True)
    for interleaved in (False, True)
    for i in range(18)
)
# The norm of q and k beside the rotation, and positions on several axes: `--only norm`.
_FUSED = replace(_LLAMA3_8B, norm_offset=0.0, source="fused")
NORM_CASES: tuple[Case, ...] = (
    replace(_FUSED, name="norm-qwen3-8b", base=1e6),
    Case("norm-qwen3-next", 2, 8192, 24, 4, 256, base=1e7, rotary_dim=64, norm_offset=1.0, source="gated"),
    Case("norm-bert-base", 32, 512, 12, 12, 64, norm_offset=0.0, source="fused"),
    replace(_FUSED, name="norm-1", batch=1, tokens=1, modes=("decode",)),
    replace(_FUSED, name="norm-64", batch=1, tokens=64, modes=("fwd",)),
    *(
        replace(_LLAMA3_8B, name=name, positions=positions, modes=("fwd",), interleaved=interleaved)
        for interleaved in (False, True)
        for name, positions in (("axes-1", "ordered"), ("axes-3", "axes"))
    ),
)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case, and its positions in the forms that implementations ask for."""

    q: Tensor
    k: Tensor
    cos: Tensor  # (n, R/2), float32
    sin: Tensor
    inv_freq: Tensor  # (R/2,), float64
    positions: Tensor | None  # or offsets, as `apply_rope` takes them
    cu_seqlens: Tensor | None  # int32
    token_positions: Tensor  # (B, T), or (total,): the position of every token, int64; with axes of the first axis
    axes: Tensor | None = None  # (R/2,), where positions are (3, B, T)
    weights: tuple[Tensor, ...] = ()  # of the norm of q and of k, (D,) each

    def parameters(self, grad: bool = True) -> tuple[Tensor, ...]:
        """Return copies of the weights as leaves."""
        return tuple(weight.detach().clone().requires_grad_(grad) for weight in self.weights)


def make_inputs(case: Case, device: torch.device, seed: int = 0) -> Inputs:
    """Draw q and k, and lay out tables and positions; positions that a case gives are random and out of order."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(case.torch_dtype)

    if case.source == "fused":
        heads = case.q_heads, case.k_heads, case.k_heads
        q, k, _ = draw(*case.shape(sum(heads))).split(heads, dim=case.layout.index("h"))
    else:
        q, k = (draw(*case.shape(heads)) for heads in (case.q_heads, case.k_heads))
        if case.source == "gated":
            q = torch.stack((q, q), dim=-2).flatten(-2)[..., : case.head_dim]
    shape = (case.tokens,) if case.layout == "thd" else (case.batch, case.tokens)
    token_positions = index = torch.arange(case.tokens, device=device).expand(shape)
    rows = max(case.sequences, default=case.tokens)
    if case.positions in ("tokens", "offsets"):
        rows = max(case.tokens, _TABLE_ROWS)
    positions = cu_seqlens = axes = None
    if case.positions == "tokens":
        positions = token_positions = torch.randint(rows, shape, generator=generator, device=device)
    elif case.positions == "ordered":
        positions = index.contiguous()
    elif case.positions == "axes":  # frames of patches: time, height and width
        positions = torch.stack((index // 1024, index // 32 % 32, index % 32))
        token_positions, axes = positions[0], torch.arange(case.width // 2, device=device) % 3
    elif case.positions == "offsets":
        positions = torch.randint(rows - case.tokens + 1, (case.batch,), generator=generator, device=device)
        token_positions = positions[:, None] + index
    if case.sequences:
        cu_seqlens = torch.tensor((0, *case.sequences)).cumsum(0).to(device, torch.int32)
        token_positions = torch.cat([torch.arange(length, device=device) for length in case.sequences])
    inv_freq, _ = inverse_frequencies("default", case.width, case.base)
    cos, sin = rope_table(rows, inv_freq, device=device)
    weights = () if case.norm_offset is None else tuple(draw(case.head_dim) * 0.1 + 1 - case.norm_offset for _ in "qk")
    return Inputs(q, k, cos, sin, inv_freq.to(device), positions, cu_seqlens, token_positions, axes, weights)

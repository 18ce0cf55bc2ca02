"""The cases of attention's benchmark and tests, as data.

Shape letters: B batch, T tokens, H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ropewalk.frequencies import inverse_frequencies, rope_table

MODES = {
    "fwd": "the kernels alone, forward",
    "bwd": "the kernels alone, backward",
    "train": "RoPE, attention and both their backwards",
    "schemes-fwd": "position schemes in the kernel, forward",
    "schemes-bwd": "position schemes in the kernel, backward",
    "variants-fwd": "dropout, softcap and sinks in the kernel, forward",
    "variants-bwd": "dropout, softcap and sinks in the kernel, backward",
    "learned-bwd": "position schemes with and without learned parameters, backward",
    "rerope-fwd": "ReRoPE, forward",
    "rerope-train": "ReRoPE, attention and both their backwards",
    "layer-fwd": "what today's layers have around attention: QK-norm, RoPE of half the features, output gate; forward",
    "layer-train": "the same, with all their backwards",
    "decode": "one query for each row of a cache of rotated keys, RoPE of the query included",
    "memory": "bytes held at the peak of RoPE, attention and both their backwards",
}
_DIRECTIONS = {"decode": "fwd", "memory": "train"}  # of the modes whose names do not end with it
_KERNELS = ("fwd", "bwd", "train")
REROPE = ("rerope-fwd", "rerope-train")
LAYER = ("layer-fwd", "layer-train")
_FORMS = ("dense", "packed", "cache")
BASE = 10000.0


def direction_of(mode: str) -> str:
    """Return the direction of a mode: forward "fwd", backward "bwd", or both "train"."""
    return _DIRECTIONS.get(mode, mode.rpartition("-")[2])


@dataclass(frozen=True)
class AttentionCase:
    """One self-attention: shapes, mask, and the modes to measure.

    `form` decides the meaning of B and T:

    - "dense": B rows of T tokens;
    - "packed": B sequences one after another, of `shortest` to T tokens, their logarithms uniform;
    - "cache": B rows of a cache with room for T keys, `shortest` to T of them there, and one query for the last.
    """

    name: str
    batch: int
    tokens: int
    q_heads: int
    k_heads: int
    head_dim: int
    causal: bool = False
    padded: bool = False  # dense: key lengths drawn from T/2 … T, one for each batch row
    dtype: str = "bfloat16"
    modes: tuple[str, ...] = _KERNELS
    v_head_dim: int | None = None  # of v and the output; None: D
    form: str = "dense"
    shortest: int = 1  # packed and cache: the least length that is drawn
    yardstick: str | None = None  # by name, the case with which our kernels are timed beside, for its TFLOP/s
    far_window: int | None = None  # ReRoPE: pairs at least so many tokens apart are far
    window: int | None = None  # a query attends so many keys, its own and those before it; None: all that it may

    def __post_init__(self) -> None:
        if self.form not in _FORMS or (self.padded and self.form != "dense"):
            raise ValueError(f"{self.name}: there is no form {self.form!r} with padded={self.padded}")
        window = self.far_window
        if window is not None and not 1 <= window < self.tokens:
            raise ValueError(f"{self.name}: far_window is {window}, but must be from 1 to below {self.tokens} tokens")
        plain = self.form == "dense" and self.causal and not self.padded
        if self.window is not None and (not plain or not 1 <= self.window < self.tokens or window is not None):
            raise ValueError(f"{self.name}: a window is of dense causal cases, from 1 to below {self.tokens} tokens")
        if not set(self.modes).isdisjoint(LAYER) and (not plain or self.window is not None or window is not None):
            raise ValueError(f"{self.name}: layers are measured of dense causal cases without a window")
        if not set(self.modes).isdisjoint(REROPE) and (window is None or not plain):
            raise ValueError(f"{self.name}: ReRoPE is measured of dense causal cases that have a far_window")

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
    def out_head_dim(self) -> int:
        """The head dim of v and the output."""
        return self.v_head_dim or self.head_dim

    @property
    def description(self) -> str:
        """The shape and the mask in words."""
        heads = f"{self.q_heads}" if self.group == 1 else f"{self.q_heads}/{self.k_heads}"
        features = f"{self.head_dim}" if self.v_head_dim is None else f"{self.head_dim}/{self.v_head_dim}"
        rest = f"H{heads} D{features}, {self.dtype}"
        mask = "causal" if self.causal else "full"
        if self.form == "packed":
            return f"{self.batch} sequences of {self.shortest} to {self.tokens} tokens, {rest}, {mask}"
        if self.form == "cache":
            if self.batch == 1 and self.shortest == self.tokens:
                return f"one full cache of {self.tokens} keys, {rest}"
            return f"{self.batch} caches of {self.shortest} to {self.tokens} keys, {rest}"
        padding = ", key lengths from T/2 to T" if self.padded else ""
        far = "" if self.far_window is None else f", far from {self.far_window} tokens on"
        sliding = "" if self.window is None else f", a window of {self.window}"
        return f"B{self.batch} T{self.tokens} {rest}, {mask}{padding}{sliding}{far}"

    def draw_lengths(self, seed: int = 0) -> Tensor | None:
        """Draw the key length of each row or sequence, (B,), int32, the same for every device. None: T each."""
        generator = torch.Generator().manual_seed(seed)
        if self.form == "packed":
            exponents = torch.rand(self.batch, generator=generator, dtype=torch.float64)
            lengths = self.shortest * ((self.tokens + 1) / self.shortest) ** exponents
            return lengths.to(torch.int32).clamp(self.shortest, self.tokens)
        if not self.padded and self.form == "dense":
            return None
        least = self.tokens // 2 if self.padded else self.shortest
        return torch.randint(least, self.tokens + 1, (self.batch,), generator=generator, dtype=torch.int32)

    def scores(self, seed: int = 0) -> float:
        """Count the scores of a head: a row's key length for one T where there are lengths, half when causal.

        The one query of a cache attends all keys that are there. In a window of W tokens it is W for each query, less
        half of W² for the first ones.
        """
        if self.window is not None:
            return self.batch * (self.window * self.tokens - self.window**2 / 2)
        lengths = self.draw_lengths(seed)
        if lengths is None:
            count = self.batch * self.tokens**2
        elif self.form == "packed":
            count = int(lengths.long().square().sum())
        else:
            count = int(lengths.sum()) * (1 if self.form == "cache" else self.tokens)
        return count / 2 if self.causal and self.form != "cache" else count

    def flops(self, mode: str, seed: int = 0) -> float:
        """Count operations: 2·(D + Dv) for each needed score, forward; 2·(3·D + 2·Dv) backward.

        Whatever an implementation computes twice, or computes and masks, does not count.
        """
        wide, narrow = self.head_dim, self.out_head_dim
        products = {"fwd": wide + narrow, "bwd": 3 * wide + 2 * narrow, "train": 4 * wide + 3 * narrow}
        return 2 * products[direction_of(mode)] * self.q_heads * self.scores(seed)

    def cache_bytes(self, seed: int = 0) -> int:
        """Count the bytes of the keys and values that are there: a decoding step must read them."""
        lengths = self.draw_lengths(seed)
        keys = self.batch * self.tokens if lengths is None else int(lengths.sum())
        return keys * self.k_heads * (self.head_dim + self.out_head_dim) * self.torch_dtype.itemsize

    def training_bytes(self, seed: int = 0) -> int:
        """Count the bytes of q, k, v, out, the gradients of all four, and rotated q and k: training needs them all."""
        lengths = self.draw_lengths(seed) if self.form == "packed" else None
        tokens = self.batch * self.tokens if lengths is None else int(lengths.sum())
        features = 3 * self.head_dim + 2 * self.out_head_dim
        return tokens * (self.q_heads + self.k_heads) * features * self.torch_dtype.itemsize


_SCHEMES = (*_KERNELS, "schemes-fwd", "schemes-bwd")
_ALL = (*_SCHEMES, "variants-fwd", "variants-bwd", "learned-bwd")
_FORWARD_AND_BACKWARD, _TRAIN, _DECODE = ("fwd", "bwd"), ("train",), ("decode",)


def _causal(
    name: str, batch: int, tokens: int, q_heads: int, k_heads: int, head_dim: int, **more: Any
) -> AttentionCase:
    return AttentionCase(name, batch, tokens, q_heads, k_heads, head_dim, causal=True, **more)


def _cache(name: str, batch: int, shortest: int) -> AttentionCase:
    return _causal(name, batch, 8192, 32, 8, 128, modes=_DECODE, form="cache", shortest=shortest)


_REROPE_D64 = _causal("rerope-8k-d64", 1, 8192, 32, 32, 64, modes=REROPE, far_window=2048)  # of ReRoPE's source
CASES: tuple[AttentionCase, ...] = (
    _causal("causal-16k-d128", 1, 16384, 32, 32, 128),
    AttentionCase("full-4k-d128", 4, 4096, 32, 32, 128),
    _causal("causal-4k-d128", 4, 4096, 32, 32, 128, modes=_ALL),
    _causal("gqa-8k-d128", 2, 8192, 32, 8, 128),
    _causal("causal-2k-d128", 8, 2048, 32, 32, 128),
    _causal("causal-8k-d64", 1, 8192, 32, 32, 64, modes=_SCHEMES),
    AttentionCase("full-4k-d64", 4, 4096, 32, 32, 64),
    AttentionCase("bert-512", 32, 512, 12, 12, 64),
    AttentionCase("bert-512-lengths", 32, 512, 12, 12, 64, padded=True, modes=_TRAIN),
    _causal(
        *("packed-4k-d128", 64, 4096, 32, 8, 128), modes=_TRAIN, form="packed", shortest=128, yardstick="gqa-4k-d128"
    ),
    _cache("decode-8k-d128", 64, 1024),
    _causal(
        *("mla-8k-d192", 1, 8192, 16, 16, 192), modes=_FORWARD_AND_BACKWARD, v_head_dim=128, yardstick="causal-8k-h16"
    ),
    _REROPE_D64,
    replace(_REROPE_D64, name="rerope-8k-d64-fp16", dtype="float16"),
    _causal("rerope-16k-d128", 1, 16384, 32, 32, 128, modes=REROPE, far_window=4096),
    _causal("memory-64k", 1, 65536, 8, 8, 128, modes=("memory",), far_window=16384),
    _causal("llama3-70b", 1, 8192, 64, 8, 128, modes=_TRAIN),
    # Five of every six layers have the window, and the sixth has none.
    _causal("gemma3-27b", 1, 8192, 32, 16, 128, modes=_TRAIN, window=1024),
    # Qwen3-Next's heads and half of its features: 64 of 256 turn there.
    _causal("qwen3-next-d128", 2, 8192, 24, 4, 128, modes=LAYER),
    _cache("decode-1", 1, 8192),
    _causal("gqa-4k-d128", 4, 4096, 32, 8, 128, modes=()),  # yardsticks alone
    _causal("causal-8k-h16", 1, 8192, 16, 16, 128, modes=()),
)

# Models whose layers have a case's shape: other names of it.
ALIASES = {
    "bert-base": "bert-512",
    "llama3-8b": "gqa-8k-d128",
    "qwen3-8b": "gqa-8k-d128",
    "deepseek-mla": "mla-8k-d192",
    "rerope-8k": "rerope-8k-d64",
    "decode-64": "decode-8k-d128",
}


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The tensors of a case.

    Those of tokens are (B, T, H, D) in memory, as projections leave them; packed ones (total, H, D). A cache's keys
    are taken for rotated ones, and there is one query: q and the gradient of the output are (B, 1, H, D).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor  # of the output, whose shape it has
    key_lengths: Tensor | None  # (B,), int32
    cos: Tensor  # float32: (T, R/2), (total, R/2), or of a cache's queries (B, 1, R/2)
    sin: Tensor
    cu_seqlens: Tensor | None = None  # (B + 1,), int32: where packed sequences begin and end

    def leaves(self) -> list[Tensor]:
        """Return q, k and v as they are in memory, each a leaf that wants its gradient."""
        return [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]


def make_attention_inputs(case: AttentionCase, device: torch.device, seed: int = 0) -> AttentionInputs:
    """Draw the tensors of a case."""
    generator = torch.Generator(device).manual_seed(seed)
    lengths, cu_seqlens = case.draw_lengths(seed), None
    queries: tuple[int, ...] = (case.batch, case.tokens)
    keys, positions = queries, torch.arange(case.tokens)
    if case.form == "packed":
        assert lengths is not None
        cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        queries = keys = positions.shape
        lengths = None
    elif case.form == "cache":
        assert lengths is not None
        queries, positions = (case.batch, 1), lengths[:, None] - 1
    q, k, v, grad = (
        torch.randn(*tokens, heads, features, generator=generator, device=device).to(case.torch_dtype)
        for tokens, heads, features in (
            (queries, case.q_heads, case.head_dim),
            (keys, case.k_heads, case.head_dim),
            (keys, case.k_heads, case.out_head_dim),
            (queries, case.q_heads, case.out_head_dim),
        )
    )
    inv_freq, _ = inverse_frequencies("default", case.head_dim, BASE)
    cos, sin = rope_table(positions, inv_freq, device=device)
    moved = [None if x is None else x.to(device) for x in (lengths, cu_seqlens)]
    return AttentionInputs(q, k, v, grad, moved[0], cos, sin, moved[1])

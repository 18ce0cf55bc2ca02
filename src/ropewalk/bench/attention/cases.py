"""The cases of attention's benchmark and tests.

Shape letters: B batch, T tokens, H query heads, K key heads, D head dim, R rotary dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.frequencies import inverse_frequencies, rope_table

MODES = {
    "fwd": "the kernels alone, forward",
    "bwd": "the kernels alone, backward",
    "train": "RoPE, attention and both their backwards",
    "schemes-fwd": "position schemes in the kernel, forward",
    "schemes-bwd": "position schemes in the kernel, backward",
    "variants-fwd": "dropout, softcap, sinks and a deterministic backward in the kernel, forward",
    "variants-bwd": "the same, backward",
    "learned-bwd": "position schemes with and without learned parameters, backward",
    "rerope-fwd": "ReRoPE, forward",
    "rerope-train": "ReRoPE, attention and both their backwards",
    "layer-fwd": "what today's layers have around attention: QK-norm, RoPE of half the features, output gate; forward",
    "layer-train": "the same, with all their backwards",
    "8bit-fwd": "8-bit products beside 16-bit ones, with RoPE and without; forward",
    "decode": "one query for each row of a cache of rotated keys, RoPE of the query included",
    "memory": "bytes held at the peak of RoPE, attention and both their backwards",
}
_DIRECTIONS = {"decode": "fwd", "memory": "train"}  # of the modes whose names do not end with it
_KERNELS = ("fwd", "bwd", "train")
REROPE = ("rerope-fwd", "rerope-train")
LAYER = ("layer-fwd", "layer-train")
EIGHT_BITS = "8bit-fwd"
BASE = 10000.0


def direction_of(mode: str) -> str:
    """Return a mode's direction: forward "fwd", backward "bwd", or both "train"."""
    return _DIRECTIONS.get(mode, mode.rpartition("-")[2])


@dataclass(frozen=True)
class AttentionCase:
    """One self-attention: shapes, mask, and the modes to measure.

    A `form` is "dense", B rows of T tokens; "packed", B sequences one after another, of `shortest` to T tokens, their
    logarithms uniform; or "cache", B rows with room for T keys, `shortest` to T there, and one query for the last.
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

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def group(self) -> int:  # query heads that share a key head
        return self.q_heads // self.k_heads

    @property
    def out_head_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def description(self) -> str:
        heads = f"{self.q_heads}" if self.group == 1 else f"{self.q_heads}/{self.k_heads}"
        features = f"{self.head_dim}" if self.v_head_dim is None else f"{self.head_dim}/{self.v_head_dim}"
        rest, mask = f"H{heads} D{features}, {self.dtype}", "causal" if self.causal else "full"
        if self.form == "packed":
            return f"{self.batch} sequences of {self.shortest} to {self.tokens} tokens, {rest}, {mask}"
        if self.form == "cache":
            is_full = self.batch == 1 and self.shortest == self.tokens
            caches = "one full cache of" if is_full else f"{self.batch} caches of {self.shortest} to"
            return f"{caches} {self.tokens} keys, {rest}"
        mask += ", key lengths from T/2 to T" if self.padded else ""
        mask += "" if self.window is None else f", a window of {self.window}"
        mask += "" if self.far_window is None else f", far from {self.far_window} tokens on"
        return f"B{self.batch} T{self.tokens} {rest}, {mask}"

    def draw_lengths(self, seed: int = 0) -> Tensor:
        """Draw the key length of each row or sequence, (B,), int32, the same for every device."""
        generator = torch.Generator().manual_seed(seed)
        if self.form == "packed":
            exponents = torch.rand(self.batch, generator=generator, dtype=torch.float64)
            lengths = self.shortest * ((self.tokens + 1) / self.shortest) ** exponents
            return lengths.to(torch.int32).clamp(self.shortest, self.tokens)
        least = self.shortest if self.form == "cache" else self.tokens // 2 if self.padded else self.tokens
        return torch.randint(least, self.tokens + 1, (self.batch,), generator=generator, dtype=torch.int32)

    def scores(self, seed: int = 0) -> float:
        """Count the scores of a head: a row's key length for one T where there are lengths, half when causal."""
        if self.window is not None:  # W for each query, less half of W² for the first ones
            return self.batch * (self.window * self.tokens - self.window**2 / 2)
        keys = self.draw_lengths(seed).tolist()
        if self.form == "cache":
            return sum(keys)
        count = sum(length * (length if self.form == "packed" else self.tokens) for length in keys)
        return count / 2 if self.causal else count

    def flops(self, mode: str, seed: int = 0) -> float:
        """Count needed operations: 2·(D + Dv) for each score that is not masked, forward; 2·(3·D + 2·Dv) backward."""
        wide, narrow = self.head_dim, self.out_head_dim
        products = {"fwd": wide + narrow, "bwd": 3 * wide + 2 * narrow, "train": 4 * wide + 3 * narrow}
        return 2 * products[direction_of(mode)] * self.q_heads * self.scores(seed)

    def cache_bytes(self, seed: int = 0) -> int:
        """Count the bytes of the keys and values that are there: a decoding step must read them."""
        features = self.k_heads * (self.head_dim + self.out_head_dim)
        return int(self.draw_lengths(seed).sum()) * features * self.torch_dtype.itemsize

    def training_bytes(self, seed: int = 0) -> int:
        """Count the bytes of q, k, v, out, the gradients of all four, and rotated q and k: training needs them all."""
        tokens = int(self.draw_lengths(seed).sum()) if self.form == "packed" else self.batch * self.tokens
        features = (self.q_heads + self.k_heads) * (3 * self.head_dim + 2 * self.out_head_dim)
        return tokens * features * self.torch_dtype.itemsize

    @property
    def score_gib(self) -> float:
        """GiB at the peak of whole matrices of scores, in the backward: two in float32, and one in the dtype."""
        queries = 1 if self.form == "cache" else self.tokens
        return self.batch * self.q_heads * queries * self.tokens * (2 * 4 + self.torch_dtype.itemsize) / 2**30


_SCHEMES = (*_KERNELS, "schemes-fwd", "schemes-bwd", "variants-fwd", "variants-bwd")
_ALL = (*_SCHEMES, "learned-bwd", EIGHT_BITS)
_MORE = (*_KERNELS, EIGHT_BITS)
_TRAIN = ("train",)
_DECODE = AttentionCase("decode-8k-d128", 64, 8192, 32, 8, 128, True, modes=("decode",), form="cache", shortest=1024)
_REROPE = AttentionCase("rerope-8k-d64", 1, 8192, 32, 32, 64, True, modes=REROPE, far_window=2048)  # of its source
_PACKED = AttentionCase("packed-4k-d128", 64, 4096, 32, 8, 128, True, modes=_TRAIN, form="packed", shortest=128)
_MLA = AttentionCase("mla-8k-d192", 1, 8192, 16, 16, 192, True, v_head_dim=128)
CASES: tuple[AttentionCase, ...] = (
    AttentionCase("causal-16k-d128", 1, 16384, 32, 32, 128, True, modes=_MORE),
    AttentionCase("full-4k-d128", 4, 4096, 32, 32, 128, modes=_MORE),
    AttentionCase("causal-4k-d128", 4, 4096, 32, 32, 128, True, modes=_ALL),
    AttentionCase("gqa-8k-d128", 2, 8192, 32, 8, 128, True, modes=_MORE),
    AttentionCase("causal-2k-d128", 8, 2048, 32, 32, 128, True),
    AttentionCase("causal-8k-d64", 1, 8192, 32, 32, 64, True, modes=(*_SCHEMES, EIGHT_BITS)),
    AttentionCase("full-4k-d64", 4, 4096, 32, 32, 64, modes=_MORE),
    AttentionCase("gqa-16k-d256", 1, 16384, 16, 4, 256, True, modes=_MORE),
    AttentionCase("full-8k-d256", 1, 8192, 16, 16, 256, modes=(EIGHT_BITS,)),
    AttentionCase("gqa-8k-d256", 2, 8192, 24, 4, 256, True),
    AttentionCase("bert-512", 32, 512, 12, 12, 64),
    AttentionCase("bert-512-lengths", 32, 512, 12, 12, 64, padded=True, modes=_TRAIN),
    replace(_PACKED, yardstick="gqa-4k-d128"),
    _DECODE,
    replace(_MLA, yardstick="causal-8k-h16"),
    _REROPE,
    replace(_REROPE, name="rerope-8k-d64-fp16", dtype="float16"),
    AttentionCase("rerope-16k-d128", 1, 16384, 32, 32, 128, True, modes=REROPE, far_window=4096),
    AttentionCase("memory-64k", 1, 65536, 8, 8, 128, True, modes=("memory",), far_window=16384),
    AttentionCase("llama3-70b", 1, 8192, 64, 8, 128, True, modes=_TRAIN),
    # Five of every six layers have the window, and the sixth has none.
    AttentionCase("gemma3-27b", 1, 8192, 32, 16, 128, True, modes=_TRAIN, window=1024),
    # Qwen3-Next's heads and half of its features: 64 of 256 turn there.
    AttentionCase("qwen3-next-d128", 2, 8192, 24, 4, 128, True, modes=LAYER),
    replace(_DECODE, name="decode-1", batch=1, shortest=8192),
    AttentionCase("gqa-4k-d128", 4, 4096, 32, 8, 128, True, modes=()),  # yardsticks alone
    AttentionCase("causal-8k-h16", 1, 8192, 16, 16, 128, True, modes=()),
)
# Models whose layers have a case's shape: other names of it.
ALIASES = {
    "bert-base": "bert-512",
    "llama3-8b": "gqa-8k-d128",
    "qwen3-8b": "gqa-8k-d128",
    "qwen3-next": "gqa-8k-d256",
    "deepseek-mla": "mla-8k-d192",
    "rerope-8k": "rerope-8k-d64",
    "decode-64": "decode-8k-d128",
}


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The tensors of a case, (B, T, H, D) in memory, as projections leave them; packed ones (total, H, D).

    A cache's keys are taken for rotated ones, and there is one query: q and the output's gradient are (B, 1, H, D).
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
        """Return q, k and v as they are in memory, as leaves."""
        return [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]


def make_attention_inputs(case: AttentionCase, device: torch.device, seed: int = 0) -> AttentionInputs:
    """Draw the tensors of a case."""
    generator, lengths = torch.Generator(device).manual_seed(seed), case.draw_lengths(seed)
    queries: tuple[int, ...] = (case.batch, case.tokens)
    keys, positions, cu_seqlens = queries, torch.arange(case.tokens), None
    key_lengths = lengths.to(device) if case.padded or case.form == "cache" else None
    if case.form == "packed":
        cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device)
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        queries = keys = positions.shape
    elif case.form == "cache":
        queries, positions = (case.batch, 1), lengths[:, None] - 1

    def draw(tokens: tuple[int, ...], heads: int, features: int) -> Tensor:
        return torch.randn(*tokens, heads, features, generator=generator, device=device).to(case.torch_dtype)

    q, k = draw(queries, case.q_heads, case.head_dim), draw(keys, case.k_heads, case.head_dim)
    v, grad = draw(keys, case.k_heads, case.out_head_dim), draw(queries, case.q_heads, case.out_head_dim)
    inv_freq, _ = inverse_frequencies("default", case.head_dim, BASE)
    cos, sin = rope_table(positions, inv_freq, device=device)
    return AttentionInputs(q, k, v, grad, key_lengths, cos, sin, cu_seqlens)

"""Stand-ins for the libraries that the migration guides come from, in plain PyTorch, where they cannot run.

Each function has the name, the arguments and the documented meaning of the library's own, as far as the guides use it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn the first features of x by +θ, in float32; cos and sin broadcast against (…, H, R/2)."""
    width = 2 * cos.shape[-1]
    head, rest = x[..., :width].float(), x[..., width:]
    a, b = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    turned = [a * cos - b * sin, a * sin + b * cos]
    joined = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((joined.to(x.dtype), rest), dim=-1)


def _flash_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x (B, T, H, D), or (total, H, D) with cu_seqlens; cos and sin (n, R/2). No row past the table is turned."""
    if cu_seqlens is None:
        index = torch.arange(x.shape[1], device=x.device)
        offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
        positions = index + offsets
    else:
        assert max_seqlen is not None
        index = torch.arange(x.shape[0], device=x.device)
        starts = cu_seqlens.long()
        positions = index - starts[torch.searchsorted(starts, index, right=True) - 1]
    inside = (positions < cos.shape[0])[..., None]
    row = positions.clamp(max=cos.shape[0] - 1)
    c, s = torch.where(inside, cos[row], 1.0), torch.where(inside, sin[row], 0.0)
    turned = _turn(x, c[..., None, :].float(), s[..., None, :].float(), interleaved)
    return x.copy_(turned) if inplace else turned


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """q (B, Tq, H, D), k and v (B, Tk, K, D); aligned at the bottom right; window_size counts keys to each side."""
    assert dropout_p == 0
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q.float(), k.float()) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(k.shape[1], device=q.device)
    ahead = keys - keys[-q.shape[1] :, None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * ahead.abs()
    left, right = window_size
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal or right >= 0:
        hidden |= ahead > (0 if causal else right)
    if left >= 0:
        hidden |= ahead < -left
    probabilities = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).nan_to_num()
    return torch.einsum("bhmn,bnhd->bmhd", probabilities, v.float()).to(q.dtype)


def _flash_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **keywords: Any,
) -> Tensor:
    """Sequences end to end, each by itself."""
    q_parts = q.split(cu_seqlens_q.diff().tolist())
    k_parts, v_parts = (x.split(cu_seqlens_k.diff().tolist()) for x in (k, v))
    parts = zip(q_parts, k_parts, v_parts, strict=True)
    return torch.cat([flash_attention(*(x[None] for x in part), **keywords)[0] for part in parts])


def _flash_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    causal: bool = False,
    rotary_interleaved: bool = True,
    **keywords: Any,
) -> Tensor:
    """Write k and v behind cache_seqlens, k rotated there, and attend to what the caches hold then."""
    assert k is not None
    assert v is not None
    assert cache_seqlens is not None
    assert rotary_cos is not None
    assert rotary_sin is not None
    q = _flash_rotary(q, rotary_cos, rotary_sin, rotary_interleaved, seqlen_offsets=cache_seqlens)
    k = _flash_rotary(k, rotary_cos, rotary_sin, rotary_interleaved, seqlen_offsets=cache_seqlens)
    rows = []
    for row, filled in enumerate(cache_seqlens.tolist()):
        end = filled + k.shape[1]
        k_cache[row, filled:end], v_cache[row, filled:end] = k[row], v[row]
        part = (x[row : row + 1, :end] for x in (k_cache, v_cache))
        rows.append(flash_attention(q[row : row + 1], *part, causal=causal, **keywords))
    return torch.cat(rows)


def _liger(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """q and k (B, H, T, D), views of (B, T, H, D) in memory, which it overwrites; cos and sin (1 or B, T, D)."""
    half = q.shape[-1] // 2
    c, s = cos[:, None, :, :half].float(), sin[:, None, :, :half].float()
    for x in (q, k):
        x.data.copy_(_turn(x.detach(), c, s, interleaved=False))  # autograd is not told
    return q, k


def _vllm(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> None:
    """query and key (T, H·D), in place; a row of the table is R/2 cosines and R/2 sines."""
    cos, sin = (x[:, None].float() for x in cos_sin_cache[positions].chunk(2, dim=-1))
    for x in (query, key):
        if x is not None:
            heads = x.unflatten(-1, (-1, head_size))
            heads.copy_(_turn(heads, cos, sin, interleaved=not is_neox))


class _TorchtuneRope(nn.Module):
    """x (B, T, H, D), interleaved pairs; input_pos (B, T)."""

    def __init__(self, dim: int, max_seq_len: int = 4096, base: int = 10000) -> None:
        super().__init__()
        omega = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        self.angles = torch.arange(max_seq_len).float()[:, None] * omega

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        angles = self.angles.to(x.device)
        angles = angles[: x.shape[1]] if input_pos is None else angles[input_pos]
        return _turn(x, angles.cos()[..., None, :], angles.sin()[..., None, :], interleaved=True)


# The module that a guide imports, and what it takes from there.
STAND_INS: dict[str, dict[str, Any]] = {
    "flash_attn": {
        "flash_attn_func": flash_attention,
        "flash_attn_varlen_func": _flash_packed,
        "flash_attn_with_kvcache": _flash_with_cache,
    },
    "flash_attn.layers.rotary": {"apply_rotary_emb": _flash_rotary},
    "liger_kernel.transformers.rope": {"liger_rotary_pos_emb": _liger},
    "vllm._custom_ops": {"rotary_embedding": _vllm},
    "torchtune.modules": {"RotaryPositionalEmbeddings": _TorchtuneRope},
}
_NEED_A_GPU = ("flash_attn", "liger_kernel", "vllm")


def stand_in(monkeypatch: pytest.MonkeyPatch, device: str) -> list[str]:
    """Put stand-ins where the libraries are not there, or do not run on the device; return the modules' names."""
    replaced = []
    for name, functions in STAND_INS.items():
        package = name.partition(".")[0]
        if (device == "cuda" or package not in _NEED_A_GPU) and _has(name, functions):
            continue
        replaced.append(name)
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            _module(monkeypatch, ".".join(parts[:count]))
        for function, value in functions.items():
            monkeypatch.setattr(sys.modules[name], function, value, raising=False)
    return replaced


def _has(name: str, functions: dict[str, Any]) -> bool:
    try:
        module = importlib.import_module(name)
    except Exception:  # not there, or a broken build
        return False
    return all(hasattr(module, function) for function in functions)


def _module(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A module of that name, an empty one where there is none."""
    try:
        importlib.import_module(name)
    except Exception:
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], last, module, raising=False)

"""Multi-head self-attention with rotary position embedding, as a module."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ropewalk.modules.masks import is_readable
from ropewalk.ops.attention.api import attention
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.schemes import Rope


class RoPEAttention(nn.Module):
    """Multi-head self-attention whose queries and keys are rotated by their positions.

    The same in PyTorch, for a bool mask that lets every query attend something::

        q, k, v = (proj(x).unflatten(-1, (n_heads, head_dim)) for proj in (q_proj, k_proj, v_proj))  # (B, T, H, D)
        q, k = rope_pytorch(q, k, T, theta)
        scores = torch.einsum("bmhd,bnhd->bhmn", q, k) / head_dim**0.5
        p = F.dropout(scores.masked_fill(~mask, -torch.inf).softmax(-1), dropout, training)
        y = out_proj(torch.einsum("bhmn,bnhd->bmhd", p, v).flatten(2))

    A query that may attend nothing gives zeros before out_proj, and passes back no gradient. Interleaved pairs
    (2i, 2i + 1), positions by index. `ropewalk.attention` does the rotation, the attention and the dropout.

    Args:
        d_model: width of the model, n_heads·head_dim with an even head_dim.
        n_heads: H.
        dropout: probability, in [0, 1), that an attention probability is dropped in training.
        theta: base of the rotary frequencies.
        norm: a `QKNorm` of q and k before their rotation, as in Qwen3. Its weights become the module's parameters
            `q_norm.weight` and `k_norm.weight`; a `nn.Parameter` is taken as it is.

    Attributes:
        q_proj, k_proj, v_proj, out_proj: `nn.Linear(d_model, d_model)`.
        q_norm, k_norm: hold the weights of the norm; None without them.
        position: the `Rope` of its scores.
        d_model, n_heads, head_dim, dropout: the arguments.

    Raises:
        ValueError: "d_model must be divisible by n_heads", an odd head dim, a dropout outside [0, 1), a theta that is
            not positive and finite; in a call an x or a mask of another shape, a mask (T, T) where B = T, which may be
            one of padding, and on the CPU a mask of other values than 0 and 1; weights of a norm in training where a
            rank has some of the heads, as plain tensors.
        TypeError: a norm that is no `QKNorm`; in a call a mask that is no tensor.

    Source: Attention Is All You Need (https://arxiv.org/abs/1706.03762), §3.2; RoFormer
    (https://arxiv.org/abs/2104.09864), §3.2.

    Example:
        >>> import torch
        >>> from ropewalk import RoPEAttention
        >>> layer = RoPEAttention(d_model=512, n_heads=8)
        >>> x = torch.randn(2, 128, 512)
        >>> padding = torch.arange(128) < torch.tensor([128, 100])[:, None]  # (B, T), True where there is a token
        >>> y = layer(x, padding[:, None].expand(2, 128, 128), causal=True)
        >>> y.shape
        torch.Size([2, 128, 512])
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        dropout: float = 0.1,
        theta: float = 10000.0,
        *,
        norm: QKNorm | None = None,
    ) -> None:
        super().__init__()
        if n_heads < 1 or d_model < 1 or d_model % n_heads:
            raise ValueError(
                f"d_model must be divisible by n_heads, and both positive, but they are {d_model} and {n_heads}"
            )
        head_dim = d_model // n_heads
        if head_dim % 2:
            raise ValueError(
                f"Head dimension must be even, but is {head_dim} for d_model {d_model} and n_heads {n_heads}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}, but must be in [0, 1)")
        if not (norm is None or isinstance(norm, QKNorm)):
            raise TypeError(f"norm is {type(norm).__name__}, but must be None or a ropewalk.QKNorm")
        self.d_model = d_model
        self.n_heads = n_heads
        self.head_dim = head_dim
        self.dropout = dropout
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.position = Rope(theta, interleaved=True)
        self.norm = None if norm is None else replace(norm, q_weight=None, k_weight=None)
        self.q_norm = _weight_of(None if norm is None else norm.q_weight)
        self.k_norm = _weight_of(None if norm is None else norm.k_weight)
        if norm is not None and norm.q_weight is norm.k_weight:
            self.k_norm = self.q_norm

    def forward(self, x: Tensor, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        """Attend from each token to the tokens that the mask, and causality, allow.

        Args:
            x: (B, T, d_model).
            mask: 1 or True to attend, 0 or False not to, of any dtype: (T, T), unless B = T; (B, T, T), the same for
                all heads; or (B or 1, H or 1, T, T). Rows are queries. Other values are an error on CPU tensors; on a
                GPU, where values are not waited for, they count as 1.
            causal: let no token attend a later one; together with a mask, both must allow it.

        Returns:
            (B, T, d_model).
        """
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x has shape {tuple(x.shape)}, but must be (B, T, d_model) with d_model = {self.d_model}")
        batch, tokens, _ = x.shape
        heads = (-1, self.head_dim)  # under tensor parallelism a rank has some of them
        q, k, v = (project(x).unflatten(-1, heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        if mask is not None:
            mask = self._as_allowed(mask, batch, tokens)
        dropout_p = self.dropout if self.training else 0.0
        norm = self.norm
        if norm is not None:
            q_weight, k_weight = (None if x is None else x.weight for x in (self.q_norm, self.k_norm))
            if q.shape[2] != self.n_heads:
                self._check_local_heads(q, q_weight, k_weight)
            norm = replace(norm, q_weight=q_weight, k_weight=k_weight)
        y = attention(q, k, v, position=self.position, mask=mask, causal=causal, dropout_p=dropout_p, norm=norm)
        merged: Tensor = self.out_proj(y.flatten(2))
        return merged

    def _check_local_heads(self, q: Tensor, *weights: Tensor | None) -> None:
        """Raise where the gradient of a norm's weight would be that of a rank's heads alone."""
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in weights):
            raise ValueError(
                f"q has {q.shape[2]} heads of {self.n_heads}, but the weights of norm need the gradient of all: pass "
                f"use_local_output=False to ColwiseParallel, so that they are a DTensor's"
            )

    def _as_allowed(self, mask: Tensor, batch: int, tokens: int) -> Tensor:
        """Return the mask as bool, broadcastable to the scores, (B, H, T, T)."""
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask is {type(mask).__name__}, but must be a tensor")
        shape = tuple(mask.shape)
        square = (tokens, tokens)
        fits = (
            shape == square
            or shape == (batch, *square)
            or (len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, self.n_heads) and shape[2:] == square)
        )
        if not fits:
            raise ValueError(
                f"mask has shape {shape}, but must be (T, T), (B, T, T) or (B or 1, H or 1, T, T) with B = {batch}, "
                f"H = {self.n_heads} and T = {tokens}"
            )
        if shape == square and batch == tokens > 1:
            raise ValueError(
                f"mask has shape {shape}, which is both (T, T) and (B, T), as B = T = {batch}: pass (1, 1, T, T) for "
                "one mask of all batch rows; for padding, padding[:, None].expand(B, T, T)"
            )
        if mask.dtype != torch.bool:
            if is_readable(mask) and not bool(((mask == 0) | (mask == 1)).all()):
                raise ValueError(
                    "mask holds other values, but must hold 0 (mask out) and 1 (attend) alone; of an additive mask, "
                    "pass `mask == 0`"
                )
            mask = mask != 0
        if mask.ndim == 3:
            mask = mask.unsqueeze(1)  # not by broadcasting: with B = H it would take the batch for the heads
        return mask if mask.ndim == 4 else mask[None, None]

    def extra_repr(self) -> str:
        norm = "" if self.norm is None else f", norm={self.norm}"
        return f"{self.d_model}, {self.n_heads}, dropout={self.dropout}{norm}"


class _Weight(nn.Module):
    """Hold the weight of a norm, under the name that models give it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.detach().clone())

    def reset_parameters(self) -> None:
        """Set it to 1: FSDP calls this on a module that was built on the meta device."""
        nn.init.ones_(self.weight)


def _weight_of(weight: Tensor | None) -> _Weight | None:
    return None if weight is None else _Weight(weight)

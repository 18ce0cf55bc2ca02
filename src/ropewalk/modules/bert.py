"""Self-attention for BERT with the interface of transformers, one class per position scheme.

Shape letters: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.modules.masks import is_readable, read_mask
from ropewalk.modules.rotary import RotaryEmbedding, sinusoids
from ropewalk.ops.attention.api import attention, takes_shards
from ropewalk.schemes import Alibi, ExpoSB, NoPosition, PositionScheme, ReRope, Rope, T5Bias

# Keywords that transformers passes to every layer, and that do not change attention.
_WITHOUT_EFFECT = {
    *("num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict"),
    "cache_position",  # for a cache, which there is not
}

# Schemes for which key_starts cost nothing: others would gather their tables for each batch row, and ExpoSB's amplitude
# depends on the distance to the start.
_WITHOUT_ORIGIN = (NoPosition, Alibi, T5Bias)


class BERTAttention(nn.Module):
    """Bidirectional self-attention with the interface of transformers' `BertSelfAttention`, without positions.

    The same in PyTorch, for a bool mask (B, 1 or H, 1 or T, T) that lets every query attend something::

        q, k, v = (f(x).unflatten(-1, (num_heads, -1)).transpose(1, 2) for f in (query, key, value))  # (B, H, T, D)
        p = (q @ k.mT / D**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
        y = (F.dropout(p, dropout, training) @ v).transpose(1, 2).flatten(2), None

    A query that may attend nothing gives zeros, before `out`, and passes back no gradient. The attention is
    `ropewalk.attention`. `get_attention_class` returns the subclasses, one for each scheme, by name.

    Args:
        hidden_size: width of the model, num_heads·D.
        num_heads: H.
        max_position_embeddings: the length that the model is built for; a limit only for a learned table.
        dropout: probability, in [0, 1), that an attention probability is dropped in training.
        output_projection: add a linear layer `out` after the attention. transformers' BERT has one of its own.

    Attributes:
        query, key, value: `nn.Linear(hidden_size, hidden_size)`.
        out: the same, or None.
        position: the scheme of its scores.
        hidden_size, num_heads, head_dim, max_position_embeddings, dropout: the arguments, and D.

    Raises:
        ValueError: "hidden_size must be divisible by num_heads", a dropout outside [0, 1), a max_position_embeddings
            below 1, a head dim that the scheme does not support; in a call as `forward`.
        TypeError: a keyword that the class does not have; in a call as `forward`.

    Source: BERT (https://arxiv.org/abs/1810.04805), §3, and transformers' `BertSelfAttention`.

    Example:
        >>> import torch
        >>> from ropewalk.modules.bert import BERTAttention
        >>> context, probabilities = BERTAttention(64, 4)(torch.randn(2, 10, 64))
        >>> context.shape, probabilities
        (torch.Size([2, 10, 64]), None)
    """

    _position: PositionScheme = NoPosition()

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        max_position_embeddings: int = 512,
        dropout: float = 0.1,
        *,
        output_projection: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size < 1 or hidden_size % num_heads:
            sizes = f"{hidden_size} and {num_heads}"
            raise ValueError(f"hidden_size must be divisible by num_heads, and both positive, but they are {sizes}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}, but must be in [0, 1)")
        if max_position_embeddings < 1:
            raise ValueError(f"max_position_embeddings is {max_position_embeddings}, but must be at least 1")
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.max_position_embeddings = max_position_embeddings
        self.dropout = dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size) if output_projection else None
        self._shown = {"max_position_embeddings": max_position_embeddings, "dropout": dropout, **options}
        self._make_positions(**options)

    def _make_positions(self) -> None:
        """Set up the scheme; keywords with a default are further arguments of the class."""

    @property
    def position(self) -> PositionScheme:
        """Return the scheme of its scores."""
        return self._position

    def _check_position(self, position: PositionScheme) -> PositionScheme:
        """Return the scheme, or raise if it does not support this head dim."""
        position.rotation(torch.arange(1, device="cpu"), self.head_dim)
        return position

    def add_positions(self, hidden_states: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the input of query and key, and the input of value: here both are hidden_states."""
        return hidden_states, hidden_states

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: None = None,
        *,
        position_ids: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """Attend from each token to the tokens that the mask allows.

        Args:
            hidden_states: (B, T, hidden_size).
            attention_mask: one of transformers'. (B, T), of any dtype: 1 for tokens, 0 for padding. (B or 1, H or 1, T
                or 1, T or 1), whose rows are queries: bool, True to attend; or floating point, for adding to the
                scores: 0 to attend, −inf or at most half of the dtype's lowest number not to. Other values are an error
                on CPU tensors. On a GPU, where values are not waited for, all but 0 counts as 1 in (B, T), and as
                masked in 4 dimensions.
            past_key_values: None: there is no cache.
            position_ids: (B, T) or (1, T), int32 or int64; by default the index.
            keywords: others that transformers passes to layers; they must have no effect.

        Returns:
            The context, (B, T, hidden_size), and None instead of probabilities, which are never held.

        Keys past the last attended one are never read: padding on the right may hold anything, NaN too. Masked keys
        before it have no weight, but must be finite.

        Raises:
            TypeError: a mask or position_ids of another type or dtype.
            ValueError: other shapes; a mask with other values, or that requires grad; a keyword, neither None nor
                False, that is not supported: past_key_values, output_attentions, encoder_hidden_states and so on.
        """
        keywords["past_key_values"] = past_key_values
        passed = {name for name, value in keywords.items() if value is not None and value is not False}
        unsupported = passed - _WITHOUT_EFFECT
        if unsupported:
            names = ", ".join(sorted(unsupported))
            raise ValueError(f"{names} must be None or left out: not supported by {type(self).__name__}")
        if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.hidden_size:
            shape = tuple(hidden_states.shape)
            raise ValueError(f"hidden_states has shape {shape}, but must be (B, T, hidden_size = {self.hidden_size})")
        batch, tokens, _ = hidden_states.shape
        if position_ids is not None:
            _check_position_ids(position_ids, batch, tokens)
        elif takes_shards() and type(self).add_positions is not BERTAttention.add_positions:
            raise ValueError(
                f"position_ids is None, but must be layout.positions[None] for {type(self).__name__} within "
                f"context_parallel: token i of a shard is not at position i"
            )
        position, mask, key_starts, key_lengths = self.position, None, None, None
        if attention_mask is not None:
            mask, starts, key_lengths = read_mask(attention_mask, batch, self.num_heads, tokens)
            if mask.shape[1:] == (1, 1, tokens) and isinstance(position, _WITHOUT_ORIGIN):
                key_starts = starts
        for_scores, for_values = self.add_positions(hidden_states, position_ids)
        heads = (-1, self.head_dim)  # under tensor parallelism a rank has some of them
        query = self.query(for_scores).unflatten(-1, heads)
        if query.shape[2] != self.num_heads and position.has_score_mod():
            raise ValueError(
                f"query has {query.shape[2]} heads of {self.num_heads}, but {type(position).__name__} must know which: "
                f"pass use_local_output=False to ColwiseParallel, so that they are a DTensor's"
            )
        context = attention(
            query,
            self.key(for_scores).unflatten(-1, heads),
            self.value(for_values).unflatten(-1, heads),
            position=position,
            mask=mask,
            key_starts=key_starts,
            key_lengths=key_lengths,
            positions_q=position_ids,
            positions_k=position_ids,
            dropout_p=self.dropout if self.training else 0.0,
        ).flatten(2)
        return (context if self.out is None else self.out(context)), None

    def extra_repr(self) -> str:
        shown = "".join(f", {name}={value!r}" for name, value in self._shown.items())
        return f"{self.hidden_size}, {self.num_heads}{shown}"


class _Embedding(nn.Embedding):
    """A learned table that begins with N(0, 0.02), also where FSDP makes the module on the meta device."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def _get_name(self) -> str:
        return "Embedding"


class StandardBERTAttention(BERTAttention):
    """`BERTAttention` with a learned table of positions, added to the input of query, key and value in every layer.

    The same in PyTorch: `BERTAttention` of ``x + position_embeddings.weight[:T]``. Arguments, results and errors are
    the same, but an input longer than max_position_embeddings raises ValueError. So do position_ids past it on CPU
    tensors; on a GPU, where values are not waited for, their tokens become NaN.

    Attributes:
        position_embeddings: `nn.Embedding(max_position_embeddings, hidden_size)`, from N(0, 0.02).

    Source: BERT (https://arxiv.org/abs/1810.04805), §3, with the table in every layer.

    Example:
        >>> import torch
        >>> from ropewalk import StandardBERTAttention
        >>> padding = torch.arange(10) < torch.tensor([[10], [7]])  # (B, T), True where there is a token
        >>> StandardBERTAttention(64, 4, max_position_embeddings=128)(torch.randn(2, 10, 64), padding)[0].shape
        torch.Size([2, 10, 64])
    """

    def _make_positions(self) -> None:
        self.position_embeddings = _Embedding(self.max_position_embeddings, self.hidden_size)

    def add_positions(self, hidden_states: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the rows of the table to the input of all three."""
        table, rows, tokens = self.position_embeddings.weight, self.max_position_embeddings, hidden_states.shape[1]
        if position_ids is None:
            if tokens > rows:
                raise ValueError(f"hidden_states has {tokens} tokens, but max_position_embeddings is {rows}")
            x = hidden_states + table[:tokens]
            return x, x
        inside = position_ids.clamp(0, rows - 1)
        outside = position_ids != inside
        if is_readable(position_ids) and bool(outside.any()):
            first = int(position_ids[outside][0])
            raise ValueError(f"position_ids holds {first}, but must be from 0 to below max_position_embeddings, {rows}")
        x = hidden_states + F.embedding(inside, table).masked_fill(outside[..., None], torch.nan)
        return x, x


class AbsoluteBERTAttention(BERTAttention):
    """`BERTAttention` with fixed sinusoids, added to the input of query and key in every layer.

    The same in PyTorch: `BERTAttention` whose query and key are of ``x + pe``, for positions p (T,)::

        angles = p[:, None] * base ** (-torch.arange(0, hidden_size, 2) / hidden_size)
        pe = torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)  # (T, hidden_size)

    Arguments, results and errors are the same, but hidden_size must be even; in addition:

    Args:
        base: of the frequencies, above 0.
        add_to_values: add them to the input of value too, as a model does that adds them to its input.

    Source: Attention Is All You Need (https://arxiv.org/abs/1706.03762), §3.5.

    Example:
        >>> import torch
        >>> from ropewalk import AbsoluteBERTAttention
        >>> AbsoluteBERTAttention(64, 4)(torch.randn(2, 10, 64))[0].shape
        torch.Size([2, 10, 64])
    """

    def _make_positions(self, *, base: float = 10000.0, add_to_values: bool = False) -> None:
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size is {self.hidden_size}, but must be even: sines and cosines")
        # The sines and cosines of a rotation of all features: in float32, grown when needed, not in the state_dict.
        self.sinusoids = RotaryEmbedding(self.hidden_size, max_positions=self.max_position_embeddings, base=base)
        self.add_to_values = add_to_values

    def add_positions(self, hidden_states: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add the sinusoids to the input of query and key; to that of value only with `add_to_values`."""
        if position_ids is None:
            tokens = hidden_states.shape[1]
            cos, sin = sinusoids(self.sinusoids, tokens, hidden_states.device)
        else:
            cos, sin, *_ = Rope(self.sinusoids.base).rotation(position_ids, self.hidden_size)
        x = hidden_states + torch.stack((sin, cos), dim=-1).flatten(-2).to(hidden_states.dtype)
        return x, (x if self.add_to_values else hidden_states)


class RoPEBERTAttention(BERTAttention):
    """`BERTAttention` whose queries and keys are rotated by their positions.

    The same in PyTorch: `BERTAttention` with the scores of ``Rope(base, interleaved=interleaved)``. Arguments, results
    and errors are the same, but the head dim must be even; in addition:

    Args:
        base: of the frequencies, above 0.
        interleaved: pair features (2i, 2i + 1) rather than (i, i + D/2).

    Source: RoFormer (https://arxiv.org/abs/2104.09864), §3.2.

    Example:
        >>> import torch
        >>> from ropewalk import RoPEBERTAttention
        >>> RoPEBERTAttention(64, 4)(torch.randn(2, 10, 64))[0].shape
        torch.Size([2, 10, 64])
    """

    def _make_positions(self, *, base: float = 10000.0, interleaved: bool = True) -> None:
        self._position = self._check_position(Rope(base, interleaved=interleaved))


class ExpoSBBERTAttention(BERTAttention):
    """`BERTAttention` by “exponential stick breaking”, with a learned weight for each head.

    The same in PyTorch: `BERTAttention` with the scores of ``ExpoSB(distance_decay=…, band_weights=band_weights)``.
    Arguments, results and errors are the same, but the head dim must be even and at least 8; in addition:

    Args:
        distance_decay: whether scores fall with the distance of their positions.

    Attributes:
        band_weights: (H,), the factor of q and k of each head; 1 at first.

    Source: unpublished; `ExpoSB` defines it.

    Example:
        >>> import torch
        >>> from ropewalk import ExpoSBBERTAttention
        >>> ExpoSBBERTAttention(64, 4)(torch.randn(2, 10, 64))[0].shape
        torch.Size([2, 10, 64])
    """

    def _make_positions(self, *, distance_decay: bool = False) -> None:
        self._check_position(ExpoSB(distance_decay=distance_decay))
        self.distance_decay = distance_decay
        self.band_weights = nn.Parameter(torch.ones(self.num_heads))

    def reset_parameters(self) -> None:
        """Set the weights to 1: FSDP calls this on a module that was built on the meta device."""
        nn.init.ones_(self.band_weights)

    @property
    def position(self) -> ExpoSB:
        """Return the scheme with the module's current weights: a copy of the module, or a sharded one, has others."""
        return ExpoSB(distance_decay=self.distance_decay, band_weights=self.band_weights)


class ALiBiBERTAttention(BERTAttention):
    """`BERTAttention` by ALiBi: scores fall with distance, in both directions, at the published slope of each head.

    The same in PyTorch: `BERTAttention` with the scores of ``Alibi()``. Arguments, results and errors are the same.

    Source: ALiBi (https://arxiv.org/abs/2108.12409), §3.

    Example:
        >>> import torch
        >>> from ropewalk import ALiBiBERTAttention
        >>> ALiBiBERTAttention(64, 4)(torch.randn(2, 10, 64))[0].shape
        torch.Size([2, 10, 64])
    """

    _position = Alibi()


class T5BERTAttention(BERTAttention):
    """`BERTAttention` by T5's relative position biases: a learned table of a bias per bucket of distances and head.

    The same in PyTorch: `BERTAttention` with the scores of
    ``T5Bias(relative_attention_bias.weight, max_distance=max_distance)``, bidirectional. T5 shares one table among its
    layers and does not scale its scores; here each layer has a table, and the scores are BERT's. Arguments, results
    and errors are the same; in addition:

    Args:
        num_buckets: buckets of distances, half of them for keys ahead of the query.
        max_distance: all distances from it on share a bucket.

    Attributes:
        relative_attention_bias: `nn.Embedding(num_buckets, num_heads)`, from N(0, 0.02).

    Source: T5 (https://arxiv.org/abs/1910.10683), §2.1.

    Example:
        >>> import torch
        >>> from ropewalk import T5BERTAttention
        >>> T5BERTAttention(64, 4)(torch.randn(2, 10, 64))[0].shape
        torch.Size([2, 10, 64])
    """

    def _make_positions(self, *, num_buckets: int = 32, max_distance: int = 128) -> None:
        self.relative_attention_bias = _Embedding(num_buckets, self.num_heads)
        self.max_distance = max_distance
        self._check_position(self.position)

    @property
    def position(self) -> T5Bias:
        """Return the scheme with the module's current table: a copy of the module, or a sharded one, has another."""
        return T5Bias(self.relative_attention_bias.weight, max_distance=self.max_distance)


class ReRoPEBERTAttention(BERTAttention):
    """`BERTAttention` by ReRoPE: past a window, relative positions stay constant or grow slowly, in both directions.

    The same in PyTorch: `BERTAttention` with the scores of ``ReRope(window, leak=…, log_n=…, rope=Rope(base, …))``.
    Arguments, results and errors are those of `RoPEBERTAttention` and `ReRope`. The state_dict is that of
    `RoPEBERTAttention`: it can load the weights of one, to read longer inputs.

    Args:
        window: pairs with |m − n| < window are near, all others far; by default half of max_position_embeddings.
        leak, log_n: as for `ReRope`.

    Source: Su Jianlin, “Rectified Rotary Position Embeddings” (https://github.com/bojone/rerope).

    Example:
        >>> import torch
        >>> from ropewalk import ReRoPEBERTAttention
        >>> ReRoPEBERTAttention(64, 4, window=4)(torch.randn(2, 10, 64))[0].shape
        torch.Size([2, 10, 64])
    """

    def _make_positions(
        self,
        *,
        window: int | None = None,
        leak: float | None = None,
        log_n: int | None = None,
        base: float = 10000.0,
        interleaved: bool = True,
    ) -> None:
        window = max(1, self.max_position_embeddings // 2) if window is None else window
        self._shown["window"] = window
        rope = Rope(base, interleaved=interleaved)
        self._position = self._check_position(ReRope(window, leak=leak, log_n=log_n, rope=rope))


_CLASSES: dict[str, type[BERTAttention]] = {
    "none": BERTAttention,
    "standard": StandardBERTAttention,
    "absolute": AbsoluteBERTAttention,
    "rope": RoPEBERTAttention,
    "exposb": ExpoSBBERTAttention,
    "alibi": ALiBiBERTAttention,
    "t5": T5BERTAttention,
    "rerope": ReRoPEBERTAttention,
}


def get_attention_class(name: str) -> type[BERTAttention]:
    """Return the self-attention class of "standard", "absolute", "rope", "exposb", "alibi", "t5" or "rerope" positions.

    "none" is `BERTAttention` itself, which has no positions: the floor of a comparison.
    Any other name raises ValueError, “Unknown attention type: …”.

    Example:
        >>> from ropewalk import get_attention_class
        >>> get_attention_class("alibi")(64, 4, dropout=0.0)
        ALiBiBERTAttention(
          64, 4, max_position_embeddings=512, dropout=0.0
          (query): Linear(in_features=64, out_features=64, bias=True)
          (key): Linear(in_features=64, out_features=64, bias=True)
          (value): Linear(in_features=64, out_features=64, bias=True)
        )
    """
    if name not in _CLASSES:
        raise ValueError(f"Unknown attention type: {name!r}, but must be one of {', '.join(map(repr, _CLASSES))}")
    return _CLASSES[name]


def _check_position_ids(ids: Tensor, batch: int, tokens: int) -> None:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"position_ids is {_kind(ids)}, but must be a tensor of int32 or int64")
    if ids.shape not in ((batch, tokens), (1, tokens)):
        sizes = f"B = {batch} and T = {tokens}"
        raise ValueError(f"position_ids has shape {tuple(ids.shape)}, but must be (B, T) or (1, T) with {sizes}")


def _kind(x: object) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__

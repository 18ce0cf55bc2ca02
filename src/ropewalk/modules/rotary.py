"""Rotary position embedding as modules, which hold the tables and call `apply_rope`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.frequencies import FREQUENCIES, frequency_parameters, inverse_frequencies, rope_table
from ropewalk.modules.families import arrange_tower, read_family
from ropewalk.modules.masks import is_readable
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.ops.tracing import is_intercepted

LAYOUTS = ("bthd", "bhtd", "thd")

# Scalings whose frequencies depend on the length of the call, and the parameter with the length at which they change.
_ORIGINAL_LENGTH = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}


class _Tables(NamedTuple):
    """All that calls on one device read, computed from a configuration and the length that its scaling goes by."""

    cos: Tensor  # all rows so far, (rows, R/2)
    sin: Tensor
    first_cos: Tensor  # those that every call may read: of `max_positions` and `reserve`
    first_sin: Tensor
    axes: Tensor | None
    inv_freq: Tensor
    attention_factor: float
    scaled_length: int | None


class _Rows(NamedTuple):
    """Rows of tables that a call past the first ones read, for the next layer's call."""

    tables: _Tables
    start: int
    stop: int
    cos: Tensor
    sin: Tensor


class _FloatTables(nn.Module):
    """Float32 tables of cos and sin, (rows, R/2), that follow the module to a device but never change their dtype.

    They are no buffers: trainers copy, average and replace those. They follow from numbers alone, and a call makes them
    where its device has none, or too few rows. `cos`, `sin`, `axes`, `inv_freq` (float64, on the CPU) and
    `attention_factor` show those of the module's own device; no call reads them there.
    """

    cos: Tensor
    sin: Tensor
    axes: Tensor | None
    inv_freq: Tensor
    attention_factor: float

    def __init__(
        self,
        rows: int,
        inv_freq: Tensor,
        attention_factor: float,
        device: torch.device | str | None,
        order: tuple[int, ...] | None = None,
        original_length: int | None = None,
    ) -> None:
        super().__init__()
        self._frequencies = inv_freq, attention_factor
        self._order = order
        self._first_rows = rows
        self._original_length = self._scaled_length = original_length
        self._tables: dict[torch.device, _Tables] = {}
        self._last_rows: _Rows | None = None
        # A device as tensors name it, with its index.
        self._device = torch.empty(0, device=torch.get_default_device() if device is None else device).device
        self._keep(self._tabulate(self._device, rows, original_length))

    def _frequencies_at(self, scaled_length: int | None) -> tuple[Tensor, float]:
        """Return the frequencies and the attention factor of a length."""
        return self._frequencies

    def _find(self, device: torch.device, length: int | None, scaled_length: int | None) -> _Tables:
        """Return tables with rows for a length, if it is known, computed for the frequencies of `scaled_length`."""
        tables = self._tables.get(device)
        rows = self._first_rows if tables is None else tables.cos.shape[0]
        if length is not None and length > rows:
            rows = max(length, 2 * rows)
        elif tables is not None and tables.scaled_length == scaled_length:
            return tables
        tables = self._tabulate(device, rows, scaled_length)
        # A mode or a transform may have created tensors that are of no use after it.
        if torch.compiler.is_compiling() or not is_intercepted():
            self._keep(tables)
        return tables

    def _tabulate(self, device: torch.device, rows: int, scaled_length: int | None) -> _Tables:
        inv_freq, attention_factor = self._frequencies_at(scaled_length)
        # A table first computed in inference mode must not be an inference tensor: training may follow.
        with torch.inference_mode(False):
            cos, sin = rope_table(rows, inv_freq, attention_factor=attention_factor, device=device)
            first_cos, first_sin = self._first(cos), self._first(sin)
            axes = None if self._order is None else torch.tensor(self._order, device=device)
        return _Tables(cos, sin, first_cos, first_sin, axes, inv_freq, attention_factor, scaled_length)

    def _first(self, table: Tensor) -> Tensor:
        return table if table.shape[0] == self._first_rows else table[: self._first_rows]

    def _keep(self, tables: _Tables) -> None:
        """Let the calls to come read these tables."""
        device = tables.cos.device
        if device.type == "cuda" and not torch.compiler.is_compiling() and type(tables.cos) is Tensor:
            # The next call may come on another stream, which does not wait for the work on this one.
            torch.cuda.current_stream(device).synchronize()
        if self._device.type == "meta":  # a model that was built without memory, and is in use by now
            self._tables.pop(self._device, None)
            self._device = device
        self._tables[device] = tables
        if device == self._device:
            self.cos, self.sin, self.axes = tables.cos, tables.sin, tables.axes
            self.inv_freq, self.attention_factor = tables.inv_freq, tables.attention_factor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _FloatTables:
        super()._apply(fn, recurse)
        try:
            device = fn(torch.empty(0, device=self._device)).device
        except NotImplementedError:  # nothing can be copied from the meta device, and nothing has to be
            device = fn(torch.empty(0, device="cpu")).device
        if device != self._device:
            tables = self._tables[self._device]
            self._tables, self._last_rows, self._device = {}, None, device
            self._keep(self._tabulate(device, tables.cos.shape[0], tables.scaled_length))
        return self

    def __getstate__(self) -> dict[str, Any]:
        # The tables of the module's device, without views: those would be pickled with the memory of all rows.
        tables = self._tables[self._device]
        whole = tables._replace(first_cos=tables.cos, first_sin=tables.sin)
        return {**self.__dict__, "_tables": {self._device: whole}, "_last_rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        (tables,) = self._tables.values()
        self._device = tables.cos.device  # torch.load may have moved them
        whole = tables._replace(first_cos=self._first(tables.cos), first_sin=self._first(tables.sin))
        self._tables = {self._device: whole}


class RotaryEmbedding(_FloatTables):
    """Rotate queries and keys by their positions, with tables that grow with the longest sequence so far.

    The same in PyTorch, for the default scaling and `layout="bthd"`::

        angles = torch.arange(T).double()[:, None] * inv_freq  # (T, R/2)
        q, k = apply_rope(q, k, angles.cos().float(), angles.sin().float())

    The tables stay float32 under `.half()`, `.bfloat16()` and `.to(dtype)`, and move with the model to a device. They
    are neither buffers nor in the state_dict, so that DDP sends none, and averaged or loaded models have their own. A
    call on another device makes its own. Share one module among all layers of a model: its tables take 4·R bytes per
    position.

    Growth: if a call needs more rows than the tables have, they are computed again with at least twice as many. The
    host can tell where `positions` is None, an int, or a tensor on the CPU (for packed sequences: `cu_seqlens` on the
    CPU; `offsets` likewise).
    It never waits for positions on a GPU, nor for a tensor's values inside `torch.compile`: there the token of a
    position past max_positions, and past what `reserve` asked for, becomes NaN. Each growth, or change of frequencies,
    recompiles a compiled caller; lengths within the tables do not.

    A rotation depends on its call alone, and on `reserve`: not on the calls before it, so that a checkpoint recomputes
    it. Scalings whose frequencies depend on the length go by the largest position of the call plus one: "longrope" has
    its long factors past original_max_position_embeddings, and its short ones up to it; "dynamic" has the frequencies
    of that length, or of max_position_embeddings or the reserved length if that is greater. Where the host cannot tell
    the length, they go by the reserved one, at first by those two parameters. (transformers keeps the frequencies of
    the longest call, until one is shorter than max_position_embeddings.)

    Args:
        dim: R, the number of rotated features; the rest of a longer head passes through.
        max_positions: rows to begin with, which all calls can read.
        base: the base of the frequencies (rope_theta).
        scaling: a name of `FREQUENCIES`.
        interleaved: pair features (2i, 2i + 1) rather than (i, i + R/2).
        pair_block: as of `apply_rope`: pairs half-split inside blocks of so many features.
        axes: (R/2,), the position axis of each pair, as `mrope_axes` makes it. A call then needs `positions` (A, B, T),
            (A, total) for "thd", with a row for each axis: text has equal rows.
        layout: "bthd", "bhtd" or "thd".
        impl: the implementation that `apply_rope` uses; None for its default.
        device: of the tables; None for torch's default device.
        parameters: of the scaling, by transformers' names (`inverse_frequencies`); not seq_len, which is taken from
            the calls.

    Attributes:
        inv_freq: (R/2,), radians per position, of the last call; float64, and always on the CPU.
        attention_factor: the factor of cos and sin.
        cos, sin: the tables of the last call, (rows, R/2), float32.
        axes: the argument, on the tables' device; or None.
        All are to be read alone: a write changes no call.

    Raises:
        ValueError, TypeError: as `inverse_frequencies`, `rope_table` and, in a call, `apply_rope`; each names the
            argument. ValueError for an unknown layout and for a negative max_positions too, TypeError for seq_len.

    Source: RoFormer (https://arxiv.org/abs/2104.09864).

    Example:
        >>> import torch
        >>> from ropewalk import RotaryEmbedding
        >>> rotary = RotaryEmbedding(64, scaling="linear", factor=2.0).bfloat16()
        >>> q, k = torch.randn(2, 16, 8, 64).bfloat16(), torch.randn(2, 16, 2, 64).bfloat16()
        >>> q, k = rotary(q, k)
        >>> q.shape, k.shape, rotary.cos.dtype
        (torch.Size([2, 16, 8, 64]), torch.Size([2, 16, 2, 64]), torch.float32)
        >>> next_q = rotary(torch.randn(2, 1, 8, 64), positions=16)  # or offsets=torch.tensor([16, 9])
    """

    def __init__(
        self,
        dim: int,
        *,
        max_positions: int = 2048,
        base: float = 10000.0,
        scaling: str = "default",
        interleaved: bool = False,
        pair_block: int | None = None,
        axes: Tensor | None = None,
        layout: str = "bthd",
        impl: str | None = None,
        device: torch.device | str | None = None,
        **parameters: Any,
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout is {layout!r}, but must be one of {', '.join(map(repr, LAYOUTS))}")
        if max_positions < 0:
            raise ValueError(f"max_positions is {max_positions}, but must not be negative")
        if "seq_len" in parameters:
            raise TypeError("seq_len must not be passed: it is taken from the calls, or from `reserve`")
        inv_freq, attention_factor = inverse_frequencies(scaling, dim, base, **parameters)
        order = None if axes is None else _check_axes(axes, dim)
        length_parameter = _ORIGINAL_LENGTH.get(scaling)
        original_length = None if length_parameter is None else parameters[length_parameter]
        super().__init__(max_positions, inv_freq, attention_factor, device, order, original_length)
        self.dim = dim
        self.base = base
        self.scaling = scaling
        self.interleaved = interleaved
        self.pair_block = pair_block
        self.layout = layout
        self.impl = impl
        self.parameters_of_scaling = parameters

    @classmethod
    def from_hf_config(cls, config: Any, *, layer_type: str | None = None, **overrides: Any) -> RotaryEmbedding:
        """Make the rotary embedding that a transformers config describes.

        It reads `rope_parameters` (transformers 5), or `rope_scaling`, `rope_theta` and `partial_rotary_factor`
        (before it; GPT-NeoX's `rotary_emb_base` and `rotary_pct` too), and `head_dim`, or hidden_size //
        num_attention_heads. The tables begin with max_position_embeddings rows. transformers itself is not imported.

        Args:
            config: the config; of a multimodal model, its text or its vision config. Multimodal RoPE's text configs and
                vision towers with rope_type "axial" give `axes` by `model_type` (docs/conventions.md has the families).
            layer_type: the layers whose parameters to read, if the config holds some for each type of layer; ignored
                if all layers share theirs.
            overrides: keywords of `RotaryEmbedding`, which prevail. None removes a keyword, such as a parameter that is
                in the config by accident; a `scaling` discards the config's scaling parameters. mrope_section=None is
                for one position a token.

        Raises:
            ValueError: a model_type with axes that are not known, a layer_type that is missing or unknown, layers of
                that type that have no rotary embedding, or a config without the sizes of a head; and as
                `RotaryEmbedding`.
            TypeError: a dict for a config, or a parameter in the config that its scaling does not have, or lacks.

        Example:
            >>> from types import SimpleNamespace
            >>> from ropewalk import RotaryEmbedding
            >>> rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
            >>> config = SimpleNamespace(head_dim=64, max_position_embeddings=512, rope_parameters=rope_parameters)
            >>> rotary = RotaryEmbedding.from_hf_config(config, layout="bhtd")
            >>> rotary.dim, rotary.base, rotary.cos.shape
            (64, 500000.0, torch.Size([512, 32]))
        """
        arguments = {**_read_hf_config(config, layer_type, overrides), **overrides}
        arguments.pop("mrope_section", None)  # read into axes
        return cls(**{name: value for name, value in arguments.items() if value is not None})

    def reserve(self, length: int) -> None:
        """Grow the tables for positions 0 … length − 1; they never shrink.

        For calls whose positions are on a GPU, and before a CUDA graph is captured. Where frequencies depend on the
        length, they then go by this one in calls whose length the host cannot tell, and "dynamic" in shorter ones too.
        """
        original = self._original_length
        if original is not None:
            self._scaled_length = max(length, original) if self.scaling == "dynamic" else self._scaled_by(length)
        self._first_rows, old_rows = max(length, self._first_rows), self._first_rows
        for device, tables in list(self._tables.items()):
            rows = tables.cos.shape[0]
            if length > old_rows or tables.scaled_length != self._scaled_length:
                rows = rows if length <= rows else max(length, 2 * rows)
                self._keep(self._tabulate(device, rows, self._scaled_length))

    def _frequencies_at(self, scaled_length: int | None) -> tuple[Tensor, float]:
        if scaled_length == self._original_length:
            return self._frequencies
        frequencies: tuple[Tensor, float] = FREQUENCIES[self.scaling](
            self.dim, self.base, seq_len=scaled_length, **self.parameters_of_scaling
        )
        return frequencies

    def forward(
        self,
        q: Tensor,
        k: Tensor | None = None,
        positions: Tensor | int | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        offsets: Tensor | None = None,
        norm: QKNorm | None = None,
    ) -> Any:
        """Rotate q and k as `apply_rope` does, with its shapes; return (q, k), or q alone where k is None.

        norm: normalise q and k in the same launch. Its weights are the caller's, such as those of each layer.
        """
        if self._order is not None:
            self._check_positions(positions)
        length = self._known_length(q, positions, cu_seqlens, offsets)
        scaled_length = self._scaled_length
        if length is not None and self._original_length is not None:
            scaled_length = self._scaled_by(length)
        tables = self._find(q.device, length, scaled_length)
        cos, sin = tables.first_cos, tables.first_sin
        if length is not None and length > self._first_rows:
            # As many as the call has tokens: a decode step's kind is then that of the step before.
            is_by_index = cu_seqlens is None and offsets is None and not isinstance(positions, (Tensor, bool))
            start = positions if is_by_index and isinstance(positions, int) and positions >= 0 else 0
            cos, sin = self._rows_between(tables, start, length)
            positions = positions if start == 0 else None
        return apply_rope(
            q,
            k,
            cos,
            sin,
            positions=positions,
            offsets=offsets,
            axes=tables.axes,
            cu_seqlens=cu_seqlens,
            layout=self.layout,
            interleaved=self.interleaved,
            pair_block=self.pair_block,
            norm=norm,
            impl=self.impl,
        )

    def _rows_between(self, tables: _Tables, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the rows of cos and sin from `start` to below `stop`; layer after layer asks for the same."""
        rows = self._last_rows
        if torch.compiler.is_compiling():
            return tables.cos[start:stop], tables.sin[start:stop]
        if rows is None or rows.tables is not tables or rows.start != start or rows.stop != stop:
            rows = _Rows(tables, start, stop, tables.cos[start:stop], tables.sin[start:stop])
            self._last_rows = rows
        return rows.cos, rows.sin

    def _check_positions(self, positions: Tensor | int | None) -> None:
        """Raise unless there is a position for each axis."""
        assert self._order is not None
        n_axes, sizes = max(self._order) + 1, ("A", "total") if self.layout == "thd" else ("A", "B", "T")
        if isinstance(positions, Tensor) and positions.ndim == len(sizes) and positions.shape[0] >= n_axes:
            return
        # No repr of a tensor: it reads the values, which waits for a GPU and which torch.compile does not trace.
        found = f"of shape {tuple(positions.shape)}" if isinstance(positions, Tensor) else repr(positions)
        raise ValueError(
            f"positions is {found}, but must be a tensor ({', '.join(sizes)}) with a row for each of {n_axes} axes: "
            f"text has equal rows"
        )

    def extra_repr(self) -> str:
        parameters = "".join(f", {name}={value!r}" for name, value in self.parameters_of_scaling.items())
        blocks = "" if self.pair_block is None else f", pair_block={self.pair_block}"
        axes = "" if self._order is None else f", axes={list(self._order)}"
        return (
            f"{self.dim}, base={self.base}, scaling={self.scaling!r}{parameters}, interleaved={self.interleaved}"
            f"{blocks}{axes}, layout={self.layout!r}, impl={self.impl!r}"
        )

    def _known_length(
        self, q: Tensor, positions: Tensor | int | None, cu_seqlens: Tensor | None, offsets: Tensor | None
    ) -> int | None:
        """Return one past the last position of a call, or None where the host cannot tell it, or apply_rope raises."""
        is_packed = self.layout == "thd"
        n_dims = (1 if is_packed else 2) + (self._order is not None)
        if q.ndim != len(self.layout) or (isinstance(positions, Tensor) and positions.ndim != n_dims):
            return None
        if offsets is not None and (is_packed or positions is not None or not isinstance(offsets, Tensor)):
            return None
        tokens: int = q.shape[self.layout.index("t")]
        for index in (positions, offsets, cu_seqlens):
            if isinstance(index, Tensor) and not is_readable(index):
                return None
        if cu_seqlens is not None:
            tokens = _largest(cu_seqlens.diff())
        if offsets is not None:
            return _largest(offsets) + tokens
        if positions is None:
            return tokens
        if isinstance(positions, Tensor):
            return _largest(positions) + 1
        return tokens + positions if isinstance(positions, int) else None

    def _scaled_by(self, length: int) -> int | None:
        """Return the length that the scaling of a call of this length goes by."""
        original, least = self._original_length, self._scaled_length
        if original is None or least is None:
            return None
        if self.scaling == "longrope":
            return original + 1 if length > original else original
        return max(length, least)


class TritonRotary(_FloatTables):
    """Rotate q and k by −θ, with the frequencies of `half_truncated`: half of the pairs do not rotate.

    The same in PyTorch::

        angles = torch.arange(T).double()[:, None] * inv_freq  # (T, D/2)
        cos, sin = angles.cos().float(), angles.sin().float()
        x1, x2 = x.float().chunk(2, dim=-1)
        y = torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).to(x.dtype)

    Out of place, differentiable, on any device: the name is that of the class it replaces.

    Args:
        dim: D, the head dim, a multiple of 4. All of it is rotated, as half-split pairs (i, i + D/2).
        max_seq_len: rows of the tables; they do not grow.

    Attributes:
        dim: D.
        max_seq_len: the argument.
        cos, sin: the tables, (max_seq_len, D/2), float32, neither buffers nor in the state_dict.

    Raises:
        ValueError: a dim that is not a positive multiple of 4, a negative max_seq_len, or in a call more than
            max_seq_len tokens, another head dim, or k of another batch, length or device than q.
        TypeError: in a call a dtype that is not floating point.

    Source: the rotary class of the modded-nanogpt speedruns (https://github.com/KellerJordan/modded-nanogpt).

    Example:
        >>> import torch
        >>> from ropewalk import TritonRotary
        >>> rotary = TritonRotary(64, max_seq_len=128)
        >>> q, k = rotary(torch.randn(2, 8, 100, 64), torch.randn(2, 8, 100, 64))
        >>> q.shape
        torch.Size([2, 8, 100, 64])
    """

    def __init__(self, dim: int, max_seq_len: int) -> None:
        if max_seq_len < 0:
            raise ValueError(f"max_seq_len is {max_seq_len}, but must not be negative")
        inv_freq, attention_factor = inverse_frequencies("half_truncated", dim, 10000.0)
        super().__init__(max_seq_len, inv_freq, attention_factor, device=None)
        self.dim = dim
        self.max_seq_len = max_seq_len

    def forward(self, q: Tensor, k: Tensor) -> Any:
        """Rotate q and k, both (B, H, T, D); return the two."""
        max_seq_len = self.max_seq_len
        for name, x in (("q", q), ("k", k)):
            if x.ndim != 4 or x.shape[-1] != self.dim:
                raise ValueError(f"{name} has shape {tuple(x.shape)}, but must be (B, H, T, D) with D = {self.dim}")
            if x.shape[2] > max_seq_len:
                raise ValueError(f"{name} has {x.shape[2]} tokens, but must have at most max_seq_len, {max_seq_len}")
        tables = self._find(q.device, None, None)
        return apply_rope(q, k, tables.cos, tables.sin, layout="bhtd", inverse=True)


def sinusoids(rotary: RotaryEmbedding, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and the sines of the first positions, (tokens, R/2), on a device."""
    tables = rotary._find(device, tokens, None)
    return tables.cos[:tokens], tables.sin[:tokens]


def _check_axes(axes: Tensor, dim: int) -> tuple[int, ...]:
    """Return the axis of each pair, or raise."""
    if not isinstance(axes, Tensor) or axes.dtype not in (torch.int32, torch.int64):
        kind = f"a tensor of {axes.dtype}" if isinstance(axes, Tensor) else type(axes).__name__
        raise TypeError(f"axes is {kind}, but must be a tensor of int32 or int64")
    if axes.shape != (dim // 2,):
        raise ValueError(f"axes has shape {tuple(axes.shape)}, but must be (R/2,) = ({dim // 2},)")
    if axes.is_meta:
        raise ValueError("axes is on the meta device, but must hold values: make it with device='cpu'")
    order: tuple[int, ...] = tuple(axes.tolist())
    if min(order) < 0:
        raise ValueError(f"axes holds {min(order)}, but must hold no number below 0")
    return order


def _largest(values: Tensor) -> int:
    return int(values.max()) if values.numel() else 0


def _read_hf_config(config: Any, layer_type: str | None, overrides: dict[str, Any]) -> dict[str, Any]:
    """Read the keywords of `RotaryEmbedding` from a transformers config."""
    if isinstance(config, dict):
        raise TypeError("config is a dict, but must have attributes: pass model.config, or SimpleNamespace(**config)")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # An attribute of the whole config does not hold for one type of layer.
    original_length = getattr(config, "original_max_position_embeddings", None)
    if any(isinstance(value, dict) for value in rope.values()):
        if layer_type is None or rope.get(layer_type) is None:
            names = ", ".join(repr(name) for name, value in rope.items() if value is not None)
            raise ValueError(
                f"layer_type is {layer_type!r}, but this config holds parameters for each type of layer, so it must be "
                f"one of {names}"
            )
        rope = rope[layer_type]
        original_length = None
        if hasattr(config, "per_layer_config"):  # in which head_dim, too, depends on the layer
            # The keys of rope_parameters need not be types of layers, and layers of a type may differ otherwise.
            with contextlib.suppress(KeyError, ValueError):
                config = config.per_layer_config[layer_type]
    rope = {name: value for name, value in rope.items() if value is not None}

    max_length = getattr(config, "max_position_embeddings", None)
    base = _first_value(rope.pop("rope_theta", None), config, ("rope_theta", "rotary_emb_base"), 10000.0)
    partial = _first_value(
        rope.pop("partial_rotary_factor", None), config, ("partial_rotary_factor", "rotary_pct"), 1.0
    )
    old_name = rope.pop("type", "default")
    scaling = rope.pop("rope_type", old_name)
    scaling = "default" if scaling == "mrope" else scaling  # Qwen2-VL's first configs
    if "mrope_section" in overrides:
        rope["mrope_section"] = overrides["mrope_section"]
    family = read_family(config, rope, scaling, one_axis="mrope_section" in overrides and not rope["mrope_section"])
    scaling = family.get("scaling", scaling)
    if overrides.get("scaling") is not None:
        scaling, rope = overrides["scaling"], {}
    accepted = frequency_parameters(scaling)
    if "max_position_embeddings" in accepted:
        rope.setdefault("max_position_embeddings", max_length)
    if "original_max_position_embeddings" in accepted:
        rope["original_max_position_embeddings"] = (
            original_length or rope.get("original_max_position_embeddings") or max_length
        )
    if "partial_rotary_factor" in accepted:
        rope["partial_rotary_factor"], partial = partial, 1.0
    # transformers does not read another scaling's parameters; one that no scaling has may change the rotation.
    rope = {name: value for name, value in rope.items() if name in accepted or name not in _PARAMETERS}
    beta = rope.pop(_BETA, None)
    if beta and _BETA not in overrides:
        raise TypeError(
            f"config's rope parameters hold {_BETA}, {beta!r}, but RotaryEmbedding does not scale: the beta multiplies "
            f"q by 1 + {beta!r} · ln(1 + position // original_max_position_embeddings); do that to q, and pass "
            f"{_BETA}=None to read the rest"
        )
    dim = overrides.get("dim")
    if dim is None:
        head_dim = getattr(config, "head_dim", None)
        if not head_dim:
            hidden_size, heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
            if scaling == "axial":
                hidden_size, heads = _size_of_tower(config, hidden_size, heads)
            if not hidden_size or not heads:
                raise ValueError(
                    f"config ({type(config).__name__}) has no head_dim, and hidden_size and num_attention_heads are "
                    f"{hidden_size} and {heads}: head_dim or both must be there, or pass dim="
                )
            head_dim = hidden_size // heads
        dim = int(head_dim * partial)
    tower = family.pop("tower", None)
    if tower is not None:
        family |= arrange_tower(tower, dim)
    return {**rope, "dim": dim, "base": base, "scaling": scaling, "max_positions": max_length, **family}


_PARAMETERS = {parameter for name in FREQUENCIES for parameter in frequency_parameters(name)}
_BETA = "llama_4_scaling_beta"


def _size_of_tower(config: Any, hidden_size: Any, heads: Any) -> tuple[Any, Any]:
    """Return the width and the heads of a vision tower, whose names differ from model to model."""
    names = ("memory_attention_hidden_size", "memory_attention_num_attention_heads", "memory_attention_downsample_rate")
    width, number, rate = (getattr(config, name, None) for name in names)
    if width and number and rate:  # SAM 2's attention to memories
        return width // rate, number
    # Qwen2-VL's tower has the width of its language model as hidden_size.
    return getattr(config, "embed_dim", None) or hidden_size, getattr(config, "num_heads", None) or heads


def _first_value(value: Any, config: Any, names: tuple[str, str], otherwise: float) -> Any:
    values = (value, *(getattr(config, name, None) for name in names), otherwise)
    return next(value for value in values if value is not None)

"""The argument `precision` of `attention`: products whose operands are quantised to 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.ops.attention.call import Precision

VALUES = ("16-bit", "float8")


@dataclass(frozen=True, kw_only=True)
class QuantizedProducts:
    """Attention whose products are of 8-bit numbers: QKᵀ of int8, PV of 16 bits or of e4m3.

    `attention(…, precision=QuantizedProducts())` is `precision="int8"`, and `QuantizedProducts(values="float8")` is
    `"int8-fp8"`. The same in PyTorch, for queries (Tq, D) and keys (Tk, D) with their features mapped, in float32::

        shift = keys[:128].mean(0)  # where attention is causal; else a mean of up to 256 keys, evenly spaced
        group = torch.arange(Tk) // 128 * 4 + torch.arange(Tk) % 8 // 2  # 32 keys share a unit
        x_q, x_k = queries @ hadamard, (keys - shift) @ hadamard  # orthogonal: the scores are the same
        unit_q = x_q.abs().amax(1) / 127  # of each query and head
        unit_k = torch.zeros(Tk).scatter_reduce(0, group, x_k.abs().amax(1), "amax")[group] / 127
        q_int8, k_int8 = (x_q / unit_q[:, None]).round(), (x_k / unit_k[:, None]).round()
        scores = scale * (q_int8 @ k_int8.T * unit_q[:, None] * unit_k + (queries @ shift)[:, None])

    Values in float8 are divided by a unit of each block of 128 and key head, its largest magnitude / 448, after a mean
    was taken off, that of the rows of `shift`. Units are at least 2**-40. A block's units depend on its own keys alone,
    and in causal attention the shift does on the first 128: later keys change no bit of earlier rows. Padding enters no
    unit. A key that is NaN or infinite makes its unit NaN, and so does a value: every row that attends one that shares
    it is NaN. The log-sum-exp and the largest logits are those of these scores.

    Args:
        values: "16-bit", or "float8" for probabilities and values in e4m3.
        hadamard: multiply features by a Hadamard matrix of the largest power of two that divides D: it spreads channels
            of large magnitude over all others.
        centre: take a mean off keys, and off values in float8. It changes roundings alone.
        backward: None refuses calls that need a gradient. "16-bit" computes it by products in 16 bits, of q, k and v
            and of the output and the log-sum-exp of 8-bit products; it cannot be differentiated again.

    Raises:
        TypeError: a `hadamard` or `centre` that is no bool.
        ValueError: other `values`, or another `backward`.

    Source: SageAttention2 (https://arxiv.org/abs/2411.10958) for integers and shifted keys; FlashAttention-3
    (https://arxiv.org/abs/2407.08608), §3.3, for the Hadamard transform and e4m3.

    Example:
        >>> import torch
        >>> from ropewalk import QuantizedProducts, Rope, attention
        >>> q, k, v = torch.randn(3, 1, 256, 4, 64)
        >>> exact = attention(q, k, v, position=Rope(), causal=True)
        >>> precision = QuantizedProducts(values="float8", hadamard=False)
        >>> out = attention(q, k, v, position=Rope(), causal=True, precision=precision)
        >>> bool((out - exact).norm() < 0.05 * exact.norm())
        True
    """

    values: str = "16-bit"
    hadamard: bool = True
    centre: bool = True
    backward: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.values, str) or self.values not in VALUES:
            raise ValueError(f"values is {self.values!r}, but must be '16-bit' or 'float8'")
        for name in ("hadamard", "centre"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}, but must be True or False")
        if self.backward is not None and not (isinstance(self.backward, str) and self.backward == "16-bit"):
            raise ValueError(f"backward is {self.backward!r}, but must be None or '16-bit'")


NAMES = {"int8": QuantizedProducts(), "int8-fp8": QuantizedProducts(values="float8")}


def as_products(precision: str | QuantizedProducts | None) -> QuantizedProducts | None:
    """Return what an argument `precision` stands for, or raise."""
    if precision is None or isinstance(precision, QuantizedProducts):
        return precision
    if not isinstance(precision, str):
        raise TypeError(
            f"precision is {type(precision).__name__}, but must be None, {_names()} or a ropewalk.QuantizedProducts"
        )
    if precision not in NAMES:
        raise ValueError(f"precision is {precision!r}, but must be None, {_names()} or a ropewalk.QuantizedProducts")
    return NAMES[precision]


def _names() -> str:
    return ", ".join(map(repr, NAMES))


def precision_of(products: QuantizedProducts | None) -> str | None:
    """Return what backends read of 8-bit products: a `Precision` as text."""
    if products is None:
        return None
    return Precision(products.values == "float8", products.hadamard, products.centre).as_text()

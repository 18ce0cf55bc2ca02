"""Frequencies of the pairs of features, and the tables of their cosines and sines.

Pair i of R/2 rotates by ω_i radians per position. The variants differ in ω, and in a factor on the rotated features
(the attention factor, 1 for most). R is the rotary dim. All arithmetic is in float64, on the CPU.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 20  # of a table computed at a time: 8 MiB for each float64 temporary


def default(rotary_dim: int, base: float) -> tuple[Tensor, float]:
    """Compute ω_i = base^(−2i/R). Source: RoFormer (https://arxiv.org/abs/2104.09864), §3.2.2."""
    _check_dim_and_base(rotary_dim, base)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    return float(base) ** -exponents, 1.0


def linear(rotary_dim: int, base: float, *, factor: float) -> tuple[Tensor, float]:
    """Divide every ω by `factor`. Source: position interpolation (https://arxiv.org/abs/2306.15595), equation 4."""
    _check_positive("factor", factor)
    return default(rotary_dim, base)[0] / factor, 1.0


def ntk(rotary_dim: int, base: float, *, factor: float) -> tuple[Tensor, float]:
    """Compute the default with base·factor^(R/(R−2)): the slowest ω is divided by `factor`, the fastest unchanged.

    Source: u/bloc97, “NTK-aware scaled RoPE” (reddit, r/LocalLLaMA, June 2023); YaRN
    (https://arxiv.org/abs/2309.00071), definition 1.
    """
    _check_dim_and_base(rotary_dim, base)
    _check_at_least("rotary_dim", rotary_dim, 4)
    _check_positive("factor", factor)
    return default(rotary_dim, base * factor ** (rotary_dim / (rotary_dim - 2)))


def dynamic(
    rotary_dim: int, base: float, *, factor: float, max_position_embeddings: int, seq_len: int | None = None
) -> tuple[Tensor, float]:
    """Compute `ntk` with a factor that grows with the length: factor·L/max_position_embeddings − (factor − 1).

    L is `seq_len`, and at least max_position_embeddings, where the factor is 1.
    Source: u/emozilla, “dynamically scaled RoPE” (reddit, r/LocalLLaMA, June 2023); YaRN, §3.3, for the idea.
    """
    _check_positive("factor", factor)
    _check_at_least("max_position_embeddings", max_position_embeddings, 1)
    length = max(seq_len or 0, max_position_embeddings)
    return ntk(rotary_dim, base, factor=factor * length / max_position_embeddings - (factor - 1))


def yarn(
    rotary_dim: int,
    base: float,
    *,
    original_max_position_embeddings: int,
    factor: float | None = None,
    max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> tuple[Tensor, float]:
    """Divide the slow pairs' ω by `factor`, leave the fast pairs alone, with a ramp between (YaRN).

    The ramp runs from the pair with `beta_fast` revolutions in the original length to the one with `beta_slow`;
    `truncate` rounds its ends outwards to whole pairs. Without a `factor` it is max_position_embeddings /
    original_max_position_embeddings. The attention factor is 0.1·ln(factor) + 1; with mscale and mscale_all_dim
    (DeepSeek's) it is (0.1·mscale·ln(factor) + 1) / (0.1·mscale_all_dim·ln(factor) + 1).
    Source: YaRN (https://arxiv.org/abs/2309.00071), §3.2 to §3.4.
    """
    omega, _ = default(rotary_dim, base)
    if not base > 1:
        raise ValueError(f"base is {base!r}, but for 'yarn' it must be greater than 1")
    _check_at_least("original_max_position_embeddings", original_max_position_embeddings, 1)
    factor = _factor_or_ratio(factor, max_position_embeddings, original_max_position_embeddings)
    _check_positive("factor", factor)
    _check_positive("beta_fast", beta_fast)
    _check_positive("beta_slow", beta_slow)
    if attention_factor is None:
        numerator, denominator = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1.0, 0.0)
        log_factor = 0.1 * math.log(max(factor, 1))
        attention_factor = (numerator * log_factor + 1) / (denominator * log_factor + 1)
    _check_finite("attention_factor", attention_factor)

    def pair_with(revolutions: float) -> float:
        period = original_max_position_embeddings / (2 * math.pi * revolutions)
        return rotary_dim * math.log(period) / (2 * math.log(base))

    start, end = pair_with(beta_fast), pair_with(beta_slow)
    if truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, rotary_dim - 1)
    if start == end:
        end += 0.001  # a ramp of no length is a step
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
    slowed = ((pairs - start) / (end - start)).clamp(0, 1)
    return omega * (1 - slowed) + omega / factor * slowed, float(attention_factor)


def longrope(
    rotary_dim: int,
    base: float,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    factor: float | None = None,
    max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
    seq_len: int | None = None,
) -> tuple[Tensor, float]:
    """Divide each ω by its own searched factor: `long_factor` past the original length, `short_factor` up to it.

    Both have R/2 values. The length is `seq_len` (None: short). The attention factor is
    sqrt(1 + ln(factor)/ln(original_max_position_embeddings)), where `factor`, if it is None, is
    max_position_embeddings / original_max_position_embeddings.
    Source: LongRoPE (https://arxiv.org/abs/2402.13753), §3, and its use in Phi-3.
    """
    omega, _ = default(rotary_dim, base)
    for name, values in (("short_factor", short_factor), ("long_factor", long_factor)):
        if len(values) != rotary_dim // 2:
            raise ValueError(
                f"{name} has {len(values)} values, but must have one for each pair, {rotary_dim // 2} for rotary_dim "
                f"{rotary_dim}"
            )
        if not min(values) > 0:
            raise ValueError(f"{name} holds {min(values)!r}, but all of its values must be greater than 0")
    _check_at_least("original_max_position_embeddings", original_max_position_embeddings, 2)
    if factor is not None:
        _check_positive("factor", factor)
    if attention_factor is None:
        ratio = _factor_or_ratio(factor, max_position_embeddings, original_max_position_embeddings)
        attention_factor = math.sqrt(1 + math.log(max(ratio, 1)) / math.log(original_max_position_embeddings))
    _check_finite("attention_factor", attention_factor)
    is_long = seq_len is not None and seq_len > original_max_position_embeddings
    divisors = torch.tensor(long_factor if is_long else short_factor, dtype=torch.float64, device="cpu")
    return omega / divisors, float(attention_factor)


def llama3(
    rotary_dim: int,
    base: float,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> tuple[Tensor, float]:
    """Divide ω by `factor` for pairs with fewer than `low_freq_factor` revolutions in the original length.

    Pairs with more than `high_freq_factor` revolutions are left alone; between the two ω is mixed linearly. A
    `high_freq_factor` that is not above `low_freq_factor` makes a step at the latter, as Llama 4 Scout's does.
    Source: Llama 3 (https://arxiv.org/abs/2407.21783), §3.4.2 for the idea, and the Llama 3.1 reference code.
    """
    omega, _ = default(rotary_dim, base)
    _check_positive("factor", factor)
    _check_at_least("original_max_position_embeddings", original_max_position_embeddings, 1)
    _check_positive("low_freq_factor", low_freq_factor)
    _check_positive("high_freq_factor", high_freq_factor)
    revolutions = original_max_position_embeddings * omega / (2 * math.pi)
    if high_freq_factor > low_freq_factor:
        fast = ((revolutions - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    else:
        fast = (revolutions > low_freq_factor).double()
    return omega * fast + omega / factor * (1 - fast), 1.0


def proportional(
    rotary_dim: int, base: float, *, partial_rotary_factor: float = 1.0, factor: float = 1.0
) -> tuple[Tensor, float]:
    """Divide the default by `factor`, for the first partial_rotary_factor of the pairs; the others do not rotate.

    Unlike a smaller rotary dim, this pairs features across the whole head, and takes the exponents from all of R.
    Source: transformers' “proportional” rope type, for Gemma.
    """
    _check_positive("factor", factor)
    if not 0 <= partial_rotary_factor <= 1:
        raise ValueError(f"partial_rotary_factor is {partial_rotary_factor!r}, but must be in 0 … 1")
    omega, _ = default(rotary_dim, base)
    omega[int(partial_rotary_factor * rotary_dim // 2) :] = 0
    return omega / factor, 1.0


def half_truncated(rotary_dim: int, base: float) -> tuple[Tensor, float]:
    """Compute R/4 frequencies base^(−linspace(0, 1, R/4)), both ends included; the other R/4 pairs do not rotate.

    Source: the modded-nanogpt speedruns (https://github.com/KellerJordan/modded-nanogpt); `TritonRotary` uses it.
    """
    _check_dim_and_base(rotary_dim, base)
    if rotary_dim % 4:
        raise ValueError(f"rotary_dim is {rotary_dim!r}, but for 'half_truncated' it must be a multiple of 4")
    rotating = float(base) ** -torch.linspace(0, 1, rotary_dim // 4, dtype=torch.float64, device="cpu")
    return torch.cat((rotating, torch.zeros_like(rotating))), 1.0


def axial(
    rotary_dim: int, base: float, *, n_axes: int = 2, dealt: bool = False, alternating: bool = False
) -> tuple[Tensor, float]:
    """Compute the default of R/n_axes features once for each position axis, as vision towers do for rows and columns.

    `dealt` gives the default of all R features to the axes in turn, as Pixtral does. With `alternating`, neighbouring
    pairs belong to different axes, as Kimi's do, rather than to one axis after another.
    Source: transformers' rope_type "axial"; Qwen2-VL (https://arxiv.org/abs/2409.12191), §2.1.
    """
    _check_dim_and_base(rotary_dim, base)
    _check_at_least("n_axes", n_axes, 1)
    if rotary_dim % (2 * n_axes):
        raise ValueError(f"rotary_dim is {rotary_dim!r}, but for 'axial' it must be a multiple of {2 * n_axes}")
    if dealt and alternating:
        raise ValueError("dealt and alternating are both True, but at most one of them may be")
    if alternating:
        return default(rotary_dim // n_axes, base)[0].repeat_interleave(n_axes), 1.0
    if dealt:
        return default(rotary_dim, base)[0].view(-1, n_axes).T.flatten(), 1.0
    return default(rotary_dim // n_axes, base)[0].repeat(n_axes), 1.0


FREQUENCIES: dict[str, Callable[..., tuple[Tensor, float]]] = {
    "default": default,
    "linear": linear,
    "ntk": ntk,
    "dynamic": dynamic,
    "yarn": yarn,
    "longrope": longrope,
    "llama3": llama3,
    "proportional": proportional,
    "half_truncated": half_truncated,
    "axial": axial,
}


def inverse_frequencies(name: str, rotary_dim: int, base: float, **parameters: object) -> tuple[Tensor, float]:
    """Compute the angle of each pair per position, for a scaling variant.

    The same in PyTorch, for "default"::

        inv_freq = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
        attention_factor = 1.0

    Every variant equals what transformers computes for the same parameters, to float32 rounding: transformers
    computes in float32, this in float64. The parameters have the names that they have in a transformers config.

    Args:
        name: a key of `FREQUENCIES`: default, linear, ntk, dynamic, yarn, longrope, llama3, proportional,
            half_truncated, axial. The docstring of `FREQUENCIES[name]` describes the variant.
        rotary_dim: R, the number of rotated features, even.
        base: of the geometric series of frequencies (θ, rope_theta), greater than 0.
        parameters: those of the variant, such as `factor` or `original_max_position_embeddings`.

    Returns:
        (inv_freq, attention_factor): a float64 CPU tensor of R/2 values, in radians per position, and the factor that
        multiplies cos and sin.

    Raises:
        ValueError: a name that is not in `FREQUENCIES`, or a value out of its range.
        TypeError: a parameter that the variant does not have, or lacks.

    Source: RoFormer (https://arxiv.org/abs/2104.09864); each variant's docstring names its own.

    Example:
        >>> from ropewalk import inverse_frequencies
        >>> inverse_frequencies("linear", 8, 10000.0, factor=2.0)
        (tensor([0.5000, 0.0500, 0.0050, 0.0005], dtype=torch.float64), 1.0)
    """
    accepted = frequency_parameters(name)
    for parameter in parameters:
        if parameter not in accepted:
            names = ", ".join(accepted) or "none"
            raise TypeError(f"{parameter} is not a parameter of {name!r}; its parameters are: {names}")
    for parameter, required in accepted.items():
        if required and parameter not in parameters:
            raise TypeError(f"{parameter} was not passed, but is a required parameter of {name!r}")
    return FREQUENCIES[name](rotary_dim, base, **parameters)


def frequency_parameters(name: str) -> dict[str, bool]:
    """Return the parameters of a variant, and whether each is required."""
    if name not in FREQUENCIES:
        raise ValueError(f"the frequency scaling is {name!r}, but must be one of {', '.join(map(repr, FREQUENCIES))}")
    parameters = inspect.signature(FREQUENCIES[name]).parameters.values()
    return {p.name: p.default is p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}


def rope_table(
    length_or_positions: int | Tensor,
    inv_freq: Tensor,
    *,
    attention_factor: float = 1.0,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Tabulate the cosine and sine of every position's angles, rounded once, to float32.

    The same in PyTorch::

        angles = positions[..., None].double() * inv_freq.double()
        cos, sin = (attention_factor * angles.cos()).float(), (attention_factor * angles.sin()).float()

    Angles are taken in float64: a float32 product is off by 7.6e-3 at position 128k, and by 0.76 at 10M. The
    tables are computed by blocks, so that beside them a few float64 temporaries of 8 MiB exist at most. A device
    without float64 (mps) gets its tables from the CPU. Nothing here is differentiated.

    Args:
        length_or_positions: an int n, for positions 0 … n − 1; or a tensor of positions, integers or float64, of any
            shape.
        inv_freq: (R/2,), radians per position, floating point; float64 if the last bits of the angles matter.
        attention_factor: multiplies cos and sin.
        device: of the tables; by default the positions' device, or inv_freq's for a length.

    Returns:
        (cos, sin), float32, (n, R/2) or positions.shape + (R/2,).

    Raises:
        TypeError: positions or inv_freq of another kind.
        ValueError: a negative length, an inv_freq that is not 1-D, or a CUDA device that this machine lacks.

    Source: RoFormer (https://arxiv.org/abs/2104.09864), equation 34.

    Example:
        >>> import torch
        >>> from ropewalk import inverse_frequencies, rope_table
        >>> inv_freq, attention_factor = inverse_frequencies("default", 64, 10000.0)
        >>> cos, sin = rope_table(128, inv_freq, attention_factor=attention_factor)
        >>> cos.shape, sin.dtype
        (torch.Size([128, 32]), torch.float32)
        >>> rope_table(torch.tensor([[7, 16_000_000]]), inv_freq)[0].shape
        torch.Size([1, 2, 32])
    """
    if not isinstance(inv_freq, Tensor) or not inv_freq.is_floating_point():
        raise TypeError(f"inv_freq is {_kind(inv_freq)}, but must be a floating-point tensor")
    if inv_freq.ndim != 1:
        raise ValueError(f"inv_freq has shape {tuple(inv_freq.shape)}, but must be 1-D, (R/2,)")
    if isinstance(length_or_positions, Tensor):
        positions = length_or_positions
        fractional = positions.is_floating_point() and positions.dtype is not torch.float64
        if fractional or positions.is_complex() or positions.dtype is torch.bool:
            raise TypeError(f"positions is {_kind(positions)}, but must be a tensor of integers, or of float64")
        device = _check_device(positions.device if device is None else device)
    elif isinstance(length_or_positions, (int, torch.SymInt)):
        if length_or_positions < 0:
            raise ValueError(f"the length is {length_or_positions}, but must not be negative")
        device = _check_device(inv_freq.device if device is None else device)
        positions = torch.arange(length_or_positions, device=device)
    else:
        raise TypeError(f"the length is {_kind(length_or_positions)}, but must be an int or a tensor of positions")

    compute_device = torch.device("cpu") if device.type == "mps" else device
    omega = inv_freq.detach().to(compute_device).to(torch.float64)
    flat = positions.reshape(-1).to(compute_device)
    pairs = omega.numel()
    if torch.compiler.is_compiling() or flat.numel() * pairs <= BLOCK_ELEMENTS:
        # Compiled code holds no temporaries, and would unroll the loop again for each length.
        cos, sin = _tabulate(flat, omega, attention_factor)
    else:
        cos = torch.empty(flat.numel(), pairs, dtype=torch.float32, device=compute_device)
        sin = torch.empty_like(cos)
        rows = max(1, BLOCK_ELEMENTS // max(1, pairs))
        for start in range(0, flat.numel(), rows):
            block = slice(start, start + rows)
            cos[block], sin[block] = _tabulate(flat[block], omega, attention_factor)
    shape = (*positions.shape, pairs)
    return cos.reshape(shape).to(device), sin.reshape(shape).to(device)


def mrope_axes(sections: Sequence[int], interleaved: bool = False) -> Tensor:
    """Return the position axis of each pair in multimodal RoPE (M-RoPE), for `apply_rope(…, axes=…)`.

    The same in PyTorch, without interleaving::

        torch.arange(len(sections)).repeat_interleave(torch.tensor(sections))

    Args:
        sections: the pairs of each axis, such as time, height and width; their sum is R/2. A model's config calls them
            mrope_section.
        interleaved: whether axes alternate from pair to pair (Qwen3-VL) rather than come in blocks (Qwen2-VL). Of three
            axes, pair p then has axis p mod 3 while p < 3 · sections[p mod 3], else axis 0.

    Returns:
        (R/2,), int64, on the CPU.

    Raises:
        TypeError: sections that are no sequence of ints.
        ValueError: no sections, negative ones, or other than three to interleave.

    Source: Qwen2-VL (https://arxiv.org/abs/2409.12191), §2.1; transformers' Qwen3-VL for interleaved axes.

    Example:
        >>> from ropewalk import mrope_axes
        >>> mrope_axes([2, 3])
        tensor([0, 0, 1, 1, 1])
        >>> mrope_axes([2, 1, 1], interleaved=True)
        tensor([0, 1, 2, 0])
    """
    if not isinstance(sections, Sequence):
        raise TypeError(f"sections is {type(sections).__name__}, but must be a sequence of ints")
    for section in sections:
        if not isinstance(section, int) or isinstance(section, bool):
            raise TypeError(f"sections holds {section!r}, but must hold ints")
        if section < 0:
            raise ValueError(f"sections holds {section}, but must hold no number below 0")
    if not sections:
        raise ValueError("sections is empty, but must hold the pairs of at least one axis")
    if not interleaved:
        return torch.repeat_interleave(torch.arange(len(sections), device="cpu"), torch.tensor(sections, device="cpu"))
    if len(sections) != 3:
        raise ValueError(f"sections holds {len(sections)} numbers, but must hold 3 where interleaved is True")
    axes = [p % 3 if p < 3 * sections[p % 3] else 0 for p in range(sum(sections))]
    return torch.tensor(axes, dtype=torch.int64, device="cpu")


def _check_device(device: torch.device | str) -> torch.device:
    """Return the device, or raise if it is a GPU that PyTorch cannot use here."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        reason = "finds no GPU" if torch.version.cuda or torch.version.hip else "is built without CUDA"
        raise ValueError(f"device is {str(device)!r}, but must be one of this machine: PyTorch {reason}")
    return device


def _tabulate(positions: Tensor, omega: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    angles = positions[:, None].to(torch.float64) * omega
    return (angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float()


def _check_dim_and_base(rotary_dim: int, base: float) -> None:
    if not isinstance(rotary_dim, int) or rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim is {rotary_dim!r}, but must be a positive even integer")
    if not base > 0:
        raise ValueError(f"base is {base!r}, but must be greater than 0")


def _check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:  # not `<`: a NaN must not pass
        raise ValueError(f"{name} is {value!r}, but must be at least {least}")


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value!r}, but must be greater than 0")


def _check_finite(name: str, value: float) -> None:
    if not abs(value) < math.inf:
        raise ValueError(f"{name} is {value!r}, but must be finite")


def _factor_or_ratio(factor: float | None, max_position_embeddings: int | None, original: int) -> float:
    if factor is not None:
        return factor
    if max_position_embeddings is None:
        raise TypeError("factor was not passed, so max_position_embeddings must be: their ratio is the factor")
    return max_position_embeddings / original


def _kind(value: object) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__

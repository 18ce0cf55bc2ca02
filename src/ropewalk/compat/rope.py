"""The rotation with fixed signatures: (B, T, H, D) tensors, interleaved pairs, +θ.

Shape letters: B batch, T tokens, H heads, D head dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.tracing import is_plain_eager, is_transformed


def rope_triton(q: Tensor, k: Tensor, seq_len: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Rotate q and k by each token's index, with the Triton kernel.

    The same in PyTorch: `rope_pytorch(q, k, seq_len, theta)`.

    Out of place and differentiable. The tables of cosines and sines are cached between calls; the first call with a
    new head dim, theta, device or much greater length makes them and waits for the device, so make it before a CUDA
    graph is captured.

    Args:
        q: (B, T, H, D) on a GPU, D even; float16, bfloat16, float32 or float64.
        k: the same shape and dtype; it may have fewer heads.
        seq_len: T, which must be q's.
        theta: base of the frequencies: pair i rotates by theta^(−2i/D) radians per token.

    Returns:
        (q, k) rotated, of the same shapes and dtypes.

    Raises:
        ValueError: "Inputs must be on CUDA device", "Q and K must have same shape", "Head dimension must be even", a
            seq_len that is not T, tensors that are not 4-D, or a GPU that Triton does not support.
        TypeError: another dtype.

    Source: RoFormer (https://arxiv.org/abs/2104.09864), equation 34.

    Example:
        >>> import torch
        >>> from ropewalk import rope_triton
        >>> if torch.cuda.is_available():
        ...     q, k = torch.randn(2, 128, 8, 64, device="cuda"), torch.randn(2, 128, 2, 64, device="cuda")
        ...     q, k = rope_triton(q, k, 128)
    """
    for name, x in (("q", q), ("k", k)):
        if x.device.type != "cuda":
            raise ValueError(f"Inputs must be on CUDA device, but {name} is on {x.device}")
    return _rotate_by_index(q, k, seq_len, theta, "triton")


def rope_pytorch(q: Tensor, k: Tensor, seq_len: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Rotate q and k by each token's index, in plain PyTorch on any device.

    The same in PyTorch::

        freqs_cis = precompute_freqs_cis(D, T, theta, device=q.device)  # (T, D/2)

        def rotate(x):
            pairs = torch.view_as_complex(x.float().unflatten(-1, (D // 2, 2)))
            return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).to(x.dtype)

        q, k = rotate(q), rotate(k)

    Out of place and differentiable; float64 tensors are rotated in float64. The tables are cached between calls.

    Args:
        q: (B, T, H, D), D even; float16, bfloat16, float32 or float64.
        k: the same shape and dtype, on the same device; it may have fewer heads.
        seq_len: T, which must be q's.
        theta: base of the frequencies: pair i rotates by theta^(−2i/D) radians per token.

    Returns:
        (q, k) rotated, of the same shapes and dtypes.

    Raises:
        ValueError: "Q and K must have same shape", "Head dimension must be even", a seq_len that is not T, tensors that
            are not 4-D, or on two devices.
        TypeError: another dtype.

    Source: RoFormer (https://arxiv.org/abs/2104.09864), equation 34.

    Example:
        >>> import torch
        >>> from ropewalk import rope_pytorch
        >>> q, k = rope_pytorch(torch.randn(2, 128, 8, 64), torch.randn(2, 128, 2, 64), 128)
        >>> q.shape, k.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 128, 2, 64]))
    """
    return _rotate_by_index(q, k, seq_len, theta, "reference")


def precompute_freqs_cis(
    dim: int, seq_len: int, theta: float = 10000.0, device: torch.device | str | None = None
) -> Tensor:
    """Tabulate every position's rotations as complex numbers of length 1, e^(i·t·ω).

    The same in PyTorch::

        omega = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # (dim/2,), radians per position
        angles = torch.arange(seq_len)[:, None] * omega
        freqs_cis = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    Args:
        dim: D, the head dim, even.
        seq_len: number of positions, from 0.
        theta: base of the frequencies.
        device: of the table; None for torch's default device.

    Returns:
        (seq_len, dim/2), complex64. The angles are taken in float64, so only the result is rounded.

    Raises:
        ValueError: "Head dimension must be even", a theta that is not positive, or a negative seq_len.

    Source: RoFormer (https://arxiv.org/abs/2104.09864), §3.2.2.

    Example:
        >>> from ropewalk import precompute_freqs_cis
        >>> freqs_cis = precompute_freqs_cis(64, 128)
        >>> freqs_cis.shape, freqs_cis.dtype
        (torch.Size([128, 32]), torch.complex64)
    """
    return torch.complex(*_make_tables(dim, seq_len, theta, torch.get_default_device() if device is None else device))


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate one tensor by a table of complex numbers, row t for token t.

    The same in PyTorch::

        pairs = torch.view_as_complex(x.float().unflatten(-1, (D // 2, 2)))
        x = torch.view_as_real(pairs * freqs_cis[:T, None]).flatten(-2).to(x.dtype)

    Out of place and differentiable in x, by the default implementation on x's device.

    Args:
        x: (B, T, H, D); float16, bfloat16, float32 or float64.
        freqs_cis: (n, D/2) with n ≥ T, complex, as `precompute_freqs_cis` makes it. It is moved to x's device if it is
            on another. Its conjugate is the inverse.

    Returns:
        x rotated, of the same shape and dtype.

    Raises:
        ValueError: shapes that do not fit, fewer rows than tokens, or a freqs_cis that requires grad.
        TypeError: a freqs_cis that is not complex, or an x of another dtype.

    Source: RoFormer (https://arxiv.org/abs/2104.09864), equation 34.

    Example:
        >>> import torch
        >>> from ropewalk import apply_rotary_emb, precompute_freqs_cis
        >>> x = torch.randn(2, 100, 8, 64)
        >>> apply_rotary_emb(x, precompute_freqs_cis(64, 128)).shape
        torch.Size([2, 100, 8, 64])
    """
    if x.ndim != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}, but must be (B, T, H, D)")
    if not freqs_cis.is_complex():
        raise TypeError(f"freqs_cis has dtype {freqs_cis.dtype}, but must be complex")
    _check_even(x.shape[-1])
    if freqs_cis.ndim != 2 or freqs_cis.shape[1] != x.shape[-1] // 2:
        raise ValueError(
            f"freqs_cis has shape {tuple(freqs_cis.shape)}, but must be (n, {x.shape[-1] // 2}) for x of shape "
            f"{tuple(x.shape)}"
        )
    if freqs_cis.shape[0] < x.shape[1]:
        raise ValueError(
            f"freqs_cis has {freqs_cis.shape[0]} rows, but must have one for each of x's {x.shape[1]} tokens"
        )
    if freqs_cis.requires_grad:
        raise ValueError("freqs_cis requires grad, but is not differentiated: pass freqs_cis.detach()")
    # A conjugate is a flag on the same memory, which a kernel cannot read from an address: resolve it. Two contiguous
    # halves are read faster, and cost little to make: a table is small beside x.
    cos, sin = torch.view_as_real(freqs_cis[: x.shape[1]].to(x.device).resolve_conj()).unbind(-1)
    rotated: Tensor = apply_rope(x, None, cos.contiguous(), sin.contiguous(), interleaved=True)
    return rotated


def _rotate_by_index(q: Tensor, k: Tensor, seq_len: int, theta: float, impl: str) -> tuple[Tensor, Tensor]:
    if q.ndim != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}, but must be (B, T, H, D)")
    batch, tokens, heads, head_dim = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[1], k.shape[3]) != (batch, tokens, head_dim) or k.shape[2] > heads:
        raise ValueError(
            f"Q and K must have same shape, except that K may have fewer heads; they have {tuple(q.shape)} and "
            f"{tuple(k.shape)}"
        )
    _check_even(head_dim)
    if seq_len != tokens:
        raise ValueError(
            f"seq_len is {seq_len}, but must be the number of tokens, {tokens} for q of shape {tuple(q.shape)}"
        )
    if is_plain_eager(q, k) and not is_transformed():
        # Rounded up, so that a stream of lengths shares few tables.
        rows = 1 << max(10, (tokens - 1).bit_length())
        cos, sin = _cached_tables(head_dim, rows, float(theta), q.device)
    else:
        # A table computed under a compiler, mode or transform must not outlive it.
        cos, sin = _make_tables(head_dim, tokens, theta, q.device)
    rotated: tuple[Tensor, Tensor] = apply_rope(q, k, cos, sin, interleaved=True, impl=impl)
    return rotated


@lru_cache(maxsize=8)
def _cached_tables(head_dim: int, rows: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # a table first computed in inference mode may be used in training later
        cos, sin = _make_tables(head_dim, rows, theta, device)
    if device.type == "cuda":
        # The next call may come on another stream, which does not wait for the work on this one.
        torch.cuda.current_stream(device).synchronize()
    return cos, sin


def _make_tables(head_dim: int, rows: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    _check_even(head_dim)
    inv_freq, _ = inverse_frequencies("default", head_dim, theta)
    return rope_table(rows, inv_freq, device=device)


def _check_even(head_dim: int) -> None:
    if head_dim % 2:
        raise ValueError(f"Head dimension must be even, but is {head_dim}")

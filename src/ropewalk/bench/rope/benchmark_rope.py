"""`benchmark_rope`: a fixed name and signature, timed by the benchmark's own rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.bench.core.timing import time_rounds
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.backends import why_not


def benchmark_rope(
    batch_size: int, seq_len: int, n_heads: int, head_dim: int, n_warmup: int = 10, n_iterations: int = 100
) -> dict[str, float]:
    """Time the Triton rotation of q and k against the complex-number form in eager PyTorch, on the GPU.

    q and k are float32 (batch_size, seq_len, n_heads, head_dim) with interleaved pairs. The tables are computed before;
    both are timed by device events, in rounds, with a cold cache.

    Returns:
        batch_size, seq_len, n_heads, head_dim; pytorch_ms and triton_ms, the medians; speedup, their ratio.

    Raises:
        RuntimeError: there is no GPU, or the Triton kernels cannot run on it; it says what is missing.

    Example:
        >>> from ropewalk import benchmark_rope
        >>> import torch
        >>> if torch.cuda.is_available():
        ...     speedup = benchmark_rope(4, 512, 8, 64)["speedup"]
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "benchmark_rope needs a GPU, and PyTorch finds none (torch.cuda.is_available() is False); "
            "on a CPU, `ropewalk bench rope` compares what runs there"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    reason = why_not("triton", device)
    if reason is not None:
        raise RuntimeError(f"benchmark_rope needs the Triton kernels: {reason}")
    shape = (batch_size, seq_len, n_heads, head_dim)
    q, k = torch.randn(shape, device=device), torch.randn(shape, device=device)
    inv_freq, _ = inverse_frequencies("default", head_dim, 10000.0)
    cos, sin = rope_table(seq_len, inv_freq, device=device)
    freqs_cis = torch.complex(cos, sin)[:, None]  # (T, 1, D/2)

    def rotate_complex(x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * freqs_cis).flatten(-2)

    calls = {
        "pytorch": lambda: (rotate_complex(q), rotate_complex(k)),
        "triton": lambda: apply_rope(q, k, cos, sin, interleaved=True, impl="triton"),
    }
    times = time_rounds(calls, device, warmup=n_warmup, rounds=n_iterations, max_seconds=60.0)
    found: dict[str, float] = dict(zip(("batch_size", "seq_len", "n_heads", "head_dim"), shape, strict=True))
    found |= {f"{name}_ms": spread.p50 / 1e3 for name, spread in times.items()}
    return {**found, "speedup": found["pytorch_ms"] / found["triton_ms"]}

"""`benchmark_rope`, by the name of the API reference."""

import pytest
import torch

from ropewalk import benchmark_rope


def test_without_a_gpu_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a GPU, and PyTorch finds none"):
        benchmark_rope(1, 4, 1, 8)


@pytest.mark.gpu
def test_on_a_gpu_it_reports_both_times(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    result = benchmark_rope(2, 64, 4, 64, n_warmup=2, n_iterations=5)
    assert {key: result[key] for key in ("batch_size", "seq_len", "n_heads", "head_dim")} == {
        "batch_size": 2,
        "seq_len": 64,
        "n_heads": 4,
        "head_dim": 64,
    }
    assert result["speedup"] == result["pytorch_ms"] / result["triton_ms"] > 0

"""The cases as data, and the tensors made of them."""

from dataclasses import replace

import pytest
import torch

from ropewalk import apply_rope
from ropewalk.bench.core.gate import max_error
from ropewalk.bench.core.load import variant_of
from ropewalk.bench.rope.cases import CASES, MODES, NORM_CASES, Case, make_inputs
from ropewalk.bench.rope.gate import Gate

SMALL = [
    Case("index", 2, 5, 3, 1, 8, "float32"),
    Case("offsets", 2, 5, 3, 1, 8, "float32", positions="offsets"),
    Case("tokens", 2, 5, 3, 1, 8, "float32", positions="tokens"),
    Case("partial", 2, 5, 3, 1, 8, "float32", rotary_dim=4, interleaved=True),
    Case("bhtd", 2, 5, 3, 1, 8, "float32", layout="bhtd", positions="tokens"),
    Case("packed", 1, 9, 3, 1, 8, "float32", layout="thd", sequences=(4, 1, 4)),
    Case("thd tokens", 1, 9, 3, 1, 8, "float32", layout="thd", positions="tokens"),
]


def test_the_cases_are_distinct_and_consistent() -> None:
    cases = CASES + NORM_CASES
    assert len({(case.name, variant_of(vars(case))) for case in cases}) == len(cases)
    for case in cases:
        assert set(case.modes) <= set(MODES)
        assert case.torch_dtype.is_floating_point
        assert not case.sequences or sum(case.sequences) == case.tokens


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("bert-base", (12, 12, 64, 64, 10000.0)),
        ("llama3-8b", (32, 8, 128, 128, 500000.0)),
        ("llama3-70b", (64, 8, 128, 128, 500000.0)),
        ("qwen3-8b", (32, 8, 128, 128, 1e6)),
        ("gemma3-27b", (32, 16, 128, 128, 1e6)),
        ("deepseek-mla", (128, 1, 64, 64, 10000.0)),
        ("glm4-9b-partial", (32, 2, 128, 64, 10000.0)),
        ("decode-256", (32, 8, 128, 128, 500000.0)),
    ],
)
def test_models_have_their_configurations_heads(name: str, shape: tuple[float, ...]) -> None:
    cases = [case for case in CASES if case.name == name]
    assert cases
    for case in cases:
        assert (case.q_heads, case.k_heads, case.head_dim, case.width, case.base) == shape


def test_bytes_count_what_must_be_read_and_written() -> None:
    case = Case("small", 2, 8192, 32, 8, 128)
    assert case.bytes_of("fwd") == case.bytes_of("bwd") == 2 * 2 * (2 * 8192 * (32 + 8) * 128)
    normed = replace(case, norm_offset=0.0)
    assert normed.bytes_of("fwd") == case.bytes_of("fwd")
    assert normed.bytes_of("bwd") == case.bytes_of("fwd") * 3 // 2


def test_q_and_k_of_a_norm_lie_in_a_projection(device: torch.device) -> None:
    fused, gated = (
        make_inputs(Case("norm", 2, 5, 3, 1, 8, "float32", norm_offset=0.0, source=source), device)
        for source in ("fused", "gated")
    )
    assert fused.q.stride() == fused.k.stride() == (5 * 5 * 8, 5 * 8, 8, 1)
    assert gated.q.stride(2) == 2 * 8
    assert [weight.shape for weight in fused.weights] == [(8,), (8,)]


def test_every_pair_turns_by_the_position_of_its_axis(device: torch.device) -> None:
    case = Case("axes", 2, 40, 3, 1, 8, "float32", positions="axes")
    inputs = make_inputs(case, device)
    assert inputs.positions is not None
    assert inputs.positions[:, 1, 33].tolist() == [0, 1, 1]
    rotated = apply_rope(inputs.q, inputs.k, inputs.cos, inputs.sin, positions=inputs.positions, axes=inputs.axes)
    assert max_error(rotated, Gate(case, inputs, "fwd").truth) < 1e-5


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_inputs_give_the_same_positions_in_every_form(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    assert inputs.q.shape == case.shape(case.q_heads)
    assert inputs.cos.shape[-1] == case.width // 2
    rotated = apply_rope(
        inputs.q,
        inputs.k,
        inputs.cos,
        inputs.sin,
        **{"offsets" if case.positions == "offsets" else "positions": inputs.positions},
        cu_seqlens=inputs.cu_seqlens,
        layout=case.layout,
        interleaved=case.interleaved,
    )
    assert max_error(rotated, Gate(case, inputs, "fwd").truth) < 1e-5

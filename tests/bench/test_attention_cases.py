"""Attention's cases as data, and the tensors made of them."""

from dataclasses import replace

import torch

from ropewalk.bench.attention_cases import CASES, MODES, SCHEMES, AttentionCase, make_attention_inputs
from ropewalk.positions import PositionScheme

CASE = AttentionCase("small", 3, 16, 4, 2, 8)


def test_the_cases_are_distinct_and_consistent() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert set(case.modes) <= set(MODES)
        assert case.q_heads == case.group * case.k_heads
        assert case.torch_dtype.is_floating_point
    assert {mode for case in CASES for mode in case.modes} == set(MODES)


def test_operations_are_counted_as_in_the_field() -> None:
    whole = 4 * 3 * 4 * 16 * 16 * 8
    assert CASE.flops("fwd") == CASE.flops("schemes-fwd") == whole
    assert CASE.flops("bwd") == 2.5 * whole
    assert CASE.flops("train") == 3.5 * whole
    assert replace(CASE, causal=True).flops("fwd") == whole / 2
    padded = replace(CASE, padded=True)
    lengths = padded.draw_key_lengths()
    assert lengths is not None
    assert padded.flops("fwd") == whole * int(lengths.sum()) / (3 * 16)


def test_what_training_cannot_do_without() -> None:
    assert CASE.training_bytes() == 2 * (5 * 3 * 16 * 4 * 8 + 5 * 3 * 16 * 2 * 8)


def test_key_lengths_are_seeded_and_within_bounds() -> None:
    case = replace(CASE, batch=200, padded=True)
    lengths, again, other = (case.draw_key_lengths(seed) for seed in (0, 0, 1))
    assert lengths is not None
    assert again is not None
    assert other is not None
    assert (int(lengths.min()), int(lengths.max())) == (8, 16)
    assert torch.equal(lengths, again)
    assert not torch.equal(lengths, other)


def test_inputs_are_those_of_the_case(device: torch.device) -> None:
    inputs = make_attention_inputs(replace(CASE, padded=True), device)
    assert inputs.q.shape == inputs.grad.shape == (3, 16, 4, 8)
    assert inputs.k.shape == inputs.v.shape == (3, 16, 2, 8)
    assert inputs.cos.shape == inputs.sin.shape == (16, 4)
    assert {x.dtype for x in (inputs.q, inputs.k, inputs.v, inputs.grad)} == {torch.bfloat16}
    assert inputs.key_lengths is not None
    again = make_attention_inputs(replace(CASE, padded=True), device)
    assert torch.equal(inputs.grad, again.grad)
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in inputs.leaves())


def test_schemes_are_schemes() -> None:
    assert all(isinstance(make(4), PositionScheme) for make in SCHEMES.values())

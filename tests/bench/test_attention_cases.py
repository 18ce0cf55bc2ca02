"""Attention's cases as data, and the tensors made of them."""

from dataclasses import replace

import pytest
import torch

from ropewalk.bench.attention.cases import (
    ALIASES,
    CASES,
    LAYER,
    MODES,
    REROPE,
    AttentionCase,
    direction_of,
    make_attention_inputs,
)
from ropewalk.bench.attention.settings import LAYERS, LEARNED, PRODUCTS, SCHEMES, SETTINGS, VARIANTS
from ropewalk.bench.host.bench import CASES as HOST
from ropewalk.bench.rope.cases import CASES as ROTATIONS
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.attention.api import attention

CASE = AttentionCase("small", 3, 16, 4, 2, 8, far_window=5)
PACKED = replace(CASE, batch=200, form="packed", shortest=2, causal=True)
CACHE = replace(CASE, batch=200, form="cache", shortest=4)


def test_the_cases_are_distinct_and_consistent() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert set(case.modes) <= set(MODES)
        assert case.yardstick is None or case.yardstick in {other.name for other in CASES}
    assert {mode for case in CASES for mode in case.modes} == set(MODES)
    for case in (*CASES, *HOST):
        assert case.q_heads == case.group * case.k_heads
        assert case.form in ("dense", "packed", "cache")
        plain, windows = case.form == "dense" and case.causal and not case.padded, (case.window, case.far_window)
        assert not case.padded or case.form == "dense"
        assert all(window is None or 1 <= window < case.tokens for window in windows)
        assert case.window is None or (plain and case.far_window is None)
        assert not {*case.modes} & {*LAYER} or (plain and windows == (None, None))
        assert not {*case.modes} & {*REROPE} or (plain and case.far_window is not None)


def test_models_are_other_names_of_cases() -> None:
    names = {case.name for case in CASES}
    assert set(ALIASES.values()) <= names
    assert not set(ALIASES) & names
    models = {case.name for case in ROTATIONS}
    assert {name for name in {*ALIASES, *names} if name in models} == {
        "bert-base",
        "llama3-8b",
        "llama3-70b",
        "qwen3-8b",
        "gemma3-27b",
        "deepseek-mla",
        "rerope-8k",
        "decode-1",
        "decode-64",
    }


@pytest.mark.parametrize("name", ["llama3-8b", "bert-base", "rerope-8k"])
def test_a_models_rotation_and_attention_have_one_shape(name: str) -> None:
    rotation = next(case for case in ROTATIONS if case.name == name)
    attention = next(case for case in CASES if case.name == ALIASES[name])
    for field in ("batch", "tokens", "q_heads", "k_heads", "head_dim", "dtype"):
        assert getattr(rotation, field) == getattr(attention, field)


def test_operations_are_counted_as_in_the_field() -> None:
    whole = 4 * 3 * 4 * 16 * 16 * 8
    assert CASE.flops("fwd") == CASE.flops("schemes-fwd") == whole
    assert CASE.flops("bwd") == 2.5 * whole
    assert CASE.flops("train") == 3.5 * whole
    assert replace(CASE, causal=True).flops("fwd") == whole / 2
    padded = replace(CASE, padded=True)
    lengths = padded.draw_lengths()
    assert padded.flops("fwd") == whole * int(lengths.sum()) / (3 * 16)


def test_head_dims_of_keys_and_of_values_count_as_they_are() -> None:
    scores = 3 * 4 * 16 * 16
    wide = replace(CASE, head_dim=12, v_head_dim=8)
    assert wide.flops("fwd") == 2 * scores * (12 + 8)
    assert wide.flops("bwd") == 2 * scores * (3 * 12 + 2 * 8)
    assert wide.flops("train") == wide.flops("fwd") + wide.flops("bwd")
    assert wide.training_bytes() == 2 * 3 * 16 * (4 + 2) * (3 * 12 + 2 * 8)


def test_a_window_counts_what_it_lets_through() -> None:
    case = replace(CASE, far_window=None, causal=True, window=6)
    assert case.flops("fwd") == 4 * 3 * 4 * 8 * (6 * 16 - 6 * 6 / 2)
    assert case.description.endswith("causal, a window of 6")


def test_packed_sequences_and_caches_count_what_is_there() -> None:
    lengths, keys = PACKED.draw_lengths(), CACHE.draw_lengths()
    assert PACKED.flops("fwd") == 4 * 4 * 8 * int(lengths.long().square().sum()) / 2
    assert PACKED.training_bytes() == 2 * int(lengths.sum()) * 5 * (4 + 2) * 8
    assert CACHE.flops("decode") == replace(CACHE, causal=True).flops("decode") == 4 * 4 * 8 * int(keys.sum())
    assert CACHE.cache_bytes() == 2 * int(keys.sum()) * 2 * 2 * 8


def test_every_mode_has_a_direction() -> None:
    assert {direction_of(mode) for mode in MODES} == {"fwd", "bwd", "train"}
    assert (direction_of("decode"), direction_of("memory")) == ("fwd", "train")
    assert [direction_of(mode) for mode in REROPE] == ["fwd", "train"]


def test_a_far_window_is_in_the_description_and_costs_no_operations() -> None:
    without = replace(CASE, far_window=None)
    assert CASE.description == f"{without.description}, far from 5 tokens on"
    assert CASE.flops("rerope-fwd") == without.flops("fwd")
    assert CASE.flops("rerope-train") == without.flops("train")


def test_what_training_cannot_do_without() -> None:
    assert CASE.training_bytes() == 2 * (5 * 3 * 16 * 4 * 8 + 5 * 3 * 16 * 2 * 8)


@pytest.mark.parametrize(
    ("case", "bounds"), [(replace(CASE, batch=200, padded=True), (8, 16)), (PACKED, (2, 16)), (CACHE, (4, 16))]
)
def test_lengths_are_seeded_and_within_bounds(case: AttentionCase, bounds: tuple[int, int]) -> None:
    lengths, again, other = (case.draw_lengths(seed) for seed in (0, 0, 1))
    assert (int(lengths.min()), int(lengths.max())) == bounds
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


def test_packed_inputs_lie_one_after_another(device: torch.device) -> None:
    case = replace(PACKED, batch=5, v_head_dim=6)
    lengths, inputs = case.draw_lengths(), make_attention_inputs(case, device)
    assert inputs.cu_seqlens is not None
    assert inputs.cu_seqlens.dtype == torch.int32
    assert torch.equal(inputs.cu_seqlens.diff().cpu(), lengths)
    total = int(lengths.sum())
    assert (inputs.q.shape, inputs.k.shape) == ((total, 4, 8), (total, 2, 8))
    assert (inputs.v.shape, inputs.grad.shape) == ((total, 2, 6), (total, 4, 6))
    assert inputs.key_lengths is None
    start = int(inputs.cu_seqlens[1])
    assert torch.equal(inputs.cos[start], inputs.cos[0])  # positions begin anew
    assert not torch.equal(inputs.cos[start - 1], inputs.cos[0])


def test_a_caches_query_stands_at_the_last_key(device: torch.device) -> None:
    inputs = make_attention_inputs(replace(CACHE, batch=5), device)
    assert inputs.q.shape == inputs.grad.shape == (5, 1, 4, 8)
    assert inputs.k.shape == inputs.v.shape == (5, 16, 2, 8)
    assert inputs.key_lengths is not None
    cos, _ = rope_table(16, inverse_frequencies("default", 8, 10000.0)[0], device=device)
    assert torch.equal(inputs.cos[:, 0], cos[inputs.key_lengths.long() - 1])


def test_settings_are_what_attention_takes(device: torch.device) -> None:
    others = {name for name, setting in SETTINGS.items() if setting.exact and "other" in name}
    assert {*SCHEMES, *LEARNED, *VARIANTS, *LAYERS, *PRODUCTS, *others, "none", "rope", "rerope"} == set(SETTINGS)
    inputs = make_attention_inputs(CASE, device)
    for setting in SETTINGS.values():
        keywords, parameters = setting.make(CASE, device)
        assert attention(inputs.q, inputs.k, inputs.v, **keywords, impl="reference").shape == inputs.grad.shape
        assert bool(parameters) == setting.learned
        assert all(x.is_leaf and x.requires_grad for x in parameters)
        assert all(x.shape[-1] == (8 if setting.is_layer else 4) for x in parameters)
    with pytest.raises(ValueError, match="window is None"):
        SETTINGS["rerope"].make(replace(CASE, far_window=None), device)

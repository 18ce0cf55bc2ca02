"""A scheme's tables and numbers: what is remembered is what would be made anew."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from helpers.attention_calls import SCHEMES, B, D, H
from helpers.writes import WRITES
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ropewalk.ops.attention import api
from ropewalk.ops.attention import tables as memory
from ropewalk.ops.attention.call import NO_TABLES, AttentionCall, token_positions
from ropewalk.ops.attention.tables import map_features, resolve_scheme, with_rows
from ropewalk.ops.attention.validate import Arguments, validate
from ropewalk.ops.launch import remembered
from ropewalk.schemes import (
    Alibi,
    ExpoSB,
    NoPosition,
    PositionScheme,
    ReRope,
    Rope,
    Rotation,
    SelfExtend,
    T5Bias,
)


@pytest.fixture(autouse=True)
def _forget():
    remembered._remembered.clear()
    remembered._captured.clear()


def validated(q, k, **keywords):
    """A call whose scheme is not resolved yet."""
    return validate(q, k, k, Arguments(**{"layout": "bhtd", **keywords}))


def resolved(device, scheme, queries=5, keys=5, heads=H, **call):
    q, k = torch.empty(B, heads, queries, D, device=device), torch.empty(B, heads, keys, D, device=device)
    return resolve_scheme(validated(q, k, position=scheme, **call))


def cos_of(device, scheme):
    """The table of the queries' cosines."""
    return resolved(device, scheme).tables.q.cos


def numbers_of(call):
    """The tensors that a call's scheme gave."""
    far = () if call.far is None else (table for table in call.far.tables if table is not None)
    tables = [table for table in (call.tables.q, call.tables.k, *far) if table is not None]
    found = [x for table in tables for x in table] + [call.tables.feature_weights, call.score_mod_params]
    return [x for x in found if x is not None]


def made(monkeypatch, kind, name):
    """Counts the calls of a scheme's method."""
    calls = []
    right = getattr(kind, name)

    def counting(self, *arguments):
        calls.append(arguments)
        return right(self, *arguments)

    monkeypatch.setattr(kind, name, counting)
    return calls


LENGTHS = [
    (1, 1),
    (5, 5),
    (255, 256),
    (256, 256),
    (257, 257),
    (1, 1000),
    (1000, 1),
    (300, 20),
    (600, 300),
    (0, 4),
    (4, 0),
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_remembered_is_what_would_be_made(device, scheme):
    scheme = SCHEMES[scheme]
    for queries, keys in LENGTHS * 2:  # the second time from memory, with whatever the others left there
        result = resolved(device, scheme, queries, keys)
        for tokens, start, table in (
            (queries, keys - queries, result.tables.q),
            (keys, 0, result.tables.k),
        ):
            fresh = scheme.rotation(torch.arange(start, start + tokens, device=device)[None], D)
            assert (fresh is None) == (table is None)
            if fresh is not None:
                assert torch.equal(table.cos, fresh.cos)
                assert torch.equal(table.sin, fresh.sin)
                assert result.tables.interleaved == fresh.interleaved
                assert (result.tables.feature_weights is None) == (fresh.weights is None)
        if scheme.kernel_score_mod() is not None:
            numbers = scheme.score_mod_params(H, device)
            assert (result.score_mod_params is None) == (numbers is None)
            assert numbers is None or torch.equal(result.score_mod_params, numbers)


def test_everything_else_goes_through(device):
    mask = torch.ones(B, 1, 5, 7, dtype=torch.bool, device=device)
    lengths = torch.tensor([7, 2], device=device)
    result = resolved(device, NoPosition(), 5, 7, mask=mask, key_lengths=lengths, causal=True, window=3, scale=0.5)
    given = {
        "causal": True,
        "window_left": 2,
        "scale": 0.5,
        "key_lengths": lengths,
        "dropout_p": 0.0,
        "keys_rotated": False,
    }
    others = {
        "n_learned_params": 0,
        "tables": NO_TABLES,
        "return_lse": False,
        "return_max_logits": False,
        "deterministic": False,
    }
    left_out = {"q", "k", "v", "scheme", "mask", "needs_backward"}
    expected = {**dict.fromkeys(AttentionCall._fields), **given, **others}
    assert all(
        getattr(result, name) is value or getattr(result, name) == value
        for name, value in expected.items()
        if name not in left_out
    )
    assert result.mask.data_ptr() == mask.data_ptr()
    rest = {
        "key_starts": torch.tensor([0, 3], device=device),
        "query_starts": torch.tensor([1, 2], device=device),
        "softcap": 2.5,
        "sinks": torch.rand(H, device=device),
        "dropout_p": 0.25,
    }
    result = resolved(device, NoPosition(), 5, 7, **rest)
    for name, value in rest.items():
        assert getattr(result, name) is value or getattr(result, name) == value


def test_positions_reach_score_functions_and_tables(device):
    positions_q = torch.tensor([[4, 4, 100000, 0, 7]], device=device, dtype=torch.int32)
    positions_k = torch.randint(0, 50, (B, 5), device=device)
    result = resolved(device, Rope(), positions_q=positions_q, positions_k=positions_k)
    assert not result.reads_positions  # no score mod reads them
    assert torch.equal(result.tables.q.cos, Rope().rotation(positions_q.long(), D).cos)
    assert torch.equal(result.tables.k.cos, Rope().rotation(positions_k, D).cos)
    result = resolved(device, Alibi(), positions_q=positions_q)
    assert result.positions_q is positions_q
    assert result.positions_k is None
    assert result.tables.q is None


# Tokens that do not stand at their index


def rows(*values):
    return lambda device: torch.tensor(values, device=device)


PLACED = {
    "packed": (12, 12, {"cu_seqlens_q": rows(0, 5, 5, 12)}),
    "packed, with room": (12, 15, {"cu_seqlens_q": rows(0, 5, 5, 9)}),
    "packed, of other lengths": (12, 20, {"cu_seqlens_q": rows(0, 7, 7, 11), "cu_seqlens_k": rows(0, 4, 13, 19)}),
    "packed, more queries": (20, 9, {"cu_seqlens_q": rows(0, 12, 18), "cu_seqlens_k": rows(0, 4, 9)}),
    "packed, none": (4, 4, {"cu_seqlens_q": rows(0)}),
    "starts": (9, 9, {"key_starts": rows(0, 4)}),
    "starts of fewer queries": (3, 9, {"key_starts": rows(9, 2)}),
    "starts of more queries": (9, 3, {"key_starts": rows(1, 3)}),
    "query starts": (3, 9, {"query_starts": rows(0, 6)}),
    "both starts": (3, 9, {"query_starts": rows(1, 5), "key_starts": rows(4, 0)}),
}


def make_call(device, name, scheme, dtype=torch.int64, **more):
    """A call of tokens that are not at their index; its scheme is not resolved yet."""
    queries, keys, call = PLACED[name]
    call = {key: make(device).to(dtype) for key, make in call.items()}
    layout = "thd" if "cu_seqlens_q" in call else "bhtd"
    batch = () if layout == "thd" else (B,)
    shape_q, shape_k = ((queries, H, D), (keys, H, D)) if layout == "thd" else ((H, queries, D), (H, keys, D))
    q, k = torch.empty(*batch, *shape_q, device=device), torch.empty(*batch, *shape_k, device=device)
    return validated(q, k, position=scheme, layout=layout, **call, **more)


def belongs(bounds, total, device):
    """Which packed tokens belong to a sequence."""
    return torch.arange(total, device=device) < bounds[-1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", PLACED)
def test_tables_are_of_the_positions(device, name, dtype, causal):
    for scheme in (Rope(), ExpoSB(), Rope(inv_freq=torch.rand(4, device=device), rotary_offset=3)):
        call = make_call(device, name, scheme, dtype, causal=causal)
        result = resolve_scheme(call)
        positions_q, positions_k = token_positions(call)
        judged_q, judged_k = (positions_q >= 0) | (not causal), positions_k >= 0
        if call.cu_seqlens_q is not None:
            judged_q = belongs(call.cu_seqlens_q, call.q.shape[2], device)[None]
            judged_k = belongs(call.cu_seqlens_k, call.k.shape[2], device)[None]
            if causal:
                judged_q = judged_q & (positions_q >= 0)
        for cos, sin, positions, judged in (
            (result.tables.q.cos, result.tables.q.sin, positions_q, judged_q),
            (result.tables.k.cos, result.tables.k.sin, positions_k, judged_k),
        ):
            expected = scheme.rotation(positions.long(), D)
            assert cos.shape == sin.shape == expected.cos.shape
            assert torch.equal(cos[judged], expected.cos[judged])
            assert torch.equal(sin[judged], expected.sin[judged])
        assert result.tables.rotary_offset == getattr(scheme, "rotary_offset", 0)
        assert (result.tables.q.cos is result.tables.k.cos) is (name in ("packed", "packed, none", "starts"))


def test_packed_and_padded_calls_share_one_table(device, monkeypatch):
    calls = made(monkeypatch, Rope, "rotation")
    for name in PLACED:
        resolve_scheme(make_call(device, name, Rope(), causal=True))
    assert len(calls) == 1
    assert calls[0][0].amin() == 0
    for name in PLACED:
        resolve_scheme(make_call(device, name, Rope()))
    assert len(calls) == 2


class _NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        assert not any(name in str(function) for name in ("_local_scalar_dense", "nonzero", "masked_select"))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PLACED)
def test_nothing_is_waited_for_or_read_out_of_bounds(device, name, causal):
    """What a device holds is not looked at: it may be anything."""
    call = make_call(device, name, Rope(), causal=causal)
    resolve_scheme(call)
    for wrong in (10**12, -(10**12), 10**6, 3):
        spoiled = {
            field: torch.full_like(getattr(call, field), wrong)
            for field in ("cu_seqlens_q", "cu_seqlens_k", "key_starts", "query_starts")
            if getattr(call, field) is not None
        }
        result = resolve_scheme(call._replace(**spoiled))
        assert result.tables.q.cos.isfinite().all()
        with _NoWaiting():  # under a mode nothing is remembered either
            resolve_scheme(call._replace(**spoiled))


def test_positions_that_are_given_count_for_packed_tokens(device):
    cu_seqlens = torch.tensor([0, 4, 9], device=device)
    positions = torch.randint(0, 10**6, (9,), device=device)
    q = torch.empty(9, H, D, device=device)
    call = validated(q, q, position=Rope(), cu_seqlens_q=cu_seqlens, positions_k=positions, layout="thd")
    result = resolve_scheme(call)
    assert torch.equal(result.tables.k.cos, Rope().rotation(positions[None], D).cos)
    own = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=device)
    assert torch.equal(result.tables.q.cos, Rope().rotation(own, D).cos)


def test_score_functions_get_both_positions_where_padding_shifts_one(device):
    given, starts = torch.arange(5, device=device)[None], torch.tensor([0, 2], device=device)
    result = resolved(device, Alibi(), 5, 7, key_starts=starts)
    assert result.positions_q is result.positions_k is None
    result = resolved(device, Alibi(), 5, 7, key_starts=starts, positions_q=given)
    assert result.positions_q is given
    assert torch.equal(result.positions_k, torch.arange(7, device=device) - starts[:, None])
    result = resolved(device, Rope(), 5, 7, key_starts=starts, positions_q=given)
    assert not result.reads_positions


@pytest.mark.parametrize("scheme", [Rope(), ExpoSB(), Rope(rotary_dim=4, rotary_offset=8, interleaved=True)])
def test_keys_that_were_mapped_are_left_alone(device, scheme):
    q, k = torch.randn(B, H, 3, D, device=device), torch.randn(B, H, 7, D, device=device)
    call = validated(q, k, position=scheme)
    rotated = resolve_scheme(call._replace(keys_rotated=True))
    assert rotated.tables.k is rotated.tables.feature_weights is None
    once_q, once_k = map_features(resolve_scheme(call))
    for keys in (k, once_k):
        mapped_q, mapped_k = map_features(rotated._replace(k=keys))
        assert torch.equal(mapped_q, once_q)
        assert mapped_k is keys


@pytest.mark.parametrize("keys_rotated", [False, True])
def test_pages_have_a_row_of_tables_for_each_key_that_is_not_rotated_yet(device, keys_rotated):
    q, pages = torch.randn(B, H, 3, D, device=device), torch.randn(5, H, 16, D, device=device)
    call = validated(
        q,
        pages,
        position=Rope(),
        block_table=torch.zeros(B, 4, dtype=torch.int32, device=device),
        key_lengths=torch.tensor([64, 40], device=device),
        keys_rotated=keys_rotated,
    )
    for more in ({}, {"query_starts": torch.tensor([61, 37], device=device)}):
        result = with_rows(resolve_scheme(call._replace(**more)))
        positions_q, positions_k = token_positions(call._replace(**more))
        assert torch.equal(result.tables.q.cos, Rope().rotation(positions_q, D).cos.expand_as(result.tables.q.cos))
        if keys_rotated:
            assert result.tables.k is None
            assert map_features(result)[1] is pages
        else:
            assert torch.equal(result.tables.k.cos, Rope().rotation(positions_k, D).cos)
    assert positions_q.tolist() == [[61, 62, 63], [37, 38, 39]]


def decoded(device, scheme=None, **keywords):
    """A call whose keys come rotated."""
    q, k = torch.randn(B, H, 3, D, device=device), torch.randn(B, H, 40, D, device=device)
    return validated(q, k, **{"position": scheme or Rope(), "keys_rotated": True, **keywords})


DECODED = {
    "last": {},
    "starts": {"query_starts": [37, 5]},
    "padding": {"key_starts": [0, 33]},
    "both": {"query_starts": [37, 12], "key_starts": [2, 14]},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", DECODED)
def test_a_whole_table_costs_no_operator_and_has_the_rows_of_queries(device, monkeypatch, name, causal):
    starts = {key: torch.tensor(values, device=device) for key, values in DECODED[name].items()}
    call = decoded(device, causal=causal, **starts)
    whole = resolve_scheme(call)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_indices", None)  # called by all that gathers rows
        assert resolve_scheme(call).tables.q.cos is whole.tables.q.cos
    start = whole.tables.q_start
    every = torch.arange(start, start + whole.tables.q.cos.shape[1], device=device)[None]
    for x, y in zip(whole.tables.q, Rope().rotation(every, D)[:2], strict=True):
        assert torch.equal(x, y)
    rows = with_rows(whole)
    assert rows.tables.q_start is None
    positions, _ = token_positions(call)
    # Causal queries before the first key attend nothing, and have any row.
    positions = positions.clamp(min=start)
    for x, y in zip(rows.tables.q, Rope().rotation(positions, D)[:2], strict=True):
        assert torch.equal(x, y)
    for x, y in zip(map_features(whole), map_features(rows), strict=True):
        assert torch.equal(x, y)


@dataclass(frozen=True, eq=False)
class OfQueries(Rope):
    def query_rotation(self, positions, head_dim):
        return self.rotation(positions, head_dim)


@dataclass(frozen=True, eq=False)
class Scaled(Rope):
    def rotation(self, positions, head_dim):
        return (
            super().rotation(positions, head_dim)._replace(scale=torch.full_like(positions, 2.0, dtype=torch.float32))
        )


def test_q_has_a_row_for_each_query_where_no_whole_table_is_enough(device):
    positions = torch.arange(3, device=device)[None]
    packed = torch.tensor([0, 1, 3], device=device, dtype=torch.int32)
    q = torch.randn(3, H, D, device=device)
    assert decoded(device).tables == NO_TABLES
    for call in (
        decoded(device, positions_q=positions),
        decoded(device, keys_rotated=False),
        decoded(device, OfQueries()),
        decoded(device, Scaled(rotary_dim=8)),
        validated(q, q, position=Rope(), keys_rotated=True, cu_seqlens_q=packed, layout="thd"),
    ):
        tables = resolve_scheme(call).tables
        assert tables.q_start is None
        assert tables.q.cos.shape[1] == 3


def test_a_backward_reads_rows_of_queries(device):
    q, k = (torch.randn(B, H, n, D, device=device, requires_grad=n == 3) for n in (3, 40))
    keywords = {"position": Rope(), "keys_rotated": True, "layout": "bhtd"}
    assert api.make_call(q, k, k, **keywords).tables.q_start is None
    with torch.no_grad():
        assert api.make_call(q, k, k, **keywords).tables.q_start == 0


@pytest.mark.parametrize("scheme", [Rope(rotary_dim=4, rotary_offset=8), Rope(rotary_offset=10, interleaved=True)])
def test_the_last_features_may_turn(device, scheme):
    q, k = torch.randn(B, H, 5, D, device=device), torch.randn(B, H, 7, D, device=device)
    mapped = map_features(resolve_scheme(validated(q, k, position=scheme)))
    first = scheme.rotary_offset
    turned = scheme.rotation(torch.arange(7, device=device), D).cos.shape[-1] * 2
    alone = Rope(interleaved=scheme.interleaved)
    parts = [x[..., first : first + turned].contiguous() for x in (q, k)]
    expected = map_features(resolve_scheme(validated(*parts, position=alone)))
    for x, whole, part in zip((q, k), mapped, expected, strict=True):
        assert torch.equal(whole[..., :first], x[..., :first])
        torch.testing.assert_close(whole[..., first : first + turned], part)
        assert torch.equal(whole[..., first + turned :], x[..., first + turned :])


@pytest.mark.parametrize(
    "make",
    [Alibi, lambda x: ExpoSB(band_weights=x), lambda x: T5Bias(x.expand(32, H))],
    ids=["alibi", "exposb", "t5"],
)
def test_parameters_stay_differentiable(device, make):
    weight = torch.rand(H, device=device, requires_grad=True)
    result = resolved(device, make(weight))
    assert result.score_mod_params.dtype == torch.float32
    assert torch.autograd.grad(result.score_mod_params.sum(), weight)[0].all()
    assert result.n_learned_params == (34 if isinstance(make(weight), T5Bias) else 0)


def test_tables_are_made_once_for_many_lengths(device, monkeypatch):
    calls = made(monkeypatch, Rope, "rotation")
    for tokens in (1, 2, 100, 255, 256):
        resolved(device, Rope(), tokens, tokens)
        resolved(device, Rope(), 1, tokens)
    assert len(calls) == 1
    resolved(device, Rope(), 257, 257)
    assert len(calls) == 2


@pytest.mark.parametrize("scheme", [NoPosition(), Alibi()], ids=["none", "alibi"])
def test_a_scheme_that_rotates_nothing_makes_no_positions(device, monkeypatch, scheme):
    """On a GPU they would be kernels, as long as a step of decoding has besides."""
    monkeypatch.setattr(memory, "_indices", lambda *arguments: pytest.fail("indices were made"))
    starts = torch.zeros(B, dtype=torch.int64, device=device)
    for tokens in (1, 100):
        resolved(device, scheme, tokens, 100, query_starts=starts, key_lengths=starts + tokens, causal=True)


def test_numbers_are_made_once_for_as_many_heads(device, monkeypatch):
    calls = made(monkeypatch, Alibi, "score_mod_params")
    for tokens in (1, 100, 1000):
        resolved(device, Alibi(), tokens, tokens)
    resolved(device, Alibi(), heads=6)
    assert [call[0] for call in calls] == [H, 6]


def test_equal_schemes_share_their_tables_and_others_do_not(device, monkeypatch):
    calls = made(monkeypatch, Rope, "rotation")
    first = resolved(device, Rope(500.0))
    assert torch.equal(cos_of(device, Rope(500.0)), first.tables.q.cos)
    assert len(calls) == 1
    for other in (Rope(501.0), Rope(500.0, rotary_dim=4), Rope(500.0, attention_factor=2.0), ExpoSB()):
        assert not torch.equal(cos_of(device, other)[..., :2], first.tables.q.cos[..., :2]) or other.rotary_dim == 4
    assert resolved(device, Rope(500.0, interleaved=True)).tables.interleaved
    assert len(calls) == 5


OF_TENSOR = {
    "rope": ((8,), lambda x: Rope(inv_freq=x)),
    "rerope": ((8,), lambda x: ReRope(3, rope=Rope(inv_freq=x))),
    "self-extend": ((8,), lambda x: SelfExtend(3, 2, rope=Rope(inv_freq=x))),
    "alibi": ((H,), Alibi),
    "bands": ((H,), lambda x: ExpoSB(band_weights=x)),
    "t5": ((8, H), T5Bias),
}


@pytest.mark.parametrize("same_scheme", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen_parameter", [False, True])
@pytest.mark.parametrize("name", OF_TENSOR)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_by_any_way_is_seen(device, write, name, frozen_parameter, dtype, same_scheme):
    """Checkpoint loaders write through `.data`, which leaves a tensor's version as it was."""
    shape, make = OF_TENSOR[name]
    x = torch.rand(shape, device=device).to(dtype)
    x = nn.Parameter(x, requires_grad=False) if frozen_parameter else x
    scheme = make(x)
    first = [x.clone() for x in numbers_of(resolved(device, scheme))]
    WRITES[write](x, torch.rand(shape, device=device).to(dtype))
    new = resolved(device, scheme if same_scheme else make(x))
    expected = resolved(device, make(x.detach().clone()))
    assert any(not torch.equal(a, b) for a, b in zip(first, numbers_of(new), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(numbers_of(expected), numbers_of(new), strict=True))


def test_a_write_through_numpy_is_seen():
    numpy = pytest.importorskip("numpy")
    inv_freq = torch.rand(8, dtype=torch.float64)
    before = cos_of("cpu", Rope(inv_freq=inv_freq)).clone()
    inv_freq.numpy()[:] = numpy.linspace(0.1, 1, 8)
    assert not torch.equal(cos_of("cpu", Rope(inv_freq=inv_freq)), before)


def test_equal_values_in_two_tensors_stay_apart(device):
    one, other = torch.rand(H, device=device), torch.empty(H, device=device)
    other.copy_(one)
    resolved(device, Alibi(one))
    one.data.add_(1)
    assert torch.equal(resolved(device, Alibi(other)).score_mod_params[:, 0], other)


def test_a_tensor_at_the_address_of_another_is_not_mistaken_for_it(device):
    for _ in range(40):
        scheme = Rope(inv_freq=torch.rand(8, device=device))
        assert torch.equal(cos_of(device, scheme), scheme.rotation(torch.arange(5, device=device)[None], D).cos)
        del scheme


def test_the_memory_does_not_grow_without_end(device, monkeypatch):
    inv_freq = torch.rand(8, device=device)
    first = weakref.ref(inv_freq)
    resolved(device, Rope(inv_freq=inv_freq))
    del inv_freq
    for base in range(50):
        resolved(device, Rope(100.0 + base))
    gc.collect()
    assert len(remembered._remembered) <= remembered._MOST_REMEMBERED
    assert first() is None
    calls = made(monkeypatch, Rope, "rotation")
    resolved(device, Rope(149.0))  # the newest is still there
    assert not calls


def test_what_was_used_last_is_kept_longest(device, monkeypatch):
    for base in range(remembered._MOST_REMEMBERED):
        resolved(device, Rope(100.0 + base))
    resolved(device, Rope(100.0))
    resolved(device, Rope(1.5))
    calls = made(monkeypatch, Rope, "rotation")
    resolved(device, Rope(100.0))
    assert not calls
    resolved(device, Rope(101.0))
    assert len(calls) == 1


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_is_made_in_a_mode_can_be_used_in_training(device, mode):
    with mode():
        resolved(device, ExpoSB(distance_decay=True), 3, 7)
        resolved(device, Alibi())
    for result in (resolved(device, ExpoSB(distance_decay=True), 3, 7), resolved(device, Alibi())):
        for x in result:
            assert not isinstance(x, torch.Tensor) or not x.is_inference()


def test_what_is_to_be_learned_is_made_anew(device):
    slopes = nn.Parameter(torch.rand(H, device=device))
    with torch.no_grad():
        resolved(device, Alibi(slopes))
    assert resolved(device, Alibi(slopes)).score_mod_params.requires_grad
    assert not remembered._remembered


@dataclass(frozen=True, eq=False)
class Listed(PositionScheme):
    """A scheme with a value that no memory can be kept under."""

    rates: list

    def rotation(self, positions, head_dim):
        angles = positions[..., None] * torch.tensor(self.rates, device=positions.device)
        return Rotation(angles.cos(), angles.sin(), False, None)


class Plain(PositionScheme):
    """A scheme that is no dataclass of its own."""

    def __init__(self, rate):
        self.rate = rate

    def rotation(self, positions, head_dim):
        angles = positions[..., None] * torch.tensor([self.rate], device=positions.device)
        return Rotation(angles.cos(), angles.sin(), False, None)


@pytest.mark.parametrize("make", [lambda rate: Listed([rate]), Plain], ids=["list", "no dataclass"])
def test_schemes_with_other_values_are_not_mistaken_for_one_another(device, make):
    for rate in (0.5, 0.25):
        scheme = make(rate)
        expected = scheme.rotation(torch.arange(5, device=device)[None], D).cos
        assert torch.equal(cos_of(device, scheme), expected)
    if isinstance(scheme, Listed):
        scheme.rates[0] = 2.0
        assert torch.equal(cos_of(device, scheme), scheme.rotation(torch.arange(5, device=device)[None], D).cos)


def test_threads_share_the_memory(device):
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(100):
            base = 100.0 + int(torch.randint(0, 30, (), generator=generator))
            expected = Rope(base).rotation(torch.arange(5, device=device)[None], D).cos
            if not torch.equal(cos_of(device, Rope(base)), expected):
                wrong.append(base)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

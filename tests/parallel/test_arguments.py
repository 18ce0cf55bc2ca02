"""What stands in for `attention` reads each of its arguments, or refuses it: `context_parallel` and DTensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import agreement_calls, field_calls, processes
from helpers.modes import ON_GPU
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from ropewalk import Alibi, QKNorm, Rope, apply_rope, attention
from ropewalk.ops import dtensor
from ropewalk.ops.arguments import defaults_of
from ropewalk.ops.attention import api as attention_api
from ropewalk.ops.attention.validate import Arguments
from ropewalk.ops.rope import api as rope_api
from ropewalk.parallel import SequenceLayout, api, context_parallel, explain_context_parallel, shard_sequence

pytestmark = pytest.mark.skipif(ON_GPU, reason="gloo's processes run on the CPU")
T, H, K, D = 20, 4, 2, 8
CPU = torch.device("cpu")


def test_ranks_that_differ_say_in_what() -> None:
    processes.run(2, agreement_calls.check)


@pytest.fixture(scope="module")
def layout() -> Iterator[SequenceLayout]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SequenceLayout(dist.group.WORLD, T)
    dist.destroy_process_group()


def draw(transposed: bool = False) -> list[Tensor]:
    xs = [torch.randn(1, T, n, D) for n in (H, K, K)]
    return [x.transpose(1, 2) for x in xs] if transposed else xs


def keywords_of(function: Any) -> set[str]:
    return {name for name, x in inspect.signature(function).parameters.items() if x.kind is x.KEYWORD_ONLY}


# === every argument reaches what stands in for a function ===


def test_attention_hands_on_all_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr(attention_api, "find_sharded", lambda: lambda q, k, v, **keywords: found.update(keywords))
    attention(*draw())
    assert set(found) == keywords_of(attention)
    assert found == {name: defaults_of(attention)[name] for name in found}
    assert set(Arguments._fields) < set(found)


def test_apply_rope_hands_on_all_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded(Tensor):
        pass

    found: dict[str, Any] = {}
    monkeypatch.setattr(rope_api, "is_dtensor", lambda x: True)
    monkeypatch.setattr(dtensor, "rotate", lambda function, q, k, keywords: found.update(keywords))
    apply_rope(torch.ones(1, T, H, D).as_subclass(Sharded), None, torch.ones(T, D // 2), torch.ones(T, D // 2))
    refused = {"block_table", "q_bias", "k_bias"}
    assert {*found, *refused} == {*keywords_of(apply_rope), "cos", "sin"}
    assert set(found) == {*dtensor.ROTATION_READS, "inplace"}


# === those that are read ===

POSITIONS = 2 * torch.arange(T)[None]
# For each argument: keywords of two calls; None where it changes no number.
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "position": ({}, {"position": Rope()}),
    "causal": ({}, {"causal": True}),
    "window": ({}, {"window": 3}),
    "scale": ({}, {"scale": 1.0}),
    "softcap": ({}, {"softcap": 0.5}),
    "sinks": ({}, {"sinks": torch.linspace(0, 1, H)}),
    "norm": ({}, {"norm": QKNorm()}),
    "gate": ({}, {"gate": torch.linspace(0, 1, T * H).view(1, T, H)}),
    "positions_q": ({"position": Rope()}, {"position": Rope(), "positions_q": POSITIONS, "positions_k": POSITIONS}),
    "return_lse": ({}, {"return_lse": True}),
    "layout": ({"layout": "bhtd"}, {"layout": "bhtd", "causal": True}),
}
OF_DTENSORS = {
    **READ,
    "mask": ({}, {"mask": torch.arange(T * T).view(T, T) % 3 != 0}),
    "key_lengths": ({}, {"key_lengths": torch.tensor([9])}),
    "key_starts": ({}, {"key_starts": torch.tensor([9])}),
    "query_starts": ({"causal": True}, {"causal": True, "query_starts": torch.tensor([-9])}),
    "keys_rotated": ({"position": Rope()}, {"position": Rope(), "keys_rotated": True}),
    "return_max_logits": ({}, {"return_max_logits": True}),
    "precision": ({}, {"precision": "int8"}),
}
# Read too, and shown elsewhere: by a bad value, with other tensors, or beside another one.
BAD = {"deterministic": 3, "impl": "fast", "precision": "int4"}
BESIDE = {"positions_k": "positions_q"}
OF_PACKED_AND_PAGES = {"cu_seqlens_q", "cu_seqlens_k", "block_table", "k_scale", "v_scale"}


def as_list(result: Any) -> list[Tensor]:
    results = result if type(result) is tuple else (result,)
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in results]


def check_read(attend: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    xs = draw(after.get("layout") == "bhtd")
    first, second, expected = attend(xs, before), attend(xs, after), as_list(attention(*xs, **after))
    for x, y in zip(second, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert len(first) != len(second) or not torch.allclose(first[0], second[0], atol=1e-3)


def test_what_context_parallel_reads_changes_the_result(layout: SequenceLayout) -> None:
    assert set(api.READS) == {*READ, *BAD, *BESIDE, "dropout_p"}
    assert set(api.READS) <= keywords_of(attention)

    def attend(xs: list[Tensor], keywords: dict[str, Any]) -> list[Tensor]:
        with context_parallel(layout):
            return as_list(attention(*xs, **keywords))

    for before, after in READ.values():
        check_read(attend, before, after)
    xs = draw()
    assert not torch.allclose(attend(xs, {"dropout_p": 0.5})[0], attend(xs, {})[0], atol=1e-3)
    for name, value in BAD.items():
        with pytest.raises((TypeError, ValueError), match=f"{name} is {value!r}"):
            attend(xs, {name: value})


def test_what_dtensors_read_changes_the_result(layout: SequenceLayout) -> None:
    assert set(dtensor.ATTENTION_READS) == {*OF_DTENSORS, *BAD, *BESIDE, *OF_PACKED_AND_PAGES}
    assert set(dtensor.ATTENTION_READS) <= keywords_of(attention)
    assert set(dtensor.ROTATION_READS) <= {*keywords_of(apply_rope), "cos", "sin"}
    mesh = init_device_mesh("cpu", (1,))

    def attend(xs: list[Tensor], keywords: dict[str, Any]) -> list[Tensor]:
        gate = {name: distribute_tensor(x, mesh, [Replicate()]) for name, x in keywords.items() if name == "gate"}
        return as_list(attention(*(distribute_tensor(x, mesh, [Replicate()]) for x in xs), **{**keywords, **gate}))

    for before, after in OF_DTENSORS.values():
        check_read(attend, before, after)
    for name in sorted(OF_PACKED_AND_PAGES):
        xs = field_calls.tensors(field_calls.CHANGES[name].kind, CPU, torch.float32)
        before, after = field_calls.keywords_of(name, CPU)
        first, second, expected = attend(xs, before), attend(xs, after), as_list(attention(*xs, **after))
        torch.testing.assert_close(second, expected)
        assert not torch.allclose(first[0], second[0], atol=1e-3)
    for name, value in BAD.items():
        with pytest.raises((TypeError, ValueError), match=f"{name} is {value!r}"):
            attend(draw(), {name: value})


# === those that are not ===


@pytest.mark.parametrize("value", [torch.ones(H), 0.5])
def test_an_argument_that_nobody_lists_is_refused(layout: SequenceLayout, value: Any) -> None:
    shown = "logit_bias was given" if isinstance(value, Tensor) else "logit_bias is 0.5"
    keywords = {name: defaults_of(attention)[name] for name in keywords_of(attention)}
    with pytest.raises(NotImplementedError, match=f"{shown}, but must be None within context_parallel"):
        api._attend_in_context(layout, *draw(), **keywords, logit_bias=value)
    api._attend_in_context(layout, *draw(), **keywords, logit_bias=None)
    mesh = init_device_mesh("cpu", (1,))
    q, k, v = (distribute_tensor(x, mesh, [Replicate()]) for x in draw())
    with pytest.raises(ValueError, match=f"{shown}, but must be None for DTensors"):
        dtensor.attend(attention, q, k, v, {**keywords, "logit_bias": value})
    rotation = {name: defaults_of(apply_rope)[name] for name in (*dtensor.ROTATION_READS, "inplace")}
    with pytest.raises(ValueError, match=f"{shown}, but must be None for DTensors"):
        dtensor.rotate(apply_rope, q, k, {**rotation, "logit_bias": value})


@pytest.mark.parametrize("name", sorted(keywords_of(attention) - set(api.READS)))
def test_context_parallel_refuses_all_that_it_does_not_list(layout: SequenceLayout, name: str) -> None:
    neutral = defaults_of(attention)[name]
    value = True if neutral is False else torch.ones(1)
    with context_parallel(layout), pytest.raises((ValueError, NotImplementedError), match=name):
        attention(*draw(), **{name: value})
    with pytest.raises(TypeError, match=f"explain_context_parallel got {name}"):
        explain_context_parallel(*draw(), layout=layout, **{name: value})


# === whole sequences, and other attention ===


def test_a_whole_sequence_is_to_be_sharded(layout: SequenceLayout) -> None:
    long = [torch.randn(1, 101, n, D) for n in (H, K, K)]
    text = "q has 101 tokens, but must have the 20 of a shard, .*shard_sequence once.*no generation within"
    with context_parallel(layout), pytest.raises(ValueError, match=text):
        attention(*long, position=Rope())
    q, k, v = draw()
    with context_parallel(layout), pytest.raises(ValueError, match=r"k has 21 tokens, .* no generation within"):
        attention(q[:, :1].expand(-1, T, -1, -1), torch.cat((k, k[:, :1]), 1), torch.cat((v, v[:, :1]), 1))


def test_position_ids_of_a_whole_sequence_are_refused(layout: SequenceLayout) -> None:
    pytest.importorskip("transformers")
    from ropewalk.integrations.huggingface import attention as integration

    with warnings.catch_warnings(), context_parallel(layout):
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="position_ids has 101 tokens, but must have the 20 of a shard"):
            integration._check_position_ids(nn.Module(), torch.arange(101)[None])
        integration._check_position_ids(nn.Module(), layout.positions[None])


def test_a_context_without_our_attention_warns(layout: SequenceLayout) -> None:
    q, k, v = (x.transpose(1, 2) for x in draw())
    text = "no attention of Ropewalk ran within context_parallel"
    with pytest.warns(UserWarning, match=text) as caught, context_parallel(layout):
        nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with context_parallel(layout):
            attention(*(shard_sequence(x, layout) for x in draw()), position=Alibi())
        with pytest.raises(RuntimeError, match="stop"), context_parallel(layout):
            raise RuntimeError("stop")

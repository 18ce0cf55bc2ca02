"""Each backend lists the fields of a call that it reads: all are real, change results, and others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.attention_calls import ROUNDINGS, plainly
from helpers.field_calls import (
    AFTER_CHOICE,
    CHANGES,
    ONE_RESULT,
    WITHOUT_CHANGE,
    B,
    T,
    extend,
    in_pages,
    keywords_of,
    tensors,
)
from helpers.hopper_calls import on_hopper
from helpers.modes import INTERPRETED, ON_GPU, needs_kernels, on_gpu

from ropewalk import Rope, attention
from ropewalk.ops.arguments import is_set
from ropewalk.ops.attention import backends, pages, reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backend import Wanted, why_unread
from ropewalk.ops.attention.call import LEAVES, NOT_IN_PROGRAM, SCHEMA, AttentionCall, from_bhtd
from ropewalk.ops.attention.dropout import make_seed
from ropewalk.ops.attention.hopper import support as hopper
from ropewalk.ops.launch.record import Record
from ropewalk.testing import assert_close_to_truth

LISTS = {
    **{f"{name}": backend.reads for name, backend in backends.BACKENDS.items()},
    **{f"{name}, backward": backend.backward_reads for name, backend in backends.KERNELS.items()},
    "triton, decode": pages.DECODE_READS,
    "gluon, decode": hopper.DECODE_READS,
}


FEW = 4  # queries that the decode kernels run


def in_dtype(keywords: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Keywords with a gate of q's dtype."""
    return {name: x.to(dtype) if name == "gate" else x for name, x in keywords.items()}


def of_last_queries(keywords: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a call of the last queries alone, as in decoding."""
    rows = {"gate": (slice(None), slice(-FEW, None)), "mask": (..., slice(-FEW, None), slice(None))}
    rows["positions_q"] = rows["gate"]
    return {name: x[rows[name]] if name in rows else x for name, x in keywords.items()}


def attend(xs: list[torch.Tensor], keywords: dict[str, Any], impl: str) -> list[torch.Tensor]:
    torch.manual_seed(1)  # of dropout
    result = attention(*xs, impl=impl, **in_dtype(keywords, xs[0].dtype))
    return list(result) if isinstance(result, tuple) else [result]


def in_steps(xs: list[torch.Tensor], keywords: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """The output as the definition gives it with each step rounded to a dtype."""
    given = in_dtype(keywords, dtype)
    gate = given.pop("gate", None)
    call = make_call(*xs, **given)
    torch.manual_seed(1)
    call = call._replace(seed=make_seed(call.q)) if call.dropout_p > 0 else call
    out, _ = reference.attend(reference.in_dtype(call, dtype))
    out = from_bhtd(out, given.get("layout", "bthd"))
    return out if gate is None else out * torch.sigmoid(gate)[..., None]


@torch.no_grad()
def check_change(field: str, impl: str, dtype: torch.dtype, device: torch.device, *, paged: bool = False) -> None:
    """The second call of a field's gives what the reference gives, and another result than the first."""
    kind, both = CHANGES[field].kind, keywords_of(field, device)
    queries = FEW if paged else T
    xs = tensors(kind, device, torch.float32 if kind == "int8 pages" and not ON_GPU else dtype, queries)
    if paged:
        both = tuple(of_last_queries(keywords) for keywords in both)
    if paged and kind == "dense":
        both = tuple(in_pages(xs, keywords)[1] for keywords in both)
        xs = in_pages(xs, {})[0]
    before, after = (make_call(*xs, **in_dtype(keywords, xs[0].dtype)) for keywords in both)
    if field not in AFTER_CHOICE:
        old, new = getattr(before, field), getattr(after, field)
        are_tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
        assert not torch.equal(old, new) if are_tensors else is_set(new, old)
    if any(backends.why_not(backends.BACKENDS[impl], call) is not None for call in (before, after)):
        pytest.skip("refused here")
    first, second = (attend(xs, keywords, impl) for keywords in both)
    wide = torch.float32 if xs[1].dtype == torch.int8 else torch.float64  # which has no quantised pages
    truth = attend([x.to(wide) if x.is_floating_point() else x for x in xs], both[1], "reference")
    plain = [in_steps(xs, both[1], xs[0].dtype), *attend(xs, both[1], "reference")[1:]]
    for mine, x, y in zip(second, truth, plain, strict=True):
        assert_close_to_truth(mine, x, y, ROUNDINGS)
    is_same = len(first) == len(second) and torch.allclose(first[0], second[0], atol=1e-3)
    assert is_same is (field in ONE_RESULT), f"{impl} gives the same with and without {field}"


def changing(reads: tuple[str, ...]) -> list[str]:
    return [name for name in reads if name in CHANGES]


@pytest.mark.parametrize("name", LISTS)
def test_a_list_names_fields_and_each_has_calls_that_show_it(name):
    reads = LISTS[name]
    assert len(set(reads)) == len(reads)
    assert set(reads) <= set(AttentionCall._fields)
    assert {"q", "k", "v", "scale"} <= set(reads)
    assert set(reads) <= {*CHANGES, *WITHOUT_CHANGE, "needs_backward"}
    assert ("seed" in reads) is ("dropout_p" in reads)
    if name in backends.KERNELS:  # `attention` asks whether they run a call before it sets these
        assert ("row_logits" in reads) is ("return_max_logits" in reads)


def test_every_field_but_the_tensors_has_a_neutral_value():
    required = set(AttentionCall._fields) - set(AttentionCall._field_defaults)
    assert required == {"q", "k", "v"}
    assert set(NOT_IN_PROGRAM) <= set(AttentionCall._fields)


@pytest.mark.parametrize("impl", [name for name in backends.LIBRARIES if name != "flash"])  # which needs its library
def test_a_listed_field_changes_the_result(device, impl):
    dtype = torch.float16 if ON_GPU else torch.float32
    for field in changing(backends.BACKENDS[impl].reads):
        try:
            check_change(field, impl, dtype, device)
        except pytest.skip.Exception:
            assert ON_GPU, f"{impl} lists {field}, and refuses the call that shows it"


@needs_kernels
@pytest.mark.parametrize("field", changing(backends.TRITON.reads))
def test_a_field_that_triton_lists_changes_the_result(device, field):
    check_change(field, "triton", torch.float32, device)


@needs_kernels
@pytest.mark.parametrize("field", [name for name in changing(pages.DECODE_READS) if CHANGES[name].kind != "int8 pages"])
def test_a_field_that_the_decode_kernels_list_changes_the_result(device, field):
    check_change(field, "triton", torch.float32, device, paged=True)


@on_gpu
@on_hopper
@pytest.mark.parametrize("field", changing(backends.KERNELS["gluon"].reads))
def test_a_field_that_gluon_lists_changes_the_result(device, field):
    check_change(field, "gluon", torch.float16, device)


@on_gpu
@on_hopper
@pytest.mark.parametrize("field", changing(hopper.DECODE_READS))
def test_a_field_that_gluons_decode_kernels_list_changes_the_result(device, field):
    check_change(field, "gluon", torch.float16, device, paged=True)


@on_gpu
@pytest.mark.parametrize("field", changing(backends.LIBRARIES["flash"].reads))
def test_a_field_that_flash_lists_changes_the_result(device, field):
    check_change(field, "flash", torch.float16, device)


BACKWARDS = [
    *(pytest.param("triton", field, marks=needs_kernels) for field in changing(backends.TRITON.backward_reads)),
    *(pytest.param("gluon", x, marks=[on_gpu, on_hopper]) for x in changing(backends.KERNELS["gluon"].backward_reads)),
]


@pytest.mark.parametrize(("impl", "field"), BACKWARDS)
def test_a_field_that_a_backward_lists_changes_its_gradients(device, impl, field):
    dtype = torch.float32 if INTERPRETED else torch.float16
    both = keywords_of(field, device)
    xs = tensors(CHANGES[field].kind, device, dtype)
    if backends.why_not(backends.BACKENDS[impl], make_call(*xs, **in_dtype(both[1], dtype))) is not None:
        pytest.skip("refused here")
    weights = torch.randn_like(xs[0], dtype=torch.float64)

    def differentiate(function: Any, keywords: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in xs]
        return list(torch.autograd.grad((function(leaves, keywords) * weights.to(dtype)).sum(), leaves))

    before, after = (differentiate(lambda *call: attend(*call, impl)[0], keywords, dtype) for keywords in both)
    truth = differentiate(lambda *call: attend(*call, "reference")[0], both[1], torch.float64)
    plain = differentiate(lambda *call: in_steps(*call, dtype), both[1], dtype)
    for x, y, z in zip(after, truth, plain, strict=True):
        assert_close_to_truth(x, y, z, ROUNDINGS)
    changes = any(not torch.allclose(x, y, atol=1e-3) for x, y in zip(before, after, strict=True))
    assert changes is (field not in ONE_RESULT)


@pytest.mark.parametrize("impl", ["reference", "sdpa", "triton", "gluon", "flash"])
def test_other_q_k_and_v_change_the_result(device, impl):
    xs = tensors("dense", device, torch.float16 if ON_GPU else torch.float32)
    if backends.why_not(backends.BACKENDS[impl], make_call(*xs)) is not None:
        pytest.skip("refused here")
    (out,) = attend(xs, {}, impl)
    for index in range(3):
        others = [x.flip(1) * 2 if place == index else x for place, x in enumerate(xs)]
        assert not torch.allclose(attend(others, {}, impl)[0], out, atol=1e-3)


# === a field that nobody lists ===


@pytest.mark.parametrize("impl", backends.BACKENDS)
@pytest.mark.parametrize(("hint", "value"), [(torch.Tensor | None, "tensor"), (float, 0.5), (bool, True)])
def test_a_field_that_nobody_lists_is_refused(monkeypatch, impl, hint, value):
    neutral = None if value == "tensor" else type(value)()
    record = extend("window_right", hint=hint, default=neutral)
    xs = tensors("dense", torch.device("cpu"), torch.float32)
    plain = record(**make_call(*xs)._asdict())
    backend = backends.BACKENDS[impl]
    monkeypatch.setattr(type(backend), "why_not", lambda self, call: None)  # of a backend that has not heard of it
    assert backends.why_not(backend, plain) is None
    call = plain._replace(logit_bias=torch.ones(T) if value == "tensor" else value)
    assert backends.why_not(backend, call) == ("logit_bias", "logit_bias is not supported")
    with pytest.raises(ValueError, match="logit_bias is not supported"):
        backends.choose(call, impl)
    with pytest.raises(ValueError, match=r"no backend can run this call: logit_bias is not supported"):
        backends.choose(call, None)


def test_a_backends_own_answer_refuses_it_too(device):
    xs = tensors("dense", device, torch.float32)
    call = extend("mask")(**make_call(*xs)._asdict())._replace(logit_bias=torch.ones(T))
    assert backends.BACKENDS["sdpa"].why_not(call).code == "logit_bias"


def test_a_backward_that_does_not_read_a_field_does_not_run(monkeypatch):
    """Such as one that a forward reads."""
    xs = [x.requires_grad_() for x in tensors("dense", torch.device("cpu"), torch.float32)]
    record = extend("window_right")
    call = record(**make_call(*xs)._asdict())._replace(logit_bias=torch.ones(T))
    triton, gluon = backends.TRITON, backends.KERNELS["gluon"]
    for backend in (triton, gluon):
        monkeypatch.setattr(type(backend), "why_not", lambda self, call: None)
        monkeypatch.setattr(type(backend), "reads", (*backend.reads, "logit_bias"))
    assert backends.why_not(triton, call).code == "logit_bias"
    assert backends.why_not(triton, call._replace(needs_backward=False)) is None
    monkeypatch.setattr(type(triton), "backward_reads", (*triton.backward_reads, "logit_bias"))
    assert backends.why_not(gluon, call) is None
    assert backends.backward_of(gluon, call, Wanted()) is triton  # gluon's own does not list it
    assert backends.backward_of(gluon, call._replace(logit_bias=None), Wanted()) is gluon


def test_kernels_that_do_not_read_a_field_leave_calls_of_pages_to_a_copy(device):
    xs, keywords = in_pages(tensors("dense", device, torch.float32, queries=2), {})
    call = extend("window_right")(**make_call(*xs, **keywords)._asdict())
    assert not pages.is_copied(call)
    assert hopper._why_not_paged(call) is None or "logit_bias" not in hopper._why_not_paged(call).reason
    call = call._replace(logit_bias=torch.ones(T))
    assert pages.is_copied(call)
    assert "logit_bias is not supported" in hopper._why_not_paged(call).reason


def test_the_check_is_traced():
    xs = tensors("dense", torch.device("cpu"), torch.float32)
    keywords = {"softcap": 2.0, "key_lengths": torch.tensor([9, T])}
    out = torch.compile(lambda *xs: attention(*xs, **keywords), backend="eager", fullgraph=True)(*xs)
    assert_close_to_truth(out, plainly(torch.float64)(*xs, **keywords), attention(*xs, **keywords))


@pytest.mark.parametrize(
    ("value", "neutral", "expected"),
    [
        (None, None, False),
        (torch.zeros(2), None, True),
        (0.0, 0.0, False),
        (1, 0, True),
        (True, False, True),
        ((None, 0), (None, 0), False),
        ((None, 1), (None, 0), True),
        ((torch.zeros(2), 0), (None, 0), True),
        (None, 1.0, True),
    ],
)
def test_a_value_that_is_not_neutral_is_set(value, neutral, expected):
    assert is_set(value, neutral) is expected


def test_reasons_are_looked_at_in_their_order(device):
    keywords = {"mask": torch.ones(1, 1, T, T, dtype=torch.bool, device=device), "softcap": 2.0}
    call = make_call(*tensors("dense", device, torch.float32), **keywords)
    reads = tuple(name for name in AttentionCall._fields if name not in keywords)
    assert why_unread(call, reads) == ("mask", "mask is not supported")
    assert why_unread(call, reads, {"softcap": "no cap"}) == ("softcap", "no cap")
    assert why_unread(call, AttentionCall._fields) is None


# === leaves and schemas ===


@pytest.mark.parametrize("after", ["v", "mask", "blocks", "sinks", "tables", "row_logits"])
@pytest.mark.parametrize(
    ("hint", "value", "schema"), [(torch.Tensor | None, torch.ones(3), "Tensor?"), (int, 7, "int")]
)
def test_a_field_in_the_middle_needs_no_other_change(after, hint, value, schema):
    record = extend(after, hint=hint, default=None if schema == "Tensor?" else 0)
    described: Record[Any] = Record(record, NOT_IN_PROGRAM)
    names = list(described.names)
    assert tuple(name for name in names if name != "logit_bias") == LEAVES
    following = AttentionCall._fields[AttentionCall._fields.index(after) + 1 :]
    next_field = next((name for name in following if name not in NOT_IN_PROGRAM), None)
    place = names.index("logit_bias")
    assert next_field is None or names[place + 1].startswith(next_field)
    assert sorted(described.schema.split(", ")) == sorted([*SCHEMA.split(", "), f"{schema} logit_bias"])
    xs = tensors("dense", torch.device("cpu"), torch.float32)
    keywords = {"position": Rope(), "causal": True, "key_lengths": torch.tensor([9, T])}
    call = record(**make_call(*xs, **keywords)._asdict())._replace(logit_bias=value)
    values = described.flatten(call)
    assert values[place] is value
    again = described.unflatten(values)
    assert type(again) is record
    for name in record._fields:
        mine, theirs = getattr(again, name), getattr(call, name)
        if name not in NOT_IN_PROGRAM:
            assert mine is theirs or repr(mine) == repr(theirs), name


def test_leaves_are_the_records():
    assert len(LEAVES) == len(set(LEAVES))
    assert {name for name in AttentionCall._fields if name not in NOT_IN_PROGRAM} - set(LEAVES) == {
        "blocks",
        "tables",
        "far",
    }


def test_an_operators_schema_has_room():
    """PyTorch's dispatcher takes 64 arguments: a leaf more than that needs another way for some."""
    for name in ("attend", "attend_with_row_logits", "attend_backward"):
        schema = getattr(torch.ops.ropewalk, name).default._schema
        assert len(schema.arguments) <= 64
        assert set(LEAVES) <= {argument.name for argument in schema.arguments}


def test_the_reference_refuses_what_only_kernels_read(device):
    call = make_call(*tensors("dense", device, torch.float32))._replace(gate=torch.ones(B, 4, T, device=device))
    assert backends.why_not(backends.REFERENCE, call).code == "gate"

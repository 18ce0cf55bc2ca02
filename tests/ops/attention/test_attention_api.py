"""What `attention` promises, whoever serves it: results, layouts, errors, and who is chosen."""

import copy
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers.attention_calls import (
    ROUNDINGS,
    SCHEMES,
    TK,
    TQ,
    B,
    D,
    H,
    K,
    assert_correct,
    draw,
    plainly,
    refusal_of,
    value_and_grads,
)
from helpers.modes import ON_GPU, needs_kernels, on_gpu
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ropewalk import Alibi, ExpoSB, NoPosition, PositionScheme, Rope, T5Bias, apply_rope, attention, explain_choice
from ropewalk import device as gpu
from ropewalk.ops.attention import backends, reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import Rule, backend_order
from ropewalk.ops.attention.call import NO_TABLES, FarRange, RopeTable
from ropewalk.ops.attention.libraries import sdpa
from ropewalk.schemes import Rotation
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

OURS = [pytest.param("triton", marks=needs_kernels), "reference"]
IMPLS = [*OURS, "flash", "sdpa", None]


@pytest.fixture(params=IMPLS, ids=str)
def impl(request, device):
    """An implementation that this run has."""
    reason = None if request.param is None else backends.why_missing(request.param, device)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def runs(impl, *tensors, **call):
    """Whether a backend runs a call; the chosen one always does."""
    return impl is None or refusal_of(impl, *tensors, **call) is None


def assert_refused(impl, *tensors, **call):
    """Our own kernels have no excuse; a library that cannot serve a call says so."""
    assert impl in ("flash", "sdpa")
    with pytest.raises(ValueError, match=f"impl is '{impl}', but it cannot run this call: "):
        attention(*tensors, impl=impl, **call)


def half_or_float(impl, device):
    """A dtype that every implementation takes where it runs."""
    return torch.bfloat16 if device.type == "cuda" and impl != "reference" else torch.float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_implementation_computes_the_same(device, impl, scheme, causal):
    call = {"position": SCHEMES[scheme], "causal": causal}
    tensors = draw(device, half_or_float(impl, device))
    if not runs(impl, *tensors, **call):
        assert_refused(impl, *tensors, **call)
        return
    with unchanged(tensors), poisoned_memory():
        assert_correct(lambda *leaves, **keywords: attention(*leaves, impl=impl, **keywords), tensors, **call)


SIZES = [{"queries": 1}, {"queries": 9}, {"keys": 3}, {"heads": 2}, {"key_heads": 1}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("scheme", ["none", "rope", "exposb"])
def test_lengths_and_heads_may_differ(device, impl, scheme, sizes):
    tensors, call = draw(device, half_or_float(impl, device), **sizes), {"position": SCHEMES[scheme]}
    if not runs(impl, *tensors, **call):
        assert_refused(impl, *tensors, **call)
        return
    assert_correct(lambda *leaves, **keywords: attention(*leaves, impl=impl, **keywords), tensors, **call)


MASKED = {
    "window": lambda device: {"window": 5},
    "causal window": lambda device: {"window": 5, "causal": True},
    "lengths": lambda device: {"key_lengths": torch.tensor([TK, 3], device=device)},
    "mask": lambda device: {"mask": torch.rand(TQ, TK, device=device) > 0.5},
    "positions": lambda device: {"positions_q": torch.arange(TQ, device=device)[None] * 3},
}


@pytest.mark.parametrize("kind", MASKED)
def test_what_some_alone_can_do_they_do(device, impl, kind):
    tensors = draw(device, half_or_float(impl, device))
    call = {"position": Rope(), **MASKED[kind](device)}
    if not runs(impl, *tensors, **call):
        assert_refused(impl, *tensors, **call)
        return
    assert_correct(lambda *leaves, **keywords: attention(*leaves, impl=impl, **keywords), tensors, **call)


def test_layouts_differ_in_nothing_but_strides(device, impl):
    tensors = draw(device, half_or_float(impl, device))
    mask = None if impl in ("sdpa", "flash") else torch.rand(B, TQ, TK, device=device) > 0.3
    expected = attention(*tensors, position=Rope(), mask=mask, impl=impl)
    assert expected.shape == (B, TQ, H, D)
    turned = [x.transpose(1, 2) for x in tensors]
    for views in (turned, [x.contiguous() for x in turned]):
        out = attention(*views, position=Rope(), mask=mask, layout="bhtd", impl=impl)
        assert out.shape == (B, H, TQ, D)
        torch.testing.assert_close(out.transpose(1, 2), expected)


def test_slices_of_one_projection(device, impl):
    fused = torch.randn(B, TQ, H + 2 * K, D, device=device).to(half_or_float(impl, device))
    q, k, v = fused.split([H, K, K], dim=2)
    with unchanged([fused]):
        out = attention(q, k, v, position=Rope(), causal=True, impl=impl)
    dense = attention(*(x.contiguous() for x in (q, k, v)), position=Rope(), causal=True, impl=impl)
    torch.testing.assert_close(out, dense)


@pytest.mark.parametrize("sizes", [{"queries": 0}, {"keys": 0}, {"queries": 0, "keys": 0}, {"batch": 0}], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_nothing_to_attend_or_to_attend_from(device, name, sizes):
    tensors = [x.requires_grad_() for x in draw(device, **sizes)]
    out = attention(*tensors, position=Rope(), causal=True, impl=name)
    assert out.shape == tensors[0].shape
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), tensors):
        assert not grad.any()


# The log-sum-exp


@pytest.mark.parametrize("name", OURS)
def test_the_log_sum_exp_is_natural_and_differentiable(device, name):
    tensors = draw(device)
    call = {"position": Rope(), "window": 7}
    weights = torch.randn(B, H, TQ, device=device, dtype=torch.float64)

    def function(*leaves, attend, **keywords):
        out, lse = attend(*leaves, return_lse=True, **keywords)
        assert lse.shape == (B, H, TQ)
        assert lse.dtype == (torch.float64 if leaves[0].dtype == torch.float64 else torch.float32)
        return torch.cat([out.transpose(1, 2), lse[..., None]], dim=-1)

    weights = torch.randn(B, H, TQ, D + 1, device=device, dtype=torch.float64)
    actual = value_and_grads(function, tensors, weights, attend=attention, impl=name, **call)
    doubles = [x.double() for x in tensors]
    truth = value_and_grads(function, doubles, weights, attend=plainly(torch.float64), **call)
    baseline = value_and_grads(function, tensors, weights, attend=plainly(torch.float32), **call)
    for mine, exact, plain in zip(actual, truth, baseline, strict=True):
        assert_close_to_truth(mine, exact, plain, ROUNDINGS)


@pytest.mark.parametrize("name", OURS)
def test_the_log_sum_exp_may_be_all_that_is_used(device, name):
    tensors = [x.requires_grad_() for x in draw(device)]
    _, lse = attention(*tensors, return_lse=True, impl=name)
    grad_q, grad_k, grad_v = torch.autograd.grad(lse.sum(), tensors, materialize_grads=True)
    assert grad_q.any()
    assert grad_k.any()
    assert not grad_v.any()


@pytest.mark.parametrize("name", [*OURS, None])
def test_rows_that_attend_nothing(device, name):
    tensors = [x.requires_grad_() for x in draw(device)]
    mask = torch.rand(B, H, TQ, TK, device=device) > 0.5
    mask[0, 1, 3], mask[1] = False, False
    empty = ~mask.any(-1)
    out, lse = attention(*tensors, mask=mask, return_lse=True, impl=name)
    assert torch.equal(lse == -math.inf, empty)
    assert not out.transpose(1, 2)[empty].any()
    total = (out * torch.randn_like(out)).sum() + lse[~empty].sum()
    grads = torch.autograd.grad(total, tensors)
    assert all(bool(x.isfinite().all()) for x in grads)
    assert not grads[0].transpose(1, 2)[empty].any()
    assert not any(bool(x[1].any()) for x in grads)


# Autocast, modes and transforms


def test_autocast_casts_as_for_pytorchs_own(device, impl):
    dtype = torch.bfloat16
    if impl == "triton" and device.type == "cpu":
        dtype = torch.float16  # the interpreter does not round to bfloat16
    tensors = [x.requires_grad_() for x in draw(device)]
    call = {"position": Rope(), "causal": True, "impl": impl}
    with torch.autocast(device.type, dtype):
        out = attention(*tensors, **call)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(grad.dtype == torch.float32 for grad in grads)
    torch.testing.assert_close(out, attention(*(x.to(dtype) for x in tensors), **call))


def test_autocast_leaves_float64_alone_and_the_reference_in_float32(device):
    with torch.autocast(device.type, torch.bfloat16):
        assert attention(*draw(device, torch.float64)).dtype == torch.float64
        tensors = draw(device, torch.bfloat16)
        out, lse = attention(*tensors, impl="reference", return_lse=True)
    expected = attention(*tensors, impl="reference", return_lse=True)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_transforms_run_the_reference(device):
    q, k, v = draw(device)
    expected = attention(q, k, v, position=Rope(), impl="reference")
    mapped = torch.vmap(lambda q, k, v: attention(q[None], k[None], v[None], position=Rope())[0])(q, k, v)
    torch.testing.assert_close(mapped, expected)
    grad = torch.func.grad(lambda q: attention(q, k, v, position=Rope()).sin().sum())(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(attention(leaf, k, v, position=Rope()).sin().sum(), leaf)[0])
    _, tangent = torch.func.jvp(lambda v: attention(q, k, v, position=Rope()), (v,), (torch.ones_like(v),))
    torch.testing.assert_close(tangent, torch.ones_like(expected))
    for name in ("triton", "sdpa"):
        with pytest.raises(ValueError, match=r"torch\.func transforms .* are not supported"):
            torch.func.grad(lambda q, name=name: attention(q, k, v, impl=name).sum())(q)


def test_the_reference_is_differentiable_twice(device):
    tensors = [x.requires_grad_() for x in draw(device, torch.float64, batch=1, queries=3, keys=3, heads=2, head_dim=4)]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: attention(q, k, v, position=Rope(), causal=True, impl="reference"), tensors
    )


@needs_kernels
def test_the_kernels_are_differentiable_once(device):
    tensors = [x.requires_grad_() for x in draw(device)]
    out = attention(*tensors, impl="triton")
    grads = torch.autograd.grad(out.sin().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiat"):
        torch.autograd.grad(sum(grad.sum() for grad in grads), tensors)


def test_inference_mode_leaves_training_alone(device, impl):
    """What is remembered of a call in inference mode serves one that is differentiated."""
    tensors = [x.to(half_or_float(impl, device)) for x in draw(device)]
    position = Rope(base=777.0)
    with torch.inference_mode():
        expected = attention(*tensors, position=position, impl=impl)
    leaves = [x.requires_grad_() for x in tensors]
    out = attention(*leaves, position=position, impl=impl)
    torch.testing.assert_close(out, expected.clone())
    torch.autograd.grad(out.sum(), leaves)


# Errors


@pytest.mark.parametrize("position", [None, "rope", 3, Rope, torch.ones(3)], ids=str)
def test_a_position_that_is_no_scheme_is_refused(device, position):
    with pytest.raises(TypeError, match=r"position is .*, but must be a scheme of ropewalk\.schemes"):
        attention(*draw(device), position=position)


def test_bad_arguments_are_refused_by_name(device):
    q, k, v = draw(device)
    with pytest.raises(ValueError, match="impl is 'cudnn', but must be None or one of 'triton', 'gluon', 'flash'"):
        attention(q, k, v, impl="cudnn")
    with pytest.raises(ValueError, match="layout is 'hbtd'"):
        attention(q, k, v, layout="hbtd")
    for causal in (2, "yes", None, torch.ones(1)):
        with pytest.raises(TypeError, match=r"causal is .*, but must be True or False"):
            attention(q, k, v, causal=causal)
    with pytest.raises(TypeError, match="deterministic is 1, but must be None, True or False"):
        attention(q, k, v, deterministic=1)
    with pytest.raises(TypeError, match="q is list"):
        attention([1.0], k, v)
    with pytest.raises(ValueError, match="q has 4 heads, but they must be a multiple of k's 3"):
        attention(q, *draw(device, key_heads=3)[1:])
    with pytest.raises(TypeError, match="windows"):
        explain_choice(q, k, v, windows=3)


REFUSED = {
    "sdpa": [
        ({"position": Alibi()}, "score_mod"),
        ({"position": ExpoSB(distance_decay=True)}, "score_mod"),
        ({"window": 3}, "window"),
        ({"key_lengths": torch.tensor([1, 2])}, "key_lengths"),
        ({"mask": torch.ones(TQ, TK, dtype=torch.bool)}, "mask"),
        ({"return_lse": True}, "return_lse"),
        ({"scale": -1.0}, "scale"),
        ({"key_starts": torch.tensor([1, 2])}, "key_starts"),
        ({"query_starts": torch.tensor([0, 0])}, "query_starts"),
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": torch.ones(H)}, "sinks"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"position": T5Bias(torch.ones(32, H))}, "score_mod"),
        ({"position": ExpoSB(band_weights=torch.ones(H))}, "score_mod"),
    ],
    "triton": [({}, "dtype")],
}


def test_libraries_refuse_packed_sequences_and_pages(device):
    q, k, v = draw_packed(device, 9, 9)
    packed = {"cu_seqlens_q": torch.tensor([0, 4, 9], device=device), "layout": "thd"}
    assert refusal_of("sdpa", q, k, v, **packed) == (None if device.type == "cpu" else "cu_seqlens_q")
    nothing = {**packed, "cu_seqlens_q": torch.tensor([0, 0], device=device)}
    assert refusal_of("sdpa", q, k, v, **nothing) == ("empty" if device.type == "cpu" else "cu_seqlens_q")
    with FlopCounterMode(display=False):  # a tracer, which is a mode too, could not follow what is read
        assert refusal_of("sdpa", q, k, v, **packed) == "cu_seqlens_q"
    q, pages = torch.randn(B, 1, H, D, device=device), torch.randn(4, 16, K, D, device=device)
    call = {"key_lengths": torch.tensor([3, 20], device=device)}
    call["block_table"] = torch.tensor([[0, 1], [2, 1]], device=device)
    assert refusal_of("sdpa", q, pages, pages, **call) == "block_table"
    for position, rotated in ((ExpoSB(), True), (ExpoSB(), False), (Rope(), False), (Alibi(), False)):
        code = refusal_of("triton", q, pages, pages, position=position, keys_rotated=rotated, **call)
        assert code in (None, "device")


NEW = {
    "softcap": lambda device: 30.0,
    "sinks": lambda device: torch.ones(H, device=device),
    "dropout_p": lambda device: 0.1,
}


def draw_packed(device, queries, keys, dv=D):
    shapes = ((queries, H, D), (keys, K, D), (keys, K, dv))
    return [torch.randn(shape, device=device).requires_grad_() for shape in shapes]


PACKS = {
    "as long": ([5, 0, 9, 3], None, 0),
    "with room": ([5, 9, 1], None, 7),
    "of other lengths": ([5, 0, 9, 3, 2], [7, 4, 2, 0, 2], 3),
    "one": ([11], None, 0),
    "none": ([], None, 4),
}


# PyTorch's attention takes them on a CPU alone.
MASKS = ("window", "mask", "key_lengths", "key_starts", "query_starts")
SDPA_MASKED = {
    "mask": lambda: {"mask": torch.rand(B, H, TQ, TK) < 0.4},
    "mask-of-keys": lambda: {"mask": torch.rand(B, 1, 1, TK) < 0.4},
    "rows-of-nothing": lambda: {"mask": (torch.arange(TQ) % 3 > 0)[:, None].expand(TQ, TK)},
    "key_lengths": lambda: {"key_lengths": torch.tensor([0, TK - 2])},
    "key_starts": lambda: {"key_starts": torch.tensor([3, 0]), "causal": True},
    "query_starts": lambda: {"query_starts": torch.tensor([0, 1]), "causal": True},
    "window": lambda: {"window": 2},
    "causal-window": lambda: {"window": 3, "causal": True, "key_lengths": torch.tensor([TK, 2])},
    "causal": lambda: {"causal": True},
}


@pytest.mark.parametrize("block", [1 << 24, 3 * B * TK])
@pytest.mark.parametrize("name", SDPA_MASKED)
def test_pytorchs_attention_takes_masks_on_a_cpu(monkeypatch, name, block):
    """Rows that attend nothing are zeros, and keys that do not exist may hold anything."""
    monkeypatch.setattr(sdpa, "MASK_BLOCK", block)
    call = SDPA_MASKED[name]()
    q, k, v = draw(torch.device("cpu"), torch.float64, keys=TK + 1 if "query_starts" in call else TK)
    if "key_lengths" in call:
        k[0, call["key_lengths"][0] :] = v[0, call["key_lengths"][0] :] = torch.nan
    assert explain_choice(q, k, v, position=Rope(), **call).name == "sdpa"
    results = []
    for impl in ("sdpa", "reference"):
        tensors = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*tensors, position=Rope(), impl=impl, **call)
        results.append((out, *torch.autograd.grad(out.sin().sum(), tensors)))
    for mine, defined in zip(*results, strict=True):
        torch.testing.assert_close(mine, defined)


@pytest.mark.parametrize("call", [{}, {"causal": True}, {"window": (3, 1)}], ids=str)
@pytest.mark.parametrize("pack", [name for name in PACKS if name != "none"])
def test_pytorchs_attention_takes_packed_sequences_on_a_cpu(pack, call):
    lengths_q, lengths_k, room = PACKS[pack]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k or lengths_q))
    q, k, v = draw_packed(torch.device("cpu"), int(cu_q[-1]) + room, int(cu_k[-1]) + room, dv=24)
    call = {**call, "position": Rope(), "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "layout": "thd"}
    assert explain_choice(q, k, v, **call).name == "sdpa"
    with torch.no_grad():
        k[int(cu_k[-1]) :] = v[int(cu_k[-1]) :] = torch.nan  # no sequence has them
    results = []
    for impl in ("sdpa", "reference"):
        out = attention(q, k, v, impl=impl, **call)
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    for mine, defined in zip(*results, strict=True):
        torch.testing.assert_close(mine, defined)


@pytest.mark.parametrize("impl", ["sdpa", "reference"])
@pytest.mark.parametrize("head_dim", [258, 512])
def test_heads_of_any_width(device, impl, head_dim):
    """Gemma 4 has 512 features in a head. Triton's kernels take as many, in halves."""
    tensors = draw(device, torch.float32, head_dim=head_dim)
    call = {"position": Rope(), "causal": True}
    assert_correct(lambda *leaves, **keywords: attention(*leaves, impl=impl, **keywords), tensors, **call)
    assert refusal_of("flash", *tensors) is not None


@pytest.mark.parametrize("name", NEW)
def test_every_refusal_names_the_argument(device, name):
    explained = explain_choice(*draw(device, torch.float16), **{name: NEW[name](device)})
    assert name in explained.others["sdpa"]
    assert name in explained.others["flash"] or "flash-attn" in explained.others["flash"]
    assert set(explained.others) | {explained.name} == set(backends.BACKENDS)
    if device.type == "cpu":
        assert explained.name == "reference"


@pytest.mark.parametrize(("name", "call", "code"), [(name, *case) for name in REFUSED for case in REFUSED[name]])
def test_a_refusal_has_a_code_and_says_why(device, name, call, code):
    tensors = draw(device, torch.float64 if name == "triton" else torch.float16)
    call = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    if name == "sdpa" and device.type == "cpu" and code in MASKS:
        assert refusal_of(name, *tensors, **call) is None
        return
    assert refusal_of(name, *tensors, **call) == code
    reason = explain_choice(*tensors, **call).others[name]
    with pytest.raises(ValueError, match=re.escape(f"impl is '{name}', but it cannot run this call: {reason}")):
        attention(*tensors, impl=name, **call)


@on_gpu
def test_causal_attention_of_other_lengths_is_not_pytorchs(device):
    with pytest.raises(ValueError, match="causal attention is aligned at the top left"):
        attention(*draw(device, torch.float16, queries=3), causal=True, impl="sdpa")


@pytest.mark.skipif(ON_GPU, reason="there is a GPU")
def test_triton_needs_a_gpu(device):
    with pytest.raises(ValueError, match="Triton kernels need a GPU, and the tensors are on cpu"):
        attention(*draw(device), impl="triton")


# Schemes of one's own


@dataclass(frozen=True, eq=False)
class Fading(PositionScheme):
    """A scheme with a reference form alone."""

    def score_mod(self, scores, distance):
        return scores - 0.1 * distance.abs()


def test_a_scheme_without_score_functions_is_the_references(device):
    tensors = draw(device)
    assert explain_choice(*tensors, position=Fading()).name == "reference"
    for name in ("triton", "sdpa"):
        assert refusal_of(name, *tensors, position=Fading()) == "score_mod"
    slopes = torch.full((H,), 0.1, device=device)
    torch.testing.assert_close(
        attention(*tensors, position=Fading()), attention(*tensors, position=Alibi(slopes), impl="reference")
    )


@dataclass(frozen=True, eq=False)
class Learned(Fading):
    """A scheme whose numbers a gradient may reach, which its score functions do not pass on."""

    rates: torch.Tensor

    def kernel_score_mod(self):
        return f"{__name__}:WITHOUT_GRADIENT"

    def score_mod_params(self, n_heads, device):
        return self.rates.to(device)[:, None]

    def score_mod(self, scores, distance):
        return scores - self.rates[:, None, None] * distance.abs()


WITHOUT_GRADIENT = SimpleNamespace(forward=None, backward=None)


def test_numbers_that_score_functions_do_not_differentiate_are_the_references(device):
    tensors = draw(device)
    rates = nn.Parameter(torch.rand(H, device=device))
    explained = explain_choice(*tensors, position=Learned(rates))
    assert explained.name == "reference"
    if device.type == "cuda":
        assert refusal_of("triton", *tensors, position=Learned(rates)) == "param_grad"
    (grad,) = torch.autograd.grad(attention(*tensors, position=Learned(rates)).sin().sum(), rates)
    (expected,) = torch.autograd.grad(attention(*tensors, position=Alibi(rates)).sin().sum(), rates)
    torch.testing.assert_close(grad, expected)


def test_tables_that_are_to_be_learned_are_the_references(device):
    @dataclass(frozen=True, eq=False)
    class Turning(PositionScheme):
        rates: torch.Tensor

        def rotation(self, positions, head_dim):
            angles = positions[..., None] * self.rates
            return Rotation(angles.cos(), angles.sin(), False, None)

    rates = nn.Parameter(torch.rand(D // 2, device=device))
    tensors = draw(device)
    assert explain_choice(*tensors, position=Turning(rates)).name == "reference"
    assert refusal_of("triton", *tensors, position=Turning(rates)) == "learned_tables"
    assert refusal_of("sdpa", *tensors, position=Turning(rates)) == "learned_tables"


# Packed sequences

LEARNED = {
    "alibi": (Alibi, (H,)),
    "exposb-bands": (lambda x: ExpoSB(band_weights=x), (H,)),
    "exposb-bands-decay": (lambda x: ExpoSB(band_weights=x, distance_decay=True), (H,)),
    "t5": (lambda x: T5Bias(x, max_distance=12), (8, H)),
    "t5-decoder": (lambda x: T5Bias(x, max_distance=12, bidirectional=False), (8, H)),
}


def t5(device):
    return T5Bias(torch.randn(32, H, device=device), max_distance=20)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", ["rope", "exposb-decay", "alibi", "t5"])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("name", OURS)
def test_packed_sequences_are_calls_of_their_own(device, name, pack, scheme, causal):
    lengths_q, lengths_k, room = PACKS[pack]
    cu_q, cu_k = (
        None if lengths is None else torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0).int()
        for lengths in (lengths_q, lengths_k)
    )
    total_q, total_k = (sum(lengths) + room for lengths in (lengths_q, lengths_q if lengths_k is None else lengths_k))
    tensors = draw_packed(device, total_q, total_k, dv=24)
    call = {"position": t5(device) if scheme == "t5" else SCHEMES[scheme], "causal": causal, "return_lse": True}
    packed = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "layout": "thd", "impl": name}
    out, lse = attention(*tensors, **call, **packed)
    assert out.shape == (total_q, H, 24)
    assert lse.shape == (H, total_q)
    outs, lses, start_q, start_k = [], [], 0, 0
    for length_q, length_k in zip(lengths_q, lengths_q if lengths_k is None else lengths_k, strict=True):
        q, k, v = tensors
        rows, columns = slice(start_q, start_q + length_q), slice(start_k, start_k + length_k)
        alone, lse_alone = attention(q[None, rows], k[None, columns], v[None, columns], impl="reference", **call)
        outs.append(alone[0])
        lses.append(lse_alone[0])
        start_q, start_k = rows.stop, columns.stop
    outs.append(torch.zeros(total_q - start_q, H, 24, device=device))
    lses.append(torch.full((H, total_q - start_q), -math.inf, device=device))
    expected, expected_lse = torch.cat(outs), torch.cat(lses, dim=1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    if lengths_q:
        weights = torch.randn_like(out)
        grads, truth = (torch.autograd.grad((x * weights).sum(), tensors) for x in (out, expected))
        torch.testing.assert_close(grads, truth, rtol=1e-3, atol=1e-4)


def test_packed_tokens_may_have_positions_of_their_own(device):
    q, k, v = draw_packed(device, 9, 9)
    cu_seqlens = torch.tensor([0, 4, 9], device=device)
    call = {"position": Rope(), "cu_seqlens_q": cu_seqlens, "layout": "thd"}
    index = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4], device=device)
    torch.testing.assert_close(
        attention(q, k, v, positions_q=index, positions_k=index, **call), attention(q, k, v, **call)
    )
    far = attention(q, k, v, positions_q=3 * index, positions_k=index + 7, **call)
    alone = attention(
        *(x[None, 4:] for x in (q, k, v)),
        position=Rope(),
        positions_q=3 * index[None, 4:],
        positions_k=index[None, 4:] + 7,
    )
    torch.testing.assert_close(far[4:], alone[0])


# Generation


@pytest.mark.parametrize("form", ["padded on the left", "cache", "cache of rotated keys", "pages"])
@pytest.mark.parametrize("scheme", ["rope", "exposb-decay", "alibi", "t5"])
@pytest.mark.parametrize("name", OURS)
def test_generation_token_by_token_is_one_call(device, name, scheme, form):
    """Prompts of several lengths, then a token at a time, as serving does it in several ways."""
    position = t5(device) if scheme == "t5" else SCHEMES[scheme]
    prompts, steps = [5, 2], 3
    longest, page = max(prompts), 16
    rows = [[x[0] for x in draw(device, batch=1, queries=n + steps, keys=n + steps)] for n in prompts]
    expected = [attention(*(x[None] for x in row), position=position, causal=True, impl="reference")[0] for row in rows]
    rotates = form in ("cache of rotated keys", "pages")
    pad = form == "padded on the left"
    keys = torch.full((B, 32, K, D), math.nan, device=device)
    values = keys.clone()
    for b, (_, k, v) in enumerate(rows):
        if rotates:
            table = position.rotation(torch.arange(len(k), device=device)[None], D)
            if table is not None:
                k = apply_rope(k[None], None, table.cos, table.sin, interleaved=table.interleaved)[0]
                k = k if table.weights is None else k * table.weights
        first = longest - prompts[b] if pad else 0
        keys[b, first : first + len(k)], values[b, first : first + len(k)] = k, v
    starts = torch.tensor([longest - n if pad else 0 for n in prompts], device=device)
    call = {"position": position, "causal": True, "keys_rotated": rotates, "impl": name}
    if form == "pages":  # in any order, the unused ones anything
        table = torch.tensor([[3, 10**6], [1, -1]], device=device, dtype=torch.int32)
        pool = [torch.full((5, page, K, D), math.nan, device=device) for _ in range(2)]
        for place, x in zip(pool, (keys, values), strict=True):
            place[3], place[1] = x[0, :page], x[1, :page]
        keys, values = pool
        call["block_table"] = table
    for step in range(steps + 1):
        lengths = torch.tensor([n + step for n in prompts], device=device)
        tokens = longest if step == 0 else 1
        q = torch.zeros(B, tokens, H, D, device=device)
        if pad:
            call["key_starts"] = starts
            here = {"key_lengths": torch.full((B,), longest + step, device=device)}
            here["query_starts"] = torch.full((B,), 0 if step == 0 else longest + step - 1, device=device)
        else:
            here = {"key_lengths": lengths, "query_starts": lengths - 1 if step else torch.zeros_like(lengths)}
        for b, n in enumerate(prompts):
            if step:
                q[b, 0] = rows[b][0][n + step - 1]
            else:
                first = longest - n if pad else 0
                q[b, first : first + n] = rows[b][0][:n]
        with torch.no_grad():
            out = attention(q, keys, values, **call, **here)
        assert out.isfinite().all()
        for b, n in enumerate(prompts):
            if step:
                mine, theirs = out[b, 0], expected[b][n + step - 1]
            else:
                first = longest - n if pad else 0
                mine, theirs = out[b, first : first + n], expected[b][:n]
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_pages_have_no_backward(device, name):
    pages = torch.randn(3, 16, K, D, device=device)
    q = torch.randn(B, 1, H, D, device=device)
    weight = nn.Parameter(torch.rand(H, device=device))
    call = {"key_lengths": torch.tensor([3, 20], device=device), "impl": name}
    call["block_table"] = torch.tensor([[0, 1], [2, 1]], device=device)
    attention(q, pages, pages, **call)
    for position in (Alibi(weight), ExpoSB(band_weights=weight)):
        with pytest.raises(ValueError, match="position has parameters that require grad, but with block_table there"):
            attention(q, pages, pages, position=position, **call, keys_rotated=True)
        with torch.no_grad():
            attention(q, pages, pages, position=position, **call, keys_rotated=True)
    with pytest.raises(ValueError, match="sinks requires grad, but with block_table there is no backward"):
        attention(q, pages, pages, sinks=weight, **call)
    for leaves in ((q.clone().requires_grad_(), pages, pages), (q, pages, pages.clone().requires_grad_())):
        with pytest.raises(ValueError, match="requires grad, but with block_table there is no backward"):
            attention(*leaves, **call)
        with torch.no_grad():
            attention(*leaves, **call)


# Dropout


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", OURS)
def test_checkpointed_dropout_is_the_same_dropout(device, name, use_reentrant):
    tensors = [x.requires_grad_() for x in draw(device)]

    def layer(q, k, v):
        return attention(q, k, v, position=Rope(), causal=True, dropout_p=0.4, impl=name)

    weights = torch.randn(B, TQ, H, D, device=device)
    torch.manual_seed(5)
    plain = layer(*tensors)
    grads = torch.autograd.grad((plain * weights).sum(), tensors)
    torch.manual_seed(5)
    out = checkpoint(layer, *tensors, use_reentrant=use_reentrant)
    assert torch.equal(out, plain)
    torch.rand(3, device=device)  # what comes between forward and backward
    for x in tensors:
        x.grad = None
    (out * weights).sum().backward()
    assert all(torch.equal(x.grad, grad) for x, grad in zip(tensors, grads, strict=True))


@pytest.mark.parametrize("name", OURS)
def test_dropout_goes_by_torchs_seed(device, name):
    tensors = draw(device)
    call = {"dropout_p": 0.5, "impl": name}
    torch.manual_seed(1)
    first, second = attention(*tensors, **call), attention(*tensors, **call)
    torch.manual_seed(1)
    assert torch.equal(attention(*tensors, **call), first)
    assert torch.equal(attention(*tensors, **call), second)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert not torch.equal(attention(*tensors, **call), first)


@needs_kernels
def test_every_implementation_drops_the_same(device):
    tensors = draw(device)
    outs = []
    for name in ("triton", "reference"):
        torch.manual_seed(3)
        outs.append(attention(*tensors, position=Rope(), dropout_p=0.3, impl=name))
    torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)


def test_numbers_are_drawn_for_what_is_dropped_alone(device):
    tensors = draw(device)

    def state():
        return (torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()).clone()

    before = state()
    attention(*tensors, position=Rope(), causal=True)
    attention(*tensors, dropout_p=0.0, window=3)
    explain_choice(*tensors, dropout_p=0.5)
    for wrong in ({"impl": "sdpa"}, {"softcap": -1.0}, {"layout": "tbd"}):
        with pytest.raises(ValueError, match=r"impl is 'sdpa', but|softcap|layout"):
            attention(*tensors, dropout_p=0.5, **wrong)
    assert torch.equal(state(), before)
    attention(*tensors, dropout_p=0.5)
    assert not torch.equal(state(), before)


def test_dropout_keeps_the_mean_and_the_log_sum_exp(device):
    q, k, _ = draw(device)
    v = torch.ones(B, TK, K, D, device=device)
    lse = attention(q, k, v, return_lse=True)[1]
    p = 0.25
    outs = [attention(q, k, v, dropout_p=p, return_lse=True) for _ in range(40)]
    assert all(torch.equal(other, lse) for _, other in outs)
    sums = torch.stack([out for out, _ in outs])[..., 0]
    assert abs(sums.mean() - 1) < 5 * (p / (1 - p) / sums.numel()) ** 0.5  # at the most: rows that attend one key
    assert sums.std() > 0.01


# What is learned


def learn(attend, tensors, weight, make, weights, **call):
    """The output, and the gradients of q, k, v, the scheme's weight and the sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, weight, call.pop("sinks"))]
    q, k, v, weight, sinks = leaves
    out, lse = attend(q, k, v, position=make(weight), sinks=sinks, return_lse=True, **call)
    total = (out * weights.to(out.dtype)).sum() + lse.sin().sum()
    return [out.detach(), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("call", [{}, {"causal": True, "softcap": 2.0}, {"window": 9}], ids=str)
@pytest.mark.parametrize("scheme", LEARNED)
@pytest.mark.parametrize("name", OURS)
def test_what_a_scheme_and_sinks_have_to_learn_is_learned(device, name, scheme, call):
    make, shape = LEARNED[scheme]
    tensors, weight, sinks = draw(device), torch.rand(shape, device=device) + 0.1, torch.randn(H, device=device)
    weights = torch.randn(B, TQ, H, D, dtype=torch.float64, device=device)
    actual = learn(attention, tensors, weight, make, weights, sinks=sinks, impl=name, **call)
    exact = learn(
        plainly(torch.float64),
        [x.double() for x in tensors],
        weight.double(),
        make,
        weights,
        sinks=sinks.double(),
        **call,
    )
    plain = learn(plainly(torch.float32), tensors, weight, make, weights, sinks=sinks, **call)
    for mine, truth, baseline in zip(actual, exact, plain, strict=True):
        assert_close_to_truth(mine, truth, baseline, ROUNDINGS)
    assert actual[4].any()
    assert actual[5].any()


@pytest.mark.parametrize("name", OURS)
def test_what_is_learned_needs_no_gradient_of_q(device, name):
    tensors = draw(device)
    slopes, sinks = (torch.rand(H, device=device, requires_grad=True) for _ in range(2))
    out = attention(*tensors, position=Alibi(slopes), sinks=sinks, impl=name)
    grads = torch.autograd.grad(out.sin().sum(), [slopes, sinks])
    exact = [x.detach().double().requires_grad_() for x in (slopes, sinks)]
    out = attention(*(x.double() for x in tensors), position=Alibi(exact[0]), sinks=exact[1])
    truth = torch.autograd.grad(out.sin().sum(), exact)
    for grad, expected in zip(grads, truth, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-3, atol=1e-4)


def test_a_backward_will_come_for_what_is_learned_alone(device):
    weight = torch.rand(H, device=device, requires_grad=True)
    for call in ({"sinks": weight}, {"position": Alibi(weight)}, {}):
        assert make_call(*draw(device), **call).needs_backward is bool(call)
        with torch.no_grad():
            assert not make_call(*draw(device), **call).needs_backward


# Head dims, soft caps and sinks


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dv", [1, 7, 24, 32])
def test_values_may_have_a_head_dim_of_their_own(device, impl, dv, causal):
    q, k, _ = draw(device, half_or_float(impl, device))
    v = torch.randn(B, TK, K, dv, device=device).to(q.dtype)
    call = {"position": Rope(), "causal": causal}
    if not runs(impl, q, k, v, **call):
        assert_refused(impl, q, k, v, **call)
        return
    out = attention(q, k, v, impl=impl, **call)
    assert out.shape == (B, TQ, H, dv)
    weights = torch.randn_like(out, dtype=torch.float64)
    mine = value_and_grads(lambda *leaves: attention(*leaves, impl=impl, **call), [q, k, v], weights)
    truth = value_and_grads(plainly(torch.float64), [x.double() for x in (q, k, v)], weights, **call)
    baseline = value_and_grads(plainly(q.dtype), [q, k, v], weights, **call)
    for actual, exact, plain in zip(mine, truth, baseline, strict=True):
        assert_close_to_truth(actual, exact, plain, ROUNDINGS)


def test_sdpa_refuses_values_of_another_head_dim_on_gpus():
    q = torch.empty(1, 1, 128, 64, device="meta", dtype=torch.float16)
    assert refusal_of("sdpa", q, q, q[..., :32], layout="bhtd") == "v_head_dim"


@pytest.mark.parametrize("name", OURS)
def test_the_equation_of_the_docstring(device, name):
    q, k, v = (x.transpose(1, 2).double() for x in draw(device, key_heads=H))
    mask = torch.rand(TQ, TK, device=device) > 0.3
    mask[4] = False
    sinks = torch.randn(H, dtype=torch.float64, device=device)
    scores = 1.7 * torch.tanh(q @ k.mT * 0.9 / 1.7)
    scores = torch.cat((scores.masked_fill(~mask, -math.inf), sinks[:, None, None].expand(B, H, TQ, 1)), dim=-1)
    expected = scores.softmax(-1)[..., :TK] @ v
    call = {"mask": mask, "scale": 0.9, "softcap": 1.7, "sinks": sinks.float(), "layout": "bhtd", "impl": name}
    out, lse = attention(q.float(), k.float(), v.float(), return_lse=True, **call)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-5)
    assert not out[:, :, 4].any()
    torch.testing.assert_close(lse[:, :, 4], sinks.float().expand(B, H))


@pytest.mark.parametrize("name", OURS)
def test_the_last_features_of_a_head_may_turn(device, name):
    tensors = draw(device)
    assert_correct(
        lambda *leaves, **keywords: attention(*leaves, impl=name, **keywords),
        tensors,
        position=Rope(rotary_dim=6, rotary_offset=10),
        causal=True,
    )


@pytest.mark.parametrize("scheme", ["rope", "exposb", "none"])
def test_rotated_keys_are_rotated_once(device, impl, scheme):
    q, k, v = draw(device, half_or_float(impl, device))
    position = SCHEMES[scheme]
    call = make_call(q, k, v, position=position)
    index = torch.arange(TK, device=device)[None]
    mapped = reference.map_features(call, index, index)[1].transpose(1, 2)
    out = attention(q, mapped, v, position=position, keys_rotated=True, impl=impl)
    tolerance = {} if q.dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(out, attention(q, k, v, position=position, impl=impl), **tolerance)


# Compilation and autocast


@pytest.mark.parametrize(("scheme", "call"), [("rope", {"dropout_p": 0.5}), ("t5", {"softcap": 3.0})], ids=str)
def test_packed_sequences_compile_once_for_all_lengths(device, scheme, call):
    counter = CompileCounterWithBackend("aot_eager")
    position = t5(device) if scheme == "t5" else SCHEMES[scheme]

    def packed(q, k, v, cu_seqlens):
        return attention(q, k, v, position=position, causal=True, cu_seqlens_q=cu_seqlens, layout="thd", **call)

    torch._dynamo.reset()
    compiled = torch.compile(packed, backend=counter, fullgraph=True)
    tensors = draw_packed(device, 24, 24)
    for bounds in ([0, 5, 24], [0, 20, 24], [0, 0, 7]):
        cu_seqlens = torch.tensor(bounds, device=device)
        results = []
        for function in (packed, compiled):
            torch.manual_seed(0)
            out = function(*tensors, cu_seqlens)
            results.append([out, *torch.autograd.grad(out.sin().sum(), tensors)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_what_serving_asks_for_compiles_once(device):
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, starts, lengths, first, sinks):
        return attention(
            q,
            k,
            v,
            position=Rope(),
            key_starts=starts,
            key_lengths=lengths,
            query_starts=first,
            sinks=sinks,
            causal=True,
        )

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    q, k, v = draw(device, queries=1)
    sinks = torch.randn(H, device=device)
    for starts, lengths in (([0, 3], [7, 9]), ([2, 2], [20, 4])):
        rows = [torch.tensor(x, device=device) for x in (starts, lengths, [n - 1 for n in lengths])]
        torch.testing.assert_close(compiled(q, k, v, *rows, sinks), step(q, k, v, *rows, sinks))
    assert counter.frame_count == 1


@pytest.mark.parametrize("scheme", ["alibi", "exposb-bands-decay", "t5"])
def test_what_is_learned_compiles(device, scheme):
    make, shape = LEARNED[scheme]
    tensors = draw(device)
    weight, sinks = (torch.rand(size, device=device, requires_grad=True) for size in (shape, (H,)))

    def layer(q, k, v, weight, sinks):
        return attention(q, k, v, position=make(weight), sinks=sinks)

    torch._dynamo.reset()
    results = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        out = function(*tensors, weight, sinks)
        results.append([out, *torch.autograd.grad(out.sin().sum(), (weight, sinks))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_autocast_casts_packed_sequences_and_leaves_sinks(device, name):
    dtype = torch.float16
    tensors = draw_packed(device, 12, 12)
    sinks, slopes = (torch.rand(H, device=device, requires_grad=True) for _ in range(2))
    call = {"cu_seqlens_q": torch.tensor([0, 5, 12], device=device), "layout": "thd", "dropout_p": 0.2, "impl": name}
    torch.manual_seed(0)
    with torch.autocast(device.type, dtype):
        out = attention(*tensors, position=Alibi(slopes), sinks=sinks, **call)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().sin().sum(), [*tensors, sinks, slopes])
    assert all(grad.dtype == torch.float32 for grad in grads)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = attention(*(x.to(dtype) for x in tensors), position=Alibi(slopes), sinks=sinks, **call)
    torch.testing.assert_close(out, expected)


# Who is chosen


def test_a_choice_is_explained(device):
    tensors = draw(device, torch.bfloat16)
    explained = explain_choice(*tensors, position=Rope(), causal=True)
    assert explained.name in backends.BACKENDS
    assert {explained.name, *explained.others} == set(backends.BACKENDS)
    text = str(explained)
    assert text.startswith(f"{explained.name} runs\n")
    assert all(f"not {name}: {reason}" in text for name, reason in explained.others.items())
    forced = explain_choice(*tensors, impl="reference")
    assert forced.name == "reference"
    with pytest.raises(ValueError, match="impl is 'sdpa', but"):
        explain_choice(*tensors, softcap=3.0, impl="sdpa")


def test_explaining_computes_nothing(device):
    tensors = [x.requires_grad_() for x in draw(device)]
    with unchanged([x.detach() for x in tensors]):
        explain_choice(*tensors, position=Rope(), return_lse=True, layout="bthd")


def imagined(
    monkeypatch,
    capability=(9, 0),
    queries=4096,
    keys=4096,
    rocm=False,
    device="cuda",
    far_window=None,
    mask=None,
    **given,
):
    """A call on a GPU that this machine may lack."""
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    monkeypatch.setattr(gpu, "is_rocm", lambda: rocm)
    q = SimpleNamespace(device=torch.device(device), shape=(1, 8, queries, 128))
    far = None if far_window is None else FarRange(far_window)
    k = SimpleNamespace(shape=(1, 8, keys, 128))
    made = {
        "needs_backward": True,
        "far": far,
        "tables": NO_TABLES,
        "mask": mask,
        "block_table": None,
        "blocks": None,
        "cu_seqlens_q": None,
        "score_mod": None,
        "key_lengths": None,
        "goes_by_index": True,
        "dropout_p": 0.0,
        "value_dim": 128,
    }
    return SimpleNamespace(q=q, k=k, precision=None, **made | given)


def test_orders_name_every_backend_that_a_device_may_have(monkeypatch):
    in_order = set(backends.BACKENDS)
    for rules in backends.ORDER.values():
        assert rules[-1] == Rule(rules[-1].order)  # it fits every call with one encoding
        for rule in rules:
            assert set(rule.order) == in_order
            assert rule.order[-1] == "reference"
    for capability in ((8, 0), (9, 0), (12, 0)):
        for tokens, far_window in ((1, None), (512, None), (512, 100), (4096, None), (4096, 100)):
            order = backend_order(imagined(monkeypatch, capability, queries=tokens, far_window=far_window))
            assert set(order) == in_order
    assert backend_order(imagined(monkeypatch, (8, 6))) == backends.FLASH_FIRST
    assert backend_order(imagined(monkeypatch, rocm=True)) == backends.FLASH_FIRST
    assert backend_order(imagined(monkeypatch, device="cpu")) == ("sdpa", "reference")


def test_a_rule_fits_the_calls_that_it_describes(monkeypatch):
    call = imagined(monkeypatch, queries=100, keys=4096)
    order = ("reference",)
    assert Rule(order).fits(call)
    assert Rule(order, tokens=100, backward=True).fits(call)
    assert not Rule(order, tokens=101).fits(call)
    call.needs_backward = False
    assert Rule(order, tokens=100).fits(call)
    assert not Rule(order, backward=True).fits(call)
    assert not Rule(order, far=True).fits(call)
    assert Rule(order, below=4097).fits(call)
    assert not Rule(order, below=4096).fits(call)
    assert Rule(order, host_bound=True).fits(call)
    call.needs_backward = True
    assert not Rule(order, host_bound=True).fits(call)
    call.tables = call.tables._replace(q=RopeTable(torch.zeros(1), torch.zeros(1)))
    assert Rule(order, host_bound=True).fits(call)
    assert Rule(order, plain=True).fits(call)
    for keywords in ({"key_lengths": torch.ones(1)}, {"score_mod": "somewhere:SCORES"}):
        assert not Rule(order, plain=True).fits(imagined(monkeypatch, **keywords))
    call = imagined(monkeypatch, far_window=100)
    assert Rule(order, far=True).fits(call)
    assert not Rule(order).fits(call)
    assert not Rule(order, masked=True).fits(imagined(monkeypatch))
    assert Rule(order, features=128).fits(imagined(monkeypatch))
    assert not Rule(order, features=129).fits(imagined(monkeypatch))
    assert Rule(order, masked=True).fits(imagined(monkeypatch, mask=torch.ones(1, 1, 4096, 4096, dtype=torch.bool)))


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("tokens", [1, 100, 5000])
def test_wide_heads_go_to_triton(monkeypatch, tokens, compiling):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    call = imagined(monkeypatch, queries=tokens, keys=tokens)
    assert backend_order(call)[0] != "triton"
    call.value_dim = 512
    assert backend_order(call)[0] == "triton"
    assert backend_order(imagined(monkeypatch, (8, 0), queries=tokens, keys=tokens))[0] != "triton"


@pytest.mark.parametrize(("tokens", "first"), [(128, "triton"), (1023, "triton"), (1024, "gluon")])
def test_masks_become_lists_where_calls_are_long(monkeypatch, tokens, first):
    call = imagined(monkeypatch, (9, 0), queries=tokens, keys=tokens, mask=torch.ones(1, 1, tokens, tokens))
    assert next(name for name in backend_order(call) if name in ("gluon", "triton")) == first


LENGTHS, SCORES = {"key_lengths": torch.ones(1)}, {"score_mod": "somewhere:SCORES"}
SHORT = [
    *[(1, {}, "triton"), (255, {}, "triton"), (256, {}, "gluon"), (1023, {}, "gluon")],
    *[(511, LENGTHS, "triton"), (511, SCORES, "triton"), (512, LENGTHS, "gluon"), (512, SCORES, "gluon")],
]


@pytest.mark.parametrize(("tokens", "keywords", "first"), SHORT)
def test_short_calls_go_to_kernels_where_a_library_costs_the_host_more(monkeypatch, tokens, keywords, first):
    call = imagined(monkeypatch, (9, 0), queries=tokens, keys=tokens, **keywords)
    call.needs_backward = False
    assert backend_order(call)[0] == first
    call.needs_backward = True
    assert backend_order(call)[:2] == ("sdpa", "gluon" if tokens >= 512 else "triton")
    call.tables = call.tables._replace(q=RopeTable(torch.zeros(1), torch.zeros(1)))
    assert backend_order(call)[0] == first


def test_two_encodings_are_run_by_gluon_where_they_are_long(monkeypatch):
    assert backend_order(imagined(monkeypatch, queries=4095, far_window=100))[0] == "triton"
    order = backend_order(imagined(monkeypatch, queries=4096, far_window=100))
    assert order[:2] == ("gluon", "flash")


@pytest.mark.parametrize("tokens", [1024, 8192, 131072])
@pytest.mark.parametrize("value_dim", [64, 128, 256])
@pytest.mark.parametrize("needs_backward", [False, True])
def test_gluon_goes_first_on_hopper_from_1024_tokens_on(monkeypatch, tokens, value_dim, needs_backward):
    call = imagined(monkeypatch, queries=tokens, keys=tokens, value_dim=value_dim)
    call.needs_backward = needs_backward
    assert backend_order(call)[:2] == ("gluon", "flash")


def test_determinism_excludes_what_is_not(device):
    tensors = [x.requires_grad_() for x in draw(device, torch.bfloat16, queries=64, keys=64)]
    if device.type == "cuda":
        assert refusal_of("sdpa", *tensors, deterministic=True) == "deterministic"
        with torch.no_grad():
            assert refusal_of("sdpa", *tensors, deterministic=True) != "deterministic"
        torch.use_deterministic_algorithms(True)
        try:
            assert refusal_of("sdpa", *tensors) == "deterministic"
            assert refusal_of("sdpa", *tensors, deterministic=False) != "deterministic"
        finally:
            torch.use_deterministic_algorithms(False)
    out, again = (attention(*tensors, position=Rope(), deterministic=True) for _ in range(2))
    assert torch.equal(out, again)
    grads, more = (torch.autograd.grad(x.sin().sum(), tensors) for x in (out, again))
    assert all(torch.equal(a, b) for a, b in zip(grads, more, strict=True))


def test_schemes_can_be_copied(device):
    tensors = draw(device)
    for scheme in (NoPosition(), *SCHEMES.values(), Rope(inv_freq=torch.rand(4, device=device))):
        twin = copy.deepcopy(scheme)
        assert torch.equal(attention(*tensors, position=twin), attention(*tensors, position=scheme))

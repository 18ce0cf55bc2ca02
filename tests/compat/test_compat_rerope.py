"""`rerope_attention`: ready pairs, against the formula of Ropewalk's document 001."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.modes import HAS_KERNELS, KERNEL_DTYPES, needs_kernels, on_gpu
from helpers.ready_pairs import ROUNDINGS, D, H, K, N, Z, by, check_full_tiles, draw_pairs, value_and_grads
from torch._dynamo.testing import CompileCounterWithBackend

from ropewalk import attention, rerope_attention, torch_attention
from ropewalk.compat.rerope import GivenPairs
from ropewalk.ops.attention import reference
from ropewalk.ops.attention.call import FarQK, FarRange, flatten, unflatten
from ropewalk.ops.attention.tables import resolve_scheme
from ropewalk.ops.attention.validate import Arguments, validate
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

IMPLS = [pytest.param("triton", marks=needs_kernels), "reference", None]
SCALE = 0.25
NAMES = ["q1", "q2", "k1", "k2", "v"]


def formula(q1, q2, k1, k2, v, causal, sm_scale, window):
    """The same, pair by pair: no score is computed of the wrong pair. Every step in the tensors' dtype."""
    tokens, groups = q1.shape[2], q1.shape[1] // k1.shape[1]
    k1, k2, v = (torch.cat([head for head in x.split(1, dim=1) for _ in range(groups)], dim=1) for x in (k1, k2, v))
    rows = []
    for m in range(tokens):
        last = m + 1 if causal else tokens
        near = slice(max(0, m - window + 1), min(last, m + window))
        behind, ahead = slice(0, near.start), slice(near.stop, max(last, near.stop))
        parts = [(q, k[:, :, n]) for q, k, n in ((q2, k2, behind), (q1, k1, near), (q2, k2, ahead))]
        scores = torch.cat([(q[:, :, m, None] * k).sum(-1) for q, k in parts], dim=-1) * sm_scale
        rows.append((scores.softmax(-1)[..., None] * v[:, :, :last]).sum(-2))
    return torch.stack(rows, dim=2)


def assert_correct(function, tensors, *arguments, **keywords):
    """The output and all gradients, against `torch_attention` in float64; returns what was computed."""
    weights = torch.randn(*tensors[0].shape[:3], tensors[4].shape[3], dtype=torch.float64, device=tensors[0].device)
    with unchanged(tensors), poisoned_memory():
        actual = value_and_grads(function, tensors, weights, *arguments, **keywords)
    truth = value_and_grads(torch_attention, [x.double() for x in tensors], weights, *arguments)
    baseline = value_and_grads(formula, tensors, weights, *arguments)
    for mine, exact, plain in zip(actual, truth, baseline, strict=True):
        assert_close_to_truth(mine, exact, plain, ROUNDINGS)
    return actual


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9])
def test_torch_attention_is_the_formula(device, window, causal):
    tensors = draw_pairs(device, torch.float64, batch=2, heads=4, key_heads=2, tokens=8, head_dim=4, v_head_dim=3)
    weights = torch.randn(2, 4, 8, 3, dtype=torch.float64, device=device)
    actual, expected = (value_and_grads(f, tensors, weights, causal, -0.7, window) for f in (torch_attention, formula))
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_attention_rounds_once(device, dtype):
    tensors = draw_pairs(device, dtype)
    expected = torch_attention(*(x.float() for x in tensors), True, SCALE, 9)
    assert torch.equal(torch_attention(*tensors, True, SCALE, 9), expected.to(dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 33, N - 1, N])
@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_random_pairs(device, impl, window, causal):
    assert_correct(by(impl), draw_pairs(device), causal, SCALE, window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_every_dtype(device, impl, dtype, causal):
    assert_correct(by(impl), draw_pairs(device, dtype, heads=4, key_heads=2), causal, SCALE, 10)


@pytest.mark.parametrize(
    "sizes",
    [
        {"heads": 3, "key_heads": 3},
        {"heads": 6, "key_heads": 2},
        {"batch": 2, "head_dim": 24, "causal": False},
        {"v_head_dim": 40},
        {"head_dim": 192, "v_head_dim": 128},
        {"tokens": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_every_size(device, impl, sizes):
    sizes = dict(sizes)
    causal = sizes.pop("causal", True)
    assert_correct(by(impl), draw_pairs(device, **sizes), causal, -(sizes.get("head_dim", D) ** -0.5), 10)


@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_any_strides(device, impl):
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw_pairs(device)]
    fused = torch.randn(Z, N, 2 * H + 3 * K, D, device=device).transpose(1, 2).split([H, H, K, K, K], dim=1)
    features_apart = [x.mT.contiguous().mT for x in draw_pairs(device)]
    q1, q2, k1, k2, v = draw_pairs(device, heads=4, key_heads=2)
    shared = [q1[:, :1].expand_as(q1), q2[:, :, :1].expand_as(q2), k1, k2[..., :1].expand_as(k2), v]
    for tensors in (transposed, fused, features_apart, shared):
        assert not all(x.is_contiguous() for x in tensors)
        assert_correct(by(impl), list(tensors), True, SCALE, 10)


@pytest.mark.parametrize("side", ["past", "future"])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 20, N - 1])
@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_the_window_is_strict(device, impl, window, side):
    """All weight is on the first far pair, and then on the last near one: taken for its other, a pair has none."""
    width, sign = 64, 1 if side == "past" else -1
    assert width > N
    tokens = torch.arange(N, device=device)
    v = torch.randn(1, 1, N, D, device=device)

    def one_hot(places):
        """Row m has its one at the key `places[m]`; beyond the keys, where nobody looks for it."""
        return torch.nn.functional.one_hot(torch.where((places < 0) | (places >= N), N, places), width).float()

    keys = one_hot(tokens)[None, None]
    for queries_of_pair, other, apart in (("far", "near", window), ("near", "far", window - 1)):
        target = tokens - sign * apart
        queries = {
            queries_of_pair: one_hot(target)[None, None],
            other: torch.full((1, 1, N, width), -1.0, device=device),
        }
        out = rerope_attention(queries["near"], queries["far"], keys, keys, v, side == "past", 40.0, window, impl=impl)
        meets = (target >= 0) & (target < N)
        assert meets.any()
        torch.testing.assert_close(out[0, 0, meets], v[0, 0, target[meets]])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [N, N + 1, 2**40])
@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_a_window_of_all_tokens_leaves_the_near_pair_alone(device, impl, window, causal):
    tensors = draw_pairs(device)
    out, grad_q1, grad_q2, grad_k1, grad_k2, _ = assert_correct(by(impl), tensors, causal, SCALE, window)
    assert not grad_q2.any()
    assert not grad_k2.any()
    assert grad_q1.any()
    assert grad_k1.any()
    q1, _, k1, _, v = tensors
    alone = attention(q1, k1, v, causal=causal, scale=SCALE, layout="bhtd", impl=impl)
    torch.testing.assert_close(out, alone)


@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_gradients_may_be_needed_of_some_alone(device, impl):
    tensors = draw_pairs(device)
    weights = torch.randn_like(tensors[0])
    for causal in (False, True):
        _, *expected = value_and_grads(by(impl), tensors, weights, causal, SCALE, 9)
        for index, grad in enumerate(expected):
            leaves = [x.detach().requires_grad_(place == index) for place, x in enumerate(tensors)]
            out = rerope_attention(*leaves, causal, SCALE, 9, impl=impl)
            assert torch.equal(torch.autograd.grad((out * weights).sum(), leaves[index])[0], grad)
    with torch.no_grad():
        assert not rerope_attention(*leaves, True, SCALE, 9, impl=impl).requires_grad


@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_one_tensor_may_be_both_of_a_pair(device, impl):
    """Then it is plain attention, and the gradient is the sum of both."""
    q, _, k, _, v = draw_pairs(device)
    weights = torch.randn_like(q)
    near, far = (
        value_and_grads(f, (q, k, v), weights)
        for f in (
            lambda q, k, v: attention(q, k, v, causal=True, scale=SCALE, layout="bhtd", impl=impl),
            lambda q, k, v: rerope_attention(q, q, k, k, v, True, SCALE, 9, impl=impl),
        )
    )
    for mine, theirs in zip(far, near, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_differentiable_twice(device, causal):
    leaves = draw_pairs(device, torch.float64, tokens=5, head_dim=3, v_head_dim=2)
    leaves = [x.requires_grad_() for x in leaves]
    function = lambda *x: rerope_attention(*x, causal, 0.5, 2, impl="reference")  # noqa: E731
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@needs_kernels
def test_the_kernels_are_differentiable_once(device):
    leaves = [x.requires_grad_() for x in draw_pairs(device)]
    out = rerope_attention(*leaves, True, SCALE, 9, impl="triton")
    grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice"):
        sum(grad.sum() for grad in grads).backward()


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_holds_blocks_alone(device, monkeypatch, causal):
    tensors = draw_pairs(device, batch=2)
    weights = torch.randn_like(tensors[0])
    expected = value_and_grads(by("reference"), tensors, weights, causal, SCALE, 9)
    blocks = []
    attend_block = reference._attend_block
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * H * N * 10)
    monkeypatch.setattr(
        reference, "_attend_block", lambda *rest: (blocks.append(rest[0].shape[2]), attend_block(*rest))[1]
    )
    actual = value_and_grads(by("reference"), tensors, weights, causal, SCALE, 9)
    assert blocks == [10, 10, 10, 10, 5, *blocks[5:]]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("impl", IMPLS, ids=str)
@pytest.mark.parametrize("sizes", [{"tokens": 0}, {"batch": 0}, {"tokens": 1}], ids=str)
def test_little_or_nothing_to_attend(device, impl, sizes):
    tensors = draw_pairs(device, **sizes)
    out, *grads = value_and_grads(by(impl), tensors, torch.ones_like(tensors[0]), True, SCALE, 3)
    assert torch.equal(out, tensors[4].expand_as(out))
    assert [grad.shape for grad in grads] == [x.shape for x in tensors]
    for grad in grads[:4]:  # a lone token's probability is 1, and what rounding leaves of its score's gradient no more
        torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-6)


# Errors


BAD = {
    "q1 is no tensor": ("q1", lambda x: x.tolist(), TypeError, "q1 is list, but must be a tensor"),
    "v is no tensor": ("v", lambda x: None, TypeError, "v is NoneType, but must be a tensor"),
    "integers": ("q1", lambda x: x.long(), TypeError, r"q1 has dtype torch\.int64"),
    "another dtype": (
        "k2",
        lambda x: x.double(),
        TypeError,
        r"k2 has dtype torch\.float64, but all tensors must share",
    ),
    "another device": ("q2", lambda x: x.to("meta"), ValueError, "q2 is on meta, but must be on q1's device"),
    "three dimensions": ("k1", lambda x: x[0], ValueError, r"k1 has shape .*, but must be \(Z, H, N, D\)"),
    "fewer queries": ("q2", lambda x: x[:, :, 1:], ValueError, r"q2 has shape .*, but must have q1's"),
    "one query for all": ("q2", lambda x: x[:, :, :1], ValueError, r"q2 has shape .*, but must have q1's"),
    "fewer keys": ("k1", lambda x: x[:, :, 1:], ValueError, r"k1 has shape .* N = 45, D = 16 and a K that divides 2"),
    "more key heads": ("k1", lambda x: x.repeat(1, 3, 1, 1), ValueError, r"k1 has shape .* a K that divides 2"),
    "no key head": ("k1", lambda x: x[:, :0], ValueError, r"k1 has shape .* a K that divides 2"),
    "keys of other features": ("k1", lambda x: x[..., :8], ValueError, r"k1 has shape .* D = 16"),
    "another batch": ("k1", lambda x: x.repeat(2, 1, 1, 1), ValueError, r"k1 has shape .* Z = 1"),
    "far keys of more heads": ("k2", lambda x: x.repeat(1, 2, 1, 1), ValueError, "k2 has shape .*, but must have k1's"),
    "fewer values": (
        "v",
        lambda x: x[:, :, 1:],
        ValueError,
        r"v has shape .*, but must have k1's, .*, all but the head",
    ),
    "window of none": ("window", 0, ValueError, "window is 0, but must be an int of at least 1"),
    "window of a fraction": ("window", 2.0, ValueError, r"window is 2\.0, but must be an int of at least 1"),
    "window or not": ("window", True, ValueError, "window is True, but must be an int of at least 1"),
    "no window": ("window", None, ValueError, "window is None, but must be an int of at least 1"),
}


def call_of(device):
    arguments = dict(zip(NAMES, draw_pairs(device), strict=True))
    return arguments | {"causal": True, "sm_scale": SCALE, "window": 9}


@pytest.mark.parametrize("function", [rerope_attention, torch_attention])
@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_by_name(device, function, case):
    name, change, error, pattern = BAD[case]
    arguments = call_of(device)
    tensors = [arguments[name] for name in NAMES]
    with unchanged(tensors):
        function(**arguments)
        arguments[name] = change(arguments[name]) if callable(change) else change
        with pytest.raises(error, match=pattern):
            function(**arguments)


@pytest.mark.parametrize("scale", [math.inf, math.nan, "1"])
def test_a_scale_that_is_none_is_refused(device, scale):
    with pytest.raises(ValueError, match=r"scale is .*, but must be a finite number"):
        rerope_attention(**call_of(device) | {"sm_scale": scale})


def test_a_named_backend_that_cannot_run_raises(device):
    arguments = call_of(device)
    with pytest.raises(ValueError, match="impl is 'sdpa', but it cannot run this call: "):
        rerope_attention(**arguments, impl="sdpa")
    with pytest.raises(ValueError, match="impl is 'fast', but must be None or one of"):
        rerope_attention(**arguments, impl="fast")
    wide = arguments | {name: arguments[name].double() for name in NAMES}
    with pytest.raises(ValueError, match=r"impl is 'triton', but it cannot run this call: .*float64"):
        rerope_attention(**wide, impl="triton")
    assert rerope_attention(**wide).dtype == torch.float64
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"impl is 'flash', but it cannot run this call: .* NVIDIA GPU"):
            rerope_attention(**arguments, impl="flash")
    if not HAS_KERNELS:
        with pytest.raises(ValueError, match="impl is 'triton', but it cannot run this call: "):
            rerope_attention(**arguments, impl="triton")


# What looks at a program rather than running it


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_one_graph_is_for_many_lengths(device, impl, causal):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda *tensors: rerope_attention(*tensors, causal, SCALE, 9, impl=impl), backend=counter, fullgraph=True
    )
    for length in (17, 23, 5, 40):
        tensors = draw_pairs(device, tokens=length)
        weights = torch.randn_like(tensors[0])
        actual = value_and_grads(compiled, tensors, weights)
        for mine, theirs in zip(actual, value_and_grads(by(impl), tensors, weights, causal, SCALE, 9), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert counter.frame_count <= 2  # the first length, and all others


@pytest.mark.parametrize("impl", IMPLS, ids=str)
def test_the_window_may_be_an_argument_of_what_is_compiled(device, impl):
    compiled = torch.compile(
        lambda *arguments: rerope_attention(*arguments, impl=impl), backend="aot_eager", fullgraph=True
    )
    tensors = draw_pairs(device)
    for window in (9, 17, N, 60, 1):
        expected = rerope_attention(*tensors, True, SCALE, window, impl=impl)
        torch.testing.assert_close(compiled(*tensors, True, SCALE, window), expected)


def operator_arguments(tensors, causal, window, save):
    """A call as `torch.ops.ropewalk.attend` takes it: features of far pairs are given."""
    q1, q2, k1, k2, v = tensors
    arguments = Arguments(position=GivenPairs(window), causal=causal, scale=SCALE, layout="bhtd")
    future = None if causal else q2.detach().clone().requires_grad_(q2.requires_grad)
    call = resolve_scheme(validate(q1, k1, v, arguments))
    return *flatten(call._replace(far=FarRange(window, None, FarQK(q2, future, k2)))), save, "triton"


@needs_kernels
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["dense", "bthd", "odd head dim"])
def test_the_operator_is_what_its_schema_says(device, layout, causal, requires_grad):
    tensors = draw_pairs(device, tokens=20, head_dim=12 if layout == "odd head dim" else D)
    if layout == "bthd":
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    tensors = [x.detach().requires_grad_(requires_grad) for x in tensors]
    arguments = operator_arguments(tensors, causal, 5, requires_grad)
    torch.library.opcheck(torch.ops.ropewalk.attend.default, arguments)


@needs_kernels
@pytest.mark.parametrize("causal", [False, True])
def test_its_backward_is_what_its_schema_says(device, causal):
    *leaves, _, impl = operator_arguments(draw_pairs(device, tokens=20), causal, 5, True)
    out, lse, *rotated = torch.ops.ropewalk.attend(*leaves, True, impl)
    assert not any(x.numel() for x in rotated)
    grads = torch.randn_like(out), torch.randn_like(lse)
    arguments = (*grads, out, lse, *unflatten(leaves).far.given, [False, False, False], impl, *leaves)
    torch.library.opcheck(torch.ops.ropewalk.attend_backward.default, arguments)


@on_gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "causal"),
    [(torch.bfloat16, 64, False), (torch.bfloat16, 128, True), (torch.float16, 256, True), (torch.float32, 64, True)],
    ids=str,
)
def test_pairs_of_full_tiles(device, dtype, head_dim, causal):
    check_full_tiles(
        "triton", draw_pairs(device, dtype, tokens=1000, head_dim=head_dim), causal, (63, 64, 65, 300, 999)
    )

"""`attention(norm=)` against a norm, a rotation and attention in float64."""

import dataclasses

import pytest
import torch
from helpers.modes import HAS_KERNELS, KERNEL_DTYPES, ON_GPU
from helpers.rope_definition import pair_features

from ropewalk import Alibi, ExpoSB, NoPosition, QKNorm, ReRope, Rope, attention, explain_choice
from ropewalk.testing import assert_close_to_truth

pytestmark = pytest.mark.both_modes
DEVICE = "cuda" if ON_GPU else "cpu"
B, T, H, K, D = 2, 24, 4, 2, 16
IMPLS = [None, "reference"] + (["triton"] if HAS_KERNELS else [])
NORMS = {
    "before": QKNorm,
    "after": lambda *weights: QKNorm(*weights, after=True),
    "one plus": lambda *weights: QKNorm(*weights, offset=1.0, eps=1e-5),
    "across heads": lambda *weights: QKNorm(*weights, across_heads=True),
}
SCHEMES = [NoPosition(), Rope(), Rope(rotary_dim=8), Rope(interleaved=True, attention_factor=1.2), Alibi(), ExpoSB()]
SCHEMES += [Rope(pair_block=8)]
SCHEME_IDS = ["none", "rope", "partial", "interleaved", "alibi", "exposb", "blocks"]
CALLS = {
    "plain": {},
    "lengths": {"causal": True, "key_lengths": (T, T - 7)},
    "positions": {"positions": True},
    "bhtd": {"layout": "bhtd", "causal": True},
    "packed": {"layout": "thd", "causal": True},
}
CASES = [
    pytest.param(norm, scheme, call, id=f"{norm}-{name}-{call}")
    for norm in NORMS
    for scheme, name in zip(SCHEMES, SCHEME_IDS, strict=True)
    for call in CALLS
    if (call == "plain" or (norm, name) in (("before", "rope"), ("after", "interleaved"), ("across heads", "alibi")))
    and (norm, name) != ("after", "exposb")
]


def draw(dtype, layout, norm_name):
    """q and k as slices of one projection, v, and weights some of which are near 0."""
    fused = torch.randn(B, T, H + 2 * K, D, device=DEVICE).to(dtype)
    q, k, v = fused.split([H, K, K], dim=2)
    if layout == "bhtd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if layout == "thd":
        q, k, v = (x.reshape(B * T, *x.shape[2:]) for x in (q, k, v))
    sizes = (H * D, K * D) if norm_name == "across heads" else (D, D)
    weights = [torch.rand(size, device=DEVICE, dtype=dtype) for size in sizes]
    for weight in weights:
        weight[:3] = torch.tensor([0.0, 1e-3, -1.0])
    return [x.detach().requires_grad_() for x in (q, k, v, *weights)]


def rms(x, weight, norm):
    """The norm of x (…, heads, D) by PyTorch."""
    shape = x.shape
    if norm.across_heads:
        x = x.flatten(-2)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * (weight + norm.offset)
    return x.reshape(shape)


def define(tensors, norm, scheme, keywords):
    """Norm and attention by PyTorch in the tensors' dtype; after the scheme's rotation by `Rope.rotation`."""
    q, k, v, *weights = tensors
    layout = keywords.get("layout", "bthd")
    if layout == "bhtd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if norm.after and isinstance(scheme, Rope):
        q, k = (by_hand(x, scheme, keywords, layout) for x in (q, k))
        scheme = NoPosition()
    q, k = rms(q, weights[0], norm), rms(k, weights[1], norm)
    if layout == "bhtd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if type(scheme) is NoPosition:
        keywords = {name: x for name, x in keywords.items() if not name.startswith("positions")}
    return attention(q, k, v, position=scheme, impl="reference", **keywords)


def by_hand(x, scheme, keywords, layout):
    """Rotate x (B, T, heads, D), or packed tokens, by complex numbers."""
    positions = keywords.get("positions_q")
    if positions is None:
        positions = torch.arange(T, device=DEVICE).repeat(B if layout == "thd" else 1)
    rotary_dim = scheme.rotary_dim or D
    angles = positions[..., None].double() * 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=DEVICE) / rotary_dim)
    turn = torch.polar(torch.full_like(angles, scheme.attention_factor), angles)[..., None, :]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = pair_features(rotary_dim // 2, scheme.interleaved, scheme.pair_block)
    z = torch.complex(rotated[..., first].double(), rotated[..., second].double()) * turn
    parts = torch.cat((z.real, z.imag), -1)[..., torch.tensor([*first, *second]).argsort()]
    return torch.cat((parts.to(x.dtype), rest), -1)


def keywords_of(name):
    given = dict(CALLS[name])
    if "key_lengths" in given:
        given["key_lengths"] = torch.tensor(given["key_lengths"], device=DEVICE, dtype=torch.int32)
    if given.pop("positions", False):
        given["positions_q"] = given["positions_k"] = torch.randint(0, 50, (B, T), device=DEVICE)
    if given.get("layout") == "thd":
        given["cu_seqlens_q"] = torch.tensor([0, T, 2 * T], device=DEVICE, dtype=torch.int32)
    return given


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("norm_name", "scheme", "call"), CASES)
def test_result_and_gradients_are_those_of_float64(dtype, impl, norm_name, scheme, call):
    torch.manual_seed(0)
    keywords = keywords_of(call)
    tensors = draw(dtype, keywords.get("layout"), norm_name)
    norm = NORMS[norm_name](*tensors[3:])
    given = (
        dict(keywords)
        if type(scheme) is not NoPosition
        else {name: x for name, x in keywords.items() if not name.startswith("positions")}
    )
    out = attention(*tensors[:3], position=scheme, norm=norm, impl=impl, **given)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    truth = define(wide, norm, scheme, keywords)
    plain = [x.detach().requires_grad_() for x in tensors]
    baseline = define(plain, norm, scheme, keywords)
    grad = torch.randn_like(out)
    # Rounded are normed q and k, probabilities and the result; their gradients on the way back too.
    assert_close_to_truth(out, truth, baseline, roundings=4)
    mine = torch.autograd.grad(out, tensors, grad)
    exact = torch.autograd.grad(truth, wide, grad.double())
    theirs = torch.autograd.grad(baseline, plain, grad)
    for x, actual, expected, other in zip(tensors, mine, exact, theirs, strict=True):
        assert actual.dtype == x.dtype
        assert actual.shape == x.shape
        assert_close_to_truth(actual, expected, other, roundings=8)


def test_two_range_encodings_take_a_norm_before_them():
    torch.manual_seed(0)
    tensors = draw(torch.float32, "bthd", "before")
    norm, scheme = QKNorm(*tensors[3:]), ReRope(window=6)
    out = attention(*tensors[:3], position=scheme, norm=norm, causal=True)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    truth = define(wide, norm, scheme, {"causal": True})
    assert_close_to_truth(out, truth, define(tensors, norm, scheme, {"causal": True}), roundings=4)
    for other in (scheme, ExpoSB()):
        with pytest.raises(ValueError, match=f"norm.after is True, but must be False for {type(other).__name__}"):
            attention(*tensors[:3], position=other, norm=dataclasses.replace(norm, after=True), causal=True)


@pytest.mark.parametrize(
    "scheme", [NoPosition(), Rope(), Alibi(), ReRope(window=6)], ids=["none", "rope", "alibi", "far"]
)
@pytest.mark.parametrize(("layout", "keys"), [("bthd", 5), ("bhtd", 5), ("thd", 2 * T)])
def test_keys_may_have_another_length(scheme, layout, keys):
    """As in cross-attention; packed, q and k have other sums of lengths."""
    torch.manual_seed(0)
    *tensors, q_weight, k_weight = draw(torch.float64, layout, "before")
    norm, call = QKNorm(q_weight, k_weight), {"layout": layout}
    if layout == "thd":
        tensors[0] = tensors[0][: T + 3]
        for name, bounds in (("q", [0, 3, T + 3]), ("k", [0, T, 2 * T])):
            call[f"cu_seqlens_{name}"] = torch.tensor(bounds, device=DEVICE, dtype=torch.int32)
    else:
        tensors[1:] = [x.narrow(2 if layout == "bhtd" else 1, 0, keys) for x in tensors[1:]]
    q, k, v = tensors
    out = attention(q, k, v, position=scheme, norm=norm, **call)
    expected = attention(rms(q, q_weight, norm), rms(k, k_weight, norm), v, position=scheme, **call)
    torch.testing.assert_close(out, expected)
    leaves = (q, k, v, q_weight, k_weight)
    mine, theirs = (torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_alone_get_gradients():
    q, k, v, q_weight, k_weight = draw(torch.float32, "bthd", "before")
    q, k, v = (x.detach() for x in (q, k, v))
    out = attention(q, k, v, position=Rope(), norm=QKNorm(q_weight, k_weight))
    grads = torch.autograd.grad(out.square().sum(), (q_weight, k_weight))
    assert all(bool(x.abs().max() > 0) for x in grads)


def test_gate_comes_after_and_norm_before():
    q, k, v, *weights = (x.detach() for x in draw(torch.float32, "bthd", "before"))
    gate = torch.randn(B, T, H, device=DEVICE)
    norm = QKNorm(*weights)
    gated = attention(q, k, v, position=Rope(), norm=norm, gate=gate)
    expected = attention(q, k, v, position=Rope(), norm=norm) * torch.sigmoid(gate)[..., None]
    torch.testing.assert_close(gated, expected)


# Keywords of a call of 12 queries and keys, and which tokens of q and of k attend nothing.
UNATTENDED = {
    "lengths": ({"key_lengths": [9]}, [], slice(9, None)),
    "starts": ({"key_starts": [4]}, [], slice(0, 4)),
    "starts-causal": ({"key_starts": [4], "causal": True}, slice(0, 4), slice(0, 4)),
    "mask": ({"mask": [[[[i != 7 and j != 5 for j in range(12)] for i in range(12)]]]}, [7], [5]),
    "packed": ({"layout": "thd", "cu_seqlens_q": [0, 4, 9]}, slice(9, None), slice(9, None)),
}


@pytest.mark.parametrize("held", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scheme", [NoPosition(), Rope(), ReRope(window=3)], ids=["none", "rope", "far"])
@pytest.mark.parametrize("norm_name", NORMS)
@pytest.mark.parametrize("name", UNATTENDED)
def test_no_gradient_knows_of_tokens_that_attend_nothing(name, norm_name, scheme, impl, held):
    """Eager and planned, from the second call on."""
    if norm_name == "after" and type(scheme) is ReRope:
        pytest.skip("no norm comes after it")
    if name == "mask" and (impl == "triton" or (impl is None and ON_GPU)):
        pytest.skip("the kernels multiply keys that a mask leaves to no query, without a norm too")
    given, unread_q, unread_k = UNATTENDED[name]
    if impl != "reference":  # of queries, the backward kernels of attention multiply what they hold
        unread_q = []
    keywords = {
        key: torch.tensor(x, device=DEVICE, dtype=torch.bool if key == "mask" else torch.int32)
        if isinstance(x, list)
        else x
        for key, x in given.items()
    }
    q, k, v = (torch.randn(1, 12, n, D, device=DEVICE) for n in (H, K, K))
    sizes = (H * D, K * D) if norm_name == "across heads" else (D, D)
    weights = [torch.rand(size, device=DEVICE).requires_grad_() for size in sizes]
    found = []
    for value in (0.5, held, held):
        tensors = [x.clone() for x in (q, k, v)]
        for x, unread in zip(tensors, (unread_q, unread_k, unread_k), strict=True):
            x[:, unread] = value
        tensors = [(x[0] if name == "packed" else x).requires_grad_() for x in tensors]
        norm = NORMS[norm_name](*weights)
        out = attention(*tensors, position=scheme, norm=norm, impl=impl, **keywords)
        grads = torch.autograd.grad(out.square().sum(), [*tensors, *weights])
        for grad, unread in zip(grads, (unread_q, unread_k, unread_k), strict=False):
            assert not grad.reshape(1, 12, -1)[:, unread].any()
        found.append((out, *grads))
    for mine in found[1:]:
        for x, expected in zip(mine, found[0], strict=True):
            torch.testing.assert_close(x, expected)


def test_unfit_norms_raise():
    q, k, v, *weights = draw(torch.float32, "bthd", "before")
    with pytest.raises(TypeError, match=r"norm is float, but must be a ropewalk\.QKNorm"):
        attention(q, k, v, norm=1.0)
    with pytest.raises(ValueError, match="norm was passed with keys_rotated"):
        attention(q, k, v, position=Rope(), keys_rotated=True, norm=QKNorm(*weights))
    for scheme in (NoPosition(), Rope()):
        with pytest.raises(ValueError, match=r"norm\.k_weight has shape \(3,\)"):
            attention(q, k, v, position=scheme, norm=QKNorm(weights[0], torch.ones(3, device=DEVICE)))
    with pytest.raises(ValueError, match=r"norm\.k_weight has shape \(3,\)"):
        attention(q, k[:, :5], v[:, :5], norm=QKNorm(weights[0], torch.ones(3, device=DEVICE)))
    with pytest.raises(TypeError, match=r"q is list, but must be a tensor"):
        attention([q], k, v, norm=QKNorm())
    positions = torch.arange(T, device=DEVICE)[None]
    norm = QKNorm(weights[0], torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match=r"norm\.k_weight has shape \(3,\)"):
        attention(q, k, v, position=Rope(), norm=norm, positions_q=positions, positions_k=positions)


def test_choice_is_explained_by_the_same_keywords():
    q, k, v, *weights = draw(torch.float32, "bthd", "before")
    norm = QKNorm(*weights, after=True)
    assert explain_choice(q, k, v, position=Rope(), norm=norm).name == explain_choice(q, k, v).name
    with pytest.raises(ValueError, match=r"norm\.after is True, but must be False for ReRope"):
        explain_choice(q, k, v, position=ReRope(window=6), norm=norm)


@pytest.mark.parametrize("scheme", [pytest.param(NoPosition(), marks=pytest.mark.slow), Rope()], ids=["none", "rope"])
def test_compiled_calls_are_the_eager_ones(scheme):
    q, k, v, *weights = draw(torch.float32, "bthd", "before")

    def call(q, k, v, q_weight, k_weight):
        return attention(q, k, v, position=scheme, norm=QKNorm(q_weight, k_weight), causal=True)

    eager = call(q, k, v, *weights)
    compiled = torch.compile(call, fullgraph=True)(q, k, v, *weights)
    torch.testing.assert_close(compiled, eager)
    tensors = (q, k, v, *weights)
    mine, theirs = (torch.autograd.grad(out.sin().sum(), tensors) for out in (compiled, eager))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_lowers_the_result():
    q, k, v, *weights = (x.detach() for x in draw(torch.float32, "bthd", "before"))
    with torch.autocast(DEVICE, torch.bfloat16):
        out = attention(q, k, v, position=Rope(), norm=QKNorm(*weights))
    assert out.dtype == torch.bfloat16
    exact = attention(q, k, v, position=Rope(), norm=QKNorm(*weights))
    torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=0.05)

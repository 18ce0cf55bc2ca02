"""RoPEAttention against attention with an explicit score matrix, in float64."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ropewalk import QKNorm, RoPEAttention
from ropewalk.testing import assert_close_to_truth

B, T, H, D = 3, 13, 4, 8
ROUNDINGS = 6  # projection, rotation, scores, probabilities, their product with the values, output projection


def make(device, d_model=H * D, n_heads=H, dropout=0.0, seed=0, **keywords):
    torch.manual_seed(seed)
    return RoPEAttention(d_model, n_heads, dropout=dropout, **keywords).to(device)


def random(*shape, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def random_mask(*shape, device="cpu", seed=0):
    """A random mask in which no row is empty."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    return (mask | torch.eye(shape[-1], dtype=torch.bool)).to(device)


def explicit(layer, x, allowed=None, theta=10000.0):
    """The layer's output from its definition, in x's dtype; `allowed` is bool and broadcasts against (B, H, T, T)."""
    n_heads, head_dim = layer.n_heads, layer.head_dim
    tokens = x.shape[1]
    omega = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
    angles = (torch.arange(tokens, dtype=torch.float64)[:, None] * omega)[:, None].to(x.device)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def rotate(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    q, k, v = (p(x).unflatten(-1, (n_heads, head_dim)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    scores = torch.einsum("bmhd,bnhd->bhmn", rotate(q), rotate(k)) / head_dim**0.5
    if allowed is None:
        allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device)
    largest = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).amax(-1, keepdim=True)
    weights = (scores - largest).clamp(max=0).exp() * allowed
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / total.where(total > 0, 1)
    return layer.out_proj(torch.einsum("bhmn,bnhd->bmhd", probabilities, v).flatten(2))


def value_and_grads(call, layer, x):
    """The output of `call(layer, x)`, and the gradients of x and of every parameter for one random cotangent.

    Those of the three projections come as one: with one token those of q and k are exactly zero in truth, the
    difference of two numbers of the size of v's.
    """
    x = x.clone().requires_grad_()
    y = call(layer, x)
    cotangent = random(*y.shape, device=x.device, seed=9).to(y.dtype)
    projections = [parameter for p in (layer.q_proj, layer.k_proj, layer.v_proj) for parameter in p.parameters()]
    leaves = (x, *layer.out_proj.parameters(), *projections)
    grad_x, grad_weight, grad_bias, *grads = torch.autograd.grad(y, leaves, cotangent)
    return [y.detach(), grad_x, grad_weight, grad_bias, torch.cat([grad.flatten() for grad in grads])]


def check(layer, x, allowed=None, theta=10000.0, **call):
    """The layer's output and gradients are as close to the truth as float32 allows."""
    actual = value_and_grads(lambda layer, x: layer(x, **call), layer, x)
    truth = value_and_grads(
        lambda layer, x: explicit(layer, x, allowed, theta), copy.deepcopy(layer).double(), x.double()
    )
    baseline = value_and_grads(lambda layer, x: explicit(layer, x, allowed, theta), layer, x)
    for mine, true, same_dtype in zip(actual, truth, baseline, strict=True):
        assert mine.isfinite().all()
        assert_close_to_truth(mine, true, same_dtype, ROUNDINGS)


@pytest.mark.parametrize("theta", [10000.0, 100.0])
def test_attends_to_all(device, theta):
    check(make(device, theta=theta), random(B, T, H * D, device=device), theta=theta)


@pytest.mark.parametrize(("batch", "tokens", "d_model", "n_heads"), [(1, 1, 8, 4), (2, 37, 120, 3), (2, 5, 2, 1)])
def test_shapes(device, batch, tokens, d_model, n_heads):
    check(make(device, d_model, n_heads), random(batch, tokens, d_model, device=device))
    check(
        make(device, d_model, n_heads),
        random(batch, tokens, d_model, device=device),
        torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril(),
        causal=True,
    )


def test_no_tokens(device):
    layer = make(device)
    assert layer(torch.empty(2, 0, H * D, device=device)).shape == (2, 0, H * D)


MASK_SHAPES = [(T, T), (B, T, T), (1, 1, T, T), (B, 1, T, T), (1, H, T, T), (B, H, T, T)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_masks(device, shape, causal):
    mask = random_mask(*shape, device=device)
    allowed = mask[:, None] if mask.ndim == 3 else mask
    if causal:
        allowed = allowed & torch.ones(T, T, dtype=torch.bool, device=device).tril()
    before = mask.clone()
    check(make(device), random(B, T, H * D, device=device), allowed, mask=mask, causal=causal)
    assert torch.equal(mask, before)


def test_a_mask_per_batch_row_is_not_read_as_per_head_where_there_are_as_many(device):
    layer, x = make(device), random(H, T, H * D, device=device)
    mask = random_mask(H, T, T, device=device)
    check(layer, x, mask[:, None], mask=mask)
    for row in range(H):
        alone = layer(x[row : row + 1], mask[row])
        torch.testing.assert_close(layer(x, mask)[row : row + 1], alone)


def test_an_expanded_padding_mask(device):
    is_token = torch.arange(T, device=device) < torch.tensor([[T], [5], [1]], device=device)
    mask = is_token[:, None, None].expand(B, 1, T, T)
    check(make(device), random(B, T, H * D, device=device), mask, mask=mask)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_masks_of_ones_and_zeros(device, dtype):
    layer, x, mask = make(device), random(B, T, H * D, device=device), random_mask(B, T, T, device=device)
    assert torch.equal(layer(x, mask.to(dtype)), layer(x, mask))


def test_causal_is_the_triangular_mask(device):
    layer, x = make(device), random(B, T, H * D, device=device)
    allowed = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    check(layer, x, allowed, causal=True)
    check(layer, x, allowed, mask=allowed.float()[None, None])


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_attend_nothing(device, causal):
    layer, x = make(device), random(B, T, H * D, device=device)
    mask = random_mask(B, H, T, T, device=device)
    mask[0, :, 4] = False  # a query
    mask[1, 2, 7] = False  # a query of one head
    mask[2] = False  # a batch row
    mask[1, :, :, 0] = False  # with causal, this takes the first query its only key
    allowed = mask & torch.ones(T, T, dtype=torch.bool, device=device).tril() if causal else mask
    check(layer, x, allowed, mask=mask, causal=causal)
    y = layer(x, mask, causal=causal)
    nothing = ~allowed.any(-1).any(1)
    assert nothing.sum() == T + 1 + causal
    assert torch.equal(y[nothing], layer.out_proj.bias.expand_as(y[nothing]))


def test_rows_that_attend_nothing_pass_back_nothing(device):
    layer, x = make(device), random(B, T, H * D, device=device).requires_grad_()
    mask = random_mask(B, T, T, device=device)
    mask[0, 4] = False
    mask[2] = False
    y = layer(x, mask)
    silent = torch.cat((y[0, 4], y[2].flatten()))
    cotangent = random(*silent.shape, device=device, seed=5)
    inner = [p for projection in (layer.q_proj, layer.k_proj, layer.v_proj) for p in projection.parameters()]
    for grad in torch.autograd.grad(silent, (x, *inner, layer.out_proj.weight), cotangent):
        assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_attend_nothing_in_training_with_dropout(device, causal):
    layer, x = make(device, dropout=0.5), random(B, T, H * D, device=device).requires_grad_()
    mask = random_mask(B, T, T, device=device)
    mask[0, 4] = False
    mask[2] = False
    y = layer(x, mask, causal=causal)
    assert y.isfinite().all()
    silent = torch.cat((y[0, 4:5], y[2]))
    assert torch.equal(silent, layer.out_proj.bias.expand_as(silent))
    inner = [p for projection in (layer.q_proj, layer.k_proj, layer.v_proj) for p in projection.parameters()]
    for grad in torch.autograd.grad(silent, (x, *inner), random(*silent.shape, device=device), retain_graph=True):
        assert torch.equal(grad, torch.zeros_like(grad))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), (x, *inner)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    layer, x = make(device).to(dtype), random(B, T, H * D, device=device).to(dtype)
    mask = random_mask(B, T, T, device=device)
    mask[1, 3] = False
    truth = explicit(copy.deepcopy(layer).double(), x.double(), mask[:, None])
    y = layer(x, mask)
    assert y.dtype == dtype
    assert_close_to_truth(y, truth, explicit(layer, x, mask[:, None]), ROUNDINGS)


def test_under_autocast(device):
    layer, x = make(device), random(B, T, H * D, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x, causal=True)
        allowed = torch.ones(T, T, dtype=torch.bool, device=device).tril()
        baseline = explicit(layer, x, allowed)
    y.sum().backward()
    assert layer.q_proj.weight.grad.isfinite().all()
    assert_close_to_truth(y, explicit(copy.deepcopy(layer).double(), x.double(), allowed), baseline, ROUNDINGS)


def test_longer_than_its_first_tables(device):
    tokens = 2100
    layer, x = make(device, 8, 2), random(1, tokens, 8, device=device)
    allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    with torch.no_grad():
        truth = explicit(copy.deepcopy(layer).double(), x.double(), allowed)
        assert_close_to_truth(layer(x, causal=True), truth, explicit(layer, x, allowed), ROUNDINGS)


def averaging(device, dropout):
    """A layer whose probabilities are all 1/T and whose values are all 1: it returns the sum of the probabilities."""
    layer = make(device, dropout=dropout)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.v_proj.bias.fill_(1)
        layer.out_proj.weight.copy_(torch.eye(H * D))
    return layer


@pytest.mark.parametrize("masked", [False, True])
def test_dropout_acts_on_probabilities_in_training(device, masked):
    tokens, batch, p = 100, 40, 0.3
    layer, x = averaging(device, p), torch.zeros(batch, tokens, H * D, device=device)
    mask = torch.ones(tokens, tokens, device=device) if masked else None
    torch.manual_seed(0)
    y = layer(x, mask).unflatten(-1, (H, D)).double()
    # What is dropped is a key, for all features of a head at once.
    torch.testing.assert_close(y, y[..., :1].expand_as(y), rtol=1e-5, atol=1e-5)
    sums = y[..., 0].flatten()
    variance = p / (1 - p) / tokens  # of the sum of T terms that are each 0 or 1/T/(1 − p)
    assert abs(sums.mean() - 1) < 5 * (variance / sums.numel()) ** 0.5
    assert abs(sums.var() / variance - 1) < 5 * (2 / sums.numel()) ** 0.5
    assert not torch.equal(layer(x, mask), layer(x, mask))


def test_dropout_goes_by_torchs_seed(device):
    layer, x = make(device, dropout=0.5), random(B, T, H * D, device=device)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(value_and_grads(lambda layer, x: layer(x, causal=True), layer, x))
    assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    assert not torch.equal(results[0][0], results[2][0])


@pytest.mark.parametrize("causal", [False, True])
def test_no_dropout_in_evaluation(device, causal):
    layer, x = make(device, dropout=0.5).eval(), random(B, T, H * D, device=device)
    allowed = torch.ones(T, T, dtype=torch.bool, device=device).tril() if causal else None
    check(layer, x, allowed, causal=causal)


def test_only_the_projections_are_saved(device):
    layer, other = make(device), make(device, seed=1)
    names = {f"{name}_proj.{kind}" for name in ("q", "k", "v", "out") for kind in ("weight", "bias")}
    assert set(layer.state_dict()) == names
    other.load_state_dict(layer.state_dict())
    x = random(B, T, H * D, device=device)
    assert torch.equal(layer(x), other(x))


def test_default_dropout():
    assert RoPEAttention(16, 2).dropout == 0.1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_compiles_without_a_graph_break(device, causal, with_mask):
    layer = make(device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (8, 13, 21):
        x = random(2, tokens, H * D, device=device)
        mask = None
        if with_mask:
            mask = random_mask(2, tokens, tokens, device=device).float()
            mask[1, 5] = 0
        expected = value_and_grads(lambda layer, x, m=mask: layer(x, m, causal=causal), layer, x)
        actual = value_and_grads(lambda _, x, m=mask: compiled(x, m, causal=causal), layer, x)
        for mine, eager in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, eager)


def test_dropout_compiles_without_a_graph_break(device):
    layer, x = make(device, dropout=0.3), random(2, T, H * D, device=device)
    torch._dynamo.reset()
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        results.append(value_and_grads(lambda _, x, function=function: function(x, causal=True), layer, x))
    for mine, eager in zip(*results, strict=True):
        torch.testing.assert_close(mine, eager)


BAD_SHAPES = [
    (T,),
    (T, T - 1),
    (T - 1, T),
    (1, T),
    (1, T, T),
    (H, T, T),
    (B, 1, T),
    (B, T),
    (B, 1, 1, T),
    (B - 1, 1, T, T),
    (1, H - 1, T, T),
    (H, B, T, T),
    (1, B, H, T, T),
]


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=str)
def test_masks_of_other_shapes_are_refused(device, shape):
    layer, x = make(device), random(B, T, H * D, device=device)
    with pytest.raises(ValueError, match=r"mask has shape .*, but must be \(T, T\), \(B, T, T\) or \(B or 1, H or 1"):
        layer(x, torch.ones(shape, device=device))


def test_a_mask_that_may_be_one_of_padding_is_refused(device):
    layer, x = make(device), random(T, T, H * D, device=device)
    mask = random_mask(T, T, device=device)
    with pytest.raises(ValueError, match=r"which is both \(T, T\) and \(B, T\), as B = T = 13: pass \(1, 1, T, T\)"):
        layer(x, mask)
    check(layer, x, mask, mask=mask[None, None])
    assert layer(x[:1, :1], mask[:1, :1]).shape == (1, 1, H * D)
    with pytest.raises(TypeError, match="mask is list, but must be a tensor"):
        layer(x, [1] * T)


def test_a_mask_to_be_added_is_refused_on_the_cpu():
    layer, x = make("cpu"), random(B, T, H * D)
    additive = torch.zeros(T, T).masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
    with pytest.raises(ValueError, match="mask holds other values, but must hold 0"):
        layer(x, additive)
    with pytest.raises(ValueError, match="mask holds other values, but must hold 0"):
        layer(x, torch.full((T, T), torch.nan))
    assert torch.equal(layer(x, additive == 0), layer(x, torch.ones(T, T).tril()))


@pytest.mark.parametrize("shape", [(T, H * D), (B, T, H * D - 1), (B, H, T, D)])
def test_x_of_another_shape_is_refused(device, shape):
    with pytest.raises(ValueError, match=r"x has shape .*, but must be \(B, T, d_model\) with d_model = 32"):
        make(device)(torch.zeros(shape, device=device))


def test_bad_constructor_arguments():
    for d_model, n_heads in ((10, 3), (8, 0), (0, 2), (-8, 2), (8, -2)):
        with pytest.raises(ValueError, match="d_model must be divisible by n_heads"):
            RoPEAttention(d_model, n_heads)
    with pytest.raises(ValueError, match="Head dimension must be even"):
        RoPEAttention(9, 3)
    for dropout in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match=r"dropout is .*, but must be in \[0, 1\)"):
            RoPEAttention(8, 2, dropout=dropout)
    with pytest.raises(ValueError, match="base"):
        RoPEAttention(8, 2, theta=-1.0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_is_of_queries_and_keys_before_the_rotation(device, offset):
    weights = [random(D, seed=seed).double() for seed in (1, 2)]
    layer = make(device, norm=QKNorm(*weights, eps=1e-5, offset=offset)).double()
    plain = make(device).double()
    x = random(B, T, H * D, device=device).double()

    def normed(proj, weight):
        def project(x):
            heads = proj(x).unflatten(-1, (H, D))
            heads = heads * (heads.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight.to(device) + offset)
            return heads.flatten(-2)

        return project

    expected = explicit(SimpleNamespace(**plain_parts(plain, normed, weights)), x)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-6)  # the angles are of float32
    names = set(layer.state_dict()) - set(plain.state_dict())
    assert names == {"q_norm.weight", "k_norm.weight"}
    layer(x).square().sum().backward()
    assert all(layer.get_parameter(name).grad.abs().sum() > 0 for name in names)
    again = copy.deepcopy(layer)
    assert torch.equal(again(x), layer(x))
    assert again.q_norm.weight is not layer.q_norm.weight


def plain_parts(layer, normed, weights):
    """What `explicit` reads of a layer, with queries and keys normed by their projections."""
    parts = {name: getattr(layer, name) for name in ("n_heads", "head_dim", "v_proj", "out_proj")}
    return parts | {"q_proj": normed(layer.q_proj, weights[0]), "k_proj": normed(layer.k_proj, weights[1])}


def test_a_norm_may_have_one_weight_or_none(device):
    shared = nn.Parameter(torch.ones(D))
    layer = make(device, norm=QKNorm(shared, shared))
    assert len(list(layer.parameters())) == len(list(make(device).parameters())) + 1
    assert layer.q_norm is layer.k_norm
    layer = make(device, norm=QKNorm())
    assert set(layer.state_dict()) == set(make(device).state_dict())
    x = random(B, T, H * D, device=device)
    assert not torch.allclose(layer(x), make(device)(x))
    assert "QKNorm" in repr(layer)
    with pytest.raises(TypeError, match=r"norm is str, but must be None or a ropewalk\.QKNorm"):
        make(device, norm="rms")

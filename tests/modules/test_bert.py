"""BERT's self-attention by each position scheme against attention with an explicit score matrix, in float64."""

import copy
import math

import pytest
import torch

import ropewalk
from ropewalk import get_attention_class
from ropewalk.modules.bert import BERTAttention
from ropewalk.testing import assert_close_to_truth, error_budget, unchanged

B, T, H, D = 3, 13, 4, 8
C = H * D
LONGEST = 16
WINDOW = 5
ROUNDINGS = 8  # positions, projection, rotation, gain, scores, decay, probabilities, their product with the values


def random(*shape, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def omega(width, device, base=10000.0):
    return torch.tensor([base ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64, device=device)


def sinusoids(p, width, base=10000.0):
    """(..., T, width), in float64."""
    pe = torch.zeros(*p.shape, width, dtype=torch.float64, device=p.device)
    for i, w in enumerate(omega(width, p.device, base)):
        pe[..., 2 * i], pe[..., 2 * i + 1] = torch.sin(p * w), torch.cos(p * w)
    return pe


def pairs(x, interleaved=True):
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)


def turned(q, k, relative, base=10000.0, interleaved=True):
    """The scores of q turned by relative positions (B or 1, T, T), against k: all pairs of tokens at once."""
    angles = (relative[..., None] * omega(D, q.device, base))[:, None]
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)  # (B or 1, 1, T, T, D/2)
    (qa, qb), (ka, kb) = (
        (y[:, :, :, None] for y in pairs(q, interleaved)),
        (y[:, :, None] for y in pairs(k, interleaved)),
    )
    return ((qa * ka + qb * kb) * cos + (qa * kb - qb * ka) * sin).sum(-1)


def relative(p):
    return p[:, :, None] - p[:, None]


def rope(layer, q, k, p):
    return turned(q, k, relative(p))


def rope_with_options(layer, q, k, p):
    return turned(q, k, relative(p), base=100.0, interleaved=False)


def exposb(layer, q, k, p):
    amplitude = (1 + 0.2 * torch.exp(-0.001 * p)).to(q.dtype)
    feature = torch.arange(D, dtype=torch.float64, device=q.device)
    gain = (0.8 + 0.4 * torch.exp(-((feature - D // 4) ** 2) / (2 * (D // 8) ** 2))).to(q.dtype)
    weights = layer.band_weights[:, None, None].to(q.dtype)
    angles = (p[..., None] * omega(D, q.device))[:, None]
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

    def change(x):
        a, b = pairs(x)
        return (
            weights
            * gain
            * amplitude[:, None, :, None]
            * torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        )

    return change(q) @ change(k).mT


def exposb_with_decay(layer, q, k, p):
    return exposb(layer, q, k, p) * (0.7 + 0.3 * torch.exp(-0.005 * relative(p).abs()))[:, None].to(q.dtype)


def alibi(layer, q, k, p):
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)], device=q.device).to(q.dtype)
    return q @ k.mT - D**0.5 * slopes[:, None, None] * relative(p).abs()[:, None].to(q.dtype)  # the bias is not scaled


def t5_bucket(distance, way, max_distance):
    """T5's bucket of m − n: half of a way hold one distance each, the others grow with its logarithm."""
    past, exact = abs(distance), way // 2
    if past >= exact:
        past = min(exact + int(math.log(past / exact) / math.log(max_distance / exact) * (way - exact)), way - 1)
    return past + way * (distance < 0)


def t5(layer, q, k, p):
    table = layer.relative_attention_bias.weight
    buckets = relative(p).long().cpu().apply_(lambda d: t5_bucket(d, table.shape[0] // 2, layer.max_distance))
    bias = table[buckets.to(table.device)].permute(0, 3, 1, 2).to(q.dtype)
    return q @ k.mT + D**0.5 * bias  # the bias is not scaled


def rerope(layer, q, k, p):
    return turned(q, k, relative(p).clamp(-WINDOW, WINDOW))


def leaky_rerope(layer, q, k, p):
    d = relative(p)
    beyond = torch.sign(d) * (WINDOW + (d.abs() - WINDOW) / 4)
    grown = (torch.log(p + 1) / math.log(6)).clamp(min=1).to(q.dtype)
    return turned(q * grown[:, None, :, None], k, torch.where(d.abs() < WINDOW, d, beyond))


def plain(layer, q, k, p):
    return q @ k.mT


# By case: the class, its arguments, the scores before they are divided by √D, and the inputs of q and k, and of v.
CASES = {
    "none": ("none", {}, plain),
    "standard": ("standard", {}, plain),
    "absolute": ("absolute", {}, plain),
    "absolute-classic": ("absolute", {"base": 100.0, "add_to_values": True}, plain),
    "rope": ("rope", {}, rope),
    "rope-half-split": ("rope", {"base": 100.0, "interleaved": False}, rope_with_options),
    "exposb": ("exposb", {}, exposb),
    "exposb-decay": ("exposb", {"distance_decay": True}, exposb_with_decay),
    "alibi": ("alibi", {}, alibi),
    "t5": ("t5", {"num_buckets": 8, "max_distance": 9}, t5),
    "rerope": ("rerope", {"window": WINDOW}, rerope),
    "rerope-leaky": ("rerope", {"window": WINDOW, "leak": 4, "log_n": 6}, leaky_rerope),
}
NAMES = ("none", "standard", "absolute", "rope", "exposb", "alibi", "t5", "rerope")


def make(case, device="cpu", dropout=0.0, seed=0, **keywords):
    kind, arguments, _ = CASES[case]
    kind = get_attention_class(kind) if isinstance(kind, str) else kind
    torch.manual_seed(seed)
    layer = kind(C, H, LONGEST, dropout, **arguments, **keywords)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name == "band_weights":  # that each head has its own can be seen
                parameter.copy_(torch.linspace(0.5, 1.5, H))
            if name in ("position_embeddings.weight", "relative_attention_bias.weight"):
                parameter.mul_(50)
    return layer.to(device)


def explicit(case, layer, x, allowed=None, p=None, normalise=True):
    """The layer's output from its definition, in x's dtype; `allowed` is bool and broadcasts against (B, H, T, T).

    Without `normalise` the value is the same, but what probabilities are divided by passes back no gradient.
    """
    kind, arguments, scores_of = CASES[case]
    tokens = x.shape[1]
    p = torch.arange(tokens, device=x.device)[None] if p is None else p
    for_scores = for_values = x
    if kind == "standard":
        for_scores = for_values = x + layer.position_embeddings.weight[p]
    if kind == "absolute":
        for_scores = x + sinusoids(p.double(), C, arguments.get("base", 10000.0)).to(x.dtype)
        for_values = for_scores if arguments.get("add_to_values") else x
    q, k, v = (
        projection(y).unflatten(-1, (H, D)).transpose(1, 2)
        for projection, y in ((layer.query, for_scores), (layer.key, for_scores), (layer.value, for_values))
    )
    scores = scores_of(layer, q, k, p.double()) / D**0.5
    if allowed is None:
        allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device)
    largest = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).amax(-1, keepdim=True)
    largest = largest if normalise else largest.detach()
    weights = (scores - largest).clamp(max=0).exp() * allowed
    total = weights.sum(-1, keepdim=True)
    total = total if normalise else total.detach()
    y = ((weights / total.where(total > 0, 1)) @ v).transpose(1, 2).flatten(2)
    return y if layer.out is None else layer.out(y)


def value_and_grads(call, layer, x, cotangent=None):
    """The output of `call(layer, x)`, and the gradients of x, of the projections as one, and of all else.

    Those of the three projections come as one: without a rotation that of the key's bias is zero in truth.
    """
    x = x.clone().requires_grad_()
    y = call(layer, x)
    if cotangent is None:
        cotangent = random(*y.shape, device=x.device, seed=9)
    projections = [parameter for part in (layer.query, layer.key, layer.value) for parameter in part.parameters()]
    own = [
        parameter for name, parameter in layer.named_parameters() if name.split(".")[0] not in ("query", "key", "value")
    ]
    grad_x, *grads = torch.autograd.grad(y, (x, *projections, *own), cotangent.to(y.dtype))
    count = len(projections)
    return [y.detach(), grad_x, torch.cat([grad.flatten() for grad in grads[:count]]), *grads[count:]]


def check(case, layer, x, allowed=None, p=None, cancels=False, **call):
    """The layer's output and gradients are as close to the truth as float32 allows.

    Where all that scores get back `cancels`, what cancels is rounded nonetheless.
    """
    actual = value_and_grads(lambda layer, x: layer(x, **call)[0], layer, x)
    in_double = copy.deepcopy(layer).double()
    truth = value_and_grads(lambda layer, x: explicit(case, layer, x, allowed, p), in_double, x.double())
    baseline = value_and_grads(lambda layer, x: explicit(case, layer, x, allowed, p), layer, x)
    terms = value_and_grads(
        lambda layer, x: explicit(case, layer, x, allowed, p, normalise=False), in_double, x.double()
    )
    for mine, true, same_dtype, term in zip(actual, truth, baseline, terms, strict=True):
        assert mine.isfinite().all()
        if not cancels:
            assert_close_to_truth(mine, true, same_dtype, ROUNDINGS)
        else:
            rounded = ROUNDINGS * torch.finfo(mine.dtype).eps * term.abs().max()
            assert (mine.double() - true).abs().max() <= error_budget(true, same_dtype, ROUNDINGS) + rounded


@pytest.mark.parametrize("case", CASES)
def test_attends_to_all(device, case):
    check(case, make(case, device), random(B, T, C, device=device))


@pytest.mark.parametrize("case", CASES)
def test_masks_and_empty_rows(device, case):
    allowed = torch.rand(B, H, T, T, device=device) < 0.5
    allowed[0, :, 4] = False  # a query
    allowed[1, 2, 7] = False  # a query of one head
    allowed[2] = False  # a batch row
    check(case, make(case, device), random(B, T, C, device=device), allowed, attention_mask=allowed)


@pytest.mark.parametrize("case", CASES)
def test_one_token_and_none(device, case):
    layer = make(case, device)
    check(case, layer, random(2, 1, C, device=device), cancels=True)  # the one probability is 1, whatever the score
    for mask in (None, torch.ones(2, 0, device=device), torch.ones(2, 1, 0, 0, dtype=torch.bool, device=device)):
        assert layer(torch.empty(2, 0, C, device=device), mask)[0].shape == (2, 0, C)


@pytest.mark.parametrize("case", CASES)
def test_gradients_reach_everything(device, case):
    """In document 002 none reached q, k, v or the positions."""
    layer = make(case, device, output_projection=True)
    x = random(B, T, C, device=device).requires_grad_()
    y, _ = layer(x, torch.arange(T, device=device) < torch.tensor([[T], [9], [5]], device=device))
    y.backward(random(*y.shape, device=device, seed=5))
    assert x.grad.abs().min() > 0
    own = {
        "standard": {"position_embeddings.weight"},
        "exposb": {"band_weights"},
        "t5": {"relative_attention_bias.weight"},
    }.get(case.partition("-")[0], set())
    names = {f"{part}.{kind}" for part in ("query", "key", "value", "out") for kind in ("weight", "bias")}
    assert {name for name, _ in layer.named_parameters()} == names | own
    for name, parameter in layer.named_parameters():
        grad = parameter.grad[:T] if name == "position_embeddings.weight" else parameter.grad
        if name == "relative_attention_bias.weight":  # no key ahead is at distance 0
            grad = torch.cat((grad[:4], grad[5:]))
        # What a key's bias adds to all scores of a query changes nothing, unless it is turned or stretched.
        if name != "key.bias" or CASES[case][2] not in (plain, alibi, t5):
            assert grad.abs().max() > 1e-4, name
        if name in own or name == "query.weight":
            assert grad.abs().min() > 0, name


PADDED_TO = torch.tensor([T, 9, 4])


def masks_of(is_token):
    """Hugging Face's masks for a padded batch: each says the same."""
    batch, tokens = is_token.shape
    square = is_token[:, None, None].expand(batch, 1, tokens, tokens)
    yield from (is_token, is_token.long(), is_token.float(), is_token.to(torch.uint8), is_token.bfloat16())
    yield from (square, square.contiguous(), is_token[:, None, None], square.expand(-1, H, -1, -1))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        lowest = torch.finfo(dtype).min
        for masked in (lowest, lowest / 2, -math.inf):
            additive = torch.zeros(square.shape, dtype=dtype, device=square.device).masked_fill(~square, masked)
            yield additive
        yield additive[:, :, :1]
        yield additive[:, :, :1].expand(-1, -1, tokens, -1)


@pytest.mark.parametrize("case", CASES)
def test_padding_masks_agree(device, case):
    layer, x = make(case, device), random(B, T, C, device=device)
    for is_token in (
        torch.arange(T) < PADDED_TO[:, None],
        torch.arange(T) >= T - PADDED_TO[:, None],
        torch.rand(B, T) < 0.5,
    ):
        is_token = is_token.to(device)
        first, *others = masks_of(is_token)
        check(case, layer, x, is_token[:, None, None], attention_mask=first)
        with torch.no_grad():
            truth = explicit(case, copy.deepcopy(layer).double(), x.double(), is_token[:, None, None])
            baseline = explicit(case, layer, x, is_token[:, None, None])
            for mask in others:  # not the same bits: a GPU may serve them by other kernels
                with unchanged([mask, x]):
                    assert_close_to_truth(layer(x, mask)[0], truth, baseline, ROUNDINGS)


@pytest.mark.parametrize("case", CASES)
def test_right_padding_changes_nothing_outside(device, case):
    """Neither that it is there, nor what it holds: in the output and in all gradients."""
    layer, x = make(case, device), random(B, T, C, device=device)
    is_token = torch.arange(T, device=device) < PADDED_TO[:, None].to(device)
    cotangent = random(B, T, C, device=device, seed=7) * is_token[..., None]

    def of_tokens(x):
        return value_and_grads(lambda layer, x: layer(x, is_token)[0], layer, x, cotangent)

    y, grad_x, *grads = of_tokens(x)
    other = torch.where(is_token[..., None], x, 100 * random(B, T, C, device=device, seed=3))
    y_other, grad_x_other, *grads_other = of_tokens(other)
    assert torch.equal(y[is_token], y_other[is_token])
    assert torch.equal(grad_x, grad_x_other)
    assert not grad_x[~is_token].any()
    for grad, grad_other in zip(grads, grads_other, strict=True):
        torch.testing.assert_close(grad, grad_other)
    for row, length in enumerate(PADDED_TO):
        alone = layer(x[row : row + 1, :length])[0]
        torch.testing.assert_close(y[row : row + 1, :length], alone)


@pytest.mark.parametrize("as_mask", ["2-D", "bool", "additive"])
@pytest.mark.parametrize("case", CASES)
def test_right_padding_may_be_nan(device, case, as_mask):
    layer, x = make(case, device), random(B, T, C, device=device)
    is_token = torch.arange(T, device=device) < PADDED_TO[:, None].to(device)
    square = is_token[:, None, None].expand(B, 1, T, T)
    mask = {"2-D": is_token, "bool": square, "additive": torch.where(square, 0.0, -math.inf)}[as_mask]
    expected = layer(x, mask)[0]
    y = layer(x.masked_fill(~is_token[..., None], math.nan), mask)[0]
    assert torch.equal(y[is_token], expected[is_token])


@pytest.fixture
def calls(monkeypatch):
    """What layers ask of `attention`, from here on, and what it returns is v."""
    asked = []

    def attention(q, k, v, **keywords):
        asked.append(keywords)
        return v

    monkeypatch.setattr("ropewalk.modules.bert.attention", attention)
    return asked


def test_key_lengths_are_the_last_key_of_any_query(device, calls):
    layer, x = make("none", device), random(B, T, C, device=device)
    is_token = torch.zeros(B, T, dtype=torch.bool, device=device)
    is_token[0, 2], is_token[1, [0, 11]] = True, True
    layer(x, is_token)
    assert calls[-1]["key_starts"].tolist() == [2, 0, 0]
    assert calls[-1]["key_lengths"].tolist() == [3, 12, 0]
    assert calls[-1]["mask"].shape == (B, 1, 1, T)
    allowed = torch.zeros(1, H, T, T, dtype=torch.bool, device=device)
    allowed[0, 1, 5, 6], allowed[0, 3, 0, 8] = True, True
    layer(x, allowed)
    assert calls[-1]["key_lengths"].tolist() == [9, 9, 9]
    assert calls[-1]["key_starts"] is None
    for heads in (1, H):
        layer(x, is_token[:, None, None].expand(B, heads, T, T))  # one row is read, not T
        assert calls[-1]["mask"].shape == (B, 1, 1, T)
        assert calls[-1]["key_starts"].tolist() == [2, 0, 0]
    layer(x, is_token.any(dim=1)[:, None, None, None])
    assert calls[-1]["key_lengths"].tolist() == [T, T, 0]
    layer(x)
    assert calls[-1]["mask"] is calls[-1]["key_starts"] is calls[-1]["key_lengths"] is None


@pytest.mark.parametrize("case", CASES)
def test_keys_start_elsewhere_where_that_moves_no_position(device, calls, case):
    layer, x = make(case, device), random(B, T, C, device=device)
    layer(x, torch.arange(T, device=device) >= torch.tensor([[0], [4], [9]], device=device))
    assert calls[-1]["key_lengths"].tolist() == [T, T, T]
    if case.partition("-")[0] in ("rope", "rerope", "exposb"):
        assert calls[-1]["key_starts"] is None
    else:
        assert calls[-1]["key_starts"].tolist() == [0, 4, 9]


@pytest.mark.parametrize("case", CASES)
def test_values_on_a_device_are_not_waited_for(case):
    """A meta tensor has no values: whoever asks for them fails."""
    layer, x = make(case).to("meta"), torch.empty(B, T, C, device="meta")
    ids = torch.zeros(B, T, dtype=torch.long, device="meta")
    for mask in (torch.ones(B, T, device="meta"), torch.zeros(B, 1, T, T, device="meta")):
        assert layer(x, mask, position_ids=ids)[0].shape == (B, T, C)


def test_what_values_count_as_that_are_not_looked_at(device, monkeypatch):
    for module in ("bert", "masks"):
        monkeypatch.setattr(f"ropewalk.modules.{module}.is_readable", lambda x: False)
    layer, x = make("none", device), random(B, T, C, device=device)
    is_token = torch.arange(T, device=device) < PADDED_TO[:, None].to(device)
    expected = layer(x, is_token)[0]
    assert torch.equal(layer(x, 2 * is_token.long())[0], expected)
    for masked in (-1e4, math.nan, 1.0):
        assert torch.equal(layer(x, torch.where(is_token, 0.0, masked)[:, None, None])[0], expected)
    standard, ids = make("standard", device), torch.arange(T, device=device)[None].clone()
    ids[0, 3], ids[0, 7] = -1, LONGEST
    x, _ = standard.add_positions(x, ids)
    assert x.isnan().all(dim=-1).nonzero()[:, 1].tolist() == [3, 7] * B
    assert x.isnan().any(dim=-1).sum() == 2 * B


@pytest.mark.parametrize("case", CASES)
def test_position_ids(device, case):
    layer, x = make(case, device), random(B, T, C, device=device)
    per_token = torch.stack([torch.randperm(LONGEST)[:T] for _ in range(B)]).to(device)
    for ids in (per_token, per_token.int(), per_token[:1], torch.arange(T, device=device)[None]):
        check(case, layer, x, p=ids.long(), position_ids=ids)


def test_positions_past_the_learned_table(device):
    layer = make("standard", device)
    with pytest.raises(ValueError, match="hidden_states has 17 tokens, but max_position_embeddings is 16"):
        layer(random(B, LONGEST + 1, C, device=device))
    ids = torch.arange(T)[None].clone()
    for outside in (-1, LONGEST):
        ids[0, 3] = outside
        with pytest.raises(ValueError, match=f"position_ids holds {outside}, but must be from 0 to below max_position"):
            make("standard")(random(B, T, C), position_ids=ids)


@pytest.mark.parametrize("case", [case for case in CASES if case != "standard"])
def test_nothing_else_limits_the_length(device, case):
    check(case, make(case, device), random(1, 3 * LONGEST + 1, C, device=device))


@pytest.mark.parametrize("case", CASES)
def test_output_projection(device, case):
    layer = make(case, device, output_projection=True)
    check(case, layer, random(B, T, C, device=device))
    context, probabilities = layer(random(B, T, C, device=device))
    assert context.shape == (B, T, C)
    assert context.is_contiguous()
    assert probabilities is None


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, case, dtype):
    layer, x = make(case, device).to(dtype), random(B, T, C, device=device).to(dtype)
    is_token = torch.arange(T, device=device) < PADDED_TO[:, None].to(device)
    y = layer(x, is_token)[0]
    assert y.dtype == dtype
    truth = explicit(case, copy.deepcopy(layer).double(), x.double(), is_token[:, None, None])
    assert_close_to_truth(y, truth, explicit(case, layer, x, is_token[:, None, None]), ROUNDINGS)


@pytest.mark.parametrize("case", CASES)
def test_under_autocast(device, case):
    layer, x = make(case, device), random(B, T, C, device=device)
    is_token = torch.arange(T, device=device) < PADDED_TO[:, None].to(device)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x, is_token)[0]
        baseline = explicit(case, layer, x, is_token[:, None, None])
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    truth = explicit(case, copy.deepcopy(layer).double(), x.double(), is_token[:, None, None])
    assert_close_to_truth(y, truth, baseline.to(y.dtype), ROUNDINGS)


def test_sinusoids_survive_half_precision(device):
    layer, x = make("absolute", device), random(B, T, C, device=device)
    expected = layer(x)[0]
    for _ in range(2):
        layer.sinusoids.half()
    assert torch.equal(layer.float()(x)[0], expected)


@pytest.mark.parametrize("masked", [False, True])
def test_dropout_acts_on_probabilities_in_training(device, masked):
    tokens, batch, p = 100, 40, 0.3
    layer, x = make("none", device, dropout=p), torch.zeros(batch, tokens, C, device=device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.value.bias.fill_(1)  # what it returns is the sum of the probabilities, each of them 0 or 1/T/(1 − p)
    mask = torch.ones(batch, tokens, device=device) if masked else None
    y = layer(x, mask)[0].unflatten(-1, (H, D)).double()
    torch.testing.assert_close(y, y[..., :1].expand_as(y), rtol=1e-5, atol=1e-5)
    sums = y[..., 0].flatten()
    variance = p / (1 - p) / tokens
    assert abs(sums.mean() - 1) < 5 * (variance / sums.numel()) ** 0.5
    assert abs(sums.var() / variance - 1) < 5 * (2 / sums.numel()) ** 0.5
    torch.testing.assert_close(layer.eval()(x, mask)[0], torch.ones_like(x))


@pytest.mark.parametrize("name", NAMES)
def test_dropout_goes_by_torchs_seed(device, name):
    layer, x = make(name, device, dropout=0.5), random(B, T, C, device=device)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(value_and_grads(lambda layer, x: layer(x)[0], layer, x))
    assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    assert not torch.equal(results[0][0], results[2][0])


@pytest.mark.parametrize(("name", "lengths"), [(name, (13,) if name != "absolute" else (8, 13, 21)) for name in NAMES])
def test_compiles_without_a_graph_break(device, name, lengths):
    """The sinusoids, of which there are 16 rows at first, grow with the last length."""
    layer = make(name, device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in lengths:
        x = random(2, tokens, C, device=device)
        mask = (torch.arange(tokens, device=device) < torch.tensor([[tokens], [5]], device=device)).long()
        if name in ("rope", "exposb"):
            allowed = mask[:, None, None].expand(2, 1, tokens, tokens) > 0
            mask = torch.where(allowed, 0.0, torch.finfo(x.dtype).min)
        eager, mine = (value_and_grads(lambda _, x, f=f, mask=mask: f(x, mask)[0], layer, x) for f in (layer, compiled))
        for result, expected in zip(mine, eager, strict=True):
            torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", ["exposb", "t5"])
def test_a_copy_learns_weights_of_its_own(device, name):
    layer = make(name, device)
    other = copy.deepcopy(layer)
    own = other.band_weights if name == "exposb" else other.relative_attention_bias.weight
    with torch.no_grad():
        own.fill_(0)
    x = random(B, T, C, device=device)
    assert not torch.allclose(layer(x)[0], other(x)[0])
    assert (other.position.band_weights if name == "exposb" else other.position.table) is own


def test_classes_by_name():
    classes = [get_attention_class(name) for name in NAMES]
    spelled = ("", "Standard", "Absolute", "RoPE", "ExpoSB", "ALiBi", "T5", "ReRoPE")
    assert [kind.__name__ for kind in classes] == [f"{name}BERTAttention" for name in spelled]
    assert classes[1:] == [getattr(ropewalk, kind.__name__) for kind in classes[1:]]
    with pytest.raises(ValueError, match="Unknown attention type: 'sinusoidal', but must be one of 'none', 'stand"):
        get_attention_class("sinusoidal")


@pytest.mark.parametrize("name", NAMES)
def test_defaults_and_initialisation(name):
    torch.manual_seed(0)
    layer = get_attention_class(name)(768, 12)
    assert (layer.max_position_embeddings, layer.dropout, layer.out) == (512, 0.1, None)
    torch.manual_seed(0)
    same = [torch.nn.Linear(768, 768) for _ in range(3)]  # whatever the scheme
    for mine, expected in zip((layer.query, layer.key, layer.value), same, strict=True):
        assert torch.equal(mine.weight, expected.weight)
    if name == "standard":
        table = layer.position_embeddings.weight
        assert table.shape == (512, 768)
        assert abs(table.mean()) < 5 * 0.02 / table.numel() ** 0.5
        assert abs(table.std() / 0.02 - 1) < 0.01
    if name == "exposb":
        assert torch.equal(layer.band_weights, torch.ones(12))
        assert not layer.position.distance_decay
    if name == "t5":
        table = layer.relative_attention_bias.weight
        assert table.shape == (32, 12)
        assert abs(table.std() / 0.02 - 1) < 5 / (2 * table.numel()) ** 0.5
        assert layer.position.max_distance == 128
        assert layer.position.bidirectional
    if name == "rerope":
        assert layer.position.window == 256
        layer.load_state_dict(get_attention_class("rope")(768, 12).state_dict())


def test_what_is_shown():
    def first_line(layer):
        return repr(layer).splitlines()[1].strip()

    assert first_line(make("standard")) == "32, 4, max_position_embeddings=16, dropout=0.0"
    assert first_line(make("rope-half-split")).endswith("dropout=0.0, base=100.0, interleaved=False")
    assert first_line(make("rerope-leaky")).endswith("dropout=0.0, window=5, leak=4, log_n=6")
    assert first_line(ropewalk.ReRoPEBERTAttention(32, 4)).endswith("dropout=0.1, window=256")


BAD_MASKS = {
    "no tensor": ([1] * T, TypeError, "attention_mask is list, but must be a tensor"),
    "3-D": (torch.ones(B, T, T), ValueError, r"attention_mask has shape \(3, 13, 13\), but must be \(B, T\) or \(B or"),
    "1-D": (torch.ones(T), ValueError, "attention_mask has shape"),
    "batch": (torch.ones(1, T), ValueError, "attention_mask has shape"),
    "keys": (torch.ones(B, 1, T, T - 1) > 0, ValueError, "attention_mask has shape"),
    "heads": (torch.ones(B, B, T, T) > 0, ValueError, "attention_mask has shape"),
    "padding of 2": (torch.full((B, T), 2), ValueError, r"must hold 1 \(token\) and 0 \(padding\) alone"),
    "additive padding": (torch.full((B, T), -1e4), ValueError, "must hold 1"),
    "integers": (
        torch.ones(B, 1, T, T).long(),
        TypeError,
        "a tensor of torch.int64, but with 4 dimensions must be bool",
    ),
    "a bias": (
        torch.full((B, 1, T, T), -0.5),
        ValueError,
        "a bias of the scores, but a floating-point mask must hold 0",
    ),
    "ones": (torch.ones(B, 1, 1, T), ValueError, "a bias of the scores"),
    "not quite masked": (torch.full((B, 1, T, T), -1e4), ValueError, "a bias of the scores"),
    "nan": (torch.full((B, 1, T, T), math.nan), ValueError, "a bias of the scores"),
    "to be learned": (torch.zeros(B, 1, T, T).requires_grad_(), ValueError, "and not require grad; a bias can be"),
}


@pytest.mark.parametrize("kind", BAD_MASKS)
def test_masks_that_are_refused(kind):
    mask, error, message = BAD_MASKS[kind]
    with pytest.raises(error, match=message):
        make("none")(random(B, T, C), mask)


BAD_IDS = {
    "float": (torch.zeros(B, T), TypeError, "position_ids is a tensor of torch.float32, but must be a tensor of int32"),
    "list": ([0] * T, TypeError, "position_ids is list"),
    "1-D": (torch.arange(T), ValueError, r"position_ids has shape \(13,\), but must be \(B, T\) or \(1, T\)"),
    "short": (torch.zeros(B, T - 1).long(), ValueError, r"position_ids has shape \(3, 12\)"),
}


@pytest.mark.parametrize("kind", BAD_IDS)
def test_position_ids_that_are_refused(kind):
    ids, error, message = BAD_IDS[kind]
    with pytest.raises(error, match=message):
        make("rope")(random(B, T, C), position_ids=ids)


def test_unsupported_keywords_are_refused_by_name():
    layer, x = make("rope"), random(B, T, C)
    for name, value in {
        "past_key_values": object(),
        "output_attentions": True,
        "encoder_hidden_states": x,
        "head_mask": torch.ones(H),
        "is_causal": True,
        "cu_seq_lens_q": torch.tensor([0, T]),
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be None or left out: not supported by RoPEBERTAttention"):
            layer(x, **{name: value})
        layer(x, **{name: None})
    with pytest.raises(ValueError, match="head_mask, output_attentions must be None"):
        layer(x, output_attentions=True, head_mask=x, use_cache=False)
    expected = layer(x)[0]
    of_no_concern = {
        "cache_position": torch.arange(T),
        "num_items_in_batch": torch.tensor(7),
        "output_hidden_states": True,
        "use_cache": False,
    }
    assert torch.equal(layer(x, None, None, **of_no_concern)[0], expected)


@pytest.mark.parametrize("shape", [(T, C), (B, T, C - 1), (B, H, T, D)])
def test_hidden_states_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"hidden_states has shape .*, but must be \(B, T, hidden_size = 32\)"):
        make("rope")(torch.zeros(shape))


@pytest.mark.parametrize("name", NAMES)
def test_bad_constructor_arguments(name):
    kind = get_attention_class(name)
    for hidden_size, num_heads in ((10, 3), (8, 0), (0, 2), (-8, 2), (8, -2)):
        with pytest.raises(ValueError, match="hidden_size must be divisible by num_heads"):
            kind(hidden_size, num_heads)
    for dropout in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match=r"dropout is .*, but must be in \[0, 1\)"):
            kind(16, 2, dropout=dropout)
    with pytest.raises(ValueError, match="max_position_embeddings is 0, but must be at least 1"):
        kind(16, 2, 0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'theta'"):
        kind(16, 2, theta=1.0)


def test_widths_that_a_scheme_cannot_have():
    for name in ("rope", "rerope", "exposb"):
        with pytest.raises(ValueError, match="9"):
            get_attention_class(name)(18, 2)
    with pytest.raises(ValueError, match="the head dim is 6, but must be even and at least 8 for ExpoSB"):
        get_attention_class("exposb")(12, 2)
    with pytest.raises(ValueError, match="hidden_size is 9, but must be even"):
        get_attention_class("absolute")(9, 1)
    with pytest.raises(ValueError, match="table has shape"):
        get_attention_class("t5")(16, 2, num_buckets=2)
    with pytest.raises(ValueError, match="max_distance is 8, but must be an int above 8"):
        get_attention_class("t5")(16, 2, max_distance=8)
    with pytest.raises(ValueError, match="window is 0"):
        get_attention_class("rerope")(16, 2, window=0)
    for name in ("rope", "rerope", "absolute"):
        with pytest.raises(ValueError, match="base is -1"):
            get_attention_class(name)(16, 2, base=-1.0)


def bert(device, implementation, make_attention=None):
    """A random BertModel in float64 of two layers; with its self-attention exchanged for ours where that is given."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=C, num_hidden_layers=2, num_attention_heads=H, intermediate_size=2 * C,
        max_position_embeddings=LONGEST, initializer_range=0.3, attn_implementation=implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertModel(config)
    for layer in model.encoder.layer if make_attention is not None else ():
        theirs = layer.attention.self
        ours = make_attention(config.hidden_size, config.num_attention_heads, config.max_position_embeddings)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        ours.load_state_dict(theirs.state_dict())
        layer.attention.self = ours
    return model.to(device, torch.float64).eval()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_drops_into_transformers_bert(device, implementation):
    """Without positions of its own it is BERT's: with padding, and with none, in outputs and gradients."""
    theirs, ours = bert(device, implementation), bert(device, implementation, BERTAttention)
    tokens = torch.randint(50, (B, T), generator=torch.Generator().manual_seed(0)).to(device)
    is_token = (torch.arange(T) < PADDED_TO[:, None]).long().to(device)
    for mask in (None, torch.ones_like(is_token), is_token):
        results = []
        for model in (theirs, ours):
            model.zero_grad()
            y = model(tokens, mask, output_hidden_states=True, num_items_in_batch=torch.tensor(3, device=device))
            y.last_hidden_state.sum(dim=1).square().sum().backward()
            query = model.encoder.layer[0].attention.self.query
            results.append((y.last_hidden_state, *y.hidden_states, y.pooler_output, query.weight.grad))
        for mine, expected in zip(*results[::-1], strict=True):
            torch.testing.assert_close(mine, expected)
    with pytest.raises(ValueError, match=r"output_attentions must be None .* by BERTAttention"):
        ours(tokens, output_attentions=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("standard", "exposb", "t5")])
def test_schemes_in_transformers_bert(device, name):
    """Each takes BERT's weights, and its padding, and tells positions apart; "none" tells none."""
    model = bert(device, "sdpa", get_attention_class(name))
    model.embeddings.position_embeddings.weight.data.zero_()
    tokens = torch.randint(50, (B, T), generator=torch.Generator().manual_seed(0)).to(device)
    is_token = (torch.arange(T) < PADDED_TO[:, None]).long().to(device)
    y = model(tokens, is_token).last_hidden_state
    for row, length in enumerate(PADDED_TO):
        alone = model(tokens[row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(y[row : row + 1, :length], alone)
    rolled = model(tokens[:1].roll(1, dims=1)).last_hidden_state.roll(-1, dims=1)
    if name == "none":
        torch.testing.assert_close(rolled, y[:1])
    else:
        assert (rolled - y[:1]).abs().max() > 1e-3

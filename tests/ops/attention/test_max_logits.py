"""`return_max_logits`: each head's largest scaled score, against its definition in float64."""

import itertools
import math
import re

import pytest
import torch
from helpers.attention_calls import draw, refusal_of
from helpers.attention_launches import launches_of
from helpers.compile import compile_launch
from helpers.kinds import kinds_of
from helpers.modes import HAS_KERNELS, INTERPRETED, KERNEL_DTYPES, needs_kernels, on_gpu
from helpers.targets import SHARED_MEMORY, TARGETS, resources, spilled_bytes

from ropewalk import Alibi, ExpoSB, NoPosition, ReRope, Rope, attention, explain_choice
from ropewalk.ops.attention import reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.call import flatten
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.kinds import KINDS

B, T, H, K, D, WINDOW = 2, 45, 4, 2, 16, 7
IMPLS = ["reference", *(["triton"] if HAS_KERNELS else [])]
SCHEMES = {"none": NoPosition(), "rope": Rope(), "alibi": Alibi(), "rerope": ReRope(WINDOW)}


def define(q, k, scheme, may, scale=D**-0.5, q_index=None):
    """The largest scaled score of each head over the pairs of `may`, of (B, T, H, D) tensors; the pairs' distances turn
    features, half by half, and those of ReRoPE end at its window."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    m = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1] if q_index is None else q_index
    distance = (m[:, None] - torch.arange(k.shape[1], device=q.device)).double()
    if scheme in ("none", "alibi"):
        distance = distance * 0
    if scheme == "rerope":
        distance = distance.clamp(-WINDOW, WINDOW)
    angle = distance[..., None] * 10000.0 ** (-torch.arange(0, D, 2, device=q.device).double() / D)
    (qa, qb), (ka, kb) = (x.chunk(2, -1) for x in (q, k))
    even = torch.einsum("bmhd,bnhd,mnd->bhmn", qa, ka, angle.cos()) + torch.einsum(
        "bmhd,bnhd,mnd->bhmn", qb, kb, angle.cos()
    )
    odd = torch.einsum("bmhd,bnhd,mnd->bhmn", qa, kb, angle.sin()) - torch.einsum(
        "bmhd,bnhd,mnd->bhmn", qb, ka, angle.sin()
    )
    scores = ((even + odd) * scale).masked_fill(~may, -math.inf)
    return torch.stack([scores[:, head].max() for head in range(scores.shape[1])])


def ahead(device, queries=T, keys=T):
    return torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]


MASKS = {
    "full": lambda device: ({}, ahead(device) < math.inf),
    "causal": lambda device: ({"causal": True}, ahead(device) <= 0),
    "window": lambda device: ({"window": (9, 2)}, (ahead(device) >= -9) & (ahead(device) <= 2)),
    "lengths": lambda device: (
        {"key_lengths": torch.tensor([T, 5], device=device)},
        (torch.arange(T, device=device) < torch.tensor([T, 5], device=device)[:, None])[:, None, None],
    ),
    "starts": lambda device: (
        {"key_starts": torch.tensor([0, 33], device=device), "causal": True},
        ((torch.arange(T, device=device) >= torch.tensor([0, 33], device=device)[:, None])[:, None, None])
        & (ahead(device) <= 0),
    ),
    "mask": lambda device: (lambda mask: ({"mask": mask}, mask))(torch.rand(B, H, T, T, device=device) > 0.9),
}


def assert_near(actual, truth, dtype=torch.float32):
    assert actual.dtype == torch.float32
    assert not actual.requires_grad
    torch.testing.assert_close(actual.double(), truth, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("sign", [0, -1], ids=["any", "negative"])
@pytest.mark.both_modes
def test_definition(device, impl, mask, scheme, sign):
    """Where all scores are below 0, neither the zeros of padding win, nor pairs that are masked."""
    q, k, v = draw(device, queries=T, keys=T)
    if sign:
        q, k = -q.abs() - 0.1, k.abs() + 0.1
        if scheme in ("rope", "rerope"):
            q, k = (torch.cat((x[..., : D // 2] * 0, x[..., D // 2 :]), -1) for x in (q, k))  # turned, they stay below
    keywords, may = MASKS[mask](device)
    out, largest = attention(q, k, v, position=SCHEMES[scheme], **keywords, impl=impl, return_max_logits=True)
    truth = define(q, k, scheme, may)
    if sign and scheme in ("none", "alibi"):
        assert (truth < 0).all()
    assert_near(largest, truth)
    torch.testing.assert_close(out, attention(q, k, v, position=SCHEMES[scheme], **keywords, impl=impl))


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_dtypes(device, dtype):
    q, k, v = draw(device, dtype, queries=T, keys=T)
    _, largest = attention(q, k, v, causal=True, impl="triton", return_max_logits=True)
    assert_near(largest, define(q, k, "none", ahead(device) <= 0))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "position", [NoPosition(), Alibi(), ExpoSB(distance_decay=True)], ids=["none", "alibi", "decay"]
)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.both_modes
def test_before_softcap_score_mod_and_sinks(device, impl, position, softcap, scale):
    q, k, v = draw(device, queries=T, keys=T)
    sinks = torch.full((H,), 100.0, device=device)
    keywords = {"causal": True, "scale": scale, "impl": impl, "return_max_logits": True}
    _, largest = attention(q, k, v, position=position, softcap=softcap, sinks=sinks, dropout_p=0.5, **keywords)
    if isinstance(position, ExpoSB):
        truth = attention(q.double(), k.double(), v.double(), position=ExpoSB(), **keywords | {"impl": "reference"})[1]
        assert_near(largest, truth.double())
    else:
        assert_near(largest, define(q, k, "none", ahead(device) <= 0, scale))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_maxima_that_creep_up_and_down(device, impl):
    """Each tile of keys raises the maximum by less than lazy rescaling would notice; and the other way round."""
    q, k, v = draw(device, queries=70, keys=300, heads=2, key_heads=2)
    q, k = q.abs() + 0.1, k.abs() * 0.01
    k[:, :, 0] += torch.linspace(0.1, 0.5, 300, device=device)[:, None]
    k[:, :, 1] += torch.linspace(0.5, 0.1, 300, device=device)[:, None]
    _, largest = attention(q, k, v, impl=impl, return_max_logits=True)
    assert_near(largest, define(q, k, "none", ahead(device, 70, 300) < math.inf))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("queries", [3, T])
@pytest.mark.both_modes
def test_several_axes(device, impl, queries):
    q, k, v = draw(device, queries=queries, keys=T)
    axes = torch.arange(D // 2, device=device) % 3
    index = torch.arange(T, device=device).expand(3, 1, T)
    scheme, places = Rope(axes=axes), {"positions_q": index[..., T - queries :], "positions_k": index}
    _, largest = attention(q, k, v, position=scheme, causal=True, **places, impl=impl, return_max_logits=True)
    assert_near(largest, define(q, k, "rope", ahead(device, queries) <= 0))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_packed(device, impl):
    """Sequences attend themselves alone, and tokens of none attend nothing, though their scores are the largest."""
    bounds = [0, 3, 3, 36, T - 4]
    q, k, v = draw(device, batch=None, queries=T, keys=T)
    q[-4:] = k[-4:] = 100.0
    packed = torch.tensor(bounds, device=device)
    _, lse, largest = attention(
        q, k, v, causal=True, layout="thd", cu_seqlens_q=packed, impl=impl, return_lse=True, return_max_logits=True
    )
    assert lse.shape == (H, T)
    rows = [
        define(q[None, a:b], k[None, a:b], "none", ahead(device, b - a, b - a) <= 0)
        for a, b in itertools.pairwise(bounds)
        if a < b
    ]
    assert_near(largest, torch.stack(rows).amax(0))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_heads_without_a_pair(device, impl):
    q, k, v = draw(device, queries=T, keys=T)
    mask = torch.ones(1, H, 1, T, dtype=torch.bool, device=device)
    mask[:, 2] = False
    _, largest = attention(q, k, v, mask=mask, impl=impl, return_max_logits=True)
    assert_near(largest, define(q, k, "none", mask))
    assert largest[2] == -math.inf
    for sizes in ({"keys": 0}, {"queries": 0}, {"batch": 0}):
        _, largest = attention(*draw(device, **sizes), impl=impl, return_max_logits=True)
        assert largest.tolist() == [-math.inf] * H


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_padding_may_hold_anything(device, impl):
    q, k, v = draw(device, queries=T, keys=T)
    lengths = torch.tensor([T, 11], device=device)
    _, truth = attention(q, k, v, key_lengths=lengths, impl=impl, return_max_logits=True)
    for x in (k, v):
        x[1, 11:] = math.nan
    _, largest = attention(q, k, v, key_lengths=lengths, impl=impl, return_max_logits=True)
    assert torch.equal(largest, truth)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.both_modes
def test_decoding(device, impl, queries):
    q, k, v = draw(device, queries=queries, keys=300)
    lengths = torch.tensor([300, 170], device=device)
    _, largest = attention(q, k, v, key_lengths=lengths, impl=impl, return_max_logits=True)
    may = (torch.arange(300, device=device) < lengths[:, None])[:, None, None]
    assert_near(largest, define(q, k, "none", may))


def test_pages(device):
    """The reference reads pages; the decode kernels keep no maximum."""
    q, k, v = draw(device, queries=1, keys=48)
    keywords = {"key_lengths": torch.tensor([48, 20], device=device), "return_max_logits": True}
    table = torch.arange(6, device=device).view(2, 3)
    pages = [x.reshape(6, 16, K, D) for x in (k, v)]
    assert torch.equal(
        attention(q, *pages, block_table=table, **keywords)[1], attention(q, k, v, impl="reference", **keywords)[1]
    )


def test_blocks_of_queries(device, monkeypatch):
    """The reference takes blocks of queries: the largest score is that of all blocks."""
    q, k, v = draw(device, queries=T, keys=T)
    keywords = {"position": ReRope(WINDOW), "causal": True, "return_max_logits": True, "impl": "reference"}
    _, truth = attention(q, k, v, **keywords)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 1000)
    assert_near(attention(q, k, v, **keywords)[1], truth.double())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_results_and_gradients(device, impl):
    """The output, the log-sum-exp and all gradients are those of the same call without."""
    q, k, v = (x.requires_grad_() for x in draw(device, queries=T, keys=T))
    gate = torch.randn(B, T, H, device=device)
    sinks = torch.randn(H, device=device, requires_grad=True)
    keywords = {"position": Rope(), "causal": True, "sinks": sinks, "gate": gate, "impl": impl, "return_lse": True}
    plain = attention(q, k, v, **keywords)
    out, lse, largest = attention(q, k, v, **keywords, return_max_logits=True)
    assert largest.shape == (H,)
    assert not largest.requires_grad
    torch.testing.assert_close((out, lse), plain)
    grad_of = lambda out, lse: torch.autograd.grad(out.sum() + lse.square().sum(), (q, k, v, sinks))  # noqa: E731
    torch.testing.assert_close(grad_of(out, lse), grad_of(*plain))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.both_modes
def test_compile(device, impl):
    q, k, v = (x.requires_grad_() for x in draw(device, queries=T, keys=T))
    sinks = torch.randn(H, device=device).half()

    def function(q, k, v):
        return attention(q, k, v, position=Rope(), causal=True, sinks=sinks, impl=impl, return_max_logits=True)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (out, largest), (plain, truth) = compiled(q, k, v), function(q, k, v)
    assert_near(largest, truth.double())
    torch.testing.assert_close(out, plain)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, plain)]
    torch.testing.assert_close(*grads)


@needs_kernels
def test_operator(device):
    q, k, v = draw(device, queries=T, keys=T)
    leaves = flatten(make_call(q.requires_grad_(), k, v, position=Rope(), causal=True))
    *results, rows = torch.ops.ropewalk.attend_with_row_logits(*leaves, True, "triton")
    torch.testing.assert_close(tuple(results), torch.ops.ropewalk.attend(*leaves, True, "triton"))
    assert_near(rows.detach().amax((0, 2)), define(q.detach(), k, "rope", ahead(device) <= 0))
    torch.library.opcheck(torch.ops.ropewalk.attend_with_row_logits.default, (*leaves, True, "triton"))


def test_transforms(device):
    q, k, v = draw(device, queries=T, keys=T)
    keywords = {"causal": True, "return_max_logits": True}
    mapped = torch.func.vmap(lambda *x: attention(*(y[None] for y in x), **keywords)[1])(q, k, v)
    single = [attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], **keywords)[1] for i in range(B)]
    torch.testing.assert_close(mapped, torch.stack(single))


@needs_kernels
def test_plans_are_left_alone(device, monkeypatch):
    """A call with max logits neither makes a plan nor takes that of the same call without."""
    monkeypatch.setattr(kinds, "on_cpu", INTERPRETED)
    KINDS.clear()
    q, k, v = draw(device, queries=T, keys=T)
    for _ in range(3):
        attention(q, k, v, impl="triton")
    n_plans = len(kinds_of())
    assert n_plans == 1
    for _ in range(3):
        _, largest = attention(q, k, v, impl="triton", return_max_logits=True)
    assert_near(largest, define(q, k, "none", ahead(device) < math.inf))
    assert len(kinds_of()) == n_plans


def test_autocast(device):
    q, k, v = draw(device, queries=T, keys=T)
    with torch.autocast(device.type, torch.bfloat16):
        out, largest = attention(q, k, v, impl="reference", return_max_logits=True)
    assert out.dtype == torch.bfloat16
    assert_near(largest, define(q.bfloat16(), k.bfloat16(), "none", ahead(device) < math.inf))


def test_float64_is_rounded_once(device):
    q, k, v = draw(device, torch.float64, queries=T, keys=T)
    _, largest = attention(q, k, v, return_max_logits=True)
    assert_near(largest, define(q, k, "none", ahead(device) < math.inf))


def test_libraries_refuse(device):
    q, k, v = draw(device, torch.float16, queries=T, keys=T)
    choice = explain_choice(q, k, v, return_max_logits=True)
    assert choice.name not in ("sdpa", "flash")
    assert refusal_of("sdpa", q, k, v, return_max_logits=True) == "return_max_logits"


@on_gpu
@pytest.mark.parametrize("impl", ["triton", "gluon"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_large(device, impl, head_dim, causal, softcap):
    if refusal_of(impl, *draw(device, torch.bfloat16, queries=64, keys=64), return_max_logits=True) is not None:
        pytest.skip("this GPU does not run it")
    q, k, v = draw(device, torch.bfloat16, queries=1000, keys=1900, head_dim=head_dim)
    q, k = -q.abs(), k.abs()
    keywords = {"causal": causal, "softcap": softcap, "return_max_logits": True}
    _, largest = attention(q, k, v, impl=impl, **keywords)
    _, truth = attention(q.double(), k.double(), v.double(), impl="reference", **keywords)
    assert_near(largest, truth.double())


# === machine code ===


@pytest.mark.compile
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["rope-causal", "alibi-mask", "softcap", "packed", "rerope"])
def test_triton_compiles_without_spills(monkeypatch, tmp_path, head_dim, name):
    launches, _ = launches_of(monkeypatch, "sm_90", head_dim, head_dim, torch.bfloat16, name)
    kernel, arguments, keywords = launches[0]
    rows = torch.empty(1, dtype=torch.float32)
    compiled = compile_launch(kernel, arguments, keywords | {"row_logits_ptr": rows}, TARGETS["sm_90"])
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    assert spilled_bytes(resources(compiled, tmp_path), "sm_90") <= 64  # as without


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["rope-causal", "plain", "softcap", "alibi-causal", "packed-causal", "rerope-causal"])
def test_gluon_compiles_with_few_more_spills(monkeypatch, tmp_path, head_dim, name):
    hopper = pytest.importorskip("helpers.compile_hopper")
    launch, _ = hopper.forward_launch_of(monkeypatch, head_dim, torch.bfloat16, name)
    compiled = hopper.compile_gluon(launch, row_logits_ptr=torch.empty(1, dtype=torch.float32))
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    report = hopper.ptxas_report(compiled, tmp_path)
    assert not re.findall(r"C75\d\d", report)  # matrix products that wait for each other
    assert hopper.spilled_bytes(report) <= hopper.allowed_spills("forward", launch, name) + 64

"""Heads of 257 to 512 features in the Triton kernels: all that fewer features have, against the reference in float64.

Shape letters: B batch, T tokens, H query heads, K key heads, D head dim, Dv that of values.
"""

from functools import partial

import pytest
import torch
from helpers import attention_calls
from helpers.kernel_checks import check
from helpers.modes import INTERPRETED, needs_kernels, on_gpu
from torch.nn.attention.flex_attention import create_block_mask

from ropewalk import attention, explain_choice
from ropewalk.ops.attention.backends import TRITON
from ropewalk.schemes import Alibi, ExpoSB, ReRope, Rope, T5Bias
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

pytestmark = needs_kernels
B, H, K, D = 2, 4, 1, 512
T = 140
TQ, TK = (21, 35) if INTERPRETED else (150, 203)
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
DIMS = [(512, 512), (320, 320), (258, 260), (512, 40), (64, 384)]
ROUNDINGS = 8
draw = partial(attention_calls.draw, layout="bhtd", batch=B, queries=TQ, keys=TK, heads=H, key_heads=K, head_dim=D)

CASES = {
    "plain": {},
    "rope": {"position": Rope(), "causal": True},
    "rope-partial": {"position": Rope(rotary_dim=8, rotary_offset=2, interleaved=True)},
    "alibi-window": {"position": Alibi(), "window": 9},
    "decay": {"position": ExpoSB(distance_decay=True), "causal": True, "window": 13},
    "learned": {"position": Alibi(torch.linspace(0.1, 0.4, H).requires_grad_()), "causal": True},
    "learned-t5": {"position": T5Bias(torch.linspace(-1, 1, 32 * H).view(32, H).requires_grad_()), "causal": True},
    "rerope": {"position": ReRope(7), "causal": True},
    "leaky-both-ways": {"position": ReRope(7, leak=4.0, rope=Rope(interleaved=True))},
    "softcap-sinks": {"position": Rope(), "causal": True, "softcap": 5.0, "sinks": torch.linspace(-1, 1, H)},
    "dropout": {"causal": True, "dropout_p": 0.3},
    "lengths": {"position": Rope(), "key_lengths": torch.tensor([TK, 9]), "query_starts": torch.tensor([3, 0])},
    "starts": {"position": Rope(), "causal": True, "key_starts": torch.tensor([0, 11])},
    "mask": {"mask": torch.arange(H * TQ * TK).view(1, H, TQ, TK) % 7 % 3 > 0},
}


def to(device, keywords):
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in keywords.items()}
    scheme = moved.get("position")
    learned = {name: x for name, x in vars(scheme).items() if isinstance(x, torch.Tensor)} if scheme else {}
    if learned:
        moved["position"] = type(scheme)(*(x.detach().to(device).requires_grad_() for x in learned.values()))
    return moved


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_forward_and_backward(device, dims, name):
    tensors = draw(device, DTYPE, head_dim=dims[0], v_head_dim=dims[1])
    check(TRITON, tensors, **to(device, CASES[name]))


@pytest.mark.parametrize("dtype", [torch.float16, *([] if INTERPRETED else [torch.bfloat16])], ids=str)
@pytest.mark.parametrize("dims", [(512, 512), (320, 320)], ids=str)
def test_halves(device, dtype, dims):
    tensors = draw(device, dtype, head_dim=dims[0], v_head_dim=dims[1])
    check(TRITON, tensors, position=Rope(), causal=True)


@pytest.mark.parametrize("scheme", [Rope(), ReRope(4), Alibi()], ids=["rope", "rerope", "alibi"])
def test_packed_sequences(device, scheme):
    ends = {"cu_seqlens_q": torch.tensor([0, 5, 5, 18], device=device).int()}
    ends["cu_seqlens_k"] = torch.tensor([0, 9, 14, 30], device=device).int()
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in draw(device, DTYPE))
    check(TRITON, (q, k, v), layout="thd", position=scheme, causal=True, **ends)


def results(tensors, grad, gate, impl, dtype, **keywords):
    """The output, and without `torch.no_grad` all gradients, of a call in a dtype."""
    leaves = [x.detach().to(dtype).requires_grad_(torch.is_grad_enabled()) for x in tensors]
    if gate is not None:
        gate = gate.detach().to(dtype).requires_grad_(torch.is_grad_enabled())
        leaves.append(gate)
        keywords["gate"] = gate
    out = attention(*leaves[:3], impl=impl, **keywords)
    if not torch.is_grad_enabled():
        return [out]
    return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]


def agree(tensors, *, gate=None, truth=None, **keywords):
    """Compare with the reference in float64 and in the dtype; `truth` has what the reference reads in place of some."""
    out_shape = (*tensors[0].shape[:-1], tensors[2].shape[-1])
    grad = torch.randn(out_shape, device=tensors[0].device)
    dtype = tensors[0].dtype
    with unchanged(tensors), poisoned_memory():
        mine = results(tensors, grad, gate, "triton", dtype, **keywords)
    for_reference = {**keywords, **(truth or {})}
    exact, plain = (results(tensors, grad, gate, "reference", x, **for_reference) for x in (torch.float64, dtype))
    for index, each in enumerate(zip(mine, exact, plain, strict=True)):
        assert_close_to_truth(*each, roundings=ROUNDINGS if index < 4 else 4 * ROUNDINGS)


def rows(tensors):
    return [x.transpose(1, 2).contiguous() for x in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [Rope(), Alibi()], ids=["rope", "alibi"])
def test_lists_of_blocks(device, scheme):
    tensors = rows(draw(device, DTYPE, queries=T, keys=T))
    document = torch.arange(T, device=device) // 50

    def mod(b, h, m, n):
        return (document[m] == document[n]) & (m >= n)

    blocks = create_block_mask(mod, None, None, T, T, device=device, BLOCK_SIZE=64)
    index = torch.arange(T, device=device)
    mask = mod(None, None, index[:, None], index[None])
    agree(tensors, position=scheme, blocks=blocks, truth={"blocks": None, "mask": mask})


@pytest.mark.parametrize("per_feature", [False, True])
def test_gates(device, per_feature):
    tensors = rows(draw(device, DTYPE))
    gate = torch.randn(B, TQ, H, *((D,) if per_feature else ()), device=device).to(DTYPE)
    agree(tensors, position=Rope(), causal=True, gate=gate)


DECODED = {
    "rope": {"position": Rope(), "causal": True, "key_lengths": torch.tensor([290, 33])},
    "alibi-window": {"position": Alibi(), "causal": True, "window": 60, "softcap": 5.0},
    "decay-sinks": {"position": ExpoSB(distance_decay=True), "sinks": torch.linspace(-1, 1, H)},
    "rerope": {"position": ReRope(40), "causal": True},
    "mask": {"position": Rope(), "mask": torch.arange(B * H * 300).view(B, H, 1, 300) % 7 % 3 > 0},
}


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("dims", [(512, 512), (320, 260)], ids=str)
@torch.no_grad()
def test_decoding(device, dims, queries, name):
    q, k, v = draw(device, DTYPE, queries=queries, keys=300, head_dim=dims[0], v_head_dim=dims[1])
    agree(rows((q, k, v)), **to(device, DECODED[name]))


def pages_of(device, dims, page_size=16, count=24):
    k, v = (torch.randn(count, page_size, K, dim, device=device).to(DTYPE) for dim in dims)
    table = torch.randperm(count, device=device).view(B, count // B).int()
    return k, v, table


@pytest.mark.parametrize("scheme", [Rope(), ReRope(40), Alibi()], ids=["rope", "rerope", "alibi"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dims", [(512, 512), (320, 260)], ids=str)
@torch.no_grad()
def test_decoding_pages(device, dims, queries, scheme):
    k, v, table = pages_of(device, dims)
    lengths = torch.tensor([190, 33], device=device)
    q = torch.randn(B, queries, H, dims[0], device=device).to(DTYPE)
    where = {"block_table": table, "key_lengths": lengths, "query_starts": lengths - queries, "causal": True}
    agree((q, k, v), position=scheme, keys_rotated=isinstance(scheme, Rope), **where)


@pytest.mark.parametrize("copied", [False, True])
@torch.no_grad()
def test_packed_queries_over_pages(device, monkeypatch, copied):
    """The forward kernel reads pages in place, or a copy of them."""
    monkeypatch.setattr("ropewalk.ops.attention.pages.pays", lambda call: copied)
    k, v, table = pages_of(device, (D, D))
    q = torch.randn(20, H, D, device=device).to(DTYPE)
    where = {"block_table": table, "key_lengths": torch.tensor([190, 33], device=device), "causal": True}
    ends = torch.tensor([0, 12, 17], device=device).int()
    out = attention(q, k, v, layout="thd", cu_seqlens_q=ends, impl="triton", **where)
    for row, (start, stop) in enumerate(((0, 12), (12, 17))):
        length = int(where["key_lengths"][row])
        of_row = [q[None, start:stop], *(x[table[row].long()].flatten(0, 1)[None, :length] for x in (k, v))]
        exact, plain = (
            attention(*(x.to(dtype) for x in of_row), causal=True, impl="reference") for dtype in (torch.float64, DTYPE)
        )
        assert_close_to_truth(out[start:stop], exact[0], plain[0], roundings=ROUNDINGS)


def test_the_largest_logits(device):
    tensors = rows(draw(device, DTYPE))
    call = {"position": Rope(), "causal": True, "return_max_logits": True}
    with torch.no_grad():
        _, mine = attention(*tensors, impl="triton", **call)
        _, exact = attention(*(x.double() for x in tensors), impl="reference", **call)
    error = 4 * torch.finfo(DTYPE).eps  # rotated q and k are rounded
    torch.testing.assert_close(mine, exact, rtol=error, atol=error)


@pytest.mark.parametrize("name", ["q", "v"])
def test_more_features_are_refused(device, name):
    dims = {"head_dim": 514} if name == "q" else {"v_head_dim": 514}
    tensors = rows(draw(device, DTYPE, **dims))
    with pytest.raises(ValueError, match=f"{name}'s head dim is 514, but must be up to 512"):
        attention(*tensors, impl="triton")


def test_quantised_pages_are_refused(device):
    k = torch.zeros(24, 16, K, D, device=device, dtype=torch.int8)
    scale = torch.ones(24, 16, K, device=device)
    call = {
        "block_table": torch.zeros(B, 12, dtype=torch.int32, device=device),
        "key_lengths": torch.tensor([5, 6], device=device),
        "keys_rotated": True,
    }
    q = torch.randn(B, 1, H, D, device=device).to(DTYPE)
    explained = explain_choice(q, k, k, k_scale=scale, v_scale=scale, **call)
    assert "quantised pages" in explained.others["triton"]


@on_gpu
def test_float32_is_refused_on_a_gpu(device):
    tensors = rows(draw(device, torch.float32))
    with pytest.raises(ValueError, match="q's head dim is 512, but must be up to 256 in float32"):
        attention(*tensors, impl="triton")

"""Packed queries over a cache, dense or in pages: against a float64 call of each sequence, by the reference and Triton.

Shape letters: B batch, H query heads, K key heads, D head dim.
"""

import math

import pytest
import torch
from helpers import stub_gpu
from helpers.compile import Recorder, compile_launch, pretend_target
from helpers.kinds import kinds_of
from helpers.modes import KERNEL_DTYPES, needs_kernels
from helpers.targets import TARGETS

from ropewalk import attention
from ropewalk.ops.attention import reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.triton import launch as triton_launch
from ropewalk.ops.attention.triton import launch_common
from ropewalk.ops.cache.formats import Format, dequantize, quantize
from ropewalk.ops.launch import kinds
from ropewalk.schemes import Alibi, NoPosition, ReRope, Rope
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

H, K = 4, 2
QUERIES, LENGTHS = (30, 5, 0, 2, 1), (37, 5, 4, 20, 0)
EXTRA = 3  # tokens of no sequence, as in padded graphs


class Packed:
    """Packed queries, their cache in pages of any order, and each sequence's own tensors; NaN where no key is."""

    def __init__(self, device, dtype, page_size, head_dim=16, value_dim=16, queries=QUERIES, lengths=LENGTHS):
        self.bounds = torch.tensor([0, *queries]).cumsum(0).int().to(device)
        self.lengths = torch.tensor(lengths, device=device)
        n_pages = -(-max(lengths) // page_size) + 1
        self.q = torch.randn(sum(queries) + EXTRA, H, head_dim, device=device).to(dtype)
        order = torch.randperm(len(lengths) * n_pages + 1)
        self.table = order[:-1].view(len(lengths), n_pages).int()
        self.k, self.v = (
            torch.full((len(order), page_size, K, dim), math.nan, dtype=dtype, device=device)
            for dim in (head_dim, value_dim)
        )
        self.sequences = []
        for row, length in enumerate(lengths):
            k, v = (torch.randn(length, K, x.shape[3], device=device).to(dtype) for x in (self.k, self.v))
            pages = self.table[row, torch.arange(length) // page_size].long()
            for cache, x in ((self.k, k), (self.v, v)):
                cache[pages, torch.arange(length) % page_size] = x
            self.sequences.append((self.q[self.bounds[row] : self.bounds[row + 1]], k, v))
        self.table = self.table.to(device)
        for row, length in enumerate(lengths):
            self.table[row, -(-length // page_size) :] = 10**6  # no page

    def arguments(self, dense=False):
        """The call's tensors and keywords."""
        where = {"layout": "thd", "cu_seqlens_q": self.bounds, "key_lengths": self.lengths}
        if not dense:
            return (self.q, self.k, self.v), {**where, "block_table": self.table}
        pages = self.table.long().clamp(max=len(self.k) - 1)
        return (self.q, self.k[pages].flatten(1, 2), self.v[pages].flatten(1, 2)), where

    def attend_each(self, dtype, sinks=None, **keywords):
        """The output and the log-sum-exp of each sequence, every step rounded to a dtype."""
        outs, lses = [], []
        for sequence in self.sequences:
            q, k, v = (x[None].to(dtype) for x in sequence)
            out, lse = reference.attend(
                make_call(q, k, v, sinks=None if sinks is None else sinks.to(dtype), **keywords)
            )
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        nothing = lses[0].new_full((H, EXTRA), -math.inf) if sinks is None else sinks[:, None].expand(H, EXTRA)
        zeros = outs[0].new_zeros(EXTRA, H, self.v.shape[3])
        lse = torch.cat([*lses, nothing.to(dtype)], dim=1)
        return torch.cat([*outs, zeros]), lse.to(torch.promote_types(dtype, torch.float32))

    def check(self, impl, dense=False, **keywords):
        tensors, where = self.arguments(dense)
        with poisoned_memory(), unchanged([self.q, self.bounds, self.lengths]):
            out, lse = attention(*tensors, impl=impl, return_lse=True, **where, **keywords)
        for actual, truth, baseline in zip(
            (out, lse),
            self.attend_each(torch.float64, **keywords),
            self.attend_each(self.q.dtype, **keywords),
            strict=True,
        ):
            finite = truth.isfinite()
            assert torch.equal(actual.isfinite(), finite)
            assert_close_to_truth(actual[finite], truth[finite], baseline[finite])


CALLS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 7},
    "sides": {"window": (9, 2)},
    "softcap": {"causal": True, "softcap": 3.0},
    "rope": {"position": Rope(), "keys_rotated": True, "causal": True},
    "alibi": {"position": Alibi(), "causal": True},
}


@pytest.mark.parametrize("dense", [False, True], ids=["pages", "dense"])
@pytest.mark.parametrize("name", [*CALLS, "unrotated", "rerope"])
def test_reference_is_a_call_of_each_sequence(device, name, dense):
    rotating = {"unrotated": {"position": Rope()}, "rerope": {"position": ReRope(8), "causal": True}}
    Packed(device, torch.float32, 4).check("reference", dense, **(CALLS | rotating)[name])


@needs_kernels
@pytest.mark.parametrize("dense", [False, True], ids=["pages", "dense"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_kernel_is_a_call_of_each_sequence(device, dtype, name, dense):
    Packed(device, dtype, 16).check("triton", dense, **CALLS[name])


@needs_kernels
@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 512])
def test_pages_of_any_size(device, page_size):
    Packed(device, torch.float32, page_size).check("triton", causal=True)


@needs_kernels
@pytest.mark.parametrize("dims", [(24, 40), (128, 64), (192, 128), (16, 256)], ids=str)
def test_head_dims(device, dims):
    Packed(device, torch.float32, 8, *dims).check("triton", causal=True)


@needs_kernels
def test_sinks_gate_and_one_page(device):
    packed = Packed(device, torch.float32, 64)
    packed.check("triton", sinks=torch.randn(H, device=device), causal=True)
    tensors, where = packed.arguments()
    gate = torch.randn(len(packed.q), H, 16, device=device)
    out, gated = (attention(*tensors, impl="triton", gate=x, **where) for x in (None, gate))
    torch.testing.assert_close(gated, out * torch.sigmoid(gate))


@needs_kernels
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_any_strides(device, impl):
    packed = Packed(device, torch.float32, 8)
    expected = attention(*packed.arguments()[0], impl=impl, **packed.arguments()[1])
    both = torch.stack((packed.k, packed.v), dim=1).transpose(2, 3).contiguous()  # HND, K beside V of a page
    k, v = (x.transpose(1, 2) for x in both.unbind(1))
    q = packed.q.transpose(0, 1).contiguous().transpose(0, 1)
    table = packed.table.t().contiguous().t()
    actual = attention(q, k, v, impl=impl, **packed.arguments()[1] | {"block_table": table})
    assert torch.equal(actual, expected)
    spread = torch.stack((packed.k, packed.k), dim=-1)[..., 0]  # features are not dense
    assert torch.equal(attention(q, spread, v, impl=impl, **packed.arguments()[1]), expected)


@needs_kernels
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=str)
def test_nothing_to_attend(device, impl, lengths):
    q, k = torch.randn(5, H, 16, device=device), torch.full((3, 4, K, 16), math.nan, device=device)
    where = {
        "cu_seqlens_q": torch.tensor([0, *(2,) * len(lengths)], device=device).cumsum(0),
        "key_lengths": torch.tensor(lengths, dtype=torch.int64, device=device),
        "block_table": torch.zeros(len(lengths), 2, dtype=torch.int32, device=device),
    }
    out, lse = attention(q, k, k, layout="thd", impl=impl, return_lse=True, **where)
    assert not out.any()
    assert bool((lse == -math.inf).all())


@needs_kernels
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("sequences", [0, 2])
def test_caches_of_no_keys(device, impl, sequences):
    q, k = torch.randn(5, H, 16, device=device), torch.empty(sequences, 0, K, 16, device=device)
    bounds = torch.tensor([0, *(2,) * sequences], device=device).cumsum(0)
    lengths = torch.zeros(sequences, dtype=torch.int64, device=device)
    assert not attention(q, k, k, layout="thd", impl=impl, cu_seqlens_q=bounds, key_lengths=lengths).any()


@pytest.mark.parametrize("kind", [Format.FP8, Format.INT8, Format.INT4])
def test_quantised_pages_are_their_numbers(device, kind):
    """The reference attends from packed queries to quantised pages; kernels do in test_page_copies.py."""
    packed = Packed(device, torch.float32, 8, 32, 64)
    fixed = torch.tensor(0.02, device=device) if kind is Format.FP8 else None
    k, k_scale = quantize(packed.k.nan_to_num(), kind, fixed)
    v, v_scale = quantize(packed.v.nan_to_num(), kind, fixed)
    k_scale, v_scale = (fixed if scale is None else scale for scale in (k_scale, v_scale))
    (q, _, _), where = packed.arguments()
    where |= {"position": Rope(), "keys_rotated": True, "causal": True}
    actual = attention(q, k, v, k_scale=k_scale, v_scale=v_scale, impl="reference", **where)
    numbers = (dequantize(x, scale, torch.float32) for x, scale in ((k, k_scale), (v, v_scale)))
    assert torch.equal(actual, attention(q, *numbers, impl="reference", **where))


def test_largest_scores(device):
    packed = Packed(device, torch.float32, 8)
    tensors, where = packed.arguments()
    _, largest = attention(*tensors, causal=True, return_max_logits=True, **where)
    each = [attention(*(x[None] for x in s), causal=True, return_max_logits=True)[1] for s in packed.sequences]
    torch.testing.assert_close(largest, torch.stack(each).amax(0))


def refusals():
    packed = Packed("cpu", torch.float32, 8)
    bounds, lengths = packed.bounds, packed.lengths
    yield "cu_seqlens_k was given with packed queries over a cache", {"cu_seqlens_k": bounds}
    yield "positions_k was given with packed queries over a cache", {"positions_k": bounds[None]}
    yield "query_starts was given with packed queries over a cache", {"query_starts": lengths}
    yield "key_starts was given with packed queries over a cache", {"key_starts": lengths}
    yield "key_lengths is None, but a cache needs it", {"key_lengths": None}
    yield "cu_seqlens_q is None, but layout 'thd' needs it", {"cu_seqlens_q": None}
    yield r"key_lengths has shape \(4,\), but must be \(B,\) with B = 5", {"key_lengths": lengths[1:]}
    yield r"block_table has shape \(4, 6\), but must be .* with B = 5", {"block_table": packed.table[1:]}
    yield "block_table holds 1000000 below key_lengths", {"key_lengths": torch.full((5,), 48)}
    yield "cu_seqlens_q ends at 38, but must end within q's 8 tokens", {"q": packed.q[:8]}
    yield r"v has shape \(31, 8, 2, 16, 1\)", {"v": packed.v[..., None]}
    yield "q requires grad, but with block_table|q requires grad, but over a cache", {"q": packed.q.requires_grad_()}
    yield (
        "block_table is None, but k of torch.int8 must come in pages",
        {
            "k": torch.zeros(5, 48, K, 16, dtype=torch.int8),
            "v": torch.zeros(5, 48, K, 16, dtype=torch.int8),
            "block_table": None,
        },
    )
    yield r"k has batch 31 .* but must have q's, 5", {"block_table": None}


@pytest.mark.parametrize(("message", "change"), list(refusals()), ids=[message for message, _ in refusals()])
def test_bad_calls(message, change):
    packed = Packed("cpu", torch.float32, 8)
    (q, k, v), where = packed.arguments()
    change = {"q": q, "k": k, "v": v, **where, **change}
    with pytest.raises(ValueError, match=message):
        attention(**change)


def test_compiled(device):
    packed = Packed(device, torch.float32, 8)
    tensors, where = packed.arguments()

    def attend(tensors, where):
        return attention(*tensors, causal=True, **where)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(tensors, where), attend(tensors, where))


def launch_thrice():
    """Record a step three times: without a plan, as it is made, and by it."""
    kinds.on_cpu = True
    q = torch.zeros(13, 8, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, 8, 16, 2, 64, dtype=torch.bfloat16)
    where = {
        "cu_seqlens_q": torch.tensor([0, 1, 11, 11], dtype=torch.int32),
        "key_lengths": torch.tensor([20, 10, 7], dtype=torch.int32),
        "block_table": torch.tensor([[5, 2], [0, 0], [1, 0]], dtype=torch.int32),
    }
    records = []
    with torch.no_grad():
        for _ in range(3):
            stub_gpu.clear()
            attention(q, k, v, layout="thd", causal=True, impl="triton", **where)
            records.append(
                [(x.name, x.grid, [a for a in x.args if not isinstance(a, tuple)]) for x in stub_gpu.launches()]
            )
    return records, len(kinds_of())


@pytest.mark.slow
@pytest.mark.compile
def test_plans_launch_the_same():
    (first, second, third), planned = stub_gpu.run(launch_thrice)
    assert planned == 1
    assert [name for name, _, _ in first] == ["schedule_kernel", "forward_kernel"]
    assert first == second == third


@pytest.mark.compile
@pytest.mark.parametrize("page_size", [1, 16, 512, 4096])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_kernel_compiles_for_hopper(monkeypatch, head_dim, value_dim, page_size):
    pretend_target(monkeypatch, "sm_90")
    launches, others = [], []
    monkeypatch.setattr(triton_launch, "forward_kernel", Recorder(triton_launch.forward_kernel, launches))
    monkeypatch.setattr(launch_common, "schedule_kernel", Recorder(launch_common.schedule_kernel, others))
    q = torch.randn(64, H, head_dim, dtype=torch.bfloat16)
    k, v = (torch.zeros(2, page_size, K, dim, dtype=torch.bfloat16) for dim in (head_dim, value_dim))
    table = None if page_size > 512 else torch.zeros(2, 4, dtype=torch.int32)
    where = {"cu_seqlens_q": torch.tensor([0, 30, 60]), "key_lengths": torch.tensor([page_size, page_size])}
    call = make_call(q, k, v, layout="thd", causal=True, position=NoPosition(), block_table=table, **where)
    triton_launch.forward(call, False)
    compiled = compile_launch(*launches[0], TARGETS["sm_90"])
    assert compiled.metadata.shared <= 227 * 1024
    assert "wgmma.mma_async" in compiled.asm["ptx"]
    assert "cp.async" in compiled.asm["ptx"]  # loads of the next tile are under way

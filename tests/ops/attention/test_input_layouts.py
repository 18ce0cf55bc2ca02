"""Kernels read every tensor of a call wherever its elements lie: each result is that of dense copies, bit by bit."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.modes import needs_kernels
from torch import Tensor

from ropewalk import Alibi, ExpoSB, QKNorm, Rope, append_kv, apply_rope, attention
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.pages import needs_copy
from ropewalk.ops.attention.tables import empty_aligned
from ropewalk.testing import poisoned_memory

B, T, H, K, D = 2, 18, 2, 1, 16
PAGES, PAGE_SIZE = 9, 8


def transposed(x: Tensor) -> Tensor:
    """The last dimension is the outermost in memory."""
    return x.movedim(-1, 0).clone(memory_format=torch.contiguous_format).movedim(0, -1)


def expanded(x: Tensor) -> Tensor:
    """All of the last dimension have one element, and so do all rows."""
    return x[..., :1].expand(x.shape) if x.ndim < 3 else x[:1, ..., :1].expand(x.shape)


def sliced(x: Tensor) -> Tensor:
    """Each row is a part of a longer one, from its second element on."""
    memory = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
    memory[..., 1:-2] = x
    return memory[..., 1:-2]


def strided(x: Tensor) -> Tensor:
    """Every other element of memory is the tensor's."""
    return torch.stack((x, torch.zeros_like(x)), -1)[..., 0]


def overlapping(x: Tensor) -> Tensor:
    """Tokens begin one element after each other: their strides are that of features."""
    if x.ndim < 3 or not x.is_floating_point():
        return sliced(x)
    return x.flatten()[: sum(x.shape) - x.ndim + 1].as_strided(x.shape, (1,) * x.ndim)


LAYOUTS = {f.__name__: f for f in (transposed, expanded, sliced, strided, overlapping)}
# Indices keep their values: no expanded bound is one. Elements of scales may not share memory.
APART = {"key_lengths", "key_starts", "query_starts", "cu_seqlens_q", "cu_seqlens_k", "block_table"}
APART |= {"k_scale", "v_scale"}


def numbers(device, *values):
    return torch.tensor(values, device=device, dtype=torch.int32)


def qkv(device, *batch, dtype=torch.float32):
    return {name: torch.randn(*batch, n, D, device=device).to(dtype) for name, n in (("q", H), ("k", K), ("v", K))}


def dense_of(device):
    mask = torch.rand(B, H, T, T, device=device) < 0.8
    rows = {"key_lengths": numbers(device, T, 11), "key_starts": numbers(device, 0, 2)}
    rows["query_starts"] = numbers(device, 0, -3)
    positions = {f"positions_{x}": torch.randint(0, 99, (B, T), device=device) for x in "qk"}
    return qkv(device, B, T) | rows | positions | {"mask": mask, "gate": torch.randn(B, T, H, D, device=device)}


def weighed_of(device):
    gate = torch.randn(B, T, H, device=device)
    return qkv(device, B, T) | {"gate": gate, "sinks": torch.randn(H, device=device)}


def packed_of(device):
    bounds = {"cu_seqlens_q": numbers(device, 0, 5, T), "cu_seqlens_k": numbers(device, 0, 9, T)}
    slopes, places = torch.rand(H, device=device), torch.randint(0, 99, (T,), device=device)
    return qkv(device, T) | bounds | {"slopes": slopes, "positions_k": places}


def paged_of(kind, device):
    lengths, table = numbers(device, 29, 20), torch.randperm(PAGES - 1, device=device).view(2, 4).int()
    found = {"q": torch.randn(2, 3, H, 64, device=device), "block_table": table, "key_lengths": lengths}
    shape = (PAGES, PAGE_SIZE, K)
    if kind == "own":
        return found | {name: torch.randn(*shape, 64, device=device) for name in ("k", "v")}
    width, dtype, groups = (64, torch.int8, ()) if kind == "int8" else (32, torch.uint8, (2,))
    of_scales = torch.float32 if kind == "int8" else torch.float16
    for name in ("k", "v"):
        found[name] = torch.randint(-100 if dtype == torch.int8 else 0, 100, (*shape, width), device=device).to(dtype)
        found[f"{name}_scale"] = (torch.rand(*shape, *groups, device=device) * 0.1).to(of_scales)
    return found


def prefill_of(device):
    found = paged_of("own", device)
    return found | {"q": torch.randn(9, H, 64, device=device), "cu_seqlens_q": numbers(device, 0, 4, 9)}


def attend(tensors, **keywords):
    given = dict(tensors)
    if "slopes" in given:
        keywords["position"] = Alibi(given.pop("slopes"))
    return attention(given.pop("q"), given.pop("k"), given.pop("v"), impl="triton", **given, **keywords)


EXPOSB = ExpoSB(distance_decay=True)
# What a call is given, its keywords, and whether there is a backward.
CALLS = {
    "weighed": (weighed_of, {"position": EXPOSB, "return_lse": True}, True),
    "dense": (dense_of, {"position": Alibi(), "causal": True, "window": 12}, True),
    "packed": (packed_of, {"layout": "thd", "causal": True, "return_lse": True}, True),
    "decoded": (lambda device: {**weighed_of(device), "gate": None}, {"position": ExpoSB(), "causal": True}, False),
    "pages": (functools.partial(paged_of, "own"), {"causal": True, "window": 9}, False),
    "8-bit pages": (functools.partial(paged_of, "int8"), {"position": Rope(), "keys_rotated": True}, False),
    "4-bit pages": (functools.partial(paged_of, "int4"), {"causal": True}, False),
    "prefill": (prefill_of, {"layout": "thd", "causal": True, "window": 9}, False),
    "copies": (prefill_of, {"layout": "thd", "causal": True, "position": Rope()}, False),
}


def compute(tensors, keywords, weights, has_backward):
    """A call's results, and the gradients of what may have one."""
    leaves = {name: x for name, x in tensors.items() if x is not None}
    if has_backward:
        leaves = {n: x.detach().requires_grad_() if x.is_floating_point() else x for n, x in leaves.items()}
    with poisoned_memory():
        found = attend(leaves, **keywords)
        results = list(found) if isinstance(found, tuple) else [found]
        if has_backward:
            wanted = [x for x in leaves.values() if x.requires_grad]
            results += torch.autograd.grad(results, wanted, weights[: len(results)])
    return results


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_attention_reads_every_layout(device, name, layout):
    make, keywords, has_backward = CALLS[name]
    given, lay = make(device), LAYOUTS[layout]
    shape = given["q"].shape
    weights = [torch.randn(shape, device=device)]
    weights.append(torch.randn(*((B, H, T) if len(shape) == 4 else (H, T)), device=device) if has_backward else None)
    odd = {n: None if x is None else strided(x) if n in APART else lay(x) for n, x in given.items()}
    dense = {n: None if x is None else x.contiguous().clone() for n, x in odd.items()}
    odd_weights = [None if x is None else lay(x) for x in weights]
    dense_weights = [None if x is None else x.contiguous().clone() for x in odd_weights]
    expected = compute(dense, keywords, dense_weights, has_backward)
    found = compute(odd, keywords, odd_weights, has_backward)
    assert all(x.isfinite().any() for x in expected)
    # Quantised pages that are not read in pairs are copied, whose products are others.
    tolerance = {} if "bit" in name else {"rtol": 0, "atol": 0}
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, exact, **tolerance)


@needs_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotations_and_caches_read_every_layout(device, layout):
    lay = LAYOUTS[layout]
    q, k, v = (lay(torch.randn(T, n, D, device=device)) for n in (H, K, K))
    cos, sin = (lay(torch.randn(T, D // 2, device=device)) for _ in range(2))
    weight, slots = lay(torch.randn(D, device=device)), strided(torch.arange(T, device=device))

    def compute(*tensors):
        q, k, v, cos, sin, weight, slots = tensors
        k_cache, v_cache = (torch.zeros(3, 8, K, D, device=device) for _ in range(2))
        if lay is transposed and tensors[0] is not copies[0]:
            k_cache, v_cache = transposed(k_cache), transposed(v_cache)
        norm = {"norm": QKNorm(weight, weight)}
        rotated = append_kv(k, v, k_cache, v_cache, slots, q=q, cos=cos, sin=sin, positions=slots, impl="triton")
        batch = [q[None], k[None]]
        plain, normed = (apply_rope(*batch, cos, sin, impl="triton", **more) for more in ({}, norm))
        return [rotated, k_cache, v_cache, *plain, *normed]

    tensors = (q, k, v, cos, sin, weight, slots)
    copies = [x.contiguous().clone() for x in tensors]
    with poisoned_memory():
        for mine, exact in zip(compute(*tensors), compute(*copies), strict=True):
            assert torch.equal(mine, exact)


def test_memory_like_overlapping_rows_has_dense_features():
    """`empty_like` gives the stride of 1 to whichever dimension it likes."""
    for x in (torch.zeros(60).unfold(0, 16, 1)[None, None], torch.zeros(16).expand(1, 40, 5, 16)):
        assert empty_aligned(x).stride(3) == 1


def test_bytes_that_begin_at_an_odd_address_are_copied(device):
    table, q = numbers(device, 0)[:, None], torch.zeros(1, 1, K, 32, device=device)
    pages = torch.zeros(PAGE_SIZE * K * 32 + 1, dtype=torch.int8, device=device)
    scale = torch.zeros(1, PAGE_SIZE, K, device=device)
    for first in range(2):
        x = pages[first : first + PAGE_SIZE * K * 32].view(1, PAGE_SIZE, K, 32)
        call = make_call(q, x, x, block_table=table, key_lengths=numbers(device, 3), k_scale=scale, v_scale=scale)
        assert needs_copy(call) is (first == 1)

"""Bool masks in the kernels for Hopper: the lists and bits made of them in the interpreter, all results on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
from helpers.compile import Recorder, describe_launch
from helpers.hopper_calls import GLUON, VARIANTS, B, H, check_supported, draw, integers, on_hopper
from helpers.modes import needs_kernels
from helpers.targets import TARGETS, resources, spilled_bytes
from triton.compiler import ASTSource

from ropewalk import Alibi, ExpoSB, ReRope, Rope, attention
from ropewalk.ops.attention.blocks import kernel, mask_kernel
from ropewalk.ops.attention.blocks.mask_kernel import BLOCK, list_mask
from ropewalk.ops.attention.call import expand_blocks
from ropewalk.testing import assert_close_to_truth, poisoned_memory

ROUNDINGS = 4  # of intermediate results to the dtype

TQ, TK = 300, 620  # neither ends with a block


def random(device, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(device) > 0.5


def documents(device, queries=TQ, keys=TK):
    """Blocks that are whole, some that are not, and some without a pair."""
    m, n = (torch.arange(tokens, device=device) for tokens in (queries, keys))
    return (m[:, None] + keys - queries) // 190 == n // 190


def with_empty_rows(device):
    """A row, all rows of a block, and rows that a part of a block's words has."""
    mask = random(device, B, H, TQ, TK)
    mask[0, :, 7] = mask[1, 2, 128:256] = mask[..., 40:60, 64:] = False
    mask[..., :128, 256:384] = True
    return mask


def of_one_pair(device):
    mask = torch.zeros(TQ, TK, dtype=torch.bool, device=device)
    mask[TQ - 1, TK - 1] = True
    return mask


MASKS = {
    "shared": lambda device: random(device, TQ, TK),
    "of batch rows": lambda device: random(device, B, TQ, TK),
    "of heads": lambda device: random(device, 1, H, TQ, TK),
    "empty rows": with_empty_rows,
    "documents": documents,
    "keys": lambda device: random(device, B, 1, 1, TK),
    "queries": lambda device: random(device, B, 1, TQ, 1),
    "expanded": lambda device: random(device, 1, 1, TQ, TK).expand(B, H, -1, -1),
    "transposed": lambda device: random(device, B, H, TK, TQ).mT,
    "a part of one": lambda device: random(device, B, H, TQ + 2, TK + 9)[:, :, 1:-1, 3:-6],
    "one pair": of_one_pair,
    "none": lambda device: torch.zeros(TQ, TK, dtype=torch.bool, device=device),
    "all": lambda device: torch.ones(TQ, TK, dtype=torch.bool, device=device),
}


# Lists and bits


def in_four_dimensions(mask):
    """A mask as calls have it."""
    mask = mask[None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
    return mask.expand(-1, -1, *(TQ if mask.shape[2] == 1 else -1, TK if mask.shape[3] == 1 else -1))


def blocks_of(tables, of):
    """Each listed block: its batch row, head, row and column, and whether all of its pairs are listed."""
    lists = tables.rows if of == "rows" else tables.columns
    for b, h, line in (
        (b, h, line) for b in range(lists.shape[0]) for h in range(lists.shape[1]) for line in range(lists.shape[2])
    ):
        n_full, n_partial, *others = lists[b, h, line].tolist()
        for kind, listed in ((True, others[:n_full]), (False, others[n_full : n_full + n_partial])):
            assert listed == sorted(set(listed))
            for other in listed:
                yield b, h, *((line, other) if of == "rows" else (other, line)), kind


def expand(tables, of, queries, keys):
    """The mask (B or 1, H or 1, Tq, Tk) that lists of "rows" or "columns" and bits stand for."""
    *shape, rows, columns = tables.slots.shape
    mask = torch.zeros(*shape, rows * BLOCK, columns * BLOCK, dtype=torch.bool)
    exists = torch.zeros(rows * BLOCK, columns * BLOCK, dtype=torch.bool)
    exists[:queries, :keys] = True
    for b, h, row, column, is_full in blocks_of(tables, of):
        own = slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK)
        pairs = exists[own]
        if not is_full:
            words = tables.bits[tables.slots[b, h, row, column]].cpu()
            pairs = (words[..., None] >> torch.arange(32, dtype=torch.int32) & 1 != 0).flatten(1)
            assert 0 < int((pairs & exists[own]).sum()) < int(exists[own].sum())
        mask[b, h][own] = pairs
    return mask[:, :, :queries, :keys]


@needs_kernels
@pytest.mark.parametrize("of", ["rows", "columns"])
@pytest.mark.parametrize("name", MASKS)
def test_lists_and_bits_are_the_mask(device, name, of):
    mask = in_four_dimensions(MASKS[name](device))
    with poisoned_memory():
        tables = list_mask(mask, of)
    assert torch.equal(expand(tables, of, TQ, TK).expand(mask.shape), mask.cpu())
    if of == "rows":
        assert torch.equal(expand_blocks(tables, slice(0, TQ), TK).expand(mask.shape), mask)


@needs_kernels
@pytest.mark.parametrize("of", ["rows", "columns"])
@pytest.mark.parametrize(("queries", "keys"), [(128, 256), (256, 128), (1, 1), (129, 33), (64, 1025)])
def test_lengths(device, queries, keys, of):
    mask = random(device, 1, 2, queries, keys)
    mask[:, 1] = documents(device, queries, keys)
    assert torch.equal(expand(list_mask(mask, of), of, queries, keys), mask.cpu())


@needs_kernels
def test_rows_and_heads_with_one_mask_share_lists(device):
    shapes = {name: list_mask(in_four_dimensions(MASKS[name](device)), "rows").slots.shape[:2] for name in MASKS}
    assert shapes["expanded"] == shapes["shared"] == shapes["documents"] == (1, 1)
    assert shapes["of batch rows"] == shapes["keys"] == (B, 1)
    assert shapes["of heads"] == (1, H)
    assert shapes["transposed"] == (B, H)


@needs_kernels
def test_queries_with_one_mask_share_bits(device):
    """Those of padding would take a number of bits that is quadratic in the length."""
    n_blocks = {name: len(list_mask(in_four_dimensions(MASKS[name](device)), "rows").bits) for name in MASKS}
    assert n_blocks["keys"] == B * 5
    assert n_blocks["queries"] == n_blocks["of batch rows"] == B * 3 * 5


@needs_kernels
def test_whole_blocks_need_no_bits(device):
    tables = list_mask(in_four_dimensions(documents(device, 256, 512)), "rows")
    kinds = {(row, column): is_full for _, _, row, column, is_full in blocks_of(tables, "rows")}
    assert kinds == {(0, 1): False, (0, 2): False, (0, 3): False, (1, 2): False, (1, 3): True}
    tables = list_mask(torch.ones(1, 1, 256, 512, dtype=torch.bool, device=device).tril(256), "columns")
    kinds = {(row, column): is_full for _, _, row, column, is_full in blocks_of(tables, "columns")}
    assert kinds == {
        **{(row, column): True for row in (0, 1) for column in range(row + 2)},
        (0, 2): False,
        (1, 3): False,
    }


@pytest.mark.compile
@pytest.mark.parametrize("keys", [1024, 1001])
def test_the_kernels_compile_and_read_whole_vectors(monkeypatch, tmp_path, keys):
    """Without spills; 16 bytes of the mask at a time where its rows are aligned."""
    launches = []
    for module, name in ((mask_kernel, "pack_kernel"), (kernel, "compact_kernel")):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    list_mask(torch.ones(1, 2, 1024, keys, dtype=torch.bool), "columns")
    assert len(launches) == 2
    for launched, arguments, keywords in launches:
        signature, constants, attributes = describe_launch(launched, arguments, keywords)
        source = ASTSource(launched, signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=TARGETS["sm_90"], options={"num_warps": keywords["num_warps"]})
        assert spilled_bytes(resources(compiled, tmp_path), "sm_90") == 0
        if "mask_ptr" in keywords and keys % 16 == 0:
            assert "ld.global.v4.b32" in compiled.asm["ptx"]


# On a GPU

CALLS = {
    "plain": lambda device: {},
    "causal": lambda device: {"causal": True, "position": Rope()},
    "window": lambda device: {"window": (170, 30), "position": Rope(interleaved=True)},
    "lengths": lambda device: {"key_lengths": integers(device, TK, 130), "key_starts": integers(device, 0, 70)},
    "no keys": lambda device: {"key_lengths": integers(device, 0, 1), "causal": True},
    "starts": lambda device: {"query_starts": integers(device, 20, -50), "causal": True},
    "alibi": lambda device: {"position": Alibi(), "softcap": 5.0},
    "decay": lambda device: {"position": ExpoSB(distance_decay=True), "causal": True},
    "rerope": lambda device: {"position": ReRope(160)},
    "sinks": lambda device: {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=device), "causal": True},
}


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_by_masks(device, mask, head_dim):
    tensors = draw(device, queries=TQ, keys=TK, head_dim=head_dim)
    check_supported(GLUON, tensors, mask=MASKS[mask](device))


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["documents", "empty rows", "keys"])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_by_calls(device, name, mask, head_dim):
    tensors = draw(device, queries=TQ, keys=TK, head_dim=head_dim)
    check_supported(GLUON, tensors, mask=MASKS[mask](device), **CALLS[name](device))


@on_hopper
@pytest.mark.parametrize("key_heads", [1, H])
def test_heads_of_a_group_have_their_own_masks(device, key_heads):
    tensors = draw(device, queries=TQ, keys=TK, key_heads=key_heads, head_dim=128)
    check_supported(GLUON, tensors, mask=with_empty_rows(device), causal=True)


@on_hopper
def test_padded_features_and_the_deterministic_backward(device):
    tensors = draw(device, queries=TQ, keys=TK, head_dim=96, v_head_dim=80)
    for kernels in VARIANTS.values():
        check_supported(kernels, tensors, mask=with_empty_rows(device), causal=True, position=Rope())


@on_hopper
@pytest.mark.parametrize("trains", [False, True])
def test_what_is_written_to_a_mask_counts_in_the_next_call(device, trains):
    """From the third call on they have plans; writes through `data` raise no version."""
    *tensors, grad = (torch.randn(2, 512, 4, 64, device=device).bfloat16() for _ in range(4))
    mask = torch.empty(512, 512, dtype=torch.bool, device=device)
    for step in range(6):
        mask.data.copy_(torch.rand(512, 512, device=device) < (step + 1) / 8)
        mask.data[:, step * 64 : step * 64 + 130] = step % 2 == 0
        results = []
        for impl, given in (("gluon", tensors), ("reference", [x.double() for x in tensors]), ("reference", tensors)):
            xs = [x.detach().requires_grad_(trains) for x in given]
            out = attention(*xs, mask=mask, causal=True, position=Rope(), impl=impl)
            results.append((out, *(torch.autograd.grad(out, xs, grad.to(out.dtype)) if trains else ())))
        for ours, truth, plain in zip(*results, strict=True):
            assert_close_to_truth(ours, truth, plain, roundings=ROUNDINGS)


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_tiles_of_many_masks(device, head_dim):
    """More work items than programs, and rows of very different lengths; against the Triton kernels."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 4096, 8, head_dim, device=device, generator=generator).bfloat16() for _ in range(3))
    bounds = torch.randint(0, 4097, (1, 8, 4096, 2), device=device, generator=generator).sort(-1).values
    bounds[:, :, :2048] = bounds[:, :, :2048:256].repeat_interleave(256, 2)
    n = torch.arange(4096, device=device)
    mask = (n >= bounds[..., :1]) & (n < bounds[..., 1:])
    results = []
    for impl in ("triton", "gluon"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attention(*leaves, mask=mask, causal=True, impl=impl, return_lse=True)
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum(), leaves)))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4e-2, atol=4e-2)

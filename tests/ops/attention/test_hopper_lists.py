"""Lists of blocks in the kernels for Hopper: their loops in Triton's interpreter, and all results on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers.block_lists import draw_lists, expand_lists, to_device
from helpers.hopper_calls import GLUON, VARIANTS, B, H, check_supported, draw, integers, on_hopper
from helpers.modes import needs_kernels
from torch.nn.attention.flex_attention import create_block_mask

from ropewalk import Alibi, BlockLists, ExpoSB, ReRope, Rope, SelfExtend, attention
from ropewalk.ops.attention.blocks.tables import find_tables
from ropewalk.ops.attention.hopper import support

if support.why_missing() is not None:
    pytest.skip(str(support.why_missing()), allow_module_level=True)

from ropewalk.ops.attention.hopper.lists import LISTED, find_tiles, start_of_tile
from ropewalk.ops.attention.triton.arguments import MaskFlags, Seqlens
from ropewalk.ops.attention.triton.masking import key_ranges, query_ranges

BLOCK = int(LISTED.value)
TOKENS = 300, 620  # of queries and keys: neither ends with a block


# Their loops


@triton.jit
def _write_loops(
    out,  # (lines, room, 2): first tokens of a line's tiles, in a loop's order, and whether they are masked; then -1
    lists,
    stride_line,
    seqlens,
    room,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OF_QUERIES: tl.constexpr,
    HAS_PARTIAL: tl.constexpr,
    LISTED: tl.constexpr,
):
    line = tl.program_id(0)
    lists += line * stride_line
    if OF_QUERIES:
        tile_range = query_ranges(line * LISTED, seqlens, FLAGS, BLOCK_M, BLOCK_N, False)
        BLOCK: tl.constexpr = BLOCK_M
    else:
        tile_range = key_ranges(line * LISTED, seqlens, FLAGS, BLOCK_M, BLOCK_N, False)
        BLOCK: tl.constexpr = BLOCK_N
    tiles = find_tiles(tl.arange(0, 32), tile_range, lists, BLOCK, HAS_PARTIAL)
    for index in range(tiles.count + tiles.n_partial):
        start = start_of_tile(index, tiles, lists, BLOCK, HAS_PARTIAL)
        masked = (start < tile_range.full) | (start >= tile_range.full_stop) | (index >= tiles.count)
        tl.store(out + (line * room + index) * 2, start)
        tl.store(out + (line * room + index) * 2 + 1, masked.to(tl.int32))


def loops_of(lists, device, flags, seqlens, block_m, of):
    """Of each line the first tokens of its tiles and whether they are masked, in the order of a loop."""
    q, k = (torch.empty(1, tokens, 1, 64, device=device) for tokens in TOKENS)
    tables = find_tables(to_device(lists, device), q, k, "bthd", None)
    lines = tables.rows if of == "rows" else tables.columns
    _, _, n_lines, width = lines.shape
    room = (width + 1) * BLOCK // 64
    out = torch.full((n_lines, room, 2), -1, dtype=torch.int32, device=device)
    _write_loops[(n_lines,)](
        out=out,
        lists=lines,
        stride_line=width,
        seqlens=seqlens,
        room=room,
        FLAGS=flags,
        BLOCK_M=block_m,
        BLOCK_N=BLOCK,
        OF_QUERIES=of == "columns",
        HAS_PARTIAL=lists.spans is not None,
        LISTED=BLOCK,
    )
    return [[(start, bool(masked)) for start, masked in line if start >= 0] for line in out.tolist()]


def spans_of(queries, keys):
    """A span of keys for each query, (1, 1, Tq, 2)."""
    bounds = torch.randint(0, keys, (1, 1, queries, 2), generator=torch.Generator().manual_seed(2))
    return bounds.sort(-1).values.int()


def lists_of(kind):
    """Lists of one head, and the mask that they stand for."""
    lists = draw_lists(1, 1, *TOKENS, (BLOCK, BLOCK), 4, seed=5, full=kind != "plain")
    if kind == "spans":
        full = (lists.full_counts, lists.full_indices)
        lists = BlockLists(lists.counts, lists.indices, *full, BLOCK, BLOCK, spans_of(*TOKENS))
    elif kind == "all":
        rows, blocks = (-(-tokens // BLOCK) for tokens in TOKENS)
        counts = torch.full((1, 1, rows), blocks, dtype=torch.int32)
        lists = BlockLists(counts, torch.arange(blocks).int().flip(0).expand(1, 1, rows, blocks))
    return lists, expand_lists(lists, *TOKENS)[0, 0]


SIDES = {
    "all": {},
    "causal": {"SIDE": 1},
    "window": {"WINDOWED": True, "window": 150, "window_right": 40},
    "causal window": {"SIDE": 1, "WINDOWED": True, "window": 90, "window_right": 90},
    "lengths": {"HAS_LENGTHS": True, "n_keys": 401},
    "starts": {"HAS_LENGTHS": True, "HAS_STARTS": True, "kv_start": 140, "n_keys": 500, "SIDE": 1},
    "no keys": {"HAS_LENGTHS": True, "n_keys": 0},
}


@needs_kernels
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["plain", "full", "spans", "all"])
@pytest.mark.parametrize(("of", "block_m"), [("rows", 128), ("columns", 128), ("columns", 64)])
def test_loops_hold_every_attended_pair_once(device, of, block_m, kind, side):
    """In a tile that is not masked every pair is attended."""
    numbers = {"kv_start": 0, "n_keys": TOKENS[1], "window": 0, "window_right": 0, **SIDES[side]}
    flags = {key: numbers.pop(key) for key in list(numbers) if key.isupper()}
    flags = MaskFlags(
        **{"SIDE": 0, "WINDOWED": False, "HAS_LENGTHS": False, "HAS_STARTS": False, **flags},
        PACKED=False,
        RANGE=0,
        INDEX_POSITIONS=True,
        PARTIAL_TILES=True,
        UNREAD_KEYS=False,
    )
    offset = TOKENS[1] - TOKENS[0]
    seqlens = Seqlens(n_queries=TOKENS[0], causal_offset=offset, **numbers)
    m, n = torch.arange(TOKENS[0])[:, None], torch.arange(TOKENS[1])
    exists = (n >= seqlens.kv_start) & (n < seqlens.n_keys) & (m >= 0)
    attends = exists
    if flags.SIDE:
        attends = attends & (n <= m + offset)
    if flags.WINDOWED:
        attends = attends & (n > m + offset - seqlens.window)
        if not flags.SIDE:
            attends = attends & (n < m + offset + seqlens.window_right)
    lists, listed = lists_of(kind)
    attends = attends & listed
    seen = torch.zeros_like(listed, dtype=torch.int32)
    for line, tiles in enumerate(loops_of(lists, device, flags, seqlens, block_m, of)):
        own = slice(line * BLOCK, (line + 1) * BLOCK)
        for start, masked in tiles:
            other = slice(start, start + (BLOCK if of == "rows" else block_m))
            pairs = (own, other) if of == "rows" else (other, own)
            assert seen[pairs].numel()
            seen[pairs] += 1
            # The backward clears keys that do not exist before its loop.
            assert masked or bool((attends if of == "rows" else attends | ~exists)[pairs].all())
    assert int(seen.max()) <= 1
    assert not bool((attends & (seen == 0)).any())


# On a GPU


def random_lists(device):
    return to_device(draw_lists(B, H, *TOKENS, (BLOCK, BLOCK), 4, full=True), device)


def shared_lists(device):
    return to_device(draw_lists(1, 1, *TOKENS, (BLOCK, BLOCK), 3, seed=1), device)


def lists_with_spans(device):
    lists = draw_lists(B, 1, *TOKENS, (BLOCK, BLOCK), 3, seed=2, full=True)
    full = (lists.full_counts, lists.full_indices)
    return to_device(BlockLists(lists.counts, lists.indices, *full, BLOCK, BLOCK, spans_of(*TOKENS)), device)


def block_mask(device):
    sizes = (None, H, *TOKENS)
    return create_block_mask(lambda b, h, m, n: (m // 40 + n // (30 + h)) % 3 > 0, *sizes, device=device)


LISTS = {"random": random_lists, "shared": shared_lists, "spans": lists_with_spans, "bits": block_mask}
CALLS = {
    "plain": lambda device: {},
    "causal": lambda device: {"causal": True, "position": Rope()},
    "window": lambda device: {"window": (170, 30), "position": Rope(interleaved=True)},
    "lengths": lambda device: {"key_lengths": integers(device, TOKENS[1], 130), "key_starts": integers(device, 0, 70)},
    "no keys": lambda device: {"key_lengths": integers(device, 0, 1), "causal": True},
    "starts": lambda device: {"query_starts": integers(device, 20, -50), "causal": True},
    "alibi": lambda device: {"position": Alibi(), "softcap": 5.0},
    "alibi learned": lambda device: {"position": Alibi((torch.rand(H, device=device) + 0.1).requires_grad_())},
    "bands": lambda device: {
        "position": ExpoSB(band_weights=(torch.rand(H, device=device) + 0.1).requires_grad_()),
        "causal": True,
    },
    "decay": lambda device: {"position": ExpoSB(distance_decay=True), "causal": True},
    "rerope": lambda device: {"position": ReRope(160)},
    "rerope causal": lambda device: {"position": ReRope(160), "causal": True},
    "self-extend": lambda device: {"position": SelfExtend(90, 4)},
    "sinks": lambda device: {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=device), "causal": True},
}


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("name", CALLS)
def test_everything_is_the_references(device, name, lists, head_dim):
    tensors = draw(device, queries=TOKENS[0], keys=TOKENS[1], head_dim=head_dim)
    check_supported(GLUON, tensors, blocks=LISTS[lists](device), **CALLS[name](device))


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize(
    "name", ["plain", "causal", "lengths", "alibi", "alibi learned", "rerope causal", "self-extend", "sinks"]
)
def test_dropout(device, name, lists, head_dim):
    tensors = draw(device, queries=TOKENS[0], keys=TOKENS[1], head_dim=head_dim)
    check_supported(GLUON, tensors, blocks=LISTS[lists](device), dropout_p=0.2, **CALLS[name](device))


@on_hopper
@pytest.mark.parametrize("lists", LISTS)
def test_padded_features_and_the_deterministic_backward(device, lists):
    tensors = draw(device, queries=TOKENS[0], keys=TOKENS[1], head_dim=96, v_head_dim=80)
    for kernels in VARIANTS.values():
        check_supported(kernels, tensors, blocks=LISTS[lists](device), causal=True, position=Rope())


@on_hopper
@pytest.mark.parametrize("key_heads", [1, H])
def test_heads_of_a_group_have_their_own_lists(device, key_heads):
    tensors = draw(device, queries=TOKENS[0], keys=TOKENS[1], key_heads=key_heads, head_dim=128)
    check_supported(GLUON, tensors, blocks=random_lists(device), causal=True)


@on_hopper
@pytest.mark.parametrize("kind", ["none", "one block"])
def test_few_blocks(device, kind):
    counts = torch.zeros(1, 1, 3, dtype=torch.int32, device=device)
    counts[..., 1] = kind == "one block"
    lists = BlockLists(counts, torch.full((1, 1, 3, 2), 4, dtype=torch.int32, device=device))
    for head_dim in (64, 128):
        tensors = draw(device, queries=TOKENS[0], keys=TOKENS[1], head_dim=head_dim)
        check_supported(GLUON, tensors, blocks=lists)


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_tiles_of_many_lists(device, head_dim):
    """More work items than programs, and long lists of very different lengths; against the Triton kernels."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(1, 4096, 8, head_dim, device=device, generator=generator).bfloat16() for _ in range(3))
    counts = torch.randint(0, 33, (1, 8, 32), device=device, generator=generator)
    counts[..., 5] = 0
    indices = torch.rand(1, 8, 32, 32, device=device, generator=generator).argsort(-1)
    results = []
    for impl in ("triton", "gluon"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = attention(*leaves, blocks=BlockLists(counts, indices), causal=True, impl=impl, return_lse=True)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        results.append((out, lse, *grads))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@on_hopper
def test_all_blocks_give_the_values_of_no_lists(device):
    tensors = [torch.randn(2, 600, 4, 128, device=device).bfloat16() for _ in range(3)]
    lists = BlockLists(
        torch.full((1, 1, 5), 5, dtype=torch.int32, device=device),
        torch.tensor([3, 1, 0, 4, 2], dtype=torch.int32, device=device).expand(1, 1, 5, 5),
    )
    for keywords in ({}, {"causal": True, "position": Rope()}):
        ours = attention(*tensors, blocks=lists, impl="gluon", **keywords)
        torch.testing.assert_close(ours, attention(*tensors, impl="gluon", **keywords))
        assert torch.equal(ours, attention(*tensors, blocks=lists, impl="gluon", **keywords))

"""Lists of blocks: what they mean, their errors, what is kept of them, and their constructors against bool masks."""

import copy
import dataclasses
import functools
import itertools
import pickle
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.block_lists import draw_lists, expand_lists
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from ropewalk import BlockLists, ReRope, Rope, attention, explain_choice
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.blocks import builders
from ropewalk.ops.attention.blocks.tables import find_tables
from ropewalk.ops.attention.call import expand_blocks

B, H, K, D = 2, 4, 2, 8
SIZES = list(itertools.product((64, 128), (64, 128)))


def qkv(queries, keys, dtype=torch.float64, *, grad=False, heads=H):
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, queries, heads, D), (B, keys, K, D), (B, keys, K, D))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]


def mask_of(lists, queries, keys):
    """The mask of the tables that are made of lists."""
    shape = (lists.counts.shape[0], queries, lists.counts.shape[1], D)
    q, k = torch.empty(shape), torch.empty(shape[0], keys, shape[2], D)
    return expand_blocks(find_tables(lists, q, k, "bthd", None), slice(0, queries), keys)


@pytest.mark.parametrize("blocks", SIZES)
@pytest.mark.parametrize(("queries", "keys"), [(130, 300), (200, 200), (1, 129), (300, 70)])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("keywords", [{}, {"causal": True, "position": Rope()}, {"window": (70, 30)}])
def test_the_reference_attends_listed_blocks(blocks, queries, keys, full, keywords):
    lists = draw_lists(B, H, queries, keys, blocks, 4, full=full)
    mask = expand_lists(lists, queries, keys)
    results = []
    for masks in ({"blocks": lists}, {"mask": mask}):
        tensors = qkv(queries, keys, grad=True)
        out, lse = attention(*tensors, impl="reference", return_lse=True, **masks, **keywords)
        total = out.sin().sum() + torch.where(lse.isfinite(), lse, 0).sum()
        results.append((out, lse, *torch.autograd.grad(total, tensors)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


LISTS = [
    lambda: BlockLists.causal(256),
    lambda: create_block_mask(lambda b, h, m, n: m >= n, None, None, 256, 256, device="cpu"),
]


@pytest.mark.parametrize("make", LISTS, ids=["lists", "block mask"])
def test_lists_kept_for_one_device_are_refused_on_another(make):
    blocks, tensors = make(), qkv(256, 256)
    attention(*tensors, blocks=blocks, impl="reference")
    for _ in range(2):
        with pytest.raises(ValueError, match="of blocks is on cpu, but must be on q's device, meta"):
            attention(*(x.to("meta") for x in tensors), blocks=blocks, impl="reference")
    attention(*tensors, blocks=blocks, impl="reference")


def test_lists_of_all_rows_and_heads_and_int64():
    for batch, heads in ((1, 1), (1, H), (B, 1)):
        lists = draw_lists(batch, heads, 200, 150, (64, 128), 2, dtype=torch.int64)
        tensors = qkv(200, 150)
        expected = attention(*tensors, mask=expand_lists(lists, 200, 150), impl="reference")
        assert torch.equal(attention(*tensors, blocks=lists, impl="reference"), expected)


def test_a_row_without_blocks_gives_zero_and_minus_infinity():
    lists = BlockLists(torch.zeros(1, 1, 2, dtype=torch.int32), torch.full((1, 1, 2, 3), -1, dtype=torch.int32))
    q, k, v = tensors = qkv(200, 200, grad=True)
    out, lse = attention(q, k, v, blocks=lists, return_lse=True)
    assert not out.any()
    assert torch.isneginf(lse).all()
    assert not any(grad.any() for grad in torch.autograd.grad(out.sum(), tensors))
    sinks = torch.randn(H, dtype=torch.float64)
    _, lse = attention(q, k, v, blocks=lists, sinks=sinks, return_lse=True)
    assert torch.equal(lse, sinks[:, None].expand_as(lse))


def documents(tokens, length):
    document = torch.arange(tokens) // length
    return lambda b, h, m, n: document[m] == document[n]


def per_head(b, h, m, n):
    return ((m - n).abs() < 30 + 40 * h) | (n < 3 + b)


def alternating(b, h, m, n):
    return (m + n) % 3 == 0


MODS = {
    "causal": (lambda b, h, m, n: m >= n, None, None),
    "window": (lambda b, h, m, n: (m >= n) & (m - n < 60), None, None),
    "prefix": (lambda b, h, m, n: (m >= n) | (n < 50), None, None),
    "documents": (documents(300, 77), None, None),
    "causal documents": (lambda b, h, m, n: documents(300, 77)(b, h, m, n) & (m >= n), None, None),
    "dilated window": (lambda b, h, m, n: ((m - n).abs() <= 100) & ((m - n) % 4 == 0), None, None),
    "per head and row": (per_head, B, H),
    "alternating": (alternating, None, H),
    "nothing": (lambda b, h, m, n: m < -1, None, None),
    "everything": (lambda b, h, m, n: m >= 0, B, None),
}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("blocks", [64, 128, (128, 64)])
@pytest.mark.parametrize(("queries", "keys"), [(300, 300), (100, 230)])
def test_the_reference_runs_block_masks(name, blocks, queries, keys):
    mod, batch, heads = MODS[name]
    block_mask = create_block_mask(mod, batch, heads, queries, keys, device="cpu", BLOCK_SIZE=blocks)
    expected = create_mask(mod, batch or 1, heads or 1, queries, keys, device="cpu")
    tensors = qkv(queries, keys)
    ours = attention(*tensors, blocks=block_mask, causal=True, return_lse=True, impl="reference")
    theirs = attention(*tensors, mask=expected, causal=True, return_lse=True, impl="reference")
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_block_masks_of_kv_blocks():
    """Blocks that one made by hand: with a mask_mod, without one, with junk, and in both kinds of lists."""
    counts = torch.tensor([[[2, 1, 0]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, -1], [1, 2**30, 7], [5, 5, 5]]]], dtype=torch.int32)
    full_counts = torch.tensor([[[1, 0, 1]]], dtype=torch.int32)
    full_indices = torch.tensor([[[[0, 9, 9], [9, 9, 9], [1, 9, 9]]]], dtype=torch.int32)
    tensors = qkv(170, 160)
    for mod in (None, alternating):
        block_mask = BlockMask.from_kv_blocks(
            counts, indices, full_counts, full_indices, BLOCK_SIZE=64, mask_mod=mod, compute_q_blocks=False
        )
        part = BlockLists(counts, indices, None, None, 64, 64)
        full = BlockLists(full_counts, full_indices, None, None, 64, 64)
        pairs = torch.ones(170, 160, dtype=torch.bool)
        if mod is not None:
            pairs = mod(0, 0, torch.arange(170)[:, None], torch.arange(160))
        mask = (expand_lists(part, 170, 160) & pairs) | expand_lists(full, 170, 160)
        assert torch.equal(attention(*tensors, blocks=block_mask), attention(*tensors, mask=mask, impl="reference"))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"counts": [1, 2]}, TypeError, "counts of blocks is list"),
        ({"counts": torch.ones(1, 1, 2)}, TypeError, "counts of blocks is a tensor of torch.float32"),
        ({"counts": torch.ones(1, 1, 3, dtype=torch.int32)}, ValueError, "counts of blocks has shape"),
        ({"counts": torch.ones(3, 1, 2, dtype=torch.int32)}, ValueError, "counts of blocks has shape"),
        ({"counts": torch.full((1, 1, 2), 3, dtype=torch.int32)}, ValueError, "counts of blocks holds 3"),
        ({"counts": torch.full((1, 1, 2), -1, dtype=torch.int32)}, ValueError, "counts of blocks holds -1"),
        ({"indices": torch.zeros(1, 1, 2, dtype=torch.int32)}, ValueError, "indices of blocks has shape"),
        ({"indices": torch.zeros(1, 1, 2, 2)}, TypeError, "indices of blocks is a tensor of torch.float32"),
        ({"indices": torch.full((1, 1, 2, 2), 2)}, ValueError, "indices of blocks holds 2"),
        ({"indices": torch.full((1, 1, 2, 2), -1)}, ValueError, "indices of blocks holds -1"),
        ({"full_counts": torch.ones(1, 1, 2, dtype=torch.int32)}, ValueError, "full_indices of blocks is None"),
        ({"full_indices": torch.zeros(1, 1, 2, 2, dtype=torch.int32)}, ValueError, "full_counts of blocks is None"),
        (
            {"full_counts": torch.ones(1, 1, 2, dtype=torch.int32), "full_indices": torch.full((1, 1, 2, 1), 5)},
            ValueError,
            "full_indices of blocks holds 5",
        ),
        ({"block_q": 32}, ValueError, "block_q of blocks is 32"),
        ({"block_k": 256}, ValueError, "block_k of blocks is 256"),
        ({"block_q": 128.0}, TypeError, "block_q of blocks is 128.0"),
        ({"spans": torch.zeros(1, 1, 200, 2)}, TypeError, "spans of blocks is torch.float32"),
        ({"spans": torch.zeros(1, 1, 199, 2, dtype=torch.int32)}, ValueError, "spans of blocks has shape"),
    ],
)
def test_lists_that_do_not_fit_raise(changes, error, words):
    lists = BlockLists(torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32))
    with pytest.raises(error) as raised:
        attention(*qkv(200, 200), blocks=dataclasses.replace(lists, **changes))
    assert words in str(raised.value)


def test_calls_that_take_no_blocks_raise():
    q, k, v = qkv(256, 256)
    lists = BlockLists.causal(256)
    with pytest.raises(TypeError, match="blocks is Tensor, but must be a BlockLists"):
        attention(q, k, v, blocks=torch.ones(2, 2))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    with pytest.raises(ValueError, match="blocks was given with layout 'thd'"):
        attention(*packed, blocks=lists, layout="thd", cu_seqlens_q=torch.tensor([0, 512]))
    pages = [x.reshape(-1, 16, K, D) for x in (k, v)]
    table = torch.arange(32).view(2, 16)
    with pytest.raises(ValueError, match="blocks was given beside block_table"):
        attention(q, *pages, blocks=lists, block_table=table, key_lengths=torch.tensor([256, 256]))
    for impl in ("sdpa", "flash", "gluon"):
        with pytest.raises(ValueError, match="cannot run this call"):
            attention(q.float(), k.float(), v.float(), blocks=lists, impl=impl)
    assert explain_choice(q, k, v, blocks=lists).others["sdpa"] == "lists of blocks (blocks) are not supported"
    with pytest.raises(TypeError, match="blocks"):
        attention(q, k, v, block_mask=lists)


@pytest.mark.parametrize(("queries", "keys"), [(200, 256), (256, 200), (300, 300)])
def test_a_block_mask_for_other_lengths_raises(queries, keys):
    block_mask = create_block_mask(lambda b, h, m, n: m >= n, None, None, queries, keys, device="cpu")
    with pytest.raises(ValueError, match="blocks"):
        attention(*qkv(256, 256), blocks=block_mask)


def test_a_block_mask_for_other_rows_or_blocks_raises():
    for batch, heads, size in ((3, None, 128), (None, 3, 128), (None, None, 32)):
        block_mask = create_block_mask(alternating, batch, heads, 256, 256, device="cpu", BLOCK_SIZE=size)
        with pytest.raises(ValueError, match="blocks"):
            attention(*qkv(256, 256), blocks=block_mask)


def test_what_was_made_of_lists_is_kept_until_they_are_written_to():
    lists = draw_lists(1, 1, 256, 256, (64, 64), 2)
    tensors = qkv(256, 256)
    first = make_call(*tensors, blocks=lists).blocks
    assert make_call(*tensors, blocks=lists).blocks is first
    assert make_call(*qkv(250, 250), blocks=lists).blocks is not first
    before = attention(*tensors, blocks=lists, impl="reference")
    lists.counts.fill_(2)
    lists.indices.copy_(torch.tensor([0, 3]).expand_as(lists.indices))
    after = attention(*tensors, blocks=lists, impl="reference")
    assert not torch.equal(before, after)
    assert torch.equal(after, attention(*tensors, mask=expand_lists(lists, 256, 256), impl="reference"))


def test_what_a_mask_mod_captured_is_read_again_after_a_write():
    document = torch.arange(256) // 100
    block_mask = create_block_mask(lambda b, h, m, n: document[m] == document[n], None, None, 256, 256, device="cpu")
    tensors = qkv(256, 256)
    before = attention(*tensors, blocks=block_mask)
    document.copy_(torch.arange(256) // 120)
    assert not torch.equal(before, attention(*tensors, blocks=block_mask))


class Documents(torch.nn.Module):
    """Tensors that mask_mods read from an object."""

    def __init__(self):
        super().__init__()
        self.register_buffer("number", torch.arange(256) // 100)
        self.places = SimpleNamespace(number=self.number)

    def of_self(self, b, h, m, n):
        return self.number[m] == self.number[n]

    def __call__(self, b, h, m, n):
        return self.of_self(b, h, m, n)


DOCUMENTS = Documents()


@pytest.mark.parametrize(
    "mask_mod",
    [
        lambda b, h, m, n: DOCUMENTS.number[m] == DOCUMENTS.number[n],
        lambda b, h, m, n: DOCUMENTS.of_self(b, h, m, n),
        (lambda places: lambda b, h, m, n: places.number[m] == places.number[n])(DOCUMENTS.places),
        (lambda own: lambda b, h, m, n: own.of_self(b, h, m, n))(DOCUMENTS),
        functools.partial(
            lambda b, h, m, n, given: given["x"][0][m] == given["x"][0][n], given={"x": [DOCUMENTS.number]}
        ),
        DOCUMENTS,
    ],
    ids=["global", "global's method", "namespace", "method", "partial", "object"],
)
def test_tensors_that_a_mask_mod_reads_from_objects_are_read_again_after_a_write(mask_mod):
    DOCUMENTS.number.copy_(torch.arange(256) // 100)
    block_mask = create_block_mask(mask_mod, None, None, 256, 256, device="cpu")
    tensors = qkv(256, 256)
    first = make_call(*tensors, blocks=block_mask).blocks
    assert make_call(*tensors, blocks=block_mask).blocks is first
    DOCUMENTS.number.copy_(torch.arange(256) // 120)
    after = make_call(*tensors, blocks=block_mask).blocks
    assert not torch.equal(first.bits, after.bits)


WINDOW, ARRAY = 30, np.array([30])


def windows():
    """Mask_mods of a number, and what changes it, by what holds it."""
    window = 30

    def change():
        nonlocal window
        window = 40

    def change_global():
        global WINDOW
        WINDOW = 40

    yield "variable", lambda b, h, m, n: (m - n).abs() < window, change
    yield "global", lambda b, h, m, n: (m - n).abs() < WINDOW, change_global
    own = SimpleNamespace(window=30, ahead=[0, 30])
    yield "attribute", lambda b, h, m, n: (m - n).abs() < own.window, lambda: setattr(own, "window", 40)
    yield "entry", lambda b, h, m, n: (m - n).abs() < own.ahead[1], lambda: own.ahead.__setitem__(1, 40)

    def of_default(b, h, m, n, *, window=30):
        return (m - n).abs() < window

    yield "default", of_default, lambda: of_default.__kwdefaults__.update(window=40)
    held = torch.tensor(30)
    places = {"window": held}
    yield "tensor", lambda b, h, m, n: (m - n).abs() < places["window"], lambda: places.update(window=held + 10)
    # What has no version.
    array, base, buffer, bag, row = np.array([30]), np.array([30]), bytearray([30]), {30}, deque([30])
    view = torch.from_numpy(base)
    yield "array", lambda b, h, m, n: (m - n).abs() < int(array[0]), lambda: array.__setitem__(0, 40)
    yield "array of a global", lambda b, h, m, n: (m - n).abs() < int(ARRAY[0]), lambda: ARRAY.__setitem__(0, 40)
    yield "tensor of an array", lambda b, h, m, n: (m - n).abs() < view[0], lambda: base.__setitem__(0, 40)
    yield "bytes", lambda b, h, m, n: (m - n).abs() < buffer[0], lambda: buffer.__setitem__(0, 40)
    yield "set", lambda b, h, m, n: (m - n).abs() < max(bag), lambda: bag.add(40)
    yield "deque", lambda b, h, m, n: (m - n).abs() < row[-1], lambda: row.append(40)
    own_array = SimpleNamespace(held=[np.array([30])])
    yield (
        "array of an object",
        lambda b, h, m, n: (m - n).abs() < int(own_array.held[0][0]),
        lambda: own_array.held[0].__setitem__(0, 40),
    )


@pytest.mark.parametrize(("mask_mod", "change"), [pytest.param(*x, id=name) for name, *x in windows()])
def test_numbers_that_a_mask_mod_reads_are_read_again_once_they_changed(mask_mod, change):
    block_mask = create_block_mask(mask_mod, None, None, 256, 256, device="cpu")
    tensors = qkv(256, 256)
    first = make_call(*tensors, blocks=block_mask).blocks
    assert make_call(*tensors, blocks=block_mask).blocks is first
    change()
    m, n = torch.arange(256)[:, None], torch.arange(256)
    out = attention(*tensors, blocks=block_mask, impl="reference")
    torch.testing.assert_close(out, attention(*tensors, mask=(m - n).abs() < 40, impl="reference"))
    assert make_call(*tensors, blocks=block_mask).blocks is make_call(*tensors, blocks=block_mask).blocks


def test_a_mask_mod_of_a_model_does_not_watch_its_weights():
    """Or each step of an optimiser would have it evaluated again."""
    model = torch.nn.Linear(2, 2)
    model.number = torch.arange(256) // 100
    mask_mod = lambda b, h, m, n: model.number[m] == model.number[n]  # noqa: E731
    block_mask = create_block_mask(mask_mod, None, None, 256, 256, device="cpu")
    first = make_call(*qkv(256, 256), blocks=block_mask).blocks
    with torch.no_grad():
        model.weight.zero_()
    assert make_call(*qkv(256, 256), blocks=block_mask).blocks is first


def test_lists_are_not_written_to_and_can_be_copied():
    lists = draw_lists(1, H, 200, 200, (64, 64), 3, full=True)
    copies = [x.clone() for x in (lists.counts, lists.indices, lists.full_counts, lists.full_indices)]
    tensors = qkv(200, 200)
    out = attention(*tensors, blocks=lists)
    for x, y in zip((lists.counts, lists.indices, lists.full_counts, lists.full_indices), copies, strict=True):
        assert torch.equal(x, y)
    for other in (copy.copy(lists), copy.deepcopy(lists), pickle.loads(pickle.dumps(lists))):
        assert torch.equal(attention(*tensors, blocks=other), out)


# === constructors ===


def ahead_of(queries, keys):
    return torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]


TOKENS = [(515, 515), (100, 640), (515, 100), (1, 300)]


@pytest.mark.parametrize("blocks", SIZES)
@pytest.mark.parametrize(("queries", "keys"), TOKENS)
def test_spans_are_their_masks(blocks, queries, keys):
    sizes = dict(zip(("block_q", "block_k"), blocks, strict=True))
    ahead, n = ahead_of(queries, keys), torch.arange(keys)
    assert torch.equal(mask_of(BlockLists.causal(queries, keys, **sizes), queries, keys)[0, 0], ahead <= 0)
    for window, n_sinks in ((128, 0), (150, 128), (300, 256), (129, 512)):
        lists = BlockLists.sliding_window(queries, keys, window=window, n_sinks=n_sinks, **sizes)
        expected = (ahead <= 0) & ((ahead > -window) | (n < n_sinks))
        assert torch.equal(mask_of(lists, queries, keys)[0, 0], expected), (window, n_sinks)
    for per_frame, behind, later in ((50, None, 0), (128, 1, 1), (200, 0, 0)):
        lists = BlockLists.frames(queries, keys, tokens_per_frame=per_frame, behind=behind, ahead=later, **sizes)
        own = torch.arange(keys - queries, keys).div(per_frame, rounding_mode="floor")
        apart = n // per_frame - own[:, None]
        expected = (apart <= later) & (apart >= -(10**6 if behind is None else behind))
        assert torch.equal(mask_of(lists, queries, keys)[0, 0], expected), per_frame


@pytest.mark.parametrize("blocks", SIZES)
@pytest.mark.parametrize("bounds", [[0, 40, 40, 100], [0, 515], [5, 100, 300, 515], list(range(0, 515, 7)), [0]])
@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_their_mask(blocks, bounds, causal):
    cu_seqlens, tokens = torch.tensor(bounds), 515
    lists = BlockLists.documents(cu_seqlens, tokens, causal=causal, block_q=blocks[0], block_k=blocks[1])
    document = torch.searchsorted(cu_seqlens, torch.arange(tokens), right=True)
    expected = (document[:, None] == document) & (document > 0) & (document < len(cu_seqlens))
    assert torch.equal(mask_of(lists, tokens, tokens)[0, 0], expected.tril() if causal else expected)


@pytest.mark.parametrize("blocks", SIZES)
def test_a_mask_lists_its_blocks(blocks):
    mask = torch.rand(2, 3, 200, 330, generator=torch.Generator().manual_seed(0)) > 0.9999
    lists = BlockLists.from_mask(mask, block_q=blocks[0], block_k=blocks[1])
    marks = torch.zeros(2, 3, -(-200 // blocks[0]), -(-330 // blocks[1]), dtype=torch.bool)
    for b, h, m, n in mask.nonzero().tolist():
        marks[b, h, m // blocks[0], n // blocks[1]] = True
    assert 0 < marks.float().mean() < 1
    expected = marks.repeat_interleave(blocks[0], 2).repeat_interleave(blocks[1], 3)[:, :, :200, :330]
    assert torch.equal(mask_of(lists, 200, 330), expected)


def listed(lists):
    """The blocks of each row, as sets in rows of all heads."""
    rows = zip(lists.indices.flatten(0, 2).tolist(), lists.counts.flatten().tolist(), strict=True)
    return [set(row[:count]) for row, count in rows]


def test_top_k_lists_the_largest_scores():
    scores = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0))
    lists = BlockLists.top_k(scores, 5, n_queries=1000, n_keys=2000)
    assert torch.equal(lists.indices, scores.topk(5).indices.sort().values.int())
    lists = BlockLists.top_k(scores, 4, n_queries=1000, causal=True, own=True, block_k=64)
    for row, blocks in enumerate(listed(lists)):
        i = row % 8
        own, behind = {2 * i, 2 * i + 1}, range(2 * i)
        own = {j for j in own if j * 64 < 1000}
        best = sorted(behind, key=lambda j: -scores.flatten(0, 2)[row, j])[: 4 - len(own)]
        assert blocks == own | set(best)


def test_top_k_takes_the_first_of_equal_scores_and_no_missing_ones():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0], [-torch.inf, torch.nan, 0.0, -0.0], [-torch.inf] * 4])[None, None]
    lists = BlockLists.top_k(scores, 2, n_queries=384, n_keys=512)
    assert listed(lists) == [{1, 2}, {2, 3}, set()]


def test_big_bird_lists_its_window_the_first_blocks_and_random_ones():
    lists = BlockLists.big_bird(4096, n_heads=2, window=1, n_global=2, n_random=3, seed=1)
    rows = listed(lists)
    for row, blocks in enumerate(rows):
        i = row % 32
        if i < 2:
            assert blocks == set(range(32))
            continue
        always = {0, 1} | {j for j in (i - 1, i, i + 1) if j < 32}
        assert always <= blocks
        assert len(blocks) == len(always) + 3
    assert rows[:32] != rows[32:]
    assert rows == listed(BlockLists.big_bird(4096, n_heads=2, window=1, n_global=2, n_random=3, seed=1))
    assert rows != listed(BlockLists.big_bird(4096, n_heads=2, window=1, n_global=2, n_random=3, seed=2))
    for row, blocks in enumerate(listed(BlockLists.big_bird(4096, causal=True))):
        assert max(blocks) <= row


def test_dilated_lists_blocks_so_far_apart():
    rows = listed(BlockLists.dilated(2048, n_blocks=2, dilation=3))
    assert rows[10] == {10, 7, 4}
    assert listed(BlockLists.dilated(2048, n_blocks=1, dilation=2, causal=False))[10] == {8, 10, 12}


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_mean_pooled_scores_mean_queries_by_mean_keys(layout):
    q, k, _ = qkv(500, 700, torch.float32)
    pooled_q = torch.stack([x.mean(1) for x in q.split(64, 1)], 1)
    pooled_k = torch.stack([x.mean(1) for x in k.split(128, 1)], 1)
    scores = torch.einsum("bihd,bjhd->bhij", pooled_q, pooled_k.repeat_interleave(H // K, 2))
    expected = listed(BlockLists.top_k(scores, 3, n_queries=500, n_keys=700, block_q=64, causal=True, own=True))
    if layout == "bhtd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    assert listed(BlockLists.mean_pooled(q, k, 3, block_q=64, layout=layout)) == expected


POOLED = torch.zeros(2, 64, 1, 8)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: BlockLists.causal(0), ValueError, "n_queries is 0"),
        (lambda: BlockLists.causal(1.5), TypeError, "n_queries is 1.5"),
        (lambda: BlockLists.causal(128, block_q=32), ValueError, "block_q is 32"),
        (lambda: BlockLists.sliding_window(256, window=64), ValueError, "window is 64"),
        (lambda: BlockLists.sliding_window(256, window=128, n_sinks=4), ValueError, "n_sinks is 4"),
        (lambda: BlockLists.frames(256, tokens_per_frame=0), ValueError, "tokens_per_frame is 0"),
        (lambda: BlockLists.documents(torch.zeros(2), 256), TypeError, "cu_seqlens is torch.float32"),
        (lambda: BlockLists.documents(torch.zeros(2, 1, dtype=torch.int32), 256), ValueError, "cu_seqlens has shape"),
        (lambda: BlockLists.dilated(256, n_blocks=1, dilation=0), ValueError, "dilation is 0"),
        (lambda: BlockLists.big_bird(256, seed=-1), ValueError, "seed is -1"),
        (lambda: BlockLists.top_k(torch.zeros(1, 1, 2, 2), 3, n_queries=256), ValueError, "k is 3"),
        (lambda: BlockLists.top_k(torch.zeros(1, 1, 2, 3), 1, n_queries=256), ValueError, "scores has shape"),
        (lambda: BlockLists.top_k(torch.zeros(1, 1, 2, 2).int(), 1, n_queries=256), TypeError, "scores is torch.int32"),
        (lambda: BlockLists.from_mask(torch.zeros(1, 1, 2, 2)), TypeError, "mask is torch.float32"),
        (lambda: BlockLists.from_mask(torch.zeros(2, 2, dtype=torch.bool)), ValueError, "mask has shape"),
        (lambda: BlockLists.mean_pooled(torch.zeros(2, 2), torch.zeros(2, 2), 1), TypeError, "q has 2 dimensions"),
        (lambda: BlockLists.mean_pooled(POOLED, POOLED, 0), ValueError, "n_blocks is 0"),
        (lambda: BlockLists.mean_pooled(POOLED, POOLED[..., :4], 1), ValueError, "k has batch 2 and head dim 4"),
        (lambda: BlockLists.mean_pooled(POOLED, POOLED[:1], 1), ValueError, "k has batch 1 and head dim 8"),
    ],
)
def test_constructors_name_the_wrong_argument(make, error, words):
    with pytest.raises(error) as raised:
        make()
    assert words in str(raised.value)


def test_builders_say_how_many_blocks_a_program_takes():
    with pytest.raises(ValueError, match="n_keys is"):
        BlockLists.big_bird(64, (builders.MAX_BLOCKS + 1) * 64, block_k=64)


def test_two_range_encodings_take_lists():
    lists = draw_lists(B, H, 300, 300, (64, 128), 3, full=True)
    tensors = qkv(300, 300)
    ours = attention(*tensors, blocks=lists, position=ReRope(70), impl="reference")
    theirs = attention(*tensors, mask=expand_lists(lists, 300, 300), position=ReRope(70), impl="reference")
    assert torch.equal(ours, theirs)

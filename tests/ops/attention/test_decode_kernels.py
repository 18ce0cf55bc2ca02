"""The kernels for few queries and many keys against the reference in float64: in Triton's interpreter, or on a GPU."""

import math

import pytest
import torch
from helpers.modes import INTERPRETED, KERNEL_DTYPES, needs_kernels, on_gpu

from ropewalk.ops.attention import reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backends import REFERENCE
from ropewalk.ops.attention.tables import with_rows
from ropewalk.schemes import Alibi, ExpoSB, NoPosition, ReRope, Rope, SelfExtend
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

pytestmark = needs_kernels

B, H, HK, D = 3, 4, 2, 32
KEYS = 110 if INTERPRETED else 700
ROUNDINGS = 8  # results on the way that are rounded to the dtype: queries, scores, probabilities, what comes of them
SPLITS = [1, 3]


@pytest.fixture(scope="module")
def kernels():
    from ropewalk.ops.attention.triton import decode_launch

    return decode_launch


@pytest.fixture(params=SPLITS, ids=lambda splits: f"splits={splits}")
def cut(request, kernels, monkeypatch):
    """Cut the keys, however few, into so many splits."""
    monkeypatch.setattr(kernels, "count_splits", lambda *arguments: request.param)
    monkeypatch.setattr(kernels, "MIN_SPLIT", 16)
    return request.param


@pytest.fixture
def change_tiles(kernels, monkeypatch):
    """Change fields of the tiles that the launcher chooses."""
    choose_tiles = kernels.choose_tiles

    def change_tiles(**fields):
        monkeypatch.setattr(kernels, "choose_tiles", lambda *arguments: choose_tiles(*arguments)._replace(**fields))

    return change_tiles


def draw(device, dtype=torch.float32, queries=1, keys=KEYS, heads=H, key_heads=HK, head_dim=D, value_dim=None):
    q = torch.randn(B, heads, queries, head_dim, device=device).to(dtype)
    k = torch.randn(B, key_heads, keys, head_dim, device=device).to(dtype)
    v = torch.randn(B, key_heads, keys, value_dim or head_dim, device=device).to(dtype)
    return q, k, v


def check(kernels, tensors, **keywords):
    """The output and log-sum-exp, against the reference in float64 and in the tensors' dtype."""
    call = make_call(*tensors, layout="bhtd", **keywords)
    exact_out, exact_lse = REFERENCE.attend(reference.in_dtype(call, torch.float64))
    plain_out, plain_lse = reference.attend(call)
    q, _, v = tensors
    with unchanged(tensors), poisoned_memory():
        out, lse = kernels.forward(call)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert lse.dtype == torch.float32
    lse = lse * math.log(2)
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    finite = exact_lse.isfinite()
    lse, exact_lse, plain_lse = (torch.where(finite, x, 0) for x in (lse, exact_lse, plain_lse.float()))
    assert_close_to_truth(out, exact_out, plain_out, roundings=ROUNDINGS)
    assert_close_to_truth(lse, exact_lse, plain_lse, roundings=ROUNDINGS)
    return out


def integers(*numbers):
    return lambda device: torch.tensor(numbers, device=device)


def holes(shape, device):
    """A mask that leaves two keys of three, others for each of its rows; and to the very last row no key."""
    number = torch.arange(math.prod(shape), device=device).view(shape)
    rows = number // shape[-1]
    return ((number + rows) % 3 != 1) & ((rows < rows.max()) | (rows.max() == 0))


LENGTHS = {"key_lengths": integers(KEYS, 37, 1)}
STARTS = {"query_starts": integers(KEYS - 3, 33, 0)}
SCHEMES = {
    "none": NoPosition(),
    "rope": Rope(),
    "rope-partial-interleaved": Rope(rotary_dim=12, interleaved=True, attention_factor=1.1),
    "rope-blocks": Rope(rotary_dim=24, rotary_offset=3, pair_block=12),
    "alibi": Alibi(),
    "alibi-rows": Alibi(torch.tensor([[0.5, 0.1, 0.02, 0.3], [0.2, 0.4, 0.01, 1.0], [0.1, 0.0, 0.6, 0.05]])),
    "exposb": ExpoSB(),
    "exposb-decay": ExpoSB(distance_decay=True),
}
MASKS = {
    "full": {},
    "lengths": LENGTHS,
    "no-keys": {"key_lengths": integers(0, 16, 17)},
    "causal": {"causal": True},
    "causal-lengths": {"causal": True, **LENGTHS},
    "window": {"window": 40},
    "causal-window": {"causal": True, "window": 40},
    "window-left": {"window": (40, 0)},
    "window-sides": {"window": (50, 12), **STARTS},
    "window-ahead": {"window": (7, -1), **STARTS},
    "window-behind": {"window": (-1, 5), **STARTS},
    "before-the-keys": {"causal": True, "query_starts": integers(-1, 0, 4)},
    "starts": {"causal": True, **STARTS, "key_lengths": integers(KEYS, 36, 3)},
    "starts-window": {"causal": True, "window": 20, **STARTS},
    "starts-of-window": {"window": 20, **STARTS},
    "padding": {"key_starts": integers(0, 33, 108)},
    "causal-padding": {"causal": True, "key_starts": integers(0, 33, KEYS)},
    "causal-mask-of-keys": {"causal": True, "mask": lambda device: holes((B, 1, 1, KEYS), device)},
    "mask-of-pairs": {"mask": lambda device: holes((1, H, 3, KEYS), device) & holes((B, 1, 1, KEYS), device)},
    "mask-and-lengths": {**LENGTHS, "mask": lambda device: holes((1, 1, 1, KEYS), device)},
    "everything": {
        "causal": True,
        "window": 30,
        "key_starts": integers(0, 5, 40),
        "key_lengths": integers(KEYS, 37, 45),
        **STARTS,
        "softcap": 2.0,
        "sinks": lambda device: torch.randn(H, device=device),
    },
}


def resized(keywords, heads):
    """What depends on the number of heads."""
    by_head = {"sinks": (heads,), "mask": (1, heads, 3, KEYS)}
    return {
        name: torch.randn(shape, device=x.device) if name == "sinks" else holes(shape, x.device)
        for name, shape in by_head.items()
        if (x := keywords.get(name)) is not None
    }


def made(keywords, device):
    return {name: value(device) if callable(value) else value for name, value in keywords.items()}


@pytest.mark.parametrize("cut", SPLITS[1:], indirect=True)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_under_every_mask(kernels, device, cut, scheme, mask):
    check(kernels, draw(device, queries=3), position=SCHEMES[scheme], **made(MASKS[mask], device))


FAR_SCHEMES = {
    "rerope": ReRope(40),
    "rerope-partial": ReRope(1, log_n=8, rope=Rope(rotary_dim=8, rotary_offset=4, attention_factor=1.1)),
    "leaky": ReRope(17, leak=3.5, rope=Rope(interleaved=True)),
    "self-extend": SelfExtend(30, 4),
    "blocks": ReRope(17, leak=3.5, rope=Rope(pair_block=16)),
    "never-far": ReRope(KEYS),
}


@pytest.mark.parametrize("mask", [name for name, keywords in MASKS.items() if "causal" in keywords])
@pytest.mark.parametrize("scheme", FAR_SCHEMES)
def test_near_and_far_keys_that_are_not_mapped_yet(kernels, device, cut, scheme, mask):
    for queries in (1, 3):
        check(kernels, draw(device, queries=queries), position=FAR_SCHEMES[scheme], **made(MASKS[mask], device))


@pytest.mark.parametrize("mask", MASKS)
def test_loops_with_and_without_masks_agree(kernels, device, cut, change_tiles, mask):
    change_tiles(split_masked_loop=True)
    check(kernels, draw(device, queries=3), position=SCHEMES["exposb-decay"], **made(MASKS[mask], device))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "none"])
def test_keys_may_be_rotated_already(kernels, device, cut, scheme, rotated):
    check(kernels, draw(device, queries=2), position=SCHEMES[scheme], causal=True, keys_rotated=rotated)


@pytest.mark.parametrize("queries", [1, 3, 17, 45])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (5, 1)], ids=str)
def test_rows_of_all_heads_that_share_keys(kernels, device, cut, heads, queries):
    tensors = draw(device, queries=queries, keys=60, heads=heads[0], key_heads=heads[1])
    for keywords in ({"position": Rope()}, {"position": Alibi(), "causal": True, "window": 50}):
        check(kernels, tensors, **keywords)


@pytest.mark.parametrize("dims", [(16, 16), (24, 40), (40, 24), (80, 80), (96, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_dtype_and_head_dim(kernels, device, cut, dtype, dims):
    tensors = draw(device, dtype, 2, head_dim=dims[0], value_dim=dims[1])
    lengths = torch.tensor([KEYS, 40, 9], device=device)
    for scheme in (Rope(), Rope(interleaved=True), Rope(rotary_dim=8, rotary_offset=dims[0] - 8)):
        check(kernels, tensors, position=scheme, causal=True, key_lengths=lengths)


def test_positions_are_the_callers(kernels, device, cut):
    tensors = draw(device, queries=3)
    positions_q = torch.randint(0, 200, (B, 3), device=device)
    positions_k = torch.randint(0, 200, (1, KEYS), dtype=torch.int32, device=device)
    far = 2**24 + 1  # float32 knows no odd numbers there
    starts = {"key_starts": torch.tensor([0, 5, 33], device=device)}
    for scheme in ("rope", "alibi"):
        for positions in (
            {"positions_q": positions_q},
            {"positions_k": positions_k},
            {"positions_q": positions_q[:1] + far, "positions_k": positions_k.expand(B, -1) + far},
        ):
            check(kernels, tensors, position=SCHEMES[scheme], causal=True, **positions)
        check(kernels, tensors, position=SCHEMES[scheme], positions_q=positions_q, **starts)


@pytest.mark.parametrize("softcap", [0.1, 1.0, 50.0])
@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
def test_scores_are_capped(kernels, device, cut, softcap, scale):
    for scheme in ("none", "alibi"):
        check(kernels, draw(device), position=SCHEMES[scheme], softcap=softcap, scale=scale)


@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_any_scale(kernels, device, cut, scale):
    check(kernels, draw(device), scale=scale)


def test_sinks_count_once(kernels, device, cut):
    sinks = torch.tensor([-math.inf, 8.0, 0.0, -5.0], device=device)
    for keywords in ({}, {"key_lengths": torch.tensor([KEYS, 0, 1], device=device)}):
        out = check(kernels, draw(device, queries=2), position=Rope(), sinks=sinks, **keywords)
    assert not out[1].any()


def test_rows_that_attend_nothing_are_zero(kernels, device, cut):
    tensors = draw(device, queries=5)
    out = check(kernels, tensors, causal=True, query_starts=torch.tensor([40, 0, 3], device=device),
                key_starts=torch.tensor([42, 0, 30], device=device))  # fmt: skip
    assert not out[0, :, :2].any()
    assert not out[2].any()


def paged(x, page_size, order, extra):
    """x (B, K, T, D) in pages (pages, K, page_size, D), the page i of all in place order[i]; the rest is NaN."""
    pieces = x.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1)
    pages = torch.full((len(order) + extra, *pieces.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    pages[order] = pieces
    return pages


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(
    "page_size", [1, 16, 32, 256, *(pytest.param(x, marks=pytest.mark.slow) for x in (24, 64, 128))]
)
def test_pages_hold_what_a_contiguous_cache_holds(kernels, device, cut, change_tiles, page_size, token_major):
    change_tiles(block_n=32 if INTERPRETED else 64)
    pages_of_row = 2 if page_size == 256 else 256 // page_size
    keys = pages_of_row * page_size
    q, k, v = draw(device, queries=2, keys=keys)
    # Beyond its length a row's pages hold anything, and its table points anywhere.
    lengths = [min(keys, 193), page_size, page_size + 1]
    for row, length in enumerate(lengths):
        k[row, :, length:] = v[row, :, length:] = torch.nan
    order = torch.randperm(B * pages_of_row, device=device)
    table = order.view(B, pages_of_row).int()
    for row, length in enumerate(lengths):
        table[row, -(-length // page_size) :] = torch.tensor([-1, 10**9], device=device)[row % 2]
    pages_k, pages_v = (paged(x, page_size, order, 3) for x in (k, v))
    if token_major:
        pages_k, pages_v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (pages_k, pages_v))
    key_lengths = torch.tensor(lengths, device=device)
    starts = {"causal": True, "query_starts": key_lengths - 2}
    for scheme, keywords in (
        (SCHEMES["rope"], {**starts, "keys_rotated": True}),
        (SCHEMES["alibi"], {"window": 30, "key_starts": torch.tensor([3, 0, 15], device=device)}),
        (SCHEMES["rope"], starts),
        (FAR_SCHEMES["rerope"], starts),
        (FAR_SCHEMES["leaky"], {**starts, "window": 60}),
    ):
        keywords = {"position": scheme, "key_lengths": key_lengths, **keywords}
        expected = check(kernels, (q, k, v), **keywords)
        call = make_call(q, pages_k, pages_v, block_table=table, layout="bhtd", **keywords)
        with unchanged([q, pages_k, pages_v, table]), poisoned_memory():
            assert kernels.supports(call)
            out, _ = kernels.forward(call)
        if call.tables.k is not None and call.far is None:  # a dense cache is rotated before, and rounded
            torch.testing.assert_close(out, expected)
        else:
            assert torch.equal(out, expected)


def test_a_table_may_lie_anyhow_and_its_numbers_are_never_trusted(kernels, device, cut):
    q, k, v = draw(device, keys=64)
    pages_k, pages_v = (paged(x, 16, torch.arange(12, device=device), 0) for x in (k, v))
    table = torch.arange(12, device=device).view(4, 3).mT  # (B, 4), int64: columns apart
    table = table.flip(0)[:, [2, 0, 3, 1]]
    lengths = torch.tensor([64, 17, 0], device=device)
    rows = (table[..., None] * 16 + torch.arange(16, device=device)).flatten(1)  # where each key lies
    k, v = (x.transpose(0, 1).flatten(1, 2)[:, rows].transpose(0, 1) for x in (k, v))
    expected = check(kernels, (q, k, v), key_lengths=lengths)
    call = make_call(q, pages_k, pages_v, key_lengths=lengths, block_table=table, layout="bhtd")
    assert torch.equal(kernels.forward(call)[0], expected)
    # A device's numbers are not checked: whatever they are, what is read lies inside of the pages.
    wild = torch.tensor([[2**31 - 1, -(2**31), 12, -1]] * B, device=device)
    out, _ = kernels.forward(call._replace(block_table=wild, key_lengths=lengths + 10**6))
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("split_masked_loop", [False, True])
def test_missing_keys_are_not_read(kernels, device, cut, change_tiles, split_masked_loop):
    change_tiles(split_masked_loop=split_masked_loop)
    q, k, v = draw(device, queries=2)
    starts, lengths = [0, 33, 16], [KEYS, 100, 20]
    for row, (start, stop) in enumerate(zip(starts, lengths, strict=True)):
        for x in (k, v):
            x[row, :, :start] = x[row, :, stop:] = torch.nan
    for keywords in ({}, {"causal": True, "query_starts": torch.tensor([80, 97, 18], device=device)}):
        check(kernels, (q, k, v), position=Rope(), key_starts=torch.tensor(starts, device=device),
              key_lengths=torch.tensor(lengths, device=device), **keywords)  # fmt: skip


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_is_seen_where_the_definition_has_it(kernels, device, cut, which):
    """A row whose sum is NaN attends, and must not pass for one that attends nothing."""
    tensors = draw(device, queries=2)
    tensors[which][1, 0, 1, 3] = torch.nan
    call = make_call(*tensors, position=Rope(), causal=True, layout="bhtd")
    expected_out, expected_lse = REFERENCE.attend(call)
    out, lse = kernels.forward(call)
    assert torch.equal(out.isnan(), expected_out.isnan())
    assert torch.equal(lse.isnan(), expected_lse.isnan())


def test_any_strides(kernels, device, cut):
    fused = torch.randn(B, KEYS, H + 2 * HK, 40, device=device)
    q, k, v = (x.transpose(1, 2) for x in fused.split([H, HK, HK], dim=2))
    numbers = torch.tensor([KEYS, 0, 40, 0, 9, 0], device=device)[::2]
    positions = torch.randint(0, 100, (2, B), device=device).mT
    sinks = torch.randn(2 * H, device=device)[::2]
    tensors = (q[:, :, -2:], k, v)
    not_dense = [x.mT.contiguous().mT for x in tensors]  # in their features
    not_aligned = [x[..., 1:31] for x in tensors]  # with 16 bytes
    for case in (tensors, not_dense, not_aligned):
        check(kernels, case, position=Alibi(), key_lengths=numbers, sinks=sinks, positions_q=positions)
        check(kernels, case, position=Rope(rotary_dim=10), causal=True)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (1, 1), (2, 16), (1, 33)])
def test_lengths_around_nothing(kernels, device, cut, queries, keys):
    for sinks in (None, torch.randn(H, device=device)):
        check(kernels, draw(device, queries=queries, keys=keys), position=Rope(), causal=True, sinks=sinks)


def test_the_same_bits_every_time(kernels, device, cut):
    q, k, v = draw(device, torch.float16)
    call = make_call(q, k, v, position=Rope(), causal=True, layout="bhtd")
    runs = [kernels.forward(call) for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


MANY = 9


@pytest.fixture
def many_splits(kernels, monkeypatch):
    """Cut the keys into many splits, and combine two of them at a time."""
    monkeypatch.setattr(kernels, "count_splits", lambda *arguments: MANY)
    monkeypatch.setattr(kernels, "MIN_SPLIT", 16)
    monkeypatch.setattr(kernels, "COMBINED_AT_ONCE", 2)


@pytest.mark.parametrize("mask", ["full", "no-keys", "window-sides", "causal-padding", "mask-of-pairs", "everything"])
def test_many_splits_are_combined(kernels, device, many_splits, mask):
    keywords = made(MASKS[mask], device)
    schemes = [SCHEMES["rope"], SCHEMES["alibi"]]
    if keywords.get("causal"):
        schemes.append(FAR_SCHEMES["leaky"])
    for scheme in schemes:
        check(kernels, draw(device, queries=3, heads=6), position=scheme, **{**keywords, **resized(keywords, 6)})
        check(kernels, draw(device, queries=3, heads=2), position=scheme, **{**keywords, **resized(keywords, 2)})


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scheme", ["rope", "rope-partial-interleaved"])
def test_rows_of_a_whole_table(kernels, device, cut, scheme, causal):
    """Queries find the same rows, and so the same bits, as where they were gathered before."""
    tensors = draw(device, queries=3)
    starts, padding = torch.tensor([KEYS - 3, 33, 8], device=device), torch.tensor([0, 30, 6], device=device)
    for keywords in (
        {},
        {"query_starts": starts},
        {"key_starts": padding},
        {"query_starts": starts, "key_starts": padding, "key_lengths": starts + 3},
    ):
        keywords = {"position": SCHEMES[scheme], "keys_rotated": True, "causal": causal, **keywords}
        tame = make_call(*tensors, layout="bhtd", **keywords)
        wild = torch.tensor([10**6, -(10**6), 2**30], device=device)  # a device's numbers are not checked
        for call in (tame, tame._replace(query_starts=wild)):
            assert call.tables.q_start is not None
            expected = kernels.forward(with_rows(call))
            assert all(torch.equal(x, y) for x, y in zip(kernels.forward(call), expected, strict=True))
        check(kernels, tensors, **keywords)


def test_splits_are_counted_from_shapes(kernels):
    count = kernels.count_splits
    assert count(512, 8192, 16, 132) == 8  # a batch of 64 with 8 key heads: by the longest row
    assert count(8, 8192, 16, 132) == 17  # one row: all processors read
    assert count(8, 100, 16, 132) == 1
    assert count(4096, 8192, 128, 132) == 1  # a prompt's chunk
    assert count(512, 2**20, 16, 132) <= 64 * 132 // 512  # a table far longer than its rows


def test_supported_calls(kernels, device):
    def supports(tensors, **keywords):
        return kernels.supports(make_call(*tensors, layout="bhtd", **keywords))

    decode = draw(device, keys=256)
    assert supports(decode, position=Rope(), causal=True, window=5, sinks=torch.zeros(H, device=device), softcap=1.0)
    assert supports(draw(device, keys=256, queries=32))
    assert not supports(draw(device, keys=256, queries=33))
    assert supports(draw(device, keys=255))
    assert not supports(draw(device, keys=255, queries=2))
    assert supports(decode, mask=torch.ones(1, 256, dtype=torch.bool, device=device))
    pages = [x.unflatten(2, (-1, 16)).transpose(1, 2).flatten(0, 1) for x in decode[1:]]
    table = torch.zeros(B, 4, dtype=torch.int32, device=device)
    lengths = torch.ones(B, dtype=torch.int64, device=device)
    for keys_rotated in (True, False):
        keywords = {"keys_rotated": keys_rotated, "block_table": table, "key_lengths": lengths}
        assert supports((decode[0], *pages), position=Rope(), **keywords)
    assert supports(decode, position=ReRope(20), causal=True)
    assert not supports(decode, position=ReRope(20))
    assert not supports(decode, position=ReRope(20), causal=True, positions_q=torch.zeros(1, 1, device=device).long())


@on_gpu
@pytest.mark.parametrize("rows", [1, 4, 30, 50, 300])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_configuration(kernels, device, dtype, head_dim, rows):
    tensors = draw(device, dtype, rows, 3000, head_dim=head_dim)
    lengths = torch.tensor([3000, 1300, 1], device=device)
    for keywords in (
        {"position": Rope(), "key_lengths": lengths},
        {"position": Rope(interleaved=True), "causal": True, "softcap": 20.0},
        {"position": Alibi(), "window": 300, "causal": True, "sinks": torch.randn(H, device=device)},
        {"position": ReRope(600), "causal": True, "key_lengths": lengths},
        {"position": SelfExtend(64, 8, rope=Rope(interleaved=True)), "causal": True},
    ):
        check(kernels, tensors, **keywords)


@on_gpu
@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_strides_past_two_to_the_31(kernels, device, dimension):
    """Batches, heads or tokens more than 2³¹ elements apart."""
    shape, far = (2, 2, 2, 64), 2**31 + 8
    strides = [4096 * 3, 4096, 64, 1]
    strides[dimension] = far
    memory = torch.empty(far + 4096 * 6, dtype=torch.float16, device=device)

    def place(x):
        return memory.as_strided(shape, strides).copy_(x)

    q, k, v = (torch.randn(shape, device=device).half() for _ in range(3))
    call = make_call(q, k, v, position=Rope(), keys_rotated=True, layout="bhtd")
    expected = kernels.forward(call)
    for index in range(3):
        name = "qkv"[index]
        result = kernels.forward(call._replace(**{name: place(getattr(call, name))}))
        for x, y in zip(result, expected, strict=True):  # another binary, which may contract other sums
            torch.testing.assert_close(x, y, rtol=2e-3, atol=1e-3)


@on_gpu
def test_a_graph_replays_with_other_lengths(kernels, device):
    tensors = draw(device, torch.float16, keys=3000)
    lengths = torch.tensor([3000, 1, 7], device=device)
    call = make_call(*tensors, position=Rope(), key_lengths=lengths, layout="bhtd")
    kernels.forward(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = kernels.forward(call)
    lengths.copy_(torch.tensor([5, 2999, 0], device=device))
    graph.replay()
    assert torch.equal(out, kernels.forward(call)[0])

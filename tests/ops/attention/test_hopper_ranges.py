"""Far pairs by positions per token in the kernels for Hopper: lists in the interpreter, and all results on a GPU."""

from __future__ import annotations

import pytest
import torch
from helpers.far_schemes import CAUSAL, SCHEMES, Jump
from helpers.hopper_calls import (
    GLUON,
    LENGTHS,
    TK,
    TQ,
    VARIANTS,
    B,
    H,
    K,
    check_supported,
    check_what_is_read,
    compute,
    draw,
    integers,
    on_hopper,
    pack,
    random_grad,
)
from helpers.modes import needs_kernels

from ropewalk import ReRope, Rope, SelfExtend, attention
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.call import token_indices
from ropewalk.testing import poisoned_memory

triton = pytest.importorskip("triton")

ORIGIN = 10**12  # the positions that lists are made of need more than 32 bits


def in_order(device, *shape):
    """Positions that grow by 0 to 3 from token to token."""
    return torch.randint(0, 4, shape, device=device).cumsum(-1) + ORIGIN


def shuffled(device, *shape):
    """Positions of which a block may have all."""
    return torch.randint(0, 400, shape, device=device) + ORIGIN


def runs(device, *shape):
    """Positions that begin anew every so many tokens, as those of documents in one row do."""
    return (torch.arange(shape[-1], device=device) % 170).expand(shape) + ORIGIN


KINDS = {"in order": in_order, "shuffled": shuffled, "runs": runs}


# Lists


def of_pairs(call, window):
    """By range, whether each pair is in it, (B or 1, Tq, Tk)."""
    distance = call.positions_q[:, :, None] - call.positions_k[:, None]
    return {1: distance.abs() < window, 2: distance >= window, 3: distance <= -window}


def positions_of(kind, device, *shape):
    """Positions of a kind; some with gaps between them in memory, of 32 bits."""
    made = KINDS[kind](device, *shape)
    return made if kind == "in order" else (made - ORIGIN).int().repeat_interleave(2, -1)[..., ::2]


def call_with(kind, device, queries, keys, **keywords):
    tensors = [torch.zeros(B, H, n, 64, device=device, dtype=torch.float16) for n in (queries, keys, keys)]
    given = {"positions_q": positions_of(kind, device, B, queries), "positions_k": positions_of(kind, device, 1, keys)}
    return make_call(*tensors, position=ReRope(90), layout="bhtd", **given, **keywords)


def check_lists(lists, in_range, exists, of, first_line=0):
    """That lines of one batch row hold each pair of a range once; whole blocks no other pair that exists; others some.

    Returns how many blocks of each kind have no pair of the range.
    """
    seen, block, idle = torch.zeros_like(in_range, dtype=torch.int32), 128, [0, 0]
    for line in range(-(-in_range.shape[0 if of == "rows" else 1] // block)):
        n_full, n_partial, *others = lists[first_line + line].tolist()
        for place, other in enumerate(others[: n_full + n_partial]):
            row, column = (line, other) if of == "rows" else (other, line)
            own = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
            seen[own] += 1
            assert bool((in_range | ~exists)[own].all()) == (place < n_full)
            idle[place >= n_full] += not bool((in_range & exists)[own].any())
    assert bool((seen <= 1).all())
    assert bool(seen[in_range & exists].all())
    return idle


@needs_kernels
@pytest.mark.parametrize("of", ["rows", "columns"])
@pytest.mark.parametrize("sizes", [(300, 620), (256, 128), (1, 129)], ids=str)
@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_ranges(device, kind, bounds, sizes, of):
    from ropewalk.ops.attention.hopper.ranges import list_ranges

    queries, keys = sizes
    window = {"in order": 90, "shuffled": 200, "runs": 90}[kind]
    given = {}
    if bounds:
        given = {"key_starts": integers(device, 0, 100), "key_lengths": integers(device, keys, 110)}
    call = call_with(kind, device, queries, keys, **given)
    call = call._replace(far=call.far._replace(window=window))
    with poisoned_memory():
        lists = list_ranges(call, of, None)
    for tokens, copied, given in ((queries, lists.slots, call.positions_q), (keys, lists.k_pos, call.positions_k)):
        assert torch.equal(copied[:, :tokens], given.long())
        assert copied.shape[1] >= tokens + 127
    index = token_indices(call).keys
    exists = torch.ones(B, 1, keys, dtype=torch.bool, device=device)
    if bounds:
        exists = (index[:, None] >= call.key_starts[:, None, None]) & (index[:, None] < call.key_lengths[:, None, None])
    for number, in_range in of_pairs(call, window).items():
        for row in range(B):
            existing = exists[row].expand(queries, keys)
            idle = check_lists(lists.ptr[row, number - 1], in_range[row], existing, of)
            assert idle == [0, 0] or (number == 1 and idle[0] == 0)  # near pairs may lack between far ones


@needs_kernels
@pytest.mark.parametrize("of", ["rows", "columns"])
@pytest.mark.parametrize("kind", KINDS)
def test_lists_of_packed_sequences(device, kind, of):
    from ropewalk.ops.attention.hopper.ranges import BLOCK, list_ranges
    from ropewalk.ops.attention.triton.launch_common import schedule_tiles
    from ropewalk.ops.launch.steps import AT_ONCE

    (q, k, v), starts = pack(device, *LENGTHS["different"])
    given = {f"positions_{name}": positions_of(kind, device, len(x)) for name, x in (("q", q), ("k", k))}
    call = make_call(q, k, v, position=ReRope(40), layout="thd", **given, **starts)
    side = "q" if of == "rows" else "k"
    packed, _ = schedule_tiles(call, side, 1, len(q) if of == "rows" else len(k), BLOCK, AT_ONCE)
    with poisoned_memory():
        lists = list_ranges(call, of, packed).ptr
    bounds_q, bounds_k = (starts[f"cu_seqlens_{name}"].tolist() for name in "qk")
    own = bounds_q if of == "rows" else bounds_k
    for number, in_range in of_pairs(call, 40).items():
        for i in range(len(own) - 1):
            pairs = in_range[0, bounds_q[i] : bounds_q[i + 1], bounds_k[i] : bounds_k[i + 1]]
            idle = check_lists(lists[0, number - 1], pairs, torch.ones_like(pairs), of, own[i] // BLOCK + i)
            assert idle == [0, 0] or (number == 1 and idle[0] == 0)


# On a GPU


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request):
    return VARIANTS[request.param]


def given(kind, device, queries=TQ, keys=TK):
    """Positions of the queries of each row, and of the keys of all rows."""
    make = KINDS[kind]
    return {"positions_q": make(device, B, queries), "positions_k": make(device, 1, keys)}


@on_hopper
@pytest.mark.parametrize(
    ("scheme", "causal"), [*((name, False) for name in SCHEMES), *((name, True) for name in CAUSAL)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_scheme(kernels, device, scheme, head_dim, causal):
    tensors = draw(device, head_dim=head_dim)
    check_supported(kernels, tensors, position=SCHEMES[scheme], causal=causal, **given("shuffled", device))


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 64, 129, 200, 2**40])
def test_windows(kernels, device, window, kind, head_dim, causal):
    tensors = draw(device, queries=333, head_dim=head_dim)
    scheme = Jump(window, rope=Rope(attention_factor=1.2))
    check_supported(kernels, tensors, position=scheme, causal=causal, **given(kind, device, 333))


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys"), [(64, 1500), (1500, 64), (1000, 1000), (513, 1025), (128, 129), (17, 500)]
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(kernels, device, head_dim, queries, keys, causal):
    tensors = draw(device, queries=queries, keys=keys, head_dim=head_dim)
    check_supported(kernels, tensors, position=Jump(100), causal=causal, **given("in order", device, queries, keys))


@on_hopper
def test_positions_of_indices_are_indices(device):
    """The same numbers as without positions, but for the order of sums."""
    tensors = draw(device, queries=1000, keys=1000, head_dim=128)
    steps = torch.arange(1000, device=device)[None]
    by_index = make_call(*tensors, position=ReRope(300), causal=True, layout="bhtd")
    by_positions = make_call(
        *tensors, position=ReRope(300), causal=True, layout="bhtd", positions_q=steps, positions_k=steps
    )
    grad_out = random_grad(by_index)
    for mine, other in zip(compute(GLUON, by_positions, grad_out), compute(GLUON, by_index, grad_out), strict=True):
        torch.testing.assert_close(mine, other)


@on_hopper
@pytest.mark.parametrize("dims", [(24, 40), (64, 128), (96, 96), (128, 64)], ids=str)
@pytest.mark.parametrize("scheme", [ReRope(70), SelfExtend(70, 4, rope=Rope(interleaved=True))], ids=str)
def test_head_dims(kernels, device, scheme, dims):
    tensors = draw(device, head_dim=dims[0], v_head_dim=dims[1])
    check_supported(kernels, tensors, position=scheme, causal=True, **given("in order", device))


@on_hopper
@pytest.mark.parametrize("heads", [(6, 6), (6, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_heads_share_keys(kernels, device, heads, dtype):
    tensors = draw(device, dtype, heads=heads[0], key_heads=heads[1])
    check_supported(kernels, tensors, position=ReRope(70), causal=True, **given("runs", device))


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "call",
    [
        {"causal": True, "window": 150},
        {"window": (100, 30)},
        {"causal": True, "softcap": 3.0, "sinks": [0.3, -torch.inf, 4.0, -20.0]},
        {"key_lengths": [TK, 130], "key_starts": [0, 70]},
        {"causal": True, "key_starts": [0, 300], "key_lengths": [200, TK]},
        {"key_lengths": [0, 1]},
        {"dropout_p": 0.3},
    ],
    ids=str,
)
def test_what_else_a_call_asks(kernels, device, head_dim, call):
    tensors = {name: torch.tensor(value, device=device) for name, value in call.items() if isinstance(value, list)}
    positions = given("in order", device)
    check_supported(kernels, draw(device, head_dim=head_dim), position=Jump(50), **positions, **(call | tensors))


@on_hopper
@pytest.mark.parametrize("name", ["positions_q", "positions_k"])
def test_positions_of_one_side(kernels, device, name):
    positions = {name: given("in order", device)[name] - ORIGIN}
    check_supported(kernels, draw(device), position=Jump(50), **positions)


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scheme", [Jump(60), ReRope(60, rope=Rope(rotary_dim=24))], ids=["jump", "partial"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences(kernels, device, lengths, scheme, head_dim, causal):
    tensors, starts = pack(device, *LENGTHS[lengths], head_dim=head_dim)
    positions = {
        name: in_order(device, len(x)) for name, x in (("positions_q", tensors[0]), ("positions_k", tensors[1]))
    }
    check_supported(kernels, tensors, layout="thd", position=scheme, causal=causal, **starts, **positions)


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_lies_outside_starts_and_lengths_is_not_read(kernels, device, head_dim):
    check_what_is_read(kernels, draw(device, queries=TK, head_dim=head_dim), Jump(50), **given("runs", device, TK))


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_thousand_launches_give_the_same_bits(device, head_dim):
    tensors = draw(device, queries=700, keys=700, head_dim=head_dim)
    positions = given("in order", device, 700, 700)
    call = make_call(*tensors, position=ReRope(200), causal=True, layout="bhtd", **positions)
    out, saved = GLUON.forward(call, True)
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(1000):
        again, saved_again = GLUON.forward(call, True)
        differs |= (again != out).any() | (saved_again.lse != saved.lse).any()
    assert not bool(differs)


@on_hopper
@pytest.mark.parametrize("layout", ["bthd", "thd"])
def test_a_graph_replays_other_positions(device, layout):
    """Nothing waits for the device, and lists are made anew."""
    shapes = [(B, 333, heads, 64) for heads in (H, K, K)]
    tensors = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    positions = in_order(device, B, 333)
    call = {"position": ReRope(70), "causal": True, "impl": "gluon", "layout": layout}
    if layout == "thd":
        tensors, positions = [x.flatten(0, 1) for x in tensors], positions.flatten()
        call["cu_seqlens_q"] = integers(device, 0, 65, 600)
    tensors = [x.contiguous().requires_grad_() for x in tensors]
    weights = torch.randn_like(tensors[0])

    def step():
        out = attention(*tensors, positions_q=positions, positions_k=positions, **call)
        return out, *torch.autograd.grad((out * weights).sum(), tensors)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for kind in KINDS.values():
        with torch.no_grad():
            for x in (*tensors, weights):
                x.copy_(torch.randn_like(x))
            positions.copy_(kind(device, *positions.shape))
        graph.replay()
        for mine, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(mine, expected)

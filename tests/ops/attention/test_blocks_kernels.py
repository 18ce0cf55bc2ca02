"""The Triton kernels over lists of blocks, against the reference with the expanded mask in float64."""

import pytest
import torch
from helpers.block_lists import draw_lists, expand_lists, to_device
from helpers.kinds import kinds_of
from helpers.modes import KERNEL_DTYPES, ON_GPU, needs_kernels
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils.checkpoint import checkpoint

from ropewalk import Alibi, BlockLists, ExpoSB, QKNorm, ReRope, Rope, SelfExtend, T5Bias, attention
from ropewalk.ops.attention import dropout, reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.blocks import builders
from ropewalk.ops.attention.blocks.tables import find_tables
from ropewalk.ops.attention.call import flatten
from ropewalk.ops.attention.gate.operation import gate_plainly
from ropewalk.ops.attention.plans.planned import PlannedCall
from ropewalk.ops.launch import kinds
from ropewalk.ops.launch.kinds import KINDS
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

pytestmark = needs_kernels
B, D, DV = 2, 16, 24
H, K = (4, 2) if ON_GPU else (2, 1)  # the interpreter's time is that of its programs
ROUNDINGS = 4
SLOW = pytest.mark.slow  # of tests in which several calls are interpreted


def qkv(queries, keys, dtype, device, *, dims=(D, DV), heads=H):
    generator = torch.Generator().manual_seed(7)
    shapes = ((B, queries, heads, dims[0]), (B, keys, K, dims[0]), (B, keys, K, dims[1]))
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def results(tensors, grads, impl, learned=(), **keywords):
    """The output, the finite log-sum-exp, and all gradients; "stepwise" rounds each step to the dtype."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    if impl == "stepwise":
        gate = keywords.pop("gate", None)
        out, lse = reference.attend(make_call(*leaves, **keywords))
        out = out.transpose(1, 2) if gate is None else gate_plainly(out.transpose(1, 2), gate)
    else:
        out, lse = attention(*leaves, impl=impl, return_lse=True, **keywords)
    finite = torch.where(lse.isfinite(), lse, 0)
    total = (out * grads[0].to(out.dtype)).sum(dtype=torch.float64) + (finite * grads[1]).sum(dtype=torch.float64)
    return [out, finite, *torch.autograd.grad(total, (*leaves, *learned))], lse


def compare(lists, mask, queries, keys, dtype, device, *, of_lists=None, dims=(D, DV), learn=None, **keywords):
    """Compare kernels over lists with the reference and a mask: in float64, and in the dtype for the error's bound."""
    tensors = qkv(queries, keys, dtype, device, dims=dims)
    grads = [torch.randn(B, queries, H, dims[1], device=device), torch.randn(B, H, queries, device=device)]
    mask = mask.to(device)
    if "mask" in keywords:
        mask = mask & keywords["mask"]

    def run(impl, x_dtype, **masks):
        given = {**keywords, **masks}
        learned = []
        if learn is not None:
            given["position"], learned = learn(torch.float64 if x_dtype == torch.float64 else torch.float32)
        if given.get("sinks") is not None:
            given["sinks"] = given["sinks"].to(x_dtype).requires_grad_()
            learned.append(given["sinks"])
        if given.get("gate") is not None:
            given["gate"] = given["gate"].to(x_dtype).requires_grad_()
            learned.append(given["gate"])
        return results([x.to(x_dtype) for x in tensors], grads, impl, learned, **given)

    with unchanged([*tensors, *(of_lists or ())]), poisoned_memory():
        ours, lse = run("triton", dtype, blocks=lists)
    truth, true_lse = run("reference", torch.float64, mask=mask)
    baseline, _ = run("stepwise", dtype, mask=mask)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(true_lse))
    for name, actual, expected, rounded in zip(
        ("out", "lse", "dq", "dk", "dv", *("learned",) * 9), ours, truth, baseline, strict=False
    ):
        assert not actual.isnan().any(), name
        if name == "lse":  # the kernels' is float32 for every dtype
            rounded = rounded.float()
        assert_close_to_truth(actual, expected, rounded, roundings=ROUNDINGS)


def slopes(dtype):
    values = torch.linspace(0.01, 0.1, H, dtype=dtype).requires_grad_()
    return Alibi(values), [values]


def biases(dtype):
    table = torch.linspace(-1, 1, 8 * H, dtype=dtype).view(8, H).requires_grad_()
    return T5Bias(table, max_distance=64), [table]


CALLS = {
    "plain": {},
    "causal": {"causal": True, "position": Rope()},
    "window": {"window": (70, 30), "position": Rope(interleaved=True)},
    "alibi": {"position": Alibi(), "softcap": 5.0},
    "exposb": {"position": ExpoSB(distance_decay=True), "causal": True},
    "rerope": {"position": ReRope(60)},
    "rerope causal": {"position": ReRope(60), "causal": True, "dims": (D, D)},
    "leaky": {"position": ReRope(40, leak=4.0), "causal": True},
    "self-extend": {"position": SelfExtend(40, 4), "causal": True},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])[:H], "causal": True},
    "lengths": {"key_lengths": torch.tensor([150, 0]), "key_starts": torch.tensor([3, 0])},
    "starts": {"query_starts": torch.tensor([20, -5]), "causal": True},
    "learned slopes": {"learn": slopes},
    "learned table": {"learn": biases, "causal": True},
    "gate": {"gate": torch.linspace(-2, 2, B * 170 * H * DV).view(B, 170, H, DV)},
}


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("blocks", [(64, 128), (128, 64)])
@pytest.mark.parametrize("name", CALLS)
def test_random_lists(device, name, blocks, dtype):
    lists = draw_lists(B, H, 170, 200, blocks, 4, seed=len(name), full=True)
    mask = expand_lists(lists, 170, 200)
    keywords = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in CALLS[name].items()}
    compare(to_device(lists, device), mask, 170, 200, dtype, device, **keywords)


@pytest.mark.parametrize("blocks", [(64, 64), (128, 128)])
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (1, H), (B, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lists_of_all_rows_or_heads(device, blocks, batch, heads, dtype):
    lists = draw_lists(batch, heads, 200, 130, blocks, 3, dtype=dtype)
    mask = expand_lists(lists, 200, 130)
    given = to_device(lists, device)
    compare(given, mask, 200, 130, torch.float32, device, of_lists=[given.counts, given.indices], position=Rope())


@pytest.mark.parametrize("kind", ["none", "one block", "all blocks", "all blocks, backwards and twice"])
def test_few_and_all_blocks(device, kind):
    counts, indices = torch.zeros(1, 1, 3, dtype=torch.int32), torch.full((1, 1, 3, 8), -1, dtype=torch.int32)
    if kind == "one block":
        counts[..., 1], indices[..., 1, 0] = 1, 2
    elif kind != "none":
        order = [0, 1, 2, 3] if kind == "all blocks" else [3, 3, 2, 1, 0, 0, 2, 1]
        counts[:] = len(order)
        indices[..., : len(order)] = torch.tensor(order)
    lists = BlockLists(counts, indices, None, None, 64, 64)
    compare(to_device(lists, device), expand_lists(lists, 150, 200), 150, 200, torch.float32, device, causal=True)


@pytest.mark.parametrize(
    "keywords",
    [{"causal": True, "position": Rope()}, *(pytest.param(x, marks=SLOW) for x in ({"position": ReRope(50)}, {}))],
    ids=["rope", "rerope", "plain"],
)
def test_all_blocks_give_the_bits_of_no_lists(device, keywords):
    tensors = qkv(200, 200, torch.float32, device)
    grads = [torch.randn(B, 200, H, DV, device=device), torch.randn(B, H, 200, device=device)]
    lists = BlockLists(
        torch.full((1, 1, 2), 2, dtype=torch.int32, device=device),
        torch.tensor([1, 0], dtype=torch.int32, device=device).expand(1, 1, 2, 2),
    )
    ours, _ = results(tensors, grads, "triton", blocks=lists, **keywords)
    dense, _ = results(tensors, grads, "triton", **keywords)
    again, _ = results(tensors, grads, "triton", blocks=lists, **keywords)
    for x, y, z in zip(ours, dense, again, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, z)


@SLOW
def test_dropout_drops_what_it_drops_without_lists(device):
    lists = draw_lists(B, H, 170, 200, (64, 64), 3)
    mask = expand_lists(lists, 170, 200).to(device)
    tensors = qkv(170, 200, torch.float32, device)
    grads = [torch.randn(B, 170, H, DV, device=device), torch.randn(B, H, 170, device=device)]
    runs = []
    for masks in ({"blocks": to_device(lists, device)}, {"mask": mask}):
        torch.manual_seed(5)
        runs.append(results(tensors, grads, "triton", dropout_p=0.3, causal=True, **masks)[0])
    for x, y in zip(*runs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert dropout.dropped_steps(0.3) > 0


def kernels_truth_and_baseline(lists, mask, device):
    """Yield impl, dtype and keywords of the kernels with lists, and of the reference with their mask twice."""
    yield "triton", torch.float32, {"blocks": to_device(lists, device)}
    for dtype in (torch.float64, torch.float32):
        yield "reference", dtype, {"mask": mask}


@SLOW
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("scheme", [Rope(), ReRope(60), Alibi()], ids=["rope", "rerope", "alibi"])
def test_dropout_is_the_references(device, scheme, full):
    """The definition drops what the kernels drop, by the same seed, with all gradients."""
    lists = draw_lists(B, H, 170, 200, (64, 128), 3, seed=2, full=full)
    mask = expand_lists(lists, 170, 200).to(device)
    tensors = qkv(170, 200, torch.float32, device)
    grads = [torch.randn(B, 170, H, DV, device=device), torch.randn(B, H, 170, device=device)]
    runs = []
    for impl, dtype, masks in kernels_truth_and_baseline(lists, mask, device):
        torch.manual_seed(5)
        call = {"dropout_p": 0.25, "position": scheme, "softcap": 8.0, "sinks": torch.linspace(-1, 1, H, device=device)}
        runs.append(results([x.to(dtype) for x in tensors], grads, impl, **{**call, **masks})[0])
    for ours, truth, baseline in zip(*runs, strict=True):
        assert_close_to_truth(ours, truth, baseline, roundings=ROUNDINGS)


def test_a_norm_and_its_weights_learn(device):
    """Gradients of q, k, v and of the norm's weights, of each head's own lists."""
    lists = draw_lists(B, H, 150, 200, (64, 64), 2, full=True)
    mask = expand_lists(lists, 150, 200).to(device)
    tensors = qkv(150, 200, torch.float32, device)
    weights = [torch.linspace(0.5, 1.5, D, device=device), torch.linspace(1.5, 0.5, D, device=device)]
    grad = torch.randn(B, 150, H, DV, device=device)
    runs = []
    for impl, dtype, masks in kernels_truth_and_baseline(lists, mask, device):
        leaves = [x.to(dtype).requires_grad_() for x in (*tensors, *weights)]
        norm = QKNorm(*leaves[3:])
        out = attention(*leaves[:3], norm=norm, position=Rope(), causal=True, impl=impl, **masks)
        runs.append([out, *torch.autograd.grad((out * grad.to(dtype)).sum(), leaves)])
    for ours, truth, baseline in zip(*runs, strict=True):
        assert_close_to_truth(ours, truth, baseline, roundings=ROUNDINGS)


def natten(width):
    """Pixels of a picture, row by row, that are near in both directions."""
    return lambda b, h, m, n: ((m // width - n // width).abs() <= 2) & ((m % width - n % width).abs() <= 2)


def tiles(width, tile):
    """The same by tiles of pixels: a query attends the tiles about its own."""
    return lambda b, h, m, n: (
        ((m // width // tile - n // width // tile).abs() <= 1) & ((m % width // tile - n % width // tile).abs() <= 1)
    )


def prefix_lm(device):
    """The first keys of each row, as many as it says, and what causality leaves."""
    length = torch.tensor([20, 90], device=device)
    return lambda b, h, m, n: (n < length[b]) | (m >= n)


def jagged(device):
    """Documents whose tokens attend their document's prefix, and causally the rest."""
    document = torch.searchsorted(torch.tensor([30, 31, 95, 140], device=device), torch.arange(200, device=device))
    start = torch.tensor([0, 31, 32, 96, 141], device=device)
    return lambda b, h, m, n: (document[m] == document[n]) & ((m >= n) | (n - start[document[n]] < 7))


# Kinds of masks that FlexAttention is used for: of pairs of documents, heads, rows, pixels and residues.
FLEX = {
    "prefix": (prefix_lm, B, None),
    "documents with prefixes": (jagged, None, None),
    "neighbours of pixels": (lambda device: natten(14), None, None),
    "tiles of pixels": (lambda device: tiles(14, 4), None, None),
    "dilated window": (lambda device: lambda b, h, m, n: ((m - n) % 3 == 0) & ((m - n).abs() < 60), None, None),
    "strided": (lambda device: lambda b, h, m, n: ((m - n).abs() < 20) | (n % 16 == 15), None, None),
    "a window for each head": (lambda device: lambda b, h, m, n: (m >= n) & (m - n < 16 << h), None, H),
    "sinks beside a window": (lambda device: lambda b, h, m, n: (m >= n) & ((m - n < 50) | (n < 4)), None, None),
    "chunks": (lambda device: lambda b, h, m, n: (m // 48 == n // 48) & (m >= n), None, None),
    "padding": (lambda device: lambda b, h, m, n: n < 60 + 90 * b, B, None),
}


@SLOW
@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize("blocks", [64, 128])
def test_masks_that_flex_attention_is_used_for(device, name, blocks):
    make, batch, heads = FLEX[name]
    mod = make(device)
    block_mask = create_block_mask(mod, batch, heads, 196, 196, device=device, BLOCK_SIZE=blocks)
    mask = create_mask(mod, batch or 1, heads or 1, 196, 196, device=device)
    assert mask.any()
    assert not mask.all()
    compare(block_mask, mask, 196, 196, torch.float32, device, position=Rope())


@SLOW
@pytest.mark.parametrize("kind", ["lists", "bits", "spans"])
def test_the_operators_of_calls_with_lists(device, kind):
    """Their schema, fakes and autograd formula, with each kind of tables."""
    q, k, v = (x.transpose(1, 2) for x in qkv(130, 130, torch.float32, device, dims=(D, D)))
    if kind == "lists":
        blocks = to_device(draw_lists(1, H, 130, 130, (64, 64), 2, full=True), device)
    elif kind == "bits":
        blocks = create_block_mask(lambda b, h, m, n: m >= n, None, None, 130, 130, device=device, BLOCK_SIZE=64)
    else:
        blocks = BlockLists.sliding_window(130, window=70, block_q=64, block_k=64, device=device)
    call = make_call(q.requires_grad_(), k, v, layout="bhtd", blocks=blocks)
    leaves = flatten(call)
    torch.library.opcheck(torch.ops.ropewalk.attend.default, (*leaves, True, "triton"))


def test_counts_that_lie_are_not_believed_by_the_backward(device, monkeypatch):
    """Columns are made of what rows were believed: junk beyond the memory changes no gradient, and is not read."""
    counts = torch.full((1, 1, 3), 2**31 - 1, dtype=torch.int64, device=device)
    memory = torch.full((1, 1, 3, 6), 2, dtype=torch.int64, device=device)  # block 2, behind what the lists may read
    indices = memory[..., :2]
    indices.copy_(torch.tensor([[0, 2**40], [-(2**40), 1], [0, 0]], device=device))
    monkeypatch.setattr("ropewalk.ops.attention.blocks.tables._has_values", lambda x: False)
    lists = BlockLists(counts, indices, None, None, 64, 64)
    true = BlockLists(
        torch.ones(1, 1, 3, dtype=torch.int32), torch.tensor([[[[0], [1], [0]]]], dtype=torch.int32), None, None, 64, 64
    )
    compare(lists, expand_lists(true, 150, 190), 150, 190, torch.float32, device, position=Rope(), of_lists=[memory])


MODS = {
    "causal": (lambda b, h, m, n: m >= n, None, None),
    "per head and row": (lambda b, h, m, n: ((m - n).abs() < 30 + 20 * h) | (n < 3 + b), B, H),
    "nothing": (lambda b, h, m, n: m < -1, None, H),
}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("blocks", [64, (128, 64)])
@pytest.mark.parametrize(
    "keywords", [{"position": Rope()}, pytest.param({"position": ReRope(50), "causal": True}, marks=SLOW)]
)
def test_block_masks(device, name, blocks, keywords):
    mod, batch, heads = MODS[name]
    block_mask = create_block_mask(mod, batch, heads, 170, 200, device=device, BLOCK_SIZE=blocks)
    mask = create_mask(mod, batch or 1, heads or 1, 170, 200, device=device)
    compare(block_mask, mask, 170, 200, torch.float32, device, **keywords)


def test_a_block_mask_of_documents(device):
    document = torch.arange(200, device=device) // 77
    mod = lambda b, h, m, n: document[m] == document[n]  # noqa: E731
    block_mask = create_block_mask(mod, None, None, 200, 200, device=device, BLOCK_SIZE=64)
    compare(block_mask, create_mask(mod, 1, 1, 200, 200, device=device), 200, 200, torch.float32, device, causal=True)


@pytest.mark.parametrize("make", ["documents", *(pytest.param(x, marks=SLOW) for x in ("sliding_window", "frames"))])
def test_lists_with_spans(device, make):
    if make == "documents":
        bounds = torch.tensor([0, 70, 71, 200], device=device)
        lists = BlockLists.documents(bounds, 200, block_q=64, block_k=64)
    elif make == "sliding_window":
        lists = BlockLists.sliding_window(200, window=70, n_sinks=64, block_q=64, block_k=64, device=device)
    else:
        lists = BlockLists.frames(200, tokens_per_frame=50, behind=1, block_q=64, block_k=128, device=device)
    mask = expand_lists(lists, 200, 200)
    compare(lists, mask, 200, 200, torch.float32, device, position=ReRope(60))


def test_counts_and_indices_that_lie_read_nothing_else(device, monkeypatch):
    """On a device no value is checked: a count beyond the memory counts as all of it, and no block is no block."""
    counts = torch.tensor([[[2**30, -5, 3]]], dtype=torch.int32, device=device)
    indices = torch.tensor([[[[1, -7, 2], [0, 0, 0], [2**30, 0, -(2**31)]]]], dtype=torch.int32, device=device)
    true = BlockLists(
        torch.tensor([[[2, 0, 1]]], dtype=torch.int32), torch.tensor([[[[1, 2], [0, 0], [0, 0]]]]), None, None, 64, 64
    )
    monkeypatch.setattr("ropewalk.ops.attention.blocks.tables._has_values", lambda x: False)
    lists = BlockLists(counts, indices, None, None, 64, 64)
    compare(lists, expand_lists(true, 150, 190), 150, 190, torch.float32, device)


def test_tables_are_those_of_plain_pytorch(device, monkeypatch):
    monkeypatch.setattr(kinds, "on_cpu", True)
    for full, batch in 3 * ((False, 1), (True, B)):  # the last by plans
        lists = to_device(draw_lists(batch, H, 400, 700, (64, 64), 9, full=full), device)
        q, k = torch.empty(B, 400, H, D, device=device), torch.empty(B, 700, H, D, device=device)
        ours = find_tables(lists, q, k, "bthd", None)
        vars(lists).pop("_ropewalk_tables")
        with monkeypatch.context() as patch:
            patch.setattr("ropewalk.ops.attention.blocks.tables.gpu.why_no_triton", lambda device: "no")
            plain = find_tables(lists, q, k, "bthd", None)
        for x, y in ((ours.rows, plain.rows), (ours.columns, plain.columns)):
            assert torch.equal(x[..., :2], y[..., :2])
            count = x[..., :1] + x[..., 1:2]
            listed = torch.arange(x.shape[3] - 2, device=device) < count
            assert torch.equal(x[..., 2:][listed], y[..., 2:][listed])


@pytest.mark.parametrize("causal", [False, True])
def test_constructors_list_the_same_as_plain_pytorch(device, monkeypatch, causal):
    scores = torch.randn(2, 3, 5, 9, generator=torch.Generator().manual_seed(0)).round().to(device)
    scores[scores > 1] = -torch.inf
    makers = [
        lambda: BlockLists.causal(300, 515, device=device),
        lambda: BlockLists.sliding_window(515, window=150, n_sinks=128, block_q=64, device=device),
        lambda: BlockLists.documents(torch.tensor([3, 40, 300, 515], device=device), 515, causal=causal),
        lambda: BlockLists.frames(515, 300, tokens_per_frame=70, behind=1, ahead=1, device=device),
        lambda: BlockLists.dilated(515, n_blocks=2, dilation=2, causal=causal, block_k=64, device=device),
        lambda: BlockLists.big_bird(515, n_heads=3, n_random=1, causal=causal, block_q=64, device=device),
        lambda: BlockLists.top_k(scores, 3, n_queries=600, n_keys=570, causal=causal, own=causal, block_k=64),
        lambda: BlockLists.from_mask(torch.rand(1, 2, 200, 300, device=device) > 2),
    ]
    monkeypatch.setattr(kinds, "on_cpu", True)
    for make in makers:
        ours = [make() for _ in range(3)][-1]  # by its plan, if its call has tensors
        with monkeypatch.context() as patch:
            patch.setattr(builders, "_runs_kernel", lambda device: False)
            plain = make()
        for (counts, indices), (true_counts, true_indices) in zip(lists_of(ours), lists_of(plain), strict=True):
            assert torch.equal(counts, true_counts)
            rows = zip(indices.flatten(0, 2), true_indices.flatten(0, 2), counts.flatten(), strict=True)
            assert all(torch.equal(x[:n].sort().values, y[:n].sort().values) for x, y, n in rows)
        assert (ours.spans is None) is (plain.spans is None)
        assert ours.spans is None or torch.equal(ours.spans, plain.spans)


def lists_of(lists):
    pairs = ((lists.counts, lists.indices), (lists.full_counts, lists.full_indices))
    return [pair for pair in pairs if pair[0] is not None]


@SLOW
def test_plans_give_the_same_bits_and_read_new_lists(device, monkeypatch):
    monkeypatch.setattr(kinds, "on_cpu", True)
    KINDS.clear()
    tensors = qkv(200, 200, torch.float32, device)
    grads = [torch.randn(B, 200, H, DV, device=device), torch.randn(B, H, 200, device=device)]
    planned = []
    for seed in range(4):
        lists = to_device(draw_lists(1, H, 200, 200, (64, 64), 3, seed=seed), device)
        planned.append(results(tensors, grads, "triton", blocks=lists, causal=True)[0])
    assert any(isinstance(kind, PlannedCall) for kind in kinds_of())
    dense = results(tensors, grads, "triton", causal=True)[0]
    assert not torch.equal(dense[0], planned[0][0])
    monkeypatch.setattr(kinds, "on_cpu", False)
    monkeypatch.setattr(kinds, "on_gpu", False)
    for seed, ours in enumerate(planned):
        lists = to_device(draw_lists(1, H, 200, 200, (64, 64), 3, seed=seed), device)
        plain = results(tensors, grads, "triton", blocks=lists, causal=True)[0]
        assert all(torch.equal(x, y) for x, y in zip(ours, plain, strict=True))
    KINDS.clear()


@SLOW
def test_compiled_calls_take_other_lists_without_a_new_program(device):
    tensors = qkv(150, 150, torch.float32, device)

    def run(q, k, v, blocks):
        return attention(q, k, v, blocks=blocks, impl="triton", causal=True, position=Rope())

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        lists = to_device(draw_lists(1, H, 150, 150, (64, 64), 3, seed=seed), device)
        leaves = [x.detach().requires_grad_() for x in tensors]
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            ours = compiled(*leaves, lists)
        eager = run(*leaves, lists)
        assert torch.equal(ours, eager)
        for x, y in zip(*(torch.autograd.grad(out.sum(), leaves) for out in (ours, eager)), strict=True):
            assert torch.equal(x, y)


@SLOW
def test_compiled_calls_take_other_block_masks_without_a_new_program(device):
    tensors = qkv(150, 150, torch.float32, device)

    def run(q, k, v, blocks):
        return attention(q, k, v, blocks=blocks, impl="triton")

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for index, length in enumerate((40, 60, 75)):
        document = torch.arange(150, device=device) // length
        mods = [
            lambda b, h, m, n: document[m] == document[n],  # noqa: B023
            lambda b, h, m, n: document[m] >= document[n],  # noqa: B023
        ]
        block_mask = create_block_mask(mods[index % 2], None, None, 150, 150, device=device, BLOCK_SIZE=64)
        if index == 0:
            with pytest.raises(Exception, match=r"mask_mod|exception"):
                compiled(*tensors, block_mask)
        eager = run(*tensors, block_mask)
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            assert torch.equal(compiled(*tensors, block_mask), eager)


@pytest.mark.parametrize("full", [False, True])
def test_the_operator_of_lists(device, full):
    lists = to_device(draw_lists(1, 2, 200, 330, (64, 64), 3, full=full), device)
    given = (lists.counts, lists.indices, lists.full_counts, lists.full_indices)
    torch.library.opcheck(torch.ops.ropewalk.block_lists, (*given, 6, full, True))


@SLOW
def test_checkpoints_and_autocast(device):
    tensors = qkv(150, 150, torch.float32, device)
    lists = to_device(draw_lists(1, H, 150, 150, (64, 64), 3), device)

    def run(q, k, v):
        return attention(q, k, v, blocks=lists, impl="triton")

    found = []
    for call in (run, lambda *x: checkpoint(run, *x, use_reentrant=False)):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = call(*leaves)
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    with torch.autocast(device.type, torch.float16):
        out = run(*tensors)
    assert out.dtype == torch.float16
    assert torch.equal(out, run(*(x.half() for x in tensors)))


def test_a_norm_and_the_largest_logits(device):
    tensors = qkv(150, 150, torch.float32, device)
    lists = draw_lists(1, H, 150, 150, (64, 64), 2)
    mask = expand_lists(lists, 150, 150).to(device)
    norm = QKNorm(torch.ones(D, device=device), torch.ones(D, device=device))
    runs = [
        attention(*tensors, norm=norm, position=Rope(), return_max_logits=True, impl=impl, **masks)
        for impl, masks in (("triton", {"blocks": to_device(lists, device)}), ("reference", {"mask": mask}))
    ]
    for x, y in zip(*runs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)

"""The Gluon kernels of attention: what they refuse, and on a GPU of compute capability 9.0 what they compute."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers.hopper_calls import (
    GLUON,
    HEAD_DIMS,
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
    is_equal,
    on_hopper,
    pack,
    random_grad,
)
from helpers.kernel_checks import launch_backward
from products.imagined import imagined_gpu
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import ropewalk.ops.attention.hopper
from ropewalk import (
    Alibi,
    BlockLists,
    ExpoSB,
    NoPosition,
    PositionScheme,
    ReRope,
    Rope,
    SelfExtend,
    T5Bias,
    attention,
)
from ropewalk import device as gpu
from ropewalk.ops.attention import backends, reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backend import Wanted
from ropewalk.ops.attention.backends import REFERENCE
from ropewalk.ops.attention.call import as_bhtd, flatten
from ropewalk.ops.attention.hopper import config as hopper_config
from ropewalk.ops.attention.hopper import launch as hopper_launch
from ropewalk.ops.attention.hopper import support as hopper_support
from ropewalk.ops.attention.hopper.backward_warps import ALTERNATING, BY_HEADS
from ropewalk.ops.attention.hopper.support import why_not_on
from ropewalk.ops.attention.libraries import flash
from ropewalk.ops.attention.triton import score_mods
from ropewalk.testing import assert_close_to_truth

triton = pytest.importorskip("triton")

NEEDED = "its kernels need an NVIDIA GPU of compute capability 9.0"


# What they refuse


@pytest.fixture
def hopper():
    """Stand in for a GPU of compute capability 9.0, with cuDNN and without flash-attn.

    Without `monkeypatch`, which a test may use: it would put back what stands in here after that has gone.
    """
    with imagined_gpu(), mock.patch.object(flash, "flash_version", return_value=None):
        yield


def call_on_gpu(tensors=None, **keywords):
    """A call as if its tensors were on a GPU."""
    call = make_call(*(tensors or draw("cpu")), **{"layout": "bhtd", **keywords})
    with FakeTensorMode():
        q, k, v = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda", requires_grad=x.requires_grad)
            for x in (call.q, call.k, call.v)
        )
    return call._replace(q=q, k=k, v=v)


def refusal(call):
    """The code of the refusal of a call; None where the kernels run it."""
    found = backends.why_not(GLUON, call)
    return None if found is None else found.code


def chosen(call, impl=None):
    """The name of the backend that runs a call."""
    return backends.choose(call, impl).name


SCORES = SimpleNamespace(forward=None)  # a `ScoreMod` that says nothing of itself


@dataclass(frozen=True, eq=False)
class Own(PositionScheme):
    """A scheme with score functions that nobody has seen."""

    def kernel_score_mod(self) -> str:
        return f"{__name__}:SCORES"

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor:
        return torch.zeros(n_heads, 1, device=device)

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        return scores


@dataclass(frozen=True, eq=False)
class InPyTorch(PositionScheme):
    """A scheme without score functions."""

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        return scores


POSITIONS = torch.arange(TQ)[None] * 2
MASK = torch.ones(TQ, TK, dtype=torch.bool)
REFUSED = {
    "what Triton refuses": ({}, {"position": InPyTorch()}, "score_mod"),
    "float64": ({"dtype": torch.float64}, {}, "dtype"),
    "float32": ({"dtype": torch.float32}, {}, "dtype"),
    "wide": ({"head_dim": 264}, {}, "head_dim"),
    "odd": ({"head_dim": 60}, {}, "head_dim"),
    "wide values": ({"v_head_dim": 264}, {}, "head_dim"),
    "wide beside a mask": ({"head_dim": 136}, {"mask": MASK}, "mask"),
    "wide values beside a mask": ({"v_head_dim": 136}, {"mask": MASK}, "mask"),
    "mask beside lists": ({}, {"mask": MASK, "blocks": BlockLists.sliding_window(TQ, TK, window=150)}, "mask"),
    "wide beside far positions": ({"head_dim": 136}, {"position": ReRope(50), "positions_q": POSITIONS}, "positions"),
    "mask beside far positions": ({}, {"position": ReRope(50), "positions_q": POSITIONS, "mask": MASK}, "positions"),
    "lists beside far positions": (
        {},
        {
            "position": ReRope(50),
            "positions_q": POSITIONS,
            "blocks": BlockLists.sliding_window(TQ, TK, window=150),
        },
        "positions",
    ),
    "own": ({}, {"position": Own()}, "score_mod"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_codes(hopper, name):
    sizes, keywords, code = REFUSED[name]
    call = call_on_gpu(draw("cpu", **sizes), **keywords)
    assert refusal(call) == code
    with pytest.raises(ValueError, match="impl is 'gluon', but it cannot run this call: "):
        backends.choose(call, "gluon")
    assert chosen(call) != "gluon"


def test_pages_are_for_few_queries(hopper):
    pages = torch.zeros(4, K, 16, 64, dtype=torch.bfloat16)
    call = {"block_table": torch.tensor([[0, 1], [2, 3]]), "key_lengths": torch.tensor([20, 3])}
    with torch.no_grad():
        for queries, code in ((5, None), (9, "block_table")):  # of two heads that share a key
            assert refusal(call_on_gpu((draw("cpu", queries=queries)[0], pages, pages), **call)) == code


SUPPORTED = {
    "plain": {},
    "rope": {"position": Rope(), "positions_q": POSITIONS},
    "alibi": {"position": Alibi(torch.ones(H).requires_grad_())},
    "alibi by positions": {"position": Alibi(), "positions_q": POSITIONS},
    "t5": {"position": T5Bias(torch.zeros(32, H).requires_grad_())},
    "exposb": {"position": ExpoSB()},
    "decay": {"position": ExpoSB(distance_decay=True)},
    "bands": {"position": ExpoSB(band_weights=torch.ones(H).requires_grad_())},
    "bands-decay": {"position": ExpoSB(band_weights=torch.ones(H).requires_grad_(), distance_decay=True)},
    "nothing far": {"position": ReRope(TK)},
    "rerope": {"position": ReRope(50), "causal": True},
    "extend": {"position": SelfExtend(50, 4)},
    "far positions": {"position": ReRope(50), "positions_q": POSITIONS, "dropout_p": 0.1},
    "window": {"window": 30},
    "window of two sides": {"window": (30, 7)},
    "mask": {"mask": MASK, "causal": True, "position": Rope()},
    "bounds": {"key_lengths": torch.tensor([9, 300]), "key_starts": torch.tensor([0, 3])},
    "dropout": {"dropout_p": 0.1},
    "changes": {"softcap": 3.0, "sinks": torch.ones(H), "scale": -1.0, "return_lse": True, "deterministic": True},
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_calls(hopper, name):
    assert refusal(call_on_gpu(**SUPPORTED[name])) is None


def test_the_fields_of_a_score_mod_decide(hopper, monkeypatch):
    call = call_on_gpu(position=Own())
    assert refusal(call) == "score_mod"
    monkeypatch.setattr(SCORES, "runs_on_hopper", True, raising=False)
    assert refusal(call) is None
    wanted = Wanted(score_mod_params=True)
    assert getattr(GLUON.why_no_backward(call, wanted), "code", None) == "score_mod_params"
    monkeypatch.setattr(SCORES, "is_slope", True, raising=False)
    assert GLUON.why_no_backward(call, wanted) is None


@pytest.mark.parametrize(
    ("given", "is_own"), [({}, True), ({"softcap": 2.0}, True), ({"positions_q": POSITIONS}, False)], ids=str
)
def test_the_decay_of_indices_is_split_by_rows_and_columns(hopper, given, is_own):
    score_mod = hopper_launch.score_mod_of(call_on_gpu(position=ExpoSB(distance_decay=True), **given))
    assert [mod == score_mods.DECAY.value for mod in (score_mod.forward, score_mod.backward)] == [is_own] * 2


class FarAlibi(ReRope):
    """Far pairs beside learned slopes."""

    def kernel_score_mod(self) -> str:
        return Alibi().kernel_score_mod()

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor:
        return torch.ones(n_heads, 1, device=device)

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        return Alibi(torch.ones(scores.shape[1])).score_mod(scores, distance)


class FarBands(FarAlibi):
    """Far pairs beside a learned factor."""

    def kernel_score_mod(self) -> str:
        return LEARNING["bands"].kernel_score_mod()

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        return scores


LEARNING = {
    "alibi": Alibi(torch.ones(H).requires_grad_()),
    "bands": ExpoSB(band_weights=torch.ones(H).requires_grad_()),
    "bands-decay": ExpoSB(band_weights=torch.ones(H).requires_grad_(), distance_decay=True),
    "t5": T5Bias(torch.zeros(32, H).requires_grad_()),
}
# The schemes of those whose backward is that of the Triton kernels.
LEARNED = {
    "dense": ({}, {}, ()),
    "causal": ({}, {"causal": True}, ()),
    "packed": ({}, {"layout": "thd", "cu_seqlens_q": torch.tensor([0, TQ])}, ()),
    "D 128, full": ({"head_dim": 128}, {}, ()),
    "D 128": ({"head_dim": 128}, {"causal": True, "window": 30, "key_lengths": torch.tensor([9, 300])}, ()),
    "D 256": ({"head_dim": 256}, {}, ("alibi", "t5")),
    "float16": ({"dtype": torch.float16}, {}, ("bands", "bands-decay")),
    "softcap": ({}, {"softcap": 3.0}, tuple(LEARNING)),
    "dropout": ({}, {"dropout_p": 0.1}, ("t5",)),
    "mask": ({}, {"mask": MASK}, ("t5",)),
    "lists": ({}, {"blocks": BlockLists.sliding_window(TQ, TK, window=150)}, ("t5",)),
    "positions": ({}, {"positions_q": POSITIONS}, ("alibi", "t5")),
}


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("scheme", LEARNING)
def test_the_backward_of_learned_scores(hopper, scheme, name):
    sizes, keywords, refused = LEARNED[name]
    tensors = draw("cpu", **sizes)
    if "layout" in keywords:
        tensors = [x.transpose(1, 2)[0, :TQ] for x in tensors]
    call = call_on_gpu(tensors, position=LEARNING[scheme], **keywords)
    found = GLUON.why_no_backward(call, Wanted(score_mod_params=True))
    assert (found is not None) is (scheme in refused)
    assert GLUON.why_no_backward(call, Wanted()) is None
    assert found is None or found.code == "score_mod_params"


@pytest.mark.parametrize(
    "position", [ExpoSB(distance_decay=True), FarAlibi(50), FarBands(50)], ids=lambda x: type(x).__name__
)
def test_the_backward_of_other_learned_scores_is_tritons(hopper, position):
    call = call_on_gpu(position=position)
    assert GLUON.why_no_backward(call, Wanted(score_mod_params=True)).code == "score_mod_params"
    assert GLUON.why_no_backward(call, Wanted()) is None


@pytest.mark.parametrize(
    ("shape", "keywords", "refused"),
    [
        ({}, {"causal": True, "position": ReRope(50)}, False),
        ({"head_dim": 128}, {"dropout_p": 0.1, "window": (30, 7)}, False),
        ({"head_dim": 136}, {}, True),
        ({"head_dim": 64, "v_head_dim": 136}, {}, True),
        ({}, {"mask": MASK}, True),
        ({}, {"position": ReRope(50), "positions_q": POSITIONS}, True),
        ({}, {"blocks": BlockLists.sliding_window(TQ, TK, window=150)}, True),
    ],
)
def test_the_backward_of_deterministic_calls(hopper, shape, keywords, refused):
    call = call_on_gpu(draw("cpu", **shape), deterministic=True, **keywords)
    assert refusal(call) is None
    found = GLUON.why_no_backward(call, Wanted())
    assert (found is not None and found.code == "deterministic") is refused
    assert GLUON.why_no_backward(call._replace(deterministic=False), Wanted()) is None


def test_packed_batches_count_all_queries(hopper):
    starts = torch.tensor([0, 3, 9, 64], dtype=torch.int32)
    tensors = [torch.randn(64, heads, 64).bfloat16() for heads in (H, K, K)]
    assert refusal(call_on_gpu(tensors, layout="thd", cu_seqlens_q=starts)) is None


@pytest.mark.parametrize(("capability", "words"), [((8, 0), "8.0"), ((10, 0), "10.0"), ((12, 1), "12.1")])
def test_other_gpus_are_refused(hopper, monkeypatch, capability, words):
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    assert why_not_on(torch.device("cuda")) == f"{NEEDED}, and this one has {words}"
    assert refusal(call_on_gpu()) == "device"


def test_other_devices_are_refused(hopper, monkeypatch):
    cpu = torch.device("cpu")
    assert why_not_on(cpu) == gpu.why_no_triton(cpu) is not None
    monkeypatch.setattr(gpu, "is_interpreted", lambda: True)
    assert why_not_on(cpu) == f"{NEEDED}, and the tensors are on cpu"
    monkeypatch.setattr(gpu, "is_interpreted", lambda: False)
    monkeypatch.setattr(gpu, "is_rocm", lambda: True)
    assert why_not_on(torch.device("cuda")) == f"{NEEDED}, and this one is AMD's"


def test_on_the_cpu_it_is_missing():
    reason = backends.why_missing("gluon", torch.device("cpu"))
    assert reason is not None
    assert "GPU" in reason


@pytest.fixture
def fresh():
    """Look anew whether Gluon is there."""
    hopper_support.why_missing.cache_clear()
    yield
    hopper_support.why_missing.cache_clear()


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_other_versions_of_triton_are_refused(fresh, monkeypatch, version):
    monkeypatch.setattr(triton, "__version__", version)
    reason = f"its kernels were tried with Triton 3.6, 3.7, 3.8, 3.9, and {version} is installed"
    assert hopper_support.why_missing() == reason


def test_a_triton_that_lacks_names_of_gluon_is_refused(fresh, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.9.0+git1234")
    monkeypatch.delattr(ropewalk.ops.attention.hopper, "launch", raising=False)
    monkeypatch.setitem(sys.modules, "ropewalk.ops.attention.hopper.launch", None)
    assert hopper_support.why_missing().startswith(
        "Triton 3.9.0+git1234 lacks something of Gluon that its kernels use: "
    )


def test_it_is_taken_where_it_was_measured_to_be_the_fastest(hopper):
    calls = ({}, {"position": Alibi(), "causal": True}, {"position": ReRope(50), "causal": True})
    assert [chosen(call_on_gpu(**call)) for call in calls] == ["triton", "triton", "triton"]
    assert [chosen(call_on_gpu(**call), "gluon") for call in calls] == ["gluon"] * 3
    learning = [x.requires_grad_() for x in draw("cpu", queries=256, keys=256)]
    assert chosen(call_on_gpu(learning)) == "sdpa"
    assert chosen(call_on_gpu(learning, position=Rope())) == "gluon"
    assert chosen(call_on_gpu(learning, position=Rope(), key_lengths=torch.tensor([200, 256]))) == "triton"
    assert chosen(call_on_gpu(learning, position=Alibi())) == "triton"
    long = draw("cpu", queries=1024, keys=2048)
    assert [chosen(call_on_gpu(long, **call)) for call in calls] == ["gluon", "gluon", "triton"]
    assert chosen(call_on_gpu(draw("cpu", queries=4096, keys=4096), **calls[2])) == "gluon"
    packed = [x.transpose(1, 2)[0] for x in long]
    starts = [torch.tensor([0, x.shape[0]]) for x in packed[:2]]
    assert chosen(call_on_gpu(packed, layout="thd", cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])) == "gluon"
    assert chosen(call_on_gpu(long, dropout_p=0.1)) == "gluon"
    assert chosen(call_on_gpu(draw("cpu", queries=512, keys=512), dropout_p=0.1)) == "triton"
    call = call_on_gpu(**calls[1])
    assert backends.explain(call, None).others["gluon"] == "it is slower here, by measurement"
    assert backends.explain(call, "gluon").others["triton"] == "impl is 'gluon'"


def shaped(batch, tokens, heads=12, head_dim=64, **keywords):
    """A call of a shape, as if on a GPU."""
    q = torch.empty(batch, heads, tokens, head_dim, dtype=torch.bfloat16)
    return call_on_gpu((q, q, q), **keywords)


def config_of(call, features=64):
    """The configuration of a call's forward on an H200."""
    return hopper_config.choose_forward(call, hopper_launch.score_mod_of(call), features, n_sms=132)


HALVES, TWO, THREE = hopper_config.HALVES, hopper_config.TWO, hopper_config.THREE
BY_SHAPE = {
    "few queries": (HALVES, lambda: shaped(32, 256)),
    "one more tile": (HALVES, lambda: shaped(32, 512, causal=True)),
    "as many rows": (THREE, lambda: shaped(32, 384, causal=True)),
    "many queries": (THREE, lambda: shaped(32, 2048)),
    "few tiles": (TWO, lambda: shaped(4, 512)),
    "one tile of keys": (TWO, lambda: shaped(128, 128)),
    "narrow window": (HALVES, lambda: shaped(8, 2048, causal=True, window=256)),
    "wide window": (THREE, lambda: shaped(8, 4096, causal=True, window=2048)),
    "one side": (THREE, lambda: shaped(8, 2048, window=(256, -1))),
    "lengths": (HALVES, lambda: shaped(32, 384, key_lengths=torch.full((32,), 9))),
    "lengths of few": (TWO, lambda: shaped(4, 384, key_lengths=torch.full((4,), 9))),
    "far pairs of lengths": (
        TWO,
        lambda: shaped(32, 512, position=ReRope(64), key_lengths=torch.full((32,), 9)),
    ),
    "causal lengths": (HALVES, lambda: shaped(32, 512, causal=True, key_lengths=torch.full((32,), 9))),
    "long lengths": (THREE._replace(LAGS=True), lambda: shaped(8, 4096, key_lengths=torch.full((8,), 9))),
    "slopes": (TWO, lambda: shaped(32, 512, position=Alibi())),
    "causal slopes": (HALVES, lambda: shaped(32, 512, position=Alibi(), causal=True)),
    "long slopes": (THREE, lambda: shaped(8, 4096, position=Alibi())),
    "long causal slopes": (THREE._replace(LAGS=True), lambda: shaped(8, 4096, position=Alibi(), causal=True)),
    "softcap": (HALVES, lambda: shaped(32, 512, softcap=5.0)),
    "far pairs": (THREE, lambda: shaped(32, 512, position=ReRope(64))),
    "score function": (TWO, lambda: shaped(32, 512, position=ExpoSB(distance_decay=True))),
}


@pytest.mark.parametrize("name", BY_SHAPE)
def test_forwards_at_64_features_have_the_configuration_of_their_shape(hopper, name):
    expected, make = BY_SHAPE[name]
    assert config_of(make()) == expected


def test_packed_sequences_are_as_long_as_their_mean(hopper):
    for count, expected in ((32, HALVES), (16, HALVES), (4, THREE), (0, THREE)):
        q = torch.empty(4096, 96, 64, dtype=torch.bfloat16)
        starts = torch.arange(count + 1, dtype=torch.int32) * (4096 // max(1, count))
        call = call_on_gpu((q, q, q), layout="thd", cu_seqlens_q=starts)
        assert config_of(call) == expected


def test_maxima_lag_at_128_features_where_there_are_many_keys(hopper):
    for tokens, lags in ((512, False), (1024, True)):
        config = config_of(shaped(8, tokens, head_dim=128), 128)
        assert config == hopper_config.FORWARD[128][-1].config._replace(LAGS=lags)


def test_few_queries_go_by_heads_and_keys(hopper):
    def choose(queries, batch=2, heads=64, key_heads=64, keys=8192, **call):
        row = torch.zeros(1, dtype=torch.bfloat16)
        sizes = ((heads, queries), (key_heads, keys), (key_heads, keys))
        return chosen(call_on_gpu([row.expand(batch, *size, 64) for size in sizes], causal=True, **call))

    assert [choose(queries) for queries in (3, 4, 63, 64)] == ["triton", "gluon", "gluon", "triton"]
    others = (
        {"key_heads": 32},
        {"batch": 1},
        {"keys": 8191},
        {"position": Alibi()},
        {"key_lengths": integers("cpu", 9, 9)},
    )
    assert [choose(16, **other) for other in others] == ["triton"] * 4 + ["gluon"]


STEP_ORDERS = {  # of heads that share keys, keys, and features
    "many heads": (ALTERNATING, (8, 8192, 128), {"causal": True}),
    "some heads": (ALTERNATING, (6, 8192, 128), {"causal": True}),
    "few heads": (BY_HEADS, (5, 8192, 128), {"causal": True}),
    "few heads, H100": (ALTERNATING, (4, 8192, 128), {"causal": True}),
    "fewer heads, H100": (BY_HEADS, (3, 8192, 128), {"causal": True}),
    "few heads, many keys, H100": (BY_HEADS, (4, 8193, 128), {"causal": True}),
    "few narrow heads, H100": (BY_HEADS, (4, 8192, 64), {"causal": True}),
    "many keys": (BY_HEADS, (8, 8193, 128), {"causal": True}),
    "wide": (ALTERNATING, (4, 16384, 256), {"causal": True, "position": Rope(), "softcap": 5.0}),
    "wide, many keys": (BY_HEADS, (4, 16385, 256), {"causal": True}),
    "wide, few heads": (BY_HEADS, (3, 8192, 256), {"causal": True}),
    "narrow": (BY_HEADS, (8, 8192, 64), {"causal": True}),
    "causal lengths": (ALTERNATING, (8, 8192, 128), {"causal": True, "key_lengths": torch.tensor([9, 9])}),
    "window": (BY_HEADS, (8, 8192, 128), {"causal": True, "window": 64}),
    "in order": (BY_HEADS, (8, 8192, 128), {"causal": True, "deterministic": True}),
    "slopes": (BY_HEADS, (8, 8192, 128), {"causal": True, "position": Alibi()}),
    "dropout": (BY_HEADS, (8, 8192, 128), {"causal": True, "dropout_p": 0.1}),
    "far pairs": (BY_HEADS, (8, 8192, 128), {"causal": True, "position": ReRope(64)}),
    "lists": (BY_HEADS, (8, 8192, 128), {"causal": True, "blocks": BlockLists.sliding_window(TQ, window=130)}),
    "full": (BY_HEADS, (8, 8192, 128), {}),
    "full, wide": (BY_HEADS, (8, 8192, 256), {}),
}


@pytest.mark.parametrize("name", STEP_ORDERS)
def test_steps_of_the_backward_have_the_order_that_was_measured(hopper, monkeypatch, name):
    monkeypatch.setattr(gpu, "memory_bandwidth", lambda device: 3.35e12 if "H100" in name else 4.9e12)
    expected, (heads_per_key, keys, features), keywords = STEP_ORDERS[name]
    queries = keys = TQ if "blocks" in keywords else keys
    call = call_on_gpu(draw("cpu", queries=queries, keys=keys, heads=1, key_heads=1, head_dim=features), **keywords)
    assert hopper_config.choose_step_order(call, call.q.device, heads_per_key, keys, features) == expected.value


def test_the_bandwidth_is_that_of_the_card(monkeypatch):
    """Of an H100's clock, in kHz, and bus, in bits."""
    card = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    bandwidth = gpu.memory_bandwidth.__wrapped__  # what it keeps would outlive the test
    assert bandwidth(torch.device("cuda")) == 3_352_320_000_000
    assert bandwidth(torch.device("cpu")) == math.inf


def test_score_mods_by_positions_are_slower_without_a_backward(hopper):
    """At 64 features."""

    def choose(position, learns, head_dim=64):
        q, k, v = (x.requires_grad_(learns) for x in draw("cpu", queries=1024, keys=1024, head_dim=head_dim))
        positions = {"positions_q": torch.arange(1024)[None], "positions_k": torch.arange(1024)[None]}
        return chosen(call_on_gpu((q, k, v), position=position, **positions))

    schemes = (Alibi(), ExpoSB(distance_decay=True), T5Bias(torch.zeros(32, H)), Rope())
    assert [choose(scheme, False) for scheme in schemes] == ["triton", "triton", "gluon", "gluon"]
    assert [choose(scheme, False, 128) for scheme in schemes] == ["gluon"] * 4
    assert [choose(scheme, True) for scheme in schemes] == ["gluon"] * 4


# What they compute


@pytest.fixture(scope="module", params=VARIANTS)
def kernels(request):
    return VARIANTS[request.param]


def learned(device):
    return (torch.rand(H, device=device) + 0.1).requires_grad_()


def t5(device, **keywords):
    return T5Bias(torch.randn(32, H, device=device).requires_grad_(), **keywords)


def positions(device):
    """Positions of all tokens, of which float32 does not hold the differences unless they are counted from one."""
    sizes = {"positions_q": (B, TQ), "positions_k": (1, TK)}
    return {name: torch.randint(10**9, 10**9 + 500, size, device=device) for name, size in sizes.items()}


CALLS = {
    "plain": lambda device: {},
    "causal": lambda device: {"causal": True},
    "window": lambda device: {"window": 100},
    "causal-window": lambda device: {"causal": True, "window": 150},
    "window-left": lambda device: {"window": (170, 20)},
    "window-right": lambda device: {"window": (20, 140)},
    "window-ahead": lambda device: {"window": (40, -1)},
    "window-behind": lambda device: {"window": (-1, 70)},
    "before-the-keys": lambda device: {"causal": True, "query_starts": integers(device, -150, -40)},
    "before-the-window": lambda device: {"window": (30, 90), "query_starts": integers(device, -150, -40)},
    "lengths": lambda device: {"key_lengths": integers(device, TK, 130)},
    "no-keys": lambda device: {"key_lengths": integers(device, 0, 1)},
    "starts": lambda device: {"causal": True, "key_starts": integers(device, 0, 170)},
    "nothing-between": lambda device: {
        "key_starts": integers(device, 300, 9),
        "key_lengths": integers(device, 200, 9),
    },
    "cache": lambda device: {
        "position": Rope(),
        "causal": True,
        "key_starts": integers(device, 3, 100),
        "key_lengths": integers(device, 203, 333),
        "query_starts": integers(device, 3, 133),
    },
    "softcap": lambda device: {"softcap": 1.5, "causal": True},
    "sinks": lambda device: {"sinks": torch.tensor([0.3, -torch.inf, 4.0, -20.0], device=device)},
    "softcap-sinks": lambda device: {
        "position": Rope(),
        "causal": True,
        "softcap": 3.0,
        "sinks": torch.randn(H, device=device),
    },
    "negative": lambda device: {"scale": -0.3, "causal": True},
    "zero": lambda device: {"scale": 0.0},
    "alibi": lambda device: {"position": Alibi()},
    "alibi-window": lambda device: {"position": Alibi(), "causal": True, "window": 150},
    "alibi-window-right": lambda device: {"position": Alibi(), "window": (20, 140)},
    "alibi-rows": lambda device: {"position": Alibi(torch.rand(B, H, device=device) + 0.1)},
    "alibi-learned-rows": lambda device: {
        "position": Alibi((torch.rand(B, H, device=device) + 0.1).requires_grad_()),
        "causal": True,
    },
    "alibi-learned": lambda device: {"position": Alibi(learned(device)), "causal": True},
    "alibi-learned-full": lambda device: {"position": Alibi(learned(device)), "scale": -0.2},
    "alibi-learned-cache": lambda device: {
        "position": Alibi(learned(device)),
        "window": (150, 90),
        "key_starts": integers(device, 3, 100),
        "key_lengths": integers(device, 203, 333),
        "query_starts": integers(device, 3, 133),
        "sinks": torch.randn(H, device=device),
    },
    "alibi-learned-no-keys": lambda device: {"position": Alibi(learned(device)), "key_lengths": integers(device, 0, 1)},
    "alibi-positions": lambda device: {"position": Alibi(learned(device)), **positions(device)},
    "alibi-positions-causal": lambda device: {
        "position": Alibi((torch.rand(B, H, device=device) + 0.1).requires_grad_()),
        "causal": True,
        "key_lengths": integers(device, TK, 130),
        **positions(device),
    },
    "t5": lambda device: {"position": t5(device)},
    "t5-causal": lambda device: {"position": t5(device, bidirectional=False, max_distance=40), "causal": True},
    "t5-near": lambda device: {"position": t5(device, max_distance=20), "softcap": 2.0, "window": (150, 90)},
    "t5-cache": lambda device: {
        "position": t5(device, max_distance=17),
        "causal": True,
        "key_starts": integers(device, 3, 100),
        "key_lengths": integers(device, 203, 333),
        "query_starts": integers(device, 3, 133),
    },
    "t5-window": lambda device: {"position": t5(device, max_distance=17), "window": (150, 90), "scale": 1.0},
    "t5-sinks": lambda device: {
        "position": t5(device, max_distance=90),
        "causal": True,
        "sinks": torch.randn(H, device=device),
        "key_lengths": integers(device, TK, 130),
    },
    "t5-positions": lambda device: {"position": t5(device), **positions(device)},
    "exposb": lambda device: {"position": ExpoSB()},
    "decay": lambda device: {"position": ExpoSB(distance_decay=True)},
    "decay-causal": lambda device: {"position": ExpoSB(distance_decay=True), "causal": True},
    "decay-positions": lambda device: {
        "position": ExpoSB(distance_decay=True),
        "causal": True,
        **positions(device),
    },
    "bands": lambda device: {"position": ExpoSB(band_weights=learned(device))},
    "bands-decay": lambda device: {
        "position": ExpoSB(band_weights=learned(device), distance_decay=True),
        "causal": True,
    },
    "bands-cache": lambda device: {
        "position": ExpoSB(band_weights=learned(device), distance_decay=True),
        "window": (150, 90),
        "key_starts": integers(device, 3, 100),
        "key_lengths": integers(device, 203, 333),
        "query_starts": integers(device, 3, 133),
        "scale": -0.2,
    },
    "bands-zero": lambda device: {
        "position": ExpoSB(band_weights=torch.tensor([0.5, 0.0, -2.0, 1e-3], device=device).requires_grad_()),
        "window": (150, 90),
        "sinks": torch.randn(H, device=device),
        "key_lengths": integers(device, TK, 0),
    },
    "bands-positions": lambda device: {
        "position": ExpoSB(band_weights=learned(device), distance_decay=True),
        **positions(device),
    },
    "rope": lambda device: {"position": Rope()},
    "rope-causal-window": lambda device: {"position": Rope(), "causal": True, "window": 150},
    "rope-lengths": lambda device: {"position": Rope(), "key_lengths": integers(device, TK, 130)},
    "rope-no-keys": lambda device: {"position": Rope(), "causal": True, "key_lengths": integers(device, 0, 1)},
    "rope-interleaved": lambda device: {"position": Rope(interleaved=True, attention_factor=1.1), "causal": True},
    "rope-some-pairs": lambda device: {"position": Rope(interleaved=True, rotary_dim=24)},
    "rope-few-pairs": lambda device: {"position": Rope(interleaved=True, rotary_dim=12)},  # in rows of 24 bytes
    "rope-interleaved-positions": lambda device: {
        "position": Rope(interleaved=True),
        "positions_q": torch.randint(0, 10**4, (B, TQ), device=device),
    },
    "rope-partial": lambda device: {"position": Rope(rotary_dim=24, rotary_offset=8), "causal": True},
    "rope-blocks": lambda device: {"position": Rope(rotary_dim=24, rotary_offset=4, pair_block=12), "causal": True},
    "rerope-blocks": lambda device: {"position": ReRope(90, leak=8.0, rope=Rope(rotary_dim=24, pair_block=12))},
    "rope-positions": lambda device: {
        "position": Rope(),
        "causal": True,
        "positions_q": torch.randint(0, 10**4, (B, TQ), device=device),
        "positions_k": torch.randint(0, 10**4, (1, TK), device=device),
    },
    "rope-positions-of-rows": lambda device: {
        "position": Rope(),
        "causal": True,
        "positions_k": torch.randint(0, 10**4, (B, TK), device=device),
    },
    "keys-rotated": lambda device: {"position": Rope(), "keys_rotated": True},
    "rerope": lambda device: {"position": ReRope(90), "causal": True},
    "leaky-window": lambda device: {"position": ReRope(90, leak=8.0), "window": (140, 100)},
    "leaky": lambda device: {"position": ReRope(90, leak=8.0)},
    "extend-window": lambda device: {"position": SelfExtend(90, 4), "causal": True, "window": 150},
    "rerope-bounds": lambda device: {
        "position": ReRope(50),
        "causal": True,
        "key_starts": integers(device, 0, 70),
        "key_lengths": integers(device, 200, TK),
    },
}


@on_hopper
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_every_call(kernels, device, head_dim, name):
    check_supported(kernels, draw(device, head_dim=head_dim), **CALLS[name](device))


# Names of the launcher as they would be for other shapes than those of the calls.
OTHER_SHAPES = {
    (64, "many-tiles"): {"HALVES_TILES_PER_SM": 0},
    (64, "long"): {"_wastes_tiles_of_three": lambda call: False, "SHORT_LENGTHS": 0},
    (128, "long"): {"SHORT_KEYS": 0},
}


@on_hopper
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=str)
def test_every_call_as_if_of_other_shapes(monkeypatch, device, shape, name):
    for constant, value in OTHER_SHAPES[shape].items():
        monkeypatch.setattr(hopper_config, constant, value)
    check_supported(GLUON, draw(device, head_dim=shape[0]), **CALLS[name](device))


@on_hopper
@pytest.mark.parametrize("start", [0, 20_000, 39_936])
def test_decays_of_distances_whose_powers_float32_does_not_hold(kernels, device, start):
    tensors = draw(device, queries=64, keys=40_000)
    weights = torch.tensor([0.5, 0.0, -2.0, 1.0], device=device).requires_grad_()
    position = ExpoSB(band_weights=weights, distance_decay=True)
    check_supported(kernels, tensors, position=position, query_starts=integers(device, start, start))


DROPPED = (
    *("plain", "causal", "causal-window", "lengths", "starts", "no-keys", "cache", "softcap-sinks"),
    *("alibi", "alibi-learned", "alibi-learned-full", "alibi-positions", "bands", "bands-decay", "decay-causal"),
    *("rope-interleaved", "rerope", "leaky"),
)


@on_hopper
@pytest.mark.parametrize("name", DROPPED)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 96, (192, 128), 256], ids=str)
def test_dropout(kernels, device, head_dim, dtype, p, name):
    check_supported(kernels, draw(device, dtype, head_dim=head_dim), dropout_p=p, **CALLS[name](device))


@on_hopper
@pytest.mark.parametrize("p", [0.1, 0.7])
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_dropout_of_packed_sequences(kernels, device, lengths, head_dim, p):
    tensors, starts = pack(device, *LENGTHS[lengths], head_dim)
    check_supported(kernels, tensors, layout="thd", causal=True, dropout_p=p, **starts)


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["plain", "rope"])
def test_dropout_beside_a_mask(kernels, device, name, head_dim):
    mask = torch.rand(B, H, TQ, TK, device=device) < 0.5
    check_supported(kernels, draw(device, head_dim=head_dim), dropout_p=0.3, mask=mask, **CALLS[name](device))


@on_hopper
@pytest.mark.parametrize("backend", ["gluon", "triton"])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.999])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_dropped_pairs_are_those_of_the_reference(device, head_dim, p, backend):
    """With equal scores, and one key a feature, the output says which stay; with one query a feature, dV does."""
    kernels = backends.KERNELS[backend]
    seed = torch.tensor([2**62 + 5], device=device)
    q, k = (torch.zeros(B, H, tokens, head_dim, device=device).bfloat16() for tokens in (TQ, TK))
    for first in (0, 64, 192, 256):
        v, grad_out = torch.zeros_like(k), torch.zeros_like(q)
        for x in (v, grad_out):
            part = x[:, :, first : first + head_dim]
            part.copy_(torch.eye(head_dim, device=device)[: part.shape[2]])
        call = make_call(q, k, v, layout="bhtd", dropout_p=p)._replace(seed=seed)
        stays = reference.dropout_mask(slice(0, TQ), call)
        out, saved = kernels.forward(call, True)
        keys = stays[..., first : first + head_dim]
        assert torch.equal(out[..., : keys.shape[3]] != 0, keys)
        grad_v = launch_backward(kernels, call, out, saved, grad_out).v
        queries = stays[:, :, first : first + head_dim].mT
        assert torch.equal(grad_v[..., : queries.shape[3]] != 0, queries)


@on_hopper
@pytest.mark.parametrize("name", ["plain", "cache", "decay-causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_float16(kernels, device, head_dim, name):
    check_supported(kernels, draw(device, torch.float16, head_dim=head_dim), **CALLS[name](device))


@on_hopper
@pytest.mark.parametrize(
    "dims",
    [
        *((8, 8), (24, 40), (64, 128), (80, 80), (96, 96), (120, 72), (128, 64)),
        *((136, 8), (160, 128), (184, 96), (136, 136), (64, 256), (192, 192), (200, 64), (248, 240)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["plain", "cache"])
def test_head_dims(kernels, device, name, dims):
    check_supported(kernels, draw(device, head_dim=dims[0], v_head_dim=dims[1]), **CALLS[name](device))


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        *((64, 64), (64, 1000), (65, 129), (127, 128), (128, 64), (191, 384), (192, 193), (193, 127), (256, 256)),
        *((500, 63), (1000, 1), (1000, 257), (999, 999), (64, 0)),
        *((1, 1), (1, 300), (2, 127), (16, 1000), (48, 333), (63, 63)),
    ],
)
def test_lengths_around_the_edges_of_tiles(kernels, device, queries, keys, head_dim, causal):
    tensors = draw(device, queries=queries, keys=keys, head_dim=head_dim)
    for window in (None, 65):
        check_supported(kernels, tensors, causal=causal, window=window)


@on_hopper
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("queries", [64, 65, 500])
def test_tiles_without_a_walk_stand_between_others(kernels, device, queries, head_dim):
    """And a program has more tiles than its rings have stages."""
    tensors = [x.repeat(20, 1, 1, 1) for x in draw(device, queries=queries, keys=200, head_dim=head_dim)]
    lengths = integers(device, 0, 200, 1, 0, 130).repeat(8)
    check_supported(kernels, tensors, position=Rope(), key_lengths=lengths)


@on_hopper
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_nan_in_queries_stays_in_their_rows(kernels, device, head_dim):
    """Those of a batch row without keys show nowhere, and those of a query only in its own row and in gradients."""
    tensors = draw(device, head_dim=head_dim)
    call = make_call(*tensors, position=Rope(), key_lengths=integers(device, 0, TK), layout="bhtd")
    grad_out = random_grad(call)

    expected = compute(kernels, call, grad_out)
    tensors[0][0] = torch.nan
    results = compute(kernels, call, grad_out)
    assert all(is_equal(kernels, mine, clean) for mine, clean in zip(results, expected, strict=True))
    tensors[0][1, :, 7] = torch.nan
    out, lse, *_ = compute(kernels, call, grad_out)
    assert out[1, :, 7].isnan().all()
    for mine, clean in ((out, expected[0]), (lse, expected[1])):
        mine[1, :, 7] = clean[1, :, 7] = 0
        assert torch.equal(mine, clean)


@on_hopper
@pytest.mark.parametrize("position", [NoPosition(), ReRope(300)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("growth", [3, 9, 60, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_maxima_that_grow_from_tile_to_tile(monkeypatch, kernels, device, head_dim, dtype, growth, position):
    monkeypatch.setattr(hopper_config, "SHORT_KEYS", 0)  # so that maxima lag
    """By few powers of two, which add up before anything is multiplied, or many; in some rows of a warp, or in none."""
    q, k, v = draw(device, dtype, keys=900, head_dim=head_dim)
    some = torch.arange(TQ, device=device) % 3 == 0
    some[64:128] = False
    q[..., 0] = growth * math.sqrt(q.shape[3]) * math.log(2) * some
    k[..., 0] = torch.arange(900, device=device).flip(0) // 128  # walks begin with the last keys
    check_supported(kernels, (q, k, v), position=position)
    check_supported(kernels, (q, k, v), position=position, causal=True)


@on_hopper
@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 3), (6, 1)], ids=str)
def test_heads_share_keys(kernels, device, heads):
    tensors = draw(device, heads=heads[0], key_heads=heads[1])
    ones = torch.ones(H, device=device).requires_grad_()
    for scheme in (Alibi(), Alibi(ones), ExpoSB(band_weights=ones)):
        position = for_heads(scheme, heads[0], device)
        check_supported(kernels, tensors, position=position, causal=True)


@on_hopper
@pytest.mark.parametrize("sections", ["one", "many"])
@pytest.mark.parametrize("keys", [640, 999])
@pytest.mark.parametrize("name", ["plain", "rope", "lengths", "starts", "softcap", "full", "full lengths"])
@pytest.mark.parametrize("head_dim", [96, 128, (192, 128), 256], ids=str)
def test_steps_in_every_order(monkeypatch, device, head_dim, name, keys, sections):
    """Heads alternate, and walk back in one section of heads, and on in the next."""
    if sections == "many":
        monkeypatch.setattr(hopper_launch, "key_heads_per_l2_section", lambda *_: 1)
    lengths = {"key_lengths": integers(device, keys - 3, 130)}
    starts = {"key_starts": integers(device, 0, 140), "query_starts": integers(device, 30, 0)}
    extra = {"rope": {"position": Rope()}, "lengths": lengths, "starts": lengths | starts, "softcap": {"softcap": 5.0}}
    call = {"causal": not name.startswith("full"), **extra.get(name, lengths if "lengths" in name else {})}
    tensors = draw(device, queries=keys - 99, keys=keys, heads=16, head_dim=head_dim)
    made = make_call(*tensors, layout="bhtd", **call)
    widest = 128 if head_dim in (96, 128) else 256
    expected = ALTERNATING if call["causal"] else BY_HEADS
    assert hopper_config.choose_step_order(made, device, 8, keys, widest) == expected.value
    check_supported(GLUON, tensors, **call)


@on_hopper
def test_an_empty_batch(device):
    q, k, v = (x[:0].requires_grad_() for x in draw(device))
    out, lse = attention(q, k, v, causal=True, return_lse=True, layout="bhtd", impl="gluon")
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [grad.shape for grad in grads] == [x.shape for x in (q, k, v)]


@on_hopper
def test_any_strides(kernels, device):
    fused = torch.randn(B, TQ, H + 2 * K, 64, device=device).bfloat16()
    q, k, v = (x.transpose(1, 2) for x in fused.split([H, K, K], dim=2))
    check_supported(kernels, (q, k, v), position=Rope(), causal=True)
    transposed = [x.mT.contiguous().mT for x in (q, k, v)]  # features are not dense
    check_supported(kernels, transposed, position=Rope(), causal=True, key_lengths=integers(device, TQ, 0, 90, 0)[::2])


@on_hopper
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
    call = make_call(q, k, v, causal=True, layout="bhtd")

    def run(q, k, v):
        out, saved = kernels.forward(call._replace(q=q, k=k, v=v), True)
        return out, saved.lse

    expected = run(q, k, v)
    for result in (run(place(q), k, v), run(q, place(k), v), run(q, k, place(v))):
        assert all(torch.equal(x, y) for x, y in zip(result, expected, strict=True))


@on_hopper
def test_more_rows_than_a_grid_has_in_its_second_dimension(kernels, device):
    q, k, v = (torch.randn(70000, 1, 64, 16, device=device, dtype=torch.float16) for _ in range(3))
    call = make_call(q, k, v, layout="bhtd")
    out, _ = kernels.forward(call, True)
    last = call._replace(q=q[-2:], k=k[-2:], v=v[-2:])
    expected, _ = REFERENCE.attend(last)
    assert_close_to_truth(out[-2:], REFERENCE.attend(reference.in_dtype(last, torch.float64))[0], expected)


# Packed sequences, and what is not to be read


@on_hopper
@pytest.mark.parametrize("call", [{}, {"causal": True}, {"causal": True, "window": 66}], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences(kernels, device, lengths, head_dim, call):
    tensors, starts = pack(device, *LENGTHS[lengths], head_dim=head_dim)
    check_supported(kernels, tensors, layout="thd", position=Rope(), **starts, **call)


@on_hopper
@pytest.mark.parametrize("given", [False, True], ids=["by-index", "by-positions"])
@pytest.mark.parametrize("scheme", ["none", "alibi", "alibi-learned", "bands", "decay", "t5"])
def test_changed_scores_of_packed_sequences(kernels, device, scheme, given):
    schemes = {
        "none": NoPosition(),
        "alibi": Alibi(),
        "alibi-learned": Alibi(learned(device)),
        "bands": ExpoSB(band_weights=learned(device), distance_decay=True),
        "decay": ExpoSB(distance_decay=True),
    }
    tensors, starts = pack(device, *LENGTHS["different"])
    call = {"position": schemes.get(scheme) or t5(device, max_distance=50), "sinks": torch.randn(H, device=device)}
    if scheme in ("none", "alibi", "decay"):
        call["softcap"] = 4.0
    if given:
        for name, x in (("positions_q", tensors[0]), ("positions_k", tensors[1])):
            call[name] = torch.randint(10**9, 10**9 + 300, x.shape[:1], device=device)
    check_supported(kernels, tensors, layout="thd", causal=True, **call, **starts)


@on_hopper
@pytest.mark.parametrize("call", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize("name", ["rope", "alibi-learned", "bands", "decay", "t5", "rerope", "softcap-sinks", "starts"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_few_queries(kernels, device, head_dim, name, call):
    tensors = draw(device, queries=17, head_dim=head_dim)
    check_supported(kernels, tensors, **CALLS[name](device) | call)


@on_hopper
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_sequences_see_nothing_of_each_other(kernels, device, head_dim):
    """NaN in one sequence, and in what belongs to none, stays there: in values and in all gradients."""
    rest = 70
    (q, k, v), starts = pack(device, *LENGTHS["different"], head_dim=head_dim, rest=rest)
    call = make_call(q, k, v, layout="thd", position=Rope(), **starts)
    rows_q, rows_k = (slice(*list(pairwise(x.tolist()))[2]) for x in starts.values())

    def run(grad_out):
        out, saved = kernels.forward(call, True)
        grads = launch_backward(kernels, call, out, saved, as_bhtd(grad_out, "thd"))[:3]
        return [x[0].transpose(0, 1) for x in (out, *grads)]

    tensors = (q, k, v, torch.randn(*q.shape[:2], v.shape[2], device=device).bfloat16())
    expected = run(tensors[3])
    for x, rows, more in zip(tensors, (rows_q, rows_k, rows_k, rows_q), (1, 2, 2, 1), strict=True):
        x[rows] = x[len(x) - more * rest :] = torch.nan
    for mine, clean, rows, more in zip(
        run(tensors[3]), expected, (rows_q, rows_q, rows_k, rows_k), (1, 1, 2, 2), strict=True
    ):
        mine[rows] = clean[rows] = 0
        assert is_equal(kernels, mine[: -more * rest], clean[: -more * rest])


@on_hopper
@pytest.mark.parametrize(
    "offsets",
    [[0, 200, 100, 450], [-5, 100, 200, 450], [0, 100, 200, 9000], [300, 200, 100, 0], [2**31 - 1, 0, -9, 450]],
)
def test_offsets_that_are_wrong_read_nothing_out_of_bounds(kernels, device, offsets):
    """What comes out is of no account; on a device nobody checks them, and nothing past the tensors may be touched."""
    (q, k, v), starts = pack(device, [100, 100, 250], [100, 100, 250], rest=0)
    call = make_call(q, k, v, layout="thd", causal=True, **starts)
    wrong = torch.tensor(offsets, device=device, dtype=torch.int32)
    kernels.forward(call._replace(cu_seqlens_q=wrong, cu_seqlens_k=wrong), True)
    torch.cuda.synchronize()


@on_hopper
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_what_lies_outside_starts_and_lengths_is_not_read(kernels, device, head_dim):
    check_what_is_read(kernels, draw(device, head_dim=head_dim), Rope())


# Many launches


# By name, of the calls above: what is compiled for them is compiled for these.
RANDOM = (
    *("plain", "causal", "causal-window", "alibi-learned", "bands-decay", "decay", "rope-interleaved"),
    *("softcap-sinks", "t5", "t5-causal"),
)
RANDOM_CALLS = 240
# The shares of packed batches, of calls of fewer than 64 queries, and of calls with dropout, or with far pairs by
# positions, among those that may have it.
PACKED_SHARE, FEW_SHARE, DROPOUT_SHARE, RANGES_SHARE = 0.2, 0.15, 0.3, 0.15


def for_heads(scheme, heads, device):
    """A scheme whose learned tensors, if any, are for so many heads."""
    if isinstance(scheme, Alibi):
        return Alibi((torch.rand(heads, device=device) + 0.1).requires_grad_())
    if isinstance(scheme, T5Bias):
        table = torch.randn(scheme.table.shape[0], heads, device=device).requires_grad_()
        return dataclasses.replace(scheme, table=table)
    if isinstance(scheme, ExpoSB) and scheme.band_weights is not None:
        weights = (torch.rand(heads, device=device) + 0.1).requires_grad_()
        return dataclasses.replace(scheme, band_weights=weights)
    return scheme


def random_call(number, device):
    """A seeded call of a random shape: its tensors, and its other arguments."""
    source = random.Random(number)

    def length(longest):
        return int(64 * (longest / 64) ** source.random())

    group, key_heads = source.choice([(1, 1), (2, 1), (4, 1), (1, 3), (2, 2)])
    heads, dims = group * key_heads, source.choice(HEAD_DIMS)
    head_dim, v_head_dim = dims if isinstance(dims, tuple) else (dims, dims)
    if source.random() < PACKED_SHARE:
        lengths = [source.randint(0, 1500) for _ in range(source.randint(1, 5))] + [64]
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        sizes = ((heads, head_dim), (key_heads, head_dim), (key_heads, v_head_dim))
        shapes = [(sum(lengths), *size) for size in sizes]
        call = {"layout": "thd", "cu_seqlens_q": starts, "causal": source.random() < 0.5}
        call["position"] = source.choice([Rope(), Alibi(), ExpoSB(band_weights=learned(device)), t5(device)])
    else:
        queries, keys = length(5000), length(5000)
        if source.random() < FEW_SHARE:
            queries = source.randint(1, 63)
        elif source.random() < 0.3:
            keys = queries
        shapes = [(1, heads, queries, head_dim), *[(1, key_heads, keys, dim) for dim in (head_dim, v_head_dim)]]
        call = CALLS[source.choice(RANDOM)](device)
        if "sinks" in call:  # made for H heads
            call["sinks"] = torch.randn(heads, device=device)
    if "position" in call:
        call["position"] = for_heads(call["position"], heads, device)
    if source.random() < DROPOUT_SHARE:
        call["dropout_p"] = source.choice([0.1, 0.5])
    if max(head_dim, v_head_dim) <= hopper_support.WIDEST_LISTED and source.random() < RANGES_SHARE:
        window = source.choice([64, 150, 500])
        call["position"] = source.choice([ReRope(window), ReRope(window, leak=4.0), SelfExtend(window, 4)])
        steps = source.choice([2, 4, 1500])  # positions grow by fewer from token to token; or are any of so many
        for name, shape in zip(("positions_q", "positions_k"), shapes[:2], strict=True):
            tokens = (shape[0],) if "layout" in call else (1, shape[2])
            drawn = torch.randint(0, steps, tokens, device=device)
            call[name] = 10**9 + (drawn.cumsum(-1) if steps < 1500 else drawn)
    return [torch.randn(shape, device=device).bfloat16() for shape in shapes], call


def test_random_shapes_have_every_feature():
    """Each with and without a packed batch, where it may be, and each learned tensor beside dropout and without it."""
    drawn = set()
    for number in range(RANDOM_CALLS):
        (q, *_), call = random_call(number, "meta")
        is_packed, is_dropped = "layout" in call, "dropout_p" in call
        drawn |= {("dropped", is_dropped, is_packed), ("ranges", "positions_q" in call, is_packed)}
        drawn |= {("few", not is_packed and q.shape[2] < 64, is_packed)}
        if any(isinstance(x, Tensor) for x in vars(call.get("position", NoPosition())).values()):
            drawn |= {(type(call["position"]).__name__, is_dropped, is_packed)}
    every = {("dropped", True), ("dropped", False), ("few", False), ("ranges", True), ("ranges", False)}
    every |= {(name, is_dropped) for name in ("Alibi", "ExpoSB", "T5Bias") for is_dropped in (False, True)}
    expected = {(*feature, is_packed) for feature in every for is_packed in (False, True)}
    assert drawn >= expected | {("few", True, False)}


@on_hopper
@pytest.mark.parametrize("number", range(RANDOM_CALLS))
def test_random_shapes(kernels, device, number):
    tensors, call = random_call(number, device)
    check_supported(kernels, tensors, **call)


@on_hopper
@pytest.mark.parametrize("position", [NoPosition(), ReRope(200)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_ten_thousand_launches_give_the_same_bits(kernels, device, head_dim, position):
    tensors = draw(device, queries=700, keys=700, head_dim=head_dim)
    call = make_call(*tensors, position=position, causal=True, layout="bhtd")
    out, saved = kernels.forward(call, True)
    differs = torch.zeros((), dtype=torch.bool, device=device)
    for _ in range(10_000):
        again, saved_again = kernels.forward(call, True)
        differs |= (again != out).any() | (saved_again.lse != saved.lse).any()
    assert not bool(differs)


@on_hopper
@pytest.mark.parametrize("position", [NoPosition(), ReRope(200)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
def test_ten_thousand_backwards_differ_by_roundings(device, head_dim, position):
    """And in the deterministic mode not at all."""
    tensors = draw(device, queries=700, keys=700, head_dim=head_dim)
    call = make_call(*tensors, position=position, causal=True, layout="bhtd")
    grad_out = random_grad(call)
    for name, kernels in VARIANTS.items():
        out, saved = kernels.forward(call, True)
        first = [x.float() for x in launch_backward(kernels, call, out, saved, grad_out)[:3]]
        largest = torch.zeros(3, device=device)
        for _ in range(10_000):
            again = launch_backward(kernels, call, out, saved, grad_out)[:3]
            differences = [((x.float() - y).abs() / y.abs().max()).max() for x, y in zip(again, first, strict=True)]
            largest = torch.maximum(largest, torch.stack(differences))
        assert not bool(largest[1:].any())  # those of k and v have one order
        # What is added in another order in float32 rounds to the same bfloat16, or to its neighbour.
        assert float(largest[0]) <= (0 if name == "deterministic" else 2**-8)


@on_hopper
def test_two_streams_at_once(kernels, device):
    calls = []
    for head_dim in HEAD_DIMS:
        tensors = draw(device, queries=1500, keys=1500, head_dim=head_dim)
        call = make_call(*tensors, causal=True, layout="bhtd")
        calls.append((call, kernels.forward(call, True)[0]))
    streams = [torch.cuda.Stream() for _ in calls]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    outs = []
    for _ in range(50):
        for stream, (call, expected) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                outs.append((kernels.forward(call, True)[0], expected))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out, expected in outs)


@on_hopper
@pytest.mark.parametrize(
    "call",
    [{"causal": True}, {"key_lengths": [300, 9]}, {"layout": "thd"}, {"position": ReRope(70), "causal": True}],
    ids=str,
)
def test_a_graph_replays_forward_and_backward(device, call):
    call = {"position": Rope(), "impl": "gluon", **call}
    if "key_lengths" in call:
        call["key_lengths"] = torch.tensor(call["key_lengths"], device=device)
    tensors = [x.transpose(1, 2) for x in draw(device, queries=333)]
    if call.get("layout") == "thd":
        tensors = [x.flatten(0, 1) for x in tensors]
        call["cu_seqlens_q"] = integers(device, 0, 65, 600)
    tensors = [x.contiguous().requires_grad_() for x in tensors]
    weights = torch.randn_like(tensors[0])

    def step():
        out = attention(*tensors, **call)
        return out, *torch.autograd.grad((out * weights).sum(), tensors)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            for x in (*tensors, weights):
                x.copy_(torch.randn_like(x))
        graph.replay()
        for mine, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(mine, expected)


@on_hopper
def test_no_call_waits_for_the_device(device):
    tensors = [x.requires_grad_() for x in draw(device)]
    call = {"position": Rope(), "key_lengths": integers(device, TK, 4), "layout": "bhtd", "impl": "gluon"}
    attention(*tensors, **call).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(*tensors, **call).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# The operator


@on_hopper
@pytest.mark.parametrize("name", ["plain", "cache", "softcap-sinks", "alibi-learned", "rerope", "leaky"])
def test_the_operator_is_what_its_schema_says(device, name):
    tensors = [x.requires_grad_() for x in draw(device)]
    call = make_call(*tensors, layout="bhtd", **CALLS[name](device))
    arguments = (*flatten(call), True, "gluon")
    arguments = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in arguments]
    torch.library.opcheck(torch.ops.ropewalk.attend.default, tuple(arguments))


@on_hopper
@pytest.mark.parametrize("scheme", [Rope(), Alibi()], ids=lambda x: type(x).__name__)
def test_one_graph_serves_many_lengths(device, scheme):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(*tensors):
        return attention(*tensors, position=scheme, causal=True, layout="bhtd", impl="gluon")

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for length in (64, 130, 300, 77, 1000):
        tensors = [x.requires_grad_() for x in draw(device, queries=length, keys=length)]
        outs = [f(*tensors) for f in (compiled, function)]
        grads = [torch.autograd.grad(out.float().sin().sum(), tensors) for out in outs]
        for mine, expected in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
            torch.testing.assert_close(mine, expected)
    assert counter.frame_count <= 2  # the first length, and all others

"""8-bit products by kernels, against their definition in the reference in float64.

Values in e4m3 run on a GPU alone: Triton's interpreter rounds to them wrongly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import stub_gpu
from helpers.attention_calls import draw
from helpers.hopper_calls import WHY_MISSING
from helpers.kinds import kinds_of
from helpers.modes import KERNEL_DTYPES, ON_GPU, needs_kernels, on_gpu
from torch import Tensor

from ropewalk import BlockLists, QuantizedProducts, attention
from ropewalk import device as gpu
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backend import Refusal
from ropewalk.ops.attention.triton import launch as triton_launch
from ropewalk.ops.attention.triton import support
from ropewalk.ops.launch import kinds
from ropewalk.schemes import Alibi, ExpoSB, ReRope, Rope, T5Bias

H, K, T, D = 2, 1, 140, 32  # two blocks of keys
DTYPE = KERNEL_DTYPES[-1]
PRECISIONS = ["int8", "int8-fp8"] if ON_GPU else ["int8"]
MOST = {"int8": 3e-3, "int8-fp8": 2.6e-2}  # ‖δ‖/‖out‖ of a kernel, which rounds P beside the definition
BOUNDS = torch.tensor([0, 20, 133, 133, 140], dtype=torch.int32)


CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"position": Rope(), "causal": True},
    "fewer queries": {"position": Rope(), "causal": True, "queries": 40},
    "window": {"position": Rope(), "causal": True, "window": 40},
    "lengths": {"batch": 2, "key_lengths": torch.tensor([100, 0])},
    "starts": {
        "batch": 2,
        "position": Rope(),
        "causal": True,
        "queries": 120,
        "key_starts": torch.tensor([30, 3]),
        "query_starts": torch.tensor([0, 10]),
    },
    "packed": {"position": Rope(), "causal": True, "cu_seqlens_q": BOUNDS},
    "packed keys": {"cu_seqlens_q": BOUNDS // 2, "cu_seqlens_k": BOUNDS, "queries": 75},
    "rerope": {"position": ReRope(48), "causal": True},
    "leaky, both sides": {"position": ReRope(48, leak=4.0)},
    "alibi": {"position": Alibi(), "causal": True},
    "t5": {"t5": True},
    "exposb": {"position": ExpoSB(distance_decay=True), "causal": True},
    "softcap": {"softcap": 2.0},
    "negative scale": {"scale": -0.2},
    "sinks": {"causal": True, "sinks": torch.tensor([3.0, -torch.inf])},
    "gate": {"causal": True, "gate": True},
    "mask": {"mask": torch.arange(T)[:, None] % 3 != torch.arange(T) % 5},
    "blocks": {"blocks": True},
    "D 80": {"head_dim": 80, "v_head_dim": 48, "heads": 1},
    "D 192": {"head_dim": 192, "v_head_dim": 16, "heads": 1},
    "D 16": {"head_dim": 16, "v_head_dim": 80, "heads": 1},
}
IMPLS = ["triton", "gluon"] if WHY_MISSING is None else ["triton"]
if ON_GPU:
    CASES |= {f"D {d}, causal": {"position": Rope(), "causal": True, "head_dim": d} for d in (64, 128, 256)}


def make(device: torch.device, name: str, **more: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Draw a case's tensors, whose keys and values have a mean, and return its keywords."""
    keywords = {"batch": 1, "queries": T, "keys": T, "heads": H, "key_heads": K, "head_dim": D, **CASES[name], **more}
    sizes = ("batch", "queries", "keys", "heads", "key_heads", "head_dim", "v_head_dim")
    drawn = {size: keywords.pop(size) for size in sizes if size in keywords}
    is_packed = "cu_seqlens_q" in keywords
    if is_packed:
        drawn["batch"], keywords["layout"] = None, "thd"
    q, k, v = draw(device, DTYPE, **drawn)
    if keywords.pop("gate", False):
        keywords["gate"] = torch.randn(*q.shape[:-1], v.shape[-1], device=device).to(DTYPE)
    if keywords.pop("t5", False):
        keywords["position"] = T5Bias(torch.linspace(-2, 2, 32 * H, device=device).view(32, H))
    if keywords.pop("blocks", False):  # the last queries attend the first block of keys alone
        lists = (torch.ones(1, 1, 2), torch.zeros(1, 1, 2, 2))
        keywords["blocks"] = BlockLists(*(x.to(device, torch.int32) for x in lists))
    keywords = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in keywords.items()}
    return [q, k + 1, v + 0.5], keywords


def run(impl: str, tensors: list[Tensor], **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, logits = attention(*tensors, impl=impl, return_lse=True, return_max_logits=True, **keywords)
    return out, lse, logits


def define(tensors: list[Tensor], **keywords: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the definition's results in float64."""
    if "gate" in keywords:
        keywords["gate"] = keywords["gate"].double()
    return run("reference", [x.double() for x in tensors], **keywords)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@needs_kernels
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_definition(device: torch.device, impl: str, name: str, precision: str) -> None:
    tensors, keywords = make(device, name)
    with torch.no_grad():
        out, lse, logits = run(impl, tensors, precision=precision, **keywords)
        expected, expected_lse, expected_logits = define(tensors, precision=precision, **keywords)
    assert error(out, expected) <= MOST[precision]
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    # An integer may differ by one, where a number is halfway between two: in one row of many.
    off = (lse[finite].double() - expected_lse[finite].double()).abs()
    assert off.max() <= 2e-2
    assert off.square().mean().sqrt() <= 1e-3
    torch.testing.assert_close(logits.double(), expected_logits.double(), atol=2e-2, rtol=1e-3)


@on_gpu
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("precision", MOST)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["mean", "no mean", "sink"])
def test_long_sums_are_those_of_the_definition(
    device: torch.device, impl: str, head_dim: int, precision: str, kind: str
) -> None:
    """A short accumulator shrinks sums: small ones of values without a mean, too; or the first key has most weight."""
    tensors, keywords = make(device, "dense", causal=True, queries=128, keys=32768, head_dim=head_dim)
    q, k, v = tensors
    v += -0.5 if kind == "no mean" else 0.5  # to those of `make`, whose mean is 0.5
    if kind == "sink":  # at 9 nats
        q[..., 0], k[..., 0] = 4, 0
        k[:, 0], v[:, 0] = 0, v[:, 0] * 0.01
        k[:, 0, :, 0] = 9 / 4 * head_dim**0.5
    out, lse, _ = run(impl, tensors, precision=precision, **keywords)
    expected, expected_lse, _ = define(tensors, precision=precision, **keywords)
    assert error(out, expected) <= MOST[precision]
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=0)


@needs_kernels
@pytest.mark.skipif(ON_GPU, reason="descriptors of a kernel's own take memory where they are TMA's")
@pytest.mark.parametrize("name", ["lengths", "packed", "leaky, both sides", "D 80", "D 192"])
def test_gpus_without_tma_read_the_same(monkeypatch: pytest.MonkeyPatch, device: torch.device, name: str) -> None:
    tensors, keywords = make(device, name)
    expected, expected_lse, _ = run("triton", tensors, precision="int8", **keywords)
    monkeypatch.setattr(triton_launch, "has_tma", lambda: False)
    out, lse, _ = run("triton", tensors, precision="int8", **keywords)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@needs_kernels
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["causal", "packed", "rerope", "sinks", "exposb"])
def test_gradients_are_those_of_the_definition(device: torch.device, impl: str, name: str, precision: str) -> None:
    tensors, keywords = make(device, name)
    values = "16-bit" if precision == "int8" else "float8"
    keywords["precision"] = QuantizedProducts(values=values, backward="16-bit")
    weights = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1], device=device, dtype=torch.float64)

    def grads(by: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        sinks = keywords.get("sinks")
        learned = {} if sinks is None else {"sinks": sinks.to(dtype).requires_grad_()}
        out, lse = attention(*leaves, impl=by, return_lse=True, **{**keywords, **learned})
        loss = (out.double() * weights).sum() + lse.masked_fill(~lse.isfinite(), 0).sum()
        return torch.autograd.grad(loss, [*leaves, *learned.values()])

    for mine, exact in zip(grads(impl, DTYPE), grads("reference", torch.float64), strict=True):
        assert error(mine, exact) <= 5 * MOST[precision]  # the output's error, of which δ is a sum


@needs_kernels
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_later_tokens_and_other_sequences_change_no_bit(device: torch.device, impl: str, precision: str) -> None:
    tensors, keywords = make(device, "causal", queries=150, keys=150)
    keywords["precision"] = precision
    out, lse, _ = run(impl, tensors, **keywords)
    first, first_lse, _ = run(impl, [x[:, :128] for x in tensors], **keywords)
    assert torch.equal(first, out[:, :128])
    assert torch.equal(first_lse, lse[:, :, :128])
    bounds = torch.tensor([0, 70, 70, 150], dtype=torch.int32, device=device)
    packed, packed_lse, _ = run(impl, [x[0] for x in tensors], cu_seqlens_q=bounds, layout="thd", **keywords)
    for start, stop in ((0, 70), (70, 150)):
        alone, alone_lse, _ = run(impl, [x[:1, start:stop] for x in tensors], **keywords)
        assert torch.equal(alone[0], packed[start:stop])
        assert torch.equal(alone_lse[0], packed_lse[:, start:stop])


@needs_kernels
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_keys_that_do_not_exist_change_no_bit(device: torch.device, impl: str, precision: str) -> None:
    tensors, keywords = make(device, "starts")
    keywords |= {"key_lengths": torch.tensor([135, 137], device=device), "precision": precision}
    out, lse, _ = run(impl, tensors, **keywords)
    for x in tensors[1:]:
        x[0, :30], x[0, 135:], x[1, :3], x[1, 137:] = torch.nan, torch.inf, 6e4, torch.nan
    poisoned, poisoned_lse, _ = run(impl, tensors, **keywords)
    assert out.isfinite().all()
    assert torch.equal(poisoned, out)
    assert torch.equal(poisoned_lse, lse)


@needs_kernels
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("of", ["q", "k", "v"])
def test_nan_reaches_the_rows_that_attend_it(device: torch.device, impl: str, precision: str, of: str) -> None:
    tensors, keywords = make(device, "causal", batch=2, sinks=torch.tensor([0.0, 1.0]))
    tensors["qkv".index(of)][0, 130, 0, 3] = torch.nan
    out, lse, _ = run(impl, tensors, precision=precision, **keywords)
    expected, expected_lse, _ = define(tensors, precision=precision, **keywords)
    expects_nan = expected.isnan()
    assert expects_nan.any()
    if (of, precision) == ("v", "int8"):  # as in 16 bits, it also reaches rows that attend others of the same tile
        assert out[expects_nan].isnan().all()
        assert out[:, :128].isfinite().all()
        assert out[1].isfinite().all()
    else:
        assert torch.equal(out.isnan(), expects_nan)
    assert torch.equal(lse.isnan(), expected_lse.isnan())


@needs_kernels
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_that_attend_nothing_are_zero_beside_nan(device: torch.device, impl: str, precision: str) -> None:
    """Here the mean that is taken off keys is NaN, and that of values in e4m3."""
    tensors, keywords = make(device, "dense", batch=2, sinks=torch.tensor([0.0, -torch.inf]))
    for x in tensors[1:2] if precision == "int8" else tensors[1:]:
        x[0, 5, 0, 3] = torch.nan
    mask = torch.ones(T, T, dtype=torch.bool, device=device)
    mask[20:] = False
    out, lse, _ = run(impl, tensors, precision=precision, mask=mask, **keywords)
    assert out[0, :20].isnan().all()
    assert out[1].isfinite().all()
    assert (out[:, 20:] == 0).all()
    assert (lse[:, 0, 20:] == 0).all()
    assert (lse[:, 1, 20:] == -torch.inf).all()


@needs_kernels
@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_calls_have_no_break(device: torch.device, impl: str) -> None:
    tensors, keywords = make(device, "causal")
    keywords["precision"] = QuantizedProducts(backward="16-bit")

    def attend(*leaves: Tensor) -> Tensor:
        return attention(*leaves, impl=impl, **keywords)

    leaves = [x.requires_grad_() for x in tensors]
    out, compiled = attend(*leaves), torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves)
    assert torch.equal(out, compiled)
    expected, actual = (torch.autograd.grad(x.float().square().sum(), leaves) for x in (out, compiled))
    assert all(map(torch.equal, actual, expected))


REFUSED: dict[str, dict[str, Any]] = {
    "q's head dim is 40, but must be a multiple of 16 up to 256": {"head_dim": 40, "v_head_dim": 32},
    "v's head dim is 272, but must be a multiple of 16 up to 256": {"v_head_dim": 272},
    "float32 is not supported: q, k and v must be float16 or bfloat16": {"dtype": torch.float32},
    "q has 15 tokens, but must have at least 16": {"queries": 15},
}


@needs_kernels
@pytest.mark.parametrize("reason", REFUSED)
def test_calls_that_do_not_run_are_refused(device: torch.device, reason: str) -> None:
    tensors = draw(device, **{"dtype": torch.float16, **REFUSED[reason]})
    with pytest.raises(ValueError, match=f"precision is set: {reason}"):
        attention(*tensors, precision="int8", impl="triton")


@needs_kernels
def test_packed_calls_of_few_queries_run(device: torch.device) -> None:
    bounds = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    tensors = draw(device, torch.float16, batch=None, queries=5, keys=5, head_dim=32)
    out, _, _ = run("triton", tensors, precision="int8", cu_seqlens_q=bounds, layout="thd")
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("capability", "is_rocm", "reason"),
    [
        ((8, 0), False, "float8 values (e4m3) need compute capability 8.9"),
        ((8, 6), False, "float8 values (e4m3) need compute capability 8.9"),
        ((8, 9), False, None),
        ((12, 0), False, None),
        ((9, 4), True, "float8 values (e4m3) are not supported on AMD's GPUs"),
    ],
)
def test_gpus_without_e4m3_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_rocm: bool, reason: str | None
) -> None:
    monkeypatch.setattr(gpu, "capability", lambda device: capability)
    monkeypatch.setattr(gpu, "is_rocm", lambda: is_rocm)
    call = make_call(*draw(torch.device("meta"), torch.float16, queries=64, head_dim=32))
    int8, fp8 = (call._replace(precision=text) for text in ("int8+centre", "int8+float8_values+centre"))
    assert support.why_no_8_bits(int8) is None
    expected = None if reason is None else Refusal("precision", f"precision is set: {reason}")
    assert support.why_no_8_bits(fp8) == expected


def plan() -> dict[str, Any]:
    """Record the launches of calls at once and by plans, dense, of two ranges and packed."""
    kinds.on_cpu = True
    q, k, v = (torch.zeros(1, 300, n, 64, dtype=torch.bfloat16) for n in (4, 2, 2))
    packed = {"cu_seqlens_q": torch.tensor([0, 100, 300], dtype=torch.int32), "layout": "thd"}
    calls = (
        ((q, k, v), {"position": Rope(), "precision": QuantizedProducts(values="float8", backward="16-bit")}),
        ((q, k, v), {"position": ReRope(48), "precision": "int8-fp8"}),
        ((q[0], k[0], v[0]), {"precision": "int8", **packed}),
    )
    q.requires_grad_()
    records = []
    for tensors, keywords in calls:
        with torch.set_grad_enabled(not isinstance(keywords["precision"], str)):
            for _ in range(5):
                stub_gpu.clear()
                attention(*tensors, impl="triton", causal=True, **keywords)
                records.append([launch.name for launch in stub_gpu.launches()])
    return {"records": records, "kinds": len(kinds_of())}


@pytest.mark.compile
def test_plans_launch_what_calls_do() -> None:
    recorded = stub_gpu.run(plan)
    assert recorded["kinds"] == 3
    for start, names in (
        (0, ["rotate_kernel", "mean_kernel", "quantise_kernel", "forward_kernel"]),
        (5, ["mean_kernel", "quantise_kernel"] * 2 + ["forward_kernel"]),
        (10, ["mean_kernel", "quantise_kernel", "schedule_kernel", "forward_kernel"]),
    ):
        assert recorded["records"][start : start + 5] == [names] * 5

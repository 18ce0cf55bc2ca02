"""The argument `precision`: its values and errors, the backends that refuse it, and the plans of its calls."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad

from ropewalk import QKNorm, QuantizedProducts, Rope, T5Bias, attention, explain_choice
from ropewalk.ops.attention import backends
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backend import Refusal
from ropewalk.ops.attention.call import Precision
from ropewalk.ops.attention.plans.inputs import UNCHECKED
from ropewalk.ops.attention.quantise.reference import transform
from ropewalk.ops.attention.validate import Arguments, Unchecked
from ropewalk.parallel import SequenceLayout, context_parallel, context_parallel_attention, explain_context_parallel

H, K, D = 4, 2, 16
NAMES = {"int8": QuantizedProducts(), "int8-fp8": QuantizedProducts(values="float8")}


def draw(queries: int = 20, keys: int = 140) -> list[torch.Tensor]:
    return [torch.randn(1, tokens, heads, D) for tokens, heads in ((queries, H), (keys, K), (keys, K))]


# === values ===


def test_a_name_is_what_the_class_says():
    xs = draw()
    for name, products in NAMES.items():
        assert torch.equal(attention(*xs, precision=name), attention(*xs, precision=products))
    call = make_call(*xs, precision=QuantizedProducts(values="float8", hadamard=False))
    assert call.quantised == Precision(float8_values=True, hadamard=False, centre=True)
    assert make_call(*xs).precision is None
    assert torch.equal(attention(*xs, precision=None), attention(*xs))


def test_the_class_is_a_value():
    assert QuantizedProducts() == QuantizedProducts(values="16-bit")
    assert hash(QuantizedProducts()) == hash(QuantizedProducts())
    options = [{"values": "float8"}, {"hadamard": False}, {"centre": False}, {"backward": "16-bit"}]
    assert len({QuantizedProducts(), *(QuantizedProducts(**x) for x in options)}) == 5
    with pytest.raises(AttributeError):
        QuantizedProducts().values = "float8"  # type: ignore[misc]
    with pytest.raises(TypeError):
        QuantizedProducts("float8")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"values": "fp8"}, ValueError, "values is 'fp8', but must be '16-bit' or 'float8'"),
        ({"values": None}, ValueError, "values is None"),
        ({"hadamard": 1}, TypeError, "hadamard is 1, but must be True or False"),
        ({"centre": None}, TypeError, "centre is None, but must be True or False"),
        ({"backward": "8-bit"}, ValueError, "backward is '8-bit', but must be None or '16-bit'"),
        ({"backward": True}, ValueError, "backward is True"),
    ],
)
def test_the_class_refuses_other_values(keywords, error, message):
    with pytest.raises(error, match=message):
        QuantizedProducts(**keywords)


@pytest.mark.parametrize("function", [attention, explain_choice])
@pytest.mark.parametrize("impl", [None, "reference", "triton", "sdpa"])
@pytest.mark.parametrize(
    ("precision", "error", "message"),
    [
        ("fp8", ValueError, "precision is 'fp8', but must be None, 'int8', 'int8-fp8' or"),
        ("", ValueError, "precision is '', but"),
        (8, TypeError, "precision is int, but must be None"),
        (True, TypeError, "precision is bool, but must be None"),
        (["int8"], TypeError, "precision is list, but must be None"),
        (torch.ones(1), TypeError, "precision is Tensor, but must be None"),
    ],
)
def test_other_values_are_refused(function, impl, precision, error, message):
    with pytest.raises(error, match=message):
        function(*draw(), precision=precision, impl=impl)


PAGES = {"block_table": torch.tensor([[0, 1]]), "key_lengths": torch.tensor([20])}
SCALES = torch.ones(2, 16, K)
CACHE = {"layout": "thd", "cu_seqlens_q": torch.tensor([0, 2]), "key_lengths": torch.tensor([20])}
NOT_TOGETHER: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "dropout_p": ((1, 20, H, D), (1, 20, K, D), {"dropout_p": 0.5}),
    "block_table": ((1, 2, H, D), (2, 16, K, D), PAGES),
    "k_scale": ((1, 2, H, D), (2, 16, K, D), {**PAGES, "k_scale": SCALES, "v_scale": SCALES}),
    "packed queries over a cache": ((2, H, D), (1, 20, K, D), CACHE),
}


@pytest.mark.parametrize("function", [attention, explain_choice])
@pytest.mark.parametrize("impl", [None, "reference"])
@pytest.mark.parametrize("name", NOT_TOGETHER)
def test_what_does_not_go_with_it_is_refused(function, impl, name):
    of_q, of_k, keywords = NOT_TOGETHER[name]
    q, k, v = torch.randn(of_q), torch.randn(of_k), torch.randn(of_k)
    if name == "k_scale":
        k, v = k.to(torch.int8), v.to(torch.int8)
    function(q, k, v, impl=impl, **keywords)
    what = "block_table" if name == "k_scale" else name  # which it needs
    with pytest.raises(ValueError, match=f"precision was passed with {what}.*, but must be None"):
        function(q, k, v, impl=impl, precision="int8", **keywords)


@pytest.mark.parametrize(
    "name", ["smooth_k", "qk_quant_gran", "pv_accum_dtype", "q_descale", "k_descale", "v_descale", "fp8_dpa"]
)
def test_names_of_other_libraries_lead_to_it(name):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}': .*precision"):
        attention(*draw(), **{name: True})


def test_a_sharded_sequence_refuses_it():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layout = SequenceLayout(dist.group.WORLD, 20)
        xs = draw(20, 20)
        context_parallel_attention(*xs, layout=layout)
        for function in (context_parallel_attention, explain_context_parallel):
            with pytest.raises(ValueError, match="precision is 'int8', but must be None for shards of a sequence"):
                function(*xs, layout=layout, precision="int8")
        with pytest.raises(TypeError, match="unexpected keyword argument 'dropout'"):
            context_parallel_attention(*xs, layout=layout, dropout=0.5)
        with context_parallel(layout), pytest.raises(ValueError, match="precision is 'int8', but must be None for sha"):
            attention(*xs, precision="int8")
    finally:
        dist.destroy_process_group()


def test_the_docstring_says_what_is_computed():
    code = textwrap.dedent((QuantizedProducts.__doc__ or "").partition("in float32::\n\n")[2].partition("\n\n")[0])
    q, k, v = (x[0, :, 0].double() for x in draw())
    names = {"queries": q, "keys": k, "Tk": len(k), "scale": D**-0.5, "torch": torch}
    names["hadamard"] = transform(torch.eye(D, dtype=torch.float64))
    torch.set_default_dtype(torch.float64)
    try:
        exec(code, names)
    finally:
        torch.set_default_dtype(torch.float32)
    hidden = torch.arange(len(k)) > torch.arange(len(q))[:, None] + len(k) - len(q)
    scores = names["scores"].masked_fill(hidden, -torch.inf)
    xs = [x[None, :, None] for x in (q, k, v)]
    _, lse = attention(*xs, causal=True, precision="int8", return_lse=True)
    torch.testing.assert_close(lse[0, 0], scores.logsumexp(1))


# === gradients that are needed ===


def learned(name: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """A call that needs the gradient of one of its tensors."""
    xs = draw(20, 20)
    keywords: dict[str, Any] = {
        "sinks": {"sinks": torch.zeros(H)},
        "gate": {"gate": torch.zeros(1, 20, H)},
        "norm": {"norm": QKNorm(torch.ones(D).requires_grad_(), torch.ones(D)), "position": Rope()},
        "norm alone": {"norm": QKNorm(torch.ones(D), torch.ones(D).requires_grad_())},
        "scheme": {"position": T5Bias(torch.zeros(8, H).requires_grad_())},
    }.get(name, {})
    if name in ("q", "k", "v"):
        xs["qkv".index(name)].requires_grad_()
    elif name in ("sinks", "gate"):
        keywords[name].requires_grad_()
    return xs, keywords


@pytest.mark.parametrize("function", [attention, explain_choice])
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "gate", "norm", "norm alone", "scheme"])
def test_a_gradient_needs_a_backward(function, name):
    xs, keywords = learned(name)
    with pytest.raises(ValueError, match="precision is 'int8', whose backward is None, but a gradient is needed"):
        function(*xs, precision="int8", **keywords)
    function(*xs, precision=QuantizedProducts(backward="16-bit"), **keywords)
    with torch.no_grad():
        function(*xs, precision="int8", **keywords)


def test_transforms_differentiate_nothing():
    products = QuantizedProducts(backward="16-bit")
    q, k, v = draw()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, precision=products).sum()

    for differentiate in (
        lambda: torch.func.grad(attend)(q),
        lambda: torch.func.jvp(attend, (q,), (q,)),
        lambda: torch.func.vmap(attend)(q[None].requires_grad_()),
    ):
        with pytest.raises(ValueError, match=r"precision is .*, but must be None where torch.func or forward-mode"):
            differentiate()
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"precision is .* forward-mode"):
        attend(forward_ad.make_dual(q.detach(), q.detach()))
    q = q.detach()
    batched = torch.func.vmap(functools.partial(attention, k=k, v=v, precision="int8"))(torch.stack((q, 2 * q)))
    torch.testing.assert_close(batched[1], attention(2 * q, k, v, precision="int8"))

    def attend_constants(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return attention(q, k, v, precision="int8").sum() + x.sum()

    assert torch.equal(torch.func.grad(attend_constants)(q), torch.zeros_like(q))


# === backends ===


def test_backends_refuse_it_by_name():
    xs = [x.to(torch.float16) for x in draw()]
    choice = explain_choice(*xs, precision="int8")
    assert choice.name == "reference"
    assert choice.others["sdpa"] == "precision is not supported"
    with pytest.raises(ValueError, match="impl is 'sdpa', but it cannot run this call: precision is not supported"):
        attention(*xs, precision="int8", impl="sdpa")
    call = make_call(*xs, precision="int8")
    refused = backends.why_not(backends.BACKENDS["flash"], call)
    assert refused is not None
    for backend in (*backends.KERNELS.values(), backends.REFERENCE):
        assert ("precision" in backend.reads) or backend is not backends.REFERENCE
    assert not any("precision" in backend.backward_reads for backend in backends.KERNELS.values())


class _OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda")  # type: ignore[assignment]


def test_no_choice_falls_back_to_the_reference_on_a_gpu(monkeypatch):
    call = make_call(*draw(), precision="int8")
    assert backends.choose(call, None) is backends.REFERENCE
    q = call.q.as_subclass(_OnGpu)
    refused = Refusal("precision", "precision is not supported")
    monkeypatch.setattr(backends, "why_not", lambda x, call: None if x is backends.REFERENCE else refused)
    with pytest.raises(ValueError, match=r"with precision: triton: precision is not supported; gluon: .*='ref"):
        backends.choose(call._replace(q=q), None)
    assert backends.choose(call._replace(q=q), "reference") is backends.REFERENCE


# === kinds and plans ===


def test_keys_of_plans_hold_it():
    q, k, v = draw()

    def key(precision: Any) -> Any:
        return UNCHECKED.key(Unchecked(q, k, v, Arguments(precision=precision)))

    products = [{}, {"values": "float8"}, {"hadamard": False}, {"centre": False}, {"backward": "16-bit"}]
    keys = {key(x) for x in (None, "int8", "int8-fp8", *(QuantizedProducts(**y) for y in products))}
    assert len(keys) == 8
    assert key(QuantizedProducts(values="float8")) == key(QuantizedProducts(values="float8"))


def test_calls_in_a_row_keep_to_their_own(monkeypatch):
    from ropewalk.ops.launch import kinds

    monkeypatch.setattr(kinds, "on_cpu", True)
    xs = draw()
    every: list[Any] = [None, "int8", QuantizedProducts(), "int8-fp8", QuantizedProducts(hadamard=False)]
    expected = [attention(*xs, causal=True, precision=x, impl=None if x is None else "reference") for x in every]
    assert torch.equal(expected[1], expected[2])
    assert not any(torch.equal(expected[i], expected[j]) for i in (0, 1, 3, 4) for j in (0, 1, 3, 4) if i < j)
    for _ in range(3):
        for precision, out in zip(every, expected, strict=True):
            for _ in range(3):  # the second one makes a kind, which the third one finds
                assert torch.equal(attention(*xs, causal=True, precision=precision), out)


def test_one_call_is_the_same_every_time_in_all_surroundings():
    xs = [x.to(torch.bfloat16) for x in draw()]
    keywords = {"causal": True, "position": Rope(), "precision": "int8-fp8"}
    out = attention(*xs, **keywords)
    assert torch.equal(attention(*xs, **keywords), out)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(*(x.float() for x in xs), **keywords), out)


def test_it_is_traced_for_many_lengths():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        functools.partial(attention, precision="int8"), backend=counter, fullgraph=True, dynamic=True
    )
    for keys in (140, 300, 200):
        q, k, v = (x[..., :2] for x in draw(20, keys))
        torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, precision="int8"))
    assert counter.frame_count == 1

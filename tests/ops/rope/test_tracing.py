"""What looks at a program rather than running it sees one operator, compiled once, with the results of eager calls."""

import pytest
import torch
from helpers.onlooker import Onlooker
from helpers.rope_calls import CALLS, ROWS, B, D, arguments, as_tuple, assert_same, inputs
from helpers.rope_definition import random_tables, random_tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from ropewalk import apply_rope

OPERATORS = {False: torch.ops.ropewalk.rope.default, True: torch.ops.ropewalk.rope_.default}


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    torch._dynamo.reset()


def operator_arguments(name, device, impl):
    """The same for the operators: xs, and all that follows."""
    (q, k, cos, sin), call = arguments(name, device)
    positions = call.get("offsets", call.get("positions"))  # the operator's 1-D positions are offsets
    offset, positions = (positions, None) if isinstance(positions, int) else (0, positions)
    flags = [call.get("layout", "bthd"), call.get("interleaved", False), call.get("inverse", False)]
    flags += [call.get("rotary_dim"), call.get("rotary_offset", 0), impl, call.get("pair_block")]
    return [x for x in (q, k) if x is not None], (
        cos,
        sin,
        positions,
        call.get("cu_seqlens"),
        offset,
        *flags,
        call.get("axes"),
    )


def compiled(function, backend="aot_eager", dynamic=None):
    """The function without a graph break, and a counter of its compilations."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


class Wrapped(torch.Tensor):
    """A tensor subclass around another tensor, which notes the operators that it meets."""

    seen = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("inplace", [False, True], ids=["rope", "rope_"])
@pytest.mark.parametrize("name", CALLS)
def test_the_operators_are_what_their_schemas_say(name, inplace, requires_grad, device, impl):
    if inplace and requires_grad:
        pytest.skip("an operator that overwrites its arguments has no derivative")
    xs, rest = operator_arguments(name, device, impl)
    xs = [x.requires_grad_(requires_grad) for x in xs]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if "outside" in name:
        checks.pop()  # which does not know that NaN can be right
    torch.library.opcheck(OPERATORS[inplace], (xs, *rest), test_utils=checks)


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_equal_eager_ones(name, inplace, device, impl):
    (q, k, cos, sin), call = arguments(name, device)

    def function(q, k):
        return apply_rope(q, k, cos, sin, inplace=inplace, impl=impl, **call)

    def run(function):
        xs = [None if x is None else x.clone() for x in (q, k)]
        return (*as_tuple(function(*xs)), *(x for x in xs if x is not None))

    faster, counter = compiled(function)
    assert_same(run(faster), run(function))
    assert counter.frame_count == 1


def rotation_and_gradients(function, xs, weights):
    """The results, and the gradients of their weighted sum."""
    leaves = [x.clone().requires_grad_() for x in xs]
    results = as_tuple(function(*leaves))
    loss = sum((x * weight).nan_to_num().sum() for x, weight in zip(results, weights, strict=True))
    return (*(x.detach() for x in results), *torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_compiled_calls_equal_eager_ones(name, inplace, device, impl):
    (q, k, cos, sin), call = arguments(name, device)
    xs = [x for x in (q, k) if x is not None]

    def function(q, k=None):
        if inplace:
            q, k = q * 1, None if k is None else k * 1
        return apply_rope(q, k, cos, sin, inplace=inplace, impl=impl, **call)

    weights = [random_tensor(*x.shape, device=device) for x in xs]
    faster, _ = compiled(function)
    expected = rotation_and_gradients(function, xs, weights)
    assert_same(rotation_and_gradients(faster, xs, weights), expected)


@pytest.mark.parametrize("inplace", [False, True], ids=["out", "inplace"])
def test_inductor_rotates_and_differentiates(inplace, device, impl):
    (q, k, cos, sin), _ = arguments("plain", device)

    def function(q, k):
        return apply_rope(q * 2, k * 2, cos, sin, inplace=inplace, impl=impl)

    weights = [random_tensor(*x.shape, device=device) for x in (q, k)]
    faster, _ = compiled(function, "inductor")
    assert_same(rotation_and_gradients(faster, (q, k), weights), rotation_and_gradients(function, (q, k), weights))


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("kind", ["index", "offset", "tokens", "packed", "inplace"])
def test_lengths_do_not_recompile(kind, grad, device, impl):
    cos, sin = random_tables(ROWS, D // 2, device=device)
    layout = "thd" if kind == "packed" else "bthd"

    def function(q, k, positions, cu_seqlens):
        q, k = q * 1, k * 1
        call = {"positions": positions, "cu_seqlens": cu_seqlens, "layout": layout, "inplace": kind == "inplace"}
        return apply_rope(q, k, cos, sin, impl=impl, **call)

    faster, counter = compiled(function)
    for step, tokens in enumerate((5, 9, 16, 33, 64, 126, 3)):
        xs = [x.requires_grad_(grad) for x in inputs(layout, tokens, device)]
        positions = None
        if kind == "offset":
            positions = min(step + 2, ROWS - tokens)
        elif kind == "tokens":
            positions = torch.randint(ROWS, (B, tokens), device=device)
        cu_seqlens = torch.tensor([0, 2, tokens], device=device) if kind == "packed" else None
        assert_same(faster(*xs, positions, cu_seqlens), function(*xs, positions, cu_seqlens))
    assert counter.frame_count <= 2


def test_a_changing_offset_does_not_recompile(device, impl):
    cos, sin = random_tables(ROWS, D // 2, device=device)
    q, k = inputs(tokens=2, device=device)
    faster, counter = compiled(lambda q, k, offset: apply_rope(q, k, cos, sin, positions=offset, impl=impl))
    for offset in (*range(2, 40), ROWS - 2):
        assert_same(faster(q, k, offset), apply_rope(q, k, cos, sin, positions=offset, impl=impl))
    assert counter.frame_count <= 2


def test_a_marked_length_is_compiled_once(device, impl):
    cos, sin = random_tables(ROWS, D // 2, device=device)
    faster, counter = compiled(lambda q, k: apply_rope(q, k, cos, sin, impl=impl))
    for tokens in (5, 9, 33, 127):
        q, k = inputs(tokens=tokens, device=device)
        for x in (q, k):
            torch._dynamo.mark_dynamic(x, 1, min=2, max=ROWS)
        assert_same(faster(q, k), apply_rope(q, k, cos, sin, impl=impl))
    assert counter.frame_count == 1


def test_a_compiled_bad_call_raises(device):
    (q, k, cos, sin), _ = arguments("plain", device)
    faster, _ = compiled(lambda q, k, cos, sin: apply_rope(q, k, cos, sin, rotary_dim=8))
    with pytest.raises(Exception, match="rotary_dim is 8, but must be twice the width of cos, 16"):
        faster(q, k, cos, sin)


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_come_out_as_real_ones_do(name, device, impl):
    tensors, call = arguments(name, device)
    tensors = [None if x is None else x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    expected = as_tuple(apply_rope(*tensors, impl=impl, **call))
    with FakeTensorMode() as mode:
        call = {key: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for key, x in call.items()}
        results = as_tuple(apply_rope(*(x if x is None else mode.from_tensor(x) for x in tensors), impl=impl, **call))
    for fake, real in zip(results, expected, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (
            real.shape,
            real.stride(),
            real.dtype,
            real.device,
        )


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator_once(tracing_mode, device, impl):
    tensors, _ = arguments("plain", device)
    graph = make_fx(lambda *tensors: apply_rope(*tensors, impl=impl), tracing_mode=tracing_mode)(*tensors)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.ropewalk.rope.default) == 1
    assert not [target for target in targets if "aten" in str(target) and "sym_size" not in str(target)]
    assert_same(graph(*tensors), apply_rope(*tensors, impl=impl))


def test_export_keeps_the_operator_and_the_length_free(device, impl):
    tensors, _ = arguments("plain", device)

    class Rotation(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return apply_rope(q, k, cos, sin, impl=impl)

    length = torch.export.Dim("length", min=2, max=ROWS)
    program = torch.export.export(Rotation(), tensors, dynamic_shapes=({1: length}, {1: length}, None, None))
    assert "ropewalk.rope.default" in str(program.graph)
    longer = (*inputs(tokens=77, device=device), *tensors[2:])
    assert_same(program.module()(*longer), apply_rope(*longer, impl=impl))


def test_jit_trace_does_not_fix_what_it_saw(device, impl):
    (q, k, cos, sin), _ = arguments("plain", device)
    traced = torch.jit.trace(lambda q, k: apply_rope(q, k, cos, sin, impl=impl), (q, k))
    longer = inputs(tokens=50, device=device)
    assert_same(traced(*longer), apply_rope(*longer, cos, sin, impl=impl))


@pytest.mark.parametrize("inplace", [False, True], ids=["rope", "rope_"])
def test_a_dispatch_mode_sees_one_operator(inplace, device, impl):
    (q, k, cos, sin), _ = arguments("plain", device)
    expected = apply_rope(q, k, cos, sin, impl=impl)
    with Onlooker() as onlooker:
        rotated = apply_rope(q, k, cos, sin, inplace=inplace, impl=impl)
    assert onlooker.seen == [OPERATORS[inplace]]
    assert_same(rotated, expected)


def test_a_tensor_subclass_meets_the_operator(device, impl):
    (q, k, cos, sin), _ = arguments("plain", device)
    Wrapped.seen.clear()
    rotated = apply_rope(Wrapped(q), Wrapped(k), cos, sin, impl=impl)
    assert Wrapped.seen == [OPERATORS[False]]
    assert all(type(x) is Wrapped for x in rotated)
    assert_same([x.inner for x in rotated], apply_rope(q, k, cos, sin, impl=impl))


def test_autocast_leaves_the_dtype_alone(device, impl):
    for dtype in (torch.float16, torch.float32, torch.float64):
        (q, k, cos, sin), _ = arguments("plain", device, dtype)
        expected = apply_rope(q, k, cos, sin, impl=impl)
        q = q.requires_grad_()
        with torch.autocast(device.type, torch.bfloat16):
            rotated = apply_rope(q, k, cos, sin, impl=impl)
        assert_same([x.detach() for x in rotated], expected)
        assert torch.autograd.grad(rotated[0].sum(), q)[0].dtype == dtype

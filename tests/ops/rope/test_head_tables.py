"""Tables with rows for each head: the rotation and all gradients, against float64."""

import pytest
import torch
from helpers.modes import ON_GPU
from helpers.rope_calls import CALLS, HQ, ROWS, D, arguments, as_tuple, assert_same, inputs
from helpers.rope_definition import check_rotation, definition, is_interpreted, plain, random_tensor, rotate
from torch._dynamo.testing import CompileCounterWithBackend

from ropewalk import QKNorm, apply_rope
from ropewalk.ops.rope import backends
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.testing import assert_close_to_truth, poisoned_memory, unchanged

B, T, H, N = 3, 5, 3, 12
LAYOUTS = ("bthd", "bhtd", "thd")
KINDS = ("per token", "one row", "positions", "one row of positions", "offsets")
# Head dim, rotary dim, first rotated feature, and how features are paired.
WIDTHS = [(8, 8, 0, {}), (9, 6, 2, {}), (16, 16, 0, {"interleaved": True}), (11, 8, 1, {"pair_block": 4})]


def make(layout, device, head_dim=8, dtype=torch.float32, tokens=T, heads=(H, H)):
    shapes = {"bthd": lambda h: (B, tokens, h), "bhtd": lambda h: (B, h, tokens), "thd": lambda h: (tokens, h)}
    return [random_tensor(*shapes[layout](n), head_dim, dtype=dtype, device=device) for n in heads]


def tables(kind, layout, device, rotary_dim=8, dtype=torch.float32, tokens=T):
    """cos and sin, which are any numbers, and the keywords of their lookup: rows repeat, and some lie outside."""
    batch = 1 if layout == "thd" else B
    shape = {"per token": (batch, tokens, H), "one row": (1, tokens, H)}.get(kind, (N, H))
    keywords = {}
    if layout == "thd" and kind not in ("per token", "one row"):
        keywords["positions"] = torch.tensor([3, 12, 3, -1, 0], device=device)[:tokens]
    elif kind == "positions":
        keywords["positions"] = torch.tensor([[3, 3, 1, 0, 3], [11, 12, 0, -1, 3], [4, 3, 2, 1, 0]], device=device)
    elif kind == "one row of positions":
        keywords["positions"] = torch.tensor([[3, 3, -1, 0, 11]], dtype=torch.int32, device=device)
    elif kind == "offsets":
        keywords["offsets"] = torch.tensor([0, 9, -1], device=device)
    cos, sin = (random_tensor(*shape, rotary_dim // 2, dtype=dtype, device=device) for _ in range(2))
    return (cos, sin), keywords


def skip_most(impl, device, layout, kind, pairs):
    """In the interpreter, where a launch takes long, leave a third of the cases, or a sixth: each layout and kind."""
    number = LAYOUTS.index(layout) + KINDS.index(kind) + len(str(pairs))
    if is_interpreted(impl, device) and number % (6 if pairs else 3):
        pytest.skip("a launch takes long in the interpreter")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "rotary_dim", "rotary_offset", "pairs"), WIDTHS)
def test_each_head_turns_by_its_own_rows(heads_impl, device, layout, kind, head_dim, rotary_dim, rotary_offset, pairs):
    skip_most(heads_impl, device, layout, kind, pairs)
    (cos, sin), keywords = tables(kind, layout, device, rotary_dim)
    call = {"layout": layout, "rotary_offset": rotary_offset, "impl": heads_impl, **pairs, **keywords}
    check_rotation(*make(layout, device, head_dim), cos, sin, **call)
    if layout == "bthd":
        check_rotation(*make(layout, device, head_dim), cos, sin, inverse=True, **call)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("start", [None, 0, 4])
def test_rows_by_index(heads_impl, device, layout, start):
    """(n, H, R/2) without positions, or with an int."""
    (cos, sin), _ = tables("positions", layout, device)
    cos.requires_grad_()
    q, k = make(layout, device)
    positions = torch.arange(T, device=device) + (start or 0)
    positions = positions if layout == "thd" else positions[None]
    results = []
    for given in (start, positions):
        out = apply_rope(q, k, cos, sin, positions=given, layout=layout, impl=heads_impl)
        results.append((*out, torch.autograd.grad(sum(x.square().sum() for x in out), cos)[0]))
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_tables_that_fit_per_token_are_per_token(heads_impl, device):
    """B = 6 rows of T = H = 3 tokens: (6, 3, R/2) is (B, T, R/2)."""
    q, k = (random_tensor(6, H, H, 8, device=device) for _ in range(2))
    cos, sin = (random_tensor(6, H, 4, device=device) for _ in range(2))
    expected = apply_rope(q, k, cos[:, :, None].expand(-1, -1, H, -1), sin[:, :, None].expand(-1, -1, H, -1))
    for mine, theirs in zip(apply_rope(q, k, cos, sin, impl=heads_impl), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("table_dtype", [None, torch.float32], ids=["alike", "float32"])
def test_dtypes(heads_impl, device, dtype, table_dtype):
    (cos, sin), keywords = tables("positions", "bthd", device, dtype=table_dtype or dtype)
    check_rotation(*make("bthd", device, dtype=dtype), cos, sin, impl=heads_impl, **keywords)


def test_strides_single_tensors_and_no_tokens(heads_impl, device):
    (cos, sin), keywords = tables("positions", "bthd", device)
    fused = random_tensor(B, T, 3 * H, 8, device=device)
    check_rotation(fused[:, :, :H], fused[:, :, H : 2 * H], cos, sin, impl=heads_impl, **keywords)
    check_rotation(fused[:, :, :H], None, cos, sin, impl=heads_impl, **keywords)
    q, k = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in make("bthd", device))
    transposed = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in (cos, sin)]
    check_rotation(q, k, *transposed, impl=heads_impl, **keywords)
    expanded = [x[:, :1].expand(N, H, 4) for x in (cos, sin)]
    check_rotation(*make("bthd", device), *expanded, impl=heads_impl, **keywords)
    (cos, sin), keywords = tables("per token", "bthd", device, tokens=0)
    check_rotation(*make("bthd", device, tokens=0), cos, sin, impl=heads_impl)


def test_equal_rows_for_all_heads_give_what_shared_tables_give(heads_impl, device):
    (cos, sin), keywords = tables("positions", "bthd", device)
    q, k = make("bthd", device)
    expected = rotate(q, k, cos[:, 0], sin[:, 0], impl=heads_impl, **keywords)
    of_heads = [x[:, :1].expand(N, H, 4).contiguous() for x in (cos, sin)]
    for x, y in zip(rotate(q, k, *of_heads, impl=heads_impl, **keywords), expected, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


def gradients(inputs, cotangents, call, impl):
    q, k, cos, sin = inputs
    outs = rotate(q, k, cos, sin, impl=impl, **call)
    pairs = [(out, cotangent) for out, cotangent in zip(outs, cotangents, strict=True) if out.requires_grad]
    outs, cotangents = zip(*pairs, strict=True)
    return torch.autograd.grad(outs, [x for x in inputs if x is not None and x.requires_grad], cotangents)


def exact_gradients(inputs, cotangents, call):
    """All in float64; a token outside the tables has no gradient there."""
    exact = [None if x is None else x.detach().cpu().double().requires_grad_() for x in inputs]
    q, k, cos, sin = exact
    outs = [definition(x, cos, sin, **call) for x in (q, k) if x is not None]
    outs = [torch.where(x.isnan(), 0.0, x) for x in outs]
    cotangents = [x.detach().cpu().double() for x in cotangents]
    return torch.autograd.grad(outs, [x for x in exact if x is not None], cotangents)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("head_dim", "rotary_dim", "rotary_offset", "pairs"), WIDTHS)
def test_gradients_of_tables(heads_impl, device, layout, kind, head_dim, rotary_dim, rotary_offset, pairs):
    skip_most(heads_impl, device, layout, kind, pairs)
    (cos, sin), keywords = tables(kind, layout, device, rotary_dim)
    inputs = [x.requires_grad_() for x in (*make(layout, device, head_dim), cos, sin)]
    call = {"layout": layout, "rotary_offset": rotary_offset, "inverse": kind == "one row", **pairs, **keywords}
    cotangents = make(layout, device, head_dim)
    with poisoned_memory(), unchanged([*inputs, *cotangents]):
        actual = gradients(inputs, cotangents, call, heads_impl)
    again = gradients(inputs, cotangents, call, heads_impl)
    for x, y in zip(actual, again, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num())
    expected = exact_gradients(inputs, cotangents, call)
    back = rotate(*cotangents, cos.detach(), sin.detach(), impl="reference", **call | {"inverse": not call["inverse"]})
    for x, y in zip(actual[:2], back, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)
    for x, y, table in zip(actual[2:], expected[2:], (cos, sin), strict=True):
        assert (x.dtype, x.shape) == (table.dtype, table.shape)
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["per token", "one row", "positions"])
def test_gradients_are_rounded_once(heads_impl, device, kind):
    (cos, sin), keywords = tables(kind, "bthd", device, dtype=torch.float16)
    inputs = [x.requires_grad_() for x in (*make("bthd", device, dtype=torch.float16), cos, sin)]
    cotangents = make("bthd", device, dtype=torch.float16)
    actual = gradients(inputs, cotangents, keywords, heads_impl)
    for x, y in zip(actual[2:], exact_gradients(inputs, cotangents, keywords)[2:], strict=True):
        assert_close_to_truth(x.cpu(), y, y.to(x.dtype))


@pytest.mark.parametrize("wants", ["cos", "sin", "tables", "q", "q, cos", "k, sin"])
def test_only_what_asks_for_a_gradient_gets_one(heads_impl, device, wants):
    (cos, sin), keywords = tables("positions", "bthd", device)
    inputs = [*make("bthd", device), cos, sin]
    asked = [i for i, name in enumerate(("q", "k", "cos", "sin")) if name in wants.replace("tables", "cos sin")]
    for i in asked:
        inputs[i].requires_grad_()
    cotangents = make("bthd", device)
    actual = gradients(inputs, cotangents, keywords, heads_impl)
    expected = exact_gradients(inputs, cotangents, keywords)
    for x, i in zip(actual, asked, strict=True):
        torch.testing.assert_close(x.cpu().nan_to_num(), expected[i].float().nan_to_num(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_one_result(heads_impl, device, used):
    (cos, sin), keywords = tables("one row of positions", "bthd", device)
    inputs = [x.requires_grad_() for x in (*make("bthd", device), cos, sin)]
    out = rotate(*inputs, impl=heads_impl, **keywords)[used]
    (cotangent,) = make("bthd", device, heads=(H,))
    actual = torch.autograd.grad(out, inputs[2:], cotangent)
    alone = [inputs[used], None, cos, sin]
    for x, y in zip(actual, exact_gradients(alone, [cotangent], keywords)[1:], strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-5, atol=1e-5)


def test_q_alone(heads_impl, device):
    (cos, sin), keywords = tables("offsets", "bthd", device)
    inputs = [make("bthd", device)[0].requires_grad_(), None, cos.requires_grad_(), sin.requires_grad_()]
    (cotangent,) = make("bthd", device, heads=(H,))
    actual = gradients(inputs, [cotangent], keywords, heads_impl)
    for x, y in zip(actual[1:], exact_gradients(inputs, [cotangent], keywords)[1:], strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-5, atol=1e-5)


def test_gradients_of_strided_tensors_and_no_tokens(heads_impl, device):
    (cos, sin), keywords = tables("positions", "bthd", device)
    q, k = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in make("bthd", device))
    inputs = [x.requires_grad_() for x in (q, k, cos, sin)]
    cotangents = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in make("bthd", device)]
    actual = gradients(inputs, cotangents, keywords, heads_impl)
    for x, y in zip(actual[2:], exact_gradients(inputs, cotangents, keywords)[2:], strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-5, atol=1e-5)
    cos, sin = (x.requires_grad_() for x in tables("positions", "bthd", device)[0])
    none = torch.zeros(1, 0, dtype=torch.int64, device=device)
    out = apply_rope(*make("bthd", device, tokens=0), cos, sin, positions=none, impl=heads_impl)
    for x in torch.autograd.grad(out[0].sum() + out[1].sum(), (cos, sin)):
        assert x.shape == cos.shape
        assert not x.any()


@pytest.mark.parametrize("kind", ["per token", "one row", "positions", "offsets"])
@pytest.mark.parametrize("pairs", [{}, {"interleaved": True}, {"pair_block": 4, "inverse": True}], ids=str)
def test_gradcheck_and_gradgradcheck(heads_impl, device, kind, pairs):
    if is_interpreted(heads_impl, device) and kind != "positions":
        pytest.skip("a launch takes long in the interpreter")
    (cos, sin), keywords = tables(kind, "bthd", device, dtype=torch.float64)
    keywords = {name: x.clamp(0, 5) for name, x in keywords.items()}  # NaN has no finite differences
    inputs = [x.requires_grad_() for x in (*make("bthd", device, dtype=torch.float64), cos, sin)]

    def function(*inputs):
        return rotate(*inputs, impl=heads_impl, **pairs, **keywords)

    how = {"fast_mode": True, "check_undefined_grad": False}
    assert torch.autograd.gradcheck(function, inputs, **how)
    assert torch.autograd.gradgradcheck(function, inputs, **how)


def test_the_device_sums_rows_that_repeat_in_one_order(heads_impl, device):
    """Many tokens of a few rows."""
    tokens = 64 if is_interpreted(heads_impl, device) else 3000
    cos, sin = (random_tensor(4, H, 4, device=device).requires_grad_() for _ in range(2))
    positions = torch.randint(4, (2, tokens), device=device)
    q, k, *cotangents = (random_tensor(2, tokens, H, 8, device=device) for _ in range(4))
    call = {"positions": positions}
    first = gradients([q, k, cos, sin], cotangents, call, heads_impl)
    assert_same(gradients([q, k, cos, sin], cotangents, call, heads_impl), first)
    for x, y in zip(first, exact_gradients([q, k, cos, sin], cotangents, call)[2:], strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-4, atol=1e-4)


def test_in_place_needs_tables_that_are_fixed(heads_impl, device):
    (cos, sin), keywords = tables("positions", "bthd", device)
    q, k = make("bthd", device)
    before = q.clone(), k.clone()
    with pytest.raises(ValueError, match="inplace is True, but must be False where cos or sin requires grad"):
        apply_rope(q, k, cos.requires_grad_(), sin, inplace=True, impl=heads_impl, **keywords)
    assert torch.equal(q, before[0])
    with torch.no_grad():  # nothing is recorded
        rotated, _ = apply_rope(q, k, cos, sin, inplace=True, impl=heads_impl, **keywords)
    assert rotated is q


@pytest.mark.parametrize("name", [name for name in CALLS if "heads" in name])
@pytest.mark.parametrize("mode", ["opcheck", "compiled", "inductor"])
def test_learned_tables_by_operators(heads_impl, device, name, mode):
    (q, k, cos, sin), call = arguments(name, device)
    inputs = [x.requires_grad_() for x in (q, k, cos, sin)]

    def function(q, k, cos, sin):
        return apply_rope(q * 1, k * 1, cos * 1, sin * 1, impl=heads_impl, **call)

    if mode == "inductor" and (name != "heads-per-token" or is_interpreted(heads_impl, device)):
        pytest.skip("one of them is enough, as inductor takes long")
    if mode == "opcheck":
        flags = [call.get("layout", "bthd"), call.get("interleaved", False), call.get("inverse", False)]
        flags += [call.get("rotary_dim"), call.get("rotary_offset", 0), heads_impl, call.get("pair_block")]
        rest = (cos, sin, call.get("positions"), call.get("cu_seqlens"), 0, *flags, None)
        checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if "positions" in call:
            checks.pop()  # which does not know that NaN can be right
        torch.library.opcheck(torch.ops.ropewalk.rope.default, ([q, k], *rest), test_utils=checks)
        detached = [x.detach() for x in rest[:2]]
        gradients = ([q.detach(), k.detach()], [k.detach(), q.detach()], *detached, *rest[2:], True)
        torch.library.opcheck(torch.ops.ropewalk.rope_gradients.default, gradients, test_utils=checks[:3])
        return
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager" if mode == "compiled" else mode)
    faster = torch.compile(function, backend=counter, fullgraph=True)
    cotangents = [random_tensor(*x.shape, device=device) for x in (q, k)]
    results = [
        (*outs, *torch.autograd.grad(outs, inputs, cotangents)) for outs in (f(*inputs) for f in (faster, function))
    ]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)
    assert counter.frame_count == 1


def test_lengths_do_not_recompile(heads_impl, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    cos, sin = (random_tensor(ROWS, HQ, D // 2, device=device).requires_grad_() for _ in range(2))

    def function(q, k, positions):
        return apply_rope(q * 1, k * 1, cos, sin, positions=positions, impl=heads_impl)

    faster = torch.compile(function, backend=counter, fullgraph=True)
    for tokens in (5, 9, 16):
        xs = [x.requires_grad_() for x in inputs(tokens=tokens, device=device, k_heads=HQ)]
        positions = torch.randint(ROWS, (1, tokens), device=device)
        results = []
        for f in (faster, function):
            outs = as_tuple(f(*xs, positions))
            results.append((*outs, *torch.autograd.grad(outs[0].sum() + outs[1].sum(), (*xs, cos, sin))))
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y)
    assert counter.frame_count <= 2


def test_gradients_under_transforms(device):
    (cos, sin), _ = tables("per token", "bthd", device, dtype=torch.float64)
    q, k = make("bthd", device, dtype=torch.float64)

    def loss(cos, sin):
        return sum(x.square().sum() * (i + 1) for i, x in enumerate(apply_rope(q, k, cos, sin)))

    by_transform = torch.func.grad(loss, argnums=(0, 1))(cos, sin)
    leaves = [x.clone().requires_grad_() for x in (cos, sin)]
    torch.testing.assert_close(by_transform, torch.autograd.grad(loss(*leaves), leaves))


def test_a_plan_of_fixed_tables_is_not_one_of_learned_ones(heads_impl, device):
    """The same shapes with and without grad, one after the other."""
    (cos, sin), keywords = tables("positions", "bthd", device)
    q, k = make("bthd", device)
    for _ in range(2):
        fixed = apply_rope(q, k, cos, sin, impl=heads_impl, **keywords)
        learned = apply_rope(q, k, cos.clone().requires_grad_(), sin, impl=heads_impl, **keywords)
        assert not fixed[0].requires_grad
        assert learned[1].requires_grad
        assert_same([x.detach() for x in learned], fixed)


def test_a_norm_is_refused(device):
    (cos, sin), keywords = tables("positions", "bthd", device)
    with pytest.raises(ValueError, match="norm was given with tables per head, but must be None"):
        apply_rope(*make("bthd", device), cos, sin, norm=QKNorm(), **keywords)


def test_the_cuda_extension_refuses_tables_per_head():
    call = RopeCall(torch.empty(1, T, H, 4), torch.empty(1, T, H, 4), None, None, 0, RopeFlags())
    assert backends.why_not("native", torch.device("cuda"), call) == "tables per head are not supported"
    looked_up = call._replace(cos=torch.empty(N, H, 4), positions=torch.zeros(1, T))
    assert backends.why_not("native", torch.device("cuda"), looked_up) == "tables per head are not supported"


@pytest.mark.skipif(ON_GPU, reason="the CPU has no CUDA extension")
def test_a_named_implementation_that_lacks_them_is_refused(device):
    (cos, sin), keywords = tables("positions", "bthd", device)
    with pytest.raises(ValueError, match="impl is 'native', but it cannot run this call: tables per head are not"):
        apply_rope(*make("bthd", device), cos, sin, impl="native", **keywords)


def test_large_tensors_are_rotated_in_chunks(device):
    q, k = (random_tensor(2, 3000, H, 64, device=device) for _ in range(2))
    cos, sin = (random_tensor(1, 3000, H, 32, device=device) for _ in range(2))
    for x, y in zip(rotate(q, k, cos, sin), rotate(q.double(), k.double(), cos, sin, impl="reference"), strict=True):
        torch.testing.assert_close(x, y.float(), rtol=1e-5, atol=1e-5)


def test_the_definition_turns_heads_apart():
    q = torch.ones(1, 1, 2, 2)
    cos, sin = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1), torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    expected = torch.tensor([[1.0, 1.0], [-1.0, 1.0]]).view(1, 1, 2, 2).double()
    assert torch.equal(definition(q, cos, sin), expected)
    assert torch.equal(plain(q, cos, sin), expected.float())

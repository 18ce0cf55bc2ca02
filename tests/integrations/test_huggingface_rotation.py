"""transformers' models by our rotation: against transformers' own, and that in float64."""

from __future__ import annotations

import copy
import importlib
import sys
import weakref
from types import ModuleType

import pytest
import torch
from helpers.huggingface_models import (
    CAUSAL,
    LAYERS,
    OTHER_ROTATIONS,
    assert_agrees,
    build,
    heads,
    logits_and_grads,
    padding,
    tokens,
)
from torch import nn
from torch.autograd import forward_ad

from ropewalk import apply_rope
from ropewalk.integrations import huggingface
from ropewalk.integrations.huggingface import rotation
from ropewalk.ops import tracing
from ropewalk.ops.rope.repeat import Repeater
from ropewalk.testing import assert_close_to_truth


@pytest.fixture(autouse=True)
def _registered():
    huggingface.register()


def modeling(model):
    return sys.modules[type(model).__module__]


@pytest.mark.parametrize("name", [*CAUSAL, *OTHER_ROTATIONS])
def test_our_rotation_agrees_in_logits_and_gradients(name, monkeypatch, device):
    rotations = []
    monkeypatch.setattr(
        rotation, "apply_rope", lambda *xs, **flags: rotations.append(flags) or apply_rope(*xs, **flags)
    )
    repeat = Repeater.rotate

    def repeat_and_note(repeater, q, k, call):
        repeated = repeat(repeater, q, k, call)
        if repeated is not None:
            rotations.append(call.flags._asdict())
        return repeated

    monkeypatch.setattr(Repeater, "rotate", repeat_and_note)
    mask = padding("left", device)

    def run(model):
        original = modeling(model).apply_rotary_pos_emb
        with huggingface.use_ropewalk_rope(model) as handle:
            assert handle.modules == (type(model).__module__,)
            assert modeling(model).apply_rotary_pos_emb is not original
            rotations.clear()
            result = logits_and_grads(model, "ropewalk", tokens(device), mask)
        assert modeling(model).apply_rotary_pos_emb is original
        assert len(rotations) == LAYERS
        assert rotations[0]["interleaved"] is (name in ("Cohere", "Glm", "DeepseekV3"))
        assert rotations[0]["inverse"] is (name == "NanoChat")
        return result

    assert_agrees(name, device, run, mask=mask)
    assert len(rotations) == LAYERS


def test_handles_count(device):
    one, two = build("Llama", device), build("Llama", device)
    original = modeling(one).apply_rotary_pos_emb
    first, second = huggingface.use_ropewalk_rope(one), huggingface.use_ropewalk_rope(two)
    assert repr(first) == f"<RopeHandle of {modeling(one).__name__}.apply_rotary_pos_emb>"
    first.remove()
    first.remove()
    assert repr(first).endswith("apply_rotary_pos_emb, removed>")
    assert modeling(one).apply_rotary_pos_emb is not original
    second.remove()
    assert modeling(one).apply_rotary_pos_emb is original
    assert not rotation._ROTATIONS


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_after_the_removal_recomputes_what_the_forward_ran(reentrant, monkeypatch, device):
    """The recomputation runs a layer again, by whatever its module then has."""
    rotations = []
    monkeypatch.setattr(rotation, "apply_rope", lambda *xs, **flags: rotations.append(1) or apply_rope(*xs, **flags))
    monkeypatch.setattr(rotation.Repeater, "rotate", lambda *given: None)
    model = build("Llama", device).train()
    original = modeling(model).apply_rotary_pos_emb
    x = model.get_input_embeddings()(tokens(device)).detach().requires_grad_()

    def gradients(loss):
        return torch.autograd.grad(loss, [x, *(p for p in model.model.layers.parameters())])

    with huggingface.use_ropewalk_rope(model):
        expected = gradients(model(inputs_embeds=x).logits.square().sum())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    before = [part.__dict__.get("_gradient_checkpointing_func") for part in model.modules()]
    with huggingface.use_ropewalk_rope(model) as handle:
        assert "apply_rotary_pos_emb" in repr(handle)
        rotations.clear()
        loss = model(inputs_embeds=x).logits.square().sum()
    assert [part.__dict__.get("_gradient_checkpointing_func") for part in model.modules()] == before
    assert len(rotations) == LAYERS
    if reentrant:  # which gives no gradients to autograd.grad
        loss.backward()
        actual = [x.grad, *(p.grad for p in model.model.layers.parameters())]
    else:
        actual = gradients(loss)
    assert len(rotations) == 2 * LAYERS
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert modeling(model).apply_rotary_pos_emb is original
    assert not rotation._ROTATIONS
    rotations.clear()
    model(inputs_embeds=x)
    assert not rotations


def test_another_replacement_is_left_alone(monkeypatch, device):
    model = build("Llama", device)
    monkeypatch.setattr(modeling(model), "apply_rotary_pos_emb", modeling(model).apply_rotary_pos_emb)
    handle = huggingface.use_ropewalk_rope(model)
    modeling(model).apply_rotary_pos_emb = print
    with pytest.raises(RuntimeError, match=r"has replaced .*modeling_llama\.apply_rotary_pos_emb since"):
        handle.remove()
    assert modeling(model).apply_rotary_pos_emb is print


def test_models_without_such_a_function_are_refused(device):
    with pytest.raises(
        ValueError, match="BertForMaskedLM calls no rotary function, but must call one such as apply_rot"
    ):
        huggingface.use_ropewalk_rope(build("Bert", device))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Falcon", {"alibi": True}),
        ("Esm", {"position_embedding_type": "absolute"}),
        ("GraniteMoeHybrid", {"position_embedding_type": None}),
        ("Zamba2", {"use_mem_rope": False}),
    ],
)
def test_configs_without_a_rotation_are_refused(name, values, monkeypatch):
    """Such a model has the function in its module, and never calls it."""
    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    model_class = next(x for key, x in vars(module).items() if key.endswith("Attention") and isinstance(x, type))
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.config = getattr(importlib.import_module("transformers"), f"{name}Config")(**values)
    (setting,) = values
    with pytest.raises(ValueError, match=rf"config.{setting} is .*, so {model_class.__name__} rotates nothing"):
        huggingface.use_ropewalk_rope(model)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def plainly(x, cos, sin, unsqueeze_dim=1):
    return x * cos.unsqueeze(unsqueeze_dim) + rotate_half(x) * sin.unsqueeze(unsqueeze_dim)


def like_llama(q, k, cos, sin, unsqueeze_dim=1):
    return plainly(q, cos, sin, unsqueeze_dim), plainly(k, cos, sin, unsqueeze_dim)


def with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return like_llama(q, k, cos, sin, unsqueeze_dim)


def keys_the_other_way(q, k, cos, sin, unsqueeze_dim=1):
    return plainly(q, cos, sin, unsqueeze_dim), plainly(k, cos, -sin, unsqueeze_dim)


def slightly_scaled(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x * 1.0001 for x in like_llama(q, k, cos, sin, unsqueeze_dim))


def last_features(q, k, cos, sin, unsqueeze_dim=1):
    def rotate(x):
        rest = x.shape[-1] - cos.shape[-1]
        return torch.cat((x[..., :rest], plainly(x[..., rest:], cos, sin, unsqueeze_dim)), dim=-1)

    return rotate(q), rotate(k)


def interleaved_to_halves(q, k, cos, sin, unsqueeze_dim=1):
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k))
    return like_llama(q, k, cos, sin, unsqueeze_dim)


def heads_first_alone(q, k, cos, sin, unsqueeze_dim=1):
    return like_llama(q, k, cos, sin, 1)


def three(q, k, cos, sin, unsqueeze_dim=1):
    return *like_llama(q, k, cos, sin, unsqueeze_dim), None


def fewer_queries(q, k, cos, sin, unsqueeze_dim=1):
    own = (cos[:, -q.shape[2] :], sin[:, -q.shape[2] :]) if unsqueeze_dim == 1 else (cos, sin)
    return plainly(q, *own, unsqueeze_dim), plainly(k, cos, sin, unsqueeze_dim)


def of_patches(q, k, cos, sin):
    return plainly(q, cos, sin, -2), plainly(k, cos, sin, -2)


def k_may_be_none(q, k, cos, sin, unsqueeze_dim=1):
    return plainly(q, cos, sin, unsqueeze_dim), None if k is None else plainly(k, cos, sin, unsqueeze_dim)


def k_may_be_left_out(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    rotated = plainly(q, cos, sin, unsqueeze_dim)
    return rotated if k is None else (rotated, plainly(k, cos, sin, unsqueeze_dim))


def of_one(x, cos, sin, unsqueeze_dim=1):
    return plainly(x, cos, sin, unsqueeze_dim)


class LikeAHubKernel(nn.Module):
    def forward(self, *args, **kwargs):
        return like_llama(*args, **kwargs)


@pytest.fixture
def stub(monkeypatch):
    """A model of a modeling module with a rotation of its own, whose forward calls it."""

    def make(function, name="modeling_stub"):
        module = ModuleType(name)
        module.apply_rotary_pos_emb = function
        monkeypatch.setitem(sys.modules, name, module)
        body = {
            "__module__": name,
            "forward": lambda self, *args, **kwargs: module.apply_rotary_pos_emb(*args, **kwargs),
        }
        return type("Stub", (nn.Module,), body)()

    return make


@pytest.mark.parametrize(
    "function",
    [
        keys_the_other_way,
        slightly_scaled,
        last_features,
        fewer_queries,
        heads_first_alone,
        three,
        lambda q, k, cos, sin, unsqueeze_dim=1: None,
    ],
)
def test_other_rotations_are_refused_and_nothing_is_replaced(function, stub):
    good, bad = stub(like_llama, "modeling_good"), stub(function, "modeling_bad")
    with pytest.raises(
        ValueError,
        match=r"^modeling_bad\.apply_rotary_pos_emb\(.*\) must stay: apply_rope does not support its rotation; pass",
    ):
        huggingface.use_ropewalk_rope(nn.ModuleList([good, bad]))
    assert sys.modules["modeling_good"].apply_rotary_pos_emb is like_llama
    assert sys.modules["modeling_bad"].apply_rotary_pos_emb is function
    assert not rotation._ROTATIONS


def angles(*shape, twice="halves"):
    half = torch.rand(*shape, generator=torch.Generator().manual_seed(6)) * 6
    half = torch.cat((half, half), -1) if twice == "halves" else half
    return half.cos(), half.sin()


@pytest.mark.parametrize("function", [like_llama, with_positions, LikeAHubKernel()])
def test_every_layout_that_the_function_has(function, stub):
    model = stub(function)
    q, k, _ = heads(n_heads=3)
    cos, sin = angles(2, 6, 8)
    with huggingface.use_ropewalk_rope(model):
        for x, y, tables, flags in (
            (q, k, (cos, sin), {}),
            (q, k, (cos[:1], sin[:1]), {}),
            (q, k, (cos, sin), {"unsqueeze_dim": -3}),
            (q.transpose(1, 2), k.transpose(1, 2), (cos, sin), {"unsqueeze_dim": 2}),
            (q, k, (cos[0], sin[0]), {"unsqueeze_dim": 0}),
            (q.transpose(1, 2), k.transpose(1, 2), (cos[0], sin[0]), {"unsqueeze_dim": 1}),
        ):
            expected = like_llama(x.double(), y.double(), *(table.double() for table in tables), **flags)
            baseline = like_llama(x, y, *tables, **flags)
            for actual, truth, theirs in zip(model(x, y, *tables, **flags), expected, baseline, strict=True):
                assert_close_to_truth(actual, truth, theirs)


def assert_alike(actual, function, *given, **flags):
    truth = function(*(x if x is None else x.double() for x in given), **flags)
    baseline = function(*given, **flags)
    assert type(actual) is type(baseline)
    for ours, exact, theirs in (
        zip(actual, truth, baseline, strict=True) if isinstance(actual, tuple) else [(actual, truth, baseline)]
    ):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_close_to_truth(ours, exact, theirs)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("function", [interleaved_to_halves, of_one, k_may_be_none, k_may_be_left_out])
def test_functions_of_one_tensor_and_of_another_order_of_features(function, axis, stub):
    q, k, _ = (x if axis == 1 else x.transpose(1, 2) for x in heads(n_heads=3))
    cos, sin = angles(2, 6, 8)
    with huggingface.use_ropewalk_rope(stub(function)) as handle:
        ours = sys.modules[handle.modules[0]].apply_rotary_pos_emb
        assert handle.functions == ("modeling_stub.apply_rotary_pos_emb",)
        for tensors in ([q],) if function is of_one else ((q, k),):
            given = (*tensors, cos, sin)
            assert_alike(ours(*given, unsqueeze_dim=axis), function, *given, unsqueeze_dim=axis)
        if function in (k_may_be_none, k_may_be_left_out):
            given = q, None, cos, sin
            assert_alike(ours(*given, unsqueeze_dim=axis), function, *given, unsqueeze_dim=axis)
        if function is k_may_be_left_out:
            actual = ours(q, cos=cos, sin=sin, unsqueeze_dim=axis)
            assert_alike(actual, function, q, None, cos, sin, unsqueeze_dim=axis)
        if function is interleaved_to_halves:
            with pytest.raises(ValueError, match="rotary_dim is 16"):
                ours(q, k, *angles(2, 6, 4), unsqueeze_dim=axis)
            with pytest.raises(ValueError, match=r"k is None, but must be a tensor for modeling_stub\.apply_rotary"):
                ours(q, None, cos, sin)


def test_patches_without_a_batch(stub):
    q, k, _ = (x.transpose(1, 2) for x in heads(n_heads=3))
    cos, sin = angles(2, 6, 8)
    model = stub(of_patches)
    with huggingface.use_ropewalk_rope(model):
        for given in ((q, k, cos, sin), (q[0], k[0], cos[0], sin[0]), (q, k, cos[0], sin[0])):
            assert_alike(model(*given), of_patches, *given)


# === layers after the first, whose tables and kinds of q and k were seen ===


@pytest.fixture(params=["guards", "python"])
def rotate(request, stub, monkeypatch):
    """Our function of a model like Llama, with PyTorch's guards and without them."""
    if request.param == "python":
        monkeypatch.setattr(tracing, "has_guards", lambda: False)
    with huggingface.use_ropewalk_rope(stub(like_llama)) as handle:
        yield sys.modules[handle.modules[0]].apply_rotary_pos_emb


@pytest.fixture
def slow(monkeypatch):
    """The calls of `apply_rope`."""
    asked = []

    def record(*given, **keywords):
        asked.append(keywords)
        return apply_rope(*given, **keywords)

    monkeypatch.setattr(rotation, "apply_rope", record)
    return asked


def project(axis=1, n_heads=3):
    tensors = [x.requires_grad_() for x in heads(n_heads=n_heads)[:2]]
    return [x if axis == 1 else x.transpose(1, 2) for x in tensors]


def halves(cos, sin):
    return [x.chunk(2, dim=-1)[0] for x in (cos, sin)]


def assert_rotates(rotate, q, k, cos, sin, axis=1):
    """Compare results and gradients with those of `apply_rope`, bit by bit."""
    expected = apply_rope(q, k, *halves(cos, sin), layout="bhtd" if axis == 1 else "bthd")
    found = rotate(q, k, cos, sin, axis)
    grads = [torch.randn_like(x) for x in expected]
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()
    for x, y in zip(*(torch.autograd.grad(outs, (q, k), grads) for outs in (found, expected)), strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()


@pytest.mark.parametrize("axis", [1, 2])
def test_layers_after_the_first_repeat_the_rotation(rotate, slow, axis):
    for _ in range(3):  # steps, whose tables are new
        cos, sin = angles(2, 6, 8)
        for _ in range(3):
            assert_rotates(rotate, *project(axis), cos, sin, axis)
    assert len(slow) == 1


def test_other_kinds_and_tables_are_not_repeated(rotate, slow):
    cos, sin = angles(2, 6, 8)
    q, k = project()
    changes = [
        (q, k, cos, sin),
        (q[:1], k[:1], cos[:1], sin[:1]),
        (q.double(), k.double(), cos.double(), sin.double()),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, cos, sin),
        (q, k.detach().requires_grad_(), sin, cos),
    ]
    for given in changes * 3:
        expected = apply_rope(*given[:2], *halves(*given[2:]), layout="bhtd")
        for x, y in zip(rotate(*given), expected, strict=True):
            assert torch.equal(x, y)
    square = [torch.randn(2, 3, 3, 16) for _ in range(2)]  # as many heads as tokens
    tables = angles(1, 3, 8)
    for axis in (1, 2, 1, 2):
        expected = apply_rope(*square, *halves(*tables), layout="bhtd" if axis == 1 else "bthd")
        assert torch.equal(rotate(*square, *tables, axis)[0], expected[0])


def test_tables_that_are_written_or_get_other_memory(rotate):
    cos, sin = angles(2, 6, 8)
    for _ in range(2):
        assert_rotates(rotate, *project(), cos, sin)
    cos.mul_(0.5)
    assert_rotates(rotate, *project(), cos, sin)
    cos.data = torch.rand_like(cos[..., :8]).repeat(1, 1, 2)
    assert_rotates(rotate, *project(), cos, sin)
    q, k = project()
    rotated = rotate(q, k, cos, sin)
    cos.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rotated[0].sum().backward()


def test_tables_are_freed_and_copied(rotate):
    cos, sin = angles(2, 6, 8)
    q, k = heads()[:2]
    for _ in range(2):
        rotate(q, k, cos, sin)
    assert torch.equal(copy.deepcopy(cos), cos)
    gone = weakref.ref(cos)
    del cos, sin
    assert gone() is None


def test_gradients_of_a_repeated_rotation(rotate):
    cos, sin = angles(2, 6, 8)
    for _ in range(2):
        rotate(*project(), cos, sin)
    q, k = project()
    (alone,) = torch.autograd.grad(rotate(q, k, cos, sin)[0].sum(), q)
    (expected,) = torch.autograd.grad(like_llama(q, k, cos, sin)[0].sum(), q)
    torch.testing.assert_close(alone, expected)
    first, second = rotate(q, k, cos, sin)
    grads = torch.autograd.grad(first.square().sum() + second.sum(), (q, k), create_graph=True)
    (again,) = torch.autograd.grad(grads[0].square().sum(), q)
    torch.testing.assert_close(again, 8 * q)  # a rotation keeps lengths
    ones = [torch.ones(()).expand_as(x) for x in (first, second)]
    grad_q, _ = torch.autograd.grad(rotate(q, k, cos, sin), (q, k), ones)
    torch.testing.assert_close(grad_q, expected)


def test_a_repeated_rotation_under_transforms_and_without_gradients(rotate):
    cos, sin = angles(2, 6, 8)
    q, k = project()
    for _ in range(2):
        rotate(q, k, cos, sin)
    with torch.no_grad():
        assert rotate(q, k, cos, sin)[0].grad_fn is None
    expected = like_llama(q, k, cos, sin)[0]
    found = torch.func.vmap(lambda x, y: rotate(x[None], y[None], cos[:1], sin[:1])[0][0])(q, k)
    torch.testing.assert_close(found[0], expected[0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        tangent = forward_ad.unpack_dual(rotate(dual, k, cos, sin)[0]).tangent
    torch.testing.assert_close(tangent, like_llama(torch.ones_like(q), k, cos, sin)[0])


def test_a_repeated_rotation_enters_few_functions(rotate):
    cos, sin = angles(2, 6, 8)
    for _ in range(2):
        q, k = project()
        rotated = rotate(q, k, cos, sin)
        torch.autograd.grad(rotated, (q, k), rotated)
    entered = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        rotate(q, k, cos, sin)
    finally:
        sys.setprofile(None)
    assert "apply_rope" not in entered
    if tracing.has_guards():
        # Ours and the one in it, torch.compile's constant, the repeater; a function and its step, what saves, and
        # PyTorch's three.
        assert len(entered[: entered.index("rotated")]) <= 10, entered


def test_each_width_of_tables_is_checked(stub):
    q, k, _ = heads()
    with huggingface.use_ropewalk_rope(stub(with_positions)) as handle:
        rotate = sys.modules[handle.modules[0]].apply_rotary_pos_emb
        rotate(q, k, *angles(2, 6, 8))
        with pytest.raises(ValueError, match="but must hold every angle twice"):
            rotate(q[..., :8], k[..., :8], *angles(2, 6, 8, twice="once"))


def test_functions_behind_other_functions_and_methods_are_found(monkeypatch, device):
    """A helper of the module that calls the rotation, and a method that rotates by itself."""
    module = ModuleType("modeling_stub")
    source = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    return like_llama(q, k, cos, sin, unsqueeze_dim)

def apply_twice_rope(q, k, cos, sin):
    return apply_rotary_pos_emb(*apply_rotary_pos_emb(q, k, cos, sin), cos, sin)

def helper(*given):
    return apply_twice_rope(*given)

class Behind(Module):
    def forward(self, *given):
        return helper(*given)

class Itself(Module):
    def forward(self, *given):
        return self.apply_rotary_embedding(*given)

    def apply_rotary_embedding(self, *given):
        return given
"""
    vars(module).update(like_llama=like_llama, Module=nn.Module)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "modeling_stub", module)
    with huggingface.use_ropewalk_rope(module.Behind()) as handle:
        assert handle.functions == ("modeling_stub.apply_rotary_pos_emb",)
    with pytest.raises(ValueError, match=r"^modeling_stub\.Itself\.apply_rotary_embedding must stay"):
        huggingface.use_ropewalk_rope(nn.ModuleList([module.Behind(), module.Itself()]))
    assert not rotation._ROTATIONS


def test_what_the_function_has_no_use_for_raises(stub):
    q, k, _ = heads()
    cos, sin = angles(2, 6, 8)
    with huggingface.use_ropewalk_rope(stub(with_positions)) as handle:
        rotate = sys.modules[handle.modules[0]].apply_rotary_pos_emb
        once = angles(2, 6, 16, twice="once")
        for tables in (once, (once[0], sin), (cos, once[1])):
            with pytest.raises(
                ValueError,
                match=r"must hold every angle twice for modeling_stub\.apply_",
            ):
                rotate(q, k, *tables)
        rotate(q, k, cos, sin)
        with pytest.raises(ValueError, match="unsqueeze_dim is 3"):
            rotate(q, k, cos, sin, unsqueeze_dim=3)
        with pytest.raises(ValueError, match=r"position_ids were passed to modeling_stub\.apply_rotary_pos_emb"):
            rotate(q, k, cos, sin, position_ids=torch.arange(6))
        with pytest.raises(ValueError, match="per token it must be"):
            rotate(q, k, cos[:, :5], sin[:, :5])

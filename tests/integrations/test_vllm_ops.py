"""vLLM serves its models by our operator, on its own terms: against a stub of the interface that vLLM documents."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ropewalk import inverse_frequencies, rope_table, rotary_embedding
from ropewalk.integrations import vllm_ops

ROOT = Path(__file__).parents[2]

# What vLLM promises, in two generations: where the registry is, and whether the table is returned or overwritten.
CUSTOM_OP = """
    import torch

    SETTINGS = {"platform": "cuda", "off": set()}
    {module_registry}

    class CustomOp(torch.nn.Module):
        {class_registry}

        def __new__(cls, *args, **kwargs):
            return super().__new__({registry}.get(cls.__name__, cls))

        def __init__(self):
            super().__init__()
            on = self.name not in SETTINGS["off"]
            self._forward_method = getattr(self, "forward_" + SETTINGS["platform"]) if on else self.forward_native

        def forward(self, *args, **kwargs):
            return self._forward_method(*args, **kwargs)

        def forward_oot(self, *args, **kwargs):
            return self.forward_native(*args, **kwargs)

        @classmethod
        def register(cls, name):
            def decorator(op):
                op.name = name
                return op
            return decorator

        @classmethod
        def register_oot(cls, _decorated_op_cls=None, name=None):
            def decorator(op):
                assert name not in {registry}
                op.name = name
                {registry}[name] = op
                return op
            return decorator if _decorated_op_cls is None else decorator(_decorated_op_cls)
"""
ROTARY = """
    import torch
    from vllm.model_executor.custom_op import CustomOp

    @CustomOp.register("rotary_embedding")
    class RotaryEmbeddingBase(CustomOp):
        def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype):
            super().__init__()
            self.head_size, self.is_neox_style = head_size, is_neox_style
            self.rotary_dim, self.max_position_embeddings, self.base = rotary_dim, max_position_embeddings, base
            self.register_buffer("cos_sin_cache", self.make_table().to(dtype), persistent=False)

        def make_table(self):
            inv_freq = 1.0 / self.base ** (torch.arange(0, self.rotary_dim, 2) / self.rotary_dim)
            angles = torch.arange(self.max_position_embeddings)[:, None] * inv_freq
            return torch.cat((angles.cos(), angles.sin()), dim=-1)

        def _match_cos_sin_cache_dtype(self, query):
            {match}

    class RotaryEmbedding(RotaryEmbeddingBase):
        def forward_native(self, positions, query, key=None):
            return "native"

        def forward_cuda(self, positions, query, key=None):
            return "vLLM's own"

        def forward_cpu(self, positions, query, key=None):
            return "vLLM's own"

    class Llama3RotaryEmbedding(RotaryEmbedding):
        def make_table(self):
            return super().make_table().flip(0)

    class TwiceScaledRotaryEmbedding(Llama3RotaryEmbedding):
        pass

    class FourierRotaryEmbedding(RotaryEmbedding):
        def forward_native(self, positions, query, key=None):
            return "native, by other rules"

    class XDRotaryEmbedding(RotaryEmbedding):
        def forward(self, positions, query, key=None):
            return "by other rules"

    class MRotaryEmbedding(RotaryEmbeddingBase):
        def forward_cuda(self, positions, query, key=None):
            return "by other rules"
"""
GENERATIONS = {
    "0.12": {
        "module_registry": "",
        "class_registry": "op_registry_oot = {}",
        "registry": "CustomOp.op_registry_oot",
        "match": "self.cos_sin_cache = self.cos_sin_cache.to(query)",
    },
    "0.33": {
        "module_registry": "op_registry_oot = {}",
        "class_registry": "",
        "registry": "op_registry_oot",
        "match": "return self.cos_sin_cache.to(query)",
    },
}
SERVED = ["RotaryEmbedding", "Llama3RotaryEmbedding", "TwiceScaledRotaryEmbedding"]


def fill(source, parts):
    """The stub's source with its gaps filled; the braces of dicts are no gaps."""
    return re.sub(r"\{(\w+)\}", lambda gap: parts[gap[1]], textwrap.dedent(source))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write a stub of vLLM where Python finds it; forgotten afterwards."""

    def write(generation="0.33", custom_op=CUSTOM_OP, rotary=ROTARY):
        parts = GENERATIONS[generation]
        files = {
            "vllm/__init__.py": f'__version__ = "{generation}.0"',
            "vllm/model_executor/__init__.py": "",
            "vllm/model_executor/custom_op.py": fill(custom_op, parts),
            "vllm/model_executor/layers/__init__.py": "",
            "vllm/model_executor/layers/rotary_embedding/__init__.py": fill(rotary, parts),
        }
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        importlib.invalidate_caches()

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)

    forget()  # whatever is installed
    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture(params=GENERATIONS)
def vllm(install, request):
    """The stub: its classes, its registry and its settings."""
    install(request.param)
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    layers = importlib.import_module("vllm.model_executor.layers.rotary_embedding")
    registry = getattr(custom_op, "op_registry_oot", None)
    registry = custom_op.CustomOp.op_registry_oot if registry is None else registry
    return SimpleNamespace(custom_op=custom_op, layers=layers, registry=registry, settings=custom_op.SETTINGS)


def build(vllm, name="RotaryEmbedding", is_neox=True, dtype=torch.float32, device="cpu"):
    return getattr(vllm.layers, name)(16, 8, 64, 10000.0, is_neox, dtype).to(device)


def inputs(device, dtype=torch.float32, query_heads=4, key_heads=2):
    positions = torch.tensor([5, 0, 63, 7], device=device)
    query, key = (torch.randn(4, heads * 16, device=device).to(dtype) for heads in (query_heads, key_heads))
    return positions, query, key


@pytest.mark.parametrize("platform", ["cuda", "oot"])
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "interleaved"])
@pytest.mark.parametrize("name", SERVED)
def test_registered_classes_rotate_by_our_operator_in_place(name, is_neox, platform, vllm, device):
    vllm.settings["platform"] = platform
    assert vllm_ops.register() == SERVED
    layer = build(vllm, name, is_neox, device=device)
    assert isinstance(layer, getattr(vllm.layers, name))
    positions, query, key = inputs(device)
    expected = query.clone(), key.clone()
    rotary_embedding(positions, *expected, 16, layer.cos_sin_cache, is_neox)
    outputs = layer(positions, query, key)
    assert outputs[0] is query
    assert outputs[1] is key
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])


def test_the_rotation_is_the_one_of_the_base_frequencies(vllm, device):
    vllm_ops.register()
    cache = torch.cat(rope_table(64, inverse_frequencies("default", 8, base=10000.0)[0], device=device), dim=-1)
    positions, query, key = inputs(device)
    expected = query.clone(), key.clone()
    rotary_embedding(positions, *expected, 16, cache, True)
    torch.testing.assert_close(build(vllm, device=device)(positions, query, key), expected)


def test_key_may_be_missing(vllm, device):
    vllm_ops.register()
    layer = build(vllm, device=device)
    positions, query, _ = inputs(device)
    expected = query.clone()
    rotary_embedding(positions, expected, None, 16, layer.cos_sin_cache, True)
    for outputs in (layer(positions, query.clone()), layer(positions, query.clone(), None)):
        assert torch.equal(outputs[0], expected)
        assert outputs[1] is None


def test_the_table_follows_the_query(vllm, device):
    vllm_ops.register()
    layer = build(vllm, device="cpu")
    positions, query, key = inputs(device, torch.bfloat16)
    expected = query.clone(), key.clone()
    rotary_embedding(positions, *expected, 16, layer.cos_sin_cache.to(query), True)
    layer(positions, query, key)
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])


def test_a_compiled_layer_equals_an_eager_one(vllm, device):
    vllm_ops.register()
    layer = build(vllm, device=device)
    positions, query, key = inputs(device)
    expected = layer(positions, query.clone(), key.clone())
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for x, y in zip(compiled(positions, query, key), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("FourierRotaryEmbedding", "vLLM's own"),
        ("XDRotaryEmbedding", "by other rules"),
        ("MRotaryEmbedding", "by other rules"),
    ],
)
def test_classes_that_rotate_otherwise_stay_vllms(name, answer, vllm):
    vllm_ops.register()
    assert type(build(vllm, name)) is getattr(vllm.layers, name)
    assert build(vllm, name)(None, None) == answer


def test_other_platforms_stay_vllms(vllm):
    vllm_ops.register()
    vllm.settings["platform"] = "cpu"
    assert build(vllm)(None, None) == "vLLM's own"


def test_the_operator_is_switched_off_by_vllms_name_for_it(vllm):
    vllm_ops.register()
    vllm.settings["off"].add("rotary_embedding")
    for name in SERVED:
        assert build(vllm, name)(None, None) == "native"


def test_a_second_registration_changes_nothing(vllm):
    served = vllm_ops.register()
    before = dict(vllm.registry)
    assert vllm_ops.register() == served
    assert vllm.registry == before
    assert sorted(before) == sorted(SERVED)


def test_nothing_is_registered_unasked(vllm):
    assert not vllm.registry
    assert build(vllm)(None, None) == "vLLM's own"


@pytest.mark.parametrize(
    ("plugins", "asked"),
    [(None, False), ("", False), ("other", False), ("ropewalk", True), ("other,ropewalk", True), ("ropewalker", False)],
)
def test_the_plugin_waits_to_be_named(plugins, asked, vllm, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    vllm_ops.plugin()
    assert bool(vllm.registry) == asked


def test_the_plugin_is_where_vllm_looks_for_it():
    section = (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."vllm.general_plugins"]\n')[2]
    name, _, target = section.partition("\n")[0].partition(" = ")
    module, _, function = target.strip('"').partition(":")
    assert name == vllm_ops._PLUGIN
    assert getattr(importlib.import_module(module), function) is vllm_ops.plugin


def test_another_plugin_is_not_pushed_aside(vllm):
    class Other(vllm.layers.Llama3RotaryEmbedding):
        pass

    vllm.custom_op.CustomOp.register_oot(Other, name="Llama3RotaryEmbedding")
    with pytest.raises(RuntimeError, match=r"vLLM's Llama3RotaryEmbedding is already replaced by .*Other"):
        vllm_ops.register()
    assert vllm.registry == {"Llama3RotaryEmbedding": Other}


def test_without_vllm_the_error_says_so(install):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModuleNotFoundError, match="vllm is not installed"):
            vllm_ops.register()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def register_oot", "def register_elsewhere", "CustomOp has no register_oot"),
        ("class CustomOp", "class OtherOp", "has no attribute|cannot import name 'CustomOp'"),
    ],
)
def test_another_interface_of_operators_is_refused(old, new, message, install):
    install(custom_op=CUSTOM_OP.replace(old, new))
    with pytest.raises(RuntimeError, match=rf"({message}).*supports vLLM 0\.12 to"):
        vllm_ops.register()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "class RotaryEmbedding(",
            "class Rotary(",
            "has no attribute 'RotaryEmbedding'|'RotaryEmbedding' is not defined",
        ),
        ("class RotaryEmbedding(RotaryEmbeddingBase)", "class RotaryEmbedding", "RotaryEmbedding is no CustomOp"),
        ("_match_cos_sin_cache_dtype", "_match", "has no _match_cos_sin_cache_dtype"),
        ("key=None", "key=None, offsets=None", r"has no forward_cuda\(positions, query, key\)"),
        ("def forward_cuda", "def forward_gpu", r"has no forward_cuda\(positions, query, key\)"),
        ('@CustomOp.register("rotary_embedding")', "", "RotaryEmbedding has no name"),
    ],
)
def test_another_interface_of_rotation_is_refused(old, new, message, install):
    rotary = ROTARY.replace(old, new)
    if "class Rotary(" in new:
        rotary = rotary.split("    class Llama3RotaryEmbedding")[0]
    install(rotary=rotary)
    with pytest.raises(RuntimeError, match=rf"({message}).*supports vLLM 0\.12 to"):
        vllm_ops.register()

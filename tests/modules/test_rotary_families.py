"""`RotaryEmbedding.from_hf_config` for models with several position axes, against transformers' own modules."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ropewalk import QKNorm, RotaryEmbedding, mrope_axes
from ropewalk.modules.families import REFUSED

pytest.importorskip("transformers")
HEADS, KEY_HEADS, TOKENS = 4, 2, 7
HEAD_DIM = 32
# Angles below 60 in float32, in theirs and in ours, differ by 2 · 60 roundings, and turn features of 5.
ATOL = 2 * 60 * 5 * torch.finfo(torch.float32).eps

# The text models: module, config, rotary class, how their axes are arranged, and what else the config needs.
TEXTS = [
    ("qwen2_vl", "Qwen2VLTextConfig", "Qwen2VLRotaryEmbedding", "blocks", {}),
    ("qwen2_5_vl", "Qwen2_5_VLTextConfig", "Qwen2_5_VLRotaryEmbedding", "blocks", {}),
    ("qwen2_5_omni", "Qwen2_5OmniTextConfig", "Qwen2_5OmniRotaryEmbedding", "blocks", {}),
    ("qwen2_5_omni", "Qwen2_5OmniTalkerConfig", "Qwen2_5OmniRotaryEmbedding", "blocks", {}),
    ("paddleocr_vl", "PaddleOCRTextConfig", "PaddleOCRRotaryEmbedding", "blocks", {}),
    ("qwen3_vl", "Qwen3VLTextConfig", "Qwen3VLTextRotaryEmbedding", "alternating", {}),
    ("qwen3_vl_moe", "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextRotaryEmbedding", "alternating", {}),
    ("qwen3_omni_moe", "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextRotaryEmbedding", "alternating", {}),
    ("qwen3_omni_moe", "Qwen3OmniMoeTalkerTextConfig", "Qwen3OmniMoeTalkerRotaryEmbedding", "alternating", {}),
    ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5TextRotaryEmbedding", "alternating", {"partial_rotary_factor": 0.5}),
    ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeTextRotaryEmbedding", "alternating", {}),
    ("qwen4_exp", "Qwen4ExpTextConfig", "Qwen4ExpTextRotaryEmbedding", "alternating", {"partial_rotary_factor": 0.5}),
    ("cosmos3_edge", "Cosmos3EdgeTextConfig", "Cosmos3EdgeTextRotaryEmbedding", "alternating", {}),
    ("glm4v", "Glm4vTextConfig", "Glm4vTextRotaryEmbedding", "blocks", {"partial_rotary_factor": 0.5}),
    ("glm_ocr", "GlmOcrTextConfig", "GlmOcrTextRotaryEmbedding", "blocks", {}),
    ("glm4v_moe", "Glm4vMoeTextConfig", "Glm4vMoeTextRotaryEmbedding", "blocks", {"partial_rotary_factor": 0.5}),
    ("glm_image", "GlmImageTextConfig", "GlmImageTextRotaryEmbedding", "blocks", {}),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextConfig", "Ernie4_5_VLMoeTextRotaryEmbedding", "ernie", {}),
    ("hy_v4_vl", "HYV4VLTextConfig", "HYV4VLRotaryEmbedding", "alternating", {"qk_rope_head_dim": HEAD_DIM}),
]
TOWERS = [
    ("qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VLVisionRotaryEmbedding", {"embed_dim": 128, "num_heads": 4}),
    ("qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VLVisionRotaryEmbedding", {}),
    ("qwen2_5_omni", "Qwen2_5OmniVisionEncoderConfig", "Qwen2_5OmniVisionRotaryEmbedding", {}),
    ("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionRotaryEmbedding", {}),
    ("qwen3_vl_moe", "Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionRotaryEmbedding", {}),
    ("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoderConfig", "Qwen3OmniMoeVisionRotaryEmbedding", {}),
    ("qwen3_5", "Qwen3_5VisionConfig", "Qwen3_5VisionRotaryEmbedding", {}),
    ("qwen3_5_moe", "Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionRotaryEmbedding", {}),
    ("qwen4_exp", "Qwen4ExpVisionConfig", "Qwen4ExpVisionRotaryEmbedding", {}),
    ("cohere_compass", "CohereCompassVisionConfig", "CohereCompassVisionRotaryEmbedding", {}),
    ("dots3_note", "Dots3NoteVisionConfig", "Dots3NoteVisionRotaryEmbedding", {}),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeVisionConfig", "Ernie4_5_VLMoeVisionRotaryEmbedding", {}),
    ("exaone4_5", "Exaone4_5_VisionConfig", "Exaone4_5_VisionRotaryEmbedding", {}),
    ("glm4v", "Glm4vVisionConfig", "Glm4vVisionRotaryEmbedding", {}),
    ("glm4v_moe", "Glm4vMoeVisionConfig", "Glm4vMoeVisionRotaryEmbedding", {}),
    ("glm5_next", "Glm5NextVisionConfig", "Glm5NextVisionRotaryEmbedding", {}),
    ("glm_ocr", "GlmOcrVisionConfig", "GlmOcrVisionRotaryEmbedding", {}),
    ("lfm3_vl", "Lfm3VlVisionConfig", "Lfm3VlVisionRotaryEmbedding", {}),
    ("muse_glimmer", "MuseGlimmerVisionConfig", "MuseGlimmerVisionRotaryEmbedding", {}),
    ("muse_spark", "MuseSparkVisionConfig", "MuseSparkVisionRotaryEmbedding", {}),
    ("paddleocr_vl", "PaddleOCRVisionConfig", "PaddleOCRVisionRotaryEmbedding", {}),
    ("video_llama_3", "VideoLlama3VisionConfig", "VideoLlama3VisionRotaryEmbedding", {}),
    ("mlcd", "MLCDVisionConfig", "MLCDRotaryEmbedding", {}),
    ("step3p7", "Step3p7VisionConfig", "Step3p7VisionRotaryEmbedding", {}),
    ("gemma4", "Gemma4VisionConfig", "Gemma4VisionRotaryEmbedding", {"head_dim": 32}),
    ("pixtral", "PixtralVisionConfig", "PixtralVisionRotaryEmbedding", {}),
    ("sam3", "Sam3ViTConfig", "Sam3ViTRotaryEmbedding", {}),
    ("inkling2", "Inkling2VisionConfig", "Inkling2VisionRotaryEmbedding", {}),
    ("kimi_k25", "Kimi_K25VisionConfig", "Kimi_K25VisionRotaryEmbedding", {}),
    ("minimax_m3_vl", "MiniMaxM3VLVisionConfig", "MiniMaxM3VLVisionRotaryEmbedding", {}),
    ("sam2_video", "Sam2VideoConfig", "Sam2VideoVisionRotaryEmbedding", {}),
    ("sam3_tracker_video", "Sam3TrackerVideoConfig", "Sam3TrackerVideoVisionRotaryEmbedding", {}),
    ("edgetam_video", "EdgeTamVideoConfig", "EdgeTamVideoVisionRotaryEmbedding", {}),
]
PAIRWISE = ("sam3", "inkling2", "sam2_video", "sam3_tracker_video", "edgetam_video")


def parts_of(module, *names):
    """Classes of a model; skip where this transformers has none of it."""
    try:
        modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        configuration = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
        return modeling, *(getattr(modeling, name, None) or getattr(configuration, name) for name in names)
    except (ImportError, AttributeError):
        pytest.skip(f"this transformers has no {module}")


def text_config(config_class, kind, others):
    others = dict(others)
    partial = others.pop("partial_rotary_factor", 1.0)
    pairs = int(HEAD_DIM * partial) // 2
    sections = {"blocks": [2, 3, pairs - 5], "alternating": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": sections.get(kind, [5, 5, pairs - 10]),
        "partial_rotary_factor": partial,
    }
    return config_class(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_DIM,
        rope_parameters=rope,
        **others,
    )


OWN_LAYERS = [
    ("cohere_compass", "CohereCompassTextConfig", "CohereCompassRotaryEmbedding", 3),
    ("neomme", "NeoMMEConfig", "NeoMMERotaryEmbedding", 2),
]
# What has several axes, or coordinates, in the code of a model.
SEVERAL_AXES = re.compile(
    rb"recomposition_frequencies|mrope_section|compute_axial_rope_parameters|patches_center_coordinates|vision_apply_rot"
    rb"|def compute_embeddings\(inv_freq|window_freqs|LightGluePositionalEncoder|class VJEPA2RopeAttention"
)


def test_every_family_with_several_axes_is_read_or_refused():
    """Go through the code of transformers' models: a family that comes must be found here, or lose no axis."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    if transformers.__version__ >= "5.25":
        pytest.skip("the list is of transformers 5.24")
    models = Path(transformers.__file__).parent / "models"
    found = {path.parent.name for path in models.glob("*/modeling_*.py") if SEVERAL_AXES.search(path.read_bytes())}
    read = {case[0] for case in (*TEXTS, *TOWERS, *OWN_LAYERS)} | {"llama4"}
    refused = {"hunyuan_vl", *REFUSED}
    assert found - read == refused & found
    assert len(found) > 40


def several(n_axes, *shape):
    """Positions that differ from axis to axis, and from token to token."""
    generator = torch.Generator().manual_seed(0)
    count = n_axes * torch.Size(shape).numel()
    return torch.randperm(max(60, count), generator=generator)[:count].view(n_axes, *shape)


def assert_each_axis_counts(rotary, q, positions):
    """A change of one axis alone changes what is rotated."""
    rotated = rotary(q, positions=positions)
    for axis in range(len(positions)):
        changed = positions.clone()
        changed[axis] += 1
        assert not torch.allclose(rotary(q, positions=changed), rotated, atol=100 * ATOL)


@pytest.mark.parametrize(("module", "config", "rotary", "kind", "others"), TEXTS, ids=[case[1] for case in TEXTS])
def test_a_text_model_rotates_as_transformers(module, config, rotary, kind, others):
    modeling, config_class, rotary_class = parts_of(module, config, rotary)
    config = text_config(config_class, kind, others)
    positions = several(3, 2, TOKENS)
    q, k = (torch.randn(2, heads, TOKENS, HEAD_DIM) for heads in (HEADS, KEY_HEADS))
    cos, sin = rotary_class(config)(q, positions)
    width = cos.shape[-1]
    rotated = modeling.apply_rotary_pos_emb(q[..., :width], k[..., :width], cos, sin)
    expected = [torch.cat((x, y[..., width:]), dim=-1) for x, y in zip(rotated, (q, k), strict=True)]
    ours = RotaryEmbedding.from_hf_config(config, layout="bhtd")
    for x, y in zip(ours(q, k, positions), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=ATOL)
    assert_each_axis_counts(ours, q, positions)


@pytest.mark.parametrize(("module", "config", "rotary", "sizes"), TOWERS, ids=[case[1] for case in TOWERS])
def test_a_vision_tower_rotates_as_transformers(module, config, rotary, sizes):
    _, config_class, rotary_class = parts_of(module, config, rotary)
    config = config_class(**sizes)
    positions = several(3 if module == "minimax_m3_vl" else 2, TOKENS)
    own = rotary_class(config)
    cos, sin = own(torch.zeros(1, TOKENS, 8), positions.T if module != "gemma4" else positions.T[None])
    dim = cos.shape[-1]
    cos, sin = cos.view(TOKENS, dim), sin.view(TOKENS, dim)
    q, k = (torch.randn(TOKENS, heads, dim) for heads in (HEADS, KEY_HEADS))
    rotate = rotate_pairs if module in PAIRWISE else rotate_blocks if module == "gemma4" else rotate_whole
    expected = [rotate(x, cos, sin) for x in (q, k)]
    ours = RotaryEmbedding.from_hf_config(config, layout="thd")
    assert ours.dim == dim
    for x, y in zip(ours(q, k, positions), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=ATOL)
    assert_each_axis_counts(ours, q, positions)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate_whole(x, cos, sin):
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


def rotate_pairs(x, cos, sin):
    """Pairs (2i, 2i + 1), with tables that hold each angle twice."""
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * cos[:, None] + turned * sin[:, None]


def rotate_blocks(x, cos, sin):
    """Gemma 4: half-split pairs inside the features of each axis."""
    cos, sin, x = (y.unflatten(-1, (2, -1)) for y in (cos, sin, x))
    return (x * cos[:, None] + rotate_half(x) * sin[:, None]).flatten(-2)


def test_llama_4s_tower_counts_coordinates_from_1():
    modeling, config_class = parts_of("llama4", "Llama4VisionConfig")
    config = config_class(image_size=4 * 14, patch_size=14, hidden_size=64, num_attention_heads=2)
    angles = modeling.Llama4VisionRotaryEmbedding(config)(torch.zeros(1))
    q = torch.randn(1, 17, 2, 32)
    expected, _ = modeling.vision_apply_rotary_emb(q, q, freqs_ci=angles)
    patches = torch.arange(16)
    positions = torch.stack((patches % 4 + 1, patches // 4 + 1))
    positions = torch.nn.functional.pad(positions, (0, 1))[:, None]  # the class token is at 0
    ours = RotaryEmbedding.from_hf_config(config)
    out = ours(q, positions=positions)
    assert_each_axis_counts(ours, q, positions)
    torch.testing.assert_close(out, expected, rtol=0, atol=ATOL)


LAYERS = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize("layer_type", LAYERS)
@pytest.mark.parametrize(("module", "config", "rotary", "n_axes"), OWN_LAYERS, ids=[case[1] for case in OWN_LAYERS])
def test_layers_have_axes_of_their_own(module, config, rotary, n_axes, layer_type):
    modeling, config_class, rotary_class = parts_of(module, config, rotary)
    sections = dict(zip(LAYERS, ([6, 5, 5], [8, 4, 4]), strict=True))
    rope = {
        layer: {"rope_type": "default", "rope_theta": theta, "mrope_section": sections[layer]}
        for layer, theta in zip(LAYERS, (1e4, 1e3), strict=True)
    }
    if module == "neomme":
        for parameters in rope.values():
            del parameters["mrope_section"]
    config = config_class(
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=2,
        layer_types=LAYERS,
        rope_parameters=rope,
    )
    positions = several(n_axes, 2, TOKENS)
    q, k = (torch.randn(2, heads, TOKENS, HEAD_DIM) for heads in (HEADS, KEY_HEADS))
    cos, sin = rotary_class(config)(q, positions, layer_type)
    expected = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    ours = RotaryEmbedding.from_hf_config(config, layer_type=layer_type, layout="bhtd")
    for x, y in zip(ours(q, k, positions), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=ATOL)
    assert_each_axis_counts(ours, q, positions)


def test_hunyuans_axes_are_no_rotation():
    """The two features of a pair turn by different axes, so that lengths change."""
    _, config_class, rotary_class = parts_of("hunyuan_vl", "HunYuanVLTextConfig", "HunYuanVLRotaryEmbedding")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4, 4]}
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "head_dim": HEAD_DIM}
    config = config_class(num_key_value_heads=KEY_HEADS, rope_parameters=rope, **sizes)
    cos, _ = rotary_class(config)(torch.zeros(1), several(4, 2, TOKENS))
    first, second = cos.chunk(2, dim=-1)
    assert not torch.allclose(first, second)
    with pytest.raises(ValueError, match="which is no rotation"):
        RotaryEmbedding.from_hf_config(config)
    text = torch.arange(TOKENS).expand(4, 2, -1)
    cos, sin = rotary_class(config)(torch.zeros(1), text)
    q = torch.randn(2, HEADS, TOKENS, HEAD_DIM)
    ours = RotaryEmbedding.from_hf_config(config, mrope_section=None, layout="bhtd")
    torch.testing.assert_close(ours(q), q * cos[:, None] + rotate_half(q) * sin[:, None], rtol=0, atol=ATOL)


def multimodal():
    return RotaryEmbedding(16, axes=mrope_axes([2, 3, 3]))


@pytest.mark.parametrize("positions", [None, 3, torch.zeros(2, 5).long(), torch.zeros(2, 2, 5).long()])
def test_positions_of_fewer_axes_raise(positions):
    q = torch.randn(2, 5, 3, 16)
    with pytest.raises(ValueError, match=r"positions is .*, but must be a tensor .* with a row for each of 3 axes"):
        multimodal()(q, None, positions)


def test_positions_on_several_axes_compile_and_are_not_printed(monkeypatch):
    """Printing a tensor reads it, for which a GPU would be waited for."""
    rotary, q, positions = multimodal(), torch.randn(2, 5, 3, 16), several(3, 2, 5)
    expected = rotary(q, None, positions)
    compiled = torch.compile(rotary, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, None, positions), expected)
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda self: pytest.fail("a tensor is printed"))
    rotary(q, None, positions)


def test_tables_grow_with_the_largest_axis():
    rotary = RotaryEmbedding(16, axes=mrope_axes([2, 3, 3]), max_positions=4)
    positions = torch.tensor([[[0, 1]], [[2, 3]], [[40, 5]]])
    out = rotary(torch.randn(1, 2, 3, 16), positions=positions)
    assert out.isfinite().all()
    assert rotary.cos.shape[0] > 40


def test_axes_survive_dtypes_and_empty_memory():
    rotary = multimodal().half().to("meta").to_empty(device="cpu")
    assert torch.equal(rotary.axes, mrope_axes([2, 3, 3]))
    assert "axes" not in rotary.state_dict()
    assert "axes=[0, 0, 1" in repr(rotary)


def test_a_norm_goes_with_the_rotation():
    rotary, q, k = RotaryEmbedding(16), torch.randn(2, 5, 3, 16), torch.randn(2, 5, 1, 16)
    norm = QKNorm(torch.randn(16).requires_grad_(), torch.randn(16))
    alone = RotaryEmbedding(16)
    scaled = ((q, norm.q_weight), (k, norm.k_weight))
    normed = [x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight for x, weight in scaled]
    for x, y in zip(rotary(q, k, norm=norm), alone(*normed), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("axes", "error", "said"),
    [
        ([0, 0], TypeError, "axes is list, but must be a tensor"),
        (torch.zeros(8), TypeError, "axes is a tensor of torch.float32"),
        (torch.zeros(4).long(), ValueError, r"axes has shape \(4,\), but must be \(R/2,\) = \(8,\)"),
        (torch.full((8,), -1), ValueError, "axes holds -1"),
    ],
)
def test_bad_axes(axes, error, said):
    with pytest.raises(error, match=said):
        RotaryEmbedding(16, axes=axes)


def test_unknown_families_are_refused_by_name():
    config = SimpleNamespace(
        model_type="newest_vl_text",
        head_dim=16,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )
    with pytest.raises(ValueError, match="model_type is 'newest_vl_text', whose axes are not known"):
        RotaryEmbedding.from_hf_config(config)
    assert RotaryEmbedding.from_hf_config(config, mrope_section=None).axes is None
    config.rope_parameters = {"rope_type": "axial", "rope_theta": 1e4}
    with pytest.raises(ValueError, match="a vision tower whose axes are not known"):
        RotaryEmbedding.from_hf_config(config)
    config.model_type = "ernie4_5_vl_moe_text"
    config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "mrope_section": [3, 3, 2]}
    with pytest.raises(ValueError, match="rope_type is 'linear', but must be 'default'"):
        RotaryEmbedding.from_hf_config(config)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("hunyuan_vl_text", "is no rotation; for text alone pass mrope_section=None"),
        ("dinov3_vit", "has coordinates for positions"),
        ("eomt_dinov3", "has coordinates for positions"),
        ("lightglue", "has coordinates for positions"),
        ("sapiens2", "has coordinates for positions"),
        ("musicflamingo", "turns by times in seconds"),
        ("efficientloftr", "other frequencies for each head"),
        ("vjepa2", "is no rotation"),
    ],
)
def test_what_would_become_one_axis_is_refused(model_type, reason):
    """Text has equal positions on all axes, so that no test of text would find it."""
    config = SimpleNamespace(model_type=model_type, head_dim=16, max_position_embeddings=64)
    with pytest.raises(ValueError, match=f"model_type is '{model_type}', but .* {reason}"):
        RotaryEmbedding.from_hf_config(config)


def test_one_axis_keeps_the_pairs_of_its_family():
    config = SimpleNamespace(model_type="glm4v_text", head_dim=16, max_position_embeddings=64)
    rotary = RotaryEmbedding.from_hf_config(config, mrope_section=None)
    assert rotary.axes is None
    assert rotary.interleaved

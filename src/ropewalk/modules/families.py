"""The position axes of transformers' model families: which pairs turn by which of a token's positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.frequencies import mrope_axes


class Family(NamedTuple):
    """The rotation of a family of models by several axes."""

    axes: Callable[[Sequence[int]], Tensor]  # of the pairs of each axis
    sections: tuple[int, ...]  # where the config has no mrope_section
    interleaved: bool = False  # pairs (2i, 2i + 1)


class Tower(NamedTuple):
    """The rotation of a vision tower: as many pairs for each of its axes, such as rows and columns."""

    axes: tuple[int, ...] = (0, 1)
    interleaved: bool = False
    dealt: bool = False  # its frequencies are dealt to the axes in turn
    in_blocks: bool = False  # pairs are half-split inside each axis' features
    alternating: bool = False  # the axes have pairs in turn
    scaling: str = "axial"


def _height_width_then_time(sections: Sequence[int]) -> Tensor:
    """Alternate between height and width, and end with time."""
    height, width, time = sections
    return torch.tensor([1, 2] * ((height + width) // 2) + [0] * time, device="cpu")


_alternating = partial(mrope_axes, interleaved=True)
_QWEN2 = Family(mrope_axes, (16, 24, 24))
_QWEN3 = Family(_alternating, (24, 20, 20))
_QWEN3_5 = Family(_alternating, (11, 11, 10))

# By the model_type of the text config, without “_text”.
FAMILIES = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_omni": _QWEN2,
    "qwen2_5_omni_talker": _QWEN2,
    "paddleocr_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen3_omni_moe": _QWEN3,
    "qwen3_omni_moe_talker": _QWEN3,
    "cosmos3_edge": _QWEN3,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "qwen4_exp": _QWEN3_5,
    "glm4v": Family(mrope_axes, (8, 12, 12), interleaved=True),
    "glm_ocr": Family(mrope_axes, (8, 12, 12), interleaved=True),
    "glm4v_moe": Family(mrope_axes, (8, 12, 12)),
    "glm_image": Family(mrope_axes, (8, 12, 12)),
    "ernie4_5_vl_moe": Family(_height_width_then_time, (22, 22, 20), interleaved=True),
    "cohere_compass": _QWEN3,
    "hy_v4_vl": Family(_alternating, (12, 10, 10), interleaved=True),
}

_NO_ROTATION = "turns the two features of a pair by different angles, which is no rotation"
# Several axes that are no rotation; the reason, by model_type. Text, whose axes are equal, is one.
ONE_AXIS_ALONE = {"hunyuan_vl": f"{_NO_ROTATION}; for text alone pass mrope_section=None"}
# Positions that are no integers, or no rotation; the reason, by model_type.
REFUSED = {
    **dict.fromkeys(
        ("dinov3_vit", "sapiens2", "eomt_dinov3", "lightglue"),
        "has coordinates for positions: pass the tables of rope_table per token to apply_rope",
    ),
    "musicflamingo": "turns by times in seconds: pass tables per token to apply_rope",
    "efficientloftr": "has other frequencies for each head: pass tables per head to apply_rope",
    "vjepa2": _NO_ROTATION,
}

# By the model_type of the vision config.
TOWERS = {
    **dict.fromkeys(
        (
            *("qwen2_vl_vision", "qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder", "qwen3_vl_vision"),
            *("qwen3_vl_moe_vision", "qwen3_omni_moe_vision_encoder", "qwen3_5_vision", "qwen3_5_moe_vision"),
            *("qwen4_exp_vision", "cohere_compass_vision", "dots3_note_vision_encoder", "ernie4_5_vl_moe_vision"),
            *("exaone4_5_vision", "glm4v_vision", "glm4v_moe_vision", "glm5_next_vision", "glm_ocr_vision"),
            *("lfm3_vl_vision", "muse_glimmer_vision", "muse_spark_vision", "paddleocr_vl_vision"),
            *("video_llama_3_vision", "mlcd_vision_model"),
        ),
        Tower(),
    ),
    "step3p5_vision": Tower(axes=(1, 0)),
    "inkling2_vision": Tower(axes=(1, 0), interleaved=True),
    "sam3_vit_model": Tower(interleaved=True),
    "llama4_vision_model": Tower(interleaved=True),  # positions are its coordinates plus 1
    "pixtral": Tower(dealt=True),
    "gemma4_vision": Tower(in_blocks=True),
    "kimi_k25_vision": Tower(axes=(1, 0), alternating=True),
    "minimax_m3_vl_vision": Tower(axes=(0, 1, 2)),
    # The attention to memories; their towers have no rotation, or sam3_vit_model's.
    **dict.fromkeys(("sam2_video", "sam3_tracker_video", "edgetam_video"), Tower(interleaved=True)),
    "neomme": Tower(alternating=True, scaling="default"),
}


def read_family(config: Any, rope: dict[str, Any], scaling: str, one_axis: bool) -> dict[str, Any]:
    """Take out of `rope` what says how axes are arranged; return keywords of `RotaryEmbedding`, and a `tower`.

    one_axis: make tables for positions that are equal on all axes.
    """
    model_type = str(getattr(config, "model_type", ""))
    sections = rope.pop("mrope_section", None)
    rope.pop("mrope_interleaved", None)  # transformers goes by the model alone
    if scaling == "axial" or model_type in TOWERS:
        tower = _find_tower(model_type)
        if tower.scaling == "axial":
            return {"tower": tower, "scaling": "axial"}
        return {} if one_axis else {"tower": tower}
    name = model_type.removesuffix("_text")
    reason = REFUSED.get(name) or (None if one_axis else ONE_AXIS_ALONE.get(name))
    if reason is not None:
        raise ValueError(f"config's model_type is {model_type!r}, but from_hf_config cannot read it: it {reason}")
    family = FAMILIES.get(name)
    if family is None:
        if sections is None:
            return {}
        raise ValueError(
            f"mrope_section is {sections!r}, but config's model_type is {model_type!r}, whose axes are not known: pass "
            f"mrope_section=None, and axes=mrope_axes({sections!r}) or what the model's code says"
        )
    rope.pop("interleaved", None)  # Qwen3-Omni's name for mrope_interleaved
    pairs = {"interleaved": family.interleaved}
    if one_axis:
        return pairs
    if family.axes is _height_width_then_time and scaling != "default":
        raise ValueError(
            f"rope_type is {scaling!r}, but must be 'default' for {model_type!r}, which orders the default's "
            f"frequencies by axis"
        )
    return {"axes": family.axes(sections or family.sections), **pairs}


def _find_tower(model_type: str) -> Tower:
    tower = TOWERS.get(model_type)
    if tower is None:
        raise ValueError(
            f"config's model_type is {model_type!r}, a vision tower whose axes are not known: pass scaling='axial' and "
            f"axes= to RotaryEmbedding, or coordinates that are no integers as tables per token to apply_rope"
        )
    return tower


def arrange_tower(tower: Tower, dim: int) -> dict[str, Any]:
    """Return the keywords of `RotaryEmbedding` for a vision tower whose heads have `dim` features to rotate."""
    n_axes = len(tower.axes)
    if n_axes > 2:
        dim -= dim % (2 * n_axes)  # the others pass through
    order, pairs = torch.tensor(tower.axes, device="cpu"), dim // (2 * n_axes)
    axes = order.repeat(pairs) if tower.alternating else order.repeat_interleave(pairs)
    keywords = {"dim": dim, "axes": axes, "interleaved": tower.interleaved}
    keywords["pair_block"] = dim // 2 if tower.in_blocks else None
    if tower.scaling == "axial":
        parameters = {"dealt": tower.dealt, "alternating": tower.alternating, "n_axes": n_axes if n_axes > 2 else None}
        keywords |= {name: value for name, value in parameters.items() if value}
    return keywords

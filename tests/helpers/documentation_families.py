"""The table of docs/conventions.md, and each of its families' own rotation in transformers."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk import RotaryEmbedding, apply_rope

PAGE = Path(__file__).parents[2] / "docs" / "conventions.md"
B, T, H = 2, 9, 4
_SIZES = {"hidden_size": 256, "num_attention_heads": H, "num_key_value_heads": H, "head_dim": 64}
_OTHER_SIZES: dict[str, dict[str, Any]] = {
    "gptj": {"n_embd": 1024, "n_head": H, "n_positions": 512},
    "codegen": {"n_embd": 1024, "n_head": H, "n_positions": 512},
    "deepseek_v2": {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    "deepseek_v3": {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128},
    "falcon": {"hidden_size": 256, "num_attention_heads": H},
    "roformer": {"hidden_size": 256, "num_attention_heads": H, "embedding_size": 256},
}
_SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "longrope": {
        "short_factor": [1 + 0.1 * i for i in range(32)],
        "long_factor": [2 + 0.5 * i for i in range(32)],
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


@dataclass(frozen=True)
class Family:
    """A row of the table, for one model type and one scaling."""

    name: str
    model_type: str
    pairs: str
    rotated: str
    base: str
    scaling: str
    arguments: dict[str, Any]  # what the row says to pass

    def __str__(self) -> str:
        return f"{self.name}, {self.model_type}, {self.scaling}"


def read_families() -> list[Family]:
    """The rows of the page's table."""
    table = PAGE.read_text(encoding="utf-8").partition("<!-- families -->")[2].lstrip().partition("\n\n")[0]
    families = []
    for line in table.splitlines()[2:]:
        name, types, pairs, rotated, base, scalings, arguments = (cell.strip() for cell in line.strip("|").split("|"))
        passed = {} if arguments == "–" else eval(f"dict({arguments.strip('`')})")
        for model_type in re.findall(r"`(\w+)`", types):
            for scaling in re.findall(r"`(\w+)`", scalings):
                families.append(Family(name, model_type, pairs, rotated, base, scaling, passed))
    return families


def make_config(family: Family) -> Any:
    """A small config of the family, with the scaling's parameters."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family.model_type, **_OTHER_SIZES.get(family.model_type, _SIZES))
    if hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = 1024
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get(family.arguments.get("layer_type"), rope)
    if family.scaling != rope.get("rope_type", "default"):
        rope.update(rope_type=family.scaling, **_SCALINGS[family.scaling])
        if family.scaling == "longrope":
            config.original_max_position_embeddings = 256
    return config


def check_base(family: Family, config: Any) -> None:
    """Hold the row's base against the config's default, where that is the family's own and not everybody's 10000."""
    rope = getattr(config, "rope_parameters", None) or {}
    default = rope.get(family.arguments.get("layer_type"), rope).get("rope_theta", 10000.0)
    if family.base != "in the config" and (default != 10000.0 or "layer_type" in family.arguments):
        assert float(re.sub(r"\s", "", family.base)) == default


def share_rotated(family: Family, config: Any) -> tuple[int, int, int]:
    """The head dim, how many features the row says are rotated, and the first of them."""
    counts = re.match(r"(\d+) of (\d+)(, the last)?$", family.rotated)
    if counts:
        rotated, head_dim = int(counts[1]), int(counts[2])
        return head_dim, rotated, head_dim - rotated if counts[3] else 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fraction = re.match(r"1/(\d+)$", family.rotated)
    if fraction:
        return head_dim, head_dim // int(fraction[1]), 0
    if family.rotated == "all":
        return head_dim, head_dim, 0
    assert family.rotated in ("a part", "all or a part"), family.rotated
    return head_dim, int(head_dim * config.rope_parameters["partial_rotary_factor"]), 0


def rotate_by_row(family: Family, config: Any, q: Tensor, positions: Tensor) -> Tensor:
    """The rotation of q (B, H, T, R) that the row describes; R is the rotated part."""
    rotary = RotaryEmbedding.from_hf_config(config, layout="bhtd", **family.arguments)
    assert rotary.dim == q.shape[-1]
    assert rotary.interleaved == family.pairs.startswith("interleaved")
    assert rotary.scaling == family.scaling
    if family.pairs.endswith("−θ"):
        return apply_rope(q, None, rotary.cos, rotary.sin, positions=positions, layout="bhtd", inverse=True)
    return rotary(q, positions=positions)


def rotate_as_family(family: Family, config: Any, q: Tensor, positions: Tensor) -> Tensor:
    """The same by transformers' code for the family."""
    folder = family.model_type.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    if family.model_type in ("gptj", "codegen"):
        table = module.create_sinusoidal_positions(1024, q.shape[-1])
        sin, cos = (x.contiguous() for x in table[positions].chunk(2, dim=-1))
        return module.apply_rotary_pos_emb(q.transpose(1, 2), sin, cos).transpose(1, 2)
    if family.model_type == "roformer":
        table = module.RoFormerSinusoidalPositionalEmbedding(1024, q.shape[-1])
        table.weight.data.copy_(table.create_weight())
        sinusoids = table.weight[positions][:, None]
        return module.RoFormerSelfAttention.apply_rotary_position_embeddings(sinusoids, q, q)[0]
    names = [name for name in vars(module) if name.endswith("RotaryEmbedding") and "Vision" not in name]
    assert len(names) == 1, names
    embedding = getattr(module, names[0])(config)
    layer_type = family.arguments.get("layer_type")
    tables = embedding(q, positions, layer_type) if layer_type else embedding(q, positions)
    if family.model_type == "llama4_text":
        rotated = module.apply_rotary_emb(q.transpose(1, 2), q.transpose(1, 2), tables)[0]
        return rotated.transpose(1, 2)
    if family.model_type == "deepseek_v2":
        return module.apply_rotary_emb(q, q, tables)[0]
    if family.model_type == "deepseek_v3":  # writes the pairs half-split
        rotated = module.apply_rotary_pos_emb_interleave(q, q, *tables)[0]
        return torch.stack(rotated.chunk(2, dim=-1), dim=-1).flatten(-2)
    return module.apply_rotary_pos_emb(q, q, *tables)[0]

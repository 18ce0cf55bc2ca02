"""Position encodings for transformers as fast, differentiable GPU kernels.

Every public name is imported when it is first used (PEP 562), so that `import ropewalk` costs nothing and
`ropewalk --help` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ropewalk.bench.documents import benchmark_rope as benchmark_rope
    from ropewalk.far_positions import ReRope as ReRope
    from ropewalk.far_positions import SelfExtend as SelfExtend
    from ropewalk.frequencies import FREQUENCIES as FREQUENCIES
    from ropewalk.frequencies import inverse_frequencies as inverse_frequencies
    from ropewalk.frequencies import rope_table as rope_table
    from ropewalk.modules.attention import RoPEAttention as RoPEAttention
    from ropewalk.modules.bert import AbsoluteBERTAttention as AbsoluteBERTAttention
    from ropewalk.modules.bert import ALiBiBERTAttention as ALiBiBERTAttention
    from ropewalk.modules.bert import ExpoSBBERTAttention as ExpoSBBERTAttention
    from ropewalk.modules.bert import ReRoPEBERTAttention as ReRoPEBERTAttention
    from ropewalk.modules.bert import RoPEBERTAttention as RoPEBERTAttention
    from ropewalk.modules.bert import StandardBERTAttention as StandardBERTAttention
    from ropewalk.modules.bert import get_attention_class as get_attention_class
    from ropewalk.modules.rotary import RotaryEmbedding as RotaryEmbedding
    from ropewalk.modules.rotary import TritonRotary as TritonRotary
    from ropewalk.ops.attention.api import attention as attention
    from ropewalk.ops.attention.api import explain_choice as explain_choice
    from ropewalk.ops.attention.documents import absolute_attention as absolute_attention
    from ropewalk.ops.attention.documents import exposb_attention as exposb_attention
    from ropewalk.ops.attention.documents import rope_attention as rope_attention
    from ropewalk.ops.attention.documents import standard_attention as standard_attention
    from ropewalk.ops.attention.rerope import rerope_attention as rerope_attention
    from ropewalk.ops.attention.rerope import torch_attention as torch_attention
    from ropewalk.ops.rope.api import apply_rope as apply_rope
    from ropewalk.ops.rope.documents import apply_rotary_emb as apply_rotary_emb
    from ropewalk.ops.rope.documents import precompute_freqs_cis as precompute_freqs_cis
    from ropewalk.ops.rope.documents import rope_pytorch as rope_pytorch
    from ropewalk.ops.rope.documents import rope_triton as rope_triton
    from ropewalk.ops.rope.rotary_embedding import rotary_embedding as rotary_embedding
    from ropewalk.position_scheme import PositionScheme as PositionScheme
    from ropewalk.positions import Alibi as Alibi
    from ropewalk.positions import ExpoSB as ExpoSB
    from ropewalk.positions import NoPosition as NoPosition
    from ropewalk.positions import Rope as Rope
    from ropewalk.positions import T5Bias as T5Bias

_MODULE_OF = {
    "ALiBiBERTAttention": "ropewalk.modules.bert",
    "AbsoluteBERTAttention": "ropewalk.modules.bert",
    "Alibi": "ropewalk.positions",
    "ExpoSB": "ropewalk.positions",
    "ExpoSBBERTAttention": "ropewalk.modules.bert",
    "FREQUENCIES": "ropewalk.frequencies",
    "NoPosition": "ropewalk.positions",
    "PositionScheme": "ropewalk.position_scheme",
    "ReRoPEBERTAttention": "ropewalk.modules.bert",
    "ReRope": "ropewalk.far_positions",
    "RoPEAttention": "ropewalk.modules.attention",
    "RoPEBERTAttention": "ropewalk.modules.bert",
    "Rope": "ropewalk.positions",
    "RotaryEmbedding": "ropewalk.modules.rotary",
    "SelfExtend": "ropewalk.far_positions",
    "StandardBERTAttention": "ropewalk.modules.bert",
    "T5Bias": "ropewalk.positions",
    "TritonRotary": "ropewalk.modules.rotary",
    "absolute_attention": "ropewalk.ops.attention.documents",
    "apply_rope": "ropewalk.ops.rope.api",
    "apply_rotary_emb": "ropewalk.ops.rope.documents",
    "attention": "ropewalk.ops.attention.api",
    "benchmark_rope": "ropewalk.bench.documents",
    "explain_choice": "ropewalk.ops.attention.api",
    "exposb_attention": "ropewalk.ops.attention.documents",
    "get_attention_class": "ropewalk.modules.bert",
    "inverse_frequencies": "ropewalk.frequencies",
    "precompute_freqs_cis": "ropewalk.ops.rope.documents",
    "rerope_attention": "ropewalk.ops.attention.rerope",
    "rope_attention": "ropewalk.ops.attention.documents",
    "rope_pytorch": "ropewalk.ops.rope.documents",
    "rope_table": "ropewalk.frequencies",
    "rope_triton": "ropewalk.ops.rope.documents",
    "rotary_embedding": "ropewalk.ops.rope.rotary_embedding",
    "standard_attention": "ropewalk.ops.attention.documents",
    "torch_attention": "ropewalk.ops.attention.rerope",
}

__all__ = [*sorted(_MODULE_OF), "__version__"]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'ropewalk' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Position encodings for transformers as fast, differentiable GPU kernels.

Every public name is imported when it is first used (PEP 562), so that `import ropewalk` costs nothing and
`ropewalk --help` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ropewalk.bench.rope.benchmark_rope import benchmark_rope as benchmark_rope
    from ropewalk.compat.attention import absolute_attention as absolute_attention
    from ropewalk.compat.attention import exposb_attention as exposb_attention
    from ropewalk.compat.attention import rope_attention as rope_attention
    from ropewalk.compat.attention import standard_attention as standard_attention
    from ropewalk.compat.rerope import rerope_attention as rerope_attention
    from ropewalk.compat.rerope import torch_attention as torch_attention
    from ropewalk.compat.rope import apply_rotary_emb as apply_rotary_emb
    from ropewalk.compat.rope import precompute_freqs_cis as precompute_freqs_cis
    from ropewalk.compat.rope import rope_pytorch as rope_pytorch
    from ropewalk.compat.rope import rope_triton as rope_triton
    from ropewalk.frequencies import FREQUENCIES as FREQUENCIES
    from ropewalk.frequencies import inverse_frequencies as inverse_frequencies
    from ropewalk.frequencies import mrope_axes as mrope_axes
    from ropewalk.frequencies import rope_table as rope_table
    from ropewalk.modules.attention import RoPEAttention as RoPEAttention
    from ropewalk.modules.bert import AbsoluteBERTAttention as AbsoluteBERTAttention
    from ropewalk.modules.bert import ALiBiBERTAttention as ALiBiBERTAttention
    from ropewalk.modules.bert import ExpoSBBERTAttention as ExpoSBBERTAttention
    from ropewalk.modules.bert import ReRoPEBERTAttention as ReRoPEBERTAttention
    from ropewalk.modules.bert import RoPEBERTAttention as RoPEBERTAttention
    from ropewalk.modules.bert import StandardBERTAttention as StandardBERTAttention
    from ropewalk.modules.bert import T5BERTAttention as T5BERTAttention
    from ropewalk.modules.bert import get_attention_class as get_attention_class
    from ropewalk.modules.rotary import RotaryEmbedding as RotaryEmbedding
    from ropewalk.modules.rotary import TritonRotary as TritonRotary
    from ropewalk.ops.attention.api import attention as attention
    from ropewalk.ops.attention.api import explain_choice as explain_choice
    from ropewalk.ops.attention.blocks.lists import BlockLists as BlockLists
    from ropewalk.ops.attention.quantise.precision import QuantizedProducts as QuantizedProducts
    from ropewalk.ops.cache.api import append_kv as append_kv
    from ropewalk.ops.rope.api import apply_rope as apply_rope
    from ropewalk.ops.rope.norm import QKNorm as QKNorm
    from ropewalk.ops.rope.rotary_embedding import rotary_embedding as rotary_embedding
    from ropewalk.schemes import Alibi as Alibi
    from ropewalk.schemes import ExpoSB as ExpoSB
    from ropewalk.schemes import NoPosition as NoPosition
    from ropewalk.schemes import PositionScheme as PositionScheme
    from ropewalk.schemes import ReRope as ReRope
    from ropewalk.schemes import Rope as Rope
    from ropewalk.schemes import SelfExtend as SelfExtend
    from ropewalk.schemes import T5Bias as T5Bias

_MODULE_OF = {
    "ALiBiBERTAttention": "ropewalk.modules.bert",
    "AbsoluteBERTAttention": "ropewalk.modules.bert",
    "Alibi": "ropewalk.schemes",
    "BlockLists": "ropewalk.ops.attention.blocks.lists",
    "ExpoSB": "ropewalk.schemes",
    "ExpoSBBERTAttention": "ropewalk.modules.bert",
    "FREQUENCIES": "ropewalk.frequencies",
    "NoPosition": "ropewalk.schemes",
    "PositionScheme": "ropewalk.schemes",
    "QKNorm": "ropewalk.ops.rope.norm",
    "QuantizedProducts": "ropewalk.ops.attention.quantise.precision",
    "ReRoPEBERTAttention": "ropewalk.modules.bert",
    "ReRope": "ropewalk.schemes",
    "RoPEAttention": "ropewalk.modules.attention",
    "RoPEBERTAttention": "ropewalk.modules.bert",
    "Rope": "ropewalk.schemes",
    "RotaryEmbedding": "ropewalk.modules.rotary",
    "SelfExtend": "ropewalk.schemes",
    "StandardBERTAttention": "ropewalk.modules.bert",
    "T5BERTAttention": "ropewalk.modules.bert",
    "T5Bias": "ropewalk.schemes",
    "TritonRotary": "ropewalk.modules.rotary",
    "absolute_attention": "ropewalk.compat.attention",
    "append_kv": "ropewalk.ops.cache.api",
    "apply_rope": "ropewalk.ops.rope.api",
    "apply_rotary_emb": "ropewalk.compat.rope",
    "attention": "ropewalk.ops.attention.api",
    "benchmark_rope": "ropewalk.bench.rope.benchmark_rope",
    "explain_choice": "ropewalk.ops.attention.api",
    "exposb_attention": "ropewalk.compat.attention",
    "get_attention_class": "ropewalk.modules.bert",
    "inverse_frequencies": "ropewalk.frequencies",
    "mrope_axes": "ropewalk.frequencies",
    "precompute_freqs_cis": "ropewalk.compat.rope",
    "rerope_attention": "ropewalk.compat.rerope",
    "rope_attention": "ropewalk.compat.attention",
    "rope_pytorch": "ropewalk.compat.rope",
    "rope_table": "ropewalk.frequencies",
    "rope_triton": "ropewalk.compat.rope",
    "rotary_embedding": "ropewalk.ops.rope.rotary_embedding",
    "standard_attention": "ropewalk.compat.attention",
    "torch_attention": "ropewalk.compat.rerope",
}

__all__ = [*sorted(_MODULE_OF), "__version__"]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'ropewalk' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""What the README's blocks take for granted: the tensors that a reader has."""

from __future__ import annotations

_TENSORS = """
import torch
from torch import nn
q, k, v = (torch.randn(2, 48, heads, 64, device={device!r}) for heads in (8, 2, 2))
"""
# For a block that holds the text on the left; all that fit, in this order.
_PRELUDES = {
    "AutoModel.from_pretrained(name": """
import transformers
from transformers import AutoModel
sizes = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64)
name = "./tiny-llama"
transformers.LlamaModel(transformers.LlamaConfig(vocab_size=100, **sizes)).save_pretrained(name)
""",
}


def prelude(block: str, device: str) -> str:
    """The code that goes before a block of the README."""
    parts = [_TENSORS, *(text for mark, text in _PRELUDES.items() if mark in block)]
    return "\n".join(part.format(device=device) for part in parts)

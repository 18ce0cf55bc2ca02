"""Hugging Face models by Ropewalk's kernels, through transformers' own doors: nothing changes unless it is asked for.

`register` adds an attention implementation, `use_ropewalk_rope` lets models rotate by `ropewalk.apply_rope`, and
`convert_bert` gives a BERT another position scheme. transformers is imported when one of them is called.
"""

from ropewalk.integrations.huggingface.attention import register
from ropewalk.integrations.huggingface.bert import convert_bert
from ropewalk.integrations.huggingface.rotation import RopeHandle, use_ropewalk_rope

__all__ = ["RopeHandle", "convert_bert", "register", "use_ropewalk_rope"]

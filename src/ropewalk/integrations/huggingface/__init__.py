"""Integration with Hugging Face transformers, through its own interfaces; each part is enabled explicitly.

`register` adds an attention implementation, `use_ropewalk_rope` makes models rotate by `ropewalk.apply_rope`, and
`convert_bert` gives a BERT another position scheme. transformers is imported when one of them is called.
"""

from ropewalk.integrations.huggingface.attention import register
from ropewalk.integrations.huggingface.bert import convert_bert
from ropewalk.integrations.huggingface.rotation import RopeHandle, use_ropewalk_rope

__all__ = ["RopeHandle", "convert_bert", "register", "use_ropewalk_rope"]

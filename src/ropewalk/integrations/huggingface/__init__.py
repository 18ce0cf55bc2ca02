"""Integration with Hugging Face transformers, through its own interfaces; each part is enabled explicitly.

`register` adds an attention implementation, `use_ropewalk_rope` makes models rotate by `ropewalk.apply_rope`,
`use_ropewalk_layers` makes them normalise and rotate q and k in one launch, and `convert_bert` gives a BERT another
position scheme. transformers is imported when one of them is called.
"""

from ropewalk.integrations.huggingface.attention import register
from ropewalk.integrations.huggingface.bert import convert_bert
from ropewalk.integrations.huggingface.layers import LayersHandle, use_ropewalk_layers
from ropewalk.integrations.huggingface.rotation import RopeHandle, use_ropewalk_rope

__all__ = ["LayersHandle", "RopeHandle", "convert_bert", "register", "use_ropewalk_layers", "use_ropewalk_rope"]

"""Context parallelism: attention over a sequence that several processes share, with every position right.

Each process of a group holds a shard of the tokens, as a `SequenceLayout` says, and calls the attention with it::

    layout = SequenceLayout(group, n_tokens)
    q, k, v = (shard_sequence(x, layout) for x in (q, k, v))
    out = context_parallel_attention(q, k, v, layout=layout, position=Rope(), causal=True)
"""

from ropewalk.parallel.api import context_parallel, context_parallel_attention, explain_context_parallel
from ropewalk.parallel.choose import ContextParallelChoice
from ropewalk.parallel.layout import SequenceLayout
from ropewalk.parallel.shards import shard_sequence, unshard_sequence

__all__ = [
    "ContextParallelChoice",
    "SequenceLayout",
    "context_parallel",
    "context_parallel_attention",
    "explain_context_parallel",
    "shard_sequence",
    "unshard_sequence",
]

"""Launches of the kernels that decode from pages on Hopper, recorded for their checks and tools/kernel_figures.py."""

from __future__ import annotations

import torch

from helpers.compile import Recorder
from helpers.paged_calls import empty_pages
from ropewalk import Rope
from ropewalk import device as gpu
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.hopper import decode_launch, support

B, K = 3, 8
LENGTHS = torch.full((32,), 100)
CALLS = {
    "one": {"batch": 32},
    "few": {},
    "not-causal": {"causal": False, "window": (50, 7), "key_starts": LENGTHS[:B] - 90},
    "window-sinks": {"window": 300, "sinks": torch.zeros(4 * K)},
    "chunk": {"queries": 3},
    "one-row": {"batch": 1},
    "hnd": {"layout": "bhtd"},
    "rope": {"position": Rope(), "keys_rotated": True},
    "rope-part": {
        "position": Rope(rotary_dim=32, interleaved=True),
        "keys_rotated": True,
        "key_starts": LENGTHS[:B] - 90,
        "queries": 2,
    },
}


def launches_of(monkeypatch, kind, dim, name):
    """Record the launches of a call."""
    keywords = {"causal": True, "layout": "bthd", **CALLS[name]}
    batch, queries, layout = keywords.pop("batch", B), keywords.pop("queries", 1), keywords.pop("layout")
    k, v, scales = empty_pages(kind, torch.bfloat16, (batch * 32, 16, K, dim), "cpu")
    q = torch.zeros(batch, queries, 4 * K, dim, dtype=torch.bfloat16)
    if layout == "bhtd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    table = torch.zeros(batch, 32, dtype=torch.int32)
    words = {"key_lengths": LENGTHS[:batch], "query_starts": LENGTHS[:batch] - queries, "block_table": table}
    call = make_call(q, k, v, layout=layout, **words, **keywords, **scales)
    assert support._why_not_paged(call) is None
    launches = []
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    for kernel in ("decode_pages_kernel", "combine_shares_kernel"):
        monkeypatch.setattr(decode_launch, kernel, Recorder(getattr(decode_launch, kernel), launches))
    decode_launch.forward(call)
    return launches

"""Launches of the decode kernels, recorded for the compile checks and tools/kernel_figures.py."""

from __future__ import annotations

import torch

from helpers.compile import Recorder, pretend_target
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.triton import decode_launch
from ropewalk.schemes import Alibi, ExpoSB, ReRope, Rope

B, H, HK, KEYS = 2, 8, 2, 4096
LENGTHS = torch.full((B,), 100)
CALLS = {
    "rope": {"position": Rope(), "key_lengths": LENGTHS},
    "rope-causal": {"position": Rope(interleaved=True), "causal": True, "query_starts": LENGTHS - 9},
    "rope-blocks": {"position": Rope(pair_block=32), "key_lengths": LENGTHS},
    "alibi-window": {"position": Alibi(), "causal": True, "window": 500, "softcap": 10.0},
    "rope-mask": {"position": Rope(), "causal": True, "mask": torch.ones(B, 1, 1, KEYS, dtype=torch.bool)},
    "rope-pairs": {"position": Rope(), "mask": torch.ones(B, H, 1, KEYS, dtype=torch.bool)},
    "decay-padding": {"position": ExpoSB(distance_decay=True), "key_starts": LENGTHS, "sinks": torch.zeros(H)},
    "rerope": {"position": ReRope(1000), "causal": True, "query_starts": LENGTHS - 9},
    "leaky-interleaved": {
        "position": ReRope(1000, leak=4.0, rope=Rope(interleaved=True)),
        "causal": True,
        "query_starts": LENGTHS - 9,
    },
}


def launches_of(monkeypatch, target, head_dim, dtype, queries=1, page_size=None, keys=KEYS, **keywords):
    """Record the launches of a call on a target; k and v are paged if there is a page size."""
    pretend_target(monkeypatch, target)
    q = torch.empty(B, H, queries, head_dim, dtype=dtype)
    k = torch.empty(B, HK, keys, head_dim, dtype=dtype)
    if page_size is not None:
        k = torch.empty(4, HK, page_size, head_dim, dtype=dtype)
        table = torch.zeros(B, keys // page_size, dtype=torch.int32)
        keywords = {"key_lengths": LENGTHS, **keywords, "block_table": table}
        keywords["keys_rotated"] = keywords["position"].far_window() is None
    launches = []
    with monkeypatch.context() as patch:
        for kernel in ("decode_kernel", "combine_kernel"):
            patch.setattr(decode_launch, kernel, Recorder(getattr(decode_launch, kernel), launches))
        decode_launch.forward(make_call(q, k, k, layout="bhtd", **keywords))
    return launches

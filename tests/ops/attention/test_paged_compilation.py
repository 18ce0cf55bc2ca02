"""The kernels that decode from pages on Hopper compile with few registers, and their warps keep to themselves."""

from __future__ import annotations

import pytest
import torch
from helpers import compile as compile_helpers
from helpers.compile import Recorder
from helpers.paged_calls import empty_pages
from helpers.targets import SHARED_MEMORY

from ropewalk import Rope
from ropewalk import device as gpu
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.hopper import support

if support.why_missing() is not None:
    pytest.skip(str(support.why_missing()), allow_module_level=True)

from helpers.compile_hopper import compile_gluon, instructions_of, ptxas_report, spilled_bytes

from ropewalk.ops.attention.hopper import decode_launch

pytestmark = pytest.mark.compile
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
CASES = [
    *((kind, 128, name) for kind in ("own", "fp8", "int8", "int4") for name in ("one", "few", "chunk")),
    *((kind, 64, "window-sinks") for kind in ("own", "fp8", "int8", "int4")),
    *(("fp8", 128, name) for name in ("not-causal", "one-row", "hnd", "rope-part")),
    *((kind, 128, "rope") for kind in ("own", "fp8", "int4")),
    ("int4", 64, "not-causal"),
]


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
    monkeypatch.setitem(compile_helpers.POINTERS, torch.int16, "*i16")
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    for kernel in ("decode_pages_kernel", "combine_shares_kernel"):
        monkeypatch.setattr(decode_launch, kernel, Recorder(getattr(decode_launch, kernel), launches))
    decode_launch.forward(call)
    return launches


@pytest.mark.parametrize(("kind", "dim", "name"), CASES)
def test_kernels_compile(kind, dim, name, monkeypatch, tmp_path):
    attend, combine = launches_of(monkeypatch, kind, dim, name)
    compiled = compile_gluon(attend)
    batch, queries = CALLS[name].get("batch", B), CALLS[name].get("queries", 1)
    row_bytes = int(dim * {"own": 2, "int4": 0.5}.get(kind, 1))
    tiles = decode_launch.choose_tiles(row_bytes, 16 if queries > 2 else 8, batch, K, 2**20, 132)
    assert compiled.metadata.shared * tiles.programs <= SHARED_MEMORY["sm_90"]
    instructions = instructions_of(compiled, tmp_path)
    # All copies are of 16 bytes, but for those of scales.
    copies = [line for line in instructions if line.startswith("LDGSTS")]
    assert copies
    narrow = [line for line in copies if ".128" not in line]
    assert bool(narrow) == (kind in ("int8", "int4"))
    # Keys and values come from shared memory to the layout of products, values transposed.
    assert any(line.startswith("LDSM.16.M") for line in instructions)
    assert any(line.startswith("LDSM.16.MT") for line in instructions)
    if name == "one":  # warps exchange nothing, and meet twice in each step
        loop = main_loop(instructions)
        assert sum(line.startswith("BAR") for line in loop) <= 2
        assert not any(line.startswith("STS") for line in loop)
    assert spilled_bytes(ptxas_report(compile_gluon(combine), tmp_path)) == 0


def main_loop(instructions):
    """Return the instructions from the first product to the last one."""
    products = [index for index, line in enumerate(instructions) if line.startswith("HMMA")]
    return instructions[products[0] : products[-1] + 1]

"""The kernels that decode from pages on Hopper compile with few registers, and their warps keep to themselves."""

from __future__ import annotations

import pytest
from helpers.targets import SHARED_MEMORY

from ropewalk.ops.attention.hopper import support

if support.why_missing() is not None:
    pytest.skip(str(support.why_missing()), allow_module_level=True)

from helpers.compile_hopper import compile_gluon, instructions_of, ptxas_report, spilled_bytes
from helpers.paged_launches import CALLS, B, K, launches_of

from ropewalk.ops.attention.hopper import decode_launch

pytestmark = pytest.mark.compile
CASES = [
    *((kind, 128, name) for kind in ("own", "fp8", "int8", "int4") for name in ("one", "few", "chunk")),
    *((kind, 64, "window-sinks") for kind in ("own", "fp8", "int8", "int4")),
    *(("fp8", 128, name) for name in ("not-causal", "one-row", "hnd", "rope-part")),
    *((kind, 128, "rope") for kind in ("own", "fp8", "int4")),
    ("int4", 64, "not-causal"),
]


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

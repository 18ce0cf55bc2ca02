"""Names of Gluon for the kernels for Hopper, the same with all supported versions of Triton.

Gluon is Triton's language below tiles: a program manages layouts, shared memory, barriers and roles of warps. It is in
`triton.experimental`, and names in it move from version to version.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate
from triton.language.core import builtin

__all__ = [
    "aggregate",
    "associative_scan",
    "await_stores",
    "commit_copies",
    "copy_to_shared",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "store_tile",
    "tma_add",
    "wait_copies",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
await_stores = tma.store_wait
# Copies by threads: (tile, pointers, mask); zeros where the mask is false.
copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit_copies = async_copy.commit_group
wait_copies = async_copy.wait_group  # until so many groups are left
associative_scan = gl.associative_scan
# The memory of a tile for elements of another type, or another shape or layout: (tile, dtype, shape, layout).
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@builtin
def _add_by_tma(descriptor, coordinates, tile, _semantic=None):
    """The instruction has no name in Gluon before Triton 3.8, but its builder makes it."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle
    )


# Add a tile of shared memory to one of global memory: (descriptor, coordinates, tile).
tma_add = getattr(tma, "async_atomic_add", None) or _add_by_tma

"""Named barriers of the kernels for Hopper, by number and count of threads, and waits of a kernel for another.

A program has 16 barriers. Triton takes number 0, number 1, and one for each partition of warps but the first.
"""

from __future__ import annotations

from dataclasses import dataclass

from ropewalk.ops.attention.hopper.gluon_compat import gl, gluon


@dataclass(frozen=True)
class NamedBarrier:
    """One or several barriers of one purpose: the first number, and the threads that arrive or wait at each."""

    first: int
    threads: int


# Forward. One for each compute warp group: it may issue its matrix products.
PINGPONG = gl.constexpr(NamedBarrier(10, threads=256))  # 10-12

# Backward. Both compute warp groups: they are done with a range of pairs, or with all.
RANGE_DONE = gl.constexpr(NamedBarrier(7, threads=256))
# Both compute warp groups: dS is in shared memory. With DEFER_DQ two for each group, of even and odd steps.
DS_STORED = gl.constexpr(NamedBarrier(8, threads=256))  # 8-11
# Where dS has one tile, two barriers less of those: each warp group has read it.
DS_READ = gl.constexpr(NamedBarrier(9, threads=256))  # 9, 11
# A compute warp group and the dQ-reduce warp, one for each group: a chunk of dQ is in shared memory, or read from it.
DQ_FULL = gl.constexpr(NamedBarrier(12, threads=160))  # 12-13
DQ_FREE = gl.constexpr(NamedBarrier(14, threads=160))  # 14-15


@gluon.constexpr_function
def _instruction(operation, barrier):
    return f"bar.{operation} $1, {barrier.threads}; mov.u32 $0, 0;"


@gluon.constexpr_function
def _number(barrier, index):
    return barrier.first + index


@gluon.jit
def named_barrier_sync(BARRIER: gl.constexpr, INDEX: gl.constexpr, parity=0):
    """Arrive at a barrier, of even or odd steps if it has two, and wait until all its threads have."""
    PTX: gl.constexpr = _instruction("sync", BARRIER)
    gl.inline_asm_elementwise(PTX, "=r,r", [gl.to_tensor(_number(BARRIER, INDEX) + parity)], gl.int32, False, 1)


@gluon.jit
def named_barrier_arrive(BARRIER: gl.constexpr, INDEX: gl.constexpr, parity=0):
    """Arrive at a barrier without waiting."""
    PTX: gl.constexpr = _instruction("arrive", BARRIER)
    gl.inline_asm_elementwise(PTX, "=r,r", [gl.to_tensor(_number(BARRIER, INDEX) + parity)], gl.int32, False, 1)


@gluon.jit
def pingpong_sync(CONSUMER: gl.constexpr):
    """Wait until the compute warp group before this one has issued its matrix products."""
    named_barrier_sync(PINGPONG, CONSUMER)


@gluon.jit
def pingpong_arrive(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Let the next compute warp group issue its matrix products."""
    named_barrier_arrive(PINGPONG, (CONSUMER + 1) % CONSUMERS)


@gluon.jit
def let_next_kernel_begin():
    """Let the next kernel of the stream begin, as far as it does not wait, if its launch has `launch_pdl`."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], gl.int32, False, 1
    )


@gluon.jit
def await_kernel_before():
    """Wait until the kernel before this one has ended, and what it wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)

"""Candidates: one process, ours, torch's context_parallel, and an all-gather by hand.

Each takes its leaves, q, k and v of (1, T or T_local, heads, D), and returns the output. All shards are zigzag ones,
which PyTorch's are too where the length divides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import sdpa_kernel

from ropewalk.bench.attention.cases import BASE
from ropewalk.bench.attention.peers import BACKENDS
from ropewalk.bench.core.peers import Library
from ropewalk.bench.parallel.cases import Inputs, ParallelCase
from ropewalk.bench.rope.gate import rotate_plainly
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.attention.api import attention, explain_choice
from ropewalk.ops.rope.api import apply_rope
from ropewalk.parallel import context_parallel_attention, explain_context_parallel, shard_sequence

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
Context = Callable[[], AbstractContextManager[Any]]
Build = Callable[[Inputs, DeviceMesh], tuple[Run, Context]]


ONE = "one process"  # the anchor: the whole call on each rank at once
OURS = "ropewalk"


@dataclass(frozen=True)
class Call:
    """A way to compute a case: what is called, on which leaves, within which context."""

    run: Run
    leaves: tuple[Tensor, ...]  # that require grad
    learned: tuple[Tensor, ...]
    grad: Tensor
    context: Context = nullcontext
    more: dict[str, Any] = field(default_factory=dict)  # that the row says of it

    def __call__(self) -> list[Tensor]:
        """Run forward and backward: the output, and the gradients of q, k, v and of what is learned."""
        out = self.run(*self.leaves)
        return [out, *torch.autograd.grad(out, (*self.leaves, *self.learned), self.grad)]


@dataclass(frozen=True)
class ParallelPeer(Library):
    """Another implementation of context parallelism."""

    build: Build
    most_tokens: int | None = None  # of the cases that it is timed on

    def why_not(self, case: ParallelCase) -> str | None:
        """Say why it cannot run a case."""
        if not case.peers:
            return "measured with the default method"
        if case.setting != "rope" or case.window is not None or case.shortest is not None:
            return "plain causal attention alone"
        if self.most_tokens is not None and case.tokens > self.most_tokens:
            return "RoPE's part is small there"
        return None


def one_process(inputs: Inputs) -> Call:
    """Make the yardstick: the whole call, by the implementation that `attention` chooses."""
    keywords, bounds = inputs.keywords(), inputs.layout.cu_seqlens
    if bounds is not None:
        bounds = bounds.int()
        keywords = {**keywords, "layout": "thd", "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if bounds is not None:
            packed: Tensor = attention(q[0], k[0], v[0], **keywords)
            return packed[None]
        return attention(q, k, v, **keywords)

    leaves = tuple(x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    tensors = leaves if bounds is None else tuple(x[0] for x in leaves)
    served_by = explain_choice(*tensors, **keywords).name
    return Call(run, leaves, inputs.learned, inputs.grad, more={"served_by": served_by})


def ours(inputs: Inputs) -> Call:
    """Make the candidate of `context_parallel_attention`; gradients of what is learned are summed over ranks."""
    keywords = {**inputs.keywords(), "layout": inputs.layout, "method": inputs.case.method}
    keywords["sum_gradients"] = bool(inputs.learned)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context_parallel_attention(q, k, v, **keywords)

    leaves, grad = _shards(inputs)
    choice = explain_context_parallel(*leaves, **keywords)
    received = choice.bytes_received + choice.bytes_received_backward
    more = {"served_by": choice.method, "bytes_received": received}
    return Call(run, leaves, inputs.learned, grad, more=more)


def run_of_peer(inputs: Inputs, peer: ParallelPeer, mesh: DeviceMesh) -> Call:
    """Make the call of a peer that supports the case."""
    leaves, grad = _shards(inputs)
    run, context = peer.build(inputs, mesh)
    return Call(run, leaves, (), grad, context)


def _shards(inputs: Inputs) -> tuple[tuple[Tensor, ...], Tensor]:
    leaves = tuple(shard_sequence(x, inputs.layout).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    return leaves, shard_sequence(inputs.grad, inputs.layout)


def _table(inputs: Inputs) -> tuple[Tensor, Tensor]:
    inv_freq, _ = inverse_frequencies("default", inputs.case.head_dim, BASE)
    return rope_table(inputs.layout.positions, inv_freq.to(inputs.q.device))


def _build_by_hand(flash: bool) -> Build:
    """Build what a user writes: keys are gathered, then each of the two runs attends those up to its end."""

    def build(inputs: Inputs, mesh: DeviceMesh) -> tuple[Run, Context]:
        layout, group = inputs.layout, mesh.get_group()
        rank, n, half = layout.rank, layout.size, layout.n_local // 2
        cos, sin = _table(inputs)
        if flash:
            from flash_attn.cute import flash_attn_func

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not flash:
                return attention(q, k, v, causal=True)
            out: Any = flash_attn_func(q, k, v, causal=True)
            return out[0] if isinstance(out, tuple) else out

        def gather(x: Tensor) -> Tensor:
            parts = _all_gather(x[0].contiguous(), 0, group).unflatten(0, (2 * n, half))  # by rank: early, late
            in_order = [parts[2 * i] for i in range(n)] + [parts[2 * i + 1] for i in reversed(range(n))]
            return torch.cat(in_order)[None]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = apply_rope(q, k, cos, sin)
            k, v = gather(k), gather(v)
            outs = []
            for of_run, place in ((slice(0, half), rank), (slice(half, None), 2 * n - 1 - rank)):
                stop = (place + 1) * half
                outs.append(attend(q[:, of_run], k[:, :stop], v[:, :stop]))
            return torch.cat(outs, 1)

        return run, nullcontext

    return build


# PyTorch 2.14 has another name.
_all_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


@functools.cache
def _compiled_rope() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile PyTorch's RoPE of q and k once, for all lengths and heads."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_plainly(q, cos, sin, False), rotate_plainly(k, cos, sin, False)

    return torch.compile(rotate, fullgraph=True, dynamic=True)


def _build_torch(backend: str, rope: bool) -> Build:
    """Build torch's context_parallel around SDPA by one backend, after compiled RoPE or nothing."""

    def build(inputs: Inputs, mesh: DeviceMesh) -> tuple[Run, Context]:
        from torch.distributed.tensor.experimental import context_parallel

        cos, sin = (x[:, None] for x in _table(inputs))
        grouped, tokens = inputs.case.q_heads != inputs.case.k_heads, inputs.case.tokens
        device = inputs.q.device

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if rope:
                q, k = _compiled_rope()(q, k, cos, sin)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            return out.transpose(1, 2)

        @contextmanager
        def context() -> Any:
            with ExitStack() as stack:
                stack.enter_context(sdpa_kernel(BACKENDS[backend]))
                sharded = torch.zeros(tokens, device=device)  # it wants a buffer to shard, and reads the length there
                stack.enter_context(context_parallel(mesh, buffers=[sharded], buffer_seq_dims=[0]))
                yield

        return run, context

    return build


def barrier(device: torch.device) -> None:
    """Let no rank start before the others: on a GPU in the stream, and the host does not wait."""
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))
    else:
        dist.barrier()


NO_ROPE = ("torch_cudnn_bare", "torch_flash_bare")  # what these compute is held against attention without positions
PEERS: dict[str, ParallelPeer] = {
    peer.name: peer
    for peer in (
        ParallelPeer("by_hand_flash_attn_4", "flash_attn.cute", "flash-attn-4", True, _build_by_hand(True)),
        ParallelPeer("by_hand", "torch", "torch", False, _build_by_hand(False)),
        ParallelPeer("torch_cudnn_bare", "torch", "torch", True, _build_torch("cudnn", False)),
        ParallelPeer("torch_flash_bare", "torch", "torch", True, _build_torch("sdpa_flash", False)),
        ParallelPeer("torch_cudnn", "torch", "torch", True, _build_torch("cudnn", True), 1 << 16),
        ParallelPeer("torch_flash", "torch", "torch", True, _build_torch("sdpa_flash", True), 1 << 16),
    )
}

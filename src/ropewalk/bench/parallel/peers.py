"""Candidates: one process, ours, torch's context_parallel, and an all-gather by hand; and a training step of a model.

Each takes its leaves, q, k and v of (1, T or T_local, heads, D), and returns the output. All shards are zigzag ones,
which PyTorch's are too where the length divides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import sdpa_kernel

import ropewalk.parallel as cp
from ropewalk.bench.attention.cases import BASE
from ropewalk.bench.attention.peers import BACKENDS
from ropewalk.bench.core.peers import Library
from ropewalk.bench.parallel.cases import Inputs, ParallelCase
from ropewalk.bench.rope.gate import rotate_plainly
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.attention.api import attention, explain_choice
from ropewalk.ops.rope.api import apply_rope
from ropewalk.schemes import Rope

Run = Callable[[Tensor, Tensor, Tensor], Tensor]
Context = Callable[[], AbstractContextManager[Any]]
ONE = "one process"  # the anchor: the whole call on each rank at once
OURS = "ropewalk"
VOCABULARY, LAYERS = 1024, 4  # of the model: neither the table nor a head should cost anything
NO_ROPE = ("torch_cudnn_bare", "torch_flash_bare")  # what these compute is held against attention without positions
# PyTorch 2.14 has another name.
_all_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


@dataclass
class Call:
    """A way to compute a case: what is timed, within which context, the seconds of its first run, and the row's own."""

    run: Callable[[], Any]
    context: Context = nullcontext
    more: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def _both(run: Run, tensors: Sequence[Tensor], learned: Sequence[Tensor] = (), context: Context = nullcontext) -> Call:
    """Run forward and backward: the output, and the gradients of q, k, v and of what is learned."""
    *leaves, grad = tensors

    def both() -> list[Tensor]:
        out = run(*leaves)
        return [out, *torch.autograd.grad(out, (*leaves, *learned), grad)]

    return Call(both, context)


def make_call(name: str, inputs: Inputs, mesh: DeviceMesh) -> Call:
    """Make the yardstick, the whole call by the implementation that `attention` chooses; ours; or a peer's call."""
    keywords, tensors = inputs.keywords(*inputs.parameters), [inputs.q, inputs.k, inputs.v, inputs.grad]
    if name != ONE:
        tensors = [cp.shard_sequence(x, inputs.layout) for x in tensors]
    tensors[:3] = leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    if name in PEERS:
        run, context = PEERS[name].build(inputs, mesh)
        return _both(run, tensors, (), context)
    if name == ONE:
        call = _both(functools.partial(inputs.whole, **keywords), tensors, inputs.learned)
        call.more["served_by"] = inputs.whole(*leaves, run=explain_choice, **keywords).name
        return call
    # Gradients of what is learned are summed over ranks.
    keywords |= {"layout": inputs.layout, "method": inputs.case.method, "sum_gradients": bool(inputs.learned)}
    call = _both(functools.partial(cp.context_parallel_attention, **keywords), tensors, inputs.learned)
    choice = cp.explain_context_parallel(*leaves, **keywords)
    received = choice.bytes_received + choice.bytes_received_backward
    call.more |= {"served_by": choice.method, "bytes_received": received}
    return call


@dataclass(frozen=True)
class ParallelPeer(Library):
    build: Callable[[Inputs, DeviceMesh], tuple[Run, Context]]
    most_tokens: float = float("inf")  # of the cases that it is timed on

    def why_not(self, case: ParallelCase) -> str | None:
        if not case.peers:
            return "measured with the default method"
        if case.setting != "rope" or case.window is not None or case.shortest is not None:
            return "plain causal attention alone"
        return "RoPE's part is small there" if case.tokens > self.most_tokens else None


def _table(inputs: Inputs) -> tuple[Tensor, Tensor]:
    inv_freq, _ = inverse_frequencies("default", inputs.case.head_dim, BASE)
    return rope_table(inputs.layout.positions, inv_freq.to(inputs.q.device))


def _by_hand(flash: bool, inputs: Inputs, mesh: DeviceMesh) -> tuple[Run, Context]:
    """Build what a user writes: keys are gathered, then each of the two runs attends those up to its end."""
    layout, group = inputs.layout, mesh.get_group()
    rank, n, half = layout.rank, layout.size, layout.n_local // 2
    cos, sin = _table(inputs)
    attend: Callable[..., Any] = attention
    if flash:
        from flash_attn.cute import flash_attn_func

        attend = flash_attn_func

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
            out = attend(q[:, of_run], k[:, :stop], v[:, :stop], causal=True)
            outs.append(out[0] if isinstance(out, tuple) else out)
        return torch.cat(outs, 1)

    return run, nullcontext


@functools.cache
def _compiled_rope() -> Callable[..., Any]:
    """Compile PyTorch's RoPE of q and k once, for all lengths and heads."""
    rotate = functools.partial(rotate_plainly, interleaved=False)
    return torch.compile(lambda q, k, *table: (rotate(q, *table), rotate(k, *table)), fullgraph=True, dynamic=True)


def _torch(backend: str, rope: bool, inputs: Inputs, mesh: DeviceMesh) -> tuple[Run, Context]:
    """Build torch's context_parallel around SDPA by one backend, after compiled RoPE or nothing."""
    from torch.distributed.tensor.experimental import context_parallel

    cos, sin = (x[:, None] for x in _table(inputs))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rope:
            q, k = _compiled_rope()(q, k, cos, sin)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = inputs.case.q_heads != inputs.case.k_heads
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    @contextmanager
    def context() -> Iterator[None]:
        sharded = torch.zeros(inputs.case.tokens, device=inputs.q.device)  # it wants a buffer to read the length
        with sdpa_kernel(BACKENDS[backend]), context_parallel(mesh, buffers=[sharded], buffer_seq_dims=[0]):
            yield

    return run, context


_PEERS: tuple[tuple[Any, ...], ...] = (
    ("by_hand_flash_attn_4", "flash_attn.cute", "flash-attn-4", True, functools.partial(_by_hand, True)),
    ("by_hand", "torch", "torch", False, functools.partial(_by_hand, False)),
    ("torch_cudnn_bare", "torch", "torch", True, functools.partial(_torch, "cudnn", False)),
    ("torch_flash_bare", "torch", "torch", True, functools.partial(_torch, "sdpa_flash", False)),
    ("torch_cudnn", "torch", "torch", True, functools.partial(_torch, "cudnn", True), 1 << 16),
    ("torch_flash", "torch", "torch", True, functools.partial(_torch, "sdpa_flash", True), 1 << 16),
)
PEERS = {row[0]: ParallelPeer(*row) for row in _PEERS}


class Layer(nn.Module):
    def __init__(self, case: ParallelCase) -> None:
        super().__init__()
        self.heads, self.head_dim = [case.q_heads, case.k_heads, case.k_heads], case.head_dim
        width = case.q_heads * case.head_dim
        inner = int(3.5 * width)  # Llama 3 8B's
        self.norm, self.norm_of_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.heads) * case.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        x = x + self.out(attention(q, k, v, position=Rope(BASE), causal=True).flatten(2))
        gate, up = self.up(self.norm_of_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def training_step(
    case: ParallelCase, mesh: DeviceMesh, device: torch.device, sharded: bool, seed: int
) -> Callable[[], Tensor]:
    """Make the step of a whole model, or of its shard under FSDP2; it returns this process's part of the loss."""
    torch.manual_seed(seed)
    width = case.q_heads * case.head_dim
    with device:
        layers = [Layer(case) for _ in range(LAYERS)]
        table, head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        model: Any = nn.Sequential(table, *layers, nn.RMSNorm(width), head).to(case.torch_dtype)
    text = torch.randint(VOCABULARY, (1, case.tokens + 1), generator=torch.Generator().manual_seed(seed)).to(device)
    tokens, labels, layout = text[:, :-1], text[:, 1:], cp.SequenceLayout(mesh, case.tokens, case.kind)
    if sharded:
        for layer in (*layers, model):
            fully_shard(layer, mesh=mesh)
        tokens = cp.shard_sequence(tokens, layout)
        labels = cp.shard_sequence(labels, layout).masked_fill(~layout.valid, -100)
    scale = layout.size if sharded else 1  # FSDP averages over the ranks
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> Tensor:
        with cp.context_parallel(layout) if sharded else nullcontext():
            logits = model(tokens)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        (total / case.tokens * scale).backward()
        optimiser.step()
        optimiser.zero_grad()
        return total.detach().float() / case.tokens

    return step

"""Cases of the benchmark of context parallelism, their tensors, the gate, and the candidates.

Outputs and gradients of a short case are compared whole, and sampled rows of the output and of q's gradient of the case
itself: those depend on the keys before them alone, so that they are cheap at any length. The truth is the reference in
float64; the budget is twice the error of the reference in the case's dtype.

Candidates take q, k and v of (1, T or T_local, heads, D), and return the output. Their shards are zigzag ones, which
PyTorch's are too where the length divides. Letters: T tokens, H query heads, K key heads, D head dim, n ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import sdpa_kernel

import ropewalk.parallel as cp
from ropewalk.bench.attention.cases import BASE, AttentionCase
from ropewalk.bench.attention.peers import BACKENDS
from ropewalk.bench.attention.settings import SETTINGS
from ropewalk.bench.core.gate import Verdict, max_error, worst
from ropewalk.bench.core.peers import Library
from ropewalk.bench.rope.gate import rotate_plainly
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.attention.api import attention, explain_choice
from ropewalk.ops.rope.api import apply_rope
from ropewalk.schemes import NoPosition, Rope
from ropewalk.testing import error_budget

ONE = "one process"  # the anchor: the whole call on each rank at once
OURS = "ropewalk"  # by the method that a call without a name takes
VOCABULARY, LAYERS = 1024, 4  # of the model: neither the table nor a head should cost anything
NO_ROPE = ("torch_cudnn_bare", "torch_flash_bare")  # what these compute is held against attention without positions
# PyTorch 2.14 has another name.
_all_gather: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
MODES = {"train": "forward and backward on all processes"}
LLAMA = "llama"  # the setting of a case that trains layers of a model
NODES = 2  # of a mesh of two dimensions: heads are exchanged within, keys between
_ROUNDINGS = 4  # of intermediate results to the case's dtype
_ROWS = 8  # sampled beside each other
_NAMES = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
_K = 1 << 10
_MEMORY = 4.5  # times the inputs' bytes: the peak of a call on one process, measured
_PARTS = 4  # the yardstick is of so small a part of the tokens where memory has less


class Variant(NamedTuple):
    """A named method, on one group or on a mesh of two dimensions."""

    method: str
    nodes: int = 1


VARIANTS = {
    "ropewalk_gather": Variant("gather"),
    "ropewalk_ulysses": Variant("ulysses"),
    "ropewalk_ring": Variant("ring"),
    "ropewalk_2d_gather": Variant("gather", NODES),
    "ropewalk_2d_ring": Variant("ring", NODES),
}
_METHODS = ("ropewalk_gather", "ropewalk_ulysses", "ropewalk_2d_gather", "ropewalk_2d_ring")


@dataclass(frozen=True)
class ParallelCase:
    """One causal call over a whole sequence, B = 1, and how it is sharded; or training steps of a model."""

    name: str
    tokens: int
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    setting: str = "rope"  # of attention's benchmark, or `LLAMA`
    window: int | None = None
    far_window: int | None = None  # of ReRoPE
    shortest: int | None = None  # packed documents have seeded lengths, uniform from here …
    longest: int | None = None  # … to here
    kind: str = "zigzag"  # of the layout
    variants: tuple[str, ...] = ()  # of `VARIANTS`, beside the default method
    once: bool = False  # whether one run is timed, after the one that is checked: it takes many seconds
    modes: ClassVar[tuple[str, ...]] = tuple(MODES)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def description(self) -> str:
        parts = [f"T{self.tokens} H{self.q_heads}/{self.k_heads} D{self.head_dim}, {self.dtype}, {self.setting}"]
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"documents of {self.shortest} to {self.longest}"] if self.shortest else []
        return ", ".join([*parts, self.kind])

    def shrink(self, tokens: int) -> ParallelCase:
        """Return the case with fewer tokens, and windows and documents in proportion."""
        if self.tokens <= tokens:
            return self
        sizes = {name: getattr(self, name) for name in ("window", "far_window", "shortest", "longest")}
        scaled = {name: max(1, size * tokens // self.tokens) for name, size in sizes.items() if size is not None}
        return replace(self, tokens=tokens, **scaled)

    def quick(self, device: torch.device) -> ParallelCase:
        """Return the case at a size that takes seconds, also on a CPU. GPUs build the kernels of the whole case."""
        if device.type == "cuda":
            return self.shrink(16 * _K)
        k_heads = 4 if self.q_heads == self.k_heads else 2
        return replace(self.shrink(96), q_heads=4, k_heads=k_heads, head_dim=16, dtype="float32")


# The most important ones first: a run may be stopped.
CASES: tuple[ParallelCase, ...] = (
    ParallelCase("gqa-16k", 16 * _K, variants=_METHODS),
    ParallelCase("mha-16k", 16 * _K, k_heads=32, variants=_METHODS),
    ParallelCase("gqa-64k", 64 * _K, variants=_METHODS),
    ParallelCase("mha-64k", 64 * _K, k_heads=32, variants=_METHODS),
    ParallelCase("gqa-128k", 128 * _K, variants=(*_METHODS, "ropewalk_ring")),
    ParallelCase("mha-128k", 128 * _K, k_heads=32, variants=_METHODS),
    ParallelCase("packed-256k", 256 * _K, shortest=_K, longest=64 * _K, kind="balanced"),
    ParallelCase("llama-64k", 64 * _K, setting=LLAMA),
    ParallelCase("gqa-256k", 256 * _K, variants=_METHODS),
    ParallelCase("mha-256k", 256 * _K, k_heads=32, variants=_METHODS),
    ParallelCase("window-128k", 128 * _K, window=4096),
    ParallelCase("alibi-64k", 64 * _K, setting="alibi"),
    ParallelCase("rerope-64k", 64 * _K, setting="rerope", far_window=4096),
    ParallelCase("exposb-64k", 64 * _K, setting="exposb-bands-learned"),
    ParallelCase("d64-64k", 64 * _K, head_dim=64),
    ParallelCase("packed-short", 128 * _K, shortest=128, longest=4096, kind="balanced"),
    ParallelCase("gqa-1m", 1024 * _K, variants=_METHODS, once=True),
    ParallelCase("mha-1m", 1024 * _K, k_heads=32, variants=_METHODS, once=True),
)


class Inputs(NamedTuple):
    """The whole tensors of a case, the same on each rank, and how they are sharded. (1, T, heads, D)."""

    case: ParallelCase
    layout: cp.SequenceLayout
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor  # of the output
    parameters: tuple[Tensor, ...]  # of the setting, float32; those that it learns require gradients
    learned: tuple[Tensor, ...]

    def keywords(self, *parameters: Tensor) -> dict[str, Any]:
        """Return the call's keywords for one process."""
        case: Any = self.case
        own = SETTINGS[case.setting].keywords_of(case, *parameters)
        return {**own, "causal": True, "window": case.window}

    def whole(self, *qkv: Tensor, run: Any = attention, **keywords: Any) -> Any:
        """Run a call of the whole sequence, packed where it has documents."""
        if self.layout.cu_seqlens is None:
            return run(*qkv, **keywords)
        bounds = self.layout.cu_seqlens.int()
        packed = {"layout": "thd", "cu_seqlens_q": bounds, "cu_seqlens_k": bounds}
        result = run(*(x[0] for x in qkv), **keywords, **packed)
        return result[None] if isinstance(result, Tensor) else result


def make_inputs(case: ParallelCase, mesh: Any, device: torch.device, seed: int) -> Inputs:
    """Draw the tensors of a case, and the bounds of its documents, of which the last one ends with the sequence."""
    bounds = None
    if case.shortest is not None and case.longest is not None:
        shape, drawn = (case.tokens // case.shortest + 1,), torch.Generator().manual_seed(seed)
        ends = torch.randint(case.shortest, case.longest + 1, shape, generator=drawn).cumsum(0)
        bounds = F.pad(ends.clamp(max=case.tokens).unique(), (1, 0)).int()
    layout, generator = (
        cp.SequenceLayout(mesh, case.tokens, case.kind, bounds),
        torch.Generator(device).manual_seed(seed),
    )
    q, k, v, grad = (
        torch.randn(1, case.tokens, heads, case.head_dim, generator=generator, device=device, dtype=case.torch_dtype)
        for heads in (case.q_heads, case.k_heads, case.k_heads, case.q_heads)
    )
    setting = SETTINGS[case.setting]
    whole = AttentionCase(case.name, 1, case.tokens, case.q_heads, case.k_heads, case.head_dim, True, dtype=case.dtype)
    parameters = tuple(x.to(device).requires_grad_(setting.learned) for x in setting.draw(whole))
    return Inputs(case, layout, q, k, v, grad, parameters, parameters if setting.learned else ())


def on_mesh(inputs: Inputs, mesh: DeviceMesh) -> Inputs:
    """Return the inputs with their tokens dealt to another mesh."""
    layout = inputs.layout
    return inputs._replace(layout=cp.SequenceLayout(mesh, layout.n_tokens, layout.kind, layout.cu_seqlens))


def fit_yardstick(inputs: Inputs, mesh: DeviceMesh) -> Inputs:
    """Return the inputs of the yardstick: the first quarter of the tokens where the whole call does not fit."""
    case, device = inputs.case, inputs.q.device
    if device.type != "cuda" or case.window is not None or case.shortest is not None:
        return inputs
    needed = _MEMORY * sum(x.nbytes for x in (inputs.q, inputs.k, inputs.v, inputs.grad))
    if needed < torch.cuda.get_device_properties(device).total_memory:
        return inputs
    return first_tokens(inputs, mesh, case.tokens // _PARTS)


def first_tokens(inputs: Inputs, mesh: DeviceMesh, tokens: int) -> Inputs:
    """Return the inputs of the first so many tokens, without copies."""
    q, k, v, grad = (x[0, :tokens][None] for x in (inputs.q, inputs.k, inputs.v, inputs.grad))  # strides of their own
    case = replace(inputs.case, tokens=tokens)
    return inputs._replace(case=case, layout=cp.SequenceLayout(mesh, tokens, case.kind), q=q, k=k, v=v, grad=grad)


def choose_method(inputs: Inputs) -> str:
    """Return the method of a call that names none."""
    layout, nothing = inputs.layout, inputs.q.new_empty(1)
    shards = (nothing.expand(1, layout.n_local, *x.shape[2:]) for x in (inputs.q, inputs.k, inputs.v))
    return cp.explain_context_parallel(*shards, layout=layout, **inputs.keywords(*inputs.parameters)).method


class Truth(NamedTuple):
    """A right result, the budget of its errors, and where it is: in a whole result, in a shard, and of it in shards."""

    number: int  # of the result
    value: Tensor
    budget: float
    at: Sequence[Any]


def check_results(results: Sequence[Tensor], truths: Sequence[Truth], whole: bool) -> Verdict:
    """Compare an output and its gradients, whole tensors or shards; errors are multiples of their budgets."""
    verdict = Verdict(0.0, 1.0, None)
    for number, truth, budget, (in_whole, in_shard, sharded) in truths:
        found = (results[number][in_whole], truth) if whole else (results[number][in_shard], truth[sharded])
        error = max_error(found[:1], found[1:])
        share = worst([error / budget]) if budget > 0 else (0.0 if error == 0 else float("inf"))
        if share > verdict.error:
            name = _NAMES[number] if number < len(_NAMES) else "a parameter's gradient"
            verdict = Verdict(share, 1.0, f"the error of {name} is past the budget" if share > 1 else None)
    return verdict


def truths_of(inputs: Inputs, is_short: bool, bare: bool) -> list[Truth]:
    """Compute what is right with the case's positions or without any: all of a short case, or sampled rows."""
    plainly, found = inputs.case.torch_dtype, []
    for run, qkv, parameters, grad, at in _all(inputs) if is_short else _rows(inputs):
        keywords = inputs.keywords(*parameters) | ({"position": NoPosition()} if bare else {})
        both = []
        for dtype in (torch.float64, plainly):
            own = [x.to(dtype).detach().requires_grad_(is_short or x is qkv[0]) for x in qkv]
            out = run(*own, impl="reference", **keywords)
            wanted = [x for x in (*own, *parameters) if x.requires_grad]
            both.append([out.detach(), *torch.autograd.grad(out, wanted, grad.to(dtype))])
        for number, (truth, plain) in enumerate(zip(*both, strict=True)):
            budget = error_budget(truth, plain.to(plainly), _ROUNDINGS)
            found.append(Truth(number, truth, budget, at if number < len(_NAMES) else (..., ..., ...)))
    return found


Sample = tuple[Callable[..., Tensor], Sequence[Tensor], Sequence[Tensor], Tensor, Sequence[Any]]  # and a truth's `at`


def _all(inputs: Inputs) -> Iterator[Sample]:
    valid, indices, every = inputs.layout.valid, inputs.layout.indices, slice(None)
    parameters = [x.detach().requires_grad_(x.requires_grad) for x in inputs.parameters]
    at = (..., (every, valid), (every, indices[valid]))  # without rows of padding
    yield inputs.whole, (inputs.q, inputs.k, inputs.v), parameters, inputs.grad, at


def _rows(inputs: Inputs) -> Iterator[Sample]:
    """Yield a few tokens of a few places, in some heads: of the output and of q's gradient."""
    layout, case = inputs.layout, inputs.case
    n, group, indices = layout.n_local, case.q_heads // case.k_heads, layout.indices.tolist()
    places = dict.fromkeys((0, n // 2 - _ROWS, n // 2, n - _ROWS))
    for number, local in enumerate(place for place in places if place >= 0):
        found = indices[local : local + _ROWS]
        if found[0] < 0 or found != list(range(found[0], found[0] + len(found))):
            continue  # no run of real tokens
        start, stop, first = found[0], found[0] + len(found), 0
        if layout.bounds is not None:
            first = max(bound for bound in layout.bounds if bound < stop)
            local, start = local + max(0, first - start), max(start, first)
        if stop - start < 2:
            continue  # a document's first token alone: q's gradient is 0, and no scale for errors
        head = number % case.k_heads
        heads = slice(head * group, (head + 1) * group)
        # From these tokens to the keys up to them: `causal` ends where the rows end.
        q, grad = (x[:, start:stop, heads] for x in (inputs.q, inputs.grad))
        k, v = (x[:, first:stop, head : head + 1] for x in (inputs.k, inputs.v))
        parameters = [x.detach()[..., heads] for x in inputs.parameters]
        in_whole, in_shard = ((slice(None), slice(at, at + stop - start), heads) for at in (start, local))
        yield attention, (q, k, v), parameters, grad, (in_whole, in_shard, ...)


Run = Callable[[Tensor, Tensor, Tensor], Tensor]
Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class Call:
    """A way to compute a case: what is timed, within which context, and the row's own."""

    run: Callable[[], Any]
    context: Context = nullcontext
    more: dict[str, Any] = field(default_factory=dict)
    scale: float = 1.0  # of its time, if it computes a part
    first: float = 0.0  # µs of its run that was checked; 0: kernels were compiled in it


def _both(run: Run, tensors: Sequence[Tensor], learned: Sequence[Tensor] = (), context: Context = nullcontext) -> Call:
    """Run forward and backward: the output, and the gradients of q, k, v and of what is learned."""
    *leaves, grad = tensors

    def both() -> list[Tensor]:
        out = run(*leaves)
        return [out, *torch.autograd.grad(out, (*leaves, *learned), grad)]

    return Call(both, context)


def shard(inputs: Inputs) -> list[Tensor]:
    """Return this rank's tokens of q, k, v and the output's gradient."""
    return [cp.shard_sequence(x, inputs.layout) for x in (inputs.q, inputs.k, inputs.v, inputs.grad)]


def make_call(name: str, inputs: Inputs, shards: Callable[[], list[Tensor]], mesh: DeviceMesh) -> Call:
    """Make the yardstick, the whole call by the implementation that `attention` chooses; ours; or a peer's call."""
    keywords = inputs.keywords(*inputs.parameters)
    tensors = [inputs.q, inputs.k, inputs.v, inputs.grad] if name == ONE else [*shards()]
    tensors[:3] = leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    if name in PEERS:
        run, context = PEERS[name].build(inputs, mesh)
        return _both(run, tensors, (), context)
    if name == ONE:
        call = _both(functools.partial(inputs.whole, **keywords), tensors, inputs.learned)
        call.more["served_by"] = inputs.whole(*leaves, run=explain_choice, **keywords).name
        return call
    variant = VARIANTS.get(name)
    # Gradients of what is learned are summed over ranks.
    method = None if variant is None else variant.method
    keywords |= {"layout": inputs.layout, "method": method, "sum_gradients": bool(inputs.learned)}
    call = _both(functools.partial(cp.context_parallel_attention, **keywords), tensors, inputs.learned)
    choice = cp.explain_context_parallel(*leaves, **keywords)
    received = choice.bytes_received + choice.bytes_received_backward
    within = inputs.layout.within
    nodes = "" if within is None else f", {inputs.layout.size // within.size} × {within.size}"
    call.more |= {"served_by": choice.method + nodes, "bytes_received": received, "exposed_ms": choice.exposed_ms}
    return call


@dataclass(frozen=True)
class ParallelPeer(Library):
    build: Callable[[Inputs, DeviceMesh], tuple[Run, Context]]
    most_tokens: float = float("inf")  # of the cases that it is timed on

    def why_not(self, case: ParallelCase) -> str | None:
        if case.setting != "rope" or case.window is not None or case.shortest is not None:
            return "plain causal attention alone"
        return f"timed up to {self.most_tokens} tokens alone" if case.tokens > self.most_tokens else None


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
        for run_tokens, place in ((slice(0, half), rank), (slice(half, None), 2 * n - 1 - rank)):
            stop = (place + 1) * half
            out = attend(q[:, run_tokens], k[:, :stop], v[:, :stop], causal=True)
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
    ("by_hand", "torch", "torch", False, functools.partial(_by_hand, False), 1 << 18),
    ("torch_cudnn_bare", "torch", "torch", True, functools.partial(_torch, "cudnn", False)),
    ("torch_flash_bare", "torch", "torch", True, functools.partial(_torch, "sdpa_flash", False), 1 << 17),
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

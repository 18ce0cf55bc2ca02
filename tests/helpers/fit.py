"""Random calls of attention, and the memory that their kernels take on each GPU: compiled, but for their machine code.

`tools/fit.py` goes through as many calls as one likes; `test_fit_compilation.py` takes a few, others each day.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton._C import libtriton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.errors import OutOfResources

from helpers.compile import describe, describe_launch, pretend_target
from helpers.compile_hopper import describe_gluon
from helpers.paged_calls import empty_pages
from helpers.targets import GPUS, SHARED_MEMORY, TENSOR_MEMORY
from ropewalk import Alibi, BlockLists, ExpoSB, NoPosition, PositionScheme, ReRope, Rope, SelfExtend, T5Bias
from ropewalk import device as gpu
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.autograd import without_inputs
from ropewalk.ops.attention.backend import KernelBackend, Wanted
from ropewalk.ops.attention.backends import KERNELS, backward_of
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.hopper import support
from ropewalk.ops.attention.triton.support import Triton
from ropewalk.ops.launch.steps import AtOnce


class Used(NamedTuple):
    """What a kernel takes of a multiprocessor."""

    kernel: str
    shared: int  # bytes
    tensor: int  # columns of tensor memory, on Blackwell


class _AllocatedError(Exception):
    """The passes up to the allocation of memory are collected."""


def _stop(manager: Any, *rest: Any) -> None:
    raise _AllocatedError(manager)


def used_by(kernel: Any, keywords: dict[str, Any], target: str) -> Used:
    """Compile a launch up to the allocation of memory, which is a third of the work."""
    is_gluon = isinstance(kernel, GluonJITFunction)
    defaults = {name: parameter.default for name, parameter in kernel.signature.parameters.items()}
    described = describe_launch(kernel, (), defaults | keywords, describe_gluon if is_gluon else describe)
    signature, constants, attributes = described
    source = (GluonASTSource if is_gluon else ASTSource)(kernel, signature, constexprs=constants, attrs=attributes)
    options = {name: keywords[name] for name in ("num_warps", "num_stages", "maxnreg") if name in keywords}
    return Used(kernel.__name__, *memory_of(source, GPUS[target], options))


def memory_of(source: Any, target: GPUTarget, options: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of shared memory and the columns of tensor memory that a program takes."""
    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    stages: dict[str, Callable[..., Any]] = {}
    backend.add_stages(stages, parsed, source.language)
    context = libtriton.ir.context()
    libtriton.ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module, metadata = source.make_ir(target, parsed, codegen, modules, context), {}
    lower = stages.pop("llir")
    for name in ("ttir", "ttgir"):
        if name in stages:
            module = stages[name](module, metadata)
    passes = (libtriton.amd if target.backend == "hip" else libtriton.nvidia).passes.ttgpuir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "add_to_llvmir", _stop)
        try:
            lower(module, metadata)
        except _AllocatedError as stopped:
            (manager,) = stopped.args
    manager.run(module, "allocate")
    return module.get_int_attr("ttg.shared"), module.get_int_attr("ttg.tensor_memory_size") or 0


class Compiling(AtOnce):
    """Steps that compile for a target and run nothing; what does not fit raises, as Triton's launcher does."""

    def __init__(self, target: str, limit: int | None = None) -> None:
        self.target, self.limit = target, SHARED_MEMORY[target] if limit is None else limit
        self.fit: list[Used] = []
        self.over: list[Used] = []

    def launch(self, kernel: Any, n_programs: int, /, **arguments: Any) -> None:
        used = used_by(kernel, arguments, self.target)
        if used.shared > self.limit or used.tensor > TENSOR_MEMORY:
            self.over.append(used)
            raise OutOfResources(used.shared, self.limit, "shared memory")
        self.fit.append(used)

    def operate(self, function: Callable[..., Any], *arguments: Any) -> None:
        pass

    def rope(self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **keywords: Any) -> Any:
        return q if k is None else (q, k)

    def per_stream(self, make: Callable[[torch.device], Tensor], like: Tensor) -> Tensor:
        return torch.zeros(1, dtype=torch.int32)


class Case(NamedTuple):
    """A call, and the multiprocessors of the GPU that it is for, which choose kernels too."""

    shown: str
    call: AttentionCall
    n_sms: int


def compile_case(case: Case, target: str, limit: int | None = None) -> dict[str, Compiling]:
    """Compile a call by each backend that has kernels for it on a target, and return the steps that did."""
    steps = {}
    with pytest.MonkeyPatch.context() as patch:
        pretend_gpu(patch, target)
        patch.setattr(gpu, "num_sms", lambda device: case.n_sms)
        for name, backend in KERNELS.items():
            if (name != "gluon" or target == "sm_90") and backend.why_not(case.call) is None:
                steps[name] = Compiling(target, limit)
                compile_call(case.call, name, steps[name])
    return steps


def compile_call(call: AttentionCall, name: str, on: Compiling) -> None:
    """Compile the kernels of a call by a backend, and those of its backward if it has one."""
    backend: KernelBackend = KERNELS[name]
    with torch.no_grad():
        out, saved = backend.forward(call, call.needs_backward, on)
        if not call.needs_backward:
            return
        params, sinks, gate = call.score_mod_params, call.sinks, call.gate
        wanted = Wanted(*(x is not None and x.requires_grad for x in (params, sinks, gate)))
        read = without_inputs(call, saved)
        grad_lse = torch.empty_like(saved.lse) if call.return_lse else None
        backward_of(backend, read, wanted).backward(read, out, saved, torch.empty_like(out), grad_lse, wanted, on)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Let CPU tensors be ones of a target."""
    pretend_target(monkeypatch, target)
    monkeypatch.setattr(gpu, "why_no_triton", lambda device: None)
    monkeypatch.setattr(support, "why_not_on", lambda device: None)
    why_not = Triton.why_not

    def why_not_on_gpu(backend: Triton, call: AttentionCall) -> Any:
        refusal = why_not(backend, call)
        return None if refusal is not None and refusal.code == "interpreter_bfloat16" else refusal

    monkeypatch.setattr(Triton, "why_not", why_not_on_gpu)


# Of q and k, and of v.
HEAD_DIMS = (
    *((64, 64), (128, 128), (192, 128), (256, 256), (16, 16), (80, 80), (96, 96), (112, 128), (160, 160), (192, 192)),
    *((192, 256), (64, 128), (128, 64), (256, 128), (64, 256), (32, 96), (320, 320), (512, 512), (512, 64), (64, 512)),
)
TOKENS = (
    (300, 5),
    (200, 200),
    (257, 257),
    (130, 333),
    (256, 256),
    (128, 1024),
    (1, 1024),
    (4, 300),
    (17, 600),
    (1000, 1000),
    (2304, 2304),
)
WIDEST_FLOAT32 = 256


def draw_case(seed: str, index: int) -> Case:
    """Draw a call that `attention` takes."""
    rng = random.Random(f"{seed} {index}")
    while True:
        try:
            drawn = _draw(rng)
            call = make_call(**drawn)
        except (TypeError, ValueError, NotImplementedError):
            continue  # options that do not go together
        if call.dropout_p > 0:
            call = call._replace(seed=torch.zeros(1, dtype=torch.int64))
        return Case(_show(drawn), call, rng.choice((1, 132)))


def _show(drawn: dict[str, Any]) -> str:
    shown = []
    for name, x in drawn.items():
        if isinstance(x, Tensor):
            x = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" + (" grad" if x.requires_grad else "")
        elif isinstance(x, PositionScheme):
            fields = ((key, value) for key, value in vars(x).items() if value is not None and not key.startswith("_"))
            parts = (f"{key}={_show({'': value}) if isinstance(value, Tensor) else value}" for key, value in fields)
            x = f"{type(x).__name__}({', '.join(parts)})"
        elif isinstance(x, BlockLists):
            x = "BlockLists"
        shown.append(f"{name}={x}" if name else str(x))
    return " ".join(shown)


def _draw(rng: random.Random) -> dict[str, Any]:
    """Draw arguments of `make_call`, which may refuse them."""
    head_dim, v_head_dim = rng.choice(HEAD_DIMS)
    if rng.random() < 0.2:
        head_dim, v_head_dim = 192, 128  # the most rows of tiles, and three chunks
    dtype = rng.choice((torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    if max(head_dim, v_head_dim) > WIDEST_FLOAT32 and dtype == torch.float32:
        dtype = torch.bfloat16
    heads, key_heads = rng.choice(((4, 2), (2, 2), (1, 1), (8, 1)))
    queries, keys = rng.choice(TOKENS)
    kind = rng.choice(("train", "train", "train", "infer", "paged", "served"))
    if kind == "served":  # as engines call: of few queries Hopper has a kernel of its own
        return _draw_served(rng, dtype, key_heads)
    layout = rng.choice(("bthd", "bthd", "bhtd", "thd"))
    batch, is_packed, is_trained = rng.choice((1, 2)), layout == "thd", kind == "train"
    drawn: dict[str, Any] = {"layout": layout, "position": _draw_scheme(rng, heads, is_trained, batch)}

    def maybe(name: str, chance: float, make: Callable[[], Any]) -> None:
        if rng.random() < chance:
            drawn[name] = make()

    def numbers(*shape: int, learned: float = 0.0) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=is_trained and rng.random() < learned)

    def features(tokens: int, n_heads: int, dim: int, extra: int = 0) -> Tensor:
        shape = {"bthd": (batch, tokens, n_heads), "bhtd": (batch, n_heads, tokens), "thd": (tokens, n_heads)}[layout]
        return numbers(*shape, dim + extra)[..., :dim].requires_grad_(is_trained)

    padding = rng.choice((0, 0, 0, 8, 1))  # between tokens: strides that are no multiples of 16, or no descriptors
    drawn["q"] = features(queries, heads, head_dim, padding)
    drawn["k"], drawn["v"] = (features(keys, key_heads, dim, padding) for dim in (head_dim, v_head_dim))
    rows = torch.zeros(batch, dtype=torch.int32)
    if is_packed:
        cuts = sorted(rng.randint(0, queries) for _ in range(rng.choice((0, 1, 3))))
        drawn["cu_seqlens_q"] = torch.tensor([0, *cuts, queries], dtype=torch.int32)
        if queries != keys or rng.random() < 0.3:
            drawn["cu_seqlens_k"] = torch.tensor([0, *(min(cut, keys) for cut in cuts), keys], dtype=torch.int32)
        batch = 1
    else:
        maybe("key_lengths", 0.25, lambda: rows + keys)
        maybe("key_starts", 0.25, lambda: rows)
        maybe("query_starts", 0.15, lambda: rows)
    if kind == "paged":
        size, is_quantised = rng.choice((16, 48, 64)), rng.random() < 0.5
        count, stored = -(-keys // size), rng.choice(("fp8", "int8", "int4")) if is_quantised else "own"
        n_rows = len(drawn["cu_seqlens_q"]) - 1 if is_packed else batch
        dim = head_dim if is_quantised else max(head_dim, v_head_dim)
        pages, _, scales = empty_pages(stored, dtype, (4, size, key_heads, dim), "cpu")
        if layout == "bhtd":
            pages = pages.transpose(1, 2)
        drawn["k"], drawn["v"] = (pages, pages) if is_quantised else (pages[..., :head_dim], pages[..., :v_head_dim])
        drawn |= scales | {"block_table": torch.zeros(n_rows, count, dtype=torch.int32)}
        drawn["key_lengths"] = torch.full((n_rows,), keys, dtype=torch.int32)
        drawn.pop("cu_seqlens_k", None)
        maybe("keys_rotated", 0.6, lambda: True)
    maybe("causal", 0.6, lambda: True)
    maybe("window", 0.3, lambda: rng.choice((50, (130, -1), (64, 3), (-1, 20))))
    maybe("scale", 0.1, lambda: rng.choice((-0.1, 0.3)))
    maybe("softcap", 0.2, lambda: 30.0)
    maybe("sinks", 0.2, lambda: numbers(heads, learned=0.7).float())
    maybe("dropout_p", 0.2 if is_trained else 0.0, lambda: 0.1)
    maybe("deterministic", 0.3, lambda: True)
    maybe("return_lse", 0.2, lambda: True)
    maybe("return_max_logits", 0.05, lambda: True)
    shape = {"bthd": (batch, queries, heads), "bhtd": (batch, heads, queries), "thd": (queries, heads)}[layout]
    maybe("gate", 0.2, lambda: numbers(*shape, *rng.choice(((), (v_head_dim,))), learned=0.7))
    for name, tokens in (("positions_q", queries), ("positions_k", keys)):
        shape = (tokens,) if is_packed else (rng.choice((1, batch)), tokens)
        maybe(name, 0.15, lambda shape=shape: torch.zeros(shape, dtype=rng.choice((torch.int32, torch.int64))))
    if not is_packed and rng.random() < 0.4:
        shape = rng.choice(((1, 1), (batch, 1), (batch, heads), (1, heads)))
        mask_queries, start = rng.choice((queries, queries, 1)), rng.choice((0, 0, 1))
        mask = torch.ones(*shape, mask_queries, keys + start, dtype=torch.bool)[..., start:]
        drawn["mask"] = mask
    maybe("blocks", 0.15, lambda: _draw_blocks(rng, queries, keys))
    return drawn


def _draw_served(rng: random.Random, dtype: torch.dtype, key_heads: int) -> dict[str, Any]:
    """Draw a step of decoding from pages."""
    dim, batch, queries = rng.choice((64, 128)), rng.choice((1, 3, 32)), rng.choice((1, 1, 3))
    stored = rng.choice(("own", "fp8", "int8", "int4"))
    k, v, scales = empty_pages(stored, dtype, (4, rng.choice((16, 64)), key_heads, dim), "cpu")
    lengths = torch.full((batch,), 100, dtype=torch.int32)
    drawn = {
        "layout": "bthd",
        "position": rng.choice((NoPosition(), Rope(), Rope(rotary_dim=32, interleaved=True))),
        "keys_rotated": True,
        "q": torch.zeros(batch, queries, key_heads * rng.choice((1, 4)), dim, dtype=dtype),
        "k": k,
        "v": v,
        "key_lengths": lengths,
        "query_starts": lengths - queries,
        "block_table": torch.zeros(batch, 32, dtype=torch.int32),
        "causal": rng.random() < 0.7,
        "window": rng.choice((None, None, 50, (50, 7))),
        **scales,
    }
    if rng.random() < 0.3:
        drawn["sinks"] = torch.zeros(drawn["q"].shape[2])
    return drawn


def _draw_scheme(rng: random.Random, heads: int, is_trained: bool, batch: int) -> PositionScheme:
    def numbers(*shape: int) -> Tensor:
        return torch.ones(shape, requires_grad=is_trained and rng.random() < 0.5)

    def rope() -> Rope:
        part = rng.choice(({}, {}, {"rotary_dim": 16}, {"rotary_dim": 16, "rotary_offset": 16}, {"pair_block": 16}))
        return Rope(interleaved="pair_block" not in part and rng.random() < 0.5, **part)

    log_n = rng.choice((None, 8))
    return rng.choice(
        (
            NoPosition,
            rope,
            rope,
            lambda: Alibi(rng.choice((None, numbers(heads), numbers(batch, heads)))),
            lambda: T5Bias(numbers(32, heads), bidirectional=rng.random() < 0.5),
            lambda: ExpoSB(distance_decay=True),
            lambda: ExpoSB(band_weights=numbers(heads), distance_decay=rng.random() < 0.5),
            lambda: ReRope(33, leak=rng.choice((None, 4.0)), log_n=log_n, rope=rope()),
            lambda: SelfExtend(33, 8, log_n=log_n, rope=rope()),
        )
    )()


def _draw_blocks(rng: random.Random, queries: int, keys: int) -> Any:
    if rng.random() < 0.4 and queries <= keys:
        return BlockLists.sliding_window(queries, keys, window=rng.choice((128, 200)))
    block_q, block_k = rng.choice(((128, 128), (128, 128), (64, 64), (32, 16)))
    rows, columns = -(-queries // block_q), -(-keys // block_k)
    if rng.random() < 0.5 and block_q == block_k == 128:
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(lambda b, h, m, n: m % 2 == n % 2, None, None, queries, keys, device="cpu")
    counts = torch.full((1, 1, rows), columns, dtype=torch.int32)
    indices = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns).contiguous()
    return BlockLists(counts, indices, block_q=block_q, block_k=block_k)

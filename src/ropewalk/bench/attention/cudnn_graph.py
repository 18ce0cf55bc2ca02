"""Attention by cuDNN's Python frontend: a graph of one node for the forward, and one for the backward.

A graph is built at its first call, with its workspace, so that a timed call executes alone. Tensors are read where they
are, (B, T, H, D) or (total, H, D) in memory; a graph names their axes (B, H, T, D).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.bench.attention.cases import AttentionCase, AttentionInputs

_DTYPES = {
    torch.bfloat16: "BFLOAT16",
    torch.float16: "HALF",
    torch.float32: "FLOAT",
    torch.float8_e4m3fn: "FP8_E4M3",
    torch.int32: "INT32",
    torch.int64: "INT64",
}
_PACKED_MULTIPLE = 64  # of the packed tokens for which a backward has room
_SCALE_OF_P = 256.0  # probabilities are at most 1: within the range of e4m3
_LARGEST = ("amax_s", "amax_o")  # results that come with an output in e4m3


class CudnnGraphs:
    """The graphs of one case: forward, forward with the statistics of the softmax, and backward."""

    def __init__(self, lib: Any, case: AttentionCase, inputs: AttentionInputs, page_size: int) -> None:
        self.lib, self.case, self.page_size = lib, case, page_size
        self.lengths, self.offsets = self._lengths(inputs), inputs.cu_seqlens
        self.total = inputs.k.shape[0] if case.form == "packed" else 0
        self.device = inputs.q.device
        self.forward_of = functools.cache(self._build_forward)
        self.backward_of = functools.cache(self._build_backward)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_grad_enabled() and q.requires_grad:
            out: Tensor = _Attention.apply(self, q, k, v)
            return out
        return self.forward(q, k, v, False)[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, with_stats: bool) -> tuple[Tensor, ...]:
        """Return the output and, of a forward that a backward follows, the log-sum-exp of each row of scores."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        if self.case.form == "cache":
            k, v = (x.unflatten(1, (-1, self.page_size)).flatten(0, 1) for x in (k, v))
        found = {"q": q, "k": k, "v": v, "out": q.new_empty(*q.shape[:-1], v.shape[-1])}
        if with_stats:
            found["stats"] = q.new_empty(self._stats_shape(q), dtype=torch.float32)
        self.forward_of(with_stats)(found)
        return tuple(found[name] for name in ("out", "stats") if name in found)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: Tensor, grad: Tensor) -> list[Tensor]:
        """Return the gradients of q, k and v."""
        found = {"q": q.contiguous(), "k": k.contiguous(), "v": v.contiguous(), "out": out, "stats": stats}
        grads = {f"grad_{name}": torch.empty_like(found[name]) for name in "qkv"}
        self.backward_of()({**found, "grad_out": grad.contiguous(), **grads})
        return list(grads.values())

    def _lengths(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
        """Return the number of queries and of keys of each row, (B, 1, 1, 1), where rows differ."""
        keys = inputs.key_lengths if inputs.cu_seqlens is None else inputs.cu_seqlens.diff()
        if keys is None:
            return None
        queries = keys if inputs.cu_seqlens is not None else torch.full_like(keys, inputs.q.shape[1])
        return queries.view(-1, 1, 1, 1).int(), keys.view(-1, 1, 1, 1).int()

    def _stats_shape(self, q: Tensor) -> tuple[int, ...]:
        return (*q.shape[:-1], 1) if self.case.form == "packed" else (q.shape[0], q.shape[2], q.shape[1], 1)

    def _build_forward(self, with_stats: bool) -> Callable[[dict[str, Tensor]], None]:
        graph = _Graph(self)
        q, k, v = map(graph.describe, "qkv")
        paged = {}
        if self.case.form == "cache":
            n_pages = self.case.batch * self.case.tokens // self.page_size  # each row's, in their order
            table = torch.arange(n_pages, dtype=torch.int32, device=self.device).view(self.case.batch, 1, -1, 1)
            tables = {f"paged_attention_{name}_table": graph.constant(f"{name}_table", table) for name in "kv"}
            paged = {**tables, "paged_attention_max_seq_len_kv": self.case.tokens}
        out, stats = graph.node.sdpa(
            q=q, k=k, v=v, generate_stats=with_stats, name="attention", **graph.options(), **paged
        )
        graph.result("out", out)
        if with_stats:
            graph.result("stats", stats)
        return graph.build()

    def _build_backward(self) -> Callable[[dict[str, Tensor]], None]:
        graph = _Graph(self)
        q, k, v, out, grad, stats = map(graph.describe, ("q", "k", "v", "out", "grad_out", "stats"))
        room = -(-self.total // _PACKED_MULTIPLE) * _PACKED_MULTIPLE
        rooms = {f"max_total_seq_len_{side}": room for side in ("q", "kv")} if self.total else {}
        grads = graph.node.sdpa_backward(
            q=q, k=k, v=v, o=out, dO=grad, stats=stats, name="attention_backward", **graph.options(), **rooms
        )
        for name, of in zip("qkv", grads, strict=True):
            graph.result(f"grad_{name}", of)
        return graph.build()


class Float8Graph(CudnnGraphs):
    """A forward of e4m3 numbers, whose output has that type too: on Hopper there is no other.

    The scales of tensors are known before a call, as those that are delayed are in training: of a call before. Queries
    and keys may be rotated, which makes a number √2 times as large at most.
    """

    def __init__(self, lib: Any, case: AttentionCase, inputs: AttentionInputs) -> None:
        super().__init__(lib, case, inputs, 1)
        margins = zip((inputs.q, inputs.k, inputs.v), (math.sqrt(2), math.sqrt(2), 1.0), strict=True)
        largest = torch.finfo(torch.float8_e4m3fn).max
        self.scales = [float(largest / (x.abs().max().float() * margin)) for x, margin in margins]
        # An output is a mean of values: none is larger than the largest of these.
        out_scale = self.scales[2]
        self.out_unit = 1 / out_scale
        units = {f"descale_{name}": 1 / scale for name, scale in zip("qkv", self.scales, strict=True)}
        self.numbers = {**units, "descale_s": 1 / _SCALE_OF_P, "scale_s": _SCALE_OF_P, "scale_o": out_scale}
        self.execute = self._build_float8()

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
        self.execute({**found, **{name: q.new_empty(1, 1, 1, 1, dtype=torch.float32) for name in _LARGEST}})
        return found["out"]

    def _build_float8(self) -> Callable[[dict[str, Tensor]], None]:
        graph = _Graph(self, torch.float8_e4m3fn)
        q, k, v = map(graph.describe, "qkv")
        numbers = {
            name: graph.constant(name, torch.full((1, 1, 1, 1), value, device=self.device))
            for name, value in self.numbers.items()
        }
        options = {"attn_scale": self.case.head_dim**-0.5, **({"right_bound": 0} if self.case.causal else {})}
        out, _, *largest = graph.node.sdpa_fp8(q=q, k=k, v=v, is_inference=True, name="attention", **numbers, **options)
        graph.result("out", out)
        for name, tensor in zip(_LARGEST, largest, strict=True):
            tensor.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1))
            tensor.set_data_type(self.lib.data_type.FLOAT)
            graph.tensors[name] = tensor
        return graph.build()


class _Graph:
    """A graph under construction: its tensors by name, and those that every call has alike."""

    def __init__(self, of: CudnnGraphs, dtype: torch.dtype | None = None) -> None:
        self.of, self.case, self.lib = of, of.case, of.lib
        self.dtype = dtype or of.case.torch_dtype
        kinds = self.lib.data_type
        self.handle = _handle(self.lib)
        self.node = self.lib.pygraph(
            io_data_type=self._kind(self.dtype),
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self.handle,
        )
        self.tensors: dict[str, Any] = {}
        self.constants: dict[str, Tensor] = {}

    def _kind(self, dtype: torch.dtype) -> Any:
        return getattr(self.lib.data_type, _DTYPES[dtype])

    def _layout(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return a tensor's dims (B, H, T, D), their strides, and the elements of a packed token."""
        case, kind = self.case, name.removeprefix("grad_")
        heads = case.k_heads if kind in "kv" else case.q_heads
        features = {"q": case.head_dim, "k": case.head_dim, "stats": 1}.get(kind, case.out_head_dim)
        batch, tokens = case.batch, case.tokens
        if case.form == "cache":
            batch, tokens = (batch, 1) if kind not in "kv" else (batch * tokens // self.of.page_size, self.of.page_size)
        dims, width = (batch, heads, tokens, features), heads * features
        if kind == "stats" and case.form != "packed":
            return dims, (heads * tokens, tokens, 1, 1), width
        return dims, (tokens * width, features, width, 1), width

    def describe(self, name: str) -> Any:
        """Add an argument."""
        dims, strides, _ = self._layout(name)
        kind = self.lib.data_type.FLOAT if name == "stats" else self._kind(self.dtype)
        self.tensors[name] = self.node.tensor(name=name, dim=dims, stride=strides, data_type=kind)
        self._pack(name)
        return self.tensors[name]

    def result(self, name: str, tensor: Any) -> None:
        """Name a result, and say where it lies in memory."""
        dims, strides, _ = self._layout(name)
        tensor.set_output(True).set_dim(dims).set_stride(strides)
        tensor.set_data_type(self.lib.data_type.FLOAT if name == "stats" else self._kind(self.dtype))
        self.tensors[name] = tensor
        self._pack(name)

    def _pack(self, name: str) -> None:
        if self.of.offsets is not None:
            *_, width = self._layout(name)
            known = f"offsets of {width}"
            if known not in self.tensors:
                self.constant(known, (self.of.offsets.long() * width).view(-1, 1, 1, 1))
            self.tensors[name].set_ragged_offset(self.tensors[known])

    def constant(self, name: str, value: Tensor) -> Any:
        """Add an argument that every call has alike."""
        self.constants[name] = value
        dims, strides = tuple(value.shape), value.stride()
        self.tensors[name] = self.node.tensor(name=name, dim=dims, stride=strides, data_type=self._kind(value.dtype))
        return self.tensors[name]

    def options(self) -> dict[str, Any]:
        """Return the scale, the mask and the lengths, as both kinds of node take them."""
        case, found = self.case, dict[str, Any](attn_scale=self.case.head_dim**-0.5)
        if case.causal and case.form != "cache":  # a cache's one query is its last token
            found["diagonal_band_right_bound"] = 0
        if case.window is not None:
            found["diagonal_band_left_bound"] = case.window  # keys, the query's own included
        if self.of.lengths is not None:
            found["use_padding_mask"] = True
            for side, value in zip(("q", "kv"), self.of.lengths, strict=True):
                found[f"seq_len_{side}"] = self.constant(f"seq_len_{side}", value)
        return found

    def build(self) -> Callable[[dict[str, Tensor]], None]:
        """Build the graph, and return the call that executes it on tensors by name."""
        graph, lib, handle = self.node, self.lib, self.handle
        graph.build([lib.heur_mode.A, lib.heur_mode.FALLBACK])
        device = self.of.device
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=device)
        tensors, constants = self.tensors, self.constants

        def execute(found: dict[str, Tensor]) -> None:
            if device.type == "cuda":
                lib.set_stream(handle, torch.cuda.current_stream(device).cuda_stream)
            values = {tensors[name]: value for name, value in (constants | found).items()}
            graph.execute(values, workspace, handle=handle)

        return execute


@functools.cache
def _handle(lib: Any) -> Any:
    return lib.create_handle()


class _Attention(torch.autograd.Function):
    """Attention whose backward is a graph too."""

    @staticmethod
    def forward(ctx: Any, graphs: CudnnGraphs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, stats = graphs.forward(q, k, v, True)
        ctx.graphs = graphs
        ctx.save_for_backward(q, k, v, out, stats)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return None, *ctx.graphs.backward(*ctx.saved_tensors, *grads)

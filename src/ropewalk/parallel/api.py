"""`context_parallel_attention`, the context in which `attention` takes shards, and what explains their method.

Letters: B batch, T tokens, H query heads, K key heads, D head dim, n ranks.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ropewalk.ops.arguments import defaults_of, refuse_unknown, why_unread, without_unknown
from ropewalk.ops.attention import api
from ropewalk.ops.attention.backends import choose as choose_backend
from ropewalk.ops.attention.call import NO_TABLES, from_bhtd
from ropewalk.ops.attention.gate.operation import apply_gate
from ropewalk.ops.attention.tables import check_mapped_alone, check_norm_fits, goes_with_rotation
from ropewalk.ops.attention.validate import NO_POSITION, Arguments, validate
from ropewalk.ops.rope.norm import QKNorm
from ropewalk.ops.tracing import is_dtensor
from ropewalk.parallel import call as calls
from ropewalk.parallel.agreement import Kind, agree, kind_of_layout, needs_agreement, refuse, refuse_tokens
from ropewalk.parallel.call import ShardedCall, learned_of, outside, prepare_features, with_learned
from ropewalk.parallel.choose import ContextParallelChoice, choose, explain, flatten_nodes
from ropewalk.parallel.gathered import attend_gathered, attend_halo
from ropewalk.parallel.layout import SequenceLayout, is_over
from ropewalk.parallel.ring import attend_ring
from ropewalk.parallel.shards import SumGradients
from ropewalk.parallel.ulysses import attend_by_heads, attend_within
from ropewalk.schemes import PositionScheme

_RUN = {"gather": attend_gathered, "halo": attend_halo, "ulysses": attend_by_heads, "ring": attend_ring}
_TOKENS = {"bthd": 1, "bhtd": 2, "thd": 0}  # their dimension
# Arguments of `attention` that speak of the keys of one process.
_LOCAL = ("mask", "key_lengths", "key_starts", "query_starts", "block_table", "cu_seqlens_q", "cu_seqlens_k")
# Those that a sharded call reads: within `context_parallel` a call in which another one is set is refused.
READS = (
    *("position", "causal", "window", "scale", "softcap", "sinks", "norm", "gate", "dropout_p", "positions_q"),
    *("positions_k", "return_lse", "layout", "deterministic", "precision", "impl"),  # which it refuses by itself
)


@without_unknown
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: SequenceLayout,
    method: str | None = None,
    sum_gradients: bool = False,
    position: PositionScheme = NO_POSITION,
    causal: bool = False,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    norm: QKNorm | None = None,
    gate: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    layout_of_tensors: str = "bthd",
    deterministic: bool | None = None,
    impl: str | None = None,
    **unknown: NoReturn,
) -> Any:
    """Attend from this rank's queries to the keys of all ranks, each token at its position in the whole sequence.

    The same in PyTorch, on one process::

        q, k, v = (unshard_sequence(x, layout) for x in (q, k, v))
        out = attention(q, k, v, position=position, causal=causal)  # and all other keywords
        out = shard_sequence(out, layout)

    Documents of the layout attend themselves alone. Every rank of the group makes the same call, and takes part in the
    backward. The gradients are those of the sum of all ranks' losses: what a scheme learns, sinks and the norm's
    weights get this rank's part, and the parts add up, as DDP and FSDP add those of every other weight.

    Args:
        q: (B, T_local, H, D) for "bthd", (B, H, T_local, D) for "bhtd", (T_local, H, D) for "thd": the tokens of
            layout.indices. What padding tokens hold changes nothing. Or a DTensor whose tokens are sharded over the
            layout's ranks, as its heads and its batch may be over others'; the results are DTensors then.
        k: likewise, with its own heads.
        v: like k, but for its head dim.
        layout: which tokens each rank holds.
        method: "gather" (all keys, turned once), "halo" (those that a window reaches), "ulysses" (whole sequences of
            some heads on each rank), "ring" (keys travel; the least memory); None: see `explain_context_parallel`.
        sum_gradients: add up the gradients of what is learned over the ranks, for models that nothing wraps.
        position, causal, window, scale, softcap, sinks, norm, gate, deterministic, impl: as for `attention`. `gate`
            belongs to the local tokens.
        dropout_p: as for `attention`; "ulysses" alone has it, and each rank draws its own numbers.
        return_lse: return the log-sum-exp too; it is differentiable.
        layout_of_tensors: "bthd", "bhtd" or "thd".

    Returns:
        The local tokens' output; with return_lse (output, log-sum-exp), the second (B, H, T_local), or (H, T_local) for
        "thd". Rows of padding tokens are zeros.

    Raises:
        TypeError: an argument of another type than said here.
        ValueError: shapes, devices or values that do not fit, a shard of another length than T_local among them; ranks
            whose calls differ; a `precision`, as 8-bit products are not supported.
        NotImplementedError: what a method cannot do, by the argument's name. All ranks raise, before anything is sent;
            on GPUs ranks compare each kind of call once.

    Source: gather by runs is Llama 3's (https://arxiv.org/abs/2407.21783), §3.3.2; Ulysses
    https://arxiv.org/abs/2309.14509; ring https://arxiv.org/abs/2310.01889.

    Example:
        >>> import torch.distributed as dist
        >>> from ropewalk import Rope
        >>> from ropewalk.parallel import SequenceLayout, context_parallel_attention, shard_sequence
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layout = SequenceLayout(dist.group.WORLD, 100)
        >>> q, k, v = (shard_sequence(torch.randn(1, 100, heads, 64), layout) for heads in (4, 2, 2))
        >>> context_parallel_attention(q, k, v, layout=layout, position=Rope(), causal=True).shape
        torch.Size([1, 100, 4, 64])
        >>> dist.destroy_process_group()
    """
    precision: Any = unknown.pop("precision", None)
    if unknown:
        refuse_unknown("context_parallel_attention", unknown, tuple(defaults_of(context_parallel_attention)), {})
    arguments = Arguments(position, causal, window, scale, softcap=softcap, sinks=sinks, dropout_p=dropout_p, gate=gate)
    arguments = arguments._replace(layout=layout_of_tensors, precision=precision)
    return _attend(q, k, v, layout, arguments, norm, method, sum_gradients, return_lse, deterministic, impl)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    arguments: Arguments,
    norm: QKNorm | None,
    method: str | None = None,
    sum_gradients: bool = False,
    return_lse: bool = False,
    deterministic: bool | None = None,
    impl: str | None = None,
) -> Any:
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout is {type(layout).__name__}, but must be a SequenceLayout")
    if is_dtensor(q):
        return _attend_dtensors(
            q, k, v, layout, arguments, norm, method, sum_gradients, return_lse, deterministic, impl
        )
    _count(layout)
    options = {"scale": arguments.scale, "softcap": arguments.softcap, "deterministic": deterministic, "impl": impl}
    q, k, v, gate = api.lower_for_autocast(q, k, v, arguments.gate)
    try:
        call = _check(q, k, v, layout, arguments._replace(gate=gate), norm, options)
        call = flatten_nodes(call, method)
        method = choose(call, method)
        kind = (
            *_kind(call, norm),
            *(("gate", _describe(gate)), ("return_lse", return_lse), ("layout_of_tensors", arguments.layout)),
            *(("sum_gradients", sum_gradients), ("method", method)),
        )
        if sum_gradients:
            call, norm = _sum_gradients(call, norm)
        q, k, v, scheme = prepare_features(call, norm)
        call = call._replace(q=q, k=k, v=v, scheme=scheme, needs_lse=return_lse)
        if needs_agreement(layout, kind):
            _check_attention(call)
    except Exception as error:
        refuse(layout, error)
    agree(layout, kind, None)
    out, lse = _RUN[method](call) if call.layout.between is None else attend_within(call, _RUN[method])
    out = from_bhtd(out, arguments.layout)
    if gate is not None:
        missing = ~layout.valid.view(-1, *(1,) * (gate.ndim - 1 - _TOKENS[arguments.layout]))
        out = apply_gate(out, gate.masked_fill(missing, 0))
    if not return_lse:
        return out
    return out, lse.squeeze(0) if arguments.layout == "thd" else lse


def _count(layout: SequenceLayout) -> None:
    """Count a call of a layout's, for `context_parallel`; a compiled program would be for one number."""
    if not torch.compiler.is_compiling():
        layout.n_calls += 1


def _attend_dtensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    arguments: Arguments,
    norm: QKNorm | None,
    method: str | None,
    sum_gradients: bool,
    return_lse: bool,
    *options: Any,
) -> Any:
    """Run a call on this rank's parts of DTensors, whose tokens are shards of the layout."""
    from ropewalk.ops import dtensor

    keywords = {**arguments._asdict(), "norm": norm, "return_lse": return_lse, "return_max_logits": False}
    try:
        shards, parts, local = dtensor.to_parts(
            api.attention, q, k, v, keywords, partial(is_over, layout), not sum_gradients
        )
    except Exception as error:
        refuse(layout, error)
    norm = local.pop("norm")
    mine = Arguments(**{name: local[name] for name in Arguments._fields})
    result = _attend(*parts, layout, mine, norm, method, sum_gradients, return_lse, *options)
    return dtensor.to_dtensors(shards, result, keywords)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    arguments: Arguments,
    norm: QKNorm | None,
    options: dict[str, Any],
) -> ShardedCall:
    """Check a call and return it, its features not yet mapped."""
    if arguments.precision is not None:
        raise ValueError(
            f"precision is {arguments.precision!r}, but must be None for shards of a sequence: 8-bit products are not "
            f"supported"
        )
    tokens = _TOKENS.get(arguments.layout)
    if tokens is None:
        raise ValueError(f"layout_of_tensors is {arguments.layout!r}, but must be 'bthd', 'bhtd' or 'thd'")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor) and x.ndim == len(arguments.layout):
            if x.shape[tokens] != layout.n_local:
                refuse_tokens(layout, name, x.shape[tokens])
            if x.device != layout.device:
                raise ValueError(f"{name} is on {x.device}, but must be on the layout's device, {layout.device}")
    if arguments.layout == "thd":
        bounds = torch.arange(2, device=layout.device) * layout.n_local  # created there: a copy would wait
        arguments = arguments._replace(cu_seqlens_q=bounds)
    checked = validate(q, k, v, arguments)
    positions = layout.positions[None]
    if arguments.positions_q is not None or arguments.positions_k is not None:
        if arguments.positions_q is not arguments.positions_k:
            raise NotImplementedError(
                "positions_q and positions_k must be one tensor, or None, within context_parallel"
            )
        if arguments.position.has_score_mod() or arguments.position.far_window() is not None:
            raise NotImplementedError(
                f"positions_q must be None for {type(arguments.position).__name__} within context_parallel: its scores "
                f"go by the layout's positions"
            )
        assert checked.positions_q is not None
        positions = checked.positions_q
    if norm is not None:
        check_norm_fits(norm, False, None)
        if goes_with_rotation(norm, arguments.position):
            check_mapped_alone(checked._replace(tables=NO_TABLES))
    return ShardedCall(
        layout,
        checked.q,
        checked.k,
        checked.v,
        arguments.position,
        positions,
        checked.causal,
        checked.window_left,
        checked.window_right,
        checked.sinks,
        checked.dropout_p,
        options,
    )


def _check_attention(call: ShardedCall) -> None:
    """Raise what attention itself would, once others wait for this rank's tokens."""
    options = dict(call.options)
    impl = options.pop("impl")
    with outside(), torch.no_grad():
        for scheme in (call.scheme,) if impl is None else (call.scheme, NO_POSITION):
            options |= {"position": scheme, "sinks": call.sinks, "layout": "bhtd", "return_lse": True}
            attention_call = api.make_call(call.q, call.k, call.v, **options)
        if impl is not None:  # the plainest call: more is asked of it where queries are attended
            choose_backend(attention_call, impl)


def _kind(call: ShardedCall, norm: QKNorm | None) -> Kind:
    """Return what ranks must have alike, first what others follow from."""
    layout = call.layout
    tensors = {"q": call.q, "k": call.k, "v": call.v}
    needs_grad = torch.is_grad_enabled()
    return (
        *kind_of_layout(layout),
        ("the dtype of q", str(call.q.dtype)),
        *[(f"the shape of {name}, (B, H, T, D),", tuple(x.shape)) for name, x in tensors.items()],
        *(("causal", call.causal), ("window", call.window), ("dropout_p", call.dropout_p)),
        *[(name, _describe(x)) for name, x in call.options.items()],
        *(("position", _describe(call.scheme)), ("norm", _describe(norm)), ("sinks", _describe(call.sinks))),
        *[(f"{name}.requires_grad", x.requires_grad and needs_grad) for name, x in tensors.items()],
    )


def _describe(x: Any) -> Any:
    """Return what ranks must have alike of an argument: all but the values of tensors, which would have to be read."""
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, Tensor):
        return tuple(x.shape), str(x.dtype), x.requires_grad and torch.is_grad_enabled()
    if isinstance(x, tuple):
        return tuple(map(_describe, x))
    names = getattr(type(x), "__dataclass_fields__", ())
    return type(x).__name__, *(_describe(getattr(x, name)) for name in names)


def _sum_gradients(call: ShardedCall, norm: QKNorm | None) -> tuple[ShardedCall, QKNorm | None]:
    """Let the gradients of what is learned be summed over the ranks."""

    def summed(x: Tensor | None) -> Tensor | None:
        if x is None or not x.requires_grad:
            return x
        result: Tensor = SumGradients.apply(x, call.layout)
        return result

    scheme = with_learned(call.scheme, iter([SumGradients.apply(x, call.layout) for x in learned_of(call.scheme)]))
    if norm is not None:
        norm = dataclasses.replace(norm, q_weight=summed(norm.q_weight), k_weight=summed(norm.k_weight))
    return call._replace(scheme=scheme, sinks=summed(call.sinks)), norm


@contextmanager
def context_parallel(layout: SequenceLayout) -> Iterator[None]:
    """Let `attention`, the modules and transformers' "ropewalk" take shards of the layout, within the context.

    The same as `context_parallel_attention(…, layout=layout)` in the place of each `attention(…)`. A model is called
    with `shard_sequence(input_ids, layout)` and position_ids = `layout.positions[None]`. mask, key_lengths, key_starts,
    query_starts, block_table and cu_seqlens of a call speak of local tokens, and raise; so does blocks. positions_q and
    positions_k may be one tensor, the local tokens' positions, for a scheme that maps features alone.

    Args:
        layout: which tokens each rank holds.

    Raises:
        TypeError: a layout of another type. Within the context, what `context_parallel_attention` raises; any other
            argument of `attention` that is set raises NotImplementedError.

    It warns on exit if no attention of Ropewalk ran: whatever else a model attends by would see each shard alone.

    Source: the methods of `context_parallel_attention`.

    Example:
        >>> import torch.distributed as dist
        >>> from ropewalk import Rope, attention
        >>> from ropewalk.parallel import SequenceLayout, context_parallel, shard_sequence
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> layout = SequenceLayout(dist.group.WORLD, 100)
        >>> q = k = v = shard_sequence(torch.randn(1, 100, 4, 64), layout)
        >>> with context_parallel(layout):
        ...     out = attention(q, k, v, position=Rope(), causal=True)
        >>> dist.destroy_process_group()
    """
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout is {type(layout).__name__}, but must be a SequenceLayout")
    before = layout.n_calls
    with calls.inside(layout, _attend_in_context):
        yield
    if layout.n_calls == before:
        warnings.warn(
            "no attention of Ropewalk ran within context_parallel: a model that attends by another one, such as "
            "transformers' 'sdpa', attends each shard alone; pass attn_implementation='ropewalk', or call "
            "ropewalk.attention",
            stacklevel=3,
        )


def _attend_in_context(shards_of: SequenceLayout, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
    """Run a call of `attention` within a context; `layout` is that of its tensors."""
    _count(shards_of)
    for name in _LOCAL:
        if keywords[name] is not None:
            text = "it speaks of local tokens; documents are SequenceLayout(…, cu_seqlens=…)"
            refuse(shards_of, ValueError(f"{name} was passed within context_parallel, but must be None: {text}"))
    if keywords["blocks"] is not None:
        text = "blocks was passed within context_parallel, but must be None: lists of blocks are not supported"
        refuse(shards_of, NotImplementedError(text))
    unread = why_unread(api.attention, keywords, READS)
    if unread is not None:
        refuse(shards_of, NotImplementedError(f"{unread} within context_parallel"))
    arguments = Arguments(**{name: keywords[name] for name in READS if name in Arguments._fields})
    rest = {name: keywords[name] for name in READS if name not in Arguments._fields}
    return _attend(q, k, v, shards_of, arguments, **rest)


def explain_context_parallel(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> ContextParallelChoice:
    """Say which method `context_parallel_attention` takes for a call, what it moves, and why no other one.

    Nothing is computed, and nothing is sent.

    Args:
        q, k, v: as for `context_parallel_attention`.
        keywords: its keywords; layout is needed.

    Returns:
        A `ContextParallelChoice`: its `method`; `others`, a reason for each other one; the bytes that a rank receives;
        and all as text, by `str`.

    Raises:
        What `context_parallel_attention` would raise.

    Source: the costs of docs/parallel.md.

    Example:
        >>> import torch.distributed as dist
        >>> from ropewalk.parallel import SequenceLayout, explain_context_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q = k = v = torch.randn(1, 100, 4, 64)
        >>> explain_context_parallel(q, k, v, layout=SequenceLayout(dist.group.WORLD, 100), causal=True).method
        'gather'
        >>> dist.destroy_process_group()
    """
    layout, method, norm = keywords.pop("layout", None), keywords.pop("method", None), keywords.pop("norm", None)
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout is {type(layout).__name__}, but must be a SequenceLayout")
    options = {name: keywords.pop(name, None) for name in ("deterministic", "impl")}
    keywords["layout"] = keywords.pop("layout_of_tensors", "bthd")
    for name in ("sum_gradients", "return_lse"):
        keywords.pop(name, None)
    unknown = [name for name in keywords if name not in Arguments._fields or name not in READS]
    if unknown:
        raise TypeError(f"explain_context_parallel got {unknown[0]}, which is no argument of it")
    arguments = Arguments(**keywords)
    call = _check(q, k, v, layout, arguments, norm, {"scale": arguments.scale, "softcap": arguments.softcap, **options})
    return explain(call, method)

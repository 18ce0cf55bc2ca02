"""`ropewalk.attention` as an attention implementation of transformers, with its mask function.

It supports BERT, Llama, Qwen, Gemma, GPT-NeoX and every other model that uses transformers' `AttentionInterface`.

The mask function returns these masks to the layers, without waiting for any value on a device:

======================================================  ===============================================================
a model's call                                          its mask, and its meaning
======================================================  ===============================================================
causal, no attention_mask, no cache or one that grows   None; `is_causal` is enough
the same with an attention_mask, padded anywhere        uint8, (B, 1, 1, Tk), the padding; and causal
causal with a sliding window, no attention_mask         None within the window; past it uint8, (1, window, 1, 0)
either of them, and position_ids that restart           uint32, (1, window or 1, 1, S + 1), the bounds of documents
the same with an attention_mask                         uint8, (B, window, 1, Tk), the padding, expanded; and both
both ways, as in BERT                                   None; with an attention_mask bool, (B, 1, 1, Tk), and no more
a BlockMask of FlexAttention as attention_mask          the BlockMask, and no more: it says all
anything else                                           transformers' own bool mask, (B, 1, Tq, Tk), and no more
a model that has "eager" attention alone                transformers' mask for "eager", (B, 1, Tq, Tk), additive
======================================================  ===============================================================

Anything else: a preallocated cache (the one query of a step gets (B, 1, 1, Tk)), chunks, windows both ways, patterns of
your own, and in transformers 5.0 every call with keys in a cache.

Packed rows: position_ids, 2-D, whose neighbours differ by other than 1. transformers looks for them where a forward has
no attention_mask and no cache, and its mask function then says so. With a cache, which a model makes in training by
default, the layers read the position_ids that they receive: without an attention_mask, with as many keys as queries,
and where each document begins at position 0, so that gaps, steps and repeated positions are none. All rows then are one
packed call. The host waits for the positions once in a forward. It cannot under torch.compile and in the capture of a
CUDA graph: there such a call without a cache has transformers' bool mask. With one its documents attend each other, as
by "sdpa": pass cu_seq_lens_q, or use_cache=False.

"eager" alone: transformers supports neither "sdpa" nor flash attention for a class of the config's models. Then some of
them read masks themselves, or rely on a causal mask that is never None, and on None that masks nothing. They get what
they expect. Classes without flash attention may read a mask of packed sequences: they get transformers' bool mask.

If a mask is the same for all queries, the kernels loop from the first to the last key that it allows: neither padding
nor the unused end of a cache costs much. The mask function finds these bounds once for all layers, by one launch on a
GPU. A layer finds them itself in a mask that is not the very object that it returned, or that was written to since;
under torch.compile and torch.inference_mode; and in a CUDA graph, for a mask from outside. One write is not seen: into
a returned mask between two layers, through its `.data` or DLPack.

A query that may attend nothing, as in padding on the left, gives zeros; with transformers' "eager" it gives the mean
of all values. Written for transformers 5.0 to 5.24.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ropewalk.device import assume_constant
from ropewalk.integrations.huggingface.packing import begin_forward, check_bounds, find_documents, has_none
from ropewalk.modules.masks import ReadMask, drop_equal_rows, keep, masks_only, read_keys, recall
from ropewalk.ops.attention.api import attention, repeat_plain, takes_shards

# Keywords that models pass to the attention, and that do not change it.
_WITHOUT_EFFECT = frozenset(
    (
        *("cache_position", "position_embeddings", "use_cache", "past_key_values", "past_key_value"),
        *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "labels"),
        *("logits_to_keep", "max_length_q", "max_length_k", "seq_idx", "use_top_left_mask", "target_dtype"),
        *("encoder_hidden_states", "encoder_attention_mask", "token_type_ids", "layer_idx"),
    )
)
# What to call for a keyword that is refused.
_INSTEAD = {
    "position_bias": (
        "; T5's biases, fused and with their gradient, are ropewalk.attention(q, k, v, scale=1.0, "
        "position=ropewalk.T5Bias(table)), with table = layer.relative_attention_bias.weight"
    )
}
_CHECKED: Any = WeakTensorKeyDictionary()  # additive masks on a device that are no bias: (version, address)
_HOSTS = ("transformers.models.", "transformers_modules.")  # of models with a config of their own
_RESERVED = ("eager", "sdpa", "flash", "flex", "/", "|")  # transformers looks for these in a name


def register(name: str = "ropewalk") -> None:
    """Add an attention implementation to transformers, under a name, for every model of this process.

    A model selects it by `from_pretrained(…, attn_implementation="ropewalk")`, or later by
    `model.set_attn_implementation("ropewalk")`. It supports grouped queries, without repeating keys, the scale, a
    sliding window, a softcap (Gemma 2), sinks (gpt-oss), dropout in training, rows of documents packed by
    position_ids that restart, or one row by cu_seq_lens_q, FlexAttention's BlockMask as attention_mask, and any 4-D
    mask: bool, or additive if it holds 0 and the lowest numbers alone, which is checked once. All else that a layer
    passes raises, by name: output_attentions, head_mask, position_bias, a mask that is a bias, a paged cache, and any
    keyword that may change the result. So T5 raises in its first forward; `attention` with `T5Bias` has its kernel.

    Two more names have 8-bit products, as `attention(…, precision=…)` defines them: "ropewalk-int8" and
    "ropewalk-int8-fp8", or those of another name with the same ends. There a layer's call of fewer than 16 queries, as
    a step of generation is, runs in 16 bits; a gradient that is needed raises, and so does dropout.

    Models that do not use transformers' interface, such as BLOOM and MPT, keep their own attention in
    `set_attn_implementation`, with transformers' warning; built with this name, they raise in their first forward.
    Classes for which transformers supports neither "sdpa" nor flash attention get the masks of "eager", with a warning
    that names them (NLLB-MoE, GIT, DeepSeek-V4). A second call does nothing.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        RuntimeError: transformers' interface is not the one that this module supports.
        ValueError: the name is taken, or holds a word that transformers reserves.

    Source: https://huggingface.co/docs/transformers/attention_interface

    Example:
        >>> import importlib.util
        >>> from ropewalk.integrations import huggingface
        >>> if importlib.util.find_spec("transformers") is not None:
        ...     from transformers import LlamaConfig, LlamaForCausalLM
        ...     huggingface.register()
        ...     sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
        ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=100, attn_implementation="ropewalk", **sizes))
        ...     logits = model(torch.tensor([[1, 2, 3]])).logits
    """
    transformers, masking = find_transformers()
    for word in _RESERVED:
        if word in name:
            raise ValueError(f"name is {name!r}, but must not hold {word!r}, which transformers reserves")
    make_mask = _mask_function(masking)
    functions = [
        (registry, name + end, ours)
        for end, attend in (("", _attend), *_QUANTISED.items())
        for registry, ours in (
            (transformers.AttentionInterface, attend),
            (transformers.AttentionMaskInterface, make_mask),
        )
    ]
    for registry, full_name, ours in functions:
        if registry().get(full_name, ours) is not ours:
            raise ValueError(
                f"name is {name!r}, but must be free: {registry.__name__} has another function of {full_name}"
            )
    for registry, full_name, ours in functions:
        registry.register(full_name, ours)


_PACKED = "packed_sequence_mask_function"
_REMAPPED = "remap_positions_for_packed_sequence"
# Causality, a window and packed sequences.
_PLAIN = (
    *("causal_mask_function", "and_masks", "sliding_window_overlay"),
    *(_PACKED, "packed_sequence_compatibility_function", _REMAPPED),
)
_SHARDED_MASKS = (*_PLAIN, "bidirectional_mask_function")


def _check_shards(masking: Any, mask_function: Any, attention_mask: Tensor | None) -> None:
    """Raise unless causality, the layer's window and the layout's documents are all that a mask says."""
    if attention_mask is not None:
        raise ValueError(
            "attention_mask was passed within context_parallel, but must be None: it speaks of local tokens; the "
            "layout pads at the end"
        )
    for function in _parts_of(mask_function):
        if _name_in(masking, function) not in _SHARDED_MASKS:
            name = getattr(function, "__qualname__", type(function).__name__)
            raise ValueError(
                f"mask_function calls {name}, but within context_parallel must consist of causality, a causal window "
                f"and packed sequences: no other mask is sharded"
            )


def _parts_of(function: Any) -> list[Any]:
    """Return a mask function and those that it calls."""
    found = [function]
    for cell in getattr(function, "__closure__", None) or ():
        within = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        for part in within:
            if callable(part) and not isinstance(part, Tensor):
                found += _parts_of(part)
    return found


def _name_in(masking: Any, function: Any) -> str | None:
    """Return the name of transformers' function that built a part of a mask function; None if it is another's."""
    name: str = getattr(function, "__qualname__", type(function).__name__)
    return name.partition(".")[0] if function.__module__ == masking.__name__ else None


def _packed_marker(masking: Any, mask_function: Any, batch_size: int, window: int | None) -> Tensor | None:
    """Return the bounds of packed rows, as a marker; None where other than causality, a window and packing count.

    window: the mask's, None if it has one that `_attend` could not tell.
    """
    parts = {_name_in(masking, function): function for function in _parts_of(mask_function)}
    if _PACKED not in parts or "causal_mask_function" not in parts or not parts.keys() <= set(_PLAIN):
        return None
    if "sliding_window_overlay" not in parts:
        window = 1  # none, in the shape of a marker
    elif window is None:
        return None
    # Both hold one tensor. The positions are the same for all of a model's masks, and so are read once.
    which = _REMAPPED if _REMAPPED in parts else _PACKED
    cells = (cell.cell_contents for cell in parts[which].__closure__)
    tensor = next(x for x in cells if isinstance(x, Tensor))
    documents = find_documents(tensor, batch_size, step=int(which == _REMAPPED))
    if documents is None:
        return None
    return documents.bounds.view(torch.uint32)[None, None, None].expand(-1, window, -1, -1)


@lru_cache
def _mask_function(masking: Any) -> Callable[..., Tensor | None]:
    """Return the function that makes masks from the arguments of transformers' `sdpa_mask`: the table above."""

    def make_mask(
        *,
        mask_function: Any = masking.causal_mask_function,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        config: Any = None,
        **sizes: Any,
    ) -> Tensor | None:
        if not torch.compiler.is_compiling():
            begin_forward()
        configuration = type(config).__module__
        if not _uses_interface(configuration):
            raise ValueError(
                f"attn_implementation must be 'eager' for {type(config).__name__}: its model does not use "
                f"transformers' attention interface, and would read Ropewalk's masks otherwise"
            )
        supported = _supported(configuration, type(config).__qualname__)
        if takes_shards():
            if supported == "eager":
                raise ValueError(
                    f"the model of {type(config).__name__} has 'eager' attention alone, but within context_parallel "
                    f"must run 'sdpa' or flash attention: its classes may read masks themselves"
                )
            _check_shards(masking, mask_function, attention_mask)
            return None
        if supported == "eager":
            allow = {"allow_is_bidirectional_skip": allow_is_bidirectional_skip, "config": config}
            additive: Tensor | None = masking.eager_mask(
                mask_function=mask_function, attention_mask=attention_mask, **allow, **sizes
            )
            return additive
        needs_whole_mask = allow_is_causal_skip or supported != "flash" or torch.compiler.is_compiling()
        if attention_mask is None and not needs_whole_mask:
            window = local_size if local_size is not None and local_size == _window(config) else None
            marker = _packed_marker(masking, mask_function, sizes["batch_size"], window)
            if marker is not None:
                return marker
        if attention_mask is None or attention_mask.ndim == 2:
            if allow_is_bidirectional_skip and mask_function is masking.bidirectional_mask_function:
                padding = _read_padding(attention_mask, **sizes)
                return None if padding is None else keep(padding.allowed, padding)
            if allow_is_causal_skip and _is_aligned_to_end(**sizes):
                window = None if mask_function is masking.causal_mask_function else local_size
                if mask_function is masking.causal_mask_function or (window is not None and window == _window(config)):
                    padding = _read_padding(attention_mask, **sizes)
                    if padding is not None:
                        marker = padding.allowed.view(torch.uint8)
                        return keep(marker if window is None else marker.expand(-1, window, -1, -1), padding)
                    if window is None or sizes["kv_length"] <= window:
                        return None
                    return torch.empty(1, window, 1, 0, dtype=torch.uint8, device=sizes.get("device"))
        skip = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
        mask: Tensor = masking.sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **skip, **sizes)
        if torch.compiler.is_compiling() or mask.shape[1:3] != (1, 1):
            return mask
        key_mask = read_keys(mask, mask.shape[0], mask.shape[3], copy=True)
        return keep(key_mask.allowed, key_mask)

    return make_mask


@assume_constant
def _uses_interface(configuration: str) -> bool:
    """Say whether the model of a configuration module may call us: no, if its attention classes are all its own."""
    modeling = sys.modules.get(configuration.replace(".configuration_", ".modeling_"))
    if modeling is None or hasattr(modeling, "ALL_ATTENTION_FUNCTIONS") or ".modeling_" not in modeling.__name__:
        return True
    own = (x for x in vars(modeling).values() if isinstance(x, type) and x.__module__ == modeling.__name__)
    return not any("Attention" in x.__name__ for x in own)


@assume_constant
def _supported(configuration: str, name: str) -> str:
    """Return the most that transformers supports for all classes of a config's models: "flash", "sdpa" or "eager".

    By flash attention a class gets no mask but for padding, and so hands whatever it gets to the interface. By "sdpa"
    it may read a bool mask, if it is not None. By "eager" it may read each mask: it is never None where it is causal.
    """
    config_class: Any = getattr(sys.modules.get(configuration), name, None)
    return "flash" if config_class is None else _supported_by_classes(config_class)


def _has_eager_alone(config: Any) -> bool:
    """Say whether transformers supports "eager" alone for a config's models."""
    if config is None:
        return False
    config_class = type(config)
    if torch.compiler.is_compiling():
        return _supported(config_class.__module__, config_class.__qualname__) == "eager"
    return _supported_by_classes(config_class) == "eager"


_SUPPORTED: dict[type, str] = {}  # by a config's class
_ASKED_AT: dict[type, int] = {}  # the number of modules that were loaded then: another one may define more classes


def _supported_by_classes(config_class: type) -> str:
    n_modules = len(sys.modules)
    if config_class not in _SUPPORTED or _ASKED_AT.get(config_class) != n_modules:
        _SUPPORTED[config_class], _ASKED_AT[config_class] = _ask_classes(config_class), n_modules
    return _SUPPORTED[config_class]


def _ask_classes(config_class: type) -> str:
    transformers: Any = importlib.import_module("transformers")
    found, classes = [], [transformers.PreTrainedModel]
    while classes:
        for each in classes.pop().__subclasses__():
            classes.append(each)
            package = each.__module__.rpartition(".")[0]
            is_host = package == config_class.__module__.rpartition(".")[0] or package.startswith(_HOSTS)
            if each.config_class is config_class and is_host:
                found.append(each)
    lacking = sorted(x.__name__ for x in found if not (x._supports_sdpa or x._supports_flash_attn))
    if lacking:
        warnings.warn(
            f"transformers supports neither 'sdpa' nor flash attention for {', '.join(lacking)}: Ropewalk gives them "
            f"the masks of 'eager', with a number for each query and key, and layers that do not call transformers' "
            f"attention interface keep their own attention",
            stacklevel=1,
        )
        return "eager"
    return "flash" if all(x._supports_flash_attn for x in found) else "sdpa"


def _read_padding(attention_mask: Tensor | None, kv_length: int, kv_offset: int = 0, **others: Any) -> ReadMask | None:
    """Read a mask of tokens as a mask of the current keys."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[1]
    if missing > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, missing))
    if attention_mask.shape[1] != kv_length:
        attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    return read_keys(attention_mask, attention_mask.shape[0], kv_length, copy=True)


def _is_aligned_to_end(kv_length: int, kv_offset: int = 0, q_offset: Any = 0, **others: Any) -> bool:
    """Say whether the last query is certainly at the last key, as `attention` aligns causality and windows."""
    if "q_length" not in others:  # as in transformers 5.0: the offset of the queries is on the device
        position = others.get("cache_position")
        return position is not None and kv_offset == 0 and int(position.shape[0]) == kv_length
    return isinstance(q_offset, int) and q_offset + int(others["q_length"]) == kv_offset + kv_length


def _window(config: Any) -> int | None:
    """Return a config's sliding window; None where the mask may be chunked, or could not tell a window of 1."""
    window: int | None = getattr(config, "sliding_window", None)
    return None if getattr(config, "attention_chunk_size", None) is not None or window == 1 else window


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    _precision: str | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with the interface of transformers: q, k and v (B, heads, T, D) in, (B, Tq, H, Dv) out."""
    for name, option in others.items():
        if option is not None and option is not False and name not in _WITHOUT_EFFECT:
            raise ValueError(
                f"{name} is not supported by Ropewalk's attention, so must be None: use 'eager'{_INSTEAD.get(name, '')}"
            )
    bounds = None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal:
        config = getattr(module, "config", None)
        supported = _SUPPORTED.get(type(config))
        if supported != "flash" and (supported == "eager" or _has_eager_alone(config)):
            causal = False  # "eager" adds the masks that it gets, and knows no causality
        elif position_ids is not None and not has_none(position_ids):
            bounds = _read_bounds(position_ids, query, key)
    if (
        attention_mask is None
        and bounds is None
        and softcap is None
        and s_aux is None
        and cu_seq_lens_q is None
        and cu_seq_lens_k is None
        and (sliding_window is None or sliding_window >= key.shape[2])
        and not (dropout and module.training)
        and not deterministic
        and type(scaling) is float
        and _precision is None
    ):
        plain = repeat_plain(query, key, value, causal, scaling)
        if plain is not None:
            return plain.transpose(1, 2).contiguous(), None
    batch, _, queries, _ = query.shape
    keys = key.shape[2]
    is_sharded = takes_shards()
    if is_sharded:
        _check_position_ids(module, position_ids)
    causal, window = bool(causal), sliding_window
    mask, key_starts, key_lengths, blocks = attention_mask, None, None, None
    if attention_mask is not None and not isinstance(attention_mask, Tensor):  # a BlockMask, which says all
        causal, window, mask, blocks = False, None, None, attention_mask
    elif attention_mask is not None:
        causal, window = _read_pattern(attention_mask, causal, sliding_window)
        if attention_mask.dtype == torch.uint32 and causal:
            mask, bounds = None, attention_mask[0, 0, 0].view(torch.int32)
        else:
            cached = recall(attention_mask, batch, keys)
            mask, key_starts, key_lengths = cached or _convert(attention_mask, batch, keys)
            if position_ids is not None and mask is None:
                bounds = _read_bounds(position_ids, query, key)
    if window is not None and window >= keys and not is_sharded:
        window = None
    # A branch, as torch.compile with symbolic lengths hands on no SymBool.
    if queries == 1 and cu_seq_lens_q is None and not is_sharded:
        causal = False  # one query is at the last key
    dropout_p = dropout if module.training else 0.0
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if mask is not None or blocks is not None or batch != 1:
            raise ValueError(
                "cu_seq_lens_q was passed with a mask or several batch rows, but must come with one row, without an "
                "attention_mask: pass one or the other"
            )
        for name, cu_seqlens in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
            if bounds is not None and cu_seqlens is not None:
                check_bounds(bounds, cu_seqlens, queries, name)
        bounds = cu_seq_lens_q
    is_packed = bounds is not None or cu_seq_lens_k is not None
    if is_packed:
        query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out = attention(
        query,
        key,
        value,
        causal=causal,
        window=window,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout_p=dropout_p,
        deterministic=deterministic or None,
        mask=mask,
        blocks=blocks,
        key_starts=key_starts,
        key_lengths=key_lengths,
        cu_seqlens_q=bounds,
        cu_seqlens_k=cu_seq_lens_k,
        layout="thd" if is_packed else "bhtd",
        precision=_precision,
    )
    if is_packed:
        return out.unflatten(0, (batch, queries)).contiguous(), None
    return out.transpose(1, 2).contiguous(), None


_FEWEST_QUERIES = 16  # of products in 8 bits: with fewer, as in a step of generation, memory bounds a call


def _attend_quantised(
    precision: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **keywords: Any
) -> tuple[Tensor, None]:
    """Attend as `_attend` does, with 8-bit products but for few queries; a gradient that is needed raises."""
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if query.shape[2] >= _FEWEST_QUERIES or needs_grad:
        keywords["_precision"] = precision
    return _attend(module, query, key, value, *arguments, **keywords)


# By the end of a name.
_QUANTISED = {f"-{precision}": partial(_attend_quantised, precision) for precision in ("int8", "int8-fp8")}


def _read_bounds(position_ids: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the bounds of documents that positions tell apart; None if they are no packed rows."""
    batch, _, queries, _ = query.shape
    if queries < 2 or position_ids.ndim != 2 or key.shape[2] != queries or position_ids.shape[1] != queries:
        return None
    if position_ids.shape[0] not in (1, batch) or takes_shards():
        return None
    documents = find_documents(position_ids, batch)
    return documents.bounds if documents is not None and documents.are_from_zero else None


def _check_position_ids(module: nn.Module, position_ids: Tensor | None) -> None:
    """Raise where a model rotates a shard by other positions than the layout's; the first layer looks."""
    from ropewalk.parallel.agreement import refuse, refuse_tokens
    from ropewalk.parallel.call import current_layout

    layout = current_layout()
    assert layout is not None
    if position_ids is None or position_ids.ndim != 2 or getattr(module, "layer_idx", 0) != 0:
        return
    try:
        if position_ids.shape[1] != layout.n_local:
            refuse_tokens(layout, "position_ids", position_ids.shape[1])
    except ValueError as error:
        refuse(layout, error)
    is_wrong = (position_ids != layout.positions) & layout.valid
    if bool(is_wrong.any()):
        text = "must be layout.positions[None] within context_parallel: the model rotates by them"
        refuse(layout, ValueError(f"position_ids are not the layout's, but {text}"))


def _read_pattern(attention_mask: Tensor, is_causal: bool, sliding_window: int | None) -> tuple[bool, int | None]:
    """Return causality and the window that go with a mask: see the table above."""
    if not _is_marker(attention_mask):
        return False, None
    window = sliding_window if attention_mask.shape[1] == 1 else attention_mask.shape[1]
    if sliding_window not in (None, window):
        raise ValueError(f"sliding_window is {sliding_window}, but must be the mask's and the config's, {window}")
    return True, window


def _is_marker(mask: Tensor) -> bool:
    """Say whether a mask is padding, or the bounds of documents, beside causality or a window."""
    return (mask.dtype == torch.uint8 or mask.dtype == torch.uint32) and mask.ndim == 4 and mask.shape[2] == 1


def _convert(attention_mask: Tensor, batch: int, keys: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return a mask as bool, and the bounds of its keys if it is one of keys."""
    if _is_marker(attention_mask):
        if attention_mask.shape[3] == 0:  # a window without padding
            return None, None, None
        mask = attention_mask[:, :1].view(torch.bool)
    else:
        mask = drop_equal_rows(attention_mask)
        if attention_mask.dtype != torch.bool:
            _check_additive(attention_mask, mask)
    if mask.shape[1:] == (1, 1, keys):
        return read_keys(mask, batch, keys)
    return mask if mask.dtype == torch.bool else mask == 0, None, None


def _check_additive(mask: Tensor, distinct: Tensor) -> None:
    """Raise if an additive mask is a bias. distinct: the mask without rows that are equal in memory."""
    if mask.requires_grad:
        raise ValueError(
            "attention_mask requires grad, but must not require it: pass a bool mask, True where a query attends"
        )
    if not mask.is_floating_point():
        raise TypeError(f"attention_mask has dtype {mask.dtype}, but with 4 dimensions must be bool, or additive")
    if torch.compiler.is_compiling():
        raise ValueError(
            "attention_mask is additive, but must be bool under torch.compile, which cannot check its values: True "
            "where a query attends"
        )
    # To read values on a device is to wait for it: once for a mask, not in each layer.
    state = None if mask.is_cpu or mask.is_inference() else (mask._version, mask.data_ptr())
    if state is None or _CHECKED.get(mask) != state:
        if not bool(masks_only(distinct)):
            raise ValueError(
                "attention_mask is a bias, but must hold 0 and the lowest numbers alone: biases are not supported, use "
                "'eager' attention"
            )
        if state is not None:
            _CHECKED[mask] = state


def find_transformers() -> tuple[Any, Any]:
    """Import transformers and its module of masks, and check their interface.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        RuntimeError: its interface is not the one that this package supports.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError("transformers is not installed, but must be for this", name="transformers")
    transformers: Any = importlib.import_module("transformers")
    masking: Any = importlib.import_module("transformers.masking_utils")
    functions = ("sdpa_mask", "causal_mask_function", "bidirectional_mask_function")
    classes = ("AttentionInterface", "AttentionMaskInterface")
    for where, name in (*((transformers, name) for name in classes), *((masking, function) for function in functions)):
        if not hasattr(where, name):
            raise RuntimeError(
                f"the interface of transformers {transformers.__version__} is not supported: {where.__name__} has no "
                f"{name}; ropewalk.integrations.huggingface supports transformers 5.0 to 5.24"
            )
    return transformers, masking

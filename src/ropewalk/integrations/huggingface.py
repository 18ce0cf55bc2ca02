"""Hugging Face models by Ropewalk's kernels, through transformers' own doors: nothing changes unless it is asked for.

`register` adds an attention implementation, with its mask function: BERT, Llama, Qwen, Gemma, GPT-NeoX and whatever
else goes by transformers' `AttentionInterface` then attend by `ropewalk.attention`. `use_ropewalk_rope` lets
`ropewalk.apply_rope` rotate in the models that rotate by an `apply_rotary_pos_emb` of their own.

What the mask function hands to the layers, without waiting for any value on a device:

======================================================  ===============================================================
a model's call                                          its mask, and what it says
======================================================  ===============================================================
causal, no attention_mask, no cache or one that grows   None; `is_causal` says the rest
the same with an attention_mask, padded anywhere        uint8, (B, 1, 1, Tk), the padding; causal beside it
causal with a sliding window, no attention_mask         None within the window; past it uint8, (1, window, 1, 0)
the same with an attention_mask                         uint8, (B, window, 1, Tk), the padding, expanded; both beside it
both ways, as in BERT                                   None; with an attention_mask bool, (B, 1, 1, Tk), and no more
anything else                                           transformers' own bool mask, (B, 1, Tq, Tk), and no more
======================================================  ===============================================================

Anything else: a preallocated cache (its one query of a step gets (B, 1, 1, Tk)), packed sequences, chunks, windows both
ways, patterns of your own, and in transformers 5.0 every call with keys in a cache. Where a mask is the same for all
queries, the kernels walk from the first to the last key that it leaves, so that neither padding nor the unused end of a
cache costs much.

A query that may attend nothing, as in padding on the left, gives zeros; that of transformers' "eager" gives the mean of
all values. Written for transformers 5.0 to 5.23.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ropewalk.ops.attention.api import attention
from ropewalk.ops.rope.api import apply_rope

# Keywords of models that reach the attention, and change nothing there.
_WITHOUT_EFFECT = frozenset(
    (
        *("position_ids", "cache_position", "position_embeddings", "use_cache", "past_key_values", "past_key_value"),
        *("output_hidden_states", "output_router_logits", "return_dict", "num_items_in_batch", "labels"),
        *("logits_to_keep", "max_length_q", "max_length_k", "seq_idx", "use_top_left_mask", "target_dtype"),
        *("encoder_hidden_states", "encoder_attention_mask", "token_type_ids", "layer_idx"),
    )
)
_MEANT_OTHERWISE = ("eager", "sdpa", "flash", "flex", "/", "|")  # transformers looks for these in a name
_ROTATE = "apply_rotary_pos_emb"
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]  # and position_ids, as long as nobody passes them


def register(name: str = "ropewalk") -> None:
    """Add an attention implementation to transformers, under a name, for every model of this process.

    A model takes it by `from_pretrained(…, attn_implementation="ropewalk")`, or later by
    `model.set_attn_implementation("ropewalk")`. It serves what a layer may ask for: grouped queries, without repeating
    keys, the scale, a sliding window, a softcap (Gemma 2), sinks (gpt-oss), dropout in training, one row of sequences
    packed by cu_seq_lens_q, and any 4-D mask: bool, or additive where it holds 0 and the lowest numbers alone, which is
    looked at once. Whatever else a layer passes on raises, by name: output_attentions, head_mask, position_bias, a
    mask that is a bias, a paged cache, and any keyword that is not known to change nothing. A second call does nothing.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        RuntimeError: transformers' interface is not the one that this module is written for.
        ValueError: the name is taken, or holds a word by which transformers means something else.

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
    transformers, masking = _find_transformers()
    for word in _MEANT_OTHERWISE:
        if word in name:
            raise ValueError(f"name is {name!r}, but {word!r} in it means something else to transformers")
    doors = (
        (transformers.AttentionInterface, _attend),
        (transformers.AttentionMaskInterface, _mask_function(masking)),
    )
    for door, ours in doors:
        if door().get(name, ours) is not ours:
            raise ValueError(f"name is {name!r}, but {door.__name__} has another function of that name")
    for door, ours in doors:
        door.register(name, ours)


@lru_cache
def _mask_function(masking: Any) -> Callable[..., Tensor | None]:
    """The function that makes a model's masks, of what transformers' own `sdpa_mask` is given: the table above."""

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
        if attention_mask is None or attention_mask.ndim == 2:
            padding = _of_keys(attention_mask, **sizes)
            if allow_is_bidirectional_skip and mask_function is masking.bidirectional_mask_function:
                return padding
            if allow_is_causal_skip and _stand_at_the_end(**sizes):
                if mask_function is masking.causal_mask_function:
                    return None if padding is None else padding.view(torch.uint8)
                if local_size is not None and local_size == _window(config):
                    if padding is not None:
                        return padding.view(torch.uint8).expand(-1, local_size, -1, -1)
                    nothing = torch.empty(1, local_size, 1, 0, dtype=torch.uint8, device=sizes.get("device"))
                    return None if sizes["kv_length"] <= local_size else nothing
        skip = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
        mask: Tensor = masking.sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **skip, **sizes)
        return mask

    return make_mask


def _of_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int = 0, **others: Any) -> Tensor | None:
    """A mask of tokens as one of the keys that there are, (B, 1, 1, Tk)."""
    if attention_mask is None:
        return None
    missing = kv_offset + kv_length - attention_mask.shape[1]
    if missing > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, None, None, kv_offset : kv_offset + kv_length].to(torch.bool)


def _stand_at_the_end(kv_length: int, kv_offset: int = 0, q_offset: Any = 0, **others: Any) -> bool:
    """Whether the last query is known to stand at the last key, by which causality and windows here are aligned."""
    if "q_length" not in others:  # as in transformers 5.0: which queries these are, the device knows
        position = others.get("cache_position")
        return position is not None and kv_offset == 0 and int(position.shape[0]) == kv_length
    return isinstance(q_offset, int) and q_offset + int(others["q_length"]) == kv_offset + kv_length


def _window(config: Any) -> int | None:
    """The sliding window of a causal pattern that has a size; None where that may be of chunks, or the mask's 1."""
    window: int | None = getattr(config, "sliding_window", None)
    return None if getattr(config, "attention_chunk_size", None) is not None or window == 1 else window


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do: q, k and v (B, heads, T, D) in, (B, Tq, H, Dv) out."""
    for name, given in others.items():
        if given is not None and given is not False and name not in _WITHOUT_EFFECT:
            raise ValueError(f"{name} was passed to Ropewalk's attention, which cannot do it: use 'eager' attention")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask, causal, window = _read_mask(attention_mask, bool(is_causal), sliding_window)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    (batch, queries), keys = q.shape[:2], k.shape[1]
    asked: dict[str, Any] = {
        "causal": causal,
        "window": None if window is None or window >= keys else window,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout_p": dropout if module.training else 0.0,
        "deterministic": deterministic or None,
    }
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if mask is not None or batch != 1:
            raise ValueError(
                "cu_seq_lens_q was passed to Ropewalk's attention beside a mask or several batch rows, but goes with "
                "one row alone, without an attention_mask or position_ids that start anew: leave out one or the other"
            )
        asked.update(cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k, layout="thd")
        return attention(q[0], k[0], v[0], **asked)[None].contiguous(), None
    if mask is not None and attention_mask is not None:
        if mask.dtype != torch.bool:
            mask = _remembered(attention_mask, _as_bool)
        if mask.shape[1:] == (1, 1, keys):
            starts, ends = _remembered(attention_mask, _bounds)
            asked.update(key_starts=starts.expand(batch), key_lengths=ends.expand(batch))
    asked["causal"] = causal and queries > 1  # one query stands at the last key
    return attention(q, k, v, mask=mask, **asked).contiguous(), None


def _read_mask(
    given: Tensor | None, is_causal: bool, sliding_window: int | None
) -> tuple[Tensor | None, bool, int | None]:
    """The mask proper, and whether causality and which window go beside it: see the table above."""
    if given is None:
        return None, is_causal, sliding_window
    if given.dtype != torch.uint8 or given.ndim != 4 or given.shape[2] != 1:
        return given, False, None
    window = sliding_window if given.shape[1] == 1 else given.shape[1]
    if sliding_window not in (None, window):
        raise ValueError(f"sliding_window is {sliding_window}, but the config's, by which the mask goes, is {window}")
    return None if given.shape[3] == 0 else given[:, :1].view(torch.bool), True, window


def _as_bool(mask: Tensor) -> Tensor:
    """Which keys an additive mask leaves; it must be one."""
    if not mask.is_floating_point():
        raise TypeError(f"attention_mask has dtype {mask.dtype}, but with 4 dimensions must be bool, or additive")
    if mask.requires_grad or torch.compiler.is_compiling():
        why = "requires grad" if mask.requires_grad else "is additive, and torch.compile cannot look at its values"
        raise ValueError(f"attention_mask {why}: pass a bool mask, True where a query attends")
    masked = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((masked | (mask == 0)).all()):
        raise ValueError(
            "attention_mask holds other numbers than 0 and the lowest: a bias, which Ropewalk's attention cannot take "
            "from transformers; use 'eager' attention"
        )
    return ~masked


def _bounds(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where the keys that a mask of keys leaves start and end; each (B or 1,), int32, and 0 where it leaves none."""
    kept = mask[:, 0, 0]
    kept = kept == 0 if kept.is_floating_point() else kept.view(torch.bool)
    index = torch.arange(kept.shape[1], dtype=torch.int32, device=kept.device)
    ends = torch.where(kept, index + 1, 0).amax(dim=1)
    return torch.where(kept, index, kept.shape[1]).amin(dim=1).minimum(ends), ends


_MADE: Any = WeakTensorKeyDictionary()


def _remembered(mask: Tensor, make: Callable[[Tensor], Any]) -> Any:
    """What `make` makes of a mask, once for all the layers that get it; anew where it was, or may be, written to."""
    is_traced = torch.compiler.is_compiling() or isinstance(mask, FakeTensor)
    if is_traced or mask.is_inference() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return make(mask)
    made = _MADE.setdefault(mask, {})
    if make not in made or made[make][0] != mask._version:
        with torch.inference_mode(False):  # the next call may be one with a backward
            made[make] = mask._version, make(mask)
    return made[make][1]


@dataclass
class _Rotation:
    """Our rotation in a modeling module, the model's own, and how many handles hold ours there."""

    original: Any
    ours: Any
    handles: int = 0


_ROTATIONS: dict[str, _Rotation] = {}  # by the name of the modeling module


class RopeHandle:
    """What `use_ropewalk_rope` did: `modules` names the modules, `remove` undoes it, as leaving a `with` block does."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self._is_removed = False

    def remove(self) -> None:
        """Put the models' own functions back, where no other handle holds ours. A second call does nothing.

        Raises:
            RuntimeError: someone else has replaced a function since, and it was left as it is.
        """
        held = () if self._is_removed else self.modules
        self._is_removed = True
        lost = []
        for name in held:
            rotation, module = _ROTATIONS[name], sys.modules[name]
            rotation.handles -= 1
            if rotation.handles > 0:
                continue
            del _ROTATIONS[name]
            if getattr(module, _ROTATE) is rotation.ours:
                setattr(module, _ROTATE, rotation.original)
            else:
                lost.append(name)
        if lost:
            raise RuntimeError(f"{_ROTATE} was replaced by someone else since, and left as it is, in {', '.join(lost)}")

    def __enter__(self) -> RopeHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def use_ropewalk_rope(model: nn.Module) -> RopeHandle:
    """Let `ropewalk.apply_rope` rotate queries and keys in a transformers model, both in one launch.

    It replaces `apply_rotary_pos_emb` in the modules that the model's classes come from, and so for every model of
    those classes in this process. First it calls that function with random numbers, to find out what it does:
    half-split pairs (Llama, Qwen, Gemma), of a part of the head (GPT-NeoX, Phi), by tables that hold every angle once
    (gpt-oss), interleaved pairs (Cohere, GLM, ERNIE 4.5), the other direction (NanoChat); anything else is refused.
    Whether the model's cos and sin are as the function wants them is looked at once, in the first call that
    torch.compile does not trace. Rotations by functions of other names, as in some vision towers and in DeepSeek's
    interleaved models, stay the model's own.

    The arithmetic is in float32 and rounded once, to q's dtype, where the model's own rounds each step.

    Args:
        model: a model of transformers, or one that has such models inside.

    Returns:
        A `RopeHandle`: `.modules`, the names of the modules; `.remove()`; and a context manager.

    Raises:
        ValueError: no module of the model has such a function, or one does something else: then nothing is replaced.
            In the forward: cos and sin that the function has no use for.

    Example:
        >>> import importlib.util
        >>> from ropewalk.integrations import huggingface
        >>> if importlib.util.find_spec("transformers") is not None:
        ...     from transformers import LlamaConfig, LlamaForCausalLM
        ...     sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
        ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
        ...     with huggingface.use_ropewalk_rope(model):
        ...         logits = model(torch.tensor([[1, 2, 3]])).logits
    """
    names = sorted({base.__module__ for part in model.modules() for base in type(part).__mro__})
    found = {name: getattr(sys.modules[name], _ROTATE) for name in names if hasattr(sys.modules[name], _ROTATE)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no {_ROTATE} in the modules that its classes come from")
    rotations = {name: _ROTATIONS.get(name) or _replace(name, original) for name, original in found.items()}
    for name, rotation in rotations.items():
        _ROTATIONS[name] = rotation
        rotation.handles += 1
        setattr(sys.modules[name], _ROTATE, rotation.ours)
    return RopeHandle(tuple(rotations))


# How cos and sin may hold the angles: in two parts that are equal, of which apply_rope wants one.
_PARTS: dict[str, Callable[[Tensor], Any]] = {
    "halves": lambda x: x.chunk(2, dim=-1),
    "pairs": lambda x: (x[..., ::2], x[..., 1::2]),
    "once": lambda x: (x, x),
}


def _replace(name: str, original: Any) -> _Rotation:
    """Of all rotations, the one that agrees with a modeling module's own."""
    parameters = inspect.signature(original).parameters
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())  # of a Hub kernel
    if variadic or [name for name in parameters if name != "position_ids"] == _PARAMETERS:
        for kind in product(_PARTS, (False, True), (False, True)):
            if _agree(original, _rotation(name, *kind), kind[0]):
                return _Rotation(original, _rotation(name, *kind))  # a new one, which has not looked at tables yet
    raise ValueError(f"{name}.{_ROTATE}({', '.join(parameters)}) rotates in no way that apply_rope knows: it must stay")


def _rotation(name: str, table: str, interleaved: bool, inverse: bool) -> Callable[..., Any]:
    """`apply_rotary_pos_emb` by `apply_rope`, for a kind of table, of pairs, and a direction."""
    parts, looked_at = _PARTS[table], False

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, position_ids: None = None
    ) -> Any:
        nonlocal looked_at
        if position_ids is not None:
            raise ValueError(f"position_ids were passed to {name}.{_ROTATE}, which Ropewalk's does not know")
        heads = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - cos.ndim - 1
        if heads not in (-2, -3):
            raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, but cos has shape {tuple(cos.shape)}: no known layout")
        cos, same_cos = parts(cos if cos.ndim > 2 else cos[None])
        sin, same_sin = parts(sin if sin.ndim > 2 else sin[None])
        if not (looked_at or torch.compiler.is_compiling() or cos.is_meta or isinstance(cos, FakeTensor)):
            if not (torch.equal(cos, same_cos) and torch.equal(sin, same_sin)):
                raise ValueError(f"cos or sin does not hold every angle twice, but must for {name}.{_ROTATE}")
            looked_at = True
        layout = "bthd" if heads == -2 else "bhtd"
        return apply_rope(q, k, cos, sin, layout=layout, interleaved=interleaved, inverse=inverse)

    return rotate


@torch.no_grad()
def _agree(original: Any, ours: Any, table: str) -> bool:
    """Whether two functions rotate alike: in both layouts, and a half of the features if the model's own can.

    A feature is a·cos ± b·sin: three roundings, of numbers up to |a| + |b|.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 16, generator=generator, device="cpu") for heads in (3, 2))
    budget = 3 * torch.finfo(torch.float32).eps * 2 * float(max(q.abs().max(), k.abs().max()))
    for rotary_dim, axis in product((16, 8), (1, 2)):
        angles = 6 * torch.rand(2, 5, rotary_dim // 2, generator=generator, device="cpu")
        if table != "once":
            angles = angles.repeat(1, 1, 2) if table == "halves" else angles.repeat_interleave(2, dim=-1)
        given = [*((q, k) if axis == 1 else (q.transpose(1, 2), k.transpose(1, 2))), angles.cos(), angles.sin()]
        try:
            theirs = original(*given, unsqueeze_dim=axis)
        except Exception:  # it takes no such table
            if rotary_dim == 16:
                return False
            continue
        if not isinstance(theirs, tuple) or len(theirs) != 2:
            return False
        for a, b in zip(ours(*(x.double() for x in given), axis), theirs, strict=True):
            if not isinstance(b, Tensor) or a.shape != b.shape or not float((a - b).abs().max()) <= budget:
                return False
    return True


def _find_transformers() -> tuple[Any, Any]:
    """transformers and its module of masks, once they prove to be what we think they are."""
    if importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError("transformers is not installed, but must be for this", name="transformers")
    transformers: Any = importlib.import_module("transformers")
    masking: Any = importlib.import_module("transformers.masking_utils")
    functions = ("sdpa_mask", "causal_mask_function", "bidirectional_mask_function")
    doors = ("AttentionInterface", "AttentionMaskInterface")
    for where, name in (*((transformers, door) for door in doors), *((masking, function) for function in functions)):
        if not hasattr(where, name):
            raise RuntimeError(
                f"transformers {transformers.__version__} is not what it must be: {where.__name__} has no {name}; "
                "ropewalk.integrations.huggingface knows transformers 5.0 to 5.23"
            )
    return transformers, masking

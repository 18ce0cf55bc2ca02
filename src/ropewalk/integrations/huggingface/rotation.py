"""The rotation of transformers' models by `ropewalk.apply_rope`, which replaces the models' own function."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.compiler import is_dynamo_compiling

from ropewalk.integrations.huggingface.checkpoints import hold_in_checkpoints
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.repeat import Repeater
from ropewalk.ops.tracing import is_transformed

# Functions and methods of models that rotate, by their names in transformers.
_ROTARY = re.compile(r"_?(vision_)?apply_\w*(rot|rope)|rotate_")
# What such a function takes, but for position_ids, which must not be passed.
_PARAMETERS = {
    ("q", "k", "cos", "sin", "unsqueeze_dim"): "pair",
    ("q", "k", "cos", "sin"): "vision",
    ("x", "cos", "sin", "unsqueeze_dim"): "single",
}


# Settings of a config by which layers rotate or do not, and the values with which they do.
_WITH_ROTATION: dict[str, tuple[Any, ...]] = {
    "alibi": (False, None),  # Falcon
    "position_embedding_type": ("rotary", "rope"),  # ESM, Granite 4
    "use_mem_rope": (True,),  # Zamba 2
}


@dataclass
class _Rotation:
    """A rotary function of a modeling module, the model's own and ours, and the number of handles that keep ours."""

    original: Any
    ours: Any
    handles: int = 0


_ROTATIONS: dict[tuple[str, str], _Rotation] = {}  # by the names of the modeling module and of its function


class RopeHandle:
    """The handle of `use_ropewalk_rope`, and a context manager.

    `modules` are the names of the modules that it changed, `functions` those of the functions; `remove`, or the end of
    a `with`, undoes it.
    """

    def __init__(self, replaced: tuple[tuple[str, str], ...], checkpoints: tuple[Any, ...] = ()) -> None:
        self.modules = tuple(sorted({module for module, _ in replaced}))
        self.functions = tuple(f"{module}.{function}" for module, function in replaced)
        self._replaced = replaced
        self._checkpoints = checkpoints
        self._is_removed = False

    def __repr__(self) -> str:
        removed = ", removed" if self._is_removed else ""
        return f"<RopeHandle of {', '.join(self.functions)}{removed}>"

    def remove(self) -> None:
        """Restore the models' own functions, unless another handle keeps ours. A second call does nothing.

        Raises:
            RuntimeError: other code has replaced a function since, and it was left as it is.
        """
        held = () if self._is_removed else self._replaced
        self._is_removed = True
        for checkpoint in self._checkpoints:
            checkpoint.release()
        lost = []
        for module, function in held:
            rotation = _ROTATIONS[module, function]
            rotation.handles -= 1
            if rotation.handles > 0:
                continue
            del _ROTATIONS[module, function]
            if getattr(sys.modules[module], function) is rotation.ours:
                setattr(sys.modules[module], function, rotation.original)
            else:
                lost.append(f"{module}.{function}")
        if lost:
            raise RuntimeError(f"other code has replaced {', '.join(lost)} since: left as it is")

    def __enter__(self) -> RopeHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def use_ropewalk_rope(model: nn.Module) -> RopeHandle:
    """Make a transformers model rotate queries and keys by `ropewalk.apply_rope`, both in one launch.

    It replaces every rotary function that the model's classes call, such as `apply_rotary_pos_emb`, in their modeling
    modules, and so for every model of those classes in this process. First it calls each function with random numbers,
    to recognise its rotation: half-split pairs (Llama, Qwen, Gemma), of a part of the head (GPT-NeoX, Phi), by tables
    that hold every angle once (gpt-oss), interleaved pairs (Cohere, GLM, ERNIE 4.5), interleaved pairs that come out
    half-split (DeepSeek-V3), the other direction (NanoChat); of q and k, of one tensor (Gemma 4), of packed patches
    (the vision towers of Qwen-VL). Any other rotation raises, so no part of a model is left without a word. The form
    of the model's cos and sin is checked once per width, in the first call that torch.compile does not trace.

    The arithmetic is in float32 and rounded once, to q's dtype, where the model's own rounds each step.

    A backward may follow the removal: layers that transformers checkpoints (`gradient_checkpointing_enable`, called
    before) recompute by the rotation of their forward. Around other checkpoints the handle must outlast the backward.

    Args:
        model: a model of transformers, or one that has such models inside, or a part, such as a language model.

    Returns:
        A `RopeHandle`: `.modules` and `.functions`, the names of what was replaced; `.remove()`; and a context manager.

    Raises:
        ValueError: the model's classes call no rotary function, its config says that none is called (Falcon with
            `alibi`), or one has another rotation, and is named: then nothing is replaced. In the forward: cos and sin
            in another form.

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
    for setting, values in _WITH_ROTATION.items():
        value = getattr(getattr(model, "config", None), setting, values[0])
        if value not in values:
            raise ValueError(f"config.{setting} is {value!r}, so {type(model).__name__} rotates nothing")
    rotations: dict[tuple[str, str], _Rotation] = {}
    refused: set[str] = set()
    classes = {base for part in model.modules() for base in type(part).__mro__}
    for base in sorted(classes, key=lambda base: (base.__module__, base.__qualname__)):
        for method in vars(base).values():
            _collect(base, method, rotations, refused)
    if refused:
        raise ValueError(
            f"{', '.join(sorted(refused))} must stay: apply_rope does not support its rotation; pass a part of the "
            f"model that does not call it"
        )
    if not rotations:
        raise ValueError(
            f"{type(model).__name__} calls no rotary function, but must call one such as apply_rotary_pos_emb: models "
            f"with other positions, such as BERT's, rotate nothing"
        )
    _install(rotations)
    return RopeHandle(tuple(rotations), hold_in_checkpoints(model, lambda: _held(rotations)))


def _install(rotations: dict[tuple[str, str], _Rotation]) -> None:
    for (module, function), rotation in rotations.items():
        _ROTATIONS[module, function] = rotation
        rotation.handles += 1
        setattr(sys.modules[module], function, rotation.ours)


@contextmanager
def _held(rotations: dict[tuple[str, str], _Rotation]) -> Iterator[None]:
    """Rotate by ours again where a handle was removed since, as a recomputation must run what its forward ran."""
    missing = {
        (module, function): rotation
        for (module, function), rotation in rotations.items()
        if (module, function) not in _ROTATIONS and getattr(sys.modules[module], function) is rotation.original
    }
    _install(missing)
    handle = RopeHandle(tuple(missing))
    try:
        yield
    finally:
        handle.remove()


def _collect(
    base: type, function: Any, rotations: dict[tuple[str, str], _Rotation], refused: set[str], seen: Any = None
) -> None:
    """Find the rotary functions that a method reaches, itself or by functions of its module: ours, or refused."""
    module, seen = sys.modules[base.__module__], set() if seen is None else seen
    for name in _names(function):
        found = getattr(module, name, None)
        if not callable(found) or isinstance(found, type):
            if _ROTARY.match(name) and inspect.isfunction(getattr(base, name, None)):
                refused.add(f"{base.__module__}.{base.__qualname__}.{name}")
        elif name not in seen and (_ROTARY.match(name) or getattr(found, "__module__", None) == module.__name__):
            seen.add(name)
            key = (module.__name__, name)
            rotation = None
            if _ROTARY.match(name):
                rotation = rotations.get(key) or _ROTATIONS.get(key) or _recognise(module, name, found)
            if rotation is not None:
                rotations[key] = rotation
                continue
            inner: dict[tuple[str, str], _Rotation] = {}
            not_inner: set[str] = set()
            _collect(base, found, inner, not_inner, seen)
            if _ROTARY.match(name) and (not_inner or not inner):
                refused.add(_describe(module, name, found))
            else:  # it rotates by functions that ours replace
                rotations.update(inner)
                refused.update(not_inner)


def _names(function: Any) -> Iterator[str]:
    """Yield the names that a function's code reads: globals and attributes, in inner functions too."""
    function = getattr(function, "__func__", getattr(function, "fget", function))
    codes = [getattr(inspect.unwrap(function), "__code__", None)] if callable(function) else []
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            codes.extend(code.co_consts)


def _describe(module: ModuleType, name: str, function: Any) -> str:
    return f"{module.__name__}.{name}({', '.join(inspect.signature(function).parameters)})"


# The forms of cos and sin: each holds the angles in two equal parts, of which apply_rope takes one.
_PARTS: dict[str, Callable[[Tensor], Any]] = {
    "halves": lambda x: x.chunk(2, dim=-1),
    "pairs": lambda x: (x[..., ::2], x[..., 1::2]),
    "once": lambda x: (x, x),
}


def take_part(cos: Tensor, sin: Tensor, tables: str, checked: set[int], name: str) -> tuple[Tensor, Tensor]:
    """Return the part of cos and sin that apply_rope takes; `checked` are the widths whose form was compared before.

    Raises:
        ValueError: cos or sin does not hold every angle twice; `name` says for whom it must.
    """
    cos, same_cos = _PARTS[tables](cos)
    sin, same_sin = _PARTS[tables](sin)
    width = cos.shape[-1]
    if not (torch.compiler.is_compiling() or width in checked or cos.is_meta or isinstance(cos, FakeTensor)):
        if not (torch.equal(cos, same_cos) and torch.equal(sin, same_sin)):
            raise ValueError(f"cos or sin has two halves that differ, but must hold every angle twice for {name}")
        checked.add(width)
    return cos, sin


class _Convention(NamedTuple):
    """A rotary function's convention: its form of tables, its pairs, its direction, the order of its result."""

    tables: str
    interleaved: bool
    inverse: bool
    half_split_out: bool  # of interleaved pairs


def _recognise(module: ModuleType, name: str, original: Any) -> _Rotation | None:
    """Return our rotation that agrees with a modeling module's own; None if there is none."""
    parameters = inspect.signature(original).parameters
    names = tuple(name for name in parameters if name != "position_ids")
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())  # of a Hub kernel
    form = "pair" if variadic else _PARAMETERS.get(names)
    if form is None:
        return None
    axis = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in parameters else 1
    x, table = torch.ones(1, 1, 3, 4, device="cpu"), torch.ones(1, 3, 4, device="cpu")
    if form == "pair" and _call(original, x[:, :, 1:], x, table, table) is not None:
        return None  # its queries may be fewer than its keys
    alone = _call(original, x, None, table, table)
    for tables, interleaved, inverse in product(_PARTS, (False, True), (False, True)):
        for half_split_out in (False, True) if interleaved else (False,):
            convention = _Convention(tables, interleaved, inverse, half_split_out)
            functions = [_make(f"{module.__name__}.{name}", form, axis, convention, alone) for _ in range(2)]
            if _agree(original, functions[0], form, tables):
                return _Rotation(original, functions[1])  # the one that has not checked tables yet
    return None


_ATTRIBUTE = "_ropewalk_rotation"  # of a model's cos, which its layers share


class _CachedCall:
    """The call of a model's tables, for the layers after the first."""

    __slots__ = ("addresses", "axis", "call", "repeater", "sin")

    def __init__(self, repeater: Repeater, sin: Tensor, axis: int, addresses: tuple[int, int], call: RopeCall) -> None:
        self.repeater, self.sin, self.axis, self.addresses, self.call = repeater, sin, axis, addresses, call

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()  # a copy of the table keeps nothing, and any unpickler reads an empty set


def _keep(tables: tuple[Tensor, Tensor], call: RopeCall, repeater: Repeater, axis: int) -> None:
    """Let a model's cos keep the call with its rows for each token."""
    cos, sin = tables
    if type(cos) is Tensor and not (cos.requires_grad or sin.requires_grad or is_transformed()):
        # A view of cos would keep cos, which keeps it: these have no tensor that they are views of.
        call = call._replace(cos=call.cos.detach(), sin=call.sin.detach())
        setattr(cos, _ATTRIBUTE, _CachedCall(repeater, sin, axis, (cos.data_ptr(), sin.data_ptr()), call))


def _make(name: str, form: str, axis: int, convention: _Convention, alone: Any) -> Callable[..., Any]:
    """Make a rotary function of `apply_rope`, for what it takes, the default of its axis and its convention.

    `alone` is what the model's own returns for k = None: the rotated q, a tuple of it and None, or None if it raises.
    """
    checked, repeater = set[int](), Repeater()

    def rotate(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Any:
        may_repeat = k is not None and not convention.half_split_out and not is_dynamo_compiling()
        if may_repeat:
            cached = getattr(cos, _ATTRIBUTE, None)
            if (
                type(cached) is _CachedCall
                and cached.repeater is repeater
                and cached.sin is sin
                and cached.axis == unsqueeze_dim
                and cached.addresses == (cos.data_ptr(), sin.data_ptr())
            ):
                repeated = repeater.rotate(q, k, cached.call)  # type: ignore[arg-type]
                if repeated is not None:
                    return repeated
        heads = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - cos.ndim - 1
        if heads not in (-2, -3):
            raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, but must be the heads' for cos {tuple(cos.shape)}")
        tables = cos, sin
        cos, sin = cos if cos.ndim > 2 else cos[None], sin if sin.ndim > 2 else sin[None]
        cos, sin = take_part(cos, sin, convention.tables, checked, name)
        layout = "bthd" if heads == -2 else "bhtd"
        flags = RopeFlags(
            layout,
            convention.interleaved,
            convention.inverse,
            rotary_dim=q.shape[-1] if convention.half_split_out else None,
        )
        tokens = 1 if heads == -2 else 2
        are_rows = (
            q.ndim == 4 and cos.ndim == 3 and cos.shape[:2] in ((1, q.shape[tokens]), (q.shape[0], q.shape[tokens]))
        )
        if may_repeat and k is not None and are_rows:
            call = RopeCall(cos, sin, None, None, 0, flags)
            _keep(tables, call, repeater, unsqueeze_dim)
            repeated = repeater.rotate(q, k, call)
            if repeated is not None:
                return repeated
            repeater.learn(q, k, call)
        out = apply_rope(
            q,
            k,
            cos,
            sin,
            layout=layout,
            interleaved=flags.interleaved,
            inverse=flags.inverse,
            rotary_dim=flags.rotary_dim,
        )
        if not convention.half_split_out:
            return out
        return _split_pairs(out) if k is None else tuple(_split_pairs(x) for x in out)

    def rotate_pair(
        q: Tensor,
        k: Tensor | None = None,
        cos: Any = None,
        sin: Any = None,
        unsqueeze_dim: int = axis,
        *,
        position_ids: None = None,
    ) -> Any:
        if position_ids is not None:
            raise ValueError(f"position_ids were passed to {name}, but must be None for Ropewalk's")
        if k is None:
            if alone is None:
                raise ValueError(f"k is None, but must be a tensor for {name}")
            out = rotate(q, None, cos, sin, unsqueeze_dim)
            return (out, None) if isinstance(alone, tuple) else out
        return rotate(q, k, cos, sin, unsqueeze_dim)

    def rotate_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        if q.ndim > 3:
            return rotate(q, k, cos, sin, -2)
        q, k = rotate(q[None], k[None], cos, sin, -2)
        return q[0], k[0]

    def rotate_single(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = axis) -> Any:
        return rotate(x, None, cos, sin, unsqueeze_dim)

    by_form: dict[str, Callable[..., Any]] = {"pair": rotate_pair, "vision": rotate_vision, "single": rotate_single}
    return by_form[form]


def _split_pairs(x: Tensor) -> Tensor:
    """Put the features of interleaved pairs into half-split order."""
    out: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return out


@torch.no_grad()
def _agree(original: Any, ours: Any, form: str, tables: str) -> bool:
    """Test whether two functions rotate alike: in both layouts, and half of the features if the model's own can.

    A feature is a·cos ± b·sin: three roundings, of numbers up to |a| + |b|.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 16, generator=generator, device="cpu") for heads in (3, 2))
    budget = 3 * torch.finfo(torch.float32).eps * 2 * float(max(q.abs().max(), k.abs().max()))
    for rotary_dim, axis in product((16, 8), (1, 2)):
        angles = 6 * torch.rand(2, 5, rotary_dim // 2, generator=generator, device="cpu")
        if tables != "once":
            angles = angles.repeat(1, 1, 2) if tables == "halves" else angles.repeat_interleave(2, dim=-1)
        inputs = [*((q, k) if axis == 1 else (q.transpose(1, 2), k.transpose(1, 2))), angles.cos(), angles.sin()]
        keywords = {"unsqueeze_dim": axis}
        if form == "single":
            del inputs[1]
        elif form == "vision":  # packed: (T, H, D), and (T, R)
            inputs, keywords = [x[0] for x in (q.transpose(1, 2), k.transpose(1, 2), *inputs[2:])], {}
        try:
            theirs = original(*inputs, **keywords)
        except Exception:  # it does not support such a table
            if rotary_dim == 16:
                return False
            continue
        theirs = (theirs,) if form == "single" else theirs
        if not isinstance(theirs, tuple) or len(theirs) != len(inputs) - 2:
            return False
        actual = ours(*(x.double() for x in inputs), **keywords)
        for a, b in zip((actual,) if form == "single" else actual, theirs, strict=True):
            if not isinstance(b, Tensor) or a.shape != b.shape or not float((a - b).abs().max()) <= budget:
                return False
    return True


def _call(original: Any, *inputs: Tensor | None) -> Any:
    """Call a rotary function; None if it raises."""
    try:
        return original(*inputs)
    except Exception:
        return None

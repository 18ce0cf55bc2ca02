"""The rotation of transformers' models by `ropewalk.apply_rope`, which replaces the models' own function."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from ropewalk.ops.rope.api import apply_rope

_ROTATE = "apply_rotary_pos_emb"
_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]  # and position_ids, if they are not passed


@dataclass
class _Rotation:
    """The rotations of a modeling module, its own and ours, and the number of handles that keep ours."""

    original: Any
    ours: Any
    handles: int = 0


_ROTATIONS: dict[str, _Rotation] = {}  # by the name of the modeling module


class RopeHandle:
    """The handle of `use_ropewalk_rope`: `modules` it changed, and `remove`, or the end of a `with`, to undo it."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self.modules = modules
        self._is_removed = False

    def remove(self) -> None:
        """Restore the models' own functions, unless another handle keeps ours. A second call does nothing.

        Raises:
            RuntimeError: other code has replaced a function since, and it was left as it is.
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
            raise RuntimeError(f"{_ROTATE} was replaced by other code since, and left as it is, in {', '.join(lost)}")

    def __enter__(self) -> RopeHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def use_ropewalk_rope(model: nn.Module) -> RopeHandle:
    """Make a transformers model rotate queries and keys by `ropewalk.apply_rope`, both in one launch.

    It replaces `apply_rotary_pos_emb` in the modules of the model's classes, and so for every model of those classes in
    this process. First it calls that function with random numbers, to recognise its rotation: half-split pairs (Llama,
    Qwen, Gemma), of a part of the head (GPT-NeoX, Phi), by tables that hold every angle once (gpt-oss), interleaved
    pairs (Cohere, GLM, ERNIE 4.5), the other direction (NanoChat). Any other rotation raises. The form of the model's
    cos and sin is checked once, in the first call that torch.compile does not trace. Rotations by functions of other
    names, as in some vision towers and in DeepSeek's interleaved models, stay the model's own.

    The arithmetic is in float32 and rounded once, to q's dtype, where the model's own rounds each step.

    Args:
        model: a model of transformers, or one that has such models inside.

    Returns:
        A `RopeHandle`: `.modules`, the names of the modules; `.remove()`; and a context manager.

    Raises:
        ValueError: no module of the model has such a function, or one has another rotation: then nothing is replaced.
            In the forward: cos and sin in another form.

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
        raise ValueError(f"{type(model).__name__} has no {_ROTATE} in the modules of its classes, but must have it")
    rotations = {name: _ROTATIONS.get(name) or _replace(name, original) for name, original in found.items()}
    for name, rotation in rotations.items():
        _ROTATIONS[name] = rotation
        rotation.handles += 1
        setattr(sys.modules[name], _ROTATE, rotation.ours)
    return RopeHandle(tuple(rotations))


# The forms of cos and sin: each holds the angles in two equal parts, of which apply_rope takes one.
_PARTS: dict[str, Callable[[Tensor], Any]] = {
    "halves": lambda x: x.chunk(2, dim=-1),
    "pairs": lambda x: (x[..., ::2], x[..., 1::2]),
    "once": lambda x: (x, x),
}


def _replace(name: str, original: Any) -> _Rotation:
    """Return the rotation that agrees with a modeling module's own."""
    parameters = inspect.signature(original).parameters
    variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())  # of a Hub kernel
    if variadic or [name for name in parameters if name != "position_ids"] == _PARAMETERS:
        for kind in product(_PARTS, (False, True), (False, True)):
            if _agree(original, _rotation(name, *kind), kind[0]):
                return _Rotation(original, _rotation(name, *kind))  # a new one, which has not checked tables yet
    signature = f"{name}.{_ROTATE}({', '.join(parameters)})"
    raise ValueError(f"{signature} must stay: apply_rope does not support its rotation")


def _rotation(name: str, table: str, interleaved: bool, inverse: bool) -> Callable[..., Any]:
    """Make an `apply_rotary_pos_emb` of `apply_rope`, for a form of tables, a kind of pairs and a direction."""
    parts, is_checked = _PARTS[table], False

    def rotate(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, position_ids: None = None
    ) -> Any:
        nonlocal is_checked
        if position_ids is not None:
            raise ValueError(f"position_ids were passed to {name}.{_ROTATE}, but must be None for Ropewalk's")
        heads = unsqueeze_dim if unsqueeze_dim < 0 else unsqueeze_dim - cos.ndim - 1
        if heads not in (-2, -3):
            raise ValueError(f"unsqueeze_dim is {unsqueeze_dim}, but must be the heads' for cos {tuple(cos.shape)}")
        cos, same_cos = parts(cos if cos.ndim > 2 else cos[None])
        sin, same_sin = parts(sin if sin.ndim > 2 else sin[None])
        if not (is_checked or torch.compiler.is_compiling() or cos.is_meta or isinstance(cos, FakeTensor)):
            if not (torch.equal(cos, same_cos) and torch.equal(sin, same_sin)):
                raise ValueError(f"cos or sin does not hold every angle twice, but must for {name}.{_ROTATE}")
            is_checked = True
        layout = "bthd" if heads == -2 else "bhtd"
        return apply_rope(q, k, cos, sin, layout=layout, interleaved=interleaved, inverse=inverse)

    return rotate


@torch.no_grad()
def _agree(original: Any, ours: Any, table: str) -> bool:
    """Test whether two functions rotate alike: in both layouts, and half of the features if the model's own can.

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
        except Exception:  # it does not support such a table
            if rotary_dim == 16:
                return False
            continue
        if not isinstance(theirs, tuple) or len(theirs) != 2:
            return False
        for a, b in zip(ours(*(x.double() for x in given), axis), theirs, strict=True):
            if not isinstance(b, Tensor) or a.shape != b.shape or not float((a - b).abs().max()) <= budget:
                return False
    return True

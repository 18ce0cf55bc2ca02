"""QK-norm and rotation of transformers' attention layers in one launch, by `ropewalk.apply_rope` with a `QKNorm`.

Shape letters: B batch, T tokens, H query heads, K key heads, D head dim, R rotated features.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ropewalk.integrations.huggingface.checkpoints import hold_in_checkpoints
from ropewalk.integrations.huggingface.rotation import take_part
from ropewalk.ops.rope.api import apply_rope
from ropewalk.ops.rope.norm import QKNorm

# The names of a layer's norms of q and k. A layer that has one of these names is compared, or refused.
_NORMS = (
    ("q_norm", "k_norm"),
    ("qk_norm", "qk_norm"),  # one without a weight for both: Llama 4
    ("query_layernorm", "key_layernorm"),  # Hunyuan
    ("q_layernorm", "k_layernorm"),
)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_CACHES = ("cache", "past_key_values")  # the name of a forward's cache, since transformers 5.24 and before
_PARAMETERS = [["self", "hidden_states", "position_embeddings", "attention_mask", name, "kwargs"] for name in _CACHES]
_PROBE = "ropewalk_probe"  # an attention implementation, while layers are compared
# The largest relative difference of two layers in float32: about 100 roundings.
_TOLERANCE = 100 * torch.finfo(torch.float32).eps

_ON_CPU: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are


class _Norm(NamedTuple):
    """The convention of a layer's norms: the fields of a QKNorm, and the names of its modules."""

    q_name: str
    k_name: str
    eps: float
    offset: float
    across_heads: bool
    after: bool = False


class _LayerForward:
    """An attention layer's forward by `apply_rope` with a norm, in place of its class's; `handles` keep it.

    `is_complex` says that position_embeddings is one complex tensor, of interleaved pairs, rather than cos and sin.
    """

    def __init__(self, layer: Any, name: str, norm: _Norm, is_complex: bool, checked: set[int]) -> None:
        functions = inspect.unwrap(type(layer).forward).__globals__
        self.layer = layer
        self.name = name
        self.norm = norm
        self.is_complex = is_complex
        self.checked = checked  # the widths of tables whose form was compared
        self.is_gated = layer.q_proj.out_features == 2 * layer.o_proj.in_features
        self.is_windowed = hasattr(layer, "sliding_window")
        self.cache_name = next(x for x in _CACHES if x in inspect.signature(type(layer).forward).parameters)
        self.interface = functions["ALL_ATTENTION_FUNCTIONS"]
        self.eager = functions["eager_attention_forward"]
        self.handles = 0

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        *,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        cache = past_key_values if cache is None else cache
        per_token = hidden_states.shape[:-1]
        q = layer.q_proj(hidden_states)
        gate = None
        if self.is_gated:  # each head has its gate beside q
            q, gate = q.view(*per_token, -1, 2 * layer.head_dim).chunk(2, dim=-1)
        else:
            q = q.view(*per_token, -1, layer.head_dim)
        k = layer.k_proj(hidden_states).view(*per_token, -1, layer.head_dim)
        v = layer.v_proj(hidden_states).view(*per_token, -1, layer.head_dim)
        if self.is_complex:
            angles = position_embeddings.to(q.device)
            cos, sin = angles.real, angles.imag
        else:
            cos, sin = position_embeddings
            cos, sin = take_part(cos, sin, "halves", self.checked, self.name)
        for norm_name in (self.norm.q_name, self.norm.k_name):
            if _has_hooks(getattr(layer, norm_name)):
                raise ValueError(
                    f"{self.name}.{norm_name} has hooks, as fully_shard and offloading add them, but must have none "
                    f"under use_ropewalk_layers, which reads its weight: shard the layer as a whole"
                )
        norm = QKNorm(
            getattr(getattr(layer, self.norm.q_name), "weight", None),
            getattr(getattr(layer, self.norm.k_name), "weight", None),
            eps=self.norm.eps,
            offset=self.norm.offset,
            after=self.norm.after,
            across_heads=self.norm.across_heads,
        )
        q, k = apply_rope(q, k, cos, sin, interleaved=self.is_complex, norm=norm)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            # transformers 5.24 and later give the cache the other arguments too.
            options = {"kwargs": dict(kwargs)} if self.cache_name == "cache" else {}
            k, v = cache.update(k, v, layer.layer_idx, **options)
        if self.is_windowed:
            kwargs["sliding_window"] = layer.sliding_window
        out, weights = self.interface.get_interface(layer.config._attn_implementation, self.eager)(
            layer,
            q,
            k,
            v,
            attention_mask,
            dropout=layer.attention_dropout if layer.training else 0.0,
            scaling=layer.scaling,
            **kwargs,
        )
        out = out.reshape(*per_token, -1).contiguous()
        if gate is not None:
            out = out * torch.sigmoid(gate.reshape(*per_token, -1))
        return layer.o_proj(out), weights


class LayersHandle:
    """The handle of `use_ropewalk_layers`, and a context manager.

    `layers` are the names of the attention layers that it changed; `remove`, or the end of a `with`, undoes it.
    """

    def __init__(self, forwards: dict[str, _LayerForward], checkpoints: tuple[Any, ...] = ()) -> None:
        self.layers = tuple(forwards)
        self._forwards = forwards
        self._checkpoints = checkpoints

    def __repr__(self) -> str:
        removed = "" if self._forwards else ", removed"
        return f"<LayersHandle of {', '.join(self.layers)}{removed}>"

    def remove(self) -> None:
        """Restore the layers' own forward, unless another handle keeps ours. A second call does nothing.

        Raises:
            RuntimeError: other code has replaced a forward since, and it was left as it is.
        """
        held, self._forwards = self._forwards, {}
        for checkpoint in self._checkpoints:
            checkpoint.release()
        lost = []
        for name, forward in held.items():
            forward.handles -= 1
            if forward.handles > 0:
                continue
            if vars(forward.layer).get("forward") is forward:
                del forward.layer.forward
            else:
                lost.append(f"{name}.forward")
        if lost:
            raise RuntimeError(f"other code has replaced {', '.join(lost)} since: left as it is")

    def __enter__(self) -> LayersHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def use_ropewalk_layers(model: nn.Module) -> LayersHandle:
    """Make a transformers model normalise and rotate q and k in one launch, by `ropewalk.apply_rope` with a `QKNorm`.

    It replaces the forward of every attention layer that has norms of q and k (Qwen3, Qwen3-MoE, Qwen3-VL, Qwen3-Next,
    Qwen3.5, Gemma 3, OLMo 2, GLM-4.5, Llama 4). The new forward calls the layer's own projections, reads the weights
    of its norms, and updates the cache, attends and gates as the layer does. It trains every parameter, and leaves
    the state_dict as it is. A layer without such norms, such as Llama 4's without rotation, keeps its forward.

    First each norm is called with chosen numbers, to find its eps, its offset and whether its statistic is over all
    heads. Then both forwards are called with small random tensors in float32: tables, weights of the norms and
    projections. Queries, keys, the attention's arguments, the output and the gradients must agree.

    The arithmetic is in float32 and rounded once, to q's dtype, where the model's own rounds each step. A norm that has
    hooks, as fully_shard adds to a module, raises in the forward: its weight is read, and its own forward does not run.

    A backward may follow the removal: layers that transformers checkpoints (`gradient_checkpointing_enable`, called
    before) recompute by the forward that they ran. Around other checkpoints the handle must outlast the backward.

    Args:
        model: a model of transformers, or one that has such models inside, or a part, such as a language model.

    Returns:
        A `LayersHandle`: `.layers`, the names of the layers; `.remove()`; and a context manager.

    Raises:
        ValueError: no layer has norms of q and k, or one computes something else (Cohere's LayerNorm), and is named
            with the reason: then nothing is replaced. In the forward: cos and sin in another form.

    Example:
        >>> import importlib.util
        >>> from ropewalk.integrations import huggingface
        >>> if importlib.util.find_spec("transformers") is not None:
        ...     from transformers import Qwen3Config, Qwen3ForCausalLM
        ...     sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
        ...     model = Qwen3ForCausalLM(Qwen3Config(vocab_size=100, num_key_value_heads=2, head_dim=16, **sizes))
        ...     with huggingface.use_ropewalk_layers(model):
        ...         logits = model(torch.tensor([[1, 2, 3]])).logits
    """
    forwards: dict[str, _LayerForward] = {}
    refused: list[str] = []
    checked = set[int]()
    names = {name for pair in _NORMS for name in pair}
    for path, layer in model.named_modules():
        if names.isdisjoint(layer._modules):
            continue
        own = vars(layer).get("forward")
        name = path or type(layer).__name__
        if isinstance(own, _LayerForward):
            forwards[name] = own
            continue
        found = _recognise(layer, name, checked)
        if isinstance(found, str):
            refused.append(f"{name} ({type(layer).__name__}) must keep its forward: {found}")
        else:
            forwards[name] = found
    if refused:
        raise ValueError("; ".join(refused))
    if not forwards:
        raise ValueError(
            f"{type(model).__name__} has no attention layer with norms of q and k, but must have one, with modules "
            f"such as q_norm and k_norm"
        )
    _install(forwards)
    return LayersHandle(forwards, hold_in_checkpoints(model, lambda: _held(forwards)))


def _install(forwards: dict[str, _LayerForward]) -> None:
    for forward in forwards.values():
        forward.layer.forward = forward
        forward.handles += 1


@contextmanager
def _held(forwards: dict[str, _LayerForward]) -> Iterator[None]:
    """Run our forwards again where a handle was removed since, as a recomputation must run what its forward ran."""
    missing = {name: forward for name, forward in forwards.items() if "forward" not in vars(forward.layer)}
    _install(missing)
    try:
        yield
    finally:
        LayersHandle(missing).remove()


def _recognise(layer: Any, name: str, checked: set[int]) -> _LayerForward | str:
    """Return our forward that agrees with a layer's own; the reason, if there is none."""
    missing = [part for part in _PROJECTIONS if not hasattr(getattr(layer, part, None), "in_features")]
    missing += [
        field
        for field in ("config", "head_dim", "scaling", "attention_dropout", "layer_idx")
        if not hasattr(layer, field)
    ]
    pair = next((pair for pair in _NORMS if all(isinstance(getattr(layer, x, None), nn.Module) for x in pair)), None)
    if missing or pair is None:
        return f"it has no {', '.join(missing) or 'norm of both q and k'}"
    if "forward" in vars(layer):
        return "other code has replaced it"
    if list(inspect.signature(type(layer).forward).parameters) not in _PARAMETERS:
        return f"its parameters are not {', '.join(_PARAMETERS[0])}"
    functions = inspect.unwrap(type(layer).forward).__globals__
    if not {"ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"} <= functions.keys():
        return "it does not use transformers' attention interface"
    norm = _read_norms(layer, *pair)
    if isinstance(norm, str):
        return norm
    for is_complex in (False, True):
        for after in (False, True):
            ours = _LayerForward(layer, name, norm._replace(after=after), is_complex, checked)
            if _agree(layer, ours):
                return ours
    return f"apply_rope with {_describe(norm)}, before or after the rotation, computes something else"


def _has_hooks(norm: nn.Module) -> bool:
    return bool(norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks)


def _describe(norm: _Norm) -> str:
    return f"QKNorm(eps={norm.eps:g}, offset={norm.offset:g}, across_heads={norm.across_heads})"


def _read_norms(layer: Any, q_name: str, k_name: str) -> _Norm | str:
    """Return the convention of a layer's norms, found by calling them; the reason, if they are none of ours."""
    n_features = {q_name: layer.o_proj.in_features, k_name: layer.k_proj.out_features}
    conventions = set()
    for name, width in n_features.items():
        norm = getattr(layer, name)
        shapes = {key: tuple(parameter.shape) for key, parameter in norm.named_parameters()}
        kind = f"its {name} ({type(norm).__name__})"
        if shapes.keys() - {"weight"}:
            return f"{kind} has parameters beside a weight: {', '.join(sorted(shapes))}"
        if getattr(norm, "eps", 0.0) is None:
            return f"{kind} has eps None, so that it depends on the dtype"
        if "forward" in vars(norm) or _has_hooks(norm):
            return f"{kind} has hooks or a replaced forward, which would not run"
        across_heads = shapes.get("weight") == (width,) != (layer.head_dim,)
        size = (width,) if across_heads else (width // layer.head_dim, layer.head_dim)
        try:
            found = _read_norm(norm, size)
        except Exception as error:
            return f"{kind} does not support features {size}: {error}"
        if found is None:
            return f"{kind} is no RMS norm of {'all heads' if across_heads else 'a head'}"
        conventions.add((*found, across_heads, width == layer.head_dim))
    # One key head: its own statistic is that of all heads.
    across = {across_heads for *_, across_heads, is_one_head in conventions if not is_one_head} or {False}
    if len({(eps, offset) for eps, offset, *_ in conventions}) > 1 or len(across) > 1:
        return f"its {q_name} and {k_name} have different conventions"
    (eps, offset, *_), *_ = conventions
    return _Norm(q_name, k_name, eps, offset, across.pop())


@torch.no_grad()
def _read_norm(norm: nn.Module, size: tuple[int, ...]) -> tuple[float, float] | None:
    """Return the eps and offset of a norm of features of a size; None if it is no RMS norm.

    Of numbers ±c the norm gives ±c · (c² + eps)^(−1/2) · (weight + offset). Where c² is near eps that tells eps.
    """
    signs = torch.ones(size, **_ON_CPU)
    signs[..., ::2] = -1

    def scale(c: float, weight: float) -> float:
        return float((_with_weight(norm, lambda x: torch.full_like(x, weight))(c * signs) * signs).mean())

    has_weight = any(True for _ in norm.parameters())
    offset = float(f"{scale(1e6, 0.0):.6g}") if has_weight else 0.0
    if has_weight and offset not in (0.0, 1.0):  # others are read to float32's precision alone
        return None
    eps, c = 0.0, 1e-3
    for _ in range(3):
        ratio = scale(c, 1.0 - offset) ** -2 - 1
        eps = ratio * c**2 if ratio > 4 * torch.finfo(torch.float32).eps else 0.0
        if eps == 0.0:
            break
        c = math.sqrt(eps)
    eps = float(f"{eps:.5g}")
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, **_ON_CPU) for x in norm.parameters()]
    weight = offset + weights[0] if weights else torch.ones((), **_ON_CPU)
    x = torch.randn(4, *size, generator=generator, **_ON_CPU)
    x = x * torch.logspace(-3, 0, 4, **_ON_CPU).view(4, *(1 for _ in size))
    theirs = _with_weight(norm, lambda _: weights[0])(x)
    truth = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return (eps, offset) if _is_close(theirs, truth) else None


def _with_weight(norm: nn.Module, make: Callable[[Tensor], Tensor]) -> Any:
    """Copy a norm, with another weight, if it has one, in float32 on the CPU."""
    norm_copy = copy.copy(norm)
    weights = {name: nn.Parameter(make(torch.empty(x.shape, **_ON_CPU))) for name, x in norm.named_parameters()}
    vars(norm_copy)["_parameters"] = {**norm._parameters, **weights}
    return norm_copy


class _Cache:
    """A cache that keeps nothing, and the arguments of its updates beside k and v."""

    def __init__(self) -> None:
        self.updates: list[Any] = []

    def update(self, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        self.updates.append((args, keywords))
        return k, v


@torch.inference_mode(False)
def _agree(layer: Any, ours: _LayerForward) -> bool:
    """Test whether a layer's own forward and ours agree: with all features rotated, and half if its own can."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, **_ON_CPU)

    hidden, width = random(2, 5, 8), layer.o_proj.in_features
    hidden = hidden * torch.logspace(-3, 0, 5, **_ON_CPU).view(5, 1)  # where eps counts, and where it does not
    substitutes: dict[str, nn.Module] = {}
    for name in _PROJECTIONS:
        inputs, outputs = (width, 8) if name == "o_proj" else (8, getattr(layer, name).out_features)
        substitutes[name] = nn.Linear(inputs, outputs, bias=False, device="meta")
        weight = random(outputs, inputs) / math.sqrt(inputs)
        substitutes[name]._parameters["weight"] = nn.Parameter(weight)
    for name in {ours.norm.q_name, ours.norm.k_name}:
        substitutes[name] = _with_weight(getattr(layer, name), lambda x: 1 + 0.3 * random(*x.shape))
    layer_copy = copy.copy(layer)
    config = copy.copy(layer.config)
    vars(config)["_attn_implementation_internal"] = _PROBE
    vars(layer_copy).update(_modules={**layer._modules, **substitutes}, config=config, training=True)
    ours_copy = _LayerForward(layer_copy, ours.name, ours.norm, ours.is_complex, set())
    for rotary_dim in (layer.head_dim, layer.head_dim // 2):
        angles = 6 * torch.rand(2, 5, rotary_dim // 2, generator=generator, **_ON_CPU)
        # A factor in the tables, as YaRN's: without a weight it alone tells before from after.
        tables: Any = torch.polar(torch.full_like(angles, 0.75), angles)
        if not ours.is_complex:
            tables = tuple(torch.cat((x, x), dim=-1) for x in (tables.real, tables.imag))
        keywords = {"position_embeddings": tables, "attention_mask": random(1)}
        cotangent = random(2, 5, 8)
        try:
            theirs = _run(
                lambda *xs, **keywords: type(layer).forward(layer_copy, *xs, **keywords),
                ours_copy,
                hidden,
                keywords,
                cotangent,
            )
        except Exception:  # it does not support such tables
            if rotary_dim == layer.head_dim:
                return False
            continue
        try:
            actual = _run(ours_copy, ours_copy, hidden, keywords, cotangent)
        except (TypeError, ValueError, RuntimeError):
            return False
        if actual[0] != theirs[0] or len(actual[1]) != len(theirs[1]):
            return False
        if not all(_is_close(a, b) for a, b in zip(actual[1], theirs[1], strict=True)):
            return False
    return True


def _run(
    forward: Callable[..., Any], ours: _LayerForward, hidden: Tensor, inputs: dict[str, Any], cotangent: Tensor
) -> tuple[Any, list[Tensor]]:
    """Run a forward; return its attention's and cache's arguments, and q, k, v, the output and gradients."""
    calls: list[Any] = []
    tensors: list[Tensor] = []

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **keywords: Any) -> tuple[Tensor, None]:
        calls.append((module is ours.layer, mask is inputs["attention_mask"], keywords))
        tensors.extend((q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * ours.layer.scaling).softmax(dim=-1)
        return (scores @ v).transpose(1, 2).contiguous(), None

    hidden = hidden.clone().requires_grad_()
    cache = _Cache()
    ours.interface[_PROBE] = attend  # of this interface object alone
    try:
        with torch.autocast("cpu", enabled=False):
            out, _ = forward(hidden, **inputs, **{ours.cache_name: cache}, position_ids=None, use_cache=False)
            without, _ = forward(hidden, **inputs)
            gradients = torch.autograd.grad(out, [hidden, *ours.layer.parameters()], cotangent)
    finally:
        del ours.interface[_PROBE]
    return (calls, cache.updates), [*tensors, out, without, *gradients]


def _is_close(actual: Tensor, truth: Tensor) -> bool:
    """Compare each row by its largest number: the tokens' magnitudes, and so their gradients', differ widely."""
    if actual.shape != truth.shape:
        return False
    scale = truth.abs().amax(dim=-1, keepdim=True)
    return bool(((actual - truth).abs() <= _TOLERANCE * scale).all())

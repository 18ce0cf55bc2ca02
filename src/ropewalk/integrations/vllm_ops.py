"""Integration with vLLM: its rotary embedding by Ropewalk's operator, as an out-of-tree operator.

vLLM looks up each custom operator's class by name when it is instantiated (`CustomOp.register_oot`), so that a subclass
registered before the model is built replaces it. Registration is explicit: set
`VLLM_PLUGINS=ropewalk`, or call `register()` in every process that builds a model.

If vLLM compiles the model, its custom operators are off by default, and plain PyTorch rotates: pass
`compilation_config={"custom_ops": ["+rotary_embedding"]}`, the name of vLLM's own operator. vLLM's compiler passes
fuse that operator alone: a compiled model may copy q and k around this one.

Written for vLLM 0.12 to 0.33.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_PLUGIN = "ropewalk"  # the entry point's name, which VLLM_PLUGINS lists
_PARAMETERS = ["self", "positions", "query", "key"]
_SUPPORTED = "ropewalk.integrations.vllm_ops supports vLLM 0.12 to 0.33"


def plugin() -> None:
    """Call `register` if the environment variable VLLM_PLUGINS lists "ropewalk": vLLM's general plugin.

    Without VLLM_PLUGINS, vLLM calls the plugins of all installed packages, in each of its processes. Ropewalk then does
    nothing, as installing it does not mean that vLLM should use it.

    Example:
        $ VLLM_PLUGINS=ropewalk vllm serve MODEL --enforce-eager
    """
    if _PLUGIN in os.environ.get("VLLM_PLUGINS", "").split(","):
        register()


def register() -> list[str]:
    """Make every vLLM model that this process builds from now on rotate by `torch.ops.ropewalk.rotary_embedding`.

    It replaces vLLM's RotaryEmbedding and those of its subclasses that change the table alone (linear, NTK, YaRN and
    Llama 3 scaling among them). Subclasses that rotate in another way, such as M-RoPE, stay vLLM's. The new forward is
    that for CUDA and for out-of-tree platforms, which vLLM also runs on ROCm without AITER, and 0.12 on the CPU. A
    second call does nothing.

    Returns:
        The names of the vLLM classes that are replaced.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        RuntimeError: vLLM's interface is not the one that this module supports, or another plugin has registered its
            own class for one of these.

    Source: https://docs.vllm.ai/en/stable/design/custom_op/

    Example:
        >>> import importlib.util
        >>> from ropewalk.integrations import vllm_ops
        >>> if importlib.util.find_spec("vllm") is not None:
        ...     replaced = vllm_ops.register()
    """
    custom_op, rotary_embedding = _find_vllm()
    importlib.import_module("ropewalk.ops.rope.rotary_embedding")  # defines the operator
    # A class attribute in vLLM 0.12, the module's own later.
    registry = getattr(custom_op, "op_registry_oot", None)
    registry = custom_op.CustomOp.op_registry_oot if registry is None else registry
    classes = list(_same_rotation(rotary_embedding))
    for base in classes:
        other = registry.get(base.__name__)
        if other is not None and not _is_ours(other):
            raise RuntimeError(
                f"vLLM's {base.__name__} is already replaced by {other.__module__}.{other.__qualname__}, but must be "
                f"vLLM's own: load one of the two plugins"
            )
    for base in classes:
        if base.__name__ not in registry:
            ours: Any = type(f"Ropewalk{base.__name__}", (base,), {"forward_cuda": _forward, "forward_oot": _forward})
            custom_op.CustomOp.register_oot(ours, name=base.__name__)
            # The registration renamed it, but custom_ops switches the operator on and off by this name.
            ours.name = base.name
    return [base.__name__ for base in classes]


def _forward(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Rotate query and key in place, by a table of the query's dtype and device, as vLLM does."""
    matched = self._match_cos_sin_cache_dtype(query)
    # vLLM 0.12 overwrites the buffer and returns nothing; later ones return the table, and leave the buffer as it is
    # in compiled code.
    cos_sin_cache = self.cos_sin_cache if matched is None else matched
    torch.ops.ropewalk.rotary_embedding(positions, query, key, self.head_size, cos_sin_cache, self.is_neox_style)
    return query, key


def _is_ours(registered: Any) -> bool:
    return getattr(registered, "forward_cuda", None) is _forward


def _same_rotation(base: Any) -> Iterator[Any]:
    """Yield `base`, and vLLM's own subclasses of it with the same rotation."""
    yield base
    for subclass in base.__subclasses__():
        if not subclass.__module__.startswith("vllm."):
            continue
        if all(
            getattr(subclass, name) is getattr(base, name) for name in ("forward", "forward_native", "forward_cuda")
        ):
            yield from _same_rotation(subclass)


def _find_vllm() -> tuple[Any, Any]:
    """Return vLLM's module of custom operators and its RotaryEmbedding, after checking their interface."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError("vllm is not installed, but must be for this", name="vllm")
    try:
        version = importlib.import_module("vllm").__version__
        custom_op: Any = importlib.import_module("vllm.model_executor.custom_op")
        rotary_embedding = importlib.import_module("vllm.model_executor.layers.rotary_embedding").RotaryEmbedding
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"vLLM's interface is not supported: {error}; {_SUPPORTED}") from error
    for fault, holds in (
        ("CustomOp has no register_oot", hasattr(custom_op.CustomOp, "register_oot")),
        ("RotaryEmbedding is no CustomOp", issubclass(rotary_embedding, custom_op.CustomOp)),
        ("RotaryEmbedding has no name", hasattr(rotary_embedding, "name")),
        ("RotaryEmbedding has no forward_cuda(positions, query, key)", _parameters(rotary_embedding) == _PARAMETERS),
        ("RotaryEmbedding has no _match_cos_sin_cache_dtype", hasattr(rotary_embedding, "_match_cos_sin_cache_dtype")),
    ):
        if not holds:
            raise RuntimeError(f"the interface of vLLM {version} is not supported: its {fault}; {_SUPPORTED}")
    return custom_op, rotary_embedding


def _parameters(rotary_embedding: Any) -> list[str] | None:
    function = getattr(rotary_embedding, "forward_cuda", None)
    return None if function is None else list(inspect.signature(function).parameters)

"""A GPU that is imagined: which backend would run a call there, or why not, without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ropewalk import device as gpu
from ropewalk.ops.attention import backends
from ropewalk.ops.attention.backend import Refusal
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.hopper import support as hopper
from ropewalk.ops.attention.libraries import flash, flash_two_range, sdpa


@contextmanager
def imagined_gpu(capability: tuple[int, int] = (9, 0), flash_attn: int = 4) -> Iterator[None]:
    """Stand in for a GPU with cuDNN, flash-attn and Gluon."""
    answers: list[tuple[Any, str, Any]] = [
        (gpu, "capability", lambda device: capability),
        (gpu, "is_rocm", lambda: False),
        (gpu, "is_interpreted", lambda: False),
        (sdpa, "may_use_cudnn", lambda: True),
        (flash, "flash_version", lambda device: flash_attn),
        (flash, "load_flash", lambda version: (object, None)),
        (flash_two_range, "load_functions", lambda: ((object, object), None)),
        # A fake tensor means a tracer to flash-attn, which it does not support; and it has no address.
        (gpu, "is_fake", lambda x: False),
        (sdpa, "why_misaligned", lambda call: None),
        (flash, "why_misaligned", lambda call: None),
        (hopper, "why_missing", lambda: None),
    ]
    with ExitStack() as stack:
        for place, name, answer in answers:
            stack.enter_context(mock.patch.object(place, name, answer))
        yield


def on_gpu(x: Tensor) -> Tensor:
    """Return a tensor without memory that says that it is there; all else is as x's."""
    with FakeTensorMode():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda", requires_grad=x.requires_grad)


def refusal_on_gpu(impl: str, call: AttentionCall) -> Refusal | None:
    """Return a backend's refusal of a call as if its tensors were on the imagined GPU."""
    q, k, v = (on_gpu(x) for x in (call.q, call.k, call.v))
    return backends.why_not(backends.BACKENDS[impl], call._replace(q=q, k=k, v=v))

"""Calls that differ between two ranks: the error says in what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ropewalk import Alibi, QKNorm, ReRope, Rope
from ropewalk.parallel import SequenceLayout, api, context_parallel_attention, shard_sequence, unshard_sequence

T, H, D = 24, 2, 8

# What the two ranks pass, by what the error names.
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "causal": (True, False),
    "window": (3, (1, 2)),
    "dropout_p": (0.25, 0.5),
    "scale": (1.0, 2.0),
    "softcap": (None, 2.0),
    "deterministic": (None, True),
    "impl": (None, "reference"),
    "position": (Rope(100.0), ReRope(3)),
    "norm": (QKNorm(eps=0.1), QKNorm(eps=0.2)),
    "sinks": (torch.zeros(H), None),
    "gate": (torch.zeros(1, T // 2, H), None),
    "return_lse": (True, False),
    "sum_gradients": (True, False),
    "method": ("gather", "ring"),
}
SHOWN = {"window": ((2, 2), (1, 2))}
OF_TENSORS = {"the dtype of q", *(f"the shape of {name}, (B, H, T, D)," for name in "qkv")}
OF_LAYOUTS = {"layout.n_tokens", "layout.kind", "layout.cu_seqlens"}


def _differ(rank: int, name: str, values: tuple[Any, Any], call: Any) -> None:
    """The error names what differs, with both values."""
    with pytest.raises(ValueError, match="the call has other shapes or keywords on ranks") as caught:
        call()
    text = str(caught.value)
    assert f"{name} is " in text, text
    for place, value in enumerate(values):
        shown = api._describe(value) if name not in SHOWN else SHOWN[name][place]
        assert f"{shown!r} on rank {place}" in text, text


def check(rank: int) -> None:
    layout = SequenceLayout(dist.group.WORLD, T)
    x = shard_sequence(torch.ones(1, T, H, D), layout)
    kinds: list[Any] = []
    agree = api.agree

    def record(layout: SequenceLayout, kind: Any, error: Exception | None) -> None:
        kinds.append(kind)
        agree(layout, kind, error)

    api.agree = record

    def attend(*xs: torch.Tensor, **keywords: Any) -> Any:
        return context_parallel_attention(*(xs or (x, x, x)), **{"layout": layout, **keywords})

    attend(position=Alibi())
    ((*names_and_values,),) = kinds
    names = {name for name, _ in names_and_values}
    grads = {f"{name}.requires_grad" for name in "qkv"}
    assert names == {*DIFFERENT, *OF_TENSORS, *OF_LAYOUTS, *grads, "layout_of_tensors"}
    assert names_and_values[-1][0] == "method"  # it follows from others
    for name, values in DIFFERENT.items():
        given = {name: values[rank], **({"method": "ulysses"} if name == "dropout_p" else {})}
        _differ(rank, name, values, lambda given=given: attend(**given))
    half = x.half() if rank else x
    _differ(rank, "the dtype of q", ("torch.float32", "torch.float16"), lambda: attend(half, half, half))
    rows = x.expand(1 + rank, -1, -1, -1)
    shapes = (1, H, T // 2, D), (2, H, T // 2, D)
    _differ(rank, "the shape of q, (B, H, T, D),", shapes, lambda: attend(rows, rows, rows))
    grad = x.clone().requires_grad_(rank == 1)
    _differ(rank, "v.requires_grad", (False, True), lambda: attend(x, x, grad))
    turned = [x.transpose(1, 2) if rank else x] * 3
    names_of = ("bthd", "bhtd")
    _differ(rank, "layout_of_tensors", names_of, lambda: attend(*turned, layout_of_tensors=names_of[rank]))
    other = SequenceLayout(dist.group.WORLD, T, ("zigzag", "contiguous")[rank])
    _differ(rank, "layout.kind", ("zigzag", "contiguous"), lambda: attend(layout=other))
    other = SequenceLayout(dist.group.WORLD, T - rank)
    _differ(rank, "layout.n_tokens", (T, T - 1), lambda: attend(layout=other))
    bounds = (0, 5, T), (0, 6, T)
    other = SequenceLayout(dist.group.WORLD, T, cu_seqlens=torch.tensor(bounds[rank]))
    _differ(rank, "layout.cu_seqlens", bounds, lambda: attend(layout=other))
    _differ(
        rank, "dim", (1, 2), lambda: unshard_sequence(x[:, :, :, None] if rank == 0 else x[:, None], layout, 1 + rank)
    )
    attend()  # both are still in step

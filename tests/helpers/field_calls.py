"""For each field of `AttentionCall` two calls of attention that differ in it, and records with a field more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from helpers.modes import ON_GPU
from ropewalk import Alibi, BlockLists, ReRope, Rope, T5Bias
from ropewalk.ops.attention.call import AttentionCall

B, H, K = 2, 4, 2
T, D, PAGE = (256, 64, 16) if ON_GPU else (32, 16, 8)
Keywords = dict[str, Any]


class Change(NamedTuple):
    """Two calls: the keywords of both, those of the second one, and how their keys lie."""

    makes: Callable[[torch.device], Keywords]
    common: Callable[[torch.device], Keywords] = lambda device: {}
    kind: str = "dense"  # or "packed", "pages", "int8 pages"


def _ints(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _positions(device: torch.device, step: int) -> Tensor:
    return step * torch.arange(T, device=device)[None]


def _mask(device: torch.device) -> Tensor:
    distance = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)
    return (distance % 3 != 1)[None, None]


def _slopes(device: torch.device) -> Tensor:
    return torch.linspace(0.1, 0.5, H, device=device)


def _table(device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, 8 * H, device=device).view(8, H).requires_grad_()


def _bounds(device: torch.device) -> Keywords:
    return {"cu_seqlens_q": _ints(device, 0, T // 2, T), "layout": "thd"}


def _scales(device: torch.device, name: str, factor: float) -> Keywords:
    shape = (B * T // PAGE, PAGE, K)
    scales = {"k_scale": torch.full(shape, 0.02, device=device), "v_scale": torch.full(shape, 0.02, device=device)}
    return {**scales, name: scales[name] * factor}


def _order(device: torch.device, *, flips: bool) -> Keywords:
    table = torch.arange(B * T // PAGE, dtype=torch.int32, device=device).view(B, -1)
    return {"block_table": table.flip(0) if flips else table, "key_lengths": _ints(device, T, T)}


CHANGES: dict[str, Change] = {
    "scheme": Change(lambda device: {"position": Rope()}),
    "tables": Change(lambda device: {"position": Rope()}),
    "causal": Change(lambda device: {"causal": True}),
    "window_left": Change(lambda device: {"window": (3, -1)}),
    "window_right": Change(lambda device: {"window": (-1, 1)}),
    "mask": Change(lambda device: {"mask": _mask(device)}),
    "key_lengths": Change(lambda device: {"key_lengths": _ints(device, T - 9, T)}),
    "key_starts": Change(lambda device: {"key_starts": _ints(device, 0, 5)}),
    "query_starts": Change(lambda device: {"query_starts": _ints(device, -4, -1)}, lambda device: {"causal": True}),
    "cu_seqlens_q": Change(lambda device: {"cu_seqlens_q": _ints(device, 0, 5, T)}, _bounds, "packed"),
    "cu_seqlens_k": Change(lambda device: {"cu_seqlens_k": _ints(device, 0, 5, T)}, _bounds, "packed"),
    "block_table": Change(lambda device: _order(device, flips=True), kind="pages"),
    "positions_q": Change(lambda device: {"positions_q": _positions(device, 2)}, lambda device: {"position": Rope()}),
    "positions_k": Change(lambda device: {"positions_k": _positions(device, 2)}, lambda device: {"position": Rope()}),
    "blocks": Change(lambda device: {"blocks": BlockLists.causal(T, device=device)}),
    "scale": Change(lambda device: {"scale": 0.7}),
    "softcap": Change(lambda device: {"softcap": 0.5}),
    "k_scale": Change(lambda device: _scales(device, "k_scale", 1.5), kind="int8 pages"),
    "v_scale": Change(lambda device: _scales(device, "v_scale", 1.5), kind="int8 pages"),
    "gate": Change(lambda device: {"gate": _slopes(device).expand(B, T, H)}),
    "sinks": Change(lambda device: {"sinks": _slopes(device)}),
    "dropout_p": Change(lambda device: {"dropout_p": 0.5}),
    "seed": Change(lambda device: {"dropout_p": 0.5}),
    "precision": Change(lambda device: {"precision": "int8"}),
    "keys_rotated": Change(lambda device: {"keys_rotated": True}, lambda device: {"position": Rope()}),
    "score_mod": Change(lambda device: {"position": Alibi()}),
    "score_mod_params": Change(
        lambda device: {"position": Alibi(_slopes(device))}, lambda device: {"position": Alibi()}
    ),
    "n_learned_params": Change(lambda device: {"position": T5Bias(_table(device), max_distance=20)}),
    "far": Change(lambda device: {"position": ReRope(5), "causal": True}, lambda device: {"position": Rope()}),
    "return_lse": Change(lambda device: {"return_lse": True}),
    "return_max_logits": Change(lambda device: {"return_max_logits": True}),
    "row_logits": Change(lambda device: {"return_max_logits": True}),
    "deterministic": Change(lambda device: {"deterministic": True}),
}
WITHOUT_CHANGE = ("q", "k", "v")  # the tests draw others
ONE_RESULT = ("deterministic", "needs_backward")  # those that change no number
AFTER_CHOICE = ("gate", "seed", "row_logits", "needs_backward")  # `make_call` leaves them out


def tensors(kind: str, device: torch.device, dtype: torch.dtype, queries: int = T) -> list[Tensor]:
    """q, k and v."""
    if kind == "packed":
        return [torch.randn(T, n, D, device=device).to(dtype) for n in (H, K, K)]
    q = torch.randn(B, queries, H, D, device=device).to(dtype)
    if kind == "dense":
        return [q, *(torch.randn(B, T, K, D, device=device).to(dtype) for _ in "kv")]
    shape = (B * T // PAGE, PAGE, K, D)
    if kind == "pages":
        return [q, *(torch.randn(shape, device=device).to(dtype) for _ in "kv")]
    return [q, *(torch.randint(-120, 120, shape, device=device).to(torch.int8) for _ in "kv")]


def keywords_of(field: str, device: torch.device) -> tuple[Keywords, Keywords]:
    """Return the keywords of both calls."""
    change = CHANGES[field]
    common = change.common(device)
    if change.kind.endswith("pages"):
        common |= _order(device, flips=False)
    if change.kind == "int8 pages":
        common |= _scales(device, "k_scale", 1.0)
    return common, {**common, **change.makes(device)}


def in_pages(xs: list[Tensor], keywords: Keywords) -> tuple[list[Tensor], Keywords]:
    """Return a dense call with its keys in pages."""
    q, *kv = xs
    table = {"key_lengths": _ints(q.device, T, T), **_order(q.device, flips=False), **keywords}
    return [q, *(x.reshape(-1, PAGE, K, D) for x in kv)], table


def extend(after: str, name: str = "logit_bias", hint: Any = Tensor | None, default: Any = None) -> Any:
    """Return `AttentionCall` with a field more, after another one."""
    hints = {}
    for field, of_field in get_type_hints(AttentionCall).items():
        hints[field] = of_field
        if field == after:
            hints[name] = hint
    record: Any = NamedTuple("Extended", list(hints.items()))
    defaults = {**AttentionCall._field_defaults, name: default}
    record._field_defaults = {field: defaults[field] for field in hints if field in defaults}
    record.__new__.__defaults__ = tuple(record._field_defaults.values())
    for field, x in vars(AttentionCall).items():
        if isinstance(x, property):
            setattr(record, field, x)
    return record

"""Write docs/support.md: which backend of attention runs what, by their own refusals.

python tools/support.py

The calls are small ones on the CPU, whose q, k and v are then imagined to be on a GPU: every machine with Triton writes
the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ropewalk import Alibi, BlockLists, ExpoSB, NoPosition, PositionScheme, ReRope, Rope, SelfExtend, T5Bias, mrope_axes
from ropewalk import device as gpu
from ropewalk.ops.attention import backends
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backend import Refusal
from ropewalk.ops.attention.call import AttentionCall
from ropewalk.ops.attention.hopper import support as hopper
from ropewalk.ops.attention.libraries import flash, flash_two_range, sdpa
from ropewalk.schemes import Rotation

PAGE = Path(__file__).parents[1] / "docs/support.md"
COLUMNS = {
    "triton": "`triton`",
    "gluon": "`gluon`",
    "flash": "`flash`",
    "sdpa": "`sdpa` (cuDNN)",
    "reference": "`reference`",
}
B, T, H, K, D = 2, 96, 4, 2, 64
N_BUCKETS = 8


@dataclass(frozen=True, eq=False)
class OwnInPyTorch(PositionScheme):
    """A scheme of one's own that has the reference form alone."""

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Let scores fall with the distance."""
        return scores - 0.1 * distance.abs()


@dataclass(frozen=True, eq=False)
class OwnWithFunctions(PositionScheme):
    """A scheme of one's own with score functions of one's own."""

    rates: Tensor  # (H,)
    name: str = "LOG_BIAS"  # which says nothing of the gradient of what it reads

    def kernel_score_mod(self) -> str:
        """Functions that the library does not know."""
        return f"own_score_mods:{self.name}"

    def score_mod_params(self, n_heads: int, device: torch.device) -> Tensor:
        """The rates, (H, 1)."""
        return self.rates.to(device, torch.float32)[:, None]

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        """Let scores fall with the logarithm of the distance."""
        return scores - self.rates[:, None, None].to(scores.dtype) * torch.log1p(distance.abs())


@dataclass(frozen=True, eq=False)
class OwnRotation(PositionScheme):
    """A scheme of one's own that turns pairs by tables which are differentiable."""

    inv_freq: Tensor  # (R/2,)

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """The tables of Rope."""
        angles = positions[..., None] * self.inv_freq
        return Rotation(angles.cos(), angles.sin(), False, None)


@dataclass(frozen=True, eq=False)
class OwnTwoRanges(OwnRotation):
    """A scheme of one's own whose far pairs are those of a window or more, and score as at its end."""

    window: int

    def far_window(self) -> int:
        """The window."""
        return self.window

    def far_rotation(self, positions: Tensor, head_dim: int, of: str) -> Rotation | None:
        """Queries stand a window before or behind position 0, where keys are."""
        if of == "keys":
            return None
        return self.rotation(torch.full_like(positions, self.window if of == "past" else -self.window), head_dim)


@dataclass(frozen=True)
class Case:
    """A kind of call: how the table names it, and its keywords; its tensors, where they are not the usual ones."""

    name: str
    keywords: Callable[[torch.device], dict[str, Any]]
    dtype: torch.dtype = torch.bfloat16
    queries: int = T
    head_dim: int = D
    value_dim: int | None = None  # None: the head dim
    packed: bool = False
    page_size: int | None = None  # None: keys do not lie in pages
    stored: torch.dtype | None = None  # of pages; None: that of q

    def tensors(self, device: torch.device, *, learned: bool = False) -> list[Tensor]:
        """q, k and v."""
        rows: tuple[int, ...] = (B, T)
        if self.page_size is not None:
            rows = (B * T // self.page_size, self.page_size)
        tokens: tuple[int, ...] = (B, self.queries)
        if self.packed:
            rows, tokens = (B * T,) if self.page_size is None else rows, (B * T,)
        shapes = [(*tokens, H, self.head_dim), (*rows, K, self.head_dim), (*rows, K, self.value_dim or self.head_dim)]
        q, *pages = (torch.randn(shape, device=device).to(self.dtype).requires_grad_(learned) for shape in shapes)
        return [q, *pages] if self.stored is None else [q, *(x.detach().to(self.stored) for x in pages)]

    def given(self, device: torch.device) -> dict[str, Any]:
        """Its keywords; a gate has q's dtype."""
        return {name: x.to(self.dtype) if name == "gate" else x for name, x in self.keywords(device).items()}


def _integers(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _pages(device: torch.device, **keywords: Any) -> dict[str, Any]:
    table = torch.arange(B * T // 16, dtype=torch.int32, device=device).view(B, -1)
    return {"block_table": table, "key_lengths": _integers(device, T, 20), **keywords}


def _mask(device: torch.device) -> Tensor:
    return (torch.arange(T, device=device) < T // 2).expand(B, 1, 1, T)


def _pairs(device: torch.device, heads: int) -> Tensor:
    places = torch.arange(T, device=device)
    return ((places[:, None] + places) % 3 < torch.arange(1, heads + 1, device=device)[:, None, None]).repeat(
        B, 1, 1, 1
    )


def _lists(device: torch.device, block: int) -> BlockLists:
    """Lists that attend all blocks, one by one."""
    n = -(-T // block)
    counts, indices = torch.full((1, 1, n), n, device=device), torch.arange(n, device=device).expand(1, 1, n, n)
    return BlockLists(counts, indices.clone(), block_q=block, block_k=block)


def _scales(device: torch.device, *features: int) -> dict[str, Tensor]:
    dtype = torch.float16 if features else torch.float32  # 4-bit numbers have a scale for every 32 features
    made = torch.ones(B * T // 16, 16, K, *features, dtype=dtype, device=device)
    return {"k_scale": made, "v_scale": made.clone()}


def _learned(*shape: int, device: torch.device) -> Tensor:
    return torch.rand(*shape, device=device).requires_grad_()


SECTIONS: dict[str, list[Case]] = {
    "Position schemes": [
        Case("`NoPosition()`", lambda device: {"position": NoPosition()}),
        Case("`Rope()`", lambda device: {"position": Rope()}),
        Case(
            "`Rope(rotary_dim=…, rotary_offset=…)`", lambda device: {"position": Rope(rotary_dim=32, rotary_offset=32)}
        ),
        Case("`Alibi()`", lambda device: {"position": Alibi()}),
        Case("`Alibi(slopes)`, learned", lambda device: {"position": Alibi(_learned(H, device=device))}),
        Case("`T5Bias(table)`, learned", lambda device: {"position": T5Bias(_learned(N_BUCKETS, H, device=device))}),
        Case("`ExpoSB()`", lambda device: {"position": ExpoSB()}),
        Case("`ExpoSB(distance_decay=True)`", lambda device: {"position": ExpoSB(distance_decay=True)}),
        Case(
            "`ExpoSB(band_weights=…)`, learned",
            lambda device: {"position": ExpoSB(band_weights=_learned(H, device=device))},
        ),
        Case("`ReRope(window)`, causal", lambda device: {"position": ReRope(16), "causal": True}),
        Case("`ReRope(window)`, not causal", lambda device: {"position": ReRope(16)}),
        Case("`ReRope(window, leak=…)`, causal", lambda device: {"position": ReRope(16, leak=4.0), "causal": True}),
        Case("`SelfExtend(window, group)`, causal", lambda device: {"position": SelfExtend(16, 4), "causal": True}),
        Case(
            "`ReRope(window)`, causal, fewer queries than keys",
            lambda device: {"position": ReRope(16), "causal": True},
            queries=5,
        ),
        Case(
            "`ReRope(window)`, causal, positions per token",
            lambda device: {"position": ReRope(16), "causal": True, "positions_q": _positions(device)},
        ),
        Case("your own: `score_mod` alone", lambda device: {"position": OwnInPyTorch()}),
        Case(
            "your own: `kernel_score_mod`",
            lambda device: {"position": OwnWithFunctions(torch.rand(H, device=device))},
        ),
        Case(
            "your own: `kernel_score_mod` with `param_grad`, learned",
            lambda device: {"position": OwnWithFunctions(_learned(H, device=device), "LEARNED_LOG_BIAS")},
        ),
        Case(
            "your own: `kernel_score_mod` without `param_grad`, learned",
            lambda device: {"position": OwnWithFunctions(_learned(H, device=device))},
        ),
        Case("your own: `rotation`", lambda device: {"position": OwnRotation(torch.rand(D // 2, device=device))}),
        Case(
            "your own: `rotation`, learned",
            lambda device: {"position": OwnRotation(_learned(D // 2, device=device))},
        ),
        Case(
            "your own: `far_window` and `far_rotation`, causal",
            lambda device: {"position": OwnTwoRanges(torch.rand(D // 2, device=device), 16), "causal": True},
        ),
    ],
    "Which keys a query attends": [
        Case("`causal`", lambda device: {"causal": True}),
        Case("`causal`, fewer queries than keys", lambda device: {"causal": True}, queries=64),
        Case("`window`", lambda device: {"causal": True, "window": 16}),
        Case("`window=(left, right)`", lambda device: {"window": (16, 8)}),
        Case("`mask` of keys", lambda device: {"mask": _mask(device)}),
        Case("`mask` of pairs", lambda device: {"mask": _pairs(device, 1)}),
        Case("`mask` of pairs, per head", lambda device: {"mask": _pairs(device, H)}),
        Case("`key_lengths`", lambda device: {"key_lengths": _integers(device, T, 20)}),
        Case("`key_starts`", lambda device: {"causal": True, "key_starts": _integers(device, 0, 20)}),
        Case(
            "`query_starts`",
            lambda device: {"causal": True, "query_starts": _integers(device, 20, 7)},
            queries=64,
        ),
        Case(
            "packed: `cu_seqlens_q`",
            lambda device: {"causal": True, "layout": "thd", "cu_seqlens_q": _integers(device, 0, 30, 33, B * T)},
            packed=True,
        ),
        Case(
            "packed over pages: `cu_seqlens_q`, `block_table`",
            lambda device: _pages(
                device,
                position=Rope(),
                keys_rotated=True,
                causal=True,
                layout="thd",
                cu_seqlens_q=_integers(device, 0, 30, B * T),
            ),
            page_size=16,
            packed=True,
        ),
        Case(
            "packed over pages, keys not rotated",
            lambda device: _pages(
                device, position=Rope(), causal=True, layout="thd", cu_seqlens_q=_integers(device, 0, 30, B * T)
            ),
            page_size=16,
            packed=True,
        ),
        Case("`blocks`: `BlockLists.causal`", lambda device: {"blocks": BlockLists.causal(T, device=device)}),
        Case("`blocks`, your own lists of 128 × 128", lambda device: {"blocks": _lists(device, 128)}),
        Case("`blocks`, your own lists of 64 × 64", lambda device: {"blocks": _lists(device, 64)}),
        Case("`block_table`", _pages, queries=1, page_size=16),
        Case(
            "`block_table`, keys not rotated", lambda device: _pages(device, position=Rope()), queries=1, page_size=16
        ),
        Case(
            "`block_table`, `keys_rotated=True`",
            lambda device: _pages(device, position=Rope(), keys_rotated=True),
            queries=1,
            page_size=16,
        ),
        Case(
            "`block_table`, `ReRope(window)`",
            lambda device: _pages(device, position=ReRope(16)),
            queries=1,
            page_size=16,
        ),
        Case(
            "`block_table`, int8 pages with `k_scale` and `v_scale`",
            lambda device: _pages(device, position=Rope(), keys_rotated=True, **_scales(device)),
            queries=1,
            page_size=16,
            stored=torch.int8,
        ),
    ],
    "Everything else": [
        Case("`softcap`", lambda device: {"softcap": 30.0}),
        Case("`sinks`", lambda device: {"sinks": _learned(H, device=device)}),
        Case("`gate`", lambda device: {"gate": torch.randn(B, T, H, D, device=device)}),
        Case("`gate` of a number per head", lambda device: {"gate": torch.randn(B, T, H, device=device)}),
        Case("`dropout_p`", lambda device: {"dropout_p": 0.1}),
        Case("positions per token", lambda device: {"position": Rope(), "positions_q": _positions(device)}),
        Case(
            "positions of keys and queries",
            lambda device: {"position": Rope(), "positions_q": _positions(device), "positions_k": _positions(device)},
        ),
        Case(
            "`Rope(axes=…)`, positions on several axes",
            lambda device: {
                "position": Rope(axes=mrope_axes([16, 8, 8])),
                "positions_q": _positions(device).expand(3, -1, -1),
            },
        ),
        Case("`Rope(pair_block=…)`, pairs inside blocks", lambda device: {"position": Rope(pair_block=32)}),
        Case("`keys_rotated` without pages", lambda device: {"position": Rope(), "keys_rotated": True}),
        Case("`return_lse`", lambda device: {"return_lse": True}),
        Case("`return_max_logits`", lambda device: {"return_max_logits": True}),
        Case(
            "`return_max_logits`, `block_table`",
            lambda device: _pages(device, return_max_logits=True),
            queries=1,
            page_size=16,
        ),
        Case("`deterministic=True`", lambda device: {"deterministic": True}),
        Case("a scale of 0 or less", lambda device: {"scale": -0.1}),
        Case("fewer than 64 queries", lambda device: {}, queries=5),
        Case("float16", lambda device: {}, dtype=torch.float16),
        Case("float32", lambda device: {}, dtype=torch.float32),
        Case("float64", lambda device: {}, dtype=torch.float64),
        Case("head dim 256", lambda device: {}, head_dim=256),
        Case("head dim 512", lambda device: {}, head_dim=512),
        Case("head dim 512 in float32", lambda device: {}, head_dim=512, dtype=torch.float32),
        Case("a head dim that is no multiple of 8", lambda device: {}, head_dim=20),
        Case("v's head dim another, 192 and 128", lambda device: {}, head_dim=192, value_dim=128),
    ],
}


def _positions(device: torch.device) -> Tensor:
    return torch.arange(T, device=device).expand(B, T)


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
    """A tensor without memory that says that it is there; all else is as x's."""
    with FakeTensorMode():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda", requires_grad=x.requires_grad)


def refusal_on_gpu(impl: str, call: AttentionCall) -> Refusal | None:
    """A backend's refusal of a call as if its tensors were on the imagined GPU."""
    q, k, v = (on_gpu(x) for x in (call.q, call.k, call.v))
    return backends.why_not(backends.BACKENDS[impl], call._replace(q=q, k=k, v=v))


def why_not(case: Case, impl: str, *, training: bool) -> str | None:
    """Say why a backend does not run a case there, with a backward or without one; None if it does."""
    call = call_of(case, training)
    if isinstance(call, str):
        return call
    with torch.set_grad_enabled(training), imagined_gpu():
        refusal = refusal_on_gpu(impl, call)
        return None if refusal is None else refusal.reason


@functools.cache
def call_of(case: Case, training: bool) -> AttentionCall | str:
    """The call of a case, or why there is none."""
    cpu = torch.device("cpu")
    with torch.set_grad_enabled(training), imagined_gpu():
        try:
            return make_call(*case.tensors(cpu, learned=training), **case.given(cpu))
        except ValueError as error:
            return str(error)


# Fields that are filled in after a backend was chosen, and the rows of the arguments that they come from.
FILLED_IN = {"gate": "`gate`", "seed": "`dropout_p`", "row_logits": "`return_max_logits`"}


def fields_without_a_row(fields: Sequence[str] = AttentionCall._fields) -> list[str]:
    """Name the fields of a call that are the same in the calls of all rows: the page says nothing of them."""
    seen: dict[str, set[str]] = {}
    cases = [case for cases in SECTIONS.values() for case in cases]
    for case, training in itertools.product(cases, (False, True)):
        call = call_of(case, training)
        for name, value in () if isinstance(call, str) else call._asdict().items():
            if len(seen.setdefault(name, set())) < 2:
                seen[name].add(str(tuple(value.shape)) if isinstance(value, Tensor) else repr(value))
    rows = {case.name for case in cases}
    filled_in = {name for name, row in FILLED_IN.items() if row in rows}
    return [name for name in fields if len(seen.get(name, ())) < 2 and name not in filled_in]


def render() -> str:
    """The page; raise if a field of a call has no row."""
    missing = fields_without_a_row()
    if missing:
        raise SystemExit(f"no row of SECTIONS sets {', '.join(missing)} of AttentionCall: add a Case for each")
    notes: dict[str, int] = {}

    def cell(case: Case, impl: str) -> str:
        reasons = [why_not(case, impl, training=training) for training in (False, True)]
        reason = reasons[0] or reasons[1]
        if reason is None:
            return "yes"
        number = notes.setdefault(reason, len(notes) + 1)
        return f"{'–' if reasons[0] else 'forward'} ({number})"

    lines = [INTRODUCTION]
    for title, cases in SECTIONS.items():
        lines += [f"## {title}", "", f"| | {' | '.join(COLUMNS.values())} |", f"| --- {'| --- ' * len(COLUMNS)}|"]
        lines += [f"| {case.name} | {' | '.join(cell(case, impl) for impl in COLUMNS)} |" for case in cases]
        lines.append("")
    lines += ["## Why not", "", *(f"{number}. {reason}" for reason, number in notes.items())]
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
# Which backend of attention runs what

<!-- Written by tools/support.py from the backends' own refusals. Do not edit. -->

The GPU is an NVIDIA one of compute capability 9.0, with cuDNN, flash-attn 4 and a Triton that has Gluon.
Calls are in bfloat16 with a head dim of 64, unless a row says otherwise.
“yes” is forward and backward, with the gradient of what is learned; “forward” is without any gradient.
Numbers in brackets are of the [reasons](#why-not).
The frequencies that `Rope` is given are constants.

A backend runs a call that combines features if it runs each of them; `attention` says which do not go together.
`explain_choice` answers for your call, on your machine.
`impl=None` picks the fastest backend that can run a call, by measurement, or by expectation where nothing was measured.
"""


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print(f"wrote {PAGE}")

"""What attention's benchmark measures: ours, with positions in the kernel and in front of it, and the peers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.bench.attention_cases import REROPE, AttentionCase, AttentionInputs
from ropewalk.bench.attention_gate import Attend
from ropewalk.bench.attention_peers import AttentionPeer, Rotate, compile_rope
from ropewalk.bench.attention_records import label
from ropewalk.bench.attention_settings import LEARNED, SCHEMES, SETTINGS, VARIANTS
from ropewalk.bench.attention_two_scores import Pairs, build_of_pairs, build_two_calls, make_pairs, near_keywords
from ropewalk.ops.attention.api import attention, explain_choice
from ropewalk.ops.attention.cores import flash_version
from ropewalk.ops.rope.api import apply_rope

AUTO = "auto"  # impl=None
OUTSIDE = "apply_rope"  # our rotation, then attention without positions
COMPILED = "compiled rope"  # PyTorch's, for the peers
PAGE_SIZES = (64, 16)  # of paged caches
TWO_CALLS = "two calls"  # ReRoPE by attention to near keys and to far ones, merged
READY_PAIRS = "ready pairs"  # `rerope_attention` alone, without the rotations

# Whether there is a backward -> which implementation serves the case (ours alone can say), and why none does.
Serves = Callable[[bool], tuple[str | None, str | None]]
# q, k and v -> what attention gets instead.
Before = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
# Another name in records, what comes before the call, and more keywords of it.
Changes = tuple[str, Before, dict[str, Any]]


@dataclass(frozen=True)
class Candidate:
    """Something to be measured, and on what: its case and inputs are a yardstick's own where it is one."""

    case: AttentionCase
    inputs: AttentionInputs
    impl: str
    position: str  # as records name it
    setting: str  # of `SETTINGS`, by which the result is judged
    kind: str  # "ours", "peer", or "anchor" for a yardstick
    serves: Serves
    build: Callable[[], Callable[..., Tensor]]
    parameters: tuple[Tensor, ...] = ()  # that get gradients too
    pairs: Pairs | None = None  # makes what the timed call takes, before it; None: it takes q, k and v

    @property
    def yardstick(self) -> str | None:
        """The name of the case, if it is not the one that is measured."""
        return self.case.name if self.kind == "anchor" else None

    @property
    def label(self) -> str:
        """What records call it."""
        return label(self.impl, self.position, self.yardstick)

    def from_inputs(self, attend: Callable[..., Tensor]) -> Attend:
        """The timed call together with what comes before it, as the gate takes it."""
        make = self.pairs
        return attend if make is None else lambda q, k, v: attend(*make(q, k, v))

    def tensors(self) -> tuple[Tensor, ...]:
        """What the timed call takes."""
        tensors = (self.inputs.q, self.inputs.k, self.inputs.v)
        if self.pairs is None:
            return tensors
        with torch.no_grad():
            return self.pairs(*tensors)


def candidates_of(
    case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str], peers: Sequence[AttentionPeer]
) -> dict[str, list[Candidate]]:
    """By mode, what is measured of a case. A peer is built once for all modes: what it compiles, it compiles once."""
    rotate = functools.cache(functools.partial(compile_rope, case, inputs))
    peers_alone, peers_with_rope, peers_with_rerope = [], [], []
    for peer in peers:
        serves = _peer_serves(peer, case)
        build = functools.cache(functools.partial(peer.build, case, inputs))
        if peer.rerope:
            peers_with_rerope.append(Candidate(case, inputs, peer.name, "rerope", "rerope", "peer", serves, build))
            continue
        peers_alone.append(Candidate(case, inputs, peer.name, "none", "none", "peer", serves, build))
        with_rope = functools.partial(_rotate_first, rotate, build)
        peers_with_rope.append(Candidate(case, inputs, peer.name, COMPILED, "rope", "peer", serves, with_rope))

    def ours(*settings: str, auto: bool = False, changes: Changes | None = None) -> list[Candidate]:
        names = (AUTO, *impls) if auto else impls
        return [_ours(case, inputs, impl, setting, changes) for impl in names for setting in settings]

    if case.form == "cache":
        paged = [
            candidate
            for size in PAGE_SIZES
            for candidate in ours("rope", changes=(f"rope, pages of {size}", *_paged(inputs, size)))
        ]
        return {"decode": [*ours("rope", auto=True), *paged, *peers_with_rope]}
    outside = ours("none", changes=(OUTSIDE, _rotation(case, inputs), {}))
    kernels, in_kernel = ours("none"), ours("rope", auto=True)
    schemes, variants = [*kernels, *ours(*SCHEMES)], [*kernels, *ours(*VARIANTS)]
    rerope: list[Candidate] = []
    if not set(case.modes).isdisjoint(REROPE):
        rerope = [*_two_scores(case, inputs, impls), *peers_with_rerope]
    return {
        "fwd": [*kernels, *peers_alone],
        "bwd": [*kernels, *peers_alone],
        "train": [*in_kernel, *outside, *kernels, *peers_with_rope],
        "schemes-fwd": schemes,
        "schemes-bwd": schemes,
        "variants-fwd": variants,
        "variants-bwd": variants,
        "learned-bwd": [*kernels, *ours(*LEARNED)],
        "rerope-fwd": rerope,
        "rerope-train": rerope,
        "memory": in_kernel if case.far_window is None else [*in_kernel, *ours("rerope")],
    }


def yardsticks_of(case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str]) -> dict[str, list[Candidate]]:
    """By mode, our kernels on the case that another one is held against."""
    plain, with_rope = (
        [_ours(case, inputs, impl, setting, kind="anchor") for impl in impls] for setting in ("none", "rope")
    )
    return {"fwd": plain, "bwd": plain, "train": with_rope}


def _ours(
    case: AttentionCase,
    inputs: AttentionInputs,
    impl: str,
    setting: str,
    changes: Changes | None = None,
    kind: str = "ours",
) -> Candidate:
    """One of our implementations, asked by a setting, in the case's form."""
    asked, parameters = SETTINGS[setting].make(case, inputs.q.device)
    name, before, more = changes or (setting, _as_they_are, {})
    keywords = {**asked, **_form_keywords(case, inputs), **more, "impl": None if impl == AUTO else impl}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(*before(q, k, v), **keywords)
        return out

    judged = "rope" if name == OUTSIDE else setting
    serves = _ours_serves(inputs, before, keywords)
    return Candidate(case, inputs, impl, name, judged, kind, serves, lambda: attend, parameters)


def _ours_serves(inputs: AttentionInputs, before: Before, keywords: dict[str, Any]) -> Serves:
    def serves(backward: bool) -> tuple[str | None, str | None]:
        tensors = inputs.leaves() if backward else (inputs.q, inputs.k, inputs.v)
        try:
            with torch.set_grad_enabled(backward):
                return explain_choice(*before(*tensors), **keywords).name, None
        except ValueError as error:
            return None, str(error)

    return serves


def _two_scores(case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str]) -> list[Candidate]:
    """ReRoPE by one call, by two, and of ready pairs; and what RoPE costs the same kernels."""
    device = inputs.q.device
    has_flash = device.type == "cuda" and flash_version(device) is not None
    named = dict.fromkeys((*impls, *(("flash",) if has_flash else ())))
    one_call = [_ours(case, inputs, impl, "rerope") for impl in (AUTO, *named)]
    with_rope = [_ours(case, inputs, impl, "rope") for impl in named]
    otherwise = []
    for impl in impls:
        serves = _ours_serves(inputs, _as_they_are, near_keywords(case, impl))
        build = functools.cache(functools.partial(build_two_calls, case, inputs, impl))
        otherwise.append(Candidate(case, inputs, impl, TWO_CALLS, "rerope", "ours", serves, build))
        of_pairs = functools.partial(build_of_pairs, case, impl)
        one = next(candidate for candidate in one_call if candidate.impl == impl)
        otherwise.append(replace(one, position=READY_PAIRS, build=of_pairs, pairs=make_pairs(case, inputs)))
    return [*one_call, *with_rope, *otherwise]


def _form_keywords(case: AttentionCase, inputs: AttentionInputs) -> dict[str, Any]:
    if case.form == "packed":
        return {"causal": case.causal, "layout": "thd", "cu_seqlens_q": inputs.cu_seqlens}
    lengths = inputs.key_lengths
    if case.form == "cache":
        assert lengths is not None
        return {"causal": True, "key_lengths": lengths, "query_starts": lengths - 1, "keys_rotated": True}
    return {"causal": case.causal, "key_lengths": lengths, "window": case.window}


def _as_they_are(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v


def _rotation(case: AttentionCase, inputs: AttentionInputs) -> Before:
    """Our rotation of q and k; packed tokens are one batch row to it, with a row of the tables each."""

    def rotate(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if case.form != "packed":
            return *apply_rope(q, k, inputs.cos, inputs.sin), v
        q, k = apply_rope(q[None], k[None], inputs.cos, inputs.sin)
        return q[0], k[0], v

    return rotate


def _paged(inputs: AttentionInputs, size: int) -> tuple[Before, dict[str, Any]]:
    """The same cache in shuffled pages: what takes it where the dense one was, and the keywords that go with it."""
    batch, tokens = inputs.k.shape[:2]
    count = batch * -(-tokens // size)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(count, generator=generator, dtype=torch.int32).view(batch, -1).to(inputs.k.device)

    @functools.cache
    def pages() -> tuple[Tensor, Tensor]:
        return _shuffle(inputs.k, table, size), _shuffle(inputs.v, table, size)

    def before(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q, *pages()

    return before, {"block_table": table}


def _shuffle(x: Tensor, table: Tensor, size: int) -> Tensor:
    """Cut (B, T, K, D) into pages (B · pages of a row, size, K, D), each where the table says."""
    whole = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    pages = whole.unflatten(1, (-1, size)).flatten(0, 1)
    shuffled = torch.empty_like(pages)
    shuffled[table.flatten().long()] = pages
    return shuffled


def _peer_serves(peer: AttentionPeer, case: AttentionCase) -> Serves:
    reason = peer.why_not(case)
    return lambda backward: (None, reason)


def _rotate_first(rotate: Callable[[], Rotate], build: Callable[[], Attend]) -> Attend:
    turn, core = rotate(), build()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = turn(q, k)
        return core(q, k, v)

    return attend

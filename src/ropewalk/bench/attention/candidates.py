"""The candidates of attention's benchmark: ours, with positions in the kernel and in front of it, and the peers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.bench.attention.around import (
    Before,
    build_of_pairs,
    build_two_calls,
    make_layer,
    make_pairs,
    near_keywords,
)
from ropewalk.bench.attention.cases import LAYER, REROPE, AttentionCase, AttentionInputs, direction_of
from ropewalk.bench.attention.gate import Attend, AttentionGate
from ropewalk.bench.attention.peers import compile_rope
from ropewalk.bench.attention.settings import LAYERS, LEARNED, SCHEMES, SETTINGS, VARIANTS
from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.runner import Candidate
from ropewalk.bench.core.timing import Call
from ropewalk.bench.rope.peers import Peer
from ropewalk.ops.attention.api import attention, explain_choice
from ropewalk.ops.attention.libraries.flash import flash_version
from ropewalk.ops.rope.api import apply_rope

AUTO = "auto"  # impl=None
OUTSIDE = "apply_rope"  # our rotation, then attention without positions
COMPILED = "compiled rope"  # PyTorch's, for the peers
COMPILED_LAYER, EAGER_LAYER = "compiled norm, rope, gate", "eager norm, rope, gate"  # likewise
MAX_LOGITS = "max logits"
PAGE_SIZES = (64, 16)  # of paged caches
TWO_CALLS = "two calls"  # ReRoPE by attention to near keys and to far ones, merged
READY_PAIRS = "ready pairs"  # `rerope_attention` alone, without the rotations


@dataclass(frozen=True)
class AttentionCandidate:
    """A kernel or library to measure, with its case and inputs: a yardstick has its own."""

    case: AttentionCase
    inputs: AttentionInputs
    impl: str
    position: str  # as records name it
    setting: str  # of `SETTINGS`, by which the result is judged
    kind: str  # "ours", "peer", or "anchor" for a yardstick
    # Whether there is a backward -> the implementation that runs the case (known of ours alone), or why none does.
    choose: Callable[[bool], tuple[str | None, str | None]]
    build: Callable[[], Callable[..., Tensor]]
    parameters: tuple[Tensor, ...] = ()  # that get gradients too
    before: Before | None = None  # makes what the timed call takes; None: it takes q, k and v

    def of_mode(self, mode: str, gate: AttentionGate) -> Candidate:
        """Make the candidate of one mode; its check returns this and the built call beside the verdict."""
        served_by, reason = self.choose(direction_of(mode) != "fwd")
        yardstick = self.case.name if self.kind == "anchor" else None
        check = functools.partial(self._check, mode, gate)
        return Candidate(self.impl, self.kind, check, self.position, reason, served_by, yardstick)

    def _check(
        self, mode: str, gate: AttentionGate
    ) -> tuple[Verdict, tuple[AttentionCandidate, Callable[..., Tensor]]]:
        attend, make, backward = self.build(), self.before, direction_of(mode) != "fwd"
        whole = attend if make is None else lambda q, k, v: attend(*make(q, k, v))
        verdict = gate.check(whole, self.setting, backward=backward, parameters=self.parameters)
        if direction_of(mode) == "bwd" and verdict.complaint is None:
            call = self.call(mode, attend)
            for _ in range(2):  # not every backward can run again over one forward
                call()
        return verdict, (self, attend)

    def call(self, mode: str, attend: Callable[..., Tensor]) -> Call:
        """Make the call that is timed, or measured in bytes, of what `build` returned."""
        grad, direction, tensors = self.inputs.grad, direction_of(mode), self.tensors()
        if direction == "fwd":
            return functools.partial(attend, *tensors)
        leaves = [x.detach().requires_grad_() for x in tensors]
        wanted = (*leaves, *self.parameters)
        if direction == "bwd":
            return functools.partial(torch.autograd.grad, attend(*leaves), wanted, grad, retain_graph=True)
        return lambda: torch.autograd.grad(attend(*leaves), wanted, grad)

    @torch.no_grad()
    def tensors(self) -> tuple[Tensor, ...]:
        """Make the arguments of the timed call."""
        tensors = (self.inputs.q, self.inputs.k, self.inputs.v)
        return tensors if self.before is None else self.before(*tensors)


def candidates_of(
    case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str], peers: Sequence[Peer]
) -> dict[str, list[AttentionCandidate]]:
    """Make the candidates of a case, by mode. A peer is built, and compiled, once for all modes."""

    def ours(*settings: str, auto: bool = False, **changes: Any) -> list[AttentionCandidate]:
        names = (AUTO, *impls) if auto else impls
        return [our_candidate(case, inputs, impl, setting, **changes) for impl in names for setting in settings]

    plain = [_of_peer(case, inputs, peer) for peer in peers]
    peers_alone = [peer for peer in plain if peer.setting == "none"]
    peers_with_rerope = [peer for peer in plain if peer.setting == "rerope"]
    rotate = functools.cache(functools.partial(compile_rope, case, inputs))

    def rotate_first(build: Callable[[], Attend]) -> Attend:
        rotation, attend = rotate(), build()
        return lambda q, k, v: attend(*rotation(q, k), v)

    peers_with_rope = [
        replace(peer, position=COMPILED, setting="rope", build=functools.partial(rotate_first, peer.build))
        for peer in peers_alone
    ]
    in_kernel, modes = ours("rope", auto=True), set(case.modes)
    if case.form == "cache":
        pages = {f"rope, pages of {size}": _paged(inputs, size) for size in PAGE_SIZES}
        paged = [candidate for name, more in pages.items() for candidate in ours("rope", name=name, **more)]
        return {"decode": [*in_kernel, *paged, *peers_with_rope]}
    kernels, outside = ours("none"), ours("none", name=OUTSIDE, judged="rope", before=_rotation(case, inputs))
    found = {
        LAYER: _layers(case, inputs, impls, peers_alone) if modes & {*LAYER} else [],
        ("fwd", "bwd"): [*kernels, *peers_alone],
        ("train",): [*in_kernel, *outside, *kernels, *peers_with_rope],
        ("schemes-fwd", "schemes-bwd"): [*kernels, *ours(*SCHEMES)],
        ("variants-fwd", "variants-bwd"): [*kernels, *ours(*VARIANTS)],
        ("learned-bwd",): [*kernels, *ours(*LEARNED)],
        REROPE: [*_two_scores(case, inputs, impls), *peers_with_rerope] if modes & {*REROPE} else [],
        ("memory",): in_kernel if case.far_window is None else [*in_kernel, *ours("rerope")],
    }
    return {mode: candidates for same, candidates in found.items() for mode in same}


def yardsticks_of(
    case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str]
) -> dict[str, list[AttentionCandidate]]:
    """Make the yardsticks of a case, by mode: our kernels on another case."""
    settings = {"fwd": "none", "bwd": "none", "train": "rope"}
    return {
        mode: [replace(our_candidate(case, inputs, impl, setting), kind="anchor") for impl in impls]
        for mode, setting in settings.items()
    }


def our_candidate(
    case: AttentionCase,
    inputs: AttentionInputs,
    impl: str,
    setting: str,
    *,
    name: str | None = None,  # that records have instead of the setting's
    judged: str | None = None,  # the setting by which the result is judged, if it is another
    before: Before | None = None,  # makes what attention gets instead of q, k and v, and is timed
    parameters: tuple[Tensor, ...] | None = None,  # of the setting; None: they are drawn
    **more: Any,
) -> AttentionCandidate:
    """Make a candidate of one of our implementations, with a setting's keywords in the case's form, and `more`."""
    if parameters is None:
        own, parameters = SETTINGS[setting].make(case, inputs.q.device)
    else:
        own = SETTINGS[setting].keywords_of(case, *parameters)
    keywords = {**own, **_form_keywords(case, inputs), **more, "impl": None if impl == AUTO else impl}
    make = before or (lambda q, k, v: (q, k, v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attention(*make(q, k, v), **keywords)
        return result[0] if isinstance(result, tuple) else result

    of_setting = name or setting, judged or setting
    choose = functools.partial(_choose, inputs, make, keywords)
    return AttentionCandidate(case, inputs, impl, *of_setting, "ours", choose, lambda: attend, parameters)


def _choose(
    inputs: AttentionInputs, make: Before, keywords: dict[str, Any], backward: bool
) -> tuple[str | None, str | None]:
    tensors = inputs.leaves() if backward else (inputs.q, inputs.k, inputs.v)
    try:
        with torch.set_grad_enabled(backward):
            return explain_choice(*make(*tensors), **keywords).name, None
    except ValueError as error:
        return None, str(error)


def _of_peer(case: AttentionCase, inputs: AttentionInputs, peer: Peer) -> AttentionCandidate:
    reason, setting = peer.why_not(case), "rerope" if peer.rerope else "none"
    build = functools.cache(functools.partial(peer.build, case, inputs))
    return AttentionCandidate(case, inputs, peer.name, setting, setting, "peer", lambda backward: (None, reason), build)


def _two_scores(case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str]) -> list[AttentionCandidate]:
    """Make ReRoPE's candidates: by one call, by two, of ready pairs; and RoPE in the same kernels."""
    device = inputs.q.device
    has_flash = device.type == "cuda" and flash_version(device) is not None
    named = dict.fromkeys((*impls, *(("flash",) if has_flash else ())))
    one_call = {impl: our_candidate(case, inputs, impl, "rerope") for impl in (AUTO, *named)}
    otherwise = []
    for impl in impls:
        choose = functools.partial(_choose, inputs, lambda q, k, v: (q, k, v), near_keywords(case, impl))
        build = functools.cache(functools.partial(build_two_calls, case, inputs, impl))
        otherwise.append(replace(one_call[impl], position=TWO_CALLS, choose=choose, build=build))
        of_pairs, pairs = functools.partial(build_of_pairs, case, impl), make_pairs(case, inputs)
        otherwise.append(replace(one_call[impl], position=READY_PAIRS, build=of_pairs, before=pairs))
    return [*one_call.values(), *(our_candidate(case, inputs, impl, "rope") for impl in named), *otherwise]


def _layers(
    case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str], peers: Sequence[AttentionCandidate]
) -> list[AttentionCandidate]:
    """Make the candidates of layers: ours bare, with parts and whole; and PyTorch's around peers."""
    layer = make_layer(case, inputs)
    every = (layer.gate, *layer.weights)
    parameters = {"half-rope": (), "norm": layer.weights, "gate": (layer.gate,), "norm-gate": every}
    ours = functools.partial(our_candidate, case, inputs)
    found = [ours(AUTO, "norm-gate", parameters=every)]
    for impl in impls:
        found += [ours(impl, setting, parameters=parameters[setting]) for setting in reversed(LAYERS)]
        found.append(ours(impl, "half-rope", name=MAX_LOGITS, parameters=(), return_max_logits=True))
    for peer in peers:
        for name in (COMPILED_LAYER, *((EAGER_LAYER,) if peer.impl == "cudnn" else ())):
            build = functools.cache(functools.partial(layer.around, peer.build, name == COMPILED_LAYER))
            found.append(replace(peer, position=name, setting="norm-gate", build=build, parameters=every))
    return [replace(candidate, before=layer.beside_gate) for candidate in found]


def _form_keywords(case: AttentionCase, inputs: AttentionInputs) -> dict[str, Any]:
    if case.form == "packed":
        return {"causal": case.causal, "layout": "thd", "cu_seqlens_q": inputs.cu_seqlens}
    lengths = inputs.key_lengths
    if case.form == "cache":
        assert lengths is not None
        return {"causal": True, "key_lengths": lengths, "query_starts": lengths - 1, "keys_rotated": True}
    return {"causal": case.causal, "key_lengths": lengths, "window": case.window}


def _rotation(case: AttentionCase, inputs: AttentionInputs) -> Before:
    """Make our rotation of q and k. Packed tokens are one batch row, with a row of the tables each."""

    def rotate(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if case.form != "packed":
            return *apply_rope(q, k, inputs.cos, inputs.sin), v
        q, k = apply_rope(q[None], k[None], inputs.cos, inputs.sin)
        return q[0], k[0], v

    return rotate


def _paged(inputs: AttentionInputs, size: int) -> dict[str, Any]:
    """Cut the cache into shuffled pages; returns the function that puts them in its place, and the block table."""
    batch, tokens = inputs.k.shape[:2]
    count = batch * -(-tokens // size)
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(count, generator=generator, dtype=torch.int32).view(batch, -1).to(inputs.k.device)

    def shuffle(x: Tensor) -> Tensor:
        pages = F.pad(x, (0, 0, 0, 0, 0, -tokens % size)).unflatten(1, (-1, size)).flatten(0, 1)
        shuffled = torch.empty_like(pages)
        shuffled[table.flatten().long()] = pages
        return shuffled

    @functools.cache
    def pages() -> tuple[Tensor, Tensor]:
        return shuffle(inputs.k), shuffle(inputs.v)

    return {"before": lambda q, k, v: (q, *pages()), "block_table": table}

"""The candidates of attention's benchmark: ours, with positions in the kernel and in front of it, and the peers.

A layer is QK-norm, RoPE of half the features and an output gate around attention: q lies beside its gate in one
projection, as in Qwen3-Next, and the gate and the norms' weights are leaves of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.bench.attention.cases import (
    BASE,
    EIGHT_BITS,
    LAYER,
    REROPE,
    AttentionCase,
    AttentionInputs,
    direction_of,
)
from ropewalk.bench.attention.gate import Attend, AttentionGate
from ropewalk.bench.attention.peers import compile_rope
from ropewalk.bench.attention.settings import LAYERS, LEARNED, PRODUCTS, SCHEMES, SETTINGS, VARIANTS
from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.runner import Candidate
from ropewalk.bench.core.timing import Call
from ropewalk.bench.rope.gate import NORM_EPS, rotate_plainly
from ropewalk.bench.rope.peers import Peer, compile_whole
from ropewalk.compat.rerope import rerope_attention
from ropewalk.frequencies import inverse_frequencies, rope_table
from ropewalk.ops.attention.api import attention, explain_choice, make_call
from ropewalk.ops.attention.backends import ORDER, measured_order
from ropewalk.ops.attention.libraries.flash import flash_version
from ropewalk.ops.launch.steps import AT_ONCE
from ropewalk.ops.rope.api import apply_rope
from ropewalk.schemes import Rope

AUTO = "auto"  # impl=None
COMPILED = "compiled rope"  # PyTorch's, for the peers
PAGE_SIZES = (64, 16)  # of paged caches
BESIDE_8_BITS = ("cudnn_frontend", "flash_attn_4", "flash_attn_3")  # the 16-bit libraries, where they are installed
# q, k and v -> what the timed call takes: of `rerope_attention` near and far queries, near and far keys, and values.
Before = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _as_it_is(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return q, k, v


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
    before: Before = _as_it_is  # makes what the timed call takes

    def for_mode(self, mode: str, gate: AttentionGate) -> Candidate:
        """Make the candidate of one mode; its check returns this and the built call beside the verdict."""
        direction = direction_of(mode)
        grad, yardstick = direction != "fwd", self.case.name if self.kind == "anchor" else None
        served_by, reason = self.choose(grad)

        def check() -> tuple[Verdict, tuple[AttentionCandidate, Callable[..., Tensor]]]:
            attend, of = self.build(), self.parameters
            verdict = gate.check(lambda *x: attend(*self.before(*x)), self.setting, backward=grad, parameters=of)
            if direction == "bwd" and verdict.complaint is None:
                call = self.call(mode, attend)
                for _ in range(2):  # not every backward can run again over one forward
                    call()
            return verdict, (self, attend)

        return Candidate(self.impl, self.kind, check, self.position, reason, served_by, yardstick)

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
        return self.before(self.inputs.q, self.inputs.k, self.inputs.v)


def candidates_of(
    case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str], peers: Sequence[Peer]
) -> dict[str, list[AttentionCandidate]]:
    """Make the candidates of a case, by mode. A peer is built, and compiled, once for all modes."""
    modes, rotate = set(case.modes), functools.cache(functools.partial(compile_rope, case, inputs))

    def ours(*settings: str, of: Sequence[str] = impls, **more: Any) -> list[AttentionCandidate]:
        return [our_candidate(case, inputs, impl, setting, **more) for impl in of for setting in settings]

    def peer_candidate(peer: Peer) -> AttentionCandidate:
        setting = "rerope" if peer.rerope else "other-8bit" if peer.eight_bits else "none"

        def choose(backward: bool) -> tuple[str | None, str | None]:
            return None, peer.why_not(case, backward)

        build = functools.cache(functools.partial(peer.build, case, inputs))
        position = "rerope" if peer.rerope else "none"
        return AttentionCandidate(case, inputs, peer.name, position, setting, "peer", choose, build)

    def rotate_first(build: Callable[[], Attend]) -> Attend:
        rotation, attend = rotate(), build()
        return lambda q, k, v: attend(*rotation(q, k), v)

    def our_rotation(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if case.form != "packed":
            return *apply_rope(q, k, inputs.cos, inputs.sin), v
        q, k = apply_rope(q[None], k[None], inputs.cos, inputs.sin)  # one batch row, with a row of the tables a token
        return q[0], k[0], v

    def rotated(peer: AttentionCandidate) -> AttentionCandidate:
        setting = "rope" if peer.setting == "none" else f"rope-{peer.setting}"
        return replace(peer, position=COMPILED, setting=setting, build=functools.partial(rotate_first, peer.build))

    with_rerope = [peer_candidate(peer) for peer in peers if peer.rerope]
    alone = [peer_candidate(peer) for peer in peers if not peer.rerope and not peer.eight_bits]
    eight_bits = [peer_candidate(peer) for peer in peers if peer.eight_bits]
    eight_bits = [*(peer for peer in alone if peer.impl in BESIDE_8_BITS), *eight_bits]
    with_rope = [rotated(peer) for peer in alone]
    in_kernel, kernels = ours("rope", of=(AUTO, *impls)), ours("none")
    if case.form == "cache":
        pages = {f"rope, pages of {size}": ours("rope", **_paged(inputs, size)) for size in PAGE_SIZES}
        paged = [replace(candidate, position=name) for name, found in pages.items() for candidate in found]
        return {"decode": [*in_kernel, *paged, *with_rope]}
    outside = [replace(one, position="apply_rope", setting="rope") for one in ours("none", first=our_rotation)]
    found = {
        LAYER: _layers(case, inputs, impls, alone) if modes & {*LAYER} else [],
        ("fwd", "bwd"): [*kernels, *alone],
        ("train",): [*in_kernel, *outside, *kernels, *with_rope],
        ("schemes-fwd", "schemes-bwd"): [*kernels, *ours(*SCHEMES)],
        ("variants-fwd", "variants-bwd"): [*kernels, *ours(*VARIANTS)],
        ("learned-bwd",): [*kernels, *ours(*LEARNED)],
        (EIGHT_BITS,): [
            *ours("rope", "none", *PRODUCTS),
            *(_kernel_alone(case, inputs, name) for name in ("int8", "int8-fp8") if "gluon" in impls),
            *eight_bits,
            *map(rotated, eight_bits),
        ],
        REROPE: [*_two_ranges(case, inputs, impls), *with_rerope] if modes & {*REROPE} else [],
        ("memory",): in_kernel if case.far_window is None else [*in_kernel, *ours("rerope")],
    }
    return {mode: candidates for same, candidates in found.items() for mode in same}


def our_candidate(
    case: AttentionCase, inputs: AttentionInputs, impl: str, setting: str, *, first: Before = _as_it_is, **more: Any
) -> AttentionCandidate:
    """Make a candidate of one of our implementations: with a setting's keywords in the case's form, and `more`.

    `first` makes what attention gets instead of q, k and v, and is timed.
    """
    own, parameters = SETTINGS[setting].make(case, inputs.q.device)
    keywords: dict[str, Any] = {**own, "causal": case.causal, "impl": None if impl == AUTO else impl}
    lengths = inputs.key_lengths
    if case.form == "packed":
        keywords |= {"layout": "thd", "cu_seqlens_q": inputs.cu_seqlens}
    elif case.form == "cache" and lengths is not None:
        keywords |= {"causal": True, "key_lengths": lengths, "query_starts": lengths - 1, "keys_rotated": True}
    else:
        keywords |= {"key_lengths": lengths, "window": case.window}
    keywords |= more

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = attention(*first(q, k, v), **keywords)
        return result[0] if isinstance(result, tuple) else result

    def choose(backward: bool) -> tuple[str | None, str | None]:
        tensors = inputs.leaves() if backward else (inputs.q, inputs.k, inputs.v)
        try:
            with torch.set_grad_enabled(backward):
                return explain_choice(*first(*tensors), **keywords).name, None
        except ValueError as error:
            return None, str(error)

    return AttentionCandidate(case, inputs, impl, setting, setting, "ours", choose, lambda: attend, parameters)


def _kernel_alone(case: AttentionCase, inputs: AttentionInputs, precision: str) -> AttentionCandidate:
    """Make the candidate of Hopper's kernel of 8-bit products on operands that are quantised before."""
    whole = our_candidate(case, inputs, "gluon", precision)

    def build() -> Attend:
        from ropewalk.ops.attention.hopper import launch_8bit
        from ropewalk.ops.attention.quantise.launch import quantise
        from ropewalk.ops.attention.triton.launch_common import begin_forward

        call = make_call(inputs.q, inputs.k, inputs.v, causal=case.causal, precision=precision)
        operands = quantise(call, AT_ONCE, permuted=True)
        out, values, saved, _ = begin_forward(call, AT_ONCE)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            launch_8bit.attend(call, operands, values, out, saved.lse, AT_ONCE)
            return out.transpose(1, 2)

        return attend

    return replace(whole, position=f"{precision}, kernel alone", build=functools.cache(build))


def _two_ranges(case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str]) -> list[AttentionCandidate]:
    """Make ReRoPE's candidates: by one call, by two, of ready pairs; and RoPE in the same kernels."""
    window, scale, device = case.far_window, case.head_dim**-0.5, inputs.q.device
    assert window is not None
    # Of far queries: the window's row of the tables, for each token.
    cos, sin = (x[window].repeat(case.tokens, 1) for x in (inputs.cos, inputs.sin))
    with_lse: dict[str, Any] = {"causal": True, "return_lse": True}
    near: dict[str, Any] = {**with_lse, "position": Rope(BASE), "window": window}

    def build_two_calls(impl: str) -> Attend:  # to near keys and to far ones, merged
        merge, late_cos, late_sin = compile_whole(_merge), cos[window:], sin[window:]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            late = apply_rope(q[:, window:], None, late_cos, late_sin)
            far = attention(late, k[:, :-window], v[:, :-window], **with_lse, impl=impl)
            return merge(*attention(q, k, v, **near, impl=impl), *far)

        return attend

    def make_pairs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        near_q, near_k = apply_rope(q, k, inputs.cos, inputs.sin)
        far_q = apply_rope(q, None, cos, sin)
        return tuple(x.transpose(1, 2) for x in (near_q, far_q, near_k, k, v))

    def build_of_pairs(impl: str) -> Callable[..., Tensor]:  # without the rotations
        def attend(near_q: Tensor, far_q: Tensor, near_k: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rerope_attention(near_q, far_q, near_k, k, v, True, scale, window, impl=impl).transpose(1, 2)

        return attend

    has_flash = device.type == "cuda" and flash_version(device) is not None
    named = dict.fromkeys((*impls, *(("flash",) if has_flash else ())))
    one_call = {impl: our_candidate(case, inputs, impl, "rerope") for impl in (AUTO, *named)}
    otherwise = []
    for impl in impls:
        choose = our_candidate(case, inputs, impl, "none", **near).choose
        build = functools.cache(functools.partial(build_two_calls, impl))
        build_pairs = functools.partial(build_of_pairs, impl)
        otherwise += [
            replace(one_call[impl], position="two calls", choose=choose, build=build),
            replace(one_call[impl], position="ready pairs", build=build_pairs, before=make_pairs),
        ]
    return [*one_call.values(), *(our_candidate(case, inputs, impl, "rope") for impl in named), *otherwise]


def _merge(near: Tensor, near_lse: Tensor, far: Tensor, far_lse: Tensor) -> Tensor:
    """Weigh the last rows of one output and another by their shares of both sums; (B, T, H, D) and (B, H, T)."""
    first = near.shape[1] - far.shape[1]
    near_lse = near_lse[..., first:]
    lse = torch.logaddexp(near_lse, far_lse)
    near_share, far_share = ((x - lse).exp().transpose(1, 2)[..., None] for x in (near_lse, far_lse))
    merged = near[:, first:] * near_share + far * far_share
    return torch.cat((near[:, :first], merged.to(near.dtype)), 1)


def _layers(
    case: AttentionCase, inputs: AttentionInputs, impls: Sequence[str], peers: Sequence[AttentionCandidate]
) -> list[AttentionCandidate]:
    """Make the candidates of layers: ours bare, with parts and whole; and PyTorch's around peers."""
    _, (drawn, q_weight, k_weight) = SETTINGS["norm-gate"].make(case, inputs.q.device)
    # (B, T, H, D), beside memory for q, as one projection leaves both.
    gate = torch.cat((torch.zeros_like(inputs.q), drawn.detach()), -1)[..., case.head_dim :].requires_grad_()
    inv_freq, _ = inverse_frequencies("default", case.head_dim // 2, BASE)
    tables = rope_table(torch.arange(case.tokens), inv_freq, device=inputs.q.device)
    cos, sin = (x[:, None] for x in tables)  # over heads

    def norm_and_rotate(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS) * (1 + weight.float())
        return rotate_plainly(normed, cos, sin, False).to(x.dtype)

    def before(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return norm_and_rotate(q, q_weight), norm_and_rotate(k, k_weight)

    def after(out: Tensor) -> Tensor:
        return (out.float() * torch.sigmoid(gate.float())).to(out.dtype)

    def around(build: Callable[[], Attend], wrap: Callable[..., Any]) -> Attend:
        """Put a whole layer around an attention without positions."""
        attend, last = build(), wrap(after)
        first: Callable[..., tuple[Tensor, Tensor]] = wrap(before)
        return lambda q, k, v: last(attend(*first(q, k), v))

    def beside_gate(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return torch.cat((q, gate.detach()), -1)[..., : q.shape[-1]], k, v

    norms = q_weight, k_weight
    parameters = {"half-rope": (), "norm": norms, "gate": (gate,), "norm-gate": (gate, *norms)}

    def ours(impl: str, setting: str, **more: Any) -> AttentionCandidate:
        keywords = SETTINGS[setting].keywords_of(case, *parameters[setting])
        plain = our_candidate(case, inputs, impl, "none", **keywords, **more)
        return replace(plain, position=setting, setting=setting, parameters=parameters[setting])

    found = [ours(AUTO, "norm-gate")]
    for impl in impls:
        found += [ours(impl, setting) for setting in reversed(LAYERS)]
        found.append(replace(ours(impl, "half-rope", return_max_logits=True), position="max logits"))
    for peer in (replace(peer, setting="norm-gate", parameters=parameters["norm-gate"]) for peer in peers):
        for name, wrap in (("compiled", compile_whole), ("eager", lambda part: part)):
            if name == "compiled" or peer.impl == "cudnn":
                build = functools.cache(functools.partial(around, peer.build, wrap))
                found.append(replace(peer, position=f"{name} norm, rope, gate", build=build))
    return [replace(candidate, before=beside_gate) for candidate in found]


def _paged(inputs: AttentionInputs, size: int) -> dict[str, Any]:
    """Cut the cache into shuffled pages; returns the function that puts them in its place, and the block table."""
    batch, tokens = inputs.k.shape[:2]
    count, generator = -(-tokens // size), torch.Generator().manual_seed(0)
    table = torch.randperm(batch * count, generator=generator, dtype=torch.int32).view(batch, -1).to(inputs.k.device)

    @functools.cache
    def pages() -> list[Tensor]:
        whole = (F.pad(x, (0, 0, 0, 0, 0, -tokens % size)).view(-1, size, *x.shape[2:]) for x in (inputs.k, inputs.v))
        return [x[table.flatten().long().argsort()] for x in whole]

    return {"first": lambda q, k, v: (q, *pages()), "block_table": table}


def backends_of_today(case: AttentionCase, mode: str, position: str, capability: str | None) -> tuple[str, ...]:
    """Return the order in which `impl=None` tries backends for a dense case, on a GPU of a capability such as "9.0"."""
    features = ((case.q_heads, case.head_dim), (case.k_heads, case.head_dim), (case.k_heads, case.out_head_dim))
    q, k, v = (
        torch.empty(case.batch, case.tokens, *of, dtype=case.torch_dtype, device="meta", requires_grad=True)
        for of in features
    )
    keywords, _ = SETTINGS[position].make(case, q.device)
    with torch.set_grad_enabled("train" in mode):
        call = make_call(q, k, v, causal=case.causal, window=case.window, **keywords)
    major, _, minor = (capability or "0.0").partition(".")
    return measured_order(call, ORDER.get((int(major), int(minor)), ()))

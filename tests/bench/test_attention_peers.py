"""The adapters of other attentions: those that run here are checked as they are, the others through stand-ins."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ropewalk.bench import attention_peers
from ropewalk.bench.attention_candidates import PAGE_SIZES, Candidate, _paged, candidates_of, yardsticks_of
from ropewalk.bench.attention_cases import CASES, REROPE, AttentionCase, make_attention_inputs
from ropewalk.bench.attention_gate import AttentionGate
from ropewalk.bench.attention_peers import ATTENTION_PEERS, compile_rope
from ropewalk.bench.attention_settings import LEARNED
from ropewalk.bench.peers import find_peer
from ropewalk.ops.attention.api import attention
from ropewalk.ops.rope.api import apply_rope

SMALL = AttentionCase("small", 2, 136, 4, 4, 64)
FAR = replace(SMALL, name="far", causal=True, modes=REROPE, far_window=40)
PACKED = replace(SMALL, name="packed", batch=3, k_heads=2, causal=True, form="packed", shortest=20)
CACHE = replace(SMALL, name="cache", batch=3, k_heads=2, causal=True, form="cache", shortest=20)
FORMS = [
    SMALL,
    replace(SMALL, name="causal", causal=True),
    replace(SMALL, name="grouped", k_heads=2, causal=True),
    replace(SMALL, name="padded", padded=True),
    PACKED,
    CACHE,
    FAR,
    replace(FAR, name="far, grouped", k_heads=2),
]


@contextmanager
def nothing_compiled(device: torch.device) -> Iterator[None]:
    """Compiling for a CPU takes minutes."""
    with torch.compiler.set_stance("force_eager" if device.type == "cpu" else "default"):
        yield


def complaints(name: str, device: torch.device, *, backward: bool = True) -> list[str]:
    """Of a cache there is no backward, and its queries are not rotated here: no peer knows positions but ReRoPE's."""
    peer = ATTENTION_PEERS[name]
    found = []
    with nothing_compiled(device):
        for case in FORMS:
            if peer.why_not(case) is None:
                torch.compiler.reset()
                inputs = make_attention_inputs(case, device)
                attend, both = peer.build(case, inputs), backward and case.form != "cache"
                setting = "rerope" if peer.rerope else "none"
                try:
                    verdict = AttentionGate(case, inputs).check(attend, setting, backward=both)
                except RuntimeError as error:
                    if case.form == "dense" or "No available kernel" not in str(error):
                        raise
                    continue  # one backend of SDPA need not take a single query
                found += [] if verdict.complaint is None else [f"{case.name}: {verdict.complaint}"]
    return found


@pytest.mark.parametrize("name", ATTENTION_PEERS)
def test_an_installed_peer_is_right_wherever_it_says_it_serves(name: str, device: torch.device) -> None:
    _, reason = find_peer(ATTENTION_PEERS[name], device)
    if reason is not None:
        pytest.skip(reason)
    assert complaints(name, device) == []


@pytest.mark.parametrize("name", ATTENTION_PEERS)
def test_every_peer_serves_some_cases_and_says_why_not_the_others(name: str) -> None:
    reasons = [ATTENTION_PEERS[name].why_not(case) for case in CASES]
    assert None in reasons
    assert all(reason is None or len(reason) > 5 for reason in reasons)


def test_cudnns_adapter_asks_sdpa_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_peers.BACKENDS, "cudnn", SDPBackend.MATH)
    assert complaints("cudnn", torch.device("cpu")) == []


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gets_the_right_masks() -> None:
    """On a CPU it has no backward."""
    assert complaints("flex", torch.device("cpu"), backward=False) == []


@pytest.mark.parametrize("with_lse", [False, True])
def test_flash_attention_4_is_called_as_documented(monkeypatch: pytest.MonkeyPatch, with_lse: bool) -> None:
    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Any:
        out = attention(q, k, v, causal=causal, impl="reference")
        return (out, None) if with_lse else out

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqused_k: Tensor | None = None,
        causal: bool = False,
    ) -> Any:
        keywords: dict[str, Any] = {"causal": causal, "impl": "reference"}
        if cu_seqlens_q is None:
            assert causal
            assert seqused_k is not None
            out = attention(q, k, v, key_lengths=seqused_k, query_starts=seqused_k - q.shape[1], **keywords)
        else:
            assert cu_seqlens_q is cu_seqlens_k
            assert max_seqlen_q == max_seqlen_k
            assert int(cu_seqlens_q.diff().max()) <= (max_seqlen_q or 0)
            out = attention(q, k, v, layout="thd", cu_seqlens_q=cu_seqlens_q, **keywords)
        return (out, None) if with_lse else out

    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    vars(module).update(functions)
    vars(package)["cute"] = module
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    assert complaints("flash_attn_4", torch.device("cpu")) == []


def test_whole_matrices_of_scores_must_fit() -> None:
    by_name = {case.name: ATTENTION_PEERS["eager"].why_not(case) for case in CASES}
    assert by_name["rerope-8k-d64"] is None
    assert by_name["rerope-8k-d64-fp16"] is None
    assert by_name["rerope-16k-d128"] == "its whole matrices do not fit: 80 GiB, of 64 that it may take"
    assert by_name["causal-8k-d64"] == "ReRoPE of dense causal tensors alone"


def test_a_copy_in_pages_is_the_same_cache(device: torch.device) -> None:
    case = CACHE
    inputs = make_attention_inputs(case, device)
    for size in PAGE_SIZES:
        before, keywords = _paged(inputs, size)
        q, keys, values = before(inputs.q, inputs.k, inputs.v)
        assert q is inputs.q
        assert keys.shape[1] == size
        table = keywords["block_table"].long()
        assert not torch.equal(table.flatten().sort()[0], table.flatten())  # shuffled
        for pages, x in ((keys, inputs.k), (values, inputs.v)):
            assert torch.equal(pages[table].flatten(1, 2)[:, : case.tokens], x)


def test_the_peers_rotation_is_ours(device: torch.device) -> None:
    inputs = make_attention_inputs(SMALL, device)
    with nothing_compiled(device):
        rotated = compile_rope(SMALL, inputs)(inputs.q, inputs.k)
    expected = apply_rope(inputs.q, inputs.k, inputs.cos, inputs.sin, impl="reference")
    for actual, exact in zip(rotated, expected, strict=True):
        torch.testing.assert_close(actual, exact)


def test_every_candidate_is_judged_by_its_setting(device: torch.device) -> None:
    inputs = make_attention_inputs(SMALL, device)
    gate = AttentionGate(SMALL, inputs)
    found = candidates_of(SMALL, inputs, ("reference",), [ATTENTION_PEERS[name] for name in ("sdpa_flash", "eager")])
    labels = {mode: [candidate.label for candidate in found[mode]] for mode in found}
    inside, outside = ["auto + rope", "reference + rope"], ["reference + apply_rope", "reference"]
    assert labels["fwd"] == labels["bwd"] == ["reference", "sdpa_flash"]
    assert labels["train"] == [*inside, *outside, "sdpa_flash + compiled rope"]
    assert labels["memory"] == inside
    assert labels["rerope-fwd"] == labels["rerope-train"] == []
    schemes = ["reference + alibi", "reference + exposb", "reference + exposb-decay"]
    assert labels["schemes-fwd"] == labels["schemes-bwd"] == ["reference", *schemes]
    variants = ["reference + dropout", "reference + softcap", "reference + sinks"]
    assert labels["variants-fwd"] == labels["variants-bwd"] == ["reference", *variants]
    assert labels["learned-bwd"] == ["reference", *(f"reference + {name}" for name in LEARNED)]
    with nothing_compiled(device):
        for candidates in (found[mode] for mode in ("train", "schemes-fwd", "variants-fwd", "learned-bwd")):
            check_candidates(gate, candidates, backward=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_way_to_rerope_is_right(dtype: str, device: torch.device) -> None:
    case = replace(FAR, dtype=dtype)
    inputs = make_attention_inputs(case, device)
    found = candidates_of(case, inputs, ("reference",), [ATTENTION_PEERS[name] for name in ("sdpa_flash", "eager")])
    ours = [candidate for candidate in found["rerope-train"] if candidate.impl != "flash"]
    one_call = ["auto + rerope", "reference + rerope"]
    others = ["reference + rope", "reference + two calls", "reference + ready pairs", "eager + rerope"]
    assert [candidate.label for candidate in ours] == [*one_call, *others]
    assert found["rerope-fwd"] == found["rerope-train"]
    memory = [candidate.label for candidate in found["memory"]]
    assert memory == ["auto + rope", "reference + rope", "reference + rerope"]
    with nothing_compiled(device):
        check_candidates(AttentionGate(case, inputs), ours, backward=True)


def test_ready_pairs_are_made_before_what_is_timed(device: torch.device) -> None:
    inputs = make_attention_inputs(FAR, device)
    found = candidates_of(FAR, inputs, ("reference",), [])["rerope-train"]
    by_position = {candidate.position: candidate for candidate in found if candidate.impl == "reference"}
    plain, ready = by_position["rerope"], by_position["ready pairs"]
    assert plain.tensors() == (inputs.q, inputs.k, inputs.v)
    pairs = [x.requires_grad_() for x in ready.tensors()]
    near_q, far_q, near_k, far_k, v = pairs
    rotated = apply_rope(inputs.q, inputs.k, inputs.cos, inputs.sin, impl="reference")
    torch.testing.assert_close(near_q, rotated[0].transpose(1, 2))
    torch.testing.assert_close(near_k, rotated[1].transpose(1, 2))
    torch.testing.assert_close(far_q[:, :, 40], near_q[:, :, 40])
    assert torch.equal(far_k, inputs.k.transpose(1, 2))
    assert torch.equal(v, inputs.v.transpose(1, 2))
    out = ready.build()(*pairs)
    assert out.shape == inputs.grad.shape
    grads = torch.autograd.grad(out, pairs, inputs.grad)
    assert all(grad.any() for grad in grads)


def test_ways_that_cannot_serve_say_so() -> None:
    device = torch.device("cpu")
    inputs = make_attention_inputs(FAR, device)
    found = candidates_of(FAR, inputs, ("sdpa",), [])["rerope-train"]
    reasons = {candidate.label: candidate.serves(True)[1] for candidate in found}
    assert "cannot serve this call" in (reasons["sdpa + rerope"] or "")
    assert reasons["sdpa + ready pairs"] == reasons["sdpa + rerope"]
    assert "it knows no window" in (reasons["sdpa + two calls"] or "")
    assert reasons["sdpa + rope"] is reasons["auto + rerope"] is None


def test_every_candidate_of_packed_sequences_and_of_caches_is_right(device: torch.device) -> None:
    for case, mode in ((PACKED, "train"), (CACHE, "decode")):
        inputs = make_attention_inputs(case, device)
        found = candidates_of(case, inputs, ("reference",), [ATTENTION_PEERS["sdpa_default"]])[mode]
        usable = [candidate for candidate in found if candidate.serves(mode == "train")[1] is None]
        labels = [candidate.label for candidate in usable]
        if mode == "train":
            assert labels == ["auto + rope", "reference + rope", "reference + apply_rope", "reference"]
        else:
            pages = [f"reference + rope, pages of {size}" for size in PAGE_SIZES]
            assert labels == ["auto + rope", "reference + rope", *pages, "sdpa_default + compiled rope"]
        with nothing_compiled(device):
            check_candidates(AttentionGate(case, inputs), usable, backward=mode == "train")


def check_candidates(gate: AttentionGate, candidates: Sequence[Candidate], *, backward: bool) -> None:
    for candidate in candidates:
        served_by, reason = candidate.serves(backward)
        assert reason is None
        assert (served_by is None) == (candidate.kind == "peer")
        attend = candidate.from_inputs(candidate.build())
        verdict = gate.check(attend, candidate.setting, backward=backward, parameters=candidate.parameters)
        assert verdict.complaint is None, candidate.label


def test_a_yardstick_has_its_own_case(device: torch.device) -> None:
    inputs = make_attention_inputs(SMALL, device)
    found = yardsticks_of(SMALL, inputs, ("reference",))
    labels = {mode: [candidate.label for candidate in found[mode]] for mode in found}
    plain = ["reference on small"]
    assert labels == {"fwd": plain, "bwd": plain, "train": ["reference + rope on small"]}
    assert {candidate.kind for candidates in found.values() for candidate in candidates} == {"anchor"}

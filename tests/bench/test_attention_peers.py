"""The adapters of other attentions: those that run here are checked as they are, the others through stand-ins."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ropewalk.bench import attention_peers
from ropewalk.bench.attention_candidates import candidates_of
from ropewalk.bench.attention_cases import CASES, AttentionCase, make_attention_inputs
from ropewalk.bench.attention_gate import AttentionGate
from ropewalk.bench.attention_peers import ATTENTION_PEERS, compile_rope
from ropewalk.bench.peers import find_peer
from ropewalk.ops.attention.api import attention
from ropewalk.ops.rope.api import apply_rope

SMALL = AttentionCase("small", 2, 136, 4, 4, 64)
FORMS = [
    SMALL,
    replace(SMALL, name="causal", causal=True),
    replace(SMALL, name="grouped", k_heads=2, causal=True),
    replace(SMALL, name="padded", padded=True),
]


@contextmanager
def nothing_compiled(device: torch.device) -> Iterator[None]:
    """Compiling for a CPU takes minutes."""
    with torch.compiler.set_stance("force_eager" if device.type == "cpu" else "default"):
        yield


def complaints(name: str, device: torch.device, *, backward: bool = True) -> list[str]:
    peer = ATTENTION_PEERS[name]
    found = []
    with nothing_compiled(device):
        for case in FORMS:
            if peer.why_not(case) is None:
                torch.compiler.reset()
                inputs = make_attention_inputs(case, device)
                verdict = AttentionGate(case, inputs).check(peer.build(case, inputs), "none", backward=backward)
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

    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    vars(module)["flash_attn_func"] = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    assert complaints("flash_attn_4", torch.device("cpu")) == []


def test_the_peers_rotation_is_ours(device: torch.device) -> None:
    inputs = make_attention_inputs(SMALL, device)
    with nothing_compiled(device):
        rotated = compile_rope(inputs)(inputs.q, inputs.k)
    expected = apply_rope(inputs.q, inputs.k, inputs.cos, inputs.sin, impl="reference")
    for actual, exact in zip(rotated, expected, strict=True):
        torch.testing.assert_close(actual, exact)


def test_every_candidate_is_judged_by_its_scheme(device: torch.device) -> None:
    inputs = make_attention_inputs(SMALL, device)
    gate = AttentionGate(SMALL, inputs)
    found = candidates_of(SMALL, inputs, ("reference",), [ATTENTION_PEERS["sdpa_flash"]])
    labels = {mode: [candidate.label for candidate in found[mode]] for mode in found}
    inside, outside = ["auto + rope", "reference + rope"], ["reference + apply_rope", "reference"]
    assert labels["fwd"] == labels["bwd"] == ["reference", "sdpa_flash"]
    assert labels["train"] == [*inside, *outside, "sdpa_flash + compiled rope"]
    assert labels["memory"] == inside
    schemes = ["reference + alibi", "reference + exposb", "reference + exposb-decay"]
    assert labels["schemes-fwd"] == labels["schemes-bwd"] == ["reference", *schemes]
    with nothing_compiled(device):
        for candidate in [*found["train"], *found["schemes-fwd"]]:
            served_by, reason = candidate.serves(True)
            assert reason is None
            assert (served_by is None) == (candidate.kind == "peer")
            assert gate.check(candidate.build(), candidate.scheme, backward=True).complaint is None

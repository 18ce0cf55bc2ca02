"""The adapters of other libraries: those that import are checked as they are, the others through stand-ins.

A stand-in has the signature, layout and in-place behaviour that the library documents, in plain PyTorch.
"""

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.bench.attention.peers import ATTENTION_PEERS
from ropewalk.bench.core.peers import find_peer
from ropewalk.bench.report.peers import NAMES
from ropewalk.bench.rope.cases import CASES, Case, make_inputs
from ropewalk.bench.rope.gate import Gate, rotate_plainly
from ropewalk.bench.rope.peers import NORM_PEERS, PEERS

SMALL = Case("small", 2, 6, 3, 1, 64)
FORMS = [
    SMALL,
    replace(SMALL, name="offsets", positions="offsets"),
    replace(SMALL, name="tokens", positions="tokens"),
    replace(SMALL, name="partial", rotary_dim=32),
    replace(SMALL, name="bhtd", layout="bhtd"),
    replace(SMALL, name="bhtd GQA", layout="bhtd", k_heads=2),
    replace(SMALL, name="packed", batch=1, tokens=9, layout="thd", sequences=(4, 1, 4)),
    replace(SMALL, name="thd tokens", batch=1, tokens=9, layout="thd", positions="tokens"),
    replace(SMALL, name="float32", dtype="float32"),
    replace(SMALL, name="one token", tokens=1, positions="offsets"),
]


def variants() -> Iterator[tuple[Case, str]]:
    for case in FORMS:
        for interleaved in (False, True):
            for inplace in (False, True):
                for direction in ("fwd", "bwd"):
                    yield replace(case, interleaved=interleaved, inplace=inplace), direction


def served_by(name: str) -> list[tuple[Case, str]]:
    return [(case, direction) for case, direction in variants() if PEERS[name].why_not(case, direction) is None]


def complaints(name: str, device: torch.device) -> list[str]:
    found = []
    for case, direction in served_by(name):
        inputs = make_inputs(case, device)
        verdict = Gate(case, inputs, direction).check(PEERS[name].build(case, inputs, direction == "bwd"))
        if verdict.complaint is not None:
            found.append(f"{case} {direction}: {verdict}")
    return found


@pytest.mark.parametrize("name", PEERS)
def test_an_installed_peer_is_right_wherever_it_says_it_serves(name: str, device: torch.device) -> None:
    _, reason = find_peer(PEERS[name], device)
    if reason is not None:
        pytest.skip(reason)
    stance = "force_eager" if device.type == "cpu" else "default"  # compiling for a CPU takes minutes
    with torch.compiler.set_stance(stance):
        assert complaints(name, device) == []


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_serves_some_cases_and_says_why_not_the_others(name: str) -> None:
    reasons = [PEERS[name].why_not(case, direction) for case in CASES for direction in case.modes]
    assert None in reasons
    assert all(reason is None or len(reason) > 5 for reason in reasons)


def test_each_peer_has_a_name_for_tables() -> None:
    assert {*PEERS, *NORM_PEERS, *ATTENTION_PEERS} <= NAMES.keys()


def test_a_missing_peer_says_what_is_missing() -> None:
    peer = replace(PEERS["compiled"], module="a_module_that_is_not_there")
    assert find_peer(peer, torch.device("cpu")) == (None, "a_module_that_is_not_there is not installed")
    assert find_peer(PEERS["quack"], torch.device("cpu")) == (None, "needs a GPU")


def test_a_broken_peer_is_not_usable_and_its_message_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(module: str) -> None:
        raise OSError("/secret/place/lib.so: undefined symbol")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert find_peer(PEERS["compiled"], torch.device("cpu")) == (None, "torch does not import: OSError")


def test_xformers_imports_beside_flash_attention_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4 is in `flash_attn` too, which xFormers takes for FlashAttention-2."""
    for package, text in (
        ("flash_attn", ""),
        ("xformers", ""),
        (
            "xformers/ops",
            "import importlib.util\nif importlib.util.find_spec('flash_attn'):\n    import flash_attn.more",
        ),
    ):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("flash_attn", "xformers", "xformers.ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    peer, find = replace(PEERS["xformers"], needs_gpu=False), importlib.util.find_spec
    assert find_peer(peer, torch.device("cpu"))[1] is None
    assert importlib.util.find_spec is find
    (tmp_path / "flash_attn_2_cuda.py").touch()
    for name in ("xformers", "xformers.ops"):
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    assert find_peer(peer, torch.device("cpu")) == (None, "flash_attn.more is not installed")


# Stand-ins


def rotate_at(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate (…, H, D) by tables of (…, R/2), in float32."""
    return rotate_plainly(x, cos.float().unsqueeze(-2), sin.float().unsqueeze(-2), interleaved)


class Overwrite(torch.autograd.Function):
    """Liger's way: forward and backward both write into the tensors that they are given."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.tables = cos, sin
        return liger_forward(q, k, cos, sin)[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.tables
        q_grad, k_grad = grads
        return *liger_forward(q_grad, k_grad, cos, -sin)[:2], None, None


def liger_forward(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert q.ndim == 4
    assert cos.shape[1:] == (q.shape[2], q.shape[3])
    half = cos.shape[-1] // 2
    rotated = []
    for x in (q, k):
        token_major = x.transpose(1, 2).contiguous()
        token_major.copy_(rotate_at(token_major, cos[..., :half], sin[..., :half], False))
        rotated.append(token_major.transpose(1, 2))
    return rotated[0], rotated[1], cos, sin


def per_tensor(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    """flash-attn's and QuACK's way: (B, T, H, D), or (total, H, D) with cu_seqlens."""
    offsets, cu_seqlens = options["seqlen_offsets"], options["cu_seqlens"]
    if cu_seqlens is not None:
        assert x.ndim == 3
        lengths = cu_seqlens.diff().tolist()
        assert options["max_seqlen"] == max(lengths)
        rows = torch.cat([torch.arange(length) for length in lengths])
    else:
        batch, tokens = x.shape[:2]
        rows = torch.arange(tokens).expand(batch, tokens)
        rows = rows + offsets[:, None] if isinstance(offsets, Tensor) else rows
    rotated = rotate_at(x, cos[rows], sin[rows], options["interleaved"])
    return x.copy_(rotated) if options["inplace"] else rotated


def flashinfer_rotate(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions.long()].chunk(2, -1)
    rotated = [rotate_at(x.view(x.shape[0], -1, head_size), cos, sin, not is_neox).view(x.shape) for x in (query, key)]
    return rotated[0], rotated[1]


def flashinfer_overwrite(positions: Tensor, query: Tensor, key: Tensor, *rest: Any) -> None:
    for x, rotated in zip((query, key), flashinfer_rotate(positions, query, key, *rest), strict=True):
        x.copy_(rotated)


def rope_padded(
    xq: Tensor, xk: Tensor, xv: Tensor, cache_k: Tensor, cache_v: Tensor, bias: Any, **options: Any
) -> Tensor:
    assert xq.shape[0] == 1
    assert xk.shape == xv.shape == cache_k.shape == cache_v.shape
    dim = xq.shape[-1]
    powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angles = options["seqpos"][:, None] * options["theta"] ** -powers
    cache_k.copy_(rotate_at(xk, angles.cos(), angles.sin(), options["adjacents"]))
    cache_v.copy_(xv)
    return rotate_at(xq, angles.cos(), angles.sin(), options["adjacents"])


def transformer_engine_rotate(t: Tensor, freqs: Tensor, **options: Any) -> Tensor:
    assert options["fused"]
    assert freqs.dtype == torch.float32
    angles = freqs[:, 0, 0]
    angles = angles[:, ::2] if options["interleaved"] else angles.chunk(2, -1)[0]
    packed = options["tensor_format"] == "thd"
    return per_tensor(
        t,
        angles.cos(),
        angles.sin(),
        seqlen_offsets=options["start_positions"],
        cu_seqlens=options["cu_seqlens"],
        max_seqlen=int(options["cu_seqlens"].diff().max()) if packed else None,
        interleaved=options["interleaved"],
        inplace=False,
    )


STAND_INS: dict[str, dict[str, dict[str, Any]]] = {
    "liger_kernel": {
        "liger_kernel.ops.rope": {"rope_forward": liger_forward, "LigerRopeFunction": Overwrite},
    },
    "quack": {"quack.rotary": {"apply_rotary": per_tensor, "apply_rotary_emb": per_tensor}},
    "flash_attn": {
        "flash_attn.ops.triton.rotary": {"apply_rotary": per_tensor},
        "flash_attn.layers.rotary": {"apply_rotary_emb": per_tensor},
    },
    "flashinfer": {
        "flashinfer": {
            "apply_rope_with_cos_sin_cache": flashinfer_rotate,
            "apply_rope_with_cos_sin_cache_inplace": flashinfer_overwrite,
        }
    },
    "vllm": {"vllm._custom_ops": {}},  # importing it brings torch.ops._C.rotary_embedding
    "xformers": {
        "xformers.ops": {"rope_padded": rope_padded},
        "xformers.ops.fmha.attn_bias": {
            "BlockDiagonalCausalWithOffsetPaddedKeysMask": SimpleNamespace(from_seqlens=lambda **options: options)
        },
    },
    "transformer_engine": {
        "transformer_engine.pytorch.attention.rope": {"apply_rotary_pos_emb": transformer_engine_rotate}
    },
}


@pytest.mark.parametrize("name", STAND_INS)
def test_an_adapter_calls_its_library_as_documented(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module_name, attributes in STAND_INS[name].items():
        parts = module_name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in STAND_INS[name]:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        module = ModuleType(module_name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, module_name, module)
    if name == "vllm":
        monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(rotary_embedding=flashinfer_overwrite), raising=False)
    assert len(served_by(name)) >= 4
    # Angles in float32 are what Transformer Engine takes, and too coarse at the positions of a long table.
    coarse = [text for text in complaints(name, torch.device("cpu")) if "float32" not in text]
    assert coarse == []

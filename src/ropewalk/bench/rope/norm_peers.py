"""Other implementations of the norm beside the rotation: PyTorch as models write it, and Liger's two functions."""

from __future__ import annotations

import torch
from torch import Tensor

from ropewalk.bench.rope.cases import Case, Inputs
from ropewalk.bench.rope.gate import NORM_EPS, Rotation, norm_plainly
from ropewalk.bench.rope.peers import Peer


def _why_not(case: Case, direction: str) -> str | None:
    return "norms alone" if case.norm_offset is None else None


def _liger_why_not(case: Case, direction: str) -> str | None:
    return "its rotation is of the whole head" if case.width != case.head_dim else _why_not(case, direction)


def _parameters(inputs: Inputs) -> tuple[Tensor, ...]:
    return tuple(weight.detach().clone().requires_grad_() for weight in inputs.weights)


def _build_eager(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    weights = _parameters(inputs)
    cos, sin = (table[: case.tokens, None].to(case.torch_dtype) for table in (inputs.cos, inputs.sin))

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return norm_plainly(q, weights[0], cos, sin, case), norm_plainly(k, weights[1], cos, sin, case)

    return Rotation(rotate, weights=weights)


def _build_compiled(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    import torch._functorch.config

    torch.compiler.reset()
    if differentiable:
        # A backward that is timed runs many times over one graph, so it must not give its buffers away.
        torch._functorch.config.donated_buffer = False
    eager = _build_eager(case, inputs, differentiable)
    return Rotation(torch.compile(eager.rotate, fullgraph=True, dynamic=False), weights=eager.weights)


def _build_liger(case: Case, inputs: Inputs, differentiable: bool) -> Rotation:
    """Build Liger's functions, one after another: each norm has a launch, and the rotation overwrites their results."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    weights = _parameters(inputs)
    cos, sin = (torch.cat((table, table), -1)[None, : case.tokens] for table in (inputs.cos, inputs.sin))
    casting = "gemma" if case.norm_offset else "llama"

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        normed = (
            LigerRMSNormFunction.apply(x, weight, NORM_EPS, case.norm_offset, casting, False).transpose(1, 2)
            for x, weight in zip((q, k), weights, strict=True)
        )
        rotated = LigerRopeFunction.apply(*normed, cos, sin)
        return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)

    return Rotation(rotate, weights=weights)


NORM_PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("compiled", "torch", "torch", False, _why_not, _build_compiled),
        Peer("eager", "torch", "torch", False, _why_not, _build_eager),
        Peer("liger_kernel", "liger_kernel.ops.rope", "liger_kernel", True, _liger_why_not, _build_liger),
    )
}

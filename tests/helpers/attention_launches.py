"""Launches of the Triton kernels of attention, recorded for the compile checks and tools/kernel_figures.py."""

import torch
from torch.nn.attention.flex_attention import create_block_mask

from helpers.compile import Recorder, pretend_target
from ropewalk import BlockLists
from ropewalk.ops.attention import reference
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.backend import Wanted
from ropewalk.ops.attention.triton import launch as triton_launch
from ropewalk.ops.attention.triton import launch_common
from ropewalk.schemes import Alibi, ExpoSB, ReRope, Rope, T5Bias

KERNELS = ("forward_kernel", "backward_dq_kernel", "backward_dkdv_kernel")
H, T = 4, 128


def lists_of_heads():
    """Return lists that every query head has its own of."""
    return BlockLists(torch.ones(1, H, 1, dtype=torch.int32), torch.zeros(1, H, 1, 1, dtype=torch.int32))


def block_mask():
    """Return a mask whose blocks have bits, one kind of which every kernel loops over apart."""
    return create_block_mask(lambda b, h, m, n: m >= n, None, None, T, T, device="cpu")


CALLS = {
    "plain": {},
    "rope-causal": {"position": Rope(), "causal": True},
    "rope-padding": {"position": Rope(), "mask": torch.ones(2, 1, 1, T, dtype=torch.bool)},
    "alibi-mask": {"position": Alibi(), "mask": torch.ones(T, T, dtype=torch.bool)},
    "decay-window": {"position": ExpoSB(distance_decay=True), "causal": True, "window": 64},
    "packed": {"position": Rope(), "causal": True, "cu_seqlens_q": torch.tensor([0, 128, 256])},
    "starts": {"position": Rope(), "key_starts": torch.tensor([0, 3]), "query_starts": torch.tensor([0, 0])},
    "softcap": {"causal": True, "softcap": 50.0},
    "sinks": {"causal": True, "sinks": torch.zeros(H)},
    "dropout": {"causal": True, "dropout_p": 0.1},
    "learned": {"position": Alibi(torch.ones(H).requires_grad_()), "causal": True},
    "learned-bands": {"position": ExpoSB(band_weights=torch.ones(H).requires_grad_()), "causal": True},
    "learned-t5": {"position": T5Bias(torch.ones(32, H).requires_grad_()), "causal": True},
    "blocks": {"position": Rope(), "causal": True, "blocks": lists_of_heads()},
    "block-mask": {"position": Rope(), "blocks": block_mask()},
    # The windows are shorter than T: otherwise nothing is far, and the kernels are those of RoPE.
    "rerope": {"position": ReRope(48), "causal": True},
    "leaky-full": {"position": ReRope(48, leak=4.0)},
}


def draw(head_dim, v_head_dim, dtype, name):
    """Draw q, k and v of a call, and return its keywords."""
    keywords = CALLS[name]
    q, k, v = (torch.randn(2, T, *shape).to(dtype) for shape in ((H, head_dim), (2, head_dim), (2, v_head_dim)))
    if "cu_seqlens_q" in keywords:
        return *(x.flatten(0, 1) for x in (q, k, v)), {**keywords, "layout": "thd"}
    return q, k, v, {**keywords, "layout": "bthd"}


def launch_of_8_bits(monkeypatch, target, head_dim, v_head_dim, precision, name):
    """Return the launch of the forward kernel of a call of 8-bit products on a target."""
    pretend_target(monkeypatch, target)
    *tensors, keywords = draw(head_dim, v_head_dim, torch.bfloat16, name)
    launches = []

    def quantise(call, on, permuted):
        operands = reference.quantise_call(call)
        v = operands.v
        return operands if v is None else operands._replace(v=v._replace(x=v.x.contiguous()))

    monkeypatch.setattr(triton_launch, "quantise", quantise)
    monkeypatch.setattr(triton_launch, "forward_kernel", Recorder(triton_launch.forward_kernel, launches))
    monkeypatch.setattr(launch_common, "schedule_kernel", Recorder(launch_common.schedule_kernel, []))
    with torch.no_grad():
        triton_launch.forward(make_call(*tensors, precision=precision, **keywords), False)
    [launch] = launches
    return launch


def launches_of(monkeypatch, target, head_dim, v_head_dim, dtype, name):
    """Return the launches of a call's forward and backward on a target, and those of its schedules and sums."""
    pretend_target(monkeypatch, target)
    q, k, v, keywords = draw(head_dim, v_head_dim, dtype, name)
    launches, others = [], []
    for kernel in KERNELS:
        monkeypatch.setattr(triton_launch, kernel, Recorder(getattr(triton_launch, kernel), launches))
    for module, other in (
        (launch_common, "schedule_kernel"),
        (launch_common, "sinks_grad_kernel"),
        (launch_common, "sum_parts_kernel"),
    ):
        monkeypatch.setattr(module, other, Recorder(getattr(module, other), others))
    call = make_call(q, k, v, **keywords)
    if call.dropout_p > 0:
        call = call._replace(seed=torch.zeros(1, dtype=torch.int64))
    wanted = Wanted(name.startswith("learned"), "sinks" in keywords)
    with torch.no_grad():
        out, saved = triton_launch.forward(call, True)
        saved_call = call._replace(q=saved.q, k=saved.k)
        triton_launch.backward(saved_call, out, saved, torch.randn_like(out), None, wanted)
    assert list(dict.fromkeys(launch[0].__name__ for launch in launches)) == list(KERNELS)
    return launches, others

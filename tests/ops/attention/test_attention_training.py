"""Attention that learns in several processes: gradients are those of one process that has the whole batch."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from helpers.modes import INTERPRETED, ON_GPU
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ropewalk import Alibi, ExpoSB, Rope, T5Bias, attention

WORLD = 2
SECONDS = 240  # then processes that wait for each other are ended
B, T, H, K, D = 2, 10, 2, 1, 8
WIDTH = H * D
ON_GPUS = ON_GPU and torch.cuda.device_count() >= WORLD
IMPL = "triton" if INTERPRETED or ON_GPUS else "reference"

pytestmark = [
    pytest.mark.both_modes,  # by the reference, and by the kernels
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available(), reason="this build of PyTorch has no torch.distributed"),
]


class Layer(nn.Module):
    """Attention whose scheme and sinks are learned. The scheme is made in each call, of the parameters as they are."""

    def __init__(self, kind, dropout_p=0.0, checkpointed=False):
        super().__init__()
        self.kind, self.dropout_p, self.checkpointed = kind, dropout_p, checkpointed
        self.project = nn.Linear(WIDTH, WIDTH + 2 * K * D)
        self.sinks = nn.Parameter(torch.randn(H))
        if kind != "rope":
            self.learned = nn.Parameter(torch.rand((8, H) if kind == "t5" else (H,)) + 0.1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def scheme(self):
        if self.kind == "alibi":
            return Alibi(self.learned)
        if self.kind == "bands":
            return ExpoSB(band_weights=self.learned, distance_decay=True)
        return T5Bias(self.learned, max_distance=12) if self.kind == "t5" else Rope()

    def attend(self, q, k, v, **call):
        return attention(
            q, k, v, position=self.scheme(), sinks=self.sinks, causal=True, dropout_p=self.dropout_p, impl=IMPL, **call
        )

    def forward(self, x, **call):
        q, k, v = (y.unflatten(-1, (-1, D)) for y in self.project(x).split([WIDTH, K * D, K * D], dim=-1))
        if self.checkpointed:
            out = checkpoint(self.attend, q, k, v, use_reentrant=False, **call)
        else:
            out = self.attend(q, k, v, **call)
        return self.out(out.flatten(-2))


class Model(nn.Module):
    """Layers of each kind, with residuals."""

    def __init__(self, dropout_p=0.0, kinds=("rope", "alibi", "bands", "t5"), checkpointed=False):
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind, dropout_p, checkpointed) for kind in kinds)

    def forward(self, x, **call):
        for layer in self.layers:
            x = x + layer(x, **call)
        return x


LENGTHS = [[5, 0, 4], [1, 8]]  # of each process's packed sequences


def dense_batch(device):
    """x of the whole batch, each process's, and its other arguments."""
    x = torch.randn(B, T, WIDTH).to(device)
    return x, [(part, {}) for part in x.chunk(WORLD)], {}


def padded_batch(device):
    x, parts, _ = dense_batch(device)
    starts, ends = torch.tensor([3, 0], device=device), torch.tensor([T, 7], device=device)
    call = {"key_starts": starts, "key_lengths": ends}
    split = zip(*(value.chunk(WORLD) for value in call.values()), strict=True)
    return (
        x,
        [(part, dict(zip(call, values, strict=True))) for (part, _), values in zip(parts, split, strict=True)],
        call,
    )


def packed_batch(device):
    x = torch.randn(sum(map(sum, LENGTHS)), WIDTH).to(device)

    def call(lengths):
        return {"layout": "thd", "cu_seqlens_q": torch.tensor([0, *lengths], device=device).cumsum(0).int()}

    parts = x.split([sum(lengths) for lengths in LENGTHS])
    return x, list(zip(parts, map(call, LENGTHS), strict=True)), call([length for part in LENGTHS for length in part])


BATCHES = {"dense": dense_batch, "padded": padded_batch, "packed": packed_batch}


def gradients(model, runs):
    """Those of the mean over runs (seed, x, other arguments) of the outputs' sines, by parameter."""
    model.zero_grad()
    for seed, x, call in runs:
        torch.manual_seed(seed)
        (model(x, **call).sin().sum() / len(runs)).backward()
    return {
        name.removeprefix("_orig_mod.").removeprefix("module."): parameter.grad
        for name, parameter in model.named_parameters()
    }


def compare(wrap, rank, device, batch, *, rounds=1, whole=True, **model):
    """A process's gradients in a wrapper against those of the whole batch, or of both parts one after the other."""
    torch.manual_seed(7)
    plain = Model(**model).to(device)
    torch.manual_seed(7)
    wrapped = wrap(Model(**model).to(device))
    for number in range(rounds):
        torch.manual_seed(number)
        x, parts, call = BATCHES[batch](device)
        # What is dropped depends on a row's place in its batch: then the parts are computed as the processes do.
        runs = [(0, x, call)] if whole else [(10 + index, *part) for index, part in enumerate(parts)]
        expected = gradients(plain, runs)
        scale = 1 / WORLD if whole else 1
        actual = gradients(wrapped, [(10 + rank, *parts[rank])])
        assert actual.keys() == expected.keys()
        for name, grad in expected.items():
            mine = actual[name]
            mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
            assert grad.abs().sum() > 0, name
            torch.testing.assert_close(
                mine, grad * scale, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )


# What the processes do


def compare_batches(wrap, rank, device):
    for batch, rounds in (("dense", 2), ("padded", 1), ("packed", 1)):
        compare(wrap, rank, device, batch, rounds=rounds)
    compare(wrap, rank, device, "dense", whole=False, dropout_p=0.3, kinds=("rope", "alibi"))
    compare(wrap, rank, device, "packed", whole=False, dropout_p=0.3, kinds=("bands", "t5"), checkpointed=True)


def in_ddp(rank, device):
    compare_batches(DistributedDataParallel, rank, device)


def in_ddp_compiled(rank, device):
    def wrap(model):
        return torch.compile(DistributedDataParallel(model), backend="aot_eager")

    compare(wrap, rank, device, "packed", whole=False, dropout_p=0.3, kinds=("rope", "t5"))


def in_fsdp(rank, device):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (WORLD,))

    def wrap(model):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    compare_batches(wrap, rank, device)


def run(rank, task, store):
    """One process's part of a test."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if ON_GPUS else torch.device("cpu")
    if ON_GPUS:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if ON_GPUS else "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    task(rank, device)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads now and then abort a process that takes itself apart


def in_processes(task, tmp_path):
    """Run a task in as many processes as there are; what one raises is raised here."""
    work = (task, str(tmp_path / "store"))
    processes = torch.multiprocessing.start_processes(run, work, WORLD, join=False, start_method="forkserver")
    deadline = time.monotonic() + SECONDS
    try:
        while not processes.join(timeout=1):
            assert time.monotonic() < deadline, f"the processes were not done after {SECONDS} seconds"
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()


def test_gradients_in_data_parallel(tmp_path):
    in_processes(in_ddp, tmp_path)


def test_gradients_in_compiled_data_parallel(tmp_path):
    in_processes(in_ddp_compiled, tmp_path)


def test_gradients_of_sharded_parameters(tmp_path):
    pytest.importorskip("torch.distributed.fsdp", reason="this PyTorch has no FSDP2")
    in_processes(in_fsdp, tmp_path)

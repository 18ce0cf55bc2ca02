"""Functions that run in several processes: of gloo on a CPU, or of NCCL with a GPU each. One that hangs fails."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

TIMEOUT = datetime.timedelta(seconds=120)
# A server imports these once, which takes seconds, and forks. What they import later they do not share.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["sympy", "torch.distributed", "torch.multiprocessing", "triton", "ropewalk.parallel"])


def _work(
    rank: int, size: int, store: str, backend: str, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # PyTorch's meshes keep groups: their threads may abort a process that ends as Python does


def run(
    size: int, function: Callable[..., None], *arguments: Any, backend: str = "gloo", start_method: str = "forkserver"
) -> None:
    """Call function(rank, *arguments) in each of `size` processes; an error of any is raised here.

    Those of a server have its environment, whatever a test has set; "spawn" starts others.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = (size, str(Path(folder, "store")), backend, function, arguments)
        torch.multiprocessing.start_processes(_work, work, size, start_method=start_method)

"""Functions that run in several processes: of gloo on a CPU, or of NCCL with a GPU each. One that hangs fails."""

from __future__ import annotations

import datetime
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


def run(size: int, function: Callable[..., None], *arguments: Any, backend: str = "gloo") -> None:
    """Call function(rank, *arguments) in each of `size` processes; an error of any is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, (size, str(Path(folder, "store")), backend, function, arguments), size)

"""`ropewalk doctor`."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import ropewalk

if TYPE_CHECKING:
    import torch

DEFAULT_TOKENS = 2048  # of the call whose default backend is named


def doctor() -> None:
    """Print versions and devices, the implementations and peers that run here, and why others do not."""
    import torch
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ropewalk.bench.attention.peers import ATTENTION_PEERS
    from ropewalk.bench.core.peers import find_peer
    from ropewalk.bench.core.records import version_of
    from ropewalk.bench.rope.peers import PEERS
    from ropewalk.ops.attention import backends
    from ropewalk.ops.rope.backends import IMPLEMENTATIONS, choose, why_not

    console = Console()
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = [*gpus, torch.device("cpu")]

    def show(title: str, headings: str, rows: Iterable[tuple[str, ...]]) -> None:
        table = Table(*headings.split(), title=title)
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)

    versions = {
        "ropewalk": ropewalk.__version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "torch is built without it",
        "ROCm": torch.version.hip or "torch is built without it",
        "triton": version_of("triton") or "not installed",
    }
    show("versions", "package version", versions.items())

    def rotations() -> Iterator[tuple[str, ...]]:
        for device in devices:
            name = str(device)
            if device.type == "cuda":
                properties = torch.cuda.get_device_properties(device)
                name = f"{device} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)"
            for impl in IMPLEMENTATIONS:
                yield name, impl, _verdict(why_not(impl, device), choose(None, device) == impl)

    def attentions() -> Iterator[tuple[str, ...]]:
        for device in devices:
            default = _attention_by_default(device)
            for impl in backends.BACKENDS:
                yield str(device), impl, _verdict(backends.why_missing(impl, device), default == impl)

    def peers() -> Iterator[tuple[str, ...]]:
        for of, known in (("rotation", PEERS), ("attention", ATTENTION_PEERS)):
            for peer in known.values():
                version_found, reason = find_peer(peer, devices[0])
                yield of, peer.name, f"yes, {version_found}" if reason is None else f"no: {reason}"

    show("implementations of the rotation", "device implementation here", rotations())
    if not gpus:
        console.print("PyTorch finds no GPU.")
    show("implementations of attention", "device implementation here", attentions())
    console.print(
        f"The default is of a causal call with RoPE and {DEFAULT_TOKENS} tokens; `ropewalk.explain_choice` names "
        "that of your call. The reference is for correctness, not speed."
    )
    if gpus and (text := _launcher()) is not None:
        console.print(escape(text))
    show("native extension", "what here", _native_extension().items())
    show(f"peers that `ropewalk bench` can measure on {devices[0]}", "of peer here", peers())


def _verdict(reason: str | None, is_default: bool) -> str:
    if reason is not None:
        return f"no: {reason}"
    return "yes, and used by default" if is_default else "yes"


def _attention_by_default(device: torch.device) -> str:
    """Name the backend of a plain training call."""
    import torch

    from ropewalk.ops.attention.api import explain_choice
    from ropewalk.schemes import Rope

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q = torch.empty(1, DEFAULT_TOKENS, 8, 64, dtype=dtype, device=device, requires_grad=True)
    return explain_choice(q, q, q, position=Rope(), causal=True).name


def _launcher() -> str | None:
    """Say how planned calls of attention launch; None without Triton for NVIDIA GPUs. It is compiled here."""
    import torch

    from ropewalk import device as gpu

    device = torch.device("cuda", 0)
    if not gpu.is_nvidia(device) or gpu.why_no_triton(device) is not None:
        return None
    from ropewalk.ops.attention.triton import launcher

    reason = launcher.why_missing()
    if reason is None:
        return "Planned calls of attention launch by the launcher in C."
    return f"Planned calls of attention launch by Triton's launchers, which costs the host more: {reason}."


def _native_extension() -> dict[str, str]:
    """Describe the compiled extension and its compilers. Nothing is compiled here."""
    from ropewalk.ops.rope.cuda import build as native_build

    compilers = native_build.find_compilers()
    rows = {"nvcc": compilers.nvcc or "no", "host compiler": compilers.cxx or "no"}
    if compilers.missing is not None:
        rows["missing"] = compilers.missing
    architectures = native_build.visible_architectures()
    try:
        rows["cache"] = str(native_build.cache_dir())
        if not architectures:
            rows["library"] = "no: PyTorch finds no NVIDIA GPU of compute capability 8.0 or more"
        elif (library := native_build.find_library(architectures)) is not None:
            rows["library"] = f"yes, {library}"
        elif (reason := native_build.failed_before(architectures)) is not None:
            rows["library"] = f"no: {reason}\n`ropewalk build` tries again"
        elif (reason := native_build.may_build_on_first_use()) is not None:
            rows["library"] = f"no: `ropewalk build` compiles it; {reason}"
        else:
            rows["library"] = "no: it is compiled when it is first used, or by `ropewalk build`"
    except native_build.BuildError as error:
        rows["library"] = f"no: {error}"
    return rows

"""`ropewalk doctor`, in plain text: it needs no package that the library does not need."""

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

    from ropewalk.bench.attention.peers import ATTENTION_PEERS
    from ropewalk.bench.core.peers import find_peer
    from ropewalk.bench.core.records import version_of
    from ropewalk.bench.rope.peers import PEERS
    from ropewalk.ops.attention import backends
    from ropewalk.ops.attention.api import explain_choice
    from ropewalk.ops.rope.backends import IMPLEMENTATIONS, choose, why_not
    from ropewalk.schemes import Rope

    names = {torch.device("cpu"): "cpu"}
    for index in reversed(range(torch.cuda.device_count())):  # GPUs come first
        gpu = torch.cuda.get_device_properties(index)
        names = {torch.device("cuda", index): f"cuda:{index} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)"} | names
    first = next(iter(names))

    def verdict(reason: str | None, is_default: bool) -> str:
        return f"no: {reason}" if reason is not None else "yes, and used by default" if is_default else "yes"

    versions = {"ropewalk": ropewalk.__version__, "python": platform.python_version()}
    versions["python"] += f" on {platform.system()} {platform.machine()}"
    versions |= {"torch": str(torch.__version__), "CUDA": torch.version.cuda or "torch is built without it"}
    versions |= {"ROCm": torch.version.hip or "torch is built without it"}
    show("versions", "package version", [*versions.items(), ("triton", version_of("triton") or "not installed")])
    rotations, attentions = [], []
    for device, name in names.items():
        default = choose(None, device)
        rotations += [(name, impl, verdict(why_not(impl, device), default == impl)) for impl in IMPLEMENTATIONS]
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        q = torch.empty(1, DEFAULT_TOKENS, 8, 64, dtype=dtype, device=device, requires_grad=True)
        default = explain_choice(q, q, q, position=Rope(), causal=True).name  # of a plain training call
        missing = {impl: backends.why_missing(impl, device) for impl in backends.BACKENDS}
        attentions += [(str(device), impl, verdict(why, default == impl)) for impl, why in missing.items()]
    show("implementations of the rotation", "device implementation here", rotations)
    if first.type == "cpu":
        print("PyTorch finds no GPU.\n")
    show("implementations of attention", "device implementation here", attentions)
    print(
        f"The default is of a causal call with RoPE and {DEFAULT_TOKENS} tokens; `ropewalk.explain_choice` names "
        "that of your call. The reference is for correctness, not speed.\n"
    )
    if first.type == "cuda" and (text := _launcher(torch.device("cuda", 0))) is not None:
        print(f"{text}\n")
    show("native extension", "what here", _native_extension())
    known = [("rotation", peer) for peer in PEERS.values()] + [("attention", peer) for peer in ATTENTION_PEERS.values()]
    found = [(of, peer.name, *find_peer(peer, first)) for of, peer in known]
    rows = [(of, name, f"yes, {version}" if why is None else f"no: {why}") for of, name, version, why in found]
    show(f"peers that `ropewalk bench` can measure on {first}", "of peer here", rows)


def show(title: str, headings: str, rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table; the last cell of a row may have several lines."""
    lines = [tuple(headings.split()), *rows]
    widths = [max(map(len, column)) for column in zip(*(line[:-1] for line in lines), strict=True)]
    print(title)
    for *first, last in lines:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(first, widths, strict=True))
        print(f"  {cells}  " + last.replace("\n", f"\n{' ' * (len(cells) + 4)}"))
    print()


def _launcher(device: torch.device) -> str | None:
    """Say how planned calls of attention launch; None without Triton for NVIDIA GPUs. It is compiled here."""
    from ropewalk import device as gpu

    if not gpu.is_nvidia(device) or gpu.why_no_triton(device) is not None:
        return None
    from ropewalk.ops.launch import launcher

    if (reason := launcher.why_missing()) is None:
        return "Planned calls of attention launch by the launcher in C."
    return f"Planned calls of attention launch by Triton's launchers, which costs the host more: {reason}."


def _native_extension() -> Iterator[tuple[str, str]]:
    """Describe the compiled extension and its compilers. Nothing is compiled here."""
    from ropewalk.ops.rope.cuda import build

    compilers, architectures = build.find_compilers(), build.visible_architectures()
    yield from (("nvcc", compilers.nvcc or "no"), ("host compiler", compilers.cxx or "no"))
    if compilers.missing is not None:
        yield "missing", compilers.missing
    library = "no: it is compiled when it is first used, or by `ropewalk build`"
    try:
        yield "cache", str(build.cache_dir())
        if not architectures:
            library = "no: PyTorch finds no NVIDIA GPU of compute capability 8.0 or more"
        elif (found := build.find_library(architectures)) is not None:
            library = f"yes, {found}"
        elif (reason := build.failed_before(architectures)) is not None:
            library = f"no: {reason}\n`ropewalk build` tries again"
        elif (reason := build.may_build_on_first_use()) is not None:
            library = f"no: `ropewalk build` compiles it; {reason}"
    except build.BuildError as error:
        library = f"no: {error}"
    yield "library", library

"""The `ropewalk` command. Nothing here imports torch until a command needs it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import ropewalk

app = typer.Typer(
    help="Position encodings for transformers as fast, differentiable GPU kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench_app = typer.Typer(help="Measure this library against others, on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@contextmanager
def _user_errors() -> Iterator[None]:
    """Show what a user can put right as one line, not as a traceback."""
    try:
        yield
    except (ValueError, ModuleNotFoundError) as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ropewalk {ropewalk.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Position encodings for transformers as fast, differentiable GPU kernels."""


@app.command()
def doctor() -> None:
    """Print versions, devices, and which implementations and peers exist here and why the others don't."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from ropewalk.bench.peers import PEERS, find_peer
    from ropewalk.bench.records import version_of
    from ropewalk.ops.rope.eager import IMPLEMENTATIONS, choose, why_not

    console = Console()
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = [*gpus, torch.device("cpu")]

    versions = Table(title="versions")
    versions.add_column("package")
    versions.add_column("version")
    for package, version in (
        ("ropewalk", ropewalk.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", str(torch.__version__)),
        ("CUDA", torch.version.cuda or "torch is built without it"),
        ("ROCm", torch.version.hip or "torch is built without it"),
        ("triton", version_of("triton") or "not installed"),
    ):
        versions.add_row(package, version)
    console.print(versions)

    rotation = Table(title="implementations of the rotation")
    rotation.add_column("device")
    rotation.add_column("implementation")
    rotation.add_column("here")
    for device in devices:
        name = str(device)
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            name = f"{device} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)"
        for impl in IMPLEMENTATIONS:
            reason = why_not(impl, device)
            verdict = "yes, and used by default" if choose(None, device) == impl else "yes"
            rotation.add_row(name, impl, verdict if reason is None else f"no: {reason}")
    console.print(rotation)
    if not gpus:
        console.print("PyTorch sees no GPU.")

    peers = Table(title=f"peers that `ropewalk bench` can measure on {devices[0]}")
    peers.add_column("peer")
    peers.add_column("here")
    for peer in PEERS.values():
        version_found, reason = find_peer(peer, devices[0])
        peers.add_row(peer.name, f"yes, {version_found}" if reason is None else f"no: {reason}")
    console.print(peers)


@app.command()
def demo(
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The text to learn; by default documentation of Python."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; by default what suits the device.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    figure: Annotated[Path, typer.Option(dir_okay=False, help="Where the figure goes.")] = Path("ropewalk-demo.png"),
    seed: Annotated[int, typer.Option(help="Of weights, batches and the generated line.")] = 0,
) -> None:
    """Train a small transformer on real text, let it write, and time the rotation of its own q and k."""
    from ropewalk.experiments.demo import run_demo

    with _user_errors():
        run_demo(text, steps, device, figure, seed)


@bench_app.command("rope")
def bench_rope(
    case: Annotated[list[str] | None, typer.Option(help="A case by name; repeat for more.")] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(help="One of our implementations; repeat for more. By default all that exist here."),
    ] = None,
    mode: Annotated[str, typer.Option(help="Of fwd, bwd and decode, with commas between.")] = "fwd,bwd,decode",
    peers: Annotated[str, typer.Option(help="auto (those that import), none, or names with commas between.")] = "auto",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The record, a new file; by default one under ./results/."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="How often each call is timed, at most.")] = 100,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
) -> None:
    """Measure the rotation: time, bandwidth, host time, memory, each against a copy and against the peers.

    Everything is checked against float64 before it is timed. Ctrl-C keeps what was measured.
    """
    if list_cases:
        _list_cases()
        return
    from ropewalk.bench.rope import run_rope_bench

    with _user_errors():
        result = run_rope_bench(
            case_names=case or (),
            impls=impl or (),
            modes=[name.strip() for name in mode.split(",")],
            peers=peers,
            output=output,
            device=device,
            rounds=rounds,
        )
    if result.interrupted:
        raise typer.Exit(130)


def _list_cases() -> None:
    from ropewalk.bench.cases import CASES

    variants: dict[str, list[str]] = {}
    for case in CASES:
        variants.setdefault(case.name, []).append(case.variant)
    first = {case.name: case for case in reversed(CASES)}
    for name in variants:
        case = first[name]
        positions = "packed sequences" if case.sequences else f"positions by {case.positions}"
        typer.echo(
            f"{name}\n"
            f"    B{case.batch} T{case.tokens} H{case.q_heads}/{case.k_heads} D{case.head_dim} R{case.width}, "
            f"{case.dtype}, {case.layout}, {positions}\n"
            f"    variants: {', '.join(variants[name])}\n"
            f"    modes: {', '.join(case.directions)}"
        )

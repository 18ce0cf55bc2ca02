"""`ropewalk bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.cli.options import split_names, user_errors

if TYPE_CHECKING:
    from ropewalk.bench.cases import Case

app = typer.Typer(help="Measure this library against others, on this machine.", no_args_is_help=True)


@app.command("rope")
def rope(
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
    sweep: Annotated[bool, typer.Option(help="Other cases: one shape at lengths from 1 to 131072.")] = False,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
) -> None:
    """Measure the rotation: time, bandwidth, host time, memory, each against a copy and against the peers.

    Everything is checked against float64 before it is timed. Ctrl-C keeps what was measured.
    """
    from ropewalk.bench.cases import CASES, SWEEP

    cases = SWEEP if sweep else CASES
    if list_cases:
        _list_cases(cases)
        return
    from ropewalk.bench.rope import run_rope_bench

    with user_errors():
        result = run_rope_bench(
            case_names=case or (),
            impls=impl or (),
            modes=[name.strip() for name in mode.split(",")],
            peers=peers,
            output=output,
            device=device,
            rounds=rounds,
            cases=cases,
        )
    if result.interrupted:
        raise typer.Exit(130)


@app.command("attention")
def attention(
    case: Annotated[list[str] | None, typer.Option(help="A case by name; repeat for more.")] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(help="One of our implementations; repeat for more. By default triton on a GPU, else reference."),
    ] = None,
    mode: Annotated[str, typer.Option(help="Of those that --list shows, with commas between. By default all.")] = "",
    peers: Annotated[str, typer.Option(help="auto (those that import), none, or names with commas between.")] = "auto",
    protocol: Annotated[
        str, typer.Option(help="hot, cool or hot,cool; by default both for the kernels alone, and hot elsewhere.")
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The record, a new file; by default one under ./results/."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = None,
    rounds: Annotated[int | None, typer.Option(min=3, help="How often each call is timed, at most.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and modes, and stop.")] = False,
) -> None:
    """Measure attention: kernels, RoPE and other schemes in them, memory, each against the peers.

    Everything is checked against float64 before it is timed. Ctrl-C keeps what was measured.
    """
    from ropewalk.bench.attention_cases import CASES, MODES

    if list_cases:
        for known in CASES:
            modes = ", ".join(known.modes) or "none of its own"
            typer.echo(f"{known.name}\n    {known.description}\n    modes: {modes}")
        for name, meaning in MODES.items():
            typer.echo(f"mode {name}: {meaning}")
        return
    from ropewalk.bench.attention import OursError, run_attention_bench

    with user_errors(OursError):
        result = run_attention_bench(
            case_names=case or (),
            impls=impl or (),
            modes=split_names(mode) or tuple(MODES),
            peers=peers,
            protocols=split_names(protocol),
            output=output,
            device=device,
            rounds=rounds,
        )
    if result.interrupted:
        raise typer.Exit(130)


@app.command("training")
def training(
    case: Annotated[list[str] | None, typer.Option(help="A case by name; repeat for more.")] = None,
    precision: Annotated[str, typer.Option(help="Of autocast and bf16, with commas between.")] = "autocast,bf16",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The record, a new file; by default one under ./results/."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default the GPU if there is one.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="How often each candidate is timed.")] = 8,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
) -> None:
    """Measure training steps of BERT and Llama models with attention by Ropewalk, by SDPA and by eager PyTorch."""
    with user_errors():
        from ropewalk.bench.training import run_training_bench
        from ropewalk.bench.training_models import CASES

        if list_cases:
            for known in CASES:
                size = f"batch {known.batch} of {known.tokens} tokens"
                typer.echo(f"{known.name}\n    {known.description}, {size}; {', '.join(known.precisions)}")
            return
        run_training_bench(
            case_names=case or (), precisions=split_names(precision), output=output, device=device, rounds=rounds
        )


def _list_cases(cases: Sequence[Case]) -> None:
    variants: dict[str, list[str]] = {}
    for case in cases:
        variants.setdefault(case.name, []).append(case.variant)
    first = {case.name: case for case in reversed(cases)}
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

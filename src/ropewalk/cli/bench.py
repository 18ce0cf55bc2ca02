"""`ropewalk bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.options import split_names, user_errors

if TYPE_CHECKING:
    from ropewalk.bench.core.runner import Bench

app = typer.Typer(help="Measure this library against others, on this machine.", no_args_is_help=True)

Cases = Annotated[list[str] | None, typer.Option("--case", help="A case by name; repeat for more.")]
Impls = Annotated[
    list[str] | None,
    typer.Option(
        "--impl",
        help="One of our implementations; repeat for more. By default, of rotations all that exist here, of attention "
        "triton on a GPU, else reference; of the host's times all but the reference on a GPU, else sdpa and reference.",
    ),
]
Modes = Annotated[str, typer.Option("--mode", help="Of those that --list shows, with commas between. By default all.")]
Peers = Annotated[str, typer.Option(help="auto (those that import), none, or names with commas between.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The record, a new file; by default one under ./results/.")
]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default the GPU if there is one.")]
Dtype = Annotated[
    str | None, typer.Option(help="float16, bfloat16 or float32 for all cases; by default each case's own.")
]
Rounds = Annotated[
    int | None, typer.Option(min=3, help="How often each call is timed, at most; by default as the benchmark has it.")
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the record that --output names: what is whole in it stays, what was cut off is measured "
        "anew. The machine, all versions and the other options must be the same.",
    ),
]
List = Annotated[bool, typer.Option("--list", help="List the cases and modes, and stop.")]


@app.command("rope")
def rope(
    case: Cases = None,
    impl: Impls = None,
    mode: Annotated[str, typer.Option(help="Of fwd, bwd and decode, with commas between.")] = "fwd,bwd,decode",
    peers: Peers = "auto",
    output: Output = None,
    resume: Resume = False,
    device: Device = None,
    dtype: Dtype = None,
    rounds: Rounds = None,
    sweep: Annotated[bool, typer.Option(help="Other cases: one shape at lengths from 1 to 131072.")] = False,
    only: Annotated[
        str, typer.Option(help="norm: other cases, of the norm beside the rotation and of positions on three axes.")
    ] = "",
    list_cases: List = False,
) -> None:
    """Measure the rotation: time, bandwidth, host time, memory, each against a copy and against the peers.

    Everything is checked against float64 before it is timed. Ctrl-C keeps what was measured; --resume goes on.
    """
    from ropewalk.bench.rope.bench import NormBench, RopeBench, SweepBench

    if only not in ("", "norm") or (only and sweep):
        raise typer.BadParameter(f"--only is {only!r}, but must be 'norm', without --sweep")
    bench = NormBench if only else SweepBench if sweep else RopeBench
    _run([bench], list_cases, case, impl, mode, peers, output, resume, device, dtype, rounds)


@app.command("attention")
def attention(
    case: Cases = None,
    impl: Impls = None,
    mode: Modes = "",
    peers: Peers = "auto",
    protocol: Annotated[
        str, typer.Option(help="hot, cool or hot,cool; by default both for the kernels alone, and hot elsewhere.")
    ] = "",
    output: Output = None,
    resume: Resume = False,
    device: Device = None,
    dtype: Dtype = None,
    rounds: Rounds = None,
    list_cases: List = False,
) -> None:
    """Measure attention: kernels, RoPE and other schemes in them, memory, each against the peers.

    A copy and a product of large matrices are measured first: what the device can do at best. Everything is checked
    against float64 before it is timed. Ctrl-C keeps what was measured; --resume goes on.
    """
    from ropewalk.bench.attention.bench import AttentionBench

    benches = [AttentionBench]
    _run(benches, list_cases, case, impl, mode, peers, output, resume, device, dtype, rounds, protocol)


@app.command("host")
def host(
    case: Cases = None,
    impl: Impls = None,
    mode: Modes = "",
    peers: Peers = "auto",
    output: Output = None,
    resume: Resume = False,
    device: Device = None,
    dtype: Dtype = None,
    rounds: Annotated[
        int | None, typer.Option(help="How many bursts of each call are timed, at most; at least 3, by default 100.")
    ] = None,
    list_cases: List = False,
) -> None:
    """Measure the host's part of eager calls, in µs and as multiples of x.mul_(1.0), beside the peers.

    Calls are timed in short bursts, in turns, and a forward in turns with its backward, as training has them.
    Everything is checked against float64 before it is timed. On a CPU the times include the arithmetic. Ctrl-C keeps
    what was measured; --resume goes on.
    """
    from ropewalk.bench.host.bench import HostBench

    _run([HostBench], list_cases, case, impl, mode, peers, output, resume, device, dtype, rounds)


@app.command("all")
def all_(
    case: Cases = None,
    impl: Impls = None,
    peers: Peers = "auto",
    output: Output = None,
    resume: Resume = False,
    device: Device = None,
    dtype: Dtype = None,
    rounds: Rounds = None,
    list_cases: List = False,
) -> None:
    """Measure the rotation, then attention, into one record, with a figure of each.

    A name of a case, an implementation or a peer goes to each of the two benchmarks that has it; one that has none
    of the names is left out. Otherwise it is as `bench rope` and `bench attention` are.
    """
    from ropewalk.bench.attention.bench import AttentionBench
    from ropewalk.bench.rope.bench import RopeBench

    benches = [RopeBench, AttentionBench]
    _run(benches, list_cases, case, impl, "", peers, output, resume, device, dtype, rounds)


@app.command("training")
def training(
    case: Cases = None,
    precision: Annotated[str, typer.Option(help="Of autocast and bf16, with commas between.")] = "autocast,bf16",
    output: Output = None,
    device: Device = None,
    rounds: Rounds = None,
    list_cases: List = False,
) -> None:
    """Measure training steps of BERT and Llama models with attention by Ropewalk, by SDPA and by eager PyTorch."""
    with user_errors():
        from ropewalk.bench.training.bench import TrainingBench

    _run([TrainingBench], list_cases, case, None, precision, "auto", output, False, device, None, rounds)


@app.command("parallel")
def parallel(
    only: Annotated[str, typer.Option(help="Parts of cases' names, with commas between; by default all.")] = "",
    peers: Peers = "auto",
    output: Output = None,
    resume: Resume = False,
    device: Device = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small cases, for correctness. A CPU needs it.")] = False,
    rounds: Rounds = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many to start, without torchrun; by default one for each GPU.")
    ] = None,
    list_cases: List = False,
) -> None:
    """Measure context parallelism on several GPUs of a machine, against the whole call on each of them.

    torchrun --nproc-per-node 2 -m ropewalk bench parallel does the same in processes that torchrun starts. Everything
    is checked against float64 before it is timed. A run that was stopped keeps its rows; --resume goes on.
    """
    from ropewalk.bench.core.options import Options
    from ropewalk.bench.core.runner import OursError
    from ropewalk.bench.parallel.bench import ParallelBench, choose_parts, run_parallel_bench

    if list_cases:
        _list(ParallelBench)
        return
    _check_resume(resume, output)
    with user_errors(OursError):
        cases = choose_parts(split_names(only))
        options = Options(
            cases=cases, peers=peers, output=output, resume=resume, device=device, quick=quick, rounds=rounds
        )
        run_parallel_bench(options, processes)


@app.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A record of bench rope, attention or all.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="A later record, of the same cases.")],
    threshold: Annotated[
        float, typer.Option(min=0.0, help="What part worse a median must be, beyond the noise, to fail.")
    ] = 0.05,
    relative: Annotated[
        bool,
        typer.Option(
            "--relative",
            help="Compare times as multiples of a copy's, or of a matrix product's, for other clocks or another GPU.",
        ),
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Fail for peers and anchors too, not for ours alone.")] = False,
) -> None:
    """Show what B changed against A beyond the noise, and fail if one of ours is worse.

    Compared are times on the device, in CUDA graphs and of the host, and peaks of memory. A change is beyond the noise
    if the intervals from the 10 % to the 90 % quantile do not overlap and the median changed by more than 1 %. Exits
    with 1 where one of ours is worse by more than the threshold, or was right and now is wrong, failed or gone; with 2
    where a file cannot be read or compared; else with 0.
    """
    with user_errors(OSError):
        from ropewalk.bench.core.terminal import default_console
        from ropewalk.bench.report.compare import compare_records, print_changes

        changes = compare_records(before, after, threshold=threshold, relative=relative, every=every)
        print_changes(changes, threshold, default_console())
    if changes.is_worse:
        raise typer.Exit(1)


def _run(
    benches: Sequence[type[Bench]],
    list_cases: bool,
    case: list[str] | None,
    impl: list[str] | None,
    mode: str,
    peers: str,
    output: Path | None,
    resume: bool,
    device: str | None,
    dtype: str | None,
    rounds: int | None,
    protocol: str = "",
) -> None:
    """Run benchmarks into one record, or list their cases; exit as Ctrl-C and errors require."""
    if list_cases:
        for bench in benches:
            if len(benches) > 1:
                typer.echo(bench.name.upper())
            _list(bench)
        return
    _check_resume(resume, output)
    from ropewalk.bench.all import run
    from ropewalk.bench.core.options import Options
    from ropewalk.bench.core.runner import OursError

    with user_errors(OursError):
        options = Options(
            cases=case or (),
            impls=impl or (),
            modes=split_names(mode),
            peers=peers,
            protocols=split_names(protocol),
            dtype=dtype,
            rounds=rounds,
            device=device,
            output=output,
            resume=resume,
        )
        result = run(benches, options)
    if result.interrupted:
        raise typer.Exit(130)


def _check_resume(resume: bool, output: Path | None) -> None:
    if resume and output is None:
        raise typer.BadParameter("it needs --output, which names the record to go on with", param_hint="--resume")


def _list(bench: Any) -> None:
    """List the cases of a benchmark, each name once, and its modes."""
    from ropewalk.bench.core.load import variant_of

    variants: dict[str, list[str]] = {}
    for case in bench.cases:
        variants.setdefault(case.name, []).append(variant_of(vars(case)))
    first = {case.name: case for case in reversed(bench.cases)}
    for name, known in variants.items():
        also = [other for other, of in bench.aliases.items() if of == name]
        typer.echo(f"{name} ({', '.join(also)})" if also else name)
        typer.echo(f"    {first[name].description}")
        if any(known):
            typer.echo(f"    variants: {', '.join(known)}")
        typer.echo(f"    modes: {', '.join(first[name].modes) or 'none of its own'}")
    for mode, meaning in bench.modes.items():
        typer.echo(f"mode {mode}: {meaning}")

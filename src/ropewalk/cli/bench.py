"""`ropewalk bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.options import split_names, user_errors

if TYPE_CHECKING:
    from ropewalk.bench.attention.cases import AttentionCase
    from ropewalk.bench.core.runner import BenchResult
    from ropewalk.bench.rope.cases import Case

app = typer.Typer(help="Measure this library against others, on this machine.", no_args_is_help=True)

Cases = Annotated[list[str] | None, typer.Option("--case", help="A case by name; repeat for more.")]
Impls = Annotated[
    list[str] | None,
    typer.Option(
        "--impl",
        help="One of our implementations; repeat for more. By default, of rotations all that exist here, of attention "
        "triton on a GPU, else reference.",
    ),
]
Peers = Annotated[str, typer.Option(help="auto (those that import), none, or names with commas between.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="The record, a new file; by default one under ./results/."),
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
List = Annotated[bool, typer.Option("--list", help="List the cases and stop.")]


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
    rounds: Annotated[int, typer.Option(min=3, help="How often each call is timed, at most.")] = 100,
    sweep: Annotated[bool, typer.Option(help="Other cases: one shape at lengths from 1 to 131072.")] = False,
    only: Annotated[
        str, typer.Option(help="norm: other cases, of the norm beside the rotation and of positions on three axes.")
    ] = "",
    list_cases: List = False,
) -> None:
    """Measure the rotation: time, bandwidth, host time, memory, each against a copy and against the peers.

    Everything is checked against float64 before it is timed. Ctrl-C keeps what was measured; --resume goes on.
    """
    from ropewalk.bench.rope.cases import CASES, NORM_CASES, SWEEP

    if only not in ("", "norm") or (only and sweep):
        raise typer.BadParameter(f"--only is {only!r}, but must be 'norm', without --sweep")
    cases = NORM_CASES if only else SWEEP if sweep else CASES
    if list_cases:
        _list_rotations(cases)
        return
    _check_resume(resume, output)
    from ropewalk.bench.rope.run import run_rope_bench

    own: dict[str, Any] = {"modes": split_names(mode), "rounds": rounds, "cases": cases}
    if only:
        from ropewalk.bench.rope.norm_peers import NORM_PEERS

        own["known_peers"] = NORM_PEERS
    _run(run_rope_bench, case, impl, peers, output, resume, device, dtype, **own)


@app.command("attention")
def attention(
    case: Cases = None,
    impl: Impls = None,
    mode: Annotated[str, typer.Option(help="Of those that --list shows, with commas between. By default all.")] = "",
    peers: Peers = "auto",
    protocol: Annotated[
        str, typer.Option(help="hot, cool or hot,cool; by default both for the kernels alone, and hot elsewhere.")
    ] = "",
    output: Output = None,
    resume: Resume = False,
    device: Device = None,
    dtype: Dtype = None,
    rounds: Rounds = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and modes, and stop.")] = False,
) -> None:
    """Measure attention: kernels, RoPE and other schemes in them, memory, each against the peers.

    A copy and a product of large matrices are measured first: what the device can do at best. Everything is checked
    against float64 before it is timed. Ctrl-C keeps what was measured; --resume goes on.
    """
    from ropewalk.bench.attention.cases import CASES, MODES

    if list_cases:
        _list_attentions(CASES)
        for name, meaning in MODES.items():
            typer.echo(f"mode {name}: {meaning}")
        return
    _check_resume(resume, output)
    from ropewalk.bench.attention.run import run_attention_bench

    own = {"modes": split_names(mode) or tuple(MODES), "protocols": split_names(protocol), "rounds": rounds}
    _run(run_attention_bench, case, impl, peers, output, resume, device, dtype, **own)


@app.command("host")
def host(
    case: Cases = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(
            "--impl",
            help="One of our implementations of attention, beside the one that a call chooses; repeat for more. By "
            "default all but the reference on a GPU, else sdpa and reference.",
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="Of those that --list shows, with commas between. By default all.")] = "",
    peers: Peers = "auto",
    output: Output = None,
    resume: Resume = False,
    device: Device = None,
    dtype: Dtype = None,
    rounds: Annotated[int, typer.Option(help="How many bursts of each call are timed, at most; at least 3.")] = 100,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and modes, and stop.")] = False,
) -> None:
    """Measure the host's part of eager calls, in µs and as multiples of x.mul_(1.0), beside the peers.

    Calls are timed in short bursts, in turns, and a forward in turns with its backward, as training has them.
    Everything is checked against float64 before it is timed. On a CPU the times include the arithmetic. Ctrl-C keeps
    what was measured; --resume goes on.
    """
    from ropewalk.bench.host.cases import CASES, DIRECTIONS, ROTATE

    if list_cases:
        _list_attentions(CASES)
        for name, meaning in DIRECTIONS.items():
            typer.echo(f"modes that end with -{name}: {meaning}")
        typer.echo(f"mode {ROTATE}: apply_rope in place, out of place and recording, rotary_embedding, complex numbers")
        return
    _check_resume(resume, output)
    from ropewalk.bench.host.run import run_host_bench

    own = {"modes": split_names(mode), "rounds": rounds}
    _run(run_host_bench, case, impl, peers, output, resume, device, dtype, **own)


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
    from ropewalk.bench.attention.cases import CASES as ATTENTIONS
    from ropewalk.bench.rope.cases import CASES as ROTATIONS

    if list_cases:
        typer.echo("ROTATION")
        _list_rotations(ROTATIONS)
        typer.echo("ATTENTION")
        _list_attentions(ATTENTIONS)
        return
    _check_resume(resume, output)
    from ropewalk.bench.all import run_all_benches

    _run(run_all_benches, case, impl, peers, output, resume, device, dtype, rounds=rounds)


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
    from ropewalk.bench.core.terminal import default_console
    from ropewalk.bench.report.compare import compare_records
    from ropewalk.bench.report.compare_summary import print_comparison
    from ropewalk.bench.report.load import read_bench_record

    with user_errors(OSError):
        records = read_bench_record(before), read_bench_record(after)
        comparison = compare_records(*records, threshold=threshold, relative=relative, every=every)
    print_comparison(comparison, *records, threshold, default_console())
    if comparison.regressions:
        raise typer.Exit(1)


@app.command("training")
def training(
    case: Cases = None,
    precision: Annotated[str, typer.Option(help="Of autocast and bf16, with commas between.")] = "autocast,bf16",
    output: Output = None,
    device: Device = None,
    rounds: Annotated[int, typer.Option(min=3, help="How often each candidate is timed.")] = 8,
    list_cases: List = False,
) -> None:
    """Measure training steps of BERT and Llama models with attention by Ropewalk, by SDPA and by eager PyTorch."""
    with user_errors():
        from ropewalk.bench.training.cases import CASES
        from ropewalk.bench.training.run import run_training_bench

        if list_cases:
            for known in CASES:
                size = f"batch {known.batch} of {known.tokens} tokens"
                typer.echo(f"{known.name}\n    {known.description}, {size}; {', '.join(known.precisions)}")
            return
        run_training_bench(
            case_names=case or (), precisions=split_names(precision), output=output, device=device, rounds=rounds
        )


@app.command("parallel")
def parallel(
    only: Annotated[str, typer.Option(help="Parts of cases' names, with commas between; by default all.")] = "",
    peers: Peers = "auto",
    output: Output = None,
    resume: Resume = False,
    device: Device = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small cases, for correctness. A CPU needs it.")] = False,
    rounds: Annotated[int, typer.Option(min=3, help="How often each candidate is timed, at most.")] = 20,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many to start, without torchrun; by default one for each GPU.")
    ] = None,
    list_cases: List = False,
) -> None:
    """Measure context parallelism on several GPUs of a machine, against the whole call on each of them.

    torchrun --nproc-per-node 2 -m ropewalk bench parallel does the same in processes that torchrun starts. Everything
    is checked against float64 before it is timed. A run that was stopped keeps its rows; --resume goes on.
    """
    from ropewalk.bench.parallel.cases import CASES

    if list_cases:
        for case in CASES:
            typer.echo(f"{case.name}\n    {case.description}")
        return
    _check_resume(resume, output)
    from ropewalk.bench.core.runner import OursError
    from ropewalk.bench.parallel.run import ParallelOptions, run_parallel_bench

    with user_errors(OursError):
        options = ParallelOptions(split_names(only), peers, output, resume, device, quick, rounds)
        run_parallel_bench(options, processes)


def _run(
    run_bench: Callable[..., BenchResult],
    case: list[str] | None,
    impl: list[str] | None,
    peers: str,
    output: Path | None,
    resume: bool,
    device: str | None,
    dtype: str | None,
    **own: Any,
) -> None:
    """Run a benchmark with the common options and its own; exit as Ctrl-C and errors require."""
    from ropewalk.bench.core.runner import OursError

    with user_errors(OursError):
        result = run_bench(
            case_names=case or (),
            impls=impl or (),
            peers=peers,
            output=output,
            resume=resume,
            device=device,
            dtype=dtype,
            **own,
        )
    if result.interrupted:
        raise typer.Exit(130)


def _check_resume(resume: bool, output: Path | None) -> None:
    if resume and output is None:
        raise typer.BadParameter("it needs --output, which names the record to go on with", param_hint="--resume")


def _list_rotations(cases: Sequence[Case]) -> None:
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


def _list_attentions(cases: Sequence[AttentionCase]) -> None:
    from ropewalk.bench.attention.cases import ALIASES

    for case in cases:
        also = [name for name, of in ALIASES.items() if of == case.name]
        names = f"{case.name} ({', '.join(also)})" if also else case.name
        typer.echo(f"{names}\n    {case.description}\n    modes: {', '.join(case.modes) or 'none of its own'}")

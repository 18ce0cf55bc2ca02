"""`ropewalk bench`."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.options import split_names, user_errors

if TYPE_CHECKING:
    from ropewalk.bench.core.runner import Bench

    Chosen = tuple[Sequence[type[Bench]], dict[str, Any]]  # benchmarks, and more of `Options`

app = typer.Typer(help="Measure this library against others, on this machine.", no_args_is_help=True)

_IMPL = (
    "One of our implementations; repeat for more. By default, of rotations all that exist here, of attention triton on "
    "a GPU, else reference; of the host's times all but the reference on a GPU, else sdpa and reference."
)
_RESUME = (
    "Go on with the record that --output names: what is whole in it stays, what was cut off is measured anew. The "
    "machine, all versions and the other options must be the same."
)
_RELATIVE = "Compare times as multiples of a copy's, or of a matrix product's, for other clocks or another GPU."
# The options that several commands share: the type, the default, the help, and other names or bounds.
SHARED: dict[str, tuple[Any, ...]] = {
    "case": (list[str] | None, None, "A case by name; repeat for more."),
    "impl": (list[str] | None, None, _IMPL),
    "mode": (str, "", "Of those that --list shows, with commas between. By default all."),
    "precision": (str, "autocast,bf16", "Of autocast and bf16, with commas between."),
    "peers": (str, "auto", "auto (those that import), none, or names with commas between."),
    "protocol": (str, "", "hot, cool or hot,cool; by default both for the kernels alone, and hot elsewhere."),
    "output": (Path | None, None, "The record, a new file; by default one under ./results/.", "--output", "-o"),
    "resume": (bool, False, _RESUME, "--resume"),
    "device": (str | None, None, "cuda or cpu; by default the GPU if there is one."),
    "dtype": (str | None, None, "float16, bfloat16 or float32 for all cases; by default each case's own."),
    "rounds": (int | None, None, "How often each call is timed, at most; by default as the benchmark has it."),
    "list_cases": (bool, False, "List the cases and modes, and stop.", "--list"),
}
_EVERY = ("case", "impl", "peers", "output", "resume", "device", "dtype", "rounds", "list_cases")
_GATED = (
    "Everything is checked against float64 before it is timed. A run that was stopped keeps its rows: see --resume."
)
# Options that name several things, and what `Options` calls them.
_SEVERAL = {"case": "cases", "impl": "impls", "mode": "modes", "precision": "modes", "protocol": "protocols"}


def _command(name: str, *shared: str) -> Callable[[Callable[..., "Chosen"]], None]:
    """Make a command of a function that chooses benchmarks: it takes the function's options and the shared ones."""

    def register(choose: Callable[..., "Chosen"]) -> None:
        own = list(inspect.signature(choose).parameters.values())

        def command(**given: Any) -> None:
            with user_errors():
                benches, more = choose(**{parameter.name: given.pop(parameter.name) for parameter in own})
            _run(benches, **given, **more)

        *first, last = (_parameter(key, *option) for key, option in SHARED.items() if key in shared)  # --list
        taken = [*first, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), last]
        command.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
        text = inspect.getdoc(choose)
        command.__doc__ = f"{text}\n\n{_GATED}" if "resume" in shared else text
        app.command(name)(command)

    return register


def _parameter(key: str, kind: Any, default: Any, text: str, *names: str) -> inspect.Parameter:
    option = typer.Option(*names, help=text, min=3 if key == "rounds" else None)
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


@_command("rope", "mode", *_EVERY)
def _rope(
    sweep: Annotated[bool, typer.Option(help="Other cases: one shape at lengths from 1 to 131072.")] = False,
    only: Annotated[str, typer.Option(help="norm: other cases, of norms and of positions on three axes.")] = "",
) -> "Chosen":
    """Measure the rotation: time, bandwidth, host time, memory, each against a copy and against the peers."""
    from ropewalk.bench.rope.bench import NormBench, RopeBench, SweepBench

    if only not in ("", "norm") or (only and sweep):
        raise typer.BadParameter(f"--only is {only!r}, but must be 'norm', without --sweep")
    return [NormBench if only else SweepBench if sweep else RopeBench], {}


@_command("attention", "mode", "protocol", *_EVERY)
def _attention() -> "Chosen":
    """Measure attention: kernels, RoPE and other schemes in them, memory, each against the peers.

    A copy and a product of large matrices are measured first: what the device can do at best.
    """
    from ropewalk.bench.attention.bench import AttentionBench

    return [AttentionBench], {}


@_command("host", "mode", *_EVERY)
def _host() -> "Chosen":
    """Measure the host's part of eager calls, in µs and as multiples of x.mul_(1.0), beside the peers.

    Calls are timed in short bursts, in turns, and a forward in turns with its backward, as training has them. On a CPU
    the times include the arithmetic.
    """
    from ropewalk.bench.host.bench import HostBench

    return [HostBench], {}


@_command("all", *_EVERY)
def _all() -> "Chosen":
    """Measure the rotation, then attention, into one record, with a figure of each.

    A name of a case, an implementation or a peer goes to each of the two benchmarks that has it; one that has none
    of the names is left out. Otherwise it is as `bench rope` and `bench attention` are.
    """
    from ropewalk.bench.attention.bench import AttentionBench
    from ropewalk.bench.rope.bench import RopeBench

    return [RopeBench, AttentionBench], {}


@_command("training", "case", "precision", "output", "device", "rounds", "list_cases")
def _training() -> "Chosen":
    """Measure training steps of BERT and Llama models with attention by Ropewalk, by SDPA and by eager PyTorch."""
    from ropewalk.bench.training.bench import TrainingBench

    return [TrainingBench], {}


@_command("parallel", "peers", "output", "resume", "device", "rounds", "list_cases")
def _parallel(
    only: Annotated[str, typer.Option(help="Parts of cases' names, with commas between; by default all.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Small cases, for correctness. A CPU needs it.")] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many to start, without torchrun; by default one for each GPU.")
    ] = None,
) -> "Chosen":
    """Measure context parallelism on several GPUs of a machine, against the whole call on each of them.

    torchrun --nproc-per-node 2 -m ropewalk bench parallel does the same in processes that torchrun starts.
    """
    from ropewalk.bench.parallel.bench import ParallelBench, choose_parts

    return [ParallelBench], {"cases": choose_parts(split_names(only)), "quick": quick, "processes": processes}


@app.command("compare")
def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="A record of bench rope, attention or all.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="A later record, of the same cases.")],
    threshold: Annotated[float, typer.Option(min=0.0, help="What part worse, beyond the noise, fails.")] = 0.05,
    relative: Annotated[bool, typer.Option("--relative", help=_RELATIVE)] = False,
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


def _run(benches: "Sequence[type[Bench]]", list_cases: bool, **given: Any) -> None:
    """Run benchmarks into one record, or list their cases; exit as Ctrl-C and errors require."""
    if list_cases:
        for bench in benches:
            typer.echo(f"{bench.name.upper()}\n" * (len(benches) > 1) + "\n".join(bench.listing()))
        return
    if given.get("resume") and given["output"] is None:
        raise typer.BadParameter("it needs --output, which names the record to go on with", param_hint="--resume")
    from ropewalk.bench.all import run
    from ropewalk.bench.core.options import Options
    from ropewalk.bench.core.runner import OursError

    for name in _SEVERAL.keys() & given.keys():
        value = given.pop(name)
        given[_SEVERAL[name]] = split_names(value) if isinstance(value, str) else value or ()
    with user_errors(OursError):
        options = Options(**given)
        result = None if benches[0].launch(options) else run(benches, options)
    if result is not None and result.interrupted:
        raise typer.Exit(130)

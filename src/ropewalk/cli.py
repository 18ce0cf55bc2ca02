"""The `ropewalk` command. Nothing here imports torch until a command needs it."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ropewalk

if TYPE_CHECKING:
    from ropewalk.bench.cases import Case

app = typer.Typer(
    help="Position encodings for transformers as fast, differentiable GPU kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench_app = typer.Typer(help="Measure this library against others, on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
experiment_app = typer.Typer(help="Train small models, and measure what they do.", no_args_is_help=True)
app.add_typer(experiment_app, name="experiment")


@contextmanager
def _user_errors(*more: type[Exception]) -> Iterator[None]:
    """Show what a user can put right, and errors of the classes `more`, by their message, not as a traceback."""
    expected: tuple[type[Exception], ...] = (ValueError, ModuleNotFoundError, *more)
    try:
        yield
    except expected as error:
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
    from rich.markup import escape
    from rich.table import Table

    from ropewalk.bench.peers import PEERS, find_peer
    from ropewalk.bench.records import version_of
    from ropewalk.ops.attention import choice
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
            rotation.add_row(name, impl, verdict if reason is None else escape(f"no: {reason}"))
    console.print(rotation)
    if not gpus:
        console.print("PyTorch sees no GPU.")

    attention = Table(title="implementations of attention")
    attention.add_column("device")
    attention.add_column("implementation")
    attention.add_column("here")
    for device in devices:
        for impl in choice.IMPLEMENTATIONS:
            reason = choice.why_missing(impl, device)
            attention.add_row(str(device), impl, "yes" if reason is None else escape(f"no: {reason}"))
    console.print(attention)
    console.print("Which of them serves a call, `ropewalk.explain_choice` tells.")

    native = Table(title="native extension")
    native.add_column("what")
    native.add_column("here")
    for what, here in _native_extension().items():
        native.add_row(what, escape(here))
    console.print(native)

    peers = Table(title=f"peers that `ropewalk bench` can measure on {devices[0]}")
    peers.add_column("peer")
    peers.add_column("here")
    for peer in PEERS.values():
        version_found, reason = find_peer(peer, devices[0])
        peers.add_row(peer.name, f"yes, {version_found}" if reason is None else f"no: {reason}")
    console.print(peers)


def _native_extension() -> dict[str, str]:
    """What there is of the compiled extension, and of what compiles it. Nothing is compiled here."""
    from ropewalk.ops.rope import native_build

    compilers = native_build.find_compilers()
    rows = {"nvcc": compilers.nvcc or "no", "host compiler": compilers.cxx or "no"}
    if compilers.missing is not None:
        rows["missing"] = compilers.missing
    architectures = native_build.visible_architectures()
    try:
        rows["cache"] = str(native_build.cache_dir())
        if not architectures:
            rows["library"] = "no: PyTorch sees no NVIDIA GPU of compute capability 8.0 or more"
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


@app.command()
def build(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="A compute capability, as 90, 9.0 or sm_90; repeat for more. By default the visible GPUs'."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compile in any case.")] = False,
) -> None:
    """Compile the native extension ahead of its first use."""
    from ropewalk.ops.rope import native_build

    with _user_errors(native_build.BuildError):
        chosen = {native_build.parse_architecture(text) for text in arch or native_build.visible_architectures()}
        architectures = sorted(chosen, key=int)
        if not architectures:
            raise ValueError(
                "PyTorch sees no NVIDIA GPU of compute capability 8.0 or more: say with --arch which to compile for, "
                "as in --arch 90"
            )
        library = None if force else native_build.find_library(architectures)
        if library is None:
            names = ", ".join(f"sm_{architecture}" for architecture in architectures)
            typer.echo(f"compiling the native extension for {names} ...")
            start = time.perf_counter()
            library = native_build.build(architectures, force=force)
            typer.echo(f"done in {time.perf_counter() - start:.1f} s")
        else:
            typer.echo("the native extension is there already; --force compiles it again")
        typer.echo(f"{library} ({library.stat().st_size / 2**20:.1f} MiB)")


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


@experiment_app.command("length-extrapolation")
def experiment_length_extrapolation(
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The text to learn; by default PyTorch's Python sources."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; by default what suits the device.")] = None,
    train_length: Annotated[
        int | None, typer.Option(help="The length it learns at; by default 512 on a GPU, 128 on a CPU.")
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            help="Where it is evaluated, with commas between; by default 1, 2, 4, 8 and 16 times the training length, "
            "on a CPU to 4 times."
        ),
    ] = "",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The record, a new file; by default one under ./results/."),
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Where the figure goes; by default beside the record.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = 0,
) -> None:
    """Train a small transformer with RoPE, then read longer texts by RoPE, NTK, ReRoPE, leaky ReRoPE and SelfExtend.

    The loss at a length is that of the last bytes of held-out windows, the same bytes at each length.
    """
    from ropewalk.experiments.length_extrapolation import run_length_extrapolation

    with _user_errors():
        run_length_extrapolation(
            text=text,
            steps=steps,
            train_length=train_length,
            lengths=_whole_numbers("lengths", lengths),
            device=device,
            output=output,
            figure=figure,
            seed=seed,
        )


@experiment_app.command("bert-positions")
def experiment_bert_positions(
    preset: Annotated[
        str | None, typer.Option(help="smoke (a CPU), small (one GPU) or base; by default smoke.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings, in YAML or TOML, that change the preset's.")] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="A text, or a folder of texts; repeat for more. By default what ships with Python."),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="A Hugging Face dataset, NAME or NAME:CONFIGURATION.")] = None,
    schemes: Annotated[str, typer.Option(help="Position schemes, with commas between; by default all.")] = "",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between: each trains all schemes.")] = "",
    steps: Annotated[int | None, typer.Option(help="Training steps of each model.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of all results, new or empty.")] = Path(
        "bert-positions"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the output folder.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Models trained at a time, on one device.")] = 1,
    record: Annotated[Path | None, typer.Option(help="Where the record goes too, a new file.")] = None,
) -> None:
    """Pre-train a BERT for each position scheme on real text, and compare them at the training length and beyond.

    What was stopped or killed goes on with --resume where it was, by the settings in its output folder if no others are
    given. On several GPUs: torchrun --nproc-per-node N -m ropewalk experiment bert-positions …
    """
    from ropewalk.experiments.bert_positions.config import load_config
    from ropewalk.experiments.bert_positions.run import CONFIG, run_bert_positions

    if resume and preset is None and config is None:
        config = output / CONFIG
    with _user_errors():
        seed_numbers = _whole_numbers("seeds", seeds) or None
        names = {"corpus": corpus or None, "dataset": dataset, "schemes": _split(schemes) or None}
        settings = load_config(preset or "smoke", config, seeds=seed_numbers, steps=steps, **names)
        run_bert_positions(settings, output=output, resume=resume, device=device, jobs=jobs, record=record)


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

    with _user_errors():
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


@bench_app.command("attention")
def bench_attention(
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

    with _user_errors(OursError):
        result = run_attention_bench(
            case_names=case or (),
            impls=impl or (),
            modes=_split(mode) or tuple(MODES),
            peers=peers,
            protocols=_split(protocol),
            output=output,
            device=device,
            rounds=rounds,
        )
    if result.interrupted:
        raise typer.Exit(130)


@bench_app.command("training")
def bench_training(
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
    with _user_errors():
        from ropewalk.bench.training import run_training_bench
        from ropewalk.bench.training_models import CASES

        if list_cases:
            for known in CASES:
                size = f"batch {known.batch} of {known.tokens} tokens"
                typer.echo(f"{known.name}\n    {known.description}, {size}; {', '.join(known.precisions)}")
            return
        run_training_bench(
            case_names=case or (), precisions=_split(precision), output=output, device=device, rounds=rounds
        )


def _split(text: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _whole_numbers(option: str, text: str) -> list[int]:
    """Whole numbers with commas between."""
    names = _split(text)
    if not all(name.isdecimal() for name in names):
        raise ValueError(f"{option} is {text!r}, but must be whole numbers with commas between, as in 512,1024")
    return [int(name) for name in names]


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

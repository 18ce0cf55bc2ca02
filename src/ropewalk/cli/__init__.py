"""The `ropewalk` command. Nothing here imports torch until a command needs it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import ropewalk
from ropewalk.cli import bench
from ropewalk.cli.options import Option, command, split_names, whole_numbers
from ropewalk.doctor import doctor

app = typer.Typer(
    help="Position encodings for transformers as fast, differentiable GPU kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
experiment = typer.Typer(
    help="Train small models, and measure what they do; bert-positions needs the extra \\[train].", no_args_is_help=True
)
app.add_typer(bench.app, name="bench")
app.add_typer(experiment, name="experiment")

_FILE = {"exists": True, "dir_okay": False}
_TEXT: Option = (Path | None, None, "The text to learn, not the default.", "", _FILE)
_STEPS: Option = (int | None, None, "Training steps; by default what suits the device.", "", {"min": 1})
_DEVICE: Option = (str | None, None, "cpu or cuda; by default the GPU if there is one.")
_LENGTHS = "by default 1, 2, 4, 8 and 16 times the training length, on a CPU to 4 times"
_RECORD = "The record, a new file; by default one under ./records/."
_CORPUS = "A text, or a folder of texts; repeat for more; by default what ships with Python."
_FIGURE = "The figure's file; by default beside the record."
_DEMO: dict[str, Option] = {
    "text": _TEXT,
    "steps": _STEPS,
    "device": _DEVICE,
    "figure": (Path, Path("ropewalk-demo.png"), "The figure's file.", "", {"dir_okay": False}),
    "seed": (int, 0, "The seed of weights, batches and the generated line."),
}
_GALLERY = (
    "none, rope, alibi, t5, exposb, rerope, leaky-rerope, self-extend; causal, window, window-two-sided, prefix, "
    "padding, packed, sinks, frames, dilated, big-bird; relative-positions; or module:Name, a scheme of your own."
)
_DRAW: dict[str, Option] = {
    "name": (str, ..., _GALLERY),
    "output": (Path, Path("ropewalk-draw.svg"), "The picture.", "--output -o", {"dir_okay": False}),
    "head": (int, 0, "The head that is drawn, from 0.", "", {"min": 0}),
    "heads": (int, 4, "Heads of a scheme of your own, 128 at most.", "", {"min": 1}),
    "tokens": (
        int | None,
        None,
        "Tokens, 4096 at most; by default 32. Masks take none of these options.",
        "",
        {"min": 1},
    ),
    "causal": (bool, False, "Let no query attend a later key.", "--causal"),
    "window": (int | None, None, "Attend so many keys alone, the query's own among them.", "", {"min": 1}),
}
_EXTRAPOLATION: dict[str, Option] = {
    "preset": (str | None, None, "cpu, cuda or long (ten times the bytes, to 16k; a GPU); by default by the device."),
    "text": _TEXT,
    "steps": _STEPS,
    "train_length": (int | None, None, "The length it learns at; by default 512 on a GPU, 128 on a CPU."),
    "lengths": (whole_numbers, "", f"Lengths of the evaluation, with commas between; {_LENGTHS}."),
    "device": _DEVICE,
    "output": (Path | None, None, _RECORD, "--output -o"),
    "figure": (Path | None, None, _FIGURE, "", {"dir_okay": False}),
    "seed": (int, 0, "The seed of weights and batches."),
}
_SCHEMES = (
    "Position schemes, with commas between; by default the preset's. none: no positions; standard: a learned table in "
    "every layer; absolute: sinusoids; rope: RoPE; exposb: our experiment; alibi: ALiBi; t5: T5's bias; rerope: RoPE "
    "within a window; module:Name: your own (docs/experiments.md)."
)
_POSITIONS: dict[str, Option] = {
    "preset": (str | None, None, "smoke or laptop (a CPU), small or medium (one GPU) or base; by default smoke."),
    "config": (Path | None, None, "Settings, in YAML or TOML, that change the preset's."),
    "corpus": (list[str] | None, None, _CORPUS),
    "dataset": (str | None, None, "A Hugging Face dataset, NAME or NAME:CONFIGURATION."),
    "schemes": (split_names, "", _SCHEMES),
    "seeds": (whole_numbers, "", "Seeds, with commas between: each trains all schemes."),
    "steps": (int | None, None, "Training steps of each model."),
    "device": _DEVICE,
    "output": (Path, Path("bert-positions"), "The folder of all results, new or empty.", "--output -o"),
    "resume": (bool, False, "Go on with what is in the output folder.", "--resume"),
    "jobs": (int, 1, "Models trained at a time; the GPUs take turns.", "", {"min": 1}),
    "record": (
        Path | None,
        None,
        "The record's file beside the output: new, or of this comparison, to get further schemes.",
    ),
}
_BUILD: dict[str, Option] = {
    "arch": (
        list[str] | None,
        None,
        "A compute capability, as 90, 9.0 or sm_90; repeat for more; by default the visible GPUs'.",
    ),
    "force": (bool, False, "Compile in any case.", "--force"),
}


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


def build(arch: list[str] | None, force: bool) -> None:
    """Compile the native extension ahead of its first use."""
    from ropewalk.ops.rope.cuda import build as native_build

    chosen = {native_build.parse_architecture(text) for text in arch or native_build.visible_architectures()}
    architectures = sorted(chosen, key=int)
    if not architectures:
        raise ValueError(
            "PyTorch finds no NVIDIA GPU of compute capability 8.0 or more: say with --arch which to compile for, "
            "as in --arch 90"
        )
    library = None if force else native_build.find_library(architectures)
    if library is not None:
        typer.echo("the native extension is there already; --force compiles it again")
    else:
        names = ", ".join(f"sm_{architecture}" for architecture in architectures)
        typer.echo(f"compiling the native extension for {names} ...")
        start = time.perf_counter()
        library = native_build.build(architectures, force=force)
        typer.echo(f"done in {time.perf_counter() - start:.1f} s")
    typer.echo(f"{library} ({library.stat().st_size / 2**20:.1f} MiB)")


command(
    *(app, "demo", "experiments.demo.run_demo", _DEMO),
    "Train a small transformer on Python's documentation, let it write, and check results against float64.",
)
command(
    *(app, "draw", "experiments.gallery.run_draw", _DRAW),
    "Draw a scheme, or a mask: who attends whom, relative positions, and what a scheme makes of scores.\n\n"
    "Every number is read off `attention` itself, by the arguments that docs/gallery.md shows.",
)
app.command()(doctor)
command(app, "report", bench.report, bench.REPORT)
command(app, "build", build, _BUILD)
command(
    *(experiment, "length-extrapolation", "experiments.length_extrapolation.run_length_extrapolation", _EXTRAPOLATION),
    "Train a small transformer with RoPE, then read longer texts by RoPE, its scalings, ReRoPE and SelfExtend.\n\n"
    "It learns PyTorch's Python sources, or --text. The loss at a length is that of the last bytes of held-out "
    "windows, the same bytes at each length. A passkey, stated far before, is asked for at the end.",
)
command(
    *(experiment, "bert-positions", "experiments.bert_positions.run.run_bert_positions", _POSITIONS),
    "Pre-train a BERT for each position scheme on real text, and compare them at the training length and beyond.\n\n"
    "It needs the extra \\[train]. "
    "A stopped or killed run goes on with --resume, by the settings in its output folder if no others are passed. On "
    "several GPUs: torchrun --nproc-per-node N -m ropewalk experiment bert-positions …",
)

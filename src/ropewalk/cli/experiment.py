"""`ropewalk demo` and `ropewalk experiment`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropewalk.cli.options import split_names, user_errors, whole_numbers

app = typer.Typer(help="Train small models, and measure what they do.", no_args_is_help=True)

# Options of several commands.
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Training steps; by default what suits the device.")]
Text = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="The text to learn, not the default.")]


def demo(
    text: Text = None,
    steps: Steps = None,
    device: Device = None,
    figure: Annotated[Path, typer.Option(dir_okay=False, help="Where the figure goes.")] = Path("ropewalk-demo.png"),
    seed: Annotated[int, typer.Option(help="Of weights, batches and the generated line.")] = 0,
) -> None:
    """Train a small transformer on Python's documentation, let it write, and check results against float64."""
    from ropewalk.experiments.demo import run_demo

    with user_errors():
        run_demo(text, steps, device, figure, seed)


@app.command("length-extrapolation")
def length_extrapolation(
    text: Text = None,
    steps: Steps = None,
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
    device: Device = None,
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

    It learns PyTorch's Python sources, or --text. The loss at a length is that of the last bytes of held-out windows,
    the same bytes at each length.
    """
    from ropewalk.experiments.length_extrapolation import run_length_extrapolation

    with user_errors():
        run_length_extrapolation(
            text=text,
            steps=steps,
            train_length=train_length,
            lengths=whole_numbers("lengths", lengths),
            device=device,
            output=output,
            figure=figure,
            seed=seed,
        )


@app.command("bert-positions")
def bert_positions(
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
    device: Device = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder of all results, new or empty.")] = Path(
        "bert-positions"
    ),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the output folder.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Models trained at a time, on one device.")] = 1,
    record: Annotated[Path | None, typer.Option(help="Where the record goes too, a new file.")] = None,
) -> None:
    """Pre-train a BERT for each position scheme on real text, and compare them at the training length and beyond.

    A stopped or killed run goes on with --resume, by the settings in its output folder if no others are given. On
    several GPUs: torchrun --nproc-per-node N -m ropewalk experiment bert-positions …
    """
    with user_errors():
        from ropewalk.experiments.bert_positions.config import load_config
        from ropewalk.experiments.bert_positions.run import CONFIG, run_bert_positions

        if resume and preset is None and config is None:
            config = output / CONFIG
        seed_numbers = whole_numbers("seeds", seeds) or None
        names = {"corpus": corpus or None, "dataset": dataset, "schemes": split_names(schemes) or None}
        settings = load_config(preset or "smoke", config, seeds=seed_numbers, steps=steps, **names)
        run_bert_positions(settings, output=output, resume=resume, device=device, jobs=jobs, record=record)

"""`ropewalk demo` and `ropewalk experiment`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from ropewalk.cli.options import split_names, user_errors, whole_numbers

app = Typer(help="Train small models, and measure what they do.", no_args_is_help=True)

Device = Annotated[str | None, Option(help="cpu or cuda; by default the GPU if there is one.")]
Steps = Annotated[int | None, Option(min=1, help="Training steps; by default what suits the device.")]
Text = Annotated[Path | None, Option(exists=True, dir_okay=False, help="The text to learn, not the default.")]
DEMO_FIGURE = Path("ropewalk-demo.png")
Plot = Annotated[Path, Option(dir_okay=False, help="Where the figure goes.")]
DemoSeed = Annotated[int, Option(help="Of weights, batches and the generated line.")]

TrainLength = Annotated[int | None, Option(help="The length it learns at; by default 512 on a GPU, 128 on a CPU.")]
_LENGTHS = "by default 1, 2, 4, 8 and 16 times the training length, on a CPU to 4 times."
Lengths = Annotated[str, Option(help=f"Where it is evaluated, with commas between; {_LENGTHS}")]
Output = Annotated[
    Path | None, Option("--output", "-o", help="The record, a new file; by default one under ./results/.")
]
Figure = Annotated[Path | None, Option(dir_okay=False, help="Where the figure goes; by default beside the record.")]
Seed = Annotated[int, Option(help="Of weights and batches.")]

Preset = Annotated[str | None, Option(help="smoke (a CPU), small (one GPU) or base; by default smoke.")]
Config = Annotated[Path | None, Option(help="Settings, in YAML or TOML, that change the preset's.")]
_CORPUS = "A text, or a folder of texts; repeat for more. By default what ships with Python."
Corpus = Annotated[list[str] | None, Option(help=_CORPUS)]
Dataset = Annotated[str | None, Option(help="A Hugging Face dataset, NAME or NAME:CONFIGURATION.")]
Schemes = Annotated[str, Option(help="Position schemes, with commas between; by default all.")]
Seeds = Annotated[str, Option(help="Seeds, with commas between: each trains all schemes.")]
ModelSteps = Annotated[int | None, Option(help="Training steps of each model.")]
Folder = Annotated[Path, Option("--output", "-o", help="The folder of all results, new or empty.")]
Resume = Annotated[bool, Option("--resume", help="Go on with what is in the output folder.")]
Jobs = Annotated[int, Option(min=1, help="Models trained at a time, on one device.")]
Record = Annotated[Path | None, Option(help="Where the record goes too, a new file.")]


def demo(
    text: Text = None,
    steps: Steps = None,
    device: Device = None,
    figure: Plot = Path("ropewalk-demo.png"),
    seed: DemoSeed = 0,
) -> None:
    """Train a small transformer on Python's documentation, let it write, and check results against float64."""
    from ropewalk.experiments.demo import run_demo

    with user_errors():
        run_demo(text, steps, device, figure, seed)


@app.command("length-extrapolation")
def length_extrapolation(
    text: Text = None,
    steps: Steps = None,
    train_length: TrainLength = None,
    lengths: Lengths = "",
    device: Device = None,
    output: Output = None,
    figure: Figure = None,
    seed: Seed = 0,
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
    preset: Preset = None,
    config: Config = None,
    corpus: Corpus = None,
    dataset: Dataset = None,
    schemes: Schemes = "",
    seeds: Seeds = "",
    steps: ModelSteps = None,
    device: Device = None,
    output: Folder = Path("bert-positions"),
    resume: Resume = False,
    jobs: Jobs = 1,
    record: Record = None,
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
        lists = {"schemes": split_names(schemes) or None, "seeds": whole_numbers("seeds", seeds) or None}
        more = {"corpus": corpus or None, "dataset": dataset, "steps": steps}
        settings = load_config(preset or "smoke", config, **lists, **more)
        run_bert_positions(settings, output=output, resume=resume, device=device, jobs=jobs, record=record)

"""`ropewalk demo` and `ropewalk experiment`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer import Typer

from ropewalk.cli.options import Option, command, split_names, whole_numbers

app = Typer(help="Train small models, and measure what they do.", no_args_is_help=True)

_DEVICE: Option = (str | None, None, "cpu or cuda; by default the GPU if there is one.")
_STEPS: Option = (int | None, None, "Training steps; by default what suits the device.", {"min": 1})
_FILE = {"exists": True, "dir_okay": False}
_TEXT: Option = (Path | None, None, "The text to learn, not the default.", _FILE)
DEMO: dict[str, Option] = {
    "text": _TEXT,
    "steps": _STEPS,
    "device": _DEVICE,
    "figure": (Path, Path("ropewalk-demo.png"), "Where the figure goes.", {"dir_okay": False}),
    "seed": (int, 0, "Of weights, batches and the generated line."),
}
_LENGTHS = "by default 1, 2, 4, 8 and 16 times the training length, on a CPU to 4 times."
LENGTHS: dict[str, Option] = {
    "text": _TEXT,
    "steps": _STEPS,
    "train_length": (int | None, None, "The length it learns at; by default 512 on a GPU, 128 on a CPU."),
    "lengths": (str, "", f"Where it is evaluated, with commas between; {_LENGTHS}"),
    "device": _DEVICE,
    "output": (Path | None, None, "The record, a new file; by default one under ./results/.", "--output", "-o"),
    "figure": (Path | None, None, "Where the figure goes; by default beside the record.", {"dir_okay": False}),
    "seed": (int, 0, "Of weights and batches."),
}
_CORPUS = "A text, or a folder of texts; repeat for more. By default what ships with Python."
POSITIONS: dict[str, Option] = {
    "preset": (str | None, None, "smoke (a CPU), small (one GPU) or base; by default smoke."),
    "config": (Path | None, None, "Settings, in YAML or TOML, that change the preset's."),
    "corpus": (list[str] | None, None, _CORPUS),
    "dataset": (str | None, None, "A Hugging Face dataset, NAME or NAME:CONFIGURATION."),
    "schemes": (str, "", "Position schemes, with commas between; by default all."),
    "seeds": (str, "", "Seeds, with commas between: each trains all schemes."),
    "steps": (int | None, None, "Training steps of each model."),
    "device": _DEVICE,
    "output": (Path, Path("bert-positions"), "The folder of all results, new or empty.", "--output", "-o"),
    "resume": (bool, False, "Go on with what is in the output folder.", "--resume"),
    "jobs": (int, 1, "Models trained at a time, on one device.", {"min": 1}),
    "record": (Path | None, None, "Where the record goes too, a new file."),
}


def demo(text: Any, steps: Any, device: Any, figure: Any, seed: Any) -> None:
    """Train a small transformer on Python's documentation, let it write, and check results against float64."""
    from ropewalk.experiments.demo import run_demo

    run_demo(text, steps, device, figure, seed)


@command(app, "length-extrapolation", LENGTHS)
def length_extrapolation(lengths: str, **given: Any) -> None:
    """Train a small transformer with RoPE, then read longer texts by RoPE, NTK, ReRoPE, leaky ReRoPE and SelfExtend.

    It learns PyTorch's Python sources, or --text. The loss at a length is that of the last bytes of held-out windows,
    the same bytes at each length.
    """
    from ropewalk.experiments.length_extrapolation import run_length_extrapolation

    run_length_extrapolation(lengths=whole_numbers("lengths", lengths), **given)


@command(app, "bert-positions", POSITIONS)
def bert_positions(
    preset: Any, config: Any, corpus: Any, dataset: Any, schemes: Any, seeds: Any, steps: Any, **given: Any
) -> None:
    """Pre-train a BERT for each position scheme on real text, and compare them at the training length and beyond.

    A stopped or killed run goes on with --resume, by the settings in its output folder if no others are given. On
    several GPUs: torchrun --nproc-per-node N -m ropewalk experiment bert-positions …
    """
    from ropewalk.experiments.bert_positions.config import load_config
    from ropewalk.experiments.bert_positions.run import CONFIG, run_bert_positions

    if given["resume"] and preset is None and config is None:
        config = given["output"] / CONFIG
    lists = {"schemes": split_names(schemes) or None, "seeds": whole_numbers("seeds", seeds) or None}
    more = {"corpus": corpus or None, "dataset": dataset, "steps": steps}
    run_bert_positions(load_config(preset or "smoke", config, **lists, **more), **given)

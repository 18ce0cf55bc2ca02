"""Train a position scheme of your own beside RoPE, ALiBi and no positions, and read longer text than in training.

`python examples/own_scheme.py` takes about five minutes on two CPU cores, and draws own-scheme.png.
`LogBias` is the scheme, and all that is to be written for another one; docs/schemes.md adds its GPU kernels.
At the trained length the model without positions is worst; beyond it RoPE is, while both biases keep what they learnt.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from ropewalk import Alibi, NoPosition, PositionScheme, Rope
from ropewalk.experiments.byte_model import ByteTransformer, ModelSize, byte_losses, train
from ropewalk.experiments.length_extrapolation import cut_windows, read_corpus

SIZE = ModelSize(2, 128, 4, context=128, batch=16, steps=500, learning_rate=3e-3)
MULTIPLES = (1, 2, 4, 8)  # of the training length
SCORED = 64  # bytes at the end of each window: the same at each length


@dataclass(frozen=True, eq=False)
class LogBias(PositionScheme):
    """Scores fall with the logarithm of the distance, by a strength for each head."""

    strengths: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)

    def score_mod(self, scores: Tensor, distance: Tensor) -> Tensor:
        strengths = scores.new_tensor(self.strengths)[:, None, None]  # scores are (B, H, Tq, Tk)
        return scores - strengths * torch.log1p(distance.abs().to(scores.dtype))

    def is_elementwise(self) -> bool:
        return True  # by distance and head alone: the reference may take some queries at a time


SCHEMES: dict[str, PositionScheme] = {
    "LogBias, our own": LogBias(),
    "ALiBi": Alibi(),
    "RoPE": Rope(),
    "none": NoPosition(),
}


class SchemeTransformer(ByteTransformer):
    """The experiments' byte-level transformer with one scheme in all layers."""

    def __init__(self, size: ModelSize, scheme: PositionScheme) -> None:
        super().__init__(size)
        self.scheme = scheme

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens, position=self.scheme)


@torch.no_grad()
def loss_at(model: SchemeTransformer, windows: Tensor, length: int) -> float:
    """Return the loss of the windows' last bytes, where so many bytes are read, in nats."""
    losses = [byte_losses(model, part)[:, -SCORED:] for part in windows[:, -length - 1 :].split(8)]
    return float(torch.cat(losses).mean())


def draw(losses: dict[str, list[float]], lengths: list[int], size: ModelSize, path: Path) -> None:
    """Draw the losses against the length."""
    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for (name, values), marker in zip(losses.items(), "Dvox", strict=True):
        axes.plot(lengths, values, marker=marker, label=name)
    axes.axvline(size.context, color="#888888", linestyle=":", label="trained length")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(str, lengths))
    axes.set(xlabel="bytes read at once", ylabel=f"loss of the last {SCORED} bytes, nats per byte")
    axes.set_title(f"{size.steps} steps at length {size.context}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=SIZE.steps, help="training steps of each model")
    parser.add_argument("--windows", type=int, default=64, help="windows of held-out text, at most")
    parser.add_argument("--figure", type=Path, default=Path("own-scheme.png"), help="where the figure goes")
    arguments = parser.parse_args()
    size, console = dataclasses.replace(SIZE, steps=arguments.steps), Console(highlight=False)
    lengths = [size.context * multiple for multiple in MULTIPLES]
    text, training, held_out = read_corpus(None)
    windows = cut_windows(held_out, lengths[-1] + 1, most=arguments.windows)
    console.print(f"{len(SCHEMES)} models learn {text} at length {size.context}")
    losses = {}
    for name, scheme in SCHEMES.items():
        console.print(name)
        torch.manual_seed(0)  # the same weights and batches for each
        model = SchemeTransformer(size, scheme)
        train(model, training, size, console)
        losses[name] = [loss_at(model.eval(), windows, length) for length in lengths]
        console.print("  " + ", ".join(f"{x:.3f} at {length}" for x, length in zip(losses[name], lengths, strict=True)))
    draw(losses, lengths, size, arguments.figure)
    console.print(f"figure: {arguments.figure}")


if __name__ == "__main__":
    main()

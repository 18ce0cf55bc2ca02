"""ExpoSB after training: whether gradients reach it, its learned weights, and its losses against RoPE's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ropewalk.experiments.bert_positions.exposb_scores import ROUNDING, draw, scores_of
from ropewalk.experiments.bert_positions.record import EvaluationRow, ExpoSBRow
from ropewalk.modules.bert import ExpoSBBERTAttention
from ropewalk.ops.attention.api import attention
from ropewalk.schemes import ExpoSB

POSITIONS = 33
# Student's t for 5 %, two-sided, by degrees of freedom; with more of them the last, which is a bit strict.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
TOKENS = 32


def trained_band_weights(model: nn.Module) -> Tensor:
    """Return the weights of a model's ExpoSB layers, (layers, heads), on the CPU."""
    layers = [module for module in model.modules() if isinstance(module, ExpoSBBERTAttention)]
    if not layers:
        raise ValueError(f"the model, a {type(model).__name__}, has no layer of ExpoSBBERTAttention")
    return torch.stack([layer.band_weights.detach().cpu().double() for layer in layers])


def check_band_weights(hidden_size: int, num_heads: int, trained: Mapping[int, Tensor]) -> ExpoSBRow:
    """Describe the module's learned weights and their trained values, by seed (layers, heads)."""
    count = ExpoSBBERTAttention(hidden_size, num_heads).band_weights.numel()
    q, k, drawn = *draw(2, num_heads, hidden_size // num_heads), draw(num_heads)
    m, n = torch.arange(POSITIONS), torch.arange(POSITIONS).flip(0)
    plain = scores_of(ExpoSB(), q, k, m, n)
    weighted = scores_of(ExpoSB(band_weights=drawn), q, k, m, n)
    difference = float((weighted - drawn.square() * plain).abs().max() / plain.abs().max())
    measured = {
        "weights of a layer": float(count),
        "heads": float(num_heads),
        "largest difference from a head's scores times the square of its weight": difference,
    }
    per_head = count == num_heads and difference < ROUNDING
    exact = "exactly" if difference == 0 else f"to {difference:.0e}"
    finding = (
        f"A layer of {num_heads} heads has {count} of them. They multiply scores, whatever the frequency, by the "
        f"square of the head's weight ({exact}), which query weights can do as well."
    )
    if trained:
        learnt = torch.cat([layers.flatten() for layers in trained.values()]).double()
        spread = float(learnt.std(correction=0))
        means = [float(layers.double().mean()) for layers in trained.values()]
        measured |= {
            "trained models": float(len(trained)),
            "mean after training": float(learnt.mean()),
            "standard deviation over heads, layers and models": spread,
            "least after training": float(learnt.min()),
            "greatest after training": float(learnt.max()),
            "least mean of a model": min(means),
            "greatest mean of a model": max(means),
        }
        finding += (
            f" From 1 they went to {learnt.mean():.3f} ± {spread:.3f} ({learnt.min():.3f} to {learnt.max():.3f}) in "
            f"all heads and layers of {len(trained)} trained model{'s' * (len(trained) > 1)}."
        )
    return ExpoSBRow("Weights of frequency bands are learned", measured, "false" if per_head else "true", finding)


class _NoneBackward(torch.autograd.Function):
    """Attention whose backward returns None for each input."""

    @staticmethod
    def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, position=ExpoSB(), impl="reference")
        return out

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[None, None, None]:
        return None, None, None


def check_gradients(head_dim: int) -> ExpoSBRow:
    """Check the inputs that a backward of None reaches, and the error of our gradients."""
    q, k, v = (x.requires_grad_() for x in draw(3, 1, TOKENS, 2, head_dim))
    inputs = (q, k, v, draw(2).requires_grad_())
    _NoneBackward.apply(q, k, v).square().sum().backward()
    reached = sum(x.grad is not None for x in (q, k, v))
    gradients = torch.autograd.grad(_loss(*inputs), inputs)
    measured = {
        "inputs of q, k and v that a backward of None reaches": float(reached),
        "of q, k, v and band_weights that ours reaches": float(sum(bool(g.abs().max() > 0) for g in gradients)),
        "our largest relative error against differences": _error_against_differences(inputs, gradients),
    }
    _, ours, error = measured.values()
    return ExpoSBRow(
        "A backward that returns None leaves gradients to autograd",
        measured,
        "true" if reached == 3 else "false",
        f"With it gradients reach {reached} of q, k and v: the projections before the attention would learn nothing "
        f"from it. In Ropewalk they reach {ours:.0f} of q, k, v and band_weights, and agree with differences to "
        f"{error:.0e}.",
    )


def _loss(q: Tensor, k: Tensor, v: Tensor, band_weights: Tensor) -> Tensor:
    out: Tensor = attention(q, k, v, position=ExpoSB(band_weights=band_weights), impl="reference")
    return out.square().sum()


def _error_against_differences(inputs: Sequence[Tensor], gradients: Sequence[Tensor], step: float = 1e-5) -> float:
    """Return the largest relative error of the slope along a random direction of each input."""
    errors = []
    for index, (x, gradient) in enumerate(zip(inputs, gradients, strict=True)):
        direction = draw(*x.shape)
        ends = []
        for sign in (1, -1):
            moved = [each.detach() for each in inputs]
            moved[index] = moved[index] + sign * step * direction
            ends.append(float(_loss(*moved)))
        slope = (ends[0] - ends[1]) / (2 * step)
        along = float((gradient * direction).sum())
        errors.append(abs(along - slope) / max(abs(along), abs(slope), 1e-30))
    return max(errors)


def compare_losses(evaluation: Sequence[EvaluationRow], train_length: int) -> list[ExpoSBRow]:
    """Compare the losses of ExpoSB and RoPE of the same seeds: at the training length, and their rise with length.

    A difference counts as shown where Student's test of the pairs tells it from 0 at 5 %, which takes two seeds or
    more. No row without a seed of both.
    """
    losses = {(row.scheme, row.seed, row.length): row.loss for row in evaluation}
    of_exposb, of_rope = ({row.seed for row in evaluation if row.scheme == name} for name in ("exposb", "rope"))
    seeds = sorted(of_exposb & of_rope)
    longest = max((row.length for row in evaluation), default=train_length)
    if not seeds:
        return []

    def by_seed(scheme: str, length: int) -> list[float]:
        return [losses[scheme, seed, length] for seed in seeds]

    first = [by_seed(scheme, train_length) for scheme in ("exposb", "rope")]
    rows = [_compare("It learns better than RoPE", f"Loss at the training length, {train_length}", "loss", *first)]
    if longest > train_length:
        rises = [
            [far - near for far, near in zip(by_seed(scheme, longest), at_first, strict=True)]
            for scheme, at_first in zip(("exposb", "rope"), first, strict=True)
        ]
        what = f"Rise of the loss from length {train_length} to {longest}"
        rows.append(_compare("It reads longer texts better than RoPE", what, "rise", *rises))
    return rows


def _compare(claim: str, what: str, name: str, exposb: Sequence[float], rope: Sequence[float]) -> ExpoSBRow:
    differences = [a - b for a, b in zip(exposb, rope, strict=True)]
    series = {f"ExpoSB's {name}": exposb, f"RoPE's {name}": rope, "difference": differences}
    measured, shown_as = {"seeds": float(len(differences))}, []
    for label, values in series.items():
        measured[f"mean of {label}"] = mean = statistics.mean(values)
        shown_as.append(f"{mean:+.3f}" if label == "difference" else f"{mean:.3f}")
        if len(values) > 1:
            measured[f"standard deviation of {label}"] = spread = statistics.stdev(values)
            shown_as[-1] += f" ± {spread:.3f}"
    mean = measured["mean of difference"]
    shown = _differs_from_zero(differences)
    seeds = f"over {len(differences)} seeds" if len(differences) > 1 else "for one seed, which shows no spread"
    return ExpoSBRow(
        claim,
        measured,
        ("true" if mean < 0 else "false") if shown else "not shown",
        f"{what}: {shown_as[0]} by ExpoSB, {shown_as[1]} by RoPE; difference {shown_as[2]} {seeds}.",
    )


def _differs_from_zero(values: Sequence[float]) -> bool:
    if len(values) < 2:
        return False
    quantile = _STUDENT[min(len(values) - 1, len(_STUDENT)) - 1]
    error = statistics.stdev(values) / math.sqrt(len(values))
    return abs(statistics.mean(values)) > quantile * error

"""ExpoSB as measured, against the claims of its name and of the project that introduced it.

A score is the log-sum-exp of a query with one key; probabilities are what attention makes of the rows of an identity.
All in float64 on the CPU, by the plain definition that every kernel is tested against: the same numbers everywhere.

Shape letters: P pairs of positions, N pairs of vectors, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.record import EvaluationRow, ExpoSBRow
from ropewalk.modules.bert import ExpoSBBERTAttention
from ropewalk.ops.attention.api import attention
from ropewalk.schemes import ExpoSB, PositionScheme, Rope

ROPE, EXPOSB = Rope(interleaved=True), ExpoSB()  # the variant that its project trained
DECAY = ExpoSB(distance_decay=True)
TOKENS = 32  # of the texts whose probabilities are looked at
N_PAIRS = 256  # of a random query and key
POSITIONS = 33  # at which the same pair is looked at
FAR = 1 << 20  # a position that no text has
ROUNDING = 1e-3  # what is less than this is no effect: tables of cos and sin are rounded to float32, about 1e-7
# Student's t for 5 %, two-sided, by degrees of freedom; with more of them the last, which is a bit strict.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def check_exposb(
    config: Config, evaluation: Sequence[EvaluationRow] = (), band_weights: Mapping[int, Tensor] | None = None
) -> list[ExpoSBRow]:
    """Measure a row for each claim, at the run's head dim and lengths.

    Args:
        config: of the run.
        evaluation: all rows of all schemes; what compares losses is left out where ExpoSB or RoPE is not among them.
        band_weights: those of the trained ExpoSB models, by seed, as `trained_band_weights` gives them.
    """
    head_dim, length, longest = config.hidden_size // config.num_heads, config.train_length, config.longest
    return [
        check_stick_breaking(head_dim),
        check_norms(head_dim, longest),
        check_relative(head_dim, longest),
        check_amplitude(head_dim, length, longest),
        check_fall_with_distance(head_dim, length, longest),
        check_distance_decay(head_dim, length, longest),
        check_band_gains(head_dim),
        check_band_weights(config.hidden_size, config.num_heads, band_weights or {}),
        check_gradients(head_dim),
        *compare_losses(evaluation, length),
    ]


# Scores and probabilities


def draw(*shape: int) -> Tensor:
    """Draw standard normal numbers, the same for the same shape."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def scores_of(position: PositionScheme, q: Tensor, k: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Return scores (P, N) of queries at positions m (P,) with keys at n (P,); q and k are (N, D), or (P, N, D)."""
    q, k = (x.expand(len(m), *x.shape[-2:])[:, None] for x in (q, k))  # P batch rows of one token and N heads
    at: dict[str, Any] = {"positions_q": m[:, None], "positions_k": n[:, None]}
    _, lse = attention(q, k, torch.zeros_like(k), position=position, **at, return_lse=True, impl="reference")
    scores: Tensor = lse[:, :, 0]
    return scores


def probabilities_of(position: PositionScheme, q: Tensor, k: Tensor) -> Tensor:
    """Return the attention probabilities of tokens at 0 to T − 1, (H, T, T); q and k are (T, H, D)."""
    tokens, heads, _ = k.shape
    v = torch.eye(tokens, dtype=q.dtype)[:, None].expand(tokens, heads, tokens)
    out: Tensor = attention(q[None], k[None], v[None], position=position, impl="reference")
    return out[0].transpose(0, 1)


def break_sticks(scores: Tensor, order: Tensor) -> Tensor:
    """Break sticks of length 1: each key takes the part sigmoid(score) of the rest."""
    part = scores.gather(-1, order).sigmoid()
    left = torch.cat((torch.ones_like(part[..., :1]), (1 - part).cumprod(-1)[..., :-1]), dim=-1)
    return torch.zeros_like(part).scatter(-1, order, part * left)


def size_of_scores(position: PositionScheme, head_dim: int, m: Tensor, n: Tensor) -> Tensor:
    """Return the root mean square, (P,), of scores of independent features of variance 1; exactly."""
    basis = torch.eye(head_dim, dtype=torch.float64)
    q, k = basis.repeat_interleave(head_dim, 0), basis.repeat(head_dim, 1)
    return scores_of(position, q, k, m, n).square().sum(1).sqrt()


def share_of_nearest(position: PositionScheme, head_dim: int, tokens: int) -> float:
    """Return the mean part of the last token's attention to the nearest quarter of random keys."""
    texts = max(1, (1 << 21) // (tokens * head_dim))
    q, k = draw(texts, 1, 1, head_dim), draw(texts, tokens, 1, head_dim)
    nearest = (torch.arange(tokens) >= tokens - tokens // 4).to(q.dtype)[None, :, None, None].expand(texts, -1, 1, 1)
    at = torch.full((texts, 1), tokens - 1)
    share: Tensor = attention(q, k, nearest, position=position, positions_q=at, impl="reference")
    return float(share.mean())


def _amplitudes(positions: Tensor, head_dim: int) -> Tensor:
    table = EXPOSB.rotation(positions, head_dim)
    return torch.hypot(table.cos.double(), table.sin.double()).mean(-1)


# Claims about the scheme


def check_stick_breaking(head_dim: int) -> ExpoSBRow:
    """Compare with a stick-breaking sequence of the same scores, in which no piece depends on later ones."""
    q, k, other = draw(3, TOKENS, 4, head_dim)
    p = probabilities_of(EXPOSB, q, k)
    m, n = torch.meshgrid(torch.arange(TOKENS), torch.arange(TOKENS), indexing="ij")
    scores = scores_of(EXPOSB, q[m.flatten()], k[n.flatten()], m.flatten(), n.flatten()).T.unflatten(1, (TOKENS, -1))
    orders = (n, n.flip(1), (m - n).abs().argsort(dim=1, stable=True))  # from the first, the last, the nearest key on
    sticks = [break_sticks(scores, order.expand_as(scores)) for order in orders]

    def change_by(index: int) -> float:
        changed = k.clone()
        changed[index] = other[index]
        ratio = (probabilities_of(EXPOSB, q, changed) / p)[..., torch.arange(TOKENS) != index]
        return float((ratio - 1).abs().mean())

    elsewhere = min(float((p - stick).abs().sum(-1).mean()) / 2 for stick in sticks)
    softmax = float((p - scores.softmax(-1)).abs().max())
    first, last = change_by(0), change_by(TOKENS - 1)
    return ExpoSBRow(
        "A stick is broken: keys take their pieces in turn, whatever comes later",
        {
            "least share of the probability that lies elsewhere than in stick breaking": elsewhere,
            "largest difference from the softmax": softmax,
            "mean change of the other probabilities when the first key changes": first,
            "mean change of the other probabilities when the last key changes": last,
        },
        "true" if elsewhere < ROUNDING and min(first, last) < ROUNDING else "false",
        f"Probabilities are the softmax of the scores (to {softmax:.0e}). Another first key changes those of all other "
        f"keys, by {first:.1%} on average, and another last key by {last:.1%}: no key comes before the rest. "
        f"Sticks broken by the same scores would put {elsewhere:.0%} of the probability elsewhere.",
    )


def check_norms(head_dim: int, longest: int) -> ExpoSBRow:
    """Compare encoded with raw norms: a vector's score with itself is the square of its encoded length."""
    x = torch.cat((draw(N_PAIRS, head_dim), torch.eye(head_dim, dtype=torch.float64)))
    positions = torch.linspace(0, longest - 1, POSITIONS).long()
    ours, rope = (
        (scores_of(position, x, x, positions, positions) * head_dim**0.5).sqrt() / x.norm(dim=-1)
        for position in (EXPOSB, ROPE)
    )
    (low, high), (feature_low, feature_high) = (
        (float(part.min()), float(part.max())) for part in ours.split([N_PAIRS, head_dim], 1)
    )
    first, last = float(ours[0, :N_PAIRS].mean()), float(ours[-1, :N_PAIRS].mean())
    of_rope = float((rope - 1).abs().max())
    return ExpoSBRow(
        "It rotates, so it keeps the length of q and k",
        {
            "least ratio of norms, random vectors": low,
            "greatest ratio of norms, random vectors": high,
            "least ratio of norms, single features": feature_low,
            "greatest ratio of norms, single features": feature_high,
            "mean ratio at the first position, random vectors": first,
            "mean ratio at the last position, random vectors": last,
            "RoPE's largest deviation from 1": of_rope,
        },
        "true" if max(high - 1, 1 - low) < ROUNDING else "false",
        f"Lengths are multiplied by {low:.2f} to {high:.2f} (single features by {feature_low:.2f} to "
        f"{feature_high:.2f}), on average by {first:.2f} at position 0 and {last:.2f} at {longest - 1}. RoPE's stay to "
        f"{of_rope:.0e}.",
    )


def check_relative(head_dim: int, longest: int) -> ExpoSBRow:
    """Measure the change of one pair's score at one offset while both move through the text."""
    offset = min(8, longest // 2)
    n = torch.linspace(0, longest - 1 - offset, POSITIONS).long()
    q, k = draw(2, N_PAIRS, head_dim)

    def change(scores: Tensor) -> Tensor:
        return (scores.amax(0) - scores.amin(0)) / scores.std()

    ours = scores_of(EXPOSB, q, k, n + offset, n)
    without = ours / (_amplitudes(n + offset, head_dim) * _amplitudes(n, head_dim))[:, None]
    mean, greatest, by_gains = float(change(ours).mean()), float(change(ours).max()), float(change(without).mean())
    of_rope = float(change(scores_of(ROPE, q, k, n + offset, n)).max())
    return ExpoSBRow(
        "Positions are relative, as RoPE's: a score depends on the distance alone",
        {
            "mean change of a score, in standard deviations of scores": mean,
            "greatest change": greatest,
            "mean change, amplitudes divided out": by_gains,
            "RoPE's greatest change": of_rope,
        },
        "true" if greatest < ROUNDING else "false",
        f"Moved through {longest} positions at a distance of {offset}, the same q and k change their score by "
        f"{mean:.2f} standard deviations of scores on average, by {greatest:.2f} at most, and still by {by_gains:.2f} "
        f"on average with the amplitudes divided out: gains weigh the two features of a pair differently. RoPE's "
        f"change is {of_rope:.0e} at most.",
    )


def check_amplitude(head_dim: int, length: int, longest: int) -> ExpoSBRow:
    """Measure the amplitude at the first position, at the ends of training and evaluation, and far beyond."""
    positions = [0, length - 1, longest - 1, FAR]
    first, trained, last, limit = amplitudes = _amplitudes(torch.tensor(positions), head_dim).tolist()
    return ExpoSBRow(
        "The amplitude decays exponentially, so that what is far counts little",
        {f"at position {at}": amplitude for at, amplitude in zip(positions, amplitudes, strict=True)},
        "true" if limit < 0.05 * first else "in part" if last < first else "false",
        f"It falls from {first:.3f} at position 0 to {trained:.3f} where training ends ({length - 1}), {last:.3f} at "
        f"{longest - 1} and {limit:.3f} at last. It goes by the position in the text, not by the distance: the first "
        f"tokens count most, from wherever they are seen.",
    )


def check_fall_with_distance(head_dim: int, length: int, longest: int) -> ExpoSBRow:
    """Measure the size of scores by distance, without the decay; means are over all q and k, exactly."""
    ends = torch.tensor([longest - 1, longest - 1, 0, 0])
    keys = torch.tensor([longest - 1, 0, 0, longest - 1])
    distances = torch.tensor([0, length])
    basis = torch.eye(head_dim, dtype=torch.float64)

    def ratios(position: PositionScheme) -> tuple[float, float, float]:
        near_last, back, near_first, ahead = size_of_scores(position, head_dim, ends, keys).tolist()
        here, there = scores_of(position, basis, basis, distances, torch.zeros_like(distances)).mean(1).tolist()
        return back / near_last, ahead / near_first, there / here

    (back, ahead, alike), (rope_back, rope_ahead, rope_alike) = ratios(EXPOSB), ratios(ROPE)
    farthest = max(back, ahead)
    return ExpoSBRow(
        "Scores fall exponentially with distance (without distance_decay)",
        {
            "size of scores from the last token to the first, over that to itself": back,
            "size of scores from the first token to the last, over that to itself": ahead,
            "RoPE's back": rope_back,
            "RoPE's ahead": rope_ahead,
            f"mean score of a vector with itself {length} apart, over 0 apart": alike,
            "RoPE's mean score so": rope_alike,
        },
        "true" if farthest < 1 / math.e else "in part" if farthest < 1 - ROUNDING else "false",
        f"Over {longest - 1} positions scores (root mean square over all q and k) are {back:.2f} times those at "
        f"distance 0 looking back, and {ahead:.2f} times looking ahead; RoPE's {rope_back:.2f} and {rope_ahead:.2f}. "
        f"The score of a vector with itself falls to {alike:.2f} of itself at distance {length}; RoPE's to "
        f"{rope_alike:.2f}.",
    )


def check_distance_decay(head_dim: int, length: int, longest: int) -> ExpoSBRow:
    """Measure the factor of the decay, the scores that it raises, and the attention that results."""
    distances = torch.tensor([length, longest - 1, FAR])
    at_zero = torch.zeros_like(distances)
    sizes = (size_of_scores(position, head_dim, distances, at_zero) for position in (DECAY, EXPOSB))
    near, far, limit = next(sizes).div(next(sizes)).tolist()
    q, k = draw(2, 16 * N_PAIRS, head_dim)
    decayed, plain = (scores_of(position, q, k, distances[:1], at_zero[:1]) for position in (DECAY, EXPOSB))
    raised = float((decayed > plain).double().mean())
    with_decay, without, rope = (share_of_nearest(scheme, head_dim, longest) for scheme in (DECAY, EXPOSB, ROPE))
    return ExpoSBRow(
        "With distance_decay, attention falls exponentially with distance",
        {
            f"factor of scores at distance {length}": near,
            f"factor of scores at distance {longest - 1}": far,
            f"factor of scores at distance {FAR}": limit,
            "share of scores that the factor raises": raised,
            "attention to the nearest quarter of the text": with_decay,
            "the same without distance_decay": without,
            "the same by RoPE": rope,
        },
        "true" if limit < 0.05 and raised < 0.05 else "in part" if far < 1 - ROUNDING else "false",
        f"Scores are multiplied by {near:.2f} at distance {length}, by {far:.2f} at {longest - 1} and by {limit:.2f} "
        f"at last. That raises the negative ones, {raised:.0%} of those of random q and k, whose attention to the "
        f"nearest quarter of {longest} tokens is {with_decay:.1%}; {without:.1%} without the decay, {rope:.1%} by "
        f"RoPE.",
    )


def check_band_gains(head_dim: int) -> ExpoSBRow:
    """Measure the gains of features, which are fixed, and their difference within a pair of one frequency."""
    weights = EXPOSB.rotation(torch.arange(1), head_dim).weights
    assert weights is not None
    gains = weights.double().sqrt()
    pairs = gains.unflatten(0, (-1, 2))
    least, greatest, feature = float(gains.min()), float(gains.max()), int(gains.argmax())
    low = float((gains - gains.min() < 0.01).double().mean())
    within = float((pairs.amax(1) / pairs.amin(1)).max())
    return ExpoSBRow(
        "Bands of frequencies have gains",
        {
            "least gain": least,
            "greatest gain": greatest,
            "feature of the greatest gain": float(feature),
            "share of features within 0.01 of the least": low,
            "greatest ratio within a pair": within,
        },
        "true" if within - 1 < ROUNDING else "in part",
        f"Features have fixed gains from {least:.2f} to {greatest:.2f}, a bump about feature {feature} of "
        f"{head_dim}; {low:.0%} of them are within 0.01 of the least. The two features of a pair, which rotate at one "
        f"frequency, differ by up to {within - 1:.1%}, so that they are no gains of frequencies.",
    )


# Claims about its training


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
    plain = scores_of(EXPOSB, q, k, m, n)
    weighted = scores_of(ExpoSB(band_weights=drawn), q, k, m, n)
    difference = float((weighted - drawn.square() * plain).abs().max() / plain.abs().max())
    measured = {
        "weights of a layer": float(count),
        "heads": float(num_heads),
        "largest difference from a head's scores times the square of its weight": difference,
    }
    exact = "exactly" if difference == 0 else f"to {difference:.0e}"
    finding = (
        f"A layer of {num_heads} heads has {count} of them. They multiply scores, whatever the frequency, by the "
        f"square of the head's weight ({exact}), which query weights can do as well."
    )
    if trained:
        learnt = torch.cat([layers.flatten() for layers in trained.values()]).double()
        means = [float(layers.double().mean()) for layers in trained.values()]
        mean, spread = float(learnt.mean()), float(learnt.std(correction=0))
        least, greatest = float(learnt.min()), float(learnt.max())
        measured |= {
            "trained models": float(len(trained)),
            "mean after training": mean,
            "standard deviation over heads, layers and models": spread,
            "least after training": least,
            "greatest after training": greatest,
            "least mean of a model": min(means),
            "greatest mean of a model": max(means),
        }
        finding += (
            f" From 1 they went to {mean:.3f} ± {spread:.3f} ({least:.3f} to {greatest:.3f}) in all heads and layers "
            f"of {len(trained)} trained model{'s' * (len(trained) > 1)}."
        )
    verdict = "false" if count == num_heads and difference < ROUNDING else "true"
    return ExpoSBRow("Weights of frequency bands are learned", measured, verdict, finding)


class _NoneBackward(torch.autograd.Function):
    """Attention whose backward returns None for each input."""

    @staticmethod
    def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, position=EXPOSB, impl="reference")
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
    ours = sum(bool(gradient.abs().max() > 0) for gradient in gradients)
    errors = []
    for index, gradient in enumerate(gradients):
        direction, step = draw(*gradient.shape), 1e-5
        moved = [[x.detach() for x in inputs] for _ in range(2)]
        for sign, ends in zip((1, -1), moved, strict=True):
            ends[index] = ends[index] + sign * step * direction
        slope = float(_loss(*moved[0]) - _loss(*moved[1])) / (2 * step)
        along = float((gradient * direction).sum())
        errors.append(abs(along - slope) / max(abs(along), abs(slope), 1e-30))
    return ExpoSBRow(
        "A backward that returns None leaves gradients to autograd",
        {
            "inputs of q, k and v that a backward of None reaches": float(reached),
            "of q, k, v and band_weights that ours reaches": float(ours),
            "our largest relative error against differences": max(errors),
        },
        "true" if reached == 3 else "false",
        f"With it gradients reach {reached} of q, k and v: the projections before the attention would learn nothing "
        f"from it. In Ropewalk they reach {ours} of q, k, v and band_weights, and agree with differences to "
        f"{max(errors):.0e}.",
    )


def _loss(q: Tensor, k: Tensor, v: Tensor, band_weights: Tensor) -> Tensor:
    out: Tensor = attention(q, k, v, position=ExpoSB(band_weights=band_weights), impl="reference")
    return out.square().sum()


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
        last = [by_seed(scheme, longest) for scheme in ("exposb", "rope")]
        rises = [[b - a for a, b in zip(*ends, strict=True)] for ends in zip(first, last, strict=True)]
        what = f"Rise of the loss from length {train_length} to {longest}"
        rows.append(_compare("It reads longer texts better than RoPE", what, "rise", *rises))
    return rows


def _compare(claim: str, what: str, name: str, exposb: Sequence[float], rope: Sequence[float]) -> ExpoSBRow:
    differences = [a - b for a, b in zip(exposb, rope, strict=True)]
    count = len(differences)
    series = {f"ExpoSB's {name}": exposb, f"RoPE's {name}": rope, "difference": differences}
    measured, shown_as = {"seeds": float(count)}, []
    for label, values in series.items():
        measured[f"mean of {label}"] = mean = statistics.mean(values)
        shown_as.append(f"{mean:+.3f}" if label == "difference" else f"{mean:.3f}")
        if count > 1:
            measured[f"standard deviation of {label}"] = spread = statistics.stdev(values)
            shown_as[-1] += f" ± {spread:.3f}"
    mean = measured["mean of difference"]
    shown = False
    if count > 1:
        error = measured["standard deviation of difference"] / math.sqrt(count)
        shown = abs(mean) > _STUDENT[min(count - 1, len(_STUDENT)) - 1] * error
    seeds = f"over {count} seeds" if count > 1 else "for one seed, which shows no spread"
    return ExpoSBRow(
        claim,
        measured,
        ("true" if mean < 0 else "false") if shown else "not shown",
        f"{what}: {shown_as[0]} by ExpoSB, {shown_as[1]} by RoPE; difference {shown_as[2]} {seeds}.",
    )

"""ExpoSB as measured, against the claims of its name and of the project that introduced it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropewalk.experiments.bert_positions.exposb_scores import (
    ROUNDING,
    break_sticks,
    draw,
    probabilities_of,
    scores_of,
    share_of_nearest,
    size_of_scores,
)
from ropewalk.experiments.bert_positions.exposb_training import check_band_weights, check_gradients, compare_losses
from ropewalk.experiments.bert_positions.record import EvaluationRow, ExpoSBRow
from ropewalk.schemes import ExpoSB, PositionScheme, Rope

if TYPE_CHECKING:
    from ropewalk.experiments.bert_positions.config import Config

ROPE = Rope(interleaved=True)
EXPOSB = ExpoSB()  # the variant that its project trained
DECAY = ExpoSB(distance_decay=True)
TOKENS = 32  # of the texts whose probabilities are looked at
N_PAIRS = 256  # of a random query and key
POSITIONS = 33  # at which the same pair is looked at
FAR = 1 << 20  # a position that no text has


def check_exposb(
    config: Config, evaluation: Sequence[EvaluationRow] = (), band_weights: Mapping[int, Tensor] | None = None
) -> list[ExpoSBRow]:
    """Measure a row for each claim, at the run's head dim and lengths.

    Args:
        config: of the run.
        evaluation: all rows of all schemes; what compares losses is left out where ExpoSB or RoPE is not among them.
        band_weights: those of the trained ExpoSB models, by seed, as `trained_band_weights` gives them.
    """
    head_dim, length = config.hidden_size // config.num_heads, config.train_length
    longest = config.longest
    rows = [
        check_stick_breaking(head_dim),
        check_norms(head_dim, longest),
        check_relative(head_dim, longest),
        check_amplitude(head_dim, length, longest),
        check_fall_with_distance(head_dim, length, longest),
        check_distance_decay(head_dim, length, longest),
        check_band_gains(head_dim),
        check_band_weights(config.hidden_size, config.num_heads, band_weights or {}),
        check_gradients(head_dim),
    ]
    return rows + compare_losses(evaluation, length)


def check_stick_breaking(head_dim: int) -> ExpoSBRow:
    """Compare with a stick-breaking sequence of the same scores, in which no piece depends on later ones."""
    q, k, other = draw(3, TOKENS, 4, head_dim)
    p = probabilities_of(EXPOSB, q, k)
    m, n = torch.meshgrid(torch.arange(TOKENS), torch.arange(TOKENS), indexing="ij")
    scores = scores_of(EXPOSB, q[m.flatten()], k[n.flatten()], m.flatten(), n.flatten()).T.unflatten(1, (TOKENS, -1))
    orders = (n, n.flip(1), (m - n).abs().argsort(dim=1, stable=True))  # from the first, the last, the nearest key on
    sticks = [break_sticks(scores, order.expand_as(scores)) for order in orders]
    changes = {}
    for name, index in (("first", 0), ("last", TOKENS - 1)):
        changed = k.clone()
        changed[index] = other[index]
        ratio = (probabilities_of(EXPOSB, q, changed) / p)[..., torch.arange(TOKENS) != index]
        changes[name] = float((ratio - 1).abs().mean())
    measured = {
        "least share of the probability that lies elsewhere than in stick breaking": min(
            float((p - stick).abs().sum(-1).mean()) / 2 for stick in sticks
        ),
        "largest difference from the softmax": float((p - scores.softmax(-1)).abs().max()),
        "mean change of the other probabilities when the first key changes": changes["first"],
        "mean change of the other probabilities when the last key changes": changes["last"],
    }
    elsewhere, softmax, first, last = measured.values()
    return ExpoSBRow(
        "A stick is broken: keys take their pieces in turn, whatever comes later",
        measured,
        "true" if elsewhere < ROUNDING and min(first, last) < ROUNDING else "false",
        f"Probabilities are the softmax of the scores (to {softmax:.0e}). Another first key changes those of all other "
        f"keys, by {first:.1%} on average, and another last key by {last:.1%}: no key comes before the rest. "
        f"Sticks broken by the same scores would put {elsewhere:.0%} of the probability elsewhere.",
    )


def check_norms(head_dim: int, longest: int) -> ExpoSBRow:
    """Compare encoded with raw norms: a vector's score with itself is the square of its encoded length."""
    x = torch.cat((draw(N_PAIRS, head_dim), torch.eye(head_dim, dtype=torch.float64)))
    positions = torch.linspace(0, longest - 1, POSITIONS).long()

    def ratios(position: PositionScheme) -> Tensor:
        squares = scores_of(position, x, x, positions, positions) * head_dim**0.5
        norms: Tensor = squares.sqrt() / x.norm(dim=-1)
        return norms

    ours, rope = ratios(EXPOSB), ratios(ROPE)
    measured = {
        "least ratio of norms, random vectors": float(ours[:, :N_PAIRS].min()),
        "greatest ratio of norms, random vectors": float(ours[:, :N_PAIRS].max()),
        "least ratio of norms, single features": float(ours[:, N_PAIRS:].min()),
        "greatest ratio of norms, single features": float(ours[:, N_PAIRS:].max()),
        "mean ratio at the first position, random vectors": float(ours[0, :N_PAIRS].mean()),
        "mean ratio at the last position, random vectors": float(ours[-1, :N_PAIRS].mean()),
        "RoPE's largest deviation from 1": float((rope - 1).abs().max()),
    }
    low, high, feature_low, feature_high, first, last, of_rope = measured.values()
    return ExpoSBRow(
        "It rotates, so it keeps the length of q and k",
        measured,
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
    measured = {
        "mean change of a score, in standard deviations of scores": float(change(ours).mean()),
        "greatest change": float(change(ours).max()),
        "mean change, amplitudes divided out": float(change(without).mean()),
        "RoPE's greatest change": float(change(scores_of(ROPE, q, k, n + offset, n)).max()),
    }
    mean, greatest, by_gains, of_rope = measured.values()
    return ExpoSBRow(
        "Positions are relative, as RoPE's: a score depends on the distance alone",
        measured,
        "true" if greatest < ROUNDING else "false",
        f"Moved through {longest} positions at a distance of {offset}, the same q and k change their score by "
        f"{mean:.2f} standard deviations of scores on average, by {greatest:.2f} at most, and still by {by_gains:.2f} "
        f"on average with the amplitudes divided out: gains weigh the two features of a pair differently. RoPE's "
        f"change is {of_rope:.0e} at most.",
    )


def check_amplitude(head_dim: int, length: int, longest: int) -> ExpoSBRow:
    """Measure the amplitude at the first position, at the ends of training and evaluation, and far beyond."""
    first, trained, last, limit = _amplitudes(torch.tensor([0, length - 1, longest - 1, FAR]), head_dim).tolist()
    measured = {
        "at position 0": first,
        f"at position {length - 1}": trained,
        f"at position {longest - 1}": last,
        f"at position {FAR}": limit,
    }
    verdict = "true" if limit < 0.05 * first else "in part" if last < first else "false"
    return ExpoSBRow(
        "The amplitude decays exponentially, so that what is far counts little",
        measured,
        verdict,
        f"It falls from {first:.3f} at position 0 to {trained:.3f} where training ends ({length - 1}), {last:.3f} at "
        f"{longest - 1} and {limit:.3f} at last. It goes by the position in the text, not by the distance: the first "
        f"tokens count most, from wherever they are seen.",
    )


def check_fall_with_distance(head_dim: int, length: int, longest: int) -> ExpoSBRow:
    """Measure the size of scores by distance, without the decay; means are over all q and k, exactly."""
    ends = torch.tensor([longest - 1, longest - 1, 0, 0])
    keys = torch.tensor([longest - 1, 0, 0, longest - 1])

    def ratios(position: PositionScheme) -> tuple[float, float]:
        near_last, back, near_first, ahead = size_of_scores(position, head_dim, ends, keys).tolist()
        return back / near_last, ahead / near_first

    (back, ahead), (rope_back, rope_ahead) = ratios(EXPOSB), ratios(ROPE)
    distances = torch.tensor([0, length])
    basis = torch.eye(head_dim, dtype=torch.float64)
    same = {
        name: scores_of(position, basis, basis, distances, torch.zeros_like(distances)).mean(1)
        for name, position in (("ours", EXPOSB), ("rope", ROPE))
    }
    measured = {
        "size of scores from the last token to the first, over that to itself": back,
        "size of scores from the first token to the last, over that to itself": ahead,
        "RoPE's back": rope_back,
        "RoPE's ahead": rope_ahead,
        f"mean score of a vector with itself {length} apart, over 0 apart": float(same["ours"][1] / same["ours"][0]),
        "RoPE's mean score so": float(same["rope"][1] / same["rope"][0]),
    }
    alike, rope_alike = list(measured.values())[-2:]
    verdict = "true" if max(back, ahead) < 1 / math.e else "in part" if max(back, ahead) < 1 - ROUNDING else "false"
    return ExpoSBRow(
        "Scores fall exponentially with distance (without distance_decay)",
        measured,
        verdict,
        f"Over {longest - 1} positions scores (root mean square over all q and k) are {back:.2f} times those at "
        f"distance 0 looking back, and {ahead:.2f} times looking ahead; RoPE's {rope_back:.2f} and {rope_ahead:.2f}. "
        f"The score of a vector with itself falls to {alike:.2f} of itself at distance {length}; RoPE's to "
        f"{rope_alike:.2f}.",
    )


def check_distance_decay(head_dim: int, length: int, longest: int) -> ExpoSBRow:
    """Measure the factor of the decay, the scores that it raises, and the attention that results."""
    distances = torch.tensor([length, longest - 1, FAR])
    at_zero = torch.zeros_like(distances)
    near, far, limit = (
        size_of_scores(DECAY, head_dim, distances, at_zero) / size_of_scores(EXPOSB, head_dim, distances, at_zero)
    ).tolist()
    q, k = draw(2, 16 * N_PAIRS, head_dim)
    pair = (q, k, distances[:1], at_zero[:1])
    raised = float((scores_of(DECAY, *pair) > scores_of(EXPOSB, *pair)).double().mean())
    shares = {
        name: share_of_nearest(position, head_dim, longest)
        for name, position in (("with", DECAY), ("without", EXPOSB), ("rope", ROPE))
    }
    measured = {
        f"factor of scores at distance {length}": near,
        f"factor of scores at distance {longest - 1}": far,
        f"factor of scores at distance {FAR}": limit,
        "share of scores that the factor raises": raised,
        "attention to the nearest quarter of the text": shares["with"],
        "the same without distance_decay": shares["without"],
        "the same by RoPE": shares["rope"],
    }
    verdict = "true" if limit < 0.05 and raised < 0.05 else "in part" if far < 1 - ROUNDING else "false"
    return ExpoSBRow(
        "With distance_decay, attention falls exponentially with distance",
        measured,
        verdict,
        f"Scores are multiplied by {near:.2f} at distance {length}, by {far:.2f} at {longest - 1} and by {limit:.2f} "
        f"at last. That raises the negative ones, {raised:.0%} of those of random q and k, whose attention to the "
        f"nearest quarter of {longest} tokens is {shares['with']:.1%}; {shares['without']:.1%} without the decay, "
        f"{shares['rope']:.1%} by RoPE.",
    )


def check_band_gains(head_dim: int) -> ExpoSBRow:
    """Measure the gains of features, which are fixed, and their difference within a pair of one frequency."""
    weights = EXPOSB.rotation(torch.arange(1), head_dim).weights
    assert weights is not None
    gains = weights.double().sqrt()
    pairs = gains.unflatten(0, (-1, 2))
    measured = {
        "least gain": float(gains.min()),
        "greatest gain": float(gains.max()),
        "feature of the greatest gain": float(gains.argmax()),
        "share of features within 0.01 of the least": float((gains - gains.min() < 0.01).double().mean()),
        "greatest ratio within a pair": float((pairs.amax(1) / pairs.amin(1)).max()),
    }
    least, greatest, feature, low, within = measured.values()
    return ExpoSBRow(
        "Bands of frequencies have gains",
        measured,
        "true" if within - 1 < ROUNDING else "in part",
        f"Features have fixed gains from {least:.2f} to {greatest:.2f}, a bump about feature {feature:.0f} of "
        f"{head_dim}; {low:.0%} of them are within 0.01 of the least. The two features of a pair, which rotate at one "
        f"frequency, differ by up to {within - 1:.1%}, so that they are no gains of frequencies.",
    )


def _amplitudes(positions: Tensor, head_dim: int) -> Tensor:
    table = EXPOSB.rotation(positions, head_dim)
    return torch.hypot(table.cos.double(), table.sin.double()).mean(-1)

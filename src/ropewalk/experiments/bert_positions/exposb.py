"""ExpoSB as measured, against the claims of its name and of the project that introduced it.

A score is the log-sum-exp of a query with one key; probabilities are what attention makes of the rows of an identity.
All in float64 on the CPU, by the plain definition that every kernel is tested against: the same numbers everywhere.
The claims and their words are in claims.yaml.

Shape letters: P pairs of positions, N pairs of vectors, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.modules.bert import ExpoSBBERTAttention
from ropewalk.ops.attention.api import attention
from ropewalk.schemes import ExpoSB, PositionScheme, Rope

CLAIMS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
ROPE, EXPOSB = Rope(interleaved=True), ExpoSB()  # the variant that its project trained
DECAY = ExpoSB(distance_decay=True)
TOKENS = 32  # of the texts whose probabilities are looked at
N_PAIRS = 256  # of a random query and key
POSITIONS = 33  # at which the same pair is looked at
FAR = 1 << 20  # a position that no text has
ROUNDING = 1e-3  # what is less than this is no effect: tables of cos and sin are rounded to float32, about 1e-7
# Student's t for 5 %, two-sided, by degrees of freedom; with more of them the last, which is a bit strict.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
Row = dict[
    str, Any
]  # of a record: kind, claim, measured, verdict ("true", "false", "in part", "not shown") and finding


def check_exposb(
    config: Config, evaluation: Sequence[Row] = (), trained: Mapping[int, Tensor] | None = None
) -> list[Row]:
    """Measure a row for each claim, at the run's sizes; `trained` has the band weights of its models, by seed."""
    sizes = config.hidden_size // config.num_heads, config.train_length, config.longest
    rows = [check(*sizes) for check in CHECKS]
    rows.append(check_band_weights(config.hidden_size, config.num_heads, trained or {}))
    return [*rows, check_gradients(sizes[0]), *compare_losses(evaluation, config.train_length)]


def _row(name: str, verdict: str, **values: Any) -> Row:
    values = {key: float(value) if isinstance(value, Tensor) else value for key, value in values.items()}
    claim = CLAIMS[name]
    measured = {label.format(**values): float(values[key]) for key, label in claim["measured"].items()}
    finding = claim["finding"].format(**values)
    return {"kind": "exposb", "claim": claim["claim"], "measured": measured, "verdict": verdict, "finding": finding}


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


def check_stick_breaking(head_dim: int, length: int, longest: int) -> Row:
    """Compare with a stick-breaking sequence of the same scores, in which no piece depends on later ones."""
    q, k, other = draw(3, TOKENS, 4, head_dim)
    p = probabilities_of(EXPOSB, q, k)
    m, n = torch.meshgrid(torch.arange(TOKENS), torch.arange(TOKENS), indexing="ij")
    scores = scores_of(EXPOSB, q[m.flatten()], k[n.flatten()], m.flatten(), n.flatten()).T.unflatten(1, (TOKENS, -1))
    orders = (n, n.flip(1), (m - n).abs().argsort(dim=1, stable=True))  # from the first, the last, the nearest key on
    sticks = [break_sticks(scores, order.expand_as(scores)) for order in orders]

    def change_by(index: int) -> Tensor:
        changed = k.clone()
        changed[index] = other[index]
        ratio = (probabilities_of(EXPOSB, q, changed) / p)[..., torch.arange(TOKENS) != index]
        return (ratio - 1).abs().mean()

    elsewhere, softmax = min((p - x).abs().sum(-1).mean() for x in sticks) / 2, (p - scores.softmax(-1)).abs().max()
    first, last = change_by(0), change_by(TOKENS - 1)
    verdict = "true" if max(elsewhere, min(first, last)) < ROUNDING else "false"
    return _row("stick_breaking", verdict, elsewhere=elsewhere, softmax=softmax, first=first, last=last)


def check_norms(head_dim: int, length: int, longest: int) -> Row:
    """Compare encoded with raw norms: a vector's score with itself is the square of its encoded length."""
    x = torch.cat((draw(N_PAIRS, head_dim), torch.eye(head_dim, dtype=torch.float64)))
    positions = torch.linspace(0, longest - 1, POSITIONS).long()
    ours, rope = (
        (scores_of(position, x, x, positions, positions) * head_dim**0.5).sqrt() / x.norm(dim=-1)
        for position in (EXPOSB, ROPE)
    )
    vectors, features = ours.split([N_PAIRS, head_dim], 1)
    low, high, deviation = vectors.min(), vectors.max(), (rope - 1).abs().max()
    ends = {"first": vectors[0].mean(), "last": vectors[-1].mean(), "end": longest - 1}
    of_features = {"feature_low": features.min(), "feature_high": features.max()}
    verdict = "true" if max(high - 1, 1 - low) < ROUNDING else "false"
    return _row("norms", verdict, low=low, high=high, rope=deviation, **ends, **of_features)


def check_relative(head_dim: int, length: int, longest: int) -> Row:
    """Measure the change of one pair's score at one offset while both move through the text."""
    offset = min(8, longest // 2)
    n = torch.linspace(0, longest - 1 - offset, POSITIONS).long()
    q, k = draw(2, N_PAIRS, head_dim)

    def change(scores: Tensor) -> Tensor:
        return (scores.amax(0) - scores.amin(0)) / scores.std()

    ours = scores_of(EXPOSB, q, k, n + offset, n)
    without = ours / (_amplitudes(n + offset, head_dim) * _amplitudes(n, head_dim))[:, None]
    rope = scores_of(ROPE, q, k, n + offset, n)
    found = {"mean": change(ours).mean(), "greatest": change(ours).max(), "by_gains": change(without).mean()}
    verdict = "true" if found["greatest"] < ROUNDING else "false"
    return _row("relative", verdict, longest=longest, offset=offset, rope=change(rope).max(), **found)


def check_amplitude(head_dim: int, length: int, longest: int) -> Row:
    """Measure the amplitude at the first position, at the ends of training and evaluation, and far beyond."""
    at = torch.tensor([0, length - 1, longest - 1, FAR])
    first, trained, last, limit = _amplitudes(at, head_dim).tolist()
    verdict = "true" if limit < 0.05 * first else "in part" if last < first else "false"
    ends = {"trained_end": length - 1, "end": longest - 1, "far": FAR}
    return _row("amplitude", verdict, first=first, trained=trained, last=last, limit=limit, **ends)


def check_fall_with_distance(head_dim: int, length: int, longest: int) -> Row:
    """Measure the size of scores by distance, without the decay; means are over all q and k, exactly."""
    ends = torch.tensor([longest - 1, longest - 1, 0, 0])
    keys = torch.tensor([longest - 1, 0, 0, longest - 1])
    distances = torch.tensor([0, length])
    basis = torch.eye(head_dim, dtype=torch.float64)
    ratios: dict[str, float] = {}
    for prefix, position in (("", EXPOSB), ("rope_", ROPE)):
        near_last, back, near_first, ahead = size_of_scores(position, head_dim, ends, keys).tolist()
        here, there = scores_of(position, basis, basis, distances, torch.zeros_like(distances)).mean(1).tolist()
        found = {"back": back / near_last, "ahead": ahead / near_first, "alike": there / here}
        ratios |= {prefix + name: ratio for name, ratio in found.items()}
    farthest = max(ratios["back"], ratios["ahead"])
    verdict = "true" if farthest < 1 / math.e else "in part" if farthest < 1 - ROUNDING else "false"
    return _row("fall_with_distance", verdict, length=length, end=longest - 1, **ratios)


def check_distance_decay(head_dim: int, length: int, longest: int) -> Row:
    """Measure the factor of the decay, the scores that it raises, and the attention that results."""
    distances = torch.tensor([length, longest - 1, FAR])
    at_zero = torch.zeros_like(distances)
    decayed, plain = (size_of_scores(position, head_dim, distances, at_zero) for position in (DECAY, EXPOSB))
    near, last, limit = (decayed / plain).tolist()
    q, k = draw(2, 16 * N_PAIRS, head_dim)
    decayed, plain = (scores_of(position, q, k, distances[:1], at_zero[:1]) for position in (DECAY, EXPOSB))
    raised = (decayed > plain).double().mean()
    shares = [share_of_nearest(scheme, head_dim, longest) for scheme in (DECAY, EXPOSB, ROPE)]
    verdict = "true" if limit < 0.05 and raised < 0.05 else "in part" if last < 1 - ROUNDING else "false"
    at: dict[str, float] = {"length": length, "end": longest - 1, "far": FAR, "longest": longest}
    at |= dict(zip(("with_decay", "without", "rope"), shares, strict=True))
    return _row("distance_decay", verdict, near=near, last=last, limit=limit, raised=raised, **at)


def check_band_gains(head_dim: int, length: int, longest: int) -> Row:
    """Measure the gains of features, which are fixed, and their difference within a pair of one frequency."""
    weights = EXPOSB.rotation(torch.arange(1), head_dim).weights
    assert weights is not None
    gains = weights.double().sqrt()
    pairs = gains.unflatten(0, (-1, 2))
    within = (pairs.amax(1) / pairs.amin(1)).max()
    found = {"least": gains.min(), "greatest": gains.max(), "feature": gains.argmax(), "excess": within - 1}
    low = (gains - gains.min() < 0.01).double().mean()
    verdict = "true" if within - 1 < ROUNDING else "in part"
    return _row("band_gains", verdict, head_dim=head_dim, within=within, low=low, **found)


CHECKS = (
    *(check_stick_breaking, check_norms, check_relative, check_amplitude, check_fall_with_distance),
    *(check_distance_decay, check_band_gains),
)


def trained_band_weights(model: nn.Module) -> Tensor:
    """Return the weights of a model's ExpoSB layers, (layers, heads), on the CPU."""
    layers = [module for module in model.modules() if isinstance(module, ExpoSBBERTAttention)]
    return torch.stack([layer.band_weights.detach().cpu().double() for layer in layers])


def check_band_weights(hidden_size: int, heads: int, trained: Mapping[int, Tensor]) -> Row:
    """Describe the module's learned weights and their trained values, by seed (layers, heads)."""
    count = ExpoSBBERTAttention(hidden_size, heads).band_weights.numel()
    q, k, drawn = *draw(2, heads, hidden_size // heads), draw(heads)
    m, n = torch.arange(POSITIONS), torch.arange(POSITIONS).flip(0)
    plain = scores_of(EXPOSB, q, k, m, n)
    weighted = scores_of(ExpoSB(band_weights=drawn), q, k, m, n)
    difference = float((weighted - drawn.square() * plain).abs().max() / plain.abs().max())
    verdict = "false" if count == heads and difference < ROUNDING else "true"
    exact = "exactly" if difference == 0 else f"to {difference:.0e}"
    row = _row("band_weights", verdict, count=count, heads=heads, difference=difference, exact=exact)
    if trained:
        weights = torch.stack(list(trained.values())).double()
        means = weights.flatten(1).mean(1)
        over_all = {"mean": weights.mean(), "spread": weights.std(correction=0), "least": weights.min()}
        over_all |= {"greatest": weights.max(), "least_mean": means.min(), "greatest_mean": means.max()}
        more = _row("trained_band_weights", verdict, models=len(trained), plural="s" * (len(trained) > 1), **over_all)
        row |= {"measured": row["measured"] | more["measured"], "finding": f"{row['finding']} {more['finding']}"}
    return row


class _NoneBackward(torch.autograd.Function):
    """Attention whose backward returns None for each input."""

    @staticmethod
    def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, position=EXPOSB, impl="reference")
        return out

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[None, None, None]:
        return None, None, None


def check_gradients(head_dim: int) -> Row:
    """Check the inputs that a backward of None reaches, and the error of our gradients."""

    def loss_of(q: Tensor, k: Tensor, v: Tensor, band_weights: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, position=ExpoSB(band_weights=band_weights), impl="reference")
        return out.square().sum()

    q, k, v = (x.requires_grad_() for x in draw(3, 1, TOKENS, 2, head_dim))
    inputs = (q, k, v, draw(2).requires_grad_())
    _NoneBackward.apply(q, k, v).square().sum().backward()
    reached = sum(x.grad is not None for x in (q, k, v))
    gradients = torch.autograd.grad(loss_of(*inputs), inputs)
    ours = sum(bool(gradient.abs().max() > 0) for gradient in gradients)
    errors = []
    for index, gradient in enumerate(gradients):
        direction, step = draw(*gradient.shape), 1e-5
        moved = [[x.detach() for x in inputs] for _ in range(2)]
        for sign, ends in zip((1, -1), moved, strict=True):
            ends[index] = ends[index] + sign * step * direction
        slope = float(loss_of(*moved[0]) - loss_of(*moved[1])) / (2 * step)
        along = float((gradient * direction).sum())
        errors.append(abs(along - slope) / max(abs(along), abs(slope), 1e-30))
    return _row("gradients", "true" if reached == 3 else "false", reached=reached, ours=ours, error=max(errors))


def compare_losses(evaluation: Sequence[Row], train_length: int) -> list[Row]:
    """Compare ExpoSB's and RoPE's losses of the same seeds, at the training length and in their rise with length."""
    losses = {(row["scheme"], row["seed"], row["length"]): row["loss"] for row in evaluation}
    seeds = sorted(
        {seed for _, seed, _ in losses if {(x, seed, train_length) for x in ("exposb", "rope")} <= set(losses)}
    )
    longest = max((length for _, _, length in losses), default=train_length)
    if not seeds:
        return []
    first, last = (
        [[losses[scheme, seed, length] for seed in seeds] for scheme in ("exposb", "rope")]
        for length in (train_length, longest)
    )
    rows = [_compare("It learns better than RoPE", f"Loss at the training length, {train_length}", "loss", *first)]
    if longest > train_length:
        rises = [[b - a for a, b in zip(*ends, strict=True)] for ends in zip(first, last, strict=True)]
        what = f"Rise of the loss from length {train_length} to {longest}"
        rows.append(_compare("It reads longer texts better than RoPE", what, "rise", *rises))
    return rows


def _compare(claim: str, what: str, name: str, exposb: Sequence[float], rope: Sequence[float]) -> Row:
    """Compare by Student's test of the pairs at 5 %, which takes two seeds or more to show a difference."""
    differences = [a - b for a, b in zip(exposb, rope, strict=True)]
    count, shown_as = len(differences), []
    measured = {"seeds": float(count)}
    for label, values in {f"ExpoSB's {name}": exposb, f"RoPE's {name}": rope, "difference": differences}.items():
        measured[f"mean of {label}"] = mean = statistics.mean(values)
        shown_as.append(f"{mean:+.3f}" if label == "difference" else f"{mean:.3f}")
        if count > 1:
            measured[f"standard deviation of {label}"] = spread = statistics.stdev(values)
            shown_as[-1] += f" ± {spread:.3f}"
    limit = _STUDENT[min(count - 1, len(_STUDENT)) - 1] * spread / math.sqrt(count) if count > 1 else math.inf
    verdict = "not shown" if abs(mean) <= limit else "true" if mean < 0 else "false"
    seeds = f"over {count} seeds" if count > 1 else "for one seed, which shows no spread"
    finding = f"{what}: {shown_as[0]} by ExpoSB, {shown_as[1]} by RoPE; difference {shown_as[2]} {seeds}."
    return {"kind": "exposb", "claim": claim, "measured": measured, "verdict": verdict, "finding": finding}

"""ExpoSB as measured, against the claims of its name and of the project that introduced it: those of claims.yaml.

All in float64 on the CPU, by the plain definition that every kernel is tested against: the same numbers everywhere.
Shape letters: P pairs of positions, N pairs of vectors, T tokens, H heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from torch import Tensor, nn

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.figures import spread
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
Row = dict[str, Any]  # of a record: kind, claim, measured, verdict ("true", "false", "in part", "not shown"), finding


def check_exposb(config: Config, record: Sequence[Row] = ()) -> list[Row]:
    """Measure a row for each claim, at the run's sizes; its record has losses, and band weights of trained models."""
    evaluation = [row for row in record if row["kind"] == "evaluation"]
    trained = [torch.tensor(row["band_weights"]) for row in record if row.get("band_weights") is not None]
    sizes = config.hidden_size // config.num_heads, config.train_length, config.longest
    checks = (check_stick_breaking, check_norms, check_relative, check_amplitude, check_fall_with_distance)
    rows = [check(*sizes) for check in (*checks, check_distance_decay, check_band_gains)]
    rows.append(check_band_weights(config.hidden_size, config.num_heads, trained))
    return [*rows, check_gradients(sizes[0]), *compare_losses(evaluation, config.train_length)]


def _row(name: str, is_true: bool | Tensor, in_part: bool = False, /, **values: Any) -> Row:
    values = {key: float(value) if isinstance(value, Tensor) else value for key, value in values.items()}
    claim, verdict = CLAIMS[name], "true" if is_true else "in part" if in_part else "false"
    measured = {label.format(**values): float(values[key]) for key, label in claim["measured"].items()}
    finding = claim["finding"].format(**values)
    return {"kind": "exposb", "claim": claim["claim"], "measured": measured, "verdict": verdict, "finding": finding}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def scores_of(position: PositionScheme, q: Tensor, k: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Return scores (P, N) of queries at positions m (P,) with keys at n (P,); q and k are (N, D), or (P, N, D)."""
    q, k = (x.expand(len(m), *x.shape[-2:])[:, None] for x in (q, k))  # P batch rows of one token and N heads
    at: Row = {"positions_q": m[:, None], "positions_k": n[:, None]}
    lse: Tensor = attention(q, k, 0 * k, position=position, **at, return_lse=True, impl="reference")[1]
    return lse[:, :, 0]


def probabilities_of(position: PositionScheme, q: Tensor, k: Tensor) -> Tensor:
    """Return the attention probabilities of tokens at 0 to T − 1, (H, T, T); q and k are (T, H, D)."""
    v = torch.eye(len(k), dtype=q.dtype)[:, None].expand(-1, k.shape[1], -1)
    out: Tensor = attention(q[None], k[None], v[None], position=position, impl="reference")
    return out[0].transpose(0, 1)


def break_sticks(scores: Tensor, order: Tensor) -> Tensor:
    """Break sticks of length 1: each key takes the part sigmoid(score) of the rest."""
    part = scores.gather(-1, order).sigmoid()
    left = nn.functional.pad((1 - part).cumprod(-1)[..., :-1], (1, 0), value=1.0)
    return torch.zeros_like(part).scatter(-1, order, part * left)


def size_of_scores(position: PositionScheme, head_dim: int, m: Tensor, n: Tensor) -> Tensor:
    """Return the root mean square, (P,), of scores of independent features of variance 1; exactly."""
    basis = torch.eye(head_dim, dtype=torch.float64)
    q, k = basis.repeat_interleave(head_dim, 0), basis.repeat(head_dim, 1)
    return scores_of(position, q, k, m, n).square().sum(1).sqrt()


def _amplitudes(positions: Tensor, head_dim: int) -> Tensor:
    table = EXPOSB.rotation(positions, head_dim)
    return torch.hypot(table.cos.double(), table.sin.double()).mean(-1)


def check_stick_breaking(head_dim: int, length: int, longest: int) -> Row:
    # Against a stick-breaking sequence of the same scores, in which no piece depends on later ones.
    q, k, other = draw(3, TOKENS, 4, head_dim)
    p = probabilities_of(EXPOSB, q, k)
    m, n = torch.meshgrid(torch.arange(TOKENS), torch.arange(TOKENS), indexing="ij")
    scores = scores_of(EXPOSB, q[m.flatten()], k[n.flatten()], m.flatten(), n.flatten()).T.unflatten(1, (TOKENS, -1))
    orders = (n, n.flip(1), (m - n).abs().argsort(dim=1, stable=True))  # from the first, the last, the nearest key on
    sticks = [break_sticks(scores, order.expand_as(scores)) for order in orders]
    changes = []
    for index in (0, TOKENS - 1):
        changed = k.clone()
        changed[index] = other[index]
        ratio = (probabilities_of(EXPOSB, q, changed) / p)[..., torch.arange(TOKENS) != index]
        changes.append((ratio - 1).abs().mean())
    elsewhere, softmax = min((p - x).abs().sum(-1).mean() for x in sticks) / 2, (p - scores.softmax(-1)).abs().max()
    found = {"elsewhere": elsewhere, "softmax": softmax, "first": changes[0], "last": changes[1]}
    return _row("stick_breaking", max(elsewhere, min(changes)) < ROUNDING, **found)


def check_norms(head_dim: int, length: int, longest: int) -> Row:
    # A vector's score with itself is the square of its encoded length.
    x = torch.cat((draw(N_PAIRS, head_dim), torch.eye(head_dim, dtype=torch.float64)))
    at = torch.linspace(0, longest - 1, POSITIONS).long()
    ours, rope = ((scores_of(y, x, x, at, at) * head_dim**0.5).sqrt() / x.norm(dim=-1) for y in (EXPOSB, ROPE))
    vectors, features = ours.split([N_PAIRS, head_dim], 1)
    found = {"low": vectors.min(), "high": vectors.max(), "rope": (rope - 1).abs().max(), "end": longest - 1}
    found |= {"first": vectors[0].mean(), "last": vectors[-1].mean()}
    found |= {"feature_low": features.min(), "feature_high": features.max()}
    return _row("norms", max(found["high"] - 1, 1 - found["low"]) < ROUNDING, **found)


def check_relative(head_dim: int, length: int, longest: int) -> Row:
    offset = min(8, longest // 2)  # of pairs that move through the text
    n = torch.linspace(0, longest - 1 - offset, POSITIONS).long()
    q, k = draw(2, N_PAIRS, head_dim)
    ours, rope = (scores_of(position, q, k, n + offset, n) for position in (EXPOSB, ROPE))
    by_gains = ours / (_amplitudes(n + offset, head_dim) * _amplitudes(n, head_dim))[:, None]
    change, without, rope_change = ((x.amax(0) - x.amin(0)) / x.std() for x in (ours, by_gains, rope))
    found = {"mean": change.mean(), "greatest": change.max(), "by_gains": without.mean(), "rope": rope_change.max()}
    return _row("relative", found["greatest"] < ROUNDING, longest=longest, offset=offset, **found)


def check_amplitude(head_dim: int, length: int, longest: int) -> Row:
    at = {"trained_end": length - 1, "end": longest - 1, "far": FAR}
    first, trained, last, limit = _amplitudes(torch.tensor([0, *at.values()]), head_dim).tolist()
    at |= {"first": first, "trained": trained, "last": last, "limit": limit}
    return _row("amplitude", limit < 0.05 * first, last < first, **at)


def check_fall_with_distance(head_dim: int, length: int, longest: int) -> Row:
    end, basis = longest - 1, torch.eye(head_dim, dtype=torch.float64)
    queries, keys, distances = (torch.tensor(x) for x in ([end, end, 0, 0], [end, 0, 0, end], [0, length]))
    found: dict[str, float] = {}
    for prefix, position in (("", EXPOSB), ("rope_", ROPE)):
        near_last, back, near_first, ahead = size_of_scores(position, head_dim, queries, keys).tolist()
        here, there = scores_of(position, basis, basis, distances, torch.zeros_like(distances)).mean(1).tolist()
        found |= {f"{prefix}back": back / near_last, f"{prefix}ahead": ahead / near_first}
        found[f"{prefix}alike"] = there / here
    farthest = max(found["back"], found["ahead"])
    return _row("fall_with_distance", farthest < 1 / math.e, farthest < 1 - ROUNDING, length=length, end=end, **found)


def check_distance_decay(head_dim: int, length: int, longest: int) -> Row:
    distances = torch.tensor([length, longest - 1, FAR])
    at_zero = torch.zeros_like(distances)
    decayed, plain = (size_of_scores(x, head_dim, distances, at_zero) for x in (DECAY, EXPOSB))
    near, last, limit = (decayed / plain).tolist()
    found = {"near": near, "last": last, "limit": limit, "length": length, "end": longest - 1, "far": FAR}
    q, k = draw(2, 16 * N_PAIRS, head_dim)
    decayed, plain = (scores_of(x, q, k, distances[:1], at_zero[:1]) for x in (DECAY, EXPOSB))
    found |= {"raised": float((decayed > plain).double().mean()), "longest": longest}
    texts = max(1, (1 << 21) // (longest * head_dim))
    q, k = draw(texts, 1, 1, head_dim), draw(texts, longest, 1, head_dim)
    nearest = (torch.arange(longest) >= longest - longest // 4).to(q.dtype)[None, :, None, None].expand(texts, -1, 1, 1)
    at = torch.full((texts, 1), longest - 1)
    for name, scheme in {"with_decay": DECAY, "without": EXPOSB, "rope": ROPE}.items():
        found[name] = float(attention(q, k, nearest, position=scheme, positions_q=at, impl="reference").mean())
    return _row("distance_decay", limit < 0.05 and found["raised"] < 0.05, last < 1 - ROUNDING, **found)


def check_band_gains(head_dim: int, length: int, longest: int) -> Row:
    weights = EXPOSB.rotation(torch.arange(1), head_dim).weights
    assert weights is not None
    gains = weights.double().sqrt()
    within = (gains[::2] / gains[1::2]).log().abs().max().exp()
    found = {"least": gains.min(), "greatest": gains.max(), "feature": gains.argmax(), "excess": within - 1}
    found |= {"within": within, "low": (gains - gains.min() < 0.01).double().mean()}
    return _row("band_gains", within - 1 < ROUNDING, True, head_dim=head_dim, **found)


def trained_band_weights(model: nn.Module) -> Tensor:
    """Return the weights of a model's ExpoSB layers, (layers, heads), on the CPU."""
    layers = (module.band_weights for module in model.modules() if isinstance(module, ExpoSBBERTAttention))
    return torch.stack([weights.detach().cpu().double() for weights in layers])


def check_band_weights(hidden_size: int, heads: int, trained: Sequence[Tensor]) -> Row:
    """Describe the module's learned weights and their trained values, (layers, heads) of each model."""
    count = ExpoSBBERTAttention(hidden_size, heads).band_weights.numel()
    q, k, drawn = *draw(2, heads, hidden_size // heads), draw(heads)
    m, n = torch.arange(POSITIONS), torch.arange(POSITIONS).flip(0)
    plain, weighted = (scores_of(x, q, k, m, n) for x in (EXPOSB, ExpoSB(band_weights=drawn)))
    difference = float((weighted - drawn.square() * plain).abs().max() / plain.abs().max())
    is_true, exact = count != heads or difference >= ROUNDING, f"to {difference:.0e}" if difference else "exactly"
    row = _row("band_weights", is_true, count=count, heads=heads, difference=difference, exact=exact)
    if trained:
        weights = torch.stack(list(trained)).double()
        means = weights.flatten(1).mean(1)
        found = {"mean": weights.mean(), "spread": weights.std(correction=0), "least": weights.min()}
        found |= {"greatest": weights.max(), "least_mean": means.min(), "greatest_mean": means.max()}
        more = _row("trained_band_weights", is_true, models=len(trained), plural="s" * (len(trained) > 1), **found)
        row |= {"measured": row["measured"] | more["measured"], "finding": f"{row['finding']} {more['finding']}"}
    return row


class _NoneBackward(torch.autograd.Function):
    """Attention whose backward returns None for each input."""

    @staticmethod
    def forward(ctx: object, *qkv: Tensor) -> Tensor:
        out: Tensor = attention(*qkv, position=EXPOSB, impl="reference")
        return out

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[None, None, None]:
        return None, None, None


def check_gradients(head_dim: int) -> Row:
    q, k, v = (x.requires_grad_() for x in draw(3, 1, TOKENS, 2, head_dim))
    inputs, step, errors = (q, k, v, draw(2).requires_grad_()), 1e-5, []
    _NoneBackward.apply(q, k, v).square().sum().backward()
    reached = sum(x.grad is not None for x in (q, k, v))

    def loss_with(moved: int, by: Tensor) -> Tensor:
        *qkv, weights = (x + by if index == moved else x for index, x in enumerate(inputs))
        out: Tensor = attention(*qkv, position=ExpoSB(band_weights=weights), impl="reference")
        return out.square().sum()

    gradients = torch.autograd.grad(loss_with(0, torch.zeros_like(q)), inputs)
    for index, gradient in enumerate(gradients):
        direction = draw(*gradient.shape)
        with torch.no_grad():
            rise = loss_with(index, step * direction) - loss_with(index, -step * direction)
        slope, along = float(rise) / (2 * step), float((gradient * direction).sum())
        errors.append(abs(along - slope) / max(abs(along), abs(slope), 1e-30))
    ours = sum(bool(gradient.any()) for gradient in gradients)
    return _row("gradients", reached == 3, reached=reached, ours=ours, error=max(errors))


def compare_losses(evaluation: Sequence[Row], train_length: int) -> list[Row]:
    """Compare ExpoSB's and RoPE's losses of the same seeds, at the training length and in their rise with length.

    Student's test of the pairs at 5 % takes two seeds or more to show a difference.
    """
    columns = ["length", "seed", "scheme", "loss"]
    losses = pd.DataFrame(evaluation, columns=columns).pivot(index=columns[:2], columns="scheme", values="loss")
    losses = losses.reindex(columns=["exposb", "rope"]).dropna()
    if losses.empty:
        return []
    first, longest, rows = losses.loc[train_length], losses.index.get_level_values(0).max(), []
    compared = {("It learns better than RoPE", f"Loss at the training length, {train_length}", "loss"): first}
    if longest > train_length:
        what = f"Rise of the loss from length {train_length} to {longest}"
        compared["It reads longer texts better than RoPE", what, "rise"] = losses.loc[longest] - first
    count = len(first)
    seeds = f"over {count} seeds" if count > 1 else "for one seed, which shows no spread"
    for (claim, what, name), pairs in compared.items():
        difference, measured, limit = pairs.exposb - pairs.rope, {"seeds": float(count)}, math.inf
        values = {f"ExpoSB's {name}": pairs.exposb, f"RoPE's {name}": pairs.rope, "difference": difference}
        for label, x in values.items():
            measured[f"mean of {label}"] = mean = float(x.mean())
            if count > 1:
                measured[f"standard deviation of {label}"] = deviation = float(x.std())
                limit = _STUDENT[min(count - 1, len(_STUDENT)) - 1] * deviation / math.sqrt(count)
        verdict = "not shown" if abs(mean) <= limit else "true" if mean < 0 else "false"
        by = f"{spread(pairs.exposb, 3)} by ExpoSB, {spread(pairs.rope, 3)} by RoPE"
        row = {"kind": "exposb", "claim": claim, "measured": measured, "verdict": verdict}
        rows.append(row | {"finding": f"{what}: {by}; difference {spread(difference, 3, '+')} {seeds}."})
    return rows

"""Evaluation on held-out text: loss and accuracy in windows of the training length and of longer ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.experiments.bert_positions.batches import NO_LABEL, Batch, evaluation_batches
from ropewalk.experiments.bert_positions.config import resolve_precision
from ropewalk.experiments.bert_positions.model import masked_logits
from ropewalk.experiments.bert_positions.record import EvaluationRow

if TYPE_CHECKING:
    from ropewalk.experiments.bert_positions.config import Config
    from ropewalk.experiments.bert_positions.corpus import Corpus

_TOKENS_AT_ONCE = {"cpu": 1 << 12, "cuda": 1 << 16}
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast of a precision, in training and evaluation: "auto", "no", "bf16" or "fp16"."""
    precision = resolve_precision(precision, device)
    return torch.autocast(device.type, _DTYPES.get(precision, torch.bfloat16), enabled=precision in _DTYPES)


def evaluate(
    model: Any, corpus: Corpus, config: Config, scheme: str, seed: int, device: torch.device
) -> list[EvaluationRow]:
    """Compute the loss and the accuracy of a model, on `device`, at each of the configuration's lengths.

    The same masked tokens are scored at every length: what differs is how much around them is read at once. The model
    is read as it was trained, in the same precision, but without dropout, and is left as it was.

    Raises:
        ValueError: a loss that is not finite, or lengths that do not score the same number of tokens.
    """
    was_training = model.training
    model.eval()
    rows = []
    for multiple in config.length_multiples:
        length = config.train_length * multiple
        loss, accuracy, n_labels = _score(model, corpus, config, length, device)
        if not math.isfinite(loss):
            raise ValueError(
                f"the model of {scheme}, seed {seed}, has a loss of {loss} at length {length}: it diverged"
            )
        rows.append(EvaluationRow(scheme, seed, length, loss, accuracy, n_labels))
    model.train(was_training)
    counts = {row.length: row.n_labels for row in rows}
    if len(set(counts.values())) > 1:
        raise ValueError(f"lengths are scored on different numbers of masked tokens, {counts}, but must be on the same")
    return rows


@torch.no_grad()
def _score(model: Any, corpus: Corpus, config: Config, length: int, device: torch.device) -> tuple[float, float, int]:
    """Return the mean loss, the accuracy and the number of masked tokens; waits for the device once, at the end."""
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in evaluation_batches(corpus, config, length, device, _TOKENS_AT_ONCE[device.type]):
        with autocast_of(config.precision, device):
            logits = masked_logits(model, batch)
        totals += _count(logits.float(), batch)
    loss, correct, n_labels = totals.tolist()
    if n_labels == 0:
        raise ValueError(f"the held-out text has no masked token at length {length}, but must have one")
    return loss / n_labels, correct / n_labels, int(n_labels)


def _count(logits: Tensor, batch: Batch) -> Tensor:
    """Return the sum of losses, the number of right first guesses, and the number of labels."""
    flat = batch.labels.flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), flat, ignore_index=NO_LABEL, reduction="none").double()
    right = (logits.argmax(-1).flatten() == flat).double()  # never where there is no label, which is no token
    return torch.stack((losses.sum(), right.sum(), (flat != NO_LABEL).double().sum()))

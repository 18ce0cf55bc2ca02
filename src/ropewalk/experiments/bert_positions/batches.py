"""Masked batches: windows of text with some tokens hidden, for the model to predict.

Shape letters: B rows, T tokens of a row, M masked tokens of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.corpus import Corpus
from ropewalk.experiments.bert_positions.seeds import derive_seed

NO_LABEL = -100
MASKED, REPLACED = 0.8, 0.1  # of the masked tokens: shown as [MASK], as any other; the rest as they are
EVALUATION_SEED = 0


@dataclass(frozen=True)
class Batch:
    """The rows of a batch, or a part of them."""

    input_ids: Tensor  # (B, T) int64
    attention_mask: Tensor  # (B, T) int64: 1 token, 0 padding
    masked: Tensor  # (B, M) int64: which tokens of the row are masked
    labels: Tensor  # (B, M) int64: what they are, or NO_LABEL past the row's last one
    n_labels: int  # of the whole batch, this part and the others
    n_tokens: int  # of this part, without padding


def n_masked_of(n_tokens: int, probability: float) -> int:
    """Return the number of masked tokens of a row."""
    return max(1, int(probability * n_tokens + 0.5))


def training_batch(
    corpus: Corpus, config: Config, seed: int, step: int, device: torch.device, part: int = 0, n_parts: int = 1
) -> Batch:
    """Make the batch of a step, counted from 0, or one of n_parts equal parts of its rows.

    The windows of an epoch are shuffled by `seed` alone; which tokens are masked, and as what they are shown, are drawn
    on the device by (seed, step), for the whole batch always. So a batch depends neither on what was drawn before, nor
    on how it is cut into parts. The device is never waited for.

    In a row of n tokens exactly max(1, round(mask_probability·n)) are masked, halves rounded up; M is that of T.
    """
    if config.batch_size % n_parts or not 0 <= part < n_parts:
        raise ValueError(
            f"part is {part} of n_parts = {n_parts}, but must be one of as many as divide batch_size, "
            f"{config.batch_size}: processes times accumulation_steps"
        )
    rows = slice(part * config.batch_size // n_parts, (part + 1) * config.batch_size // n_parts)
    windows = corpus.windows[_window_numbers(len(corpus.windows), config.batch_size, seed, step)]
    n_masked = (config.mask_probability * windows[:, 1].double() + 0.5).long().clamp_(min=1)
    host = _pack(corpus, windows[rows], n_masked[rows], config.train_length, pin=device.type == "cuda")
    packed = host.to(device, non_blocking=True)

    ids = packed[:, :-2].long()
    generator = torch.Generator(device).manual_seed(derive_seed(seed, step))
    draws = _Draws.of(config.batch_size, config, corpus, generator)
    inside = torch.arange(config.train_length, device=device) < packed[:, -2:-1]
    input_ids, masked, labels = _mask(ids, inside, packed[:, -1:], draws.part(rows), corpus.mask_id)
    n_tokens = int(windows[rows, 1].sum())
    return Batch(input_ids, inside.long(), masked, labels, int(n_masked.sum()), n_tokens)


def evaluation_batches(
    corpus: Corpus, config: Config, length: int, device: torch.device, tokens_at_once: int
) -> Iterator[Batch]:
    """Cut the held-out windows into rows of `length` tokens, at most tokens_at_once or one row in a batch.

    The same tokens are masked at each length and on each device, the same number in every train_length tokens; only how
    much text around them is seen differs. There is no padding, and every masked token has its label.
    """
    T, longest = config.train_length, config.longest
    if length % T or longest % length:
        raise ValueError(f"length is {length}, but must be a multiple of {T}, and divide {longest}")
    pieces = corpus.held_out.reshape(-1, T).long()
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    n_masked = torch.full((len(pieces), 1), n_masked_of(T, config.mask_probability))
    draws = _Draws.of(len(pieces), config, corpus, generator)
    ids, masked, labels = _mask(pieces, torch.ones_like(pieces, dtype=torch.bool), n_masked, draws, corpus.mask_id)

    in_row = torch.arange(len(pieces)) % (length // T) * T  # where in its row a piece begins
    tensors = ids.view(-1, length), (masked + in_row[:, None]).view(len(ids) * T // length, -1)
    labels = labels.view(len(tensors[1]), -1)
    at_once = max(1, tokens_at_once // length)
    for ids_, masked_, labels_ in zip(*(x.split(at_once) for x in (*tensors, labels)), strict=True):
        rows = ids_.to(device)
        yield Batch(rows, torch.ones_like(rows), masked_.to(device), labels_.to(device), labels_.numel(), ids_.numel())


def _window_numbers(n_windows: int, batch_size: int, seed: int, step: int) -> Tensor:
    """Return the windows of a batch: those of an epoch in their shuffled order, then those of the next."""
    places = torch.arange(step * batch_size, (step + 1) * batch_size)
    epochs = range(step * batch_size // n_windows, ((step + 1) * batch_size - 1) // n_windows + 1)
    numbers = [
        _epoch_order(n_windows, seed, epoch)[places[places // n_windows == epoch] % n_windows] for epoch in epochs
    ]
    return torch.cat(numbers)


@functools.lru_cache(maxsize=4)
def _epoch_order(n_windows: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n_windows, generator=torch.Generator().manual_seed(derive_seed(seed, epoch, "order")))


def _pack(corpus: Corpus, windows: Tensor, n_masked: Tensor, length: int, *, pin: bool) -> Tensor:
    """Pack a batch for one copy to the device: (B, T + 2) int32, tokens, their number, the number of masked ones."""
    packed = torch.empty(len(windows), length + 2, dtype=torch.int32, pin_memory=pin)
    offsets = torch.arange(length)
    places = (windows[:, :1] + offsets).clamp_(max=corpus.tokens.numel() - 1)
    outside = offsets >= windows[:, 1:]
    packed[:, :-2] = corpus.tokens[places].masked_fill_(outside, corpus.pad_id)
    packed[:, -2] = windows[:, 1]
    packed[:, -1] = n_masked
    return packed


@dataclass(frozen=True)
class _Draws:
    """The random numbers of a batch."""

    order: Tensor  # (B, T): the tokens that come first in it are masked
    kinds: Tensor  # (B, M): as what they are shown
    others: Tensor  # (B, M): ordinary tokens

    @classmethod
    def of(cls, n_rows: int, config: Config, corpus: Corpus, generator: torch.Generator) -> _Draws:
        length, device = config.train_length, generator.device
        shape = (n_rows, n_masked_of(length, config.mask_probability))
        order = torch.rand(n_rows, length, generator=generator, device=device)
        kinds = torch.rand(shape, generator=generator, device=device)
        others = torch.randint(corpus.n_special, corpus.vocab_size, shape, generator=generator, device=device)
        return cls(order, kinds, others)

    def part(self, rows: slice) -> _Draws:
        return _Draws(self.order[rows], self.kinds[rows], self.others[rows])


def _mask(ids: Tensor, inside: Tensor, n_masked: Tensor, draws: _Draws, mask_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mask tokens: (B, T) as they are shown; the masked indices, and their tokens, (B, M); n_masked is (B, 1)."""
    M = draws.kinds.shape[1]
    masked = draws.order.masked_fill(~inside, -1.0).topk(M).indices
    tokens = ids.gather(1, masked)
    is_masked = torch.arange(M, device=ids.device) < n_masked
    shown = torch.where(draws.kinds < MASKED + REPLACED, draws.others, tokens)
    shown = shown.masked_fill(draws.kinds < MASKED, mask_id)
    input_ids = ids.scatter(1, masked, torch.where(is_masked, shown, tokens))
    return input_ids, masked, tokens.masked_fill(~is_masked, NO_LABEL)

"""Masked batches: windows of text with some tokens hidden, for the model to predict.

Shape letters: B rows, T tokens of a row, M masked tokens of all rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.corpus import Corpus

EVALUATION_SEED = 0


def derive_seed(*what: object) -> int:
    """Derive a seed for one purpose: other words or numbers give another, unrelated one.

    Generators on the CPU look at 32 bits of a seed alone, so all its bits depend on all of `what`.
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1


class TrainingBatches(Dataset[dict[str, Tensor]]):
    """The windows that a training sees, in their order, batch_size to a step.

    The windows of an epoch are shuffled by `seed` alone; masks are drawn by (seed, step), for the whole batch always.
    So a batch depends neither on a scheme, nor on what was drawn before, nor on how it is cut into parts. A loader
    fetches the rows of a part at once; its batch is that of `mask_tokens`.
    """

    def __init__(self, corpus: Corpus, config: Config, seed: int) -> None:
        self.corpus, self.config, self.seed = corpus, config, seed

    def __len__(self) -> int:
        return self.config.steps * self.config.batch_size

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        config, corpus = self.config, self.corpus
        step = numbers[0] // config.batch_size
        windows = corpus.windows[self._windows_of(step)]
        offsets = torch.arange(config.train_length)
        is_token = offsets < windows[:, 1:]
        places = (windows[:, :1] + offsets).clamp_(max=len(corpus.tokens) - 1)
        ids = corpus.tokens[places].long().masked_fill_(~is_token, corpus.tokenizer.pad_token_id)
        ids, labels = mask_tokens(corpus, config, ids, is_token, derive_seed(self.seed, step))
        rows = torch.tensor(numbers) - step * config.batch_size
        return make_batch(ids[rows], is_token[rows], labels[rows])

    def tokens_of(self, step: int) -> int:
        """Count the tokens of a step, without padding."""
        return int(self.corpus.windows[self._windows_of(step), 1].sum())

    def _windows_of(self, step: int) -> Tensor:
        n_windows, size = len(self.corpus.windows), self.config.batch_size
        places = torch.arange(step * size, (step + 1) * size)
        epochs = range(step * size // n_windows, ((step + 1) * size - 1) // n_windows + 1)
        return torch.cat(
            [_epoch_order(n_windows, self.seed, n)[places[places // n_windows == n] % n_windows] for n in epochs]
        )


@functools.lru_cache(maxsize=4)
def _epoch_order(n_windows: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n_windows, generator=torch.Generator().manual_seed(derive_seed(seed, epoch, "order")))


def mask_tokens(corpus: Corpus, config: Config, ids: Tensor, is_token: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Mask tokens by transformers' collator: (B, T) as they are shown, and labels, −100 where nothing is masked."""
    collator = DataCollatorForLanguageModeling(corpus.tokenizer, mlm_probability=config.mask_probability)
    collator.generator = torch.Generator().manual_seed(seed)
    masked: tuple[Tensor, Tensor] = collator.torch_mask_tokens(ids, special_tokens_mask=~is_token)
    return masked


def make_batch(ids: Tensor, is_token: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Make the arguments of `MaskedBert`: rows, and of their masked tokens the indices and labels alone, (M,)."""
    masked = (labels != -100).flatten().nonzero()[:, 0]
    attention_mask = is_token.long()
    return {
        "input_ids": ids,
        "attention_mask": attention_mask,
        "masked": masked,
        "labels": labels.flatten()[masked],
    }


def evaluation_batches(corpus: Corpus, config: Config, length: int, tokens_at_once: int) -> list[dict[str, Tensor]]:
    """Cut the held-out windows into rows of `length` tokens, at most tokens_at_once or one row in a batch.

    The same tokens are masked at each length; only how much text around them is read differs. There is no padding.
    """
    pieces = corpus.held_out.reshape(-1, config.train_length).long()
    ids, labels = mask_tokens(corpus, config, pieces, torch.ones_like(pieces, dtype=torch.bool), EVALUATION_SEED)
    at_once = max(1, tokens_at_once // length)
    rows = (x.view(-1, length).split(at_once) for x in (ids, labels))
    return [make_batch(ids, torch.ones_like(ids, dtype=torch.bool), labels) for ids, labels in zip(*rows, strict=True)]

"""A tiny comparison of schemes, as several tests and their processes run it."""

from __future__ import annotations

import torch

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.data import SPECIAL_TOKENS, Corpus

TINY = Config(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=32,
    vocab_size=512,
    train_length=16,
    length_multiples=[1, 2],
    batch_size=8,
    steps=12,
    learning_rate=1e-2,
    warmup=0.25,
    dropout=0.1,
    log_every=2,
    checkpoint_every=4,
)

TEXT = "a rope is laid of three strands each of yarns that turn the other way so that it holds by its own strain"


def make_corpus(n_documents=20, seed=0):
    """Words that follow each other by a rule, so that masked ones can be told; some windows are short."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(10, (n_documents, 1), generator=generator)
    half = 10 * (torch.arange(n_documents)[:, None] % 2)  # of the words: a document lacks the other
    tokens = (5 + half + (starts + 3 * torch.arange(60)) % 10).int()
    lengths = torch.tensor([16, 16, 16, 12])
    windows = torch.tensor([[d * 60 + 16 * w, int(lengths[w])] for d in range(n_documents) for w in range(4)])
    words = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *map(str, range(25))))}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
    )
    facts = {"name": "a rule", "n_documents": n_documents, "n_bytes": 0, "sha256": "0" * 64}
    tags = torch.full((2, 4, 32), -100, dtype=torch.int8)
    return Corpus(facts, tokenizer, tokens.flatten(), windows, tokens[:4, :32], torch.arange(4), tags)

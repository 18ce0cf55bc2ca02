"""WordPiece, learnt from text by `tokenizers`: the same vocabulary each time."""

from __future__ import annotations

import string
import unicodedata
from collections import Counter
from typing import Any

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # with the ids 0 to 4
MOST_CHARACTERS = 1000  # single characters in the vocabulary; rarer ones are unknown


def train_wordpiece(documents: list[str], vocab_size: int) -> Any:
    """Train a lower-cased WordPiece `tokenizers.Tokenizer`, as BERT's, of at most vocab_size tokens.

    The trainer numbers characters inside a word, "##e", as it meets them in a hash map, whose order differs from run to
    run, and decides between equally frequent pairs by these numbers; so here it is given all of them before, in order.
    Text that spells a special token, as "[MASK]", is ordinary text.
    """
    from tokenizers.models import WordPiece
    from tokenizers.trainers import WordPieceTrainer

    tokenizer = _empty_tokenizer(WordPiece(unk_token="[UNK]"))
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(tokenizer.normalizer.normalize_str(document))
    characters = sorted((x for x in counts if not x.isspace()), key=lambda x: (-counts[x], x))
    characters = sorted(characters[: min(MOST_CHARACTERS, vocab_size // 4)])
    inner = [f"##{x}" for x in characters if not _is_punctuation(x)]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        special_tokens=[*SPECIAL_TOKENS, *inner],
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return _empty_tokenizer(WordPiece(vocab=tokenizer.get_vocab(), unk_token="[UNK]"))


def _empty_tokenizer(model: Any) -> Any:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _is_punctuation(character: str) -> bool:
    """Return whether it is a word of its own."""
    return character in string.punctuation or unicodedata.category(character).startswith("P")

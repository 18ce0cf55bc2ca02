"""The text of a comparison as tokens: prepared once into a folder, then mapped from its file."""

from __future__ import annotations

import hashlib
import itertools
import os
import string
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.text import MEGABYTE, read_documents

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # with the ids 0 to 4
MOST_CHARACTERS = 1000  # single characters in the vocabulary; rarer ones are unknown
SHORTEST_WINDOW = 8  # tokens; less at the end of a document is left out
SAMPLE_BYTES_PER_TOKEN = 2000  # of the vocabulary: how much text WordPiece is learnt from
ENCODED_AT_ONCE = 4 * MEGABYTE  # characters: an encoding takes far more memory than its text


@dataclass(frozen=True)
class Corpus:
    """Documents as token ids, most to learn from, some held out."""

    facts: dict[str, Any]  # for records: name, n_documents, n_bytes, and sha256 of the text, document by document
    tokenizer: Any  # transformers' PreTrainedTokenizerFast
    tokens: Tensor  # int32: all documents to learn from, end to end, mapped from a file
    windows: Tensor  # (W, 2) int64: where in tokens a window begins, and how many it has; each lies in one document
    held_out: Tensor  # (N, longest) int32: windows that each lie in one held-out document


def prepare_corpus(config: Config, folder: Path, console: Console) -> Corpus:
    """Read the corpus from `folder`; if it is not there yet, prepare it there first.

    The vocabulary is learnt from the first documents that are not held out, in their random order. The share
    `held_out` of the documents is held out, but at least one. Training windows have train_length tokens, the last of a
    document less, but at least 8.

    Raises:
        ValueError: text that cannot be read, or is too little.
        ModuleNotFoundError: tokenizers or datasets is missing.
    """
    from transformers import PreTrainedTokenizerFast

    file = folder / "tokens.pt"
    if not file.exists():
        _write_tokens(config, folder, file)
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    content = torch.load(file, mmap=True)
    facts, lengths, held_out_lengths = (content[key] for key in ("facts", "lengths", "held_out_lengths"))
    windows = cut_windows(lengths, config.train_length)
    begins = cut_held_out(held_out_lengths, config.longest, config.evaluation_windows)
    for of, found, least in (("to learn from", windows, SHORTEST_WINDOW), ("held out", begins, config.longest)):
        if not len(found):
            raise ValueError(
                f"{facts['name']}: no document {of} has {least} tokens: give more or longer text, raise max_megabytes "
                "or held_out, or lower train_length or length_multiples"
            )
    console.print(
        f"text: {facts['name']}; {facts['n_documents']:,} documents, {facts['n_bytes'] / MEGABYTE:,.1f} MB; "
        f"{len(content['tokens']):,} tokens to learn from, {len(begins)} held-out windows of {config.longest}",
        markup=False,
        highlight=False,
    )
    held_out = content["held_out"][begins[:, None] + torch.arange(config.longest)]
    return Corpus(facts, tokenizer, content["tokens"], windows, held_out)


def _write_tokens(config: Config, folder: Path, file: Path) -> None:
    name, documents = read_documents(config)
    n_held_out = max(1, round(config.held_out * len(documents)))
    if n_held_out >= len(documents):
        raise ValueError(f"{name} has {len(documents)} documents that differ, but must have more than {n_held_out}")
    digest = hashlib.sha256()
    for document in documents:
        digest.update(hashlib.sha256(document.encode()).digest())
    tokenizer = train_wordpiece(documents[n_held_out:], config.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    held_out, held_out_lengths = _encode(tokenizer, documents[:n_held_out])
    tokens, lengths = _encode(tokenizer, documents[n_held_out:])
    n_bytes = sum(len(document.encode()) for document in documents)
    facts = {"name": name, "n_documents": len(documents), "n_bytes": n_bytes, "sha256": digest.hexdigest()}
    content = {"facts": facts, "tokens": tokens, "lengths": lengths}
    unfinished = file.with_suffix(".unfinished")
    torch.save(content | {"held_out": held_out, "held_out_lengths": held_out_lengths}, unfinished)
    os.replace(unfinished, file)


def _encode(tokenizer: Any, documents: list[str]) -> tuple[Tensor, Tensor]:
    """Return the tokens of all documents, end to end, and how many each has."""
    ids, lengths = array("i"), []
    for some in _group(documents):
        for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
            ids.extend(encoding.ids)
            lengths.append(len(encoding.ids))
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(lengths)


def _group(documents: list[str]) -> Iterator[list[str]]:
    sizes = itertools.accumulate(map(len, documents))
    for _, pairs in itertools.groupby(zip(sizes, documents, strict=True), lambda pair: pair[0] // ENCODED_AT_ONCE):
        yield [document for _, document in pairs]


def cut_windows(lengths: Tensor, size: int) -> Tensor:
    """Cut windows of `size` tokens, the last of a document shorter, (W, 2): begin and number of tokens."""
    counts = lengths // size + (lengths % size >= SHORTEST_WINDOW)
    document, number = _spread(counts)
    offset = number * size
    begins = lengths.cumsum(0) - lengths
    return torch.stack((begins[document] + offset, (lengths[document] - offset).clamp(max=size)), 1)


def cut_held_out(lengths: Tensor, size: int, most: int) -> Tensor:
    """Return the begins of windows of exactly `size` tokens, at most so many, evenly from all that fit; (N,).

    A document's rest beyond its windows is left out at both of its ends, half at each.
    """
    document, number = _spread(lengths // size)
    begins = lengths.cumsum(0) - lengths
    starts = begins[document] + (lengths[document] % size) // 2 + number * size
    count = min(most, len(starts))
    return starts[torch.arange(count) * len(starts) // max(1, count)]


def _spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For each of counts.sum() things, return its count's index, and its number in that."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def train_wordpiece(documents: list[str], vocab_size: int) -> Any:
    """Train a lower-cased WordPiece `tokenizers.Tokenizer`, as BERT's, of at most vocab_size tokens.

    The trainer numbers characters inside a word, "##e", as it meets them in a hash map, whose order differs from run to
    run, and decides between equally frequent pairs by these numbers; so here it is given all of them before, in order.
    Text that spells a special token, as "[MASK]", is ordinary text.
    """
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece
    from tokenizers.trainers import WordPieceTrainer

    def make(model: Any) -> Any:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        return tokenizer

    total = itertools.accumulate(len(document.encode()) for document in documents)
    sample = documents[: max(1, sum(size <= vocab_size * SAMPLE_BYTES_PER_TOKEN for size in total))]
    tokenizer = make(WordPiece(unk_token="[UNK]"))
    counts: Counter[str] = Counter()
    for document in sample:
        counts.update(tokenizer.normalizer.normalize_str(document))
    characters = sorted((x for x in counts if not x.isspace()), key=lambda x: (-counts[x], x))
    characters = sorted(characters[: min(MOST_CHARACTERS, vocab_size // 4)])
    inner = [f"##{x}" for x in characters if x not in string.punctuation and unicodedata.category(x)[0] != "P"]
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        special_tokens=[*SPECIAL_TOKENS, *inner],
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    return make(WordPiece(vocab=tokenizer.get_vocab(), unk_token="[UNK]"))

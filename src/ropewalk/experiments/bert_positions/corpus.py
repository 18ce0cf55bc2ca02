"""The text of a comparison as tokens: prepared once into a folder, then mapped from its files.

The folder holds tokenizer.json; tokens.bin and held_out.bin, the token ids of all documents end to end; lengths.bin,
how many each document has, the held-out ones first; and manifest.json, written last, by which all of that is checked.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ropewalk.bench.core.terminal import progress_bar
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.text import MEGABYTE, Text, open_text
from ropewalk.experiments.bert_positions.wordpiece import SPECIAL_TOKENS, train_wordpiece

FORMAT = 1
SHORTEST_WINDOW = 8  # tokens; less at the end of a document is left out
SAMPLE_BYTES_PER_TOKEN = 2000  # of the vocabulary: how much text WordPiece is learnt from
ENCODED_AT_ONCE = 4 * MEGABYTE  # of text: an encoding takes far more memory than its text
FILES = ("tokenizer.json", "tokens.bin", "held_out.bin", "lengths.bin")
MANIFEST = "manifest.json"
RAW_TEXT = "text.tmp"
# The keys of the configuration that the files depend on; windows are cut when the files are read.
SETTINGS = ("corpus", "dataset", "dataset_column", "max_megabytes", "held_out", "vocab_size")


@dataclass(frozen=True)
class Corpus:
    """Documents as token ids, most to learn from, some held out."""

    name: str  # for records: no path
    n_documents: int
    n_bytes: int
    sha256: str  # of the text, document by document
    vocab_size: int
    pad_id: int
    mask_id: int
    n_special: int  # ids below are special tokens
    tokenizer: Any  # tokenizers.Tokenizer
    tokens: Tensor  # int32: all documents to learn from, end to end, mapped from a file
    windows: Tensor  # (W, 2) int64: where in tokens a window begins, and how many it has; each lies in one document
    held_out: Tensor  # (N, longest) int32: windows that each lie in one held-out document


def prepare_corpus(config: Config, folder: Path, console: Console) -> Corpus:
    """Read the corpus from `folder`; if it is not there in full yet, prepare it there first.

    The vocabulary is learnt from the first documents that are not held out, in their random order. The share
    `held_out` of the documents is held out, but at least one. Training windows have train_length tokens, the last of a
    document less, but at least 8.

    Raises:
        ValueError: text that cannot be read, or is too little; a damaged file, or files of other settings, in folder.
        ModuleNotFoundError: tokenizers or datasets is missing.
    """
    try:
        import tokenizers  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("tokenizers is not installed (pip install 'ropewalk[train]')") from error
    if not (folder / MANIFEST).exists():
        text = open_text(config)
        folder.mkdir(parents=True, exist_ok=True)
        _write_corpus(config, text, folder, console)
    return _read_corpus(config, folder)


def cut_windows(lengths: Tensor, size: int) -> Tensor:
    """Cut windows of `size` tokens, the last of a document shorter, (W, 2): begin and number of tokens."""
    begins = lengths.cumsum(0) - lengths
    rest = lengths % size
    counts = lengths // size + (rest >= SHORTEST_WINDOW)
    document, number = _spread(counts)
    offset = number * size
    return torch.stack((begins[document] + offset, (lengths[document] - offset).clamp(max=size)), 1)


def cut_held_out(lengths: Tensor, size: int, most: int) -> Tensor:
    """Return the begins of windows of exactly `size` tokens, at most so many, evenly from all that fit; (N,).

    A document's rest beyond its windows is left out at both of its ends, half at each.
    """
    begins = lengths.cumsum(0) - lengths
    document, number = _spread(lengths // size)
    starts = begins[document] + (lengths[document] % size) // 2 + number * size
    count = min(most, len(starts))
    return starts[torch.arange(count) * len(starts) // max(1, count)]


def _spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For each of counts.sum() things, return its count's index, and its number in that."""
    owner = torch.repeat_interleave(counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def _write_corpus(config: Config, text: Text, folder: Path, console: Console) -> None:
    raw = folder / RAW_TEXT
    try:
        sizes, digest = _collect(text, raw, config.max_megabytes)
        n_held_out = max(1, round(config.held_out * len(sizes)))
        if n_held_out >= len(sizes):
            raise ValueError(
                f"{text.name} has {len(sizes)} documents that are not equal, of which {n_held_out} must be held out: "
                "give more text, or a greater max_megabytes or lesser held_out"
            )
        console.print(
            f"text: {text.name}; {len(sizes):,} documents, {sum(sizes) / MEGABYTE:,.1f} MB, {n_held_out:,} held out"
            + "".join(f"; left out: {count:,} {reason}" for reason, count in sorted(text.left_out.items())),
            markup=False,
            highlight=False,
        )
        tokenizer = _train_tokenizer(raw, sizes, n_held_out, config.vocab_size)
        tokenizer.save(str(folder / "tokenizer.json"))
        lengths = _encode(tokenizer, raw, sizes, n_held_out, folder, console)
    finally:
        raw.unlink(missing_ok=True)
    held_out = torch.tensor(lengths[:n_held_out])
    _check_windows(config, text.name, torch.tensor(lengths[n_held_out:]), held_out)
    n_windows = len(cut_held_out(held_out, config.longest, config.evaluation_windows))
    console.print(
        f"{sum(lengths[n_held_out:]):,} tokens of {tokenizer.get_vocab_size():,} to learn from; {n_windows} held-out "
        f"windows of {config.longest}"
        + ("" if n_windows == config.evaluation_windows else f", fewer than {config.evaluation_windows}"),
        markup=False,
        highlight=False,
    )
    manifest = {
        "format": FORMAT,
        "settings": {key: config.as_dict()[key] for key in SETTINGS},
        "name": text.name,
        "n_documents": len(sizes),
        "n_held_out": n_held_out,
        "n_bytes": sum(sizes),
        "sha256": digest,
        "files": {name: _hash_file(folder / name) for name in FILES},
    }
    _write_manifest(folder / MANIFEST, manifest)


def _collect(text: Text, path: Path, max_megabytes: float) -> tuple[list[int], str]:
    """Copy documents into one file until the next would be too much; returns their bytes, and a hash of all."""
    sizes: list[int] = []
    left = int(max_megabytes * MEGABYTE)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for document in text.documents:
            content = document.encode()
            left -= len(content)
            if left < 0:
                break
            file.write(content)
            sizes.append(len(content))
            digest.update(hashlib.sha256(content).digest())
    if not sizes and left < 0:
        raise ValueError(f"max_megabytes is {max_megabytes}, but the first document of {text.name} has more than that")
    if not sizes:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(text.left_out.items()))
        raise ValueError(f"{text.name} has no text" + (f"; of its documents are {reasons}" if reasons else ""))
    return sizes, digest.hexdigest()


def _read_documents(path: Path, sizes: Iterable[int], offset: int = 0) -> Iterator[str]:
    with path.open("rb") as file:
        file.seek(offset)
        for size in sizes:
            yield file.read(size).decode()


def _train_tokenizer(raw: Path, sizes: list[int], n_held_out: int, vocab_size: int) -> Any:
    total = itertools.accumulate(sizes[n_held_out:])
    n_sample = max(1, sum(size <= vocab_size * SAMPLE_BYTES_PER_TOKEN for size in total))
    sample = sizes[n_held_out : n_held_out + n_sample]
    return train_wordpiece(list(_read_documents(raw, sample, sum(sizes[:n_held_out]))), vocab_size)


def _encode(tokenizer: Any, raw: Path, sizes: list[int], n_held_out: int, folder: Path, console: Console) -> list[int]:
    """Write the tokens of all documents; returns the number of each."""
    lengths: list[int] = []
    documents = _read_documents(raw, sizes)
    with progress_bar(console, seconds_between_lines=5.0) as progress:
        task = progress.add_task("tokens", total=len(sizes))
        for name, part in (("held_out.bin", sizes[:n_held_out]), ("tokens.bin", sizes[n_held_out:])):
            with (folder / name).open("wb") as file:
                for count in _group(part):
                    some = list(itertools.islice(documents, count))
                    for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
                        array("i", encoding.ids).tofile(file)
                        lengths.append(len(encoding.ids))
                    progress.advance(task, len(some))
    with (folder / "lengths.bin").open("wb") as file:
        array("q", lengths).tofile(file)
    return lengths


def _group(sizes: list[int]) -> Iterator[int]:
    """Return how many documents are encoded at once, one after the other."""
    count, total = 0, 0
    for size in sizes:
        if count and total + size > ENCODED_AT_ONCE:
            yield count
            count, total = 0, 0
        count, total = count + 1, total + size
    if count:
        yield count


def _check_windows(config: Config, name: str, training: Tensor, held_out: Tensor) -> None:
    if not len(cut_windows(training, config.train_length)):
        raise ValueError(
            f"{name}: the longest document to learn from has {int(training.max())} tokens, but must have at least "
            f"{SHORTEST_WINDOW}"
        )
    if int(held_out.max()) < config.longest:
        raise ValueError(
            f"{name}: the longest held-out document has {int(held_out.max())} tokens, but must have at least "
            f"{config.longest}, the greatest of the lengths: give more or longer text, raise max_megabytes or "
            "held_out, or lower train_length or length_multiples"
        )


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, ensure_ascii=False, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _read_corpus(config: Config, folder: Path) -> Corpus:
    from tokenizers import Tokenizer

    manifest = _check_manifest(config, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    n_held_out = manifest["n_held_out"]
    lengths = _map_file(folder / "lengths.bin", torch.int64)
    _check_windows(config, manifest["name"], lengths[n_held_out:], lengths[:n_held_out])
    begins = cut_held_out(lengths[:n_held_out], config.longest, config.evaluation_windows)
    held_out = _map_file(folder / "held_out.bin", torch.int32)[begins[:, None] + torch.arange(config.longest)]
    return Corpus(
        **{key: manifest[key] for key in ("name", "n_documents", "n_bytes", "sha256")},
        vocab_size=tokenizer.get_vocab_size(),
        pad_id=SPECIAL_TOKENS.index("[PAD]"),
        mask_id=SPECIAL_TOKENS.index("[MASK]"),
        n_special=len(SPECIAL_TOKENS),
        tokenizer=tokenizer,
        tokens=_map_file(folder / "tokens.bin", torch.int32),
        windows=cut_windows(lengths[n_held_out:], config.train_length),
        held_out=held_out,
    )


def _check_manifest(config: Config, folder: Path) -> dict[str, Any]:
    """Read the folder's manifest; raise unless its files are whole and of these settings."""
    path = folder / MANIFEST
    advice = f"delete the folder {folder} to prepare the text anew"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found, settings, files = manifest["format"], manifest["settings"], manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {advice}") from error
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, but must have {FORMAT}: {advice}")
    for key in SETTINGS:
        wanted = config.as_dict()[key]
        if settings.get(key) != wanted:
            raise ValueError(f"{folder} was prepared with {key} = {settings.get(key)!r}, but now it is {wanted!r}")
    for name in FILES:
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing: {advice}")
        if _hash_file(folder / name) != files.get(name):
            raise ValueError(f"{folder / name} is damaged: {advice}")
    return manifest


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _map_file(path: Path, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=False, size=path.stat().st_size // dtype.itemsize, dtype=dtype)

"""The text of a comparison, as tokens in a folder, cut into windows and masked for training and evaluation."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import platform
import string
import sysconfig
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.trainers import WordPieceTrainer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.tags import TAGS, tag_source

MEGABYTE = 10**6
# PyTorch requires the other two, so that these are on every machine that this runs on. transformers, though larger,
# would not do: its models are copies of each other, so that what is held out would be known.
DEFAULT_PACKAGES = ("torch", "sympy", "networkx")
# Tests, tables of numbers, and what differs between installations of one version.
SKIPPED_FOLDERS = {"test", "tests", "testing", "encodings", "site-packages", "dist-packages", "ensurepip", "lib2to3"}
LEAST_DOCUMENTS = 20  # fewer files than these are cut into about as many documents: whole documents are held out
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # with the ids 0 to 4
SHORTEST_WINDOW = 8  # tokens; less at the end of a document is left out


@dataclass(frozen=True)
class Corpus:
    """Documents as token ids, most to learn from, some held out."""

    facts: dict[str, Any]  # for records: name, n_documents, n_bytes, and sha256 of the text, document by document
    tokenizer: PreTrainedTokenizerFast
    tokens: Tensor  # int32: all documents to learn from, end to end, mapped from a file
    windows: Tensor  # (W, 2) int64: where in tokens a window begins, and how many it has; each lies in one document
    held_out: Tensor  # (N, longest) int32: windows that each lie in one held-out document
    documents: Tensor  # (N,) int64: the number of that document
    tags: Tensor  # (kinds of tags, N, longest) int8: what each token is; −100 where the document is no Python source


def prepare_corpus(config: Config, folder: Path, console: Console) -> Corpus:
    """Read the corpus from `folder`; if it is not there yet, prepare it there first; ValueError if it will not do."""
    file, vocabulary = folder / "tokens.pt", str(folder / "tokenizer.json")
    if not file.exists():
        name, documents = read_documents(config)
        n_held_out = max(1, round(config.held_out * len(documents)))
        if n_held_out >= len(documents):
            raise ValueError(f"{name} has {len(documents)} documents that differ, but must have more than {n_held_out}")
        texts = [document.encode() for document in documents]
        digest = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()
        parts: dict[str, Any] = {"name": name, "n_documents": len(texts), "n_bytes": sum(map(len, texts))}
        parts = {"facts": parts | {"sha256": digest}}
        wordpiece = train_wordpiece(documents[n_held_out:], config.vocab_size)
        parts["tokens"], parts["lengths"] = encode(wordpiece, documents[n_held_out:])
        parts["held_out"], parts["held_out_lengths"] = encode(wordpiece, documents[:n_held_out])
        lengths = parts["held_out_lengths"]
        begins, numbers = cut_held_out(lengths, config.longest, config.evaluation_windows)
        places = begins - (lengths.cumsum(0) - lengths)[numbers]
        parts["tags"] = tag_windows(wordpiece, documents[:n_held_out], places, numbers, config.longest)
        folder.mkdir(parents=True, exist_ok=True)
        wordpiece.save(vocabulary)
        torch.save(parts, unfinished := file.with_suffix(".unfinished"))
        os.replace(unfinished, file)
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL_TOKENS}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=vocabulary, **names)
    content, longest = torch.load(file, mmap=True), config.longest
    facts, tokens = content["facts"], content["tokens"]
    windows = cut_windows(content["lengths"], config.train_length)
    begins, numbers = cut_held_out(content["held_out_lengths"], longest, config.evaluation_windows)
    for of, found, least in (("to learn from", windows, SHORTEST_WINDOW), ("held out", begins, longest)):
        if not len(found):
            raise ValueError(
                f"{facts['name']}: no document {of} has {least} tokens: give more or longer text, raise max_megabytes "
                "or held_out, or lower train_length or length_multiples"
            )
    line = f"text: {facts['name']}; {facts['n_documents']:,} documents, {facts['n_bytes'] / MEGABYTE:,.1f} MB; "
    line += f"{len(tokens):,} tokens to learn from, {len(begins)} held-out windows of {longest}"
    console.print(line, markup=False, highlight=False)
    held_out = content["held_out"][begins[:, None] + torch.arange(longest)]
    return Corpus(facts, tokenizer, tokens, windows, held_out, numbers, content["tags"])


def unigram_loss(corpus: Corpus) -> float:
    """Return the loss on held-out tokens, in nats, of guessing each by its frequency in the text to learn from."""
    counts = corpus.tokens.long().bincount(minlength=len(corpus.tokenizer)) + 1
    log_p = (counts.double() / counts.sum()).log()
    return round(-log_p[corpus.held_out.long()].mean().item(), 6)  # the same on all machines


def encode(tokenizer: Tokenizer, documents: list[str], at_once: int = 64) -> tuple[Tensor, Tensor]:
    """Return the tokens of all documents, end to end, and how many each has; an encoding outweighs its text by far."""
    ids = []
    for first in range(0, len(documents), at_once):
        encodings = tokenizer.encode_batch_fast(documents[first : first + at_once], add_special_tokens=False)
        ids += [torch.tensor(encoding.ids, dtype=torch.int32) for encoding in encodings]
    return torch.cat(ids), torch.tensor([len(x) for x in ids])


def cut_windows(lengths: Tensor, size: int) -> Tensor:
    """Cut windows of `size` tokens, the last of a document shorter, (W, 2): begin and number of tokens."""
    begin, document, offset = _spread(lengths, lengths // size + (lengths % size >= SHORTEST_WINDOW), size)
    return torch.stack((begin, (lengths[document] - offset).clamp(max=size)), 1)


def cut_held_out(lengths: Tensor, size: int, most: int) -> tuple[Tensor, Tensor]:
    """Return begins and documents, (N,), of at most so many windows of `size` tokens, evenly from all, centred."""
    begin, document, _ = _spread(lengths, lengths // size, size)
    starts = begin + (lengths[document] % size) // 2
    count = min(most, len(starts))
    chosen = torch.arange(count) * len(starts) // max(1, count)
    return starts[chosen], document[chosen]


def _spread(lengths: Tensor, counts: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return begin, document and offset there of each of so many windows of documents of these lengths."""
    document = torch.repeat_interleave(counts)
    offset = (torch.arange(len(document)) - (counts.cumsum(0) - counts)[document]) * size
    return (lengths.cumsum(0) - lengths)[document] + offset, document, offset


def tag_windows(tokenizer: Tokenizer, documents: list[str], places: Tensor, numbers: Tensor, size: int) -> Tensor:
    """Tag the tokens of N windows of `size`, each of a document by number, from a token on: (kinds, N, size) int8."""
    tags = torch.full((len(TAGS), len(places), size), -100, dtype=torch.int8)
    for number in numbers.unique().tolist():
        found, here = tag_source(documents[number]), (numbers == number).nonzero()[:, 0]
        if found is not None:
            encoding = tokenizer.encode(documents[number], add_special_tokens=False)
            characters = torch.tensor([first for first, _ in encoding.offsets])
            tags[:, here] = found[:, characters[places[here, None] + torch.arange(size)]]
    return tags


def train_wordpiece(documents: list[str], vocab_size: int) -> Tokenizer:
    """Train a lower-cased WordPiece, as BERT's, of at most vocab_size tokens; "[MASK]" in a text is ordinary text.

    The trainer numbers characters inside a word, "##e", as it meets them in a hash map, whose order differs from run to
    run, and decides between equally frequent pairs by these numbers; so here it gets all of them before, in order.
    """

    def make(model: WordPiece) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.normalizer, tokenizer.decoder = normalizers.BertNormalizer(lowercase=True), decoders.WordPiece()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    total = itertools.accumulate(len(document.encode()) for document in documents)
    sample = documents[: max(1, sum(size <= vocab_size * 2000 for size in total))]
    tokenizer = make(WordPiece(unk_token="[UNK]"))
    counts: Counter[str] = Counter()
    for document in sample:
        counts.update(tokenizer.normalizer.normalize_str(document))
    characters = sorted((x for x in counts if not x.isspace()), key=lambda x: (-counts[x], x))
    characters = sorted(characters[: min(1000, vocab_size // 4)])  # rarer ones are unknown
    inner = [f"##{x}" for x in characters if x not in string.punctuation and unicodedata.category(x)[0] != "P"]
    alphabet: dict[str, Any] = {"initial_alphabet": characters, "limit_alphabet": len(characters)}
    special = [*SPECIAL_TOKENS, *inner]
    trainer = WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False, **alphabet)
    tokenizer.train_from_iterator(sample, trainer)
    return make(WordPiece(vocab=tokenizer.get_vocab(), unk_token="[UNK]"))


def read_documents(config: Config) -> tuple[str, list[str]]:
    """Read the text that `config` names, or Python's own sources: a name for records, and documents that all differ."""
    if config.dataset is not None:
        name, found = config.dataset, _read_dataset(config.dataset, config.dataset_column)
        name = Path(name).resolve().name if Path(name.partition(":")[0]).exists() else name
    else:
        packages = ", ".join(f"{package} {version(package)}" for package in DEFAULT_PACKAGES)
        name = ", ".join(Path(path).resolve().name for path in config.corpus)
        name = name or f"the sources of Python {platform.python_version()}, {packages}"
        found = _read_files(config.corpus, config.max_megabytes)
    documents, left = dict[str, None](), int(config.max_megabytes * MEGABYTE)
    for document in found:
        if document.strip() and document not in documents:
            left -= len(document.encode())
            if left < 0:
                break
            documents[document] = None
    if not documents:
        reason = f"has no document below max_megabytes, {config.max_megabytes}" if left < 0 else "has no text"
        raise ValueError(f"{name} {reason}")
    return name, list(documents)


def _read_files(corpus: list[str], max_megabytes: float) -> Iterator[str]:
    """Read files that are not hidden, or parts, ordered by a hash of their names, so that one more changes little."""
    found = []  # name, path, whether the user named it, so that it must be text
    roots = {str(number): Path(path) for number, path in enumerate(corpus)}
    if not corpus:
        roots = {package: Path(str(files(package))) for package in DEFAULT_PACKAGES}
        roots["python"] = Path(sysconfig.get_path("stdlib"))
    for prefix, root in roots.items():
        if root.is_file():
            found.append((f"{prefix}/{root.name}", root, True))
        elif not root.is_dir():
            raise ValueError(f"corpus: {root} does not exist, but must be a file or a folder with text")
        for folder, folders, names in os.walk(root):
            folders[:] = [x for x in folders if not x.startswith(".") and (corpus or x not in SKIPPED_FOLDERS)]
            for path in (Path(folder, x) for x in names if not x.startswith(".") and (corpus or x.endswith(".py"))):
                if path.is_file():
                    found.append((f"{prefix}/{path.relative_to(root).as_posix()}", path, False))
    part_bytes, sizes = MEGABYTE, [path.stat().st_size for _, path, _ in found]
    if len(found) < LEAST_DOCUMENTS:
        part_bytes = min(part_bytes, max(1, min(sum(sizes), int(max_megabytes * MEGABYTE)) // LEAST_DOCUMENTS))
    parts = [(*file, part) for file, size in zip(found, sizes, strict=True) for part in range(-(-size // part_bytes))]
    for _, path, is_named, part in sorted(parts, key=lambda x: hashlib.sha256(f"{x[0]}\n{x[3]}".encode()).digest()):
        try:
            document = read_part(path, part, part_bytes).decode("utf-8-sig")
            if "\0" in document:
                raise ValueError("it holds a zero byte")
        except (OSError, ValueError) as error:
            if is_named or isinstance(error, OSError):
                raise ValueError(f"corpus: {path} cannot be read as text in UTF-8: {error}") from error
            continue
        yield document


def read_part(path: Path, part: int, part_bytes: int) -> bytes:
    """Read the lines of a file that begin in one of its parts: from byte part·part_bytes on, before the next part."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        ends = (part * part_bytes, (part + 1) * part_bytes)
        begin, end = (at and (text.find(b"\n", at - 1) + 1 or len(text)) for at in ends)
        return text[begin:end]


def _read_dataset(dataset: str, column: str) -> Iterator[str]:
    """Read the rows of the split "train", shuffled, on demand: no more is downloaded than that."""
    import datasets

    name, _, configuration = dataset.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        for row in rows.shuffle(seed=0, buffer_size=10_000):
            if not isinstance(row.get(column), str):
                raise ValueError(f"its column {column!r} is {row.get(column)!r}, but must be text; {sorted(row)}")
            yield row[column]
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"dataset {dataset!r} cannot be read: {error}") from error


def derive_seed(*what: object) -> int:
    """Derive a seed for one purpose; each of its bits depends on all of `what`, as generators read 32 bits alone."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little") >> 1


class TrainingBatches(Dataset[dict[str, Tensor]]):
    """The windows that a training sees, in an order by `seed` alone; a loader fetches the rows of a part of a step.

    Masks are drawn by (seed, step) for the whole batch: for every scheme the same, however it is cut into parts.
    """

    def __init__(self, corpus: Corpus, config: Config, seed: int) -> None:
        self.corpus, self.config, self.seed, total = corpus, config, seed, config.steps * config.batch_size
        n_windows, generator, orders = len(corpus.windows), torch.Generator(), []
        for epoch in range(-(-total // n_windows)):
            generator.manual_seed(derive_seed(seed, epoch, "order"))
            orders.append(torch.randperm(n_windows, generator=generator))
        self.order = torch.cat(orders)[:total]

    def __len__(self) -> int:
        return len(self.order)

    def __getitems__(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        config, corpus = self.config, self.corpus
        step = numbers[0] // config.batch_size
        windows, offsets = corpus.windows[self.order.view(config.steps, -1)[step]], torch.arange(config.train_length)
        is_token = offsets < windows[:, 1:]
        at = (windows[:, :1] + offsets).clamp_(max=len(corpus.tokens) - 1)
        ids = corpus.tokens[at].long().masked_fill_(~is_token, corpus.tokenizer.pad_token_id)
        ids, labels = mask_tokens(corpus, config, ids, is_token, derive_seed(self.seed, step))
        rows = torch.tensor(numbers) - step * config.batch_size
        return make_batch(ids[rows], is_token[rows], labels[rows])


def mask_tokens(corpus: Corpus, config: Config, ids: Tensor, is_token: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Mask tokens by transformers' collator: rows as they are shown, and labels, −100 where nothing is masked."""
    collator = DataCollatorForLanguageModeling(corpus.tokenizer, mlm_probability=config.mask_probability)
    collator.generator = torch.Generator().manual_seed(seed)
    masked: tuple[Tensor, Tensor] = collator.torch_mask_tokens(ids, special_tokens_mask=~is_token)
    return masked


def make_batch(ids: Tensor, is_token: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Make the arguments of `MaskedBert`: rows, and of their masked tokens the indices and labels alone, (M,)."""
    masked = (labels != -100).flatten().nonzero()[:, 0]
    masked_tokens = {"masked": masked, "labels": labels.flatten()[masked]}
    return {"input_ids": ids, "attention_mask": is_token.long(), **masked_tokens}


def evaluation_batches(corpus: Corpus, config: Config, length: int, tokens_at_once: int) -> list[dict[str, Tensor]]:
    """Cut the held-out windows into rows of `length` tokens, without padding; the same tokens are masked at each."""
    pieces = corpus.held_out.reshape(-1, config.train_length).long()
    ids, labels = mask_tokens(corpus, config, pieces, torch.ones_like(pieces, dtype=torch.bool), seed=0)
    rows = (x.view(-1, length).split(max(1, tokens_at_once // length)) for x in (ids, labels))
    return [make_batch(ids, torch.ones_like(ids, dtype=torch.bool), labels) for ids, labels in zip(*rows, strict=True)]

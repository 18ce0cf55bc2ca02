"""Sources of text: files and folders, a Hugging Face dataset, or Python sources of every installation.

Documents come in an order that is random, but the same wherever their text and names are the same: the first of them
are a fair sample of them all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.experiments.bert_positions.config import Config

MEGABYTE = 10**6
SHUFFLE_BUFFER = 10_000  # rows of a dataset, of which the next is drawn
PART_BYTES = MEGABYTE  # larger files are cut into documents of about so much
LEAST_DOCUMENTS = 20  # fewer files than these are cut into about as many documents: whole documents are held out

# PyTorch requires the other two, so that these are on every machine that this runs on.
DEFAULT_PACKAGES = ("torch", "sympy", "networkx")
# Tests, tables of numbers, and what differs between installations of one version.
SKIPPED_FOLDERS = {"test", "tests", "testing", "encodings", "site-packages", "dist-packages", "ensurepip", "lib2to3"}


@dataclass
class Text:
    """Documents in their order, each once; skipped ones are counted while they are read, by reason."""

    name: str  # for records: of files and folders, the last part of their paths
    documents: Iterator[str]
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _File:
    """A file, the name that decides its place in the order, and whether the user named this very file."""

    path: Path
    name: str
    is_named: bool


def open_text(config: Config) -> Text:
    """Open the text that `config` names; a document's bytes are read when it is iterated.

    Without `corpus` and `dataset` it is the Python sources, docstrings and comments included, of the standard library,
    PyTorch, SymPy and NetworkX: more than 70 MB, a file each document, the same wherever their versions are the same.
    transformers, though larger, would not do: its models are copies of each other, so that what is held out would be
    known. Empty documents, and all but one of those that are equal, are left out.

    Raises:
        ValueError: a path or a dataset that is not there or cannot be read; a file that is not text; no text at all.
        ModuleNotFoundError: `datasets`, or a package whose sources are the default text, is missing.
    """
    if config.dataset is not None:
        return _open_dataset(config.dataset, config.dataset_column)
    if config.corpus:
        paths = [Path(path) for path in config.corpus]
        return _open_files(_name_paths(paths), _list_paths(paths), int(config.max_megabytes * MEGABYTE))
    sources = list(_list_sources())
    return _open_files(_name_sources(), sources, int(config.max_megabytes * MEGABYTE))


def _open_files(name: str, files: list[_File], most_bytes: int) -> Text:
    """Open documents of files, ordered by a hash of their names, so that one more file changes little."""
    total = sum(file.path.stat().st_size for file in files)
    few = len(files) < LEAST_DOCUMENTS
    part_bytes = min(PART_BYTES, max(1, min(total, most_bytes) // LEAST_DOCUMENTS)) if few else PART_BYTES
    parts = [
        (hashlib.sha256(f"{file.name}\n{part}".encode()).digest(), file, part)
        for file in files
        for part in range(-(-file.path.stat().st_size // part_bytes))
    ]
    parts.sort(key=lambda part: part[0])
    text = Text(name, iter(()))
    text.documents = _distinct(_read_parts([part[1:] for part in parts], part_bytes, text.left_out), text.left_out)
    return text


def _read_parts(parts: list[tuple[_File, int]], part_bytes: int, left_out: Counter[str]) -> Iterator[str]:
    for file, part in parts:
        try:
            content = _read_part(file.path, part, part_bytes)
            document = content.decode("utf-8-sig")
        except OSError as error:
            raise ValueError(f"corpus: {file.path} cannot be read: {error}") from error
        except UnicodeDecodeError as error:
            if file.is_named:
                raise ValueError(f"corpus: {file.path} is not text in UTF-8: {error}") from error
            left_out["not text"] += 1
            continue
        if "\0" not in document:
            if document:  # a part within one long line is empty
                yield document
        elif file.is_named:
            raise ValueError(f"corpus: {file.path} is not text: it holds a zero byte")
        else:
            left_out["not text"] += 1


def _read_part(path: Path, part: int, part_bytes: int) -> bytes:
    """Read the lines of a file that begin in one of its parts: from byte part·part_bytes on, before the next part."""
    with path.open("rb") as file:

        def next_line(at: int) -> int:
            """Return the begin of the first line from byte `at` on."""
            if at == 0:
                return 0
            file.seek(at - 1)
            file.readline()
            return file.tell()

        start, end = next_line(part * part_bytes), next_line((part + 1) * part_bytes)
        file.seek(start)
        return file.read(end - start)


def _distinct(documents: Iterator[str], left_out: Counter[str]) -> Iterator[str]:
    seen: set[bytes] = set()
    for document in documents:
        if not document.strip():
            left_out["empty"] += 1
            continue
        digest = hashlib.sha256(document.encode()).digest()
        if digest in seen:
            left_out["equal to another"] += 1
            continue
        seen.add(digest)
        yield document


def _name_paths(paths: list[Path]) -> str:
    names = [path.resolve().name for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _list_paths(paths: list[Path]) -> list[_File]:
    """List the files of paths; hidden files and folders inside a folder are left out."""
    files: list[_File] = []
    for number, path in enumerate(paths):
        if path.is_file():
            if path.stat().st_size == 0:
                raise ValueError(f"corpus: {path} is empty")
            files.append(_File(path, f"{number}/{path.name}", True))
        elif path.is_dir():
            inside = [_File(file, f"{number}/{name}", False) for file, name in _walk(path) if file.stat().st_size]
            if not inside:
                raise ValueError(f"corpus: the folder {path} holds no files with text")
            files += inside
        else:
            raise ValueError(f"corpus: {path} does not exist, but must be a file or a folder with text")
    return files


def _walk(root: Path, skipped: frozenset[str] | set[str] = frozenset()) -> Iterator[tuple[Path, str]]:
    """List all files under a folder, and their paths from there, but hidden ones and those in skipped folders."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path, path.relative_to(root).as_posix()


def _list_sources() -> Iterator[_File]:
    roots = {"python": Path(sysconfig.get_path("stdlib"))}
    for package in DEFAULT_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(
                f"{package} is not installed, whose sources belong to the default text: give another by corpus or "
                f"dataset, or install it (pip install {package})"
            )
        roots[package] = Path(next(iter(spec.submodule_search_locations)))
    for package, root in roots.items():
        for path, name in _walk(root, SKIPPED_FOLDERS):
            if path.suffix == ".py" and path.stat().st_size:
                yield _File(path, f"{package}/{name}", False)


def _name_sources() -> str:
    packages = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in DEFAULT_PACKAGES)
    return f"the sources of Python {platform.python_version()}, {packages}"


def _open_dataset(dataset: str, column: str) -> Text:
    """Open the rows of the split "train", shuffled, read on demand: no more is downloaded than that."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"dataset is {dataset!r}, but datasets is not installed (pip install 'ropewalk[train]')"
        ) from error
    name, _, configuration = dataset.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        rows = rows.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"dataset {dataset!r} cannot be read: {error}") from error
    is_local = Path(name).exists()
    text = Text(Path(name).resolve().name if is_local else dataset, iter(()))
    text.documents = _distinct(_read_rows(rows, dataset, column), text.left_out)
    return text


def _read_rows(rows: Any, dataset: str, column: str) -> Iterator[str]:
    rows = iter(rows)
    while True:
        try:
            row = next(rows, None)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"dataset {dataset!r} cannot be read: {error}") from error
        if row is None:
            return
        if column not in row:
            raise ValueError(f"dataset {dataset!r} has no column {column!r}; there are: {', '.join(row)}")
        if not isinstance(row[column], str):
            kind = type(row[column]).__name__
            raise ValueError(f"dataset {dataset!r}: its column {column!r} holds a {kind}, but must hold text")
        yield row[column]

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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ropewalk.experiments.bert_positions.config import Config

MEGABYTE = 10**6
SHUFFLE_BUFFER = 10_000  # rows of a dataset, of which the next is drawn
LEAST_DOCUMENTS = 20  # fewer files than these are cut into about as many documents: whole documents are held out

# PyTorch requires the other two, so that these are on every machine that this runs on.
DEFAULT_PACKAGES = ("torch", "sympy", "networkx")
# Tests, tables of numbers, and what differs between installations of one version.
SKIPPED_FOLDERS = {"test", "tests", "testing", "encodings", "site-packages", "dist-packages", "ensurepip", "lib2to3"}


class _File(NamedTuple):
    name: str  # decides its place in the order
    path: Path
    is_named: bool  # by the user, so that it must be text


def read_documents(config: Config) -> tuple[str, list[str]]:
    """Read the text that `config` names up to its max_megabytes: a name for records, and documents that all differ.

    Without `corpus` and `dataset` it is the Python sources, docstrings and comments included, of the standard library,
    PyTorch, SymPy and NetworkX: more than 70 MB, a file each document, the same wherever their versions are the same.
    transformers, though larger, would not do: its models are copies of each other, so that what is held out would be
    known.

    Raises:
        ValueError: a path or a dataset that is not there or cannot be read; a named file that is not text; no text.
        ModuleNotFoundError: `datasets`, or a package whose sources are the default text, is missing.
    """
    if config.dataset is not None:
        name, found = config.dataset, _read_dataset(config.dataset, config.dataset_column)
        name = Path(name).resolve().name if Path(name.partition(":")[0]).exists() else name
    elif config.corpus:
        paths = [Path(path) for path in config.corpus]
        name = ", ".join(path.resolve().name for path in paths)
        found = _read_files(_list_paths(paths), config.max_megabytes)
    else:
        packages = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in DEFAULT_PACKAGES)
        name = f"the sources of Python {platform.python_version()}, {packages}"
        found = _read_files(list(_list_sources()), config.max_megabytes)
    documents: dict[str, None] = {}
    left = int(config.max_megabytes * MEGABYTE)
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


def _read_files(files: list[_File], max_megabytes: float) -> Iterator[str]:
    """Read files, or parts of them, ordered by a hash of their names, so that one more file changes little."""
    part_bytes = MEGABYTE
    if len(files) < LEAST_DOCUMENTS:
        total = sum(file.path.stat().st_size for file in files)
        part_bytes = min(part_bytes, max(1, min(total, int(max_megabytes * MEGABYTE)) // LEAST_DOCUMENTS))
    parts = [(file, part) for file in files for part in range(-(-file.path.stat().st_size // part_bytes))]
    for file, part in sorted(parts, key=lambda at: hashlib.sha256(f"{at[0].name}\n{at[1]}".encode()).digest()):
        try:
            document = _read_part(file.path, part, part_bytes).decode("utf-8-sig")
            if "\0" in document:
                raise ValueError("it holds a zero byte")
        except (OSError, ValueError) as error:
            if file.is_named or isinstance(error, OSError):
                raise ValueError(f"corpus: {file.path} cannot be read as text in UTF-8: {error}") from error
            continue
        yield document


def _read_part(path: Path, part: int, part_bytes: int) -> bytes:
    """Read the lines of a file that begin in one of its parts: from byte part·part_bytes on, before the next part."""
    with path.open("rb") as file:
        ends = []
        for at in (part * part_bytes, (part + 1) * part_bytes):
            if at:
                file.seek(at - 1)
                file.readline()
            ends.append(file.tell() if at else 0)
        file.seek(ends[0])
        return file.read(ends[1] - ends[0])


def _list_paths(paths: list[Path]) -> list[_File]:
    """List the files of paths; hidden files and folders inside a folder are left out."""
    files: list[_File] = []
    for number, path in enumerate(paths):
        if path.is_dir():
            files += [_File(f"{number}/{name}", file, False) for file, name in _walk(path)]
        elif path.is_file():
            files.append(_File(f"{number}/{path.name}", path, True))
        else:
            raise ValueError(f"corpus: {path} does not exist, but must be a file or a folder with text")
    return files


def _walk(root: Path, skipped: Iterable[str] = ()) -> Iterator[tuple[Path, str]]:
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
            raise ModuleNotFoundError(f"{package}, of the default text, is not installed: pip install {package}")
        roots[package] = Path(next(iter(spec.submodule_search_locations)))
    for package, root in roots.items():
        for path, name in _walk(root, SKIPPED_FOLDERS):
            if path.suffix == ".py":
                yield _File(f"{package}/{name}", path, False)


def _read_dataset(dataset: str, column: str) -> Iterator[str]:
    """Read the rows of the split "train", shuffled, on demand: no more is downloaded than that."""
    import datasets

    name, _, configuration = dataset.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        for row in rows.shuffle(seed=0, buffer_size=SHUFFLE_BUFFER):
            if not isinstance(row.get(column), str):
                raise ValueError(f"its column {column!r} is {row.get(column)!r}, but must be text; {sorted(row)}")
            yield row[column]
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"dataset {dataset!r} cannot be read: {error}") from error

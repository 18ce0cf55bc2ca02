"""Text: its sources, its tokens, and the windows that are cut from them."""

import io
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.bert_runs import TEXT, TINY
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ropewalk.experiments.bert_positions import corpus as corpora
from ropewalk.experiments.bert_positions.config import load_config
from ropewalk.experiments.bert_positions.corpus import cut_held_out, cut_windows, prepare_corpus, train_wordpiece
from ropewalk.experiments.bert_positions.text import _read_part, read_documents

VALUES = TINY.as_dict()


@pytest.fixture
def folder(tmp_path):
    """Documents of 30 files, of different lengths."""
    folder = tmp_path / "texts"
    folder.mkdir()
    words = TEXT.split()
    for number in range(30):
        order = [words[(number * 7 + i * 3) % len(words)] for i in range(60 + number)]
        (folder / f"{number}.txt").write_text(" ".join(order))
    return folder


def make(folder, **more):
    return load_config("smoke", **{**VALUES, "corpus": [str(folder)], **more})


def prepare(config, path):
    console = Console(file=io.StringIO(), width=400)
    return prepare_corpus(config, path, console), console.file.getvalue()


def test_a_corpus(tmp_path, folder):
    corpus, said = prepare(make(folder), tmp_path / "data")
    assert "text: texts; 30 documents" in said
    assert corpus.facts["n_documents"] == 30
    held_out = corpus.tokenizer.decode(corpus.held_out[0])
    assert set(held_out.split()) <= set(TEXT.split())
    assert corpus.held_out.shape[1] == 32
    for begin, count in corpus.windows.tolist():
        assert set(corpus.tokenizer.decode(corpus.tokens[begin : begin + count]).split()) <= set(TEXT.split())

    again, _ = prepare(make(folder / "gone"), tmp_path / "data")  # it is prepared once
    moved = folder.rename(tmp_path / "elsewhere")
    other, _ = prepare(make(moved), tmp_path / "other")
    for found in (again, other):
        assert torch.equal(found.tokens, corpus.tokens)
        assert torch.equal(found.held_out, corpus.held_out)
        assert found.facts["sha256"] == corpus.facts["sha256"]


def test_the_vocabulary_is_the_same_each_time_and_spells_text_in_lower_case(monkeypatch):
    documents = [f"{a}{b}{c} Émile! [MASK]" for a, b, c in itertools.product("abcdefgh", repeat=3)]
    first, second = (train_wordpiece(documents, 512) for _ in range(2))
    assert first.to_str() == second.to_str()
    encoding = first.encode("Émile abc!", add_special_tokens=False)
    assert first.decode(encoding.ids) == "emile abc!"
    assert not {4} & set(first.encode("[MASK]", add_special_tokens=False).ids)
    monkeypatch.setattr(corpora, "ENCODED_AT_ONCE", 100)
    ids, lengths = corpora._encode(first, documents)
    assert lengths.sum() == len(ids)
    assert ids[: lengths[0]].tolist() == first.encode(documents[0], add_special_tokens=False).ids


@given(st.lists(st.integers(0, 100), min_size=1, max_size=10), st.integers(8, 20), st.integers(1, 10))
def test_windows_lie_in_one_document(lengths, size, most):
    document_of = torch.repeat_interleave(torch.tensor(lengths))
    for begin, count in cut_windows(torch.tensor(lengths), size).tolist():
        assert count == size or count >= corpora.SHORTEST_WINDOW
        assert len(set(document_of[begin : begin + count].tolist())) == 1
    assert len(cut_windows(torch.tensor(lengths), size)) == sum(n // size + (n % size >= 8) for n in lengths)
    begins = cut_held_out(torch.tensor(lengths), size, most).tolist()
    assert len(begins) == min(most, sum(n // size for n in lengths))
    assert all(b - a >= size for a, b in itertools.pairwise(begins))
    assert all(len(set(document_of[begin : begin + size].tolist())) == 1 for begin in begins)


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=9), max_size=9), st.integers(1, 9))
def test_the_parts_of_a_file_are_whole_lines_and_together_the_file(tmp_path_factory, lines, part_bytes):
    content = "\n".join(lines).encode()
    path = tmp_path_factory.mktemp("parts") / "a"
    path.write_bytes(content)
    parts = [_read_part(path, part, part_bytes) for part in range(-(-len(content) // part_bytes))]
    assert b"".join(parts) == content
    assert all(part.endswith(b"\n") for part in parts[:-1] if part and not content.endswith(part))


def test_one_file_is_cut_into_documents_and_max_megabytes_is_the_most(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(f"{number} {TEXT}" for number in range(1000)))
    name, documents = read_documents(make(path, max_megabytes=0.05))
    assert name == "a.txt"
    assert len(documents) > 10
    assert 40_000 < sum(map(len, documents)) <= 50_000


def test_equal_empty_hidden_and_binary_documents_are_left_out(tmp_path):
    for name, content in {"a": b"one", "b": b"one", "c": b" \n", ".d": b"two", "e": b"\xff\xfe", "f": b"a\0b"}.items():
        (tmp_path / name).write_bytes(content)
    assert read_documents(make(tmp_path))[1] == ["one"]


def test_the_default_text_is_pythons_sources():
    name, documents = read_documents(load_config("smoke", max_megabytes=0.3))
    assert name.startswith("the sources of Python 3.")
    assert len(documents) > 5
    assert sum("import" in document for document in documents) > len(documents) // 2


@pytest.mark.parametrize(
    ("content", "change", "message"),
    [
        (None, {}, "does not exist, but must be a file or a folder with text"),
        (b"", {}, "a.txt has no text"),
        (b"\xff\xff" * 50, {}, "a.txt cannot be read as text in UTF-8"),
        (b"a\0b" * 50, {}, "it holds a zero byte"),
        (b"abc " * 50, {"max_megabytes": 1e-6}, "has no document below max_megabytes"),
        (b"abc " * 50, {}, "has 1 documents that differ, but must have more than 1"),
        (b"abc def\nghi jkl\n" * 9 + b"a\nb\n", {}, "no document .* has .* tokens: give more or longer text"),
    ],
)
def test_text_that_will_not_do(tmp_path, content, change, message):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(make(path, **change), tmp_path / "data")


class Rows(list):
    """The rows of a dataset."""

    def shuffle(self, **options):
        return self


def test_a_dataset(monkeypatch):
    calls = []
    errors = SimpleNamespace(DatasetsError=KeyError)
    fake = SimpleNamespace(
        load_dataset=lambda *a, **k: calls.append((a, k)) or Rows([{"body": "one"}, {"body": "two"}]), exceptions=errors
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    config = load_config("smoke", dataset="a/b:c", dataset_column="body")
    assert read_documents(config) == ("a/b:c", ["one", "two"])
    assert calls == [(("a/b", "c"), {"split": "train", "streaming": True})]
    with pytest.raises(ValueError, match="dataset 'a/b' cannot be read: its column 'text' is None, but must be text"):
        read_documents(load_config("smoke", dataset="a/b"))

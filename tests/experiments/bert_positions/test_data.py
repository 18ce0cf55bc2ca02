"""Text, its tokens, the windows that are cut from them, and batches: the same for all schemes, masked as BERT's."""

import dataclasses
import io
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.bert_runs import TEXT, TINY, make_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ropewalk.experiments.bert_positions.config import load_config
from ropewalk.experiments.bert_positions.data import (
    SHORTEST_WINDOW,
    TrainingBatches,
    cut_held_out,
    cut_windows,
    encode,
    evaluation_batches,
    mask_tokens,
    prepare_corpus,
    read_documents,
    read_part,
    train_wordpiece,
)

CORPUS = make_corpus()


def make(folder, **more):
    return load_config("smoke", **dataclasses.asdict(TINY) | {"corpus": [str(folder)], **more})


def prepare(config, path):
    console = Console(file=io.StringIO(), width=400)
    return prepare_corpus(config, path, console), console.file.getvalue()


def test_a_corpus(tmp_path):
    folder, words = tmp_path / "texts", TEXT.split()
    folder.mkdir()
    for number in range(30):
        order = [words[(number * 7 + i * 3) % len(words)] for i in range(60 + number)]
        (folder / f"{number}.txt").write_text(" ".join(order))
    corpus, said = prepare(make(folder), tmp_path / "data")
    assert "text: texts; 30 documents" in said
    assert set(corpus.tokenizer.decode(corpus.held_out[0]).split()) <= set(words)
    assert corpus.held_out.shape[1] == 32
    again, _ = prepare(make(folder / "gone"), tmp_path / "data")  # it is prepared once
    other, _ = prepare(make(folder.rename(tmp_path / "elsewhere")), tmp_path / "other")
    for found in (again, other):
        assert torch.equal(found.tokens, corpus.tokens)
        assert torch.equal(found.held_out, corpus.held_out)
        assert found.facts["sha256"] == corpus.facts["sha256"]


def test_the_vocabulary_is_the_same_each_time_and_spells_text_in_lower_case():
    documents = [f"{a}{b}{c} Émile! [MASK]" for a, b, c in itertools.product("abcdefgh", repeat=3)]
    first, second = (train_wordpiece(documents, 512) for _ in range(2))
    assert first.to_str() == second.to_str()
    ids, lengths = encode(first, documents)
    assert lengths.sum() == len(ids)
    assert first.decode(ids[: lengths[0]].tolist()).startswith("aaa emile!")
    assert not (ids == 4).any()


@given(st.lists(st.integers(0, 100), min_size=1, max_size=10), st.integers(8, 20), st.integers(1, 10))
def test_windows_lie_in_one_document(lengths, size, most):
    document_of = torch.repeat_interleave(torch.tensor(lengths))
    for begin, count in cut_windows(torch.tensor(lengths), size).tolist():
        assert count == size or count >= SHORTEST_WINDOW
        assert len(set(document_of[begin : begin + count].tolist())) == 1
    assert len(cut_windows(torch.tensor(lengths), size)) == sum(n // size + (n % size >= 8) for n in lengths)
    begins, numbers = (x.tolist() for x in cut_held_out(torch.tensor(lengths), size, most))
    assert len(begins) == min(most, sum(n // size for n in lengths))
    assert all(b - a >= size for a, b in itertools.pairwise(begins))
    for begin, number in zip(begins, numbers, strict=True):
        assert set(document_of[begin : begin + size].tolist()) == {number}


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=9), max_size=9), st.integers(1, 9))
def test_the_parts_of_a_file_are_whole_lines_and_together_the_file(tmp_path_factory, lines, part_bytes):
    content = "\n".join(lines).encode()
    path = tmp_path_factory.mktemp("parts") / "a"
    path.write_bytes(content)
    parts = [read_part(path, part, part_bytes) for part in range(-(-len(content) // part_bytes))]
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
    assert sum("import" in document for document in documents) > len(documents) // 2 > 2


@pytest.mark.parametrize(
    ("content", "change", "message"),
    [
        (None, {}, "does not exist, but must be a file or a folder with text"),
        (b"", {}, "a.txt has no text"),
        (b"a\0b" * 50, {}, "a.txt cannot be read as text in UTF-8: it holds a zero byte"),
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


def rows_of(step):
    return range(step * TINY.batch_size, (step + 1) * TINY.batch_size)


def test_each_epoch_has_each_window_once():
    batches = TrainingBatches(CORPUS, dataclasses.replace(TINY, steps=20), seed=3)
    epochs = [CORPUS.windows[order] for order in batches.order.split(80)]
    for windows in epochs:
        assert sorted(windows.tolist()) == CORPUS.windows.tolist()
    assert not torch.equal(*epochs)


def test_a_batch_depends_on_seed_and_step_alone():
    first, again = (TrainingBatches(CORPUS, TINY, seed=3) for _ in range(2))
    again.__getitems__(rows_of(7))
    whole = first.__getitems__(rows_of(2))
    parts = [again.__getitems__(rows_of(2)[4 * part : 4 * part + 4]) for part in (0, 1)]
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(whole[name], torch.cat([part[name] for part in parts]))
    assert torch.equal(whole["masked"], torch.cat((parts[0]["masked"], parts[1]["masked"] + 4 * TINY.train_length)))
    other = TrainingBatches(CORPUS, TINY, seed=4).__getitems__(rows_of(2))
    assert not torch.equal(whole["input_ids"], other["input_ids"])


def test_labels_are_what_was_masked_and_padding_is_never():
    batches = TrainingBatches(CORPUS, TINY, seed=0)
    for step in range(4):
        batch, windows = batches.__getitems__(rows_of(step)), CORPUS.windows[batches.order[rows_of(step)]]
        assert batch["attention_mask"].sum(1).tolist() == windows[:, 1].tolist()
        for index, label in zip(batch["masked"].tolist(), batch["labels"].tolist(), strict=True):
            row, column = divmod(index, TINY.train_length)
            begin, count = windows[row].tolist()
            assert column < count
            assert CORPUS.tokens[begin + column] == label
        assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()


def test_masks_are_berts():
    ids = torch.full((200, 100), 7)
    shown, labels = mask_tokens(CORPUS, TINY, ids.clone(), torch.ones_like(ids, dtype=torch.bool), seed=1)
    masked = labels != -100
    assert abs(masked.double().mean() - 0.15) < 0.01
    assert (shown[~masked] == 7).all()
    assert abs((shown[masked] == CORPUS.tokenizer.mask_token_id).double().mean() - 0.8) < 0.04


def test_evaluation_masks_the_same_tokens_at_each_length():
    short, long = (evaluation_batches(CORPUS, TINY, length, tokens_at_once=48) for length in (16, 32))
    assert [len(batch["input_ids"]) for batch in short] == [3, 3, 2]
    assert [len(batch["input_ids"]) for batch in long] == [1] * 4
    for name in ("input_ids", "labels"):
        parts = (torch.cat([batch[name].flatten() for batch in batches]) for batches in (short, long))
        assert torch.equal(*parts)

"""The corpus: what is read as text, its vocabulary, its windows, and what is said of text that will not do."""

import importlib.metadata
import io
import itertools
import json
import random
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from ropewalk.experiments.bert_positions import corpus as corpus_module
from ropewalk.experiments.bert_positions import text as text_module
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.corpus import FILES, cut_held_out, cut_windows, prepare_corpus
from ropewalk.experiments.bert_positions.text import open_text
from ropewalk.experiments.bert_positions.wordpiece import SPECIAL_TOKENS, train_wordpiece

WORDS = ["".join(random.Random(number).choices("abcdefghij", k=5)) for number in range(200)]
TINY = Config(train_length=8, length_multiples=(1, 2), vocab_size=512, evaluation_windows=4, max_megabytes=1.0)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=400)


@pytest.fixture
def folder(tmp_path):
    """30 documents of 50 to 80 words, each of which begins with a number that no other has."""
    root = tmp_path / "texts"
    (root / "inner").mkdir(parents=True)
    for number in range(30):
        words = random.Random(number).choices(WORDS, k=50 + number)
        path = root / "inner" / f"{number}.txt" if number % 3 else root / f"{number}.md"
        path.write_text(f"No{number}. " + " ".join(words) + "\n", encoding="utf-8")
    return root


def prepare(tmp_path, console, *paths, data="data", **changes):
    config = replace(TINY, **{"corpus": tuple(map(str, paths)), **changes})
    return prepare_corpus(config, tmp_path / data, console)


def printed(console):
    return console.file.getvalue()


lengths_of_documents = st.lists(st.integers(0, 70), min_size=1, max_size=12).map(torch.tensor)


@settings(deadline=None)
@given(lengths=lengths_of_documents, size=st.integers(8, 20))
def test_windows_never_cross_documents_and_leave_out_short_ends_alone(lengths, size):
    document = torch.repeat_interleave(lengths)
    windows = cut_windows(lengths, size)
    seen = torch.zeros(len(document), dtype=torch.long)
    for start, count in windows.tolist():
        assert 8 <= count <= size
        assert len(set(document[start : start + count].tolist())) == 1
        assert start + count <= len(document)
        seen[start : start + count] += 1
    assert seen.max() <= 1 if len(seen) else not len(windows)
    for number, length in enumerate(lengths.tolist()):
        rest = length % size
        missing = length - int(seen[document == number].sum())
        assert missing == (rest if rest < 8 else 0)


@settings(deadline=None)
@given(lengths=lengths_of_documents, size=st.integers(1, 20), most=st.integers(1, 30))
def test_held_out_windows_lie_in_one_document_and_are_spread_evenly(lengths, size, most):
    document = torch.repeat_interleave(lengths)
    starts = cut_held_out(lengths, size, most).tolist()
    fitting = (lengths // size).tolist()
    assert len(starts) == min(most, sum(fitting))
    assert all(second - first >= size for first, second in itertools.pairwise(starts))
    for start in starts:
        assert start + size <= len(document)
        assert document[start] == document[start + size - 1]
    for number, count in enumerate(fitting):
        here = sum(int(document[start]) == number for start in starts)
        assert abs(here - count * len(starts) / max(1, sum(fitting))) < 1
    if len(starts) == sum(fitting) and starts:  # what is left of a document is left at both ends
        first = int(document[starts[0]])
        begin = int(lengths[:first].sum())
        before, after = starts[0] - begin, int(lengths[first]) % size - (starts[0] - begin)
        assert after - before in (0, 1)


def test_what_a_corpus_holds(tmp_path, folder, console):
    corpus = prepare(tmp_path, console, folder, held_out=0.2)
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.*")]
    assert (corpus.name, corpus.n_documents) == ("texts", 30)
    assert corpus.n_bytes == sum(len(text.encode()) for text in texts)
    assert corpus.vocab_size == corpus.tokenizer.get_vocab_size() <= 512
    ids = [corpus.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
    assert ids == list(range(corpus.n_special))
    assert (corpus.pad_id, corpus.mask_id) == (ids[0], ids[4])
    assert corpus.tokens.dtype == corpus.held_out.dtype == torch.int32
    assert corpus.windows.dtype == torch.int64

    encoded = [corpus.tokenizer.encode(text).ids for text in texts]
    learnt = corpus.tokens.tolist()
    in_learnt = [" ".join(map(str, ids)) in " ".join(map(str, learnt)) for ids in encoded]
    assert in_learnt.count(True) == 24
    assert sum(len(ids) for ids, found in zip(encoded, in_learnt, strict=True) if found) == len(learnt)
    in_windows = {" ".join(map(str, learnt[start : start + count])) for start, count in corpus.windows.tolist()}
    expected = [
        ids[at : at + 8] for ids, found in zip(encoded, in_learnt, strict=True) if found for at in range(0, len(ids), 8)
    ]
    assert in_windows == {" ".join(map(str, ids)) for ids in expected if len(ids) == 8}

    assert corpus.held_out.shape == (4, 16)
    held_out = [ids for ids, found in zip(encoded, in_learnt, strict=True) if not found]
    for window in corpus.held_out.tolist():
        assert any(window == ids[at : at + 16] for ids in held_out for at in range(len(ids)))
    assert "texts; 30 documents, 0.0 MB, 6 held out" in printed(console)
    assert "4 held-out windows of 16" in printed(console)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == sorted([*FILES, "manifest.json"])


def test_it_is_prepared_once(tmp_path, folder, console, monkeypatch):
    first = prepare(tmp_path, console, folder)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir()}
    monkeypatch.setattr(corpus_module, "open_text", lambda config: pytest.fail("it reads the text again"))
    second = prepare(tmp_path, console, folder)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.windows, second.windows)
    assert torch.equal(first.held_out, second.held_out)
    assert (first.sha256, first.n_bytes) == (second.sha256, second.n_bytes)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "data").iterdir()} == times
    longer = prepare(tmp_path, console, folder, train_length=16)
    assert int(longer.windows[:, 1].max()) == 16
    assert longer.held_out.shape[1] == 32
    with pytest.raises(ValueError, match=r"the longest held-out document has .* must have at least 1024"):
        prepare(tmp_path, console, folder, train_length=512)


def test_the_vocabulary_is_learnt_from_some_of_what_is_not_held_out(tmp_path, folder, console, monkeypatch):
    samples = []

    def train(documents, vocab_size):
        samples.append(documents)
        return train_wordpiece(documents, vocab_size)

    monkeypatch.setattr(corpus_module, "train_wordpiece", train)
    documents = list(open_text(replace(TINY, corpus=(str(folder),))).documents)
    prepare(tmp_path, console, folder, held_out=0.2)
    assert samples.pop() == documents[6:]
    monkeypatch.setattr(corpus_module, "SAMPLE_BYTES_PER_TOKEN", 8)
    prepare(tmp_path, console, folder, held_out=0.2, data="less")
    sample = samples.pop()
    assert sample == documents[6 : 6 + len(sample)]
    assert 0.8 * 8 * 512 < sum(map(len, sample)) <= 8 * 512


@pytest.mark.parametrize("at_once", [1, 1000, 3000])
def test_how_many_documents_are_encoded_at_once_changes_nothing(tmp_path, folder, console, monkeypatch, at_once):
    expected = prepare(tmp_path, console, folder)
    monkeypatch.setattr(corpus_module, "ENCODED_AT_ONCE", at_once)
    found = prepare(tmp_path, console, folder, data="again")
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.windows, expected.windows)
    assert torch.equal(found.held_out, expected.held_out)


def test_it_is_the_same_wherever_the_text_lies(tmp_path, folder, console):
    first = prepare(tmp_path, console, folder)
    files = {name: (tmp_path / "data" / name).read_bytes() for name in FILES}
    moved = tmp_path / "elsewhere" / "texts"
    moved.parent.mkdir()
    folder.rename(moved)
    assert prepare(tmp_path, console, moved, data="again").sha256 == first.sha256
    assert {name: (tmp_path / "again" / name).read_bytes() for name in FILES} == files


def test_what_was_left_by_a_kill_is_prepared_anew(tmp_path, folder, console):
    expected = prepare(tmp_path, console, folder).tokens.clone()
    data = tmp_path / "data"
    (data / "manifest.json").rename(data / "manifest.tmp")
    (data / "tokens.bin").write_bytes(b"half")
    assert torch.equal(prepare(tmp_path, console, folder).tokens, expected)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_damaged_file_is_named(tmp_path, folder, console, name):
    prepare(tmp_path, console, folder)
    path = tmp_path / "data" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged: delete the folder .*data to prepare"):
        prepare(tmp_path, console, folder)
    path.write_bytes(content[:10])
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        prepare(tmp_path, console, folder)
    if name != "manifest.json":
        path.unlink()
        with pytest.raises(ValueError, match=f"{name} is missing: delete the folder"):
            prepare(tmp_path, console, folder)


def test_a_manifest_of_another_format(tmp_path, folder, console):
    prepare(tmp_path, console, folder)
    path = tmp_path / "data" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(ValueError, match=r"manifest\.json has format 99, but must have 1: delete"):
        prepare(tmp_path, console, folder)


@pytest.mark.parametrize("change", [{"vocab_size": 600}, {"held_out": 0.3}, {"max_megabytes": 2.0}, {"corpus": ("b",)}])
def test_files_of_other_settings_are_not_taken(tmp_path, folder, console, change):
    prepare(tmp_path, console, folder)
    with pytest.raises(ValueError, match=f"data was prepared with {next(iter(change))} = .*, but now it is"):
        prepare(tmp_path, console, folder, **change)


def test_the_vocabulary_is_the_same_each_time():
    generator = random.Random(0)
    documents = ["".join(generator.choices("abcdefgh ", k=2000)) for _ in range(10)]
    documents.append(" ".join(chr(0x3B1 + number % 20) + chr(0x430 + number % 30) for number in range(3000)))
    documents.append(" ".join(map(chr, range(0x4E00, 0x4E00 + 300))))  # more than there is room for
    vocabularies = [train_wordpiece(documents, 512).get_vocab() for _ in range(4)]
    assert vocabularies[0] == vocabularies[1] == vocabularies[2] == vocabularies[3]
    assert len(vocabularies[0]) == 512
    assert sorted(vocabularies[0].values()) == list(range(512))


def test_tokens_spell_the_text_in_lower_case():
    tokenizer = train_wordpiece([" ".join(WORDS) * 20], 512)
    encoding = tokenizer.encode("Hij [MASK] hij [PAD] bad? ★", add_special_tokens=False)
    assert not set(encoding.ids) & {0, 2, 3, 4}  # what only looks like a special token is text
    unknown = tokenizer.token_to_id("[UNK]")
    assert encoding.ids[-1] == unknown == 1
    assert tokenizer.decode(tokenizer.encode("Abc Jihg").ids) == "abc jihg"


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=20),
    at_end=st.booleans(),
    part_bytes=st.integers(1, 40),
)
def test_the_parts_of_a_file_are_whole_lines_and_together_the_file(tmp_path_factory, lines, at_end, part_bytes):
    content = b"\n".join(lines) + (b"\n" if at_end else b"")
    path = tmp_path_factory.mktemp("parts") / "file"
    path.write_bytes(content)
    n_parts = -(-len(content) // part_bytes)
    parts = [text_module._read_part(path, part, part_bytes) for part in range(n_parts)]
    assert b"".join(parts) == content
    longest = max(map(len, lines), default=0) + 1
    for number, part in enumerate(parts):
        assert len(part) < part_bytes + longest
        assert not part or part.endswith(b"\n") or b"".join(parts[number + 1 :]) == b""


def test_one_file_is_cut_into_documents(tmp_path, console):
    book = tmp_path / "book.txt"
    lines = [f"{number} " + " ".join(random.Random(number).choices(WORDS, k=9)) + "\n" for number in range(400)]
    book.write_text("\ufeff" + "".join(lines), encoding="utf-8")
    documents = list(open_text(replace(TINY, corpus=(str(book),))).documents)
    assert 15 <= len(documents) <= 20
    assert sorted("".join(documents).splitlines()) == sorted("".join(lines).splitlines())
    corpus = prepare(tmp_path, console, book)
    assert corpus.name == "book.txt"
    assert len(corpus.held_out) == 4


def test_no_more_than_max_megabytes_are_read(tmp_path, folder, console):
    whole = prepare(tmp_path, console, folder, data="whole")
    corpus = prepare(tmp_path, console, folder, max_megabytes=0.004)
    assert 0.5 * 4000 < corpus.n_bytes <= 4000
    assert corpus.n_documents < whole.n_documents
    with pytest.raises(ValueError, match=r"max_megabytes is 1e-05, but the first document of texts has more"):
        prepare(tmp_path, console, folder, data="less", max_megabytes=0.00001)


def test_of_equal_documents_one_is_kept(tmp_path, folder, console):
    for number in range(5):
        (folder / f"copy{number}.txt").write_text((folder / "0.md").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "blank.txt").write_text(" \n", encoding="utf-8")
    (folder / "binary.txt").write_bytes(b"a\0b")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / ".hidden").write_text("hidden words", encoding="utf-8")
    (folder / ".git").mkdir()
    (folder / ".git" / "words").write_text("hidden words", encoding="utf-8")
    assert prepare(tmp_path, console, folder).n_documents == 30
    assert "left out: 1 empty; left out: 5 equal to another; left out: 2 not text" in printed(console)


def no_text(folder):
    for path in folder.rglob("*.*"):
        path.write_bytes(b"\0")


def empty(folder):
    for path in folder.rglob("*.*"):
        path.unlink()


def blank(folder):
    for path in folder.rglob("*.*"):
        path.write_text("\n\n")


def one_left(folder):
    for path in folder.rglob("*.*"):
        path.write_text("the same words in all")


def short(folder):
    for path in folder.rglob("*.*"):
        path.write_text(path.read_text(encoding="utf-8")[:60])


def very_short(folder):
    for path in folder.rglob("*.*"):
        path.write_text(path.name[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_text, "texts has no text; of its documents are 30 not text"),
        (empty, "corpus: the folder .*texts holds no files with text"),
        (blank, "texts has no text; of its documents are 30 empty"),
        (one_left, "texts has 1 documents that are not equal, of which 1 must be held out"),
        (short, "texts: the longest held-out document has 1?[0-9] tokens, but must have at least 32"),
        (very_short, "texts: the longest document to learn from has 1 tokens, but must have at least 8"),
    ],
)
def test_text_that_will_not_do(tmp_path, folder, console, change, message):
    change(folder)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path, console, folder, length_multiples=(1, 2, 4))
    left = {path.name for path in tmp_path.glob("data/*")}
    assert not left & {"manifest.json", "text.tmp"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, r"corpus: .*missing\.txt does not exist, but must be a file or a folder"),
        ("empty.txt", b"", r"corpus: .*empty\.txt is empty"),
        ("zero.bin", b"text\0text", r"corpus: .*zero\.bin is not text: it holds a zero byte"),
        ("latin.txt", b"caf\xe9 noir", r"corpus: .*latin\.txt is not text in UTF-8"),
    ],
)
def test_a_file_that_is_named_must_be_text(tmp_path, folder, console, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path, console, folder, path)
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_without_tokenizers_it_says_what_to_install(tmp_path, folder, console, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"ropewalk\[train\]"):
        prepare(tmp_path, console, folder)


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A dataset in a folder, with the columns text and number."""
    pytest.importorskip("datasets").disable_progress_bars()
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    root = tmp_path / "rows"
    root.mkdir()
    rows = [{"text": f"No{n}. " + " ".join(random.Random(n).choices(WORDS, k=60)), "number": n} for n in range(30)]
    (root / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def test_a_dataset(tmp_path, dataset, console):
    config = replace(TINY, dataset=f"{dataset}:default")
    documents = list(open_text(config).documents)
    order = [int(document.partition(".")[0][2:]) for document in documents]
    assert sorted(order) == list(range(30)) != order
    assert list(open_text(config).documents) == documents
    corpus = prepare_corpus(config, tmp_path / "data", console)
    assert (corpus.name, corpus.n_documents) == ("rows", 30)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset_column": "body"}, "rows' has no column 'body'; there are: text, number"),
        ({"dataset_column": "number"}, "rows': its column 'number' holds a int, but must hold text"),
        ({"dataset": "{rows}:other"}, "rows:other' cannot be read"),
        ({"dataset": "{rows}/none"}, "rows/none' cannot be read"),
        ({"dataset": "no/such-data"}, "dataset 'no/such-data' cannot be read"),
    ],
)
def test_a_dataset_that_will_not_do(tmp_path, dataset, console, change, message):
    change = {key: value.format(rows=dataset) for key, value in change.items()}
    with pytest.raises(ValueError, match=message):
        prepare_corpus(replace(TINY, **{"dataset": str(dataset), **change}), tmp_path / "data", console)


def test_a_dataset_with_broken_rows(tmp_path, dataset, console):
    (dataset / "train.jsonl").write_text('{"text": "a"}\n{broken')
    with pytest.raises(ValueError, match="rows' cannot be read"):
        prepare_corpus(replace(TINY, dataset=str(dataset)), tmp_path / "data", console)


def test_without_datasets_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"datasets is not installed .*ropewalk\[train\]"):
        open_text(replace(TINY, dataset="name"))


def test_the_default_text(monkeypatch):
    text = open_text(Config())
    assert f"torch {importlib.metadata.version('torch')}" in text.name
    first = [next(text.documents) for _ in range(20)]
    again = open_text(Config()).documents
    assert [next(again) for _ in range(20)] == first
    assert sum(document.count("def ") for document in first) > 100
    files = list(text_module._list_sources())
    roots = {file.name.partition("/")[0] for file in files}
    assert roots == {"python", *text_module.DEFAULT_PACKAGES}
    assert sum(file.path.stat().st_size for file in files) > 64e6  # what the preset "small" reads
    assert not [file.name for file in files if "/tests/" in file.name or "site-packages" in file.name]
    monkeypatch.setattr(text_module, "DEFAULT_PACKAGES", ("torch", "ropewalk_has_no_such_package"))
    with pytest.raises(ModuleNotFoundError, match="ropewalk_has_no_such_package is not installed, whose sources"):
        open_text(Config())

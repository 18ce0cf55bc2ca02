"""Planted facts and the linear probe, on models that are made by hand: what can be found is, and nothing else."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from helpers.bert_runs import TINY, make_corpus
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from ropewalk.experiments.bert_positions.data import SPECIAL_TOKENS, tag_windows, train_wordpiece
from ropewalk.experiments.bert_positions.probes import (
    distances_of,
    fact_words,
    fit_linear,
    measure_probe,
    measure_recall,
    plant_facts,
)
from ropewalk.experiments.bert_positions.tags import KINDS, TAGS, tag_source

CONFIG = dataclasses.replace(TINY, train_length=64, length_multiples=[1, 4], precision="no")
MASK, VOCABULARY = 4, 1000
SOURCE = """def f(a, b=[1, {2: "x (y"}]):  # hi (
    return a + 3.5
"""


@pytest.fixture(scope="module")
def corpus():
    """Windows of random words, of which each word may be a fact's; the last hundred are pieces."""
    generator = torch.Generator().manual_seed(0)
    words = {word: number for number, word in enumerate((*SPECIAL_TOKENS, *map(str, range(5, 900))))}
    words |= {f"##{number}": number for number in range(900, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
    )
    held_out = torch.randint(5, VOCABULARY, (90, 256), generator=generator).int()
    tokens = torch.arange(5, VOCABULARY).repeat_interleave(torch.arange(1, VOCABULARY - 4)).int()
    tags = torch.randint(4, (2, 90, 256), generator=generator).to(torch.int8)
    return dataclasses.replace(
        make_corpus(), tokenizer=tokenizer, held_out=held_out, tokens=tokens, documents=torch.arange(90), tags=tags
    )


def one_hot(values, width=VOCABULARY):
    return 10 * nn.functional.one_hot(values, width).float()


class Copies(nn.Module):
    """Guesses what follows the other occurrence of the word two before [MASK], or that word itself."""

    def forward(self, input_ids, attention_mask, masked, labels, num_items_in_batch):
        guesses = []
        for row in input_ids:
            at = int((row == MASK).nonzero())
            others = [i for i in (row == row[at - 2]).nonzero()[:, 0].tolist() if i != at - 2]
            guesses.append(row[others[0] + 2] if others else row[at - 2])
        return {"logits": one_hot(torch.stack(guesses))}


class Random(nn.Module):
    """Guesses at random; or, if constant, each token with the same probability."""

    def __init__(self, size=1.0):
        super().__init__()
        self.size, self.generator = size, torch.Generator().manual_seed(0)

    def forward(self, labels, **batch):
        return {"logits": self.size * torch.randn(len(labels), VOCABULARY, generator=self.generator)}


def test_distances_go_to_the_end():
    assert distances_of(16) == [8, 13]
    assert distances_of(128) == [8, 16, 32, 64, 112]
    assert distances_of(1024) == [8, 16, 32, 64, 128, 256, 512, 896]


def test_facts_are_words_of_middling_frequency(corpus):
    words, link = fact_words(corpus)
    # 895 whole words, each more frequent than the one before.
    assert words.tolist() == list(range(5 + 223, 900 - 223))
    assert link == 899


@pytest.mark.parametrize("distance", [8, 100, 224, 253])
def test_a_fact_and_its_query_are_so_far_apart(corpus, distance):
    (words, link), windows = fact_words(corpus), corpus.held_out.clone()
    windows[windows == link] = link + 1
    planted, without, masked, value = plant_facts(corpus, words, link, windows, distance, seed=1)
    assert len(planted) == len(windows)
    firsts = set()
    for row in range(len(planted)):
        at = int(masked[row])
        assert planted[row, at] == without[row, at] == MASK
        key = int(planted[row, at - 2])
        assert {key, int(value[row])} <= set(words.tolist()) - set(windows[row].tolist())
        fact = at - 2 + (distance if row % 2 else -distance)  # after the query in odd windows
        assert planted[row, fact : fact + 3].tolist() == [key, link, int(value[row])]
        assert planted[row, at - 1] == link
        changed = {at - 2, at - 1, at, fact, fact + 1, fact + 2}
        assert set((planted[row] != windows[row]).nonzero()[:, 0].tolist()) == changed
        assert set((without[row] != windows[row]).nonzero()[:, 0].tolist()) == {at - 2, at - 1, at}
        firsts.add(min(changed))
    assert min(firsts) >= 0
    assert len(firsts) > 10 or distance == 253
    again = plant_facts(corpus, words, link, windows, distance, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(again, (planted, without, masked, value), strict=True))
    assert not torch.equal(plant_facts(corpus, words, link, windows, distance, seed=2)[0], planted)


def test_who_copies_recalls_all_and_nothing_without_the_fact(corpus):
    rows = measure_recall(Copies(), corpus, CONFIG, torch.device("cpu"))
    at = [(row["length"], row["distance"]) for row in rows]
    assert at == [(n, d) for n in (64, 256) for d in distances_of(n)]
    for row in rows:
        assert row["n_facts"] == 90
        assert row["accuracy"] == 1
        assert row["loss"] == pytest.approx(math.log(1 + (VOCABULARY - 1) * math.exp(-10)), rel=1e-4)
        assert row["control_accuracy"] == 0


def test_who_guesses_recalls_by_chance(corpus):
    for row in measure_recall(Random(), corpus, CONFIG, torch.device("cpu")):
        assert row["n_words"] == 449
        assert row["accuracy"] * row["n_facts"] <= 4  # 0.2 are expected
        assert row["control_accuracy"] * row["n_facts"] <= 4
    for row in measure_recall(Random(0.0), corpus, CONFIG, torch.device("cpu")):
        assert row["loss"] == row["control_loss"] == pytest.approx(math.log(VOCABULARY))


def test_windows_that_have_all_words_are_left_out(corpus):
    windows = corpus.held_out.clone()
    windows[:30, :100] = torch.arange(300, 400)
    planted, *_ = plant_facts(corpus, torch.arange(300, 401), 5, windows, 8, seed=0)
    assert len(planted) == 60
    with pytest.raises(ValueError, match="but one must lack two of 100 words, to plant them"):
        plant_facts(corpus, torch.arange(300, 400), 5, windows[:30], 8, seed=0)


def model_with(states_of):
    """A model whose hidden states are made by hand of the ids."""

    class Bert(nn.Module):
        def forward(self, ids, attention_mask):
            return SimpleNamespace(last_hidden_state=states_of(ids))

    model = nn.Module()
    model.bert = Bert()
    return model


def test_the_probe_finds_what_is_there_and_nothing_else(corpus):
    tagged = dataclasses.replace(corpus, tags=corpus.tags.clone())
    tagged.tags[0, 0, :40] = -100  # not tagged, and not counted
    tagged.tags[:, 1] = -100
    of_ids = torch.randint(4, (VOCABULARY, 2), generator=torch.Generator().manual_seed(3))
    for index in range(2):
        is_tagged = tagged.tags[index] >= 0
        tagged.tags[index][is_tagged] = of_ids[corpus.held_out.long(), index].to(torch.int8)[is_tagged]
    told = model_with(lambda ids: torch.cat([nn.functional.one_hot(of_ids[ids, i], 4) for i in (0, 1)], -1).float())
    rows = measure_probe(told, tagged, CONFIG, torch.device("cpu"))
    assert [(row["tag"], row["length"]) for row in rows] == [(tag, n) for n in (64, 256) for tag in TAGS]
    assert all(row["accuracy"] == 1 for row in rows)
    assert {row["n_tokens"] for row in rows} == {44 * 256}  # 45 documents of odd numbers, one of them not tagged
    same = model_with(lambda ids: torch.ones(*ids.shape, 3))
    for row in measure_probe(same, tagged, CONFIG, torch.device("cpu")):
        assert row["accuracy"] == row["majority"] < 0.5


def test_there_is_no_probe_without_source_in_both_halves(corpus):
    tags = corpus.tags.clone()
    tags[:, ::2] = -100
    assert measure_probe(Random(), dataclasses.replace(corpus, tags=tags), CONFIG, torch.device("cpu")) == []


def test_a_linear_classifier_is_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    states, labels = torch.randn(300, 4, generator=generator), torch.randint(3, (300,), generator=generator)
    states[:, 0] += labels
    guesses = fit_linear(states, labels, 3)(states)
    linear = pytest.importorskip("sklearn.linear_model").LogisticRegression()
    standard = (states - states.mean(0)) / states.std(0)
    assert (torch.from_numpy(linear.fit(standard, labels).predict(standard)) != guesses).sum() <= 1


def test_tags_of_a_source():
    kinds, depths = tag_source(SOURCE).tolist()
    assert {character for character, kind in zip(SOURCE, kinds, strict=True) if kind == -100} == {" ", "\n"}
    assert [KINDS[kinds[SOURCE.index(part)]] for part in ("def", "f(", "1", '"x', "#", "+", "3.5")] == [
        *("keyword", "name", "number", "string", "comment", "operator", "number")
    ]
    parts = ("def", "(", "a,", "[", "1", "{", "2", '"x', "}", "]", "):", "#")
    assert [depths[SOURCE.index(part)] for part in parts] == [0, 0, 1, 1, 2, 2, 3, 3, 2, 1, 0, 0]
    assert tag_source("a rope is laid of three") is None
    assert tag_source("") is None
    assert tag_source("x = (\r\n1)\r\n")[1].tolist() == [0, -100, 0, -100, 0, -100, -100, 1, 0, -100, -100]


def test_tokens_have_the_tags_of_their_characters():
    documents = [SOURCE * 3, "no source", SOURCE * 2]
    tokenizer = train_wordpiece(documents * 3, 512)
    encoding = tokenizer.encode(documents[2], add_special_tokens=False)
    size = len(encoding.ids) - 2
    tags = tag_windows(tokenizer, documents, torch.tensor([2, 0, 1]), torch.tensor([2, 1, 0]), size=size)
    assert (tags[:, 1] == -100).all()
    expected = tag_source(documents[2])[:, [first for first, _ in encoding.offsets[2:]]]
    assert torch.equal(tags[:, 0], expected)
    assert (tags[:, [0, 2]] >= 0).all()

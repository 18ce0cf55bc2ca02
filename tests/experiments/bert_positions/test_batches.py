"""Masked batches: what is masked, and that batches depend on nothing but the configuration, the seed and the step."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.experiments.bert_positions.batches import NO_LABEL, evaluation_batches, n_masked_of, training_batch
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.corpus import Corpus, cut_windows

PAD, MASK, N_SPECIAL = 0, 4, 5
SIZES = {"train_length": 16, "batch_size": 12, "schemes": ("rope",), "length_multiples": (1, 2, 4, 8)}


def make_corpus(config, lengths=(40, 9, 128, 16, 23), n_held_out=5):
    """Documents of so many tokens; no token is there twice, so that each says where it is from."""
    n_tokens, n_others = sum(lengths), n_held_out * config.longest
    tokens = torch.arange(N_SPECIAL, N_SPECIAL + n_tokens, dtype=torch.int32)
    others = torch.arange(n_others, dtype=torch.int32) + N_SPECIAL + n_tokens
    return Corpus(
        name="numbers",
        n_documents=len(lengths),
        n_bytes=0,
        sha256="",
        vocab_size=N_SPECIAL + n_tokens + n_others,
        pad_id=PAD,
        mask_id=MASK,
        n_special=N_SPECIAL,
        tokenizer=None,
        tokens=tokens,
        windows=cut_windows(torch.tensor(lengths), config.train_length),
        held_out=others.view(n_held_out, config.longest),
    )


def unmask(batch):
    """The text before it was masked; padding stays."""
    labels = torch.where(batch.labels == NO_LABEL, batch.input_ids.gather(1, batch.masked), batch.labels)
    return batch.input_ids.scatter(1, batch.masked, labels)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(8, 60), min_size=1, max_size=8),
    probability=st.floats(0.01, 0.99),
    train_length=st.integers(8, 40),
    seed=st.integers(0, 2**40),
    step=st.integers(0, 10**6),
)
def test_just_so_many_tokens_of_each_row_are_masked(device, lengths, probability, train_length, seed, step):
    config = Config(**{**SIZES, "train_length": train_length}, mask_probability=probability)
    corpus = make_corpus(config, lengths)
    batch = training_batch(corpus, config, seed, step, device)

    M = n_masked_of(train_length, probability)
    assert batch.input_ids.shape == batch.attention_mask.shape == (12, train_length)
    assert batch.masked.shape == batch.labels.shape == (12, M)
    n_tokens = batch.attention_mask.sum(1)
    is_label = batch.labels != NO_LABEL
    assert is_label.sum(1).tolist() == [n_masked_of(n, probability) for n in n_tokens.tolist()]
    assert batch.n_labels == is_label.sum()
    assert batch.n_tokens == n_tokens.sum()
    for row in range(12):
        places = batch.masked[row][is_label[row]]
        assert len(set(places.tolist())) == len(places)  # each only once
        assert bool((places < n_tokens[row]).all())  # padding never
    windows = {(int(start) + N_SPECIAL, int(size)) for start, size in corpus.windows}
    for ids, size in zip(unmask(batch), n_tokens.tolist(), strict=True):
        assert (int(ids[0]), size) in windows
        assert torch.equal(ids[:size], torch.arange(size, device=device) + ids[0])
        assert bool((ids[size:] == PAD).all())
    assert batch.attention_mask.tolist() == [[1] * size + [0] * (train_length - size) for size in n_tokens.tolist()]


@pytest.mark.parametrize(
    ("n_tokens", "probability", "expected"),
    [(128, 0.15, 19), (20, 0.15, 3), (10, 0.15, 2), (8, 0.01, 1), (10, 0.25, 3)],
)
def test_halves_are_rounded_up_and_one_is_the_least(n_tokens, probability, expected):
    assert n_masked_of(n_tokens, probability) == expected


def test_masked_tokens_are_shown_as_in_bert_and_lie_anywhere(device):
    config = Config(**{**SIZES, "batch_size": 256})
    corpus = make_corpus(config, [16] * 40)
    kinds, places = Counter(), torch.zeros(16)
    replaced = set()
    for step in range(40):
        batch = training_batch(corpus, config, 3, step, device)
        shown = batch.input_ids.gather(1, batch.masked)
        kept = shown == batch.labels
        kinds.update(mask=int((shown == MASK).sum()), kept=int(kept.sum()))
        replaced |= set(shown[(shown != MASK) & ~kept].tolist())
        places += torch.bincount(batch.masked.flatten().cpu(), minlength=16)
        outside = torch.ones_like(batch.input_ids, dtype=torch.bool).scatter(1, batch.masked, False)
        assert torch.equal(batch.input_ids[outside], unmask(batch)[outside])
    n = int(places.sum())
    assert n == 40 * 256 * 2
    # of 20480, six standard deviations
    assert abs(kinds["mask"] - 0.8 * n) < 6 * (0.16 * n) ** 0.5
    assert abs(kinds["kept"] - 0.1 * n) < 6 * (0.09 * n) ** 0.5
    assert min(replaced) >= N_SPECIAL
    assert max(replaced) < corpus.vocab_size
    # 2048 draws meet 0.798 of 1280 tokens on average; 0.75 is five standard deviations less
    assert len(replaced) > 0.75 * (corpus.vocab_size - N_SPECIAL)
    assert float((places - n / 16).abs().max()) < 6 * (n / 16) ** 0.5


@pytest.mark.parametrize("n_parts", [1, 2, 3, 4, 6, 12])
def test_the_parts_of_a_batch_together_are_the_batch(device, n_parts):
    config = Config(**SIZES)
    corpus = make_corpus(config)
    whole = training_batch(corpus, config, 1, 5, device)
    parts = [training_batch(corpus, config, 1, 5, device, part, n_parts) for part in range(n_parts)]
    for name in ("input_ids", "attention_mask", "masked", "labels"):
        tensors = [getattr(part, name) for part in parts]
        assert {len(tensor) for tensor in tensors} == {12 // n_parts}
        assert torch.equal(torch.cat(tensors), getattr(whole, name))
        assert tensors[0].dtype == torch.int64
        assert tensors[0].device.type == device.type
    assert {part.n_labels for part in parts} == {whole.n_labels}
    assert sum(part.n_tokens for part in parts) == whole.n_tokens


def test_a_batch_depends_on_seed_and_step_alone(device):
    config = Config(**SIZES)
    corpus = make_corpus(config)

    def ids(seed, step):
        return training_batch(corpus, config, seed, step, device).input_ids

    expected = ids(1, 5)
    torch.manual_seed(123)
    ids(2, 7)
    state = torch.get_rng_state()
    assert torch.equal(ids(1, 5), expected)
    assert torch.equal(torch.get_rng_state(), state)
    for seed, step in ((1, 4), (2, 5), (1 + 2**32, 5), (5, 1)):
        assert not torch.equal(ids(seed, step), expected)


def test_each_epoch_shows_each_window_once_in_another_order(device):
    config = Config(**SIZES)
    corpus = make_corpus(config, [40, 9, 128, 16, 23] * 3)
    n_windows = len(corpus.windows)
    starts, masks = [], []
    for step in range(2 * n_windows):
        batch = training_batch(corpus, config, 4, step, device)
        starts += unmask(batch)[:, 0].tolist()
        masks.append(tuple(batch.masked[:, 0].tolist()))
    epochs = [starts[at : at + n_windows] for at in range(0, len(starts), n_windows)]
    assert len(epochs) == 2 * config.batch_size
    expected = sorted((corpus.windows[:, 0] + N_SPECIAL).tolist())
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert len(set(masks)) > len(masks) - 2


@pytest.mark.parametrize(("part", "n_parts"), [(0, 5), (2, 2), (-1, 2)])
def test_parts_that_are_not_there(device, part, n_parts):
    config = Config(**SIZES)
    with pytest.raises(ValueError, match=f"part is {part} of n_parts = {n_parts}, but must be"):
        training_batch(make_corpus(config), config, 0, 0, device, part, n_parts)


@pytest.mark.parametrize("tokens_at_once", [1, 64, 300, 10**6])
def test_at_each_length_the_same_tokens_are_scored(device, tokens_at_once):
    config = Config(**SIZES)
    corpus = make_corpus(config)
    seen = {}
    for length in (16, 32, 64, 128):
        batches = list(evaluation_batches(corpus, config, length, device, tokens_at_once))
        for batch in batches:
            n_rows = len(batch.input_ids)
            assert batch.input_ids.shape == (n_rows, length)
            assert n_rows * length <= max(length, tokens_at_once)
            assert batch.labels.shape == batch.masked.shape == (n_rows, 2 * length // 16)
            assert (batch.n_labels, batch.n_tokens) == (batch.labels.numel(), batch.input_ids.numel())
            assert bool((batch.attention_mask == 1).all())
            assert batch.input_ids.device.type == device.type
        labels = torch.cat([batch.labels.flatten() for batch in batches])
        text = torch.cat([unmask(batch).flatten() for batch in batches]).cpu()
        assert torch.equal(text, corpus.held_out.flatten().long())
        assert NO_LABEL not in labels
        assert len(set(labels.tolist())) == len(labels) == 5 * 8 * 2
        shown = torch.cat([batch.input_ids.flatten() for batch in batches])
        seen[length] = sorted(labels.tolist()), shown.tolist()
    assert seen[16] == seen[32] == seen[64] == seen[128]
    assert seen[16][1].count(MASK) > 40


def test_the_evaluation_is_the_same_on_each_device_and_each_time(device):
    config = Config(**SIZES)
    corpus = make_corpus(config)
    torch.manual_seed(5)
    first = next(evaluation_batches(corpus, config, 32, torch.device("cpu"), 10**6))
    second = next(evaluation_batches(corpus, config, 32, device, 10**6))
    assert torch.equal(first.input_ids, second.input_ids.cpu())
    assert torch.equal(first.masked, second.masked.cpu())


@pytest.mark.parametrize("length", [8, 24, 48, 256])
def test_lengths_that_the_windows_cannot_be_cut_into(device, length):
    config = Config(**SIZES)
    with pytest.raises(ValueError, match=f"length is {length}, but must be a multiple of 16, and divide 128"):
        next(evaluation_batches(make_corpus(config), config, length, device, 100))


@pytest.mark.gpu
def test_a_batch_never_waits_for_the_device(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    config = Config(**SIZES)
    corpus = make_corpus(config)
    training_batch(corpus, config, 0, 0, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        training_batch(corpus, config, 0, 1, device, 1, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")

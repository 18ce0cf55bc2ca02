"""Batches: the same for all schemes and however they are cut, and masked as BERT's."""

import torch
from helpers.bert_runs import TINY, make_corpus

from ropewalk.experiments.bert_positions.batches import (
    TrainingBatches,
    derive_seed,
    evaluation_batches,
    mask_tokens,
)

CORPUS = make_corpus()


def rows_of(step):
    return range(step * TINY.batch_size, (step + 1) * TINY.batch_size)


def test_each_epoch_has_each_window_once():
    batches = TrainingBatches(CORPUS, TINY, seed=3)
    assert len(batches) == TINY.steps * TINY.batch_size
    epochs = [torch.cat([batches._windows_of(step) for step in range(n, n + 10)]) for n in (0, 10)]
    for order in epochs:
        assert sorted(order.tolist()) == list(range(80))
    assert not torch.equal(*epochs)
    assert not torch.equal(epochs[0][:8], TrainingBatches(CORPUS, TINY, seed=4)._windows_of(0))
    assert batches.tokens_of(3) == int(CORPUS.windows[batches._windows_of(3), 1].sum())


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
        batch = batches.__getitems__(rows_of(step))
        windows = CORPUS.windows[batches._windows_of(step)]
        assert batch["attention_mask"].sum(1).tolist() == windows[:, 1].tolist()
        for index, label in zip(batch["masked"].tolist(), batch["labels"].tolist(), strict=True):
            row, place = divmod(index, TINY.train_length)
            begin, count = windows[row].tolist()
            assert place < count
            assert CORPUS.tokens[begin + place] == label
        assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()


def test_masks_are_berts():
    ids = torch.full((200, 100), 7)
    shown, labels = mask_tokens(CORPUS, TINY, ids.clone(), torch.ones_like(ids, dtype=torch.bool), seed=1)
    masked = labels != -100
    assert abs(masked.double().mean() - 0.15) < 0.01
    assert (shown[~masked] == 7).all()
    assert abs((shown[masked] == CORPUS.tokenizer.mask_token_id).double().mean() - 0.8) < 0.04
    assert abs((shown[masked] == 7).double().mean() - 0.1) < 0.04


def test_evaluation_masks_the_same_tokens_at_each_length():
    short, long = (evaluation_batches(CORPUS, TINY, length, tokens_at_once=48) for length in (16, 32))
    assert [len(batch["input_ids"]) for batch in short] == [3, 3, 2]
    assert [len(batch["input_ids"]) for batch in long] == [1] * 4
    for name in ("input_ids", "labels"):
        assert torch.equal(
            torch.cat([batch[name].flatten() for batch in short]), torch.cat([batch[name].flatten() for batch in long])
        )


def test_seeds_for_different_purposes_differ():
    seeds = [derive_seed(*what) for what in ((0, 1), (1, 0), (0, 1, "order"), ("weights", 0), ("dropout", 0))]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)

"""Two tests of trained models: the recall of a planted fact, and a linear probe of what each token is.

Shape letters: N windows, T tokens, C hidden features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.data import SPECIAL_TOKENS, Corpus, derive_seed, make_batch
from ropewalk.experiments.bert_positions.tags import TAGS
from ropewalk.experiments.bert_positions.training import TOKENS_AT_ONCE, autocast

FACT_TOKENS = 3
NEAREST = 8  # tokens from a fact to its query
Row = dict[str, Any]  # of a record


def distances_of(length: int) -> list[int]:
    """Return where facts are planted in windows of `length` tokens: powers of two to half of it, and seven eighths.

    In a window of less than 24 tokens the last is as far as a fact and its query have room.
    """
    powers = [1 << n for n in range(NEAREST.bit_length() - 1, length.bit_length()) if 2 << n <= length]
    return sorted({*powers, min(length * 7 // 8, length - FACT_TOKENS)} - set(range(NEAREST)))


def fact_words(corpus: Corpus) -> tuple[Tensor, int]:
    """Return the ids of words of facts, neither frequent nor unknown to the models, and of their link.

    They are whole words and signs, no pieces, that occur in the text to learn from: the middle half by frequency, and
    the most frequent one. Of Python source the link is the underscore: a fact is an identifier.
    """
    tokens = corpus.tokenizer.convert_ids_to_tokens(range(len(corpus.tokenizer)))
    is_whole = torch.tensor([not token.startswith("##") and token not in SPECIAL_TOKENS for token in tokens])
    counts = corpus.tokens.long().bincount(minlength=len(tokens))
    words = (is_whole & (counts > 0)).nonzero()[:, 0]
    words = words[counts[words].argsort(stable=True)]
    return words[len(words) // 4 : len(words) - len(words) // 4], int(words[-1])


def plant_facts(
    corpus: Corpus, words: Tensor, link: int, ids: Tensor, distance: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plant a fact in each window, (N, T): windows with it, windows without it, where [MASK] is, and what it hides.

    A fact is a key, the link and a value, which replace three tokens: `key_value` in Python source. The query is the
    key, the link and [MASK], which replace three tokens `distance` later in even windows, as much earlier in odd ones.
    Key and value are two of the words, and occur nowhere else in the window. The control, windows without the fact, has
    the query alone. Windows in which fewer than two of the words are missing are left out.
    """
    generator, ids = torch.Generator().manual_seed(seed), ids.long()
    is_there = torch.zeros(len(ids), len(corpus.tokenizer)).scatter_(1, ids, 1.0)
    is_free = 1 - is_there[:, words]
    ids, is_free = (x[is_free.sum(1) >= 2] for x in (ids, is_free))
    if not len(ids):
        need = f"two of {len(words)} words, to plant them"
        raise ValueError(f"{corpus.facts['name']}: each held-out window has all but one, but one must lack {need}")
    key, value = words[torch.multinomial(is_free, 2, generator=generator)].unbind(1)
    rows = torch.arange(len(ids))
    first = torch.randint(ids.shape[1] - distance - FACT_TOKENS + 1, (len(ids),), generator=generator)
    fact, query = (torch.where(rows % 2 == odd, first, first + distance) for odd in (0, 1))
    without = ids.clone()
    without[rows, query], without[rows, query + 1], without[rows, query + 2] = key, link, corpus.tokenizer.mask_token_id
    planted = without.clone()
    planted[rows, fact], planted[rows, fact + 1], planted[rows, fact + 2] = key, link, value
    return planted, without, query + 2, value


@torch.no_grad()
def measure_recall(model: nn.Module, corpus: Corpus, config: Config, device: torch.device) -> list[Row]:
    """Measure how a model guesses the value of a planted fact from its key, at the trained and the greatest length.

    A row has a length and a distance; the mean `loss` of the value, in nats, among all tokens; and the `accuracy`, the
    share of values that are the most likely of the `n_words` words of facts. `control_loss` and
    `control_accuracy` are of the same windows without the fact. `plant_facts` defines both; facts are the same for all
    schemes and seeds.
    """
    model.eval()
    rows, (words, link) = list[Row](), fact_words(corpus)
    for length in sorted({config.train_length, config.longest}):
        windows = corpus.held_out[:, :length]
        for distance in distances_of(length):
            seed = derive_seed("fact", distance)
            planted, without, masked, value = plant_facts(corpus, words, link, windows, distance, seed)
            row: Row = {"length": length, "distance": distance, "n_facts": len(value), "n_words": len(words)}
            for prefix, ids in (("", planted), ("control_", without)):
                losses, is_right = _guess(model, config, ids, masked, value, words.to(device), device)
                row |= {f"{prefix}loss": losses.mean().item(), f"{prefix}accuracy": is_right.mean().item()}
            rows.append(row)
    return rows


def _guess(
    model: nn.Module, config: Config, ids: Tensor, masked: Tensor, value: Tensor, words: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the loss of the masked token of each window, (N,), and 1 if no other of the words is likelier; float64."""
    labels, found = torch.full_like(ids, -100).scatter_(1, masked[:, None], value[:, None]), []
    at_once = max(1, TOKENS_AT_ONCE[device.type] // ids.shape[1])
    for part in zip(ids.split(at_once), labels.split(at_once), strict=True):
        batch = make_batch(part[0], torch.ones_like(part[0], dtype=torch.bool), part[1])
        batch = {name: x.to(device) for name, x in batch.items()}
        with autocast(config, device):
            logits = model(**batch, num_items_in_batch=1)["logits"].float()
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        is_right = words[logits[:, words].argmax(-1)] == batch["labels"]
        found.append(torch.stack((losses.double(), is_right.double())).cpu())
    losses, is_right = torch.cat(found, 1)
    return losses, is_right


def measure_probe(model: nn.Module, corpus: Corpus, config: Config, device: torch.device) -> list[Row]:
    """Measure how well frozen hidden states tell what a token is: its kind in Python, and the depth of its brackets.

    For each kind of `TAGS` a linear classifier of the last layer's hidden states is fitted at the trained length, to
    the held-out documents of even numbers, and tested on those of odd numbers, at the trained and the greatest length.
    A row has the tag, the length, the `accuracy`, and the `majority`, the accuracy of the class that is most frequent
    in the first half. Without Python source in both halves there is no row.
    """
    model.eval()
    is_source, is_odd = (corpus.tags[0] >= 0).any(1), corpus.documents % 2 == 1
    to_fit, to_test = is_source & ~is_odd, is_source & is_odd
    if not (to_fit.any() and to_test.any()):
        return []
    lengths = sorted({config.train_length, config.longest})
    states = _hidden_states(model, config, corpus.held_out[to_fit], lengths[0], device)
    tags = corpus.tags.flatten(2).to(device).long()
    classifiers, rows = [], []
    for kind_tags, classes in zip(tags[:, to_fit], TAGS.values(), strict=True):
        is_tagged = kind_tags.flatten() >= 0
        labels = kind_tags.flatten()[is_tagged]
        classifiers.append((fit_linear(states[is_tagged], labels, len(classes)), labels.mode().values))
    for length in lengths:
        states = _hidden_states(model, config, corpus.held_out[to_test], length, device)
        for tag, kind_tags, (classify, most) in zip(TAGS, tags[:, to_test], classifiers, strict=True):
            is_tagged = kind_tags.flatten() >= 0
            labels = kind_tags.flatten()[is_tagged]
            accuracy, majority = (
                (guess == labels).double().mean().item() for guess in (classify(states[is_tagged]), most)
            )
            row: Row = {"tag": tag, "length": length, "accuracy": accuracy, "majority": majority}
            rows.append(row | {"n_tokens": len(labels)})
    return rows


@torch.no_grad()
def _hidden_states(model: Any, config: Config, ids: Tensor, length: int, device: torch.device) -> Tensor:
    """Return the last layer's hidden states of windows, read `length` tokens at a time, (tokens, C) float32."""
    found, rows = [], ids.long().reshape(-1, length)
    for part in rows.split(max(1, TOKENS_AT_ONCE[device.type] // length)):
        part = part.to(device)
        with autocast(config, device):
            found.append(model.bert(part, attention_mask=torch.ones_like(part)).last_hidden_state.float().flatten(0, 1))
    return torch.cat(found)


def fit_linear(states: Tensor, labels: Tensor, n_classes: int) -> Callable[[Tensor], Tensor]:
    """Fit a logistic regression to (tokens, C) and return it as a function to classes, (tokens,).

    The features are standardised; half of the squared weights is added to the sum of the losses, as scikit-learn does
    by default. L-BFGS takes 100 steps.
    """
    mean, deviation = states.mean(0), states.std(0).clamp(min=1e-6)
    linear = nn.Linear(states.shape[1], n_classes, device=states.device)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=100, line_search_fn="strong_wolfe")
    standard = (states - mean) / deviation

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(linear(standard), labels) + linear.weight.square().sum() / (2 * len(labels))
        value.backward()
        return value.item()

    optimizer.step(loss)
    return lambda x: linear((x - mean) / deviation).argmax(-1)

"""BERT with one of the position schemes, its masked-language-modelling loss, and its evaluation on held-out text."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from ropewalk.experiments.bert_positions.batches import derive_seed, evaluation_batches
from ropewalk.experiments.bert_positions.config import Config
from ropewalk.experiments.bert_positions.corpus import Corpus
from ropewalk.experiments.bert_positions.record import EvaluationRow
from ropewalk.integrations.huggingface import convert_bert

_TOKENS_AT_ONCE = {"cpu": 1 << 12, "cuda": 1 << 16}
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MaskedBert(BertForMaskedLM):  # type: ignore[misc]
    """BERT whose wide head reads the masked tokens alone, one in seven; a batch is that of `make_batch`."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, masked: Tensor, labels: Tensor, **of_the_step: Any
    ) -> dict[str, Tensor]:
        """Return logits (M, vocab), and the sum of the cross-entropies over the number of labels of the whole step.

        Added up over the parts of a step, that is the mean loss of its masked tokens, whatever the parts are.
        """
        hidden = self.bert(input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.cls(hidden.flatten(0, 1).index_select(0, masked)).float()
        total = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / of_the_step.get("num_items_in_batch", len(labels)), "logits": logits}


def plain_bert(config: Config, vocab_size: int, pad_id: int, **more: Any) -> MaskedBert:
    """Make transformers' BERT, with its table of positions, of the experiment's sizes."""
    sizes = BertConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout,
        max_position_embeddings=config.longest,
        pad_token_id=pad_id,
        **more,
    )
    return MaskedBert(sizes)


def make_model(config: Config, scheme: str, seed: int, vocab_size: int, pad_id: int) -> MaskedBert:
    """Make a BERT whose self-attention is of the scheme, on the CPU, in float32.

    With one seed, the common weights of all schemes start equal: they are drawn before the model is converted. A
    scheme's own weights are drawn afterwards, from a seed of their own.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed("weights", seed))
        model = plain_bert(config, vocab_size, pad_id)
        torch.default_generator.manual_seed(derive_seed("positions", scheme, seed))
        return convert_bert(model, scheme, **config.options_of(scheme))


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Return the autocast of the configuration's precision."""
    dtype = _DTYPES[config.precision_on(device)]
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


@torch.no_grad()
def evaluate(
    model: MaskedBert, corpus: Corpus, config: Config, scheme: str, seed: int, device: torch.device
) -> list[EvaluationRow]:
    """Compute the loss and the accuracy of a model, on `device`, at each of the configuration's lengths.

    The same masked tokens are scored at every length, in the precision of the training, without dropout.

    Raises:
        ValueError: a loss that is not finite.
    """
    model.eval()
    rows = []
    for length in (config.train_length * multiple for multiple in config.length_multiples):
        totals, n_labels = torch.zeros(2, dtype=torch.float64, device=device), 0
        for batch in evaluation_batches(corpus, config, length, _TOKENS_AT_ONCE[device.type]):
            batch = {name: tensor.to(device) for name, tensor in batch.items()}
            with autocast(config, device):
                found = model(**batch, num_items_in_batch=1)
            n_right = (found["logits"].argmax(-1) == batch["labels"]).sum()
            totals += torch.stack((found["loss"].double(), n_right.double()))
            n_labels += len(batch["labels"])
        if n_labels == 0:
            raise ValueError(f"the held-out text has no masked token at length {length}, but must have one")
        loss, accuracy = (totals / n_labels).tolist()
        if not math.isfinite(loss):
            raise ValueError(f"the loss of {scheme}, seed {seed}, is {loss} at length {length}: it diverged")
        rows.append(EvaluationRow(scheme, seed, length, loss, accuracy, n_labels))
    return rows

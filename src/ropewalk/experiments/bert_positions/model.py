"""BERT with one of the position schemes, and its masked-language-modelling loss.

Shape letters: B batch, T tokens, M masked positions of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.experiments.bert_positions.batches import NO_LABEL, Batch
from ropewalk.experiments.bert_positions.seeds import derive_seed

if TYPE_CHECKING:
    from ropewalk.experiments.bert_positions.config import Config


def bert_config(config: Config, vocab_size: int, pad_id: int, **more: Any) -> Any:
    """Return transformers' `BertConfig` of the experiment's sizes."""
    from transformers import BertConfig

    return BertConfig(
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


def make_model(config: Config, scheme: str, seed: int, vocab_size: int, pad_id: int) -> Any:
    """Make a `BertForMaskedLM` whose self-attention is of the scheme, on the CPU, in float32.

    With one seed, the common weights of all schemes start equal: they are drawn before the model is converted. A
    scheme's own weights are drawn afterwards, from a seed of their own.
    """
    from transformers import BertForMaskedLM

    from ropewalk.integrations.huggingface import convert_bert

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed("weights", seed))
        model = BertForMaskedLM(bert_config(config, vocab_size, pad_id))
        torch.default_generator.manual_seed(derive_seed("positions", scheme, seed))
        return convert_bert(model, scheme, **config.options_of(scheme))


def masked_logits(model: Any, batch: Batch) -> Tensor:
    """Return the logits of the masked tokens alone, (B, M, vocab): they are one in seven, and the head is wide."""
    hidden = model.bert(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    index = batch.masked[..., None].expand(-1, -1, hidden.shape[-1])
    logits: Tensor = model.cls(hidden.gather(1, index))
    return logits


def mlm_loss(model: Any, batch: Batch) -> Tensor:
    """Return the sum of this part's cross-entropies over the number of labels of the whole batch.

    Added up over the parts of a batch, that is the mean loss of its masked tokens, whatever the parts are.
    """
    logits = masked_logits(model, batch)
    total = F.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=NO_LABEL, reduction="sum"
    )
    return total / batch.n_labels


class TrainingLoss(nn.Module):
    """`mlm_loss` of a model as a module, for accelerate to wrap; times a number, for what averages over processes."""

    def __init__(self, model: nn.Module, times: int) -> None:
        super().__init__()
        self.model, self.times = model, times

    def forward(self, batch: Batch) -> Tensor:
        loss = mlm_loss(self.model, batch)
        return loss if self.times == 1 else loss * self.times

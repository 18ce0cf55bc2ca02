"""`convert_bert`: transformers' BERT with another position scheme, and without its table of positions."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ropewalk.integrations.huggingface.attention import find_transformers, register
from ropewalk.modules.bert import BERTAttention, get_attention_class

Model = TypeVar("Model", bound=nn.Module)

# Arguments of the attention classes that the model sets; its own layers have the output projection.
_MODEL_OPTIONS = ("hidden_size", "num_heads", "max_position_embeddings", "dropout", "output_projection")


def convert_bert(model: Model, position: str | type[BERTAttention] = "rope", **options: Any) -> Model:
    """Replace the self-attention of a transformers BERT, in place, by that of another position scheme.

    The same in PyTorch, for each layer, but that nothing is copied and nothing added::

        attention = get_attention_class(position)(hidden_size, num_heads, max_position_embeddings, dropout, **options)
        attention.load_state_dict(layer.attention.self.state_dict(), strict=False)
        layer.attention.self = attention
        model.embeddings.position_embeddings.weight.data.zero_()

    It supports `BertModel`, `BertForMaskedLM`, `BertForSequenceClassification` and every module with one of them in it.
    The layers keep their query, key and value modules, so that an optimiser goes on with them; the learned parameters
    of a scheme are new, in each layer. The model's table of positions is removed, and with it the limit of the length,
    but for "standard". position_ids of a call are the scheme's positions. Masks are those of `register`.

    `save_pretrained` writes transformers' names, and the scheme's own beside them. To load that, convert first::

        model = convert_bert(BertForMaskedLM(BertConfig.from_pretrained(folder)), position)
        safetensors.torch.load_model(model, folder / "model.safetensors")

    `from_pretrained` alone would leave out the scheme's learned parameters, without an error.

    Args:
        model: a model of transformers, or a module that has one inside, on any device, of any dtype, in any mode.
        position: "none", "standard", "absolute", "rope", "exposb", "alibi", "t5" or "rerope", as for
            `get_attention_class`; or a subclass of `ropewalk.modules.bert.BERTAttention`, for a scheme of your own.
        options: more arguments of that class, such as `base` or `window`.

    Returns:
        The model itself.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        TypeError: a model that is not a module; a position that is no name and no such class; options that the class
            does not have, or that the model sets.
        ValueError: another position, or options or sizes that its class does not support; a model without BERT's
            self-attention inside; one that is converted already; a decoder, or cross-attention; relative positions of
            BERT's own (position_embedding_type); a config with output_attentions, which are never held.
        In each case the model is as it was.

    Source: BERT (https://arxiv.org/abs/1810.04805).

    Example:
        >>> import importlib.util
        >>> import torch
        >>> from ropewalk.integrations import huggingface
        >>> if importlib.util.find_spec("transformers") is not None:
        ...     from transformers import BertConfig, BertModel
        ...     sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
        ...     model = BertModel(BertConfig(vocab_size=100, max_position_embeddings=16, **sizes))
        ...     hidden_states = huggingface.convert_bert(model, "alibi")(torch.ones(1, 32).long()).last_hidden_state
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, but must be a torch.nn.Module")
    attention_class = get_attention_class(position) if isinstance(position, str) else position
    if not (isinstance(attention_class, type) and issubclass(attention_class, BERTAttention)):
        raise TypeError(f"position is {position!r}, but must be a name or a subclass of BERTAttention")
    reserved = [name for name in _MODEL_OPTIONS if name in options]
    if reserved:
        raise TypeError(f"options hold {', '.join(reserved)}, but must not hold them: the model sets them")
    find_transformers()
    theirs = importlib.import_module("transformers.models.bert.modeling_bert")
    _check_model(model, theirs)
    parts = list(model.modules())
    replaced: dict[nn.Module, nn.Module] = {}
    for part in parts:
        if isinstance(part, theirs.BertSelfAttention):
            replaced[part] = _make_attention(part, attention_class, options)
        elif isinstance(part, theirs.BertEmbeddings):
            replaced[part] = EmbeddingsWithoutPositions(part)
    register()
    for part in parts:
        if isinstance(part, theirs.BertModel):
            part.set_attn_implementation("ropewalk")
        for name, child in list(part.named_children()):
            if child in replaced:
                setattr(part, name, replaced[child])
    return model


class EmbeddingsWithoutPositions(nn.Module):
    """transformers' `BertEmbeddings` without the table of positions, and so without a limit of the length.

    It keeps the other modules. The layers use position_ids, which they get too.
    """

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.word_embeddings = embeddings.word_embeddings
        self.token_type_embeddings = embeddings.token_type_embeddings
        self.LayerNorm = embeddings.LayerNorm
        self.dropout = embeddings.dropout
        self.training = embeddings.training

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_length: int = 0,
        *,
        past_key_values_length: int = 0,  # the name before transformers 5.24
    ) -> Tensor:
        words: Tensor = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type_ids is None:
            token_type_ids = torch.zeros(1, 1, dtype=torch.long, device=words.device)  # for all tokens
        embedded: Tensor = self.dropout(self.LayerNorm(words + self.token_type_embeddings(token_type_ids)))
        return embedded


def _check_model(model: nn.Module, theirs: Any) -> None:
    """Raise unless the model has a BERT, and each can be converted."""
    attentions = 0
    for name, part in model.named_modules():
        where = f"model.{name}" if name else "model"
        if isinstance(part, BERTAttention):
            raise ValueError(f"{where} is {type(part).__name__}, but the model must not be converted already")
        if isinstance(part, theirs.BertCrossAttention):
            raise ValueError(f"{where} is cross-attention, but must be self-attention of an encoder")
        for replaced in (theirs.BertSelfAttention, theirs.BertEmbeddings):
            if isinstance(part, replaced) and (type(part) is not replaced or not name):
                must = f"must be transformers' {replaced.__name__} itself" if name else "must be inside the model"
                raise ValueError(f"{where} is {type(part).__name__}, but {must}, to be replaced in place")
        if isinstance(part, theirs.BertSelfAttention):
            attentions += 1
            _check_attention(where, part)
    if not attentions:
        raise ValueError(f"model is {type(model).__name__}, but must have transformers' BertSelfAttention inside")


def _check_attention(where: str, attention: Any) -> None:
    config = attention.config
    if config.is_decoder or attention.is_causal:
        raise ValueError(f"{where} is a decoder's, by config.is_decoder, but must be an encoder's")
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "absolute"):
        raise ValueError(f"{where} has config.position_embedding_type {kind!r}, but it must be 'absolute'")
    if getattr(config, "output_attentions", False):
        raise ValueError(f"{where} has config.output_attentions True, but must have False: attentions are never held")
    if attention.all_head_size != config.hidden_size:
        sizes = f"{attention.num_attention_heads} heads of {attention.attention_head_size}"
        raise ValueError(f"{where} has {sizes}, but they must fill config.hidden_size, {config.hidden_size}")


def _make_attention(theirs: Any, attention_class: type[BERTAttention], options: dict[str, Any]) -> BERTAttention:
    """Make attention of another class, with the modules, device, dtype and mode of another."""
    config, weight = theirs.config, theirs.query.weight
    ours = attention_class(
        config.hidden_size, config.num_attention_heads, config.max_position_embeddings, theirs.dropout.p, **options
    )
    ours = ours.to(weight.device, weight.dtype).train(theirs.training)
    ours.query, ours.key, ours.value = theirs.query, theirs.key, theirs.value
    return ours

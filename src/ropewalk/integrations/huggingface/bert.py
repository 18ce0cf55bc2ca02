"""`convert_bert`: transformers' BERT with the self-attention of another position scheme, and no second table."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ropewalk.integrations.huggingface.attention import find_transformers, register
from ropewalk.modules.bert import BERTAttention, get_attention_class

Model = TypeVar("Model", bound=nn.Module)

# Arguments of the attention classes that the model decides; its own layers have the output projection.
_OF_THE_MODEL = ("hidden_size", "num_heads", "max_position_embeddings", "dropout", "output_projection")


def convert_bert(model: Model, position: str = "rope", **options: Any) -> Model:
    """Exchange the self-attention of a transformers BERT, in place, for that of another position scheme.

    The same in PyTorch, for each layer, but that nothing is copied and nothing added::

        attention = get_attention_class(position)(hidden_size, num_heads, max_position_embeddings, dropout, **options)
        attention.load_state_dict(layer.attention.self.state_dict(), strict=False)
        layer.attention.self = attention
        model.embeddings.position_embeddings.weight.data.zero_()

    It works on `BertModel`, `BertForMaskedLM`, `BertForSequenceClassification` and whatever else has them inside. The
    layers keep their query, key and value, the very modules, so that an optimiser goes on with them; what a scheme has
    to learn is new, one in each layer. The model's own table of positions is gone, and with it the limit of the length,
    but for "standard". position_ids of a call are the scheme's positions. Masks come from `register`'s implementation.

    `save_pretrained` writes transformers' names, and the scheme's own beside them. To load that, convert first::

        model = convert_bert(BertForMaskedLM(BertConfig.from_pretrained(folder)), position)
        safetensors.torch.load_model(model, folder / "model.safetensors")

    `from_pretrained` after it would leave out what the scheme has learned, without an error.

    Args:
        model: a model of transformers, or a module that has one inside, on any device, of any dtype, in any mode.
        position: "standard", "absolute", "rope", "exposb", "alibi" or "rerope", as for `get_attention_class`.
        options: more arguments of that class, such as `base` or `window`.

    Returns:
        The model itself.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        TypeError: no module; options that the class does not have, or that the model decides.
        ValueError: an unknown position, or options or sizes that its class refuses; a model without BERT's
            self-attention inside; one that is converted already; a decoder, or cross-attention; relative positions of
            BERT's own (position_embedding_type); a config that asks for attentions, which are never held.
        In each case the model is as it was.

    Source: Ropewalk's document 002.

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
    attention_class = get_attention_class(position)
    given = [name for name in _OF_THE_MODEL if name in options]
    if given:
        raise TypeError(f"options hold {', '.join(given)}, but the model decides that: leave it out")
    find_transformers()
    theirs = importlib.import_module("transformers.models.bert.modeling_bert")
    _check_model(model, theirs)
    parts = list(model.modules())
    exchanged: dict[nn.Module, nn.Module] = {}
    for part in parts:
        if isinstance(part, theirs.BertSelfAttention):
            exchanged[part] = _make_attention(part, attention_class, options)
        elif isinstance(part, theirs.BertEmbeddings):
            exchanged[part] = EmbeddingsWithoutPositions(part)
    register()
    for part in parts:
        if isinstance(part, theirs.BertModel):
            part.set_attn_implementation("ropewalk")
        for name, child in list(part.named_children()):
            if child in exchanged:
                setattr(part, name, exchanged[child])
    return model


class EmbeddingsWithoutPositions(nn.Module):
    """A `BertEmbeddings` of transformers without its table of positions, and so without a limit of the length.

    It takes over the other modules. position_ids are left to the layers, which get them too.
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
        past_key_values_length: int = 0,
    ) -> Tensor:
        words: Tensor = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type_ids is None:
            token_type_ids = torch.zeros(1, 1, dtype=torch.long, device=words.device)  # for all tokens
        embedded: Tensor = self.dropout(self.LayerNorm(words + self.token_type_embeddings(token_type_ids)))
        return embedded


def _check_model(model: nn.Module, theirs: Any) -> None:
    """Raise unless every BERT in a model can be converted, and there is one."""
    attentions = 0
    for name, part in model.named_modules():
        where = f"model.{name}" if name else "model"
        if isinstance(part, BERTAttention):
            raise ValueError(f"{where} is {type(part).__name__}: the model is converted already")
        if isinstance(part, theirs.BertCrossAttention):
            raise ValueError(f"{where} is cross-attention, but BERT's position schemes are for encoders")
        for exchanged in (theirs.BertSelfAttention, theirs.BertEmbeddings):
            if isinstance(part, exchanged) and (type(part) is not exchanged or not name):
                must = f"must be transformers' {exchanged.__name__} itself" if name else "must be what holds it"
                raise ValueError(f"{where} is {type(part).__name__}, but {must}, to be exchanged in place")
        if isinstance(part, theirs.BertSelfAttention):
            attentions += 1
            _check_attention(where, part)
    if not attentions:
        raise ValueError(f"model is {type(model).__name__}, without transformers' BertSelfAttention inside")


def _check_attention(where: str, attention: Any) -> None:
    config = attention.config
    if config.is_decoder or attention.is_causal:
        raise ValueError(f"{where} is a decoder's, by config.is_decoder, but BERT's position schemes are for encoders")
    kind = getattr(config, "position_embedding_type", None)
    if kind not in (None, "absolute"):
        raise ValueError(f"{where} has config.position_embedding_type {kind!r}, but it must be 'absolute'")
    if getattr(config, "output_attentions", False):
        raise ValueError(f"{where} has config.output_attentions True, but attentions are never held: set it to False")
    if attention.all_head_size != config.hidden_size:
        sizes = f"{attention.num_attention_heads} heads of {attention.attention_head_size}"
        raise ValueError(f"{where} has {sizes}, but they must fill config.hidden_size, {config.hidden_size}")


def _make_attention(theirs: Any, attention_class: type[BERTAttention], options: dict[str, Any]) -> BERTAttention:
    """Attention of another class, of the same modules, and as they are: device, dtype and mode."""
    config, weight = theirs.config, theirs.query.weight
    ours = attention_class(
        config.hidden_size, config.num_attention_heads, config.max_position_embeddings, theirs.dropout.p, **options
    )
    ours = ours.to(weight.device, weight.dtype).train(theirs.training)
    ours.query, ours.key, ours.value = theirs.query, theirs.key, theirs.value
    return ours

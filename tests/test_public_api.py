"""What users may rely on changes only where the change shows in `public_api.txt`."""

import difflib
import importlib
import inspect

import pytest
import torch
import torch.distributed as dist
from public_api import HELD, MODULES, describe_api

import ropewalk
from ropewalk import QKNorm, T5Bias
from ropewalk.integrations.huggingface import LayersHandle, RopeHandle
from ropewalk.parallel import ContextParallelChoice, SequenceLayout


def test_public_names_signatures_operators_and_commands_are_as_held():
    held, found = HELD.read_text(encoding="utf-8"), describe_api()
    changes = "\n".join(difflib.unified_diff(held.splitlines(), found.splitlines(), "held", "found", lineterm="", n=0))
    assert held == found, f"if this is meant, run python tests/public_api.py:\n{changes}"


def test_what_is_held_is_complete():
    lines = HELD.read_text(encoding="utf-8")
    assert all(f"ropewalk.{name}" in lines for name in ropewalk.__all__)
    assert "ropewalk doctor" in lines
    assert "ropewalk::attend_backward(" in lines


LISTS = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
# An object of each public class; the names of those that are made of no argument need no line.
OBJECTS = {
    "BlockLists": lambda: ropewalk.BlockLists(*LISTS),
    "ContextParallelChoice": lambda: ContextParallelChoice("gather", {"ring": "no"}, 1, 1, 1, 0.5, 0.5),
    "LayersHandle": lambda: LayersHandle({"modeling.Attention": lambda *arguments: None}),
    "QKNorm": lambda: QKNorm(torch.ones(4)),
    "ReRope": lambda: ropewalk.ReRope(8),
    "RoPEAttention": lambda: ropewalk.RoPEAttention(16, 2, norm=QKNorm(torch.ones(8))),
    "RopeHandle": lambda: RopeHandle((("modeling", "apply_rotary_pos_emb"),)),
    "RotaryEmbedding": lambda: ropewalk.RotaryEmbedding(8),
    "SelfExtend": lambda: ropewalk.SelfExtend(8, 2),
    "SequenceLayout": lambda: SequenceLayout(dist.group.WORLD, 8),
    "T5Bias": lambda: T5Bias(torch.zeros(8, 2)),
    "TritonRotary": lambda: ropewalk.TritonRotary(8, 16),
}


def public_classes():
    """Yield them."""
    for module in map(importlib.import_module, ("ropewalk", *MODULES)):
        names = getattr(module, "__all__", vars(module))
        for value in (getattr(module, name) for name in names):
            if inspect.isclass(value) and value.__module__.startswith("ropewalk."):
                yield value


@pytest.mark.parametrize("kind", sorted(set(public_classes()), key=lambda kind: kind.__name__))
def test_an_object_shows_what_it_holds(kind):
    """No address: two runs print the same."""
    if kind is SequenceLayout:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        is_layer = kind.__name__.endswith("BERTAttention")
        make = OBJECTS.get(kind.__name__, (lambda: kind(16, 2)) if is_layer else kind)
        shown = repr(make())
    finally:
        if kind is SequenceLayout:
            dist.destroy_process_group()
    assert kind.__name__ in shown
    assert " at 0x" not in shown

"""The call of flash-attn, which stands in here as its documentation describes it."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_calls import TK, TQ, draw
from helpers.documentation_stand_ins import flash_attention

from ropewalk import Rope, attention
from ropewalk.ops.attention.api import make_call
from ropewalk.ops.attention.libraries import flash


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4, (3, 5), (-1, 2), (6, -1), (5, 0)], ids=str)
def test_windows_are_those_of_flash_attn(monkeypatch, window, causal, version):
    given = []

    def stand_in(*tensors, window_size=(), **keywords):
        given.extend(window_size)
        left, right = (-1 if x is None else x for x in window_size or (-1, -1))
        return flash_attention(*tensors, window_size=(left, right), **keywords)

    monkeypatch.setattr(flash, "flash_version", lambda device: version)
    monkeypatch.setattr(flash, "load_flash", lambda version: (stand_in, None))
    tensors = draw(torch.device("cpu"), queries=TQ - 4, keys=TK)
    if isinstance(window, int) or (window and window[0] >= 0):  # nothing attends the first keys
        left = window - 1 if isinstance(window, int) else window[0]
        for x in tensors[1:]:
            x[:, : max(0, TK - (TQ - 4) - left)] = torch.nan
    call = {"position": Rope(), "causal": causal, "window": window}
    out, _ = flash.Flash().attend(make_call(*tensors, **call))
    torch.testing.assert_close(out.transpose(1, 2), attention(*tensors, impl="reference", **call), rtol=1e-5, atol=1e-5)
    assert (-1 if version == 4 else None) not in given  # a side without a bound is None to 4, and −1 to others

"""One call of `apply_rope` for each thing that it can be asked, shared by the tests that look at it from outside."""

import torch

from helpers.rope_definition import random_tables, random_tensor

B, T, HQ, HK, D, ROWS = 2, 6, 4, 2, 16, 128

# What a call can ask for, by name. Tensors are made on the device under test: see `arguments`.
CALLS = {
    "plain": {},
    "q-alone": {"k": None},
    "interleaved-inverse": {"interleaved": True, "inverse": True},
    "partial": {"layout": "bhtd", "rotary_dim": 8, "rotary_offset": 4},
    "offset": {"positions": 100},
    "offsets": {"offsets": [5, 90]},
    "tokens": {"positions": [[3, 3, 1, 0, 127, 60]]},
    "outside": {"positions": [[0, 1, -1, 3, 128, 5]]},
    "packed": {"layout": "thd", "cu_seqlens": [0, 2, 2, 6], "positions": 7},
    "packed-tokens": {"layout": "thd", "positions": [5, 4, 3, 2, 1, 0]},
    "axes": {
        "positions": [[[0, 1, 2, 60, 4, 5]] * B, [[7, 7, 9, 3, 1, 0], [5, 6, 8, 8, 127, 2]], [[9, 8, 7, 6, 5, 4]] * B],
        "axes": [0, 0, 1, 2, 1, 2, 2, 0],
    },
    "axes-outside": {"positions": [[[0, 1, 2, 3, -1, 5]], [[3, 128, 1, 0, 2, 2]]], "axes": [0, 1] * 4},
    "packed-axes": {"layout": "thd", "positions": [[0, 1, 2, 3, 4, 5], [9, 9, 8, 1, 0, 3]], "axes": [1, 0] * 4},
    "per-token": {"rows": (B, T)},
    "heads-outside": {"rows": (ROWS, HQ), "k_heads": HQ, "positions": [[3, 3, 1, 0, 127, 60], [9, 8, 128, 2, -1, 0]]},
    "heads-per-token": {"layout": "bhtd", "rows": (B, T, HQ), "k_heads": HQ, "interleaved": True, "inverse": True},
    "heads-one-row": {"layout": "thd", "rows": (1, T, HQ), "k_heads": HQ, "rotary_dim": 12, "rotary_offset": 3},
    "blocks": {"pair_block": 8, "inverse": True},
    "blocks-partial": {"layout": "bhtd", "rotary_dim": 12, "rotary_offset": 3, "pair_block": 4},
    "blocks-axes": {
        "positions": [[[0, 1, 2, 60, 4, 5]], [[7, 7, 9, 3, 1, 0]]],
        "axes": [0, 0, 0, 0, 1, 1, 1, 1],
        "pair_block": 8,
    },
}


def inputs(layout="bthd", tokens=T, device="cpu", dtype=torch.float32, k_heads=HK):
    """q and k."""
    shapes = {"bthd": lambda h: (B, tokens, h), "bhtd": lambda h: (B, h, tokens), "thd": lambda h: (tokens, h)}[layout]
    return tuple(random_tensor(*shapes(heads), D, dtype=dtype, device=device) for heads in (HQ, k_heads))


def arguments(name, device, dtype=torch.float32):
    """(q, k, cos, sin) and the keywords of a call."""
    call = dict(CALLS[name])
    q, k = inputs(call.get("layout", "bthd"), device=device, dtype=dtype, k_heads=call.pop("k_heads", HK))
    tables = random_tables(*call.pop("rows", (ROWS,)), call.get("rotary_dim", D) // 2, device=device)
    for index in {"positions", "offsets", "cu_seqlens", "axes"} & {
        key for key, value in call.items() if isinstance(value, list)
    }:
        call[index] = torch.tensor(call[index], device=device)
    return (q, call.pop("k", k), *tables), call


def as_tuple(x):
    return (x,) if isinstance(x, torch.Tensor) else tuple(x)


def assert_same(actual, expected):
    for x, y in zip(as_tuple(actual), as_tuple(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, check_stride=True)

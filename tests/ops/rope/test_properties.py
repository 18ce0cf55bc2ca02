"""Properties that hold for all shapes and flags, on examples drawn at random."""

from __future__ import annotations

import torch
from helpers.rope_definition import check_rotation, plain, random_tables, random_tensor, rotate
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk import apply_rope, inverse_frequencies, rope_table
from ropewalk.testing import assert_close_to_truth

QUICKLY = settings(max_examples=10, deadline=None, derandomize=True, database=None)

flags = st.fixed_dictionaries({"interleaved": st.booleans(), "inverse": st.booleans()})


@st.composite
def rotations(draw):
    """Shapes, strides, positions and flags of one call."""
    head_dim = draw(st.integers(2, 20))
    half = draw(st.integers(1, head_dim // 2))
    return {
        "layout": draw(st.sampled_from(["bthd", "bhtd", "thd"])),
        "memory": draw(st.permutations(range(4))),
        "batch": draw(st.integers(1, 3)),
        "tokens": draw(st.integers(0, 6)),
        "n_heads": (draw(st.integers(1, 4)), draw(st.integers(0, 3))),
        "head_dim": head_dim,
        "half": half,
        "rotary_offset": draw(st.integers(0, head_dim - 2 * half)),
        "dtype": draw(st.sampled_from([torch.float16, torch.float32, torch.float64])),
        "table_dtype": draw(st.sampled_from([torch.float16, torch.float32])),
        "index_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "positions": draw(st.sampled_from(["none", "offset", "per row", "per token", "one row", "in the table"])),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(QUICKLY, max_examples=25)
@given(case=rotations(), flags=flags)
def test_every_call_equals_the_definition(impl, device, case, flags):
    torch.manual_seed(case["seed"])
    layout, kind, rows = case["layout"], case["positions"], 9
    batch, tokens = (1 if layout == "thd" else case["batch"]), case["tokens"]

    def make(heads):
        sizes = {"b": batch, "t": tokens, "h": heads, "d": case["head_dim"]}
        shape = [sizes[letter] for letter in "bthd"]
        order = case["memory"]
        x = random_tensor(*(shape[i] for i in order), dtype=case["dtype"], device=device)
        x = x.permute([order.index(i) for i in range(4)])
        return {"bthd": x, "bhtd": x.transpose(1, 2), "thd": x[0]}[layout]

    def indices(low, high, *shape):
        return torch.randint(low, high, shape).to(device, case["index_dtype"])

    cu_seqlens = None
    positions = {
        "none": lambda: None,
        "offset": lambda: 3,
        "per row": lambda: indices(-2, rows, batch),
        "per token": lambda: indices(-2, rows + 2, batch, tokens),
        "one row": lambda: indices(-2, rows + 2, 1, tokens),
        "in the table": lambda: indices(0, rows, batch, tokens),
    }[kind]()
    if layout == "thd":
        if isinstance(positions, torch.Tensor):
            positions = indices(-2, rows + 2, tokens)
        else:
            cuts = torch.randint(0, tokens + 1, (3,)).sort().values.tolist()
            cu_seqlens = torch.tensor([0, *cuts, tokens], dtype=case["index_dtype"], device=device)
    cos, sin = random_tables(rows, case["half"], dtype=case["table_dtype"], device=device)
    q, k = (make(heads) for heads in case["n_heads"])
    check_rotation(
        q,
        k if k.shape[layout.index("h")] else None,
        cos,
        sin,
        impl=impl,
        layout=layout,
        **{"offsets" if kind == "per row" and layout != "thd" else "positions": positions},
        cu_seqlens=cu_seqlens,
        rotary_offset=case["rotary_offset"],
        **flags,
    )


@QUICKLY
@given(half=st.integers(1, 20), flags=flags, seed=st.integers(0, 2**31))
def test_norms_are_preserved(impl, device, half, flags, seed):
    torch.manual_seed(seed)
    q = random_tensor(1, 4, 2, 2 * half, device=device)
    cos, sin = random_tables(4, half, dtype=torch.float64, device=device)
    (result,) = rotate(q, None, cos, sin, impl=impl, **flags)
    truth, baseline = q.cpu().double().norm(dim=-1), plain(q, cos, sin, **flags).norm(dim=-1)
    assert_close_to_truth(result.cpu().norm(dim=-1), truth, baseline)


@QUICKLY
@given(half=st.integers(1, 20), flags=flags, inplace=st.booleans(), seed=st.integers(0, 2**31))
def test_the_inverse_undoes(impl, device, half, flags, inplace, seed):
    torch.manual_seed(seed)
    q = random_tensor(2, 3, 2, 2 * half, device=device)
    cos, sin = random_tables(3, half, dtype=torch.float64, device=device)
    back = {**flags, "inverse": not flags["inverse"]}
    turned = apply_rope(q, None, cos, sin, impl=impl, **flags)
    result = apply_rope(turned, None, cos, sin, impl=impl, inplace=inplace, **back)
    baseline = plain(plain(q, cos, sin, **flags), cos, sin, **back)
    assert_close_to_truth(result.cpu(), q.cpu().double(), baseline)


@QUICKLY
@given(half=st.integers(1, 20), shift=st.integers(0, 60), flags=flags, seed=st.integers(0, 2**31))
def test_scores_depend_on_distances_alone(impl, device, half, shift, flags, seed):
    torch.manual_seed(seed)
    q, k = (random_tensor(1, 4, 1, 2 * half, dtype=torch.float64, device=device) for _ in range(2))
    inv_freq, _ = inverse_frequencies("default", 2 * half, 10000.0)
    angles = torch.arange(64, dtype=torch.float64)[:, None] * inv_freq.cpu()
    cos, sin = angles.cos().to(device), angles.sin().to(device)

    def scores(rotated):
        q, k = rotated
        return (q[:, :, 0] @ k[:, :, 0].mT).cpu()

    near = scores(rotate(q, k, cos, sin, impl=impl, **flags))
    far = scores(rotate(q, k, cos, sin, impl=impl, positions=shift, **flags))
    exact = scores([plain(x, cos, sin, **flags) for x in (q, k)])
    shifted = scores([plain(x, cos, sin, positions=shift, **flags) for x in (q, k)])
    assert_close_to_truth(far, near, shifted + (near - exact))


def test_angles_add_up(impl, device):
    """Turning by position 2 and then by position 3 is turning by position 5."""
    inv_freq = torch.tensor([1.0, 0.3, 0.01, 0.0], dtype=torch.float64, device=device)
    cos, sin = rope_table(6, inv_freq)
    q = random_tensor(1, 1, 2, 8, device=device)
    twice = apply_rope(apply_rope(q, None, cos, sin, positions=2, impl=impl), None, cos, sin, positions=3, impl=impl)
    angles = 5 * inv_freq.cpu()[None]
    truth = plain(q.double(), angles.cos(), angles.sin())
    baseline = plain(plain(q, cos, sin, positions=2), cos, sin, positions=3)
    assert_close_to_truth(twice.cpu(), truth, baseline)

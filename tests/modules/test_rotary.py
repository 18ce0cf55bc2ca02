"""The rotary modules: what their tables hold, how they grow, and what they survive."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from ropewalk import RotaryEmbedding, TritonRotary, apply_rope, inverse_frequencies, rope_table

DIM = 16
LONGROPE = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}


def make_qk(tokens, device, *, batch=2, heads=3, dim=DIM):
    generator = torch.Generator().manual_seed(tokens)
    q = torch.randn(batch, tokens, heads, dim, generator=generator)
    k = torch.randn(batch, tokens, 1, dim, generator=generator)
    return q.to(device), k.to(device)


def expected_table(rotary, rows):
    return rope_table(rows, rotary.inv_freq, attention_factor=rotary.attention_factor, device=rotary.cos.device)


def assert_tables_are_right(rotary, rows, device):
    for table, expected in zip((rotary.cos, rotary.sin), expected_table(rotary, rows), strict=True):
        assert table.dtype == torch.float32
        assert table.device.type == device.type
        assert torch.equal(table, expected)
    assert rotary.inv_freq.dtype == torch.float64
    assert rotary.inv_freq.device.type == "cpu"


def assert_rotates_like(rotated, q, k, cos, sin, **options):
    expected_q, expected_k = apply_rope(q, k, cos, sin, **options)
    assert torch.equal(rotated[0], expected_q)
    assert torch.equal(rotated[1], expected_k)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_forward_is_apply_rope_with_its_tables(layout, interleaved, device):
    rotary = RotaryEmbedding(DIM, layout=layout, interleaved=interleaved, device=device, scaling="yarn", factor=4.0,
                             original_max_position_embeddings=64)  # fmt: skip
    assert rotary.attention_factor > 1
    q, k = make_qk(20, device, dim=24)  # partial: 8 features pass through
    if layout == "bhtd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = expected_table(rotary, 200)
    options = {"layout": layout, "interleaved": interleaved}
    assert_rotates_like(rotary(q, k), q, k, cos, sin, **options)
    assert_rotates_like(rotary(q, k, positions=100), q, k, cos, sin, positions=100, **options)
    positions = torch.randint(0, 200, (2, 20), device=device)
    assert_rotates_like(rotary(q, k, positions), q, k, cos, sin, positions=positions, **options)
    assert torch.equal(rotary(q), apply_rope(q, None, cos, sin, **options))


def test_forward_rotates_packed_sequences(device):
    rotary = RotaryEmbedding(DIM, layout="thd", max_positions=16, device=device)
    q, k = (x[0] for x in make_qk(20, device))
    cos, sin = expected_table(rotary, 16)
    cu_seqlens = torch.tensor([0, 7, 7, 20], device=device)
    packed = rotary(q, k, cu_seqlens=cu_seqlens)
    assert_rotates_like(packed, q, k, cos, sin, cu_seqlens=cu_seqlens, layout="thd")
    positions = torch.arange(20, device=device) % 13
    assert_rotates_like(rotary(q, k, positions), q, k, cos, sin, positions=positions, layout="thd")
    assert rotary.cos.shape[0] == 16


def test_options_reach_apply_rope(device):
    q, k = make_qk(4, device)
    with pytest.raises(ValueError, match="nonsense"):
        RotaryEmbedding(DIM, impl="nonsense", device=device)(q, k)
    assert_rotates_like(
        RotaryEmbedding(DIM, impl="reference", device=device)(q, k),
        q,
        k,
        *rope_table(4, inverse_frequencies("default", DIM, 10_000.0)[0], device=device),
        impl="reference",
    )


@pytest.mark.parametrize("make", [lambda: RotaryEmbedding(DIM, max_positions=40), lambda: TritonRotary(DIM, 40)])
class TestTablesSurvive:
    @pytest.mark.parametrize(
        "convert",
        [
            lambda model: model.half(),
            lambda model: model.bfloat16(),
            lambda model: model.double(),
            lambda model: model.to(torch.bfloat16),
            lambda model: model.to(torch.zeros(1, dtype=torch.float16)),
            lambda model: model.half().float(),
        ],
    )
    def test_dtype_conversions(self, make, convert, device):
        model = nn.Sequential(nn.Linear(4, 4), make()).to(device)
        convert(model)
        assert_tables_are_right(model[1], 40, model[0].weight.device)

    def test_device_moves(self, make, device):
        rotary = make()
        for target in (device, torch.device("cpu"), device):
            assert rotary.to(target) is rotary
            assert_tables_are_right(rotary, 40, target)
        rotary.to(device, torch.float16)
        assert_tables_are_right(rotary, 40, device)

    def test_the_meta_device_and_to_empty(self, make, device):
        torch.use_deterministic_algorithms(True)  # uninitialised memory is then NaN
        try:
            with torch.device("meta"):
                rotary = make()
            assert rotary.cos.is_meta
            assert rotary.cos.shape == (40, DIM // 2)
            rotary.to_empty(device=device)
            assert_tables_are_right(rotary, 40, device)
            rotary.to_empty(device=device)
            assert_tables_are_right(rotary, 40, device)
            rotary.to("meta").to_empty(device=device)
            assert_tables_are_right(rotary, 40, device)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_the_default_device(self, make, device):
        with device:
            assert_tables_are_right(make(), 40, device)

    def test_nothing_is_saved_in_the_state_dict(self, make):
        rotary = make()
        assert rotary.state_dict() == {}
        rotary.load_state_dict({})
        assert list(rotary.named_buffers()) == []
        assert list(rotary.parameters()) == []

    def test_copies_and_pickles(self, make, device):
        rotary = make().to(device)
        saved = io.BytesIO()
        torch.save(rotary, saved)
        saved.seek(0)
        for again in (
            copy.deepcopy(rotary),
            pickle.loads(pickle.dumps(rotary)),
            torch.load(saved, weights_only=False),
        ):
            assert again.cos.data_ptr() != rotary.cos.data_ptr()
            assert_tables_are_right(again.half(), 40, device)


class TestGrowth:
    def test_at_least_doubles_and_never_shrinks(self, device):
        rotary = RotaryEmbedding(DIM, max_positions=10, device=device)
        for tokens, rows in ((10, 10), (11, 20), (15, 20), (20, 20), (50, 50), (51, 100), (3, 100)):
            q, k = make_qk(tokens, device)
            rotated = rotary(q, k)
            assert rotary.cos.shape[0] == rows
            assert_tables_are_right(rotary, rows, device)
            assert_rotates_like(rotated, q, k, *expected_table(rotary, tokens))

    def test_counts_an_offset(self, device):
        rotary = RotaryEmbedding(DIM, max_positions=10, device=device)
        q, k = make_qk(4, device)
        rotary(q, k, positions=6)
        assert rotary.cos.shape[0] == 10
        rotated = rotary(q, k, positions=7)
        assert rotary.cos.shape[0] == 20
        assert_rotates_like(rotated, q, k, *expected_table(rotary, 20), positions=7)

    def test_reads_positions_on_the_cpu(self):
        q, k = make_qk(4, "cpu")
        for where, rows in (
            ({"positions": torch.tensor([[0, 30, 2, 1], [5, 5, 5, 5]])}, 31),
            ({"positions": torch.tensor([[0, 30, 2, 1]], dtype=torch.int32)}, 31),
            ({"offsets": torch.tensor([3, 30])}, 34),
            ({"offsets": torch.tensor([3, 5])}, 10),
        ):
            rotary = RotaryEmbedding(DIM, max_positions=10)
            rotated = rotary(q, k, **where)
            assert rotary.cos.shape[0] == rows
            assert_rotates_like(rotated, q, k, *expected_table(rotary, rows), **where)

    def test_reads_packed_lengths_on_the_cpu(self):
        q, k = (x[0] for x in make_qk(40, "cpu"))
        for arguments, rows in (
            ({"cu_seqlens": torch.tensor([0, 5, 40])}, 35),
            ({"cu_seqlens": torch.tensor([0, 5, 40]), "positions": 3}, 38),
            ({"positions": torch.arange(40)}, 40),
            ({"positions": torch.arange(40) % 7}, 10),
        ):
            rotary = RotaryEmbedding(DIM, max_positions=10, layout="thd")
            rotated = rotary(q, k, **arguments)
            assert rotary.cos.shape[0] == rows
            assert_rotates_like(rotated, q, k, *expected_table(rotary, rows), layout="thd", **arguments)

    def test_never_waits_for_positions_on_a_device(self, device):
        if device.type == "cpu":
            pytest.skip("the values of a CPU tensor are read")
        rotary = RotaryEmbedding(DIM, max_positions=10, device=device)
        q, k = make_qk(4, device)
        positions = torch.tensor([[0, 9, 10, 30], [1, 2, 3, 4]], device=device)
        rotary(q, k, positions)
        torch.cuda.set_sync_debug_mode("error")
        try:
            rotated_q, _ = rotary(q, k, positions)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert rotary.cos.shape[0] == 10
        assert torch.equal(rotated_q.isnan().all(-1).all(-1), positions >= 10)
        rotary.reserve(31)
        assert_rotates_like(rotary(q, k, positions), q, k, *expected_table(rotary, 31), positions=positions)

    def test_reserve(self, device):
        rotary = RotaryEmbedding(DIM, max_positions=0, device=device)
        for length, rows in ((0, 0), (7, 7), (8, 14), (100, 100), (1, 100)):
            rotary.reserve(length)
            assert_tables_are_right(rotary, rows, device)

    def test_of_a_half_precision_module(self, device):
        rotary = RotaryEmbedding(DIM, max_positions=10, device=device).half()
        q, k = make_qk(30, device)
        rotary(q.half(), k.half())
        assert_tables_are_right(rotary, 30, device)

    def test_in_inference_mode_leaves_tables_that_can_train(self, device):
        rotary = RotaryEmbedding(DIM, max_positions=10, device=device)
        q, k = make_qk(30, device)
        with torch.inference_mode():
            rotary(q, k)
        assert rotary.cos.shape[0] == 30
        assert not rotary.cos.is_inference()
        q.requires_grad_()
        rotary(q, k)[0].sum().backward()
        assert q.grad is not None

    def test_of_no_tokens(self, device):
        rotary = RotaryEmbedding(DIM, max_positions=10, device=device)
        q, k = make_qk(0, device)
        assert rotary(q, k)[0].shape == (2, 0, 3, DIM)
        assert rotary(q, k, positions=torch.zeros(2, 0, dtype=torch.int64, device=device))[0].shape == (2, 0, 3, DIM)


def test_reserve_chooses_longrope_factors_and_unknown_lengths_keep_them(device):
    rotary = RotaryEmbedding(DIM, scaling="longrope", factor=2.0, max_positions=256, device=device, **LONGROPE)
    short = rotary.inv_freq
    rotary.reserve(65)
    long = rotary.inv_freq
    assert not torch.equal(long, short)
    assert_tables_are_right(rotary, 256, device)
    q, k = make_qk(4, device)
    if device.type != "cpu":
        rotary(q, k, torch.zeros(2, 4, dtype=torch.int64, device=device))
        assert torch.equal(rotary.inv_freq, long)
    rotary(q, k)
    assert torch.equal(rotary.inv_freq, short)
    assert_tables_are_right(rotary, 256, device)


class TestCompile:
    def compiled(self, rotary):
        torch._dynamo.reset()
        counter = CompileCounter()
        return torch.compile(rotary, backend=counter, fullgraph=True), counter

    def test_no_recompilation_per_length(self, device):
        rotary = RotaryEmbedding(DIM, max_positions=128, device=device)
        compiled, counter = self.compiled(rotary)
        for tokens in (5, 9, 17, 100, 128, 64):
            q, k = make_qk(tokens, device)
            assert_rotates_like(compiled(q, k), q, k, rotary.cos, rotary.sin)
        assert counter.frame_count == 2  # the first length, then any
        assert rotary.cos.shape[0] == 128

    def test_growth_is_right(self, device):
        rotary = RotaryEmbedding(DIM, max_positions=8, device=device)
        compiled, _ = self.compiled(rotary)
        for tokens, rows in ((5, 8), (9, 16), (40, 40), (12, 40)):
            q, k = make_qk(tokens, device)
            rotated = compiled(q, k)
            assert_tables_are_right(rotary, rows, device)
            assert_rotates_like(rotated, q, k, rotary.cos, rotary.sin)

    def test_positions_are_not_read(self, device):
        rotary = RotaryEmbedding(DIM, max_positions=8, device=device)
        compiled, _ = self.compiled(rotary)
        q, k = make_qk(4, device)
        positions = torch.tensor([[0, 7, 8, 30], [1, 2, 3, 4]], device=device)
        rotated_q, _ = compiled(q, k, positions)
        assert rotary.cos.shape[0] == 8
        assert torch.equal(rotated_q.isnan().all(-1).all(-1), positions >= 8)

    def test_dynamic_frequencies_are_right(self, device):
        options = {"scaling": "dynamic", "factor": 2.0, "max_position_embeddings": 8, "max_positions": 8}
        rotary, eager = (RotaryEmbedding(DIM, device=device, **options) for _ in range(2))
        compiled, _ = self.compiled(rotary)
        for tokens in (5, 9, 20, 10, 5):
            q, k = make_qk(tokens, device)
            for rotated, expected in zip(compiled(q, k), eager(q, k), strict=True):
                assert torch.equal(rotated, expected)
            assert torch.equal(rotary.inv_freq, eager.inv_freq)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dim": 7}, ValueError, "rotary_dim is 7, but must be a positive even integer"),
        ({"base": -1.0}, ValueError, r"base is -1\.0, but must be greater than 0"),
        ({"layout": "tbhd"}, ValueError, "layout is 'tbhd', but must be one of 'bthd', 'bhtd', 'thd'"),
        ({"max_positions": -1}, ValueError, "max_positions is -1, but must not be negative"),
        ({"scaling": "yaarn"}, ValueError, "'yaarn', but must be one of 'default'"),
        ({"scaling": "linear"}, TypeError, "factor was not passed, but is a required parameter of 'linear'"),
        ({"scaling": "dynamic", "factor": 2.0}, TypeError, "max_position_embeddings was not passed, but is a required"),
        ({"factor": 2.0}, TypeError, "factor is not a parameter of 'default'"),
        (
            {"scaling": "dynamic", "factor": 2.0, "max_position_embeddings": 8, "seq_len": 9},
            TypeError,
            "seq_len must not be passed",
        ),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        RotaryEmbedding(**{"dim": DIM, **options})


def test_bad_inputs_are_refused_before_anything_grows(device):
    rotary = RotaryEmbedding(DIM, max_positions=8, device=device)
    q, k = make_qk(20, device)
    with pytest.raises(ValueError, match="q has shape"):
        rotary(q[0], k[0])
    index = torch.arange(20, device=device)
    with pytest.raises(ValueError, match="offsets="):
        rotary(q, k, index)
    with pytest.raises(ValueError, match="offsets and positions"):
        rotary(q, k, 3, offsets=index[:2])
    with pytest.raises(TypeError, match="offsets is int"):
        rotary(q, k, offsets=3)
    assert rotary.cos.shape[0] == 8


@pytest.mark.parametrize("positions", [1.5, [0, 1, 2], True])
def test_positions_of_other_types_are_refused(positions):
    with pytest.raises(TypeError, match="a tensor of int32 or int64"):
        RotaryEmbedding(8)(torch.randn(1, 3, 1, 8), positions=positions)


def test_repr_has_the_scaling():
    rotary = RotaryEmbedding(DIM, scaling="linear", factor=2.0)
    assert repr(rotary) == (
        "RotaryEmbedding(16, base=10000.0, scaling='linear', factor=2.0, interleaved=False, layout='bthd', impl=None)"
    )

"""The rotation by the names of document 003, against complex numbers in float64."""

import cmath

import pytest
import torch

from ropewalk import apply_rotary_emb, precompute_freqs_cis, rope_pytorch, rope_triton
from ropewalk.compat import rope as compat_rope
from ropewalk.testing import assert_close_to_truth

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def turns(tokens, head_dim, theta, device):
    """e^(i·t·ω) from the definition, (T, D/2), complex128."""
    omega = torch.tensor([theta ** (-2 * i / head_dim) for i in range(head_dim // 2)], dtype=torch.float64)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * omega
    return torch.complex(angles.cos(), angles.sin()).to(device)


def rotate(x, freqs_cis):
    """Rotate (B, T, H, D) by complex numbers, in their precision."""
    real = x.to(freqs_cis.real.dtype)
    pairs = torch.complex(real[..., 0::2], real[..., 1::2]) * freqs_cis[:, None]
    return torch.stack((pairs.real, pairs.imag), dim=-1).flatten(-2)


def truth_and_baseline(x, theta=10000.0, back=False):
    exact = turns(x.shape[1], x.shape[-1], theta, x.device)
    exact = exact.conj().resolve_conj() if back else exact
    rounded = exact.to(torch.complex64)
    if x.dtype == torch.float64:
        rounded = rounded.to(torch.complex128)
    return rotate(x, exact), rotate(x, rounded).to(x.dtype)


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


@pytest.fixture(params=["rope_pytorch", "rope_triton"])
def rope(request, device):
    if request.param == "rope_triton" and device.type != "cuda":
        pytest.skip("rope_triton needs a GPU")
    return {"rope_pytorch": rope_pytorch, "rope_triton": rope_triton}[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k_heads", "head_dim"), [(128, 6, 64), (97, 2, 40), (1, 1, 2), (33, 3, 96)])
def test_rotates_as_complex_numbers_do(rope, dtype, tokens, k_heads, head_dim, device):
    q = random(2, tokens, 6, head_dim, dtype=dtype, device=device)
    k = random(2, tokens, k_heads, head_dim, dtype=dtype, device=device, seed=1)
    copies = q.clone(), k.clone()
    q_rotated, k_rotated = rope(q, k, tokens)
    for rotated, x in ((q_rotated, q), (k_rotated, k)):
        assert rotated.dtype == dtype
        truth, baseline = truth_and_baseline(x)
        assert_close_to_truth(rotated, truth, baseline)
    assert torch.equal(q, copies[0])
    assert torch.equal(k, copies[1])


def test_theta_is_the_base_of_the_frequencies(rope, device):
    q = random(1, 300, 2, 64, device=device)
    truth, baseline = truth_and_baseline(q, theta=500000.0)
    assert_close_to_truth(rope(q, q, 300, 500000.0)[0], truth, baseline)
    assert_close_to_truth(rope(q, q, 300, theta=500000)[1], truth, baseline)


def test_slices_of_one_projection_and_transposed_layouts(rope, device):
    qkv = random(2, 50, 3, 4, 64, device=device)
    q, k = qkv[:, :, 0], qkv[:, :, 1].transpose(1, 2).contiguous().transpose(1, 2)
    for rotated, x in zip(rope(q, k, 50), (q, k), strict=True):
        truth, baseline = truth_and_baseline(x)
        assert_close_to_truth(rotated, truth, baseline)


def test_no_tokens(rope, device):
    q, k = rope(torch.empty(2, 0, 4, 64, device=device), torch.empty(2, 0, 2, 64, device=device), 0)
    assert q.shape == (2, 0, 4, 64)
    assert k.shape == (2, 0, 2, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_is_the_rotation_back(rope, dtype, device):
    q = random(2, 37, 4, 64, dtype=dtype, device=device).requires_grad_()
    k = random(2, 37, 2, 64, dtype=dtype, device=device).requires_grad_()
    cotangents = [random(*x.shape, dtype=dtype, device=device, seed=2) for x in (q, k)]
    grads = torch.autograd.grad(rope(q, k, 37), (q, k), cotangents)
    for grad, cotangent in zip(grads, cotangents, strict=True):
        truth, baseline = truth_and_baseline(cotangent, back=True)
        assert_close_to_truth(grad, truth, baseline)


def test_gradcheck(rope, device):
    q = random(1, 5, 2, 4, dtype=torch.float64, device=device).requires_grad_()
    k = random(1, 5, 1, 4, dtype=torch.float64, device=device, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, 5), (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: rope(q, k, 5), (q, k))


def test_growing_and_shrinking_lengths_share_tables(device):
    for tokens in (3, 1500, 3, 1025, 1024):
        q = random(1, tokens, 1, 8, device=device)
        truth, baseline = truth_and_baseline(q)
        assert_close_to_truth(rope_pytorch(q, q, tokens)[0], truth, baseline)


def first_in_inference_mode(q, theta):
    with torch.inference_mode():
        rope_pytorch(q, q, q.shape[1], theta)


def first_under_a_transform(q, theta):
    torch.func.grad(lambda q: rope_pytorch(q, q, q.shape[1], theta)[0].sum())(q)
    torch.func.vmap(lambda q: rope_pytorch(q, q, q.shape[1], theta)[0])(q[None])


def first_on_fake_tensors(q, theta):
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(q.shape, device=q.device)
        rope_pytorch(fake, fake, q.shape[1], theta)


@pytest.mark.parametrize(
    ("first", "theta"),
    [(first_in_inference_mode, 11.0), (first_under_a_transform, 12.0), (first_on_fake_tensors, 13.0)],
)
def test_cached_tables_are_those_of_a_fresh_call(first, theta, device):
    q = random(1, 9, 2, 8, device=device).requires_grad_()
    first(q.detach(), theta)  # with a theta of its own, so the tables are new
    rotated, _ = rope_pytorch(q, q, 9, theta)
    truth, baseline = truth_and_baseline(q.detach(), theta=theta)
    assert type(rotated) is torch.Tensor
    assert_close_to_truth(rotated.detach(), truth, baseline)
    cotangent = random(1, 9, 2, 8, device=device, seed=3)
    rotated.backward(cotangent)
    truth, baseline = truth_and_baseline(cotangent, theta=theta, back=True)
    assert_close_to_truth(q.grad, truth, baseline)


def test_cached_tables_are_few(device):
    q = random(1, 2, 1, 4, device=device)
    for theta in range(100, 150):
        rope_pytorch(q, q, 2, theta)
    assert compat_rope._cached_tables.cache_info().currsize <= 8


def test_compiles_without_a_graph_break(rope, device):
    compiled = torch.compile(lambda q, k: rope(q, k, q.shape[1]), fullgraph=True, backend="aot_eager")
    for tokens in (16, 24, 33):
        q, k = random(2, tokens, 4, 32, device=device), random(2, tokens, 2, 32, device=device, seed=1)
        for actual, expected in zip(compiled(q, k), rope(q, k, tokens), strict=True):
            assert torch.equal(actual, expected)


def test_triton_refuses_cpu_tensors():
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="Inputs must be on CUDA device"):
        rope_triton(q, q, 4)


@pytest.mark.gpu
def test_triton_refuses_k_on_the_cpu(device):
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    q = torch.randn(1, 4, 2, 8, device=device)
    with pytest.raises(ValueError, match="Inputs must be on CUDA device, but k"):
        rope_triton(q, q.cpu(), 4)


@pytest.mark.parametrize("shape", [(2, 16, 5, 32), (1, 16, 4, 32), (2, 15, 4, 32), (2, 16, 4, 30), (16, 4, 32)])
def test_k_of_another_shape_is_refused(rope, shape, device):
    with pytest.raises(ValueError, match="Q and K must have same shape"):
        rope(torch.zeros(2, 16, 4, 32, device=device), torch.zeros(shape, device=device), 16)


def test_odd_head_dim_is_refused(rope, device):
    q = torch.zeros(1, 4, 2, 7, device=device)
    with pytest.raises(ValueError, match="Head dimension must be even"):
        rope(q, q, 4)
    with pytest.raises(ValueError, match="Head dimension must be even"):
        precompute_freqs_cis(7, 4)
    with pytest.raises(ValueError, match="Head dimension must be even"):
        apply_rotary_emb(q, torch.zeros(4, 3, dtype=torch.complex64, device=device))


@pytest.mark.parametrize("seq_len", [3, 5, 0])
def test_another_seq_len_is_refused(rope, seq_len, device):
    q = torch.zeros(1, 4, 2, 8, device=device)
    with pytest.raises(ValueError, match=f"seq_len is {seq_len}, but must be the number of tokens, 4"):
        rope(q, q, seq_len)


def test_q_without_a_batch_is_refused(rope, device):
    q = torch.zeros(4, 2, 8, device=device)
    with pytest.raises(ValueError, match=r"q has shape \(4, 2, 8\), but must be \(B, T, H, D\)"):
        rope(q, q, 4)


def test_dtypes_that_differ_or_do_not_turn_are_refused(rope, device):
    q = torch.zeros(1, 4, 2, 8, device=device)
    with pytest.raises(ValueError, match="dtype"):
        rope(q, q.half(), 4)
    with pytest.raises(TypeError, match="dtype"):
        rope(q.long(), q.long(), 4)


@pytest.mark.parametrize("theta", [10000.0, 100])
def test_precomputed_turns(theta, device):
    table = precompute_freqs_cis(64, 20001, theta, device=device)
    assert table.shape == (20001, 32)
    assert table.dtype == torch.complex64
    assert table.device.type == device.type
    for t in (0, 1, 10000, 20000):
        for i in (0, 1, 17, 31):
            turn = cmath.exp(1j * t * theta ** (-2 * i / 64))
            # One rounding to float32 of values up to 1, and float64's error in an angle of 20000 radians.
            assert abs(table[t, i].item() - turn) <= 2**0.5 * 2**-25 + 1e-11


def test_precomputed_turns_are_on_the_default_device():
    assert precompute_freqs_cis(8, 4).device == torch.get_default_device()
    with torch.device("meta"):
        assert precompute_freqs_cis(8, 4).device.type == "meta"
    assert precompute_freqs_cis(8, 4, device="cpu").device.type == "cpu"


@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_rotary_emb_uses_the_first_rows(dtype, device):
    x = random(2, 37, 3, 40, dtype=dtype, device=device)
    rotated = apply_rotary_emb(x, precompute_freqs_cis(40, 64, device=device))
    truth, baseline = truth_and_baseline(x)
    assert rotated.dtype == dtype
    assert_close_to_truth(rotated, truth, baseline)


def test_apply_rotary_emb_takes_any_complex_table(device):
    x = random(2, 16, 3, 8, dtype=torch.float64, device=device)
    table = turns(16, 8, 10000.0, device)
    rotated = apply_rotary_emb(x, table)
    assert_close_to_truth(rotated, rotate(x, table), rotate(x, table))
    # .conj() only sets a flag; a transposed table has other strides.
    assert_close_to_truth(apply_rotary_emb(rotated, table.conj()), x, rotate(rotate(x, table), table.conj()))
    transposed = table.T.contiguous().T
    assert torch.equal(apply_rotary_emb(x, transposed), rotated)


def test_apply_rotary_emb_moves_the_table(device):
    x = random(1, 8, 2, 8, device=device)
    truth, baseline = truth_and_baseline(x)
    rotated = apply_rotary_emb(x, precompute_freqs_cis(8, 8, device="cpu"))
    assert rotated.device == x.device
    assert_close_to_truth(rotated, truth, baseline)


def test_apply_rotary_emb_gradient(device):
    x = random(1, 5, 2, 4, dtype=torch.float64, device=device).requires_grad_()
    table = precompute_freqs_cis(4, 5, device=device)
    assert torch.autograd.gradcheck(lambda x: apply_rotary_emb(x, table), (x,))


def test_apply_rotary_emb_refuses_what_does_not_fit():
    x = torch.zeros(1, 8, 2, 8)
    table = precompute_freqs_cis(8, 8, device="cpu")
    with pytest.raises(ValueError, match="freqs_cis has 7 rows, but must have one for each of x's 8 tokens"):
        apply_rotary_emb(x, table[:7])
    with pytest.raises(ValueError, match=r"freqs_cis has shape \(8, 3\), but must be \(n, 4\)"):
        apply_rotary_emb(x, table[:, :3])
    with pytest.raises(ValueError, match=r"freqs_cis has shape \(8, 1, 4\)"):
        apply_rotary_emb(x, table[:, None])
    with pytest.raises(ValueError, match=r"x has shape \(8, 2, 8\), but must be \(B, T, H, D\)"):
        apply_rotary_emb(x[0], table)
    with pytest.raises(TypeError, match="must be complex"):
        apply_rotary_emb(x, table.real)
    with pytest.raises(ValueError, match="freqs_cis requires grad"):
        apply_rotary_emb(x, table.clone().requires_grad_())

"""Rotate queries and keys: by the names of Ropewalk's API document, and by `apply_rope`, which can do more.

python examples/rope_api.py
"""

import torch

from ropewalk import (
    apply_rope,
    apply_rotary_emb,
    inverse_frequencies,
    mrope_axes,
    precompute_freqs_cis,
    rope_pytorch,
    rope_table,
    rope_triton,
)

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
B, T, HQ, HK, D = 2, 128, 8, 2, 64
q = torch.randn(B, T, HQ, D, device=device)
k = torch.randn(B, T, HK, D, device=device)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"{(a - b).abs().max().item():.1e}"


print(f"q {tuple(q.shape)} and k {tuple(k.shape)} on {device}\n")

print("By the names of the document (interleaved pairs, positions by index):")
q_rotated, k_rotated = rope_pytorch(q, k, T)
print(
    f"  rope_pytorch: lengths of the features changed by {largest_difference(q.norm(dim=-1), q_rotated.norm(dim=-1))}"
)
if device.type == "cuda":
    q_triton, _ = rope_triton(q, k, T)
    print(f"  rope_triton: differs from rope_pytorch by {largest_difference(q_triton, q_rotated)}")
else:
    print("  rope_triton: not run, it needs a GPU and there is none here")
freqs_cis = precompute_freqs_cis(D, T, device=device)
q_complex = apply_rotary_emb(q, freqs_cis)
print(f"  apply_rotary_emb: differs from rope_pytorch by {largest_difference(q_complex, q_rotated)}")
q_back = apply_rotary_emb(q_complex, freqs_cis.conj())
print(f"  apply_rotary_emb with the conjugate: back at q but for {largest_difference(q_back, q)}\n")

print("By apply_rope, the default implementation on the device:")
inv_freq, _ = inverse_frequencies("default", rotary_dim=D, base=10000.0)
cos, sin = rope_table(T + 1, inv_freq, device=device)
q_interleaved, _ = apply_rope(q, k, cos, sin, interleaved=True)
print(f"  interleaved: differs from rope_pytorch by {largest_difference(q_interleaved, q_rotated)}")
_, k_half = apply_rope(q, k, cos, sin)
print("  half-split pairs, those of Llama and GPT-NeoX: the default")
k_last = apply_rope(k[:, -1:], None, cos, sin, positions=T - 1)
print(f"  one token at position {T - 1}, as in decoding: differs by {largest_difference(k_last, k_half[:, -1:])}")

# Scores depend on distances alone: everything one position later leaves them as they are.
q_later, k_later = apply_rope(q, k, cos, sin, positions=1, interleaved=True)
before = torch.einsum("bmhd,bnhd->bhmn", q_rotated[:, :, :HK], k_rotated)
after = torch.einsum("bmhd,bnhd->bhmn", q_later[:, :, :HK], k_later)
print(f"  all positions one later: scores differ by {largest_difference(before, after)}")

q.requires_grad_()
cotangent = torch.randn_like(q)
apply_rope(q, None, cos, sin).backward(cotangent)
turned_back = apply_rope(cotangent, None, cos, sin, inverse=True)
print(f"  the gradient is the inverse rotation: differs by {largest_difference(q.grad, turned_back)}")

# An image's tokens have three positions each (multimodal RoPE): time, height and width. Text has the same on all axes.
frame = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(8), torch.arange(8), indexing="ij")).flatten(1)
positions = frame[:, None].to(device)  # (3, 1, T)
axes = mrope_axes([8, 12, 12]).to(device)  # the axis of each of the 32 pairs
q_image, k_image = apply_rope(q, k, cos, sin, positions=positions, axes=axes)
by_index = torch.arange(T, device=device).expand(3, 1, T)
q_text = apply_rope(q, None, cos, sin, positions=by_index, axes=axes)
q_by_index = apply_rope(q, None, cos, sin)
print(f"  three axes, equal as for text: differ from one axis by {largest_difference(q_text, q_by_index)}")

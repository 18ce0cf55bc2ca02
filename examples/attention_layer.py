"""An attention layer with rotary position embedding: masks, causal order, and training.

python examples/attention_layer.py
"""

import torch

from ropewalk import RoPEAttention

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
B, T = 2, 32
layer = RoPEAttention(d_model=64, n_heads=4, dropout=0.0).to(device)
x = torch.randn(B, T, 64, device=device)
print(f"{layer}\non {device}, x {tuple(x.shape)}")
if device.type == "cpu":
    print("No GPU here, so the rotation runs in plain PyTorch instead of Triton.")

with torch.no_grad():
    causal = layer(x, causal=True)
    lower = torch.ones(T, T, device=device).tril()
    by_mask = layer(x, lower[None, None])
    print(f"\ncausal=True and a triangular mask: differ by {(causal - by_mask).abs().max().item():.1e}")

    changed = x.clone()
    changed[:, T // 2 :] = 0
    past = (layer(changed, causal=True) - causal)[:, : T // 2].abs().max().item()
    print(f"the second half of the text changed: the first half's outputs changed by {past:.1e}")

    # The second text has 20 tokens; where it ends, no query may attend and no key be attended.
    is_token = torch.arange(T, device=device) < torch.tensor([[T], [20]], device=device)
    mask = is_token[:, :, None] & is_token[:, None, :]  # (B, T, T)
    padded = layer(x, mask, causal=True)
    rest_is_bias = (padded[1, 20:] - layer.out_proj.bias).abs().max().item()
    print(f"padding: finite is {bool(padded.isfinite().all())}; rows that attend nothing: {rest_is_bias:.1e} + bias")

# A task that needs positions: repeat what stood 3 tokens before.
optimiser = torch.optim.Adam(layer.parameters(), lr=3e-3)
print("\nlearning to repeat the input of 3 tokens before:")
for step in range(301):
    x = torch.randn(16, T, 64, device=device)
    loss = (layer(x, causal=True)[:, 3:] - x[:, :-3]).square().mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 100 == 0:
        print(f"  step {step:3}: mean squared error {loss.item():.3f}")

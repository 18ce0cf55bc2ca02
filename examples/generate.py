"""A small language model: trained on packed texts, then it generates from padded prompts over 8-bit pages of keys.

python examples/generate.py
"""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from ropewalk import Rope, append_kv, attention, inverse_frequencies, rope_table

VOCABULARY, H, D = 12, 4, 16
PAGE_SIZE = 16
PERIOD = 3  # a text repeats its first 3 tokens for ever
ROPE = Rope()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)


class Model(nn.Module):
    """One layer of attention; `attend` says how q, k and v of shape (..., H, D) attend."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, H * D)
        self.qkv = nn.Linear(H * D, 3 * H * D)
        self.logits = nn.Linear(H * D, VOCABULARY)

    def forward(self, tokens, attend):
        q, k, v = self.qkv(self.embedding(tokens)).unflatten(-1, (3 * H, D)).chunk(3, dim=-2)
        return self.logits(attend(q, k, v).flatten(-2))


class Cache:
    """The rotated keys and the values of all tokens so far, as int8 in pages, with memory for more of them."""

    def __init__(self, key_starts, capacity):
        rows = len(key_starts)
        pages = rows * capacity // PAGE_SIZE
        self.key_starts, self.length = key_starts, 0
        self.k, self.v = torch.zeros(2, pages, PAGE_SIZE, H, D, dtype=torch.int8, device=device)
        # What no token was written to is NaN.
        self.k_scale, self.v_scale = torch.full((2, pages, PAGE_SIZE, H), torch.nan, device=device)
        self.block_table = torch.randperm(pages, device=device).view(rows, -1)
        self.cos, self.sin = rope_table(capacity, inverse_frequencies("default", D, ROPE.base)[0], device=device)

    def __call__(self, q, k, v):
        """Keep k and v, and attend to all that is kept."""
        first, self.length = self.length, self.length + q.shape[1]
        index = torch.arange(first, self.length, device=device)
        slots = self.block_table[:, index // PAGE_SIZE] * PAGE_SIZE + index % PAGE_SIZE
        positions = (index - self.key_starts[:, None]).clamp(min=0)
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        append_kv(
            k.flatten(0, 1),
            v.flatten(0, 1),
            self.k,
            self.v,
            slots.flatten(),
            cos=self.cos,
            sin=self.sin,
            positions=positions.flatten(),
            **scales,
        )
        return attention(
            q,
            self.k,
            self.v,
            position=ROPE,
            causal=True,
            keys_rotated=True,
            key_starts=self.key_starts,
            key_lengths=torch.full_like(self.key_starts, self.length),
            query_starts=torch.full_like(self.key_starts, first),
            block_table=self.block_table,
            **scales,
        )


def draw_texts(lengths):
    return [torch.randint(VOCABULARY, (PERIOD,), device=device).repeat(n // PERIOD + 1)[:n] for n in lengths]


# Training: texts of many lengths in one row, nothing padded, and no text sees another.
model = Model().to(device)
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
print(f"on {device}; training on 16 packed texts a step:")
for step in range(201):
    texts = draw_texts(torch.randint(5, 30, (16,)).tolist())
    cu_seqlens = torch.tensor([0, *accumulate(len(text) for text in texts)], device=device)

    def attend(q, k, v, cu_seqlens=cu_seqlens):
        return attention(q, k, v, position=ROPE, causal=True, layout="thd", cu_seqlens_q=cu_seqlens)

    # What a text's last token is followed by belongs to another text, and its first 3 tokens are anything.
    targets = torch.cat([F.pad(text[PERIOD:], (PERIOD - 1, 1), value=-100) for text in texts])
    loss = F.cross_entropy(model(torch.cat(texts), attend), targets)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 100 == 0:
        print(f"  step {step:3}: loss {loss.item():.3f}")

with torch.no_grad():
    packed = model(torch.cat(texts), attend).split([len(text) for text in texts])
    alone = [model(text[None], lambda q, k, v: attention(q, k, v, position=ROPE, causal=True))[0] for text in texts]
    difference = max((a - b).abs().max().item() for a, b in zip(packed, alone, strict=True))
    print(f"packed texts and the same texts alone: logits differ by {difference:.1e}")

    # Generation: prompts end together, so they are padded on the left.
    prompts = draw_texts([7, 4, 12])
    longest = max(len(prompt) for prompt in prompts)
    key_starts = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    cache = Cache(key_starts, capacity=64)
    tokens = torch.stack([F.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    generated = tokens
    for _ in range(9):
        tokens = model(tokens, cache)[:, -1:].argmax(-1)  # the whole prompts first, then a token a step
        generated = torch.cat((generated, tokens), dim=1)

print("\ngenerating from a left-padded batch, over int8 pages of 16 keys:")
right = 0
for row, prompt, start in zip(generated.tolist(), prompts, key_starts.tolist(), strict=True):
    expected = (prompt[:PERIOD].tolist() * len(row))[: len(row) - start]
    right += row[start:] == expected
    print(f"  {' '.join(map(str, prompt.tolist())):>30} -> {' '.join(map(str, row[longest:]))}")
print(f"{right} of {len(prompts)} are continued as they began")

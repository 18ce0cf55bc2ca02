"""Train a small model on long text, with top-k blocks of keys for each block of queries, beside dense attention.

python examples/sparse_text.py

Each section of a text has one of a few topics, whose letters come in pairs. The pairs differ from text to text: to
predict the second letter, a model finds the pair in earlier sections of the topic. Which blocks of keys it may read is
chosen by the mean of their keys, as in MoBA.
"""

import torch
from torch import Tensor, nn

from ropewalk import BlockLists, Rope, attention

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = device.type == "cuda"
T, BLOCK, N_CHOSEN, STEPS = (8192, 128, 16, 400) if on_gpu else (512, 64, 3, 300)
TOPICS, LETTERS, D, HEADS = 4, 8, 64, 2  # letters of a topic


class Layer(nn.Module):
    """Causal attention with rotary embedding, and a residual; dense, or over chosen blocks."""

    def __init__(self, n_chosen: int | None) -> None:
        super().__init__()
        self.n_chosen = n_chosen
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        """Attend from x (B, T, D), and add."""
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, D // HEADS)).unbind(2)
        blocks = None
        if self.n_chosen is not None:
            blocks = BlockLists.mean_pooled(q, k, self.n_chosen, block_q=BLOCK, block_k=BLOCK)
        return x + self.out(attention(q, k, v, position=Rope(rotary_dim=8), causal=True, blocks=blocks).flatten(2))


def draw_text(generator: torch.Generator) -> Tensor:
    """Return text (1, T): sections of a block, whose pairs of letters are a first letter and what follows it here."""
    follows = torch.stack([torch.randperm(LETTERS, generator=generator) for _ in range(TOPICS)])
    topics = torch.randint(TOPICS, (T // BLOCK, 1), generator=generator)
    first = torch.randint(LETTERS, (T // BLOCK, BLOCK // 2), generator=generator)
    pairs = torch.stack((first, follows[topics, first]), -1).flatten(1)
    return (pairs + topics * LETTERS).view(1, T).to(device)


class Model(nn.Module):
    """A layer over letters, each of which knows the one before it."""

    def __init__(self, n_chosen: int | None) -> None:
        super().__init__()
        n_letters = TOPICS * LETTERS
        self.letter, self.before = nn.Embedding(n_letters, D), nn.Embedding(n_letters, D)
        self.layer, self.head = Layer(n_chosen), nn.Linear(D, n_letters)

    def forward(self, text: Tensor) -> Tensor:
        """Return logits (1, T, letters)."""
        return self.head(self.layer(self.letter(text) + self.before(text.roll(1, 1))))


def train(n_chosen: int | None) -> tuple[float, float]:
    """Train two layers, and return the mean losses of the first and the last tenth of steps."""
    torch.manual_seed(0)
    model = Model(n_chosen).to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        text = draw_text(generator)
        logits = model(text)[0, 0::2]  # at the first letter of each pair
        loss = nn.functional.cross_entropy(logits, text[0, 1::2])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    tenth = max(STEPS // 10, 1)
    first, last = (torch.stack(part).mean().item() for part in (losses[:tenth], losses[-tenth:]))
    return first, last


print(f"{T} tokens, {N_CHOSEN} of {T // BLOCK} blocks of {BLOCK}, on {device}")
for name, n_chosen in (("dense", None), ("top-k blocks", N_CHOSEN)):
    first, last = train(n_chosen)
    print(f"{name}: loss {first:.3f} at first, {last:.3f} at last")

"""Train a small Llama-shaped model whose sequences are shared by all processes, with FSDP2.

    torchrun --nproc-per-node 2 examples/context_parallel.py            # gloo on a CPU, NCCL on GPUs
    torchrun --nproc-per-node 2 examples/context_parallel.py --steps 50

The first rank prints the loss of each step. One process (--nproc-per-node 1) prints the same losses, up to roundings.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ropewalk import Rope, attention
from ropewalk.parallel import SequenceLayout, context_parallel, shard_sequence

VOCABULARY, WIDTH, HEADS, KEY_HEADS, HEAD_DIM = 64, 64, 4, 2, 16


class Layer(nn.Module):
    """Attention with grouped heads and RoPE, and a gated MLP, each after an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_of_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, T, WIDTH) with both added."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KEY_HEADS, KEY_HEADS], dim=2)
        x = x + self.out(attention(q, k, v, position=Rope(), causal=True).flatten(2))
        gate, up = self.up(self.norm_of_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def make_model() -> nn.Sequential:
    """Return a model of two layers, with the same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Layer(), Layer(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    )


def main() -> None:
    """Train, and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=250, help="of a sequence; they need not divide by the processes")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    layout = SequenceLayout(mesh, arguments.tokens)
    model = make_model().to(device)
    for layer in model[1:3]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(arguments.steps):
        # Text that repeats itself, so that there is something to learn.
        period = torch.randint(VOCABULARY, (2, 25), generator=generator)
        text = period.repeat(1, arguments.tokens // 25 + 1)[:, : arguments.tokens + 1].to(device)
        tokens, labels = text[:, :-1], text[:, 1:]  # labels are shifted before they are sharded
        tokens, labels = shard_sequence(tokens, layout), shard_sequence(labels, layout)
        labels = labels.masked_fill(~layout.valid, -100)
        with context_parallel(layout):
            logits = model(tokens)
        count = 2 * arguments.tokens
        total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
        (total / count * layout.size).backward()  # FSDP averages over the ranks
        optimizer.step()
        optimizer.zero_grad()
        loss = total.detach() / count
        dist.all_reduce(loss)
        if layout.rank == 0:
            print(f"step {step}: loss {float(loss):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

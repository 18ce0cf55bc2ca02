r"""Train a small Llama-shaped model whose sequences are shared by all processes, with FSDP2.

    torchrun --nproc-per-node 2 examples/context_parallel.py            # gloo on a CPU, NCCL on GPUs
    torchrun --nproc-per-node 2 examples/context_parallel.py --steps 50
    torchrun --nproc-per-node 2 examples/context_parallel.py --tokens 65536 --batch 1 --width 4096 --heads 32 \
        --key-heads 8 --layers 4 --dtype bfloat16                        # layers of Llama 3 8B, on two GPUs

The first rank prints the loss of each step, and at last how many tokens a second were trained on. One process
(--nproc-per-node 1) prints the same losses, up to roundings.
"""

import argparse
import gc
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ropewalk import Rope, attention
from ropewalk.parallel import SequenceLayout, context_parallel, shard_sequence

VOCABULARY, PERIOD = 64, 25


class Layer(nn.Module):
    """Attention with grouped heads and RoPE, and a gated MLP, each after an RMS norm."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.head_dim = heads, key_heads, width // heads
        inner = 7 * width // 2
        self.norm, self.norm_of_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * key_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (B, T, width) with both added."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.key_heads, self.key_heads], dim=2)
        x = x + self.out(attention(q, k, v, position=Rope(), causal=True).flatten(2))
        gate, up = self.up(self.norm_of_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def make_model(arguments: argparse.Namespace) -> nn.Sequential:
    """Return a model with the same weights in each process."""
    torch.manual_seed(0)
    width = arguments.width
    layers = [Layer(width, arguments.heads, arguments.key_heads) for _ in range(arguments.layers)]
    head = nn.Linear(width, VOCABULARY, bias=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *layers, nn.RMSNorm(width), head)


def read_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=250, help="of a sequence; they need not divide by the processes")
    parser.add_argument("--batch", type=int, default=2, help="sequences")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def main() -> None:
    """Train, and print the losses."""
    arguments = read_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    layout = SequenceLayout(mesh, arguments.tokens)
    model = make_model(arguments).to(device, getattr(torch, arguments.dtype))
    for layer in model[1:-2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    generator = torch.Generator().manual_seed(1)
    count = arguments.batch * arguments.tokens
    started = 0.0
    for step in range(arguments.steps):
        if step == 1:  # the first step builds and loads
            started = time.perf_counter()
        # Text that repeats itself, so that there is something to learn.
        period = torch.randint(VOCABULARY, (arguments.batch, PERIOD), generator=generator)
        text = period.repeat(1, arguments.tokens // PERIOD + 1)[:, : arguments.tokens + 1].to(device)
        tokens, labels = text[:, :-1], text[:, 1:]  # labels are shifted before they are sharded
        tokens, labels = shard_sequence(tokens, layout), shard_sequence(labels, layout)
        labels = labels.masked_fill(~layout.valid, -100)
        with context_parallel(layout):
            logits = model(tokens)
            total = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
            (total / count * layout.size).backward()  # FSDP averages over the ranks
        optimizer.step()
        optimizer.zero_grad()
        loss = total.detach() / count
        dist.all_reduce(loss)
        if layout.rank == 0:
            print(f"step {step}: loss {float(loss):.6f}", flush=True)
    if layout.rank == 0 and arguments.steps > 1:
        speed = (arguments.steps - 1) * count / (time.perf_counter() - started)
        print(f"{speed:,.0f} tokens/s by {layout.size} processes on {device}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    gc.collect()  # ends gloo's threads: one that lets go of a tensor while Python shuts down would abort the process

"""A Llama-shaped model under others' engines, with a shard of the tokens, beside one process: gradients in float64.

`run_two` and `run_four` run in so many processes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointError, checkpoint

from ropewalk import Rope, attention
from ropewalk.parallel import SequenceLayout, context_parallel, context_parallel_attention, shard_sequence

T, H, K, D, VOCABULARY = 22, 4, 2, 8, 31
ROWS = 4  # of the whole batch
RTOL = 1e-11


class Layer(nn.Module):
    """Attention with grouped heads and RoPE, by shards of `layout` where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H * D)
        self.q, self.k, self.v = (nn.Linear(H * D, heads * D, bias=False) for heads in (H, K, K))
        self.out = nn.Linear(H * D, H * D, bias=False)
        self.layout: SequenceLayout | None = None
        self.method: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        # −1: under tensor parallelism a rank has some of the heads.
        q, k, v = (project(y).unflatten(-1, (-1, D)) for project in (self.q, self.k, self.v))
        if self.layout is None:
            out = attention(q, k, v, position=Rope(), causal=True)
        else:
            out = context_parallel_attention(
                q, k, v, layout=self.layout, method=self.method, position=Rope(), causal=True
            )
        total: Tensor = x + self.out(out.flatten(2))
        return total


class Model(nn.Module):
    """Two layers between a table and a head, the same on each rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(VOCABULARY, H * D)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(H * D, VOCABULARY, bias=False)
        self.checkpoints = False
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        logits: Tensor = self.head(x)
        return logits


def _batch() -> tuple[Tensor, Tensor]:
    """Draw tokens and their labels, shifted; −100 where nothing is to be predicted, more often early."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCABULARY, (ROWS, T + 1), generator=generator)
    dropped = torch.rand(ROWS, T, generator=generator) > torch.linspace(0.2, 1, T)
    return text[:, :-1], text[:, 1:].masked_fill(dropped, -100)


def _sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def _expected() -> dict[str, Tensor]:
    """Return the gradients of one process with the whole batch."""
    model, (tokens, labels) = Model(), _batch()
    (_sum_of_losses(model(tokens), labels) / (labels != -100).sum()).backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def _full(x: Any) -> Tensor:
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole


def _compare(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compare the gradients; `group`: sum them there first, where no engine has."""
    expected = _expected()
    found = {name: x.grad for name, x in model.named_parameters()}
    assert len(found) == len(expected)
    for name, grad in found.items():
        name = name.replace("module.", "").replace("_orig_mod.", "")
        assert grad is not None, name
        whole = _full(grad).clone()
        if group is not None:
            dist.all_reduce(whole, group=group)
        size = float(expected[name].abs().max())
        torch.testing.assert_close(whole, expected[name], rtol=0, atol=RTOL * size, msg=lambda text, n=name: n + text)


def _shard_batch(layout: SequenceLayout, rows: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's tokens and labels, and the number of labels in the whole batch."""
    tokens, labels = _batch()
    count = (labels != -100).sum()
    mine = shard_sequence(labels[rows], layout).masked_fill(~layout.valid, -100)
    return shard_sequence(tokens[rows], layout), mine, count


def _backward(model: nn.Module, layout: SequenceLayout, scale: int, rows: slice = slice(None)) -> None:
    """Run forward and backward of a shard; `scale` undoes an engine's average."""
    tokens, labels, count = _shard_batch(layout, rows)
    with context_parallel(layout):
        (_sum_of_losses(model(tokens), labels) / count * scale).backward()


def _shard_layers(model: Model, mesh: DeviceMesh) -> None:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def check_ddp(rank: int) -> None:
    """DDP, twice: the second step has the same gradients, so nothing of the first one stays."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    layout = SequenceLayout(mesh["cp"], T)
    model = nn.parallel.DistributedDataParallel(Model())
    for _ in range(2):
        model.zero_grad()
        _backward(model, layout, layout.size)
        _compare(model)


def check_checkpointing_under_fsdp2(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layout, model = SequenceLayout(mesh, T), Model()
    model.checkpoints = True
    _shard_layers(model, mesh)
    _backward(model, layout, layout.size)
    _compare(model)


def check_checkpointing_raises_where_the_backward_left_the_context(rank: int) -> None:
    layout, model = SequenceLayout(dist.group.WORLD, T), Model()
    model.checkpoints = True
    tokens, labels, _ = _shard_batch(layout)
    with context_parallel(layout):
        loss = _sum_of_losses(model(tokens), labels)
    with pytest.raises(CheckpointError):
        loss.backward()


def check_compiled_layers(rank: int) -> None:
    """Whole layers, without a graph break, by both methods that are traced; under DDP too."""
    layout, model = SequenceLayout(dist.group.WORLD, T), Model()
    for layer, method in zip(model.layers, ("gather", "ulysses"), strict=True):
        layer.layout, layer.method = layout, method
        layer.compile(fullgraph=True, backend="aot_eager")
    wrapped = nn.parallel.DistributedDataParallel(model)
    tokens, labels, count = _shard_batch(layout)
    (_sum_of_losses(wrapped(tokens), labels) / count * layout.size).backward()
    _compare(model)


def check_transformers_trainer_on_accelerates_mesh(rank: int) -> None:
    """Train by transformers' Trainer, with the "cp" dimension of accelerate's mesh; weights as one process has them."""
    from accelerate import ParallelismConfig
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from ropewalk.integrations import huggingface

    huggingface.register()
    size = dist.get_world_size()
    mesh = ParallelismConfig(cp_size=size).build_device_mesh("cpu")
    layout = SequenceLayout(mesh["cp"], T)
    tokens, labels = _batch()
    sizes = {"hidden_size": H * D, "num_attention_heads": H, "num_key_value_heads": K, "head_dim": D}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": VOCABULARY}

    def make() -> Any:
        torch.manual_seed(3)
        return LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="ropewalk")).double()

    expected = make()
    optimiser = torch.optim.SGD(expected.parameters(), lr=0.1)
    for row in range(ROWS):
        logits = expected(tokens[row : row + 1], use_cache=False).logits
        (_sum_of_losses(logits, labels[row : row + 1]) / (labels[row] != -100).sum()).backward()
        optimiser.step()
        optimiser.zero_grad()

    class ContextParallelTrainer(Trainer):
        def get_train_dataloader(self) -> Any:  # the same rows on each rank, whole and in order
            return [{"input_ids": tokens[i : i + 1], "labels": labels[i : i + 1]} for i in range(ROWS)]

        def training_step(self, *arguments: Any, **keywords: Any) -> Tensor:
            with context_parallel(layout):  # the backward too, for models with checkpointing
                loss: Tensor = super().training_step(*arguments, **keywords)
            return loss

        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Tensor:
            mine = shard_sequence(inputs["labels"], layout).masked_fill(~layout.valid, -100)
            shard = shard_sequence(inputs["input_ids"], layout)
            logits = model(input_ids=shard, position_ids=layout.positions[None], use_cache=False).logits
            # DDP averages over the ranks.
            return _sum_of_losses(logits, mine) / (inputs["labels"] != -100).sum() * layout.size

    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in environment.items()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=ROWS, learning_rate=0.1, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0,
            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = ContextParallelTrainer(make(), arguments, train_dataset=[0] * ROWS)
        trainer.train()
    for found, wanted in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=RTOL * float(wanted.detach().abs().max()))


def check_fsdp2_on_dp_shard_and_cp(rank: int) -> None:
    """Rows are dealt to "dp_shard", tokens to "cp", weights to both, flattened: accelerate's and torchtitan's way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    layout, model = SequenceLayout(mesh["cp"], T), Model()
    _shard_layers(model, flat)
    half = ROWS // 2
    first = half * mesh.get_local_rank("dp_shard")
    _backward(model, layout, flat.size(), slice(first, first + half))
    _compare(model)


def check_replicas_of_shards(rank: int) -> None:
    """HSDP on torchtitan's mesh: weights are replicated over "dp_replicate" and sharded over the rest."""
    mesh = init_device_mesh("cpu", (2, 1, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    layout, model = SequenceLayout(mesh["cp"], T), Model()
    _shard_layers(model, mesh["dp_replicate", "cp"])  # as "dp_shard_cp", where "dp_shard" has one rank
    half = ROWS // 2
    first = half * mesh.get_local_rank("dp_replicate")
    _backward(model, layout, 4, slice(first, first + half))
    _compare(model)


def _split_heads(model: Model, mesh: DeviceMesh) -> None:
    plan: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v")}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**plan, "out": RowwiseParallel()})


def check_tensor_and_context_parallel(rank: int) -> None:
    """TP × CP on a (2, 2) mesh; what CP's ranks have is added up by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    layout, model = SequenceLayout(mesh["cp"], T), Model()
    _split_heads(model, mesh["tp"])
    _backward(model, layout, 1)
    _compare(model, mesh["cp"].get_group())


def check_torchtitans_mesh_of_four_dimensions(rank: int) -> None:
    """TP by heads, then FSDP2 over "dp_shard_cp" of what TP left, with context parallelism over "cp"."""
    mesh = init_device_mesh("cpu", (1, 1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    layout, model = SequenceLayout(mesh["cp"], T), Model()
    _split_heads(model, mesh["tp"])
    _shard_layers(model, flat)
    _backward(model, layout, layout.size)
    _compare(model)


FOUR = (
    check_fsdp2_on_dp_shard_and_cp,
    check_replicas_of_shards,
    check_tensor_and_context_parallel,
    check_torchtitans_mesh_of_four_dimensions,
)
TWO: tuple[Callable[[int], None], ...] = tuple(
    check for name, check in globals().items() if name.startswith("check_") and check not in FOUR
)


def run_two(rank: int) -> None:
    for check in TWO:
        torch.manual_seed(0)
        check(rank)


def run_four(rank: int) -> None:
    for check in FOUR:
        torch.manual_seed(0)
        check(rank)

"""All modules of the library, each with a call of a number of tokens; and what ranks of a group check of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import ropewalk
from ropewalk import QKNorm, RoPEAttention, RotaryEmbedding, TritonRotary, get_attention_class, mrope_axes
from ropewalk.modules.bert import BERTAttention

B, H, D = 2, 2, 16
ROWS = 16  # of tables at first
SHORT, LONG = 12, 40  # a length that the first rows hold, and one past them and past a scaling's length
LENGTHS = {"max_position_embeddings": ROWS, "original_max_position_embeddings": ROWS}


class Case(NamedTuple):
    """A module, and its call."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Tensor], Tensor]  # of x, (B, T, H·D)
    most_tokens: int = LONG


def _rotate(where: str, rotary: nn.Module, x: Tensor) -> Tensor:
    """Rotate, by positions that end with the number of tokens."""
    tokens, keywords = x.shape[1], {}
    if where == "start":
        x, keywords = x[:, 4:], {"positions": 4}
    elif where == "offsets":
        x, keywords = x[:, 4:], {"offsets": torch.tensor([4, 1], device=x.device)}
    elif where == "positions":
        keywords = {"positions": torch.arange(tokens, device=x.device).flip(0)[None]}
    elif where == "axes":
        keywords = {"positions": torch.arange(tokens, device=x.device).expand(3, 1, tokens)}
    q, k = rotary(x.unflatten(-1, (H, D)), x.unflatten(-1, (H, D))[:, :, :1], **keywords)
    return torch.cat((q, k), 2)


def _rotate_packed(rotary: nn.Module, x: Tensor) -> Tensor:
    bounds = torch.tensor([0, 3, x.shape[1]], device=x.device)
    rotated: Tensor = rotary(x[0].unflatten(-1, (H, D)), cu_seqlens=bounds)
    return rotated


def _rotate_heads(rotary: nn.Module, x: Tensor) -> Tensor:
    q = x.unflatten(-1, (H, D)).transpose(1, 2)
    return torch.cat(rotary(q, q), 1)


def _rotary(where: str = "index", **options: Any) -> Case:
    make = functools.partial(RotaryEmbedding, D, max_positions=ROWS, **options)
    return Case(make, functools.partial(_rotate, where))


_LONGROPE = {"short_factor": [1.0 + 0.1 * i for i in range(D // 2)], "long_factor": [2.0 + i for i in range(D // 2)]}
_DYNAMIC = {"scaling": "dynamic", "factor": 2.0, "max_position_embeddings": ROWS}
CASES = {
    **{f"rotary by {where}": _rotary(where) for where in ("index", "start", "offsets", "positions")},
    **{f"dynamic by {where}": _rotary(where, **_DYNAMIC) for where in ("index", "start", "offsets", "positions")},
    "longrope": _rotary(scaling="longrope", factor=2.0, original_max_position_embeddings=ROWS, **_LONGROPE),
    "rotary of axes": _rotary("axes", axes=mrope_axes([2, 3, 3])),
    "packed rotary": Case(lambda: RotaryEmbedding(D, max_positions=ROWS, layout="thd"), _rotate_packed),
    "TritonRotary": Case(lambda: TritonRotary(D, LONG), _rotate_heads),
    "RoPEAttention": Case(
        lambda: RoPEAttention(H * D, H, 0.0, norm=QKNorm(torch.ones(D), torch.ones(D))),
        lambda module, x: module(x, causal=True),
    ),
    **{
        name: Case(
            functools.partial(
                get_attention_class(name), H * D, H, max_position_embeddings=LONG if name == "standard" else ROWS
            ),
            lambda module, x: module(x)[0],
        )
        for name in ("none", "standard", "absolute", "rope", "exposb", "alibi", "t5", "rerope")
    },
}


def public_modules() -> set[type[nn.Module]]:
    """The library's modules that users make."""
    values = [getattr(ropewalk, name) for name in ropewalk.__all__]
    return {BERTAttention, *(x for x in values if inspect.isclass(x) and issubclass(x, nn.Module))}


def make(name: str) -> nn.Module:
    """A module in eval mode, the same each time."""
    torch.manual_seed(7)
    return CASES[name].make().eval()


def draw(tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """The same numbers for a number of tokens each time."""
    return torch.randn(B, tokens, H * D, generator=torch.Generator().manual_seed(tokens)).to(device)


def call(name: str, module: nn.Module, tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """A call's result."""
    return CASES[name].call(module, draw(tokens, device))


class Model(nn.Module):
    """A projection and one of the modules, for wrappers that need parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.project = nn.Linear(H * D, H * D)
        self.module = CASES[name].make()

    def forward(self, x: Tensor) -> Tensor:
        return CASES[self.name].call(self.module, self.project(x))


def make_model(name: str) -> Model:
    torch.manual_seed(7)
    return Model(name).eval()


def check_ranks_of_other_lengths(rank: int) -> None:
    """Each rank has its own rotation, whichever of them has seen more tokens, and DDP sends no tables."""
    for longer in (0, 1):
        for name in CASES:
            wrapped = nn.parallel.DistributedDataParallel(make_model(name))
            for tokens in (LONG, SHORT) if rank == longer else (SHORT, SHORT - 1):
                out = wrapped(draw(tokens))
                assert torch.equal(out, make_model(name)(draw(tokens))), (name, tokens)
            out.sum().backward()


def check_models_made_without_memory(rank: int) -> None:
    """FSDP on the meta device: its first kind materialises each module by `reset_parameters`."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in CASES:
        expected = make_model(name)
        with torch.device("meta"):
            first, second = Model(name).eval(), Model(name).eval()
        first = FullyShardedDataParallel(first, device_id=torch.device("cpu"), use_orig_params=True)
        fully_shard(second, mesh=mesh)
        second.to_empty(device="cpu")
        for wrapped, summon in ((first, FullyShardedDataParallel.summon_full_params), (second, None)):
            with torch.no_grad():
                if summon is not None:
                    with summon(wrapped):
                        wrapped.load_state_dict(expected.state_dict())
                else:
                    for mine, whole in zip(wrapped.parameters(), expected.parameters(), strict=True):
                        mine.to_local().copy_(whole.chunk(dist.get_world_size())[rank])
            for tokens in (LONG, SHORT) if rank else (SHORT, LONG):
                torch.testing.assert_close(wrapped(draw(tokens)), expected(draw(tokens)))


def check_whole_parameters_of_local_heads(rank: int) -> None:
    """A rank with some of the heads learns no whole parameter by them: its copies would diverge."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inputs = {"q_proj", "k_proj", "v_proj", "query", "key", "value"}
    for name, case in CASES.items():
        if not isinstance(case.make(), (RoPEAttention, BERTAttention)):
            continue
        for is_local in (True, False):
            expected, module = make(name), make(name)
            names = [key for key, _ in module.named_children() if key in inputs]
            plan: dict[str, Any] = {key: ColwiseParallel(use_local_output=is_local) for key in names}
            if name == "RoPEAttention":
                plan["out_proj"] = RowwiseParallel()
            parallelize_module(module, mesh, plan)
            wanted = call(name, expected, SHORT)
            wanted.square().sum().backward()
            if is_local and name in ("RoPEAttention", "alibi", "t5", "exposb"):
                with pytest.raises(ValueError, match="pass use_local_output=False to ColwiseParallel"):
                    call(name, module, SHORT)
                if name == "RoPEAttention":  # whose norm runs on any heads where it learns nothing
                    with torch.no_grad():
                        torch.testing.assert_close(call(name, module, SHORT), wanted)
                continue
            out = call(name, module, SHORT)
            out = out.full_tensor() if hasattr(out, "full_tensor") else _gathered(out, wanted)
            torch.testing.assert_close(out, wanted)
            out.square().sum().backward()
            for mine, other in zip(module.parameters(), expected.parameters(), strict=True):
                grad: Any = mine.grad
                torch.testing.assert_close(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, other.grad)


def _gathered(out: Tensor, wanted: Tensor) -> Tensor:
    """All features of local ones."""
    from torch.distributed.tensor import DTensor, Shard

    if out.shape == wanted.shape:
        return out
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole: Tensor = DTensor.from_local(out, mesh, [Shard(2)]).full_tensor()
    return whole


def run_all(rank: int) -> None:
    """Run each check above."""
    check_ranks_of_other_lengths(rank)
    check_models_made_without_memory(rank)
    check_whole_parameters_of_local_heads(rank)

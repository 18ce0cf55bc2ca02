"""Plans: the steps of one direction of a call, prepared once and run again with other addresses.

`Builder` hands a launcher tensors without memory, and keeps the launches and operators that it asks for. The launchers
are those that run at once without a plan, so both do the same. A plan's run allocates the results and one workspace,
reads addresses and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

from ropewalk import device as gpu
from ropewalk.ops.attention.backend import Result, Sizes, UnplannableError
from ropewalk.ops.attention.triton.bind import Launch, Number, bind, join, load_kernel
from ropewalk.ops.rope.call import RopeCall, RopeFlags
from ropewalk.ops.rope.triton import launch as rope_launch
from ropewalk.ops.rope.triton.kernel import Specialisation, compile_kernel

ALIGNMENT = 256  # bytes, of the tensors in a workspace, as PyTorch's allocator aligns them
_MISALIGNED = 15  # bits of an address: kernels are compiled for multiples of 16 bytes
MAX_STREAMS = 64  # whose memory a plan keeps


@functools.lru_cache
def _compile_rope(spec: Specialisation, device: int) -> Any:
    """Compile the rotation: a compiled kernel holds the function of the one device that it was loaded onto."""
    return compile_kernel(spec)


class Step(NamedTuple):
    """A bound launch, or the call of an operator on all tensors of a run."""

    launch: Launch | None
    operate: Callable[[Sequence[Tensor]], None] | None


class Plan:
    """The steps of one direction of a call."""

    def __init__(
        self,
        device: torch.device,
        results: Sequence[Tensor],
        workspace: int,
        per_stream: Sequence[Callable[..., Tensor]],
    ) -> None:
        self.device, self.index = device, device.index or 0
        self.results, self.workspace, self.per_stream = results, workspace, per_stream
        self.make_bytes = torch.empty(0, dtype=torch.uint8, device=device).new_empty
        on_gpu = device.type == "cuda"
        self.current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if on_gpu else _no_stream
        self.of_stream: dict[int, list[Tensor]] = {}
        self.launches: list[Launch] = []
        self.steps: list[Step] = []  # where some are operators

    def run(self, inputs: Sequence[Tensor], addresses: list[int], results: Sequence[Tensor]) -> list[Tensor]:
        """Run for tensors like those of the plan, at aligned addresses, and return the results.

        results: those of the plan, or views of them with the dimensions in another order. The current device is the
        plan's.
        """
        memory = list(map(torch.empty_like, results))
        stream = self.current_stream(self.index)
        if self.per_stream:
            memory += self.of_stream.get(stream) or self._find_memory(stream)
        if self.workspace:
            memory.append(self.make_bytes(self.workspace))
        addresses += map(Tensor.data_ptr, memory)
        for launch in self.launches:
            launch(addresses, stream)
        if self.steps:
            every = (*inputs, *memory)
            for step in self.steps:
                if step.launch:
                    step.launch(addresses, stream)
                elif step.operate:
                    step.operate(every)
        return memory

    def _find_memory(self, stream: int) -> list[Tensor]:
        """Find the memory of the current stream, and keep it."""
        if len(self.of_stream) >= MAX_STREAMS:
            self.of_stream.clear()
        memory = self.of_stream[stream] = [make(self.device) for make in self.per_stream]
        return memory


def _no_stream(index: int) -> int:
    return 0


class _OnlyViews(TorchDispatchMode):
    """Refuses every operator but allocations and views: tensors without memory would swallow its effect."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import its compiler, in seconds; no compiled code makes plans

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and not function.__name__.startswith(("empty", "new_empty")):
            raise UnplannableError(f"{function} is neither an allocation nor a view")
        return function(*args, **(kwargs or {}))


class Builder:
    """The `Steps` that make a plan."""

    def __init__(self, device: torch.device, longest: int | None = None) -> None:
        self.device = device
        self.longest_cache = longest  # the plan is for caches of all lengths that take as much memory as this one
        self.sizes: tuple[Callable[..., Any], Any, list[int]] | None = None  # what measures them, and what is measured
        self.slots: dict[int, tuple[int, int]] = {}  # by a twin's storage: its memory's index, and its offset there
        self.alive: list[Tensor] = []  # a storage that is freed could give its identity to another one
        self.n_slots = self.workspace = 0
        self.streams: list[tuple[Callable[..., Tensor], Tensor]] = []
        self.kept: list[Callable[[], Step]] = []  # each binds a step, once every tensor has its slot

    def input(self, x: Tensor | None) -> Tensor | None:
        """Return the twin of the next input, which has no memory."""
        if x is None:
            return None
        twin = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        self._give_slot(twin)
        return twin

    def launch(self, kernel: Any, n_programs: int, /, **arguments: Any) -> None:
        """Keep a launch, whose kernel is compiled and loaded here: it may not fit."""
        if gpu.is_interpreted():
            self.operate(_launch_kernel, kernel, n_programs, arguments)
            return
        plain = {name: int(value) if type(value) is Number else value for name, value in arguments.items()}
        compiled = kernel.warmup(grid=(int(n_programs),), **plain)
        load_kernel(compiled)
        self.kept.append(lambda: self._bind_launch(kernel, compiled, n_programs, arguments))

    def attempt(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that launches; keep none of its steps if a kernel does not fit."""
        n_kept = len(self.kept)
        try:
            return function(*arguments)
        except OutOfResources:
            del self.kept[n_kept:]
            raise

    def operate(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Keep the call of a function."""
        self.kept.append(lambda: self._bind_operator(function, arguments))

    def rope(
        self,
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        interleaved: bool,
        rotary_offset: int,
        pair_block: int | None,
        inverse: bool = False,
    ) -> Any:
        """Keep a rotation, and return its results' twins."""
        xs = (q,) if k is None else (q, k)
        flags = RopeFlags("bhtd", interleaved, inverse, rotary_offset=rotary_offset, pair_block=pair_block)
        call = RopeCall(cos, sin, None, None, 0, flags)
        outs = tuple(torch.empty_like(x) for x in xs)
        self.kept.append(lambda: self._bind_rope(xs, outs, call))
        return outs[0] if k is None else outs

    def per_stream(self, make: Callable[[torch.device], Tensor], like: Tensor) -> Tensor:
        """Return the twin of counters, int32, that `make` finds in each run."""
        twin = torch.empty(1, dtype=torch.int32, device="meta")
        self.streams.append((make, twin))
        return twin

    def device_of(self, like: Tensor) -> torch.device:
        """Return the plan's device."""
        return self.device

    def measure(self, function: Callable[..., Sizes], work: Any, *arguments: Any) -> Sizes:
        """Return numbers, those of a plan of many lengths with the index that each has among a run's addresses."""
        sizes = function(work, *arguments)
        if self.longest_cache is None:
            return sizes
        indices = [index for index, size in enumerate(sizes) if size is not None]
        self.sizes = function, work, indices
        numbers: list[Any] = list(sizes)
        for index in indices:
            numbers[index] = Number(sizes[index], self.n_slots)
            self.n_slots += 1
        return type(sizes)(*numbers)

    def longest(self, n_keys: int) -> int | None:
        """Return the longest cache that the plan is for; None if all have one length."""
        return self.longest_cache

    def follow(self, launcher: Callable[..., Any], *arguments: Any) -> Any:
        """Call a launcher that takes these steps."""
        with torch.no_grad(), _OnlyViews():
            return launcher(*arguments, self)

    def finish(self, results: Sequence[Tensor]) -> Plan:
        """Make the plan whose results are like these, which the launcher allocated."""
        specs = []
        for x in results:
            if _storage(x) in self.slots:
                raise UnplannableError("a result is an input, or shares memory with another result")
            self._give_slot(x)
            specs.append(self._template_of(x))
        for _, twin in self.streams:
            self._give_slot(twin)
        steps = [bind_step() for bind_step in self.kept]
        plan = Plan(self.device, specs, self.workspace, [make for make, _ in self.streams])
        if all(step.launch for step in steps):
            plan.launches = join([step.launch for step in steps if step.launch])
        else:
            plan.steps = steps
        return plan

    def _template_of(self, x: Tensor) -> Tensor:
        """Return a tensor without memory, of which `empty_like` makes a result: it parses no shape in each run."""
        template = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
        template.untyped_storage().resize_(0)
        if torch.empty_like(template).stride() != x.stride():
            raise UnplannableError("a result is not dense")
        return template

    def _give_slot(self, x: Tensor) -> None:
        """Give a twin the next slot; the workspace comes after all."""
        self.slots[_storage(x)] = (self.n_slots, 0)
        self.n_slots += 1
        self.alive.append(x)

    def is_input(self, x: Tensor) -> bool:
        """Say whether a twin has its memory already: whether it is an input, before `finish`."""
        return _storage(x) in self.slots

    def slot_of(self, x: Tensor) -> int:
        """Return the index of an input or a result."""
        return self.slots[_storage(x)][0]

    def address_of(self, x: Tensor) -> tuple[int, int]:
        """Return the index of a twin's memory among a run's, and its offset there in bytes."""
        slot = self.slots.get(_storage(x))
        if slot is None:  # the launcher allocated it, and does not return it
            slot = self.slots[_storage(x)] = (self.n_slots, self.workspace)
            # Memory of no byte, as that of calls without tokens, has an address too.
            self.workspace += -(-max(1, x.untyped_storage().nbytes()) // ALIGNMENT) * ALIGNMENT
            self.alive.append(x)
        index, start = slot
        offset = start + int(x.storage_offset()) * x.element_size()
        if offset & _MISALIGNED:
            raise UnplannableError("a view is misaligned")
        return index, offset

    def _bind_launch(self, kernel: Any, compiled: Any, n_programs: int, arguments: dict[str, Any]) -> Step:
        if self.sizes is not None and getattr(compiled.metadata, "tensordesc_meta", None):
            raise UnplannableError("descriptors of a cache that grows")
        parameters = kernel.signature.parameters
        values = [arguments.get(name, parameters[name].default) for name in kernel.arg_names]
        return Step(bind(compiled, n_programs, values, self.address_of), None)

    def _bind_rope(self, xs: tuple[Tensor, ...], outs: tuple[Tensor, ...], call: RopeCall) -> Step:
        launch = rope_launch.prepare(xs, call)
        if not isinstance(launch, rope_launch.Launch):
            raise UnplannableError("features that are not dense are rotated in copies")
        if gpu.is_interpreted():
            return self._bind_operator(_rotate, (launch, *xs, *outs, *call))
        k, k_out = (xs[1], outs[1]) if len(xs) == 2 else (0, 0)
        direction = -1 if call.flags.inverse else 1
        values = (xs[0], k, outs[0], k_out, call.cos, call.sin, 0, 0, None, call.offset, direction, *launch.constants)
        return Step(
            bind(_compile_rope(launch.spec, self.device.index or 0), launch.n_programs, values, self.address_of), None
        )

    def _bind_operator(self, function: Callable[..., Any], arguments: Any) -> Step:
        twins: dict[int, tuple[Tensor, int, int]] = {}

        def note(x: Tensor) -> Tensor:
            twins[id(x)] = (x, *self.address_of(x))
            return x

        _visit(arguments, note)

        def operate(memory: Sequence[Any]) -> None:
            real = {key: _in_memory(x, memory[slot], offset) for key, (x, slot, offset) in twins.items()}
            function(*_visit(arguments, lambda x: real[id(x)], memory))

        return Step(None, operate)


def _storage(x: Tensor) -> int:
    identity: int = x.untyped_storage()._cdata
    return identity


def _in_memory(x: Tensor, memory: Tensor, offset: int) -> Tensor:
    """Return a tensor of x's shape and strides that begins so many bytes after another one."""
    start = memory.storage_offset() * memory.element_size() + offset
    tensor = torch.empty(0, dtype=x.dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), start // x.element_size(), x.shape, x.stride())


def _visit(value: Any, change: Callable[[Tensor], Any], memory: Sequence[Any] = ()) -> Any:
    """Return nested tuples, dicts and descriptors with each tensor changed, and each number of a run's memory."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is Number and memory:
        return memory[value.slot]
    if isinstance(value, dict):
        return {key: _visit(item, change, memory) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_visit(item, change, memory) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value).__name__ == "TensorDescriptor":
        return type(value)(_visit(value.base, change), value.shape, value.strides, value.block_shape)
    return value


def _launch_kernel(kernel: Any, n_programs: int, arguments: dict[str, Any]) -> None:
    kernel[(n_programs,)](**arguments)


def _rotate(launch: rope_launch.Launch, *tensors: Any) -> None:
    n = (len(tensors) - len(RopeCall._fields)) // 2
    launch(tensors[:n], tensors[n : 2 * n], RopeCall(*tensors[2 * n :]))

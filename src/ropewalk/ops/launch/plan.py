"""Plans: the steps of one direction of a call, prepared once and run again with other addresses.

`Builder` hands a launcher tensors without memory, and keeps the launches and operators that it asks for. The launchers
are those that run at once without a plan, so both do the same. A plan's run allocates the results and one workspace,
reads addresses and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

from ropewalk import device as gpu
from ropewalk.ops.launch.bind import Launch, Number, bind, join, load_kernel
from ropewalk.ops.launch.steps import ALIGNED, Grid, Result, Sizes, UnplannableError, as_grid

ALIGNMENT = 256  # bytes, of the tensors in a workspace, as PyTorch's allocator aligns them
MAX_STREAMS = 64  # whose memory a plan keeps


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
        self.aligned: list[list[int]] = []  # for each launch that asks, the inputs whose alignment it was compiled for
        self.results, self.workspace, self.per_stream = results, workspace, per_stream
        self.make_bytes = torch.empty(0, dtype=torch.uint8, device=device).new_empty
        self.on_gpu = device.type == "cuda"
        self.current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if self.on_gpu else _no_stream
        self.memory_by_stream: dict[int, list[Tensor]] = {}
        self.launches: list[Launch] = []
        self.steps: list[Step] = []  # where some are operators

    def run(self, inputs: Sequence[Tensor], addresses: list[int], results: Sequence[Tensor]) -> list[Tensor]:
        """Run for tensors like those of the plan, at aligned addresses, and return the results.

        results: those of the plan, or views of them with the dimensions in another order.
        """
        if self.on_gpu and torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.device):
                return self.run(inputs, addresses, results)
        memory = list(map(torch.empty_like, results))
        stream = self.current_stream(self.index)
        if self.per_stream:
            memory += self.memory_by_stream.get(stream) or self._find_memory(stream)
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
        if len(self.memory_by_stream) >= MAX_STREAMS:
            self.memory_by_stream.clear()
        memory = self.memory_by_stream[stream] = [make(self.device) for make in self.per_stream]
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

    def __init__(self, device: torch.device, longest: int | None = None, addresses: Sequence[int] = ()) -> None:
        self.device, self.addresses = device, addresses  # of inputs, by which kernels are compiled that ask for them
        self.longest_cache = longest  # the plan is for caches of all lengths that take as much memory as this one
        self.sizes: tuple[Callable[..., Any], Any, list[int]] | None = None  # what measures them, and what is measured
        self.slots: dict[int, tuple[int, int]] = {}  # by a meta tensor's storage: its memory's index, and offset
        self.alive: list[Tensor] = []  # a storage that is freed could give its identity to another one
        self.n_slots = self.workspace = 0
        self.numbers: set[int] = set()  # slots of numbers that no step reads yet
        self.streams: list[tuple[Callable[..., Tensor], Tensor]] = []
        self.binders: list[Callable[[], Step]] = []  # each binds a step, once every tensor has its slot
        self.aligned: list[list[int]] = []  # see `Plan`
        self.reads_aligned = False  # whether other kernels are launched, which need all addresses aligned

    def skip(self) -> None:
        """Leave the next input alone: it is one that came before."""
        self.n_slots += 1

    def number(self, value: int) -> Number:
        """Return the next input that is a number: it has a slot among the addresses."""
        number = Number(value, self.n_slots)
        self.numbers.add(self.n_slots)
        self.n_slots += 1
        return number

    def input(self, x: Tensor | None) -> Tensor | None:
        """Return the meta tensor of the next input."""
        if x is None:
            return None
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        self._give_slot(meta)
        return meta

    def launch(self, kernel: Any, grid: Grid, /, **arguments: Any) -> None:
        """Keep a launch, whose kernel is compiled and loaded here: it may not fit."""
        is_by_values = getattr(kernel, "is_by_values", False)
        self.reads_aligned = self.reads_aligned or not is_by_values
        if gpu.is_interpreted():
            self.operate(_launch_kernel, kernel, grid, arguments)
            return
        if is_by_values:
            self.binders.append(lambda: self._bind_by_values(kernel, grid, arguments))
            return
        compiled = kernel.warmup(grid=as_grid(grid), **_plain(arguments))
        load_kernel(compiled)
        self.binders.append(lambda: self._bind_launch(kernel, compiled, grid, arguments))

    def attempt(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that launches; keep none of its steps if a kernel does not fit."""
        n_binders = len(self.binders)
        try:
            return function(*arguments)
        except OutOfResources:
            del self.binders[n_binders:]
            raise

    def operate(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Keep the call of a function."""
        self.binders.append(lambda: self._bind_operator(function, arguments))

    def per_stream(self, make: Callable[[torch.device], Tensor], like: Tensor) -> Tensor:
        """Return the meta tensor of counters, int32, that `make` finds in each run."""
        meta = torch.empty(1, dtype=torch.int32, device="meta")
        self.streams.append((make, meta))
        return meta

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
            numbers[index] = self.number(sizes[index])
        return type(sizes)(*numbers)

    def longest(self, n_keys: int) -> int | None:
        """Return the longest cache that the plan is for; None if all have one length."""
        return self.longest_cache

    def follow(self, launcher: Callable[..., Any], *arguments: Any) -> Any:
        """Call a launcher that takes these steps."""
        with torch.no_grad(), _OnlyViews(), self._on_device():
            return launcher(*arguments, self)

    def _on_device(self) -> torch.cuda.device:
        """Make the plan's device the current one: kernels are compiled for it, and loaded onto it."""
        return torch.cuda.device(self.device if self.device.type == "cuda" else -1)

    def finish(self, results: Sequence[Tensor]) -> Plan:
        """Make the plan whose results are like these, which the launcher allocated."""
        specs = []
        for x in results:
            if _storage(x) in self.slots:
                raise UnplannableError("a result is an input, or shares memory with another result")
            self._give_slot(x)
            specs.append(self._template_of(x))
        for _, meta in self.streams:
            self._give_slot(meta)
        every = list(range(len(self.addresses)))
        if self.reads_aligned and any(address & (ALIGNED - 1) for address in self.addresses):
            raise UnplannableError("an input is misaligned")
        with self._on_device():
            steps = [bind_step() for bind_step in self.binders]
            launches = join([step.launch for step in steps if step.launch])
        if self.numbers:
            raise UnplannableError("a number that varies was computed with: no step reads it as it is")
        plan = Plan(self.device, specs, self.workspace, [make for make, _ in self.streams])
        plan.aligned = [every] if self.reads_aligned else self.aligned
        if all(step.launch for step in steps):
            plan.launches = launches
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
        """Give a meta tensor the next slot; the workspace comes after all."""
        self.slots[_storage(x)] = (self.n_slots, 0)
        self.n_slots += 1
        self.alive.append(x)

    def is_input(self, x: Tensor) -> bool:
        """Say whether a meta tensor has its memory already: whether it is an input, before `finish`."""
        return _storage(x) in self.slots

    def slot_of(self, x: Tensor) -> int:
        """Return the index of an input or a result."""
        return self.slots[_storage(x)][0]

    def address_of(self, x: Tensor) -> tuple[int, int]:
        """Return the slot and the offset of a meta tensor, whose offset must be aligned."""
        slot, offset = self.memory_of(x)
        if offset & (ALIGNED - 1):
            raise UnplannableError("a view is misaligned")
        return slot, offset

    def memory_of(self, x: Tensor) -> tuple[int, int]:
        """Return the index of a meta tensor's memory among a run's, and its offset there in bytes."""
        slot = self.slots.get(_storage(x))
        if slot is None:  # the launcher allocated it, and does not return it
            slot = self.slots[_storage(x)] = (self.n_slots, self.workspace)
            # Memory of no byte, as that of calls without tokens, has an address too.
            self.workspace += -(-max(1, x.untyped_storage().nbytes()) // ALIGNMENT) * ALIGNMENT
            self.alive.append(x)
        index, start = slot
        return index, start + int(x.storage_offset()) * x.element_size()

    def _bind_launch(self, kernel: Any, compiled: Any, grid: Grid, arguments: dict[str, Any]) -> Step:
        if self.sizes is not None and getattr(compiled.metadata, "tensordesc_meta", None):
            raise UnplannableError("descriptors of a cache that grows")
        parameters = kernel.signature.parameters
        values = [arguments.get(name, parameters[name].default) for name in kernel.arg_names]
        by_values = getattr(kernel, "is_by_values", False)
        bound: Any = bind(compiled, grid, values, self.memory_of if by_values else self.address_of)
        self.numbers -= bound.numbers
        return Step(bound, None)

    def _bind_by_values(self, kernel: Any, grid: Grid, arguments: dict[str, Any]) -> Step:
        """Bind a kernel that is compiled for the alignment of some of its tensors, as they lie now."""
        union, inputs = ALIGNED, set[int]()
        for x in map(arguments.get, kernel.aligned):
            if isinstance(x, Tensor):
                slot, offset = self.memory_of(x)
                union |= offset
                if slot < len(self.addresses):
                    union |= self.addresses[slot]
                    inputs.add(slot)
        if inputs and sorted(inputs) not in self.aligned:
            self.aligned.append(sorted(inputs))
        compiled = kernel.warmup(grid=as_grid(grid), alignment=union & -union, **_plain(arguments))
        return self._bind_launch(kernel, compiled, grid, arguments)

    def _bind_operator(self, function: Callable[..., Any], arguments: Any) -> Step:
        tensors: dict[int, tuple[Tensor, int, int]] = {}

        def note(x: Any) -> Any:
            if type(x) is Number:
                self.numbers.discard(x.slot)
            else:
                tensors[id(x)] = (x, *self.address_of(x))
            return x

        _visit(arguments, note)

        def operate(memory: Sequence[Any]) -> None:
            real = {key: _in_memory(x, memory[slot], offset) for key, (x, slot, offset) in tensors.items()}
            function(*_visit(arguments, lambda x: memory[x.slot] if type(x) is Number else real[id(x)]))

        return Step(None, operate)


def _storage(x: Tensor) -> int:
    identity: int = x.untyped_storage()._cdata
    return identity


def _in_memory(x: Tensor, memory: Tensor, offset: int) -> Tensor:
    """Return a tensor of x's shape and strides that begins so many bytes after another one."""
    start = memory.storage_offset() * memory.element_size() + offset
    tensor = torch.empty(0, dtype=x.dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), start // x.element_size(), x.shape, x.stride())


def _visit(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested tuples, dicts and descriptors with each tensor changed, and each number of a run."""
    if isinstance(value, Tensor) or type(value) is Number:
        return change(value)
    if isinstance(value, dict):
        return {key: _visit(item, change) for key, item in value.items()}
    if isinstance(value, tuple):
        items = [_visit(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if type(value).__name__ == "TensorDescriptor":
        return type(value)(_visit(value.base, change), value.shape, value.strides, value.block_shape)
    return value


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with numbers of a run as those of this one."""
    return {name: int(value) if type(value) is Number else value for name, value in arguments.items()}


def _launch_kernel(kernel: Any, grid: Grid, arguments: dict[str, Any]) -> None:
    kernel[as_grid(grid)](**arguments)

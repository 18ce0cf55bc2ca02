"""Ways of running a call that something traces, transforms or replays, and the truth of each.

A way runs one call, or two with other values or other sizes by the same program: one that took a value for a constant
is wrong in the second. It gets a function like `attention`, so that the truth goes some ways as well. A row that a way
does not support must raise an error that says so: `REFUSED` lists them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from products import calls, compare, truth
from products.calls import Call
from products.compare import Expected, Results
from products.table import Row
from ropewalk import BlockLists, attention

Inputs = dict[str, Tensor]
Attend = Callable[..., Any]
Run = Callable[[Attend, Sequence[Call]], list[Results]]


class Way(NamedTuple):
    """A way of running calls."""

    run: Run
    second: str | None = None  # the program runs a second call, of other "values" or "sizes"
    is_derived: bool = False  # its results are the truth's by the same way, not those of the call
    differentiates: bool = True  # it returns gradients if the call has some
    needs: Callable[[Call], bool] = lambda call: True  # the calls that it is for
    is_costly: bool = False  # it takes seconds


# Calls

# No length is a head dim or a number of heads: a tracer that takes equal sizes for one would fix it.
SIZES = calls.CPU._replace(tokens={**calls.CPU.tokens, "equal": ((80, 80), (112, 112))})


def build(way: Way, row: Row, seed: int, device: torch.device, sizes: calls.Sizes) -> list[Call]:
    """Return the calls of a row that a way runs."""
    made = [calls.build(row, seed, device, sizes)]
    if way.second == "sizes":
        made.append(calls.build(row, seed + 2, device, sizes, variant=1))
    elif way.second == "values":
        made.append(_with_other_numbers(calls.build(row, seed + 2, device, sizes)))
    if row["blocks"] == "BlockMask":  # tracers need the bits of its partial blocks
        for call in made:
            evaluate_mask_mod(call)
    return made


def evaluate_mask_mod(call: Call) -> None:
    """Run a call that leaves the bits of a BlockMask beside it, for those that record gradients too."""
    q, k, v = (x.detach().requires_grad_() for x in operator.itemgetter("q", "k", "v")(call.keywords(call.leaves)))
    with torch.enable_grad():
        attention(**(call.keywords(call.leaves) | {"q": q, "k": k, "v": v}))


_OTHER_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("key_starts", "query_starts", "block_table"), lambda x: x.flip(0)),
    **dict.fromkeys(("positions_q", "positions_k"), lambda x: x + 3),
    # Bounds stay in order: every second one moves by one token, if its sequence has some.
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k"), lambda x: torch.cat((x[:1], x[1:-1] - (x.diff()[:-1] > 1).int(), x[-1:]))
    ),
}


def _with_other_numbers(call: Call) -> Call:
    """Return a call with other lengths, starts, positions and pages of the same shapes."""

    def keywords(leaves: calls.Leaves) -> dict[str, Any]:
        given = call.keywords(leaves)
        others = dict(_OTHER_NUMBERS)
        if "cu_seqlens_q" not in given:
            others["key_lengths"] = lambda x: x.flip(0)
        elif "key_lengths" in given:  # no more tokens than a sequence's cache has
            del others["cu_seqlens_q"]
        found = {name: other(given[name]) for name, other in others.items() if name in given}
        if "positions_q" in given and given["positions_q"] is given.get("positions_k"):  # one tensor stays one
            found["positions_k"] = found["positions_q"]
        return given | found

    return call._replace(keywords=keywords)


def _without_gradients(made: Sequence[Call]) -> list[Call]:
    return [call._replace(learned=(), has_lse_gradient=False) for call in made]


class Program(NamedTuple):
    """A call as a function of tensors alone."""

    function: Callable[[Inputs], tuple[Tensor, ...]]
    inputs: Inputs


def program_of(call: Call, attend: Attend) -> Program:
    """Return a call as a function of its leaves, and of all tensors among its keywords."""
    leaves = {name: x.detach().requires_grad_(name in call.learned) for name, x in call.leaves.items()}
    keywords = call.keywords(leaves)
    fixed = {name: x for name, x in keywords.items() if isinstance(x, Tensor) and name not in leaves}
    of_blocks = _tensors_of_blocks(keywords.get("blocks"))

    def function(inputs: Inputs) -> tuple[Tensor, ...]:
        keywords = call.keywords({name: inputs[name] for name in leaves}) | {name: inputs[name] for name in fixed}
        if of_blocks:
            keywords["blocks"] = dataclasses.replace(keywords["blocks"], **{name: inputs[name] for name in of_blocks})
        results = attend(**keywords)
        return results if isinstance(results, tuple) else (results,)

    return Program(function, leaves | fixed | of_blocks)


def _tensors_of_blocks(blocks: Any) -> Inputs:
    if not isinstance(blocks, BlockLists):
        return {}
    named = {field.name: getattr(blocks, field.name) for field in dataclasses.fields(blocks)}
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def start(call: Call) -> Any:
    """Seed dropout, and record gradients if the call has some."""
    torch.manual_seed(call.seed)
    return torch.set_grad_enabled(bool(call.learned))


def _run(call: Call, program: Program, function: Callable[[Inputs], Any]) -> Results:
    """Return the results of a program by a function, and its gradients by `backward`."""
    with start(call):
        results = function(program.inputs)
    torch.manual_seed(call.seed + 100)  # a backward draws nothing
    named = dict(zip(compare.names_of(call.keywords(program.inputs)), results, strict=True))
    found = {name: x.detach() for name, x in named.items()}
    if call.learned and named["out"].requires_grad:
        weighed = [(named["out"], call.weights(found["out"]))]
        if call.has_lse_gradient:
            weighed.append((named["lse"], call.lse_weights(found["lse"]).masked_fill(found["lse"] == -torch.inf, 0)))
        outputs, weights = zip(*weighed, strict=True)
        torch.autograd.backward(outputs, weights)
        for name in call.learned:
            leaf = program.inputs[name]
            found[f"grad of {name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found


# torch.compile


def _compile(attend: Attend, made: Sequence[Call], name: str = "aot_eager", **options: Any) -> list[Results]:
    """Compile `attention`, as within a model: schemes and views are made before."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend(name)
    compiled = torch.compile(lambda **keywords: attend(**keywords), fullgraph=True, backend=backend, **options)
    found = []
    counts = []
    for call in made:
        torch.manual_seed(call.seed)
        found.append(compare.run(call, compiled))
        counts.append(backend.frame_count)
    if len(set(counts)) > 1:
        raise AssertionError("torch.compile compiled again for the second call")
    return found


def compile_call(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Compile for some sizes, and run other values."""
    return _compile(attend, made, dynamic=False)


def compile_lengths(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Compile once for all lengths."""
    return _compile(attend, made, dynamic=True)


def compile_whole(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Compile what makes schemes and views, too."""
    torch._dynamo.reset()
    program = program_of(made[0], attend)
    compiled = torch.compile(program.function, backend="aot_eager", fullgraph=True)
    return [_run(call, program_of(call, attend), compiled) for call in made]


def compile_inductor(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Compile by Inductor, with torch's generator."""
    with torch._inductor.config.patch(fallback_random=True):
        return _compile(attend, made, "inductor", dynamic=False)


# torch.export


class _Module(torch.nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.function = program.function

    def forward(self, inputs: Inputs) -> tuple[Tensor, ...]:
        return self.function(inputs)


def _export(attend: Attend, made: Sequence[Call], strict: bool) -> Any:
    programs = [program_of(call, attend) for call in made]
    first, last = programs[0].inputs, programs[-1].inputs
    shapes = {
        name: {axis: torch.export.Dim.DYNAMIC for axis, n in enumerate(x.shape) if last[name].shape[axis] != n} or None
        for name, x in first.items()
    }
    with start(made[0]):
        return torch.export.export(_Module(programs[0]), (first,), dynamic_shapes=(shapes,), strict=strict)


def export(attend: Attend, made: Sequence[Call], strict: bool = False) -> list[Results]:
    """Export, and run the exported module."""
    module = _export(attend, made, strict).module()
    return [_run(call, program_of(call, attend), module) for call in made]


def export_strict(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Export by TorchDynamo."""
    return export(attend, made, strict=True)


def export_inference(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Export without gradients, decompose, save and load."""
    made = _without_gradients(made)
    program = _export(attend, made, False).run_decompositions()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "program.pt2"
        torch.export.save(program, path)
        module = torch.export.load(path).module()
    return [_run(call, program_of(call, attend), module) for call in made]


def aot_inductor(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Export without gradients, and compile ahead of time."""
    made = _without_gradients(made)
    program = _export(attend, made, False)
    with TemporaryDirectory() as folder, torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "program.pt2"))
        module = torch._inductor.aoti_load_package(path)
        return [_run(call, program_of(call, attend), module) for call in made]


# Checkpoints


def _checkpoint(attend: Attend, made: Sequence[Call], use_reentrant: bool) -> list[Results]:
    (call,) = made
    program = program_of(call, attend)
    names = list(program.inputs)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return program.function(dict(zip(names, tensors, strict=True)))

    return [_run(call, program, lambda inputs: checkpoint(function, *inputs.values(), use_reentrant=use_reentrant))]


def checkpointed(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Run the forward again in the backward."""
    return _checkpoint(attend, made, use_reentrant=False)


def checkpointed_reentrant(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Run the forward again in a backward of its own."""
    return _checkpoint(attend, made, use_reentrant=True)


# torch.func


class _Pure(NamedTuple):
    """A program for torch.func: a function of what learns, and of the rest."""

    function: Callable[[Inputs, Inputs], tuple[tuple[Tensor, ...], Results]]  # differentiable results, and all
    learned: Inputs
    rest: Inputs
    weights: tuple[Tensor, ...]  # the gradients of the differentiable results


def _pure(call: Call, attend: Attend) -> _Pure:
    program = program_of(call, attend)
    inputs = {name: x.detach() for name, x in program.inputs.items()}
    learned = {name: inputs[name] for name in call.learned}
    rest = {name: x for name, x in inputs.items() if name not in learned}
    names = compare.names_of(call.keywords(call.leaves))
    differentiable = ("out", "lse") if call.has_lse_gradient else ("out",)

    def function(learned: Inputs, rest: Inputs) -> tuple[tuple[Tensor, ...], Results]:
        named = dict(zip(names, program.function(learned | rest), strict=True))
        return tuple(named[name] for name in differentiable), named

    with start(call), torch.no_grad():
        of_results, _ = function(learned, rest)
    weights = [call.weights(of_results[0])]
    if call.has_lse_gradient:
        _, lse = of_results
        weights.append(call.lse_weights(lse).masked_fill(lse == -torch.inf, 0))
    return _Pure(function, learned, rest, tuple(weights))


def _named(results: Results, grads: Inputs, prefix: str = "grad of") -> Results:
    return results | {f"{prefix} {name}": x for name, x in grads.items()}


def vjp(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Differentiate by torch.func.vjp."""
    (call,) = made
    pure = _pure(call, attend)
    torch.manual_seed(call.seed)
    _, pull, results = torch.func.vjp(lambda learned: pure.function(learned, pure.rest), pure.learned, has_aux=True)
    (grads,) = pull(pure.weights)
    return [_named(results, grads)]


def _gradients(pure: _Pure, learned: Inputs, rest: Inputs, weights: tuple[Tensor, ...]) -> Results:
    def loss(learned: Inputs) -> tuple[Tensor, Results]:
        differentiable, results = pure.function(learned, rest)
        # Where no key is attended the log-sum-exp is −∞, and has no weight.
        return sum(
            (torch.where(w == 0, 0.0, x) * w).sum() for x, w in zip(differentiable, weights, strict=True)
        ), results

    grads, results = torch.func.grad(loss, has_aux=True)(learned)
    return _named(results, grads)


def grad(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Differentiate by torch.func.grad."""
    (call,) = made
    pure = _pure(call, attend)
    torch.manual_seed(call.seed)
    return [_gradients(pure, pure.learned, pure.rest, pure.weights)]


def jvp(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Differentiate forward by torch.func.jvp."""
    (call,) = made
    pure = _pure(call, attend)
    torch.manual_seed(call.seed)
    generator = torch.Generator().manual_seed(call.seed)
    tangents = {name: torch.randn(x.shape, generator=generator).to(x) for name, x in pure.learned.items()}
    _, pushed, results = torch.func.jvp(
        lambda learned: pure.function(learned, pure.rest), (pure.learned,), (tangents,), has_aux=True
    )
    named = dict(zip(("out", "lse"), pushed, strict=False))
    return [_named(results, named, "tangent of")]


def twice(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Differentiate gradients."""
    (call,) = made
    program = program_of(call, attend)
    with start(call):
        results = program.function(program.inputs)
    out = results[0]
    leaves = [program.inputs[name] for name in call.learned]
    grads = torch.autograd.grad(out, leaves, call.weights(out.detach()), create_graph=True, allow_unused=True)
    used = [x for x in grads if x is not None and x.requires_grad]
    torch.autograd.backward(used, [x.detach().sin() for x in used])  # it runs nodes that lead to no leaf, too
    pairs = zip(call.learned, leaves, strict=True)
    return [{f"second gradient of {name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in pairs}]


def _stack(first: Any, second: Any) -> Any:
    return {name: torch.stack((x, second[name])) for name, x in first.items()}


def _at(results: Results, index: int) -> Results:
    return {name: x[index] for name, x in results.items()}


def vmap(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Run two calls at once: every tensor has a dimension more."""
    programs = [program_of(call, attend) for call in _without_gradients(made)]
    inputs = _stack(programs[0].inputs, programs[1].inputs)
    names = compare.names_of(made[0].keywords(made[0].leaves))
    torch.manual_seed(made[0].seed)
    with torch.no_grad():
        results = torch.func.vmap(programs[0].function, randomness="same")(inputs)
    found = dict(zip(names, results, strict=True))
    return [_at(found, index) for index in range(2)]


def vmap_grad(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Differentiate two calls at once."""
    pures = [_pure(call, attend) for call in made]
    pure = pures[0]
    learned, rest = (_stack(x, y) for x, y in ((pures[0].learned, pures[1].learned), (pures[0].rest, pures[1].rest)))
    weights = tuple(torch.stack(pair) for pair in zip(*(x.weights for x in pures), strict=True))
    torch.manual_seed(made[0].seed)
    each = torch.func.vmap(lambda *given: _gradients(pure, *given), randomness="same")
    found = each(learned, rest, weights)
    return [_at(found, index) for index in range(2)]


def functionalized(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Run within torch.func.functionalize."""
    (call,) = made
    program = program_of(call, attend)
    return [_run(call, program, torch.func.functionalize(program.function))]


# Tracers and modes


def _trace(attend: Attend, made: Sequence[Call], mode: str) -> list[Results]:
    def prepare(call: Call) -> tuple[Callable[[Inputs], Results], Inputs]:
        program = program_of(call, attend)
        keywords = call.keywords(program.inputs)
        with start(call), torch.no_grad():
            named = dict(zip(compare.names_of(keywords), program.function(program.inputs), strict=True))
        weights = {"weights of out": call.weights(named["out"])}
        if call.has_lse_gradient:
            weights["weights of lse"] = call.lse_weights(named["lse"])

        def function(inputs: Inputs) -> Results:
            given = {name: x.detach().requires_grad_(name in call.learned) for name, x in inputs.items()}
            weighed = call._replace(
                weights=lambda out: inputs["weights of out"], lse_weights=lambda lse: inputs["weights of lse"]
            )
            with torch.set_grad_enabled(bool(call.learned)):
                return compare.finish(weighed, given, keywords, program.function(given))

        return function, weights | {name: x.detach() for name, x in program.inputs.items()}

    function, inputs = prepare(made[0])
    graph = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(inputs)
    found = []
    for call in made:
        _, inputs = prepare(call)
        torch.manual_seed(call.seed)
        found.append(graph(inputs))
    return found


def fx_real(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Trace the forward and the backward by make_fx."""
    return _trace(attend, made, "real")


def fx_symbolic(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Trace with symbols for sizes by make_fx."""
    return _trace(attend, made, "symbolic")


def fake(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Compare the shapes of fake results with real ones, which come after: no cache may keep a fake tensor."""
    (call,) = made
    program = program_of(call, attend)
    described = []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        inputs = {
            name: mode.from_tensor(x.detach()).requires_grad_(x.requires_grad) for name, x in program.inputs.items()
        }
        faked = _run(call, Program(program.function, inputs), program.function)
    real = _run(call, program, program.function)
    for name, x in real.items():
        mine = faked[name]
        kinds = [(tuple(y.shape), y.dtype, y.stride() if name == "out" and y.numel() else None) for y in (x, mine)]
        if kinds[0] != kinds[1]:
            described.append(f"{name} is {kinds[0]}, but {kinds[1]} where it is fake")
    if described:
        raise AssertionError("; ".join(described))
    return [real]


def jit_trace(attend: Attend, made: Sequence[Call]) -> list[Results]:
    """Trace by torch.jit.trace."""
    (call,) = made
    program = program_of(call, attend)
    with start(call), contextlib.suppress(DeprecationWarning):
        function = torch.jit.trace(program.function, (program.inputs,), strict=False)
    return [_run(call, program, function)]


# The table


def _learns(call: Call) -> bool:
    return bool(call.learned)


def _fits_lengths(call: Call) -> bool:
    return call.row["blocks"] != "BlockMask"  # which was made for some lengths


def _draws_nothing(call: Call) -> bool:
    return call.row["dropout"] == "none"


WAYS = {
    "compile": Way(compile_call, "values"),
    "compile lengths": Way(compile_lengths, "sizes", needs=_fits_lengths),
    "compile whole": Way(compile_whole, "values"),
    "compile inductor": Way(compile_inductor, is_costly=True),
    "export": Way(export, "values"),
    "export strict": Way(export_strict, "values"),
    "export lengths": Way(export, "sizes", needs=_fits_lengths),
    "export inference": Way(export_inference, "sizes", differentiates=False, needs=_fits_lengths),
    "aot inductor": Way(aot_inductor, differentiates=False, is_costly=True),
    "checkpoint": Way(checkpointed, needs=_learns),
    "checkpoint reentrant": Way(checkpointed_reentrant, needs=_learns),
    "vjp": Way(vjp, needs=_learns),
    "grad": Way(grad, needs=_learns),
    "jvp": Way(jvp, is_derived=True, needs=_learns),
    "twice": Way(twice, is_derived=True, needs=_learns),
    "vmap": Way(vmap, "values", differentiates=False, needs=_draws_nothing),
    "vmap of grad": Way(vmap_grad, "values", needs=lambda call: _learns(call) and _draws_nothing(call)),
    "functionalize": Way(functionalized),
    "make_fx": Way(fx_real, "values"),
    "make_fx symbolic": Way(fx_symbolic, "sizes", needs=_fits_lengths),
    "fake": Way(fake),
    "jit trace": Way(jit_trace),
}


class Refused(NamedTuple):
    """Calls that a way does not support, and the error that says so."""

    ways: tuple[str, ...]
    is_refused: Callable[[Call, str | None], bool]
    text: str


KERNELS = ("triton", "gluon")
TRANSFORMS = ("vjp", "grad", "jvp", "vmap", "vmap of grad", "functionalize")
REFUSED = (
    Refused(("jit trace",), lambda call, impl: True, "q is traced by torch.jit.trace, .* use torch.export"),
    Refused(
        TRANSFORMS,
        lambda call, impl: impl is not None and impl != "reference",
        "torch.func transforms and forward-mode",
    ),
    Refused(("twice",), lambda call, impl: impl in KERNELS, "attention by our kernels is differentiable once"),
)


def refusal(name: str, call: Call, impl: str | None) -> str | None:
    """Return what the error of a call must match; None if a way supports it."""
    return next((x.text for x in REFUSED if name in x.ways and x.is_refused(call, impl)), None)


# The truth


def expect(way: Way, made: Sequence[Call]) -> list[Expected]:
    """Return the truth of the results of a way."""
    if not way.is_derived:
        return [compare.expect(call) for call in made]

    def attend(call: Call) -> Attend:
        seed = compare.seed_of(call)

        def attend(**keywords: Any) -> Any:
            found = truth.attend(seed=seed, **keywords)
            return tuple(getattr(found, name) for name in compare.names_of(keywords))

        return attend

    def run(call: Call) -> Results:
        (found,) = way.run(attend(call), [call])
        return found

    found = []
    for call in made:
        exact = run(call._replace(leaves={name: compare.widen(x) for name, x in call.leaves.items()}))
        baseline = run(call)
        # Second derivatives sum more roundings, in another order.
        found.append(
            Expected(exact, {name: exact[name].to(x) + 2 * (x - exact[name].to(x)) for name, x in baseline.items()})
        )
    return found


def attend_by(impl: str | None) -> Attend:
    """Return `attention` by a backend."""
    return lambda **keywords: attention(**keywords, impl=impl)


def faults(way: Way, made: Sequence[Call], impl: str | None) -> list[str]:
    """Say in which results a way differs from the truth."""
    found = way.run(attend_by(impl), made)
    of_truth = made if way.differentiates else _without_gradients(made)
    pairs = zip(found, expect(way, of_truth), strict=True)
    return [fault for results, expected in pairs for fault in compare.faults(results, expected)]

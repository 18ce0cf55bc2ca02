"""The benchmark of training steps: whole models of transformers, with attention by us and by PyTorch."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ropewalk.bench.core.options import check_names, choose_device, choose_path
from ropewalk.bench.core.records import RecordWriter, describe_run, version_of
from ropewalk.bench.core.sustained import ratios
from ropewalk.bench.core.terminal import default_console, progress_bar
from ropewalk.bench.core.timing import peak_memory, quantiles
from ropewalk.bench.training.cases import CASES, Inputs, TrainingCase, make_inputs
from ropewalk.bench.training.models import CANDIDATES, OURS, Model
from ropewalk.bench.training.rows import BENCHMARK, TrainingRow, read_training_record
from ropewalk.bench.training.summary import print_training_summary
from ropewalk.integrations import huggingface
from ropewalk.ops.attention import backends

PRECISIONS = ("autocast", "bf16")
CPU_TOKENS = 512  # of a batch that a CPU trains on unless a case is named
_STEPS = 3  # between two waits for the device
_TOLERANCE = 2.0  # times the error of the same model by PyTorch's eager attention (SDPA where there is none)


def run_training_bench(
    *,
    case_names: Sequence[str] = (),
    precisions: Sequence[str] = PRECISIONS,
    output: Path | None = None,
    device: str | None = None,
    rounds: int = 8,
    seed: int = 0,
    cases: Sequence[TrainingCase] = CASES,
    console: Console | None = None,
) -> Path:
    """Measure training steps of whole models, write a record, and print a summary.

    Each step is forward, backward and AdamW. Before it is timed, each candidate's hidden states and gradients are
    compared, without dropout, with those of the same weights in float32: their error may be at most twice that of the
    same model by PyTorch's eager attention, or by SDPA for Llama.

    Args:
        case_names: which of `cases`; none for all that suit the device.
        precisions: of "autocast" and "bf16".
        output: the record's file, which must not exist, or None for one under ./results/.
        device: "cuda" or "cpu"; None for the GPU if there is one.
        rounds: how often each candidate is timed, 3 steps each time, in turn with the others.
        seed: of weights and inputs.
        cases: what can be chosen from.
        console: where to print.

    Returns:
        The record's path.

    Raises:
        ValueError: an unknown case or precision, no case that a CPU trains within minutes, a record that
            exists already, a device that PyTorch does not find.
        ModuleNotFoundError: transformers is not installed.
    """
    console = console or default_console()
    check_names("case", case_names, (case.name for case in cases))
    check_names("precision", precisions, PRECISIONS)
    target = choose_device(device)
    huggingface.register()
    attention = {impl: backends.why_missing(impl, target) or "yes" for impl in backends.BACKENDS}
    run = {
        **describe_run(BENCHMARK, target, {"transformers": version_of("transformers") or "missing"}),
        "attention": attention,
        "seed": seed,
    }
    path = choose_path(output, run)
    chosen = [case for case in cases if not case_names or case.name in case_names]
    if target.type == "cpu" and not case_names:
        left_out = [case.name for case in chosen if case.batch * case.tokens > CPU_TOKENS]
        chosen = [case for case in chosen if case.name not in left_out]
        if not chosen:
            raise ValueError(f"no case ends within minutes on a CPU: name one with --case ({', '.join(left_out)})")
    units = [(case, precision) for case in chosen for precision in case.precisions if precision in precisions]
    with RecordWriter(path, run) as writer, progress_bar(console) as progress:
        task = progress.add_task("starting", total=len(units))
        for case, precision in units:
            progress.update(task, description=f"{case.name}, {precision}")
            for row in _measure(case, precision, target, rounds, seed):
                writer.append(row)
            progress.advance(task)
    print_training_summary(read_training_record(path), console)
    console.print(f"record: {path}", highlight=False)
    return path


class _Trainee:
    """A candidate with its weights, its optimiser and its errors."""

    def __init__(self, model: Model, precision: str, device: torch.device) -> None:
        self.model, self.device, self.precision = model, device, precision
        if precision == "bf16":
            for parameter in model.module.parameters():  # and no buffer: frequencies stay in float32
                parameter.data = parameter.data.bfloat16()
        parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        self.n_parameters = sum(parameter.numel() for parameter in parameters)
        self.optimiser = torch.optim.AdamW(parameters, lr=1e-4, fused=device.type == "cuda")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "autocast")

    def step(self) -> None:
        with self.autocast():
            loss = self.model.loss()
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def probe(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the tokens, and the gradient of the first layer's projections."""
        self.model.module.eval()  # no dropout
        with self.model.context():
            with self.autocast():
                hidden = self.model.hidden()
            kept = hidden.float() if inputs.attention_mask is None else hidden.float()[inputs.attention_mask.bool()]
            kept.backward(torch.randn(kept.shape, generator=torch.Generator().manual_seed(0)).to(kept.device))
        parameters = self.model.module.named_parameters()
        found = [p.grad.float().flatten() for name, p in parameters if p.grad is not None and _is_probed(name)]
        self.optimiser.zero_grad()
        self.model.module.train()
        return kept.detach(), torch.cat(found)


def _is_probed(name: str) -> bool:
    """Return whether a parameter is the weight of the first layer's projections to q, k and v."""
    ends = tuple(f".{projection}.weight" for projection in ("query", "key", "value", "q_proj", "k_proj", "v_proj"))
    return name.endswith(ends) and (".layer.0." in name or name.startswith("layers.0."))


def _measure(case: TrainingCase, precision: str, device: torch.device, rounds: int, seed: int) -> Iterator[TrainingRow]:
    """Measure one case in one precision."""
    vocab_size = case.config.get("vocab_size", 30522)
    inputs = make_inputs(case, vocab_size, device, seed)
    builders = CANDIDATES[case.family]

    def build(name: str, precision: str) -> _Trainee:
        torch.manual_seed(seed)
        with device:
            model = builders[name](case, inputs)
        return _Trainee(model, precision, device)

    last = list(builders)[-1]
    truth = build(last, "float32").probe(inputs)
    trainees = {name: build(name, precision) for name in builders}
    errors = {name: _errors(trainee.probe(inputs), truth) for name, trainee in trainees.items()}
    del truth
    right = {
        name: trainee
        for name, trainee in trainees.items()
        if all(error <= _TOLERANCE * budget for error, budget in zip(errors[name], errors[last], strict=True))
    }
    samples = _time(right, device, rounds)
    for name, trainee in trainees.items():
        hidden_error, gradient_error = errors[name]
        row = TrainingRow(
            case=case.name,
            precision=precision,
            candidate=name,
            batch=case.batch,
            tokens=case.tokens,
            n_tokens=inputs.n_tokens,
            parameters=trainee.n_parameters,
            status="ok" if name in right else "wrong",
            hidden_error=hidden_error,
            gradient_error=gradient_error,
        )
        yield _with_times(row, samples, trainee, device) if name in right else row


def _errors(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Return the errors of hidden states and of gradients: the norm of the difference over the norm."""
    hidden, gradient = (float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True))
    return hidden, gradient


def _time(trainees: dict[str, _Trainee], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Time a step once in each round, in which the candidates alternate."""
    samples: dict[str, list[float]] = {name: [] for name in trainees}
    order, shuffle = list(trainees), random.Random(0).shuffle
    for number in range(-1, rounds):  # one round warms up
        shuffle(order)
        for name in order:
            with trainees[name].model.context():
                _wait(device)
                start = time.perf_counter()
                for _ in range(_STEPS):
                    trainees[name].step()
                _wait(device)
            if number >= 0:
                samples[name].append((time.perf_counter() - start) * 1e6 / _STEPS)
    return samples


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _with_times(
    row: TrainingRow, samples: dict[str, list[float]], trainee: _Trainee, device: torch.device
) -> TrainingRow:
    times = quantiles(samples[row.candidate])
    peak = None
    if device.type == "cuda":
        with trainee.model.context():
            peak = peak_memory(trainee.step, device)
    return TrainingRow(
        **{
            **vars(row),
            "time": times,
            "tokens_per_second": row.n_tokens * 1e6 / times.p50,
            "peak_bytes": peak,
            "speed_over": ratios(samples, OURS) if row.candidate == OURS else None,
        }
    )

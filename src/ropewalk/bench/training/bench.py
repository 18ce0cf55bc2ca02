"""The benchmark of training steps: whole models of transformers, with attention by us and by PyTorch.

Each step is forward, backward and AdamW. Before, hidden states and gradients are compared, without dropout, with those
of the same weights in float32: their error may be at most twice that of eager attention, or of SDPA for Llama.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from rich.console import Console
from torch import Tensor

from ropewalk.bench.core.gate import Verdict
from ropewalk.bench.core.load import Row
from ropewalk.bench.core.options import Options
from ropewalk.bench.core.peers import Library
from ropewalk.bench.core.runner import Bench, Candidate, Rates, Right
from ropewalk.bench.core.summary import number
from ropewalk.bench.core.timing import interleave, peak_memory, quantiles, ratios
from ropewalk.bench.training.cases import CANDIDATES, CASES, MODES, OURS, Inputs, TrainingCase, make_inputs
from ropewalk.integrations import huggingface
from ropewalk.ops.attention import backends

CPU_TOKENS = 512  # of a batch that a CPU trains on unless a case is named
ROUNDS = 8
_STEPS = 3  # between two waits for the device
_TOLERANCE = 2.0  # times the error of the same model by PyTorch's eager attention (SDPA where there is none)
# Projections of the first layer.
_PROBED = re.compile(r"(.*\.layer\.0|layers\.0)\..*\b(query|key|value|q_proj|k_proj|v_proj)\.weight").fullmatch
Opened = tuple[Inputs, tuple[Tensor, Tensor]]  # and the right results


class TrainingBench(Bench):
    name = "training"
    cases = CASES
    modes = MODES
    impls = ()
    peers = {"transformers": Library("transformers", "transformers", "transformers", False)}  # noqa: RUF012
    columns = (
        ("tokens/s", number("tokens_per_second", ",.0f")),
        ("peak, GiB", number("peak_bytes", ".1f", 2**30)),
        ("hidden error", number("hidden_error", ".2g")),
        ("gradient's", number("gradient_error", ".2g")),
    )

    def __init__(self, options: Options, device: torch.device, console: Console) -> None:
        huggingface.register()
        self.rounds = options.rounds or ROUNDS
        super().__init__(options, device, console)

    @property
    def given(self) -> Mapping[str, object]:
        """The options that rows depend on, and which of our implementations there are."""
        attention = {impl: backends.why_missing(impl, self.device) or "yes" for impl in backends.BACKENDS}
        return {"rounds": self.rounds, "attention": attention}

    def is_too_large(self, case: TrainingCase) -> bool:
        return case.batch * case.tokens > CPU_TOKENS

    def open(self, case: TrainingCase) -> Opened:
        """Make the batch, and the right results, in float32 by the family's last candidate."""
        inputs = make_inputs(case, case.config.get("vocab_size", 30522), self.device, self.options.seed)
        return inputs, _Trainee(self, case, inputs, [*CANDIDATES[case.family]][-1], "float32").probe()

    def candidates(self, case: TrainingCase, mode: str, opened: Opened) -> Iterator[Candidate]:
        """Yield ours, then what it is measured against; the last one's errors are the budget of all."""
        inputs, truth = opened
        *_, last = names = CANDIDATES[case.family]
        budget = _Trainee(self, case, inputs, last, mode).compare(truth)

        def check(name: str) -> tuple[Verdict, _Trainee]:
            trainee = _Trainee(self, case, inputs, name, mode)
            errors = trainee.compare(truth)
            share = max(error / most if most else 0.0 for error, most in zip(errors, budget, strict=True))
            complaint = None if share <= _TOLERANCE else f"the errors of hidden states and gradients are {errors}"
            return Verdict(share, _TOLERANCE, complaint), trainee

        for name in names:
            yield Candidate(name, "ours" if name == OURS else "peer", partial(check, name))

    def time(self, case: TrainingCase, mode: str, right: Right, rates: Rates) -> Iterator[Row]:
        def one_round(order: Sequence[str]) -> dict[str, float]:
            return {name: right[name][1].time_steps() for name in order}

        samples = interleave(right, one_round, warmup=1, rounds=self.rounds)
        for name, (row, trainee) in right.items():
            times, n_tokens = quantiles(samples[name]), trainee.inputs.n_tokens
            row = {**row, "n_tokens": n_tokens, "parameters": trainee.n_parameters, "time": times}
            row |= {"hidden_error": trainee.errors[0], "gradient_error": trainee.errors[1]}
            row |= {"ratios": ratios(samples, name), "tokens_per_second": n_tokens * 1e6 / times.p50}
            if self.device.type == "cuda":
                with trainee.model.context():
                    row["peak_bytes"] = peak_memory(trainee.step, self.device)
            yield row


class _Trainee:
    """A candidate with its weights, its optimiser and its errors."""

    def __init__(self, bench: Bench, case: TrainingCase, inputs: Inputs, name: str, precision: str) -> None:
        self.inputs, self.device = inputs, bench.device
        torch.manual_seed(bench.options.seed)
        with self.device:
            self.model = CANDIDATES[case.family][name](case, inputs)
        if precision == "bf16":
            for parameter in self.model.module.parameters():  # and no buffer: frequencies stay in float32
                parameter.data = parameter.data.bfloat16()
        parameters = [parameter for parameter in self.model.module.parameters() if parameter.requires_grad]
        self.n_parameters = sum(parameter.numel() for parameter in parameters)
        self.optimiser = torch.optim.AdamW(parameters, lr=1e-4, fused=self.device.type == "cuda")
        self.autocast = partial(torch.autocast, self.device.type, torch.bfloat16, enabled=precision == "autocast")

    def step(self) -> None:
        with self.autocast():
            loss = self.model.loss()
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def time_steps(self) -> float:
        """Return the microseconds of a step, a mean of some between two waits for the device."""
        wait = partial(torch.cuda.synchronize, self.device) if self.device.type == "cuda" else lambda: None
        with self.model.context():
            wait()
            start = time.perf_counter()
            for _ in range(_STEPS):
                self.step()
            wait()
        return (time.perf_counter() - start) * 1e6 / _STEPS

    def probe(self) -> tuple[Tensor, Tensor]:
        """Return the hidden states of the tokens, and the gradient of the first layer's projections."""
        mask, module = self.inputs.attention_mask, self.model.module.eval()  # no dropout
        with self.model.context():
            with self.autocast():
                hidden = self.model.hidden()
            kept = hidden.float() if mask is None else hidden.float()[mask.bool()]
            kept.backward(torch.randn(kept.shape, generator=torch.Generator().manual_seed(0)).to(kept.device))
        found = [
            p.grad.float().flatten() for name, p in module.named_parameters() if _PROBED(name) and p.grad is not None
        ]
        self.optimiser.zero_grad()
        module.train()
        return kept.detach(), torch.cat(found)

    def compare(self, truth: tuple[Tensor, Tensor]) -> list[float]:
        """Return the errors of hidden states and of gradients: the norm of the difference over the norm."""
        self.errors = [float((a - b).norm() / b.norm()) for a, b in zip(self.probe(), truth, strict=True)]
        return self.errors

"""The benchmarks of the rotation and of attention, one after the other, in one record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from ropewalk.bench.attention import cases as attention_cases
from ropewalk.bench.attention.cases import ALIASES, MODES, AttentionCase
from ropewalk.bench.attention.peers import ATTENTION_PEERS
from ropewalk.bench.attention.run import plan_attentions
from ropewalk.bench.core.options import check_names, choose_device
from ropewalk.bench.core.runner import BenchResult, Plan, run_plans
from ropewalk.bench.core.terminal import default_console
from ropewalk.bench.rope.cases import CASES, DIRECTIONS, Case
from ropewalk.bench.rope.peers import PEERS
from ropewalk.bench.rope.run import plan_rotations
from ropewalk.ops.attention.backends import BACKENDS
from ropewalk.ops.rope.backends import IMPLEMENTATIONS


def run_all_benches(
    *,
    case_names: Sequence[str] = (),
    impls: Sequence[str] = (),
    peers: str = "auto",
    output: Path | None = None,
    resume: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
    seed: int = 0,
    rotations: Sequence[Case] = CASES,
    attentions: Sequence[AttentionCase] = attention_cases.CASES,
    console: Console | None = None,
) -> BenchResult:
    """Measure rotations, then attention, write one record of both and a figure of each, and print both summaries.

    A name of a case, an implementation or a peer goes to every benchmark that has it. If cases or implementations are
    named, a benchmark that has none of them is left out.

    Args:
        rounds: how often each call is timed, at most; None for each benchmark's own.
        rotations: the cases of the rotation that can be chosen from.
        attentions: those of attention.

    The other arguments, what is raised, and Ctrl-C are as in `run_rope_bench`.
    """
    console, target = console or default_console(), choose_device(device)
    rotation_names = {case.name for case in rotations}
    attention_names = {case.name for case in attentions} | set(ALIASES)
    named = [] if peers in ("auto", "none") else [name.strip() for name in peers.split(",")]
    check_names("case", case_names, dict.fromkeys((*(case.name for case in rotations), *sorted(attention_names))))
    check_names("impl", impls, dict.fromkeys((*IMPLEMENTATIONS, *BACKENDS)))
    check_names("peer", named, dict.fromkeys((*PEERS, *ATTENTION_PEERS)))

    def known(names: Iterable[str], to: Iterable[str]) -> list[str]:
        there = set(to)
        return [name for name in names if name in there]

    def is_chosen(case_known: Iterable[str], impl_known: Iterable[str]) -> bool:
        return bool(not case_names or known(case_names, case_known)) and bool(not impls or known(impls, impl_known))

    def peers_known(to: Iterable[str]) -> str:
        return ",".join(known(named, to)) or "none" if named else peers

    plans: list[Plan] = []
    if is_chosen(rotation_names, IMPLEMENTATIONS):
        plan = plan_rotations(
            case_names=known(case_names, rotation_names),
            impls=known(impls, IMPLEMENTATIONS),
            modes=DIRECTIONS,
            peers=peers_known(PEERS),
            dtype=dtype,
            rounds=100 if rounds is None else rounds,
            seed=seed,
            cases=rotations,
            device=target,
            console=console,
        )
        plans.append(plan)
    if is_chosen(attention_names, BACKENDS):
        plan = plan_attentions(
            case_names=known(case_names, attention_names),
            impls=known(impls, BACKENDS),
            modes=tuple(MODES),
            peers=peers_known(ATTENTION_PEERS),
            protocols=(),
            dtype=dtype,
            rounds=rounds,
            seed=seed,
            cases=attentions,
            device=target,
            console=console,
        )
        plans.append(plan)
    if not plans:
        raise ValueError("no benchmark has both one of the cases and one of the implementations that are named")
    return run_plans("all", plans, target, output=output, resume=resume, seed=seed, console=console)

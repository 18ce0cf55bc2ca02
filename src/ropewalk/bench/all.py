"""Benchmarks one after the other, in one record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console

from ropewalk.bench.core.load import ALL
from ropewalk.bench.core.options import Options, check_names, choose_device
from ropewalk.bench.core.runner import Bench, Result, run_benches
from ropewalk.bench.core.terminal import default_console


def run(benches: Sequence[type[Bench]], options: Options, console: Console | None = None) -> Result:
    """Measure, write one record and a figure of each benchmark, and print their summaries.

    A name of a case, an implementation or a peer goes to every benchmark that has it. If cases or implementations are
    named, a benchmark that has none of them is left out.

    Raises:
        ValueError: an unknown name, a device that PyTorch does not find, a record that exists or cannot be resumed.
        OursError: at the end, if one of ours was wrong or failed.

    Ctrl-C ends the run and keeps what was measured; each row is written as soon as it is known.
    """
    console, device = console or default_console(), choose_device(options.device)
    chosen = benches if len(benches) == 1 else [bench for bench in benches if _has(bench, benches, options)]
    if not chosen:
        raise ValueError("no benchmark has both one of the cases and one of the implementations that are named")
    made = [bench(_narrow(options, bench) if len(benches) > 1 else options, device, console) for bench in chosen]
    return run_benches(benches[0].name if len(benches) == 1 else ALL, made, options, device, console)


def _cases(bench: type[Bench]) -> list[str]:
    return [*(case.name for case in bench.cases), *bench.aliases]


def _peers(options: Options) -> list[str]:
    return [] if options.peers in ("auto", "none") else [name.strip() for name in options.peers.split(",")]


def _has(bench: type[Bench], benches: Sequence[type[Bench]], options: Options) -> bool:
    """Whether a benchmark has one of the cases and one of the implementations; raise for a name that none has."""
    check_names("case", options.cases, (name for one in benches for name in _cases(one)))
    check_names("impl", options.impls, (name for one in benches for name in one.impls))
    check_names("peer", _peers(options), (name for one in benches for name in one.peers))
    pairs = ((options.cases, _cases(bench)), (options.impls, bench.impls))
    return all(not names or set(names) & set(known) for names, known in pairs)


def _narrow(options: Options, bench: type[Bench]) -> Options:
    """Return the options with the names that a benchmark has."""

    def known(names: Sequence[str], to: Iterable[str]) -> list[str]:
        there = set(to)
        return [name for name in names if name in there]

    named = _peers(options)
    peers = (",".join(known(named, bench.peers)) or "none") if named else options.peers
    return replace(
        options, cases=known(options.cases, _cases(bench)), impls=known(options.impls, bench.impls), peers=peers
    )

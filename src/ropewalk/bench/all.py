"""Benchmarks one after the other, in one record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from ropewalk.bench.core.load import ALL
from ropewalk.bench.core.options import Options, check_names, choose_device, split_names
from ropewalk.bench.core.runner import Bench, Result, run_benches
from ropewalk.bench.core.terminal import default_console


def run(benches: Sequence[type[Bench]], options: Options, console: Console | None = None) -> Result:
    """Measure, write one record and a figure of each benchmark, and print their summaries, as `run_benches` does.

    A name of a case, an implementation or a peer goes to every benchmark that has it. If cases or implementations are
    named, a benchmark that has none of them is left out.

    Raises:
        ValueError: an unknown name, a device that PyTorch does not find, a record that exists or cannot be resumed.
        OursError: at the end, if one of ours was wrong or failed.
    """
    console, device = console or default_console(), choose_device(options.device)
    if len(benches) == 1:
        return run_benches(benches[0].name, [benches[0](options, device, console)], options, device, console)
    check_names("case", options.cases, (name for one in benches for name in _cases(one)))
    check_names("impl", options.impls, (name for one in benches for name in one.impls))
    check_names("peer", _peers(options), (name for one in benches for name in one.peers))
    made = [bench(own, device, console) for bench in benches if (own := _narrow(options, bench)) is not None]
    if not made:
        raise ValueError("no benchmark has both one of the cases and one of the implementations that are named")
    return run_benches(ALL, made, options, device, console)


def _cases(bench: type[Bench]) -> list[str]:
    return [*(case.name for case in bench.cases), *bench.aliases]


def _peers(options: Options) -> list[str]:
    return [] if options.peers in ("auto", "none") else split_names(options.peers)


def _narrow(options: Options, bench: type[Bench]) -> Options | None:
    """Return the options with the names that a benchmark has; None: it has none of the cases or implementations."""
    cases = [name for name in options.cases if name in _cases(bench)]
    impls = [name for name in options.impls if name in bench.impls]
    if (options.cases and not cases) or (options.impls and not impls):
        return None
    peers = [name for name in _peers(options) if name in bench.peers]
    return replace(
        options, cases=cases, impls=impls, peers=",".join(peers or ["none"]) if _peers(options) else options.peers
    )

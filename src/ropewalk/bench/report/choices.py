"""Our kernels beside what `impl=None` picks, with flash-attn 4 and without.

A record has `impl=None` as "auto", on a machine where flash-attn 4 is installed or missing. Three times follow from it:

- our kernels: the fastest of `triton` and `gluon`, by name;
- `impl=None` on that machine: the time of "auto";
- `impl=None` without flash-attn 4, where "auto" picked `flash`: the time of the next backend in today's order, by name.

If "auto" picked another backend although flash-attn 4 was installed, it picks the same one without. All else was not
measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ropewalk.bench.attention.candidates import AUTO
from ropewalk.bench.report.entries import Entry, Source
from ropewalk.bench.report.verdicts import COMPARED, together

NOT_MEASURED = "not measured"
KERNELS = ("triton", "gluon")
_GLUON_FROM = {"rope": 512, "rerope": 4096}  # tokens, on Hopper
FLASH, PEER = "flash", "flash_attn_4"  # the library as our backend, and as a peer
PICKED = ("impl=None without flash-attn 4", "impl=None with flash-attn 4")
COLUMNS = {"flash_attn_4": "FlashAttention-4", "cudnn": "cuDNN", "flex": "FlexAttention"}  # of peers
CHOICES_NOTE = (
    "The fastest of our own kernels; the backend that impl=None picks where flash-attn 4 is missing, and where it is "
    "installed; other libraries after compiled RoPE. Each row is of the newest record of its case, hot."
)


@dataclass(frozen=True)
class Pick:
    """A backend and its time in microseconds."""

    backend: str
    time: float
    by_name: bool  # `impl=` named it; else `impl=None` picked it


@dataclass(frozen=True)
class Choice:
    """One case of one record. None: not measured."""

    lead: Entry  # any of the rows, for what they have in common
    kernels: Pick | None
    without_flash: Pick | None
    with_flash: Pick | None
    peers: dict[str, float]

    @property
    def picks(self) -> tuple[Pick | None, Pick | None, Pick | None]:
        """Our kernels, then what `impl=None` picks without flash-attn 4 and with it."""
        return self.kernels, self.without_flash, self.with_flash


def newest_choices(sources: Sequence[Source]) -> list[Choice]:
    """The choices of the newest record of each case, mode and protocol, in the order of the first one."""
    newest: dict[tuple[object, ...], tuple[str, Choice]] = {}
    for source in sources:
        for choice in choices(source):
            key, entry = choice.lead.group[1:], (source.date, choice)
            newest[key] = max(newest.get(key, entry), entry, key=lambda pair: pair[0])
    return [choice for _, choice in newest.values()]


def choices(source: Source) -> Iterator[Choice]:
    """The choices of the cases that a record has `impl=None` of."""
    if source.on_cpu:
        return
    for rows in together([entry for entry in source.entries if entry.time is not None]):
        position, of_peers, name = COMPARED.get(rows[0].mode, ("", "", None))
        ours = [row for row in rows if row.kind == "ours" and row.position == position]
        auto = next((row for row in ours if row.impl == AUTO), None)
        if name != AUTO or auto is None:
            continue
        by_name = {row.impl: Pick(row.impl, _time(row), True) for row in ours if row.impl != AUTO}
        kernels = min((by_name[impl] for impl in KERNELS if impl in by_name), key=lambda pick: pick.time, default=None)
        picked = Pick(str(auto.served_by), _time(auto), False)
        peers = {row.impl: _time(row) for row in rows if row.kind == "peer" and row.position == of_peers}
        if picked.backend == FLASH:
            yield Choice(auto, kernels, by_name.get(after_flash(auto, source)), picked, peers)
        else:
            yield Choice(auto, kernels, picked, picked if _has_flash(source) else None, peers)


def _time(row: Entry) -> float:
    assert row.time is not None
    return row.time.p50


def _has_flash(source: Source) -> bool:
    """Whether the record says that flash-attn 4 was installed."""
    version = (source.run.get("peers") or {}).get(PEER)
    return version is not None and not str(version).startswith("missing")


def after_flash(auto: Entry, source: Source) -> str:
    """The backend that follows `flash` in the order of a dense call; a test compares it with the registry."""
    least = _GLUON_FROM["rerope" if auto.position == "rerope" else "rope"]
    return "gluon" if source.run.get("capability") == "9.0" and auto.tokens >= least else "sdpa"

"""Comparing records: what is noise, what is a change, and what fails."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ropewalk.bench.attention.cases import AttentionCase
from ropewalk.bench.attention.rows import AttentionRow
from ropewalk.bench.core.load import BenchRecord
from ropewalk.bench.core.records import RecordWriter
from ropewalk.bench.core.timing import HostTime, Quantiles
from ropewalk.bench.report.compare import Change, Interval, changed, compare_records
from ropewalk.bench.rope.cases import Case
from ropewalk.bench.rope.rows import RopeRow
from ropewalk.cli import app

CASE = Case("rotate", 2, 6, 3, 1, 16)
ATTEND = AttentionCase("attend", 2, 19, 4, 2, 16, causal=True, modes=("fwd",))
CACHE = AttentionCase("cache", 2, 19, 4, 2, 16, modes=("decode",), form="cache", shortest=3)
RATES = {"copy_gb_per_s": 4000.0, "matmul_tflops": {"bfloat16": 700.0}}
RUN = {"benchmark": "all", "device": "some GPU", "date": "2026-11-21T03:37:22+00:00", "torch": "2.11", "commit": "abc"}


def spread(middle: float, noise: float = 0.01) -> Quantiles:
    return Quantiles(middle * (1 - noise), middle, middle * (1 + noise))


def rotate(time: float = 100.0, impl: str = "triton", kind: str = "ours", **more: Any) -> RopeRow:
    return RopeRow(
        **{"case": CASE, "direction": "fwd", "status": "ok", "time": spread(time), **more}, impl=impl, kind=kind
    )


def attend(time: float = 100.0, impl: str = "triton", kind: str = "ours", **more: Any) -> AttentionRow:
    given = {"case": ATTEND, "mode": "fwd", "position": "none", "status": "ok", "protocol": "hot", "time": spread(time)}
    return AttentionRow(**{**given, **more}, impl=impl, kind=kind)


def record(*rows: RopeRow | AttentionRow, **run: Any) -> BenchRecord:
    return BenchRecord(Path("r.jsonl"), {**RUN, **run}, rows)


def compare(before: Sequence[Any], after: Sequence[Any], **options: Any) -> list[Change]:
    return compare_records(record(*before), record(*after), **options).changes


@pytest.mark.parametrize(
    ("before", "after", "ratio"),
    [
        (Interval(9, 10, 11), Interval(9, 10, 11), None),
        (Interval(9, 10, 11), Interval(11, 12, 13), None),  # they meet
        (Interval(9, 10, 11), Interval(11.1, 12, 13), 1.2),
        (Interval(9, 10, 11), Interval(7, 8, 8.9), 0.8),
        (Interval(9, 10, 11), Interval(8, 8.5, 9), None),
        (Interval(100, 100, 100), Interval(100.9, 100.9, 100.9), None),  # below the floor
        (Interval(100, 100, 100), Interval(102, 102, 102), 1.02),
        (Interval(0, 0, 0), Interval(5, 5, 5), float("inf")),
        (Interval(0, 0, 0), Interval(0, 0, 0), None),
    ],
)
def test_a_change_is_apart_from_the_noise_and_above_the_floor(
    before: Interval, after: Interval, ratio: float | None
) -> None:
    assert changed(before, after) == (None if ratio is None else pytest.approx(ratio))


def test_a_record_is_no_worse_than_itself() -> None:
    rows = [rotate(), rotate(impl="copy_", kind="anchor"), attend(), attend(protocol="cool"), attend(position="rope")]
    found = compare_records(record(*rows), record(*rows))
    assert found.changes == found.regressions == []
    assert found.compared == 4  # of attention's first both protocols are one


@pytest.mark.parametrize("make", [rotate, attend])
@pytest.mark.parametrize(
    ("time", "verdict"), [(104.0, "slower"), (106.0, "regression"), (90.0, "faster"), (100.5, None)]
)
def test_past_the_threshold_it_is_a_regression(make: Any, time: float, verdict: str | None) -> None:
    found = compare([make()], [make(time)])
    assert [change.verdict for change in found] == ([] if verdict is None else [verdict])
    for change in found:
        assert change.quantity == "device"
        assert change.ratio == pytest.approx(time / 100)
        assert (change.before, change.after) == ("100 µs", f"{time:g} µs")
    strict = compare([make()], [make(time)], threshold=0.03)
    assert [change.regression for change in strict] == ([] if verdict is None else [time > 103])


def test_wide_noise_hides_a_change() -> None:
    assert compare([replace(rotate(), time=spread(100, 0.2))], [replace(rotate(), time=spread(130, 0.2))]) == []


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("kind", ["peer", "anchor"])
def test_what_is_not_ours_fails_only_if_it_is_asked(kind: str, every: bool) -> None:
    changes = compare([rotate(kind=kind), attend(kind=kind)], [rotate(200, kind=kind)], every=every)
    assert [(change.quantity, change.regression) for change in changes] == [("status", every), ("device", every)]
    assert {change.kind for change in changes} == {kind}


def test_graphs_hosts_and_memory_are_compared() -> None:
    before = rotate(
        graph=spread(10), host=HostTime(5, 6), host_forward=HostTime(7, 8), peak_bytes=2 << 20, direction="bwd"
    )
    worse = {
        "graph": {"graph": spread(12)},
        "host": {"host": HostTime(7, 7.5)},
        "host, recording": {"host_forward": HostTime(9, 9.5)},
        "memory": {"peak_bytes": 3 << 20},
    }
    for quantity, fields in worse.items():
        (change,) = compare([before], [replace(before, **fields)])
        assert (change.quantity, change.verdict) == (quantity, "regression")
        (change,) = compare([replace(before, **fields)], [before])
        assert change.verdict == ("less" if quantity == "memory" else "faster")
    assert compare([before], [replace(before, host=HostTime(6, 9))]) == []  # its least is no more than the other median
    (change,) = compare([attend(peak_bytes=100, time=1)], [attend(peak_bytes=103, time=1)])
    assert change.verdict == "more"


@pytest.mark.parametrize("status", ["wrong", "failed", "unsupported", None])
@pytest.mark.parametrize("make", [rotate, attend])
def test_what_was_right_must_stay_right(status: str | None, make: Any) -> None:
    bad = [] if status is None else [replace(make(status=status), time=None)]
    if make is attend:
        bad = [replace(row, protocol=None) for row in bad]
    beside = make(impl="reference")
    (change,) = compare([make(), beside], [*bad, beside])
    assert (change.quantity, change.before, change.verdict) == ("status", "ok", "regression")
    assert change.after == (status if status in ("wrong", "failed") else "gone")
    (change,) = compare([*bad, beside], [make(), beside])
    there = status in ("wrong", "failed")
    assert (change.before, change.after) == (status if there else "not there", "ok")
    assert change.verdict == ("changed" if there else "in one alone")
    assert compare([*bad, beside], [*bad, beside]) == []


def test_a_protocol_or_a_graph_that_is_gone_is_a_regression() -> None:
    both = [attend(), attend(protocol="cool")]
    (change,) = compare(both, both[:1])
    assert (change.label, change.after, change.verdict) == ("attend bfloat16 fwd cool, device", "gone", "regression")
    (change,) = compare([rotate(graph=spread(5))], [rotate(graph_reason="RuntimeError")])
    assert (change.label, change.verdict) == ("rotate bfloat16 half/out of place fwd, graph", "regression")
    (change,) = compare([rotate()], [rotate(graph=spread(5))])
    assert change.verdict == "in one alone"


def test_only_rows_of_the_same_thing_are_compared() -> None:
    """Each of these differs from the first by one field of those that say what a row is of."""
    rows: list[Any] = [attend(), attend(impl="flash"), attend(position="rope"), attend(protocol="cool")]
    rows += [attend(yardstick="other"), attend(mode="bwd"), attend(case=replace(ATTEND, dtype="float16"))]
    rows += [rotate(), rotate(direction="bwd"), rotate(impl="native"), rotate(case=replace(CASE, interleaved=True))]
    slower = [replace(row, time=spread(100.0 + 10 * (i + 1))) for i, row in enumerate(rows)]
    found = compare(rows, slower)
    assert sorted(change.ratio or 0 for change in found) == pytest.approx([1 + 0.1 * (i + 1) for i in range(len(rows))])


def test_modes_that_a_case_gained_do_not_part_it() -> None:
    more = attend(200, case=replace(ATTEND, modes=("fwd", "bwd")))
    assert [change.verdict for change in compare([attend()], [more])] == ["regression"]
    more_directions = rotate(200, case=replace(CASE, directions=("fwd",)))
    assert [change.verdict for change in compare([rotate()], [more_directions])] == ["regression"]


def test_the_worst_comes_first() -> None:
    before = [rotate(impl=name) for name in "abcd"] + [attend()]
    after = [rotate(time, impl=name) for time, name in zip((103.0, 120.0, 50.0, 150.0), "abcd", strict=True)]
    found = [(change.impl, change.verdict) for change in compare(before, after)]
    regressions = [("triton", "regression"), ("d", "regression"), ("b", "regression")]
    assert found == [*regressions, ("a", "slower"), ("c", "faster")]


# Relative to what the device could do


def with_copy(time: float, copy: float, **more: Any) -> list[RopeRow]:
    return [rotate(time, **more), rotate(copy, impl="copy_", kind="anchor", **more)]


def test_rotations_are_relative_to_their_copy() -> None:
    fast, slow = with_copy(100, 50, graph=spread(8)), with_copy(200, 100, graph=spread(8))
    assert {change.impl for change in compare(fast, slow)} == {"triton", "copy_"}
    assert compare(fast, slow, relative=True) == []
    (change,) = compare(fast, with_copy(200, 50, graph=spread(8)), relative=True)
    assert (change.quantity, change.before, change.after, change.verdict) == ("device", "2", "4", "regression")
    hosts = [[replace(row, host=HostTime(time, time)) for row in fast] for time in (1, 9)]
    assert compare(*hosts, relative=True) == []


def test_attention_is_relative_to_the_matrix_product_and_decoding_to_the_copy() -> None:
    half = {"copy_gb_per_s": 2000.0, "matmul_tflops": {"bfloat16": 700.0}}
    decode = attend(case=CACHE, mode="decode")
    slower = [attend(), replace(decode, time=spread(200))]
    (change,) = compare_records(record(attend(), decode, rates=RATES), record(*slower, rates=half)).changes
    assert change.label == "cache bfloat16 decode hot"
    found = compare_records(record(attend(), decode, rates=RATES), record(*slower, rates=half), relative=True)
    assert found.changes == []
    cold = {"copy_gb_per_s": 2000.0, "matmul_tflops": {"bfloat16": 350.0}}
    (change,) = compare_records(record(attend(), rates=cold), record(attend(), rates=RATES), relative=True).changes
    assert change.verdict == "regression"
    assert change.ratio == pytest.approx(2)


@pytest.mark.parametrize("row", [rotate(), attend(), attend(case=CACHE, mode="decode")])
def test_without_what_times_are_relative_to_there_is_no_comparison(row: Any) -> None:
    with pytest.raises(ValueError, match=r"r\.jsonl does not have what the times of \w+ bf.* relative to"):
        compare([row], [row], relative=True)


def test_records_that_have_nothing_in_common_are_refused() -> None:
    with pytest.raises(ValueError, match="have no row in common: nothing can be compared"):
        compare([rotate()], [attend()])


# The command


def write(path: Path, *rows: RopeRow | AttentionRow, **run: Any) -> str:
    with RecordWriter(path, {**RUN, **run}) as writer:
        for row in rows:
            writer.append(row, "rope" if isinstance(row, RopeRow) else "attention")
    return str(path)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "compare", *arguments], env={"COLUMNS": "200"})


def test_the_command_says_what_changed_by_its_exit_code(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", rotate(), attend(kind="peer", impl="flex"))
    b = write(tmp_path / "b.jsonl", rotate(107), attend(200, kind="peer", impl="flex"), torch="2.12")
    same = invoke(a, a)
    assert same.exit_code == 0
    assert "2 rows compared: nothing changed beyond the noise" in same.stdout
    assert "NOTE" not in same.stdout
    worse = invoke(a, b)
    assert worse.exit_code == 1
    assert "NOTE: torch was '2.11', and is '2.12'" in worse.stdout
    assert "2 rows compared: 1 regression, 1 slower" in worse.stdout
    assert "regressions: worse by more than 5.0%" in worse.stdout
    assert "+100.0%" in worse.stdout
    assert invoke(b, a).exit_code == 0
    tolerant = invoke(a, b, "--threshold", "0.1")
    assert tolerant.exit_code == 0
    assert "2 slower" in tolerant.stdout
    assert invoke(a, b, "--threshold", "0.1", "--all").exit_code == 1


def test_the_command_counts_peers_that_are_in_one_alone(tmp_path: Path) -> None:
    with_peers = [rotate(), rotate(impl="quack", kind="peer"), attend(impl="flex", kind="peer"), rotate(impl="native")]
    a = write(tmp_path / "a.jsonl", *with_peers)
    b = write(tmp_path / "b.jsonl", rotate(), rotate(impl="other"))
    result = invoke(a, b)
    assert result.exit_code == 1
    assert "1 rows compared: 1 regression, 3 in one alone" in result.stdout
    for name, listed in {"quack": False, "flex": False, "native": True, "other": True}.items():
        assert (name in result.stdout) == listed
    assert "quack" in invoke(a, b, "--all").stdout


def test_the_command_notes_another_device(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", rotate(), driver_version="1")
    b = write(tmp_path / "b.jsonl", rotate(), driver_version="2", device="another GPU")
    text = invoke(a, b).stdout
    assert "NOTE: device was 'some GPU', and is 'another GPU'" in text
    assert "NOTE: driver_version was '1', and is '2'" in text


def test_the_command_compares_relative_to_rates(tmp_path: Path) -> None:
    half = {"copy_gb_per_s": 1.0, "matmul_tflops": {"bfloat16": 350.0}}
    a, b = (write(tmp_path / f"{i}.jsonl", attend(100.0 * i), rates=x) for i, x in ((1, RATES), (2, half)))
    assert invoke(a, b).exit_code == 1
    assert invoke(a, b, "--relative").exit_code == 0


@pytest.mark.parametrize("text", [None, "no JSON", '{"format": 1, "benchmark": "training"}', ""])
def test_what_cannot_be_read_is_a_usage_error(text: str | None, tmp_path: Path) -> None:
    a, other = write(tmp_path / "a.jsonl", rotate()), tmp_path / "other.jsonl"
    if text is not None:
        other.write_text(text)
    for arguments in ((a, str(other)), (str(other), a)):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert "other.jsonl" in result.stderr
        assert "Traceback" not in result.output


def test_records_that_are_kept_can_be_compared_with_new_ones(tmp_path: Path) -> None:
    """Fields that older records lack have their defaults."""
    a = Path(write(tmp_path / "a.jsonl", attend(matrix_ratio=0.5)))
    lines = [json.loads(line) for line in a.read_text().splitlines()]
    for name in ("matrix_ratio", "gb_per_s", "yardstick"):
        del lines[1][name]
    for name in ("far_window", "yardstick", "shortest"):
        del lines[1]["case"][name]
    older = tmp_path / "older.jsonl"
    older.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert invoke(str(older), str(a)).exit_code == 0

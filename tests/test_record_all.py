"""tools/record_all.py runs each case once, goes on where it stopped, and joins what belongs together."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import overview
import pytest
import record_all
import typer
from record_all import TASKS, Folder, Task

from ropewalk.bench.attention.bench import AttentionBench
from ropewalk.bench.host.bench import HostBench
from ropewalk.bench.rope.bench import NormBench, RopeBench, SweepBench
from ropewalk.bench.training.bench import TrainingBench
from ropewalk.cli.bench import app

RUN = {"format": 1, "benchmark": "rope", "device": "NVIDIA H200", "commit": "1234567"}
# Writes a record like a benchmark; without --resume anew.
PROGRAM = """
import json, pathlib, sys, time
path, resumed = pathlib.Path(sys.argv[1]), "--resume" in sys.argv
with path.open("a" if resumed else "x") as file:
    if not resumed:
        file.write(json.dumps({run}) + "\\n" + json.dumps({{"case": {{}}, "impl": "first"}}) + "\\n")
        file.flush()
        time.sleep({seconds})
    file.write(json.dumps({{"case": {{}}, "impl": "second"}}) + "\\n" + json.dumps({{"end": "now"}}) + "\\n")
"""


def options_of(task):
    """Parse a task's options as the command does."""
    command = typer.main.get_command(app).commands[task.benchmark]
    return command.make_context(task.name, task.arguments.split()).params


def units_of(benchmark, bench):
    """The pairs of case and mode that the tasks of a benchmark measure, of a class of cases."""
    modes = {case.name: set() for case in bench.cases}
    for case in bench.cases:
        modes[case.name] |= set(case.modes)
    found = []
    for task in (task for task in TASKS if task.benchmark == benchmark):
        options = options_of(task)
        other = NormBench if options.get("norm") else SweepBench if options.get("sweep") else RopeBench
        if benchmark != "rope" or other is bench:
            chosen = (options.get("mode") or ",".join(bench.modes)).split(",")
            assert set(options["case"] or ()) <= set(modes)
            for name in options["case"] or modes:
                found += [(name, mode) for mode in modes[name] if mode in chosen]
    return sorted(found), sorted((name, mode) for name, of in modes.items() for mode in of)


@pytest.mark.parametrize(
    ("benchmark", "bench"),
    [
        ("rope", RopeBench),
        ("rope", NormBench),
        ("rope", SweepBench),
        ("attention", AttentionBench),
        ("training", TrainingBench),
    ],
)
def test_the_tasks_have_every_case_and_mode_once(benchmark, bench):
    measured, known = units_of(benchmark, bench)
    assert measured == known


def test_tasks_time_every_small_call_on_the_host_once():
    measured, known = ([unit for unit in units if "small" in unit[0]] for units in units_of("host", HostBench))
    assert measured == known


def test_kernel_pages_show_what_is_measured():
    known = {
        unit
        for benchmark, bench in (("rope", RopeBench), ("attention", AttentionBench))
        for unit in units_of(benchmark, bench)[0]
    }
    pages = sorted((Path(__file__).parents[1] / "docs/kernels").glob("*.md"))
    rows = [cells for path in pages for _, cells in overview.measured_rows(path.read_text(encoding="utf-8"))]
    shown = {(case, mode.partition(",")[0]) for _, case, mode, *_ in rows}
    assert len(shown) > 10
    assert shown <= known


def test_names_are_different_and_what_the_host_decides_is_host_timed():
    assert len({task.name for task in TASKS}) == len(TASKS)
    assert all(task.is_host_timed for task in TASKS if task.benchmark == "host" or "host" in task.name)
    assert all(options_of(task) for task in TASKS if task.benchmark == "host")


def test_a_plan_ends_with_what_is_host_timed():
    starts = record_all.plan(TASKS, 4)
    assert len(starts) == len(TASKS)
    of = {flag: [one for one in starts if one[2].is_host_timed == flag] for flag in (False, True)}
    assert min(start for start, *_ in of[True]) == max(start + task.seconds for start, _, task in of[False])
    for gpu in range(4):
        times = [(start, start + task.seconds) for start, on, task in starts if on == gpu]
        assert all(end <= start for (_, end), (start, _) in pairwise(times))
    assert {gpu for _, gpu, _ in of[True]} == {0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose tasks are the program; their arguments say how many seconds it takes."""
    command_of_bench = Folder.command

    def command(self, task):
        source = PROGRAM.format(run={**RUN, "benchmark": task.benchmark}, seconds=task.arguments)
        resume = ["--resume"] if "--resume" in command_of_bench(self, task) else []
        return [sys.executable, "-c", source.replace("'", '"'), str(self.part(task)), *resume]

    monkeypatch.setattr(Folder, "command", command)
    return Folder(tmp_path)


def test_tasks_run_side_by_side_and_join(folder, capsys):
    tasks = (Task("a", "rope", "1", 9), Task("b", "rope", "1", 9), Task("c", "serving", "0", 9, is_host_timed=True))
    record_all.run(tasks, folder, ["0", "1"], 100.0)
    said = capsys.readouterr().out.splitlines()
    assert ["started" in line for line in said] == [True, True, False, False, True, False]
    assert [path.name for path in folder.join(tasks)] == ["rope-h200.jsonl", "serving-h200.jsonl"]
    lines = [json.loads(line) for line in (folder.path / "rope-h200.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines if "format" in line] == ["a", "b"]
    assert sum("impl" in line for line in lines) == 4


def test_newer_runs_replace_those_of_their_names_and_the_others_stay(tmp_path):
    def write(name, **commits):
        runs = ({**RUN, "name": run, "commit": commit} for run, commit in commits.items())
        lines = [line for run in runs for line in (run, {"case": {"of": run["commit"]}}, {"end": "now"})]
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return path

    record, newer = write("rope-h200.jsonl", a="1", b="1", c="1"), write("newer.jsonl", b="2", d="2")
    record_all.update(record, newer)
    assert record.read_text() == write("expected.jsonl", a="1", b="2", c="1", d="2").read_text()
    record_all.update(tmp_path / "first.jsonl", newer)
    assert (tmp_path / "first.jsonl").read_text() == newer.read_text()
    newer.write_text(newer.read_text().replace("NVIDIA H200", "NVIDIA H100"))
    with pytest.raises(SystemExit, match="must be of one GPU"):
        record_all.update(record, newer)


def test_runs_without_a_name_and_of_one_name_stay(tmp_path):
    def write(name, *runs):
        lines = [{**RUN, **run} for run in runs]
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{json.dumps(line)}\n{json.dumps({'end': 'now'})}\n" for line in lines))
        return path

    old = [{"commit": "1"}, {"commit": "2"}, {"name": "a", "commit": "3"}, {"name": "a", "commit": "4"}]
    record, newer = write("rope-h200.jsonl", *old), write("newer/rope-h200.jsonl", {"commit": "5"}, {"commit": "6"})
    record_all.update(record, newer)
    assert record.read_text() == write("expected.jsonl", *old, {"commit": "5"}, {"commit": "6"}).read_text()
    record_all.update(record, write("newer.jsonl", {"name": "a", "commit": "7"}))
    found = [json.loads(line)["commit"] for line in record.read_text().splitlines() if "format" in line]
    assert found == ["1", "2", "7", "5", "6"]


def test_host_timed_tasks_start_when_others_ended_one_at_a_time(folder, capsys):
    host_timed = [Task(name, "rope", "1", 9, is_host_timed=True) for name in "cd"]
    tasks = (*host_timed, Task("a", "rope", "2", 9), Task("b", "rope", "0", 9))
    record_all.run(tasks, folder, ["0", "1"], 100.0)
    said = [line.split()[2:4] for line in capsys.readouterr().out.splitlines()]
    events = "".join(name[0] if what == "started" else name[0].upper() for name, what in said)
    assert events == "abBAcCdD"


def test_a_task_that_is_late_is_stopped_and_goes_on(folder, capsys, monkeypatch):
    monkeypatch.setattr(record_all, "MARGIN", 0)
    task = Task("a", "rope", "60", 1)
    record_all.run((task,), folder, ["0"], 100.0)
    assert "a: stopped" in capsys.readouterr().out
    assert not folder.is_done(task)
    assert [line.get("impl") for line in folder.lines(task)] == [None, "first"]
    with folder.part(task).open("a") as file:
        file.write('{"case": {}, "im')  # cut off
    assert len(folder.lines(task)) == 2
    assert folder.join((task,))
    with folder.part(task).open("r+") as file:
        file.truncate(file.seek(0, 2) - len('{"case": {}, "im'))
    record_all.run((task,), folder, ["0"], 100.0)
    assert [line.get("impl") for line in folder.lines(task)] == [None, "first", "second", None]


def test_what_does_not_fit_into_the_limit_does_not_start(folder, capsys):
    record_all.run((Task("a", "serving", "0", 9), Task("b", "blocks", "0", 200)), folder, ["0"], 100.0)
    assert "b: not started" in capsys.readouterr().out


def test_parts_of_two_commits_are_not_joined(folder):
    for name, commit in (("a", "1"), ("b", "2")):
        lines = ({**RUN, "commit": commit}, {"case": {}, "impl": name}, {"end": "now"})
        folder.part(Task(name, "rope", "", 1)).write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(SystemExit, match="commit was '1', and is '2'"):
        folder.join([Task("a", "rope", "", 1), Task("b", "rope", "", 1)])


def test_gpus_have_short_names():
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "CPU x86_64")
    assert [record_all.short_name(name) for name in names] == ["h200", "h100", "cpu"]


def test_an_interrupted_call_stops_its_tasks(folder, capsys, monkeypatch):
    task = Task("a", "rope", "60", 99)

    def interrupt(seconds):
        while not folder.lines(task):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(record_all.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        record_all.run((task,), folder, ["0"], 100.0)
    assert "a: stopped" in capsys.readouterr().out
    assert not folder.is_done(task)


@pytest.mark.parametrize(
    ("device", "modules", "reason"),
    [
        ("h200", ["json"], None),
        ("", [], None),
        ("h100", [], "--device is 'h100', and the GPU is 'NVIDIA H200'"),
        ("h200", ["json", "no_such_peer"], "--needs names 'no_such_peer', which cannot be imported: No module named"),
    ],
)
def test_a_run_on_another_gpu_or_without_a_peer_does_not_begin(device, modules, reason):
    """Else its record would have to be thrown away."""
    found = record_all.why_not_here(device, "NVIDIA H200", modules)
    assert found is None if reason is None else found.startswith(reason)

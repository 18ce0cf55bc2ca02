"""The whole comparison, as the command runs it: its files, its end by a kill and what comes after, its errors."""

import dataclasses
import math
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from helpers.bert_runs import TEXT, TINY
from transformers import Trainer
from typer.testing import CliRunner

from ropewalk.cli import app
from ropewalk.experiments.bert_positions import training
from ropewalk.experiments.bert_positions.figures import read_bert_record
from ropewalk.experiments.bert_positions.run import _visible_gpus

FILES = {"config.yaml", "data", "runs", "record.jsonl", "learning.png", "speed.png", "tables.md"}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for kind in training.EFFORTS:
        monkeypatch.setitem(training.EFFORTS, kind, (128, 1, 1, 0.0))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Sums are rounded by the number of threads, which a run side by side divides among its processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # of processes
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A file of settings, and a text, for the command."""
    folder = tmp_path_factory.mktemp("settings")
    (folder / "rope.txt").write_text("\n".join(f"{number} {TEXT}" for number in range(400)))
    values = dataclasses.asdict(TINY) | {"schemes": ["rope", "exposb"], "corpus": [str(folder / "rope.txt")]}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values | {"length_multiples": [1, 4]}))
    return folder / "tiny.yaml"


def invoke(*arguments):
    return CliRunner().invoke(app, ["experiment", "bert-positions", *map(str, arguments)])


def losses_of(output):
    record = read_bert_record(output / "record.jsonl")
    return record.training.losses.tolist(), record.evaluation.to_dict("records")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, settings, device):
    output = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training.EFFORTS, device.type, (128, 1, 1, 0.0))
        result = invoke("--config", settings, "--device", device, "-o", output, "--record", output.parent / "copy")
    assert result.exit_code == 0, result.output
    return output, result.stdout


def test_all_of_it(uninterrupted, device):
    output, said = uninterrupted
    assert {path.name for path in output.iterdir()} == FILES
    assert (output.parent / "copy").read_text() == (output / "record.jsonl").read_text()
    assert str(output.parent) not in (output / "record.jsonl").read_text()
    for expected in ("text: rope.txt", "rope, seed 0: step 12 of 12", "ExpoSB", "learning.png"):
        assert expected in said
    record = read_bert_record(output / "record.jsonl")
    assert record.run["config"]["corpus"] == ["rope.txt"]
    assert record.run["precision"] == ("no" if device.type == "cpu" else "bf16")
    assert record.training.scheme.tolist() == ["rope", "exposb"]
    assert record.evaluation.scheme.tolist() == ["rope", "rope", "exposb", "exposb"]
    assert record.evaluation.length.tolist() == [16, 64, 16, 64]
    assert len(record.speed) == 2 * 5
    assert len(record.exposb) == 11
    assert record.exposb.measured[7]["trained models"] == 1
    assert len(record.recall) == 2 * (2 + 4)  # schemes; distances 8 and 13 at length 16, 8, 16, 32 and 56 at 64
    assert record.probe.empty  # of a text that is no Python
    assert 2 < record.run["corpus"]["unigram_loss"] < math.log(512)


def test_what_is_finished_is_not_done_again(uninterrupted, device, monkeypatch):
    monkeypatch.setattr(Trainer, "training_step", None)
    before = losses_of(uninterrupted[0])
    result = invoke("--device", device, "-o", uninterrupted[0], "--resume")
    assert result.exit_code == 0, result.output
    assert losses_of(uninterrupted[0]) == before


def test_a_record_grows_over_calls(tmp_path, settings, uninterrupted, device):
    record = tmp_path / "record.jsonl"
    for scheme in ("exposb", "rope"):
        options = ["--schemes", scheme, "--config", settings, "--device", device, "--record", record]
        result = invoke(*options, "-o", tmp_path / scheme)
        assert result.exit_code == 0, result.output
    grown, whole = read_bert_record(record), read_bert_record(uninterrupted[0] / "record.jsonl")
    assert (tmp_path / "rope/record.jsonl").read_text() == record.read_text()
    assert grown.run["config"] == whole.run["config"]
    assert [part["schemes"] for part in grown.run["parts"]] == [["exposb"], ["rope"]]
    for kind in ("evaluation", "recall"):
        rows, expected = (getattr(x, kind).sort_values("scheme", kind="stable") for x in (grown, whole))
        assert rows.to_dict("records") == expected.to_dict("records")
    assert grown.exposb.to_dict("records") == whole.exposb.to_dict("records")
    assert set(grown.speed.model) == {"exposb", "Hugging Face BERT"}  # of the first call
    before = record.read_text()
    for options, message in (
        (["--schemes", "rope"], "has scheme 'rope' already: leave it out of schemes"),
        (["--schemes", "alibi", "--steps", "7"], "steps is 12 there, but 7 here"),
    ):
        result = invoke(*options, "--config", settings, "--device", device, "--record", record, "-o", tmp_path / "new")
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert record.read_text() == before
        assert not list((tmp_path / "new").iterdir())
    result = invoke("--device", device, "--record", record, "-o", tmp_path / "rope", "--resume")
    assert result.exit_code == 0, result.output
    assert losses_of(tmp_path / "rope")[1] == read_bert_record(record).evaluation.to_dict("records")


def test_a_folder_may_get_further_schemes(tmp_path, settings, uninterrupted, device):
    file = tmp_path / "untimed.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(settings.read_text()) | {"time_steps": False}))
    first = ["--config", file, "--device", device, "-o", tmp_path / "out"]
    result = invoke(*first, "--schemes", "rope")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "out/speed.png").exists()
    result = invoke(*first, "--resume")
    assert result.exit_code == 0, result.output
    assert "exposb, seed 0: step 12" in result.output
    assert "rope, seed 0: step" not in result.output
    assert losses_of(tmp_path / "out") == losses_of(uninterrupted[0])


@pytest.mark.slow
def test_killed_and_resumed_it_is_as_if_nothing_had_been(tmp_path, settings, uninterrupted, device):
    output = tmp_path / "out"
    command = [sys.executable, "-m", "ropewalk", "experiment", "bert-positions", "--config", str(settings)]
    process = subprocess.Popen([*command, "--device", str(device), "-o", str(output)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(output.glob("runs/*/checkpoint-4")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (output / "config.yaml").exists()
    assert not (output / "record.jsonl").exists()
    result = invoke("--device", device, "-o", output, "--resume")
    assert result.exit_code == 0, result.output
    assert losses_of(output) == losses_of(uninterrupted[0])


@pytest.mark.skipif(sys.platform != "linux", reason="processes are started as Linux does")
@pytest.mark.slow
def test_side_by_side_each_learns_the_same(tmp_path, settings, uninterrupted, device):
    output = tmp_path / "out"
    result = invoke("--config", settings, "--device", device, "-o", output, "--jobs", 2)
    assert result.exit_code == 0, result.output
    assert losses_of(output) == losses_of(uninterrupted[0])


def test_processes_are_shared_among_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _visible_gpus(torch.device("cuda")) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5f")
    assert _visible_gpus(torch.device("cuda")) == ["2", "GPU-5f"]
    assert _visible_gpus(torch.device("cuda:0")) == _visible_gpus(torch.device("cpu")) == []


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tmp_path, settings):
    values = yaml.safe_load(settings.read_text()) | {"dropout": 0.0, "precision": "no", "schemes": ["rope"]}
    losses = []
    for processes in (1, 2):
        output, file = tmp_path / str(processes), tmp_path / "tiny.yaml"
        file.write_text(yaml.safe_dump(values))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m", "ropewalk"]
        command += ["experiment", "bert-positions", "--config", str(file), "--device", "cpu", "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        losses.append(losses_of(output)[0][0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_only_the_same_run_can_be_resumed(tmp_path, settings, uninterrupted):
    output = uninterrupted[0]
    for options, message in (
        (["-o", output], "exists already and is not an empty folder: resume it, or choose another output"),
        (["-o", output, "--resume", "--steps", "7"], "steps is 12 there, but 7 here: it must be the same run"),
        (["-o", tmp_path / "new", "--resume"], "cannot be read"),
        (["-o", tmp_path / "new", "--jobs", "2", "--schemes", "rotary"], "'rotary'"),
        (["-o", tmp_path / "new", "--device", "gpu"], "the device is 'gpu'"),
    ):
        result = invoke("--device", "cpu", *([] if "--resume" in options else ["--config", settings]), *options)
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_text_that_will_not_do_leaves_nothing_behind(tmp_path, settings):
    result = invoke("--config", settings, "--corpus", tmp_path / "missing", "-o", tmp_path / "new", "--device", "cpu")
    assert result.exit_code == 2
    assert "does not exist, but must be a file or a folder with text" in result.stderr
    assert not list((tmp_path / "new").iterdir())


THEIRS = """
from dataclasses import dataclass
import torch
from ropewalk import Alibi, PositionScheme
from ropewalk.modules.bert import BERTAttention

@dataclass(frozen=True, eq=False)
class Fall(PositionScheme):
    slope: float = 0.5

    def score_mod(self, scores, distance):
        return scores - self.slope * distance.abs()

class LearnedSlopes(BERTAttention):
    def _make_positions(self):
        self.slopes = torch.nn.Parameter(torch.ones(self.num_heads))

    @property
    def position(self):
        return Alibi(self.slopes)

def fails(n_heads):
    raise RuntimeError("no luck")
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A module of schemes in the current folder."""
    (tmp_path / "their_bert.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "their_bert"
    sys.modules.pop("their_bert", None)


def test_schemes_from_outside_are_compared(tmp_path, settings, theirs, device):
    schemes = ["rope", f"{theirs}:Fall", f"{theirs}:LearnedSlopes"]
    values = yaml.safe_load(settings.read_text()) | {"schemes": schemes, "steps": 4, "time_steps": False}
    values["scheme_options"] = {f"{theirs}:Fall": {"slope": 2.0}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(values))
    result = invoke("--config", tmp_path / "own.yaml", "--device", device, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    record = read_bert_record(tmp_path / "out/record.jsonl")
    assert list(record.training.scheme) == schemes
    sizes = dict(zip(record.training.scheme, record.training.parameters, strict=True))
    assert sizes[schemes[2]] - sizes[schemes[1]] == TINY.num_layers * TINY.num_heads
    tables = (tmp_path / "out/tables.md").read_text()
    assert "\n| Fall |" in tables
    assert "\n| LearnedSlopes |" in tables
    assert "ExpoSB" not in tables


def test_a_name_that_is_no_scheme_is_one_line(tmp_path, settings, theirs):
    for name, said in (
        (f"{theirs}:Rise", "has no 'Rise'"),
        (f"{theirs}:torch", "must be a PositionScheme"),
        (f"{theirs}:PositionScheme", "defines neither rotation nor score_mod"),
        (f"{theirs}:fails", "raised RuntimeError: no luck"),
    ):
        result = invoke("--config", settings, "--schemes", name, "-o", tmp_path / "out")
        assert result.exit_code == 2
        assert result.stderr.startswith("error: ")
        assert said in result.stderr
        assert result.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()

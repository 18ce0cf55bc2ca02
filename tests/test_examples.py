"""The examples run, and print what they claim."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, capsys, *arguments):
    with mock.patch.object(sys, "argv", [name, *arguments]):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_rope_api(capsys):
    printed = run("rope_api.py", capsys)
    differences = [float(number) for number in re.findall(r"\d\.\d+e[+-]\d+", printed)]
    assert len(differences) == (9 if torch.cuda.is_available() else 8)
    assert max(differences) < 1e-4
    assert ("rope_triton: not run" in printed) == (not torch.cuda.is_available())


def test_attention_layer(capsys):
    printed = run("attention_layer.py", capsys)
    assert re.search(r"the first half's outputs changed by 0\.0e\+00", printed)
    assert "finite is True; rows that attend nothing: 0.0e+00 + bias" in printed
    errors = [float(error) for error in re.findall(r"mean squared error (\d+\.\d+)", printed)]
    assert len(errors) == 4
    assert errors[-1] < 0.7 * errors[0]


@pytest.mark.slow
def test_sparse_text(capsys):
    printed = run("sparse_text.py", capsys)
    losses = [float(loss) for loss in re.findall(r"(\d+\.\d+) at last", printed)]
    assert len(losses) == 2
    assert all(0 < loss < 2.1 for loss in losses)  # the topic's letters alone leave log(8)


def test_generate(capsys):
    printed = run("generate.py", capsys)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 3
    assert losses[-1] < 0.1 * losses[0]
    assert float(re.search(r"logits differ by (\d\.\d+e[+-]\d+)", printed)[1]) < 1e-4
    assert "3 of 3 are continued as they began" in printed


@pytest.mark.slow
def test_context_parallel_has_the_losses_of_one_process():
    losses = []
    for processes in (1, 2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += [str(EXAMPLES / "context_parallel.py"), "--steps", "4"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert result.returncode == 0, result.stderr
        losses.append([float(loss) for loss in re.findall(r"loss (\d+\.\d+)", result.stdout)])
    assert len(losses[0]) == 4
    # Means of 500 numbers near 4.3 in float32, after 3 updates of weights that differ by roundings.
    assert losses[1] == pytest.approx(losses[0], rel=4 * 10 * torch.finfo(torch.float32).eps)
    assert len(set(losses[0])) == 4


def test_own_scheme(capsys, tmp_path):
    path = tmp_path / "figure.png"
    printed = run("own_scheme.py", capsys, "--steps", "2", "--windows", "1", "--figure", str(path))
    losses = [float(loss) for loss in re.findall(r"(\d+\.\d+) at \d+", printed)]
    assert len(losses) == 4 * 4
    assert all(0 < loss < 6 for loss in losses)  # log(256) is 5.5
    assert path.read_bytes().startswith(b"\x89PNG")


def test_profile_rotary(capsys, tmp_path):
    printed = run("profile_rotary.py", capsys, "--json", str(tmp_path / "record.json"))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["torch"] == torch.__version__
    assert record["device"].split()[0] in printed
    rows = {row["implementation"]: row for row in record["rows"]}
    assert all(name in printed for name in rows)
    assert list(rows)[:2] == ["copy_ of the same bytes", "compiled PyTorch"]
    assert all(row["gb_per_s"] > 0 and row["host_us"] > 0 for row in rows.values())
    if torch.cuda.is_available():
        ours = next(row for name, row in rows.items() if name.startswith("rotary_embedding"))
        assert ours["kernels"] == rows["copy_ of the same bytes"]["kernels"] == 1
        assert all(row["device_us"] > 0 for row in rows.values())
    else:
        assert "no GPU here" in printed
        assert not any(row["kernels"] for row in rows.values())


def test_rerope_benchmark(capsys):
    small = ("--tokens", "200", "--heads", "3", "--window", "60", "--heads-at-once", "2")
    printed = run("rerope_benchmark.py", capsys, *small)
    checks = re.findall(r"rerope_attention.*, (b?float16), ((?:not )?causal): (.*)", printed)
    assert {check[:2] for check in checks} == {
        (dtype, order) for dtype in ("float16", "bfloat16") for order in ("causal", "not causal")
    }
    for *_, shares in checks:
        errors = [float(share) for share in shares.split(", ")]
        assert len(errors) == 6
        assert max(errors) <= 1
    rows = re.findall(r"│ (eager PyTorch|rerope_attention.*?) +│ +(b?float16) │ +([\d.]+) │ .* │ +([\d.]+) │", printed)
    names = {"eager PyTorch", "rerope_attention"}
    if torch.cuda.is_available():
        names.add("rerope_attention, triton")
    assert {row[:2] for row in rows} == {(name, dtype) for name in names for dtype in ("float16", "bfloat16")}
    assert all(float(time) > 0 and float(ratio) > 0 for *_, time, ratio in rows)
    assert all(ratio == "1.00" for name, *_, ratio in rows if name == "eager PyTorch")
    assert "2 heads at a time" in printed
    assert ("triton: not run" in printed) == ("No GPU here" in printed) == (not torch.cuda.is_available())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_is_tested(path):
    assert f'"{path.name}"' in Path(__file__).read_text()

"""tools/bench_serving.py times FlashInfer beside ours, on the same pages."""

import json
import math
import sys

import bench_serving as serving
import pytest
import tables
import torch

from ropewalk import attention
from ropewalk.bench.core.load import read_record
from ropewalk.bench.core.timing import Quantiles

LENGTHS = torch.tensor([5, 64, 33])


class Wrapper:
    """FlashInfer's decoding as its documentation has it, by the reference; `factor` and `failing` make it wrong."""

    factor = 1.0
    failing = ""  # "plan" or "run", which raises

    def __init__(self, workspace, kv_layout="HND", *, use_tensor_cores=False):
        assert (workspace.dtype, kv_layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(self, indptr, indices, last_page_len, *heads, q_data_type, kv_data_type):
        if self.failing == "plan":
            raise RuntimeError("no nvcc in /somebody/bin")
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        *self.heads, self.page_size = heads
        self.lengths = (indptr.diff() - 1) * self.page_size + last_page_len
        self.rows = indices.split(indptr.diff().tolist())

    def run(self, q, cache, *, k_scale=1.0, v_scale=1.0):
        if self.failing == "run" and cache[0].dtype == torch.float8_e4m3fn:
            raise ValueError("fp8")
        assert [q.shape[1], cache[0].shape[2], q.shape[2]] == self.heads
        assert cache[0].shape[1] == self.page_size
        outs = []
        for row, (pages, length) in enumerate(zip(self.rows, self.lengths.tolist(), strict=True)):
            k, v = (x[pages.long()].flatten(0, 1)[None, :length].float() for x in cache)
            outs.append(attention(q[row][None, None].float(), k * k_scale, v * v_scale, impl="reference")[:, 0])
        return torch.cat(outs).to(q.dtype) * self.factor


class Library:
    BatchDecodeWithPagedKVCacheWrapper = Wrapper


def rows_of(monkeypatch, factor, failing="", failures=None):
    monkeypatch.setattr(serving, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(Wrapper, "factor", factor)
    monkeypatch.setattr(Wrapper, "failing", failing)
    failures = failures or {}

    def time_calls(calls):
        return {name: Quantiles(1.0, 2.0, 3.0) for name in calls if name not in failures}, {
            k: failures[k] for k in failures if k in calls
        }

    monkeypatch.setattr(serving, "time_calls", time_calls)
    found = serving.attend_rows("decode", 1, LENGTHS, 16, ["bf16", "fp8", "int8"], longest=64, flashinfer=Library)
    return list(found)


def test_flashinfer_is_timed_beside_ours_where_it_is_right(monkeypatch, capsys):
    both = [("bf16", ""), ("bf16", "flashinfer"), ("fp8", ""), ("fp8", "flashinfer"), ("int8", "")]
    found = rows_of(monkeypatch, 1.0)
    assert [(row.kind, row.peer) for row in found] == both
    assert {row.status for row in found} == {"ok"}
    for factor in (1.5, math.nan):
        found = rows_of(monkeypatch, factor)
        assert [(row.kind, row.peer) for row in found] == both
        assert [row.status for row in found] == ["ok", "wrong", "ok", "wrong", "ok"]
        assert [row.time is None for row in found] == [False, True, False, True, False]
        assert capsys.readouterr().out.count("so it is not timed") == 2


@pytest.mark.parametrize(
    ("failing", "failures", "reasons"),
    [
        ("plan", {}, ["RuntimeError", "RuntimeError"]),
        ("run", {}, ["ValueError"]),
        ("", {"flashinfer": "AcceleratorError"}, ["AcceleratorError", "AcceleratorError"]),
    ],
)
def test_where_flashinfer_fails_ours_are_timed(failing, failures, reasons, monkeypatch):
    found = rows_of(monkeypatch, 1.0, failing, failures)
    assert [row.kind for row in found if row.peer == "" and row.time is not None] == ["bf16", "fp8", "int8"]
    failed = [row.describe() for row in found if row.status == "failed"]
    assert [row["reason"] for row in failed] == reasons  # without the message, which may hold paths
    assert {(row["impl"], row["kind"]) for row in failed} == {("flashinfer", "peer")}
    json.dumps(failed, allow_nan=False)


def test_a_record_has_the_rows_that_failed(monkeypatch, tmp_path):
    rows = rows_of(monkeypatch, 1.0, "plan")
    monkeypatch.setitem(serving.GROUPS, "decode", lambda page_size, kinds: iter(rows))
    monkeypatch.setattr(serving.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(serving, "find_flashinfer", lambda: (Library, {"flashinfer": "0.7.4"}))
    path = tmp_path / "serving.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench_serving.py", "decode", "--out", str(path)])
    serving.main()
    record = read_record(path, "serving")
    assert [row["status"] for row in record.rows] == ["ok", "failed", "ok", "failed", "ok"]
    assert all(("time" in row) == (row["status"] == "ok") for row in record.rows)


@pytest.mark.parametrize("error", [math.nan, math.inf, 1.0])
def test_ours_must_be_right(error):
    with pytest.raises(SystemExit, match="the error is"):
        serving.check("decode", "bf16", error, 0.5, {})


@pytest.fixture
def folder(tmp_path):
    """A folder whose record of serving has FlashInfer's times of one case too."""
    for name in ("attention", "serving"):
        text = (tables.RESULTS / f"{name}-{tables.CARD}.jsonl").read_text(encoding="utf-8")
        (tmp_path / f"{name}-{tables.CARD}.jsonl").write_text(text, encoding="utf-8")
    path = tmp_path / f"serving-{tables.CARD}.jsonl"
    run, first, *rest = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    rest = [line for line in rest if line.get("kind") != "peer"]
    peer = {**first, "impl": "flashinfer", "position": "bf16", "kind": "peer", "time": {"p10": 1, "p50": 444, "p90": 9}}
    lines = [{**run, "peers": {"flashinfer": "0.7.4"}}, first, peer, *rest]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    tables.books.cache_clear()
    yield tmp_path
    tables.books.cache_clear()


def test_the_page_has_a_column_for_flashinfer_when_the_record_has_it(folder):
    text = tables.make("serving", folder)
    head, _, first, *_ = (line.split(" | ") for line in text.splitlines())
    assert head[4:6] == ["4-bit", "FlashInfer, bfloat16 |"]
    assert first[5] == "444 |"
    assert "Other libraries that were measured: FlashInfer 0.7.4." in text

"""tools/bench_serving.py times FlashInfer beside ours, on the same pages."""

import json

import bench_serving as serving
import pytest
import tables
import torch

from ropewalk import attention
from ropewalk.bench.core.timing import Quantiles

LENGTHS = torch.tensor([5, 64, 33])


class Wrapper:
    """FlashInfer's decoding as its documentation has it, by the reference; `factor` makes it wrong."""

    factor = 1.0

    def __init__(self, workspace, kv_layout="HND", *, use_tensor_cores=False):
        assert (workspace.dtype, kv_layout, use_tensor_cores) == (torch.uint8, "NHD", True)

    def plan(self, indptr, indices, last_page_len, *heads, q_data_type, kv_data_type):
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        *self.heads, self.page_size = heads
        self.lengths = (indptr.diff() - 1) * self.page_size + last_page_len
        self.rows = indices.split(indptr.diff().tolist())

    def run(self, q, cache, *, k_scale=1.0, v_scale=1.0):
        assert [q.shape[1], cache[0].shape[2], q.shape[2]] == self.heads
        assert cache[0].shape[1] == self.page_size
        outs = []
        for row, (pages, length) in enumerate(zip(self.rows, self.lengths.tolist(), strict=True)):
            k, v = (x[pages.long()].flatten(0, 1)[None, :length].float() for x in cache)
            outs.append(attention(q[row][None, None].float(), k * k_scale, v * v_scale, impl="reference")[:, 0])
        return torch.cat(outs).to(q.dtype) * self.factor


class Library:
    BatchDecodeWithPagedKVCacheWrapper = Wrapper


def rows_of(monkeypatch, factor):
    monkeypatch.setattr(serving, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(Wrapper, "factor", factor)
    monkeypatch.setattr(serving, "time_calls", lambda calls: {name: Quantiles(1.0, 2.0, 3.0) for name in calls})
    found = serving.attend_rows("decode", 1, LENGTHS, 16, ["bf16", "fp8", "int8"], longest=64, flashinfer=Library)
    return [(row.kind, row.peer) for row in found]


def test_flashinfer_is_timed_beside_ours_where_it_is_right(monkeypatch, capsys):
    ours = [("bf16", ""), ("fp8", ""), ("int8", "")]
    both = [("bf16", ""), ("bf16", "flashinfer"), ("fp8", ""), ("fp8", "flashinfer"), ("int8", "")]
    assert rows_of(monkeypatch, 1.0) == both
    assert rows_of(monkeypatch, 1.5) == ours
    assert capsys.readouterr().out.count("so it is not timed") == 2


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

"""The tools that measure products of few bits: their arithmetic, on small cases, and the tables of their records."""

import json
import sys
from dataclasses import replace

import bench_precision
import precision_bits
import precision_errors
import precision_quality
import pytest
import tables
import torch
from precision_quality import Stage

from ropewalk.experiments.byte_model import ByteTransformer, ModelSize
from ropewalk.experiments.length_extrapolation import KEY_DIGITS, KEY_NAME

CPU = torch.device("cpu")
SMALL = precision_errors.cases([32], 160, 256, 320)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: f"{case.name}-{case.tokens}-{case.causal}-{case.rotated}")
def test_16_bits_are_near_float64_and_8_bits_farther(case):
    plain, *others = precision_errors.measure(case, CPU)
    assert plain["error"] < 0.004
    assert plain["lse_error"] < 1e-4
    for row, bound in zip(others, (0.03, 0.06), strict=True):
        assert plain["error"] < row["error"] < bound
        assert row["kernel_error"] < 0.003
        assert row["lse_error"] < 0.05


def test_a_refusal_is_a_row():
    def refuse(case, q, k, v, precision):
        if precision is not None:
            raise ValueError("precision is not supported")
        return precision_errors.compute(case, q, k, v, precision)

    rows = [*precision_errors.measure(SMALL[0], CPU, refuse)]
    assert [row["status"] for row in rows] == ["ok", "unsupported", "unsupported"]
    assert rows[1]["reason"] == "precision is not supported"


def test_sampled_rows_are_in_order_with_the_last():
    case = replace(SMALL[0], tokens=4096)
    rows = precision_errors.sample_rows(case, CPU)
    assert len(rows) == len(rows.unique()) == precision_errors.QUERIES
    assert bool((rows.diff() > 0).all())
    assert int(rows[-1]) == 4095


def test_formats_of_4_bits_have_their_numbers():
    x = torch.randn(64, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert precision_bits.to_e2m1(torch.tensor([0.2, 0.3, -2.4, 2.6, 5.1, 9.0])).tolist() == [0, 0.5, -2, 3, 6, 6]
    assert len(precision_bits.by_integers(x, 7)[0].unique()) <= 15
    for rounded in (precision_bits.by_mxfp4, precision_bits.by_nvfp4):
        assert 0.03 < precision_bits.relative(rounded(x), x) < 0.2
    keys = torch.zeros(256, 4, dtype=torch.float64)
    keys[3] = 1e6  # a group of its own has keys 2, 3, 10, 11, …, of the first block
    keys[4], keys[130] = 3.0, 5.0
    rounded = precision_bits.by_key_groups(keys, 127)
    assert torch.equal(rounded, keys)
    keys[2] = 1.0
    assert float(precision_bits.by_key_groups(keys, 127)[2].abs().max()) == 0


def test_products_of_4_bits_lose_more_than_those_of_8():
    case = precision_bits.cases(512, 64)[0]
    errors = {(row["product"], row["format"]): row["error"] for row in precision_bits.measure(case)}
    assert errors["QK", "int8"] < 0.02
    assert all(errors["QK", name] > 5 * errors["QK", "int8"] for name in precision_bits.QK if name != "int8")
    assert all(errors["PV", name] > 2 * errors["PV", "e4m3"] for name in precision_bits.PV if name != "e4m3")


def test_a_model_learns_windows_with_keys_and_is_read_by_each_precision():
    text = torch.randint(32, 127, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    stage = Stage(300, 16, 2)
    windows, is_asked = precision_quality.draw_windows(text, stage)
    question, counts = torch.tensor([*KEY_NAME], dtype=torch.uint8), set()
    for window, asked in zip(windows, is_asked, strict=True):
        at = [i for i in range(301) if torch.equal(window[i : i + len(question)], question)]
        first, *others = (window[i + len(question) :][:KEY_DIGITS] for i in at)
        assert others
        assert all(torch.equal(other, first) for other in others)
        assert at[-1] == 301 - len(question) - KEY_DIGITS
        assert torch.equal(window[1:][asked], first.repeat(len(others)))
        counts.add(len(others))
    assert len(counts) > 2
    model = ByteTransformer(ModelSize(1, 64, 2, context=300, batch=1))
    assert len([*precision_quality.train(model, text, [stage], 1e-3)]) == 2
    model.eval()
    plain, *others = precision_quality.measure(model, windows[:2], 300)
    assert plain["more"] == plain["digit_more"] == 0
    assert all(0 < abs(row["more"]) < 0.01 for row in others)
    assert others[0]["perplexity"] != others[1]["perplexity"]


def test_records_become_tables(tmp_path, monkeypatch):
    lines = (tables.RESULTS / f"attention-{tables.CARD}.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / f"attention-{tables.CARD}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert all("no row of this table yet" in tables.make(name, tmp_path) for name in tables.LATER)
    path = tmp_path / f"precision-{tables.CARD}.jsonl"
    options = ["--device", "cpu", "--dim", "32", "--tokens", "160", "256", "320", "--out", str(path)]
    monkeypatch.setattr(sys, "argv", ["bench_precision.py", "errors", *options])
    bench_precision.main()
    first, *rows, end = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first["benchmark"] == "precision"
    assert "end" in end
    tables.books.cache_clear()
    head, _, *found = tables.make("precision-errors", tmp_path).partition("\n\n")[0].splitlines()
    assert len(found) == len(SMALL) == len(rows) / 3
    normal = next(line for line in found if line.startswith("| normal, D 32, full, 160 tokens |"))
    cells = dict(zip(head.split(" | "), normal.split(" | "), strict=True))
    assert cells["`int8`"] == f"{rows[1]['error'] * 100:.2f}"
    shared = {"mode": "quality", "length": 256, "loss": 1.0, "keys": 8, "recalled": 0.5, "digit_loss": 1.25}
    others = [
        {"precision": "16-bit", "perplexity": 3.0, "more": 0.0, "standard_error": 0.0},
        {"precision": "int8", "perplexity": 3.003, "more": 0.001, "standard_error": 0.0002},
    ]
    normal = {"case": {"name": "normal", "rotated": False}, "product": "QK"}
    bits = [
        {"mode": "bits", **normal, "format": name, "error": error} for name, error in (("int8", 0.011), ("int4", 0.2))
    ]
    lines = [{"format": 1, "benchmark": "precision"}, *bits, *(shared | row for row in others)]
    (tmp_path / "precision-cpu.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    *_, plain, int8 = tables.make("precision-quality", tmp_path).splitlines()
    assert plain == "| CPU, 256 bytes, 16 bits | 3.0000 | – | 50 | 1.2500 |"
    assert tables.make("4-bit-qk", tmp_path).endswith("| normal | 1.1 | 20.0 |\n")
    assert int8 == "| CPU, 256 bytes, `int8` | 3.0030 | +0.100 ± 0.020 | 50 | 1.2500 |"
    tables.books.cache_clear()

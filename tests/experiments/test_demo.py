"""The demo, with a tiny model."""

import math

import pytest
import torch
from rich.console import Console

from ropewalk.experiments import demo

TINY = demo.Size(
    2,
    32,
    2,
    context=32,
    batch=8,
    steps=60,
    learning_rate=1e-2,
    rotated_tokens=600,
    rotated_q_heads=5,
    rotated_k_heads=3,
    packing=demo.ModelSize(1, 32, 2, context=32, batch=4, steps=0, learning_rate=0.0),
    packing_seconds=0.1,
)
TEXT = b"All that a rope maker makes is rope, and rope again.\n" * 40


@pytest.fixture(autouse=True)
def tiny(monkeypatch, device):
    monkeypatch.setitem(demo.SIZES, device.type, TINY)


def make_model(device):
    torch.manual_seed(0)
    return demo.make_model(TINY).to(device)


def test_the_whole_demo(tmp_path, capsys, device):
    text, figure = tmp_path / "rope.txt", tmp_path / "new" / "demo.png"
    text.write_bytes(TEXT)
    demo.run_demo(text=text, steps=8, device=str(device), figure=figure)
    printed = " ".join(capsys.readouterr().out.split())
    for expected in ("step 1 loss", "step 8 loss", "Held-out loss", "It writes: All that a", "float64", "flash, sdpa"):
        assert expected in printed
    on_cpu = device.type == "cpu"
    assert (printed.count("for correctness, not speed") == 2) == on_cpu
    assert ("ropewalk, triton" in printed) != on_cpu
    assert "ropewalk, reference" not in printed  # the definition is no product to be timed
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_the_loss_falls_below_the_entropy_of_the_bytes(device):
    training, held_out = demo.split(TEXT, TINY.context)
    model = make_model(device)
    before = demo.evaluate(model, held_out, TINY)
    losses = demo.train(model, training, TINY, TINY.steps, Console(quiet=True))
    assert len(losses) == TINY.steps
    assert demo.evaluate(model, held_out, TINY) < demo.byte_entropy(held_out) / 2 < demo.byte_entropy(held_out) < before


def test_training_ends_when_its_time_is_over(device, capsys):
    training, _ = demo.split(TEXT, TINY.context)
    losses = demo.train(make_model(device), training, TINY, 10**6, Console(), max_seconds=0.4)
    assert 1 <= len(losses) < 10**6
    printed = capsys.readouterr().out
    announced, over = (
        "It ends after 1000000 steps or 0 s, whichever comes first.",
        f"are over after {len(losses)} steps",
    )
    assert 0 <= printed.find(announced) < printed.find("step ") < printed.find(over)


def test_the_model_does_not_see_what_it_predicts(device):
    model = make_model(device).eval().double()
    tokens = torch.randint(256, (2, 20), device=device)
    changed = tokens.clone()
    changed[:, 10:] = 7
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])


def test_evaluate_is_the_mean_over_all_bytes(device):
    model = make_model(device)
    tokens = torch.randint(256, (20 * TINY.context + 1,))
    with torch.no_grad():
        losses = [
            demo.next_byte_loss(model, tokens[None, i * TINY.context : (i + 1) * TINY.context + 1]) for i in range(20)
        ]
    assert demo.evaluate(model, tokens, TINY) == pytest.approx(float(sum(losses)) / 20, rel=1e-4)


def test_byte_entropy():
    assert demo.byte_entropy(torch.tensor([65, 66, 67, 68] * 5)) == pytest.approx(math.log(4))
    assert demo.byte_entropy(torch.tensor([65] * 9)) == 0


def test_split_keeps_the_end_apart():
    training, held_out = demo.split(TEXT, TINY.context)
    assert bytes(training.tolist()) + bytes(held_out.tolist()) == TEXT
    assert len(held_out) == math.ceil(0.1 * len(TEXT))


def test_python_ships_a_text():
    assert len(demo.read_text(None)) > 100_000


def test_the_generated_line_depends_on_the_seed_alone(device):
    model, prompt = make_model(device), demo.opening(torch.tensor(list(TEXT)))
    lines = [demo.generate(model, prompt, 40, TINY.context, seed) for seed in (0, 0, 1)]
    assert [len(line) for line in lines] == [40, 40, 40]
    assert torch.equal(lines[0], lines[1])
    assert not torch.equal(lines[0], lines[2])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"    x = 1 + 2 + 3 + 4\nshort line\nTen words make a line of prose, or six do.\n", "Ten words make"),
        (b"\xff\xfe\x00", "The"),
    ],
)
def test_the_line_begins_with_prose(text, expected):
    assert bytes(demo.opening(torch.tensor(list(text))).tolist()).decode() == f"\n{expected} "


def test_q_and_k_are_those_of_the_middle_layer(device):
    model = make_model(device)
    tokens = torch.tensor(list(TEXT))
    q, k = demo.capture_qk(model, tokens, TINY)
    assert q.shape == (1, 600, 5, 16)
    assert k.shape == (1, 600, 3, 16)
    windows = tokens[: 8 * 32].view(8, 32).to(device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        block = model.blocks[1]
        x = block.attention_norm(model.blocks[0](model.embedding(windows)))
        heads = block.attention.qkv_proj(x).unflatten(-1, (3, 2, 16))
        for rotated, projected in zip((q, k), heads.unbind(2), strict=False):
            # 256 tokens of 2 heads, then the same again.
            own = projected.reshape(256, 2, 16)
            expected = own[torch.arange(600, device=device) % 256][:, torch.arange(rotated.shape[2], device=device) % 2]
            torch.testing.assert_close(rotated[0], expected)


def test_rotations_are_measured_against_float64(monkeypatch, device):
    q, k = torch.randn(1, 50, 4, 16, device=device), torch.randn(1, 50, 2, 16, device=device)
    rotations = demo.compare_rotations(q, k, ["reference"])
    assert {rotation.name for rotation in rotations} == {demo.EAGER, "ropewalk, reference"}
    for rotation in rotations:
        assert 0 < rotation.error < 4 * torch.finfo(torch.float32).eps
        n_bytes = 2 * 4 * 50 * 6 * 16
        assert rotation.gigabytes_per_second == pytest.approx(n_bytes / (rotation.microseconds * 1e-6) / 1e9)
    eager = next(rotation for rotation in rotations if rotation.name == demo.EAGER)
    assert demo.speed_up(eager, rotations) == 1

    right = demo.apply_rope
    monkeypatch.setattr(demo, "apply_rope", lambda *arguments, **keywords: right(*arguments, **keywords, inverse=True))
    wrong = next(r for r in demo.compare_rotations(q, k, ["reference"]) if r.name != demo.EAGER)
    assert wrong.error > 0.1


def test_the_interpreter_and_the_definition_are_not_timed(monkeypatch):
    monkeypatch.setattr(demo, "why_not", lambda name, device: None)
    assert "interpreter" in demo.why_untimed("triton", torch.device("cpu"))
    assert demo.why_untimed("triton", torch.device("cuda")) is None
    for device in ("cpu", "cuda"):
        assert "definition" in demo.why_untimed("reference", torch.device(device))


def test_everything_is_checked_against_float64(monkeypatch, device):
    q, k = torch.randn(1, 50, 4, 16, device=device), torch.randn(1, 50, 2, 16, device=device)
    table, *checks = [*demo.check_rotation(q, k), *demo.check_attention(device, 0, tokens=100)]
    assert table.ours < 1e-7 < 1e-4 < table.plain
    assert len(checks) == 4
    assert all(0 < check.ours < 2e-6 and 0 < check.plain < 1e-5 for check in checks)
    right = demo.attention
    monkeypatch.setattr(demo, "attention", lambda *inputs, **options: 1.001 * right(*inputs, **options))
    assert all(check.ours > 5e-4 for check in demo.check_attention(device, 0, tokens=100))


def test_packed_and_padded_sequences_give_the_same(device):
    packing = demo.measure_packing(TINY, device, 0)
    assert packing.lengths == demo.draw_lengths(TINY.packing, 0)
    assert max(packing.lengths) == 32
    assert min(packing.lengths) >= 2
    assert packing.padded_tokens == 4 * 32
    assert packing.difference < (1e-5 if device.type == "cpu" else 5e-2)
    assert packing.packed_by == "sdpa" or device.type == "cuda"


def test_the_order_on_gpus_is_that_of_the_registry():
    table = demo.gpu_table()
    assert table.row_count == 2 + sum(len(rules) for rules in demo.attention_backends.ORDER.values())
    assert "reference" not in " ".join(cell for column in table.columns for cell in column.cells)


def test_bad_arguments(tmp_path, monkeypatch):
    text = tmp_path / "short.txt"
    text.write_bytes(TEXT[:100])
    figure = tmp_path / "demo.png"
    monkeypatch.setitem(demo.SIZES, "cpu", TINY)
    with pytest.raises(ValueError, match="the text has 100 bytes, but must have at least 330"):
        demo.run_demo(text=text, steps=1, device="cpu", figure=figure)
    with pytest.raises(ValueError, match="steps is 0, but must be at least 1"):
        demo.run_demo(text=None, steps=0, device="cpu", figure=figure)
    with pytest.raises(ValueError, match="'meta'"):
        demo.run_demo(text=None, steps=1, device="meta", figure=figure)
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        demo.run_demo(text=None, steps=1, device="cpu", figure=figure)
    assert not figure.exists()

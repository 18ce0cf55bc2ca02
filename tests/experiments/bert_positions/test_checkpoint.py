"""Checkpoints: whole or not there, verified, and the newest alone."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ropewalk.experiments.bert_positions.checkpoint import first_difference, load_checkpoint, save_checkpoint

SETTINGS = {"steps": 10, "schemes": ["rope"], "options": {"rope": {"base": 100.0}}}
FILES = ("model.pt", "state.pt", "manifest.json")


def make_parts(step):
    return {"model": {"weight": torch.full((3, 4), float(step))}, "state": {"step": step, "random": (3, (1, 2), None)}}


def save(folder, step, settings=SETTINGS):
    save_checkpoint(folder, step, settings, make_parts(step))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_holds(checkpoint, step):
    assert checkpoint is not None
    assert checkpoint.step == step
    assert torch.equal(checkpoint.parts["model"]["weight"], torch.full((3, 4), float(step)))
    assert checkpoint.parts["state"] == {"step": step, "random": (3, (1, 2), None)}


def test_what_was_saved_is_loaded_and_the_newest_alone_is_kept(tmp_path):
    folder = tmp_path / "new" / "run"
    assert load_checkpoint(folder, SETTINGS) is None
    for step in (5, 10, 100):
        save(folder, step)
        assert names(folder) == [f"checkpoint-{step:08}"]
        assert_holds(load_checkpoint(folder, SETTINGS), step)
    assert sorted(FILES) == names(folder / "checkpoint-00000100")


def test_of_two_the_newest_is_loaded(tmp_path):
    """As a kill leaves them, that came before the older one was deleted, or all of it was."""
    for step in (9, 10):
        save(tmp_path / str(step), step)
        (tmp_path / str(step) / f"checkpoint-{step:08}").rename(tmp_path / f"checkpoint-{step:08}")
    (tmp_path / "checkpoint-00000009" / "model.pt").unlink()
    assert_holds(load_checkpoint(tmp_path, SETTINGS), 10)


def test_tuples_of_settings_are_as_the_lists_that_json_makes_of_them(tmp_path):
    save(tmp_path, 1, {"seeds": (0, 1)})
    assert_holds(load_checkpoint(tmp_path, {"seeds": (0, 1)}), 1)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "delete"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    save(tmp_path, 7)
    file = tmp_path / "checkpoint-00000007" / name
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    else:
        content[len(content) // 2] ^= 0xFF  # no text of the manifest, which is ASCII, has such a byte
        file.write_bytes({"flip": content, "cut": content[: len(content) // 2], "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"delete .* to start this run anew") as error:
        load_checkpoint(tmp_path, SETTINGS)
    assert f"{file} is {'missing' if damage == 'delete' else 'damaged'}: delete {tmp_path} to" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"step": 7}', "is damaged"), ("[]", "is damaged"), ('{"format": 2, "step": 7}', "is damaged")],
)
def test_a_manifest_that_is_none(tmp_path, content, message):
    save(tmp_path, 7)
    (tmp_path / "checkpoint-00000007" / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 11}, "steps was 10 there, and is 11 now"),
        ({"schemes": ["rope", "alibi"]}, "schemes was ['rope'] there, and is ['rope', 'alibi'] now"),
        ({"options": {"rope": {"base": 99.0}}}, "options.rope.base was 100.0 there, and is 99.0 now"),
        ({"more": 1}, "more was None there, and is 1 now"),
    ],
)
def test_another_configuration_is_refused_by_its_key(tmp_path, change, message):
    save(tmp_path, 7)
    with pytest.raises(ValueError, match="is of another configuration") as error:
        load_checkpoint(tmp_path, {**SETTINGS, **change})
    assert message in str(error.value)
    assert "manifest.json" in str(error.value)


def test_the_first_difference_is_that_of_the_first_key():
    assert first_difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) is None
    assert first_difference({"a": 1, "b": 2, "c": 3}, {"c": 4, "b": 3, "a": 1}) == ("b", 2, 3)
    assert first_difference({"a": {}}, {"a": {"x": 1}}) == ("a.x", None, 1)
    assert first_difference({"a": 1}, {}) == ("a", 1, None)


def test_pickles_that_run_code_are_not_loaded(tmp_path):
    class Malice:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was here"),)

    save_checkpoint(tmp_path, 1, SETTINGS, {"model": Malice()})
    with pytest.raises(Exception, match="Weights only load failed"):
        load_checkpoint(tmp_path, SETTINGS)
    assert not (tmp_path / "was here").exists()


# Its children save two checkpoints, each into a folder of its own, and are killed at one of the calls by which the
# second one changes the disk: the first child at none, the next at the first, and so on. It prints how many they are.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from ropewalk.experiments.bert_positions.checkpoint import save_checkpoint

CALLS = ((os, ("replace", "fsync", "mkdir", "rmdir", "unlink")), (torch, ("save",)), (shutil, ("rmtree",)))

def save(folder, step):
    parts = {"model": {"weight": torch.full((3, 4), float(step))}, "state": {"step": step, "random": (3, (1, 2), None)}}
    settings = {"steps": 10, "schemes": ["rope"], "options": {"rope": {"base": 100.0}}}
    save_checkpoint(folder, step, settings, parts)

def child(folder, deadly):
    calls = 0
    def deadly_at_one_call(function):
        def call(*arguments, **keywords):
            nonlocal calls
            calls += 1
            if calls == deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)
        return call
    save(folder, 5)
    for module, names in CALLS:
        for name in names:
            setattr(module, name, deadly_at_one_call(getattr(module, name)))
    save(folder, 10)
    os._exit(calls)

calls, killed = 0, 0
while killed <= calls:
    process = os.fork()
    if process == 0:
        child(Path(sys.argv[1]) / str(killed), killed)
    _, status = os.waitpid(process, 0)
    if killed == 0:
        calls = os.waitstatus_to_exitcode(status)
    else:
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (killed, status)
    killed += 1
print(calls)
"""


def test_killed_at_any_moment_there_is_one_whole_checkpoint(tmp_path):
    """At every call by which a checkpoint changes the disk; then the next one is written as if nothing had been."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    calls = int(done.stdout)
    assert calls >= 10
    steps = []
    for call in range(1, calls + 1):
        folder = tmp_path / str(call)
        found = load_checkpoint(folder, SETTINGS)
        assert_holds(found, found.step)
        steps.append(found.step)
        save(folder, 20)
        assert names(folder) == ["checkpoint-00000020"]
        assert_holds(load_checkpoint(folder, SETTINGS), 20)
    assert steps == sorted(steps)
    assert set(steps) == {5, 10}


def test_the_manifest_says_what_the_files_must_be(tmp_path):
    save(tmp_path, 3)
    manifest = json.loads((tmp_path / "checkpoint-00000003" / "manifest.json").read_text())
    assert manifest["step"] == 3
    assert manifest["settings"] == SETTINGS
    assert set(manifest["sha256"]) == {"model.pt", "state.pt"}

"""The `ropewalk` command."""

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import ropewalk
from ropewalk import __main__ as command
from ropewalk import cli, device
from ropewalk.bench.core.load import read_record
from ropewalk.bench.core.records import default_path
from ropewalk.cli import app, bench
from ropewalk.cli.options import EXTRAS
from ropewalk.doctor import _launcher
from ropewalk.ops.rope.cuda import build as native_build


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_version() -> None:
    assert invoke("--version").stdout == f"ropewalk {ropewalk.__version__}\n"


def test_doctor_says_what_is_here_and_why_the_rest_is_not() -> None:
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for word in ("ropewalk", "torch", "triton", "gluon", "reference", "sdpa", "flash", "compiled", "flashinfer"):
        assert word in result.stdout


def test_doctor_names_the_defaults_of_the_rotation_and_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    _, rotation, attention = invoke("doctor").stdout.split("implementations of")
    for table in (rotation, attention.partition("native extension")[0]):
        assert table.count("used by default") == 1
    assert "for correctness, not speed" in " ".join(attention.split())


def test_doctor_says_how_planned_calls_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = pytest.importorskip("ropewalk.ops.launch.launcher", reason="Triton is missing")
    monkeypatch.setattr(device, "is_nvidia", lambda device: False)
    assert _launcher(torch.device("cuda", 0)) is None
    monkeypatch.setattr(device, "is_nvidia", lambda device: True)
    monkeypatch.setattr(device, "why_no_triton", lambda device: None)
    for reason, said in ((None, "launch by the launcher in C."), ("no compiler", "Triton's launchers, which costs")):
        monkeypatch.setattr(launcher, "why_missing", lambda reason=reason: reason)
        text = _launcher(torch.device("cuda", 0))
        assert text is not None
        assert said in text
        assert reason is None or text.endswith(f": {reason}.")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvcc and the host compiler that makes what it is asked for, a cache, and a GPU to compile for."""
    path = tmp_path / "compiler"
    path.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho made for libstdc++.so.6 > "$2"\n')
    path.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(path))
    monkeypatch.setenv("NVCC_CCBIN", str(path))
    monkeypatch.setenv("ROPEWALK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ROPEWALK_BUILD_ON_FIRST_USE", raising=False)
    monkeypatch.setattr(native_build, "visible_architectures", lambda: ("90",))
    return path


def test_build_compiles_for_the_visible_gpus_once(compiler: Path) -> None:
    first = invoke("build")
    library = native_build.library_path(("90",))
    assert first.exit_code == 0, first.output
    assert library.read_text() == "made for libstdc++.so.6\n"
    lines = first.stdout.splitlines()
    assert lines[0] == "compiling the native extension for sm_90 ..."
    assert lines[1].startswith("done in ")
    assert lines[2:] == [f"{library} (0.0 MiB)"]
    again = invoke("build").stdout.splitlines()
    assert again == ["the native extension is there already; --force compiles it again", lines[2]]
    assert invoke("build", "--force").stdout.startswith("compiling")


def test_build_compiles_for_the_architectures_that_are_named(compiler: Path) -> None:
    result = invoke("build", "--arch", "10.0", "--arch", "sm_80", "--arch", "80")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("compiling the native extension for sm_80, sm_100 ...\n")
    assert native_build.library_path(("80", "100")).is_file()


def test_build_without_a_gpu_asks_for_architectures(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "visible_architectures", lambda: ())
    result = invoke("build")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: PyTorch finds no NVIDIA GPU of compute capability 8.0 or more: say with --arch"
    )


def test_build_refuses_what_is_no_architecture(compiler: Path) -> None:
    result = invoke("build", "--arch", "hopper")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: architecture is 'hopper', but must be a compute capability")


def test_a_failed_build_prints_the_compilers_whole_output(compiler: Path) -> None:
    compiler.write_text("#!/bin/sh\necho the header is missing\nexit 7\n")
    result = invoke("build")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the native extension was not built: compiler exited with 7\n")
    assert "    the header is missing\n" in result.stderr
    assert "build.log" in result.stderr
    assert "Traceback" not in result.output


def test_doctor_looks_at_the_native_extension_and_builds_nothing(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report() -> str:
        result = invoke("doctor")
        assert result.exit_code == 0, result.output
        return result.stdout.partition("native extension")[2].partition("peers that")[0]

    first = report()
    assert first.count(f" {compiler}\n") == 2
    assert f" {native_build.cache_dir()}\n" in first
    assert "no: it is compiled when it is first used, or by `ropewalk build`" in first
    monkeypatch.setenv("ROPEWALK_BUILD_ON_FIRST_USE", "0")
    assert "no: `ropewalk build` compiles it; ROPEWALK_BUILD_ON_FIRST_USE is '0'" in report()
    assert not native_build.cache_dir().exists()

    working = compiler.read_text()
    compiler.write_text("#!/bin/sh\necho 'see [/usr/include]'\nexit 1\n")
    assert invoke("build").exit_code == 2
    failed = report()
    assert "no: the native extension was not built: compiler exited with 1" in failed
    assert "see [/usr/include]" in failed
    assert "`ropewalk build` tries again" in failed
    compiler.write_text(working)
    assert invoke("build").exit_code == 0
    assert f"yes, {native_build.library_path(('90',))}" in report()

    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    monkeypatch.setattr(native_build, "visible_architectures", lambda: ())
    last = report()
    assert "CUDACXX is 'no-such-nvcc', but must be" in last
    assert "no: PyTorch finds no NVIDIA GPU of compute capability 8.0 or more" in last


@pytest.mark.parametrize("command", ["rope", "attention", "host", "all", "training", "parallel"])
def test_benchmarks_list_their_cases_and_modes(command: str) -> None:
    result = invoke("bench", command, "--list")
    assert result.exit_code == 0, result.output
    assert "\n    modes: " in result.stdout
    assert "\nmode " in result.stdout


def test_bench_lists_its_cases() -> None:
    result = invoke("bench", "rope", "--list")
    assert result.exit_code == 0
    assert "llama3-70b\n    B1 T16384 H64/8 D128 R128, bfloat16, bthd, positions by index" in result.stdout


def test_bench_writes_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    options = ["--case", "decode-1", "--impl", "reference", "--peers", "none", "--rounds", "3", "--mode", "decode"]
    result = invoke("bench", "rope", *options, "--device", "cpu", "-o", str(path))
    assert result.exit_code == 0, result.output
    assert {row["mode"] for row in read_record(path).of("rope")} == {"decode"}
    assert "decode-1" in result.stdout


def test_bench_ends_with_130_when_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropewalk.bench.core.runner.run", lambda benches, options: True)
    assert invoke("bench", "rope").exit_code == 130


def test_a_user_error_is_one_line() -> None:
    result = invoke("bench", "rope", "--case", "llama", "--device", "cpu", "--peers", "none")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: case 'llama' does not exist; there are: llama3-8b,")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("command", "device", "expected"),
    [
        (["bench", "rope"], "gpu", "the device is 'gpu', but must be 'cpu', 'cuda', or one GPU as in 'cuda:0'"),
        (["bench", "attention"], "gpu", "the device is 'gpu', but must be"),
        (["bench", "all"], "gpu", "the device is 'gpu', but must be"),
        (["bench", "training"], "gpu", "the device is 'gpu', but must be"),
        (["demo"], "gpu", "the device is 'gpu', but must be"),
        (["experiment", "length-extrapolation"], "gpu", "the device is 'gpu', but must be"),
        (["bench", "rope"], "cuda:99", "the device is 'cuda"),
        (["bench", "rope"], "meta", "the device is 'meta', but only 'cpu' and 'cuda' can be timed"),
    ],
)
def test_a_wrong_device_is_one_line(command: list[str], device: str, expected: str) -> None:
    result = invoke(*command, "--device", device)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {expected}")
    assert result.stderr.count("\n") == 1


def test_training_on_a_cpu_asks_for_a_case() -> None:
    result = invoke("bench", "training", "--device", "cpu")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: nothing is to be measured")
    assert "on a CPU name one with --case (bert-base-rope," in result.stderr


def test_a_file_gets_a_line_a_case(tmp_path: Path) -> None:
    """Output that is no terminal has a line for each measurement, as it ends."""
    options = ["--case", "decode-1", "--impl", "reference", "--peers", "none", "--rounds", "3", "--mode", "decode"]
    result = invoke("bench", "rope", *options, "--device", "cpu", "-o", str(tmp_path / "record.jsonl"))
    lines = [line for line in result.stdout.splitlines() if "decode-1" in line and line[:1].isdigit()]
    assert [line.split(",")[0] for line in lines] == [
        f"{number}/4 decode-1 {pairs}/{place} decode"
        for number, (pairs, place) in enumerate(
            itertools.product(("half", "interleaved"), ("out of place", "in place")), 1
        )
    ]


@pytest.mark.parametrize(
    ("package", "extra"), [("matplotlib", "bench"), ("transformers", "bench"), ("tokenizers.models", "train")]
)
def test_a_missing_package_is_named_with_its_extra(package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(benches: Any, options: Any) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr("ropewalk.bench.core.runner.run", fail)
    result = invoke("bench", "rope")
    assert result.exit_code == 2
    name = package.partition(".")[0]
    assert result.stderr == f"error: {name} is not installed: pip install 'ropewalk[{extra}]'\n"


def test_every_extra_has_its_packages() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for package, extra in EXTRAS.items():
        section = text.partition(f"\n{extra} = [")[2].partition("]\n")[0]
        distribution = {"yaml": "pyyaml"}.get(package, package)
        assert f'"{distribution}>' in section


def test_doctor_needs_no_extra() -> None:
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(EXTRAS)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["ropewalk", "doctor"]
from ropewalk import __main__ as command
command.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "implementations of attention" in done.stdout
    assert "transformers is not installed" in done.stdout


@pytest.mark.parametrize("arguments", ["doctor", "bench rope --list", "--help"])
def test_a_reader_that_has_enough_ends_the_command_quietly(arguments: str) -> None:
    script = f"'{sys.executable}' -m ropewalk {arguments} | true"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ropewalk", "demo"])
    for missing, expected in (
        (("typer", "rich"), "error: typer and rich are not installed: pip install 'ropewalk[bench]'\n"),
        (("rich",), "error: rich is not installed: pip install 'ropewalk[bench]'\n"),
    ):
        monkeypatch.setattr(command, "find_spec", lambda name, missing=missing: None if name in missing else object())
        with pytest.raises(SystemExit) as stopped:
            command.main()
        assert stopped.value.code == 2
        assert capsys.readouterr().err == expected


def test_commands_hide_torchs_warning_about_numpy() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; sys.argv = ['ropewalk', 'doctor']\n"
        "from ropewalk.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NumPy" not in done.stderr


def test_what_commands_write_by_default_is_ignored_by_git() -> None:
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        pytest.skip("this is no checkout")
    tables = (cli._DEMO, cli._EXTRAPOLATION, cli._POSITIONS, bench.REPORT, bench.OPTIONS)
    paths = [default for table in tables for _, default, *_ in table.values() if isinstance(default, Path)]
    assert len(paths) >= 3
    record = default_path({"benchmark": "rope", "device": "NVIDIA H200", "date": "2026-11-21T03:37:22+00:00"})
    for path in (*paths, record, record.with_suffix(".png")):
        file = path if path.suffix else path / "file"
        done = subprocess.run(["git", "-C", root, "check-ignore", "--quiet", file])
        assert done.returncode == 0, f"a command writes {path}, which git does not ignore"


def test_demo_hands_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    fake = SimpleNamespace(run_demo=lambda **given: calls.append(tuple(given.values())))
    monkeypatch.setitem(sys.modules, "ropewalk.experiments.demo", fake)
    text = tmp_path / "text.txt"
    text.write_text("a line")
    assert invoke("demo").exit_code == 0
    options = ["--text", str(text), "--steps", "3", "--device", "cpu", "--figure", "f.png", "--seed", "7"]
    assert invoke("demo", *options).exit_code == 0
    assert calls == [(None, None, None, Path("ropewalk-demo.png"), 0), (text, 3, "cpu", Path("f.png"), 7)]


def test_demo_refuses_a_text_that_is_not_there(tmp_path: Path) -> None:
    assert invoke("demo", "--text", str(tmp_path / "missing.txt")).exit_code == 2

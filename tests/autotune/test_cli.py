"""What every command has in common: help, one-line errors, exit statuses, JSON alone on stdout."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.kernels import errors
from lowbit.kernels.cuda.gpus import GpuHere

COMMAND = [sys.executable, "-m", "lowbit.autotune"]


def commands(
    command: click.Command = autotune, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def run(*args: str) -> Any:
    return CliRunner().invoke(autotune, args)


@pytest.mark.parametrize(
    ("path", "command"), list(commands()), ids=lambda value: "-".join(value) if isinstance(value, tuple) else ""
)
def test_every_command_and_option_has_help_and_every_command_an_example(
    path: tuple[str, ...], command: click.Command
) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert f"Example:\n    autotune {' '.join(path)}".rstrip() in result.output
    for parameter in command.params:
        # click has no help for arguments: the command's own text names them.
        told = parameter.help if isinstance(parameter, click.Option) else str(parameter.metavar) in (command.help or "")
        assert told, f"{path}: {parameter.name} has no help"


def test_help_lists_every_exit_status_that_an_error_has() -> None:
    epilog = run("--help").output.partition("Exit status:")[2]
    listed = {int(line.split()[0]) for line in epilog.splitlines() if line.strip()}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LowbitError)]
    assert listed == {kind.exit_status for kind in kinds} | {0, 1, 2, 130, 141}


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--device", "sm_86x"], 3, ["sm_86x"]),
        (["--heads", "8", "--head-dim", "0"], 2, ["head_dim", "0"]),
        (["--heads", "8", "--head-dim", "7"], 2, ["head_dim", "7"]),
        (["--heads", "8", "--kv-heads", "3", "--head-dim", "64"], 2, ["8", "3"]),
        (["--heads", "eight", "--head-dim", "64"], 2, ["--heads", "eight"]),
        (["--heads", "8"], 2, ["--head-dim"]),
        (["--head-dim", "64"], 2, ["--heads"]),
        (["--heads", "8", "--head-dim", "64", "--model", "phi-2"], 2, ["--model"]),
        (["--tokens", "0"], 2, ["tokens", "0"]),
        (["--tokens", "64", "--budget", "nan"], 2, ["--budget", "nan"]),
        (["--tokens", "64", "--threads", "999"], 2, ["--threads", "256"]),
        (["--tokens", "64", "--heads", "1000000", "--kv-heads", "1", "--head-dim", "64"], 2, ["heads", "4096"]),
        (["--tokens", "128,-5"], 2, ["-5"]),
        (["--tokens", "128,lots"], 2, ["lots"]),
        (["--tokens", ""], 2, ["--tokens"]),
        (["--precision", "w3a8"], 2, ["w3a8", "w4a8"]),
        (["--operator", "gemm"], 2, ["gemm", "attend"]),
        (["--query-rows", "17"], 2, ["17"]),
        (["--strategy", "guess"], 2, ["guess", "oracle"]),
        (["--budget", "0"], 2, ["--budget"]),
        (["--model", "llama-99"], 7, ["llama-99", "phi-2"]),
        (["--model", "absent.gguf"], 7, ["absent.gguf"]),
        (["--plugin", "no_such_module_here"], 2, ["--plugin", "no_such_module_here"]),
        (["--wrong"], 2, ["--wrong"]),
        (["polish"], 2, ["polish"]),
        (["--heads", "8", "devices"], 2, ["--heads", "devices"]),
        (["calibrate", "--device", "abacus"], 3, ["abacus"]),
        (["db", "info", "--db", "absent.db"], 5, ["absent.db"]),
        (["db", "winners", "--db", "."], 5, ["directory"]),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_a_status(
    args: list[str], status: int, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    result = run(*args)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert list(tmp_path.iterdir()) == []


def test_devices_prints_one_json_object() -> None:
    result = run("devices", "--json")
    assert result.exit_code == 0
    (device,) = json.loads(result.stdout)["devices"]
    assert device["name"] == "cpu"
    assert device["cores"] >= 1
    assert [cache["level"] for cache in device["caches"]] == sorted(cache["level"] for cache in device["caches"])
    assert device["isa"] in device["fingerprint"]
    assert result.stderr == ""


def test_devices_for_people_names_the_instruction_set() -> None:
    device = json.loads(run("devices", "--json").stdout)["devices"][0]
    result = run("devices")
    assert device["isa"] in result.stdout
    assert device["fingerprint"] in result.stdout


def test_version_is_the_packages() -> None:
    import lowbit

    assert lowbit.__version__ in run("--version").output


def test_interrupt_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.costmodel.device.detect", interrupted)
    result = run("devices")
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "error: interrupted"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("here")

    monkeypatch.setattr("lowbit.costmodel.device.detect", broken)
    assert isinstance(run("devices").exception, ZeroDivisionError)


def test_an_error_of_many_lines_becomes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise errors.CompileError("first\n  second")

    monkeypatch.setattr("lowbit.costmodel.device.detect", failing)
    result = run("devices")
    assert result.exit_code == errors.CompileError.exit_status
    assert result.stderr == "error: first second\n"


def test_a_plugin_that_exits_does_not_end_the_command_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaver.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run("--tokens", "64", "--plugin", "leaver", "--db", str(tmp_path / "t.db"))
    assert result.exit_code == 2
    assert "cannot import 'leaver': SystemExit" in result.stderr
    assert not (tmp_path / "t.db").exists()


@pytest.mark.skipif(os.name != "posix", reason="closes a pipe as POSIX shells do")
def test_a_closed_pipe_ends_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, "devices", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device here is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("cache", "info"), ("cache", "info", "--json"), ("--help",), ("cache", "--help")])
def test_output_that_cannot_be_written_is_one_line(words: tuple[str, ...], unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == f"error: the output cannot be written: {os.strerror(errno.ENOSPC)}\n"


@pytest.mark.skipif(os.name != "posix", reason="closes a descriptor as POSIX shells do")
@pytest.mark.parametrize("words", ["cache info", "cache info --json", "--help"])
def test_closed_output_is_one_line(words: str) -> None:
    script = f'exec "$0" -m lowbit.autotune {words} >&-'
    done = subprocess.run(["sh", "-c", script, sys.executable], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: standard output is closed\n"


def test_tables_print_where_the_terminal_knows_ascii_only() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([*COMMAND, "devices"], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "cpu" in done.stdout


def test_help_needs_no_compiler_and_no_database_packages() -> None:
    heavy = ("numba", "llvmlite", "optuna", "sqlite_utils", "networkx")
    script = f"import sys, lowbit.autotune.cli; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_devices_lists_architectures_with_the_board_that_each_stands_for() -> None:
    listed = {each["name"]: each for each in json.loads(run("devices", "--json").stdout)["architectures"]}
    assert list(listed) == ["sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert listed["sm_86"]["default"] == "RTX 3090"
    boards = {board["name"]: board for board in listed["sm_86"]["boards"]}
    assert {"RTX 3090", "RTX 3060", "A10"} <= set(boards)
    assert {board["arch"] for board in boards.values()} == {"sm_86"}
    assert all(boards["RTX 3060"]["sources"].values())
    shown = run("devices").stdout
    for words in ("sm_120", "RTX 3090", "A10", "H200"):
        assert words in shown


def test_devices_has_the_gpus_of_this_machine_before_those_that_need_not_be_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = GpuHere(
        ordinal=0, name="NVIDIA A10", arch="sm_86", sms=72, clock_mhz=1695.0, memory_clock_mhz=6251.0, bus_bits=384,
        memory_bytes=24 << 30, l2_bytes=6 << 20, shared_bytes=99 << 10, shared_bytes_sm=100 << 10, registers_sm=65536,
        threads_sm=1536, ecc=True, driver="13.0", uuid="GPU-0", pci="0000:01:00.0",
    )  # fmt: skip
    monkeypatch.setattr("lowbit.kernels.cuda.gpus.gpus_here", lambda: [here])
    cpu, gpu = json.loads(run("devices", "--json").stdout)["devices"]
    assert (cpu["name"], gpu["name"], gpu["board"], gpu["here"]["driver"]) == ("cpu", "sm_86", "A10", "13.0")
    shown = run("devices").stdout
    assert shown.index("GPU 0") < shown.index("GPUs that need not be here")


@pytest.mark.parametrize("command", [[], ["explain"], ["calibrate"]])
def test_an_unknown_architecture_or_board_is_one_line_with_the_list(command: list[str]) -> None:
    for args, words in ((["--device", "sm_11"], "sm_86"), (["--device", "sm_86", "--gpu", "Voodoo 2"], "RTX 3060")):
        result = run(*command, *args)
        assert (result.exit_code, result.stdout) == (3, "")
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: unknown") and words in line


def test_a_gpu_that_is_not_here_is_not_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "t.db"
    result = run("calibrate", "--device", "sm_86", "--db", str(path))
    assert result.exit_code == 3
    assert "RTX 3090" in result.stderr and "not in this machine: nothing can be calibrated" in result.stderr
    assert not path.exists()

"""`autotune generate` on a small model with random weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.runtime.model.model import Model
from tiny_models import write_model

PROMPT = "he said hello in the "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path, types="Q8_0")
    return path


@pytest.fixture(autouse=True)
def no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.autotune.decoding.default_database", lambda: tmp_path / "none.db")


def run(model: Path, *words: str, **options: Any) -> Any:
    return CliRunner().invoke(autotune, ["generate", "-m", str(model), "-t", "2", *words], **options)


def answer(model: Path, *words: str) -> dict[str, Any]:
    result = run(model, *words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_greedy_tokens_are_those_of_the_model(model: Path) -> None:
    found = answer(model, "-p", PROMPT, "-n", "12", "--temp", "0", "--ignore-eos")
    loaded = Model.load(model, threads=2)
    session = loaded.session(200)
    logits, expected = session.prefill(loaded.tokenizer.encode(PROMPT)), []
    for _ in range(12):
        expected.append(int(np.argmax(logits)))
        logits = session.step(expected[-1])
    assert found["tokens"] == expected
    assert found["text"] == b"".join(map(loaded.tokenizer.spelled, expected)).decode(errors="replace")
    assert (found["stopped"], found["prompt"]) == ("predict", PROMPT)
    assert found["prompt_tokens"] == len(loaded.tokenizer.encode(PROMPT))
    assert found["timings"]["generated_steps"] == 11
    assert found["timings"]["prompt_tokens_per_s"] > 0
    assert found["cache"]["tokens"] == found["prompt_tokens"] + 11


def test_the_text_goes_to_stdout_and_times_to_stderr(model: Path) -> None:
    words = ("-p", PROMPT, "-n", "20", "-s", "3")
    result = run(model, *words)
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip("\n") == answer(model, *words)["text"].rstrip("\n")
    lines = result.stderr.splitlines()
    assert "none.db does not exist: using untuned layouts" in lines[0]
    assert [line.split(":")[0] for line in lines] == ["warning", "prompt", "answer"]
    assert "tokens per second" in lines[1]


def test_a_seed_repeats_a_draw_and_is_told(model: Path) -> None:
    words = ("-p", PROMPT, "-n", "20", "--temp", "1.5", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    first = answer(model, *words)
    assert first["sampling"] == {
        "temperature": 1.5,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "seed": first["sampling"]["seed"],
    }
    again = answer(model, *words, "-s", str(first["sampling"]["seed"]))
    assert again["tokens"] == first["tokens"]
    assert answer(model, *words, "-s", "1")["tokens"] != answer(model, *words, "-s", "2")["tokens"]


def test_a_prompt_comes_from_a_file_or_standard_input(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    words = ("-n", "6", "--temp", "0")
    expected = answer(model, "-p", PROMPT, *words)["tokens"]
    assert answer(model, "-f", str(file), *words)["tokens"] == expected
    result = run(model, "-f", "-", *words, "--json", input=PROMPT)
    assert json.loads(result.stdout)["tokens"] == expected


@pytest.mark.parametrize(
    ("k", "v", "formats"),
    [("q8_0", "q4_0", ("int8", "int4")), ("int4", "int4", ("int4", "int4")), ("f16", "fp16", ("fp16", "fp16"))],
)
def test_keys_and_values_have_types_of_their_own(model: Path, k: str, v: str, formats: tuple[str, str]) -> None:
    cache = answer(model, "-p", PROMPT, "-n", "4", "--cache-type-k", k, "-ctv", v)["cache"]
    assert (cache["type_k"], cache["type_v"]) == formats
    assert sum(each["tokens"] for each in cache["segments"]) == cache["tokens"]
    assert formats[0] in cache["segments"][0]["layout"]


def test_it_ends_with_the_context(model: Path) -> None:
    result = run(model, "-p", PROMPT, "-c", "40", "--ignore-eos", "--json")
    found = json.loads(result.stdout)
    assert (found["stopped"], found["cache"]["tokens"], found["cache"]["context"]) == ("context", 40, 40)
    assert len(found["tokens"]) == 41 - found["prompt_tokens"]
    assert "context full" in result.stderr
    assert answer(model, "-p", PROMPT, "-c", "0", "-n", "1")["cache"]["context"] == 512  # what it was trained for


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("-p", PROMPT * 30, "-c", "64"), 11, "no room in a context of 64 tokens for a prompt"),
        ((), 2, "either --prompt or --file"),
        (("-p", "a", "-f", "b"), 2, "either --prompt or --file"),
        (("-f", "no such file"), 1, "no such file: No such file"),
        (("-p", "a", "-ctk", "q5_0"), 2, "unknown cache type 'q5_0'"),
        (("-p", "a", "--temp", "-1"), 2, "temperature must be 0 or more"),
        (("-p", "a", "--top-p", "2"), 2, "top-p must be 0 to 1"),
        (("-p", "a", "-n", "-2"), 2, "-2 is not in the range"),
        (("-p", "a", "--db", "missing.db"), 5, "missing.db"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(model: Path, words: tuple[str, ...], status: int, said: str) -> None:
    result = run(model, *words)
    assert result.exit_code == status, result.output
    (line,) = (line for line in result.stderr.splitlines() if not line.startswith("warning"))
    assert line.startswith("error: ")
    assert said in line


@pytest.mark.parametrize("cut", [3, 100, -50])
def test_a_damaged_file_is_one_line(model: Path, tmp_path: Path, cut: int) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(model.read_bytes()[:cut])
    result = run(damaged, "-p", "a")
    assert (result.exit_code, result.stderr.splitlines()[-1].startswith("error: ")) == (7, True), result.output


def test_a_prompt_that_is_no_text_is_refused(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(b"ab\xff")
    result = run(model, "-f", str(file))
    assert (result.exit_code, "is not UTF-8 text" in result.stderr) == (2, True)


def test_a_context_longer_than_the_training_is_warned_of(model: Path) -> None:
    result = run(model, "-p", PROMPT, "-c", "600", "-n", "2")
    assert result.exit_code == 0, result.output
    assert "a context of 600 is longer than the 512 tokens" in result.stderr


def test_ctrl_c_ends_the_answer_and_not_its_report(model: Path, tmp_path: Path) -> None:
    big = tmp_path / "long.gguf"
    write_model(big, types="Q8_0", context=1 << 20, layers=8)
    words = ["generate", "-m", str(big), "-p", PROMPT, "-c", "0", "--ignore-eos", "-t", "1"]
    home = {"XDG_DATA_HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "lowbit.autotune", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | home,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)  # it has begun
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read().decode()
        assert process.wait(timeout=30) == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("answer: ")
    assert errors.splitlines()[-1].endswith("interrupted")

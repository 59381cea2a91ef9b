"""Measuring what caches cost: windows, which tokens are scored, and what is compared with what; and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.autotune.outcome import Silent
from lowbit.autotune.quality import FLOOR_TOKENS, Cache, measure, windows
from lowbit.kernels.errors import LogitsError, ProblemError
from lowbit.runtime.cache_types import REFERENCE, CacheTypes, pairs
from tiny_models import write_model

INT8, INT4 = CacheTypes("q8_0", "q8_0"), CacheTypes("q4_0", "q4_0")
VOCABULARY = 40


class Noisy:
    """Logits depend on all that it holds, and in ``noise`` parts on how it was computed."""

    def __init__(self, noise: float = 0.0, part: int = 3) -> None:
        self.noise, self.part = noise, part
        self.held: list[int] = []
        self.calls: list[tuple[str, int]] = []

    def truncate(self, length: int) -> None:
        del self.held[length:]

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        self.calls.append(("prefill", len(tokens)))
        self.held += tokens
        return self.logits()

    def scores(self, tokens: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        self.calls.append(("scores", len(tokens)))
        for start in range(0, len(tokens), self.part):
            rows = []
            for token in tokens[start : start + self.part]:
                self.held.append(token)
                rows.append(self.logits())
            block = np.array(rows)
            yield start, block
            block[:] = np.nan  # valid until the next one is asked for

    def logits(self) -> np.ndarray:
        clean = np.random.default_rng(self.held).standard_normal(VOCABULARY)
        noise = np.random.default_rng([len(self.held), 7]).standard_normal(VOCABULARY)
        return (clean + self.noise * noise).astype(np.float32)


def text(count: int) -> list[int]:
    return np.random.default_rng(5).integers(0, VOCABULARY, count).tolist()


def test_windows_are_whole_and_begin_as_the_model_expects() -> None:
    cut = windows(list(range(25)), 8, 0)
    assert [each.tolist() for each in cut] == [list(range(i, i + 8)) for i in (0, 8, 16)]
    assert len(windows(list(range(25)), 8, 2)) == 2
    assert [each[0] for each in windows(list(range(25)), 8, 0, first=99)] == [99] * 3
    with pytest.raises(ProblemError, match="7 tokens, too few for one window of 8"):
        windows(list(range(7)), 8, 0)
    with pytest.raises(ProblemError, match="at least 4 tokens, not 3"):
        windows(list(range(7)), 3, 0)


@pytest.mark.parametrize("size", [4, 9, 16, 101])
def test_the_second_half_is_scored_with_its_whole_context(size: int) -> None:
    texts = windows(text(3 * size), size, 0)
    found = measure({"a": lambda types: Noisy(0.0 if types == REFERENCE else 0.3)}, [INT8], texts, Silent())
    for number, window in enumerate(texts):
        half = size // 2
        expected, exact = [], []
        for at in range(half, size - 1):
            for noise, into in ((0.3, expected), (0.0, exact)):
                decoder = Noisy(noise)
                logits = decoder.prefill(window[: at + 1].tolist()).astype(np.float64)
                into.append(math.log(np.exp(logits).sum()) - logits[window[at + 1]])
        assert found.scores[Cache("a", INT8)][number].nll == pytest.approx(expected, rel=1e-6)
        assert found.scores[Cache("a", REFERENCE)][number].nll == pytest.approx(exact, rel=1e-6)


def test_each_contestant_is_compared_with_its_own_reference() -> None:
    noise = {"a": {REFERENCE: 0.0, INT8: 0.01, INT4: 0.3}, "b": {REFERENCE: 2.0, INT8: 2.01, INT4: 2.0}}
    makers = {name: (lambda types, name=name: Noisy(noise[name][types])) for name in noise}
    found = measure(makers, [INT8, INT4, REFERENCE], windows(text(300), 100, 0), Silent())
    rows = {(row["impl"], row["cache_type_k"], row["floor"]): row for row in found.rows()}
    median = {key: row["kl_divergence"]["median"]["value"] for key, row in rows.items()}
    assert len(rows) == 8
    assert median["a", "f16", False] == median["b", "f16", False] == 0
    assert 0 < median["a", "q8_0", False] < 0.01 < median["a", "q4_0", False]
    assert median["b", "q4_0", False] == 0 < median["b", "q8_0", False]
    assert rows["a", "q8_0", False]["perplexity_ratio"]["value"] == pytest.approx(1, abs=0.02)
    ratios = found.perplexity_ratios("a", "b")
    assert list(ratios) == ["f16", "q8_0", "q4_0"]
    expected = rows["a", "q4_0", False]["perplexity"]["value"] / rows["b", "q4_0", False]["perplexity"]["value"]
    assert ratios["q4_0"]["value"] == pytest.approx(expected)
    assert found.perplexity_ratios("a", "c") == {}


def test_the_floor_computes_the_context_in_other_parts() -> None:
    made: list[Noisy] = []

    def make(types: CacheTypes) -> Noisy:
        made.append(Noisy())
        return made[-1]

    size = 6 * FLOOR_TOKENS
    found = measure({"a": make}, [], windows(text(size), size, 0), Silent())
    (decoder,) = made
    half = ("scores", size // 2)
    assert decoder.calls == [("prefill", size // 2), half, *[("prefill", FLOOR_TOKENS)] * 3, half]
    assert found.scores[Cache("a", REFERENCE, floor=True)][0].divergence == pytest.approx(0, abs=1e-12)


def test_a_cache_whose_logits_are_no_numbers_is_named() -> None:
    def make(types: CacheTypes) -> Noisy:
        return Noisy(np.nan if types == INT4 else 0.0)

    with pytest.raises(LogitsError, match="a with q4_0, window 1"):
        measure({"a": make}, [INT8, INT4], windows(text(20), 10, 0), Silent())


@pytest.mark.parametrize(
    ("k", "v", "expected"),
    [
        (["q8_0", "q4_0"], ["q8_0", "q4_0"], [("q8_0", "q8_0"), ("q4_0", "q4_0")]),
        (["int8"], ["INT4", "fp16"], [("q8_0", "q4_0"), ("q8_0", "f16")]),
        (["f16", "f16"], ["f16"], [("f16", "f16")]),
    ],
)
def test_types_are_paired(k: list[str], v: list[str], expected: list[tuple[str, str]]) -> None:
    assert pairs(k, v) == tuple(CacheTypes(*each) for each in expected)


def test_types_have_names_and_precisions() -> None:
    mixed = CacheTypes("q8_0", "q4_0")
    assert (INT8.name, mixed.name) == ("q8_0", "q8_0+q4_0")
    assert (REFERENCE.precision, INT8.precision, mixed.precision) == ("fp16", "w8a8", "w8a8+w4a8")
    with pytest.raises(ProblemError, match="2 types of keys and 3 of values"):
        pairs(["f16"] * 2, ["f16"] * 3)


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_model(path, head_dim=64, types="Q8_0")
    return path


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("lowbit.autotune.decoding.default_database", lambda: tmp_path / "none.db")
    path = tmp_path / "book.txt"
    path.write_text("hello in the hell on the inn, then another one. " * 12)
    return path


def run(model: Path, book: Path, *words: str) -> Any:
    return CliRunner().invoke(autotune, ["quality", "-m", str(model), "--text", str(book), "-t", "2", *words])


def test_the_report_has_a_row_for_each_cache(model: Path, book: Path) -> None:
    result = run(model, book, "--windows", "3", "--window-tokens", "32", "--impl", "lowbit", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(row["impl"], row["cache_type_k"], row["floor"]) for row in found["rows"]] == [
        ("lowbit", "f16", False),
        ("lowbit", "q8_0", False),
        ("lowbit", "q4_0", False),
        ("lowbit", "f16", True),
    ]
    assert (found["windows"], found["scored_tokens"], found["weights"]) == (3, 45, "tuned")
    assert [row["tokens"] for row in found["rows"]] == [45] * 4
    medians = [row["kl_divergence"]["median"]["value"] for row in found["rows"]]
    assert medians[0] == 0 < medians[1] < medians[2]
    assert found["perplexity_ratio_vs_llamacpp"] == {}


def test_llama_cpp_is_measured_beside(model: Path, book: Path) -> None:
    pytest.importorskip("llama_cpp")
    words = ("--windows", "2", "--window-tokens", "32", "--weights", "exact", "-ctk", "q8_0", "-ctv", "q8_0", "--json")
    result = run(model, book, *words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["peers"]["llama_cpp"].startswith("llama-cpp-python ")
    assert sum(row["impl"] == "llama_cpp" for row in found["rows"]) == 3
    for name in ("f16", "q8_0"):
        assert found["perplexity_ratio_vs_llamacpp"][name]["value"] == pytest.approx(1, abs=0.02)


def test_an_absent_peer_is_said_and_left_out(model: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.autotune.bench.llama_model.MODULE", "no_such_module")
    words = ("--windows", "2", "--window-tokens", "32")
    result = run(model, book, *words)
    assert result.exit_code == 0, result.output
    assert "llama.cpp is left out: not installed: pip install llama-cpp-python" in result.stderr
    table = " ".join(result.stdout.split())
    for part in ("lowbit", "f16 in other parts", "q8_0", "KL 99.9 %", "±", "absent: not installed"):
        assert part in table
    alone = run(model, book, *words, "--impl", "llama_cpp")
    assert (alone.exit_code, alone.stderr.splitlines()[-1][:32]) == (2, "error: nobody is left to measure")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--window-tokens", "5000"), "too few for one window of 5000"),
        (("--window-tokens", "3"), "3 is not in the range"),
        (("-ctk", "q5_0"), "unknown cache type 'q5_0'"),
        (("-ctk", "f16,f16", "-ctv", "f16,f16,f16"), "2 types of keys and 3 of values"),
        (("--impl", "mlc"), "unknown implementation 'mlc'"),
    ],
)
def test_bad_options_are_one_line(model: Path, book: Path, words: tuple[str, ...], said: str) -> None:
    result = run(model, book, *words)
    assert result.exit_code == 2, result.output
    (line,) = (line for line in result.stderr.splitlines() if not line.startswith("warning"))
    assert said in line


def test_a_text_that_is_missing_or_no_text_is_one_line(model: Path, book: Path) -> None:
    missing = run(model, book.parent / "missing.txt")
    assert (missing.exit_code, missing.stderr.splitlines()[-1]) == (
        1,
        f"error: {book.parent}/missing.txt: No such file or directory",
    )
    book.write_bytes(b"abc\xff\xfe" * 100)
    assert "is not UTF-8 text: invalid start byte at byte 3" in run(model, book).stderr

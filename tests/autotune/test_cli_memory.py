"""`autotune memory`, and the shapes that it works with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.autotune.decoder_shapes import HYBRIDS, decoder_named
from lowbit.autotune.models import PRESETS
from lowbit.autotune.parameters import PARAMETERS
from lowbit.autotune.sizes import size_in_bytes
from lowbit.runtime.memory import CacheShape

gguf = pytest.importorskip("gguf")


def run(*args: str) -> Any:
    return CliRunner().invoke(autotune, ["memory", *args])


def report(*args: str) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def write_gguf(path: Path, architecture: str, tensors: dict[str, Any] | None = None, **metadata: Any) -> str:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    for name, (shape, kind) in (tensors or {"token_embd.weight": ((96, 64), "F32")}).items():
        values = gguf.quants.quantize(np.ones(shape, np.float32), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


SMALL = {"block_count": 4, "embedding_length": 64, "attention__head_count": 4, "attention__head_count_kv": 2}


def test_a_published_hybrid() -> None:
    found = report("--model", "Qwen3.6-27B", "--context", "200000", "--budget", "24GB")
    assert (found["layers"], found["layers_with_kv"], found["budget_bytes"]) == (64, 16, 24 * 10**9)
    plain, *_, small = found["rows"]
    assert (plain["k"], plain["bytes_per_token"], plain["cache_bytes"]) == ("f16", 65_536, 13_107_200_000)
    assert not plain["fits"] and small["fits"]
    assert small["cache_bytes"] == 13_107_200_000 * 4.5 / 16
    for row in found["rows"]:
        assert row["weights_bytes"] == 27e9 * 4.5 / 8
        parts = ("weights", "codes", "scales", "state", "ring", "scratch")
        assert row["total_bytes"] == sum(row[f"{name}_bytes"] for name in parts)
        assert row["fits"] == (row["largest_context"] >= 200_000)
    assert [(row["k"], row["v"]) for row in found["rows"]] == [
        ("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "q4_0"),
    ]  # fmt: skip


def test_weights_rings_and_windows() -> None:
    plain, more = (report("--model", "gemma-2-2b", "-c", "100000", "--budget", "9GB", *extra)["rows"][0] for extra in (
        (), ("--weights", "f16", "--draft-layers", "3")
    ))  # fmt: skip
    assert more["weights_bytes"] == 2 * PARAMETERS["gemma-2-2b"]
    assert more["ring_bytes"] == 4096 * 3 * 2304 * 2 and plain["ring_bytes"] == 0
    # 13 layers keep all tokens, and 13 the window, cut into four segments of which two more are held for a while.
    assert plain["codes_bytes"] == 2 * 13 * 4 * 256 * 2 * (100_000 + 4096 * 6 // 4)


def test_without_a_budget_it_is_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.runtime.available.available_bytes", lambda: 123_456_789)
    assert report("--model", "smollm2-135m")["budget_bytes"] == 123_456_789


def test_a_budget_for_nothing_and_one_for_anything(tmp_path: Path) -> None:
    assert {row["largest_context"] for row in report("--budget", "1MB")["rows"]} == {0}
    path = write_gguf(tmp_path / "m.gguf", "llama", attention__sliding_window=128, **SMALL)
    assert {row["largest_context"] for row in report("--model", path, "--budget", "1GB")["rows"]} == {None}
    shown = run("--model", path, "--budget", "1GB")
    assert shown.exit_code == 0 and "any" in shown.stdout and "window 128" in shown.stdout


def test_for_people_what_is_unknown_is_said() -> None:
    shown = run("--model", "qwen3.6-27b", "--context", "200000", "--budget", "24GB")
    text = " ".join(shown.stdout.split())
    assert "64, of which 16 keep keys and values" in text and "not known and not counted" in text
    assert "2 × 16 layers × 4 heads × 256 channels × 200,000 tokens × 2 bytes = 13.1 GB" in text


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_of_presets_are_those_of_their_matrices(name: str) -> None:
    """Untied heads count twice, and phi-2 has no gate; norms and biases are less than half a percent."""
    model = PRESETS[name]
    (shape,) = model.geometries
    layer = 2 * model.width * shape.head_dim * (shape.heads + shape.kv_heads)
    layer += (2 if name == "phi-2" else 3) * model.width * model.feed_forward[0]
    ends = model.vocabulary * model.width * (2 if name in ("qwen3-8b", "phi-2") else 1)
    assert PARAMETERS[name] == pytest.approx(shape.layers * layer + ends, rel=0.005)


def test_every_preset_has_a_shape() -> None:
    assert set(PARAMETERS) == {*PRESETS, *HYBRIDS}
    for name in PARAMETERS:
        decoder = decoder_named(name.upper())
        assert decoder.shape.layers >= decoder.shape.cached_layers > 0
        assert decoder.parameters > 0


# -- files ------------------------------------------------------------------------------------------------------------


def caches(path: str) -> set[CacheShape]:
    return set(decoder_named(path).shape.caches)


def test_layers_without_heads_keep_nothing_and_have_a_state(tmp_path: Path) -> None:
    metadata = SMALL | {"attention__head_count_kv": [2, 0, 0, 2]}
    path = write_gguf(tmp_path / "a.gguf", "hybrid", **metadata)
    assert caches(path) == {CacheShape(2, 2, 16)}
    assert decoder_named(path).shape.state_bytes is None
    ssm = {"ssm__state_size": 16, "ssm__inner_size": 128, "ssm__conv_kernel": 4, "ssm__group_count": 2}
    path = write_gguf(tmp_path / "b.gguf", "hybrid", **metadata, **ssm)
    assert decoder_named(path).shape.state_bytes == 2 * 4 * (16 * 128 + 3 * (128 + 2 * 2 * 16))
    assert report("--model", path, "--budget", "1GB")["rows"][0]["state_bytes"] == decoder_named(path).shape.state_bytes


@pytest.mark.parametrize(("architecture", "given"), [("qwen35", {}), ("other", {"full_attention_interval": 4})])
def test_an_interval_says_which_layers_attend(tmp_path: Path, architecture: str, given: dict[str, int]) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture, **(SMALL | {"block_count": 64}), **given)
    assert caches(path) == {CacheShape(16, 2, 16)}


@pytest.mark.parametrize(
    ("architecture", "pattern", "windowed"),
    [("llama", {}, 12), ("gemma3", {}, 10), ("gemma2", {}, 6), ("unheard-of", {}, 0),
     ("any", {"attention__sliding_window_pattern": 4}, 9),
     ("any", {"attention__sliding_window_pattern": [True, False, False] * 4}, 4)],
)  # fmt: skip
def test_which_layers_have_a_window(tmp_path: Path, architecture: str, pattern: dict[str, Any], windowed: int) -> None:
    metadata = SMALL | {"block_count": 12, "attention__sliding_window": 512} | pattern
    path = write_gguf(tmp_path / "m.gguf", architecture, **metadata)
    both = {CacheShape(12 - windowed, 2, 16), CacheShape(windowed, 2, 16, window=512)}
    assert caches(path) == {each for each in both if each.layers}


def test_weights_of_a_file_count_as_they_are_decoded_with(tmp_path: Path) -> None:
    kinds = {"Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5, "F16": 8.5}
    tensors: dict[str, Any] = {f"blk.0.{kind}.weight": ((32, 64), kind) for kind in kinds}
    tensors["output_norm.weight"] = ((64,), "F32")
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, **SMALL)
    decoder = decoder_named(path)
    assert decoder.parameters == 4 * 32 * 64 + 64
    assert decoder.weights == sum(32 * 64 * bits / 8 for bits in kinds.values()) + 4 * 64
    assert decoder.file == 32 * 64 * (18 / 32 + 20 / 32 + 34 / 32 + 2) + 4 * 64
    found = report("--model", path, "--budget", "1GB")
    assert (found["weights"], found["rows"][0]["weights_bytes"]) == ("file", decoder.weights)
    assert report("--model", path, "--budget", "1GB", "--weights", "q8_0")["rows"][0]["weights_bytes"] == int(
        decoder.parameters * 8.5 / 8
    )


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("24GiB", 24 << 30), ("24gib", 24 << 30), ("512 MiB", 512 << 20), ("1.5kB", 1500),
     ("1000000", 10**6), ("7B", 7), ("0.5TiB", 1 << 39), (" 3MB ", 3 * 10**6)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "24G", "-3GB", "0", "0.0001B", "1e9", "24 GB GB", "nan", "inf", "२GB", "1,5GB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: write 24GB"):
        size_in_bytes(text)


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--budget", "24G"], 2, ["--budget", "24G", "24GiB"]),
        (["--context", "0"], 2, ["--context", "0"]),
        (["--context", "many"], 2, ["--context", "many"]),
        (["--context", "99999999"], 2, ["16777216"]),
        (["--model", "llama-99"], 7, ["llama-99", "qwen3.6-27b"]),
        (["--model", "absent.gguf"], 7, ["absent.gguf"]),
        (["--weights", "q3"], 2, ["q3", "q4_0"]),
        (["--draft-layers", "-1"], 2, ["--draft-layers"]),
    ],
)
def test_bad_input_is_one_line_and_a_status(args: list[str], status: int, words: list[str]) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout) == (status, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line


def test_a_truncated_file_is_one_line(tmp_path: Path) -> None:
    path = Path(write_gguf(tmp_path / "m.gguf", "llama", **SMALL))
    path.write_bytes(path.read_bytes()[:100])
    result = run("--model", str(path))
    assert result.exit_code == 7
    assert len(result.stderr.splitlines()) == 1 and "truncated" in result.stderr

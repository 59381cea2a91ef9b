"""Files that are cut off, damaged, foreign or absurd are refused: in one line, soon, and without much memory."""

from __future__ import annotations

import itertools
import os
import struct
import time
import tracemalloc

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lowbit.kernels.errors import ModelError
from lowbit.runtime.model import gguf_file
from lowbit.runtime.model.config import Config
from lowbit.runtime.model.gguf_file import GgufFile
from lowbit.runtime.model.tensor_types import TYPES as TENSOR_TYPES
from lowbit.runtime.model.tokenizer import Tokenizer
from lowbit.runtime.model.weights import exact, vector, weight
from tiny_models import TYPES, write_model

LARGEST_MEMORY = 64 << 20


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


def u64(*numbers):
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def text(content):
    return u64(len(content)) + content


def head(tensors=0, keys=0, version=3):
    return b"GGUF" + u32(version) + u64(tensors, keys)


def key(name, kind, value):
    return text(name) + u32(kind) + value


def tensor(name, dimensions, kind=0, offset=0):
    return text(name) + u32(len(dimensions)) + u64(*dimensions) + u32(kind) + u64(offset)


def everything(path):
    """All that loading a model reads."""
    with GgufFile(path) as file:
        config = Config.read(file)
        for name, rows, _ in config.shapes():
            if rows == 1:
                vector(file, name, config.row_order(name))
            else:
                weight(file, name, config.row_order(name))
        exact(file, "token_embd.weight")
        config.rope.frequencies()
        tokenizer = Tokenizer(file)
        tokenizer.decode(tokenizer.encode("Hello <|im_start|> the café 12"))


def survives(path):
    """Read everything: it works, or a `ModelError` of one line says why not."""
    try:
        everything(path)
    except ModelError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error), str(error)


# -- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_tensors_are_those_that_the_gguf_package_finds(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(gguf_file, "CHUNK_BYTES", 1000)
    path = write_model(tmp_path / "m.gguf", types=kind, width=256, hidden=256, rope_factors=[1.0] * 32)
    with GgufFile(path) as file:
        reader = GGUFReader(path)
        assert list(file.tensors) == [found.name for found in reader.tensors]
        for found in reader.tensors:
            info = file.tensor(found.name)
            assert (info.type.name, info.offset, info.nbytes) == (
                found.tensor_type.name,
                found.data_offset,
                found.n_bytes,
            )
            rows = np.concatenate([part.copy() for _, part in file.chunks(found.name)])
            assert rows.tobytes() == found.data.tobytes()


def test_metadata_are_those_that_the_gguf_package_finds(tmp_path):
    path = write_model(tmp_path / "m.gguf")
    fields = GGUFReader(path).fields
    with GgufFile(path) as file:
        assert file.text("general.name") == fields["general.name"].contents() == "tiny"
        assert file.integer("llama.block_count") == fields["llama.block_count"].contents() == 2
        epsilon = file.real("llama.attention.layer_norm_rms_epsilon", least=0, largest=1)
        assert epsilon == fields["llama.attention.layer_norm_rms_epsilon"].contents()
        tokens = [raw.decode() for raw in file.strings("tokenizer.ggml.tokens")]
        assert tokens == fields["tokenizer.ggml.tokens"].contents()
        kinds = file.numbers("tokenizer.ggml.token_type")
        assert list(kinds) == fields["tokenizer.ggml.token_type"].contents()
        assert not file.flag("tokenizer.ggml.add_bos_token", True)
        assert "llama.block_count" in file and "llama.other" not in file


def test_the_second_version_of_the_format_is_read(tmp_path):
    path = write_model(tmp_path / "m.gguf")
    raw = bytearray(path.read_bytes())
    raw[4:8] = u32(2)
    path.write_bytes(raw)
    everything(path)


def test_another_alignment(tmp_path):
    path = tmp_path / "m.gguf"
    raw = head(1, 1) + key(b"general.alignment", 4, u32(256)) + tensor(b"a", (3,))
    path.write_bytes(raw.ljust(256, b"\0") + np.array([1.5, 2, 3], np.float32).tobytes())
    with GgufFile(path) as file:
        assert list(exact(file, "a")[0]) == [1.5, 2, 3]


def test_a_file_is_closed_when_it_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(head(1))
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for _ in range(3):
        with pytest.raises(ModelError):
            GgufFile(path)
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


# -- what is refused ---------------------------------------------------------------------------------------------------


BIG = (1 << 63) - 1


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"PK\3\4" + bytes(100), "not a GGUF file"),
        (b"GGUF", "truncated"),
        (b"GGUF" + u32(3), "truncated"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "a big-endian GGUF file"),
        (head(version=1), "GGUF version 1; readable are 2 and 3"),
        (head(version=4), "GGUF version 4"),
        (head(tensors=BIG), f"it claims to have {BIG} tensors"),
        (head(keys=BIG), f"it claims to have {BIG} keys"),
        (head(keys=1), "truncated"),
        (head(keys=1) + u64(BIG), "a key of"),
        (head(keys=1) + key(b"a" * 70000, 4, u32(1)), "a key is 70000 bytes long"),
        (head(keys=1) + key(b"\xff", 4, u32(1)), "a key is not UTF-8"),
        (head(keys=1) + key(b"a", 13, u32(1)), "'a' has a value of the unknown type 13"),
        (head(keys=1) + key(b"a", 8, u64(BIG)), "the value of 'a' of"),
        (head(keys=1) + key(b"a", 8, text(b"\xff")), "the value of 'a' is not UTF-8"),
        (head(keys=2) + key(b"a", 4, u32(1)) * 2, "the key 'a' is there twice"),
        (head(keys=1) + key(b"a", 9, u32(4) + u64(BIG)), f"'a' has {BIG} elements"),
        (head(keys=1) + key(b"a", 9, u32(4) + u64(1 << 20)), "it ends within 'a'"),
        (head(keys=1) + key(b"a", 9, u32(8) + u64(1 << 20)), "truncated"),
        (head(keys=1) + key(b"a", 9, u32(8) + u64(2) + u64(BIG)), "it ends within 'a'"),
        (head(keys=1) + key(b"a", 9, (u32(9) + u64(1)) * 5000), "'a' is an array of elements of type 9"),
        (head(keys=1) + key(b"general.alignment", 4, u32(0)), "general.alignment must be a power of two, not 0"),
        (head(keys=1) + key(b"general.alignment", 4, u32(24)), "general.alignment must be a power of two, not 24"),
        (head(keys=1) + key(b"general.alignment", 8, text(b"x")), "general.alignment must be a power of two, not 'x'"),
        (head(1), "truncated"),
        (head(1) + tensor(b"a", ()), "tensor 'a' has 0 dimensions"),
        (head(1) + text(b"a") + u32(1 << 31), "tensor 'a' has 2147483648 dimensions"),
        (head(1) + tensor(b"a", (0, 4)), "tensor 'a' of type F32 has the shape 0×4"),
        (head(1) + tensor(b"a", (33, 4), 2), "tensor 'a' of type Q4_0 has the shape 33×4"),
        (head(1) + tensor(b"a", (BIG, BIG, BIG, BIG)), "tensor 'a' ends at byte"),
        (head(1) + tensor(b"a", (4,), 0, BIG), "tensor 'a' ends at byte"),
        (head(1) + tensor(b"a", (4,), 99), "tensor 'a' is of the unknown type 99"),
        (head(2) + tensor(b"a", (1,)) * 2 + bytes(64), "tensor 'a' is there twice"),
        (head(1) + tensor(b"a\nb", (4,), 99), r"tensor 'a\\nb' is of"),
    ],
    ids=itertools.count(),
)
def test_refusals(tmp_path, raw, said):
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=said) as caught:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < LARGEST_MEMORY
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [number for number, kind in TENSOR_TYPES.items() if not kind.readable])
def test_types_that_weights_may_not_have_are_named_when_they_are_read(tmp_path, number):
    kind, path = TENSOR_TYPES[number], tmp_path / "m.gguf"
    path.write_bytes(head(1) + tensor(b"a", (256,), number) + bytes(4096))
    with GgufFile(path) as file:
        assert file.tensors["a"].nbytes == 256 // kind.block * kind.block_bytes
        for read in (weight, exact, vector):
            with pytest.raises(ModelError, match=f"tensor 'a' is of type {kind.name}, which is unsupported"):
                read(file, "a")


def test_what_is_no_file(tmp_path):
    with pytest.raises(ModelError, match=r"absent\.gguf: No such file"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="not a file"):
        GgufFile(tmp_path)
    with pytest.raises(ModelError, match="null"):
        GgufFile("a\0b")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")  # reading it would wait for ever
        with pytest.raises(ModelError, match="not a file"):
            GgufFile(tmp_path / "pipe.gguf")


def test_look_ups_refuse_what_has_another_type(tmp_path):
    path = write_model(tmp_path / "m.gguf", metadata={"general.flag": True, "general.number": 3})
    with GgufFile(path) as file:
        for look_up, said in (
            (lambda: file.text("general.number"), "general.number must be text, not 3"),
            (lambda: file.integer("general.name"), "general.name must be a number from 1 to 1048576, not 'tiny'"),
            (lambda: file.integer("general.flag"), "general.flag must be a number"),
            (lambda: file.integer("tokenizer.ggml.merges"), "merges must be a number from 1 to 1048576, not a list"),
            (lambda: file.real("general.flag", least=0, largest=1), "general.flag must be a number"),
            (lambda: file.real("general.number", least=0, largest=1), "general.number must be a number from 0 to 1"),
            (lambda: file.flag("general.number", True), "general.number must be true or false, not 3"),
            (lambda: file.strings("general.name"), "general.name must be a list of texts"),
            (lambda: file.strings("tokenizer.ggml.token_type"), "token_type must be a list of texts"),
            (lambda: file.numbers("tokenizer.ggml.tokens"), "tokens must be a list of numbers"),
            (lambda: file.numbers("general.absent"), "general.absent is missing"),
            (lambda: file.tensor("absent"), "tensor 'absent' is missing"),
        ):
            with pytest.raises(ModelError, match=said):
                look_up()


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    types = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "ffn_up": "F16", "": "Q5_1"}
    path = write_model(tmp_path_factory.mktemp("whole") / "m.gguf", types=types, layers=1, biases=True)
    everything(path)
    return path.read_bytes()


def test_a_file_cut_off_anywhere_is_refused(tmp_path, whole):
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    with GgufFile(path) as file:
        end = max(info.offset + info.nbytes for info in file.tensors.values())
        start = min(info.offset for info in file.tensors.values())
    step = max(1, start // 300)
    for size in [*range(0, start, step), start, (start + end) // 2, end - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"truncated|not a GGUF"):
            everything(path)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_lead_to_an_error_or_to_a_model(tmp_path, whole, seed):
    """Anywhere in the head, one to three bytes at a time; each byte of the first 200 once."""
    draw = np.random.default_rng(seed)
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    with GgufFile(path) as file:
        start = min(info.offset for info in file.tensors.values())
    places = [[at] for at in range(seed, 200, 4)]
    places += [draw.integers(4, start, draw.integers(1, 4)) for _ in range(150)]
    for places_of_one in places:
        raw = bytearray(whole)
        for at in places_of_one:
            raw[at] ^= int(draw.integers(1, 256))
        path.write_bytes(raw)
        began = time.monotonic()
        tracemalloc.start()
        try:
            survives(path)
            assert tracemalloc.get_traced_memory()[1] < LARGEST_MEMORY
        finally:
            tracemalloc.stop()
        assert time.monotonic() - began < 20


def test_random_weights_lead_to_an_error_or_to_a_model(tmp_path, whole):
    draw = np.random.default_rng(7)
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    with GgufFile(path) as file:
        start = min(info.offset for info in file.tensors.values())
    for _ in range(20):
        raw = bytearray(whole)
        at = int(draw.integers(start, len(raw) - 4000))
        raw[at : at + 4000] = draw.bytes(4000)
        path.write_bytes(raw)
        survives(path)


@settings(deadline=None, max_examples=200, derandomize=True, suppress_health_check=list(HealthCheck))
@given(counts=st.tuples(st.integers(0, 5), st.integers(0, 5)), noise=st.binary(max_size=300))
def test_noise_after_a_head(tmp_path_factory, counts, noise):
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    path.write_bytes(head(*counts) + noise)
    survives(path)

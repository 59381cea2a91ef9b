"""Saved caches: what comes back is what was there, and nothing comes back from a file that is not what was saved."""

import hashlib
import json
import os
import stat
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from cache_model import ROWS, SHAPES
from lowbit.kernels.errors import CacheFileError
from lowbit.kernels.layout import Layout
from lowbit.runtime import cache_file
from lowbit.runtime.cache_header import FORMAT, VERSION, Header
from lowbit.runtime.kvcache import KVCache
from lowbit.runtime.segment import KVLayout, Shape

SHAPE = SHAPES[1]
TILES = KVLayout(
    Layout.parse("T/16 D/4 t16 d4 | int8/bytes/offset"), Layout.parse("T/32 D t32 | int4/contiguous/signed | pad 64")
)
HALVES = KVLayout(Layout.parse("T D | fp16"), Layout.parse("T/16 D/8 t16 d8 | int4/lane_interleaved/offset"))


def grow(cache, count):
    taken = np.arange(cache.length, cache.length + count) % 256
    cache.append(*(np.ascontiguousarray(np.moveaxis(each[taken], 0, 2)) for each in ROWS[SHAPE]))


def some_cache(tokens=50, window=0):
    cache = KVCache(*SHAPE, 400, TILES, window=window, segment_tokens=None if not window else 32)
    grow(cache, tokens)
    cache.switch(HALVES)
    grow(cache, 21)
    return cache


def contents(cache):
    return [
        (each.start, each.tokens, each.layout, role, each.operand(role, layer).dequantize().tobytes())
        for each in cache.segments
        for role in "kv"
        for layer in range(cache.layers)
    ]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "context.safetensors"
    some_cache().save(path)
    return path


@pytest.mark.parametrize("cache", [KVCache(*SHAPE, 100, TILES), some_cache(), some_cache(300, window=40)], ids=repr)
def test_what_was_saved_comes_back_and_goes_on(cache, tmp_path):
    cache.save(tmp_path / "c")
    again = KVCache.restore(tmp_path / "c")
    for name in ("length", "capacity", "window", "segment_tokens", "layout", "start"):
        assert getattr(again, name) == getattr(cache, name)
    assert contents(again) == contents(cache)
    grow(cache, 70)
    grow(again, 70)
    assert contents(again) == contents(cache)
    assert len(again.segments) == len(cache.segments)


def test_a_restored_cache_may_have_room_for_more(saved):
    cache = KVCache.restore(saved, capacity=1000)
    grow(cache, 929)
    assert cache.length == 1000
    assert KVCache.restore(saved, capacity=71).capacity == 71
    with pytest.raises(CacheFileError, match="holds 71 tokens, and there is to be room for 70"):
        KVCache.restore(saved, capacity=70)


def test_any_reader_of_safetensors_reads_the_file(saved):
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(saved)
    assert tensors["segment.0.k.words"].shape == (SHAPE[0], SHAPE[1], 64 * SHAPE[2])
    assert tensors["segment.1.k.words"].shape == (SHAPE[0], SHAPE[1], 21 * 2 * SHAPE[2])
    assert tensors["segment.0.v.scales"].dtype == np.float16
    assert sorted(tensors) == [
        "segment.0.k.scales", "segment.0.k.words", "segment.0.v.scales", "segment.0.v.words",
        "segment.1.k.words", "segment.1.v.scales", "segment.1.v.words",
    ]  # fmt: skip
    words = tensors["segment.1.k.words"].view(np.float16).reshape(*SHAPE[:2], 21, SHAPE[2])
    taken = np.arange(50, 71)
    np.testing.assert_array_equal(words, np.moveaxis(ROWS[SHAPE][0][taken].astype(np.float16), 0, 2))


def test_rows_that_were_rolled_back_are_not_in_the_file(tmp_path):
    """Two caches of the same tokens are the same file, whatever else they once held."""
    one, other = KVCache(*SHAPE, 400, TILES), KVCache(*SHAPE, 400, TILES)
    grow(one, 90)
    one.truncate(37)
    grow(other, 37)
    one.save(tmp_path / "one")
    other.save(tmp_path / "other")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_every_flipped_bit_of_the_header_is_noticed(saved):
    original = saved.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    for position in range(header):
        altered = bytearray(original)
        altered[position] ^= 1 << position % 8
        saved.write_bytes(altered)
        with pytest.raises(CacheFileError, match="is not restored"):
            KVCache.restore(saved)


def test_every_flipped_bit_of_the_data_is_noticed(saved):
    original = saved.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    for position in np.random.default_rng(0).integers(header, len(original), 300):
        altered = bytearray(original)
        altered[position] ^= 1 << position % 8
        saved.write_bytes(altered)
        with pytest.raises(CacheFileError, match=r"altered|not finite"):
            KVCache.restore(saved)


def test_every_truncated_or_lengthened_file_is_refused(saved):
    original = saved.read_bytes()
    for size in (*range(64), *range(64, len(original), 97), len(original) - 1):
        saved.write_bytes(original[:size])
        with pytest.raises(CacheFileError, match="is not restored"):
            KVCache.restore(saved)
    saved.write_bytes(original + b"\0")
    with pytest.raises(CacheFileError, match="truncated, or altered"):
        KVCache.restore(saved)


def forge(path, change, data=None):
    """Rewrite a file's description by ``change``, with a digest that fits."""
    original = path.read_bytes()
    size = int.from_bytes(original[:8], "little")
    listed = json.loads(original[8 : 8 + size])
    data = original[8 + size :] if data is None else data
    text = json.dumps(change(json.loads(listed["__metadata__"]["cache"])), separators=(",", ":"))
    digest = hashlib.sha256(f"{FORMAT} {VERSION}\n{text}\n".encode() + data).hexdigest()
    listed["__metadata__"] |= {"cache": text, "sha256": digest}
    with suppress(CacheFileError):
        listed = {"__metadata__": listed["__metadata__"], **Header.parse(text).entries()}
    header = json.dumps(listed, separators=(",", ":")).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def segment(number, **values):
    def change(record):
        record["segments"][number] |= values
        return record

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {**r, "layers": 1 << 40}, "layers is 1099511627776, not 1 to"),
        (lambda r: {**r, "layers": 4}, "bytes and needs"),
        (lambda r: {**r, "head_dim": 0}, "head_dim is 0"),
        (lambda r: {**r, "head_dim": 31}, "no whole number|bytes and needs"),
        (lambda r: {**r, "length": True}, "length is True"),
        (lambda r: {**r, "length": 72}, "71 tokens of 72"),
        (lambda r: {**r, "capacity": 70}, "71 tokens of 71 in a cache for 70"),
        (lambda r: {**r, "extra": 1}, "more than a cache has"),
        (lambda r: {**r, "segments": r["segments"][1:]}, "tokens 0 to 50 are missing"),
        (lambda r: {**r, "segments": 5}, "lists no segments"),
        (lambda r: {**r, "layout": {"k": "T D | fp16"}}, "names no packing"),
        (lambda r: [], "layers is None"),
        (segment(0, tokens=0), "tokens is 0, not 1 to"),
        (segment(0, tokens=49), "starts at token 50 instead of 49"),
        (segment(1, tokens=1 << 20), "1048626 tokens of 71"),
        (segment(0, k="T/16 D/4 t16 d4 | int8/bytes/mine"), "unknown packing 'int8/bytes/mine'"),
        (segment(0, k="T D t16 | fp16"), "does not continue|nothing counts"),
        (segment(0, k="D T | fp16"), "grows along tokens"),
        (segment(0, k="T/100000000000 D t100000000000 | fp16"), "holds at most 4096 tokens"),
        (segment(0, k="T D/100000000000 d100000000000 | fp16"), "holds at most 4096 tokens"),
        (segment(0, k="T D | int8/bytes/offset"), "bytes and needs"),
    ],
)
def test_a_description_that_cannot_be_is_refused_though_its_digest_fits(saved, change, message):
    forge(saved, change)
    with pytest.raises(CacheFileError, match=message):
        KVCache.restore(saved)


def test_numbers_that_would_make_nan_of_hidden_rows_are_refused(tmp_path):
    path = tmp_path / "c"
    cache = KVCache(*SHAPE, 32, KVLayout(HALVES.k, HALVES.k))
    grow(cache, 3)
    cache.save(path)
    forge(path, lambda record: record)
    KVCache.restore(path)
    original = path.read_bytes()
    size = int.from_bytes(original[:8], "little")
    data = bytearray(original[8 + size :])
    data[6:8] = b"\x00\x7c"
    forge(path, lambda record: record, bytes(data))
    with pytest.raises(CacheFileError, match=r"segment.0.k.words has numbers that are not finite"):
        KVCache.restore(path)


def test_another_model_s_cache_is_refused(saved):
    assert KVCache.restore(saved, shape=Shape(*SHAPE)).length == 71
    with pytest.raises(CacheFileError, match="2 layers of 1 heads of 32, not 2 layers of 3 heads of 32"):
        KVCache.restore(saved, shape=replace(Shape(*SHAPE), kv_heads=3))


def test_other_files_are_refused(tmp_path, saved):
    with pytest.raises(CacheFileError, match=r"cannot read .*nothing: No such file"):
        KVCache.restore(tmp_path / "nothing")
    with pytest.raises(CacheFileError, match="cannot read"):
        KVCache.restore(tmp_path)
    other = tmp_path / "other"
    for header, message in (
        (b"{}", "no saved cache"),
        (b"[1]", "no saved cache"),
        (b"nonsense", "no saved cache"),
        (b"[" * 100_000, "no saved cache"),
        (b'{"__metadata__":{"format":"pt","version":"1","sha256":"","cache":""}}', "no saved cache but 'pt'"),
    ):
        other.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(CacheFileError, match=message):
            KVCache.restore(other)
    other.write_bytes(saved.read_bytes().replace(b'"version":"1"', b'"version":"2"'))
    with pytest.raises(CacheFileError, match="of version 2, and this release reads version 1"):
        KVCache.restore(other)


def test_a_save_that_fails_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_file.os, "fsync", full)
    with pytest.raises(CacheFileError, match=r"cannot write .*: No space left on device"):
        some_cache(9).save(saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_a_file_in_no_directory_is_refused(tmp_path):
    with pytest.raises(CacheFileError, match=r"cannot write .*: No such file or directory"):
        some_cache().save(tmp_path / "nowhere" / "c")


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX's")
def test_only_its_owner_reads_what_was_said(saved):
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600

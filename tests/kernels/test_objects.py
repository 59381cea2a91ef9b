"""Object code across processes: what is loaded, what is built anew, and what is refused."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from lowbit.kernels.cpu import code_files, machine, objects
from lowbit.kernels.cpu.isa import detect
from lowbit.kernels.cpu.objects import CacheWarning, Key, _Objects, counts

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners and modes here")


def adding(amount: int) -> bytes:
    """Object code of ``i64 f(i64 x)`` that adds ``amount``."""
    text = f"define i64 @f(i64 %x) {{\n  %y = add i64 %x, {amount}\n  ret i64 %y\n}}"
    return machine.object_code(text, detect())


def never() -> bytes:
    raise AssertionError("built although it was stored")


def call(addresses: tuple[int, ...]) -> int:
    (address,) = addresses
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(10))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go, not yet made."""
    path = tmp_path / "cache" / "objects"
    monkeypatch.setenv(code_files.CACHE_VARIABLE, str(path))
    monkeypatch.setattr("lowbit.kernels.cpu.objects.edited", lambda: False)  # whoever edits while tests run
    return path


KEY = Key(("f",), ("adding",))


def the_file(place: Path) -> Path:
    (found,) = place.iterdir()
    return found


def test_a_second_process_loads_what_the_first_built(place: Path) -> None:
    assert call(_Objects().addresses(KEY, lambda: adding(1))) == 11
    built, loaded = counts.built, counts.loaded
    assert call(_Objects().addresses(KEY, never)) == 11
    assert (counts.built, counts.loaded) == (built, loaded + 1)


def test_one_process_asks_once(place: Path) -> None:
    process = _Objects()
    first = process.addresses(KEY, lambda: adding(1))
    the_file(place).unlink()
    assert process.addresses(KEY, never) == first


@pytest.mark.parametrize("other", [Key(("f",), ("adding", "")), Key(("f",), ("Adding",)), Key(("f",), ())])
def test_another_key_is_another_object(place: Path, other: Key) -> None:
    _Objects().addresses(KEY, lambda: adding(1))
    assert call(_Objects().addresses(other, lambda: adding(2))) == 12
    assert call(_Objects().addresses(KEY, never)) == 11


@pytest.mark.parametrize("what", ["toolchain", "python"])
def test_another_version_is_another_key(place: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    _Objects().addresses(KEY, lambda: adding(1))
    if what == "toolchain":
        monkeypatch.setattr("lowbit.kernels.cpu.objects.toolchain", lambda: "numba 99")
    else:
        monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-999")
    assert call(_Objects().addresses(KEY, lambda: adding(2))) == 12


def test_a_process_whose_sources_were_edited_neither_loads_nor_stores(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Objects().addresses(KEY, lambda: adding(1))
    before = the_file(place).read_bytes()
    monkeypatch.setattr("lowbit.kernels.cpu.objects.edited", lambda: True)
    assert call(_Objects().addresses(KEY, lambda: adding(2))) == 12
    assert the_file(place).read_bytes() == before


def test_an_edited_source_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "tile.py"
    source.touch()
    monkeypatch.setattr(objects, "_sources", lambda: [source])
    assert objects.edited()
    os.utime(source, (1e9, 1e9))
    assert not objects.edited()


@pytest.mark.parametrize("damage", ["empty", "cut", "bit", "longer", "text"])
def test_a_damaged_file_is_built_anew_and_replaced(place: Path, damage: str) -> None:
    _Objects().addresses(KEY, lambda: adding(1))
    file = the_file(place)
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(
        {
            "empty": b"",
            "cut": whole[:middle],
            "bit": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            "longer": whole + b"\0",
            "text": b"not object code\n",
        }[damage]
    )
    assert call(_Objects().addresses(KEY, lambda: adding(1))) == 11
    assert file.read_bytes()[:16] == whole[:16]
    assert call(_Objects().addresses(KEY, never)) == 11


def test_a_file_of_another_key_is_not_loaded(place: Path) -> None:
    _Objects().addresses(KEY, lambda: adding(1))
    other = Key(("f",), ("other",))
    the_file(place).rename(place / code_files.file_name(other.digest))
    assert call(_Objects().addresses(other, lambda: adding(2))) == 12


def test_object_code_without_the_function_is_an_error(place: Path) -> None:
    with pytest.raises(RuntimeError, match="g is not in"):
        _Objects().addresses(Key(("g",), ()), lambda: adding(1))


def test_off(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(code_files.CACHE_VARIABLE, "off")
    assert code_files.directory() is None
    for amount in (1, 2):
        assert call(_Objects().addresses(KEY, lambda amount=amount: adding(amount))) == 10 + amount
    assert code_files.stored() == [] and not place.exists()


def test_by_default_files_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(code_files.CACHE_VARIABLE, "")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *args, **kwargs: str(tmp_path / "lowbit"))
    assert code_files.directory() == tmp_path / "lowbit" / "objects"


@posix
def test_the_directory_and_its_files_are_the_users_alone(place: Path) -> None:
    before = os.umask(0)
    try:
        _Objects().addresses(KEY, lambda: adding(1))
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(the_file(place).stat().st_mode) == 0o600


@posix
@pytest.mark.parametrize("mode", [0o770, 0o702])
@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_others_may_write_is_not_executed(place: Path, what: str, mode: int) -> None:
    _Objects().addresses(KEY, lambda: adding(1))
    (place if what == "directory" else the_file(place)).chmod(mode)
    with pytest.warns(CacheWarning, match="can be written by others"):
        assert call(_Objects().addresses(KEY, lambda: adding(2))) == 12


@posix
@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_another_user_owns_is_not_executed(place: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    _Objects().addresses(KEY, lambda: adding(1))
    owner = (place if what == "directory" else the_file(place)).stat().st_ino
    honest = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = honest(descriptor)
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]]) if found.st_ino == owner else found

    monkeypatch.setattr(code_files.os, "fstat", fstat)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert call(_Objects().addresses(KEY, lambda: adding(2))) == 12


@posix
def test_links_and_pipes_are_not_followed(place: Path, tmp_path: Path) -> None:
    _Objects().addresses(KEY, lambda: adding(1))
    file = the_file(place)
    moved = file.rename(tmp_path / "elsewhere")
    file.symlink_to(moved)
    with pytest.warns(CacheWarning):
        assert call(_Objects().addresses(KEY, lambda: adding(2))) == 12
    file.unlink()
    os.mkfifo(file)
    assert call(_Objects().addresses(KEY, lambda: adding(3))) == 13
    assert call(_Objects().addresses(KEY, never)) == 13


def test_a_place_that_cannot_be_used_costs_one_warning(place: Path) -> None:
    place.parent.mkdir()
    place.write_text("no directory")
    process = _Objects()
    with pytest.warns(CacheWarning) as caught:
        assert call(process.addresses(KEY, lambda: adding(1))) == 11
        assert call(process.addresses(Key(("f",), ()), lambda: adding(2))) == 12
    assert len(caught) == 1
    assert str(place) in str(caught[0].message) and "\n" not in str(caught[0].message)


@pytest.mark.parametrize("step", ["open", "replace"])
def test_a_full_or_read_only_disk_costs_one_warning(place: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    honest = getattr(os, step)

    def refuse(name: object, *arguments: object, **options: object) -> object:
        if step == "open" and not (isinstance(arguments[0], int) and arguments[0] & os.O_CREAT):
            return honest(name, *arguments, **options)
        raise OSError(28, "No space left on device")

    process = _Objects()
    supported = {*os.supports_dir_fd, refuse} if os.open in os.supports_dir_fd else os.supports_dir_fd
    monkeypatch.setattr(code_files.os, "supports_dir_fd", supported)
    monkeypatch.setattr(code_files.os, step, refuse)
    with pytest.warns(CacheWarning, match="No space left") as caught:
        for number in range(2):
            assert (
                call(process.addresses(Key(("f",), (str(number),)), lambda number=number: adding(number)))
                == 10 + number
            )
    assert len(caught) == 1
    assert list(place.iterdir()) == []


def test_the_least_recently_used_files_go_first(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 0
    for number in range(4):
        _Objects().addresses(Key(("f",), (str(number),)), lambda number=number: adding(number))
        file = place / code_files.file_name(Key(("f",), (str(number),)).digest)
        os.utime(file, (1e9 + number, 1e9 + number))
        size = file.stat().st_size
    _Objects().addresses(Key(("f",), ("0",)), never)  # marks it as used
    (place / "notes.txt").write_text("not of the cache")
    left = place / (code_files.file_name(b"\1" * 32) + ".123-4-5")
    left.write_bytes(b"half a file")
    os.utime(left, (1e9, 1e9))
    monkeypatch.setattr(code_files, "LIMIT_BYTES", 2 * size + size // 2)
    code_files.sweep(place)
    kept = {code_files.file_name(Key(("f",), (number,)).digest) for number in ("0", "3")}
    assert {each.name for each in place.iterdir()} == {*kept, "notes.txt"}


def test_clear_deletes_the_files_and_nothing_else(place: Path) -> None:
    assert code_files.clear() == (0, [])
    for number in range(3):
        _Objects().addresses(Key(("f",), (str(number),)), lambda number=number: adding(number))
    (place / "notes.txt").write_text("not of the cache")
    assert sum(each.size_bytes for each in code_files.stored()) > 0
    assert code_files.clear() == (3, [])
    assert [each.name for each in place.iterdir()] == ["notes.txt"]


RACE = textwrap.dedent(
    """
    import ctypes, sys
    from lowbit.kernels.cpu import machine
    from lowbit.kernels.cpu.isa import detect
    from lowbit.kernels.cpu.objects import Key, addresses

    def built(amount):
        return machine.object_code(f"define i64 @f(i64 %x) {{ %y = add i64 %x, {amount}\\n ret i64 %y }}", detect())

    print("ready", flush=True)
    sys.stdin.readline()
    for amount in range(40):
        (at,) = addresses(Key(("f",), (str(amount),)), lambda: built(amount))
        assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(at)(10) == 10 + amount
    """
)


def test_processes_may_build_and_load_at_once(place: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", RACE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
    outcomes = [racer.communicate("go\n") for racer in racers]
    assert [(racer.returncode, error) for racer, (_, error) in zip(racers, outcomes, strict=True)] == [(0, "")] * 3
    assert len(list(place.iterdir())) == 40

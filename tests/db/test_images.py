"""Winners' machine code in a database."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from contextlib import closing
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowbit.db import KernelImage, KernelLaunch, Rule, ShippedWinner, Store, Winner
from lowbit.db.kernels import MOST_TEXT_BYTES, unpacked
from lowbit.kernels.errors import DatabaseError

PROBLEM = "attend h8/2 d128 q1 w8a8"


def image(symbol: str = "main", ptx: str = ".entry main()", cubin: bytes = b"\x7fELF\0code") -> KernelImage:
    return KernelImage(
        toolchain="t1",
        symbol=symbol,
        arch="sm_86",
        ptx=ptx,
        cubin=cubin,
        arguments=(("k_words", "pointer"), ("tokens", "int32"), ("factor", "float32")),
        registers=40,
        created="2026-12-01T00:00:00.000+00:00",
        spill_bytes=0,
        shared_bytes=512,
    )


def launch(symbol: str = "main") -> KernelLaunch:
    grid = (Rule(2), Rule(0, 1, 128), Rule(1))
    return KernelLaunch(symbol, grid, 128, Rule(1024), {"tokens": Rule(0, 1), "factor": Rule(0.125)})


def winner(tokens: int = 512, candidate: str = "c", provenance: str = "predicted") -> Winner:
    return Winner(
        device="d",
        problem=PROBLEM,
        tokens=tokens,
        tokens_from=1,
        tokens_to=None,
        candidate=candidate,
        provenance=provenance,
        median_us=None if provenance == "predicted" else 1.0,
        protocol=None if provenance == "predicted" else "cold",
        toolchain="t1",
    )


SHIPPED = ShippedWinner((launch(), launch("merge")), Rule(4096, 8, 32))


def test_a_winners_code_and_launches_come_back_as_they_went(path: Path) -> None:
    images = (image(), image("merge", cubin=b""))
    with Store.open(path) as store:
        store.put_winner(winner())
        store.put_shipped(winner(), SHIPPED, images)
    with Store.open(path, "read") as store:
        assert store.shipped(winner()) == (SHIPPED, images)
        assert store.shipped_arch(winner()) == "sm_86"
        assert store.shipped_arch(winner(tokens=1024)) is None
        assert store.kernel("t1", "merge", "sm_86") == images[1]
        assert store.kernel("t1", "merge", "sm_80") is None
        assert store.kernel("t2", "main", "sm_86") is None
        assert store.kernels() == list(images) == store.kernels("sm_86")
        assert store.kernels("sm_80") == []
        assert store.info()["counts"]["kernels"] == 2


def test_code_is_stored_once_and_goes_with_its_last_winner(store: Store) -> None:
    for tokens in (512, 1024):
        store.put_winner(winner(tokens))
        store.put_shipped(winner(tokens), SHIPPED, (image(), image("merge")))
    assert store.info()["counts"]["kernels"] == 2
    only = ShippedWinner((launch("other"),), Rule(0))
    for tokens, left in ((512, ["main", "merge", "other"]), (1024, ["other"])):
        store.put_winner(winner(tokens, "better", "measured"))
        assert store.shipped(winner(tokens)) is None
        store.put_shipped(winner(tokens, "better", "measured"), only, (image("other"),))
        assert sorted(kernel.symbol for kernel in store.kernels()) == left


def test_code_of_another_build_replaces_what_the_symbol_had(store: Store) -> None:
    store.put_winner(winner())
    store.put_shipped(winner(), SHIPPED, (image(), image("merge")))
    changed = image(ptx=".entry main() // other")
    store.put_shipped(winner(), SHIPPED, (changed, image("merge")))
    assert store.kernels() == [changed, image("merge")]


def test_code_needs_its_winner_and_each_launch_its_image(store: Store) -> None:
    with pytest.raises(DatabaseError, match="holds no such winner"):
        store.put_shipped(winner(), SHIPPED, (image(), image("merge")))
    store.put_winner(winner())
    with pytest.raises(DatabaseError, match="image of its own"):
        store.put_shipped(winner(), SHIPPED, (image("merge"), image()))
    with pytest.raises(DatabaseError, match="holds no such winner"):
        store.put_shipped(winner(candidate="another"), SHIPPED, (image(), image("merge")))
    assert store.kernels() == []


def test_the_digest_covers_everything_that_runs() -> None:
    first = image()
    changed = (
        {"symbol": "x"},
        {"arch": "sm_80"},
        {"ptx": first.ptx + " "},
        {"cubin": first.cubin + b"\0"},
        {"cubin": b""},
        {"arguments": first.arguments[::-1]},
    )
    digests = {replace(first, **change).digest for change in changed} | {first.digest}
    assert len(digests) == len(changed) + 1
    moved = replace(first, ptx=first.ptx + "\x7f", cubin=first.cubin[1:])
    assert moved.ptx.encode() + moved.cubin == first.ptx.encode() + first.cubin
    assert moved.digest != first.digest
    head = b'["main","sm_86",[["k_words","pointer"],["tokens","int32"],["factor","float32"]]]'
    whole = b"".join(len(part).to_bytes(8, "little") + part for part in (head, first.ptx.encode(), first.cubin))
    assert first.digest == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE kernels SET cubin = :other",
        "UPDATE kernels SET ptx = :other",
        "UPDATE kernels SET cubin = NULL",
        "UPDATE kernels SET cubin = x'00'",
        "UPDATE kernels SET ptx = substr(ptx, 1, length(ptx) - 1)",
        "UPDATE kernels SET ptx = CAST(ptx || x'00' AS BLOB)",
        "UPDATE kernels SET ptx = 'text'",
        "UPDATE kernels SET arch = 'sm_80'",
        "UPDATE kernels SET digest = 'x'",
        "UPDATE kernels SET symbol = symbol || 'x'",
        "UPDATE kernels SET arguments = '[]'",
        "UPDATE kernels SET arguments = '17'",
        'UPDATE kernels SET arguments = \'[{"name": "a", "type": "int16"}]\'',
        "UPDATE launches SET payload = '[]'",
        "UPDATE launches SET payload = '{}'",
        "UPDATE launches SET payload = json_set(payload, '$.threads', 4096)",
        "UPDATE launches SET payload = json_set(payload, '$.grid[0]', 'many')",
        "UPDATE launches SET payload = json_set(payload, '$.grid', json('[1, 1]'))",
        "UPDATE launches SET payload = json_set(payload, '$.shared_bytes', json('{\"base\": 1, \"per\": 0}'))",
    ],
)
def test_code_and_launches_that_were_tampered_with_are_refused(path: Path, statement: str) -> None:
    with Store.open(path) as store:
        store.put_winner(winner())
        store.put_shipped(winner(), SHIPPED, (image(), image("merge")))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute(statement, {"other": zlib.compress(b"other")} if ":other" in statement else {})
    connection.commit()
    connection.close()
    with Store.open(path, "read") as store, pytest.raises(DatabaseError) as caught:
        store.shipped(winner())
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_code_that_unpacks_to_too_much_is_refused_without_unpacking_it() -> None:
    bomb = zlib.compress(b"\0" * (MOST_TEXT_BYTES + 1))
    with pytest.raises(DatabaseError, match="too long"):
        unpacked(bomb)


@given(
    base=st.integers(-5, 1000),
    times=st.integers(1, 64),
    shift=st.integers(0, 12),
    lengths=st.lists(st.integers(1, 1 << 20), min_size=3, max_size=12, unique=True),
)
def test_a_rule_that_is_found_says_what_it_was_found_from(
    base: int, times: int, shift: int, lengths: list[int]
) -> None:
    per = 1 << shift

    def value(tokens: int) -> int:
        return base + times * ceil(tokens / per)

    rule = Rule.of(value, lengths)
    assert all(rule.at(tokens) == value(tokens) for tokens in lengths)
    assert Rule.from_json(json.loads(json.dumps(rule.as_json()))) == rule


def test_rules_of_constants_and_of_nothing() -> None:
    assert Rule.of(lambda tokens: 7, [1, 2, 3]) == Rule(7)
    assert Rule.of(lambda tokens: 0.25, [1, 2]).at(999) == 0.25
    assert Rule.of(lambda tokens: tokens, [1, 2, 1000]) == Rule(0, 1, 1)
    for odd in (lambda tokens: tokens * tokens, lambda tokens: tokens / 2, lambda tokens: -(-tokens // 96)):
        with pytest.raises(DatabaseError, match="follows no rule"):
            Rule.of(odd, [1, 31, 32, 33, 96, 97, 128, 1000, 5000])
    for wrong in (float("inf"), float("nan"), True, "1", None, 1 << 63):
        with pytest.raises(DatabaseError):
            Rule(wrong)  # type: ignore[arg-type]


def test_the_view_tells_what_is_shipped(path: Path) -> None:
    with Store.open(path) as store:
        store.put_winner(winner())
        store.put_shipped(winner(), SHIPPED, (image(), image("merge", cubin=b"")))
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT tokens, position, symbol, arch, threads, grid FROM shipped").fetchall()
    stored = connection.execute("SELECT ptx FROM kernels").fetchone()[0]
    connection.close()
    assert [row[:5] for row in rows] == [(512, 0, "main", "sm_86", 128), (512, 1, "merge", "sm_86", 128)]
    assert json.loads(rows[0][5]) == [2, {"base": 0, "times": 1, "per": 128}, 1]
    assert zlib.decompress(stored) == b".entry main()"


def test_a_winner_whose_kernels_are_missing_is_damaged(path: Path) -> None:
    with Store.open(path) as store:
        store.put_winner(winner())
        store.put_shipped(winner(), SHIPPED, (image(), image("merge")))
    for damage in ("DELETE FROM kernels WHERE symbol = 'merge'", "UPDATE kernels SET toolchain_id = -1"):
        copy = path.with_name("damaged.db")
        copy.write_bytes(path.read_bytes())
        with closing(sqlite3.connect(copy)) as connection:
            connection.execute("PRAGMA foreign_keys = OFF")
            connection.execute(damage)
            connection.commit()
        with Store.open(copy, "read") as store, pytest.raises(DatabaseError, match=r"kernels of the winner .* missing"):
            store.shipped(winner())

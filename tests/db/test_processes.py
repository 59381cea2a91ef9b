"""Several processes on one file, and processes that are killed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from lowbit.db import Store

PROBLEM = "qk h8/2 d128 q1 w8a8"

WRITER = """
import sys
from lowbit.db import Measurement, Store

PROBLEM = "qk h8/2 d128 q1 w8a8"
path, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
with Store.open(path) as store:
    for n in range(count):
        if n % 10 == 0:
            store.put_features("d", PROBLEM, 1 + n, {f"{name}{i}": {"bytes": i} for i in range(300)}, name)
        row = store.put_measurement(Measurement(
            device="d", problem=PROBLEM, tokens=512, candidate=f"{name}{n}", protocol="warm", status="ok",
            median_us=1.0 + n, toolchain="t",
        ))
        print(row, f"{name}{n}", flush=True)
"""


def start(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def go(writer: subprocess.Popen[str]) -> None:
    assert writer.stdin is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()


def test_killed_writer_loses_nothing_it_had_committed(path: Path) -> None:
    chance = random.Random(20)
    committed: dict[int, str] = {}
    # The first kills fall into the creation of the file, later ones into writes of one row and of many.
    for n, delay_s in enumerate((0.003, 0.02, *(chance.uniform(0.05, 0.4) for _ in range(5)))):
        writer = start(path, f"w{n}-", 1_000_000)
        go(writer)
        time.sleep(delay_s)
        writer.kill()
        printed, _ = writer.communicate()
        # A line cut short by the kill tells of a committed row all the same, but not of which.
        lines = [line.split() for line in printed.splitlines(keepends=True) if line.endswith("\n")]
        committed |= {int(row): name for row, name in lines}
        with Store.open(path) as store:
            kept = {m.candidate for m in store.measurements("d", PROBLEM, 512, "t")}
            assert kept >= set(committed.values())
            for tokens in range(1, 200, 10):
                assert len(store.features("d", PROBLEM, tokens, f"w{n}-")) in (0, 300)
    assert len(committed) > 20


def test_two_writers_finish_on_one_file_that_both_create(path: Path) -> None:
    writers = [start(path, name, 120) for name in ("a", "b")]
    for writer in writers:
        go(writer)
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert (writer.returncode, errors) == (0, "")
    with Store.open(path, "read") as store:
        names = [m.candidate for m in store.measurements("d", PROBLEM, 512, "t")]
        assert sorted(names) == sorted(f"{writer}{n}" for writer in "ab" for n in range(120))
        assert len(store.features("d", PROBLEM, 111, "a")) == len(store.features("d", PROBLEM, 111, "b")) == 300
    assert [p.name for p in path.parent.iterdir()] == [path.name]

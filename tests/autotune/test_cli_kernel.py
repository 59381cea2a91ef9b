"""`autotune kernel` from a file to a tuned database, and from there to a program that uses it."""

from __future__ import annotations

import json
import re
import sqlite3
import warnings
from pathlib import Path
from typing import Any

import lowbit
import numpy as np
import pytest
from click.testing import CliRunner
from lowbit.autotune.cli import autotune
from lowbit.autotune.outcome import Options, Silent
from lowbit.autotune.preflight import preflight
from lowbit.costmodel.assembly import CLASSES
from lowbit.costmodel.bandwidth import Bandwidth, BandwidthPoint
from lowbit.costmodel.calibrate import Calibration
from lowbit.costmodel.device import detect
from lowbit.costmodel.lep import EXTENDED, TWO_TERM, Coefficients
from lowbit.db.store import Store
from lowbit.kernels.errors import KernelError
from lowbit.kernels.user import load_definition
from lowbit.runtime import FallbackWarning

KERNELS = Path(__file__).parents[1] / "kernels" / "own_kernels.py"
SOURCE = """
import lowbit
import numpy as np
from lowbit.kernels.rows import dot_rows, prepare_rows
from numba import njit

def make_operands(tokens, rng):
    return {"q": rng.standard_normal((1, 32), np.float32), "k": rng.standard_normal((tokens, 32), np.float32)}

@lowbit.kernel(
    "%s", operands={"k": lowbit.Packed("int8")}, reference=lambda q, k: k @ q[0], make_operands=make_operands
)
@njit
def nearest(q, k, out, first, last):
    small = prepare_rows(k, q)
    scores = np.empty((1, 64), np.float32)
    for start in range(first, last, 64):
        count = min(64, last - start)
        dot_rows(k, 0, start, count, small, scores)
        for i in range(min(count, out.shape[0] - start)):
            out[start + i] = scores[0, i]
"""
QUICK = ("--tokens", "200", "--precision", "w8a8", "--quick", "--budget", "6", "--top-k", "2", "--protocol", "warm")


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not fail a test: nothing counts as contention here."""
    monkeypatch.setattr("lowbit.search.rounds.tainted", lambda slot, contention: False)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A database that knows this machine's coefficients, so that no test calibrates."""
    path = tmp_path / "t.db"
    device = detect()
    bandwidth = Bandwidth((BandwidthPoint(1, 1 << 12, 100.0, "L1"), BandwidthPoint(1, 1 << 30, 10.0, "DRAM")))
    free = dict.fromkeys([*(f"{name}_ns" for name in CLASSES), "exponential_ns", "task_us", "fork_us", "gamma"], 0.0)
    calibration = Calibration(
        device, 1, bandwidth, Coefficients(TWO_TERM, {"alpha1": 1.0, "alpha2_ns": 0.0}, bandwidth, 1),
        Coefficients(EXTENDED, free, bandwidth, 1), (), 0.0, 1.0, "t",
    )  # fmt: skip
    with Store.open(path) as store:
        store.put_calibration(device.fingerprint, 1, calibration.as_dict(), "t")
    return path


def run(*args: str) -> Any:
    return CliRunner().invoke(autotune, args)


def tuned(target: object, db: Path, *more: str) -> Any:
    return run("kernel", str(target), *QUICK, "--threads", "1", "--db", str(db), *more)


def rows(db: Path, query: str) -> list[Any]:
    with sqlite3.connect(db) as connection:
        return connection.execute(query).fetchall()


def nearest_by_database(target: object, db: Path) -> tuple[Any, float]:
    """What a program would do: the selected kernel, and how far its result is from NumPy's."""
    definition = load_definition(str(target))
    kernel = lowbit.open_db(db).select(definition.problem("w8a8"), 200)
    made = definition.inputs(150, seed=9)
    q, k = made.arrays["q"], kernel.pack("k", made.packed["k"][0])
    out = np.full(150, np.nan, np.float32)
    kernel(q, k, out)
    return kernel, definition.error(out, k.dequantize()[0] @ q[0])


def test_from_a_file_to_a_kernel_that_a_program_selects(db: Path, tmp_path: Path) -> None:
    path = tmp_path / "nearest.py"
    path.write_text(SOURCE % "nearest_tuned")
    result = tuned(path, db, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (decision,) = report["problems"]
    assert decision["problem"] == "user:nearest_tuned h1/1 d32 q1 w8a8"
    assert decision["provenance"] == "verified" and decision["median_us"] > 0 and decision["speedup"] > 0
    assert report["space"]["candidates"] > 50
    shown = run("db", "winners", "--db", str(db))
    assert shown.exit_code == 0 and "user:nearest_tuned h1/1 d32 q1 w8a8" in shown.output
    assert "200 tokens" in shown.output and "verified" in shown.output
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        kernel, error = nearest_by_database(path, db)
    assert kernel.candidate.layout == decision["winner"]["layout"]
    assert error < 0.02
    errors = rows(db, "SELECT max_error FROM timings WHERE status = 'ok'")
    assert errors and all(0 < each < 0.02 for (each,) in errors)
    ((command,),) = rows(db, "SELECT command FROM runs")
    assert command.startswith(f"autotune kernel {path} --precision w8a8 --tokens 200 --strategy verify")


def test_an_edited_kernel_makes_what_is_stored_stale(db: Path, tmp_path: Path) -> None:
    old, new = (tmp_path / f"{name}.py" for name in ("old", "new"))
    old.write_text(SOURCE % "nearest_edited")
    assert tuned(old, db).exit_code == 0
    # One process imports both versions, so that the new one is another file; its name in the database is the same.
    new.write_text((SOURCE % "nearest_edited").replace("scores[0, i]", "np.float32(1.0) * scores[0, i]"))
    with pytest.warns(FallbackWarning, match="with another toolchain .*user:nearest_edited"):
        _, error = nearest_by_database(new, db)
    assert error < 0.02
    counted = rows(db, "SELECT count(*) FROM tiles")
    assert tuned(new, db).exit_code == 0
    toolchains = rows(db, "SELECT DISTINCT toolchain FROM timings WHERE status = 'ok'")
    assert len(toolchains) == 2
    # The tiles are what they were: their counts serve both.
    assert rows(db, "SELECT count(*) FROM tiles WHERE toolchain_id = (SELECT min(toolchain_id) FROM tiles)")
    assert rows(db, "SELECT count(DISTINCT toolchain_id) FROM tiles") == [(1,)]
    assert rows(db, "SELECT count(*) FROM tiles") >= counted
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        nearest_by_database(new, db)


@pytest.mark.parametrize(
    ("name", "exit_status", "status", "words"),
    [
        ("forgets_the_tail", 9, "wrong", "user:forgets_the_tail .* in floats: wrong, error inf exceeds 0.02"),
        ("reads_too_far", 9, "crashed", r"raised ValueError: first \+ count exceeds the tokens"),
        ("mistyped", 4, "compile_failed", "scores must be a 2-dimensional float32 array"),
    ],
)
def test_a_kernel_that_does_not_work_is_refused_and_recorded(
    db: Path, name: str, exit_status: int, status: str, words: str
) -> None:
    result = tuned(f"{KERNELS}:{name}", db)
    assert result.exit_code == exit_status
    (error,) = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert re.search(words, error)
    ((found, message),) = rows(db, "SELECT status, message FROM timings")
    assert found == status and message
    assert rows(db, "SELECT count(*) FROM winners") == [(0,)]


def test_a_tolerance_that_integers_cannot_keep_is_told(db: Path) -> None:
    definition = load_definition(f"{KERNELS}:exact")
    options = Options(db, f"user:{KERNELS}:exact", protocol="warm", threads=1)
    preflight([definition.problem("fp16")], 40, options, Silent())
    problem = definition.problem("w8a8")
    words = r"user:exact .* in integers: wrong, error 0.0\d+ exceeds 0.0001 .*declare pipelines=\('float',\)"
    with pytest.raises(KernelError, match=words):
        preflight([problem], 40, options, Silent())
    assert rows(db, "SELECT problem, status, pipeline FROM timings") == [(problem.key, "wrong", "integer")]


@pytest.mark.parametrize(
    ("args", "exit_status", "words"),
    [
        ((f"{KERNELS}:scored", "--precision", "w2a8"), 2, "unknown precision 'w2a8'"),
        ((f"{KERNELS}:weighted", "--precision", "w4a8"), 2, "weighted: v is declared for int8, fp16, not int4"),
        ((f"{KERNELS}:scored", "--tokens", "0"), 2, "tokens must be"),
        ((str(KERNELS),), 9, "name a kernel of"),
        (("nowhere.py:scored",), 9, "nowhere.py does not exist"),
        ((), 2, "Missing argument"),
        ((f"{KERNELS}:exits_in_make_operands",), 9, "exits_in_make_operands: make_operands raised SystemExit: 3"),
        ((f"{KERNELS}:leaves_in_reference",), 9, "leaves_in_reference: the reference raised GeneratorExit"),
        ((f"{KERNELS}:has_no_truth",), 9, "the reference of has_no_truth returned nan at (0,): it must be finite"),
    ],
)
def test_what_is_asked_wrongly_is_refused_in_one_line(args: tuple[str, ...], exit_status: int, words: str) -> None:
    result = run("kernel", *args, "--db", "unused.db")
    assert result.exit_code == exit_status and words in result.output
    assert result.output.count("\n") == 1
    assert not Path("unused.db").exists()


def test_the_main_job_leaves_kernels_of_ones_own_to_their_command() -> None:
    result = run("--operator", "user:scored", "--db", "unused.db")
    assert result.exit_code == 2 and "autotune kernel" in result.output

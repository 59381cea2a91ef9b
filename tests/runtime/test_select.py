from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lowbit.db import Store, Winner
from lowbit.kernels.backend import Array, Backend, Code, Kernel, Rejected
from lowbit.kernels.candidate import Candidate, Launch, Schedule
from lowbit.kernels.errors import CompileError, DatabaseError, DeviceError, NoWinnerError, ProblemError
from lowbit.kernels.layout import Layout
from lowbit.kernels.problem import Problem
from lowbit.runtime import Choice, Database, FallbackWarning, open_db
from lowbit.runtime.choice import distance, related

PROBLEM = Problem("attend", 32, 8, 128, "w8a8")
MACHINE = SimpleNamespace(fingerprint="here", isa="avx2", cores=2)


def candidate(registers: int = 1, rows: int = 4, threads: int = 2) -> Candidate:
    layout = Layout.parse("T D | int8/bytes/signed")
    return Candidate(layout, layout, "integer", Schedule(rows, registers, 64, 1, 0, threads))


BASELINE = replace(candidate(rows=1), pipeline="float")


@dataclass
class FakeKernel(Kernel):
    problem: Problem
    candidate: Candidate

    def pack(self, role: str, values: Array, capacity: int | None = None) -> Any:
        return values

    def __call__(self, *operands: Any, tokens: int | None = None, out: Array | None = None) -> Array:
        raise NotImplementedError


class FakeBackend(Backend):
    """Compiles whatever passes no more rows at once than the problem has."""

    name = "fake"

    def __init__(self) -> None:
        self.compiled: list[Candidate] = []

    def target(self) -> str:
        return "avx2"

    def toolchain(self) -> str:
        return "t2"

    def space(self, problem: Problem, threads: int) -> Iterator[Candidate | Rejected]:
        yield self.baseline(problem, threads)

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        assert threads == MACHINE.cores
        return BASELINE

    def compile(self, problem: Problem, candidate: Candidate) -> Kernel:
        if candidate.schedule.rows > problem.rows:
            raise CompileError(f"{candidate.schedule.rows} rows are more than the problem's {problem.rows}")
        self.compiled.append(candidate)
        return FakeKernel(problem, candidate)

    def tiles(self, problem: Problem, candidate: Candidate) -> tuple[str, ...]:
        raise AssertionError("a decoder counts nothing")

    def code(self, problem: Problem, candidate: Candidate) -> list[Code]:
        return []


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    backend = FakeBackend()
    monkeypatch.setattr("lowbit.runtime.select.backend_named", lambda name: backend)
    monkeypatch.setattr("lowbit.costmodel.device.detect", lambda: MACHINE)
    return backend


def winner(tokens: int, range_: tuple[int, int | None], chosen: Candidate | str, **changes: Any) -> Winner:
    fields: dict[str, Any] = {
        "device": "here",
        "problem": PROBLEM.key,
        "provenance": "measured",
        "median_us": 10.0,
        "protocol": "warm",
        "toolchain": "t2",
    }
    name = chosen if isinstance(chosen, str) else chosen.name
    return Winner(tokens=tokens, tokens_from=range_[0], tokens_to=range_[1], candidate=name, **{**fields, **changes})


def database(path: Path, *winners: Winner) -> Database:
    with Store.open(path / "t.db") as store:
        store.put_device("here", {"description": "This chip", "isa": "avx2"})
        store.put_device("sibling", {"description": "Sibling chip", "isa": "avx2"})
        store.put_device("stranger", {"description": "Stranger chip", "isa": "avx512_vnni"})
        for each in winners:
            store.put_winner(each)
    return open_db(path / "t.db")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("tokens", "registers", "how"),
    [
        (100, 1, "exact"),
        (511, 1, "exact"),
        (512, 2, "exact"),
        (2000, 2, "exact"),
        (2001, 2, "nearest"),
        (4095, 2, "nearest"),  # √(1024 · 16384) = 4096 is as far, in octaves, from one as from the other
        (4097, 3, "nearest"),
        (9999, 3, "nearest"),
        (10_000, 3, "exact"),
        (1 << 24, 3, "exact"),
    ],
)
def test_range_then_nearest_length(tmp_path: Path, tokens: int, registers: int, how: str) -> None:
    db = database(
        tmp_path,
        winner(256, (1, 511), candidate(1)),
        winner(1024, (512, 2000), candidate(2)),
        winner(16384, (10_000, None), candidate(3)),
    )
    choice = db.choose(PROBLEM.key, tokens)
    assert (choice.candidate, choice.how) == (candidate(registers), how)
    assert choice.winner == db.winner(PROBLEM, tokens)


def test_exact_is_silent_and_compiled_once(tmp_path: Path, backend: FakeBackend) -> None:
    db = database(tmp_path, winner(512, (1, None), candidate(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = db.select(PROBLEM, 100)
        assert db.select(PROBLEM.key, 5000) is kernel
    assert (kernel.problem, kernel.candidate) == (PROBLEM, candidate(2))
    assert backend.compiled == [candidate(2)]


@pytest.mark.usefixtures("backend")
def test_overlapping_ranges_prefer_what_was_measured_and_then_the_nearest(tmp_path: Path) -> None:
    db = database(
        tmp_path,
        winner(512, (1, None), candidate(1)),
        winner(2048, (1, None), candidate(2)),
        winner(1000, (1, None), candidate(3), provenance="predicted", median_us=None, predicted_us=1.0),
    )
    assert [db.choose(PROBLEM, tokens).candidate for tokens in (900, 1000, 1100)] == [
        candidate(1),
        candidate(1),
        candidate(2),
    ]


@pytest.mark.usefixtures("backend")
def test_one_warning_a_problem(tmp_path: Path) -> None:
    db = database(tmp_path, winner(512, (256, 1024), candidate(2)))
    with pytest.warns(FallbackWarning, match=r"at 4096 tokens: no winner for this length; .* tuned at 512 tokens$"):
        db.select(PROBLEM, 4096)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        db.select(PROBLEM, 8192)
    with pytest.warns(FallbackWarning, match="no winner for this problem"):
        db.select(replace(PROBLEM, heads=64), 512)


@pytest.mark.usefixtures("backend")
def test_family_takes_the_most_alike_that_compiles(tmp_path: Path) -> None:
    db = database(
        tmp_path,
        winner(512, (1, None), candidate(1, rows=8), problem="attend h64/8 d128 q1 w8a8"),
        winner(512, (1, None), candidate(2), problem="attend h8/2 d128 q1 w8a8"),
        winner(512, (1, None), candidate(3), problem="attend h32/8 d64 q1 w8a8"),
        winner(512, (1, None), candidate(4), problem="attend h32/8 d128 q1 w4a8"),
        winner(512, (1, None), candidate(5), problem="qk h32/8 d128 q1 w8a8"),
    )
    first = db.choose(PROBLEM, 512)
    assert (first.how, first.candidate) == ("family", candidate(1, rows=8))
    with pytest.warns(FallbackWarning, match=r"for attend h8/2 d128 q1 w8a8; skipped .* \(8 rows are more than .* 4\)"):
        kernel = db.select(PROBLEM, 512)
    assert (kernel.problem, kernel.candidate) == (PROBLEM, candidate(2))
    assert db.choose(PROBLEM, 512).candidate == candidate(2)


@pytest.mark.usefixtures("backend")
def test_other_device_of_the_same_instruction_set(tmp_path: Path) -> None:
    db = database(
        tmp_path,
        winner(512, (1, None), candidate(9), device="stranger"),
        winner(512, (1, None), candidate(3, threads=16), device="sibling"),
    )
    with pytest.warns(FallbackWarning, match="on Sibling chip"):
        kernel = db.select(PROBLEM, 512)
    assert kernel.candidate == candidate(3, threads=MACHINE.cores)
    assert db.choose(PROBLEM, 512).how == "other_device"
    assert db.choose(PROBLEM, 512, device="stranger").candidate == candidate(9, threads=2)


@pytest.mark.usefixtures("backend")
def test_own_family_comes_before_other_devices(tmp_path: Path) -> None:
    db = database(
        tmp_path,
        winner(512, (1, None), candidate(1), device="sibling"),
        winner(512, (1, None), candidate(2), problem="attend h8/2 d128 q1 w8a8"),
    )
    assert db.choose(PROBLEM, 512).candidate == candidate(2)


@pytest.mark.usefixtures("backend")
def test_default_says_so(tmp_path: Path) -> None:
    db = database(tmp_path, winner(512, (1, None), candidate(1), device="stranger"))
    assert db.choose(PROBLEM, 512) == Choice(None, BASELINE, "default")
    with pytest.warns(FallbackWarning, match="has nothing that fits; using the untuned baseline"):
        assert db.select(PROBLEM, 512).candidate == BASELINE
    with pytest.raises(NoWinnerError, match="holds no winner for attend h32/8 d128 q1 w8a8"):
        db.winner(PROBLEM, 512)


@pytest.mark.usefixtures("backend")
def test_stale_winner_is_used_with_a_warning_and_gives_way_to_a_current_one(tmp_path: Path) -> None:
    stale = winner(512, (1, 1024), candidate(1), toolchain="t1")
    db = database(tmp_path, stale)
    assert db.choose(PROBLEM, 512) == Choice(db.winners[0], candidate(1), "exact", stale=True)
    with pytest.warns(FallbackWarning, match=r"with another toolchain \(t1, here t2\)"):
        db.select(PROBLEM, 512)
    current = winner(700, (100, 900), candidate(2))
    db = database(tmp_path, current)
    assert db.choose(PROBLEM, 512).candidate == candidate(2)
    # The range decides before the toolchain does.
    assert db.choose(PROBLEM, 1000).candidate == candidate(1)


@pytest.mark.usefixtures("backend")
def test_winner_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    unknown = candidate(1).name.replace("int8/bytes/signed", "int8/of_a_plugin/signed")
    db = database(tmp_path, winner(512, (1, 600), unknown), winner(1024, (601, None), candidate(2)))
    with pytest.warns(FallbackWarning, match="no winner for this length"):
        assert db.select(PROBLEM, 512).candidate == candidate(2)


@pytest.mark.usefixtures("backend")
def test_exact_winner_that_does_not_compile_is_named(tmp_path: Path) -> None:
    db = database(tmp_path, winner(512, (1, 600), candidate(1, rows=64)))
    with pytest.warns(FallbackWarning, match="untuned baseline.*64 rows are more than"):
        assert db.select(PROBLEM, 512).candidate == BASELINE


@pytest.mark.usefixtures("backend")
def test_bad_questions(tmp_path: Path) -> None:
    db = database(tmp_path, winner(512, (1, None), candidate(1)))
    with pytest.raises(ProblemError):
        db.select("attend", 512)
    with pytest.raises(ProblemError):
        db.select(PROBLEM, 0)
    with pytest.raises(DatabaseError, match="does not exist"):
        open_db(tmp_path / "none.db")


def test_file_may_vanish_once_loaded(tmp_path: Path, backend: FakeBackend) -> None:
    db = database(tmp_path, winner(512, (1, None), candidate(1)))
    (tmp_path / "t.db").unlink()
    assert db.select(PROBLEM, 512).candidate == candidate(1)
    assert list(tmp_path.iterdir()) == []


def test_distance_counts_octaves_of_shape_and_one_for_each_other_option():
    assert distance(PROBLEM, PROBLEM) == 0
    assert distance(PROBLEM, replace(PROBLEM, query_rows=4)) == 2
    assert distance(PROBLEM, replace(PROBLEM, window=4096, softcap=50.0)) == 2
    assert distance(replace(PROBLEM, window=512), replace(PROBLEM, window=4096)) == 1
    matrix = Problem("gemv", 1, 1, 2048, "w4a8")
    assert distance(matrix, replace(matrix, head_dim=8192, query_rows=2)) == 3


def test_matrices_are_related_whatever_their_columns_and_attention_is_not():
    matrix = Problem("gemv", 1, 1, 2048, "w4a8")
    assert related(matrix, replace(matrix, head_dim=576, query_rows=16))
    assert not related(matrix, replace(matrix, precision="w8a8"))
    assert not related(PROBLEM, replace(PROBLEM, head_dim=64))
    assert not related(PROBLEM, replace(PROBLEM, precision="w8a8+w4a8"))
    assert related(PROBLEM, replace(PROBLEM, window=64))


GPU = "sm_86-82sm-1695MHz-936GBps-L2:6M"


def launch(rows: int) -> Candidate:
    layout = Layout.parse("T D | int8/bytes/signed")
    return Candidate(layout, layout, "integer", Launch(rows, 1, 4, 0, 16, 4))


class FakeGpuBackend(FakeBackend):
    """A GPU's backend, whose compiler may be missing."""

    compiler = True

    def toolchain(self) -> str:
        if not self.compiler:
            raise CompileError("no ptxas")
        return "g1"

    def baseline(self, problem: Problem, threads: int) -> Candidate:
        return replace(launch(1), pipeline="float")

    def compile(self, problem: Problem, candidate: Candidate) -> Kernel:
        self.compiled.append(candidate)
        return FakeKernel(problem, candidate)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeBackend]:
    known = {"cpu": FakeBackend(), "sm_86": FakeGpuBackend()}
    monkeypatch.setattr("lowbit.runtime.select.backend_named", known.__getitem__)
    monkeypatch.setattr("lowbit.costmodel.device.detect", lambda: MACHINE)
    return known


def both(path: Path) -> Database:
    with Store.open(path / "t.db") as store:
        store.put_device(GPU, {"description": "RTX 3090", "isa": "sm_86"})
    return database(
        path,
        winner(512, (1, None), candidate(2)),
        winner(512, (1, None), launch(4), device=GPU, toolchain="g1", provenance="predicted", median_us=None),
    )


def test_a_gpus_winner_is_chosen_only_when_it_is_asked_for(tmp_path: Path, backends: dict[str, FakeBackend]) -> None:
    db = both(tmp_path)
    assert db.select(PROBLEM, 512).candidate == candidate(2)
    assert (db.choose(PROBLEM, 512, GPU).candidate, db.choose(PROBLEM, 512, GPU).stale) == (launch(4), False)
    only_gpu = Database(db.path, [w for w in db.winners if w.device == GPU], db._devices)
    assert only_gpu.choose(PROBLEM, 512).how == "default"
    assert only_gpu.choose(PROBLEM, 512).candidate == BASELINE


def test_another_board_of_the_architecture_is_another_device(tmp_path: Path, backends: dict[str, FakeBackend]) -> None:
    choice = both(tmp_path).choose(PROBLEM, 512, "sm_86-28sm-1777MHz-360GBps-L2:3M")
    assert (choice.how, choice.candidate) == ("other_device", launch(4))


def test_a_gpus_kernel_is_compiled_only_where_the_gpu_is(
    tmp_path: Path, backends: dict[str, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    db = both(tmp_path)
    monkeypatch.setattr("lowbit.kernels.cuda.gpus.gpus_here", lambda: [SimpleNamespace(arch="sm_75")])
    with pytest.raises(DeviceError, match="no sm_86 GPU is in this machine"):
        db.select(PROBLEM, 512, GPU)
    assert backends["sm_86"].compiled == []
    monkeypatch.setattr("lowbit.kernels.cuda.gpus.gpus_here", lambda: [SimpleNamespace(arch="sm_86")])
    assert db.select(PROBLEM, 512, GPU).candidate == launch(4)
    assert backends["cpu"].compiled == []


def test_without_a_gpus_compiler_nothing_is_called_stale(
    tmp_path: Path, backends: dict[str, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeGpuBackend, "compiler", False)
    assert not both(tmp_path).choose(PROBLEM, 512, GPU).stale


def test_a_database_for_gpus_needs_one_or_a_device(
    tmp_path: Path, backends: dict[str, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    both(tmp_path)
    monkeypatch.setattr("lowbit.costmodel.gpu_here.gpus_here", list)
    db = open_db(tmp_path / "t.db", "sm_86")
    with pytest.raises(DeviceError, match="name the device"):
        db.choose(PROBLEM, 512)
    assert db.choose(PROBLEM, 512, GPU).candidate == launch(4)
    described = SimpleNamespace(
        name="NVIDIA GeForce RTX 3090", arch="sm_86", sms=82, memory_bytes=24 << 30, clock_mhz=1695,
        bandwidth_gbps=936, l2_bytes=6 << 20,
    )  # fmt: skip
    monkeypatch.setattr("lowbit.costmodel.gpu_here.gpus_here", lambda: [described])
    assert open_db(tmp_path / "t.db", "sm_86").choose(PROBLEM, 512).candidate == launch(4)


def warned(db: Database, problem: Problem = PROBLEM, **more: Any) -> str:
    with pytest.warns(FallbackWarning) as caught:
        db.select(problem, 512, **more)
    (only,) = caught
    return str(only.message)


BOARDS = {
    GPU: {"description": "RTX 3090 (sm_86), 82 multiprocessors at 1695 MHz", "isa": "sm_86"},
    "sm_80-108sm": {"description": "A100-SXM4-80GB (sm_80), 108 multiprocessors at 1410 MHz", "isa": "sm_80"},
}


def test_winners_for_other_kinds_of_device_are_named(tmp_path: Path, backends: dict[str, FakeBackend]) -> None:
    other = replace(PROBLEM, head_dim=64)
    with Store.open(tmp_path / "t.db") as store:
        for fingerprint, description in BOARDS.items():
            store.put_device(fingerprint, description)
    fixed: dict[str, Any] = {"toolchain": "g1", "provenance": "predicted", "median_us": None}
    db = database(
        tmp_path,
        *(winner(n, (1, None), launch(4), device=GPU, **fixed) for n in (512, 4096)),
        winner(512, (1, None), launch(4), device="sm_80-108sm", **fixed),
        winner(512, (1, None), candidate(1), device="stranger"),
        winner(512, (1, None), launch(4), device="sm_75-40sm", problem=other.key, **fixed),
        winner(512, (1, None), candidate(9), device="stranger", problem="qk h4/4 d64 q1 w8a8"),
    )
    runs = "which lowbit.runtime.cuda_kernel.load_kernel runs"
    start = f"{PROBLEM.key} at 512 tokens: {db.path} has nothing that fits; using the untuned baseline, {BASELINE}; "
    message = warned(db)
    assert message.startswith(start)
    named, *rest = message.removeprefix(start).split("; ")
    assert named == f"it has winners for RTX 3090 (sm_86), A100-SXM4-80GB (sm_80), {runs}"
    assert rest == ["it has winners for Stranger chip (avx512_vnni)"]
    # Of a device that nobody described its fingerprint tells the architecture.
    assert warned(db, other).endswith(f"; it has winners for sm_75-40sm, {runs}")
    # A problem that nobody tuned for anything.
    assert "it has" not in warned(db, replace(PROBLEM, head_dim=32))


def test_a_gpu_without_winners_is_told_of_those_for_cpus(
    tmp_path: Path, backends: dict[str, FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.kernels.cuda.gpus.gpus_here", lambda: [SimpleNamespace(arch="sm_86")])
    db = database(tmp_path, winner(512, (1, None), candidate(2)))
    assert warned(db, device=GPU).endswith("; it has winners for This chip (avx2)")

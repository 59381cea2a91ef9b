"""Shipped kernels through the installed cuda.core."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lowbit.autotune.shipping import ship
from lowbit.costmodel.gpu_here import profile_here
from lowbit.db import KernelImage, KernelLaunch, Rule, ShippedWinner, Store, Winner
from lowbit.kernels.backend import backend_named
from lowbit.kernels.cuda.gpus import gpus_here
from lowbit.kernels.cuda.program import build
from lowbit.kernels.errors import CompileError, DeviceError, GpuFaultError, NoWinnerError, TrustError
from lowbit.kernels.problem import Problem
from lowbit.kernels.reference import make_operands
from lowbit.runtime import cuda_loaders
from lowbit.runtime.cuda_kernel import TRUST_THIS_FILE, load_kernel
from lowbit.runtime.select import FallbackWarning

PROBLEM = "qk h8/2 d64 q1 w8a8"
CANDIDATE = "K: T D | int8/bytes/signed; integer; rows 4, lanes 1, loads 4, stages 0, splits 2, warps 4"
NAMES = (
    ("x", "pointer"),
    ("out", "pointer"),
    ("partials", "pointer"),
    ("k_words", "pointer"),
    ("k_scales", "pointer"),
    ("k_stride", "int64"),
    ("k_scale_stride", "int64"),
    ("tokens", "int32"),
    ("factor", "float32"),
)


def ptx(arch: int, symbol: str = "scores", last: str = ".f32") -> str:
    types = [".u64"] * 7 + [".u32", last]
    parameters = ", ".join(f".param {type_} p{n}" for n, type_ in enumerate(types))
    return f".version 7.0\n.target sm_{arch}\n.visible .entry {symbol}({parameters}) {{ ret; }}\n"


def image(arch: int = 86, symbol: str = "scores", **changes: object) -> KernelImage:
    text = ptx(arch, symbol)
    values: dict[str, object] = {
        "toolchain": "t",
        "symbol": symbol,
        "arch": f"sm_{arch}",
        "ptx": text,
        "cubin": b"\x7fELF // cubin\n" + text.encode(),
        "arguments": NAMES,
    }
    return KernelImage(**{**values, **changes})


def fill(path: Path, *kept: tuple[str, int, KernelImage], symbol: str = "scores") -> str:
    """Store winners as (device, tokens, image); returns the file's digest."""
    constants = {"tokens": Rule(0, 1), "factor": Rule(0.5)}
    launch = KernelLaunch(symbol, (Rule(2), Rule(0, 1, 32), Rule(1)), 128, Rule(64 << 10), constants)
    with Store.open(path) as store:
        for device, tokens, code in kept:
            winner = Winner(
                device=device,
                problem=PROBLEM,
                tokens=tokens,
                tokens_from=tokens,
                tokens_to=4 * tokens - 1,
                candidate=CANDIDATE,
                provenance="predicted",
                toolchain=code.toolchain,
            )
            store.put_winner(winner)
            store.put_shipped(winner, ShippedWinner((launch,), Rule(0, 8, 32)), [code])
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "g.db"


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    monkeypatch.setattr(cuda_loaders, "_opened", type(cuda_loaders._opened)())
    warnings.simplefilter("error", FallbackWarning)


def here() -> str:
    return profile_here(gpus_here()[0]).fingerprint


@pytest.mark.parametrize("tokens", [64, 100])
def test_a_winner_runs_with_the_stored_code_geometry_and_arguments(fake, path, tokens):
    digest = fill(path, (here(), 64, image()))
    kernel = load_kernel(path, PROBLEM, tokens, digest=digest)
    assert kernel.native and kernel.winner.tokens == 64
    operands = make_operands(Problem.parse(PROBLEM), tokens)
    call = kernel.bind(operands.x, kernel.pack("k", operands.k))
    out = call()
    assert out.shape == (8, 1, tokens)
    (launched,) = fake.launches
    blocks = -(-tokens // 32)
    assert (launched.symbol, launched.grid, launched.block) == ("scores", (2, blocks, 1), (128, 1, 1))
    assert launched.shared_bytes == 64 << 10
    *pointers, stride, scale_stride, count, factor = struct.unpack("<qqqqqqqif", launched.arguments)
    assert len(set(pointers)) == 5 and all(pointer % 256 == 0 for pointer in pointers)
    capacity = -(-tokens // 32) * 32
    assert (stride, scale_stride, count, factor) == (capacity * 64, capacity * 2 * 2, tokens, 0.5)
    words = np.empty(2 * stride, np.uint8)
    kernel._loader.read(call._held[2], words)
    assert (words.reshape(2, capacity, 64)[:, :tokens].view(np.int8) == operands.k.codes).all()


def test_operands_on_the_gpu_are_used_where_they_lie(fake, path):
    interface = {"data": (0x7000, False), "shape": (1,), "typestr": "<f4", "version": 3}
    array = SimpleNamespace(__cuda_array_interface__=interface)
    digest = fill(path, (here(), 64, image()))
    kernel = load_kernel(path, PROBLEM, 64, digest=digest)
    assert kernel.argument_names() == ("x", "out", "k_words", "k_scales", "k_stride", "k_scale_stride")
    values = {"x": array, "out": 2, "k_words": 3, "k_scales": 4, "k_stride": 5, "k_scale_stride": 6}
    call = kernel.bind_pointers(values, tokens=64)
    call.enqueue()
    call.enqueue()
    call.synchronize()
    assert len(fake.launches) == 2
    assert struct.unpack("<qqqqqqqif", fake.launches[1].arguments)[0] == 0x7000
    with pytest.raises(CompileError, match="k_stride"):
        kernel.bind_pointers({name: value for name, value in values.items() if name != "k_stride"}, tokens=64)


def test_nothing_is_loaded_that_nobody_vouches_for(fake, path):
    digest = fill(path, (here(), 64, image()))
    with pytest.raises(TrustError, match="nobody vouches"):
        load_kernel(path, PROBLEM, 64)
    with pytest.raises(TrustError, match="nobody vouches"):
        load_kernel(path, PROBLEM, 64, trust=True)
    with pytest.raises(TrustError, match="not the file that was vouched for"):
        load_kernel(path, PROBLEM, 64, digest="0" * 64, trust=TRUST_THIS_FILE)
    with pytest.raises(TrustError, match="not a SHA-256"):
        load_kernel(path, PROBLEM, 64, digest=digest[:-1])
    with Store.open(path) as store:
        store.put_run("something else")
    with pytest.raises(TrustError, match="not the file"):
        load_kernel(path, PROBLEM, 64, digest=digest)
    assert load_kernel(path, PROBLEM, 64, trust=TRUST_THIS_FILE).native


def test_a_digest_does_not_cover_a_log_beside_the_file(fake, path):
    digest = fill(path, (here(), 64, image()))
    path.with_name("g.db-wal").write_bytes(b"pages")
    with pytest.raises(TrustError, match="log beside it"):
        load_kernel(path, PROBLEM, 64, digest=digest)


@pytest.mark.parametrize(
    ("code", "gpu", "native"),
    [(86, (8, 6), True), (80, (8, 6), True), (86, (8, 9), True), (86, (9, 0), False), (75, (8, 6), False)],
)
def test_a_cubin_runs_on_its_own_major_architecture_and_ptx_on_later_ones(fake, path, code, gpu, native):
    fake.arch(*gpu)
    text = ptx(code)
    digest = fill(path, ("elsewhere", 64, image(code, cubin=b"\x7fELF" + text.encode())))
    warnings.simplefilter("ignore", FallbackWarning)
    kernel = load_kernel(path, PROBLEM, 64, digest=digest)
    assert kernel.native == native
    call = kernel.bind_pointers(dict.fromkeys(kernel.argument_names(), 0), tokens=64)
    call.enqueue()
    assert [each.symbol for each in fake.launches] == ["scores"]


def test_an_earlier_gpu_is_refused_in_one_line_that_names_both(fake, path):
    fake.arch(8, 0)
    digest = fill(path, ("elsewhere", 64, image(86)))
    with pytest.raises(NoWinnerError, match=r"on sm_86, which does not run on sm_80$"):
        load_kernel(path, PROBLEM, 64, digest=digest)


def test_code_without_a_cubin_is_translated_by_the_driver(fake, path):
    digest = fill(path, (here(), 64, image(cubin=b"")))
    kernel = load_kernel(path, PROBLEM, 64, digest=digest)
    assert not kernel.native


def test_the_gpus_own_winner_comes_first_and_others_with_a_warning(fake, path):
    mine, other = image(86), image(80)
    fill(path, ("elsewhere", 64, other), (here(), 64, mine))
    trusted = {"trust": TRUST_THIS_FILE}
    assert load_kernel(path, PROBLEM, 100, **trusted).winner.device == here()
    assert load_kernel(path, PROBLEM, 100, device="elsewhere", **trusted).winner.device == "elsewhere"
    with pytest.warns(FallbackWarning, match="no winner for this length; using that of 64 tokens"):
        load_kernel(path, PROBLEM, 5000, **trusted)
    with pytest.raises(NoWinnerError, match="no winner with machine code"):
        load_kernel(path, "qk h8/2 d64 q2 w8a8", 64, **trusted)


def test_only_a_foreign_board_answers_with_a_warning(fake, path):
    fill(path, ("elsewhere", 64, image(86)))
    with pytest.warns(FallbackWarning, match=r"no winner of this GPU \(sm_86\); using that of elsewhere"):
        load_kernel(path, PROBLEM, 64, trust=TRUST_THIS_FILE)


def test_parameters_of_other_sizes_than_the_database_says_are_refused(fake, path):
    text = ptx(86, last=".f64")
    digest = fill(path, (here(), 64, image(ptx=text, cubin=b"\x7fELF" + text.encode())))
    with pytest.raises(CompileError, match=r"takes parameters of \(.*, 4, 8\) bytes, its database says \(.*, 4, 4\)"):
        load_kernel(path, PROBLEM, 64, digest=digest)


def test_a_kernel_that_faults_says_that_the_process_must_end(fake, path):
    digest = fill(path, (here(), 64, image(symbol="fault")), symbol="fault")
    kernel = load_kernel(path, PROBLEM, 64, digest=digest)
    call = kernel.bind_pointers(dict.fromkeys(kernel.argument_names(), 0), tokens=64)
    call.enqueue()
    with pytest.raises(GpuFaultError):
        call.synchronize()


def test_kernels_of_one_thread_share_a_stream(fake, path):
    fill(path, (here(), 64, image()))
    first, second = (load_kernel(path, PROBLEM, 64, trust=TRUST_THIS_FILE) for _ in range(2))
    assert first._loader is second._loader
    with pytest.raises(DeviceError, match="unknown loader"):
        load_kernel(path, PROBLEM, 64, trust=TRUST_THIS_FILE, loader="cupy")


def test_a_winner_that_was_tuned_here_runs_where_there_is_no_compiler(fake, path):
    """Shipped as the command ships it; then loaded by a process in which nothing of Numba can be imported."""
    backend, problem = backend_named("sm_86"), Problem.parse("attend h4/2 d64 q1 w4a8")
    made = backend.baseline(problem, 1)
    winner = Winner(
        device=here(),
        problem=problem.key,
        tokens=256,
        tokens_from=1,
        tokens_to=None,
        candidate=made.name,
        provenance="predicted",
        toolchain=backend.toolchain(),
    )
    with Store.open(path) as store:
        store.put_winner(winner)
        ship(store, backend, [winner])
    program = f"""
import sys
for name in ("numba", "llvmlite", "numba_cuda"):
    sys.modules[name] = None
import numpy as np
from lowbit.runtime.cuda_kernel import load_kernel
kernel = load_kernel({str(path)!r}, {problem.key!r}, 256, digest={hashlib.sha256(path.read_bytes()).hexdigest()!r})
values = np.random.default_rng(0).standard_normal((2, 256, 64), np.float32)
call = kernel.bind(values[:, :2].reshape(4, 1, 64), kernel.pack("k", values), kernel.pack("v", values))
print(kernel.native, call().shape, *(image.symbol for image in kernel.images))
"""
    for arch, native in (((8, 6), "True"), ((9, 0), "False")):
        environment = {**os.environ, "FAKE_ARCH": f"{arch[0]}{arch[1]}", "PYTHONWARNINGS": "ignore"}
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        assert ended.returncode == 0, ended.stderr
        symbols = [entry.symbol for entry in _entries(build(problem, made, "sm_86"))]
        assert ended.stdout.split() == [native, "(4,", "1,", "64)", *symbols]


def _entries(program):
    return [entry for entry in (program.main, program.merge) if entry is not None]

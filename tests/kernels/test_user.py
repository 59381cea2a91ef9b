"""Kernels of somebody's own: what may be declared, how one is compiled and called, and what makes it another one."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import lowbit
import numpy as np
import own_kernels
import pytest
from lowbit.kernels.backend import Rejected
from lowbit.kernels.candidate import Candidate
from lowbit.kernels.cpu.backend import CpuBackend
from lowbit.kernels.cpu.user import UserBackend, backend_of
from lowbit.kernels.errors import CompileError, KernelError, LayoutError, ProblemError
from lowbit.kernels.layout import Layout
from lowbit.kernels.packed import pack
from lowbit.kernels.problem import Problem
from lowbit.kernels.quantize import quantize
from lowbit.kernels.user import Trial, load_definition
from numba import njit

ROOT = Path(__file__).resolve().parents[2]
ORDERS = ("T/16 D/4 t16 d4", "T D")


def candidates(definition, precision, threads=2):
    backend, problem = UserBackend(definition), definition.problem(precision)
    entries = list(backend.space(problem, threads))
    return backend, problem, [each for each in entries if not isinstance(each, Rejected)], entries


def trial(definition, problem, tokens, seed=0):
    """Inputs at a context length, and their packed operands quantised."""
    inputs = definition.inputs(tokens, seed)
    stored = {role: quantize(values, problem.stored(role)) for role, values in inputs.packed.items()}
    values = {role: each.dequantize() for role, each in stored.items()}
    return Trial(inputs, definition.expected(inputs.arrays, values)), stored


def some(found, count=6):
    """Candidates of both pipelines, from everywhere in the space."""
    picked = []
    for pipeline in ("integer", "float"):
        own = [each for each in found if each.pipeline == pipeline]
        picked += own[:: max(len(own) // count, 1)]
    return picked


# -- right ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("scored", "w8a8"), ("scored", "fp16"), ("one_by_one", "w4a8"), ("weighted", "w8a8"), ("weighted", "fp16"),
        ("of_both_roles", "w8a8"), ("of_both_roles", "w8a8+w4a8"),
    ],
)  # fmt: skip
def test_candidates_compute_what_the_reference_says(name, precision):
    definition = getattr(own_kernels, name)
    backend, problem, found, _ = candidates(definition, precision)
    for candidate in some(found, 2 if name == "one_by_one" else 5):
        kernel = backend.compile(problem, candidate)
        for tokens in (1, 33, 97):
            inputs, stored = trial(definition, problem, tokens)
            packed = [kernel.pack(role, stored[role]) for role in problem.roles]
            error = definition.error(kernel(inputs, *packed), inputs.expected)
            assert error < definition.tolerance, (candidate.name, tokens)
            if candidate.pipeline == "float":
                assert error < 1e-4, (candidate.name, tokens)


def test_a_call_is_the_functions_own_without_what_is_filled_in():
    definition = own_kernels.scored
    backend, problem, found, _ = candidates(definition, "w8a8")
    kernel = backend.compile(problem, found[0])
    inputs, stored = trial(definition, problem, 70)
    q, scale, k = inputs.inputs.arrays["q"], inputs.inputs.arrays["scale"], kernel.pack("k", stored["k"])
    out = np.full((2, 3, 70), np.nan, np.float32)
    assert kernel(q, k, scale, out) is out
    by_name = np.full_like(out, np.nan)
    kernel(out=by_name, k=k, scale=scale, q=q)
    np.testing.assert_array_equal(out, by_name)
    # A bound call reads its operands anew.
    call = kernel.bind(q, k, scale, out=out)
    q *= 2
    np.testing.assert_allclose(call(), 2 * by_name, rtol=1e-6)


def test_fewer_tokens_than_are_stored():
    definition = own_kernels.scored
    backend, problem, found, _ = candidates(definition, "w8a8")
    kernel = backend.compile(problem, found[0])
    inputs, stored = trial(definition, problem, 70)
    arrays = inputs.inputs.arrays
    out = np.full((2, 3, 40), np.nan, np.float32)
    kernel(arrays["q"], kernel.pack("k", stored["k"], capacity=200), arrays["scale"], out, tokens=40)
    assert definition.error(out, inputs.expected[:, :, :40]) < definition.tolerance


def test_untuned_the_function_takes_any_layout():
    rng = np.random.default_rng(5)
    for order, (format_, precision) in zip(ORDERS, (("int8/bytes/offset", "w8a8"), ("fp16", "fp16")), strict=True):
        made = own_kernels.make_scored(50, rng)
        problem = own_kernels.scored.problem(precision)
        k = pack(quantize(made["k"], problem.stored("k")), Layout.parse(f"{order} | {format_}"))
        out = np.full((2, 3, 50), np.nan, np.float32)
        own_kernels.scored(made["q"], k, made["scale"], out, 0, k.capacity, 32)
        expected = own_kernels.scores_of(made["q"], k.dequantize(), made["scale"])
        assert own_kernels.scored.error(out, expected) < 0.01


@pytest.mark.parametrize("name", ["cosine_scan", "biased_scores"])
def test_examples_agree_with_numpy(name):
    """Queries are rounded to 8 bits; a cosine of random directions in 384 dimensions moves by about 10⁻⁴."""
    assert runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]() < 2e-3


# -- the space --------------------------------------------------------------------------------------------------------


def test_the_space_offers_what_a_kernel_can_use():
    _, _, ranged, entries = candidates(own_kernels.scored, "w8a8")
    assert {1, 2} <= {each.schedule.threads for each in ranged}
    assert len({each.schedule.block for each in ranged}) > 1
    assert {each.schedule.rows for each in ranged} <= {1, 3}
    names = [(each.candidate if isinstance(each, Rejected) else each).name for each in entries]
    assert len(set(names)) == len(names) > 100
    assert all(each.reason for each in entries if isinstance(each, Rejected))
    _, _, alone, _ = candidates(own_kernels.one_by_one, "w8a8")
    assert {(each.schedule.threads, each.schedule.splits, each.schedule.block) for each in alone} == {(1, 1, 256)}


def test_a_kernel_may_be_declared_for_floats_alone():
    definition = lowbit.kernel(**{**own_kernels.SCORED, "name": "in_floats", "pipelines": ("float",)})(
        own_kernels.scored.function
    )
    _, _, found, entries = candidates(definition, "w8a8")
    assert {each.pipeline for each in found} == {"float"}
    reasons = {each.reason for each in entries if isinstance(each, Rejected) and each.candidate.pipeline == "integer"}
    assert "the kernel is declared for floats alone" in reasons


def test_what_is_counted_is_what_our_own_operators_have():
    backend, problem, found, _ = candidates(own_kernels.scored, "w8a8")
    (symbol,) = backend.tiles(problem, found[0])
    tile = backend.tile(problem, found[0], symbol)
    assert (tile.role, tile.symbol) == ("k", symbol) and symbol in tile.assembly
    ours = Problem("qk", 1, 1, 40, "w8a8", 3)
    assert CpuBackend().tiles(ours, found[0]) == (symbol,)
    assert backend.code(problem, found[0]) == CpuBackend().code(ours, found[0])


def test_the_baseline_is_row_major_and_compiles():
    for definition, threads in ((own_kernels.scored, 2), (own_kernels.weighted, 1)):
        backend, problem = UserBackend(definition), definition.problem("w8a8")
        baseline = backend.baseline(problem, 2)
        assert baseline.pipeline == "float" and baseline.schedule.threads == threads
        assert str(baseline.k or baseline.v).startswith("T D |")
        backend.compile(problem, baseline)


# -- wrong ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mistyped", r"scores must be a 2-dimensional float32 array in C order, not .* \(own_kernels.py, line \d+\)"),
        ("takes_keys_for_values", "accumulate_rows reads role 'v'; an operand of role 'k' is for dot_rows"),
    ],
)
def test_what_does_not_compile_says_why(name, words):
    backend, problem, found, _ = candidates(getattr(own_kernels, name), "w8a8")
    with pytest.raises(CompileError, match=words):
        backend.compile(problem, found[0])


def test_an_exception_in_a_kernel_is_told():
    backend, problem, found, _ = candidates(own_kernels.reads_too_far, "w8a8")
    kernel = backend.compile(problem, found[0])
    inputs, stored = trial(own_kernels.reads_too_far, problem, 40)
    call = kernel.bind(inputs, kernel.pack("k", stored["k"]))
    for _ in range(2):
        with pytest.raises(KernelError, match="reads_too_far raised ValueError: first \\+ count exceeds"):
            call()


@pytest.mark.parametrize(("name", "role"), [("reads_a_stranger", "k"), ("weighs_a_stranger", "v")])
def test_heads_that_an_operand_lacks_are_refused(name, role):
    definition = getattr(own_kernels, name)
    backend, problem = UserBackend(definition), definition.problem("w8a8")
    kernel = backend.compile(problem, backend.baseline(problem, 1))
    k = kernel.pack(role, np.ones((1, 40, 64), np.float32))
    for head in (1, -1):
        out = np.empty(definition.sample_result.shape, np.float32)
        with pytest.raises(KernelError, match="ValueError: head is none of the operand's heads"):
            kernel(np.int64(head), k, out)
        # Untuned, its layout is in its type.
        with pytest.raises(ValueError, match="head is none of the operand's heads"):
            definition(head, k, out)
    kernel(np.int64(0), k, np.empty(definition.sample_result.shape, np.float32))


def shaped(reference):
    definition = lowbit.kernel(**{**GOOD, "reference": reference})(right)
    backend, problem = UserBackend(definition), definition.problem("w8a8")
    return backend.compile(problem, backend.baseline(problem, 1))


@pytest.mark.parametrize(
    ("reference", "tokens", "shape"),
    [
        (lambda q, k: k @ q, 70, (70,)),
        (lambda q, k: k.T, 70, (8, 70)),
        (lambda q, k: np.outer(k.sum(0), q), 70, (8, 8)),
        (lambda q, k: np.add.reduceat(k @ q, np.arange(0, len(k), 32)), 70, (3,)),
        (lambda q, k: (k @ q)[:50], 70, (50,)),
        (lambda q, k: (k @ q)[:50], 40, (40,)),
        (lambda q, k: (k @ q)[: 1 if len(k) < 1057 else None], 70, (1,)),
    ],
)  # fmt: skip
def test_the_shape_of_a_result_is_that_of_the_reference(reference, tokens, shape):
    kernel = shaped(reference)
    q, k = np.ones(8, np.float32), kernel.pack("k", np.ones((tokens, 8), np.float32))
    out = np.empty(shape, np.float32)
    assert kernel(q, k, out) is out
    for axis in range(len(shape)):
        for change in (-1, 1):
            other = tuple(size + change * (place == axis) for place, size in enumerate(shape))
            with pytest.raises(
                KernelError, match=rf"out must have the shape \({shape[0]},.*for {tokens} tokens, not"
            ) as told:
                kernel.bind(q, k, out=np.empty(other, np.float32))
            assert "\n" not in str(told.value)


def test_shapes_are_found_without_the_reference_of_every_length():
    lengths = []

    def reference(q, k):
        lengths.append(len(k))
        return k @ q

    kernel = shaped(reference)
    for tokens in (70, 71, 5000):
        k = kernel.pack("k", np.ones((tokens, 8), np.float32))
        kernel(np.ones(8, np.float32), k, np.empty(tokens, np.float32))
    assert lengths == [32, 1057]


def test_wrong_calls_are_refused():
    definition = own_kernels.scored
    backend, problem, found, _ = candidates(definition, "w8a8")
    kernel = backend.compile(problem, found[0])
    inputs, stored = trial(definition, problem, 40)
    q, k, out = inputs.inputs.arrays["q"], kernel.pack("k", stored["k"]), np.empty((2, 3, 40), np.float32)
    with pytest.raises(KernelError, match=r"called as scored\(q, k, scale, out\): missing .*'out'"):
        kernel(q, k, 0.5)
    with pytest.raises(KernelError, match="unexpected keyword argument 'block'"):
        kernel(q, k, 0.5, out, block=3)
    with pytest.raises(KernelError, match=r"q must be array\(float32, 3d, C\), as make_operands makes .*float64"):
        kernel(q.astype(np.float64), k, 0.5, out)
    with pytest.raises(KernelError, match="out must be"):
        kernel(q, k, 0.5, out[0])
    out.flags.writeable = False
    with pytest.raises(KernelError, match=r"out must be .* not .*readonly"):
        kernel(q, k, 0.5, out)
    with pytest.raises(KernelError, match="scale must be a number, not 'half'"):
        kernel(q, k, "half", np.empty((2, 3, 40), np.float32))
    other = pack(stored["k"], Layout.parse("T/32 D t32 | int8/bytes/signed"))
    with pytest.raises(LayoutError, match=r"pack it with the kernel's own pack\('k', values\)"):
        kernel(q, other, 0.5, np.empty((2, 3, 40), np.float32))
    with pytest.raises(LayoutError, match="must be a PackedTensor"):
        kernel(q, inputs.inputs.packed["k"], 0.5, np.empty((2, 3, 40), np.float32))
    with pytest.raises(LayoutError, match="scored has no packed operand 'q': it has k"):
        kernel.pack("q", stored["k"])
    with pytest.raises(ProblemError, match="500 tokens asked of k"):
        kernel(q, k, 0.5, np.empty((2, 3, 40), np.float32), tokens=500)


@njit
def right(q, k, out):
    pass


@njit
def ranged_by_half(q, k, out, first):
    pass


@njit
def without_out(q, k):
    pass


@njit(parallel=True)
def in_parallel(q, k, out):
    pass


def plain(q, k, out):
    pass


INT8 = lowbit.Packed(("int8",))
GOOD = {
    "operands": {"k": INT8},
    "reference": lambda q, k: k @ q,
    "make_operands": lambda tokens, rng: {"q": np.ones(8, np.float32), "k": np.ones((tokens, 8), np.float32)},
}


@pytest.mark.parametrize(
    ("function", "changes", "words"),
    [
        (plain, {}, "plain is no compiled function: put @numba.njit between"),
        (without_out, {}, "needs a parameter 'out'"),
        (ranged_by_half, {}, "needs both of first and last"),
        (in_parallel, {}, "parallel=True: take first and last instead"),
        (right, {"name": "two words"}, "letters, digits and underscores, not 'two words'"),
        (right, {"operands": {"w": INT8}}, "no parameter 'w'"),
        (right, {"operands": {}}, "needs one packed operand"),
        (right, {"operands": {"k": INT8, "q": INT8}}, "one has role 'k' and one 'v'"),
        (right, {"operands": {"k": "int8"}}, "'k' must be a lowbit.Packed, not str"),
        (right, {"operands": {"k": INT8, "q": lowbit.Packed(("int4",), "v")}}, "share no format"),
        (right, {"reference": lambda q, w: q}, "the reference asks for 'w', which is no input"),
        (right, {"make_operands": lambda tokens: {}}, "takes two arguments"),
        (right, {"tolerance": 0.9}, "tolerance is a largest relative error up to 0.5, not 0.9"),
        (right, {"rows": 17}, "rows must be 1 to 16, not 17"),
        (right, {"pipelines": ("floats",)}, "pipelines are of integer and float"),
    ],
)
def test_declarations_that_cannot_work_are_refused(function, changes, words):
    with pytest.raises(KernelError, match=words):
        lowbit.kernel(**{**GOOD, **changes})(function)


def test_packed_operands_have_known_formats_and_roles():
    assert lowbit.Packed("int8").formats == ("int8",)
    with pytest.raises(KernelError, match="unknown format 'int3': choose of fp16, int8, int4"):
        lowbit.Packed(("int3",))
    with pytest.raises(KernelError, match="unknown format ''"):
        lowbit.Packed(())
    with pytest.raises(KernelError, match="unknown role 'q'"):
        lowbit.Packed(("int8",), "q")


ONES = np.ones((32, 8), np.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"make_operands": lambda tokens, rng: [ONES]}, "must make a dict of q, k, not of list"),
        ({"make_operands": lambda tokens, rng: {"k": ONES}}, "must make a dict of q, k, not of k"),
        ({"make_operands": lambda tokens, rng: {"q": ONES, "k": ONES[:5]}}, r"k a float array of shape \(heads, 32,"),
        ({"make_operands": lambda tokens, rng: {"q": 1, "k": np.ones((tokens, 8), int)}}, "not int64"),
        ({"make_operands": lambda tokens, rng: 1 / 0}, "make_operands raised ZeroDivisionError: division by zero"),
        ({"reference": lambda q, k: 1 / 0}, "the reference raised ZeroDivisionError"),
        ({"reference": lambda q, k: exec("raise OSError('two\\nlines')")}, "the reference raised OSError: two lines$"),
        ({"reference": lambda q, k: "many"}, "the reference of right returned str: it must return an array"),
        ({"reference": lambda q, k: np.nan * k}, r"the reference of right returned nan at \(0, 0\): it must be finite"),
        ({"reference": lambda q, k: 3.0}, r"the reference of right returned an array of shape \(\): it must"),
        ({"make_operands": lambda tokens, rng: sys.exit(3)}, "right: make_operands raised SystemExit: 3"),
        ({"reference": lambda q, k: sys.exit(3)}, "right: the reference raised SystemExit: 3"),
    ],
)
def test_inputs_and_references_that_do_not_fit_are_refused(changes, words):
    definition = lowbit.kernel(**{**GOOD, **changes})(right)
    with pytest.raises(KernelError, match=words):
        assert definition.sample_result is None


def test_precisions_are_those_that_are_declared():
    assert own_kernels.scored.precisions == ("w8a8", "w4a8", "fp16")
    assert own_kernels.of_both_roles.precisions == ("w8a8",)
    with pytest.raises(ProblemError, match="weighted: v is declared for int8, fp16, not int4"):
        own_kernels.weighted.problem("w4a8")
    with pytest.raises(ProblemError, match="unknown precision"):
        own_kernels.weighted.problem("w2a8")


# -- names and identity -----------------------------------------------------------------------------------------------


def test_problems_have_names_that_parse_back_where_the_kernel_is_unknown():
    problem = own_kernels.scored.problem("w8a8")
    assert problem.key == "user:scored h2/2 d40 q3 w8a8"
    assert Problem.parse(problem.key) == problem and problem.roles == ("k",)
    assert own_kernels.of_both_roles.problem("w8a8+w4a8").roles == ("k", "v")
    stranger = Problem.parse("user:elsewhere h1/1 d64 q1 w8a8")
    with pytest.raises(ProblemError, match="user:elsewhere is not defined here: import the module"):
        assert stranger.roles
    with pytest.raises(KernelError, match="user:elsewhere is not defined here"):
        backend_of("user:elsewhere")
    with pytest.raises(ProblemError, match="is no problem of user:scored"):
        UserBackend(own_kernels.scored).baseline(stranger, 1)
    for key in ("user: h1/1 d64 q1 w8a8", "user:a b h1/1 d64 q1 w8a8", "user:a"):
        with pytest.raises(ProblemError, match="not a problem's name"):
            Problem.parse(key)


SOURCE = """
import lowbit
import numpy as np
from numba import njit
from part import twice

FACTOR = 3.0

def unrelated():
    return 1

@njit
def helped(x):
    return FACTOR * twice(x)

def make_operands(tokens, rng):
    return {"k": rng.standard_normal((tokens, 32), np.float32)}

@lowbit.kernel("mine", operands={"k": lowbit.Packed("int8")}, reference=lambda k: k[:, 0], make_operands=make_operands)
@njit
def mine(k, out):
    out[0] = helped(1.0)
"""
PART = """
from numba import njit

@njit
def twice(x):
    return 2 * x
"""


def test_a_kernel_is_another_one_when_something_that_it_uses_changes(tmp_path):
    def digest(name, source, part=PART):
        folder = tmp_path / name
        folder.mkdir()
        # Each version has a helper module of its own name: one process imports them all.
        (folder / f"part_{name}.py").write_text(part)
        (folder / "mine.py").write_text(source.replace("from part", f"from part_{name}"))
        return load_definition(f"{folder / 'mine.py'}:mine").digest

    first = digest("first", SOURCE)
    assert digest("same", SOURCE) == first
    assert digest("aside", SOURCE.replace("return 1", "return 2")) == first
    edits = [
        ("out[0] = helped", "out[0] = -helped"), ("FACTOR = 3.0", "FACTOR = 4.0"), ("k[:, 0]", "k[:, 1]"),
        ("rng.standard_normal", "2 * rng.standard_normal"), ('Packed("int8")', 'Packed("int4")'),
        ('"mine", ', '"mine", pipelines=("float",), '),
    ]  # fmt: skip
    others = [digest(f"edit{i}", SOURCE.replace(*edit)) for i, edit in enumerate(edits)]
    others.append(digest("part", SOURCE, PART.replace("2 * x", "x + x")))
    assert len({first, *others}) == 1 + len(others)


def test_the_toolchain_names_the_kernel_and_its_digest():
    backend = UserBackend(own_kernels.scored)
    assert backend.toolchain() == f"{backend.tile_toolchain()}, user:scored {own_kernels.scored.digest}"


def test_kernels_are_found_by_file_and_by_module(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE.replace("from part import twice", "twice = abs"))
    assert load_definition(f"{path}:mine") is load_definition(str(path))
    assert load_definition("own_kernels:scored") is own_kernels.scored
    for target, words in (
        (f"{path}:helped", "helped in .*mine.py is no kernel: decorate it with lowbit.kernel"),
        (f"{path}:yours", "there is no kernel 'yours' in .*mine.py: it defines mine"),
        ("own_kernels", "name a kernel of own_kernels, as in own_kernels:NAME: it defines scored, "),
        ("lowbit.kernels.rows", "it defines none: decorate one with lowbit.kernel"),
        (f"{tmp_path / 'none.py'}:mine", "none.py does not exist"),
        ("no_such_module:mine", "cannot import 'no_such_module': ModuleNotFoundError"),
    ):
        with pytest.raises(KernelError, match=words):
            load_definition(target)
    path.with_name("broken.py").write_text("def")
    with pytest.raises(KernelError, match=r"cannot import .*broken.py': SyntaxError"):
        load_definition(str(path.with_name("broken.py")))
    for raised in ("SystemExit", "GeneratorExit"):
        path.with_name(f"{raised}.py").write_text(f"raise {raised}")
        with pytest.raises(KernelError, match=f"cannot import .*{raised}.py': {raised}"):
            load_definition(str(path.with_name(f"{raised}.py")))
    path.with_name("interrupted.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_definition(str(path.with_name("interrupted.py")))


def test_names_of_candidates_parse_back():
    _, _, found, _ = candidates(own_kernels.of_both_roles, "w8a8+w4a8")
    for candidate in some(found):
        assert Candidate.parse(candidate.name) == candidate

from __future__ import annotations

from collections.abc import Sequence

import pytest
from lowbit.costmodel.assembly import parse_function
from lowbit.costmodel.loops import Loop, control_flow, hot_loop, natural_loops
from lowbit.kernels.errors import CompileError


def graph_of(text: str):  # type: ignore[no-untyped-def]
    return control_flow(parse_function(f"f:\n{text}\n.Lfunc_end0:\n", "f"))


NEST = """
	xorl %eax, %eax
.LOUTER:
	vpxor %xmm0, %xmm0, %xmm0
.LFIRST:
	vpaddd %ymm1, %ymm0, %ymm0
	decq %rdi
	jne .LFIRST
.LSECOND:
	vpaddd %ymm1, %ymm0, %ymm0
	vpaddd %ymm2, %ymm0, %ymm0
	testq %rdi, %rdi
	je .LSKIP
	vpaddd %ymm3, %ymm0, %ymm0
.LSKIP:
	decq %rsi
	jne .LSECOND
	decq %rdx
	jne .LOUTER
	retq
"""


def test_control_flow_of_a_nest() -> None:
    graph = graph_of(NEST)
    # Blocks by first instruction: entry 0, outer 1, first 2, second 5, then-part 9, skip 10, latch 12, return 14.
    assert set(graph.edges) == {
        (0, 1), (1, 2), (2, 2), (2, 5), (5, 9), (5, 10), (9, 10), (10, 5), (10, 12), (12, 1), (12, 14),
    }  # fmt: skip


def test_natural_loops_nest() -> None:
    assert natural_loops(graph_of(NEST)) == [
        Loop(header=1, blocks=(1, 2, 5, 9, 10, 12), depth=1, innermost=False),
        Loop(header=2, blocks=(2,), depth=2, innermost=True),
        Loop(header=5, blocks=(5, 9, 10), depth=2, innermost=True),
    ]


@pytest.mark.parametrize(
    ("through", "header"), [(range(20), 5), ([1, 2], 2), ([9], 5), ([2, 9], 5), ([0, 12], None), ([], None)]
)
def test_the_hot_loop_is_innermost_and_has_most_vector_instructions(through: Sequence[int], header: int | None) -> None:
    loop = hot_loop(graph_of(NEST), through)
    assert (loop and loop.header) == header


def test_a_remainder_loop_is_not_the_hot_one_wherever_it_stands() -> None:
    body = "\tvpaddd %ymm1, %ymm0, %ymm0\n"
    one, four = f".LA:\n{body}\tdecq %rdi\n\tjne .LA\n", f".LB:\n{body * 4}\tdecq %rsi\n\tjne .LB\n"
    for text, header in ((one + four, 3), (four + one, 0)):
        loop = hot_loop(graph_of(text + "\tretq\n"), [0, 3, 6])
        assert loop is not None and loop.header == header


def test_a_loop_entered_in_its_middle_by_a_rotated_jump_is_found() -> None:
    # The entry jumps to the test at the bottom, which dominates the body.
    text = "\tjmp .LTEST\n.LBODY:\n\tvpaddd %ymm1, %ymm0, %ymm0\n.LTEST:\n\tdecq %rdi\n\tjne .LBODY\n\tretq\n"
    assert natural_loops(graph_of(text)) == [Loop(header=2, blocks=(1, 2), depth=1, innermost=True)]


def test_two_back_edges_to_one_header_make_one_loop() -> None:
    text = ".LA:\n\tdecq %rdi\n\tje .LA\n\tdecq %rsi\n\tjne .LA\n\tretq\n"
    assert natural_loops(graph_of(text)) == [Loop(header=0, blocks=(0, 2), depth=1, innermost=True)]


def test_aarch64_branches_make_the_same_graph() -> None:
    text = "\tcbz x0, .LEND\n.LA:\n\tadd v0.4s, v0.4s, v1.4s\n\tsubs x0, x0, #1\n\tb.ne .LA\n.LEND:\n\tret\n"
    graph = graph_of(text)
    assert set(graph.edges) == {(0, 1), (0, 4), (1, 1), (1, 4)}
    assert hot_loop(graph, [1]) == Loop(header=1, blocks=(1,), depth=1, innermost=True)


def test_straight_line_code_has_no_hot_loop() -> None:
    assert hot_loop(graph_of("\tvpaddd %ymm1, %ymm0, %ymm0\n\tretq\n"), [0]) is None


def test_a_loop_that_nothing_reaches_is_ignored() -> None:
    assert hot_loop(graph_of("\tretq\n.LA:\n\tdecq %rdi\n\tjne .LA\n\tretq\n"), [0, 1]) is None


def test_a_cycle_with_two_entries_is_refused() -> None:
    text = "\ttestq %rdi, %rdi\n\tje .LB\n.LA:\n\tdecq %rdi\n.LB:\n\tdecq %rsi\n\tjne .LA\n\tretq\n"
    with pytest.raises(CompileError, match="several entries"):
        hot_loop(graph_of(text), [2])

"""Sums of accumulator lanes that belong to one output."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from .vector import F32, Emitter, Value


def fold(emit: Emitter, vectors: Sequence[Value], outputs: Sequence[tuple[int, ...]], wanted: Sequence[int]) -> Value:
    """One lane for each output in ``wanted``.

    Parameters
    ----------
    vectors : vectors of equal type
    outputs : one tuple a vector
        The output that each lane contributes to.
    wanted : outputs in the order of the result's lanes

    Returns
    -------
    Value
        A vector of ``len(wanted)`` lanes.
    """
    pool = [(vector, tuple(lanes)) for vector, lanes in zip(vectors, outputs, strict=True)]
    pool = [entry for entry in pool if set(entry[1]) & set(wanted)]
    while len(pool[0][1]) > 1 and all(lanes[i] == lanes[i + 1] for _, lanes in pool for i in range(0, len(lanes), 2)):
        pool = _folded_once(emit, pool)
    places: dict[int, list[tuple[int, int]]] = {output: [] for output in wanted}
    for number, (_, lanes) in enumerate(pool):
        for lane, output in enumerate(lanes):
            if output in places:
                places[output].append((number, lane))
    copies = {len(found) for found in places.values()}
    assert len(copies) == 1, "every output has the same number of partial sums"
    add = emit.builder.fadd if vectors[0].type.element == F32 else emit.builder.add
    values = [vector for vector, _ in pool]
    total: Value = None
    for copy in range(copies.pop()):
        part = emit.gather(values, [places[output][copy] for output in wanted])
        total = part if total is None else add(total, part)
    return total


def _folded_once(emit: Emitter, pool: list[tuple[Value, tuple[int, ...]]]) -> list[tuple[Value, tuple[int, ...]]]:
    folded = []
    for i in range(0, len(pool), 2):
        vector, lanes = pool[i]
        if i + 1 < len(pool):
            other, other_lanes = pool[i + 1]
            folded.append((emit.fold_pairs(vector, other), lanes[::2] + other_lanes[::2]))
        else:
            undefined = ir.Constant(vector.type, ir.Undefined)
            whole = emit.fold_pairs(vector, undefined)
            folded.append((emit.shuffle(whole, range(len(lanes) // 2)), lanes[::2]))
    if len({len(lanes) for _, lanes in folded}) > 1:
        width = max(len(lanes) for _, lanes in folded)
        folded = [
            (emit.shuffle(v, [i % len(lanes) for i in range(width)]), lanes + (-1,) * (width - len(lanes)))
            for v, lanes in folded
        ]
    return folded

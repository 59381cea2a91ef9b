"""Sums of accumulator lanes that belong to one output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .vector import F32, Emitter, Value

Combine = Callable[[Value, Value], Value]


def fold(
    emit: Emitter,
    vectors: Sequence[Value],
    outputs: Sequence[tuple[int, ...]],
    wanted: Sequence[int],
    combine: Combine | None = None,
) -> Value:
    """One lane for each output in ``wanted``.

    Parameters
    ----------
    vectors : vectors of equal type
    outputs : one tuple a vector
        The output that each lane contributes to.
    combine : callable, optional
        What joins two partial results; addition if not given.
    wanted : outputs in the order of the result's lanes

    Returns
    -------
    Value
        A vector of ``len(wanted)`` lanes.
    """
    join: Combine = combine or (emit.builder.fadd if vectors[0].type.element == F32 else emit.builder.add)
    pool = [(vector, tuple(lanes)) for vector, lanes in zip(vectors, outputs, strict=True)]
    pool = [entry for entry in pool if set(entry[1]) & set(wanted)]
    while len(pool[0][1]) > 1 and all(lanes[i] == lanes[i + 1] for _, lanes in pool for i in range(0, len(lanes), 2)):
        pool = _folded_once(emit, pool, join)
    places: dict[int, list[tuple[int, int]]] = {output: [] for output in wanted}
    for number, (_, lanes) in enumerate(pool):
        for lane, output in enumerate(lanes):
            if output in places:
                places[output].append((number, lane))
    copies = {len(found) for found in places.values()}
    assert len(copies) == 1, "every output has the same number of partial sums"
    values = [vector for vector, _ in pool]
    total: Value = None
    for copy in range(copies.pop()):
        part = emit.gather(values, [places[output][copy] for output in wanted])
        total = part if total is None else join(total, part)
    return total


def _folded_once(
    emit: Emitter, pool: list[tuple[Value, tuple[int, ...]]], join: Combine
) -> list[tuple[Value, tuple[int, ...]]]:
    """Neighbouring lanes joined: half the vectors, or half the lanes of a last odd one.

    Two vectors are joined within 128-bit lanes, where one shuffle takes a cycle: lanes of the first and of the second
    then alternate by twos.
    """
    folded = []
    for i in range(0, len(pool), 2):
        vector, lanes = pool[i]
        count = len(lanes)
        if i + 1 < len(pool):
            other, other_lanes = pool[i + 1]
            both = (*lanes, *other_lanes)
            even = [
                source * count + lane + 2 * k
                for lane in range(0, count, 4)
                for source in range(2)
                for k in range(min(2, count // 2))
            ]
            odd = [index + 1 for index in even]
            joined = join(emit.shuffle(vector, even, other), emit.shuffle(vector, odd, other))
            folded.append((joined, tuple(both[index] for index in even)))
        else:
            halves = (emit.shuffle(vector, range(start, count, 2)) for start in range(2))
            folded.append((join(*halves), lanes[::2]))
    width = max(len(lanes) for _, lanes in folded)
    return [
        (emit.shuffle(v, [i % len(lanes) for i in range(width)]), lanes + (-1,) * (width - len(lanes)))
        if len(lanes) < width
        else (v, lanes)
        for v, lanes in folded
    ]

"""Few combinations of many factors in which every two values of two factors meet."""

import itertools
import random


def pairwise(factors, seed=0, allowed=lambda row: True):
    """Rows (dicts) such that each pair of values that ``allowed`` has in some row is in one; deterministic and greedy.

    Parameters
    ----------
    factors : dict of str to sequence
    allowed : callable
        Whether a complete row may be.
    """
    names = list(factors)
    rows = [dict(zip(names, values, strict=True)) for values in itertools.product(*factors.values())]
    rows = [row for row in rows if allowed(row)]
    random.Random(seed).shuffle(rows)
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = []
    while missing:
        best = max(rows[:4000], key=lambda row: len(missing & _pairs(row)))
        gained = missing & _pairs(best)
        if not gained:  # what is missing is further back
            best = next(row for row in rows if missing & _pairs(row))
            gained = missing & _pairs(best)
        missing -= gained
        chosen.append(best)
    return chosen


def _pairs(row):
    return set(itertools.combinations(row.items(), 2))

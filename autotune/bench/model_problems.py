"""What has to be tuned for a model to decode well: its matrices, and attention at the lengths of a comparison."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from ...runtime.cache_types import FORMATS, PRECISIONS, CacheTypes
from ...runtime.model.model import Model, matrix_problems
from ...runtime.model.tuned import attention_problem
from .case import Case


def model_cases(path: Path, threads: int, types: Sequence[CacheTypes], lengths: Sequence[int]) -> list[Case]:
    """The distinct problems of a model's decode step, and their lengths.

    Parameters
    ----------
    path : Path
        A GGUF file.
    threads : int
    types : sequence of CacheTypes
    lengths : sequence of int
        Context lengths that attention is wanted for.

    Raises
    ------
    ModelError
        If the file cannot be used.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is tuned yet
        model = Model.load(path, threads=threads)
    cases = [Case(problem, rows) for problem, rows in matrix_problems(model.config, model.network)]
    for each in types:
        k, v = (PRECISIONS[FORMATS[kind]] for kind in (each.k, each.v))
        problem = attention_problem(model.config, k, v)
        cases += [Case(problem, length) for length in dict.fromkeys(lengths)]
    return cases

"""A decoder read from a GGUF file, whose weights lie in tuned layouts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ...kernels.cpu.isa import Isa, detect
from ...kernels.cpu.pool import allowed_cpus
from ...kernels.errors import ProblemError
from ...kernels.problem import PRECISIONS, Problem
from ..cache_types import cache_precision
from ..kvcache import KVCache
from ..memory import check_fits
from ..select import Database, FallbackWarning, open_db
from ..switching import PhaseSwitcher
from .config import Config
from .gguf_file import GgufFile
from .network import Network, load
from .session import Session
from .tuned import Readers, attention_problem

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

WEIGHTS = ("tuned", "exact")
NO_DATABASE = Path("no database")


class Model:
    """Weights, tokenizer and tuned choices. Immutable; sessions of one model must not run at the same time.

    Attributes
    ----------
    path : Path
    config : Config
    network : Network
    database : Database
    threads : int
    isa : Isa
    weights : str
        One of `WEIGHTS`.
    """

    def __init__(
        self, path: Path, config: Config, network: Network, database: Database, threads: int, isa: Isa, weights: str
    ) -> None:
        self.path, self.config, self.network = path, config, network
        self.database, self.threads, self.isa, self.weights = database, threads, isa, weights
        self._told: set[str] = set()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        database: Database | str | Path | None = None,
        threads: int | None = None,
        weights: str = "tuned",
    ) -> Self:
        """Read a model, and repack its weights.

        Parameters
        ----------
        path : path-like
            A GGUF file of a supported architecture; see `lowbit.runtime.model.config.ARCHITECTURES`.
        database : Database or path-like, optional
            Tuned choices. Where there are none, untuned layouts are used, and a `FallbackWarning` says so once.
        threads : int, optional
            All cores that this process may use, unless given.
        weights : str
            ``tuned`` repacks them as 8-bit or 4-bit codes; ``exact`` keeps float32 numbers, as the file's codes stand
            for, which is slow and takes four bytes a weight.

        Raises
        ------
        ModelError
            If the file cannot be read, is damaged, or asks for something unsupported.
        DatabaseError
            If the database is missing or refused.
        ProblemError
            If ``threads`` or ``weights`` is out of range.
        """
        if weights not in WEIGHTS:
            raise ProblemError(f"weights must be one of {', '.join(WEIGHTS)}, not {weights!r}")
        cores = len(allowed_cpus())
        if threads is not None and not 1 <= threads <= 256:
            raise ProblemError(f"threads must be 1 to 256, not {threads}")
        if database is None:
            database = Database(NO_DATABASE, (), {})
        elif not isinstance(database, Database):
            database = open_db(database)
        isa = detect()
        with GgufFile(path) as file:
            config = Config.read(file)
            network = load(file, config, database, isa, weights)
        model = cls(Path(path), config, network, database, threads or cores, isa, weights)
        if weights == "tuned":
            model._tell(matrix_problems(config, network))
        return model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """From the file.

        Raises
        ------
        ModelError
            If the file has none, or one of an unsupported kind.
        """
        from .tokenizer import Tokenizer

        with GgufFile(self.path) as file:
            return Tokenizer(file)

    def session(self, context: int, cache_type_k: str = "f16", cache_type_v: str = "f16") -> Session:
        """A new sequence.

        Parameters
        ----------
        context : int
            Most tokens of it.
        cache_type_k, cache_type_v : str
            Formats of keys and values; see `lowbit.runtime.cache_types`.

        Raises
        ------
        ProblemError
            For an unknown type, or a context of no tokens.
        FitError
            If it would take more memory than is available.
        """
        k, v = cache_precision(cache_type_k), cache_precision(cache_type_v)
        config = self.config
        check_fits(config, context, PRECISIONS[k].format, PRECISIONS[v].format)
        problem = attention_problem(config, k, v)
        readers = Readers(problem, self.isa, self.threads)
        switcher = PhaseSwitcher(self.database.prices(problem), horizon=context)
        layout = readers.learn(switcher.layout_at([], 0))
        self._tell([(problem, context)])
        cache = KVCache(config.layers, config.kv_heads, config.head_dim, context, layout, window=config.window)
        return Session(self, cache, problem, readers, switcher)

    def _tell(self, problems: Iterable[tuple[Problem, int]]) -> None:
        """Warn once of what was not tuned."""
        missing = []
        for problem, tokens in problems:
            choice = self.database.choose(problem, tokens)
            if choice.how not in ("exact", "nearest") and problem.key not in self._told:
                self._told.add(problem.key)
                missing.append(problem.key)
        if missing:
            where = (
                "there is no database" if self.database.path == NO_DATABASE else f"{self.database.path} has no winner"
            )
            warnings.warn(
                f"{where} for {', '.join(missing)}: using untuned layouts; "
                f"`autotune bench model -m {self.path} --db FILE` tunes what a model needs",
                FallbackWarning,
                stacklevel=3,
            )


def matrix_problems(config: Config, network: Network) -> list[tuple[Problem, int]]:
    """The distinct problems of a network's packed matrices, with their rows."""
    from .matrix import PackedMatrix

    found: dict[tuple[Problem, int], None] = {}
    for layer in network.layers:
        for each in (*layer.qkv.matrices, layer.output, *layer.gate_up.matrices, layer.down):
            if isinstance(each, PackedMatrix):
                found[each.problem, each.rows] = None
    for each in (network.embedding, network.head):
        if isinstance(each, PackedMatrix):
            found[each.problem, each.rows] = None
    return list(found)

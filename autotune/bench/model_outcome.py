"""What a comparison of whole models found: rows for each contestant, cache, depth and test, and their ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...runtime.cache_types import REFERENCE, CacheTypes
from ...search.rounds import Fault, Timed
from ...search.statistics import median, spread
from .model_contestant import PLAIN
from .model_messages import Weighed

PROMPT, GENERATE = "pp", "tg"
"""llama-bench's names of its two tests."""
MOST_SPREAD = 0.4
"""Interquartile range over median beyond which a median is not reported."""
OWN, PEER = "lowbit", "llama_cpp"


@dataclass(frozen=True)
class ModelCase:
    """A test of one cache: ``tokens`` computed together (``pp``) or one by one (``tg``), after ``depth`` others."""

    types: CacheTypes
    depth: int
    test: str
    tokens: int


@dataclass(frozen=True)
class ModelRow:
    """One contestant's result in one case.

    Attributes
    ----------
    case : ModelCase
    impl : str
    status : str
        ``ok``, or why there is no speed: ``absent``, ``unsupported``, ``wrong``, ``crashed``, ``hung``, ``noisy``.
    message : str
        The reason in words.
    seconds : tuple of float
        Each repetition's.
    tainted : int
        Repetitions that contention spoilt.
    """

    case: ModelCase
    impl: str
    status: str
    message: str = ""
    seconds: tuple[float, ...] = ()
    tainted: int = 0

    @property
    def speed(self) -> float | None:
        """Tokens per second, the median of the repetitions."""
        return self.case.tokens / median(self.seconds) if self.status == "ok" else None

    @property
    def flash_attention(self) -> bool | None:
        return {PEER: True, PLAIN: False}.get(self.impl)

    def as_dict(self) -> dict[str, Any]:
        case, ok = self.case, self.status == "ok"
        flash = {} if self.flash_attention is None else {"flash_attention": self.flash_attention}
        return {
            "impl": PEER if self.impl == PLAIN else self.impl,
            **flash,
            "cache_type_k": case.types.k,
            "cache_type_v": case.types.v,
            "depth": case.depth,
            "test": f"{case.test}{case.tokens}",
            "status": self.status,
            "tokens_per_s": self.speed,
            "spread": spread(self.seconds) if ok and len(self.seconds) > 1 else None,
            "samples": [case.tokens / each for each in self.seconds],
            "tainted": self.tainted,
            **({"message": self.message} if self.message else {}),
        }


def timed_row(case: ModelCase, impl: str, timed: Timed | Fault | None, least: int) -> ModelRow:
    """A row of what `lowbit.search.rounds.interleave` found; ``least`` undisturbed repetitions make a median."""
    if isinstance(timed, Fault):
        return ModelRow(case, impl, timed.status, timed.message)
    clean = 0 if timed is None else len(timed.samples_us)
    if timed is None or clean < least:
        return ModelRow(case, impl, "noisy", f"only {clean} repetitions of it were undisturbed")
    seconds = tuple(us / 1e6 for us in timed.samples_us)
    if clean > 1 and spread(seconds) > MOST_SPREAD:
        width = spread(seconds)
        return ModelRow(
            case, impl, "noisy", f"its repetitions' spread of {width:.0%} says nothing", seconds, timed.tainted
        )
    return ModelRow(case, impl, "ok", "", seconds, timed.tainted)


@dataclass
class ModelOutcome:
    """A whole comparison.

    Attributes
    ----------
    device : dict
        `lowbit.costmodel.device.Device.as_dict`.
    threads : int
    model : str
    peers : dict of str to str
        Version of each contestant, or ``absent: `` and the reason.
    rows : list of ModelRow
    weights : dict of (str, CacheTypes) to Weighed
        Memory of each contestant's process with one kind of cache.
    divergences : dict of CacheTypes to float
        Of this project's distribution from llama.cpp's after a short text, in nats.
    rounds, tainted : int
    """

    device: dict[str, Any]
    threads: int
    model: str
    peers: dict[str, str] = field(default_factory=dict)
    rows: list[ModelRow] = field(default_factory=list)
    weights: dict[tuple[str, CacheTypes], Weighed] = field(default_factory=dict)
    divergences: dict[CacheTypes, float] = field(default_factory=dict)
    rounds: int = 0
    tainted: int = 0

    def ratios(self, test: str, peer_types: CacheTypes | None = None) -> dict[str, dict[str, float]]:
        """How many times as fast this project is, by types and depth.

        Parameters
        ----------
        test : str
        peer_types : CacheTypes, optional
            llama.cpp's cache to compare with; the same types unless given. Of two ways of attention the faster counts.
        """
        found: dict[str, dict[str, float]] = {}
        for row in self._rows(OWN, test):
            peer = self._fastest(row.case, peer_types or row.case.types)
            if row.speed is not None and peer is not None:
                found.setdefault(row.case.types.name, {})[str(row.case.depth)] = row.speed / peer
        return found

    def _rows(self, impl: str, test: str) -> Iterator[ModelRow]:
        return (row for row in self.rows if row.impl == impl and row.case.test == test)

    def _fastest(self, case: ModelCase, types: CacheTypes) -> float | None:
        wanted = ModelCase(types, case.depth, case.test, case.tokens)
        speeds = [row.speed for row in self.rows if row.impl in (PEER, PLAIN) and row.case == wanted]
        return max((speed for speed in speeds if speed is not None), default=None)

    def memory(self) -> dict[str, Any]:
        """Peak resident bytes by contestant and types, and this project's over llama.cpp's; of two ways the smaller.

        ``model_rss_bytes`` are the peak less what every process had before it loaded anything of its own.
        """
        peaks: dict[str, dict[str, int]] = {}
        added: dict[str, dict[str, int]] = {}
        for (impl, types), weighed in self.weights.items():
            if weighed.peak_bytes is None or weighed.before_bytes is None:
                continue
            name = PEER if impl == PLAIN else impl
            for found, size in ((peaks, weighed.peak_bytes), (added, weighed.peak_bytes - weighed.before_bytes)):
                of = found.setdefault(name, {})
                of[types.name] = min(size, of.get(types.name, size))
        return {
            "peak_rss_bytes": peaks,
            "model_rss_bytes": added,
            "peak_rss_ratio": _over(peaks),
            "model_rss_ratio": _over(added),
        }

    def as_dict(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "ratio_vs_llamacpp_same_bits": self.ratios(GENERATE),
            "ratio_vs_llamacpp_f16": self.ratios(GENERATE, REFERENCE),
            "prefill_ratio_vs_llamacpp_same_bits": self.ratios(PROMPT),
            "prefill_ratio_vs_llamacpp_f16": self.ratios(PROMPT, REFERENCE),
            **self.memory(),
            "kl_divergence_from_llamacpp": {types.name: value for types, value in self.divergences.items()},
            "model": self.model,
            "peers": self.peers,
            "device": self.device,
            "threads": self.threads,
            "rounds": {"timed": self.rounds, "tainted": self.tainted},
        }


def _over(sizes: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    own, peer = sizes.get(OWN, {}), sizes.get(PEER, {})
    return {name: own[name] / peer[name] for name in own if peer.get(name)}

"""What a database keeps of a winner's machine code: the code, what it takes, and how it is launched."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ..kernels.cuda.arch import MOST_THREADS
from ..kernels.errors import DatabaseError
from .records import utc_now

ARGUMENT_TYPES = ("pointer", "int64", "int32", "float32")
MOST_TEXT_BYTES = 64 << 20
"""Text or code that unpacks to more than this is no kernel."""
LARGEST = 1 << 62


@dataclass(frozen=True)
class Rule:
    """A number of a launch as a function of the context length: ``base + times · ceil(tokens / per)``.

    Parameters
    ----------
    base : int or float
    times : int
        0 for a constant.
    per : int

    Raises
    ------
    DatabaseError
        For numbers that no launch has.
    """

    base: int | float
    times: int = 0
    per: int = 1

    def __post_init__(self) -> None:
        whole = isinstance(self.times, int) and isinstance(self.per, int) and isinstance(self.base, int | float)
        if not whole or isinstance(self.base, bool) or self.per < 1 or not math.isfinite(self.base):
            raise DatabaseError(f"no rule of a launch: {self.base!r} + {self.times!r} * ceil(tokens / {self.per!r})")
        if abs(self.base) > LARGEST or abs(self.times) > LARGEST or (self.times and not isinstance(self.base, int)):
            raise DatabaseError(f"no rule of a launch: {self.base} + {self.times} * ceil(tokens / {self.per})")

    def at(self, tokens: int) -> int | float:
        return self.base + self.times * -(-tokens // self.per)

    def as_json(self) -> Any:
        return {"base": self.base, "times": self.times, "per": self.per} if self.times else self.base

    @classmethod
    def from_json(cls, value: Any) -> Self:
        return cls(**value) if isinstance(value, dict) else cls(value)

    @classmethod
    def of(cls, value: Callable[[int], int | float], lengths: Sequence[int]) -> Self:
        """The rule that ``value`` follows at each of ``lengths``.

        Raises
        ------
        DatabaseError
            If it follows none.
        """
        wanted = {tokens: value(tokens) for tokens in sorted(set(lengths))}
        numbers = list(wanted.values())
        if len(set(numbers)) == 1:
            return cls(numbers[0])
        if all(isinstance(number, int) for number in numbers):
            for per in (1 << shift for shift in range(25)):
                found = cls._through(wanted, per)
                if found is not None:
                    return found
        raise DatabaseError(f"a number of a launch follows no rule: {numbers[:3]} … at {list(wanted)[:3]} … tokens")

    @classmethod
    def _through(cls, wanted: Mapping[int, int | float], per: int) -> Self | None:
        blocks = {-(-tokens // per): number for tokens, number in wanted.items()}
        first, last = min(blocks), max(blocks)
        if first == last:
            return None
        times, rest = divmod(int(blocks[last]) - int(blocks[first]), last - first)
        if rest:
            return None
        rule = cls(int(blocks[first]) - times * first, times, per)
        return rule if all(rule.at(tokens) == number for tokens, number in wanted.items()) else None


@dataclass(frozen=True, kw_only=True)
class KernelImage:
    """One kernel's code.

    Parameters
    ----------
    toolchain : str
        `Backend.toolchain`.
    symbol : str
        Its name in the code.
    arch : str
        ``sm_86``: what the cubin is for. PTX also serves later architectures.
    ptx : str
    cubin : bytes
        Empty where no assembler was at hand; the driver then translates the PTX.
    arguments : tuple of (name, type)
        In order; types of `ARGUMENT_TYPES`.
    registers, spill_bytes, shared_bytes : int
        Of a thread, of a thread, static ones of a block; 0 if unknown.
    created : str

    Raises
    ------
    DatabaseError
        For an argument's type that does not exist, or a kernel without code.
    """

    toolchain: str
    symbol: str
    arch: str
    ptx: str
    cubin: bytes = b""
    arguments: tuple[tuple[str, str], ...]
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    created: str = field(default_factory=utc_now)

    def __post_init__(self) -> None:
        if not self.ptx:
            raise DatabaseError(f"kernel {self.symbol} has no code")
        for name, type_ in self.arguments:
            if not isinstance(name, str) or type_ not in ARGUMENT_TYPES:
                raise DatabaseError(f"kernel {self.symbol}: argument {name!r} of unknown type {type_!r}")

    @property
    def digest(self) -> str:
        """SHA-256 of everything that runs or says how: symbol, architecture, arguments, PTX, cubin."""
        head = json.dumps([self.symbol, self.arch, self.arguments], separators=(",", ":")).encode()
        parts = (head, self.ptx.encode(), self.cubin)
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()


@dataclass(frozen=True)
class KernelLaunch:
    """How one of a winner's kernels is launched.

    Parameters
    ----------
    symbol : str
    grid : tuple of Rule
        Blocks along x, y and z.
    threads : int
        Of a block.
    shared_bytes : Rule
        Dynamic shared memory of a block.
    constants : dict of str to Rule
        Arguments that do not depend on the operands.
    """

    symbol: str
    grid: tuple[Rule, Rule, Rule]
    threads: int
    shared_bytes: Rule
    constants: Mapping[str, Rule]

    def as_json(self) -> dict[str, Any]:
        return {
            "grid": [rule.as_json() for rule in self.grid],
            "threads": self.threads,
            "shared_bytes": self.shared_bytes.as_json(),
            "constants": {name: rule.as_json() for name, rule in self.constants.items()},
        }

    @classmethod
    def from_json(cls, symbol: str, payload: Mapping[str, Any]) -> Self:
        """Inverse of `as_json`.

        Raises
        ------
        DatabaseError, TypeError, ValueError, KeyError
            If ``payload`` is no launch.
        """
        x, y, z = (Rule.from_json(value) for value in payload["grid"])
        threads = payload["threads"]
        if not isinstance(threads, int) or not 1 <= threads <= MOST_THREADS:
            raise DatabaseError(f"kernel {symbol} cannot have {threads!r} threads a block")
        constants = {name: Rule.from_json(value) for name, value in payload["constants"].items()}
        return cls(symbol, (x, y, z), threads, Rule.from_json(payload["shared_bytes"]), constants)


@dataclass(frozen=True)
class ShippedWinner:
    """All that runs a winner without a compiler.

    Parameters
    ----------
    launches : tuple of KernelLaunch
        In order.
    workspace_bytes : Rule
        Memory that the launches share.
    """

    launches: tuple[KernelLaunch, ...]
    workspace_bytes: Rule


def packed(data: bytes) -> bytes:
    """``data`` as it is stored: zlib."""
    return zlib.compress(data, 9)


def unpacked(data: object) -> bytes:
    """Inverse of `packed`.

    Raises
    ------
    DatabaseError
        If ``data`` is not what `packed` gave, or too long.
    """
    if not isinstance(data, bytes):
        raise DatabaseError("code is no blob")
    stream = zlib.decompressobj()
    try:
        text = stream.decompress(data, MOST_TEXT_BYTES)
    except zlib.error as error:
        raise DatabaseError(f"code cannot be unpacked: {error}") from error
    if not stream.eof or stream.unused_data:
        raise DatabaseError("code is cut short or too long")
    return text

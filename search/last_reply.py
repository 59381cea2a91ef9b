"""A reply that says that its worker is gone."""

from __future__ import annotations

from dataclasses import dataclass

from .messages import Reply


@dataclass(frozen=True)
class Last:
    """A worker's last reply: what it was asked broke the process, which ends by itself.

    Whatever the worker had compiled is compiled again where it is next asked for.
    """

    reply: Reply

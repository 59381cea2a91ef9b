"""Which candidate wins: strategies, and the timing that they rest on."""

from __future__ import annotations

"""Devices in words, from what a database holds about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

GPU = "sm_"
"""Begins the name of a GPU's architecture, and its fingerprint."""

Devices = Mapping[str, Mapping[str, Any]]
"""As `lowbit.db.store.Store.devices`: descriptions by fingerprint, empty for a device that was never described."""


def isa_of(fingerprint: str, description: Mapping[str, Any]) -> str:
    """Instruction set, or a GPU's architecture; empty if neither the description nor the fingerprint tells."""
    known = description.get("isa")
    if known:
        return str(known)
    return fingerprint.partition("-")[0] if fingerprint.startswith(GPU) else ""


def chip_of(fingerprint: str, description: Mapping[str, Any]) -> str:
    """Name of a board or processor, ``RTX 3090``; the fingerprint of a device that was never described."""
    named = str(description.get("description") or "").partition(",")[0]
    return named.removesuffix(f"({isa_of(fingerprint, description)})").strip() or fingerprint


def short_names(devices: Devices) -> dict[str, str]:
    """Chip and instruction set of each device, ``RTX 3090 (sm_86)``, by fingerprint."""
    names = {}
    for fingerprint, description in devices.items():
        chip, isa = chip_of(fingerprint, description), isa_of(fingerprint, description)
        names[fingerprint] = chip if chip == fingerprint or not isa else f"{chip} ({isa})"
    return _told_apart(names)


def long_names(devices: Devices) -> dict[str, str]:
    """All that a device says of itself, by fingerprint."""
    return _told_apart({key: str(known.get("description") or key) for key, known in devices.items()})


def _told_apart(names: Mapping[str, str]) -> dict[str, str]:
    """With the fingerprint behind what several devices are called."""
    shared = Counter(names.values())
    return {key: name if shared[name] == 1 else f"{name}, {key}" for key, name in names.items()}

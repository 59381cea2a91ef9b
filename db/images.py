"""Winners' machine code: kept beside them, and read without a compiler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlite_utils import Database

from ..kernels.errors import DatabaseError
from .kernels import KernelImage, KernelLaunch, Rule, ShippedWinner, packed, unpacked
from .records import Winner
from .session import Session

_KERNEL = """
    SELECT t.name AS toolchain, symbol, arch, ptx, cubin, arguments, registers, spill_bytes, shared_bytes, digest,
           created
    FROM kernels JOIN toolchains t ON t.id = toolchain_id
"""
_BLOBS = ("ptx", "cubin")


class KernelImages(Session):
    """The part of `Store` that makes a database run where nothing compiles."""

    def kernel(self, toolchain: str, symbol: str, arch: str) -> KernelImage | None:
        """A kernel's code; None if the file lacks it.

        Raises
        ------
        DatabaseError
            If what is stored is not what its digest says.
        """
        where = "WHERE t.name = ? AND symbol = ? AND arch = ?"
        rows = self._rows(f"{_KERNEL} {where}", (toolchain, symbol, arch), blobs=_BLOBS)
        return self._image(rows[0]) if rows else None

    def kernels(self, arch: str | None = None) -> list[KernelImage]:
        """The code of all kernels, or of those for one architecture; raises as `kernel` does."""
        rows = self._rows(f"{_KERNEL} WHERE ? IS NULL OR arch = ? ORDER BY kernels.id", (arch, arch), blobs=_BLOBS)
        return [self._image(row) for row in rows]

    def put_shipped(self, winner: Winner, shipped: ShippedWinner, images: Sequence[KernelImage]) -> None:
        """Keep the code of a stored winner's launches, in their order, and how each is launched; replaces both.

        Code is kept once for all winners of its toolchain and architecture, and goes with the last of them.

        Raises
        ------
        DatabaseError
            If the winner is not stored, or an image is not its launch's.
        """
        if [launch.symbol for launch in shipped.launches] != [image.symbol for image in images]:
            raise DatabaseError("each launch needs the image of its own kernel")
        with self._writing() as db:
            id_ = self._winner_id(winner)
            if id_ is None:
                raise DatabaseError(f"{self.path} holds no such winner for {winner.problem} at {winner.tokens}")
            db.table("launches").delete_where("winner_id = ?", [id_])
            for position, (launch, image) in enumerate(zip(shipped.launches, images, strict=True)):
                payload = {**launch.as_json(), "workspace_bytes": shipped.workspace_bytes.as_json()}
                kernel = self._put_kernel(db, image)
                db.table("launches").insert(
                    {"winner_id": id_, "position": position, "kernel_id": kernel, "payload": json.dumps(payload)}
                )
            # A winner that was replaced took its launches along.
            db.conn.execute("DELETE FROM kernels WHERE id NOT IN (SELECT kernel_id FROM launches)")

    def _put_kernel(self, db: Database, image: KernelImage) -> int:
        row = {
            "toolchain_id": self._names.put("toolchains", image.toolchain),
            "symbol": image.symbol,
            "arch": image.arch,
            "ptx": packed(image.ptx.encode()),
            "cubin": packed(image.cubin) if image.cubin else None,
            "arguments": json.dumps([{"name": name, "type": type_} for name, type_ in image.arguments]),
            "registers": image.registers,
            "spill_bytes": image.spill_bytes,
            "shared_bytes": image.shared_bytes,
            "digest": image.digest,
            "created": image.created,
        }
        values = ", ".join(f":{name}" for name in row)
        changed = ", ".join(f"{name} = excluded.{name}" for name in row)
        found = db.conn.execute(
            f"""INSERT INTO kernels ({", ".join(row)}) VALUES ({values})
                ON CONFLICT (toolchain_id, symbol, arch) DO UPDATE SET {changed} RETURNING id""",
            row,
        ).fetchone()
        return int(found[0])

    def shipped(self, winner: Winner) -> tuple[ShippedWinner, tuple[KernelImage, ...]] | None:
        """How a winner is launched, and the code of each launch; None if it was stored without code.

        Raises
        ------
        DatabaseError
            If the launches make no sense, or code is not what its digest says.
        """
        id_ = self._winner_id(winner)
        if id_ is None:
            return None
        rows = self._rows(
            f"""SELECT l.payload, k.* FROM launches l JOIN ({_KERNEL.replace("SELECT", "SELECT kernels.id,", 1)}) k
                ON k.id = l.kernel_id WHERE l.winner_id = ? ORDER BY l.position""",
            (id_,),
            blobs=_BLOBS,
        )
        launches_stored = self._rows("SELECT position FROM launches WHERE winner_id = ? ORDER BY position", (id_,))
        if not launches_stored:
            return None
        if len(rows) != len(launches_stored) or [row["position"] for row in launches_stored] != [*range(len(rows))]:
            raise DatabaseError(f"{self.path}: kernels of the winner for {winner.problem} are missing")
        with self._decoding():
            payloads = [self._parsed(row.pop("payload")) for row in rows]
            try:
                workspace = Rule.from_json(payloads[0]["workspace_bytes"])
                launches = tuple(
                    KernelLaunch.from_json(row["symbol"], payload) for row, payload in zip(rows, payloads, strict=True)
                )
            except (KeyError, AttributeError) as error:
                raise DatabaseError(f"a launch lacks {error}") from error
        return ShippedWinner(launches, workspace), tuple(map(self._image, rows))

    def shipped_arch(self, winner: Winner) -> str | None:
        """The architecture that a winner's code is for; None if it was stored without code."""
        id_ = self._winner_id(winner)
        rows = self._rows(
            "SELECT k.arch FROM launches l JOIN kernels k ON k.id = l.kernel_id WHERE winner_id = ? AND position = 0",
            (id_,),
        )
        return str(rows[0]["arch"]) if rows else None

    def _winner_id(self, winner: Winner) -> int | None:
        names = {"device": winner.device, "problem": winner.problem, "toolchain": winner.toolchain}
        ids = self._ids(**names, candidate=winner.candidate)
        if ids is None:
            return None
        rows = self._rows(
            """SELECT id FROM winners WHERE device_id = :device AND problem_id = :problem AND tokens = :tokens
               AND toolchain_id = :toolchain AND candidate_id = :candidate""",
            {**ids, "tokens": winner.tokens},
        )
        return int(rows[0]["id"]) if rows else None

    def _image(self, row: dict[str, Any]) -> KernelImage:
        with self._decoding():
            image = KernelImage(
                toolchain=row["toolchain"],
                symbol=row["symbol"],
                arch=row["arch"],
                ptx=unpacked(row["ptx"]).decode(),
                cubin=b"" if row["cubin"] is None else unpacked(row["cubin"]),
                arguments=tuple((each["name"], each["type"]) for each in json.loads(row["arguments"])),
                registers=row["registers"],
                spill_bytes=row["spill_bytes"],
                shared_bytes=row["shared_bytes"],
                created=row["created"],
            )
            if image.digest != row["digest"]:
                raise DatabaseError(f"kernel {image.symbol} is not what its digest says")
        return image

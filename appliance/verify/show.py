"""The rows of a check for people and for machines."""

from __future__ import annotations

import json

from appliance import console
from appliance.verify.judge import Row, label

_HEAD = ("scheme", "worker", "moved by", "layers moved", "returned", "from bf16", "verdict", "kernels")


def table(rows: list[Row], *, columns: int | None = None) -> str:
    """A line per worker, then a line per problem. columns: as of console.table."""
    problems = [f"{_name(row)}: {problem}" for row in rows for problem in row.problems]
    return "\n".join([console.table(map(_cells, rows), head=_HEAD, columns=columns), *problems])


def _name(row: Row) -> str:
    worker = f" worker {row.worker.rank}" if row.worker else ""
    return label(row.scheme, emulated=row.emulated) + worker


def _cells(row: Row) -> tuple[str, ...]:
    verdict = "FAILED" if row.problems else "live"
    scheme = label(row.scheme, emulated=row.emulated)
    if row.worker is None:
        return scheme, "-", "-", "-", "-", "-", verdict, "-"
    worker = row.worker
    return (
        scheme,
        str(worker.rank),
        _nats(row.moved),
        f"{worker.layers - len(worker.unmoved)} of {worker.layers}",
        "bit for bit" if row.returned and not worker.unreturned else "no",
        _nats(row.from_bf16),
        verdict,
        "; ".join(f"{count} x {name}" for name, count in worker.kernels),
    )


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g} nats"


def as_json(rows: list[Row]) -> str:
    return json.dumps(
        {"schema_version": 1, "live": not any(row.problems for row in rows), "workers": [*map(_plain, rows)]}
    )


def _plain(row: Row) -> dict[str, object]:
    """A flat object per worker; nats, and names of layers."""
    worker = {"rank": None, "kernels": {}, "layers": 0, "unmoved": [], "unreturned": []}
    if row.worker:
        worker |= {**row.worker.model_dump(mode="json"), "kernels": dict(row.worker.kernels)}
    return worker | {
        "scheme": str(row.scheme),
        "emulated": row.emulated,
        "moved": row.moved,
        "returned": row.returned,
        "from_bf16": row.from_bf16,
        "problems": list(row.problems),
    }

"""What people get of all rows: a table, a page of Markdown, and an archive to attach to an issue."""

from __future__ import annotations

import datetime
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance import console
from appliance.files import whole_file, write_whole
from appliance.plan.build import installed_versions
from appliance.record.attestations import fingerprint
from benchmarks.accept.outcome import LOG, Outcome, State
from benchmarks.accept.probe import Facts
from benchmarks.accept.process import KEPT, KEPT_BYTES
from benchmarks.accept.rows import row_of

COUNTED = (State.PASSED, State.FAILED, State.SKIPPED)


@dataclass(frozen=True)
class Report:
    title: str
    folder: Path
    """Folder of the rows; page and archive have its name."""
    output: Path
    """Folder where these are written."""
    facts: Facts
    """Facts of PyTorch and the GPUs."""
    host: dict[str, bytes]
    """Files for the archive, by name."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def page(self) -> Path:
        return self.output / f"{self.name}.md"

    @property
    def archive(self) -> Path:
        return self.output / f"{self.name}.tar.gz"

    def write(self, outcomes: list[Outcome], *, waiting: Sequence[str]) -> None:
        """The page and the archive, each whole. waiting: rows that did not begin. Raises OSError."""
        text = page(outcomes, title=self.title, facts=self.facts, waiting=waiting)
        write_whole(self.page, text)
        with whole_file(self.archive) as partial, tarfile.open(partial, "w:gz", compresslevel=6) as tar:
            for name, content in self._files(outcomes, text=text):
                info = tarfile.TarInfo(f"{self.name}/{name}")
                info.size, info.mtime = len(content), int(datetime.datetime.now().timestamp())
                tar.addfile(info, io.BytesIO(content))

    def _files(self, outcomes: list[Outcome], *, text: str) -> Iterator[tuple[str, bytes]]:
        """The page, every outcome, the host, and the end of every log and of what a training wrote."""
        found = {"schema_version": 1, "title": self.title, "versions": installed_versions()}
        document = {**found, "fingerprint": fingerprint(), "rows": [one.model_dump(mode="json") for one in outcomes]}
        yield f"{self.name}.md", text.encode()
        yield "rows.json", (json.dumps(document, indent=1) + "\n").encode()
        yield from self.host.items()
        for outcome in outcomes:
            folder = self.folder / outcome.row
            if (log := folder / LOG).is_file():
                yield f"{outcome.row}.log", log.read_bytes()[-KEPT_BYTES:]
            for file in sorted((folder / KEPT).rglob("*")):
                if file.is_file():
                    yield f"{outcome.row}/{file.relative_to(folder / KEPT)}", file.read_bytes()


def table(outcomes: list[Outcome], *, columns: int | None) -> str:
    rows = [
        (outcome.row, str(outcome.state), f"{outcome.seconds:.0f}", str(outcome.checks), outcome.why.partition("\n")[0])
        for outcome in outcomes
    ]
    return console.table(rows, head=("row", "state", "s", "checks", "why"), numbers=(2, 3), columns=columns)


def counted(outcomes: list[Outcome]) -> str:
    states = [outcome.state for outcome in outcomes]
    others = dict.fromkeys(state for state in states if state not in COUNTED)
    return ", ".join(f"{states.count(state)} {state}" for state in (*COUNTED, *others))


def page(outcomes: list[Outcome], *, title: str, facts: Facts, waiting: Sequence[str]) -> str:
    versions = ", ".join(f"{name} {found}" for name, found in installed_versions().items() if found)
    lines = [
        f"# Accepted on {title}" if not title.startswith("CPU") else f"# {title}",
        "",
        f"Made by `appliance accept` on {datetime.date.today().isoformat()}: {counted(outcomes)}.",
        f"Code {fingerprint()}, {versions}.",
        "",
        *(f"* {line}" for line in facts.lines),
        "",
        "| row | what | state | s | checks |",
        "| --- | --- | --- | --- | --- |",
    ]
    for outcome in outcomes:
        cells = (outcome.row, row_of(outcome.row).text, outcome.state, f"{outcome.seconds:.0f}", outcome.checks)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", f"Not run: {', '.join(waiting)}."] if waiting else []
    for outcome in outcomes:
        if outcome.why or outcome.parts or outcome.figures or outcome.stand_ins:
            lines += ["", f"## {outcome.row}", ""]
            lines += [f"{outcome.state}: {outcome.why}", ""] if outcome.why else []
            passed = [part.name for part in outcome.parts if part.state is State.PASSED]
            lines += [f"* passed: {'; '.join(passed)}"] if passed else []
            lines += [f"* {part.text}" for part in outcome.parts if part.state is not State.PASSED]
            lines += [f"* {figure.text}" for figure in outcome.figures]
            lines += [f"* stand-in for {each}" for each in outcome.stand_ins]
    return "\n".join(lines) + "\n"


def say_end(outcomes: list[Outcome], *, report: Report, rehearsal: bool) -> None:
    console.show(table(outcomes, columns=console.columns()))
    console.show(f"{counted(outcomes)}{' (CPU rehearsal)' if rehearsal else ''}: {report.page}")
    for outcome in outcomes:
        if outcome.state in (State.FAILED, State.INTERRUPTED):
            console.say(f"{outcome.row}: its log is {report.folder / outcome.row / LOG}")
    console.say(f"to attach to an issue: {report.archive}")

"""What a row has to work with: a device, its own folder, and where its figures and checks are written down at once.

A row is a function of a Ground. It returns where all holds; it raises RowFailed, or whatever goes wrong in it.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from appliance.errors import ApplianceError
from appliance.files import write_whole
from benchmarks.accept.outcome import OUTCOME, Figure, Outcome, Part, State, read_outcome

if TYPE_CHECKING:
    import torch

Size = TypeVar("Size")
ENGINE_AND_TRAINER = ("vllm", "verl", "ray")  # what a bundle may leave out


class RowFailed(Exception):
    """Something is not as it must be; the message says what."""


class RowSkipped(Exception):
    """This host cannot run the row; the message says what it lacks."""


class DeviceLost(Exception):
    """After some errors of CUDA (an illegal address) nothing more runs on it in this process."""


def lack_of(error: Exception) -> str:
    """What the row needs and this host has not, or an empty text where it is another error."""
    if isinstance(error, RowSkipped):
        return str(error)
    name = error.name if isinstance(error, ModuleNotFoundError) else ""  # of a part that is missing: `vllm.something`
    return f"needs {name}, which is not installed" if name in ENGINE_AND_TRAINER else ""


def failure_text(error: Exception) -> str:
    if isinstance(error, ApplianceError):
        return f"{type(error).__name__}: {error.message}"
    text = str(error).strip() or "no message"
    return text if isinstance(error, RowFailed) else f"{type(error).__name__}: {text}"


@dataclass
class Ground:
    row: str
    folder: Path
    """Folder of this row alone."""
    rehearsal: bool
    """Whether it runs on a CPU, with stand-ins."""
    figures: list[Figure] = field(default_factory=list)
    stand_ins: list[str] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    checks: int = 0
    started: float = field(default_factory=time.monotonic)

    def take_over_outcome(self) -> None:
        """Take over the outcome of another process of the row, where one was lost."""
        if before := read_outcome(self.folder):
            self.figures, self.stand_ins = list(before.figures), list(before.stand_ins)
            self.parts, self.checks = {part.name: part for part in before.parts}, before.checks

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu" if self.rehearsal else "cuda")

    def size(self, real: Size, *, tiny: Size) -> Size:
        """Return the size of the work: as it is on a GPU, or as a rehearsal has it."""
        return tiny if self.rehearsal else real

    def free_bytes(self) -> int:
        """Return the free bytes of the GPU's memory; in a rehearsal, of this host's."""
        if self.rehearsal:
            import psutil

            return int(psutil.virtual_memory().available)
        import torch

        return int(torch.cuda.mem_get_info()[0])

    def figure(self, name: str, value: float, unit: str = "") -> None:
        """Written at once: a fault later costs none of them."""
        self.figures.append(Figure(name=name, value=float(value), unit=unit))
        self.write(State.RUNNING)

    def stand_in(self, part: str) -> None:
        """Note what a CPU lacks. part: the kernel, and what replaces it."""
        if part not in self.stand_ins:
            self.stand_ins.append(part)

    def hold(self, holds: object, reason: str) -> None:
        """Count one check. Raises RowFailed with `reason` where it does not hold."""
        self.checks += 1
        if not holds:
            raise RowFailed(reason)

    def run_parts(self, names: Iterable[str], run: Callable[[str], None]) -> None:
        """Run the parts of a row that have not run yet: none stops the others, and each verdict is written at once.

        Raises RowFailed with those that failed, RowSkipped where this host runs none, DeviceLost where the rest needs
        a new process.
        """
        self.parts = {name: Part(name=name) for name in names} | self.parts
        for name in [part.name for part in self.parts.values() if part.state is State.WAITING]:
            self._part(Part(name=name, state=State.RUNNING))
            started, state, why = time.monotonic(), State.PASSED, ""
            try:
                run(name)
            except Exception as error:  # the others have something to say as well
                traceback.print_exc()
                lack = lack_of(error)
                state, why = (State.SKIPPED, lack) if lack else (State.FAILED, failure_text(error))
            self._part(Part(name=name, state=state, why=why, seconds=round(time.monotonic() - started, 1)))
            if state is State.FAILED and not self.has_device():
                raise DeviceLost(name)
        if why := self._outcome(State.RUNNING).why_by_parts:
            raise RowFailed(why)
        if all(part.state is State.SKIPPED for part in self.parts.values()):
            raise RowSkipped(next(iter(self.parts.values())).why)

    def has_device(self) -> bool:
        """Whether CUDA still answers in this process."""
        if self.rehearsal or "torch" not in sys.modules:
            return True
        import torch

        try:
            torch.cuda.synchronize()
            return float(torch.ones(2, device=self.device).sum()) == 2
        except RuntimeError:
            return False

    def _part(self, part: Part) -> None:
        self.parts[part.name] = part
        self.write(State.RUNNING)

    def write(self, state: State, *, why: str = "") -> None:
        write_whole(self.folder / OUTCOME, self._outcome(state, why=why).model_dump_json(indent=1) + "\n")

    def _outcome(self, state: State, *, why: str = "") -> Outcome:
        return Outcome(
            row=self.row,
            state=state,
            why=why,
            seconds=round(time.monotonic() - self.started, 1),
            checks=self.checks,
            parts=tuple(self.parts.values()),
            figures=tuple(self.figures),
            stand_ins=tuple(self.stand_ins),
        )

"""Why a rollout engine does not start, in vLLM's own words.

vLLM runs an engine in separate processes. What one of them raises while it starts goes to a log; whoever made the
engine gets `Engine core initialization failed. See root cause above`. So the exception becomes an event of the run, or
of the command, in the process where it was raised, and the first event is what the user reads.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from appliance.errors import ApplianceError, EngineNotStarted, EngineRefused, error_class
from appliance.record.events import append_failure, events_folder, first_failure

LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")  # of the core, and of its workers
FAILED_TO_START = "failed to start"  # in what both log with the exception
_ELSEWHERE = ("See root cause above", "See stack trace for root cause")  # in an error that only says that there is one
_REFUSALS = (AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, TypeError, ValueError)
_LONGEST = 600  # characters
_HINT = "these are vLLM's own words; the log says where the error was raised"


class _StartFailures(logging.Handler):
    """Makes an event of the exception that vLLM logs when one of its processes cannot start."""

    def emit(self, record: logging.LogRecord) -> None:
        error, folder = (record.exc_info or (None, None))[1], events_folder()
        if folder is None or error is None or FAILED_TO_START not in record.getMessage():
            return
        # An error of ours that `report_failures` saw is an event already; a second one does no harm: the first counts.
        if isinstance(error, ApplianceError):
            append_failure(folder, error)
        elif not is_elsewhere(error):
            append_failure(folder, not_started(error))


def report_start_failures() -> None:
    """Make events of failed starts from now on, in this process. Called in every process of vLLM, several times."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _StartFailures) for handler in logger.handlers):
            logger.addHandler(_StartFailures(logging.ERROR))


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Raise, around what makes an engine, the first error that one of its processes met: an error of ours as it was
    there, any other as EngineNotStarted."""
    began_s = time.time()
    try:
        yield
    except ApplianceError:
        raise
    except Exception as error:  # the boundary of vLLM: in whatever words, the engine did not start
        folder = events_folder()
        first = first_failure(folder, since_s=began_s) if folder is not None else None
        kind = error_class(first.error) if first is not None else None
        if first is not None and kind is not None:
            raise kind.retold(first.what, hint=first.hint) from error
        raise not_started(error) from error


def not_started(error: BaseException) -> EngineNotStarted:
    """Make the error of ours. What vLLM refuses it refuses again, except for want of memory, which may be free the next
    time."""
    refuses = isinstance(error, _REFUSALS) and "memory" not in str(error).lower()
    kind = EngineRefused if refuses else EngineNotStarted
    return kind(f"the rollout engine does not start: {in_words(error)}", hint=_HINT)


def is_elsewhere(error: BaseException) -> bool:
    """Tell whether the error only says that another process has the reason."""
    return any(text in str(error) for text in _ELSEWHERE)


def in_words(error: BaseException) -> str:
    """Describe an error by its type and message, on one line. An error of pydantic's, which vLLM's configuration
    raises, is described by what its rules say, without the input and the address that pydantic adds."""
    message = str(error)
    if callable(problems := getattr(error, "errors", None)) and type(error).__module__.startswith("pydantic"):
        message = "; ".join(str(problem["msg"]) for problem in problems())
    text = f"{type(error).__name__}: {' '.join(message.split()) or 'no message'}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."

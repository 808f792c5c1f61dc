"""The phases of a run, by their names in its events, in `run.json` and in reports."""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    """Phase of a run. It lasts until the next one begins."""

    STARTING = "starting"
    """No process of the run has reported a phase yet."""
    PREPARE = "prepare"
    """The cache gets the model and the data that it lacks."""
    SCALE = "scale"
    """The model is scaled for UAQ."""
    PROFILE = "profile"
    """The model is profiled."""
    IMPORT = "import"
    """The driver imports what its workers are forked with."""
    START = "start"
    """Ray starts."""
    LOAD_MODEL = "load-model"
    """The trainer's model is loaded, and the rollout engines start."""
    ATTEST = "attest"
    """Every process attests what it runs."""
    SYNC = "sync"
    """Weights go to the rollout engines."""
    ROLLOUT = "rollout"
    LOG_PROBS = "log-probs"
    """The trainer computes log-probs of the rollouts."""
    UPDATE = "update"
    """The policy is updated."""
    VALIDATE = "validate"
    RESTART_ENGINES = "restart-engines"
    """New rollout engines replace the present ones."""
    SAVE = "save"
    """A checkpoint is written."""
    EXPORT = "export"
    """`model/` is written."""
    DONE = "done"


OF_A_STEP = (Phase.ROLLOUT, Phase.LOG_PROBS, Phase.UPDATE, Phase.SYNC)
"""Phases that every step goes through, in their order."""
AT_AN_ENGINE = frozenset({Phase.ROLLOUT, Phase.VALIDATE, Phase.RESTART_ENGINES})
"""Phases in which the trainer waits for a rollout engine."""

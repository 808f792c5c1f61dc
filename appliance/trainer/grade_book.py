"""The grades of a run's samples, until their step or validation has read them.

Rollouts write grades on their own thread while the trainer reads those of the step before, so that one lock guards the
whole book.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from appliance.tasks.grading import Graded, set_metrics
from appliance.trainer.rewards import known_parts, neutral_parts, reward_means

_Parts = dict[str, float]  # reward by name, of one sample


class GradeBook:
    """Grades of training by prompt, grades of the newest validation by set.

    Keys of samples are the TransferQueue's, `uid_session_index`.
    """

    def __init__(self, *, rewards: Sequence[str] = (), val_sets: Sequence[str] = ()) -> None:
        """rewards: names of the rewards, of a task of the user's own.  val_sets: names of the validation sets where
        there are several; grades of a single one are not needed again."""
        self._rewards = rewards
        self._val_sets = val_sets
        self._lock = threading.Lock()
        self._by_prompt: dict[str, tuple[int, Sequence[Graded]]] = {}
        """Step and samples of each prompt, by its uid."""
        self._ungraded: dict[str, int] = {}
        """Steps of the training samples that could not be graded, by their keys without the last part."""
        self._by_set: dict[str, list[Sequence[Graded]]] = {}
        """Samples of each problem, in the order of the problems, by validation set."""
        self._prompt_rewards: list[float] = []
        self._num_validated = 0

    # the thread of the rollouts writes

    def add(self, uid: str, graded: Sequence[Graded], *, step: int, validate: bool) -> None:
        """Write down the grades of a prompt's samples."""
        with self._lock:
            if self._val_sets if validate else self._rewards:
                self._by_prompt[uid] = step, graded
            if not validate:
                faulty = (session for session, sample in enumerate(graded) if sample.fault)
                self._ungraded |= {f"{uid}_{session}": step for session in faulty}

    def add_prompt_reward(self, mean: float) -> None:
        """Write down the mean reward of a prompt that a filter chooses among."""
        with self._lock:
            self._prompt_rewards.append(mean)

    def begin_validation(self) -> None:
        """Forget the validation before."""
        with self._lock:
            self._by_set = {name: [] for name in self._val_sets}

    def count_validated(self, uids: Sequence[str], *, val_set: str = "") -> None:
        """Count problems of a validation, in their order. val_set: the set that they are of, empty for a single one."""
        with self._lock:
            if val_set:
                self._by_set[val_set] += [self._by_prompt.pop(uid)[1] for uid in uids]
            if val_set == (self._val_sets[0] if self._val_sets else ""):
                self._num_validated += len(uids)

    # the trainer reads

    @property
    def num_validated(self) -> int:
        """Validation problems that were scored so far, of several sets those of the first."""
        return self._num_validated

    def set_metrics(self) -> dict[str, float]:
        """Return the metrics of the newest validation, the mean of the first set first. Empty without several sets."""
        first_reward = self._rewards[0] if self._rewards else ""
        with self._lock:
            by_set = {name: list(problems) for name, problems in self._by_set.items()}
        metrics = (set_metrics(name, problems, first_reward=first_reward) for name, problems in by_set.items())
        return {name: value for set_values in metrics for name, value in set_values.items()}

    def reward_means(self, keys: Iterable[str], *, step: int) -> dict[str, float | None]:
        """Return the mean of each reward over a step's samples, and forget the steps before.

        keys: of the samples that the step trains on: what a filter generated beside them does not count.
        """
        parts = [sample for sample in self._parts(keys, parts_of=neutral_parts) if sample is not None]
        with self._lock:
            self._by_prompt = {uid: entry for uid, entry in self._by_prompt.items() if entry[0] >= step}
        return reward_means(parts, names=self._rewards)

    def reward_parts(self, keys: Iterable[str]) -> dict[str, list[float]]:
        """Return by reward what each sample got: 0 where the reward does not apply, NaN for a sample without a grade (a
        fault, or a row that only pads the batch). keys: as `reward_means`."""
        parts = list(self._parts(keys, parts_of=known_parts))
        return {
            name: [math.nan if sample is None else sample.get(name, 0.0) for sample in parts] for name in self._rewards
        }

    def take_ungraded(self, keys: Iterable[str], *, step: int) -> set[int]:
        """Return the places of a step's samples that have no grade, and forget the steps before. keys: as
        `reward_means`."""
        with self._lock:
            places = {place for place, key in enumerate(keys) if key.rpartition("_")[0] in self._ungraded}
            self._ungraded = {key: sampled_at for key, sampled_at in self._ungraded.items() if sampled_at >= step}
        return places

    def take_prompt_rewards(self) -> list[float]:
        """Return the mean reward of each prompt that a filter was given since the last call."""
        with self._lock:
            rewards, self._prompt_rewards = self._prompt_rewards, []
        return rewards

    def _parts(
        self, keys: Iterable[str], *, parts_of: Callable[[Sequence[Graded]], Sequence[_Parts | None]]
    ) -> Iterator[_Parts | None]:
        """Yield a sample's rewards by their names, None for a row that only pads the batch. parts_of: gives those of a
        prompt's samples."""
        with self._lock:
            by_prompt = dict(self._by_prompt)
        parts = {uid: parts_of(samples) for uid, (_, samples) in by_prompt.items()}
        for uid, session, _ in (key.rsplit("_", 2) for key in keys):
            yield next(iter(parts[uid][int(session) : int(session) + 1]), None) if uid in parts else None

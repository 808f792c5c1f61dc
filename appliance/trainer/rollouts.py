"""Rollouts: prompts go to the engines, scored samples go into the TransferQueue, and the trainer is told.

This is an agent loop manager of our own (verl's only demand: `generate_sequences`, results in the TransferQueue). It
lives in the trainer's process, on a thread with an event loop: the trainer only waits while rollouts are made. One call
per engine brings the prompts there and their samples back, one put brings up to PROMPTS_PER_PUT prompts.

The same run gives the same samples again: a seed per sample, each engine's prompts all at once and in their order, and
results in that order too, whoever is finished first.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import math
import statistics
import threading
from asyncio import FIRST_EXCEPTION
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
import transfer_queue
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from tensordict import TensorDict, is_non_tensor
from torch import Tensor
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from appliance.errors import EngineError, TrainingError, last_line
from appliance.record.liveness import Heartbeat
from appliance.record.samples import Group, SampleLog
from appliance.tasks.grading import Graded, Shaping, set_metrics
from appliance.tasks.response_text import ResponseReader
from appliance.tasks.task import Response
from appliance.trainer.rewards import RewardPool, known_parts, neutral, neutral_parts, reward_means
from appliance.trainer.support import support_fields
from appliance.trainer.top_words import top_fields
from appliance.trainer.turns import Drawn, Opening, Tally, Trajectory, TrajectoryGroup, Turns, one_turn

PROMPTS_PER_PUT = 64
PUT_EVERY_S = 1.0
LOOK_AGAIN_S = 1.0  # how long a wait for rollouts lasts at most before the buffer is looked at again
_HINT = "the log has the whole story"
_NOT_PUT = ("extra_info", "turns", "response_text")  # rewards and SampleLog read them, verl does not


@dataclass(frozen=True)
class Sampling:
    """How one kind of rollout is sampled. temperature 0 is greedy."""

    temperature: float
    top_p: float
    num_samples: int
    top_k: int = -1
    """Most likely words that are drawn from; -1: all."""
    top_log_probs: int = 0
    """Most likely words at each token whose log-probs are asked for."""


@dataclass(frozen=True)
class _Prompt:
    """A row of the data set on its way to an engine."""

    row: dict[str, Any]
    token_ids: list[int]
    seed: int | None
    group: asyncio.Future[Any]
    """Where its samples will be."""


class PromptSeeds:
    """One seed per sample, the same in every attempt: a hash of the run's seed, the step, the prompt and how many
    prompts of the step were the same before it, plus the number of the sample, which vLLM adds.

    verl's own switch gives all samples one seed, so that the samples of a prompt would all be equal.
    """

    def __init__(self, seed: int, *, val_set: str = "") -> None:
        """val_set: of several validations the one whose samples these are: each has seeds of its own."""
        self._seed = seed
        self._val_set = val_set
        self._step = -1
        self._seen: Counter[tuple[int, ...]] = Counter()

    def next(self, token_ids: Sequence[int], *, step: int) -> int:
        """Prompts of one step come in their order."""
        if step != self._step:
            self._step, self._seen = step, Counter()
        prompt = tuple(token_ids)
        seed = prompt_seed(prompt, run_seed=self._seed, step=step, occurrence=self._seen[prompt], val_set=self._val_set)
        self._seen[prompt] += 1
        return seed


def prompt_seed(token_ids: Sequence[int], *, run_seed: int, step: int, occurrence: int, val_set: str = "") -> int:
    """0 <= seed < 2^62: vLLM keeps seeds as signed 64-bit numbers, and a prompt's samples count up from this one."""
    before = f"{val_set} " if val_set else ""
    text = f"{before}{run_seed} {step} {occurrence}:{' '.join(map(str, token_ids))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2


class Rollouts:
    """validated: how many validation problems were generated and scored so far, of several sets those of the first.

    generated_prompts, generated_tokens: of training, since the start, filtered ones included.
    servers: one handle per rollout replica.  reader: makes text of responses.  pool: grades them.  shaping: from a
    grade to the reward that trains; validation reads grades.  in_order: results are put in the order of the prompts, so
    that a run can be repeated; else as they come, for a filter that looks at them and asks for others.  seed: the
    run's.  val_sets: where there are several validations, how each is sampled, in place of `validation`.  rewards:
    names, of a task of the user's own.  turns: of a task with tools.  clock: what the chat template is given besides,
    see terms/clock.py."""

    def __init__(
        self,
        servers: list[ActorHandle],
        *,
        tokenizer: Any,
        reader: ResponseReader,
        pool: RewardPool,
        samples: SampleLog,
        shaping: Shaping,
        training: Sampling,
        validation: Sampling,
        max_prompt_tokens: int,
        seed: int,
        in_order: bool,
        val_sets: Mapping[str, Sampling] | None = None,
        rewards: Sequence[str] = (),
        turns: Turns | None = None,
        clock: Mapping[str, Callable[[str], str]] | None = None,
    ) -> None:
        self._turns = turns
        self._clock = clock or {}
        self._tally = Tally()
        self._rewarded: list[float] = []
        self.serve_by(servers)
        self._seed = seed
        self._seeds = PromptSeeds(seed)
        self._tokenizer = tokenizer
        self._reader = reader
        self.pool = pool
        self.samples = samples
        self._shaping = shaping
        self._in_order = in_order
        self._training = training
        self._validation = validation
        self._max_prompt_tokens = max_prompt_tokens
        self._val_sets = val_sets or {}
        self._validated: dict[str, list[list[Graded]]] = {}  # by set, of each problem its samples
        self._rewards = rewards
        self._graded: dict[str, tuple[int, list[Graded]]] = {}  # by uid: the step, and the samples
        self._ungraded: dict[str, int] = {}  # training samples without a grade, by key less its last part: the step
        self.validated = 0
        self._validates = False  # the newest that was asked for is a validation
        self._heartbeat = Heartbeat()
        self.generated_prompts = 0
        self.generated_tokens = 0
        self._progress = threading.Event()
        self._futures: list[Future[None]] = []
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True).start()

    def generate_sequences(self, prompts: TensorDict) -> None:
        """verl's entry: returns at once, the results arrive in the TransferQueue."""
        validate = "validate" in prompts and bool(prompts["validate"])
        prompts.pop("validate", None)
        future = asyncio.run_coroutine_threadsafe(self._generate(_rows(prompts), validate=validate), self._loop)
        self._futures = [each for each in self._futures if not each.done()] + [future]
        future.add_done_callback(self._note_failure)

    @property
    def is_busy(self) -> bool:
        return any(not future.done() for future in self._futures)

    def take_turns(self) -> dict[str, float]:
        """Of what was generated for training since they were taken last; nothing of a run without tools."""
        found, self._tally = self._tally, Tally()
        return found.metrics() if self._turns is not None else {}

    def take_rewards(self) -> list[float]:
        """The mean reward of each prompt that a filter was given since they were taken last."""
        found, self._rewarded = self._rewarded, []
        return found

    def finish(self) -> None:
        """Raises as `wait`."""
        while self.is_busy:
            self.wait(LOOK_AGAIN_S)

    def serve_by(self, servers: list[ActorHandle]) -> None:
        """To be called while nothing is generated."""
        self._servers = servers
        self._unanswered = [0] * len(servers)  # prompts that each has

    def abandon(self) -> None:
        """Leave what is being generated, for a run that stops: nobody waits for it any more."""
        for future in self._futures:
            future.cancel()
        for server in self._servers:
            server.abort_all_requests.remote()

    def wait(self, timeout_s: float) -> None:
        """Until new results were put, or the time is over. Raises EngineError when an engine failed and TrainingError
        when anything else did."""
        self._progress.wait(timeout_s)
        self._progress.clear()
        if (error := self._failure) is None:
            return
        if isinstance(error, EngineError):
            raise error
        kind = EngineError if isinstance(error, RayError) else TrainingError
        raise kind(f"rollouts failed: {type(error).__name__}: {last_line(error)}", hint=_HINT) from error

    def _note_failure(self, future: Future[None]) -> None:
        if not future.cancelled():
            self._failure = self._failure or future.exception()
        self._progress.set()

    def by_set(self) -> dict[str, float]:
        """What the newest of several validations says, the mean of the first set first. Empty where there is one."""
        first_reward = self._rewards[0] if self._rewards else ""
        found = (set_metrics(name, graded, first_reward=first_reward) for name, graded in self._validated.items())
        return {name: value for metrics in found for name, value in metrics.items()}

    def reward_means(self, keys: Iterable[str], *, step: int) -> dict[str, float | None]:
        """Of each reward of the user's own task its mean over a step's samples. keys: the TransferQueue's, of what the
        step trains on: what a filter generated beside it does not count."""
        parts = [each for each in self._parts(keys, of=neutral_parts) if each is not None]
        for uid, (of, _) in self._graded.copy().items():
            if of < step:
                del self._graded[uid]
        return reward_means(parts, names=self._rewards)

    def reward_parts(self, keys: Iterable[str]) -> dict[str, list[float]]:
        """By reward of the user's own task what each sample got, 0 where it does not apply; NaN of one without a grade:
        a fault, or a row that only pads the batch. keys: as `reward_means`."""
        parts = list(self._parts(keys, of=known_parts))
        return {name: [math.nan if each is None else each.get(name, 0.0) for each in parts] for name in self._rewards}

    def take_ungraded(self, keys: Iterable[str], *, step: int) -> set[int]:
        """The places of a step's samples that have no grade. keys: as `reward_means`."""
        found = {place for place, key in enumerate(keys) if key.rpartition("_")[0] in self._ungraded}
        for name, of in self._ungraded.copy().items():  # the loop's thread may add some for the next step
            if of < step:
                del self._ungraded[name]
        return found

    def _parts(
        self, keys: Iterable[str], *, of: Callable[[Sequence[Graded]], Sequence[dict[str, float] | None]]
    ) -> Iterator[dict[str, float] | None]:
        """A sample's rewards by their names, None of a row that only pads the batch. of: the samples of a prompt."""
        graded = self._graded.copy()  # the loop's thread may add some for the next step
        known = {uid: of(samples) for uid, (_, samples) in graded.items()}
        for uid, session, _ in (key.rsplit("_", 2) for key in keys):
            yield next(iter(known[uid][int(session) : int(session) + 1]), None) if uid in known else None

    async def _generate(self, rows: list[dict[str, Any]], *, validate: bool) -> None:
        has_validated, self._validates = self._validates, validate
        if has_validated and not validate:  # a resumed run does not validate first: nothing is cached there either
            await asyncio.gather(*(server.clear_kv_cache.remote() for server in self._servers))
        if not (validate and self._val_sets):
            sampling = self._validation if validate else self._training
            await self._sampled(rows, sampling=sampling, seeds=self._seeds, validate=validate)
            return
        self._validated = {name: [] for name in self._val_sets}
        for name, sampling in self._val_sets.items():
            share = [row for row in rows if row["extra_info"]["split"] == name]
            seeds = PromptSeeds(self._seed, val_set=name)
            await self._sampled(share, sampling=sampling, seeds=seeds, validate=True, val_set=name)

    async def _sampled(
        self, rows: list[dict[str, Any]], *, sampling: Sampling, seeds: PromptSeeds, validate: bool, val_set: str = ""
    ) -> None:
        partition = "val" if validate else "train"
        shaping = Shaping() if validate else self._shaping
        prompts = [self._prompt(row, sampling=sampling, seeds=seeds) for row in rows]
        shares = {number: share for number, share in enumerate(self._shares(prompts)) if share}
        engines = [self._stream(number, share, sampling=sampling) for number, share in shares.items()]
        grades = [asyncio.create_task(self._grades(prompt)) for prompt in prompts]
        least = asyncio.create_task(_least(grades))
        tasks = [
            asyncio.create_task(self._scored(prompt, graded, least=least, shaping=shaping, validate=validate))
            for prompt, graded in zip(prompts, grades, strict=True)
        ]
        streams = [asyncio.create_task(engine) for engine in engines]
        for share, stream in zip(shares.values(), streams, strict=True):
            stream.add_done_callback(functools.partial(_leave_none_waiting, share))
        try:
            async for ready in _in_order(tasks) if validate or self._in_order else _as_they_come(tasks):
                if validate:  # counted before: who sees the results may ask how many there are
                    ready = self._counted(ready, val_set=val_set)
                else:
                    self.generated_prompts += len(ready)
                    masks = (each["response_mask"] for _, samples in ready for each in samples)
                    self.generated_tokens += sum(int(mask.sum()) for mask in masks)
                self.samples.note(ready, validate=validate)
                await _put(ready, partition=partition)
                self._progress.set()
        finally:
            for task in (*tasks, least, *grades, *streams):
                task.cancel()

    def _counted(self, ready: list[Group], *, val_set: str) -> list[Group]:
        """Of each problem the first sample: verl's own numbers of several validations are not used."""
        if val_set:
            self._validated[val_set] += [self._graded.pop(uid)[1] for uid, _ in ready]
        if val_set in ("", next(iter(self._val_sets), "")):
            self.validated += len(ready)
        return [(uid, samples[:1]) for uid, samples in ready]

    def _prompt(self, row: dict[str, Any], *, sampling: Sampling, seeds: PromptSeeds) -> _Prompt:
        messages = list(row["raw_prompt"])
        if self._turns is not None:
            ids = self._turns.prompt_ids(messages)
        else:
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False, **self._clock
            )
        token_ids = list(ids)[-self._max_prompt_tokens :]
        seed = seeds.next(token_ids, step=int(row["global_steps"])) if sampling.temperature else None
        return _Prompt(row, token_ids, seed, self._loop.create_future())

    def _shares(self, prompts: list[_Prompt]) -> list[list[_Prompt]]:
        """Each prompt to the engine with the fewest unanswered ones: dynamic sampling asks for a few at a time."""
        unanswered, shares = self._unanswered, [list[_Prompt]() for _ in self._servers]

        def answered(number: int, _: object) -> None:
            unanswered[number] -= 1

        for prompt in prompts:
            number = min(range(len(shares)), key=unanswered.__getitem__)
            unanswered[number] += 1
            prompt.group.add_done_callback(functools.partial(answered, number))
            shares[number].append(prompt)
        return shares

    async def _stream(self, number: int, share: list[_Prompt], *, sampling: Sampling) -> None:
        """A share of the prompts to one of the engines, and their groups back as they come."""
        ask = functools.partial(self._ask, number, sampling=sampling)
        if self._turns is None:
            ids, seeds = [prompt.token_ids for prompt in share], [prompt.seed for prompt in share]
            async for place, group in ask(ids, seeds=seeds, num_samples=sampling.num_samples):
                trajectories = [one_turn(sample, text=self._text(sample)) for sample in group.samples]
                share[place].group.set_result(TrajectoryGroup(trajectories, group.weights_version))
        else:
            openings = [Opening(list(each.row["raw_prompt"]), each.token_ids, each.seed) for each in share]
            async for place, played in self._turns.play(openings, ask=ask, num_samples=sampling.num_samples):
                share[place].group.set_result(played)

    async def _ask(
        self,
        number: int,
        prompts: list[list[int]],
        *,
        seeds: list[int | None],
        num_samples: int,
        sampling: Sampling,
        already: list[int] | None = None,
    ) -> AsyncIterator[tuple[int, Any]]:
        """`generate_groups` of an engine. Raises EngineError when it fails, or leaves prompts out."""
        answers = (
            self._servers[number]
            .generate_groups.options(num_returns="streaming")
            .remote(
                prompts,
                seeds=seeds,
                sampling={
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k,
                    "logprobs": sampling.top_log_probs,
                },
                num_samples=num_samples,
                already=already,
            )
        )
        answered = 0
        try:
            async for answer in answers:
                yield await answer
                answered += 1
                self._heartbeat.beat()
        except RayError as error:
            raise _named(error, engine=number) from error
        if answered < len(prompts):
            raise EngineError(f"rollout engine {number} answered {answered} of {len(prompts)} prompts", hint=_HINT)

    def _text(self, sample: Drawn) -> str:
        return self._reader.text(sample.token_ids, finished=sample.finished)

    async def _grades(self, prompt: _Prompt) -> list[Graded]:
        group = await prompt.group
        begun = self._reader.begun
        return await asyncio.gather(
            *(self.pool.grade(_response(sample, prompt.row, begun=begun)) for sample in group.samples)
        )

    async def _scored(
        self,
        prompt: _Prompt,
        grades: asyncio.Task[list[Graded]],
        *,
        least: asyncio.Task[float],
        shaping: Shaping,
        validate: bool,
    ) -> Group:
        """(uid, one field dictionary per sample). least: what a fault has in a validation."""
        graded, group, row = await grades, await prompt.group, prompt.row
        if validate:
            graded = [replace(each, accuracy=await least) if each.fault else each for each in graded]
        if self._val_sets if validate else self._rewards:
            self._graded[row["uid"]] = int(row["global_steps"]), graded
        if not validate:
            self._tally.extend(group.samples)
            faulty = (session for session, each in enumerate(graded) if each.fault)
            self._ungraded |= {f"{row['uid']}_{session}": int(row["global_steps"]) for session in faulty}
        is_known = [validate or each.fault is None for each in graded]
        accuracies, rewards = _shaped(graded, group=group, shaping=shaping, known=is_known)
        if not (validate or self._in_order):  # a filter chooses among them
            self._rewarded.append(statistics.fmean(rewards))
        return row["uid"], [
            _fields(prompt, group=group, session=session, accuracy=accuracy, reward=reward, trains=not validate)
            for session, (accuracy, reward) in enumerate(zip(accuracies, rewards, strict=True))
        ]


async def _least(grades: list[asyncio.Task[list[Graded]]]) -> float:
    """0, or the least of all samples where that is below 0: known when all are graded."""
    return min((0.0, *(each.accuracy for graded in await asyncio.gather(*grades) for each in graded)))


def _response(trajectory: Trajectory, row: dict[str, Any], *, begun: str) -> Response:
    truth, as_given = row["reward_model"]["ground_truth"], row["extra_info"].get("row") or ""
    before = tuple((each["role"], each["content"]) for each in row["raw_prompt"]) if trajectory.said else ()
    ids = tuple(trajectory.last_turn)
    messages = (*before, *trajectory.said)
    return Response(trajectory.text, truth, as_given, token_ids=ids, messages=messages, begun=begun)


def _named(error: RayError, *, engine: int) -> EngineError:
    """What became of an engine, in the words of engines.py: whoever sees it first tells it."""
    if isinstance(error, RayActorError):
        problem = "died: its server's process is gone"
    elif "EngineDeadError" in type(error).__name__:  # Ray names the cause so
        problem = "died: its core process is gone"
    else:
        problem = f"failed: {type(error).__name__}: {last_line(error)}"
    return EngineError(f"rollout engine {engine} {problem}", hint=_HINT)


def _leave_none_waiting(prompts: list[_Prompt], stream: asyncio.Task[None]) -> None:
    """However an engine's answers ended: who waits for one that did not come hears why."""
    waiting = [prompt for prompt in prompts if not prompt.group.done()]
    if stream.cancelled():
        for prompt in waiting:
            prompt.group.cancel()
        return
    if waiting and (error := stream.exception()):
        for prompt in waiting:
            prompt.group.set_exception(error)


def _shaped(
    graded: Sequence[Graded], *, group: TrajectoryGroup, shaping: Shaping, known: Sequence[bool]
) -> tuple[list[float], list[float]]:
    """(accuracies, rewards) of a prompt's samples. One that is not known has the others' mean of both, and no penalty
    for its own length; where none is, each is as a wrong one."""
    accuracies = [shaping.comparable(each) for each in neutral((each.accuracy for each in graded), known=known)]
    lengths = (each.generated for each in group.samples)
    shaped = (shaping.reward(each, num_tokens=of) for each, of in zip(accuracies, lengths, strict=True))
    rewards = neutral(shaped, known=known) if any(known) else [shaping.wrong] * len(accuracies)
    return accuracies, [shaping.comparable(each) for each in rewards]


def _fields(
    prompt: _Prompt, *, group: TrajectoryGroup, session: int, accuracy: float, reward: float, trains: bool
) -> dict[str, Any]:
    """What verl's trainer reads of one sample (verl/trainer/ppo/v1/agent_loop_tq.py). `acc` is what it validates by,
    and what DAPO's filter compares (plan/verl_args.py, FILTER_METRIC). trains: log-probs of it will be computed."""
    sample, prompt_ids = group.samples[session], prompt.token_ids
    response_mask = _ints(sample.mask)
    rewards = torch.zeros(len(sample.token_ids), dtype=torch.float32)
    rewards[-1] = reward  # the last token is the model's
    input_ids = _ints(prompt_ids + sample.token_ids)
    top = {} if sample.top is None else top_fields(sample.top.spread(sample.mask))
    support = support_fields(sample.support.spread(sample.mask)) if trains and sample.support is not None else {}
    return (
        prompt.row
        | top
        | support
        | {
            "session_id": session,
            "prompts": _ints(prompt_ids),
            "responses": _ints(sample.token_ids),
            "response_mask": response_mask,
            "loss_mask": response_mask,
            "rollout_log_probs": torch.tensor(sample.log_probs, dtype=torch.float32),
            "rm_scores": rewards,
            "input_ids": input_ids,
            "position_ids": torch.arange(len(input_ids)),
            "multi_modal_inputs": {},
            "num_turns": 2 * sample.turns,
            "extra_fields": {
                "min_global_steps": group.weights_version,
                "max_global_steps": group.weights_version,
                "reward_extra_info": {"acc": accuracy},
                "finished": sample.finished,
            },
            "turns": sample.said,
            "response_text": sample.text,
        }
    )


async def _in_order(tasks: list[asyncio.Task[Group]]) -> AsyncIterator[list[Group]]:
    ready: list[Group] = []
    for finished, task in enumerate(tasks, start=1):
        ready.append(await task)
        if len(ready) == PROMPTS_PER_PUT or finished == len(tasks):
            yield ready
            ready = []


async def _as_they_come(tasks: list[asyncio.Task[Group]]) -> AsyncIterator[list[Group]]:
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, timeout=PUT_EVERY_S, return_when=FIRST_EXCEPTION)
        groups = [task.result() for task in done]
        for start in range(0, len(groups), PROMPTS_PER_PUT):
            yield groups[start : start + PROMPTS_PER_PUT]


async def _put(ready: list[Group], *, partition: str) -> None:
    keys, fields, tags = [], [], []
    for uid, samples in ready:
        for sample in samples:
            versions = {name: sample["extra_fields"][name] for name in ("min_global_steps", "max_global_steps")}
            tag = {"prompt_len": len(sample["prompts"]), "response_len": len(sample["responses"])} | versions
            keys.append(f"{uid}_{sample['session_id']}_0")
            fields.append({name: value for name, value in sample.items() if name not in _NOT_PUT})
            tags.append(
                tag | {"status": "success", "seq_len": len(sample["input_ids"]), "global_steps": sample["global_steps"]}
            )
    put = functools.partial(transfer_queue.async_kv_batch_put, partition_id=partition)
    await put(keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags)
    await put(keys=[uid for uid, _ in ready], tags=[{"status": "finished"} for _ in ready])


def _ints(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def _rows(batch: TensorDict) -> list[dict[str, Any]]:
    """A batch of verl's data set, row by row."""
    columns = {key: value.tolist() if is_non_tensor(value) else value for key, value in batch.items()}
    return [{key: column[index] for key, column in columns.items()} for index in range(len(batch))]

"""Rollouts: prompts go to the engines, graded samples go into the TransferQueue, and the waiting trainer is woken.

This is an agent loop manager of our own (verl's only demand: `generate_sequences`, results in the TransferQueue). It
lives in the trainer's process, on a thread with an event loop: the trainer only waits while rollouts are made. One call
per engine brings the prompts there and their samples back, one put brings up to PROMPTS_PER_PUT prompts.

The same run gives the same samples again: a seed per sample, each engine's prompts all at once and in their order, and
results in that order too, whichever engine is finished first.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import threading
from asyncio import FIRST_EXCEPTION
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
import transfer_queue
from ray.actor import ActorHandle
from ray.exceptions import RayError
from tensordict import TensorDict, is_non_tensor
from torch import Tensor
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from appliance.errors import EngineError, TrainingError, last_line
from appliance.record.samples import Group, SampleLog
from appliance.tasks.grading import Graded, Shaping
from appliance.tasks.response_text import ResponseReader
from appliance.tasks.task import Response
from appliance.trainer.engine_shares import HINT, EngineShares, Prompt, Sampling
from appliance.trainer.grade_book import GradeBook
from appliance.trainer.prompt_seeds import PromptSeeds
from appliance.trainer.rewards import RewardPool, fill_neutral
from appliance.trainer.support import support_fields
from appliance.trainer.top_words import top_fields
from appliance.trainer.turns import Drawn, Opening, Tally, Trajectory, TrajectoryGroup, Turns, one_turn

PROMPTS_PER_PUT = 64
PUT_EVERY_S = 1.0
LOOK_AGAIN_S = 1.0  # seconds that a wait for rollouts lasts at most before the buffer is looked at again
_NOT_PUT = ("extra_info", "turns", "response_text")  # rewards and SampleLog read them, verl does not


class Rollouts:
    """The loop that joins seeds, engines, grades and the TransferQueue."""

    engines: EngineShares
    """Engines, and who generates what."""
    grades: GradeBook
    """Grades that samples got."""
    generated_prompts: int
    """Number of prompts of training since the start, filtered ones included."""
    generated_tokens: int
    """Number of tokens of training since the start, filtered ones included."""
    step_prompts: list[list[int]]
    """Token ids of the prompts of the newest step of training, filtered ones included."""

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
        """servers: one handle per rollout replica.  reader: makes text of responses.  pool: grades them.  shaping: from
        a grade to the reward that trains; validation reads grades.  in_order: put results in the order of the prompts,
        so that a run can be repeated; else as they come, for a filter that looks at them and asks for others.
        seed: the run's.  val_sets: how each validation set is sampled, in place of `validation`, where there are
        several.  rewards: names, of a task of the user's own.  turns: of a task with tools.  clock: further functions
        for the chat template, see terms/clock.py."""
        self.engines = EngineShares(servers)
        self.grades = GradeBook(rewards=rewards, val_sets=[*(val_sets or {})])
        self._turns = turns
        self._clock = clock or {}
        self._tally = Tally()
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
        self._validates = False  # whether the newest call was for a validation
        self.generated_prompts = 0
        self.generated_tokens = 0
        self.step_prompts = []
        self._prompts_of_step = 0  # the number of that step
        self._progress = threading.Event()
        self._futures: list[Future[None]] = []
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True).start()

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Start generating for a batch of prompts, as verl asks for it. Returns at once: the results arrive in the
        TransferQueue."""
        validate = "validate" in prompts and bool(prompts["validate"])
        prompts.pop("validate", None)
        future = asyncio.run_coroutine_threadsafe(self._generate(_split_rows(prompts), validate=validate), self._loop)
        self._futures = [*(running for running in self._futures if not running.done()), future]
        future.add_done_callback(self._note_failure)

    @property
    def is_busy(self) -> bool:
        """Whether prompts are being generated."""
        return any(not future.done() for future in self._futures)

    def take_counts(self) -> dict[str, float]:
        """Return what samples for training did since the last call."""
        tally, self._tally = self._tally, Tally()
        return tally.metrics(has_tools=self._turns is not None)

    def finish(self) -> None:
        """Wait until nothing is generated. Raises as `wait`."""
        while self.is_busy:
            self.wait(LOOK_AGAIN_S)

    def abandon(self) -> None:
        """Stop generating, for a run that ends: nobody waits for the results."""
        for future in self._futures:
            future.cancel()
        self.engines.abort()

    def wait(self, timeout_s: float) -> None:
        """Wait until new results were put, or the time is over. Raises EngineError when an engine failed and
        TrainingError when anything else did."""
        self._progress.wait(timeout_s)
        self._progress.clear()
        if (error := self._failure) is None:
            return
        if isinstance(error, EngineError):
            raise error
        kind = EngineError if isinstance(error, RayError) else TrainingError
        raise kind(f"rollouts failed: {type(error).__name__}: {last_line(error)}", hint=HINT) from error

    def _note_failure(self, future: Future[None]) -> None:
        if not future.cancelled():
            self._failure = self._failure or future.exception()
        self._progress.set()

    async def _generate(self, rows: list[dict[str, Any]], *, validate: bool) -> None:
        has_validated, self._validates = self._validates, validate
        if has_validated and not validate:  # a resumed run does not validate first: nothing is cached there either
            await self.engines.clear_caches()
        if not (validate and self._val_sets):
            sampling = self._validation if validate else self._training
            await self._sample(rows, sampling=sampling, seeds=self._seeds, validate=validate)
            return
        self.grades.begin_validation()
        for name, sampling in self._val_sets.items():
            share = [row for row in rows if row["extra_info"]["split"] == name]
            seeds = PromptSeeds(self._seed, val_set=name)
            await self._sample(share, sampling=sampling, seeds=seeds, validate=True, val_set=name)

    async def _sample(
        self, rows: list[dict[str, Any]], *, sampling: Sampling, seeds: PromptSeeds, validate: bool, val_set: str = ""
    ) -> None:
        partition = "val" if validate else "train"
        shaping = Shaping() if validate else self._shaping
        prompts = [self._make_prompt(row, sampling=sampling, seeds=seeds) for row in rows]
        if not validate:
            self._note_step(prompts)
        shares = {number: share for number, share in enumerate(self.engines.assign(prompts)) if share}
        engines = [self._stream(number, share, sampling=sampling) for number, share in shares.items()]
        grades = [asyncio.create_task(self._grade_samples(prompt)) for prompt in prompts]
        lowest = asyncio.create_task(_lowest_accuracy(grades))
        tasks = [
            asyncio.create_task(self._score(prompt, graded, lowest=lowest, shaping=shaping, validate=validate))
            for prompt, graded in zip(prompts, grades, strict=True)
        ]
        streams = [asyncio.create_task(engine) for engine in engines]
        for share, stream in zip(shares.values(), streams, strict=True):
            stream.add_done_callback(functools.partial(_leave_none_waiting, share))
        try:
            async for ready in _yield_in_order(tasks) if validate or self._in_order else _yield_as_they_come(tasks):
                if validate:
                    # Counted before they are put: who sees the results may ask how many there are.
                    self.grades.count_validated([uid for uid, _ in ready], val_set=val_set)
                    # One sample of each problem is enough: verl's own numbers of several sets are not used.
                    groups = [(uid, samples[:1]) for uid, samples in ready]
                else:
                    groups = ready
                    self.generated_prompts += len(groups)
                    masks = (sample["response_mask"] for _, samples in groups for sample in samples)
                    self.generated_tokens += sum(int(mask.sum()) for mask in masks)
                self.samples.note(groups, validate=validate)
                await _put(groups, partition=partition)
                self._progress.set()
        finally:
            for task in (*tasks, lowest, *grades, *streams):
                task.cancel()

    def _note_step(self, prompts: Sequence[Prompt]) -> None:
        """Note the prompts of a step. Dynamic sampling asks for more of them in the same step."""
        step = max((int(prompt.row["global_steps"]) for prompt in prompts), default=self._prompts_of_step)
        before = self.step_prompts if step == self._prompts_of_step else []
        self._prompts_of_step, self.step_prompts = step, [*before, *(prompt.token_ids for prompt in prompts)]

    def prompt_ids(self, messages: Sequence[Any]) -> list[int]:
        """Return the token ids of a chat, as the engines get them."""
        if self._turns is not None:
            ids = self._turns.prompt_ids(list(messages))
        else:
            ids = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **self._clock
            )
        return list(ids)[-self._max_prompt_tokens :]

    def _make_prompt(self, row: dict[str, Any], *, sampling: Sampling, seeds: PromptSeeds) -> Prompt:
        token_ids = self.prompt_ids(row["raw_prompt"])
        seed = seeds.next(token_ids, step=int(row["global_steps"])) if sampling.temperature else None
        return Prompt(row, token_ids, seed, self._loop.create_future())

    async def _stream(self, number: int, share: list[Prompt], *, sampling: Sampling) -> None:
        """Bring a share of the prompts to one of the engines, and their groups back as they come."""
        ask = functools.partial(self.engines.ask, number, sampling=sampling)
        if self._turns is None:
            ids, seeds = [prompt.token_ids for prompt in share], [prompt.seed for prompt in share]
            async for place, group in ask(ids, seeds=seeds, num_samples=sampling.num_samples):
                trajectories = [one_turn(sample, text=self._read_text(sample)) for sample in group.samples]
                share[place].group.set_result(TrajectoryGroup(trajectories, group.weights_version))
        else:
            openings = [Opening(list(prompt.row["raw_prompt"]), prompt.token_ids, prompt.seed) for prompt in share]
            async for place, played in self._turns.play(openings, ask=ask, num_samples=sampling.num_samples):
                share[place].group.set_result(played)

    def _read_text(self, sample: Drawn) -> str:
        return self._reader.text(sample.token_ids, finished=sample.finished)

    async def _grade_samples(self, prompt: Prompt) -> list[Graded]:
        group = await prompt.group
        begun = self._reader.begun
        return await asyncio.gather(
            *(self.pool.grade(_make_response(sample, prompt.row, begun=begun)) for sample in group.samples)
        )

    async def _score(
        self,
        prompt: Prompt,
        grades: asyncio.Task[list[Graded]],
        *,
        lowest: asyncio.Task[float],
        shaping: Shaping,
        validate: bool,
    ) -> Group:
        """Return (uid, one field dictionary per sample). lowest: the accuracy that a fault gets in a validation."""
        graded, group, row = await grades, await prompt.group, prompt.row
        if validate:
            graded = [replace(each, accuracy=await lowest) if each.fault else each for each in graded]
        self.grades.add(row["uid"], graded, step=int(row["global_steps"]), validate=validate)
        if not validate:
            self._tally.extend(group.samples)
        is_known = [validate or each.fault is None for each in graded]
        accuracies, rewards = _shape_rewards(graded, group=group, shaping=shaping, known=is_known)
        if not (validate or self._in_order):  # a filter chooses among them
            self.grades.add_prompt_reward(statistics.fmean(rewards))
        return row["uid"], [
            _make_fields(prompt, group=group, session=session, accuracy=accuracy, reward=reward, trains=not validate)
            for session, (accuracy, reward) in enumerate(zip(accuracies, rewards, strict=True))
        ]


async def _lowest_accuracy(grades: list[asyncio.Task[list[Graded]]]) -> float:
    """Return 0, or the lowest accuracy of all samples where that is below 0: known when all are graded."""
    return min((0.0, *(each.accuracy for graded in await asyncio.gather(*grades) for each in graded)))


def _make_response(trajectory: Trajectory, row: dict[str, Any], *, begun: str) -> Response:
    truth, as_given = row["reward_model"]["ground_truth"], row["extra_info"].get("row") or ""
    before = tuple((each["role"], each["content"]) for each in row["raw_prompt"]) if trajectory.transcript else ()
    ids = tuple(trajectory.last_turn)
    messages = (*before, *trajectory.transcript)
    return Response(trajectory.text, truth, as_given, token_ids=ids, messages=messages, begun=begun)


def _leave_none_waiting(prompts: list[Prompt], stream: asyncio.Task[None]) -> None:
    """Have nobody wait for an answer that does not come, however the engine's answers ended."""
    waiting = [prompt for prompt in prompts if not prompt.group.done()]
    if stream.cancelled():
        for prompt in waiting:
            prompt.group.cancel()
        return
    if waiting and (error := stream.exception()):
        for prompt in waiting:
            prompt.group.set_exception(error)


def _shape_rewards(
    graded: Sequence[Graded], *, group: TrajectoryGroup, shaping: Shaping, known: Sequence[bool]
) -> tuple[list[float], list[float]]:
    """Return (accuracies, rewards) of a prompt's samples. One that is not known has the others' mean of both, and no
    penalty for its own length; where none is known, each counts as a wrong one."""
    accuracies = [shaping.comparable(each) for each in fill_neutral((each.accuracy for each in graded), known=known)]
    lengths = (sample.generated for sample in group.samples)
    shaped = (shaping.reward(accuracy, num_tokens=length) for accuracy, length in zip(accuracies, lengths, strict=True))
    rewards = fill_neutral(shaped, known=known) if any(known) else [shaping.wrong] * len(accuracies)
    return accuracies, [shaping.comparable(each) for each in rewards]


def _make_fields(
    prompt: Prompt, *, group: TrajectoryGroup, session: int, accuracy: float, reward: float, trains: bool
) -> dict[str, Any]:
    """Return what verl's trainer reads of one sample (verl/trainer/ppo/v1/agent_loop_tq.py).

    `acc` is what it validates by, and what DAPO's filter compares (plan/verl_args.py, FILTER_METRIC).
    trains: whether log-probs of the sample will be computed.
    """
    sample, prompt_ids = group.samples[session], prompt.token_ids
    response_mask = _int_tensor(sample.mask)
    rewards = torch.zeros(len(sample.token_ids), dtype=torch.float32)
    rewards[-1] = reward  # the last token is the model's
    input_ids = _int_tensor(prompt_ids + sample.token_ids)
    top = {} if sample.top is None else top_fields(sample.top.spread(sample.mask))
    support = support_fields(sample.support.spread(sample.mask)) if trains and sample.support is not None else {}
    return (
        prompt.row
        | top
        | support
        | {
            "session_id": session,
            "prompts": _int_tensor(prompt_ids),
            "responses": _int_tensor(sample.token_ids),
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
            "turns": sample.transcript,
            "response_text": sample.text,
        }
    )


async def _yield_in_order(tasks: list[asyncio.Task[Group]]) -> AsyncIterator[list[Group]]:
    ready: list[Group] = []
    for finished, task in enumerate(tasks, start=1):
        ready.append(await task)
        if len(ready) == PROMPTS_PER_PUT or finished == len(tasks):
            yield ready
            ready = []


async def _yield_as_they_come(tasks: list[asyncio.Task[Group]]) -> AsyncIterator[list[Group]]:
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


def _int_tensor(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def _split_rows(batch: TensorDict) -> list[dict[str, Any]]:
    """Return a batch of verl's data set row by row."""
    columns = {key: value.tolist() if is_non_tensor(value) else value for key, value in batch.items()}
    return [{key: column[index] for key, column in columns.items()} for index in range(len(batch))]

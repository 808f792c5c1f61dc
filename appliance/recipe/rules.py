"""Rules: what one key cannot say of another. Here are those over a whole recipe, which need nothing else, and `judge`,
which runs them and the rules of plan/rules.py and preflight/. Pure; each broken one is a finding that names the keys it
concerns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from operator import attrgetter
from pathlib import PurePath

from appliance.corrections.registry import METHODS
from appliance.finding import Finding, concerns, fault
from appliance.guard.policy import Action
from appliance.quant.uaq import MOST
from appliance.recipe.objective import broken_objective
from appliance.recipe.schema import Recipe
from appliance.recipe.text import in_yaml, path_problem, pattern_problem
from appliance.settings.sections import (
    Algorithm,
    AlgorithmKind,
    Attention,
    Backward,
    Correction,
    Forward,
    Lora,
    LoraSync,
    Reward,
    Task,
)
from appliance.tasks.library import BUILT_IN_MODELS, TASKS, TINY_MODELS, CalculatorSpec
from appliance.tasks.own_task import template_parts
from appliance.tasks.rewards import BUILT_IN
from appliance.terms.counts import counted
from appliance.terms.devices import AUTO, DEVICES, why_outgrown
from appliance.terms.schemes import Scheme, listed
from appliance.terms.settings import Dtype, KvCache, OldLogProbs

MAX_RANK = 512  # of an adapter that vLLM holds
PATHS = (
    *("model.path", "task.train_file", "task.val_file", "task.tools", "quantization.profile"),
    *("cluster.run_dir", "cluster.token_file"),
)
OF_OWN = ("data", "config", "split", "prompt", "template", "system", "truth", "rewards", "tools", "max_turns")
_DATA_SET = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


class Needs(IntEnum):
    """What a rule is given: the facts up to this one, in this order."""

    RECIPE = 1
    PLAN = 2
    """RunPlan of the recipe."""
    HOST = 3
    """HostFacts of the host that the plan was made on."""
    INPUTS = 4
    """InputFacts: what preflight has read."""


@dataclass(frozen=True)
class Rule:
    """A rule: the function that yields a finding for each way in which it is broken, and what that function needs."""

    check: Callable[..., Iterable[Finding]]
    needs: Needs = Needs.RECIPE


def judge(
    rules: Iterable[Rule], recipe: Recipe, *facts: object, unreadable: Collection[tuple[str, ...]] = ()
) -> list[Finding]:
    """Return what breaks the rules, in their order, each finding once and with the place where the user wrote it. Rules
    that need more facts than are given are left out.

    facts: as many of those of Needs after the recipe as there are, in that order.  unreadable: keys of the recipe whose
    values could not be read. What was found about these is not reported: it would be about another value. Neither is
    what the plan shows of the keys of a finding `is_of_no_value`, which it has other values of.
    """
    all_facts = (recipe, *facts)
    all_findings = [
        (rule.needs, finding)
        for rule in rules
        if rule.needs <= len(all_facts)
        for finding in rule.check(*all_facts[: rule.needs])
        if not concerns(finding, unreadable)
    ]
    replaced = {tuple(key.split(".")) for _, finding in all_findings if finding.is_of_no_value for key in finding.keys}
    reported = [
        finding
        for needs, finding in all_findings
        if needs is Needs.RECIPE or finding.is_of_no_value or not concerns(finding, replaced)
    ]
    return list(dict.fromkeys(map(recipe.placed, reported)))


def _model(recipe: Recipe) -> Iterator[Finding]:
    model, keys = recipe.model, ("model.path", "model.builtin")
    if model.path and model.builtin:
        yield fault(keys, "`path` and `builtin` exclude each other", "set one of them to null")
    if not model.path and not model.builtin:
        hint = f"give `path`, or `builtin: {next(iter(TINY_MODELS))}`"
        yield fault(keys, "no model is named", hint, is_of_no_value=True)
    if model.builtin and model.revision:
        yield fault(("model.revision",), "a built-in model has none", "leave it out, or set model.builtin to null")
    if model.builtin and model.builtin not in BUILT_IN_MODELS:
        message, hint = f"unknown value `{model.builtin}`", f"use {listed(BUILT_IN_MODELS)}"
        yield fault(("model.builtin",), message, hint, is_of_no_value=True)
    elif model.builtin and recipe.task.longest > (most := BUILT_IN_MODELS[model.builtin].max_positions):
        message = f"prompt and response are up to {recipe.task.longest} tokens, `{model.builtin}` takes {most}"
        yield fault(("task.max_response_tokens", "task.max_prompt_tokens"), message, "lower one of them")


def _lora(recipe: Recipe) -> Iterator[Finding]:
    """Refuse with LoRA what acts on weights that it does not train. `plan/rules.py` asks for experts, too."""
    key, lora = "model.lora", recipe.model.lora
    if lora is None:
        return
    if lora.targets and len(set(lora.targets)) < len(lora.targets):
        yield fault((f"{key}.targets", key), "a layer is named twice", "name each once")
    if lora.sync is LoraSync.ADAPTER:
        sync = f"{key}.sync"
        if recipe.rollout.tensor_parallel > 1:
            message = "an adapter that is sent alone is proven in engines of one rank"
            yield fault((sync, "rollout.tensor_parallel", key), message, "use `merge`, or tensor_parallel: 1")
        if lora.rank > MAX_RANK:
            message = f"vLLM takes adapters up to rank {MAX_RANK}, and this one has {lora.rank}"
            yield fault((f"{key}.rank", sync, key), message, "use `merge`, or a smaller rank")
    refused = {
        "correction.uaq_scale": (None, "UAQ scales weights so that an update moves them more, and LoRA moves none"),
        "optimizer.norm_fed_lr_scale": (1.0, "it is a rate of the weights that a norm feeds, and LoRA trains none"),
    }
    for name, (usual, message) in refused.items():
        if attrgetter(name)(recipe) != usual:
            yield fault((name, key), message, "remove it, or set model.lora to null")
    yield from _lora_in_one_flow(lora, recipe.trainer.forward)


def _lora_in_one_flow(lora: Lora, forward: Forward) -> Iterator[Finding]:
    """Refuse what has no place in a forward that is the rollouts': a model that is quantised again after each merge,
    and what an update drops and engines do not."""
    key = "trainer.forward"
    if forward is Forward.LINEARS:
        message = "`linears` has the rollouts' layers without an adapter beside them"
        yield fault((key, "model.lora"), message, "use bf16, or rollout with model.lora.sync: adapter")
    if forward is not Forward.ROLLOUT:
        return
    if lora.sync is LoraSync.MERGE:
        message = "`rollout` keeps the model as first quantised, and `merge` sends another at each update"
        yield fault((key, "model.lora.sync", "model.lora"), message, "use model.lora.sync: adapter, or bf16")
    if lora.dropout:
        message = "an update would drop a part of the adapter's input, and the rollouts do not"
        yield fault(("model.lora.dropout", key, "model.lora"), message, "use 0, or trainer.forward: bf16")


def _task(recipe: Recipe) -> Iterator[Finding]:
    task = recipe.task
    yield from _val_sets(task)
    if task.is_own:
        yield from _own_task(task)
        calls = isinstance(TINY_MODELS.get(recipe.model.builtin or ""), CalculatorSpec)
        if task.tools and recipe.model.builtin in BUILT_IN_MODELS and not calls:
            message = f"the chat template of `{recipe.model.builtin}` has no tools"
            yield fault(("task.tools", "model.builtin"), message, "use `tiny-calculator`")
        return
    spec = TASKS[task.kind]
    for key in OF_OWN:
        if getattr(task, key) != Task.model_fields[key].default:
            message = f"`{task.kind}` does not have this key: it is for `own`"
            yield fault((f"task.{key}", "task.kind"), message, "remove it, or set task.kind to `own`")
    if spec.source is None:
        of_sets = {f"task.val_sets.{name}.file": each.file for name, each in task.val_sets.items()}
        for key, value in {"task.train_file": task.train_file, "task.val_file": task.val_file, **of_sets}.items():
            if value:
                yield fault((key, "task.kind"), f"`{task.kind}` makes its own problems", "remove it")
    elif task.val_file and not task.train_file:
        keys = ("task.val_file", "task.train_file")
        yield fault(keys, "there is no `train_file` beside it", "give task.train_file too")
    if spec.check_sizes is not None:
        name, usual = next(((name, each) for name, each in task.val_sets.items() if not each.file), ("", None))
        sizes = {"train_size": task.train_size, "val_size": usual.size if usual else task.val_size}
        for finding in spec.check_sizes(difficulty=task.difficulty, seed=task.seed, **sizes):
            key = f"task.val_sets.{name}.size" if usual and finding.place == "task.val_size" else finding.place
            yield replace(finding, keys=(key, "task.difficulty"))


def _val_sets(task: Task) -> Iterator[Finding]:
    """Check the validation sets, which tasks/task.py describes at `splits`. How many problems a file has is known when
    it is read."""
    if not task.val_sets:
        return
    for key in ("val_file", "val_size"):
        if getattr(task, key) != Task.model_fields[key].default:
            message = f"`{key}` and `val_sets` exclude each other"
            yield fault((f"task.{key}", "task.val_sets"), message, "remove one: a set has a file and a size of its own")
    held_out = [name for name, val_set in task.val_sets.items() if not val_set.file]
    if len(held_out) > 1:
        message = f"{listed(held_out)} have no file: only one validation can be held out of the training data"
        yield fault((f"task.val_sets.{held_out[1]}", "task.val_sets"), message, "give the others a `file`")
    for name, val_set in task.val_sets.items():
        place = f"task.val_sets.{name}"
        if not val_set.file and not val_set.size:
            message = "the number of problems to hold out of the training data is not given"
            yield fault((f"{place}.size", place, "task.val_sets"), message, "give `size`, or a `file`")
        if val_set.samples > 1 and val_set.temperature == 0:
            message = f"{val_set.samples} samples at temperature 0 are all the same"
            yield fault((f"{place}.samples", f"{place}.temperature"), message, "use 1 sample, or a temperature above 0")


def _own_task(task: Task) -> Iterator[Finding]:
    if not task.train_file and not task.data:
        keys = ("task.train_file", "task.data")
        hint = "give task.train_file, or a data set as task.data"
        yield fault(keys, "a task of your own needs problems", hint, is_of_no_value=True)
    if task.train_file and task.data:
        yield fault(("task.data", "task.train_file"), "`data` and `train_file` exclude each other", "remove one")
    if task.data and not _DATA_SET.fullmatch(task.data):
        hint = "a data set of the hub is `owner/name`; a file is task.train_file"
        yield fault(("task.data",), f"`{task.data}` is no name of a data set", hint, is_of_no_value=True)
    for key in ("config", "split"):
        if not task.data and getattr(task, key) != Task.model_fields[key].default:
            message = "it is for a data set on the hub, and `data` names none"
            yield fault((f"task.{key}", "task.data"), message, "remove it, or give task.data")
    yield from _prompt(task)
    yield from _own_code(task)


def _own_code(task: Task) -> Iterator[Finding]:
    """Check rewards and tools: what is built in, and the user's files."""
    if task.max_turns and not task.tools:
        yield fault(("task.max_turns", "task.tools"), "there are no tools to take turns with", "remove it")
    if not task.rewards:
        hint = "give some, such as [{name: math}]; docs/own-task.md has them all"
        yield fault(("task.rewards",), "a task of your own needs rewards", hint, is_of_no_value=True)
    elif not any(each.weight for each in task.rewards):
        yield fault(("task.rewards",), "all weights are 0, so no response earns anything", "give one a weight")
    timed = [each.name for each in task.rewards if each.name in BUILT_IN and BUILT_IN[each.name].most_s]
    if (most_s := sum(BUILT_IN[name].most_s for name in timed)) >= task.reward_timeout_s:
        message = f"{listed(timed)} may take {most_s:g} s, and a response has {task.reward_timeout_s:g} s"
        hint = f"give task.reward_timeout_s more than {most_s:g}"
        yield fault(("task.reward_timeout_s", "task.rewards"), message, hint)
    for reward in task.rewards:
        yield from _broken_reward(reward)
    if task.tools:
        yield from _no_code(task.tools, key="task.tools")


def _no_code(file: str, *, key: str) -> Iterator[Finding]:
    """Report a key that names no Python file."""
    if "://" in file or not file.endswith(".py"):
        message = f"`{file[:60]}` is not the path of a Python file on this host"
        hint = "it is code that the run executes: copy it here first, and read it"
        hint = hint if "/" in file else "give the path of a file that ends in .py, such as `rewards.py`"
        yield fault((key,), message, hint, is_of_no_value=True)
    elif why := path_problem(file):
        yield fault((key,), f"`{file[:60]}`: {why}", "correct the path", is_of_no_value=True)


def _broken_reward(reward: Reward) -> Iterator[Finding]:
    broken = partial(fault, ("task.rewards",), is_of_no_value=True)
    options = reward.model_dump(exclude={"name", "weight"}, exclude_none=True)
    file, colon, name = reward.name.rpartition(":")
    built_in = None if colon else BUILT_IN.get(name)
    if colon:
        no_code = list(_no_code(file, key="task.rewards"))
        yield from no_code
        if not no_code and not name.isidentifier():
            hint = f"give one of {PurePath(file).name}: `{file}:name`"
            yield broken(f"`{name[:60]}` is not the name of a function", hint)
    elif built_in is None:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        use = f"use one of {listed(BUILT_IN)}, or a function of a file: `rewards.py:{near[0] if near else 'name'}`"
        yield broken(f"no reward is called `{name[:60]}`", f"did you mean `{near[0]}`? {use}" if near else use)
    if colon or built_in is not None:
        for key in sorted(options.keys() - set(built_in.options if built_in else ())):
            owner = next(other for other, kind in BUILT_IN.items() if key in kind.options)
            yield broken(f"`{name}` has no option `{key}`: it is for `{owner}`", "remove it")
        for key in sorted(set(built_in.needs if built_in else ()) - options.keys()):
            yield broken(f"`{name}` has no `{key}`", f"give it: `{{name: {name}, {key}: ...}}`")
    if reward.pattern and (why := pattern_problem(reward.pattern)):
        yield broken(f"`{reward.pattern[:60]}` is not a regular expression: {why}", "correct it")
    if reward.url and not (reward.url.startswith(("http://", "https://")) and "@" not in reward.url):
        hint = "give one such as `http://localhost:8000/v1`, without a password"
        yield broken(f"`{reward.url[:60]}` is no address of an API", hint)


def _prompt(task: Task) -> Iterator[Finding]:
    """Check how a row becomes a prompt."""
    if task.template is None:
        return
    if task.prompt != Task.model_fields["prompt"].default:
        keys = ("task.template", "task.prompt")
        hint = "a template names its fields itself: remove one; an inherited `prompt` goes with `prompt: prompt`"
        yield fault(keys, "`template` and `prompt` exclude each other", hint)
    hint = "write {field} or {field.inner} for a field's value, {{ and }} for braces"
    try:
        if not any(name for _, name in template_parts(task.template)):
            yield fault(("task.template",), "it names no field, so that all prompts are the same", hint)
    except ValueError as error:
        yield fault(("task.template",), str(error), hint)


def _rollout(recipe: Recipe) -> Iterator[Finding]:
    rollout, gpus = recipe.rollout, recipe.cluster.gpus_per_node
    if gpus % rollout.tensor_parallel:
        message = f"{rollout.tensor_parallel} does not divide the {counted(gpus, 'GPU')} of a node"
        yield fault(("rollout.tensor_parallel", "cluster.gpus_per_node"), message, "an engine lives on one node")
    engines = recipe.topology.engines
    if rollout.replicas and rollout.scheme != AUTO:
        keys = ("rollout.replicas", "rollout.scheme")
        yield fault(keys, "`scheme` and `replicas` exclude each other", "remove `scheme`, or set it to `auto`")
    if rollout.replicas and len(rollout.replicas) > engines:
        message = f"{len(rollout.replicas)} schemes for {counted(engines, 'engine')}"
        keys = ("rollout.replicas", "cluster.gpus_per_node", "cluster.nodes", "rollout.tensor_parallel")
        yield fault(keys, message, "an engine takes tensor_parallel GPUs; raise cluster.gpus_per_node, or list fewer")
    if rollout.kv_cache is KvCache.FP8 and recipe.trainer.dtype is Dtype.FP16:
        keys = ("rollout.kv_cache", "trainer.dtype")
        yield fault(keys, "`fp8` is rounded from BF16 alone", "use `auto`, or trainer.dtype: bf16")
    if recipe.trainer.sequence_parallel > 1:
        for key, usual in {"rollout.top_p": 1.0, "rollout.top_k": 0}.items():
            if attrgetter(key)(recipe) != usual:
                message = "log-probs over a part of the words are not computed where GPUs share a sequence"
                yield fault((key, "trainer.sequence_parallel"), message, f"use {usual}, or sequence_parallel: 1")


def _one_flow(recipe: Recipe) -> Iterator[Finding]:
    """Refuse in one flow what the trainer's form of that forward does not have. `plan/rules.py` asks for what `auto`
    may choose: the scheme and the device."""
    key, backward, schemes = "trainer.forward", "trainer.backward", _named_schemes(recipe)
    in_fp8 = recipe.trainer.backward is Backward.FP8_BLOCK
    if in_fp8 and recipe.trainer.forward is not Forward.ROLLOUT:
        yield fault((backward, key), "`fp8-block` needs the rollouts' forward", "use trainer.forward: rollout")
    if (forward := recipe.trainer.forward) is Forward.BF16:
        return
    if len({*schemes}) > 1:
        yield fault((key, "rollout.replicas"), f"`{forward}` computes in one scheme, not in several", "name one scheme")
    refused = {
        "rollout.tensor_parallel": (1, "a layer in parts rounds in another way"),
        "rollout.lm_head_fp32": (False, f"the last projection of `{forward}` is in BF16"),
        "trainer.sequence_parallel": (1, f"`{forward}` does not share sequences"),
        "trainer.attention": (Attention.AUTO, "only the forward in BF16 has a choice of attention"),
    }
    for name, (usual, message) in refused.items():
        if attrgetter(name)(recipe) != usual:
            yield fault((name, key), message, f"use {in_yaml(usual)}, or trainer.forward: bf16")
    if forward is Forward.ROLLOUT and recipe.rollout.kv_cache is not KvCache.AUTO:
        message = f"`{forward}` computes with keys and values of 16 bits"
        yield fault(("rollout.kv_cache", key), message, "use `auto`, or trainer.forward: bf16")


def _old_log_probs(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what needs the distance between the rollouts' log-probs and the trainer's, which are then the same."""
    if recipe.trainer.old_log_probs is not OldLogProbs.ROLLOUT:
        return
    key, hint = "trainer.old_log_probs", "or trainer.old_log_probs: recompute"
    if recipe.trainer.forward is not Forward.ROLLOUT:
        message = "`rollout` takes the engines' log-probs for the trainer's, and a BF16 forward has others"
        yield fault((key, "trainer.forward"), message, f"use trainer.forward: rollout, {hint}")
    if METHODS[recipe.correction.method].has_shadow_pass:
        message = (
            f"`{recipe.correction.method}` fits bounds to how log-probs differ from the engines', and here they do not"
        )
        yield fault((key, "correction.method"), message, f"use another method, {hint}")
    if Action.TIGHTEN in (recipe.guard.actions or ()):
        message = "`tighten` is for a correction, which has nothing to act on where old log-probs are the engines'"
        yield fault(("guard.actions", key), message, f"remove `tighten`, {hint}")


def scheme_key(recipe: Recipe) -> str:
    """Return the key that names the schemes of the engines."""
    return "rollout.replicas" if recipe.rollout.replicas else "rollout.scheme"


def _named_schemes(recipe: Recipe) -> list[Scheme]:
    return [scheme for scheme in recipe.rollout.schemes if scheme != AUTO]


def _quantization(recipe: Recipe) -> Iterator[Finding]:
    quantization = recipe.quantization
    if quantization.emulate and not any(scheme.spec.can_emulate for scheme in _named_schemes(recipe)):
        message = "only an FP8 scheme can be emulated"
        yield fault(("quantization.emulate", "rollout.scheme"), message, "remove it, or set rollout.scheme")
    if quantization.profile != "auto":
        is_none = quantization.profile == "none"
        for key in ("smoothing", "mismatch_budget"):
            value = getattr(quantization, key)
            if key in quantization.model_fields_set and (value if is_none else value is not None):
                has = "is `none`" if is_none else f"is made already: {quantization.profile}"
                message = f"it comes from the profile, and `profile` {has}"
                yield fault((f"quantization.{key}", "quantization.profile"), message, "remove one of them")


def _correction(recipe: Recipe) -> Iterator[Finding]:
    correction, method = recipe.correction, METHODS[recipe.correction.method]
    yield from method.refusals(cap=correction.cap, bounds=correction.bounds, clip=recipe.algorithm.clip)
    if (scale := correction.uaq_scale) is not None and (scale == 1 or not 1 / MOST <= scale <= MOST):
        message = "1 scales nothing" if scale == 1 else f"{scale:g} does not lie between {1 / MOST:g} and {MOST:g}"
        yield fault(("correction.uaq_scale",), message, "give one such as 1.5, or null")
    yield from _shadow(recipe)
    yield from _centering(recipe)


def _centering(recipe: Recipe) -> Iterator[Finding]:
    """Report the settings with which score centering and the comparison of whole distributions cannot be combined."""
    name, top = recipe.correction.method, recipe.rollout.top_log_probs
    centers, key, of_words = METHODS[name].centers, "correction.method", "rollout.top_log_probs"
    if centers and top == 0:
        message = f"`{name}` needs log-probs of the engine's most likely words"
        yield fault((of_words, key), message, "give a number such as 20, or null")
    if centers and recipe.trainer.forward is Forward.ROLLOUT:
        message = f"`{name}` has nothing to take out where the trainer computes what the rollouts do"
        yield fault((key, "trainer.forward"), message, "use `tis`, or trainer.forward: bf16")
    if (centers or top) and recipe.trainer.sequence_parallel > 1:
        message = "log-probs of the engine's most likely words are not computed where GPUs share a sequence"
        keys = ("trainer.sequence_parallel", of_words, key)
        yield fault(keys, message, "use 1, or rollout.top_log_probs: 0 and a correction.method that needs none")


def _shadow(recipe: Recipe) -> Iterator[Finding]:
    correction, method = recipe.correction, ("correction.method",)
    if not METHODS[correction.method].has_shadow_pass:
        with_one = listed(name for name, each in METHODS.items() if each.has_shadow_pass)
        for key in ("shadow_every", "shadow_fraction"):
            if getattr(correction, key) != Correction.model_fields[key].default:
                message = f"`{correction.method}` has no shadow pass"
                yield fault((f"correction.{key}", *method), message, f"remove it, or use {with_one}")
    elif not shadow_sequences(recipe):
        ranks, whole = recipe.topology.data_parallel, recipe.batch.prompts_per_step * recipe.rollout.samples_per_prompt
        message = (
            f"`{correction.method}` without a shadow batch: {correction.shadow_fraction:g} of "
            f"{counted(whole, 'sequence')} is none for each of {counted(ranks, 'rank')}"
        )
        yield fault(("correction.shadow_fraction", *method), message, "raise it")


def shadow_sequences(recipe: Recipe) -> int:
    """Return the number of sequences of a shadow batch, the same on each rank."""
    ranks, whole = recipe.topology.data_parallel, recipe.batch.prompts_per_step * recipe.rollout.samples_per_prompt
    return int(recipe.correction.shadow_fraction * whole) // ranks * ranks


def _batch(recipe: Recipe) -> Iterator[Finding]:
    """Check which sizes divide which. verl checks little of it, and with packing by tokens next to nothing."""
    batch, samples, prompts = recipe.batch, recipe.rollout.samples_per_prompt, recipe.batch.prompts_per_step
    gpus, ranks = recipe.topology.gpus, recipe.topology.data_parallel
    sizes = ("rollout.samples_per_prompt", "cluster.gpus_per_node", "cluster.nodes")
    mini, of_each = batch.mini_batch_prompts or prompts, counted(samples, "sample")
    mini_keys = ("batch.mini_batch_prompts", "batch.prompts_per_step")
    if prompts * samples % gpus:
        message = f"{counted(prompts, 'prompt')} x {of_each} do not divide over {gpus} GPUs"
        yield fault(("batch.prompts_per_step", *sizes), message, "each GPU takes the same number of sequences")
    if mini > prompts:
        yield fault(mini_keys, f"{mini} is more than the {counted(prompts, 'prompt')} of a step", "lower it")
    elif prompts % mini:
        yield fault(mini_keys, f"{mini} does not divide the {prompts} prompts of a step", "use a divisor")
    if mini * samples % ranks:
        if mini != prompts:
            message = f"{counted(mini, 'prompt')} x {of_each} do not divide over {ranks} data-parallel ranks"
            yield fault((*mini_keys, *sizes), message, "each rank takes the same number of sequences")
    elif batch.micro_batch_sequences and (share := mini * samples // ranks) % batch.micro_batch_sequences:
        message = f"{batch.micro_batch_sequences} does not divide the {counted(share, 'sequence')} of a rank"
        keys = ("batch.micro_batch_sequences", *mini_keys, *sizes)
        yield fault(keys, message, "it is the sequences of one forward on one GPU")


def _packing(recipe: Recipe) -> Iterator[Finding]:
    batch, longest = recipe.batch, recipe.task.longest
    if batch.max_tokens_per_gpu and batch.micro_batch_sequences:
        keys = ("batch.max_tokens_per_gpu", "batch.micro_batch_sequences")
        yield fault(keys, "`max_tokens_per_gpu` and `micro_batch_sequences` exclude each other", "remove one of them")
    room = (batch.max_tokens_per_gpu or longest) * recipe.trainer.sequence_parallel
    if room < longest:
        tokens = counted(batch.max_tokens_per_gpu or 0, "token does not hold", plural="tokens do not hold")
        message = f"{tokens} one sequence of {longest} (prompt and response)"
        keys = ("batch.max_tokens_per_gpu", "task.max_response_tokens", "trainer.sequence_parallel")
        yield fault(keys, message, "raise it")


def _dapo(recipe: Recipe) -> Iterator[Finding]:
    """Check what only `dapo` has."""
    algorithm, batch = recipe.algorithm, recipe.batch
    if algorithm.kind is not AlgorithmKind.DAPO:
        typed_keys = [
            f"algorithm.{key}"
            for key in ("max_generation_batches", "overlong_tokens", "overlong_penalty")
            if getattr(algorithm, key) != Algorithm.model_fields[key].default
        ]
        for key in (*typed_keys, *(["batch.generation_prompts"] if batch.generation_prompts else [])):
            message = f"`{algorithm.kind}` does not have this key: it is for `dapo`"
            yield fault((key, "algorithm.kind"), message, "remove it, or set algorithm.kind to `dapo`")
        return
    longest, prompts = recipe.task.max_response_tokens, batch.prompts_per_step
    if algorithm.overlong_tokens > longest:
        message = f"{algorithm.overlong_tokens} is more than the {counted(longest, 'token')} of a response"
        yield fault(("algorithm.overlong_tokens", "task.max_response_tokens"), message, "lower it")
    if (batch.generation_prompts or prompts) % prompts:
        message = f"{batch.generation_prompts} is no multiple of the {prompts} prompts of a step"
        hint = f"use a multiple of {prompts}: verl 0.9.1 generates for whole steps (max_inflight_gen_batches)"
        yield fault(("batch.generation_prompts", "batch.prompts_per_step"), message, hint)


def _length(recipe: Recipe) -> Iterator[Finding]:
    trainer, keys = recipe.trainer, ("trainer.steps", "trainer.epochs")
    if 0 < recipe.task.train_size < (prompts := recipe.batch.prompts_per_step):
        problems = counted(recipe.task.train_size, "problem does not fill", plural="problems do not fill")
        message = f"{problems} one step of {prompts} prompts"
        yield fault(("task.train_size", "batch.prompts_per_step"), message, "raise it")
    if trainer.steps and trainer.epochs:
        yield fault(keys, "`steps` and `epochs` exclude each other", "set one of them to null")
    if not trainer.steps and not trainer.epochs:
        yield fault(keys, "the length of the training is not given", "give `steps` or `epochs`", is_of_no_value=True)
    if trainer.epochs and not recipe.task.train_size:
        yield fault(("trainer.epochs", "task.train_size"), "`epochs` needs task.train_size", "give it, or `steps`")
    if recipe.topology.gpus % trainer.sequence_parallel:
        message = f"{trainer.sequence_parallel} does not divide the GPUs of the cluster"
        yield fault(("trainer.sequence_parallel", "cluster.gpus_per_node", "cluster.nodes"), message)


def _guard(recipe: Recipe) -> Iterator[Finding]:
    quantised = set(recipe.rollout.schemes) - {Scheme.BF16}
    if Action.RAISE_PRECISION in (recipe.guard.actions or ()):
        keys = ("guard.actions", scheme_key(recipe))
        if not quantised:
            yield fault(keys, "rollouts in BF16 have no precision to raise", "remove `raise-precision`")
        elif len(quantised) > 1:
            message = "`raise-precision` cannot say which of several quantised schemes to raise"
            yield fault(keys, message, "remove it (`bf16` works for all), or use one scheme beside bf16")
    every, both = recipe.trainer.validate_every, recipe.trainer.validate_bf16_every or 0
    if both and (not every or both % every):
        message = f"there is no validation every {counted(both, 'step')}"
        hint = f"use a multiple of validate_every ({every})" if every else "set validate_every, or null for the end"
        yield fault(("trainer.validate_bf16_every", "trainer.validate_every"), message, hint)


def _cluster(recipe: Recipe) -> Iterator[Finding]:
    yield from _device(recipe)
    if recipe.cluster.nodes > 1 and "run_dir" not in recipe.cluster.model_fields_set:
        hint = "set it to a folder on a file system that all nodes share"
        yield fault(("cluster.run_dir",), f"{recipe.cluster.nodes} nodes need a shared folder for the run", hint)
    if recipe.cluster.address is not None and recipe.cluster.token_file is None:
        hint = "give the file that holds its token"
        yield fault(("cluster.token_file",), "cluster.address names a cluster that runs already", hint)
    if ".." in PurePath(recipe.cluster.run_dir).parts:
        hint = "give an absolute path, or one below the folder where the program is started"
        yield fault(("cluster.run_dir",), "`..` is not allowed here", hint)


def _device(recipe: Recipe) -> Iterator[Finding]:
    device = recipe.cluster.device
    if device not in (AUTO, *DEVICES):
        near = difflib.get_close_matches(device.lower(), DEVICES, n=1)
        use = f"use one of {listed((AUTO, *DEVICES))}"
        hint = f"did you mean `{near[0]}`? {use}" if near else use
        yield fault(("cluster.device",), f"unknown value `{device}`", hint, is_of_no_value=True)
        return
    for scheme in dict.fromkeys(_named_schemes(recipe)):
        if why := why_outgrown(scheme, device=device):
            yield fault((scheme_key(recipe), "cluster.device"), why, "use `fp8`, or `bf16`")


def _texts(recipe: Recipe) -> Iterator[Finding]:
    for key in PATHS:
        value = attrgetter(key)(recipe)
        if value and (why := path_problem(value)):
            yield fault((key,), why, "correct the path", is_of_no_value=True)
    for name, each in recipe.task.val_sets.items():
        if each.file and (why := path_problem(each.file)):
            yield fault((f"task.val_sets.{name}.file",), why, "correct the path", is_of_no_value=True)
    for rule in recipe.quantization.ignore:
        if rule.startswith("re:") and (why := pattern_problem(rule[3:])):
            message = f"`{rule[:60]}` is not a regular expression: {why}"
            yield fault(("quantization.ignore",), message, "correct it")


RULES = tuple(
    Rule(check)
    for check in (
        *(_model, _lora, _task, _rollout, _quantization, _correction, broken_objective, _dapo),
        *(_batch, _packing, _length, _cluster, _guard, _one_flow, _old_log_probs, _texts),
    )
)
"""Rules that need the recipe alone, in the order of the file's sections."""

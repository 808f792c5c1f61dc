"""Reads what a plan wants to read and write: model, data, profile, disks, installed packages. Judges nothing. Files of
a model, and of a profile for it, are read without torch: names, headers and sizes."""

from __future__ import annotations

import os
import os.path
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from appliance import console, hub
from appliance.errors import EngineError, RecipeError
from appliance.finding import Finding, fault
from appliance.gguf.source import GgufFacts, gguf_facts
from appliance.patch import recorded, why_unfit
from appliance.plan.bench_results import key_of_plan, read_result
from appliance.plan.host import HostFacts
from appliance.plan.model_shape import model_shape
from appliance.preflight.access import AccessFacts, read_access
from appliance.preflight.disk import Disks, Written, read_disks, read_written
from appliance.preflight.mismatch import Expected, expected_of
from appliance.preflight.template import TemplateChild
from appliance.preflight.weights import WeightsChild, WeightsFacts, folder_of_weights
from appliance.quant.files import PROFILE_FILE, SMOOTHING, made_of_another_class, read_file_header, tensor_shapes
from appliance.quant.headers import Damage, damage, missing_shards
from appliance.quant.uaq import layers_to_scale
from appliance.record.attestations import version_of
from appliance.record.code import as_it_runs, code_of
from appliance.record.plan import ProfilePlan, RunPlan
from appliance.tasks.library import PACKAGED_MODELS, is_from_hub, splits_of, task_of, too_few_problems
from appliance.tasks.packaged_model import PackageFacts, package_facts
from appliance.tasks.sample import SampleVerdict
from appliance.tasks.templates import TemplateFacts
from appliance.tasks.tools import read_tools, tools_request
from appliance.tasks.user_code import ChildOutput, run_child
from appliance.terms.devices import StoredResult
from appliance.terms.families import name_when_fused
from appliance.terms.schemes import Scheme
from appliance.terms.shapes import ModelShape, read_shape

_REMEDY = "mend the function, the rows or task.truth, or take a reward that reads such answers"
_REMEDY_OF_WRONG = f"{_REMEDY}; leave it where your function wants another form"
_REMEDY_OF_EASY = "mend the reward; leave it where such an answer is meant to earn as much"
_STARTS_WITHIN_S = 60.0  # the child that grades a sample, and what a grading may take longer than in a run


@dataclass(frozen=True)
class RewardProblem:
    message: str
    is_rare: bool = False
    """Whether the problem is a warning only: it is in at most half of the sample, so that some rows can never be right
    and the data is not that of another task; or it is about a reward of the user's own, which is theirs to judge."""
    remedy: str = _REMEDY


@dataclass(frozen=True)
class StackFacts:
    versions: tuple[tuple[str, str, str], ...] = ()
    """Versions that differ: (distribution, what the plan pins, what is installed or empty)."""
    patches: tuple[tuple[str, str], ...] = ()
    """Patches of the plan that cannot be applied: (name, reason)."""


@dataclass(frozen=True)
class InputFacts:
    """Facts about the plan's inputs, as seen from this host. A problem is empty where there is none, or where it was
    not looked for."""

    model_folder_exists: bool
    model_missing: tuple[str, ...]
    """Parts that the model folder lacks (`config.json`, `weights`, `tokenizer`)."""
    model_bytes: int
    """Size of the model's weights, 0 when unknown."""
    model_shape: ModelShape | None
    """Shape of the model by its config.json, None when unknown."""
    model_is_cached: bool
    """Whether the model is a name on the hub whose files are in the local cache of the hub."""
    is_offline: bool
    """Whether the hub is needed and HF_HUB_OFFLINE is set."""
    hub_problem: str
    """Reason why the hub cannot be reached."""
    data_faults: tuple[Finding, ...]
    """Faults of the data, those of a row at its `file:line`."""
    has_data: bool
    """Whether the cache has the problems that are made of the data."""
    disks: Disks
    """Disks that the run writes to."""
    profile_problem: str = ""
    """Reason why the named profile cannot be used (the function `profile_problem`)."""
    expected: Expected | None = None
    """Mismatch that the profile predicts, where there is a profile already."""
    uaq_problem: str = ""
    """Reason why UAQ cannot scale the model (the function `uaq_problem`)."""
    model_damage: Damage = field(default_factory=Damage)
    """Damage of the model's files of weights."""
    weights: WeightsFacts = field(default_factory=WeightsFacts)
    """Facts about whether the files of weights hold the model of config.json."""
    has_chat_template: bool = True
    """Whether the model has a chat template; also true where its files are not here, or its own code may make one."""
    model_problem: str = ""
    """Reason why the hub, which answers, does not give the model."""
    gguf: GgufFacts | None = None
    """Facts about the GGUF file that the model is converted from, where there is one."""
    package: PackageFacts = field(default_factory=PackageFacts)
    """Facts about the package of a built-in model that is not made yet."""
    revision_problem: str = ""
    """Reason why it is not known which commit `model.revision` is."""
    reward_problem: RewardProblem | None = None
    """Problem of the rewards, tried on the first problems."""
    tool_faults: tuple[Finding, ...] = ()
    """Faults of the tools, at `task.tools`."""
    access: AccessFacts = field(default_factory=AccessFacts)
    stack: StackFacts = field(default_factory=StackFacts)
    template: TemplateFacts = field(default_factory=TemplateFacts)
    """Facts about the model's chat template, where its files are here."""
    stored: StoredResult | None = None
    """Result of `bench` that counts here, where there is one."""
    written: Written = field(default_factory=Written)
    """Bytes that earlier attempts of the run wrote."""


def read_inputs(
    plan: RunPlan,
    *,
    ask_hub: bool,
    run_code: bool = True,
    read_weights: bool = True,
    try_template: bool = True,
    host: HostFacts | None = None,
    made_profile: Path | None = None,
) -> InputFacts:
    """Read the facts about a plan's inputs, data files in full.

    ask_hub: whether the network may be asked, and children, which takes seconds.  run_code: whether these may grade a
    sample and describe tools: the user's code runs in them, and a judge is asked.  read_weights: whether a child may
    check the model's files of weights against its config.json, which takes torch.  try_template: whether a child may
    try the model's chat template, which takes transformers.  host: for what `bench` kept; None: it is not looked up.
    made_profile: the folder of the one that the cache has.
    """
    with WeightsChild() as weights, TemplateChild() as template:
        children = (weights if read_weights else None, template if try_template else None)
        facts = _read(plan, ask_hub=ask_hub, run_code=run_code, host=host, children=children)
        facts = replace(facts, expected=expected_mismatch(plan, made_profile=made_profile))
        return replace(facts, weights=weights.hear(), template=template.hear())


def look_at_inputs(plan: RunPlan) -> InputFacts:
    """Read the facts that need no network and no child, for a plan that is refused anyway."""
    return read_inputs(plan, ask_hub=False, run_code=False, read_weights=False, try_template=False)


def _read(
    plan: RunPlan,
    *,
    ask_hub: bool,
    run_code: bool,
    host: HostFacts | None,
    children: tuple[WeightsChild | None, TemplateChild | None],
) -> InputFacts:
    """children: started as soon as there is something for them, and not waited for."""
    from appliance.tasks.prepare import has_data

    weights_child, template_child = children
    has_made_data, folder = has_data(plan), Path(plan.weights.name_or_path)
    name, commit = plan.weights.hub_name, plan.weights.commit
    cached = bool(name) and _is_cached(plan)
    needs_model = bool(name) and not cached
    needs_hub = needs_model or (is_from_hub(plan.task) and not has_made_data)
    is_offline = needs_hub and hub.is_offline()
    asks = ask_hub and needs_hub and not is_offline
    hub_problem = hub.problem() if asks else ""
    data_faults = _data_faults(plan)
    no_rewards, no_tools = missing_code(plan)
    asks_code = ask_hub and run_code and not (no_rewards or no_tools)
    access = read_access(plan, ask_network=ask_hub)  # before anything looks into the folder
    is_barred = str(folder) in access.unreadable
    is_folder = not plan.weights.is_cached and not name and folder.is_absolute()
    may_look = is_folder and not is_barred and os.path.isdir(folder)
    gguf = gguf_facts(Path(plan.weights.gguf)) if plan.weights.gguf else None
    weights_folder = folder if may_look else (_snapshot(plan) if cached else None)
    model_damage = damage(weights_folder) if weights_folder else Damage()
    shape = model_shape(plan.model, weights=plan.weights)
    is_refused = bool(model_damage or access.unreadable or (shape and shape.quantised))
    is_asked = ask_hub and (may_look or cached) and not is_refused
    if weights_child and is_asked and (weights := folder_of_weights(plan.weights)):
        weights_child.start(weights, trust_remote_code=plan.model.trust_remote_code)
    has_template = bool(gguf.chat_template) if gguf else not (may_look or cached) or _has_chat_template(plan)
    may_load = ask_hub and has_template and (run_code or not plan.model.trust_remote_code)
    if template_child and may_load and (may_look or cached or (gguf and not gguf.problem) or _is_made(plan)):
        template_child.start(plan)  # it takes seconds to load transformers, and runs beside the one that grades
    reward = reward_problem(plan) if asks_code and not data_faults else None
    return InputFacts(
        model_folder_exists=is_barred or os.path.isdir(folder),
        model_missing=hub.missing_parts(folder) if may_look else (),
        model_bytes=model_bytes(plan),
        model_shape=shape,
        model_is_cached=cached,
        is_offline=is_offline,
        hub_problem=hub_problem,
        data_faults=data_faults,
        has_data=has_made_data,
        disks=read_disks(Path(plan.run_dir)),
        profile_problem=profile_problem(plan),
        uaq_problem=uaq_problem(plan),
        model_damage=model_damage,
        has_chat_template=has_template,
        # Where the commit is not known, of `main`: what stands against the revision is told by revision_problem.
        model_problem=hub.model_refusal(name, revision=commit) if asks and needs_model and not hub_problem else "",
        revision_problem=_revision_problem(plan) if ask_hub else "",
        reward_problem=no_rewards or reward,
        tool_faults=tool_faults(plan, template=may_look or cached) if asks_code else no_tools,
        access=access,
        stack=read_stack(plan),
        gguf=gguf,
        package=_package_facts(plan, ask_index=ask_hub),
        stored=stored_result(plan, host=host) if host and not plan.trainer.one_flow else None,
        written=read_written(plan),
    )


def _data_faults(plan: RunPlan) -> tuple[Finding, ...]:
    """Find the faults of rows; where all rows are read, also those of what is made of them. Each file is read once."""
    task = plan.task
    task_to_read = task_of(task, files=plan.task_files)
    if not task.train_file or task_to_read.checked_rows:
        keys = {file: key for key, file in reversed(task.data_files_by_key.items())}  # of several the first
        return tuple(finding for file in task.data_files for finding in task_to_read.check_rows(file, key=keys[file]))
    try:
        splits = splits_of(task, files=plan.task_files)
        return tuple(too_few_problems(len(splits.train), prompts_per_step=plan.batch.prompts_per_step))
    except RecipeError as error:
        return error.findings


def _is_cached(plan: RunPlan) -> bool:
    """Tell whether the hub's cache has all of a model's files. One that is there and damaged counts: it is refused, for
    the hub is not asked for it again."""
    folder = _snapshot(plan)
    return folder is not None and not hub.missing_parts(folder) and not missing_shards(folder)


def _snapshot(plan: RunPlan) -> Path | None:
    """Return the folder in the hub's cache; of a model with a revision that of this very commit."""
    return plan.weights.folder if plan.model.revision else hub.cached_snapshot(plan.weights.hub_name)


def _is_made(plan: RunPlan) -> bool:
    """Tell whether the cache has a built-in model that was fetched."""
    return plan.model.builtin in PACKAGED_MODELS and os.path.isdir(plan.weights.name_or_path)


def _package_facts(plan: RunPlan, *, ask_index: bool) -> PackageFacts:
    packaged = PACKAGED_MODELS.get(plan.model.builtin)
    if packaged is None or _is_made(plan):
        return PackageFacts()
    return package_facts(packaged, cache_dir=Path(plan.cache_dir), ask_index=ask_index)


def _has_chat_template(plan: RunPlan) -> bool:
    folder = plan.weights.folder or hub.cached_snapshot(plan.weights.hub_name)
    return plan.model.trust_remote_code or folder is None or hub.has_chat_template(folder)


def _revision_problem(plan: RunPlan) -> str:
    name, revision = plan.weights.hub_name, plan.model.revision
    if not (name and revision) or plan.weights.commit:
        return ""
    why = hub.revision(name, requested=revision)[1]
    return f"it is not known which commit of `{name}` `{revision}` is: {why}"


def model_bytes(plan: RunPlan) -> int:
    """Return the size of the weights in the model's folder, 0 when it is not on this host yet."""
    folder = Path(plan.weights.name_or_path)
    return hub.weight_bytes(folder) if folder.is_absolute() else 0


def uaq_problem(plan: RunPlan) -> str:
    """Describe why `correction.uaq_scale` cannot be used; empty where it can, or where the model is not on this host
    yet."""
    folder = Path(plan.weights.name_or_path)
    if plan.uaq is None or not os.path.isfile(folder / "config.json"):
        return ""
    try:
        layers_to_scale(folder)
    except EngineError as error:
        return error.message
    return ""


def profile_problem(plan: RunPlan) -> str:
    """Describe why the folder of `quantization.profile` has no profile for this plan; empty where it has one, or where
    none is named. A resumed run has its own copy, and the folder may be gone."""
    if plan.profile is None or not plan.profile.source:
        return ""
    source = _profile_folder(plan.profile)
    if not os.path.isfile(source / PROFILE_FILE):
        return f"{source}: the folder has no {PROFILE_FILE}"
    try:
        header, shapes = read_file_header(source), tensor_shapes(source)
        channels = {group["source"]: shapes[SMOOTHING + group["source"]] for group in header["smoothing"]}
        if flat := [source for source, sizes in channels.items() if len(sizes) != 1]:
            raise ValueError(f"the scales of {flat[0]} are no vector")
    except EngineError as error:
        return error.message
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{source / PROFILE_FILE}: its header cannot be used: {type(error).__name__}: {error}"
    if (scheme := Scheme(header["scheme"])) is not plan.profile.scheme:
        return f"{source}: a profile for `{scheme}`, and the plan's scheme is `{plan.profile.scheme}`"
    model = Path(plan.weights.name_or_path)
    shape = read_shape(model / "config.json")
    if shape and (why := made_of_another_class(header, architectures=shape.architectures)):
        return f"{source}: of another model: {why}"
    return _of_another_model(header["smoothing"], channels, source=source, model=model, shape=shape)


def _of_another_model(
    groups: list[dict[str, Any]],
    channels: dict[str, tuple[int, ...]],
    *,
    source: Path,
    model: Path,
    shape: ModelShape | None,
) -> str:
    """Say what the profile smooths and the model has not; nothing of a model that is not here yet, or cannot be read.
    channels: of each group's norm or linear layer that is divided. shape: of the model."""
    try:
        have = tensor_shapes(model) if model.is_absolute() else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ""  # the model's own finding
    for group in groups if have else ():
        name = group["source"]
        rows, stored = channels[name][0], name if name in have else name_when_fused(name)
        if stored not in have:
            return f"{source}: of another model: it smooths {name}, which {model} does not have"
        is_last = stored != name and have[stored][0] >= rows  # the last rows of a fused layer
        if have[stored][:1] != (rows,) and not is_last:
            return f"{source}: of another model: {name} has {rows} channels there and {list(have[stored])} in {model}"
        if shape and group["head_dim"] not in (0, shape.head_size):  # files of the same sizes, and another function
            return (
                f"{source}: of another model: its heads have {group['head_dim']} channels, {model}'s {shape.head_size}"
            )
        columns = rows * group["readers_of_head"]
        for linear in group["linears"]:
            sizes = have.get(linear, have.get(name_when_fused(linear), (columns,)))  # experts have other names, too
            if sizes[-1:] != (columns,):
                fact = f"{linear} reads {columns} channels there and is {list(sizes)} in {model}"
                return f"{source}: of another model: {fact}"
    return ""


def expected_mismatch(plan: RunPlan, *, made_profile: Path | None = None) -> Expected | None:
    """Read what the run's profile predicts: that of `quantization.profile`, or the one that was made before
    (made_profile: its folder). None where there is no profile yet, where it predicts nothing, or has a problem."""
    if plan.profile is None or profile_problem(plan):
        return None
    named_folder = _profile_folder(plan.profile)
    folder = named_folder if os.path.isfile(named_folder / PROFILE_FILE) else made_profile
    return expected_of(folder) if folder else None


def _profile_folder(profile: ProfilePlan) -> Path:
    return Path(profile.folder if os.path.isfile(Path(profile.folder) / PROFILE_FILE) else profile.source)


def stored_result(plan: RunPlan, *, host: HostFacts) -> StoredResult | None:
    return read_result(key_of_plan(plan, host=host), cache_dir=Path(plan.cache_dir))[0]


def missing_code(plan: RunPlan) -> tuple[RewardProblem | None, tuple[Finding, ...]]:
    """Find files of the user's code that cannot be read. Returns the reward_problem and the tool_faults."""
    why, remedy = "no such file, or it cannot be read", "correct the path"
    gone = [each.path for each in code_of(plan) if not each.sha256]
    tools = tuple(fault(("task.tools",), f"{path}: {why}", remedy) for path in gone if path == plan.task.tools)
    rewards = ", ".join(path for path in gone if path != plan.task.tools)
    return RewardProblem(f"{rewards}: {why}", remedy=remedy) if rewards else None, tools


def reward_problem(plan: RunPlan) -> RewardProblem | None:
    """Try the rewards on the first problems and return what is wrong; None where nothing is, or the data is not here
    yet. The user's code is imported in any case: a run's own copies, where there are some."""
    task = as_it_runs(plan)
    has_rows = task.is_own and os.path.isfile(plan.task_files.train_parquet)
    if is_from_hub(task) and not code_of(plan) and not has_rows:
        return None
    for url in task.judges:
        console.say(f"note: `judge` sends what it is tried on to {url}: the first rows, their truths and responses")
    within_s = _STARTS_WITHIN_S + task.reward_timeout_s
    output = run_child("appliance.tasks.sample", stdin=plan.replace(task=task).to_json(), within_s=within_s)
    return _problem(output, within_s=within_s, is_own=task.is_own)


def tool_faults(plan: RunPlan, *, template: bool) -> tuple[Finding, ...]:
    """Find what is wrong with the user's tools. template: whether the model's files are here, so that its chat template
    can be checked as well."""
    if not plan.task.tools:
        return ()
    try:
        read_tools(tools_request(plan, model=plan.weights.name_or_path if template else ""))
    except RecipeError as error:
        return error.findings
    return ()


def _problem(output: ChildOutput, *, within_s: float, is_own: bool) -> RewardProblem | None:
    doing = output.words.get("doing", "the rewards of the first problems")
    if "verdict" not in output.words:
        if output.is_late:
            remedy = "mend what takes so long, or raise task.reward_timeout_s"
            return RewardProblem(f"{doing}: no end after {within_s:g} s", remedy=remedy)
        message = f"{doing}: its process ended with {output.code}: {output.printed}"
        return RewardProblem(message, remedy="mend the file: a reward must not end its process")
    verdict = SampleVerdict(**output.words["verdict"])
    if verdict.failure:
        return RewardProblem(verdict.failure, **({"remedy": verdict.remedy} if verdict.remedy else {}))
    if is_own:
        return _own_problem(verdict)
    if not verdict.wrong:
        return None
    share = f"{verdict.wrong} of {verdict.sampled}"
    message = f"{share} sampled rewards are wrong: {verdict.first}"
    return RewardProblem(message, is_rare=verdict.wrong * 2 <= verdict.sampled)


def _own_problem(verdict: SampleVerdict) -> RewardProblem | None:
    """Describe the problem of the rewards of a task of the user's own: warnings alone, for the grades are theirs to
    judge."""
    counted = (
        (verdict.wrong, "the right answer earns no more than an empty response", verdict.first),
        (verdict.unread, "the right answer earns nothing in a mark that models use", verdict.first_unread),
        (verdict.easy, "a wrong answer earns as much as the right one", verdict.first_easy),
    )
    facts = [f"in {count} of {verdict.sampled} sampled rows {what}: {first}" for count, what, first in counted if count]
    facts += [verdict.doubt] if verdict.doubt else []
    if not facts:
        return None
    remedy = _REMEDY_OF_WRONG if verdict.wrong else _REMEDY
    if len(facts) == 1:
        remedy = _REMEDY_OF_EASY if verdict.easy else verdict.remedy or remedy
    return RewardProblem("; ".join(facts), is_rare=True, remedy=remedy)


def read_stack(plan: RunPlan) -> StackFacts:
    installed = [(name, pinned, version_of(name)) for name, pinned in plan.pins]
    wanted = {name for each in plan.attestations for name in each.patches}
    problems = [(name, why_unfit(recorded()[name])) for name in sorted(wanted)]
    return StackFacts(
        versions=tuple(each for each in installed if each[1] != each[2]),
        patches=tuple((name, why) for name, why in problems if why),
    )

"""Judges a plan against the facts: pure functions, facts in, findings out. All findings at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from appliance.finding import Finding, Severity, error, warning
from appliance.plan.host import HostFacts, Limits
from appliance.plan.memory import GIB, cpu_ladder, host_bytes, is_estimated, memory_by_role, moments, peak, shape_on_cpu
from appliance.preflight import device
from appliance.preflight.access import judge_access
from appliance.preflight.child import REMEDY_OF_LATE
from appliance.preflight.container import judge_container
from appliance.preflight.disk import (
    bytes_in_bf16,
    bytes_of_a_save_by_time,
    bytes_to_cache,
    gib,
    judge_disk,
    needed_bytes,
)
from appliance.preflight.inputs import InputFacts, StackFacts
from appliance.preflight.mismatch import judge_mismatch
from appliance.preflight.weights import judge_weights
from appliance.record.plan import RunPlan
from appliance.tasks.library import TINY_MODELS, is_from_hub
from appliance.terms.counts import counted
from appliance.terms.environment import JUDGE_KEY_VARIABLE
from appliance.terms.families import ALIKE_WINDOWS, ALWAYS_PARTIAL, NEVER_PARTIAL, UNLIKE_WINDOWS, why_unknown
from appliance.terms.ropes import rope_conflict, unknown_rope
from appliance.terms.shapes import ModelShape

PYTHON = (3, 11)
_PADDING = 0.05  # of a model's rows: more without a word is no padding, which is some 0.2 to 2 %
_ROPE_REMEDY = (
    "train sequences no longer than the model was made for (task.max_prompt_tokens, task.max_response_tokens) with a "
    'copy whose config.json has "rope_type": "default", or another model'
)
PACKAGE_OF = {"libnuma.so.1": "libnuma1"}
_HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+", re.ASCII)
_TINY_START_S, _TINY_STEP_S, _TINY_STEP_SEQUENCES, _TINY_VALIDATION_S = 45, 2.2, 256, 2  # docs/results/demo.md
_SUPPORT_BYTES = 12  # of a word: four in the engine, in the queue and in a batch
_SHM_NEEDED = GIB // 4
_SHM_BESIDE_TINY_WEIGHTS = 43 << 20  # with the demo's 5 MiB less than Docker's 64: Ray keeps its objects in a file
_SHM_NEEDED_WITH_GPUS = GIB  # Docker's default is 64 MiB; NCCL and a bucket of weights per worker want more

# Of the demo on 2 cores, counted while it trained: 13 processes had up to 115 files each and 400 threads together.
_FILES_OF_A_PROCESS = 1024  # ten times as many: Ray opens some per worker, vLLM per file of weights
_THREADS = 2048  # OpenMP and Ray start some per core, in every process
_THREADS_PER_CORE = 64


def judge(plan: RunPlan, *, host: HostFacts, inputs: InputFacts, knows_device: bool = True) -> list[Finding]:
    """Judge a plan on this host: find what prevents it, and what the user should know.

    knows_device: whether the plan is for the device that the recipe means; else nothing is judged that depends on it.
    """
    model_bytes = bytes_in_bf16(inputs.model_shape, in_files=inputs.model_bytes)
    schemes = list(device.judge_planned_schemes(plan, host))
    is_slow = any(each.code == "scheme-slow" for each in schemes)  # said once, unless `bench` has measured it
    may_gain = inputs.stored is not None or not is_slow

    def of_the_device(findings: Iterable[Finding]) -> Iterable[Finding]:
        return findings if knows_device else ()

    checks = (
        _python(host),
        of_the_device(judge_stack(plan, host, inputs.stack)),
        judge_limits(host.limits, cores=host.cores, actors=plan.topology.gpus + plan.topology.engines),
        # Who may not write the run root may not write the cache in it: one cause, one finding.
        judge_access(replace(inputs.access, cache_problem="") if host.run_root_problem else inputs.access),
        of_the_device(_libraries(plan, host)),
        of_the_device(device.judge_gpus(plan, host)),
        device.judge_attention(plan, host),
        of_the_device(schemes),
        device.judge_scale_groups(plan, inputs.model_shape),
        of_the_device(device.judge_experts(plan, host=host, shape=inputs.model_shape)),
        _profile_and_uaq(inputs),
        device.judge_one_flow(plan, shape=inputs.model_shape),
        of_the_device(judge_mismatch(plan, expected=inputs.expected, shape=inputs.model_shape, stored=inputs.stored)),
        _model(plan, inputs),
        _shape(plan, inputs),
        _vocabulary(inputs),
        of_the_device(device.judge_parallel(plan, inputs.model_shape)),
        of_the_device(device.judge_kv_cache(plan, host, inputs.model_shape)),
        of_the_device(device.judge_gpu_memory(plan, host, inputs.model_shape)),
        _data(plan, inputs),
        of_the_device(device.judge_gain(plan, host=host, shape=inputs.model_shape, stored=inputs.stored))
        if may_gain and (plan.is_cpu or host.gpus)
        else (),
        _folder(host),
        judge_disk(
            plan,
            inputs.disks,
            model_bytes=model_bytes,
            shape=inputs.model_shape,
            written=inputs.written,
            to_cache=bytes_to_cache(plan, inputs.model_shape, in_files=inputs.model_bytes),
        ),
        of_the_device(_memory(plan, host, inputs.model_shape)),
        of_the_device(_shared_memory(plan, host, inputs.model_shape)),
        _logging(plan, host),
        _sampling(plan, host, inputs.model_shape),
        judge_container(
            host.container,
            needs_gpu=knows_device and not plan.is_cpu,
            num_gpus=len(host.gpus),
            writable=not host.run_root_problem,
        ),
        of_the_device(device.judge_guard(plan, inputs.model_shape)),
    )
    return [finding for check in checks for finding in check]


def judge_node(plan: RunPlan, host: HostFacts, shape: ModelShape | None) -> list[Finding]:
    """Judge another host of a cluster by its facts alone. Its program and GPUs are compared in cluster/node_report.py.

    shape: of the model, None where its sizes are not known.
    Not the log backends: only the driver, on the head, writes to them.
    """
    checks = (
        judge_limits(host.limits, cores=host.cores),
        _libraries(plan, host),
        device.judge_attention(plan, host),
        device.judge_offloaded_state(plan, host, shape),
        _folder(host),
        _memory(plan, host, shape),
        _shared_memory(plan, host, shape),
        judge_container(host.container, needs_gpu=False, num_gpus=0, writable=not host.run_root_problem),
    )
    return [finding for check in checks for finding in check]


def _python(host: HostFacts) -> Iterator[Finding]:
    if host.python != PYTHON:
        found = ".".join(map(str, host.python))
        yield error("python-version", "python", f"version {found} is untested", "use CPython 3.11")


def _libraries(plan: RunPlan, host: HostFacts) -> Iterator[Finding]:
    for library in host.missing_libraries if plan.is_cpu else ():
        package = PACKAGE_OF[library]
        remedy = f"apt-get install {package} (or your distribution's package with it)"
        yield error("missing-library", library, "the shared library is missing, vLLM needs it", remedy)


def _profile_and_uaq(inputs: InputFacts) -> Iterator[Finding]:
    if inputs.profile_problem:
        remedy = "point to a folder made by `appliance profile`, or use `auto`"
        yield error("profile", "quantization.profile", inputs.profile_problem, remedy)
    if inputs.uaq_problem:
        remedy = "leave out correction.uaq_scale, or use a model of the list of families"
        yield error("uaq", "correction.uaq_scale", inputs.uaq_problem, remedy)


def _model(plan: RunPlan, inputs: InputFacts) -> Iterator[Finding]:
    model, weights = plan.model, plan.weights
    folder = weights.name_or_path
    if model.trust_remote_code:
        message = f"Python code that comes with {model.path or model.builtin} will run"
        yield warning("remote-code", "model.trust_remote_code", message, "read it first")
    if inputs.package.problem:
        finding = error if inputs.package.is_certain else warning
        yield finding("model-package", "model.builtin", inputs.package.problem, inputs.package.remedy)
    if inputs.gguf and inputs.gguf.problem:
        yield error("model-gguf", "model.path", f"{weights.gguf}: {inputs.gguf.problem}", inputs.gguf.remedy)
        return
    if model.builtin in TINY_MODELS:
        return
    if weights.is_cached:
        pass
    elif weights.hub_name:
        yield from _hub_model(plan, inputs)
    elif folder.startswith("/"):
        if not inputs.model_folder_exists:
            yield error("model-missing", "model.path", f"{folder}: no such folder", "correct the path")
        elif inputs.model_missing:
            message = f"{folder}: the folder has no {' and no '.join(inputs.model_missing)}"
            remedy = (
                "point to a complete transformers model; *.bin and *.pt are pickles, which can run code: convert them"
            )
            yield error("model-incomplete", "model.path", message, remedy)
        elif inputs.model_damage:
            message = f"{folder}: {'; '.join(inputs.model_damage.problems)}"
            yield error("model-damaged", "model.path", message, inputs.model_damage.remedy)
    yield from judge_weights(inputs.weights, model=model.path or "")
    if not inputs.has_chat_template and not inputs.model_missing:
        message = f"{model.path} has no chat template: its tokenizer does not say how a prompt is put to it"
        remedy = "take an instruct model, or add a chat_template.jinja to the model's folder"
        if inputs.gguf:
            remedy = "take an instruct model, or its folder from the hub"
        yield error("chat-template", "model.path", message, remedy)
    if inputs.template.problem and not inputs.model_missing and not inputs.data_faults:
        yield error("chat-template", "model.path", inputs.template.problem, inputs.template.remedy)
    if inputs.template.unproven:
        yield warning("template-unproven", "model.path", inputs.template.unproven, REMEDY_OF_LATE)
    if inputs.template.begin_of_answer:
        remedy = "end the template with what begins an answer, under {% if add_generation_prompt %}"
        yield warning("generation-prompt", "model.path", inputs.template.no_generation_prompt, remedy)
    if inputs.template.long_prompts:
        yield warning("prompt-limit", "task.max_prompt_tokens", inputs.template.long_prompts, "raise it")
    if inputs.template.long_truths:
        remedy = "raise it: an answer that is cut before its end is wrong"
        yield warning("response-limit", "task.max_response_tokens", inputs.template.long_truths, remedy)


def _vocabulary(inputs: InputFacts) -> Iterator[Finding]:
    """Yield findings where tokenizer and model differ in their number of tokens by more than padding explains."""
    rows, words = inputs.model_shape.vocab if inputs.model_shape else 0, inputs.template.tokens
    if not rows or not words:
        return
    if words > rows:
        message = (
            f"the tokenizer has {words:,} words and the model {rows:,} rows: a token without a row ends the training"
        )
        yield warning("vocabulary", "model.path", message, "use the model's own tokenizer")
    elif rows - words > _PADDING * rows:
        message = (
            f"the model has {rows:,} rows and its tokenizer {words:,} words: rollouts never sample the others, and "
            "what probability the trainer gives them is mismatch"
        )
        yield warning("vocabulary", "model.path", message, "if this is another model's tokenizer, use the model's own")


def _hub_model(plan: RunPlan, inputs: InputFacts) -> Iterator[Finding]:
    name, revision = plan.weights.hub_name, plan.model.revision
    if not _HUB_NAME.fullmatch(name):
        message = f"`{name}` is neither a folder nor a possible name on the hub"
        yield error("model-missing", "model.path", message, "give a folder, or `owner/name`")
    elif not inputs.model_is_cached and (inputs.is_offline or inputs.hub_problem):
        why = "HF_HUB_OFFLINE is set" if inputs.is_offline else inputs.hub_problem
        at = f" at `{revision}`" if revision else ""
        message = f"`{name}`{at} is not a folder and not in the hub's cache, and {why}"
        yield error(
            "model-unreachable", "model.path", message, "give a folder, or download it where there is a network"
        )
    elif inputs.model_problem:
        names = "the name or model.revision" if revision else "the name"
        remedy = f"correct {names}; or accept the model's terms on the hub and set HF_TOKEN"
        yield error("model-refused", "model.path", inputs.model_problem, remedy)
    elif inputs.revision_problem:
        remedy = "give its commit, or the name of a branch or tag that the hub has"
        yield error("model-revision", "model.revision", inputs.revision_problem, remedy)
    elif inputs.model_damage:
        message = f"`{name}` in the hub's cache: {'; '.join(inputs.model_damage.problems)}"
        remedy = f"in a copy of its folder, given as model.path: {inputs.model_damage.remedy}"
        yield error(
            "model-damaged", "model.path", message, f"delete it from the cache, if its download was bad; or {remedy}"
        )


def _without_row(plan: RunPlan, shape: ModelShape) -> Iterator[Finding]:
    """Yield findings where a plan asks for what only families of the list have, and for a model without a class. What
    the structure of any other model must show is checked when its engine starts."""
    if not (why := why_unknown(shape.architectures)):
        return
    has_class = bool(shape.architectures)  # else all that is said is that
    asks = (
        ("model.path", not has_class or shape.has_experts, "use a model of the list"),
        ("trainer.forward", plan.trainer.quantises, "use `bf16`"),
        ("optimizer.norm_fed_lr_scale", plan.optimizer.norm_fed_lr_scale != 1, "leave it out"),
        ("model.lora.sync", plan.sends_adapters, "use `merge`"),
    )
    for place, is_asked, remedy in asks if has_class else asks[:1]:
        if is_asked:
            yield error("architecture", place, f"{plan.weights.name_or_path}: {why}", remedy)
    if shape.beside_text:
        message = f"its config.json has `{shape.beside_text}`: the model takes more than text, and no proof knows the "
        message += "places of its weights"
        yield error(
            "architecture", "model.path", f"{plan.weights.name_or_path}: {message}", "use a model of text alone"
        )
    if shape.other_mixer:
        message = f"some of its layers are `{shape.other_mixer}`: among layers that mix tokens the engine knows plain "
        message += "attention alone"
        remedy = "use a model whose layers all have plain attention"
        yield error("architecture", "model.path", f"{plan.weights.name_or_path}: {message}", remedy)


def _shape(plan: RunPlan, inputs: InputFacts) -> Iterator[Finding]:
    """Check what the weights must fit: verl and vLLM would report it after a minute of start-up, or not at all."""
    shape = inputs.model_shape
    if shape is None:
        return
    yield from _without_row(plan, shape)
    if shape.quantised:
        message = f"{plan.weights.name_or_path}: its weights are quantised already ({shape.quantised})"
        yield error("architecture", "model.path", message, "use the model that they were made from")
    longest = plan.task.longest
    if 0 < shape.max_positions < longest:
        message = f"prompt and response are up to {longest} tokens, {plan.model.given_name} takes {shape.max_positions}"
        yield error("context", "task.max_response_tokens", message, "lower it, or task.max_prompt_tokens")
    if why := rope_conflict(shape.ropes, longest=longest) or unknown_rope(shape.ropes):
        yield error("rope", "model.path", f"{plan.weights.name_or_path}: {why}", _ROPE_REMEDY)
    alike = ALIKE_WINDOWS.issuperset(shape.architectures)
    slides = shape.partial_window > 0 and not shape.other_mixer  # `layer_types` that differ by a window
    if slides and not alike and (NEVER_PARTIAL in shape.architectures or longest > shape.partial_window):
        unlike = (UNLIKE_WINDOWS[each] for each in shape.architectures if each in UNLIKE_WINDOWS)
        outcome = next(unlike, "vLLM and the trainer may treat them differently")
        remedies = [f"keep prompt and response within {shape.partial_window} tokens together"]
        if ALWAYS_PARTIAL not in shape.architectures:
            remedies.append('use a copy whose config.json has "use_sliding_window": false, and no layer_types')
        if NEVER_PARTIAL in shape.architectures:
            outcome, remedies = "vLLM does not start with them", remedies[1:]
        remedy = ", or ".join([*remedies, "another model"])
        layers = f"some of its layers have a sliding window, of {shape.partial_window} tokens"
        message = f"{plan.weights.name_or_path}: {layers}"
        yield error("window", "model.path", f"{message}: {outcome}", remedy)


def _data(plan: RunPlan, inputs: InputFacts) -> Iterator[Finding]:
    # They are the host's: what is wrong with a file or a row may differ on another one.
    yield from (replace(finding, code="data") for finding in inputs.data_faults)
    yield from (replace(finding, code="tools") for finding in inputs.tool_faults)
    if problem := inputs.reward_problem:
        severity = Severity.WARNING if problem.is_rare else Severity.ERROR
        place = "task.train_file" if plan.task.train_file else "task.kind"
        remedy = "mend the rows, or set the task that they belong to"
        if plan.task.is_own:
            place, remedy = "task.rewards", problem.remedy
        yield Finding(severity, "reward", (place,), problem.message, remedy)
    if any(reward.name == "code" for reward in plan.task.rewards):
        message = "`code` runs the programs that the model writes as you: it limits them, and it is no sandbox"
        remedy = "train in a container or a machine that has nothing to lose: --in-container"
        yield warning("no-sandbox", "task.rewards", message, remedy)
    for url in plan.task.judges:
        message = (
            f"`judge` sends prompts, truths and responses to {url}, and the key of {JUDGE_KEY_VARIABLE} if it is set"
        )
        yield warning("judge", "task.rewards", message, "train only with an address that may have them")
    if is_from_hub(plan.task) and not inputs.has_data and plan.task.is_own:
        message = f"rewards are not tried on rows of {plan.task.data} before a run has prepared its data"
        remedy = (
            "look at its rows with `appliance data preview`; on the rows of a task.train_file rewards are tried at once"
        )
        yield Finding(Severity.INFO, "not-scored", ("task.data",), message, remedy)
    if is_from_hub(plan.task) and not inputs.has_data and (inputs.is_offline or inputs.hub_problem):
        why = "HF_HUB_OFFLINE is set" if inputs.is_offline else inputs.hub_problem
        if plan.task.is_own:  # `datasets` keeps what it loaded once
            message = f"{plan.task.data} is a data set of the hub, and {why}"
            hint = "it must have been loaded here before; else give task.train_file"
            yield Finding(Severity.WARNING, "data-unreachable", ("task.data",), message, hint)
            return
        message = f"none is given, so the data comes from the hub, and {why}"
        yield error("data-unreachable", "task.train_file", message, "give a JSON-lines or parquet file")


def judge_stack(plan: RunPlan, host: HostFacts, facts: StackFacts) -> Iterator[Finding]:
    """Judge the installed versions and patches. Nothing is found for a plan of a GPU where there is none: the versions
    would only show that this is another host."""
    if not plan.is_cpu and not host.gpus:
        return
    remedy = "install the locked requirements: `make demo` does, or the image" + (
        "" if plan.is_cpu else " of the gpu flavour"
    )
    for name, pinned, installed in facts.versions:
        message = f"{installed or 'nothing'} is installed, the plan is for {pinned}"
        yield error("version", name, message, remedy)
    differ = {name for name, _, _ in facts.versions}
    for name, why in facts.patches if not differ else ():  # another version has other sources: said once
        yield error("patch", f"patch {name}", why, remedy)


def judge_limits(limits: Limits, *, cores: int, actors: int = 0) -> Iterator[Finding]:
    """Judge the limits of this user's processes. actors: of the whole run, on the host of its driver, which has a
    socket for each of them."""
    threads = max(_THREADS, _THREADS_PER_CORE * cores)
    files = max(_FILES_OF_A_PROCESS, _FILES_OF_A_PROCESS // 2 + actors)
    if limits.open_files < files:
        message = f"a process may open {limits.open_files} files, Ray and vLLM want {files}"
        remedy = "ulimit -Hn 65536, or in a container --ulimit nofile=65536:65536"
        yield error("open-files", "ulimit -n", message, remedy)
    if limits.threads < threads:
        message = f"{limits.threads} processes and threads are allowed, a run on {cores} cores may start {threads}"
        remedy = "raise it (ulimit -u), or in a container --pids-limit=-1"
        yield warning("threads", "ulimit -u", message, remedy)


def _folder(host: HostFacts) -> Iterator[Finding]:
    if host.run_root_problem and host.container is None:
        remedy = "set cluster.run_dir to a folder that you can write to"
        yield error("run-folder", "cluster.run_dir", host.run_root_problem, remedy)


def estimates(plan: RunPlan, *, model_bytes: int = 0, shape: ModelShape | None = None) -> list[tuple[str, str]]:
    """Estimate what a run needs: (what, how much), for people. model_bytes: of its files of weights, 0 when they are
    not here."""
    to_cache = bytes_to_cache(plan, shape, in_files=model_bytes)
    model_bytes = bytes_in_bf16(shape, in_files=model_bytes)
    disk = f"about {gib(sum(needed_bytes(plan, model_bytes=model_bytes, shape=shape, to_cache=to_cache)))}"
    if more := bytes_of_a_save_by_time(plan, model_bytes=model_bytes, shape=shape):
        disk += f", and {gib(more)} more with each save by checkpoint.every_minutes: all of them stay"
    needs = [("disk", disk if plan.model.builtin or model_bytes else "unknown until downloaded")]
    if of_host := shape_on_cpu(plan, shape):
        parts = ", ".join(f"{role} {size / GIB:.1f}" for role, size in memory_by_role(plan, of_host).items())
        needs.append(("memory", f"about {gib(peak(plan, of_host))}: {parts}"))
    for moment in moments(plan, shape) if shape else ():
        needs.append((f"memory, {moment.name}", moment.text))
    if shape and is_estimated(plan, shape) and (offloaded := host_bytes(plan, shape)):
        what = "the trainer's state and engines that sleep" if plan.sends_adapters else "the trainer's state"
        needs.append(("memory, host", f"about {gib(offloaded)} of {what} on each host"))
    needs.append(("time", _time(plan)))
    return needs


def _time(plan: RunPlan) -> str:
    """Only the built-in model was measured; of another one nothing is known before its first step."""
    sequences = plan.batch.prompts_per_step * plan.rollout.samples_per_prompt
    if plan.model.builtin in TINY_MODELS and plan.is_cpu:
        step_s = _TINY_STEP_S * max(1.0, sequences / _TINY_STEP_SEQUENCES)
        validations = 2 + (plan.trainer.steps - 1) // plan.trainer.validate_every
        validation_s = _TINY_VALIDATION_S * plan.task.validated_samples / 512
        seconds = _TINY_START_S + plan.trainer.steps * step_s + validations * validation_s
        total = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
        return (
            f"about {total}: a start of {_TINY_START_S} s and {counted(plan.trainer.steps, 'step')} of {step_s:.1f} s"
        )
    tokens = f"up to {sequences * plan.task.max_response_tokens:,} tokens"
    does = f"learns from {tokens}, and generates more where prompts are replaced"
    does = does if plan.algorithm.filters else f"generates {tokens}"
    return f"known after the first step; each of {counted(plan.trainer.steps, 'step')} {does}"


def _shared_memory(plan: RunPlan, host: HostFacts, shape: ModelShape | None) -> Iterator[Finding]:
    needed, flag = (_SHM_NEEDED, "2g") if plan.is_cpu else (_SHM_NEEDED_WITH_GPUS, "32g")
    if shape is not None and shape.is_tiny:
        needed = _SHM_BESIDE_TINY_WEIGHTS + 2 * shape.weights  # in BF16
    if host.shm_free_bytes < needed:
        message = f"{host.shm_free_bytes >> 20} MiB free, Ray and the weight updates need about {needed >> 20}"
        yield error("shared-memory", "/dev/shm", message, f"in a container: --shm-size={flag}")


def _memory(plan: RunPlan, host: HostFacts, read: ModelShape | None) -> Iterator[Finding]:
    """Judge the host's memory without a GPU. read: shape of the model by its files, None where they are not known."""
    shape = shape_on_cpu(plan, read)
    if shape is None:
        return
    needed, free = peak(plan, shape) // plan.cluster.nodes, host.memory_free_bytes
    if free < needed:
        message = f"{gib(needed - free)} are missing: {gib(free)} free, the run takes about {gib(needed)}"
        changes = cpu_ladder(plan, shape, limit=free * plan.cluster.nodes)
        fits = f"by the same estimate it fits with {'; '.join(changes)}" if changes else "take a larger host"
        yield warning("memory", "memory", message, f"close other programs; {fits}")


def _logging(plan: RunPlan, host: HostFacts) -> Iterator[Finding]:
    for backend in plan.logging.backends:
        if backend not in host.packages:
            message = f"the package `{backend}` is not installed"
            yield error("log-backend", "logging.backends", message, f"pip install {backend}, or leave it out")


def _sampling(plan: RunPlan, host: HostFacts, shape: ModelShape | None) -> Iterator[Finding]:
    """Report how many words a step's tokens can be drawn from at most, where engines report them."""
    rollout = plan.rollout
    if shape is None or not rollout.leaves_words_out:
        return
    words = min(rollout.top_k or shape.vocab, shape.vocab)
    tokens = plan.batch.prompts_per_step * rollout.samples_per_prompt * plan.task.max_response_tokens
    if (needed := _SUPPORT_BYTES * words * tokens) > host.memory_free_bytes:
        key = "rollout.top_k" if rollout.top_k else "rollout.top_p"
        message = (
            f"the words that a step's tokens are drawn from take {gib(needed)} where the model is so unsure that each "
            f"token has {words:,} of them; {gib(host.memory_free_bytes)} are free"
        )
        hint = "a trained model has a handful; rollout.top_k bounds them" if not rollout.top_k else "lower it"
        yield warning("top-p", key, message, hint)

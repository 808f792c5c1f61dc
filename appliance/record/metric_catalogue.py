"""Every key of the files of numbers that a run writes: its unit, its meaning, and when it is missing or null.

`docs/metrics.md` is printed from here: `python -m appliance.record.metric_catalogue >docs/metrics.md`. A test
compares the page with it, one that reads the source compares it with the places that write keys, and each test that
trains compares it with the lines that were written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

ALWAYS = "every step"
VALIDATED = "after a validation, also before training"
QUANTISED = "every step; null where no layer is quantised"
UPDATED = "every step; null where the update was left out"
COMPARED = "every step; null where a log-prob is not finite"
TOOLS = "with `task.tools`"
FILTERED = "with `algorithm.kind: dapo`"


@dataclass(frozen=True)
class Metric:
    """One key of a line."""

    key: str
    """Key as it is written; `<...>` in it is a name of the user's or a number."""
    unit: str
    """Unit: `fraction` for 0 to 1, empty for a word or a count without a unit."""
    meaning: str
    """Meaning of the value, as a sentence without its full stop; Markdown."""
    when: str = ALWAYS
    """Lines that have the key, and cases in which it is null."""


@dataclass(frozen=True)
class Table:
    """Keys that belong together."""

    title: str
    about: str
    """Paragraph above the table, or empty."""
    metrics: tuple[Metric, ...]


@dataclass(frozen=True)
class File:
    """A file of the run's folder with one JSON object a line."""

    name: str
    about: str
    """Paragraph below the file's heading."""
    tables: tuple[Table, ...]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(metric for table in self.tables for metric in table.metrics)


# metrics.jsonl

WHICH_STEP = Table(
    "Which step, and what ran in it",
    "",
    (
        Metric("step", "count", "The number of the step, from 1; 0 is the validation before training", "every line"),
        Metric("time_s", "s", "Seconds since the run's first event, breaks between attempts included", "every line"),
        Metric(
            "scheme",
            "",
            "The scheme in which the step's rollouts were really made, as the engines report it; `int8+bf16` where "
            "replicas differ",
            "every line",
        ),
        Metric("emulated", "", "Whether that scheme was emulated: its numbers are right, its speed says nothing"),
        Metric(
            "bf16_layers", "layers", "Quantised layers that the guard had put in BF16 for these rollouts, 0 without it"
        ),
        Metric(
            "guard_level",
            "",
            "Where on its [ladder](governor.md) the governor stood during the step: `observe`, `warn`, `tighten`, "
            "`raise-precision (...)`, `bf16`",
        ),
        Metric(
            "correction_cap",
            "",
            "The cap of the correction in this step, as tight as the guard had it",
            "every step; null for a method without a cap",
        ),
        Metric(
            "correction_reject_k3",
            "nats per token",
            "Sequences with a larger mean k3 were dropped, because the guard had tightened the correction",
            "every step; null where none were",
        ),
    ),
)

REWARDS = Table(
    "Rewards and responses",
    "",
    (
        Metric(
            "reward_mean", "reward", "The mean reward of the samples that the step trained on, without any KL penalty"
        ),
        Metric(
            "reward/<name>",
            "reward",
            "The mean of one reward of `task.rewards`, without its weight, over the samples to which it applied",
            "with `task.kind: own`; null where it applied to none",
        ),
        Metric(
            "reward_failures",
            "samples",
            "Samples whose reward function raised, hung, died or returned no finite number; their advantage is 0",
        ),
        Metric("response_tokens_mean", "tokens", "The mean length of a response; what tools said does not count"),
        Metric(
            "unfinished_fraction",
            "fraction",
            "Samples that were cut before the model ended them, of all that were generated for the step: at "
            "`task.max_response_tokens`, or where a tool's answer had no room or the chat template refused it",
            "every step, unless no sample was generated since the step before it",
        ),
        Metric(
            "equal_group_fraction",
            "fraction",
            "Prompts of which all samples are the same sequence of tokens: their advantages are 0",
        ),
        Metric("turns_mean", "turns", "How often the model spoke in a sample", TOOLS),
        Metric("tool_calls_mean", "calls", "Calls of tools in a sample", TOOLS),
        Metric("tool_calls_failed_fraction", "fraction", "Calls that ended in an error message, of all calls", TOOLS),
        Metric("tool_tokens_mean", "tokens", "Tokens of a sample that tools and the chat template added", TOOLS),
        Metric(
            "generated_prompts", "prompts", "Prompts that were answered for the step, those left out included", FILTERED
        ),
        Metric(
            "filtered_prompts", "prompts", "Prompts left out because all of their samples were equally right", FILTERED
        ),
        Metric("discarded_prompts", "prompts", "Usable prompts that were left over when the step was full", FILTERED),
        Metric(
            "generated_reward_mean",
            "reward",
            "The mean reward of all samples that were generated, those left out included; the guard judges this mean",
            "with `algorithm.kind: dapo`, in steps that graded something",
        ),
    ),
)

VALIDATION = Table(
    "Validation",
    "The line of step 0 has these keys, `step`, `scheme` and `time_s` only.",
    (
        Metric(
            "val_reward_mean",
            "reward",
            "The mean reward of the validation (greedy, unless `task.val_sets` says otherwise), in the scheme that the "
            "rollouts had at that time; with several validations that of the first",
            VALIDATED,
        ),
        Metric(
            "val_reward_bf16_mean",
            "reward",
            "The mean reward of the validation with all layers in BF16",
            f"{VALIDATED}; null where it was not due (`trainer.validate_bf16_every`)",
        ),
        Metric("val_samples", "problems", "The number of problems in that mean", VALIDATED),
        Metric(
            "val_scheme",
            "",
            "The scheme of `val_reward_mean`; not `scheme` where the step's weight update changed the scheme",
            VALIDATED,
        ),
        Metric(
            "val/<set>/avg@<n>",
            "reward",
            "The mean reward of one of several validations, over the `n` samples of each problem",
            f"{VALIDATED}, with `task.val_sets`",
        ),
        Metric(
            "val/<set>/pass@<k>",
            "fraction",
            "How often at least one of `k` samples passes, by the unbiased estimator of Chen et al. 2021",
            f"{VALIDATED}, with `task.val_sets`",
        ),
    ),
)

TIMES = Table(
    "Seconds",
    "`step_s` covers rollouts, log-probs, update and sync, and new engines where they were needed for the next step. "
    "Validation comes after it. Saving a checkpoint is in neither.",
    (
        Metric("step_s", "s", "The whole step, from its first prompt to the proven weight update"),
        Metric("rollout_s", "s", "Generating the samples and grading them"),
        Metric(
            "rollout_tokens_per_s",
            "tokens per s",
            "Generated tokens divided by `rollout_s`",
        ),
        Metric(
            "logprob_s",
            "s",
            "The pass for the old log-probs",
            "every step; 0 where the plan makes no such pass (`trainer.old_log_probs`)",
        ),
        Metric("update_s", "s", "Forward, backward and optimizer"),
        Metric(
            "sync_s", "s", "The weight update: sending, loading, quantising and proving, without restarts of engines"
        ),
        Metric("proof_s", "s", "The part of `sync_s` in which the slowest rank asked its kernels for the proof"),
        Metric("digest_s", "s", "The part of `sync_s` in which tensors were digested, sender and receiver together"),
        Metric("telemetry_s", "s", "Measuring: the mismatch in the trainer, and the codes in the slowest engine rank"),
        Metric(
            "kv_scales_s",
            "s",
            "The part of `sync_s` in which the scales of an FP8 KV cache were measured, written and proven",
            "with `rollout.kv_cache: fp8`",
        ),
        Metric("validate_s", "s", "The validation after the step, in one scheme or two", "steps with a validation"),
        Metric(
            "engine_restart_s",
            "s",
            "Replacing rollout engines by new ones in another scheme",
            "steps in which engines were replaced",
        ),
    ),
)

MISMATCH = Table(
    "Mismatch: how far the rollouts' policy is from the trainer's",
    "These numbers are over the response tokens of the step, before any correction. For each token "
    "`x = log p_trainer - log p_rollout`, in nats, and `w = exp(x)`. [The glossary](glossary.md) says what the names "
    "mean, and [the governor's page](governor.md#when-it-moves) which values are bad.",
    (
        Metric(
            "mismatch_k3_kl", "nats per token", "The k3 estimate of KL(rollout, trainer): mean of `w - 1 - x`", COMPARED
        ),
        Metric(
            "mismatch_kl",
            "nats per token",
            "The k1 estimate of KL(rollout, trainer): mean of `-x`; it can be negative",
            COMPARED,
        ),
        Metric("probs_diff_mean", "probability", "The mean of `abs(p_trainer - p_rollout)`", COMPARED),
        Metric("probs_diff_max", "probability", "The largest `abs(p_trainer - p_rollout)`", COMPARED),
        Metric("is_weight_mean", "", "The mean importance weight `w`; 1 without a mismatch", COMPARED),
        Metric("is_weight_std", "", "The standard deviation of `w`", COMPARED),
        Metric("is_weight_max", "", "The largest `w`", COMPARED),
        Metric(
            "is_ess",
            "fraction",
            "The effective sample size, `(sum w)^2 / (T sum w^2)` of `T` tokens; 1 without a mismatch",
            COMPARED,
        ),
        Metric("mismatch_chi2", "", "The chi-square divergence, `mean(w^2) - 1`", "every step"),
        Metric(
            "mismatch_ppl_gap",
            "perplexity",
            "The trainer's perplexity of a response less the engine's, mean over responses; above 0 where the trainer "
            "is less sure of what was sampled",
        ),
        Metric(
            "mismatch_equal_fraction",
            "fraction",
            "Tokens whose two log-probs are the same as float32; 1 with [one flow](one-flow.md)",
        ),
        Metric(
            "differing_tokens",
            "tokens",
            "Tokens whose log-probs differ",
            "with one flow on a CPU, in steps whose rollouts were in the planned precision",
        ),
        Metric("nonfinite_fraction", "fraction", "Tokens with a log-prob that is not finite, or is below -300 nats"),
        Metric("mismatch_largest_nats", "nats", "The `x` of the token on which the two differ most"),
        Metric("mismatch_largest_sequence", "", "The row of the batch that this token is in, from 0"),
        Metric("mismatch_largest_position", "", "Its place among the response's tokens, from 0"),
        Metric(
            "mismatch_top_kl",
            "nats per token",
            "KL(rollout, trainer) over the engine's most likely words, with all other words counted as one",
            "with `rollout.top_log_probs` above 0",
        ),
        Metric(
            "mismatch_top_equal_fraction",
            "fraction",
            "Tokens at which that divergence is exactly 0",
            "with `rollout.top_log_probs` above 0",
        ),
        Metric(
            "mismatch_by_length",
            "list",
            "The same statistics for responses of up to 16, 64, 256, 1024, 4096, 16384 and more tokens: "
            "[an object for each](#mismatch_by_length) of these ranges that has a response",
        ),
    ),
)

CORRECTION = Table(
    "What the correction did",
    "",
    (
        Metric(
            "is_truncated_fraction",
            "fraction",
            "Tokens on which the correction acted: cut, weighted 0, dropped, or with another clip bound",
        ),
        Metric(
            "is_above_cap_fraction",
            "fraction",
            "Tokens whose weight is above `correction.cap`, however tight the correction is now; the guard compares it "
            "with `guard.truncated_fraction`",
            "with methods that cut single tokens' weights: `tis`, `acr`, `adaptive`, `score-centering-tis`",
        ),
        Metric("acr_widened_fraction", "fraction", "Tokens whose upper clip bound was widened", "with `acr`"),
        Metric(
            "acr_bound_mean",
            "ratio",
            "The mean upper clip bound of the widened tokens",
            "with `acr`; null where none was widened",
        ),
        Metric(
            "adaptive_share",
            "fraction",
            "How much of the weights was used: 0 for none, 1 for all of them",
            "with `adaptive`",
        ),
        Metric("clip_bound_low", "ratio", "The lower clip bound of this step", "with `calibrated-clipping`"),
        Metric("clip_bound_high", "ratio", "The upper clip bound of this step", "with `calibrated-clipping`"),
        Metric(
            "clip_fitted_step",
            "step",
            "The step after which these bounds were fitted",
            "with `calibrated-clipping`; null before the first fit",
        ),
        Metric(
            "score_centering",
            "",
            "How much was taken out of the gradient: the size of the mean score, mean over tokens",
            "with `score-centering` and `score-centering-tis`, in steps with an update",
        ),
    ),
)

UPDATE = Table(
    "What the trainer's update did",
    "",
    (
        Metric(
            "entropy",
            "nats per token",
            "The trainer's mean entropy at the sampled tokens, at the rollouts' temperature",
        ),
        Metric("grad_norm", "", "The norm of the gradient before it is scaled down", UPDATED),
        Metric("learning_rate", "", "The learning rate of this step's updates", UPDATED),
        Metric(
            "clip_fraction",
            "fraction",
            "Tokens that the loss clipped, by verl's count, mean over the step's updates",
            UPDATED,
        ),
        Metric(
            "clipped_negative_fraction",
            "fraction",
            "Of the tokens with a negative advantage, those that learned nothing because their ratio was out of bounds",
            "every step; null where there was no such token, or no update",
        ),
        Metric(
            "reference_kl",
            "nats per token",
            "The divergence from the model at the start, by `algorithm.kl_estimator`",
            "with `algorithm.kl` above 0",
        ),
        Metric("grad_scale", "", "The factor that losses are multiplied by", "with `trainer.dtype: fp16`"),
        Metric(
            "overflow_fraction",
            "fraction",
            "The step's updates that were left out because a gradient overflowed",
            "with `trainer.dtype: fp16`",
        ),
    ),
)

SYNC = Table(
    "What the weight update did to the codes",
    "These numbers come from a fixed sample of up to eight rows of each weight.",
    (
        Metric(
            "codes_changed_fraction",
            "fraction",
            "Codes that differ from those of the update before. Near 0 the optimizer moves weights by less than a code",
            f"{QUANTISED}, and at an engine's first update",
        ),
        Metric(
            "saturated_fraction",
            "fraction",
            "Codes of the largest value there is. Each scale makes at least one: 1/K is the least for rows of K codes",
            QUANTISED,
        ),
        Metric("scale_drift", "", "The mean of `abs(log(scale / scale at the run's first update))`", QUANTISED),
        Metric(
            "layer_error_max",
            "fraction",
            "The largest relative error that quantising makes in the weights of a layer",
            QUANTISED,
        ),
        Metric(
            "kv_range_drift",
            "fraction",
            "The largest relative change, with this update, of the range of a layer's keys or values, from which the "
            "scales of an [FP8 KV cache](kv-cache.md) follow",
            "with `rollout.kv_cache: fp8`",
        ),
    ),
)

BY_LENGTH = Table(
    "mismatch_by_length",
    "Each object has `k3_kl`, `kl`, `probs_diff_mean`, `probs_diff_max`, `weight_mean`, `weight_std`, `weight_max`, "
    "`ess`, `chi2` and `ppl_gap`, as above, and:",
    (
        Metric("min_tokens", "tokens", "The shortest response of the bucket", ""),
        Metric("max_tokens", "tokens", "The longest response of the bucket", "null in the last bucket"),
        Metric("num_sequences", "responses", "Responses in the bucket", ""),
        Metric("num_tokens", "tokens", "Tokens of those responses", ""),
        Metric(
            "truncated_fraction",
            "fraction",
            "Tokens whose weight is above the cap",
            "0 with a method that cuts no token's weight",
        ),
        Metric("largest", "object", "`nats`, `sequence` and `position` of the largest difference", ""),
    ),
)

METRICS = File(
    "metrics.jsonl",
    "One line a step, and one of step 0 for a validation before training. **A number that is not finite is written as "
    "null.** Keys may be added; those on this page keep their names. With `logging.backends` every number of a line is "
    "also sent as `appliance/<key>`.",
    (WHICH_STEP, REWARDS, VALIDATION, TIMES, MISMATCH, CORRECTION, UPDATE, SYNC),
)

MEMORY = File(
    "memory.jsonl",
    "The memory that all processes of the run on the launcher's host take. It is measured every 5 s, or more seldom so "
    "that measuring takes at most a hundredth of the time.",
    (
        Table(
            "",
            "",
            (
                Metric("time", "Unix s", "When it was measured", ""),
                Metric(
                    "pss_bytes",
                    "bytes",
                    "The sum of their proportional set sizes: a page that several processes share counts once in all",
                    "",
                ),
                Metric("processes", "count", "The number of those processes", ""),
            ),
        ),
    ),
)

CLIPPING = File(
    "clipping.jsonl",
    "With `correction.method: calibrated-clipping`, a line for each fit of the clip bounds. A resumed run takes its "
    "bounds from here.",
    (
        Table(
            "",
            "",
            (
                Metric("step", "step", "The step after whose update the fit was made", ""),
                Metric("low", "ratio", "The fitted lower bound is `1 - low`, before the cap", ""),
                Metric("high", "ratio", "The fitted upper bound is `1 + high`, before the cap", ""),
                Metric("tokens", "tokens", "Tokens of the shadow batch", ""),
                Metric("above", "tokens", "Those that the recipe's upper bound clips in full precision", ""),
                Metric("below", "tokens", "Those that the recipe's lower bound clips in full precision", ""),
                Metric(
                    "unfitted_above",
                    "tokens",
                    "Those that the recipe's upper bound would clip by their ratio to the rollout policy",
                    "",
                ),
                Metric(
                    "unfitted_below",
                    "tokens",
                    "Those that the recipe's lower bound would clip by their ratio to the rollout policy",
                    "",
                ),
            ),
        ),
    ),
)

EVENTS = File(
    "events.jsonl",
    "What happens in a run, written when it happens: phases, notes, checkpoints, decisions of the guard, failures. "
    "Some kinds have further keys.",
    (
        Table(
            "",
            "",
            (
                Metric("time", "Unix s", "When it happened", "every line"),
                Metric(
                    "kind",
                    "",
                    "What it is: `phase`, `progress`, `profile`, `checkpoint`, `guard`, `reward`, `clipping`, "
                    "`cluster`, `sweep`, `resume`, `restart`, `stop`, `stall`, `failure`, `note`",
                    "every line",
                ),
                Metric("what", "", "A sentence; for a `phase` its name", "every line"),
                Metric(
                    "why", "", "The reason, or the numbers behind a decision", "every line; empty where there is none"
                ),
                Metric("done", "", "How much of a piece of work is done", "`progress`"),
                Metric("total", "", "How much that piece of work is in all", "`progress`"),
                Metric("note", "", "More about it", "`progress`"),
                Metric("error", "", "[The error's name](troubleshooting.md#exit-codes)", "`failure`"),
                Metric("hint", "", "What to do", "`failure`"),
                Metric("exit_code", "", "What the run ends with", "`failure`"),
                Metric(
                    "step", "step", "The step whose state is saved, or that the event is about", "where there is one"
                ),
            ),
        ),
    ),
)

FILES = (METRICS, EVENTS, MEMORY, CLIPPING)

_PATTERNS = tuple(
    re.compile(re.sub(r"<\w+>", ".+", re.escape(metric.key).replace(r"\<", "<").replace(r"\>", ">")))
    for metric in METRICS.metrics
)


def is_known(key: str) -> bool:
    """Tell whether a key of `metrics.jsonl` is in the catalogue."""
    return any(pattern.fullmatch(key) for pattern in _PATTERNS)


# The page

HEAD = """\
# Metrics

Every number that a run writes down, with its unit. The files lie in the run's folder, and each line is one JSON object.
(`samples.jsonl`, what the model said, is described [with the page of a run](report.md#what-is-on-it).) To look at some:

```
jq -c '[.step, .reward_mean, .mismatch_k3_kl]' runs/NAME/metrics.jsonl
```

This page is printed by `python -m appliance.record.metric_catalogue`.
"""


def page() -> str:
    """Render `docs/metrics.md`, the whole file."""
    parts = [HEAD]
    for file in FILES:
        parts.append(f"## {file.name}\n\n{file.about}\n")
        parts += ["\n".join(_section(table)) + "\n" for table in file.tables]
        if file is METRICS:
            parts.append("\n".join(_section(BY_LENGTH)) + "\n")
    return "\n".join(parts)


def _section(table: Table) -> Iterator[str]:
    if table.title:
        yield from (f"### {table.title}", "")
    if table.about:
        yield from (table.about, "")
    with_when = any(metric.when for metric in table.metrics)
    yield "| key | unit | meaning |" + " in which lines |" * with_when
    yield "| --- | --- | --- |" + " --- |" * with_when
    for metric in table.metrics:
        cells = [f"`{metric.key}`", metric.unit, metric.meaning, *([metric.when] if with_when else [])]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page())

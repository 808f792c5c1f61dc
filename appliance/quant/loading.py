"""What loading a checkpoint would make up or leave out, found by transformers itself from the headers of its files.

`from_pretrained` fills a tensor that the files lack with random numbers, leaves out one that the model does not have,
and casts whole numbers to floats, each with a warning at most. Here it loads tensors without memory (torch's meta
device) that have the names, shapes and types of the headers, and is asked what it did. So its own rules decide what may
be missing or ignored: tied heads, buffers, its lists of keys, its conversions (experts become one tensor).

Some of what it takes no engine does, and is refused here: a base model's names, a prefix too many, a tied head that is
not the embedding, a tied head alone, two names for one tensor, and numbers of experts that have a gap.
"""

from __future__ import annotations

import contextlib
import logging
import os.path
import re
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Module

from appliance.errors import WeightsError, first_line
from appliance.quant.headers import weight_files
from appliance.terms.counts import counted
from appliance.terms.families import REMEDY_OF_OWN_ATTENTION, why_own_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NUMBER = re.compile(r"\.\d+(?=\.)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MOST_NAMED = 3
_MOST_COMPARED, _SAMPLED_ROWS = 64, 256  # tensors of a kind, and rows of each
_MARGIN = 0.5  # octaves
_FAR = 1024.0
_ROWS = 4096  # of a tensor at a time
_AGAIN = "copy or download the model again, or correct its config.json"


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a checkpoint, without its values."""

    type: str
    """Type as safetensors names it, such as `BF16`."""
    shape: tuple[int, ...]
    file: Path


@dataclass(frozen=True)
class Loading:
    """Findings about a checkpoint; all of them are empty where nothing is wrong."""

    problem: str = ""
    """Reason why the files do not hold the model that config.json describes."""
    remedy: str = ""
    doubt: str = ""
    """Doubt about its types, though it can be loaded."""
    own_attention: str = ""
    """Name of transformers' class, where it takes no other attention than its own (the function of this name)."""


def ask_transformers(folder: Path, *, trust_remote_code: bool = False) -> Loading:
    """Compare the headers of a folder's files of weights with the model that its config.json describes. No values are
    read, but those of a head that is tied and is there all the same.

    trust_remote_code: whether code that comes with the model may run.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # the boundary of what a config.json may hold, and of code that may be the model's own
        problem = f"transformers cannot build the model of config.json: {type(error).__name__}: {first_line(error)}"
        return Loading(problem, "correct config.json, or take a model of a known family")
    try:
        loading = _Checkpoint(model, headers=read_headers(folder)).judge_loading()
    except WeightsError as error:
        loading = Loading(error.message, error.hint)
    return replace(loading, own_attention=own_attention(model))


def own_attention(model: PreTrainedModel) -> str:
    """Return the name of a model's class, if it computes attention itself and looks for none that was registered with
    transformers; an empty text otherwise. Such a class raises KeyError for a name that it does not know, or takes no
    notice of it: then all sequences of a row would see each other. What counts is the code of the layers that are
    called attention, whatever else the class has of other models; all of its code where none is called so."""
    looks_by_kind = {
        kind: hasattr(sys.modules.get(base.__module__), "ALL_ATTENTION_FUNCTIONS")
        for kind in {type(part) for part in model.modules()}
        for base in [next(base for base in kind.__mro__ if "forward" in vars(base))]
    }
    of_attention = [looks for kind, looks in looks_by_kind.items() if _is_attention(kind)]
    return "" if (all(of_attention) if of_attention else any(looks_by_kind.values())) else type(model).__name__


def _is_attention(kind: type[Module]) -> bool:
    """Tell whether a class of layers is called attention and computes something itself: an `AttentionNorm` that has all
    of torch's `RMSNorm` does not."""
    base = next(base for base in kind.__mro__ if "forward" in vars(base))
    return "attention" in kind.__name__.lower() and not base.__module__.startswith("torch.")


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Read the headers of the tensors in the files that transformers reads, by name. Raises WeightsError for a file
    that is broken."""
    headers: dict[str, TensorHeader] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    part = opened.get_slice(name)
                    headers[name] = TensorHeader(part.get_dtype(), tuple(part.get_shape()), file)
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file.name} cannot be read: {error}", hint="copy or download it again") from error
    return headers


_whole: weakref.WeakKeyDictionary[Module, int] = weakref.WeakKeyDictionary()  # of `load_whole`: how many tensors


def load_whole(auto_class: Any, name_or_path: str, *, is_trained: bool = False, **settings: Any) -> PreTrainedModel:
    """Call transformers' `auto_class.from_pretrained(name_or_path, **settings)`. Raises WeightsError when something of
    the model was made up, or something of the checkpoint left out or read as another type, and for a model that is to
    be trained when its class takes no attention but its own."""
    from transformers.utils import CONFIG_NAME, cached_file

    folder = Path(cached_file(name_or_path, CONFIG_NAME, revision=settings.get("revision"))).parent
    trusts = bool(settings.get("trust_remote_code"))
    files = weight_files(folder)
    # Of a snapshot of the hub the index may be here and its files not yet: a download broke off, or another rank's is
    # under way, and from_pretrained continues with it.
    is_here = bool(files) and (os.path.isdir(name_or_path) or all(map(os.path.isfile, files)))
    if is_here:
        _require(ask_transformers(folder, trust_remote_code=trusts), model=name_or_path, is_trained=is_trained)
    with _quiet():
        model, report = auto_class.from_pretrained(
            name_or_path, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    if not is_here:  # of the hub, and downloaded by now
        _require(ask_transformers(folder, trust_remote_code=trusts), model=name_or_path, is_trained=is_trained)
    if random := sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}):
        raise WeightsError(
            f"{name_or_path}: {_counted(random, 'not in the checkpoint and would be random')}", hint=_AGAIN
        )
    _whole[model] = len(model.state_dict())
    _leave_out_unused_code(model)
    return model


def _leave_out_unused_code(model: PreTrainedModel) -> None:
    """Remove `auto_map`, which names files of Python code beside published weights, from the configuration of a model
    that runs by transformers' own class, so that this code is not used. verl's save would enter the class into that
    mapping without a name, and config.json could then not be written. A saved model has its base's config.json and code
    all the same (trainer/checkpoints.py)."""
    runs_by_own_code = getattr(model, "_auto_class", None) is not None
    if not runs_by_own_code and getattr(model.config, "auto_map", None) is not None:
        del model.config.auto_map


def _require(loading: Loading, *, model: str, is_trained: bool) -> None:
    if loading.problem:
        raise WeightsError(f"{model}: {loading.problem}", hint=loading.remedy)
    if loading.own_attention and is_trained:
        raise WeightsError(f"{model}: {why_own_attention(loading.own_attention)}", hint=REMEDY_OF_OWN_ATTENTION)


def tensors_loaded(module: Module) -> int:
    """Count the tensors of this model, or of one in it, that `load_whole` has loaded; 0 where it did not."""
    return sum(_whole.get(part, 0) for part in module.modules())


@dataclass(frozen=True)
class _Report:
    """What `from_pretrained` made up and left out, by the model's own names."""

    missing: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    mismatched: frozenset[str] = frozenset()
    failure: str = ""
    """Reason why it reported nothing: tensors that it makes one of do not fit each other."""

    @property
    def is_clean(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched or self.failure)


class _Checkpoint:
    """The headers of a checkpoint beside the model that is to be loaded from it."""

    def __init__(self, model: PreTrainedModel, *, headers: Mapping[str, TensorHeader]) -> None:
        self._model, self._headers = model, headers
        self._tied = dict(getattr(model, "all_tied_weights_keys", {}))
        self._saved_shapes = saved_shapes(model)
        self._known = self._saved_shapes.keys() | self._tied.keys()
        self._names = {name: self._as_saved(name) for name in headers}
        integers = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
        self._usable = {
            name for name, header in headers.items() if header.type in _FLOATS or self._names[name] in integers
        }

    def _as_saved(self, name: str) -> str:
        """Return the name in this model's own checkpoints: transformers takes the base model's as well, without the
        prefix, and one prefix too many."""
        prefix = f"{self._model.base_model_prefix}."
        return next((each for each in (name, prefix + name, name.removeprefix(prefix)) if each in self._known), name)

    def judge_loading(self) -> Loading:
        checks = (self._class_problem, self._tensors_problem, self._head_problem, self._bits_problem)
        problem, remedy = next(filter(None, (check() for check in checks)), ("", ""))
        return Loading(problem, remedy, doubt="" if problem else self._mixed_types())

    def _class_problem(self) -> tuple[str, str] | None:
        architectures, built = getattr(self._model.config, "architectures", None) or [], type(self._model).__name__
        if not architectures or built in architectures or self._model.is_remote_code():
            return None
        problem = f"config.json names {architectures[0]}, which vLLM builds, but by its model_type "
        problem += f"transformers builds {built}"
        return problem, "correct `architectures` or `model_type` in config.json"

    def _tensors_problem(self) -> tuple[str, str] | None:
        by_name = defaultdict(list)
        for name, saved in self._names.items():
            by_name[saved].append(name)
        if twice := next((names for names in by_name.values() if len(names) > 1), None):
            problem = f"the files have one tensor of the model under two names, {' and '.join(sorted(twice))}"
            return problem, "leave one of them out, and save the model again"
        sources = {self._names[name] for name in self._usable}
        both = {head for head, source in self._tied.items() if {head, source} <= sources}
        report = self._loaded([name for name in self._usable if self._names[name] not in both])
        missing = sorted(self._saved_shapes.keys() - sources)
        unexpected = self._unexpected(report, missing=missing)
        if report.is_clean and not (missing and unexpected):  # a gap in the numbers of experts: they are only counted
            return self._names_problem()
        return self._describe(report, missing=missing, unexpected=unexpected)

    def _names_problem(self) -> tuple[str, str] | None:
        others = sorted(name for name, saved in self._names.items() if name != saved)
        if not others:
            return None
        fact = f"under names that transformers accepts and vLLM does not, the first for {self._names[others[0]]}"
        return _counted(others, fact), "load the model with transformers and save it again"

    def _loaded(self, names: Sequence[str]) -> _Report:
        state = {
            name: torch.empty(
                self._headers[name].shape,
                dtype=_FLOATS.get(self._headers[name].type, torch.int64),
                device="meta",
            )
            for name in names
        }
        try:
            with _quiet():
                _, loading_info = type(self._model).from_pretrained(
                    None,
                    config=self._model.config,
                    state_dict=state,
                    device_map={"": "meta"},
                    ignore_mismatched_sizes=True,  # else it raises, without their names
                    output_loading_info=True,
                )
        except RuntimeError as error:
            return _Report(failure=first_line(error))
        mismatched = frozenset(str(name) for name, *_ in loading_info["mismatched_keys"])
        return _Report(frozenset(loading_info["missing_keys"]), frozenset(loading_info["unexpected_keys"]), mismatched)

    def _unexpected(self, report: _Report, *, missing: Sequence[str]) -> list[str]:
        """List unexpected tensors, also what is numbered like the model's own and lies between or behind them: of
        experts transformers counts how many there are."""
        others = [name for name, saved in self._names.items() if saved not in self._known]
        lost = set(missing)
        counted = self._saved_shapes if report.failure or report.mismatched else missing
        numbered = {_NUMBER.sub(".#", name) for name in counted}
        layers = {name.rpartition(".")[0] for name in report.unexpected}  # of which it would have made one

        def is_unexpected(name: str) -> bool:
            is_numbered = _NUMBER.sub(".#", name) in numbered
            is_below = not layers.isdisjoint(_heads(name))
            return name in report.unexpected or is_numbered or is_below or not lost.isdisjoint(_tails(name))

        return sorted(filter(is_unexpected, others))

    def _describe(self, report: _Report, *, missing: list[str], unexpected: list[str]) -> tuple[str, str]:
        pairs = {name: saved for name, saved in self._names.items() if saved in self._saved_shapes}
        no_floats = sorted(name for name in pairs if name not in self._usable)
        of_no_floats = {pairs[name] for name in no_floats}
        missing = [name for name in missing if name not in of_no_floats]
        mismatched = sorted(
            name
            for name, saved in pairs.items()
            if name in self._usable and self._headers[name].shape != self._saved_shapes[saved]
        )
        shapes = [
            f"{name} has {list(self._headers[name].shape)} and not {list(self._saved_shapes[pairs[name]])}"
            for name in mismatched
        ]
        types = [f"{name} is {self._headers[name].type}" for name in no_floats]
        kinds = (
            (types, "no float, and there is no quantization_config"),
            (missing, "missing"),
            (unexpected, "not part of the model"),
            (shapes, "of another shape"),
        )
        facts = [_counted(names, fact) for names, fact in kinds if names]
        if not facts:  # by the names of the model, where no other is known
            more = sorted(report.missing | report.mismatched | report.unexpected)
            facts = [_counted(more, "not as the model has it")] if more else [report.failure]
        facts = [*facts, *self._layer_count_problem()]
        problem = f"the weights are not those of the model in config.json: {'; '.join(facts)}"
        return problem, self._remedy(missing, unexpected=unexpected, no_floats=no_floats)

    def _layer_count_problem(self) -> Iterator[str]:
        """Report the number of layers where only that differs."""
        there = {int(found[1]) for name in self._headers if (found := _LAYER.search(name))}
        wanted = {int(found[1]) for name in self._saved_shapes if (found := _LAYER.search(name))}
        if there != wanted and there and wanted and max(there) != max(wanted):
            yield f"the files have {counted(len(there), 'layer')}, config.json says {len(wanted)}"

    def _remedy(self, missing: Sequence[str], *, unexpected: Sequence[str], no_floats: Sequence[str]) -> str:
        if no_floats:
            return "take the model that it was quantised from, or copy or download it again"
        if unexpected and (prefix := _common_prefix(unexpected, missing)):
            return f"save the model again without `{prefix}`: what was saved is a wrapper around it"
        heads = [name for name in missing if name.endswith("lm_head.weight")]
        if heads and len(missing) == 1 and not unexpected:
            tie = "`tie_word_embeddings: true` in config.json, if the head is the embedding"
            return f"add the file with {heads[0]}; or {tie}"
        return _AGAIN

    def _head_problem(self) -> tuple[str, str] | None:
        """Check the head of a model that ties it: vLLM never reads it, transformers does where it differs."""
        name_of = {self._names[name]: name for name in self._usable}
        for head, source in self._tied.items():
            if head in name_of and source not in name_of:
                problem = f"{source} is missing; vLLM does not take {head} in its place, to which config.json ties it"
                return problem, f"save the model again: transformers reads it, and writes {source}"
            if head in name_of and not self._are_equal(name_of[head], name_of[source]):
                problem = f"config.json ties {head} to {source}, and the files have two that differ"
                return problem, "tie_word_embeddings: false in config.json, or leave the head out"
        return None

    def _are_equal(self, *names: str) -> bool:
        left, right = (self._headers[name] for name in names)
        if left.shape != right.shape:
            return False
        with safe_open(left.file, framework="pt") as first, safe_open(right.file, framework="pt") as second:
            parts = first.get_slice(names[0]), second.get_slice(names[1])
            starts = range(0, left.shape[0], _ROWS)
            rows = (slice(start, start + _ROWS) for start in starts)
            return all(torch.equal(parts[0][each].float(), parts[1][each].float()) for each in rows)

    def _bits_problem(self) -> tuple[str, str] | None:
        """Report where a tensor's type is a name that does not fit its bits: its values are as large as those of
        tensors of its kind only when they are read as the other type of 16 bits."""
        rare, usual = self._types_of_16_bits()
        with _Values(self._headers) as values:
            known = _UsualSizes(usual, headers=self._headers, values=values)
            wrong = [name for name in rare if known.fit_only_as_other_type(name)]
        if not wrong:
            return None
        fact = f"labelled with a type that does not fit the bits; that of the {len(usual)} other tensors does"
        return _counted([f"{name} is {self._headers[name].type}" for name in wrong], fact), _AGAIN

    def _types_of_16_bits(self) -> tuple[list[str], list[str]]:
        """Return names of the rarer of F16 and BF16, and of the other; the first is empty where only one is there."""
        both = [sorted(each for each in self._usable if self._headers[each].type == kind) for kind in ("F16", "BF16")]
        rare, usual = sorted(both, key=len)
        return rare, usual

    def _mixed_types(self) -> str:
        rare, _ = self._types_of_16_bits()
        if not rare:
            return ""
        return _counted(
            [f"{name} is {self._headers[name].type}" for name in rare], "of another type of 16 bits than the rest"
        )


class _Values:
    """The first values of a checkpoint's tensors. Each file is opened once: its header is as long as the checkpoint has
    tensors."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self._headers = headers
        self._files: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Values:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def first(self, name: str) -> Tensor:
        header = self._headers[name]
        if header.file not in self._files:
            self._files[header.file] = self._stack.enter_context(safe_open(header.file, framework="pt"))
        opened = self._files[header.file]
        return opened.get_slice(name)[:_SAMPLED_ROWS] if header.shape else opened.get_tensor(name)


class _UsualSizes:
    """How large the values of the tensors are that have the usual type of 16 bits, by the kind of tensor."""

    def __init__(self, usual: Sequence[str], *, headers: Mapping[str, TensorHeader], values: _Values) -> None:
        self._headers, self._values = headers, values
        self._alike: defaultdict[str | int, list[str]] = defaultdict(list)
        for name in usual:
            for kind in self._kinds(name):
                self._alike[kind].append(name)
        self._bounds: dict[str | int, tuple[float, float]] = {}

    def _kinds(self, name: str) -> tuple[str, int]:
        """Return the name without its numbers; and where no other tensor has that, as many dimensions."""
        return _NUMBER.sub(".#", name), len(self._headers[name].shape)

    def fit_only_as_other_type(self, name: str) -> bool:
        """Whether a tensor of the rare type has values of this size when its bits are read as the usual type, and has
        not as they are."""
        kind = next((kind for kind in self._kinds(name) if kind in self._alike), None)
        if kind is None:
            return False
        if kind not in self._bounds:
            sizes = [_octaves(self._values.first(other)) for other in self._alike[kind][:_MOST_COMPARED]]
            self._bounds[kind] = min(sizes) - _MARGIN, max(sizes) + _MARGIN
        least, most = self._bounds[kind]
        values, usual_type = self._values.first(name), _FLOATS[self._headers[self._alike[kind][0]].type]
        return least <= _octaves(values.view(usual_type)) <= most and not least <= _octaves(values) <= most


def saved_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return, by name, the shape of each tensor that a checkpoint of this model has, as transformers would save
    it now."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = getattr(model, "all_tied_weights_keys", {})
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}


def _octaves(values: Tensor) -> float:
    """Compute log2 of the median of what is no zero; far from all weights where nothing of it is finite."""
    sizes = values.float().abs()
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    return float(sizes.median().log2()) if len(sizes) else _FAR


def _counted(names: Sequence[str], fact: str) -> str:
    """Phrase a number of names, such as `2 of them are missing (a, b)`, with the first names."""
    shown = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    verb = "is" if len(names) == 1 else "are"
    return f"{len(names)} {verb} {fact} ({shown})"


def _common_prefix(unexpected: Sequence[str], missing: Sequence[str]) -> str:
    """Return the prefix of the model's own name in each name that is not the model's, where that name is missing."""
    lost = set(missing)
    prefixes = {name[: -len(each)] for name in unexpected for each in _tails(name) if each in lost}
    return next(iter(prefixes)) if len(prefixes) == 1 else ""


def _tails(name: str) -> Iterator[str]:
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _heads(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, which reports what it makes up as a table of warnings: here that is one line."""
    from transformers.utils import logging as of_transformers

    level = of_transformers.get_verbosity()
    of_transformers.set_verbosity(logging.CRITICAL)
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        of_transformers.set_verbosity(level)
        of_transformers.enable_progress_bar()

"""What an engine gets by FlashRL's variables, and FlashRL's YAML file: a list of engines' settings, read strictly.

Every key of FlashRL's is known, ours come after them. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import RecipeError
from appliance.finding import Finding, fault
from appliance.quant.files import PROFILE_FILE
from appliance.recipe.text import MAX_BYTES, Node, Refused, parse, path_problem, pattern_problem
from appliance.terms.schemes import Scheme
from appliance.terms.settings import METHOD_NAME, Quantisation
from flashrl_compat.names import IN_FILES, NAMES, OWN_NAMES, Name, listed
from flashrl_compat.variables import CONFIG_VARIABLE, LM_HEAD_VARIABLE, HubFile, Variables

THEIR_KEYS = (
    "fn",
    "load_format",
    "model",
    "profile",
    "distributed_executor_backend",
    "module_attribute_to_preserve",
    "quantization",
)
OUR_KEYS = ("emulated", "ignore", "lm_head_fp32")
LOAD_FORMATS = ("auto", "dummy")
EXTERNAL_LAUNCHER = "external_launcher"
BACKENDS = ("mp", "ray", "uni", EXTERNAL_LAUNCHER)

_PICKLES = (".pt", ".pth", ".pkl", ".bin")
_KEYS_HINT = "the keys are " + ", ".join(f"`{key}`" for key in (*THEIR_KEYS, *OUR_KEYS))


@dataclass(frozen=True)
class Entry:
    """One engine's settings."""

    name: Name
    quantisation: Quantisation
    load_format: str
    """Format in which the model is loaded: one of LOAD_FORMATS."""
    model: str
    """Model as the file has it, or empty."""
    backend: str
    """Backend as the file has it, or empty."""


@dataclass(frozen=True)
class EngineSettings:
    quantisation: Quantisation
    load_format: str
    """Load format; empty where the engine's own setting applies."""
    backend: str
    """Backend; empty where the engine's own setting applies."""
    reload: tuple[str, ...]
    """Checkpoints to reload, in order."""
    same_for_all: bool
    """Whether every rank gets the same settings."""
    notes: tuple[str, ...]
    """Differences from FlashRL, for the log."""


def engine_settings(variables: Variables, *, rank: int) -> EngineSettings:
    """Return the settings of one engine. rank: data-parallel, in verl the replica's. Raises RecipeError."""
    assert variables.config is not None  # the caller has checked
    entries = _entries_of(variables.config)
    entry = entry_of_rank(entries, rank=rank)
    return EngineSettings(
        quantisation=_with_lm_head(entry.quantisation, lm_head_fp32=variables.lm_head_fp32),
        load_format="" if entry.load_format == LOAD_FORMATS[0] else entry.load_format,
        backend="" if entry.backend == EXTERNAL_LAUNCHER else entry.backend,
        reload=variables.reload,
        same_for_all=all(each == entry for each in entries),
        notes=_notes(entry),
    )


def _entries_of(config: Name | Path | HubFile) -> tuple[Entry, ...]:
    if isinstance(config, Name):
        return (Entry(config, Quantisation(scheme=config.scheme), load_format=LOAD_FORMATS[0], model="", backend=""),)
    if isinstance(config, HubFile):
        return read_config(_downloaded(config), shown=f"{config.repo}/{config.path}")
    return read_config(config)


def _downloaded(file: HubFile) -> Path:
    """The file and every profile of ours beside it. Nothing else: FlashRL's own profiles are pickles."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(file.repo, allow_patterns=[file.path, f"*{PROFILE_FILE}"])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        fact = f"{file.repo}/{file.path} is no file here and cannot be had from the hub"
        raise RecipeError([fault((CONFIG_VARIABLE,), fact, str(error).splitlines()[0])]) from error
    path = Path(folder) / file.path
    if not path.is_file():
        raise RecipeError([fault((CONFIG_VARIABLE,), f"{file.repo} on the hub has no file {file.path}")])
    return path


def _with_lm_head(quantisation: Quantisation, *, lm_head_fp32: bool | None) -> Quantisation:
    if lm_head_fp32 is False and quantisation.lm_head_fp32:
        hint = "unset the variable, or change the file"
        raise RecipeError([fault((LM_HEAD_VARIABLE,), "it is 0, and the file says lm_head_fp32: true", hint)])
    return quantisation.replace(lm_head_fp32=quantisation.lm_head_fp32 or lm_head_fp32 is True)


def _notes(entry: Entry) -> tuple[str, ...]:
    notes = [f"{entry.name.theirs}: FlashRL: {entry.name.meant}; here: {entry.name.differs}"]
    if entry.backend == EXTERNAL_LAUNCHER:
        notes.append(
            "distributed_executor_backend: external_launcher of the file is left out; the engine's own setting applies"
        )
    if entry.load_format != LOAD_FORMATS[0]:
        notes.append("load_format: dummy: the weights are random until the first sync")
    return tuple(notes)


def read_config(path: Path, *, shown: str = "") -> tuple[Entry, ...]:
    """Read the entries, in order; at least one. `profile:` is a folder relative to the file.

    shown: how messages call the file.  Raises RecipeError with all problems.
    """
    file = shown or str(path)
    try:
        with path.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError([fault((file,), f"cannot be read: {error.strerror}")]) from error
    root, faults = parse(raw, file=file)
    nodes = _entries(root, file=file, faults=faults) if root else []
    entries = [_Reader(node, index=i, folder=path.parent, faults=faults).entry() for i, node in enumerate(nodes)]
    if faults:
        raise RecipeError(faults)
    return tuple(entry for entry in entries if entry)


def entry_of_rank(entries: tuple[Entry, ...], *, rank: int) -> Entry:
    """Choose the entry of a rank by FlashRL's rule: rank r takes entry r mod n. rank: data-parallel, in verl the
    replica's."""
    return entries[rank % len(entries)]


def _entries(root: Node, *, file: str, faults: list[Finding]) -> list[Node]:
    top = root.value
    if not isinstance(top, dict) or "configs" not in top:
        hint = "FlashRL's files are a mapping with a list under `configs`"
        faults.append(fault((), "`configs` is missing", hint, where=file))
        return []
    for key, node in top.items():
        if key != "configs":
            faults.append(fault((key,), "unknown key", "the only key outside the list is `configs`", where=node.place))
    configs = top["configs"]
    if not isinstance(configs.value, list) or not configs.value:
        faults.append(fault(("configs",), "expected a list of engines' settings", where=configs.place))
        return []
    return configs.value


class _Reader:
    """Reads one entry and adds its faults to the list."""

    def __init__(self, node: Node, *, index: int, folder: Path, faults: list[Finding]) -> None:
        self.node = node
        self.path = f"configs.{index}"
        self.folder = folder
        self.faults = faults
        self.values: dict[str, Node] = {}

    def entry(self) -> Entry | None:
        if not isinstance(self.node.value, dict):
            self.faults.append(fault((self.path,), "expected a mapping of keys", _KEYS_HINT, where=self.node.place))
            return None
        self.values = {key: node for key, node in self.node.value.items() if node.value is not None}
        for key in self.values:
            if key not in (*THEIR_KEYS, *OUR_KEYS):
                self._refuse(key, "unknown key", _KEYS_HINT)
        name = self._name()
        load_format = self._choice("load_format", LOAD_FORMATS) or LOAD_FORMATS[0]
        backend = self._choice("distributed_executor_backend", BACKENDS)
        model = self._text("model")
        self._texts("module_attribute_to_preserve")
        emulated, lm_head_fp32 = self._flag("emulated"), self._flag("lm_head_fp32")
        ignore = self._patterns("ignore")
        if name is None:
            return None
        self._check_quantization(name)
        if emulated and not name.scheme.spec.can_emulate:
            self._refuse("emulated", f"`{name.theirs}` is never emulated", "only FP8 schemes are: leave it out")
        quantisation = Quantisation(
            scheme=name.scheme,
            emulated=emulated,
            ignore=ignore,
            profile=self._profile(name),
            lm_head_fp32=lm_head_fp32,
        )
        return Entry(name=name, quantisation=quantisation, load_format=load_format, model=model, backend=backend)

    def _refuse(self, key: str, fact: str, hint: str) -> None:
        place = self.values[key].place if key in self.values else self.node.place
        self.faults.append(fault((f"{self.path}.{key}",), fact, hint, where=place))

    def _name(self) -> Name | None:
        use = f"use one of {listed((*NAMES, *OWN_NAMES))}"
        if "fn" not in self.values:
            self._refuse("fn", "is missing", use)
            return None
        word = self._text("fn")
        name = IN_FILES.get(word)
        if name is None and word:
            self._refuse("fn", f"unknown value `{word[:60]}`", use)
        return name

    def _text(self, key: str) -> str:
        value = self.values[key].value if key in self.values else ""
        if isinstance(value, str):
            return value.strip()
        if not isinstance(value, Refused):
            self._refuse(key, "expected text", "")
        return ""

    def _choice(self, key: str, legal: tuple[str, ...]) -> str:
        value = self._text(key)
        if value and value not in legal:
            self._refuse(key, f"unknown value `{value[:60]}`", "use one of " + ", ".join(f"`{each}`" for each in legal))
            return ""
        return value

    def _flag(self, key: str) -> bool:
        value = self.values[key].value if key in self.values else False
        if not isinstance(value, bool | Refused):
            self._refuse(key, "expected true or false", "")
        return value is True

    def _texts(self, key: str) -> tuple[str, ...]:
        value = self.values[key].value if key in self.values else []
        if isinstance(value, Refused):
            return ()
        if not isinstance(value, list) or not all(isinstance(item.value, str) for item in value):
            self._refuse(key, "expected a list of texts", "")
            return ()
        return tuple(item.value for item in value)

    def _patterns(self, key: str) -> tuple[str, ...]:
        """Exact names, and regular expressions after `re:`."""
        patterns = self._texts(key)
        for rule in patterns:
            if rule.startswith("re:") and (why := pattern_problem(rule[3:])):
                self._refuse(key, f"`{rule[:60]}` is not a regular expression: {why}", "correct it")
        return patterns

    def _check_quantization(self, name: Name) -> None:
        """FlashRL hands this to vLLM; here the scheme follows from `fn`, and the two may not contradict each other."""
        legal = (METHOD_NAME, *filter(None, [name.scheme.spec.vllm_name]))
        value = self._text("quantization")
        if value and value not in legal:
            hint = f"leave it out: `fn: {name.theirs}` says it all"
            self._refuse("quantization", f"`{value[:60]}` is not what `{name.theirs}` means", hint)

    def _profile(self, name: Name) -> str:
        value = self._text("profile")
        if not value:
            return ""
        if not name.scheme.spec.takes_profile:
            self._refuse("profile", f"`{name.theirs}` takes no profile", "leave it out")
            return ""
        if why := path_problem(value):
            self._refuse("profile", why, "correct the path")
            return ""
        path = Path(os.path.expanduser(value))
        if path.suffix in _PICKLES:
            self._refuse("profile", f"{path.name} is a pickle of FlashRL's, which can run any code", _remedy(name))
            return ""
        folder = (self.folder / path).absolute()
        if not (folder / PROFILE_FILE).is_file():
            self._refuse("profile", f"{folder} has no {PROFILE_FILE}", "name the folder of a profile, or leave it out")
        return str(folder)


def _remedy(name: Name) -> str:
    if name.scheme is not Scheme.INT8:
        return f"leave it out: `{name.theirs}` needs none here"
    return "`appliance convert-profile` makes a profile of ours of it; name its folder here"

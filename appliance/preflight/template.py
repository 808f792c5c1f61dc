"""What stands against a model's chat template, as a child of ours says that loads the tokenizer: see
tasks/templates.py."""

from __future__ import annotations

from importlib.util import find_spec

from appliance.preflight.child import WITHIN_S, EarlyChild
from appliance.processes import module_argv
from appliance.record.plan import RunPlan
from appliance.tasks.templates import TemplateFacts

_CHILD = "appliance.tasks.templates"
_TRIED = "the model's chat template, tried"


class TemplateChild:
    """The child that tries a model's chat template: started (`start`) where the tokenizer's files are here, read later
    (`hear`), and ended with the block in any case."""

    def __init__(self) -> None:
        self._child = EarlyChild(doing="trying the model's chat template")

    def __enter__(self) -> TemplateChild:
        self._child.__enter__()
        return self

    def __exit__(self, *of_an_error: object) -> None:
        self._child.__exit__(*of_an_error)

    def start(self, plan: RunPlan) -> None:
        """Start the child. Does nothing on a host that has the launcher alone and starts a container: preflight runs in
        that again."""
        if find_spec("transformers") is not None:
            self._child.start(module_argv(_CHILD), stdin=plan.model_dump_json())

    def hear(self) -> TemplateFacts:
        if not self._child.is_started:
            return TemplateFacts()
        output = self._child.hear()
        if "template" in output.words:
            return TemplateFacts(**output.words["template"])
        if output.is_late:
            return TemplateFacts(unproven=f"{_TRIED}: no end after {WITHIN_S:g} s")
        problem = f"{_TRIED}: its process ended with {output.code}: {output.printed}"
        return TemplateFacts(problem, "look at the tokenizer's files")

"""vLLM's entry point `vllm.general_plugins`: a function run in every vLLM process, several times.

vLLM logs and skips an error while *importing* this module, so the import is trivial; an error inside `register`
propagates and stops the engine.
"""


def register() -> None:
    from vllm.platforms import current_platform

    import appliance.engine.config  # noqa: F401  registers the quantisation method by its name
    from appliance.engine.cpu_patches import apply_cpu_patches
    from appliance.record.events import report_failures
    from appliance.record.liveness import keep_stacks

    keep_stacks("engine")
    if current_platform.is_cpu():
        with report_failures():
            apply_cpu_patches()

"""When an engine must not generate: who asks is told why, and no request waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine, free_engine, read_checkpoint, start_engine
from torch import Tensor

from appliance.errors import SyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HALF_UPDATED = r"half-updated: 15 layers did not receive all their weights: model\.embed_tokens \(0 of "


def start(folder: Path, **settings: object) -> Engine:
    from vllm.config.weight_transfer import WeightTransferConfig

    return start_engine(folder, scheme="bf16", weight_transfer_config=WeightTransferConfig(backend="shm"), **settings)


def test_a_core_in_another_process_says_why(two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch) -> None:
    """vLLM's usual LLM. A request that was waiting in a pause of the user's own when the update broke ends too."""
    from vllm import SamplingParams, envs

    ways_in.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    envs.disable_envs_cache()  # an engine of another test in this process enabled it
    engine = start(two_checkpoints[0])
    envs.disable_envs_cache()  # and the next one is in this process again
    llm, core = engine.llm, engine.llm.llm_engine.engine_core
    before = engine.generate()
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    llm.llm_engine.add_request("flies", {"prompt_token_ids": [1, 2, 3]}, params)
    llm.llm_engine.step()
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(two_checkpoints[1])})
    ends = []
    while llm.llm_engine.has_unfinished_requests():
        ends += [(each.request_id, each.outputs[0].finish_reason) for each in llm.llm_engine.step() if each.finished]
    assert ends == [("flies", "abort")]
    core.call_utility("pause_scheduler", "keep", False)
    llm.llm_engine.add_request("waits", {"prompt_token_ids": [1, 2, 3]}, params)
    llm.start_weight_update()
    with pytest.raises(Exception, match="layers did not receive all their weights"):
        llm.finish_weight_update()
    while not (outputs := llm.llm_engine.step()):
        pass
    assert [(each.request_id, each.outputs[0].finish_reason) for each in outputs] == [("waits", "abort")]
    for _ in range(2):
        with pytest.raises(
            SyncError, match=rf"^request \S+: the weights of rank 0 are {HALF_UPDATED}.*; restart the eng"
        ):
            engine.generate()
        assert not llm.llm_engine.has_unfinished_requests()
    assert before
    core.shutdown()


def test_an_engine_of_the_same_process_without_the_variable_is_vllms_own(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    proven = start(two_checkpoints[0])
    ways_in.delenv("FLASHRL_CONFIG")
    plain = start(two_checkpoints[0])
    plain.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(two_checkpoints[1])})
    assert plain.generate() != proven.generate()
    assert (plain.llm.get_weight_version(), proven.llm.get_weight_version()) == ("default", "default")
    free_engine(plain)
    free_engine(proven)


def test_a_worker_that_cannot_say_closes_the_engine_for_good(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    engine.generate()
    with ways_in.context() as patch:
        patch.setattr(type(engine.worker), "appliance_weights", lambda self, settles: None)  # another call's answer
        with pytest.raises(SyncError):
            engine.llm.collective_rpc("appliance_weights", args=(False,))
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(0, "whole", "")]
    for _ in range(2):
        with pytest.raises(SyncError, match=r"^request \S+: a worker's weights cannot be known: "):
            engine.generate()
    free_engine(engine)


def test_a_request_that_the_user_kept_over_an_update_is_told_of(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch
) -> None:
    """By its name and both versions; one that had no token yet is not."""
    from vllm import SamplingParams

    from flashrl_compat import core as module

    warnings: list[str] = []
    ways_in.setattr(module.LOGGER, "warning", lambda text, *values: warnings.append(text % values))
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    llm, core = engine.llm.llm_engine, engine.llm.llm_engine.engine_core.engine_core
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    name = llm.add_request("kept", {"prompt_token_ids": [1, 2, 3]}, params)
    llm.step()
    llm.step()
    core.pause_scheduler("keep", False)
    llm.add_request("new", {"prompt_token_ids": [1, 2, 3]}, params)
    for number, folder in enumerate((two_checkpoints[1], two_checkpoints[0]), start=1):
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        assert warnings[number - 1 :] == [f"1 requests mix weight versions {number - 1} and {number}: {name}"]
    core.resume_scheduler()
    ends = []
    while llm.has_unfinished_requests():
        ends += [(each.request_id, len(each.outputs[0].token_ids)) for each in llm.step() if each.finished]
    assert ends == [("kept", 8), ("new", 8)]
    free_engine(engine)


def test_a_store_of_keys_and_values_that_cannot_be_reset_is_told_of(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.config import KVTransferConfig

    from flashrl_compat import core as module

    warnings: list[str] = []
    ways_in.setattr(module.LOGGER, "warning", lambda text, *values: warnings.append(text % values))
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    store = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    engine = start(two_checkpoints[0], kv_transfer_config=store)
    for number in (1, 2):
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(two_checkpoints[number % 2])})
        said = "ExampleConnector has no reset: what it keeps beyond a request is read with the new weights"
        assert warnings == [said] * number
    free_engine(engine)


def test_a_kept_request_keeps_no_cache_of_the_old_weights(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch
) -> None:
    """A trainer in the engine's own process resets as vLLM does, which does nothing while a request has blocks."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": list(range(1, 100))}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)

    def finished(llm: object) -> dict[str, list[int]]:
        ends = []
        while llm.has_unfinished_requests():
            ends += [each for each in llm.step() if each.finished]
        return {each.request_id: list(each.outputs[0].token_ids) for each in ends}

    ways_in.setenv("FLASHRL_CONFIG", "int8")
    caches = {"block_size": 32, "enable_prefix_caching": True}
    fresh = start(two_checkpoints[1], **caches)
    fresh.llm.llm_engine.add_request("new", prompt, params)
    expected = finished(fresh.llm.llm_engine)
    free_engine(fresh)
    engine = start(two_checkpoints[0], **caches)
    llm, core = engine.llm.llm_engine, engine.llm.llm_engine.engine_core.engine_core
    llm.add_request("kept", prompt, params)
    llm.step()
    core.pause_scheduler("keep", False)
    engine.model.load_weights(read_checkpoint(two_checkpoints[1]))
    assert engine.llm.reset_prefix_cache()
    core.resume_scheduler()
    llm.add_request("new", prompt, params)
    ends = finished(llm)
    assert ends.pop("kept") and ends == expected
    free_engine(engine)


@pytest.mark.parametrize("past_the_core", [False, True])
def test_a_request_in_flight_ends_with_an_update_that_is_whole_at_once(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, past_the_core: bool
) -> None:
    """By one call of the core, or by the trainer's own process between two steps: as aborted, whoever waits for it."""
    from vllm import SamplingParams

    ways_in.setenv("FLASHRL_CONFIG", "int8")
    fresh = start(two_checkpoints[1])
    expected = fresh.generate()
    free_engine(fresh)
    engine = start(two_checkpoints[0])
    llm = engine.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    for name in ("one", "two"):
        llm.add_request(name, {"prompt_token_ids": [1, 2, 3]}, params)
    llm.step()
    llm.step()
    if past_the_core:
        engine.model.load_weights(read_checkpoint(two_checkpoints[1]))
    else:
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(two_checkpoints[1])})
    ends = [(each.request_id, each.outputs[0].finish_reason) for each in llm.step()]
    assert ends == [("one", "abort"), ("two", "abort")]
    assert not llm.has_unfinished_requests()
    assert engine.generate() == expected
    free_engine(engine)


def test_a_pooling_engine_answers_and_takes_no_update(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch
) -> None:
    """vLLM has no answer to a pooling request but a result, so none could be refused while weights are half-updated."""
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    pooling = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
    engine = start_engine(two_checkpoints[0], scheme="bf16", **pooling)

    def embedding() -> list[float]:
        (output,) = engine.llm.embed({"prompt_token_ids": [1, 2, 3]}, use_tqdm=False)
        return output.outputs.embedding

    before = embedding()
    assert len(before) == 64
    with pytest.raises(SyncError, match=r"^weight update: a pooling model takes none"):
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(two_checkpoints[1])})
    with pytest.raises(SyncError, match=r"^weight update: a pooling model takes none"):
        engine.model.load_weights(read_checkpoint(two_checkpoints[1]))
    with pytest.raises(SyncError, match=r"^weight update: a pooling model takes none after a sleep of level 2"):
        engine.llm.collective_rpc("sleep", kwargs={"level": 2})
    assert embedding() == before
    free_engine(engine)


def test_an_update_that_fails_before_its_first_tensor_leaves_the_weights(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder or a segment that is not there, a connection that was cut. The next one is the engine's first."""

    def cut_off() -> Iterator[tuple[str, Tensor]]:
        yield from ()
        raise SyncError("weight update: cut off")

    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    before, config = engine.generate(), engine.worker.model_runner.model_config
    with pytest.raises(Exception, match="nowhere"):
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path / "nowhere")})
    assert config.model == str(two_checkpoints[0])
    engine.llm.start_weight_update()  # the core closes, and is open again
    with pytest.raises(FileNotFoundError, match="no_segment"):
        engine.llm.update_weights({"update_info": {"segment": "no_segment"}})
    assert not engine.llm.llm_engine.engine_core.engine_core.is_scheduler_paused()
    assert engine.generate() == before
    ways = engine.worker.appliance_ways_in
    ways.begin("a sender")
    with pytest.raises(SyncError, match="cut off"):
        engine.model.load_weights(cut_off())
    assert engine.llm.collective_rpc("appliance_weights", args=(False,)) == [(0, "whole", "")]
    assert engine.generate() == before
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(two_checkpoints[1])})
    assert config.model == str(two_checkpoints[1])
    assert (ways.update._sync, engine.generate() == before) == (1, False)
    free_engine(engine)

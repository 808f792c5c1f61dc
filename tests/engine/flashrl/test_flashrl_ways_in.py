"""Each way in which a trainer updates an engine that it did not configure: proven, or no token."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine
from families import SIZES
from faults import settle
from torch import Tensor
from vllm.model_executor.model_loader.reload import layerwise
from ways_and_faults import (
    EMULATED,
    EVERY_WAY,
    IN_THE_WEIGHTS,
    ON_THE_WAY,
    SCHEMES,
    WAYS,
    Weights,
    by_buckets,
    by_call,
    by_iterator,
    by_tensor,
    cut_short,
    dropped,
    lent,
    listed,
    of_fp32,
    refusals,
    restart,
    start,
    tally_of,
)

from appliance.errors import SyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def fresh_answers(two_checkpoints: tuple[Path, Path]) -> dict[str, list]:
    """What an engine of the second checkpoint says, by scheme."""
    return {
        scheme: start_engine(two_checkpoints[1], scheme=scheme, emulated=scheme in EMULATED).generate()
        for scheme in (*SCHEMES, *EMULATED)
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way_ends_in_the_engine_of_the_new_weights(
    two_checkpoints: tuple[Path, Path], fresh_answers: dict[str, list], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    """One engine, update after update, to and fro; with and without a list of digests, and of FP32 masters."""
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(two_checkpoints[0])
    old, new = engine.generate(), fresh_answers[scheme]
    assert old != new
    first, second = map(read_checkpoint, two_checkpoints)
    version = 0
    for way in EVERY_WAY.values():
        for weights, says in ((second, new), (of_fp32(first), old)):
            way(engine, weights)
            version += 1
            assert (engine.generate(), engine.llm.llm_engine.get_weight_version()) == (says, str(version))
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(two_checkpoints[1])})
    assert (engine.generate(), engine.llm.llm_engine.get_weight_version()) == (new, str(version + 1))
    by_tensor(engine, first)
    engine.llm.collective_rpc("reload_weights")  # vLLM's own takes the folder that it was given last
    assert engine.generate() == new
    buffers = [(f"model.layers.{each}.self_attn.rotary_emb.inv_freq", torch.ones(16)) for each in (0, 1)]
    engine.model.load_weights([buffers[0], *first[:3], buffers[1], *first[3:], buffers[0]])  # it computes them itself
    assert engine.generate() == old


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_order_and_any_buckets_end_in_the_same_engine(
    two_checkpoints: tuple[Path, Path],
    fresh_answers: dict[str, list],
    ways_in: pytest.MonkeyPatch,
    scheme: str,
    record_property,
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(two_checkpoints[0])
    old = engine.generate()
    assert old != fresh_answers[scheme]
    first, second = map(read_checkpoint, two_checkpoints)
    shuffled, tried = random.Random(0), 0
    for _ in range(20):
        for weights, says in ((second, fresh_answers[scheme]), (first, old)):
            shuffled.shuffle(weights)
            rest = iter(weights)
            while bucket := list(itertools.islice(rest, shuffled.randint(1, 9))):
                engine.model.load_weights(bucket)
            assert engine.generate() == says
            tried += 1
    record_property("said", f"orders and buckets of weight updates in {scheme}: {tried}")
    assert tried == 40


@pytest.fixture(scope="module")
def two_fused(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Phi-3's, whose checkpoints have one tensor for queries, keys and values, and one for gate and up."""
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(**(SIZES | {"pad_token_id": 0}))
    folders = tuple(tmp_path_factory.mktemp(name) for name in ("fused-a", "fused-b"))
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        Phi3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folders


def test_one_tensor_for_a_fused_layer_is_taken_by_every_way(
    two_fused: tuple[Path, Path], ways_in: pytest.MonkeyPatch
) -> None:
    """And half of it beside it is one that came twice."""
    ways_in.setenv("FLASHRL_CONFIG", "bf16")
    engine, (first, second) = start(two_fused[0]), map(read_checkpoint, two_fused)
    old, new = engine.generate(), start_engine(two_fused[1], scheme="bf16").generate()
    assert old != new
    for way, weights, says in zip(WAYS.values(), (second, first) * 3, (new, old) * 3, strict=True):
        way(engine, listed(weights) if way is by_tensor else weights)
        assert engine.generate() == says
    name = "model.layers.0.mlp.gate_up_proj.weight"
    half = (name.replace("gate_up_proj", "up_proj"), dict(first)[name][:160])
    with pytest.raises(SyncError, match=r"^weight update: model\.layers\.0\.mlp\.up_proj\.weight came twice$"):
        by_tensor(engine, [(name, dict(first)[name]), half])


@pytest.mark.parametrize("scheme", [*SCHEMES, *EMULATED])
def test_what_waits_for_the_rest_of_its_layer_is_copied_out_of_the_senders_memory(
    two_checkpoints: tuple[Path, Path],
    fresh_answers: dict[str, list],
    ways_in: pytest.MonkeyPatch,
    tmp_path: Path,
    scheme: str,
) -> None:
    """By vLLM, and by what proves it: a sound update is none that is broken."""
    file = tmp_path / "fp8.yaml"
    file.write_text(f"configs: [{{fn: {scheme.replace('-', '_')}, emulated: true}}]")
    ways_in.setenv("FLASHRL_CONFIG", str(file) if scheme in EMULATED else scheme)
    engine = start(two_checkpoints[0])
    by_tensor(engine, lent(read_checkpoint(two_checkpoints[1])))
    assert engine.generate() == fresh_answers[scheme]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_fault_by_every_way_is_caught_and_never_sampled_from(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, record_property, scheme: str
) -> None:
    cases = [(way, fault, False) for way in EVERY_WAY for fault in IN_THE_WEIGHTS]
    called = f"tensor dropped, twice, cropped, not finite, unknown, sender dead: {len(EVERY_WAY)} ways in ({scheme})"
    old, new = two_checkpoints
    tally = tally_of(
        cases, called=called, scheme=scheme, ways_in=ways_in, old=old, weights=lambda: read_checkpoint(new)
    )
    record_property("said", str(tally))
    settle(tally, cases=42)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_fault_behind_the_digests_by_every_way_is_caught_and_never_sampled_from(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, record_property, scheme: str
) -> None:
    cases = [(way, fault, True) for way in WAYS for fault in ON_THE_WAY]
    called = f"tensor dropped, twice, cropped, swapped, flipped, after its digest: {len(WAYS)} ways in ({scheme})"
    old, new = two_checkpoints
    tally = tally_of(
        cases, called=called, scheme=scheme, ways_in=ways_in, old=old, weights=lambda: read_checkpoint(new)
    )
    record_property("said", str(tally))
    settle(tally, cases=30)


WAITING = (
    r"model\.layers\.0\.self_attn\.qkv_proj \(4160 of 12480 elements\) and 7 more layers wait for weights",
    "the list of what was sent has not come",
)


def test_a_sender_that_fails_within_a_call_leaves_an_error_that_names_what_waits(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch
) -> None:
    """Its own error, an interrupt, a segment that went with it. What it sent before is in the model."""

    def interrupted(sent: Weights) -> Iterator[tuple[str, Tensor]]:
        yield from sent
        raise KeyboardInterrupt

    def vanished(engine: Engine) -> None:
        engine.llm.start_weight_update()
        engine.model.load_weights(weights[:9])
        engine.llm.update_weights({"update_info": {"segment": "no_segment"}})

    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine, weights = start(two_checkpoints[0]), read_checkpoint(two_checkpoints[1])
    for sender, waits, update in (
        ("load_weights", WAITING[0], lambda: by_call(engine, cut_short(weights))),
        ("reload_weights", WAITING[0], lambda: by_iterator(engine, cut_short(weights))),
        ("load_weights", WAITING[0], lambda: by_call(engine, interrupted(weights[:9]))),
        ("a layerwise reload", WAITING[0], lambda: vanished(engine)),
        ("load_weights", WAITING[1], lambda: by_call(engine, interrupted(listed(weights)[:-1]))),
    ):
        with pytest.raises((ConnectionError, KeyboardInterrupt, FileNotFoundError)):
            update()
        why = f"half-updated: an update by {sender} did not finish: {waits}"
        first, second, past = refusals(engine)
        assert re.fullmatch(rf"request \S+: the weights of rank 0 are {why}", first), first
        assert re.fullmatch(rf"request \S+: the weights of rank 0 are {why}", second), second
        assert re.fullmatch(rf"weight update: the engine's weights are {why}", past), past
        restart(engine, read_checkpoint(two_checkpoints[0]))
    free_engine(engine)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_update_that_is_not_whole_is_told_of_when_the_cache_is_reset_and_when_tokens_are_asked_for(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    """Whichever comes first: plain `load_weights` says no end."""
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(two_checkpoints[0])
    rest = dropped(read_checkpoint(two_checkpoints[1]))
    for ask in (
        engine.llm.reset_prefix_cache,
        lambda: engine.generate(resets=False),
        lambda: engine.worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1)),
    ):
        by_tensor(engine, rest)
        lost = r"1 layer did not receive all its weights: model\.layers\.0\.self_attn\.qkv_proj \(\d+ of 12480 "
        with pytest.raises(SyncError, match=rf"^weight update: {lost}"):
            ask()
        assert all(re.search(lost, said) for said in refusals(engine))
        restart(engine, read_checkpoint(two_checkpoints[0]))
    free_engine(engine)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_updates_of_plain_tensors_that_meet_are_an_error(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    """Tensor for tensor, and one that begins when the other has sent a part. Nothing of it is ever whole."""
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    first, second = map(read_checkpoint, two_checkpoints)
    engine = start(two_checkpoints[0])
    for meet in ([each for pair in zip(second, first, strict=True) for each in pair], [*second[9:20], *first]):
        twice = re.escape(next(name for number, (name, _) in enumerate(meet) if name in dict(meet[:number])))
        with pytest.raises(SyncError, match=rf"^weight update: {twice} came twice$"):
            by_tensor(engine, meet)
        assert all(re.search(f"half-updated: {twice} came twice", said) for said in refusals(engine))
        restart(engine, first)
    free_engine(engine)


BEGINS: dict[str, tuple[str, Callable[[Engine, Path], object]]] = {
    "tensors": ("load_weights", lambda engine, folder: by_buckets(engine, read_checkpoint(folder)[:6])),
    "reload": ("a layerwise reload", lambda engine, folder: layerwise.initialize_layerwise_reload(engine.model)),
    "transfer": ("a layerwise reload", lambda engine, folder: engine.llm.start_weight_update()),
    "folder": (
        "reload_weights of {}",
        lambda engine, folder: engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)}),
    ),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("second", ["reload", "transfer", "folder"])
@pytest.mark.parametrize("first", ["tensors", "reload", "transfer"])
def test_two_updates_at_once_are_refused(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, first: str, second: str, scheme: str
) -> None:
    """Each way within each that stays open: tensors of plain `load_weights` are then those of the update that is. A
    second transfer vLLM refuses itself; the first one stays open."""
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine, folder = start(two_checkpoints[0]), two_checkpoints[1]
    (first_sender, begin), (other, begin_again) = BEGINS[first], BEGINS[second]
    begin(engine, folder)
    refusal = f"weight update: it was begun by {first_sender}, and then by {other.format(folder)} as well$"
    if first == second == "transfer":
        refusal = "start_weight_update called while a weight update is already active"
    with pytest.raises((SyncError, RuntimeError), match=f"^{refusal}"):
        begin_again(engine, folder)
    why = f"an update was begun by {first_sender}, and then by {other.format(folder)} as well"
    if first == second == "transfer":
        why = "a layerwise reload has not ended it, so nothing is generated|open on rank 0, begun by a layerwise reload"
    assert all(re.search(why, refused) for refused in refusals(engine))
    free_engine(engine)


def test_an_open_update_refuses_requests_by_its_name_until_it_is_finished(
    two_checkpoints: tuple[Path, Path], fresh_answers: dict[str, list], ways_in: pytest.MonkeyPatch
) -> None:
    from flashrl_compat.shared_memory import ShmTrainer

    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    engine.llm.start_weight_update()
    is_open = "a weight update is open on rank 0, begun by a layerwise reload: no weights have come yet$"
    with pytest.raises(SyncError, match=rf"^request \S+: {is_open}"):
        engine.generate()
    with pytest.raises(SyncError, match=f"^the engine stays paused: {is_open}"):
        engine.llm.llm_engine.engine_core.engine_core.resume_scheduler()
    client = SimpleNamespace(
        start_weight_update=lambda: None,
        update_weights=lambda info: engine.llm.update_weights({"update_info": info}),
        finish_weight_update=engine.llm.finish_weight_update,
    )
    ShmTrainer(client=client, source=read_checkpoint(two_checkpoints[1]), chunk_bytes=1 << 20).send_weights()
    assert engine.generate() == fresh_answers["int8"]
    engine.llm.start_weight_update()
    engine.model.load_weights(read_checkpoint(two_checkpoints[0])[:9])
    with pytest.raises(SyncError, match=r": model\.\S+ \(\d+ of \d+ elements\) and \d+ more layers wait for weights$"):
        engine.generate()


def test_what_a_transfer_has_received_and_not_applied_is_not_proven(
    two_checkpoints: tuple[Path, Path], fresh_answers: dict[str, list], ways_in: pytest.MonkeyPatch
) -> None:
    """vLLM's `defers_processing`, from 0.29 on: whoever ends the update himself need not know that the transfer has a
    thread of its own, and before that end no token is sampled."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from flashrl_compat import shared_memory
    from flashrl_compat.shared_memory import ShmEngine, ShmTrainer, ShmUpdateInfo

    received: list[Weights] = []

    class DeferringEngine(ShmEngine):
        defers_processing = True

        def receive_weights(self, update_info: ShmUpdateInfo) -> None:
            received.append(list(shared_memory._read(update_info)))

        def drain_pending(self) -> None:
            with ThreadPoolExecutor() as pool:
                for weights in received:
                    pool.submit(self.model.load_weights, weights).result()
            received.clear()

        def finish_weight_update(self) -> None:
            self.drain_pending()
            super().finish_weight_update()

    ways_in.setitem(WeightTransferEngineFactory._registry, "deferring", lambda: DeferringEngine)
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    transfer = WeightTransferConfig(backend="deferring")
    engine = start_engine(two_checkpoints[0], scheme="bf16", weight_transfer_config=transfer)
    old = engine.generate()
    client = SimpleNamespace(
        start_weight_update=engine.llm.start_weight_update,
        update_weights=lambda info: engine.llm.update_weights({"update_info": info}),
        finish_weight_update=lambda: None,
    )
    ShmTrainer(client=client, source=read_checkpoint(two_checkpoints[1]), chunk_bytes=40_000).send_weights()
    with pytest.raises(SyncError, match=r"begun by a layerwise reload: no weights have come yet$"):
        engine.generate()
    layerwise.finalize_layerwise_reload(engine.model, engine.runner.model_config)  # not vLLM's finish_weight_update
    assert engine.generate() == fresh_answers["int8"]
    engine.worker._weight_update_active = False
    client.finish_weight_update = engine.llm.finish_weight_update
    ShmTrainer(client=client, source=read_checkpoint(two_checkpoints[0]), chunk_bytes=40_000).send_weights()
    assert engine.generate() == old
    with pytest.raises(SyncError, match=r"1 layer did not receive all its weights: model\.layers\.0\.self_attn\.qkv"):
        ShmTrainer(
            client=client, source=dropped(read_checkpoint(two_checkpoints[1])), chunk_bytes=40_000
        ).send_weights()
    free_engine(engine)


def test_a_transport_that_packs_tensors_leaves_each_where_it_can_be_read() -> None:
    """One behind the other, as vLLM's CUDA IPC and NCCL have them; the first one of ours is bytes."""
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    from flashrl_compat.sender import with_manifest

    weights = [("a", torch.randn(3, 5).to(torch.bfloat16)), ("b", torch.randn(7, 16).to(torch.bfloat16))]
    sent = list(with_manifest(weights, number=1))
    names, tensors = zip(*sent, strict=True)
    flat = [each.contiguous().view(torch.uint8).view(-1) for each in tensors]
    shapes, types = [list(each.shape) for each in tensors], [each.dtype for each in tensors]
    unpacked = unpack_tensor(torch.cat(flat), list(names), shapes, types, [len(each) for each in flat])
    assert [name for name, _ in unpacked] == ["appliance.precision", "a", "b", "appliance.manifest"]
    assert all(torch.equal(one, other) for (_, one), other in zip(unpacked, tensors, strict=True))
    assert all(each.storage_offset() * each.element_size() % 2 == 0 for _, each in unpacked[1:3])


@pytest.mark.parametrize("wakes", ["first", "last"])
def test_nothing_is_generated_between_a_deep_sleep_and_an_update(
    two_checkpoints: tuple[Path, Path], fresh_answers: dict[str, list], ways_in: pytest.MonkeyPatch, wakes: str
) -> None:
    """A CPU's worker sleeps by doing nothing; the core's calls are those of a GPU."""
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    core = engine.llm.llm_engine.engine_core.engine_core
    core.sleep(level=2)
    if wakes == "first":
        core.wake_up()
        assert core.is_scheduler_paused()
        with pytest.raises(SyncError, match=r"^request \S+: rank 0 has had no weights since a sleep of level 2, which"):
            engine.generate()
        with pytest.raises(SyncError, match="no weights have come since a sleep of level 2"):
            engine.worker.appliance_ways_in.require_whole()
        core.sleep(level=2)
        core.wake_up(["weights"])
    by_tensor(engine, read_checkpoint(two_checkpoints[1]))
    engine.llm.collective_rpc("appliance_weights", args=(False,))
    assert core.is_scheduler_paused()  # as long as there is no cache
    core.wake_up()
    assert engine.generate() == fresh_answers["int8"]
    core.sleep(level=1)
    core.wake_up()
    assert engine.generate() == fresh_answers["int8"]
    free_engine(engine)


def test_a_tied_head_may_come_anywhere_if_it_is_the_embedding(
    two_checkpoints: tuple[Path, Path], fresh_answers: dict[str, list], ways_in: pytest.MonkeyPatch
) -> None:
    """Before the first layer, among them, and after the last one, when the update has ended itself."""
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    old = engine.generate()
    first, second = map(read_checkpoint, two_checkpoints)
    for weights, says in ((second, fresh_answers["int8"]), (first, old)):
        head = ("lm_head.weight", dict(weights)["model.embed_tokens.weight"])
        for place in (len(weights), 0, 9):
            by_tensor(engine, [*weights[:place], head, *weights[place:]])
            assert engine.generate() == says


@pytest.mark.parametrize("place", [9, 26])
def test_a_tied_head_that_is_not_the_embedding_is_refused(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, place: int
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    weights = read_checkpoint(two_checkpoints[1])
    assert len(weights) == 26
    head = ("lm_head.weight", dict(weights)["model.embed_tokens.weight"] + 1)
    with contextlib.suppress(SyncError):
        by_tensor(engine, [*weights[:place], head, *weights[place:]])
    refusals(engine)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_read_from_the_old_weights_cache(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    """A prompt of several blocks, asked before and after each way's updates by somebody who resets nothing himself."""
    from vllm import SamplingParams

    def says(engine: Engine) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        [output] = engine.llm.generate([{"prompt_token_ids": list(range(1, 100))}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    ways_in.setenv("FLASHRL_CONFIG", scheme)
    fresh = start(two_checkpoints[1], block_size=32, enable_prefix_caching=True)
    new, _ = says(fresh)
    free_engine(fresh)
    engine = start(two_checkpoints[0], block_size=32, enable_prefix_caching=True)
    old, _ = says(engine)
    first, second = map(read_checkpoint, two_checkpoints)
    assert old != new
    for update in EVERY_WAY.values():
        for weights, tokens in ((second, new), (first, old)):
            assert says(engine)[1] == 96
            update(engine, weights)
            assert says(engine) == (tokens, 0)
    free_engine(engine)


def test_weights_in_a_kernels_format_are_refused(
    two_checkpoints: tuple[Path, Path], fresh_answers: dict[str, list], ways_in: pytest.MonkeyPatch
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    weights = [(name, held.clone()) for name, held in engine.model.named_parameters()]
    engine.runner.reload_weights(weights_path=str(two_checkpoints[1]))
    for ask in (engine.worker.reload_weights, engine.runner.reload_weights):  # extensions ask the runner itself
        with pytest.raises(SyncError, match="in a kernel's own format cannot be proven"):
            ask(weights_iterator=weights, is_checkpoint_format=False)
    assert engine.generate() == fresh_answers["int8"]
    assert engine.worker.appliance_ways_in.report.version == 1

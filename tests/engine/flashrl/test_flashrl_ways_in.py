"""Each way in which a trainer updates an engine that it did not configure: proven, or no token."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine
from families import SIZES
from torch import Tensor
from vllm.model_executor.model_loader.reload import layerwise

from appliance.errors import SyncError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Weights = list[tuple[str, Tensor]]
SCHEMES = ("bf16", "int8")
EMULATED = ("fp8-channel", "fp8-block")
RELOAD = "vllm.model_executor.model_loader.reload"


def start(folder: Path, **settings: object) -> Engine:
    from vllm.config.weight_transfer import WeightTransferConfig

    return start_engine(folder, scheme="bf16", weight_transfer_config=WeightTransferConfig(backend="shm"), **settings)


def by_tensor(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """TRL (colocated) and OpenRLHF."""
    for each in weights:
        engine.model.load_weights([each])


def by_buckets(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """NeMo-RL."""
    weights = iter(weights)
    while bucket := list(itertools.islice(weights, 5)):
        engine.model.load_weights(bucket)


def by_reload(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """SkyRL and prime-rl."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(engine.model)
    by_buckets(engine, weights)
    finalize_layerwise_reload(engine.model, engine.runner.model_config)


def by_transfer(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """vLLM's native weight transfer."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from flashrl_compat.shared_memory import ShmTrainerInitInfo

    client = SimpleNamespace(
        init_weight_transfer_engine=lambda info: engine.llm.init_weight_transfer_engine({"init_info": info}),
        start_weight_update=engine.llm.start_weight_update,
        update_weights=lambda info: engine.llm.update_weights({"update_info": info}),
        finish_weight_update=engine.llm.finish_weight_update,
    )
    init = ShmTrainerInitInfo(rank=0, chunk_bytes=40_000)
    WeightTransferTrainerFactory.trainer_init(init, client=client, source=weights).send_weights()


WAYS = {"tensors": by_tensor, "buckets": by_buckets, "reload": by_reload, "transfer": by_transfer}
Fault = Callable[[Weights], Iterable[tuple[str, Tensor]]]


def listed(weights: Weights, *, number: int = 1) -> Weights:
    from flashrl_compat.sender import with_manifest

    return list(with_manifest(weights, number=number))


def of_fp32(weights: Weights) -> Weights:
    return [(name, tensor.float()) for name, tensor in weights]


@pytest.fixture(scope="module")
def told(two_checkpoints: tuple[Path, Path]) -> dict[str, list]:
    """What an engine of the second checkpoint says, by scheme."""
    return {
        scheme: start_engine(two_checkpoints[1], scheme=scheme, emulated=scheme in EMULATED).generate()
        for scheme in (*SCHEMES, *EMULATED)
    }


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_way_ends_in_the_engine_of_the_new_weights(
    two_checkpoints: tuple[Path, Path], told: dict[str, list], ways_in: pytest.MonkeyPatch, scheme: str
) -> None:
    """One engine, update after update, to and fro; with and without a list of digests, and of FP32 masters."""
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(two_checkpoints[0])
    old, new = engine.generate(), told[scheme]
    assert old != new
    first, second = map(read_checkpoint, two_checkpoints)
    version = 0
    for way in WAYS.values():
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
    two_checkpoints: tuple[Path, Path], told: dict[str, list], ways_in: pytest.MonkeyPatch, scheme: str, record_property
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine = start(two_checkpoints[0])
    old = engine.generate()
    assert old != told[scheme]
    first, second = map(read_checkpoint, two_checkpoints)
    shuffled, tried = random.Random(0), 0
    for _ in range(20):
        for weights, says in ((second, told[scheme]), (first, old)):
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
    for way, weights, says in zip(WAYS.values(), (second, first) * 2, (new, old) * 2, strict=True):
        way(engine, listed(weights) if way is by_tensor else weights)
        assert engine.generate() == says
    name = "model.layers.0.mlp.gate_up_proj.weight"
    half = (name.replace("gate_up_proj", "up_proj"), dict(first)[name][:160])
    with pytest.raises(SyncError, match=r"^weight update: model\.layers\.0\.mlp\.up_proj\.weight came twice$"):
        by_tensor(engine, [(name, dict(first)[name]), half])


def lent(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """In memory that the sender uses again."""
    for name, tensor in weights:
        buffer = tensor.clone()
        yield name, buffer
        buffer.fill_(float("nan"))


@pytest.mark.parametrize("scheme", [*SCHEMES, *EMULATED])
def test_what_waits_for_the_rest_of_its_layer_is_copied_out_of_the_senders_memory(
    two_checkpoints: tuple[Path, Path], told: dict[str, list], ways_in: pytest.MonkeyPatch, tmp_path: Path, scheme: str
) -> None:
    """By vLLM, and by what proves it: a sound update is none that is broken."""
    file = tmp_path / "fp8.yaml"
    file.write_text(f"configs: [{{fn: {scheme.replace('-', '_')}, emulated: true}}]")
    ways_in.setenv("FLASHRL_CONFIG", str(file) if scheme in EMULATED else scheme)
    engine = start(two_checkpoints[0])
    by_tensor(engine, lent(read_checkpoint(two_checkpoints[1])))
    assert engine.generate() == told[scheme]


def dropped(weights: Weights) -> Weights:
    return weights[:7] + weights[8:]


def doubled(weights: Weights) -> Weights:
    return weights[:8] + weights[7:]


def cropped(weights: Weights) -> Weights:
    return [(name, tensor[:-1] if number == 7 else tensor) for number, (name, tensor) in enumerate(weights)]


def not_finite(weights: Weights) -> Weights:
    return [
        (name, tensor.fill_(float("nan")) if number == 7 else tensor) for number, (name, tensor) in enumerate(weights)
    ]


def unknown(weights: Weights) -> Weights:
    return [*weights[:7], ("model.layers.0.mlp.extra_proj.weight", weights[7][1]), *weights[7:]]


def swapped(weights: Weights) -> Weights:
    """Two of one shape, on their way: only a list of digests sees that."""
    places = [
        number for number, (name, _) in enumerate(weights) if name.endswith(("gate_proj.weight", "up_proj.weight"))
    ]
    one, other = places[:2]
    found = list(weights)
    found[one], found[other] = (weights[one][0], weights[other][1]), (weights[other][0], weights[one][1])
    return found


def flipped(weights: Weights) -> Weights:
    """The lowest bit of one value."""
    place = next(number for number, (name, _) in enumerate(weights) if name.endswith("down_proj.weight"))
    name, tensor = weights[place]
    bits = tensor.clone().contiguous()
    bits.view(torch.int16).view(-1)[3] ^= 1
    return [*weights[:place], (name, bits), *weights[place + 1 :]]


def cut_short(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """A sender that dies half-way."""
    yield from weights[:9]
    raise ConnectionError("the sender died")


IN_THE_WEIGHTS = (dropped, doubled, cropped, not_finite, unknown, cut_short)
ON_THE_WAY = (dropped, doubled, cropped, swapped, flipped)  # with a list of digests, made before


def generates_nothing(engine: Engine) -> bool:
    """Asked twice, and once past the core."""
    caught = 0
    for _ in range(2):
        with pytest.raises(SyncError, match=r"half-updated|did not receive|list of what was sent|is open on rank 0"):
            engine.generate()
        caught += 1
    with pytest.raises(SyncError):
        engine.worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
    return caught == 2


def caught_of(
    cases: Iterable[tuple[str, Fault, bool]],
    *,
    ways_in: pytest.MonkeyPatch,
    old: Path,
    weights: Callable[[], Weights],
    number: int = 1,
) -> list[tuple[str, str, bool]]:
    """Those of the cases (way, fault, whether a list of digests came before it) that are told of, and never sampled
    from: each in an engine of its own. number: of the update, after sound ones."""
    caught = []
    for turn, (way, fault, is_listed) in enumerate(cases):
        ways_in.setenv("FLASHRL_CONFIG", SCHEMES[turn % 2])
        engine = start(old)
        for _ in range(1, number):
            by_tensor(engine, weights())
        try:
            WAYS[way](engine, fault(listed(weights(), number=number) if is_listed else weights()))
            said = ""
        except (SyncError, ConnectionError) as error:
            said = str(error)
        if generates_nothing(engine) and (said or WAYS[way] in (by_tensor, by_buckets)):
            caught.append((way, fault.__name__, is_listed))
        free_engine(engine)
    return caught


def test_every_fault_by_every_way_is_caught_and_never_sampled_from(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, record_property
) -> None:
    cases = [(way, fault, False) for way in WAYS for fault in IN_THE_WEIGHTS]
    cases += [(way, fault, True) for way in WAYS for fault in ON_THE_WAY]
    old, new = two_checkpoints
    caught = caught_of(cases, ways_in=ways_in, old=old, weights=lambda: read_checkpoint(new))
    record_property("said", f"faults in weight updates by {len(WAYS)} ways: {len(cases)}, caught: {len(caught)}")
    assert len(caught) == len(cases) == 44


BEGINS: dict[str, tuple[str, Callable[[Engine, Path], object]]] = {
    "tensors": ("load_weights", lambda engine, folder: by_buckets(engine, read_checkpoint(folder)[:6])),
    "reload": ("a layerwise reload", lambda engine, folder: layerwise.initialize_layerwise_reload(engine.model)),
    "transfer": ("a layerwise reload", lambda engine, folder: engine.llm.start_weight_update()),
    "folder": (
        "reload_weights of {}",
        lambda engine, folder: engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)}),
    ),
}


@pytest.mark.parametrize("second", ["reload", "transfer", "folder"])
@pytest.mark.parametrize("first", ["tensors", "reload", "transfer"])
def test_two_updates_at_once_are_refused(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, first: str, second: str
) -> None:
    """Each way within each that stays open: tensors of plain `load_weights` are then those of the update that is. A
    second transfer vLLM refuses itself; the first one stays open."""
    ways_in.setenv("FLASHRL_CONFIG", SCHEMES[len(first + second) % 2])
    engine, folder = start(two_checkpoints[0]), two_checkpoints[1]
    (one, begin), (other, begin_again) = BEGINS[first], BEGINS[second]
    begin(engine, folder)
    said = f"weight update: it was begun by {one}, and then by {other.format(folder)} as well$"
    if first == second == "transfer":
        said = "start_weight_update called while a weight update is already active"
    with pytest.raises((SyncError, RuntimeError), match=f"^{said}"):
        begin_again(engine, folder)
    assert generates_nothing(engine)
    free_engine(engine)


def test_an_open_update_refuses_requests_by_its_name_until_it_is_finished(
    two_checkpoints: tuple[Path, Path], told: dict[str, list], ways_in: pytest.MonkeyPatch
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
    assert engine.generate() == told["int8"]
    engine.llm.start_weight_update()
    engine.model.load_weights(read_checkpoint(two_checkpoints[0])[:9])
    with pytest.raises(SyncError, match=r": model\.\S+ \(\d+ of \d+ elements\) and \d+ more layers wait for weights$"):
        engine.generate()


def test_a_transport_that_packs_tensors_leaves_each_where_it_can_be_read() -> None:
    """One behind the other, as vLLM's CUDA IPC and NCCL have them; the first one of ours is bytes."""
    from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor

    from flashrl_compat.sender import with_manifest

    weights = [("a", torch.randn(3, 5).to(torch.bfloat16)), ("b", torch.randn(7, 16).to(torch.bfloat16))]
    sent = list(with_manifest(weights, number=1))
    names, tensors = zip(*sent, strict=True)
    flat = [each.contiguous().view(torch.uint8).view(-1) for each in tensors]
    shapes, types = [list(each.shape) for each in tensors], [each.dtype for each in tensors]
    found = unpack_tensor(torch.cat(flat), list(names), shapes, types, [len(each) for each in flat])
    assert [name for name, _ in found] == ["appliance.precision", "a", "b", "appliance.manifest"]
    assert all(torch.equal(one, other) for (_, one), other in zip(found, tensors, strict=True))
    assert all(each.storage_offset() * each.element_size() % 2 == 0 for _, each in found[1:3])


@pytest.mark.parametrize("wakes", ["first", "last"])
def test_nothing_is_generated_between_a_deep_sleep_and_an_update(
    two_checkpoints: tuple[Path, Path], told: dict[str, list], ways_in: pytest.MonkeyPatch, wakes: str
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
    assert engine.generate() == told["int8"]
    core.sleep(level=1)
    core.wake_up()
    assert engine.generate() == told["int8"]
    free_engine(engine)


def test_a_tied_head_may_come_anywhere_if_it_is_the_embedding(
    two_checkpoints: tuple[Path, Path], told: dict[str, list], ways_in: pytest.MonkeyPatch
) -> None:
    """Before the first layer, among them, and after the last one, when the update has ended itself."""
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[0])
    old = engine.generate()
    first, second = map(read_checkpoint, two_checkpoints)
    for weights, says in ((second, told["int8"]), (first, old)):
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
    assert generates_nothing(engine)


@pytest.mark.parametrize("way", ["tensors", "transfer"])
def test_nothing_is_read_from_the_old_weights_cache(
    two_checkpoints: tuple[Path, Path], ways_in: pytest.MonkeyPatch, way: str
) -> None:
    """A prompt of several blocks, asked before and after an update by somebody who resets nothing himself."""
    from vllm import SamplingParams

    def says(engine: Engine) -> tuple[list[int], int]:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        [output] = engine.llm.generate([{"prompt_token_ids": list(range(1, 100))}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    ways_in.setenv("FLASHRL_CONFIG", "int8")
    fresh = start(two_checkpoints[1], block_size=32, enable_prefix_caching=True)
    wanted, _ = says(fresh)
    engine = start(two_checkpoints[0], block_size=32, enable_prefix_caching=True)
    says(engine)
    assert says(engine)[1] == 96
    WAYS[way](engine, read_checkpoint(two_checkpoints[1]))
    assert says(engine) == (wanted, 0)


def test_weights_in_a_kernels_format_are_refused(
    two_checkpoints: tuple[Path, Path], told: dict[str, list], ways_in: pytest.MonkeyPatch
) -> None:
    ways_in.setenv("FLASHRL_CONFIG", "int8")
    engine = start(two_checkpoints[1])
    with pytest.raises(SyncError, match="in a kernel's own format cannot be proven"):
        engine.llm.collective_rpc("reload_weights", kwargs={"is_checkpoint_format": False})
    assert engine.generate() == told["int8"]

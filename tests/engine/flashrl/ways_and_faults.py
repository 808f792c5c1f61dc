"""The ways in which a trainer updates an engine that it did not configure, and what goes wrong with each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from engines import Engine, free_engine, read_checkpoint, start_engine
from faults import Tally, recover, same_bytes
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from appliance.engine.ways_in import WaysIn
from appliance.errors import SyncError
from appliance.quant.profile import Smoothing

Weights = list[tuple[str, Tensor]]
SCHEMES = ("bf16", "int8")
EMULATED = ("fp8-channel", "fp8-block")


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


def by_call(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """All in one call."""
    engine.model.load_weights(iter(weights))


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


def by_iterator(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """vLLM's `reload_weights` with the weights themselves."""
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


def by_folder(engine: Engine, weights: Iterable[tuple[str, Tensor]]) -> None:
    """A checkpoint on disk, in files of 8 tensors. Where its writer died, half of a file is there in the end."""
    weights, last = iter(weights), Path()
    with TemporaryDirectory() as folder:
        try:
            for number in itertools.count():
                if not (file := list(itertools.islice(weights, 8))):
                    break
                last = Path(folder, f"model-{number}.safetensors")
                save_file(dict(file), last)
        except ConnectionError:
            Path(folder, f"model-{number}.safetensors").write_bytes(last.read_bytes()[: last.stat().st_size // 2])
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


WAYS = {
    "tensors": by_tensor,
    "buckets": by_buckets,
    "call": by_call,
    "reload": by_reload,
    "transfer": by_transfer,
    "iterator": by_iterator,
}
PLAIN = (by_tensor, by_buckets, by_call)  # whose updates nobody ends
EVERY_WAY = WAYS | {"folder": by_folder}  # whose files have an order of their own, and no list of digests
Fault = Callable[[Weights], Iterable[tuple[str, Tensor]]]


def listed(weights: Weights, *, number: int = 1) -> Weights:
    from flashrl_compat.sender import with_manifest

    return list(with_manifest(weights, number=number))


def of_fp32(weights: Weights) -> Weights:
    return [(name, tensor.float()) for name, tensor in weights]


def lent(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """In memory that the sender uses again."""
    for name, tensor in weights:
        buffer = tensor.clone()
        yield name, buffer
        buffer.fill_(float("nan"))


UNKNOWN = "model.layers.0.mlp.extra_proj.weight"


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
    return [*weights[:7], (UNKNOWN, weights[7][1].clone()), *weights[7:]]


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


def at_fault(fault: Fault, weights: Weights) -> set[str]:
    """Of what an error must name one: tensors, or their layers in vLLM's names."""
    if fault is unknown:
        return {UNKNOWN}
    if fault is cut_short:
        names = [name for name, _ in weights[9:]]
    elif fault in (swapped, flipped):
        pairs = zip(weights, fault(weights), strict=True)
        names = [name for (name, was), (_, now) in pairs if not same_bytes(was, now)]
    else:
        names = [weights[7][0]]
    return {*names, *map(layer_of, names)}


def layer_of(name: str) -> str:
    name = re.sub(r"\b[qkv]_proj\b", "qkv_proj", name.removesuffix(".weight").removesuffix(".bias"))
    return re.sub(r"\b(gate|up)_proj\b", "gate_up_proj", name.partition(".experts.")[0])


def refusals(engine: Engine) -> list[str]:
    """What two requests are told, and a call past the core. Fails where one is answered."""
    past = SimpleNamespace(total_num_scheduled_tokens=1)
    asks = (lambda: engine.generate(resets=False), engine.generate, lambda: engine.worker.execute_model(past))
    messages = []
    for ask in asks:
        with pytest.raises(SyncError) as refused:
            ask()
        messages.append(str(refused.value))
    return messages


def restart(engine: Engine, weights: Weights) -> None:
    """With the weights that it was started with, out of what broke it for good. No user's engine ever does this."""
    worker, core = engine.worker, engine.llm.llm_engine.engine_core.engine_core
    recover(engine, weights)
    worker._weight_update_active = False  # vLLM's own, of a transfer that nobody ended
    worker.appliance_ways_in = WaysIn(
        engine.model, vllm_config=worker.vllm_config, rank=0, smoothing=Smoothing(), tell=lambda line: None
    )
    core.__dict__.pop("_appliance_known", None)
    core.resume_scheduler()


def tally_of(
    cases: Iterable[tuple[str, Fault, bool]],
    *,
    called: str,
    scheme: str,
    ways_in: pytest.MonkeyPatch,
    old: Path,
    weights: Callable[[], Weights],
    number: int = 1,
) -> Tally:
    """Of the cases (way, fault, whether a list of digests came before it): caught is what every request, and an error
    that the sender got, tells of by a tensor or a layer. Only plain `load_weights` may leave it to the requests to say
    so. One engine, as it was started before each case. number: of the update, after sound ones."""
    ways_in.setenv("FLASHRL_CONFIG", scheme)
    engine, first, tally = start(old), read_checkpoint(old), Tally(called)
    before = engine.generate()
    for way, fault, is_listed in cases:
        for _ in range(1, number):
            by_tensor(engine, weights())
        sent, messages, is_told = listed(weights(), number=number) if is_listed else weights(), [], True
        names = at_fault(fault, sent)
        try:
            EVERY_WAY[way](engine, fault(sent))
            is_told = EVERY_WAY[way] in PLAIN
        except SyncError as error:
            messages.append(str(error))
        except (ConnectionError, SafetensorError):  # the sender's own
            pass
        messages += refusals(engine)
        tally.injected += 1
        if is_told and all(any(name in said for name in names) for said in messages):
            tally.caught += 1
        else:
            tally.missed.append(f"{way} {fault.__name__}{' of a list' * is_listed}: {messages}")
        restart(engine, first)
        assert engine.generate() == before
    free_engine(engine)
    return tally

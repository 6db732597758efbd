"""Test the weight loader of SGLang's processes on small models of our own that fuse, shard and pad as SGLang
does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.machine.errors import counted
from megarl.rollout.sglang.cpu_adaptations import empty_storages, refill_storages
from megarl.rollout.sglang.loader import EngineModel, LoaderClient, RankLoader
from megarl.weights.checksum import checksum
from megarl.weights.tensors import Manifest, TensorMeta, WeightTransferError
from tests.plain_trainer import PlainTrainer, manifest_of

CPU = torch.device("cpu")
SHAPES = {"q": (8, 6), "k": (4, 6), "down": (6, 10), "norm": (6,), "embed": (7, 6), "expert": (2, 3, 6)}


class Model(torch.nn.Module):
    """Model with q and k fused and sharded by rows, `down` sharded by columns and padded, `embed` padded by
    rows, `expert` stored transposed for each expert, and `norm` on every rank."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self._rank = rank
        self._num_ranks = num_ranks
        shapes = {
            "qk": (12 // num_ranks, 6),
            "down": (6, 16 // num_ranks),
            "embed": (8 // num_ranks, 6),
            "expert": (2, 6, 3),
            "norm": (6,),
        }
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.full(shape, 99.0)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rank = self._rank
        count = self._num_ranks

        for name, tensor in weights:
            if name in ("q", "k"):
                rows = tensor.shape[0] // count
                first = 0 if name == "q" else 8 // count
                self.qk.data.narrow(0, first, rows).copy_(tensor.narrow(0, rank * rows, rows))
            elif name == "down":
                start, stop = (min((rank + end) * self.down.shape[1], 10) for end in (0, 1))
                self.down.data[:, : stop - start].copy_(tensor[:, start:stop])
            elif name == "embed":
                start, stop = (min((rank + end) * self.embed.shape[0], 7) for end in (0, 1))
                self.embed.data[: stop - start].copy_(tensor[start:stop])
            elif name == "expert":
                for expert in range(2):
                    self.expert.data[expert].copy_(tensor[expert].t())
            elif name == "norm":
                assert tensor.shape == self.norm.shape, "wrong shape"
                self.norm.data.copy_(tensor)


class Scheduler:
    """Run the code of SGLang's processes, one rank after the other, in this process."""

    def __init__(self, models: Sequence[torch.nn.Module], drafts: Sequence[torch.nn.Module] = ()) -> None:
        self.models = list(models)
        self.drafts = list(drafts)
        self._loaders = [RankLoader(CPU) for _ in models]
        self.silent_ranks: set[int] = set()

    def send(self, tensors: list[tuple[str, torch.Tensor]], time_limit: bool, selected: EngineModel) -> None:
        message = json.loads(bytes(tensors[0][1].numpy()))
        models = self.models if selected == "target" else self.drafts
        for rank, (model, loader) in enumerate(zip(models, self._loaders, strict=True)):
            if rank in self.silent_ranks:
                continue
            try:
                answer = {"result": getattr(loader, message["command"])(model, rank, **message["arguments"])}
            except WeightTransferError as error:
                answer = {"failure": str(error)}
            (Path(message["answers"]) / f"{message['number']}.{rank}.json").write_text(json.dumps(answer))


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class ClientsEngine:
    """The part of an engine that PlainTrainer needs, for a client alone."""

    def __init__(self, client: LoaderClient) -> None:
        self._client = client
        self.needed_slices = client.needed_slices
        self.join_weights = client.join

    def begin_weight_update(self, manifest: Manifest, first_round: int = 0) -> None:
        self._first_round = first_round
        self._client.prepare(manifest)

    def receive_weights(self) -> None:
        while not self._client.receive(self._first_round):
            pass

    def end_weight_update(self, version: int) -> None:
        pass


def trainer_of(
    client: LoaderClient, weights: dict[str, torch.Tensor], message_numel: int = 1000
) -> PlainTrainer:
    engine: Any = ClientsEngine(client)
    return PlainTrainer(engine, weights, message_numel=message_numel)


def load(client: LoaderClient, weights: dict[str, torch.Tensor], message_numel: int = 1000) -> None:
    trainer = trainer_of(client, weights, message_numel)
    trainer.push(weights, 1)
    trainer.close()


@pytest.fixture
def client_of():
    clients = []

    def make(scheduler: Scheduler) -> LoaderClient:
        clients.append(LoaderClient(scheduler.send, len(scheduler.models), has_draft=bool(scheduler.drafts)))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


class DerivingModel(Model):
    """Model whose loader also computes a buffer in place, and an attribute that it replaces."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self.register_buffer("norm_plus_one", torch.ones(6), persistent=False)
        self.scratch = torch.zeros(3)  # is not written
        self.folded: Any = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.norm_plus_one.copy_(self.norm.data).add_(1.0)
        self.folded = [self.down.data @ self.down.data.t()]


class PostponingModel(DerivingModel):
    def post_load_weights(self) -> None:
        self.folded = [self.down.data @ self.down.data.t()]


class RefreshedModel(PostponingModel):
    def refresh_gemma_weight(self) -> None:
        self.norm_plus_one.copy_(self.norm.data).add_(1.0)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("kind", "named"),
    [(DerivingModel, ["folded[0]", "norm_plus_one"]), (PostponingModel, ["norm_plus_one"])],
)
def test_a_model_with_tensors_that_a_sync_leaves_stale_is_refused(
    client_of: Callable, kind: type[Model], named: list[str], num_ranks: int
) -> None:
    client = client_of(Scheduler([kind(rank, num_ranks) for rank in range(num_ranks)]))
    with pytest.raises(WeightTransferError) as refused:
        load(client, random_weights())
    names = ", ".join(f".{name} of {kind.__name__}" for name in named)
    assert f"would leave {counted(len(named), 'tensor')} unchanged" in str(refused.value)
    assert f"so that samples would be wrong: {names}; unset" in str(refused.value)


def test_scales_that_sglang_has_converted_are_refused(client_of: Callable) -> None:
    """A sync would write float32 scales where packed exponents are."""
    model = Model(0, 1)
    model.norm.format_ue8m0 = False  # pyrefly: ignore[missing-attribute]
    load(client_of(Scheduler([model])), random_weights())
    model.norm.format_ue8m0 = True  # pyrefly: ignore[missing-attribute]
    with pytest.raises(WeightTransferError, match=r"has converted 1 scale .*such as norm.*; remove rollout"):
        load(client_of(Scheduler([model])), random_weights())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_derived_tensors_follow_every_sync(client_of: Callable, num_ranks: int) -> None:
    models = [RefreshedModel(rank, num_ranks) for rank in range(num_ranks)]
    client = client_of(Scheduler(models))
    weights = random_weights()
    trainer = trainer_of(client, weights)
    for version, factor in enumerate((1.0, 2.0, -0.5), start=1):
        pushed = {name: tensor * factor for name, tensor in weights.items()}
        trainer.push(pushed, version)
        for model in models:
            assert torch.equal(model.norm_plus_one, pushed["norm"] + 1.0)
            assert torch.equal(model.folded[0], model.down @ model.down.t())
            assert torch.equal(model.scratch, torch.zeros(3))
    trainer.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("chunk_elements", [2, 5, 1000])
def test_pieces_of_any_size_arrive_as_whole_tensors_would(
    client_of: Callable, num_ranks: int, chunk_elements: int
) -> None:
    weights = random_weights()
    expected = [Model(rank, num_ranks) for rank in range(num_ranks)]

    for model in expected:
        for parameter in model.parameters():
            parameter.data.zero_()  # padding counts as zero
        model.load_weights(list(weights.items()))

    scheduler = Scheduler([Model(rank, num_ranks) for rank in range(num_ranks)])
    client = client_of(scheduler)
    load(client, weights, chunk_elements)

    for model, reference in zip(scheduler.models, expected, strict=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, reference.get_parameter(name)), name

    assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
    with pytest.raises(WeightTransferError, match="is gone"):
        client.receive()


def test_checksums_tell_which_tensor_is_wrong(client_of: Callable) -> None:
    weights = random_weights()
    scheduler = Scheduler([Model(rank, 2) for rank in range(2)])
    client = client_of(scheduler)
    load(client, weights)
    scheduler.models[1].qk.data[5, 2] += 1e-6  # the last row of rank 1's part of k
    true = {name: checksum(tensor) for name, tensor in weights.items()}
    assert {name for name, value in client.checksums().items() if value != true[name]} == {"k"}
    scheduler.models[1].norm.data[3] += 1
    with pytest.raises(WeightTransferError, match="different copies of norm"):
        client.checksums()


class Draft(torch.nn.Module):
    """Head that shares the policy's embedding, as SGLang's `set_embed_and_head` does, and has a layer."""

    def __init__(self, policy: Model) -> None:
        super().__init__()
        self.embed = policy.embed
        self.fc = torch.nn.Parameter(torch.randn((6, 12), generator=torch.Generator().manual_seed(1)))


def test_a_draft_model_stays_as_it_was_loaded_and_sees_the_policys_new_embedding(client_of: Callable) -> None:
    weights = random_weights()
    models = [Model(rank, 2) for rank in range(2)]
    scheduler = Scheduler(models, [Draft(model) for model in models])
    client = client_of(scheduler)
    before = [draft.fc.detach().clone() for draft in scheduler.drafts]
    trainer = trainer_of(client, weights)
    for version, factor in ((1, 1.0), (2, 2.0)):
        pushed = {name: tensor * factor for name, tensor in weights.items()}
        trainer.push(pushed, version)
        assert client.checksums() == {name: checksum(tensor) for name, tensor in pushed.items()}
        embeds = [draft.embed.detach() for draft in scheduler.drafts]
        assert torch.equal(torch.cat(embeds)[:7], pushed["embed"])
    trainer.close()
    assert all(torch.equal(draft.fc, fc) for draft, fc in zip(scheduler.drafts, before, strict=True))

    # Memory that came back without the draft's weights.
    scheduler.drafts[1].fc.data[2, 3] = 0.0
    with pytest.raises(WeightTransferError, match="1 tensor of the draft model .* on rank 1 .*: fc$"):
        client.checksums()
    scheduler.drafts[1].fc.data.copy_(before[1])
    client.checksums()

    # An embedding of its own is no longer the policy's, also if it has the same elements.
    scheduler.drafts[0].embed = torch.nn.Parameter(models[0].embed.detach().clone())
    with pytest.raises(WeightTransferError, match="or no longer the policy's, on rank 0 .*: embed$"):
        client.checksums()


def test_tensors_that_are_not_the_models(client_of: Callable) -> None:
    scheduler = Scheduler([Model(0, 1)])
    client = client_of(scheduler)
    manifest = manifest_of(random_weights())
    before = {name: parameter.clone() for name, parameter in scheduler.models[0].named_parameters()}
    with pytest.raises(WeightTransferError, match="bias is not a tensor of the engine's model"):
        client.prepare({**manifest, "bias": TensorMeta((6,), torch.float32)})
    with pytest.raises(WeightTransferError, match="no tensor is loaded into embed"):
        client.prepare({name: meta for name, meta in manifest.items() if name != "embed"})

    with pytest.raises(
        WeightTransferError, match=r"refuses norm of shape \(5,\): AssertionError wrong shape"
    ):
        client.prepare({**manifest, "norm": TensorMeta((5,), torch.float32)})

    with pytest.raises(
        WeightTransferError, match=r"embed does not fit the engine's model: 12 of 54 elements are missing"
    ):
        client.prepare({**manifest, "embed": TensorMeta((9, 6), torch.float32)})

    for name, parameter in scheduler.models[0].named_parameters():
        assert torch.equal(parameter, before[name])


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape at another location, with other elements."""
    return torch.full_like(tensor, 99.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the names of the tensors in each call of `Model.load_weights`."""
    calls: list[list[str]] = []
    load_weights = Model.load_weights

    def load_and_note(model: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = list(weights)
        calls.append([name for name, _ in tensors])
        load_weights(model, tensors)

    monkeypatch.setattr(Model, "load_weights", load_and_note)
    return calls


def test_where_tensors_go_is_asked_once_for_all_of_them(client_of: Callable, asked: list[list[str]]) -> None:
    weights = random_weights()
    client = client_of(Scheduler([Model(0, 1)]))

    for _ in range(2):
        load(client, weights)
        assert asked == [list(SHAPES)]

    assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
    assert asked == [list(SHAPES)]
    halved = {name: tensor.bfloat16() for name, tensor in weights.items()}
    client.prepare(manifest_of(halved))
    assert asked == [list(SHAPES)] * 2
    load(client, halved)
    assert client.checksums() == {name: checksum(tensor) for name, tensor in halved.items()}
    assert asked == [list(SHAPES)] * 2


def test_the_plan_survives_sleep(client_of: Callable, asked: list[list[str]]) -> None:
    """Padding, which is random after a sleep, is zeroed again; no parameter is looked up again."""
    weights = random_weights()
    scheduler = Scheduler([Model(rank, 2) for rank in range(2)])
    client = client_of(scheduler)
    trainer = trainer_of(client, weights)
    trainer.push(weights, 1)
    expected = [
        {name: parameter.clone() for name, parameter in model.named_parameters()}
        for model in scheduler.models
    ]
    asked.clear()

    for model in scheduler.models:
        asleep = empty_storages(list(model.parameters()))
        assert not any(parameter.untyped_storage().nbytes() for parameter in model.parameters())
        refill_storages(asleep)
        for parameter in model.parameters():
            parameter.data.fill_(99.0)

    client.forget_padding()
    trainer.push(weights, 2)
    assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
    assert asked == []

    for model, parameters in zip(scheduler.models, expected, strict=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, parameters[name]), name


def test_parameters_that_moved_while_asleep_are_found(client_of: Callable, asked: list[list[str]]) -> None:
    weights = random_weights()
    scheduler = Scheduler([Model(0, 1)])
    client = client_of(scheduler)
    trainer = trainer_of(client, weights)
    trainer.push(weights, 1)
    expected = {name: parameter.clone() for name, parameter in scheduler.models[0].named_parameters()}
    asked.clear()
    scheduler.models[0].embed.data = moved(scheduler.models[0].embed.data)
    client.forget_padding()
    trainer.push(weights, 2)
    assert asked == [list(SHAPES)]
    for name, parameter in scheduler.models[0].named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_parameters_that_moved_before_their_checksums_are_found(client_of: Callable) -> None:
    """Their padding is not trusted by the next update either."""
    weights = random_weights()
    scheduler = Scheduler([Model(0, 1)])
    client = client_of(scheduler)
    trainer = trainer_of(client, weights)
    trainer.push(weights, 1)
    expected = scheduler.models[0].embed.clone()
    scheduler.models[0].embed.data = moved(expected)
    scheduler.models[0].embed.data[:7] = weights["embed"]
    assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}
    trainer.push(weights, 2)
    assert torch.equal(scheduler.models[0].embed, expected)


def test_parameters_that_were_moved_between_updates_are_followed(client_of: Callable) -> None:
    weights = random_weights()
    scheduler = Scheduler([Model(rank, 2) for rank in range(2)])
    client = client_of(scheduler)
    trainer = trainer_of(client, weights, 5)
    trainer.push(weights, 1)
    expected = [
        {name: parameter.clone() for name, parameter in model.named_parameters()}
        for model in scheduler.models
    ]
    former = scheduler.models[1].down.data
    scheduler.models[1].down.data = moved(former)
    former.fill_(7.0)
    trainer.push(weights, 2)

    for model, parameters in zip(scheduler.models, expected, strict=True):
        for name, parameter in model.named_parameters():
            # Elements that no tensor fills are zero there, too.
            assert torch.equal(parameter, parameters[name]), name

    assert bool((former == 7.0).all())
    assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}


def test_parameters_that_were_cut_anew_are_not_filled(client_of: Callable) -> None:
    weights = random_weights()
    scheduler = Scheduler([Model(0, 1)])
    client = client_of(scheduler)
    trainer_of(client, weights)
    scheduler.models[0] = Model(0, 2)
    with pytest.raises(WeightTransferError, match="sliced its parameters differently.*restart the engine"):
        client.receive()


def test_a_refused_manifest_does_not_change_where_tensors_go(client_of: Callable) -> None:
    weights = random_weights()
    client = client_of(Scheduler([Model(0, 1)]))
    trainer = trainer_of(client, weights)
    with pytest.raises(WeightTransferError, match="no tensor is loaded into norm"):
        client.prepare({name: meta for name, meta in manifest_of(weights).items() if name != "norm"})
    trainer.push(weights, 1)
    assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}


class HoldingBack(Model):
    """Model that copies q and k together and last, like loaders that fuse tensors once the last of them has
    arrived."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held = {}
        for name, tensor in weights:
            if name in ("q", "k"):
                held[name] = tensor
            else:
                super().load_weights([(name, tensor)])

        if len(held) == 2:
            super().load_weights(held.items())


@pytest.mark.parametrize("backwards", [False, True])
def test_a_loader_that_holds_tensors_back_is_followed(client_of: Callable, backwards: bool) -> None:
    weights = dict(sorted(random_weights().items(), reverse=backwards))
    scheduler = Scheduler([HoldingBack(0, 1)])
    reference = Model(0, 1)
    client = client_of(scheduler)
    load(client, weights)
    reference.load_weights(weights.items())
    assert torch.equal(scheduler.models[0].get_parameter("qk"), reference.qk)
    assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}


class Joining(Model):
    """Model that copies q and k joined, without their last columns, and keeps a product of its weights, as
    SGLang's models with latent attention do."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(weights)
        if {"q", "k"} <= tensors.keys():
            joined = torch.cat([tensors.pop("q"), tensors.pop("k")], dim=0)
            self.qk.data[:, :4].copy_(joined[:, :4])
            self.qk.data[:, 4:].copy_(joined[:, 4:])
        super().load_weights(tensors.items())

    def post_load_weights(self) -> None:
        self.derived = self.qk.detach() * 2


def test_a_loader_that_joins_tensors_is_followed(client_of: Callable) -> None:
    weights = random_weights()
    model = Joining(0, 1)
    reference = Model(0, 1)
    client = client_of(Scheduler([model]))
    load(client, weights, message_numel=5)
    reference.load_weights(weights.items())
    assert torch.equal(model.qk, reference.qk)
    assert torch.equal(model.derived, reference.qk * 2)
    assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}


class Stacking(Model):
    """Model that computes one tensor from q and k."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(weights)
        if {"q", "k"} <= tensors.keys():
            self.qk.data.copy_(torch.cat([tensors.pop("q") * 2, tensors.pop("k")]))
        super().load_weights(tensors.items())


class OneAtATime(Model):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        [(name, tensor)] = weights
        super().load_weights([(name, tensor)])


def test_a_loader_of_single_tensors_is_asked_about_each(client_of: Callable, asked: list[list[str]]) -> None:
    weights = random_weights()
    client = client_of(Scheduler([OneAtATime(0, 1)]))
    load(client, weights)
    assert asked == [[name] for name in SHAPES]
    assert client.checksums() == {name: checksum(tensor) for name, tensor in weights.items()}


class Quantizing(Model):
    """Model that fails with a Python error on one of its tensors, as if a parameter lacked an attribute that
    the loader uses."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self.down, "weight_loader" if name == "down" else "data")
            super().load_weights([(name, tensor)])


def test_a_refused_tensor_is_named_whatever_the_models_error(client_of: Callable) -> None:
    client = client_of(Scheduler([Quantizing(0, 1)]))
    with pytest.raises(
        WeightTransferError,
        match=r"refuses down of shape \(6, 10\): AttributeError .*no attribute 'weight_loader'",
    ):
        client.prepare(manifest_of(random_weights()))


class Reading(Model):
    """Model that reads an element, which a tensor without data does not have."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name != "norm" or tensor[0].item() == 0:
                super().load_weights([(name, tensor)])


class Scaling(Model):
    """Model that changes a tensor in place before it is copied."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(
            [(name, tensor[:].mul_(2) if name == "norm" else tensor) for name, tensor in weights]
        )


class Computing(Model):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights([(name, tensor * 2 if name == "norm" else tensor) for name, tensor in weights])


class Flattening(Model):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk.data.view(-1)[:48].copy_(tensor.view(-1))
            else:
                super().load_weights([(name, tensor)])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Computing, r"1 tensor .*norm \(it calls aten\.mul"),
        (Scaling, r"1 tensor .*norm \(it calls aten\.mul_"),
        (Stacking, r"1 tensor .*q \(it calls aten\.mul"),
        (Reading, r"1 tensor .*norm \(it calls aten\._local_scalar_dense"),
        (Flattening, r"1 tensor .*q \(of shape \(8, 6\) it copies"),
    ],
)
def test_a_loader_that_cannot_be_followed_is_an_error_when_pieces_come(
    client_of: Callable, kind: type[Model], why: str
) -> None:
    """The error comes late, since a folder can still be loaded."""
    weights = random_weights()
    client = client_of(Scheduler([kind(0, 1)]))
    client.prepare(manifest_of(weights))
    with pytest.raises(WeightTransferError, match=why + r".*resharding\.transport=folder"):
        client.needed_slices(manifest_of(weights))


def test_a_rank_that_does_not_answer(client_of: Callable) -> None:
    scheduler = Scheduler([Model(rank, 2) for rank in range(2)])
    scheduler.silent_ranks = {1}
    with pytest.raises(
        WeightTransferError, match=r"ranks \[1\] did not run megarl's weight loader \(prepare\)"
    ):
        client_of(scheduler).prepare(manifest_of(random_weights()))

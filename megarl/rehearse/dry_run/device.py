"""A simulated CUDA device. Its tensors are fake tensors without memory; those of the host are real.

Integers on the device that are computed from host integers (ids, sequence boundaries, shapes) are also kept
on the host, so that the engine reads the same values as on a real device. Every other number that it reads is
1. The experts selected by a router are given (`FakeDevice.routes`), and other ranks are assumed to route in
the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, PythonCallbackWork
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from megarl.engine.fake_cuda import CUDA
from megarl.rehearse.dry_run.ledger import Ledger, collective_of, kind_of, place, tensors_of
from megarl.rehearse.dry_run.record import RehearsalError

_MOST_KNOWN = 2**23  # the largest integer tensor, in elements, of which the host keeps a copy
_KNOWN = "megarl_known"  # attribute of a fake tensor: its copy on the host
_IS_ZERO = "megarl_is_zero"  # attribute of a fake tensor of other dtypes that was created as zeros
# The largest host tensor, in elements, with real memory. Larger ones (the host buffer of a model's state) are
# fake as well.
_MOST_REAL = 2**26
_INTEGERS = (torch.int64, torch.int32, torch.bool)
_DEVICE = torch.ops.prim.device.default
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
_READ = torch.ops.aten._local_scalar_dense.default
_ZEROS = torch.ops.aten.zeros_like.default
_TOP_K = torch.ops.aten.topk.default
_SELECT = torch.ops.aten.masked_select.default


class _FakeTensors(FakeTensorMode):
    avoid_device_init = True  # fake_cuda.py reports a GPU to torch


class FakeDevice(TorchDispatchMode):
    """A dispatch mode in which `cuda` is the simulated device. Collectives use `fake` groups and end at once.

    Attributes:
        ledger: Where memory, calls and operations are counted.
        received_integers: What an integer message from another rank contains: the shape of hidden states,
            which pipeline stages send to each other.
        routes: Returns the experts (T, K) that a router selects for T tokens. They are used as the indices of
            each top-k over rows of expert scores.
        num_experts: The number of scores in such a row. Rows of group scores are shorter.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.received_integers: Sequence[int] = ()
        self.routes: Callable[[int], Tensor] | None = None
        self.num_experts = 0
        self._fake = _FakeTensors(allow_non_fake_inputs=True)
        self._send_batch = dist.batch_isend_irecv
        self._num_batches = 0
        self._batch: int | None = None

    def __enter__(self) -> FakeDevice:
        dist.batch_isend_irecv = self._communicate_batch  # pyrefly: ignore[bad-assignment]
        # `torch.tensor(..., device="cuda")` is created on the host and then copied, which is an operation
        # that this mode sees.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        torch._C._set_only_lift_cpu_tensors(False)
        dist.batch_isend_irecv = self._send_batch

    # pyrefly: ignore[bad-override-param-name]  # torch passes the arguments by position
    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        # Each `tensor.device` comes here: half of all operators of a run.
        if operator is _DEVICE and isinstance(arguments[0], FakeTensor):
            return arguments[0].fake_device
        keywords = keywords or {}
        if operator.namespace == "c10d":
            return self._communicate(operator, arguments, keywords)
        tensors = tensors_of(arguments, keywords)
        on_device = keywords.get("device") is not None and torch.device(keywords["device"]).type in (
            "cuda",
            "meta",
        )

        if on_device:
            # The memory of a fake tensor is on `meta`, which stands for the simulated device.
            keywords = {**keywords, "device": CUDA}

        fakes = [each for each in tensors if isinstance(each, FakeTensor)]
        if not on_device and not fakes:
            return self._on_host(operator, tensors, arguments, keywords)
        if operator is _READ:
            return self._read(fakes[0])
        # Results that follow from host numbers are computed on the host too, since shapes may depend on them.
        known = self._known(operator, tensors, arguments, keywords)
        result = self._on_device(operator, tensors, known, arguments, keywords)

        # A tensor that was modified in an unknown way no longer has a known value.
        if known is None:
            for mutated in _mutated(operator, arguments, keywords):
                vars(mutated).pop(_KNOWN, None)
                vars(mutated).pop(_IS_ZERO, None)
        elif not operator._schema.is_mutable:
            for fake, value in zip(tensors_of(result), tensors_of(known), strict=True):
                if isinstance(fake, FakeTensor):
                    vars(fake)[_KNOWN] = value

        if operator is _ZEROS:
            vars(result)[_IS_ZERO] = True
        if operator is _TOP_K and self.routes is not None and arguments[0].shape[1:] == (self.num_experts,):
            vars(result[1])[_KNOWN] = self._routes_of(*arguments[:2])

        # A small copy to the host gets values: known ones, or ones for floats, which are not tracked.
        if operator in _COPIES:
            self._count_copy(operator, arguments, keywords, result)
            if operator is _COPIES[0] and result.device.type == "cpu" and result.numel() <= _MOST_KNOWN:
                if known is not None:
                    return known
                if result.is_floating_point():
                    return torch.ones(result.shape, dtype=result.dtype)

        formula = flop_registry.get(operator._overloadpacket)
        if formula is not None:
            # Attention of packed rows depends on their lengths, if the formula can read them.
            sized, named = tree_map_only(
                FakeTensor, lambda fake: vars(fake).get(_KNOWN, fake), (arguments, keywords)
            )
            self.ledger.computes(formula(*sized, **named, out_val=result))

        self.ledger.sees(
            each for each in tensors_of(result) if isinstance(each, FakeTensor) and each.device.type == "cuda"
        )
        return result

    def _on_host(self, operator: Any, tensors: Sequence[Tensor], arguments: Any, keywords: Any) -> Any:
        if (
            not tensors
            and arguments
            and isinstance(arguments[0], list | torch.Size)
            and prod(arguments[0]) > _MOST_REAL
        ):
            with self._fake:
                return operator(*arguments, **keywords)
        return operator(*arguments, **keywords)

    def _on_device(
        self, operator: Any, tensors: Sequence[Tensor], known: Any, arguments: Any, keywords: Any
    ) -> Any:
        try:
            with self._fake:
                result = operator(*arguments, **keywords)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            if operator is _SELECT and (mask := known_value(arguments[1])) is not None:
                known = torch.empty(int(mask.sum()), dtype=arguments[0].dtype)
            if known is None:
                raise RehearsalError(
                    f"{operator} needs numbers of the device that are not computed from host numbers, at "
                    f"{place()}"
                ) from error
            self.ledger.synchronizes("read")
            return self._like(known)
        except RuntimeError as error:
            raise RehearsalError(f"{operator}: {str(error).splitlines()[0]}, at {place()}") from error

        # In-place operators return their argument.
        mutated = _mutated(operator, arguments, keywords)

        # A host tensor that is written from the device stays the same object.
        return mutated[0] if len(mutated) == 1 and not isinstance(mutated[0], FakeTensor) else result

    def _like(self, known: Any) -> Any:
        with self._fake:
            return tree_map_only(Tensor, lambda value: torch.empty_like(value, device="cuda"), known)

    def _known(self, operator: Any, tensors: Sequence[Tensor], arguments: Any, keywords: Any) -> Any:
        """Compute an operator's result on the host; None if it is not known.

        If the operator modifies a tensor, the host's copy is modified.
        """
        if (
            operator is _COPIES[0]
            and vars(tensors[0]).get(_IS_ZERO)
            and keywords.get("dtype") in _INTEGERS
            and _has_room(tensors[0])
        ):
            return torch.zeros(tensors[0].shape, dtype=keywords["dtype"])

        # The value is known only if all inputs are, and the operator defines its elements.
        values = [known_value(each) for each in tensors]
        if any(value is None for value in values) or "empty" in operator._opname:
            return None
        if not tensors and keywords.get("dtype") not in _INTEGERS and operator._opname != "arange":
            return None
        arguments, keywords = tree_map_only(Tensor, known_value, (arguments, keywords))
        if keywords.get("device") is not None:
            keywords = {**keywords, "device": torch.device("cpu")}
        result = operator(*arguments, **keywords)

        # Large values are dropped, since they would cost the host the memory that the device is spared.
        return result if all(_is_small(value) for value in tensors_of(result)) else None

    def _routes_of(self, scores: Tensor, num_chosen: int) -> Tensor:
        assert self.routes is not None
        routes = self.routes(scores.shape[0])
        assert routes.shape[1] == num_chosen, "a top-k of other scores than a router's"
        return routes

    def _read(self, tensor: FakeTensor) -> Any:
        # Reading a number makes the host wait for the device.
        if tensor.device.type == "cuda":
            self.ledger.synchronizes("read")
        value = known_value(tensor)
        if value is not None:
            return value.item()
        if tensor.is_floating_point():
            return 1.0
        raise RehearsalError(
            f"a number ({tensor.dtype}) is read that is not computed from host numbers, at {place()}"
        )

    def _count_copy(self, operator: Any, arguments: Any, keywords: Any, result: Any) -> None:
        """Count a copy between host and device, unless it is asynchronous."""
        # `_to_copy` returns its target, and `copy_` has it as its first argument.
        source, target = (arguments[0], result) if operator is _COPIES[0] else (arguments[1], arguments[0])
        blocks = not (
            keywords.get("non_blocking") or (operator is _COPIES[1] and len(arguments) > 2 and arguments[2])
        )
        if blocks and (source.device.type == "cuda") != (target.device.type == "cuda") and source.numel():
            self.ledger.synchronizes("copy")

    def _communicate(self, operator: Any, arguments: Any, keywords: Any) -> Any:
        for tensor in tensors_of(arguments, keywords):
            if tensor.device.type != "cuda":
                raise RehearsalError(
                    f"{kind_of(operator)} of a tensor on {tensor.device}, which NCCL does not support, at "
                    f"{place()}"
                )

        if (call := collective_of(operator, arguments, keywords)) is not None:
            collective, tensor = call
            # A pipeline stage receives shapes before activations; the dry run knows them in advance.
            if collective.kind == "recv" and not tensor.is_floating_point():
                vars(tensor)[_KNOWN] = torch.tensor(self.received_integers, dtype=tensor.dtype).view(
                    tensor.shape
                )
            if collective.kind == "all_gather":
                _gather_known(arguments[0], arguments[1], len(collective.ranks))
            number = self.ledger.communicates(collective._replace(batch=self._batch))
            work = PythonCallbackWork(lambda limit: self._end(number)).boxed()
        else:
            work = FakeWork().boxed()

        return work if len(operator._schema.returns) == 1 else (arguments[0], work)

    def _end(self, call: int) -> bool:
        self.ledger.awaits(call)
        return True

    def _communicate_batch(self, transfers: list[dist.P2POp]) -> list[dist.Work]:
        self._num_batches += 1
        self._batch = self._num_batches
        try:
            return self._send_batch(transfers)
        finally:
            self._batch = None


def _gather_known(gathered: Any, part: Any, num_ranks: int) -> None:
    """Set the known value of a gathered tensor.

    Other ranks have the same number of tokens and the same routes, so they send the same values.
    """
    if (
        isinstance(gathered, FakeTensor)
        and isinstance(part, FakeTensor)
        and (value := known_value(part)) is not None
    ):
        vars(gathered)[_KNOWN] = torch.cat([value] * num_ranks).view(gathered.shape)


def _mutated(operator: Any, arguments: Any, keywords: Any) -> list[Tensor]:
    if not operator._schema.is_mutable:
        return []
    named = zip(operator._schema.arguments, arguments, strict=False)
    values = [value for argument, value in named if argument.is_write]
    values += [
        keywords[argument.name]
        for argument in operator._schema.arguments
        if argument.is_write and argument.name in keywords
    ]

    return tensors_of(values)


def _is_small(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and _has_room(tensor)


def _has_room(tensor: Tensor) -> bool:
    return tensor.numel() <= _MOST_KNOWN


def known_value(tensor: Tensor) -> Tensor | None:
    """Return the value of a tensor that is known on the host, if any."""
    if isinstance(tensor, FakeTensor):
        return vars(tensor).get(_KNOWN)
    return tensor if _is_small(tensor) else None

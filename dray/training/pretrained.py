"""Pretrained weights that all trials in a process share: frozen, in memory only once, left out of checkpoints."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import torch

from dray.storage.disk import scratch
from dray.training.checkpoint.joint import open_together
from dray.training.errors import PeerFailed
from dray.training.parallel.distributed import DistributedContext
from dray.training.parallel.exchange import all_or_none, on_failure

log = logging.getLogger(__name__)

M = TypeVar("M", bound=torch.nn.Module)

MARK = "_dray_pretrained"  # the attribute that links a parameter to its `Weight`; copies of the parameter lack it


class Weight:
    """A pretrained tensor in memory that trials share, or this rank's shard of it. `kept` is the module it is from."""

    def __init__(self, tensor: torch.Tensor, whole: Weight | None = None, kept: Pretrained[Any] | None = None) -> None:
        self._tensor = tensor.detach()
        self.kept = kept
        self._checksum = _checksum(self._tensor)
        self.is_shard = whole is not None
        if whole is not None:
            self.sha256 = whole.sha256

    @cached_property
    def sha256(self) -> str:
        """The hash of the whole tensor's dtype, shape and content."""
        digest = hashlib.sha256(f"{self._tensor.dtype} {tuple(self._tensor.shape)} ".encode())
        digest.update(_bytes(self._tensor).cpu().numpy().data)
        return digest.hexdigest()

    @property
    def summary(self) -> tuple[str, tuple[int, ...], int]:
        """What equal weights have in common, and others hardly ever; it takes less time than the SHA-256."""
        return str(self._tensor.dtype), tuple(self._tensor.shape), self._checksum

    def moved_to(self, tensor: torch.Tensor) -> Weight:
        weight = copy.copy(self)
        weight._tensor = tensor
        return weight

    def share(self, parameter: torch.nn.Parameter | None = None) -> torch.nn.Parameter:
        """Let a parameter use the same memory: this one, or a new frozen one."""
        if parameter is None:
            parameter = torch.nn.Parameter(self._tensor, requires_grad=False)
        parameter.data = self._tensor
        setattr(parameter, MARK, self)
        return parameter

    def equals(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter that shared this memory, and may have moved since, still has the loaded values."""
        loaded, current = self._tensor, _local(parameter)
        return (
            (current.dtype, current.shape) == (loaded.dtype, loaded.shape)
            and _checksum(current) == self._checksum  # which does not depend on the order of elements
            and (current.device != loaded.device or torch.equal(_bytes(current), _bytes(loaded)))
        )

    def is_intact(self) -> bool:
        """Whether the tensor still has the loaded values. Reads all of it, so finds writes that autograd misses."""
        return _checksum(self._tensor) == self._checksum


class Pretrained(Generic[M]):
    """A kept module, frozen from now on, whose copies share its weights."""

    def __init__(self, module: M) -> None:
        self._module = module.requires_grad_(False)
        # Subclasses of Parameter (quantised weights) hold more than a tensor, and are not shared.
        self._parameters = [each for each in module.parameters() if type(each) is torch.nn.Parameter]
        self._weights = [Weight(each, kept=self) for each in self._parameters]
        self._file: BinaryIO | None = None

    @property
    def in_file(self) -> bool:
        """Whether the weights are in a file instead of in memory."""
        return self._file is not None

    def is_intact(self) -> bool:
        """Whether no trial has changed a weight."""
        return self.in_file or all(weight.is_intact() for weight in self._weights)

    def copy(self) -> M:
        """Copy the module. Only its frozen parameters share memory with this one."""
        weights = zip(self._parameters, self._loaded(), strict=True)
        return copy.deepcopy(self._module, {id(each): weight.share() for each, weight in weights})

    def write(self, stack: contextlib.ExitStack) -> Path:
        path = stack.enter_context(scratch("pretrained")) / "weights.pt"
        with path.open("wb") as file:  # given a path, torch would raise a RuntimeError when the disk is full
            torch.save([weight._tensor for weight in self._loaded()], file)
        return path

    def move_to(self, path: Path, sharing: Iterable[torch.nn.Parameter]) -> None:
        """Keep the weights only in a file from `write`, which may be deleted afterwards. The parameters in `sharing`
        then share the file's pages, unless the trial has changed or cast them."""
        self._file = path.open("rb")
        moved = dict(zip(self._weights, self._loaded(), strict=True))
        for parameter in sharing:
            if (weight := _weight_of(parameter)) in moved and weight.equals(parameter):
                moved[weight].share(parameter)
        self._weights = [weight.moved_to(weight._tensor.to("meta")) for weight in self._weights]
        # Change a copy, because the user's function may have kept the module that it returned.
        empty = [torch.nn.Parameter(torch.empty(0), requires_grad=False) for _ in self._parameters]
        self._module = copy.deepcopy(self._module, dict(zip(map(id, self._parameters), empty, strict=True)))
        self._parameters = empty

    def _loaded(self) -> list[Weight]:
        """The weights. A file is mapped, so that processes share its pages until they write to them."""
        if self._file is None:
            return self._weights
        path = f"/dev/fd/{self._file.fileno()}"
        tensors = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
        return [weight.moved_to(tensor) for weight, tensor in zip(self._weights, tensors, strict=True)]


def share_on_machine(model: torch.nn.Module, peers: DistributedContext) -> None:
    """Move the kept pretrained weights of a model into files, one per machine, before the model is sharded. All ranks
    call this together."""
    hash_on_chiefs([model], peers)
    parameters = {id(each): each for each in shared_parameters(model).values()}.values()
    for kept in dict.fromkeys(_weight_of(each).kept for each in parameters):
        if kept is None:
            continue
        in_file, intact = zip(*peers.allgather((kept.in_file, kept.is_intact())), strict=True)
        if all(in_file) or not all(intact):  # weights that a trial has changed will be loaded again
            continue
        try:
            with contextlib.ExitStack() as stack, on_failure(lambda _: None):  # the trial continues
                path = open_together(peers, partial(kept.write, stack), "writing its pretrained weights")
                with all_or_none(peers, "reading its pretrained weights"):  # before the file is deleted
                    kept.move_to(path, parameters)
        except (OSError, PeerFailed) as error:
            log.warning("each process keeps its pretrained weights in memory; set TMPDIR to a larger disk: %s", error)


def shared_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of a model that share a `Weight`, by their names in its state dict."""
    if not any(hasattr(parameter, MARK) for parameter in model.parameters()):
        return {}
    return {name: value for name, value in model.state_dict(keep_vars=True).items() if hasattr(value, MARK)}


def _weight_of(parameter: torch.Tensor) -> Weight:
    weight: Weight = getattr(parameter, MARK)
    return weight


def unshare(parameters: Iterable[torch.Tensor]) -> None:
    """Give parameters that will be changed their own memory."""
    for parameter in parameters:
        if hasattr(parameter, MARK):
            if not _weight_of(parameter).is_shard:
                parameter.data = parameter.data.clone()
            delattr(parameter, MARK)


@contextlib.contextmanager
def sharding(model: torch.nn.Module) -> Iterator[None]:
    """A block that shards a model. At its end, shards of shared weights are marked as such."""
    whole = {name: _weight_of(parameter) for name, parameter in shared_parameters(model).items()}
    yield
    if whole:
        shards = model.state_dict(keep_vars=True)
        for name, weight in whole.items():
            setattr(shards[name], MARK, Weight(_local(shards[name]), weight))


def unshare_changed_shards(models: Sequence[torch.nn.Module], peers: DistributedContext) -> None:
    """Have checkpoints include each pretrained weight with a shard that its rank has changed. All ranks call this
    together."""
    shared = [parameter for model in models for parameter in shared_parameters(model).values()]
    shards = [parameter for parameter in shared if _weight_of(parameter).is_shard]
    if shards:  # on all ranks
        ranks = peers.allgather([not _weight_of(shard).equals(shard) for shard in shards])
        unshare(shard for shard, *changed in zip(shards, *ranks, strict=True) if any(changed))


def hash_on_chiefs(models: Sequence[torch.nn.Module], peers: DistributedContext) -> None:
    """Hash the pretrained weights in the models on one rank of each machine, for all its ranks that have loaded the
    same. All ranks call this together."""
    weights = {
        (n, name): _weight_of(each) for n, model in enumerate(models) for name, each in shared_parameters(model).items()
    }
    own = {key: (each.summary, each.sha256) for key, each in weights.items()} if peers.local_rank == 0 else {}
    for key, (summary, sha256) in peers.allgather_local(own)[0].items():
        if key in weights and weights[key].summary == summary:
            weights[key].sha256 = sha256


def digest_of(models: Sequence[torch.nn.Module]) -> str:
    """A digest of all pretrained weights in the models; "" if there are none."""
    digests = [{name: _weight_of(each).sha256 for name, each in shared_parameters(model).items()} for model in models]
    return hashlib.sha256(repr(digests).encode()).hexdigest() if any(digests) else ""


def check_same(digests: Sequence[str]) -> None:
    """Raise a RuntimeError unless all ranks have loaded the same pretrained weights, by their `digest_of`."""
    for rank, each in enumerate(digests):
        if each != digests[0]:
            raise RuntimeError(
                f"ranks 0 and {rank} have loaded different pretrained weights; each rank loads them itself, so their "
                "files must be the same on all machines"
            )


def without_shared(model: torch.nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """A model's state dict without its shared weights, and their SHA-256 by name.

    A weight that the trial has changed, for example by merging an adapter into it, stays in the state dict. For shards
    see `unshare_changed_shards`.
    """
    state = model.state_dict()
    left_out = {
        name: _weight_of(parameter).sha256
        for name, parameter in shared_parameters(model).items()
        if _weight_of(parameter).is_shard or _weight_of(parameter).equals(parameter)
    }
    for name in left_out:
        del state[name]
    return state, left_out


def with_shared(model: torch.nn.Module, saved: Mapping[str, Any], left_out: Mapping[str, str]) -> Mapping[str, Any]:
    """Complete a saved state dict with the weights that were left out, of which `left_out` has the SHA-256.

    Weights that the state dict itself contains are no longer shared.

    Raises:
        ValueError: the model has not loaded the same weights.
    """
    shared = shared_parameters(model)
    unshare(shared[name] for name in shared.keys() & saved.keys())
    for name, sha256 in left_out.items():
        if name not in shared:
            raise ValueError(
                f"it has no {name!r}, a pretrained weight, and the trial's model does not get it from a function with "
                "@pytorch.pretrained; load it as the trial that wrote the checkpoint did"
            )
        if _weight_of(shared[name]).sha256 != sha256:
            raise ValueError(
                f"it was trained on other pretrained weights than the trial has loaded: {name!r} differs; load the same"
            )
    if not left_out:
        return saved
    # The parameters themselves: loading does not copy a parameter onto itself.
    complete = OrderedDict({**saved, **{name: shared[name] for name in left_out}})
    complete._metadata = getattr(saved, "_metadata", None)  # type: ignore[attr-defined]
    return complete


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
    return local


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _checksum(tensor: torch.Tensor) -> int:
    """The sum of a tensor's words, which takes about as long as reading the tensor once."""
    data = _bytes(tensor)
    if data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32) if data.numel() % 4 == 0 else data
    return int(words.sum(dtype=torch.int64))

"""Uses: every time a parameter is applied during a pass, with its input and the gradient of its output.

Backward runs through activations only: inside the block no parameter requires a gradient, so nothing is written to
`.grad` and no time goes into summed weight gradients.
Shapes: B examples, T tokens (or readouts) of an example, M readouts, I in, O out, D hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from budwood.data.batch import Batch
from budwood.errors import ModelError, TreeError, nearest
from budwood.models.objective import Targets
from budwood.params.tree import named

Kind = Literal["linear", "conv1d", "conv2d", "embedding", "layernorm", "rmsnorm"]


@dataclass(frozen=True)
class Layout:
    """How the rows of a module's input belong to examples.

    [B, T, I] and [B, I] inputs are rows of examples; [M, I] inputs are readouts of the examples `row_M` (see Targets).
    """

    count: int
    row_M: Tensor | None = None
    mask_BT: Tensor | None = None


def layout_of(batch: Batch, targets: Targets) -> Layout:
    """The layout of a batch under the targets of an objective."""
    return Layout(len(batch), targets.row_M, batch.inputs.get("attention_mask"))


@dataclass(frozen=True)
class Use:
    """One application of a module, example by example.

    `a`: the input a_BTI of a linear layer or Conv1D (of a Conv2d: its patches, places being positions), the normalised
    input a_BTD of a norm, or the token ids a_BT of an embedding. `g_BTO`: the gradient of the output. `mask_BT`: which
    positions are real (None: all). `weight`, `bias`: canonical names of the parameters applied (None: absent). `skip`:
    the id that an embedding never learns; `words`: how many it has.
    """

    kind: Kind
    weight: str | None
    bias: str | None
    a: Tensor
    g_BTO: Tensor
    mask_BT: Tensor | None
    skip: int | None = None
    words: int = 0


@dataclass
class Record:
    """A use whose output gradient is still to come."""

    kind: Kind
    weight: str | None
    bias: str | None
    a: Tensor
    version: int
    edge: GradientEdge
    skip: int | None
    time_first: bool = False
    words: int = 0


@dataclass
class LinearIO:
    """What `linear_io` records. `uncovered`: wanted parameters that the modules' own calls do not explain."""

    layout: Layout
    wanted: dict[int, str]
    records: list[Record] = field(default_factory=list)
    uncovered: set[str] = field(default_factory=set)
    _uses: list[Use] = field(default_factory=list)

    def backward(self, value: Tensor, keep: bool = False) -> None:
        """Fill in the output gradients of a scalar; `keep` leaves the graph for another call."""
        self._uses = []
        if not self.records or not value.requires_grad:
            return
        edges = [r.edge for r in self.records]
        grads = torch.autograd.grad(value, edges, retain_graph=keep, allow_unused=True)
        for record, grad in zip(self.records, grads, strict=True):
            if grad is not None:  # None: the output has no part in the value
                self._uses.append(arranged(record, grad, self.layout))

    def uses(self, name: str) -> tuple[Use, ...]:
        """All uses of one parameter in the last `backward`, in the order of the pass."""
        return tuple(u for u in self._uses if name in (u.weight, u.bias))


def arranged(record: Record, grad: Tensor, layout: Layout) -> Use:
    """A record with its gradient, both with the example first; an input that is no longer what was seen is refused."""
    if record.a._version != record.version:
        raise ModelError(
            f"The model changes the input of '{record.weight or record.bias}' in place after using it, so that its "
            "gradient cannot be told from what is left. Leave it out with --modules, or write the model without the "
            "in-place change."
        )
    if record.kind == "conv2d":
        g_BTO = grad.flatten(2).transpose(1, 2)
        return Use(record.kind, record.weight, record.bias, record.a, g_BTO, None)
    ids = record.kind == "embedding"
    a = record.a
    if record.time_first:
        a, grad = (x.reshape(-1, layout.count, x.shape[-1]).transpose(0, 1) for x in (a, grad))
    elif not ids and a.dim() == 2 and layout.row_M is not None and len(a) == len(layout.row_M):
        a_BTI, g_BTO, mask_BT = _by_example(a, grad, layout)
        return Use(record.kind, record.weight, record.bias, a_BTI, g_BTO, mask_BT, record.skip)
    count = layout.count
    a = a.reshape(count, -1) if ids else a.reshape(count, -1, a.shape[-1])
    g_BTO = grad.reshape(count, -1, grad.shape[-1])
    mask = layout.mask_BT
    fits = mask is not None and (record.time_first or record.a.dim() >= (2 if ids else 3)) and mask.shape == a.shape[:2]
    return Use(record.kind, record.weight, record.bias, a, g_BTO, mask if fits else None, record.skip, record.words)


def _by_example(a_MI: Tensor, g_MO: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Readouts put beside one another by example, zeros where an example has fewer than the most."""
    assert layout.row_M is not None
    row_M = layout.row_M.to(a_MI.device)
    count_B = torch.bincount(row_M, minlength=layout.count)
    order_M = torch.argsort(row_M, stable=True)
    first_B = count_B.cumsum(0) - count_B
    rank_M = torch.empty_like(row_M)
    rank_M[order_M] = torch.arange(len(row_M), device=row_M.device) - first_B[row_M[order_M]]
    most = int(count_B.max()) if len(row_M) else 0
    a_BTI = a_MI.new_zeros(layout.count, most, a_MI.shape[1]).index_put((row_M, rank_M), a_MI)
    g_BTO = g_MO.new_zeros(layout.count, most, g_MO.shape[1]).index_put((row_M, rank_M), g_MO)
    return a_BTI, g_BTO, torch.arange(most, device=row_M.device) < count_B[:, None]


def kind_of(module: nn.Module) -> Kind | None:
    """How a module applies its parameters; None where its calls cannot be taken apart.

    Subclasses count only while they keep the forward pass of the class they come from.
    """
    from transformers.pytorch_utils import Conv1D

    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return "linear"
    if isinstance(module, Conv1D) and forward is Conv1D.forward:
        return "conv1d"
    if isinstance(module, nn.Conv2d) and forward is nn.Conv2d.forward:
        whole = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return "conv2d" if whole else None
    if isinstance(module, nn.Embedding) and forward is nn.Embedding.forward:
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return "embedding" if plain else None
    if isinstance(module, nn.LayerNorm) and forward is nn.LayerNorm.forward and len(module.normalized_shape) == 1:
        return "layernorm"
    own = dict(module.named_parameters(recurse=False))
    if type(module).__name__.endswith("RMSNorm") and list(own) == ["weight"] and own["weight"].dim() == 1:
        return "rmsnorm"
    return None


def _normalised(module: Any, kind: Kind, x: Tensor) -> Tensor:
    """A norm's input as its weight sees it."""
    if kind == "layernorm":
        return nn.functional.layer_norm(x, module.normalized_shape, None, None, module.eps)
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or torch.finfo(x.dtype).eps
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _patches(module: Any, x_BCHW: Tensor) -> Tensor:
    """a_BTI: what a Conv2d sees at each of its places."""
    unfolded = nn.functional.unfold(x_BCHW, module.kernel_size, module.dilation, module.padding, module.stride)
    return unfolded.transpose(1, 2)


def _belongs(x: Tensor, ids: bool, layout: Layout) -> bool:
    """Whether the leading rows of an input are examples or readouts."""
    if x.dim() >= 3 or (ids and x.dim() == 2):
        return x.shape[0] == layout.count
    readouts = layout.count if layout.row_M is None else len(layout.row_M)
    return x.dim() == 2 and x.shape[0] in (layout.count, readouts)


def _edge(output: Tensor) -> tuple[Tensor, GradientEdge]:
    """An output and the place in the graph where its gradient will arrive; the graph begins here if it has not yet."""
    if output.requires_grad:
        return output, get_gradient_edge(output)
    leaf = output.detach().requires_grad_()
    return leaf.clone(), get_gradient_edge(leaf)  # a leaf could not be changed in place further on


def _recording(io: LinearIO, module: Any, kind: Kind, weight: str | None, bias: str | None) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x: Tensor = (args[0] if args else next(iter(kwargs.values()))).detach()
        if not _belongs(x, kind == "embedding", io.layout):
            io.uncovered.update(n for n in (weight, bias) if n)
            return output
        if kind == "conv2d":
            x = _patches(module, x)
        if kind in ("layernorm", "rmsnorm"):
            x = _normalised(module, kind, x)
            if kind == "rmsnorm" and not torch.allclose(module.weight * x, output, rtol=1e-3, atol=1e-4):
                io.uncovered.update(n for n in (weight, bias) if n)
                return output
        output, edge = _edge(output)
        skip = module.padding_idx if kind == "embedding" else None
        words = module.num_embeddings if kind == "embedding" else 0
        io.records.append(Record(kind, weight, bias, x, x._version, edge, skip, words=words))
        return output

    return hook


class _Inside(TorchFunctionMode):
    """Sees the linear maps that `nn.MultiheadAttention` applies without calling the modules that own them."""

    def __init__(self, io: LinearIO, owned: dict[int, tuple[str, str | None]]) -> None:
        super().__init__()
        self.io, self.owned = io, owned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        plain = nn.functional.linear
        nn.functional.linear = self._linear
        try:
            return func(*args, **(kwargs or {}))
        finally:
            nn.functional.linear = plain

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = torch._C._nn.linear(x, weight, bias)
        if id(weight) in self.owned:
            x = x.detach()  # [T B, I] or [T, B, I]: this module has the examples second
            output, edge = _edge(output)
            record = Record("linear", *self.owned[id(weight)], x, x._version, edge, None, time_first=True)
            self.io.records.append(record)
        return output


def _attention_maps(model: nn.Module, io: LinearIO) -> dict[int, tuple[str, str | None]]:
    """Wanted (weight, bias) that `nn.MultiheadAttention` modules of a model apply themselves, by weight."""
    found: dict[int, tuple[str, str | None]] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            pairs = [(module.out_proj.weight, module.out_proj.bias), (module.in_proj_weight, module.in_proj_bias)]
            for weight, bias in pairs:
                if weight is not None and id(weight) in io.wanted:
                    found[id(weight)] = io.wanted[id(weight)], io.wanted.get(id(bias))
    return found


def _expanding(io: LinearIO) -> Callable[..., Any]:
    """Give shared ids ([1, T] positions) one row per example, so that their gradients do not arrive summed."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = args[0] if args else kwargs["input"]
        if ids.dim() == 2 and ids.shape[0] == 1:
            ids = ids.expand(io.layout.count, -1)
        return (ids, *args[1:]), {k: v for k, v in kwargs.items() if k != "input"}

    return hook


def _attach(model: nn.Module, io: LinearIO) -> Iterator[RemovableHandle]:
    """Hooks on every module that owns a wanted parameter."""
    explained: set[str] = set()
    for module in model.modules():
        own = {part: io.wanted.get(id(p)) for part, p in module.named_parameters(recurse=False)}
        found = {part: name for part, name in own.items() if name}
        if not found:
            continue
        kind = kind_of(module)
        if kind is None:
            continue
        explained.update(found.values())
        if kind == "embedding":
            yield module.register_forward_pre_hook(_expanding(io), with_kwargs=True)
        hook = _recording(io, module, kind, found.get("weight"), found.get("bias"))
        yield module.register_forward_hook(hook, with_kwargs=True)
    io.uncovered.update(set(io.wanted.values()) - explained)


@contextlib.contextmanager
def recording(model: nn.Module, names: Sequence[str], layout: Layout) -> Iterator[LinearIO]:
    """Record uses without touching what requires a gradient."""
    parameters = named(model)
    unknown = [n for n in names if n not in parameters]
    if unknown:
        raise TreeError(f"The model has no parameter '{unknown[0]}'.{nearest(unknown[0], parameters)}")
    io = LinearIO(layout, {id(parameters[n]): n for n in names})
    handles: list[RemovableHandle] = []
    inside = _attention_maps(model, io)
    try:
        handles.extend(_attach(model, io))
        io.uncovered -= {n for pair in inside.values() for n in pair if n}
        with _Inside(io, inside) if inside else contextlib.nullcontext():
            yield io
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def linear_io(model: nn.Module, names: Sequence[str] | None, layout: Layout) -> Iterator[LinearIO]:
    """Record, per parameter, all its uses in the forward pass made inside the block.

    `names` are canonical (None: every parameter that requires a gradient). Afterwards `io.backward(value)` fills in the
    output gradients and `io.uses(name)` gives them. Hooks and flags are put back at the end, also after an exception.
    """
    parameters = named(model)
    old = {n: p.requires_grad for n, p in parameters.items()}
    wanted = [n for n in parameters if old[n]] if names is None else list(names)
    with recording(model, wanted, layout) as io, torch.enable_grad():
        try:
            for p in parameters.values():
                p.requires_grad_(False)
            yield io
        finally:
            for n, p in parameters.items():
                p.requires_grad_(old[n])

"""Makes ``DTensor`` a valid argument of the operators, except the float8 ones, for tensor and sequence parallelism.

You don't have to call anything. After ``import torchops``, this module is imported as soon as anything imports
``torch.distributed.tensor``. It isn't imported earlier, because that takes far more time than torchops itself.

``docs/distributed.md`` says what each operator does with which placement, and what that costs. Data parallelism
(``DistributedDataParallel``, ``fully_shard``) passes plain tensors to the operators, so it works without this module.

``ColwiseParallel`` and ``RowwiseParallel`` are PyTorch's parallel styles, which take a :class:`torchops.nn.Dense`, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding
except ImportError as error:
    raise ImportError(
        f"torchops.distributed: expected a torch with DTensor and register_sharding, got {torch.__version__} ({error})"
    ) from error

if TYPE_CHECKING:
    from torchops.distributed.styles import ColwiseParallel, RowwiseParallel

__all__ = ["ColwiseParallel", "RowwiseParallel"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("torchops.distributed.styles"), name)
    raise AttributeError(f"module 'torchops.distributed' has no attribute {name!r}")


_myops = torch.ops.myops

# What may happen along one dimension of a mesh: the placements of the outputs, and of the arguments (None where one is
# no tensor). DTensor combines these over the dimensions of the mesh and takes what moves the fewest bytes. `x: Any` in
# the functions that list them stands for DTensor's description of a tensor: shape, ndim, placements.
_Way = tuple[list[Any], list[Any]]

_REPLICATE = Replicate()


def _sharded(x: Any, dims: Iterable[int]) -> list[Any]:
    """The placements that cut ``x`` along one of ``dims``, starting with those that it has (also strided ones)."""
    dims = list(dims)
    present = [p for p in x.placements if getattr(p, "dim", None) in dims]
    return list(dict.fromkeys([*present, *map(Shard, dims)]))


def _if_given(argument: Any, placement: Any = _REPLICATE) -> Any:
    return None if argument is None else placement


def _asked(mask: Sequence[bool], placements: Sequence[Any]) -> list[Any]:
    """The placements of gradients; those that nobody asked for are empty tensors, the same on every rank."""
    return [p if wanted else _REPLICATE for wanted, p in zip(mask, placements, strict=True)]


def _check_stays(op: str, name: str, x: Any, allowed: Sequence[Any], expected: str) -> None:
    """An operator that overwrites ``x`` does so on each rank's part of it; it never moves ``x``."""
    if not all(p in allowed for p in x.placements):
        raise RuntimeError(
            f"{op}: expected {name} replicated or sharded{expected}, got shape {tuple(x.shape)} with placements "
            f"{tuple(x.placements)}; redistribute() it first, or use {op.rstrip('_')}"
        )


# --- elementwise -----------------------------------------------------------------------------------------------------


def _elementwise(x: Any) -> list[Any]:
    return [_REPLICATE, *_sharded(x, range(x.ndim))]


def _sigmoid(x: Any) -> list[_Way]:
    return [([p], [p]) for p in _elementwise(x)]


def _sigmoid_(x: Any) -> list[_Way]:
    _check_stays("sigmoid_", "x", x, _elementwise(x), "")
    return [([], [p]) for p in _elementwise(x)]


def _keep(x: Any) -> list[_Way]:
    return [([p], [p]) for p in dict.fromkeys([_REPLICATE, *x.placements])]


# --- softmax ---------------------------------------------------------------------------------------------------------


def _beside(x: Any, dim: int) -> list[Any]:
    return [_REPLICATE, *_sharded(x, (d for d in range(x.ndim) if d != dim % x.ndim))]


def _softmax(x: Any, dim: int = -1) -> list[_Way]:
    return [([p], [p, None]) for p in _beside(x, dim)]


def _softmax_(x: Any, dim: int = -1) -> list[_Way]:
    _check_stays("softmax_", "x", x, _beside(x, dim), f" along dimensions other than dim = {dim}")
    return [([], [p, None]) for p in _beside(x, dim)]


def _softmax_backward(grad: Any, y: Any, dim: int) -> list[_Way]:
    return [([p], [p, p, None]) for p in _beside(y, dim)]


# --- layer_norm ------------------------------------------------------------------------------------------------------


def _leading(x: Any, normalized_shape: Sequence[int]) -> list[Any]:
    return [_REPLICATE, *_sharded(x, range(x.ndim - len(normalized_shape)))]


def _check_layer_norm_stays(op: str, x: Any, shape: Sequence[int]) -> None:
    _check_stays(op, "x", x, _leading(x, shape), f" along dimensions before the last {len(shape)}")


def _layer_norm(x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 0.0) -> list[_Way]:
    return [([p], [p, None, _if_given(weight), _if_given(bias), None]) for p in _leading(x, shape)]


def _layer_norm_(x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 0.0) -> list[_Way]:
    _check_layer_norm_stays("layer_norm_", x, shape)
    return [([], arguments) for _, arguments in _layer_norm(x, shape, weight, bias)]


def _layer_norm_moments(x: Any, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> list[_Way]:
    return [([p, p, p], arguments) for [p], arguments in _layer_norm(x, shape, weight, bias)]


def _layer_norm_backward(
    grad: Any, x: Any, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, mask: Sequence[bool]
) -> list[_Way]:
    ways = []
    for p in _leading(x, shape):
        # The gradients of weight and bias are sums over rows, so ranks with some of the rows hold a part of the sum.
        affine = _REPLICATE if p == _REPLICATE else Partial()
        ways.append((_asked(mask, [p, affine, affine]), [p, p, None, p, p, _if_given(weight), None]))
    return ways


def _layer_norm_moments_(_cls: type, op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> tuple[Any, Any]:
    # DTensor takes it that an operator named like this returns its argument or nothing.
    x, shape, weight, bias, eps = args
    _check_layer_norm_stays("_layer_norm_", x, shape)
    affine = (t if t is None else _local(t, [_REPLICATE] * len(x.placements)) for t in (weight, bias))
    mean, rstd = op(_local(x, x.placements), shape, *affine, eps)
    sizes = (*x.shape[: x.ndim - len(shape)], *[1] * len(shape))
    return _wrap(mean, x, x.placements, sizes), _wrap(rstd, x, x.placements, sizes)


# --- products --------------------------------------------------------------------------------------------------------


def _dense(x: Any, w: Any, b: Any = None) -> list[_Way]:
    rows = [_REPLICATE, *_sharded(x, range(x.ndim - 1))]
    columns = ([Shard(x.ndim - 1)], [_REPLICATE, Shard(0), _if_given(b, Shard(0))])
    return [*(([p], [p, _REPLICATE, _if_given(b)]) for p in rows), columns]


def _dense_on_path(x: Any, w: Any, b: Any, path: str) -> list[_Way]:
    return [(outputs, [*arguments, None]) for outputs, arguments in _dense(x, w, b)]


def _dense_backward(grad: Any, y: Any, mask: Sequence[bool] = (True, True)) -> list[_Way]:
    last = Shard(y.ndim - 1)
    ways = [(_REPLICATE, _REPLICATE), *((p, Partial()) for p in _sharded(y, range(y.ndim - 1))), (last, Shard(0))]
    return [(_asked(mask, out), [out[0], out[0], None]) for out in ways]


def _dense_gradients(grad: Any, y: Any, x: Any, w: Any, mask: Sequence[bool]) -> list[_Way]:
    last, part = Shard(y.ndim - 1), Partial()
    rows = [([p, part, part], [p, p, p, _REPLICATE]) for p in _sharded(y, range(y.ndim - 1))]
    columns_out = ([part, Shard(0), Shard(0)], [last, last, _REPLICATE, Shard(0)])
    columns_in = ([last, Shard(1), _REPLICATE], [_REPLICATE, _REPLICATE, last, Shard(1)])
    replicated = ([_REPLICATE] * 3, [_REPLICATE] * 4)
    return [(_asked(mask, out), [*on, None]) for out, on in (replicated, *rows, columns_out, columns_in)]


def _gate(v: Any, x: Any, w: Any, b: Any = None) -> list[_Way]:
    rows = [_REPLICATE, *_sharded(v, range(v.ndim - 1))]
    last = Shard(v.ndim - 1)
    columns = ([last], [last, _REPLICATE, Shard(0), _if_given(b, Shard(0))])
    return [*(([p], [p, p, _REPLICATE, _if_given(b)]) for p in rows), columns]


def _gate_(v: Any, x: Any, w: Any, b: Any = None) -> list[_Way]:
    _check_stays("gate_", "v", v, _elementwise(v), "")
    return [([], arguments) for _, arguments in _gate(v, x, w, b)]


def _gate_with_product(v: Any, x: Any, w: Any, b: Any) -> list[_Way]:
    return [([p, p], arguments) for [p], arguments in _gate(v, x, w, b)]


def _gate_backward(
    grad: Any, v: Any, x: Any, w: Any, b: Any, mask: Sequence[bool], v_is_y: bool = False, z: Any = None
) -> list[_Way]:
    ways = []
    for [p], arguments in _gate(v, x, w, b):
        columns = p == Shard(v.ndim - 1)
        # A sum over rows, or for dx over columns, is partial where these are sharded.
        dx = Partial() if columns else p
        dw = Shard(0) if columns else _REPLICATE if p == _REPLICATE else Partial()
        ways.append((_asked(mask, [p, dx, dw, dw]), [p, *arguments, None, None, _if_given(z, p)]))
    return ways


def _glu(x: Any, w: Any, wg: Any, b: Any = None, bg: Any = None, activation: str = "sigmoid") -> list[_Way]:
    rows = [_REPLICATE, *_sharded(x, range(x.ndim - 1))]
    rest = [_REPLICATE, _REPLICATE, _if_given(b), _if_given(bg)]
    whole = Shard(0)
    columns = ([Shard(x.ndim - 1)], [_REPLICATE, whole, whole, _if_given(b, whole), _if_given(bg, whole)])
    return [*(([p], [p, *rest]) for p in rows), columns]


def _glu_with_products(x: Any, w: Any, wg: Any, b: Any, bg: Any, activation: str) -> list[_Way]:
    return [([p, p, p], arguments) for [p], arguments in _glu(x, w, wg, b, bg)]


def _glu_backward(
    grad: Any,
    x: Any,
    w: Any,
    wg: Any,
    b: Any,
    bg: Any,
    activation: str,
    mask: Sequence[bool],
    z: Any = None,
    u: Any = None,
) -> list[_Way]:
    ways = []
    for [p], arguments in _glu(x, w, wg, b, bg):
        columns = arguments[1] == Shard(0)
        dx = Partial() if columns else p
        dw = Shard(0) if columns else _REPLICATE if p == _REPLICATE else Partial()
        products = [_if_given(z, p), _if_given(u, p)]
        ways.append((_asked(mask, [dx, dw, dw, dw, dw]), [p, *arguments, None, None, *products]))
    return ways


def _linear_in(a: Any) -> list[Any]:
    # A product with parts of a sum gives the parts of a sum.
    return [_REPLICATE, *_sharded(a, range(a.ndim - 1)), Partial()]


def _square_matmul(a: Any, b: Any, transpose_b: bool = False) -> list[_Way]:
    # A batch of matrices is cut together with the rows that they multiply.
    batch = range(b.ndim - 2)
    return [([p], [p, p if getattr(p, "dim", None) in batch else _REPLICATE]) for p in _linear_in(a)]


def _square_matmul_(a: Any, b: Any, transpose_b: bool = False) -> list[_Way]:
    _check_stays("square_matmul_", "a", a, _linear_in(a), " along dimensions before the last")
    return [([], arguments) for _, arguments in _square_matmul(a, b)]


def _local(x: Any, placements: Sequence[Any]) -> Tensor:
    if x.placements != tuple(placements):
        # Autograd is above this; redistribute() must not see that x requires a gradient.
        x = x.detach().redistribute(placements=placements)
    return x.to_local()


def _wrap(local: Tensor, like: Any, placements: Sequence[Any], shape: Sequence[int]) -> Any:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    mesh = like.device_mesh
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides[-len(shape) :])
    )


def _product(x: Any, w: Any, contracted: int) -> Any:
    """The sum over the last dimension of ``x`` and dimension ``contracted`` of ``w``, each rank with its own part of
    either, and partial where that dimension is sharded. Moves less than gathering ``w``, if it moves anything.
    """
    last = x.ndim - 1
    places: list[tuple[Any, Any, Any]] = []
    for p, q in zip(x.placements, w.placements, strict=True):
        if (q == Shard(contracted) and p in (_REPLICATE, Shard(last))) or (q == _REPLICATE and p == Shard(last)):
            places.append((Shard(last), Shard(contracted), Partial()))
        elif p == Partial() or getattr(p, "dim", last) != last:
            places.append((p, _REPLICATE, p))
        elif q == Shard(1 - contracted):
            places.append((_REPLICATE, q, Shard(last)))
        else:
            places.append((_REPLICATE, _REPLICATE, _REPLICATE))
    x_placements, w_placements, out_placements = zip(*places, strict=True)
    w_local = _local(w, w_placements)
    out = torch.matmul(_local(x, x_placements), w_local if contracted == 0 else w_local.t())
    return _wrap(out, x, out_placements, (*x.shape[:-1], w.shape[1 - contracted]))


def _pairs(x: Any, w: Any, b: Any = None) -> list[tuple[Any, Any]]:
    """The placements of ``x`` and ``w`` along each dimension of the mesh. None where DTensor will refuse the arguments:
    plain tensors among them, or another mesh."""
    others = [w] if b is None else [w, b]
    if not all(isinstance(t, DTensor) and t.device_mesh == getattr(x, "device_mesh", None) for t in others):
        return []
    return list(zip(x.placements, w.placements, strict=True))


def _dense_row_parallel(_cls: type, op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    # With a sharded contraction each rank holds a part of the sum that the sigmoid is taken of, so the parts are
    # added up between the two. Every other call goes to the rules above.
    x, w, b = (*args, None)[:3]
    last = Shard(x.ndim - 1)
    if not any(p in (_REPLICATE, last) and q == Shard(1) for p, q in _pairs(x, w, b)):
        return NotImplemented
    z = _product(x, w, contracted=1)
    z = z.redistribute(placements=[_REPLICATE if p.is_partial() else p for p in z.placements])
    y = z.to_local()  # shares memory with z
    if b is not None:
        y.add_(_local(b, [Shard(0) if p == last else _REPLICATE for p in z.placements]))
    y.sigmoid_()
    return z


def _square_matmul_sharded_b(_cls: type, op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    # A part of b is no square matrix, so the operator itself cannot take it.
    a, b = args
    last = Shard(a.ndim - 1)
    if b.ndim > 2 or not any(p == last or (p == _REPLICATE and q != _REPLICATE) for p, q in _pairs(a, b)):
        return NotImplemented
    return _product(a, b, contracted=1 if kwargs.get("transpose_b", False) else 0)


# --- checks of whole tensors ------------------------------------------------------------------------------------------

_accepted: set[Any] = set()


def _checked(rule: Callable[..., Any]) -> Callable[..., Any]:
    """`rule`, after the operator's own checks of the whole tensors: the parts may fit where these don't. With gradients
    on, the kernels for autograd, which are above the rules, have checked them."""

    def call(cls: type, op: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            _check_whole(op, args, kwargs or {})
        return rule(cls, op, types, args, kwargs)

    return call


def _check_whole(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Calls `op` on tensors without data. Arguments that it accepted once pass again without a call."""
    try:
        key = op, _look(args), *((name, _look(value)) for name, value in kwargs.items())
        if key in _accepted:
            return
    except _PlainTensorError:
        return  # the rule refuses it
    except TypeError:  # symbolic sizes
        key = None
    with _disable_current_modes():
        op(*_without_data(args), **{name: _without_data(value) for name, value in kwargs.items()})
    if key is not None:
        if len(_accepted) >= 4096:
            _accepted.clear()
        _accepted.add(key)


class _PlainTensorError(Exception):
    pass


def _look(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, Tensor):
        raise _PlainTensorError
    return tuple(map(_look, value)) if isinstance(value, (list, tuple)) else value


def _without_data(value: Any) -> Any:
    if isinstance(value, DTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return [_without_data(each) for each in value] if isinstance(value, (list, tuple)) else value


# --- registration ----------------------------------------------------------------------------------------------------

for _name, _ways in {
    "dense": _dense,
    "_dense_backward": _dense_backward,
    "_dense_gradients": _dense_gradients,
    "_dense_on_path": _dense_on_path,
    "gate": _gate,
    "_gate": _gate_with_product,
    "gate_": _gate_,
    "_gate_backward": _gate_backward,
    "glu": _glu,
    "_glu": _glu_with_products,
    "_glu_backward": _glu_backward,
    "_keep": _keep,
    "layer_norm": _layer_norm,
    "layer_norm_": _layer_norm_,
    "_layer_norm": _layer_norm_moments,
    "_layer_norm_backward": _layer_norm_backward,
    "sigmoid": _sigmoid,
    "sigmoid_": _sigmoid_,
    "softmax": _softmax,
    "softmax_": _softmax_,
    "_softmax_backward": _softmax_backward,
    "square_matmul": _square_matmul,
    "square_matmul_": _square_matmul_,
}.items():
    register_sharding(getattr(_myops, _name).default)(_ways)

# What register_sharding registers is remembered, on torch 2.11, by the tensors and integers of a call alone. These
# depend on a list too; the number is its position.
for _name, _position in {
    "_dense_backward": 2,
    "_dense_gradients": 4,
    "_gate_backward": 5,
    "_glu_backward": 6,
    "layer_norm": 1,
    "layer_norm_": 1,
    "_layer_norm": 1,
    "_layer_norm_backward": 2,
}.items():
    _schema_info = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    _schema_info[getattr(_myops, _name).default] = RuntimeSchemaInfo(_position, needs_pytree=True)

# These come before the above; by returning NotImplemented they leave a call to it.
for _name, _rule in {
    "dense": _dense_row_parallel,
    "_dense_on_path": _dense_row_parallel,
    "_layer_norm_": _layer_norm_moments_,
    "square_matmul": _square_matmul_sharded_b,
}.items():
    torch.library.register_torch_dispatch(f"myops::{_name}", DTensor, _checked(_rule))

import torchops.distributed.attention  # noqa: E402
import torchops.distributed.transition  # noqa: E402
import torchops.distributed.triangle.update  # noqa: E402, F401

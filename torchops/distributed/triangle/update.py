"""The triangle multiplicative update of ``DTensor``; imported by :mod:`torchops.distributed`.

Along each dimension of the mesh, ``x`` of ``(*batch, N, N, c)`` may be

- replicated, or sharded along the batch: every rank calls the operator on its part;
- sharded along rows, dimension -3. Outgoing, row i of a and all of b give row i of ``o[i, j] = sum_k a[i, k] b[j, k]``,
  so b is gathered. Incoming, ``o[i, j] = sum_k a[k, i] b[k, j]`` is a sum over rows, of which ranks add up parts.

Anything else is redistributed to one of these. The operator itself needs whole pair matrices, so rows go through
layer_norm, glu and gate (``distributed/triangle/rows.py``), or kernels: those of the operator
(``distributed/triangle/hopper.py``), or others (``distributed/triangle/triton.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from torchops._core import devices
from torchops.distributed._dtensor import local, register_rule, wrap
from torchops.distributed.triangle import hopper, hopper_gradients
from torchops.distributed.triangle.rows import GROUPS, P_OUT, Rows, TriangleCall, apart, arrived, kernels_for

_myops = torch.ops.myops


def _padded(n: int, d: int, dtype: torch.dtype) -> tuple[int, int]:
    """Rows and columns of the product of n rows, per channel (of d)."""

    def multiple(size: int) -> int:
        step = size // dtype.itemsize
        return -(-n // step) * step

    return multiple(32), multiple(128 if n >= 512 and d <= 128 else 32)


class _Call(TriangleCall):
    def product_shape(self) -> tuple[int, ...]:
        """The shape that the private operator gives it."""
        *batch, n, _, _ = self.whole.shape
        dtype, d = self.parameters[P_OUT].dtype, self.parameters[P_OUT].shape[1]
        return (*batch, d, *_padded(n, d, dtype))

    def wrapped_product(self, product: Tensor, keep: bool) -> Any:
        # In the product, rows of the pair matrix are the second to last dimension. With sharded rows, the product is o
        # without padding; only `gradients` reads it, on the same ranks.
        places = self.with_rows_as(Shard(self.whole.ndim - 2)) if keep else self.nowhere
        return wrap(product, self.whole, places, self.product_shape() if keep else (0,))

    def update(self, keep: bool, add_residual: bool = False) -> tuple[Tensor, Tensor]:
        """The update; with `add_residual` and sharded rows, x itself, to which it was added."""
        if self.by_rows:
            done = hopper.update(self, keep, add_residual)
            if done is not None:
                return done
            kernels = self._kernels()
            return (
                self._by_operators(keep, add_residual)
                if kernels is None
                else self._by_kernels(kernels, keep, add_residual)
            )
        arguments = (self.x, self.mask, self.parameters, self.outgoing, self.eps, keep)
        return _myops._triangle_multiplicative_update(*arguments)

    def _by_operators(self, keep: bool, add_residual: bool) -> tuple[Tensor, Tensor]:
        update, product = Rows(self).update(keep)
        return self.x.add_(update) if add_residual else update, product

    def _kernels(self) -> Any:
        """The GPU kernels, if there are any for these parameters: the same on all ranks."""
        kernels = kernels_for(self.x)
        return None if kernels is None or not kernels.fits(apart(self.parameters)) else kernels

    def _by_kernels(self, kernels: Any, keep: bool, add_residual: bool) -> tuple[Tensor, Tensor]:
        w, rows, n, mask = apart(self.parameters), self.rows.dim, self.whole.shape[-2], self.mask
        x, inside = self.x.contiguous(), add_residual and self.x.is_contiguous()
        target = x if inside else torch.empty(x.shape, dtype=w.p_out.dtype, device=x.device)
        sizes, batch = self.whole.shape[:rows], x.shape[:rows]
        flat = (math.prod(batch), *x.shape[rows:])

        def exchange(t: Tensor) -> Callable[[], Tensor]:
            here, there = (Shard(0), Replicate()) if self.outgoing else (Partial(), Shard(0))
            coming = self.moved_rows(t.unflatten(1, batch or (1,)), here, there, sizes or (1,))
            return lambda: arrived(coming).flatten(1, -3)

        with devices.on(x.device):
            product = kernels.update(
                x.view(flat), None if mask is None else mask.reshape(flat[:-1]), w, n, self.outgoing, self.scale(),
                self.eps, GROUPS, exchange, target.view(flat), inside,
            )  # fmt: skip
        product = product.unflatten(0, batch or (1,)).flatten(0, 0 if batch else 1) if keep else x.new_empty(0)
        return self.x.add_(target) if add_residual and not inside else target, product

    def gradients(self, grad: Any, product: Any, output_mask: Sequence[bool], add_residual: bool) -> list[Any]:
        grad = local(grad, self.placements)
        product = local(product, self.with_rows_as(Shard(self.whole.ndim - 2)))
        gradients: list[Any]
        if self.by_rows:
            done = hopper_gradients.gradients(self, grad, product, output_mask, add_residual)
            if done is None:
                done = Rows(self).gradients(grad, product, output_mask)
                if add_residual and output_mask[0]:
                    done[0] = done[0] + grad
            gradients = done
        else:
            gradients = _myops._triangle_multiplicative_update_backward(
                grad, self.x, [product], self.mask, self.parameters, self.outgoing, self.eps, output_mask, add_residual
            )
        inputs = [self.whole, self.dmask, *self.parameters]
        return self.wrapped_gradients(gradients, inputs, [self.placements] * 2, output_mask)


# --- what the operators become ---------------------------------------------------------------------------------------


def _beneath(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    x, mask, parameters, outgoing, eps, keep, add_residual = (*args, False, False)[:7]
    call = _Call("_triangle_multiplicative_update", x, mask, parameters, outgoing, eps)
    update, product = call.update(keep)
    return call.wrapped(call.x + update if add_residual else update), call.wrapped_product(product, keep)


def _beneath_(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    x, mask, parameters, outgoing, eps, keep = (*args, False)[:6]
    call = _Call("_triangle_multiplicative_update_", x, mask, parameters, outgoing, eps, writes=True)
    return call.wrapped_product(_in_place(call, keep), keep)


def _in_place(call: _Call, keep: bool) -> Tensor:
    """Returns the product."""
    if call.by_rows:
        return call.update(keep, add_residual=True)[1]
    arguments = (call.x, call.mask, call.parameters, call.outgoing, call.eps, keep)
    product: Tensor = _myops._triangle_multiplicative_update_(*arguments)
    return product


def _backward(_cls: type, _op: Any, _types: Any, args: Sequence[Any], _kwargs: Any) -> Any:
    grad, x, (product,), mask, parameters, outgoing, eps, output_mask, add_residual = (*args, False)[:9]
    call = _Call("_triangle_multiplicative_update_backward", x, mask, parameters, outgoing, eps)
    return call.gradients(grad, product, output_mask, add_residual)


def _in_order(kwargs: Any) -> list[Any]:
    """The parameters of the public operators, in the order of the private ones."""

    def of(layer: str) -> list[Any]:
        return [kwargs.get(f"{layer}_weight"), kwargs.get(f"{layer}_bias")]

    # Packed, as they are: to chunk a DTensor takes longer on the host than the rest of a call: 0.4 ms in torch 2.11.
    nothing = [None, None]
    return [*of("norm_in"), *of("p_in"), *nothing, *of("g_in"), *nothing, *of("norm_out"), *of("p_out"), *of("g_out")]


def _public_call(op: str, args: Sequence[Any], kwargs: Any, writes: bool) -> _Call:
    x, direction = (*args, kwargs.get("direction", "outgoing"))[:2]
    outgoing, eps = direction == "outgoing", kwargs.get("eps", 1e-5)
    return _Call(op, x, kwargs.get("mask"), _in_order(kwargs), outgoing, eps, writes)


def _public(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> Any:
    call = _public_call("triangle_multiplicative_update", args, kwargs or {}, writes=False)
    return call.wrapped(call.update(False)[0])


def _public_(_cls: type, _op: Any, _types: Any, args: Sequence[Any], kwargs: Any) -> None:
    _in_place(_public_call("add_triangle_multiplicative_update_", args, kwargs or {}, writes=True), False)


for _name, _rule in {
    "triangle_multiplicative_update": _public,
    "add_triangle_multiplicative_update_": _public_,
    "_triangle_multiplicative_update": _beneath,
    "_triangle_multiplicative_update_": _beneath_,
    "_triangle_multiplicative_update_backward": _backward,
}.items():
    register_rule(_name, _rule)

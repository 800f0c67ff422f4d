"""The loop of a sampler (Abramson et al. 2024, algorithm 18), and the alignment in it (algorithm 28), without a look at
a value on the host.

As released, a step waits for the GPU several times: for its noise level, for warnings that ask for the rank of a
matrix, for a singular value decomposition. In between, the GPU waits for the host. Here the noise levels are read
before the first step, and whether there are coordinates after the last one, so the host launches steps ahead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Below it, points have no unique alignment, and released samplers say so.
LEAST_POINTS = 4

# q.T K q is linear in K, and for K of a covariance C it is tr(R.T C) with the rotation R of the quaternion q
# (Horn 1987, doi:10.1364/JOSAA.4.000629): rows are the entries of C and R, columns those of K and of q q.T.
_HORN = (
    {(0, 0): 1, (1, 1): 1, (2, 2): -1, (3, 3): -1},
    {(0, 3): -1, (1, 2): 1},
    {(0, 2): 1, (1, 3): 1},
    {(0, 3): 1, (1, 2): 1},
    {(0, 0): 1, (1, 1): -1, (2, 2): 1, (3, 3): -1},
    {(0, 1): -1, (2, 3): 1},
    {(0, 2): -1, (1, 3): 1},
    {(0, 1): 1, (2, 3): 1},
    {(0, 0): 1, (1, 1): -1, (2, 2): -1, (3, 3): 1},
)


@functools.cache
def _horn(device: torch.device) -> Tensor:
    rows = torch.zeros(9, 4, 4, dtype=torch.float64)
    for row, entries in zip(rows, _HORN, strict=True):
        for (i, j), sign in entries.items():
            row[i, j] = row[j, i] = sign
    return rows.flatten(1).to(device)


def rotation(c: Tensor) -> Tensor:
    """The rotations R that maximise tr(R.T C), in float64: with C = U S V.T, that is U diag(1, 1, det(U V.T)) V.T.

    R is that of the eigenvector of K's largest eigenvalue. K / ||K|| + 1 has none below 0, and high powers of it tend
    to the projection to that eigenvector. A power of 2^9 of a matrix of norm 1, whose largest eigenvalue is at least
    1/2, does not underflow; three times that, 2^27, tells eigenvalues apart that float32's covariances tell apart.

    Args:
        c: covariances C, `(batch, 3, 3)`.
    """
    horn = _horn(c.device)
    k = (c.double().flatten(1) @ horn).unflatten(1, (4, 4))
    p = k / _norm(k) + torch.eye(4, dtype=k.dtype, device=k.device)
    for _ in range(3):
        p = torch.linalg.matrix_power(p / _norm(p), 2**9)
    largest = p.diagonal(dim1=1, dim2=2).argmax(1)
    q = p.gather(1, largest[:, None, None].expand(-1, 1, 4)).squeeze(1)
    q = q / q.norm(dim=1, keepdim=True)
    return ((q[:, :, None] * q[:, None, :]).flatten(1) @ horn.T).unflatten(1, (3, 3))


def _norm(k: Tensor) -> Tensor:
    return torch.linalg.vector_norm(k, dim=(1, 2), keepdim=True).clamp(min=torch.finfo(k.dtype).tiny)


@torch.no_grad()
def align(x: Tensor, to: Tensor, weights: Tensor) -> Tensor:
    """The points `x`, turned and moved to where the weighted squares of their distances from `to` are least. As
    released, they are constants of a gradient.

    Args:
        x, to: `(batch, points, 3)`, float32.
        weights: `(batch, points)`.
    """
    w = weights.unsqueeze(-1)
    total = w.sum(-2, keepdim=True)
    center, target = ((t * w).sum(-2, keepdim=True) / total for t in (x, to))
    x = x - center
    r = rotation((w * (to - target)).mT @ x)
    return x @ r.to(x.dtype).mT + target


def denoise(
    sampler: Any, augmentation: Callable[..., Any], mask: Tensor, steps: int, network: dict[str, Any]
) -> Tensor:
    """Coordinates, `(samples, atoms, 3)`, from noise.

    Args:
        sampler: a released sampler, whose schedule, constants and network these are.
        augmentation: gives random rotations and translations for so many samples.
        mask: `(samples, atoms)`.
        steps: of the sampler.
        network: keywords of its score model.

    Raises:
        LinAlgError: with alignment, if coordinates are infinite or no numbers, as the released decomposition does.
    """
    samples, shape, device = mask.shape[0], (*mask.shape, 3), sampler.device
    sigmas = sampler.sample_schedule(steps)
    gammas = torch.where(sigmas > sampler.gamma_min, sampler.gamma_0, 0.0)
    levels = torch.stack([sigmas[:-1], sigmas[1:], gammas[1:]], 1).tolist()
    weights = mask.float() ** 2
    x = aligned = sigmas[0] * torch.randn(shape, device=device)
    for sigma, following, gamma in levels:
        turn, move = augmentation(samples, device=x.device, dtype=x.dtype)
        x = torch.einsum("bmd,bds->bms", x - x.mean(-2, keepdim=True), turn) + move
        level = sigma * (1 + gamma)
        scale = math.sqrt(sampler.noise_scale**2 * (level**2 - sigma**2))
        x = x + scale * torch.randn(shape, device=device)
        with torch.no_grad():  # of a copy, as released: it may be exchanged for one that writes to its argument
            clean = sampler.preconditioned_network_forward(
                x.clone(), level, network_condition_kwargs={"multiplicity": samples, **network}
            )
        if sampler.alignment_reverse_diff:
            with torch.autocast(device.type, enabled=False):
                x = aligned = align(x.float(), clean.float(), weights).to(clean)
        x = x + sampler.step_scale * (following - level) * ((x - clean) / level)
    # What is not finite in one step is not in those that follow.
    if sampler.alignment_reverse_diff and not aligned.isfinite().all():
        raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
            "expected finite coordinates to align, got infinite ones or NaN"
        )
    return x

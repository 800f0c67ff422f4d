"""ESMFold in transformers, ``transformers.models.esm.modeling_esmfold``: OpenFold's modules, with biases."""

from __future__ import annotations

from torch import Tensor

from torchops.adapters.attention import TriangleAttention
from torchops.adapters.module import Adapter
from torchops.adapters.openfold import InPlaceTriangleUpdate, direction
from torchops.adapters.transition import HAS_RELU

FILE = "transformers.models.esm.modeling_esmfold"
_ROLES = {"norm": "LayerNorm", "linear": "EsmFoldLinear", "attention": "EsmFoldAttention"}


class EsmFoldTriangleAttention(TriangleAttention):
    """Replaces ``EsmFoldTriangleAttention``. `inplace_safe` doesn't overwrite any argument."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        chunk_size: int | None = None,
        use_memory_efficient_kernel: bool = False,
        use_lma: bool = False,
        inplace_safe: bool = False,
    ) -> Tensor:
        return self.update(x, mask)


MODULES = (
    Adapter(FILE, ("EsmFoldTriangleMultiplicativeUpdate",), (InPlaceTriangleUpdate,), _ROLES, direction),
    Adapter(FILE, ("EsmFoldTriangleAttention",), (EsmFoldTriangleAttention,), _ROLES),
)
LAYERS: tuple[Adapter, ...] = ()
UNFIT = ((FILE, "EsmFoldResidueMLP", HAS_RELU),)

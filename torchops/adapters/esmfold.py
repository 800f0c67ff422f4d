"""ESMFold in transformers, ``transformers.models.esm.modeling_esmfold``: the module of OpenFold, with biases."""

from __future__ import annotations

from torchops.adapters.openfold import InPlaceTriangleUpdate, direction
from torchops.adapters.triangle import TriangleAdapter

TRIANGLE_UPDATES = (
    TriangleAdapter(
        "transformers.models.esm.modeling_esmfold",
        ("EsmFoldTriangleMultiplicativeUpdate",),
        (InPlaceTriangleUpdate,),
        direction,
        norm="LayerNorm",
        linear="EsmFoldLinear",
    ),
)

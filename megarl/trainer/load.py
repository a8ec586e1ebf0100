"""Loads a Hugging Face folder into this rank's parameters, slice by slice; no tensor is ever read whole.

slices (which part of which HF tensor goes where) --HfFolder.read--> copy_ into parameter.as_strided
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoint.hf_folder import HfFolder, view
from megarl.models.shards import ShardSlice

_PADDED = ("word_embeddings.weight", "output_layer.weight")  # the only parameters with padding rows
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def load_hf(parameters: Mapping[str, Tensor], slices: Iterable[ShardSlice], folder: str | Path) -> None:
    """Fill `parameters` (local Megatron names) from `folder`; padding rows of the vocabulary become zero.

    A value head (`score.`) that the folder lacks stays as it is. Raises ValueError if another tensor is missing, or
    one has another shape or is quantised.
    """
    by_param: dict[str, list[ShardSlice]] = defaultdict(list)
    for part in slices:
        by_param[part.param].append(part)
    assert by_param.keys() == parameters.keys(), f"slices and model differ: {by_param.keys() ^ parameters.keys()}"
    source = HfFolder(Path(folder))
    for name, parameter in parameters.items():
        _assert_covered(name, parameter, by_param[name])
        if name.endswith(_PADDED):
            parameter.zero_()
        for part in by_param[name]:
            if part.name.startswith("score."):
                if part.name not in source.tensors:
                    continue
                source.check({part.name: part.shape}, ignored=source.tensors)
            if part.name in source.tensors and source.dtype(part.name) not in _FLOATS:  # quantised: it needs its scales
                stored = source.tensors[part.name].dtype
                raise ValueError(f"{folder}: {part.name} is quantised ({stored}); use a bf16 copy of the model")
            source.copy(part, parameter)


def _assert_covered(name: str, parameter: Tensor, slices: list[ShardSlice]) -> None:
    """Asserts that every element of a parameter comes from one HF element, and padding rows from none."""
    assert parameter.is_contiguous(), f"{name} is not contiguous"
    count = torch.zeros(parameter.shape, dtype=torch.int8, device="cpu")
    for part in slices:
        view(count, part).add_(1)
    assert count.numel() == 0 or count.max() <= 1, f"{name}: an element is in two slices"
    if not name.endswith(_PADDED):
        assert count.numel() == 0 or count.min() == 1, f"{name}: an element is in no slice"

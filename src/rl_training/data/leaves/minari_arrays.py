"""The arrays of a Minari episode's observations, with images that may be JPEG files.

Minari stores images of 32 by 32 pixels and more as JPEG files by default, one for each step. They
are not the images that were recorded: JPEG changes pixels.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np

from rl_training.data.formats.hdf5 import array_at, require_numbers, require_stored
from rl_training.data.leaves.columns import STORED_KINDS, pack_leaves
from rl_training.data.leaves.minari_spaces import MinariLeaf
from rl_training.errors import DataError, one_line
from rl_training.observations import ObservationSpec

MOST_PIXELS = 4_096
"""Most bytes of an image for each byte of its file"""


def read_observations(
    group: Any, leaves: list[MinariLeaf], observation: ObservationSpec, number: int, name: str
) -> np.ndarray:
    """Return the rows of an episode's observations, `(number, size)`."""
    found = {each.leaf.name: _read_leaf(group, each, number, name) for each in leaves}
    return pack_leaves(observation, found, f"{name}/observations")


def holds_files(group: Any, leaf: MinariLeaf, name: str) -> bool:
    """Whether the images of a leaf are stored as files."""
    return leaf.leaf.kind == "image" and _are_files(array_at(group, leaf.path, name), leaf)


def write_observations(
    group: Any, leaves: list[MinariLeaf], observations: dict[str, np.ndarray]
) -> None:
    """Write the arrays of an episode, by the names of their leaves."""
    for each in leaves:
        values = observations[each.leaf.name]
        # Gymnasium's type of binary values.
        group[each.path] = values.astype(np.int8) if each.leaf.kind == "binary" else values


def _read_leaf(group: Any, stored: MinariLeaf, number: int, name: str) -> np.ndarray:
    leaf, array = stored.leaf, array_at(group, stored.path, name)
    place = f"{name}/{stored.path}"
    if leaf.kind == "image" and _are_files(array, stored):
        if array.shape[0] != number:
            raise DataError(f"{place} has {array.shape[0]} images; expected {number}")
        return _read_files(array, leaf.shape, place)
    require_numbers(array, stored.path, name)
    expected = (number, *leaf.shape)
    if array.shape != expected:
        raise DataError(f"{place} has shape {array.shape}; expected {expected}")
    if array.dtype.kind not in STORED_KINDS[leaf.kind]:
        raise DataError(f"{place} has type {array.dtype}, which does not fit its space")
    require_stored(array, place)
    return np.asarray(array[()])


def _are_files(array: Any, stored: MinariLeaf) -> bool:
    """Whether an array holds one file for each step: of different lengths, or all of the same."""
    import h5py

    if len(array.shape) == 1:
        return bool(h5py.check_vlen_dtype(array.dtype) == np.uint8)
    return len(array.shape) == 2 and array.dtype == np.uint8 and len(stored.leaf.shape) > 1


def _read_files(array: Any, shape: tuple[int, ...], place: str) -> np.ndarray:
    images = []
    for index in range(array.shape[0]):
        data = np.asarray(array[index]).tobytes()
        images.append(_decoded(data, shape, f"{place}[{index}]"))
    return np.stack(images)


def _decoded(data: bytes, shape: tuple[int, ...], place: str) -> np.ndarray:
    from PIL import Image

    if math.prod(shape) > MOST_PIXELS * len(data):
        raise DataError(f"{place} has {len(data):,} bytes, too few for an image of shape {shape}")
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            # Known before the pixels are decoded, which allocates memory for them.
            if (image.height, image.width) != shape[:2]:
                raise DataError(
                    f"{place} is an image of {image.height} by {image.width} pixels; expected "
                    f"shape {shape}"
                )
            pixels = np.asarray(image)
    except DataError:
        raise
    except Exception as error:  # Pillow does not document what a damaged image raises
        raise DataError(f"{place} cannot be read as JPEG ({one_line(str(error), 100)})") from None
    if pixels.shape != shape:
        raise DataError(f"{place} is an image of shape {pixels.shape}; expected {shape}")
    return pixels

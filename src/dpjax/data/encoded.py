# SPDX-License-Identifier: Apache-2.0
"""Images that are stored as JPEG or PNG streams, all in one buffer.

Such a file is smaller than its pixels. Images from JPEG streams are lossy copies, and the note of
the data set says so.
"""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np


def decoded(stream: np.ndarray, starts: np.ndarray | None, path: Path) -> np.ndarray:
    """Images from a buffer of JPEG or PNG streams.

    Args:
      stream: The bytes of all images, concatenated.
      starts: The offset of each image, and the end of the last one.
      path: The file, for errors.

    Returns:
      Bytes, ``[examples, height, width, channels]``.
    """
    edges = np.zeros(0, np.int64) if starts is None else starts
    if edges.ndim != 1 or edges.dtype.kind not in "iu" or len(edges) < 2 or stream.ndim != 1:
        raise ValueError(
            f"data.load: {path} holds encoded images without their offsets; expected offsets_train "
            "and offsets_test, whole numbers, one more than there are images."
        )
    # The first and the last offset say whether buffer and offsets were stored together; decoding
    # finds every other damage.
    if edges[0] != 0 or edges[-1] != stream.nbytes:
        raise ValueError(
            f"data.load: {path} holds {stream.nbytes} bytes of encoded images, but the offsets "
            f"are from {edges[0]} to {edges[-1]}. It may have been cut off: fetch it again."
        )
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            f"data.load: {path} holds encoded images, and Pillow, which decodes them, is not "
            "installed. Install it: pip install pillow."
        ) from error
    whole = stream.tobytes()
    pieces = (io.BytesIO(whole[a:b]) for a, b in itertools.pairwise(edges.tolist()))
    images, modes = [], set()
    try:
        for piece in pieces:
            image = Image.open(piece)
            images.append(np.asarray(image))
            modes.add(image.mode)
        # A palette's pixels are its indices, no shades, and other modes have other units.
        if modes <= {"L", "RGB"}:
            return np.stack(images)
    except (OSError, SyntaxError, ValueError) as error:  # a SyntaxError of a PNG's chunks
        raise ValueError(
            f"data.load: {path} holds encoded images that do not decode ({error}). It may have "
            "been cut off while it was copied: fetch it again."
        ) from error
    raise ValueError(
        f"data.load: {path} holds encoded images of modes {', '.join(sorted(modes))}; expected L "
        "or RGB. Usually a program stored few shades as a palette, mode P: store every image "
        "again, in Pillow by image.convert('L') or image.convert('RGB')."
    )

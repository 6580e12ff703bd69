"""Decodes images to arrays of one size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import tensorflow as tf

from scaleflow.interfaces.options import Check, is_list_of, is_size

ImageSize = Annotated[
    Sequence[int],
    Check(lambda value: is_list_of(value, is_size) and len(value) == 2, "[height, width], such as [224, 224]"),
]
Resize = Literal["stretch", "pad", "crop"]
Channels = Annotated[int, Check(lambda value: value in (1, 3), "3, or 1 for grey")]

#: The place in a PNG file of the number of bits of a value, in one byte, and of the type of the colours, in the next.
PNG_HEADER = 24

#: EXIF data is searched in this many bytes at the beginning of a file.
HEAD_BYTES = 1 << 17

#: The orientation is searched in this many bytes at the beginning of the EXIF data.
EXIF_BYTES = 4096

#: The bytes before the EXIF data in a JPEG and in a PNG.
EXIF_MARKS = (b"Exif\0\0", b"eXIf")

#: For each order of bytes, the entry before the orientation, and the place of the orientation after its start.
ORIENTATION_ENTRIES = (((0x12, 1, 3, 0, 1, 0, 0, 0), 8), ((1, 0x12, 0, 3, 0, 0, 0, 1), 9))

#: How much smaller than its file libjpeg can decode a picture, in both directions.
JPEG_RATIOS = (1, 2, 4, 8)


def make_image_decoder(
    size: ImageSize, resize: Resize = "stretch", channels: Channels = 3
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function: encoded image (JPEG, PNG, BMP, GIF) -> [height, width, channels] uint8. Traced.

    It takes the first frame of an animation, drops an alpha channel, and turns a JPEG or PNG as its EXIF data says. A
    PNG with 16 bits for a value is an error: its values may have any range.

    Args:
        size: [height, width].
        resize: `stretch` to the size; `pad` with black, keeps the aspect ratio; `crop` the middle to fill the size.
        channels: 3, or 1 for grey.
    """
    height, width = size

    def decode(encoded: tf.Tensor) -> tf.Tensor:
        image = decode_image(encoded, channels, lambda shape: largest_ratio(shape, height, width, resize=resize))
        return tf.ensure_shape(resize_image(image, height, width, resize=resize), [height, width, channels])

    return decode


def decode_image(encoded: tf.Tensor, channels: int, ratio_of: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Decodes an image to [h, w, channels] uint8, a JPEG up to eight times smaller than it is.

    `ratio_of` maps the [height, width, channels] int32 of a JPEG to how many times smaller it may become; 0 as 1.
    """

    def decode_jpeg(ratio: int) -> tf.Tensor:
        return tf.io.decode_jpeg(encoded, channels, ratio=ratio)

    def decode_other() -> tf.Tensor:
        image = tf.ensure_shape(tf.io.decode_image(encoded, channels=3, expand_animations=False), [None, None, 3])
        with tf.control_dependencies([image]):  # so that a damaged file is reported as such
            is_deep = is_png_file(encoded) & tf.equal(tf.strings.substr(encoded, PNG_HEADER, 1), b"\x10")
        message = (
            "the picture has 16 bits for a value, and only 8 are read; convert it to 8 bits, by the range of your data"
        )
        with tf.control_dependencies([tf.debugging.Assert(~is_deep, [message])]):
            return tf.image.rgb_to_grayscale(image) if channels == 1 else tf.identity(image)

    def choose_ratio() -> tf.Tensor:
        ratio = ratio_of(turn_shape(tf.io.extract_jpeg_shape(encoded), orientation))
        return tf.maximum(1, tf.reduce_sum(tf.cast(ratio >= tf.constant(JPEG_RATIOS), tf.int32)))

    orientation = find_orientation(encoded)
    branches = [decode_other, *(lambda ratio=ratio: decode_jpeg(ratio) for ratio in JPEG_RATIOS)]
    branch = tf.cond(tf.io.is_jpeg(encoded), choose_ratio, lambda: tf.constant(0))
    image = tf.ensure_shape(tf.switch_case(branch, branches), [None, None, channels])
    return tf.ensure_shape(turn_image(image, orientation), [None, None, channels])


def find_orientation(encoded: tf.Tensor) -> tf.Tensor:
    """Returns the orientation in the EXIF data of a JPEG or PNG, int32 from 1 to 8. It is 1 for other files."""
    is_png = is_png_file(encoded)
    mark = tf.where(is_png, EXIF_MARKS[1], EXIF_MARKS[0])
    head = tf.strings.substr(encoded, 0, HEAD_BYTES)
    # `tf.strings.split` makes a ragged tensor of it, which takes 25 µs a picture.
    parts = tf.raw_ops.StringSplitV2(input=[head], sep=mark, maxsplit=1).values

    def search() -> tf.Tensor:
        exif = tf.strings.join([tf.strings.substr(parts[1], 0, EXIF_BYTES), bytes(32)])
        values = tf.cast(tf.io.decode_raw(exif, tf.uint8), tf.int32)
        count = tf.size(values) - 9
        windows = tf.stack([values[n : n + count] for n in range(10)], axis=1)
        candidates = []
        for entry, place in ORIENTATION_ENTRIES:
            is_entry = tf.reduce_all(tf.equal(windows[:, :8], entry), axis=1)
            candidates.append(tf.where(is_entry, windows[:, place], 0))
        orientations = tf.add_n(candidates)
        first = orientations[tf.argmax(tf.cast(orientations > 0, tf.int32))]
        return tf.where((first >= 1) & (first <= 8), first, 1)

    has_exif = (tf.size(parts) > 1) & (tf.io.is_jpeg(encoded) | is_png)
    return tf.cond(has_exif, search, lambda: tf.constant(1))


def is_png_file(encoded: tf.Tensor) -> tf.Tensor:
    return tf.equal(tf.strings.substr(encoded, 0, 4), b"\x89PNG")


def turn_shape(shape: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Returns [height, width, ...] of a picture after it is turned."""
    return tf.where(orientation >= 5, tf.concat([shape[1::-1], shape[2:]], axis=0), shape)


def turn_image(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turns [h, w, c] by an orientation of EXIF, from 1 to 8."""

    def turn() -> tf.Tensor:
        turned = tf.cond(orientation >= 5, lambda: tf.transpose(image, [1, 0, 2]), lambda: image)
        for axis, orientations in ((1, (2, 3, 6, 7)), (0, (3, 4, 7, 8))):
            is_flipped = tf.reduce_any(tf.equal(orientation, orientations))
            turned = tf.cond(
                is_flipped, lambda pixels=turned, axis=axis: tf.reverse(pixels, [axis]), lambda pixels=turned: pixels
            )
        return turned

    return tf.cond(orientation > 1, turn, lambda: image)


def image_size(encoded: tf.Tensor, image: tf.Tensor) -> tf.Tensor:
    """Returns [height, width] int32 of an encoded image. `image` is the result of `decode_image`."""

    def read_size() -> tf.Tensor:
        return turn_shape(tf.io.extract_jpeg_shape(encoded)[:2], find_orientation(encoded))

    return tf.cond(tf.io.is_jpeg(encoded), read_size, lambda: tf.shape(image)[:2])


def largest_ratio(shape: tf.Tensor, height: int, width: int, resize: str) -> tf.Tensor:
    """Returns how many times smaller an image may become before it is resized to height and width.

    Each side keeps at least 7/8 of the pixels of the result. libjpeg means over all pixels when it decodes a smaller
    picture, so this loses less than bilinear resizing does, which leaves pixels out: for a photograph of 320 x 240
    pixels and 128 x 128, the mean difference from an antialiased resize of the whole is 2.0 of 255, and 3.5 for
    bilinear. It is a third faster than to decode the whole.
    """
    ratios = 8 * shape[:2] // (7 * tf.constant([height, width]))
    return tf.reduce_max(ratios) if resize == "pad" else tf.reduce_min(ratios)


def resize_image(
    image: tf.Tensor,
    height: int,
    width: int,
    resize: str,
    scale: Callable[[tf.Tensor, Any], tf.Tensor] | None = None,
    fill: int = 0,
) -> tf.Tensor:
    """Resizes [h, w, c] uint8 to [height, width, c] uint8 with `scale` (`scale_image`); `pad` fills with `fill`."""
    scale = scale or scale_image
    if resize != "pad":
        return scale(crop_middle(image, height, width) if resize == "crop" else image, [height, width])
    part_height, part_width = fit_inside(tf.shape(image), height, width)
    top = (height - part_height) // 2
    left = (width - part_width) // 2
    borders = [[top, height - part_height - top], [left, width - part_width - left], [0, 0]]
    return tf.pad(scale(image, [part_height, part_width]), borders, constant_values=tf.constant(fill, image.dtype))


def scale_image(image: tf.Tensor, size: Any) -> tf.Tensor:
    """Scales [h, w, c] uint8 to size [2]: to a smaller one by the mean of the pixels that fall on one, else bilinear.

    The mean takes half the time of an antialiased (triangle) filter, and differs from it by 1.5 of 255 on a photograph
    that becomes 2.2 times smaller; bilinear alone by 3.5, and by 11 at 4 times smaller, because it leaves pixels out.
    """
    images = image[None]
    size = tf.convert_to_tensor(size)

    def enlarge() -> tf.Tensor:
        return round_pixels(tf.raw_ops.ResizeBilinear(images=images, size=size, half_pixel_centers=True))

    def shrink() -> tf.Tensor:
        return round_pixels(tf.raw_ops.ResizeArea(images=images, size=size))

    change = tf.shape(image)[:2] - size
    grows = tf.reduce_any(change < 0)
    stays = tf.reduce_all(tf.equal(change, 0))
    branch = tf.where(grows, 0, tf.where(stays, 1, 2))
    return tf.switch_case(branch, [enlarge, lambda: image, shrink])


def scale_mask(mask: tf.Tensor, size: Any) -> tf.Tensor:
    """Scales [h, w, c] to size [2] by taking the nearest pixel."""
    return tf.raw_ops.ResizeNearestNeighbor(images=mask[None], size=size, half_pixel_centers=True)[0]


def round_pixels(images: tf.Tensor) -> tf.Tensor:
    """Rounds [1, h, w, c] float32 from 0 to 255 to [h, w, c] uint8."""
    return tf.cast(images[0] + 0.5, tf.uint8)


def fit_inside(shape: tf.Tensor, height: int, width: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the largest (height, width) with the aspect ratio of an image's shape that is inside the given one."""
    h = shape[0]
    w = shape[1]
    is_wide = w * height > h * width
    part_h = tf.where(is_wide, tf.maximum(1, h * width // w), height)
    part_w = tf.where(is_wide, width, tf.maximum(1, w * height // h))
    return part_h, part_w


def crop_middle(image: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Crops the largest centred part with the aspect ratio of height and width."""
    h = tf.shape(image)[0]
    w = tf.shape(image)[1]
    is_wide = w * height > h * width
    part_h = tf.where(is_wide, h, tf.maximum(1, w * height // width))
    part_w = tf.where(is_wide, tf.maximum(1, h * width // height), w)
    return tf.image.crop_to_bounding_box(image, (h - part_h) // 2, (w - part_w) // 2, part_h, part_w)

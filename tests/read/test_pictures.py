"""Pictures against Pillow, where it is installed, and against plain numpy; and what is refused before it is decoded."""

import importlib.util
import io
import struct
import zlib

import numpy as np
import pytest

from penstock.errors import ConfigError, DecodeFailed, LimitExceeded
from penstock.read import pictures
from penstock.read.picture_headers import PictureHeader, read_header
from penstock.read.pictures import convert, decode, decode_with_pillow

imagecodecs = pytest.importorskip("imagecodecs")
needs_pillow = pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow is the oracle")

MODES = ("L", "RGB", "RGBA")
HIGH, WIDE = 37, 53


def photo(channels=3, seed=0):
    """Smooth enough to be a picture, rough enough to tell decoders apart."""
    noise = np.random.default_rng(seed).integers(0, 40, (HIGH, WIDE, channels))
    slope = np.add.outer(np.arange(HIGH) * 3, np.arange(WIDE) * 2)[..., None] * np.arange(1, channels + 1)
    return ((slope + noise) % 256).astype(np.uint8)


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(depth, colour, *before, wide=13, high=7):
    """A PNG of random pixels, written by hand so that every kind can be made."""
    samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    row_bytes = (wide * samples * depth + 7) // 8
    rng = np.random.default_rng(depth * 10 + colour)
    rows = b"".join(b"\0" + rng.integers(0, 256, row_bytes, np.uint8).tobytes() for _ in range(high))
    header = struct.pack(">IIBBBBB", wide, high, depth, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", header), *before, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def palette(depth):
    return chunk(b"PLTE", np.random.default_rng(depth).integers(0, 256, 3 * 2**depth, np.uint8).tobytes())


PNGS = {
    **{f"grey of {depth} bits": png(depth, 0) for depth in (1, 2, 4, 8, 16)},
    **{f"colour of {depth} bits": png(depth, 2) for depth in (8, 16)},
    **{f"palette of {depth} bits": png(depth, 3, palette(depth)) for depth in (1, 2, 4, 8)},
    **{f"grey and alpha of {depth} bits": png(depth, 4) for depth in (8, 16)},
    **{f"colour and alpha of {depth} bits": png(depth, 6) for depth in (8, 16)},
    "palette with alpha": png(8, 3, palette(8), chunk(b"tRNS", bytes(range(0, 256, 3)))),
    "colour with one transparent": png(8, 2, chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3))),
    "grey with one transparent": png(8, 0, chunk(b"tRNS", struct.pack(">H", 7))),
    "colour with gamma": png(8, 2, chunk(b"gAMA", struct.pack(">I", 45455))),
}


def pillow(data, mode):
    from PIL import Image

    with Image.open(io.BytesIO(data)) as picture:
        picture.load()
        return np.asarray(picture.convert(mode))


def written(array, kind, **options):
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind, **options)
    return stream.getvalue()


def jpeg(array=None, **options):
    return imagecodecs.jpeg8_encode(photo() if array is None else array, **options)


@needs_pillow
@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("data", PNGS.values(), ids=PNGS)
def test_pngs_are_converted_as_pillow_does(data, mode):
    assert np.array_equal(decode(data, mode), pillow(data, mode))


@needs_pillow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [{"quality": 30}, {"quality": 75}, {"quality": 100}, {"subsampling": 0}, {"progressive": True}, {"optimize": True}],
    ids=str,
)
def test_jpegs_have_the_pixels_pillow_gives(options, mode):
    for original in (photo(), photo(1)[..., 0]):
        data = written(original, "JPEG", **options)
        assert np.array_equal(decode(data, mode), pillow(data, mode))


@needs_pillow
@pytest.mark.parametrize("mode", MODES)
def test_other_kinds_have_the_pixels_pillow_gives(mode):
    cmyk = written(photo(), "PNG")
    from PIL import Image

    for_print = io.BytesIO()
    Image.open(io.BytesIO(cmyk)).convert("CMYK").save(for_print, "JPEG")
    kinds = {
        "webp": written(photo(), "WEBP"),
        "webp without loss": written(photo(4), "WEBP", lossless=True),
        "webp with alpha": written(photo(4), "WEBP"),
        "gif": written(photo(1)[..., 0], "GIF"),
        "bmp": written(photo(), "BMP"),
        "tiff": written(photo(), "TIFF"),
        "ppm": written(photo(), "PPM"),
        "jpeg for print": for_print.getvalue(),
    }
    for kind, data in kinds.items():
        assert np.array_equal(decode(data, mode), pillow(data, mode)), kind


def test_a_png_comes_back_as_it_was():
    assert np.array_equal(decode(imagecodecs.png_encode(photo())), photo())
    assert np.array_equal(decode(imagecodecs.png_encode(photo(4)), "RGBA"), photo(4))
    grey = photo(1)[..., 0]
    assert np.array_equal(decode(imagecodecs.png_encode(grey), "L"), grey)
    assert np.array_equal(decode(imagecodecs.png_encode(grey), "RGB"), np.stack([grey] * 3, -1))


def test_a_jpeg_has_the_pixels_of_its_library():
    assert np.array_equal(decode(jpeg()), imagecodecs.jpeg8_decode(jpeg()))


def test_conversions_by_hand():
    red, alpha = np.array([[[255, 0, 0, 9]]], np.uint8), np.array([[[100, 7]]], np.uint8)
    assert convert(red, "L").tolist() == [[76]]
    assert convert(red, "RGB").tolist() == [[[255, 0, 0]]]
    assert convert(red[..., :3], "RGBA").tolist() == [[[255, 0, 0, 255]]]
    assert convert(alpha, "RGBA").tolist() == [[[100, 100, 100, 7]]]
    assert convert(alpha, "L").tolist() == [[100]]
    assert convert(np.array([[[0x1234, 0xFF00, 0x00FF]]], np.uint16), "RGB").tolist() == [[[0x12, 0xFF, 0]]]
    assert convert(np.array([[40, 400]], np.uint16), "L").tolist() == [[40, 255]], "Pillow clips grey of 16 bits"
    with pytest.raises(DecodeFailed, match="float32"):
        convert(np.zeros((2, 2), np.float32), "L")


@pytest.mark.parametrize("data", [jpeg(), imagecodecs.png_encode(photo())], ids=["jpeg", "png"])
def test_into_memory_of_the_caller(data):
    out = np.zeros((3, HIGH, WIDE, 3), np.uint8)
    assert decode(data, out=out[1]) is not None
    assert np.array_equal(out[1], decode(data))
    assert not out[[0, 2]].any()
    with pytest.raises(DecodeFailed, match=r"\(37, 53, 3\)"):
        decode(data, out=np.zeros((5, 5, 3), np.uint8))


def test_grey_jpeg_into_memory_for_colour():
    grey = jpeg(photo(1)[..., 0])
    out = np.zeros((HIGH, WIDE, 3), np.uint8)
    assert np.array_equal(decode(grey, out=out), decode(grey))


def test_what_is_given_can_be_written_to():
    for mode in MODES:
        assert decode(jpeg(), mode).flags.writeable


# Sizes.


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp"])
def test_headers_tell_the_size(kind):
    encode = {"jpeg": jpeg, "png": imagecodecs.png_encode, "webp": imagecodecs.webp_encode}[kind]
    header = read_header(encode(photo()))
    assert (header.kind, header.width, header.height, header.is_plain) == (kind, WIDE, HIGH, True)


@needs_pillow
def test_headers_of_other_kinds_tell_the_size():
    found = [read_header(written(photo(), kind)) for kind in ("GIF", "BMP", "WEBP")]
    found += [read_header(written(photo(4), "WEBP", lossless=lossless)) for lossless in (True, False)]
    assert {(header.width, header.height) for header in found} == {(WIDE, HIGH)}
    assert read_header(written(photo(), "TIFF")) is None
    from PIL import Image

    frames = [Image.fromarray(photo(seed=seed)) for seed in range(2)]
    stream = io.BytesIO()
    frames[0].save(stream, "WEBP", save_all=True, append_images=frames[1:])
    assert read_header(stream.getvalue()) == PictureHeader("webp", WIDE, HIGH, is_animated=True)
    assert np.array_equal(decode(stream.getvalue()), pillow(stream.getvalue(), "RGB"))


def bomb(width, height):
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("decoding", [decode, lambda data: decode_with_pillow(data, "RGB")], ids=["array", "pillow"])
def test_a_picture_that_declares_too_much_is_refused_unread(decoding):
    with pytest.raises(LimitExceeded, match=r"50,000 by 50,000 = 2,500,000,000 pixels.*max_pixels=100,000,000"):
        decoding(bomb(50_000, 50_000))


def test_the_limit_can_be_set():
    with pytest.raises(LimitExceeded, match="max_pixels=1,960"):
        decode(jpeg(), max_pixels=WIDE * HIGH - 1)
    assert decode(jpeg(), max_pixels=WIDE * HIGH).shape == (HIGH, WIDE, 3)


def test_a_size_in_a_jpeg_is_believed_before_it_is_decoded():
    data = bytearray(jpeg())
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", 60_000, 60_000)
    with pytest.raises(LimitExceeded, match="60,000 by 60,000"):
        decode(bytes(data))


# Broken ones.


def test_an_empty_picture():
    with pytest.raises(DecodeFailed, match="0 bytes"):
        decode(b"")


@pytest.mark.parametrize("left", [1, 2, 10, 30, 200, 0.5, -1, -2, -10])
@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_a_cut_picture_says_how_much_there_is(kind, left):
    whole = jpeg() if kind == "jpeg" else imagecodecs.webp_encode(photo(), level=80)
    cut = whole[: int(len(whole) * left) if isinstance(left, float) else left]
    with pytest.raises(DecodeFailed, match=rf"{len(cut):,} bytes: \S"):
        decode(cut)


@pytest.mark.parametrize("left", [9, 20, 33, 60, -30])
def test_a_cut_png(left):
    with pytest.raises(DecodeFailed, match=r"bytes: \S"):
        decode(imagecodecs.png_encode(photo())[:left])


def test_an_end_marker_in_a_preview_is_not_the_end():
    """Cameras put a small JPEG into the header of a large one."""
    whole = jpeg()
    preview = b"\xff\xe1" + struct.pack(">H", 2 + 100) + b"Exif" + bytes(94) + b"\xff\xd9"
    data = whole[:2] + preview + whole[2:]
    assert np.array_equal(decode(data), decode(whole))
    with pytest.raises(DecodeFailed, match="cut short"):
        decode(data[:-20])


def test_what_is_no_picture():
    with pytest.raises((DecodeFailed, ConfigError), match=r"bytes|Pillow"):
        decode(b"hello, this is text and not a picture at all")


@needs_pillow
def test_postscript_is_not_run_whatever_it_is_called(monkeypatch):
    import subprocess

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: pytest.fail(f"started {args}"))
    drawing = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(DecodeFailed, match="78 bytes"):
        decode(drawing)


def test_without_pillow_other_kinds_say_what_is_needed(monkeypatch):
    monkeypatch.setattr(pictures, "_load_pillow", lambda: None)
    with pytest.raises(ConfigError, match=r"Pillow: pip install"):
        decode(b"P6\n1 1\n255\nabc")
    assert decode(jpeg()).shape == (HIGH, WIDE, 3)


@needs_pillow
def test_without_imagecodecs_pillow_decodes(monkeypatch):
    quick = decode(jpeg()), decode(PNGS["grey of 16 bits"], "L")
    monkeypatch.setattr(pictures, "_load_imagecodecs", lambda: None)
    assert np.array_equal(decode(jpeg()), quick[0])
    assert np.array_equal(decode(PNGS["grey of 16 bits"], "L"), quick[1])


@needs_pillow
def test_damage_is_either_decoded_or_refused():
    rng = np.random.default_rng(3)
    seeds = [jpeg(), imagecodecs.png_encode(photo()), imagecodecs.webp_encode(photo(), level=80)]
    refused = 0
    for turn in range(300):
        data = bytearray(seeds[turn % len(seeds)])
        for place in rng.integers(0, len(data), 4):
            data[place] = rng.integers(256)
        try:
            decode(bytes(data))
        except (DecodeFailed, LimitExceeded):
            refused += 1
    assert refused > 50


def test_any_picture_can_cover_any_size():
    """The part to scale must stay inside the picture, however its sides are rounded."""
    wanted = np.empty((224, 224, 3), np.uint8)
    for side in range(40, 120):
        for shape in ((side, 64), (64, side), (side, side + 7)):
            pictures.fit(np.full((*shape, 3), 7, np.uint8), "cover", wanted)
            assert (wanted == 7).all()

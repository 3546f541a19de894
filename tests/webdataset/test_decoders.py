"""Fields decoded by their names: each kind, a caller's own, and what is refused."""

import gzip
import io
import json
import pickle
import struct
import zlib

import numpy as np
import pytest
import torch

import penstock.webdataset as wds
from penstock.errors import ConfigError, DecodeFailed, LimitExceeded, SchemaMismatch, Unsafe
from penstock.read.npy import encode_npy, encode_npz, encode_ten
from penstock.webdataset import decoders
from penstock.webdataset.decoders import PICTURE_MODES, Continue, Decoder

imagecodecs = pytest.importorskip("imagecodecs")

PIXELS = np.random.default_rng(0).integers(0, 256, (11, 17, 3), np.uint8)
PNG = imagecodecs.png_encode(PIXELS)


def decoded(*handlers, __url__="x.tar", **how):
    """A function from fields to their values."""
    decoder = Decoder(handlers, **how)
    return lambda **fields: decoder({"__key__": "k", "__url__": __url__, **fields})


PLAIN = {
    "txt": ("grüße".encode(), "grüße"),
    "text": (b"a\n", "a\n"),
    "transcript": (b"", ""),
    "cls": (b"7", 7),
    "cls2": (b"-3\n", -3),
    "index": (b"12", 12),
    "inx": (b"0", 0),
    "id": (b" 5 ", 5),
    "json": (b'{"a": [1, null]}', {"a": [1, None]}),
    "jsn": (b"3", 3),
    "bin": (b"\0\1", b"\0\1"),
    "class": (b"7", b"7"),
    "mp4": (b"video", b"video"),
    "h5": (b"\x89HDF", b"\x89HDF"),
    "pt": (b"\x80\x04N.", b"\x80\x04N."),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_kinds(name):
    data, value = PLAIN[name]
    for field in (name, f"left.{name}"):
        sample = decoded("torch")(**{field: data})
        assert sample == {"__key__": "k", "__url__": "x.tar", field: value}
        assert type(sample[field]) is type(value)


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "h5"])
def test_plain_kinds_are_theirs(name, peer):
    data, _ = PLAIN[name]
    theirs = peer.Decoder([peer.imagehandler("torch")])({"__key__": "k", name: data})
    assert decoded("torch")(**{name: data})[name] == theirs[name]


def test_arrays():
    arrays = [np.arange(6, dtype=np.float16).reshape(2, 3), np.arange(3)]
    sample = decoded()(npy=encode_npy(arrays[0]), npz=encode_npz({"x": arrays[1]}), ten=encode_ten(arrays), tb=b"")
    assert sample["npy"].dtype == np.float16
    assert np.array_equal(sample["npy"], arrays[0])
    assert np.array_equal(sample["npz"]["x"], arrays[1])
    assert [array.tolist() for array in sample["ten"]] == [array.tolist() for array in arrays]
    assert sample["tb"] == []


def test_unpacked_first():
    sample = decoded()(**{"txt.gz": gzip.compress(b"hello") + gzip.compress(b" again"), "gz": gzip.compress(b"raw")})
    assert sample["txt.gz"] == "hello again"
    assert sample["gz"] == b"raw"


def test_packed_and_broken_or_too_much(monkeypatch):
    packed = gzip.compress(bytes(100_000))
    for broken in (packed[:-5], packed[:20], b"not packed"):
        with pytest.raises(DecodeFailed, match=r"'txt.gz': gz of \d+ bytes: \S"):
            decoded()(**{"txt.gz": broken})
    monkeypatch.setattr(decoders, "MAX_ARRAY_BYTES", 99_999)
    with pytest.raises(LimitExceeded, match=r"gz of \d+ bytes unpacks to more than 99,999"):
        decoded()(**{"txt.gz": packed})


def test_msgpack():
    msgpack = pytest.importorskip("msgpack")
    assert decoded()(mp=msgpack.packb({"a": 1}), msg=msgpack.packb([2])) == {
        "__key__": "k", "__url__": "x.tar", "mp": {"a": 1}, "msg": [2],
    }  # fmt: skip


# Pictures.


@pytest.mark.parametrize("mode", [mode for mode in PICTURE_MODES if not mode.startswith("pil")])
def test_pictures_by_mode(mode):
    picture = decoded(mode)(png=PNG)["png"]
    channels = mode.removeprefix("torch").removesuffix("8") or "rgb"
    shape = (11, 17) if channels == "l" else (11, 17, len(channels))
    if mode.startswith("torch"):
        assert isinstance(picture, torch.Tensor)
        assert picture.is_contiguous()
        picture = picture.numpy() if channels == "l" else picture.permute(1, 2, 0).numpy()
    assert picture.shape == shape
    assert picture.dtype == (np.uint8 if mode.endswith("8") else np.float32)
    if channels != "l":
        exact = PIXELS if mode.endswith("8") else PIXELS.astype(np.float32) / 255.0
        assert np.array_equal(picture[..., :3], exact)
    if channels == "rgba":
        assert (picture[..., 3] == (255 if mode.endswith("8") else 1)).all()


@pytest.mark.parametrize("mode", PICTURE_MODES)
def test_pictures_are_theirs(mode, peer):
    pytest.importorskip("PIL")
    grey, alpha = PIXELS[..., 0].copy(), np.dstack([PIXELS, PIXELS[..., :1]])
    fields = {
        "jpg": imagecodecs.jpeg8_encode(PIXELS, level=80),
        "grey.jpg": imagecodecs.jpeg8_encode(grey),
        "png": PNG,
        "grey.png": imagecodecs.png_encode(grey),
        "alpha.png": imagecodecs.png_encode(alpha),
        "deep.png": imagecodecs.png_encode(PIXELS.astype(np.uint16) * 257),
        "webp": imagecodecs.webp_encode(PIXELS, lossless=True),
        "ppm": b"P6\n17 11\n255\n" + PIXELS.tobytes(),
    }
    theirs = peer.Decoder([peer.imagehandler(mode)])({"__key__": "k", **fields})
    ours = decoded(mode)(**fields)
    for name in fields:
        assert type(ours[name]) is type(theirs[name])
        one, other = np.asarray(ours[name]), np.asarray(theirs[name])
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        assert np.array_equal(one, other), name


def test_no_such_mode():
    with pytest.raises(ConfigError, match=r"decode\('rgb9'\): no such mode for pictures; there are l8, rgb8"):
        decoded("rgb9")


def bomb():
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("mode", ["rgb8", "torch", "pil"])
def test_pictures_that_are_refused(mode):
    cut = imagecodecs.jpeg8_encode(PIXELS)[:-40]
    for data, kind, words in (
        (b"", DecodeFailed, "0 bytes"),
        (cut, DecodeFailed, "cut short"),
        (b"GIF89a", DecodeFailed, "ends inside its header"),
        (bomb(), LimitExceeded, "50,000 by 50,000"),
    ):
        with pytest.raises(kind, match=rf"^x\.tar: 'k', field 'jpg': .*{words}"):
            decoded(mode)(jpg=data)


def test_the_limit_of_pixels_can_be_set():
    with pytest.raises(LimitExceeded, match="187 pixels, more than max_pixels=186"):
        decoded("rgb8", max_pixels=186)(png=PNG)
    assert decoded("rgb8", max_pixels=187)(png=PNG)["png"].shape == (11, 17, 3)


def test_postscript_is_a_program():
    with pytest.raises(Unsafe, match="PostScript is a program"):
        decoded("rgb8")(eps=b"%!PS")
    assert decoded()(eps=b"%!PS")["eps"] == b"%!PS"


# A caller's own.


def test_functions_of_name_and_bytes_come_first():
    seen = []

    def own(key, data):
        seen.append(key)
        return len(data) if key.endswith(".npy") else None

    sample = decoded(own)(**{"voxels.npy": b"12345", "txt": b"hello"})
    assert sample["voxels.npy"] == 5
    assert sample["txt"] == "hello"
    assert seen == [".voxels.npy", ".txt"]


def test_functions_by_extension():
    sample = decoded({"wav": len, "seg.PNG": bytes.hex, ".npy": bytes}, "rgb8")(
        **{"wav": b"123", "x.wav": b"1", "seg.png": b"\1", "png": PNG, "npy": b"\2", "awav": b"4"}
    )
    assert [sample[name] for name in ("wav", "x.wav", "seg.png", "npy", "awav")] == [3, 1, "01", b"\2", b"4"]
    assert sample["png"].shape == (11, 17, 3)
    own = wds.handle_extension("jpg seg.png", len)
    assert [own(key, b"12") for key in (".jpg", ".a.JPG", ".seg.png", ".png", ".notseg.png")] == [2, 2, 2, None, None]


def test_going_on_with_other_bytes():
    def unhex(key, data):
        return Continue(key.removesuffix(".hex"), bytes.fromhex(data.decode())) if key.endswith(".hex") else None

    assert decoded(unhex)(**{"txt.hex": b"6869"})["txt.hex"] == "hi"


def test_before_and_after_can_be_replaced():
    assert decoded(pre=[], post=[])(**{"txt.gz": b"x", "cls": b"7"})["cls"] == b"7"
    assert decoded(post=[lambda key, data: 1])(cls=b"7", foo=b"8") == {
        "__key__": "k", "__url__": "x.tar", "cls": 1, "foo": 1,
    }  # fmt: skip


def test_only_some_fields():
    sample = decoded("rgb8", only="cls txt")(cls=b"7", png=PNG, pyd=b"x")
    assert (sample["cls"], sample["png"], sample["pyd"]) == (7, PNG, b"x")
    assert decoded("rgb8", only=["png"])(cls=b"7", png=PNG)["cls"] == b"7"


def test_twice():
    once = decoded()(cls=b"7")
    with pytest.raises(SchemaMismatch, match=r"field 'cls': decode expects bytes, and it is int; decode once, or with"):
        Decoder([])(once)
    assert Decoder([], partial=True)(once) == once


def test_the_errors_of_a_callers_function_say_where():
    with pytest.raises(
        DecodeFailed, match=r"^x\.tar: 'k', field 'foo' \(3 bytes\): ZeroDivisionError: division by zero"
    ):
        decoded(lambda key, data: 1 / 0)(foo=b"123")
    with pytest.raises(wds.DecodingError):
        decoded()(cls=b"seven")
    with pytest.raises(DecodeFailed, match="field 'json'"):
        decoded()(json=b"{")


def test_what_is_no_decoder():
    with pytest.raises(ConfigError, match="neither a mode"):
        decoded(7)


# Never pickle.


class Marker:
    """Unpickling it would be seen."""

    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


@pytest.mark.case(17)
@pytest.mark.parametrize("name", ["pyd", "pickle", "pkl", "pth", "x.pyd"])
def test_pickles_are_refused(name):
    data = pickle.dumps(Marker())
    with pytest.raises(Unsafe, match=rf"^x\.tar: 'k', field '{name}': only unpickling could read it"):
        decoded("torch")(**{name: data})
    assert decoded("torch", only="cls")(**{name: data})[name] == data, "nobody asked"
    assert decoded({name: len})(**{name: data})[name] == len(data), "the caller may know better"


def test_pickles_in_arrays_are_refused():
    stream = io.BytesIO()
    np.save(stream, np.array([Marker()], object), allow_pickle=True)
    with pytest.raises(Unsafe, match="field 'npy': npy of Python objects"):
        decoded()(npy=stream.getvalue())


def test_pickles_hidden_in_a_picture_or_a_text():
    data = pickle.dumps(Marker())
    with pytest.raises(DecodeFailed):
        decoded("rgb8")(png=data)
    with pytest.raises(DecodeFailed):
        decoded()(json=data)


def test_cbor_needs_a_function():
    with pytest.raises(ConfigError, match=r"pass one of your own to decode\(\)"):
        decoded()(cbor=b"x")


def test_json_is_json():
    assert json.loads(json.dumps(decoded()(json=b'{"__reduce__": "x"}')["json"])) == {"__reduce__": "x"}

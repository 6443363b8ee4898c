"""Readers of user data, on files with damage in them."""

import io
import json
import pickle
import sys
import tarfile
from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest
from PIL import Image

from train.data import open_source
from train.data.digits import Digits
from train.data.images import SampleError, decode, find_shards, parse_caption
from train.data.loader import batches
from train.data.source import DataError
from train.data.tokenizer import ByteTokenizer

RESOLUTION = 16
READERS = ("folder", "webdataset", "parquet")
COUNT = 120  # val holds out 0, 50 and 100
# What is wrong with which sample; 50 is the second of val, 7 and 8 are neighbours.
DAMAGE = {7: "torn image", 8: "no caption", 50: "not an image", 60: "empty caption"}


@dataclass(frozen=True)
class Config:
    name: str
    path: str | None
    family: str = "all"
    resolution: int = RESOLUTION
    seed: int = 0


def encoded(index, kind="PNG"):
    """A plain image whose colour tells the index."""
    buffer = io.BytesIO()
    colour = (index, 255 - index, 2 * index % 256)
    Image.new("RGB", (24, 20), colour).save(buffer, kind)
    return buffer.getvalue()


def stored(index, damaged=True):
    """Image bytes and caption of a sample, None where missing."""
    image, caption = encoded(index), f"picture {index}"
    match DAMAGE.get(index) if damaged else None:
        case "torn image":
            image = image[: len(image) // 2]
        case "no caption":
            caption = None
        case "not an image":
            image = b"hello"
        case "empty caption":
            caption = "  "
    return image, caption


def write_folder(root, damaged=True):
    for index in range(COUNT):
        image, caption = stored(index, damaged)
        path = root / f"{index // 40}" / f"{index:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
        if caption is not None and index % 2:
            path.with_suffix(".txt").write_text(caption)
        elif caption is not None:
            path.with_suffix(".json").write_text(json.dumps({"caption": caption}))


def add(tar, name, data):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_webdataset(root, damaged=True):
    root.mkdir(parents=True, exist_ok=True)
    for shard in range(3):
        with tarfile.open(root / f"{shard:05}.tar", "w") as tar:
            for index in range(40 * shard, 40 * shard + 40):
                image, caption = stored(index, damaged)
                if caption is not None and index % 2:
                    add(tar, f"{index:03}.txt", caption.encode())
                elif caption is not None:
                    add(tar, f"{index:03}.json", json.dumps({"text": caption}).encode())
                add(tar, f"{index:03}.png", image)
                add(tar, f"{index:03}.cls", b"3")


def write_parquet(root, damaged=True):
    root.mkdir(parents=True, exist_ok=True)
    for shard in range(3):
        rows = [stored(i, damaged) for i in range(40 * shard, 40 * shard + 40)]
        images = [{"bytes": image, "path": None} for image, _ in rows]
        frame = pl.DataFrame({"image": images, "text": [text for _, text in rows]})
        frame.write_parquet(root / f"{shard:05}.parquet", row_group_size=10)


WRITE = {
    "folder": write_folder,
    "webdataset": write_webdataset,
    "parquet": write_parquet,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Path of each kind of data set, damaged."""
    root = tmp_path_factory.mktemp("data")
    for name, write in WRITE.items():
        write(root / name)
    return root


def open_reader(name, path, split="train"):
    return open_source(Config(name, str(path)), split)


def index_of(example):
    return int(example["image"][0, 0, 0])


@pytest.mark.parametrize("name", READERS)
def test_damaged_samples_are_passed_over_and_named(name, data):
    source = open_reader(name, data / name)
    order = [i for i in range(COUNT) if i % 50]
    assert len(source) == len(order)
    skipped = {}
    for position, index in enumerate(order):
        example = source[position]
        while index in DAMAGE:
            index = order[order.index(index) + 1]
        assert index_of(example) == index
        assert example["caption"] == f"picture {index}"
        expected = (index, 255 - index, 2 * index % 256)
        assert np.all(example["image"] == expected)
        skipped |= example["skipped"]
    assert len(skipped) == 3
    assert all("\n" not in reason for reason in skipped.values())
    by_index = {
        int("".join(filter(str.isdigit, n[-8:]))): r for n, r in skipped.items()
    }
    if name == "parquet":  # rows are named file[row]; 20 of the second file is 60
        by_index = {
            k % 100 + (40 if "00001" in n else 0): r
            for (k, r), n in zip(by_index.items(), skipped, strict=True)
        }
    assert set(by_index) == {7, 8, 60}
    assert "empty" in by_index[60]


@pytest.mark.parametrize("name", READERS)
def test_val_is_held_out_and_skips_within_itself(name, data):
    val = open_reader(name, data / name, "val")
    assert [index_of(val[i]) for i in range(3)] == [0, 100, 100]
    assert list(val[1]["skipped"].values()) == ["not an image"]


@pytest.mark.parametrize("name", READERS)
def test_every_reader_gives_the_same_samples(name, data, tmp_path):
    WRITE[name](tmp_path, damaged=False)
    source = open_reader(name, tmp_path)
    assert [index_of(source[i]) for i in range(len(source))] == [
        i for i in range(COUNT) if i % 50
    ]
    assert not any(source[i]["skipped"] for i in range(len(source)))


@pytest.mark.parametrize("name", READERS)
def test_batches_name_the_damaged_samples(name, data):
    source = open_reader(name, data / name)
    kept = pickle.loads(pickle.dumps(source))  # as worker processes receive it
    reader = batches(kept, ByteTokenizer(16), batch_size=len(source), seed=0)
    batch = next(reader)
    assert len(reader.skipped) == 3
    again = next(batches(source, ByteTokenizer(16), batch_size=len(source), seed=0))
    np.testing.assert_array_equal(batch["image"], again["image"])
    reader.close()


@pytest.mark.parametrize("name", READERS)
def test_nothing_to_read_is_an_error(name, tmp_path):
    def fails(path):
        with pytest.raises(DataError) as error:
            open_reader(name, path)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "missing" in fails(tmp_path / "missing")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in fails(empty)
    with pytest.raises(DataError, match="needs a path"):
        open_source(Config(name, None), "train")


@pytest.mark.parametrize("name", READERS)
def test_a_data_set_damaged_throughout_is_an_error(name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys.modules[__name__],
        "DAMAGE",
        {i: "not an image" for i in range(COUNT)},
    )
    WRITE[name](tmp_path)
    with pytest.raises(DataError, match="117 samples in a row .* not an image"):
        open_reader(name, tmp_path)


@pytest.mark.parametrize("name", ["webdataset", "parquet"])
@pytest.mark.parametrize("content", [b"", b"no shard at all" * 100])
def test_an_unreadable_shard_is_an_error(name, content, tmp_path):
    WRITE[name](tmp_path)
    suffix = {"webdataset": ".tar", "parquet": ".parquet"}[name]
    (tmp_path / f"bad{suffix}").write_bytes(content)
    with pytest.raises(DataError, match=f"bad{suffix}") as error:
        open_reader(name, tmp_path)
    assert "\n" not in str(error.value)


def test_a_compressed_shard_is_an_error(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w:gz") as tar:
        add(tar, "0.png", encoded(0))
    with pytest.raises(DataError, match="uncompressed"):
        open_reader("webdataset", tmp_path)


@pytest.mark.parametrize("where", ["image", "header", "boundary"])
def test_a_shard_cut_short_loses_its_end_only(where, tmp_path):
    write_webdataset(tmp_path, damaged=False)
    path = tmp_path / "00002.tar"
    with tarfile.open(path) as tar:
        member = tar.getmember("110.png")
    end = {
        "image": member.offset_data + 10,
        "header": member.offset + 100,
        "boundary": member.offset,
    }[where]
    path.write_bytes(path.read_bytes()[:end])
    source = open_reader("webdataset", tmp_path)
    skipped = {}
    for i in range(len(source)):
        skipped |= source[i]["skipped"]
    # 110 has its caption but no whole image; then comes the mark of the lost end.
    assert "00002.tar:110" in skipped
    assert any("cut off" in reason for reason in skipped.values())
    assert max(index_of(source[i]) for i in range(len(source))) == 109


def test_a_damaged_header_inside_a_shard_is_reported(tmp_path):
    write_webdataset(tmp_path, damaged=False)
    path = tmp_path / "00001.tar"
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        at = tar.getmember("060.json").offset
    content[at : at + 512] = b"\xff" * 512
    path.write_bytes(content)
    source = open_reader("webdataset", tmp_path)
    skipped = {}
    for i in range(len(source)):
        skipped |= source[i]["skipped"]
    assert skipped == {
        f"00001.tar:byte {at}": "the shard is cut off or damaged from here on"
    }


def test_a_damaged_row_group_is_passed_over(tmp_path):
    write_parquet(tmp_path, damaged=False)
    path = tmp_path / "00001.parquet"
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)  # the first row group: samples 40 to 49
    path.write_bytes(content)
    source = open_reader("parquet", tmp_path)
    skipped = {}
    seen = set()
    for i in range(len(source)):
        skipped |= source[i]["skipped"]
        seen.add(index_of(source[i]))
    assert seen == {i for i in range(COUNT) if i % 50 and not 40 <= i < 50}
    assert skipped == {
        f"00001.parquet[{row}]": "the row group is damaged" for row in range(10)
    }


def test_parquet_columns(tmp_path):
    images = [encoded(i) for i in range(4)]
    texts = [f"picture {i}" for i in range(4)]
    plain = tmp_path / "plain.parquet"
    pl.DataFrame({"image": images, "caption": texts}).write_parquet(plain)
    assert open_reader("parquet", plain)[0]["caption"] == "picture 1"
    for frame, missing in [
        ({"picture": images, "text": texts}, "'image'"),
        ({"image": texts, "text": texts}, "'image'"),
        ({"image": images, "label": texts}, "'text' or 'caption'"),
    ]:
        pl.DataFrame(frame).write_parquet(tmp_path / "odd.parquet")
        with pytest.raises(DataError, match=f"{missing}.*its columns are"):
            open_reader("parquet", tmp_path / "odd.parquet")


def test_a_caption_without_an_image_is_named(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.png").write_bytes(encoded(i))
        (tmp_path / f"{i}.txt").write_text("x")
    (tmp_path / "3.png").unlink()
    source = open_reader("folder", tmp_path)
    assert source[2]["skipped"] == {"3.txt": "no image of the same name"}
    assert index_of(source[2]) == 4


def test_shards_by_glob_and_file(data):
    path = data / "webdataset"
    assert [p.name for p in find_shards(f"{path}/0000[12].tar", ".tar")] == [
        "00001.tar",
        "00002.tar",
    ]
    assert len(open_reader("webdataset", path / "00000.tar")) == 39


def test_short_side_is_resized_and_the_centre_cropped():
    wide = np.zeros((10, 30, 3), np.uint8)
    wide[:, 10:20] = (200, 100, 50)
    buffer = io.BytesIO()
    Image.fromarray(wide).save(buffer, "PNG")
    read = decode(buffer.getvalue(), 20)
    assert read.shape == (20, 20, 3)
    # The bicubic kernel reaches two source pixels, here four, over the crop's edge.
    assert np.all(read[:, 4:-4] == (200, 100, 50))
    # At the edge itself, a quarter of a pixel inside, most is still the square's.
    assert read[:, [0, -1], 0].min() > 100


def test_left_stays_left():
    image = np.zeros((20, 20, 3), np.uint8)
    image[:, :10] = 255
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    read = decode(buffer.getvalue(), 20)
    assert read[:, 0].min() == 255 and read[:, -1].max() == 0


def test_photographs_are_turned_upright():
    image = Image.new("RGB", (20, 20))
    image.paste((255, 255, 255), (0, 0, 20, 10))  # top half white
    exif = Image.Exif()
    exif[0x0112] = 3  # stored upside down
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    read = decode(buffer.getvalue(), 20)
    assert read[0].max() == 0 and read[-1].min() == 255


def test_grey_palette_and_transparent_images_are_read_but_16_bit_is_not():
    for mode in ("L", "P", "RGBA", "1", "CMYK"):
        buffer = io.BytesIO()
        Image.new(mode, (8, 8)).save(buffer, "TIFF")
        assert decode(buffer.getvalue(), 8).shape == (8, 8, 3)
    buffer = io.BytesIO()
    Image.new("I;16", (8, 8)).save(buffer, "PNG")
    with pytest.raises(SampleError, match="8 bits"):
        decode(buffer.getvalue(), 8)


@pytest.mark.parametrize(
    ("data", "is_json", "reason"),
    [
        (b"caf\xe9", False, "not UTF-8"),
        (b"{", True, "not a JSON object"),
        (b"[1]", True, "not a JSON object"),
        (b'{"title": "x"}', True, 'no text under "caption"'),
        (b'{"caption": 3}', True, 'no text under "caption"'),
        (b" \n", False, "empty"),
    ],
)
def test_unusable_captions_say_why(data, is_json, reason):
    with pytest.raises(SampleError, match=reason):
        parse_caption(data, is_json)


def test_digits_split_and_grow():
    train, val = Digits(32, "train"), Digits(32, "val")
    assert (len(train), len(val)) == (1437, 360)
    assert train[0]["image"].shape == (32, 32, 3)
    assert val[0]["caption"] == "a handwritten zero"
    names = {train[i]["caption"] for i in range(100)}
    assert len(names) == 10
    images = {train[i]["image"].tobytes() for i in range(len(train))}
    assert not images & {val[i]["image"].tobytes() for i in range(len(val))}


def test_open_source_refuses_what_does_not_exist(data):
    assert open_source(Config("shapes", None), "novel")[0]["image"].shape[0] == 16
    with pytest.raises(DataError, match="no split 'novel'"):
        open_source(Config("digits", None), "novel")
    with pytest.raises(DataError, match="shapes, digits, folder"):
        open_source(Config("imagenet", str(data)), "train")

from __future__ import annotations

import gzip
import io
import os
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from avgpipe.errors import LibraryNotFound
from avgpipe.tasks import DataNotFound
from avgpipe_lab.workloads.batches import SampleBatches, generator, shuffled
from avgpipe_lab.workloads.images import ImageBatch, ImageSet, find_images, read_images, shifted
from tests.lab.workloads.pictures import (
    CLASSES,
    idx_bytes,
    idx_folder,
    jpeg,
    jpeg_folder,
    jpeg_members,
    picture,
    write_tar,
)


def real_data(name):
    folder = os.environ.get("AVGPIPE_DATA")
    if folder is None:
        pytest.skip("AVGPIPE_DATA names no folder of real data")
    return Path(folder) / name


# ---- reading -------------------------------------------------------------------------------------------------------


def test_jpeg_archives_are_read_with_the_classes_of_their_folders(tmp_path):
    data = read_images(jpeg_folder(tmp_path))
    assert data.classes == CLASSES
    assert data.shape == (3, 32, 32)
    assert data.mirrored
    assert [len(split.labels) for split in (data.train, data.valid)] == [54, 6]
    for images, labels in (data.train, data.valid):
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert torch.equal(brightest_quarter(images), labels)


def brightest_quarter(images):
    half = images.shape[-1] // 2
    quarters = images.double().mean(1).unfold(1, half, half).unfold(2, half, half).mean((3, 4))
    return quarters.flatten(1).argmax(1)


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_idx_files_are_read_packed_and_plain(tmp_path, suffix):
    data = read_images(idx_folder(tmp_path, suffix=suffix))
    assert data.classes == ("0", "1", "2", "3")
    assert data.shape == (1, 28, 28)
    assert not data.mirrored
    assert [len(split.labels) for split in (data.train, data.valid)] == [54, 6]
    for images, labels in (data.train, data.valid):
        assert torch.equal(brightest_quarter(images), labels)


def test_folders_among_the_members_and_a_leading_dot_are_accepted(tmp_path):
    members = [(".", None), ("./train", None), ("./train/cat", None)]
    write_tar(tmp_path / "train.tar.gz", members + [(f"./{name}", raw) for name, raw in jpeg_members(2)])
    assert len(read_images(tmp_path).train.labels) == 7


def test_validation_is_a_fixed_part_that_train_lacks(tmp_path):
    jpeg_folder(tmp_path)
    whole, small = read_images(tmp_path), read_images(tmp_path, limit=7, held_out_limit=3)
    seen = {image.numpy().tobytes() for image in whole.train.images}
    assert len(seen) == 54
    assert not seen & {image.numpy().tobytes() for image in whole.valid.images}
    assert torch.equal(small.train.images, whole.train.images[:7])
    assert torch.equal(small.valid.images, whole.valid.images[:3])


def test_only_what_the_limit_takes_is_decoded(tmp_path):
    jpeg_folder(tmp_path)
    few = read_images(tmp_path, limit=1, held_out_limit=1)
    whole = jpeg_members(15)
    taken = {image.numpy().tobytes() for image in torch.cat((few.train.images, few.valid.images))}
    members = []
    for name, raw in whole:  # every image but those two is damaged
        pixels = np.asarray(pytest.importorskip("PIL.Image").open(io.BytesIO(raw))).transpose(2, 0, 1)
        members.append((name, raw if pixels.tobytes() in taken else b"damaged"))
    write_tar(tmp_path / "train.tar.gz", members)
    assert torch.equal(read_images(tmp_path, limit=1, held_out_limit=1).train.images, few.train.images)
    with pytest.raises(ValueError, match=r"member 'train/\w+/\d{4}.jpg' is not a whole JPEG image"):
        read_images(tmp_path, limit=2)


def test_mean_and_deviation_are_those_of_the_training_images(tmp_path):
    data = read_images(jpeg_folder(tmp_path), limit=40)
    pixels = data.train.images.numpy().astype(np.float64) / 255
    np.testing.assert_allclose(data.mean, pixels.mean((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(data.std, pixels.std((0, 2, 3)), rtol=1e-4)


def test_images_of_one_value_are_not_divided_by_zero(tmp_path):
    idx_folder(tmp_path, suffix="")
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_bytes(np.full((60, 28, 28), 7)))
    data = read_images(tmp_path)
    images, _ = ImageBatch(data.train, data.mean, data.std)(torch.arange(3), generator(1))
    assert images.abs().max() < 1e-2


def test_real_cifar_has_its_published_statistics():
    data = read_images(real_data("cifar10-jpeg"), limit=2000, held_out_limit=100)
    assert data.classes[0] == "airplane"
    assert len(data.classes) == 10
    torch.testing.assert_close(data.mean, torch.tensor([0.4913, 0.4821, 0.4465]), atol=0.01, rtol=0)
    torch.testing.assert_close(data.std, torch.tensor([0.2452, 0.2428, 0.2606]), atol=0.01, rtol=0)
    assert data.train.labels.bincount().min() > 140


def test_real_mnist_has_its_published_statistics():
    data = read_images(real_data("mnist"))
    assert [len(split.labels) for split in (data.train, data.valid)] == [54_000, 6_000]
    assert data.mean.item() == pytest.approx(0.1307, abs=5e-4)
    assert data.std.item() == pytest.approx(0.3081, abs=5e-4)


# ---- folders and files that cannot be read -------------------------------------------------------------------------


def test_a_missing_folder_is_named_with_what_works(tmp_path):
    with pytest.raises(
        DataNotFound, match=r"none does not exist; give a folder with CIFAR-10's train.tar.gz"
    ):
        find_images(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(DataNotFound, match="is a file, not a folder"):
        find_images(tmp_path / "file")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataNotFound, match=r"lacks train.tar.gz; .* or with MNIST's train-images"):
        find_images(tmp_path)
    idx_folder(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataNotFound, match=r"lacks train-labels-idx1-ubyte.gz; give"):
        find_images(tmp_path)


def test_archives_need_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    (tmp_path / "train.tar").touch()
    with pytest.raises(LibraryNotFound, match="reading JPEG images needs PIL"):
        find_images(tmp_path)
    assert len(find_images(idx_folder(tmp_path))) == 2


@pytest.mark.parametrize("make", [jpeg_folder, idx_folder])
def test_a_truncated_file_is_named(tmp_path, make):
    make(tmp_path)
    file = find_images(tmp_path)[0]
    raw = file.read_bytes()
    file.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read: Compressed file ended"):
        read_images(tmp_path)
    file.write_bytes(raw[:200] + bytes(200) + raw[400:])
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read: "):
        read_images(tmp_path)
    file.write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=rf"{file.name} cannot be read: Not a gzipped file"):
        read_images(tmp_path)


def test_a_truncated_archive_within_its_gzip_is_refused(tmp_path):
    jpeg_folder(tmp_path)
    raw = gzip.decompress((tmp_path / "train.tar.gz").read_bytes())
    for end in (5000, 5700, 1024 * 7 + 300):
        (tmp_path / "train.tar.gz").write_bytes(gzip.compress(raw[:end]))
        with pytest.raises(
            ValueError, match=r"train.tar.gz.*(not a whole tar archive|not a whole JPEG|images)"
        ):
            read_images(tmp_path)
    (tmp_path / "train.tar.gz").write_bytes(gzip.compress(b"no archive " * 1000))
    with pytest.raises(ValueError, match=r"train.tar.gz is not a whole tar archive"):
        read_images(tmp_path)


def png():
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.fromarray(np.zeros((32, 32), np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize("damage", ["png", "cut", "empty"])
def test_a_member_that_is_no_whole_jpeg_is_named(tmp_path, damage):
    members = jpeg_members(2)
    name, content = members[3]
    members[3] = name, {"png": png(), "cut": content[: len(content) // 2], "empty": b""}[damage]
    write_tar(tmp_path / "train.tar.gz", members)
    with pytest.raises(ValueError, match=rf"train.tar.gz: member '{name}' is not a whole JPEG image"):
        read_images(tmp_path)


def test_images_of_different_sizes_are_refused(tmp_path):
    members = jpeg_members(2)
    members[5] = members[5][0], jpeg(picture(0, np.random.default_rng(0), 16))
    write_tar(tmp_path / "train.tar.gz", members)
    with pytest.raises(ValueError, match=r"train.tar.gz has images of different sizes: 16 x 16, 32 x 32"):
        read_images(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../train/cat/1.jpg",
        "/train/cat/1.jpg",
        "train/../cat/1.jpg",
        "train/cat/../../1.jpg",
        "train/1.jpg",
        "test/cat/1.jpg",
        "train/cat/1.png",
        "train/cat/deep/1.jpg",
    ],
)
def test_a_member_at_another_path_is_named(tmp_path, name):
    write_tar(tmp_path / "train.tar.gz", [*jpeg_members(1), (name, b"")])
    with pytest.raises(ValueError, match=r"train.tar.gz: member '.*' is not train/<class>/<n>.jpg"):
        read_images(tmp_path)


def test_a_link_among_the_members_is_refused(tmp_path):
    with tarfile.open(tmp_path / "train.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo("train/cat/0001.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    with pytest.raises(ValueError, match=r"member 'train/cat/0001.jpg' is not train/<class>"):
        read_images(tmp_path)


def test_too_few_images_are_refused(tmp_path):
    for members in ([("train", None)], jpeg_members(1)[:1]):
        write_tar(tmp_path / "train.tar.gz", members)
        with pytest.raises(ValueError, match=r"train.tar.gz has [01] images: give two or more"):
            read_images(tmp_path)


def test_an_idx_file_of_another_kind_or_length_is_refused(tmp_path):
    file = idx_folder(tmp_path, suffix="") / "train-images-idx3-ubyte"
    whole = file.read_bytes()
    for raw, found in (
        ((tmp_path / "train-labels-idx1-ubyte").read_bytes(), "type 2049"),
        (b"", r"type 0 and sizes \[0, 0, 0\]"),
        (whole[:-1], r"type 2051 and sizes \[60, 28, 28\], and 47039 bytes follow"),
    ):
        file.write_bytes(raw)
        with pytest.raises(ValueError, match=rf"idx3-ubyte is not a whole idx file of type 2051: .*{found}"):
            read_images(tmp_path)


def test_labels_of_another_number_than_images_are_refused(tmp_path):
    idx_folder(tmp_path, suffix="")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(19) % 4))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte has 60 images, but .* 19 labels"):
        read_images(tmp_path)


# ---- batches -------------------------------------------------------------------------------------------------------


def some_images(n=40, channels=3, side=8):
    draw = torch.Generator().manual_seed(5)
    images = torch.randint(256, (n, channels, side, side), generator=draw, dtype=torch.uint8)
    return ImageSet(images, torch.arange(n) % 10)


MEAN, STD = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])


def test_a_batch_is_normalised_by_channel():
    samples = some_images()
    images, labels = ImageBatch(samples, MEAN, STD)(torch.tensor([7, 3]), generator(1))
    expected = (samples.images[[7, 3]].double() / 255 - MEAN.double()[:, None, None]) / STD.double()[
        :, None, None
    ]
    assert images.dtype == torch.float32
    assert torch.equal(labels, torch.tensor([7, 3]))
    torch.testing.assert_close(images.double(), expected, rtol=0, atol=1e-5)


def crops(image, padding):
    """Every crop of one image [C, H, W], by shift and mirroring, in plain loops."""
    channels, height, width = image.shape
    around = np.zeros((channels, height + 2 * padding, width + 2 * padding), image.dtype)
    around[:, padding : padding + height, padding : padding + width] = image
    result = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = around[:, top : top + height, left : left + width]
            result[crop.tobytes()] = (top, left, False)
            result[crop[:, :, ::-1].tobytes()] = (top, left, True)
    return result


@pytest.mark.parametrize("mirrored", [False, True])
def test_every_shift_occurs_and_nothing_else(mirrored):
    draw = torch.Generator().manual_seed(1)
    image = torch.rand(2, 5, 6, generator=draw)
    seen = set()
    possible = crops(image.numpy(), 2)
    for out in shifted(image.expand(600, -1, -1, -1), 2, mirrored, generator(4)):
        seen.add(possible[out.numpy().tobytes()])
    assert len(seen) == (50 if mirrored else 25)
    assert any(turned for *_, turned in seen) == mirrored


@pytest.mark.promise
def test_a_batch_depends_on_seed_epoch_and_batch_alone():
    make = ImageBatch(some_images(), MEAN, STD, padding=4, mirrored=True)

    def batches(seed=1, epoch=0, start=0, workers=0):
        order = shuffled(40, 8, seed, epoch)
        return list(SampleBatches(order, 8, make, seed=seed, epoch=epoch, start=start, workers=workers))

    torch.manual_seed(1)
    whole = batches()
    torch.manual_seed(2)
    for other in (batches(start=3), batches(start=3, workers=2)):
        assert len(other) == 2
        for (a, b), (c, d) in zip(whole[3:], other):
            assert torch.equal(a, c)
            assert torch.equal(b, d)
    assert not torch.equal(batches(epoch=1)[3][0], whole[3][0])
    assert not torch.equal(batches(seed=2)[3][0], whole[3][0])


def test_making_batches_can_be_sent_to_workers():
    make = pickle.loads(pickle.dumps(ImageBatch(some_images(), MEAN, STD, padding=1)))
    assert make(torch.tensor([1]), generator(1))[0].shape == (1, 3, 8, 8)

"""Images of data files: verl's forms become stored files and prompts with a token each; bad rows are named in words."""

from __future__ import annotations

import hashlib
import io
import json
import os

import numpy as np
import pytest
from PIL import Image

import plaudit_workers.images
from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rollout import ImagesSpec, TrainDataSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.data_files import RowForm
from plaudit_workers.images import ImageError, ImageProcessor, ImageStore, decode_image, image_size
from plaudit_workers.launch.data_checks import data_problem
from plaudit_workers.tokenizer import ChatTemplate
from plaudit_workers.training.data import PromptData
from plaudit_workers.training.prompts import PromptRenderer
from tiny_vision import SIZES, mixed_rows, noise_image, save_vision_policy, vision_row, write_rows

IMAGE = noise_image(0)
WITH_IMAGES = RowForm(images=True)


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    return save_vision_policy(tmp_path_factory.mktemp("vision") / "model")


def processor(model, folder, **settings):
    return ImageProcessor.of_model(ModelSpec(source=str(model)), ImagesSpec(**settings), ImageStore(folder / "run"))


def load(path, images, model, **section):
    spec = ModelSpec(source=str(model))
    template = ChatTemplate.of_model(spec, [])
    images.give_template(template, spec)
    return PromptData.load(
        TrainDataSpec(path=str(path), shuffle=False, **section), PromptRenderer(template, images), 1, WITH_IMAGES
    )


def ids_of(row):
    return np.frombuffer(row.prompt_ids, "<i4").tolist()


def test_each_image_is_one_token_of_the_prompt_and_a_stored_file(tmp_path, vision_model):
    images = processor(vision_model, tmp_path)
    data = load(write_rows(tmp_path / "a.parquet", mixed_rows()), images, vision_model)
    rows = [data.prompt_at(number) for number in range(4)]
    assert [ids_of(row).count(images.token_id) for row in rows] == [1, 2, 0, 1]
    assert [len(row.images) for row in rows] == [1, 2, 0, 1]
    assert rows[1].prompt_text == (
        "<bos><|vision_start|><|image_pad|><|vision_end|><|vision_start|><|image_pad|><|vision_end|>what 1?="
    )
    assert rows[1].messages == [{"role": "user", "content": "<image><image>what 1?"}]
    content = noise_image(2, *SIZES[2])
    assert rows[1].images[1] == hashlib.sha256(content).hexdigest()
    assert images.store.read(rows[1].images[1]) == content


def test_the_tokens_of_an_image_are_those_of_the_models_processor(tmp_path, vision_model):
    from transformers import AutoProcessor

    images = processor(vision_model, tmp_path)
    data = load(write_rows(tmp_path / "a.parquet", mixed_rows()), images, vision_model)
    own = AutoProcessor.from_pretrained(vision_model)
    for number, files in ((0, [0]), (1, [1, 2]), (3, [3])):
        row = data.prompt_at(number)
        pictures = [Image.open(io.BytesIO(noise_image(each, *SIZES[each]))) for each in files]
        expected = own(text=[row.prompt_text], images=pictures)["input_ids"][0]
        assert images.expand(np.array(ids_of(row), np.int32), row.images).tolist() == list(expected)


def test_the_limit_on_prompts_counts_the_tokens_of_images(tmp_path, vision_model):
    images = processor(vision_model, tmp_path)
    path = write_rows(tmp_path / "a.parquet", mixed_rows())
    lengths = [len(ids_of(row)) for row in map(load(path, images, vision_model).prompt_at, range(4))]
    assert max(lengths) <= 20
    assert images.num_tokens(load(path, images, vision_model).prompt_at(3).images[0]) == 49
    short = load(path, images, vision_model, max_prompt_length=40)
    assert len(short) == 3
    assert short.selection.left_out == 1


def test_fewer_pixels_make_fewer_tokens(tmp_path, vision_model):
    images = processor(vision_model, tmp_path, max_pixels=4 * 56 * 56)
    data = load(write_rows(tmp_path / "a.parquet", mixed_rows()), images, vision_model)
    assert images.num_tokens(data.prompt_at(3).images[0]) == 9
    pixels = images.pixels(data.prompt_at(3).images[0])
    assert images.tokens_of_grid(pixels.grid) == 9


def test_verls_forms_of_an_image_are_the_same_image(tmp_path, vision_model):
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "a.png").write_bytes(IMAGE)
    absolute = str(tmp_path / "shots" / "a.png")
    forms = ["shots/a.png", {"path": "shots/a.png"}, {"image": absolute}, {"bytes": None, "path": f"file://{absolute}"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(vision_row(number, [form])) + "\n" for number, form in enumerate(forms)))
    assert data_problem("data", str(path), WITH_IMAGES, ImagesSpec()) is None
    data = load(path, processor(vision_model, tmp_path), vision_model)
    digest = hashlib.sha256(IMAGE).hexdigest()
    assert [data.prompt_at(number).images for number in range(4)] == [(digest,)] * 4


def test_parts_of_type_image_are_places_too_and_lose_their_files(tmp_path, vision_model):
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}, {"type": "text", "text": "b?"}]
    row = vision_row(0, [{"bytes": IMAGE}], [{"role": "user", "content": parts}])
    data = load(write_rows(tmp_path / "a.parquet", [row]), processor(vision_model, tmp_path), vision_model)
    assert data.prompt_at(0).prompt_text == "<bos>a<|vision_start|><|image_pad|><|vision_end|>b?="
    assert data.prompt_at(0).messages == [
        {"role": "user", "content": [parts[0], {"type": "image"}, parts[2]]},
    ]


def test_a_file_without_images_is_read_as_ever(tmp_path, vision_model):
    row = vision_row(0, [])
    del row["images"]
    data = load(write_rows(tmp_path / "a.parquet", [row]), processor(vision_model, tmp_path), vision_model)
    assert data.prompt_at(0).images == ()
    assert data.prompt_at(0).prompt_text == "<bos>what 0?="


TEXT = [{"role": "user", "content": "what?"}]
BAD_ROWS = {
    "no place": (
        vision_row(0, [IMAGE], TEXT),
        "column images has 1 image, but the prompt has 0 places for one",
        "Write <image> (or a part of type image) once for each image",
    ),
    "no image": (
        vision_row(0, [], [{"role": "user", "content": "<image>what?"}]),
        "column images has 0 images, but the prompt has 1 place for one",
        "Write <image> (or a part of type image) once for each image",
    ),
    "a prompt of text": (
        vision_row(0, [IMAGE], "<image>what?"),
        "column images has images, but the prompt is text, which the chat template does not see",
        "Give messages, with <image> where an image belongs",
    ),
    "too many": (
        vision_row(0, [IMAGE] * 5),
        "column images has 5 images, data.images.maxPerPrompt is 4",
        "Raise it, or remove images",
    ),
    "no picture": (
        vision_row(0, [b"GIF, they say"]),
        "column images has image 1, which is no PNG, JPEG, WEBP, GIF, BMP, TIFF image",
        "Write it in one of these formats",
    ),
    "cut off": (
        vision_row(0, [IMAGE, IMAGE[:-200]]),
        "column images has image 2, which cannot be decoded (",
        "Write the file again",
    ),
    "no file": (
        vision_row(0, [{"path": "gone.png"}]),
        "column images has image 1, which cannot be read: ",
        "Correct the path",
    ),
    "a zero byte in a path": (
        vision_row(0, [{"path": "a\0.png"}]),
        "column images has image 1, which cannot be read: ",
        "Correct the path",
    ),
    "a device": (
        vision_row(0, [{"path": "/dev/zero"}]),
        "column images has image 1, which cannot be read: /dev/zero (no regular file)",
        "Correct the path",
    ),
    "an image in its address": (
        vision_row(0, [{"path": f"data:image/png;base64,{'A' * 5000}"}]),
        "column images has image 1, which is the address data:image/png;base64,AAA",
        "Decode it: write its bytes, as {bytes: …}",
    ),
    "an address": (
        vision_row(0, [{"path": "https://example.com/a.png"}]),
        "column images has image 1, which is the address https://example.com/a.png",
        "Download it: a run reads images from files only",
    ),
    "nothing": (
        vision_row(0, [{"bytes": None, "path": None}]),
        "column images has image 1, which has bytes, path",
        "Give {bytes: …}, {path: …} or a path; paths are relative to the data file",
    ),
}


@pytest.mark.parametrize(("row", "complaint", "remedy"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_named_by_the_preflight_and_by_the_trainer(tmp_path, vision_model, row, complaint, remedy):
    path = write_rows(tmp_path / "a.parquet", [{**row}])
    problem = data_problem("spec.data.train.path", str(path), WITH_IMAGES, ImagesSpec())
    assert problem is not None
    assert problem.message.startswith(f"{path}: row 1: {complaint}")
    assert problem.remedy == remedy
    with pytest.raises(RefusedError) as refused:
        load(path, processor(vision_model, tmp_path), vision_model)
    assert str(refused.value).startswith(f"data file {path}: row 1: {complaint}")
    assert str(refused.value).endswith(remedy)


def test_a_pipe_as_an_image_is_refused_and_not_waited_for(tmp_path, vision_model):
    os.mkfifo(tmp_path / "pipe.png")
    path = write_rows(tmp_path / "a.parquet", [vision_row(0, [{"path": "pipe.png"}])])
    problem = data_problem("spec.data.train.path", str(path), WITH_IMAGES, ImagesSpec())
    assert problem is not None
    assert "pipe.png (no regular file)" in problem.message


def test_videos_are_refused_beside_images(tmp_path, vision_model):
    path = write_rows(tmp_path / "a.parquet", [vision_row(0, [IMAGE]) | {"videos": ["a.mp4"]}])
    assert "has column videos" in str(data_problem("data", str(path), WITH_IMAGES, ImagesSpec()))
    with pytest.raises(RefusedError, match=r"has column videos\. Prompts have text and images"):
        load(path, processor(vision_model, tmp_path), vision_model)


def test_a_special_token_in_a_text_is_no_place_for_an_image(tmp_path, vision_model):
    row = vision_row(0, [IMAGE], [{"role": "user", "content": "<image><|image_pad|>"}])
    with pytest.raises(RefusedError, match="has 1 images, but the rendered prompt has 2 image tokens"):
        load(write_rows(tmp_path / "a.parquet", [row]), processor(vision_model, tmp_path), vision_model)


def test_a_model_without_a_processor_of_images_is_refused(tmp_path, model_folder):
    with pytest.raises(RefusedError, match=r"data\.images cannot be used"):
        processor(model_folder, tmp_path)


def test_a_stored_file_that_is_cut_off_or_gone_is_noticed_and_written_again(tmp_path):
    store = ImageStore(tmp_path)
    digest = store.add(IMAGE)
    store.path(digest).write_bytes(IMAGE[:-1])
    with pytest.raises(ValueError, match="is damaged"):
        store.read(digest)
    assert store.add(IMAGE) == digest
    assert store.read(digest) == IMAGE
    store.path(digest).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        store.read(digest)
    store.add(IMAGE)
    assert store.read(digest) == IMAGE


def test_transparent_images_lie_on_white_and_turned_ones_stand_upright():
    file = io.BytesIO()
    Image.new("RGBA", (4, 2), (0, 0, 0, 0)).save(file, "PNG")
    assert decode_image(file.getvalue()).getpixel((0, 0)) == (255, 255, 255)
    turned, tags = io.BytesIO(), Image.Exif()
    tags[0x0112] = 6
    Image.new("RGB", (40, 20), (9, 9, 9)).save(turned, "JPEG", exif=tags)
    assert decode_image(turned.getvalue()).size == (20, 40)
    assert image_size(turned.getvalue()) == (40, 20)


def test_an_image_of_too_many_pixels_is_refused_by_its_header():
    file = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(file, "PNG")
    with pytest.raises(ValueError, match=r"has 10000 x 10000 pixels, more than 33,554,432\. Make it smaller"):
        decode_image(file.getvalue())


def test_what_the_decoder_raises_over_a_header_is_the_rows_refusal(tmp_path, vision_model):
    file = io.BytesIO()
    tags = Image.Exif()
    tags[0x0112] = 6
    Image.new("RGB", (8, 4)).save(file, "TIFF", exif=tags)
    content = file.getvalue()
    refused = set()
    for place in range(min(len(content), 200)):
        for byte in (0, 1, 0x7F, 0xFF):
            broken = content[:place] + bytes([byte]) + content[place + 1 :]
            for read in (image_size, decode_image):
                try:
                    read(broken)
                except ImageError as error:
                    refused.add(str(error).split(" (")[0])
    assert "cannot be decoded" in refused


def test_an_image_that_stays_too_large_for_the_model_is_refused_by_row(tmp_path, vision_model, monkeypatch):
    monkeypatch.setattr(plaudit_workers.images, "MOST_SCALED_PIXELS", 4 * 28 * 28)
    path = write_rows(tmp_path / "a.parquet", [vision_row(0, [IMAGE])])
    with pytest.raises(
        RefusedError, match=r"row 1: column images has an image of .* more than 3,136\. Set data\.images"
    ):
        load(path, processor(vision_model, tmp_path), vision_model)

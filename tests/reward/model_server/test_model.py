"""The logits are those of plain transformers, whatever shares a forward pass; what cannot be computed is refused."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from pathlib import Path

import pytest

from plaudit_model_server.batcher import ModelSettings
from plaudit_model_server.model import Classifier
from plaudit_wire.errors import ConfigurationError, DataError

# transformers' own DeBERTa still uses it.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

Folder = Callable[[str], Path]
Plain = Callable[[str, list[str]], list[list[float]]]

DRAW = random.Random(1)
TEXTS = ["".join(DRAW.choices(string.ascii_letters, k=k)) for k in (1, 2, 3, 17, 40, 41, 100, 200, 256)]


@pytest.mark.parametrize(
    ("kind", "packs"), [("decoder", True), ("windows", True), ("capped", False), ("encoder", False)]
)
def test_a_mixed_pass_gives_each_sequence_the_score_that_it_has_alone(
    model_folder: Folder, plain_logits: Plain, kind: str, packs: bool
) -> None:
    classifier = Classifier(ModelSettings(str(model_folder(kind)), dtype="float32"))
    sequences = classifier.tokenize(TEXTS, add_special_tokens=True)
    assert (classifier.packs, classifier.batches) == (packs, True)
    together = classifier.logits(sequences)
    for got, expected in zip(together, plain_logits(kind, TEXTS), strict=True):
        assert got == pytest.approx(expected, abs=1e-5)
    assert len({tuple(logits) for logits in together}) == len(TEXTS)


def test_text_that_ends_with_the_padding_token_is_read_as_transformers_reads_it(
    model_folder: Folder, plain_logits: Plain
) -> None:
    texts = ["abc<pad>", "abcd", "<pad><pad>"]
    classifier = Classifier(ModelSettings(str(model_folder("decoder")), dtype="float32"))
    got = classifier.logits(classifier.tokenize(texts, add_special_tokens=True))
    assert got == [pytest.approx(each, abs=1e-5) for each in plain_logits("decoder", texts)]


def test_a_model_without_padding_token_is_computed_one_at_a_time(model_folder: Folder, plain_logits: Plain) -> None:
    classifier = Classifier(ModelSettings(str(model_folder("without_padding")), dtype="float32"))
    assert not classifier.batches
    got = [classifier.logits([tokens])[0] for tokens in classifier.tokenize(TEXTS[:3], add_special_tokens=True)]
    assert got == [pytest.approx(each, abs=1e-5) for each in plain_logits("without_padding", TEXTS[:3])]


def test_a_chat_is_rendered_by_the_models_template(model_folder: Folder) -> None:
    classifier = Classifier(ModelSettings(str(model_folder("decoder")), dtype="float32"))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert classifier.render(messages) == "u:hi\na:ho\n"
    with pytest.raises(DataError, match="template refuses"):
        classifier.render([{"text": "no role"}])


REFUSED = [([], "no tokens"), ([1] * 257, "257 tokens, the model takes 256"), ([10**6], "from 0 to"), ([-1], "from 0")]


@pytest.mark.parametrize(("tokens", "words"), REFUSED)
def test_a_sequence_longer_than_a_pass_is_refused(model_folder: Folder, tokens: list[int], words: str) -> None:
    classifier = Classifier(ModelSettings(str(model_folder("decoder")), dtype="float32"))
    with pytest.raises(DataError, match=words):
        classifier.check(tokens)


def test_a_model_without_a_trained_head_is_refused(model_folder: Folder, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = model_folder("decoder")
    AutoModelForSequenceClassification.from_pretrained(folder).model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no weights for score\.weight"):
        Classifier(ModelSettings(str(tmp_path), dtype="float32"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"--model {tmp_path}: no tokenizer could be loaded"):
        Classifier(ModelSettings(str(tmp_path)))

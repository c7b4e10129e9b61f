"""Tiny classifiers of several kinds, what plain transformers says of texts, and a server as its own process."""

from __future__ import annotations

import importlib.util
import os
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_job.processes import server_command, server_environment
from plaudit_job.spec.rewards import RewardModelSpec
from plaudit_reward.endpoint.vllm_sleep import SLEEP_TOKEN_VARIABLE
from plaudit_workers.launch.redis import free_port

EXAMPLES = Path(__file__).parents[3] / "examples"
TEMPLATE = "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}{{ '\\n' }}{% endfor %}"
MAX_LENGTH = 256
SLEEP_TOKEN = "of the process that started the server"


def save_decoder(folder: Path) -> None:
    """Qwen2: packed."""
    spec = importlib.util.spec_from_file_location("tiny_model", EXAMPLES / "tiny_model.py")
    assert spec is not None
    assert spec.loader is not None
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    model, tokenizer = tiny.make_tiny_classifier(string.printable, TEMPLATE, max_length=MAX_LENGTH, seed=3)
    model.score.weight.data.mul_(30)  # logits of order 1, as a trained model's
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_like_decoder(folder: Path, config_class: Any, **further: Any) -> None:
    """Another decoder of the same tokenizer, random."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    save_decoder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(4)
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        num_labels=1,
        initializer_range=0.3,
        **further,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def save_with_windows(folder: Path) -> None:
    """Mistral, whose tokens see 16 tokens back: packed."""
    from transformers import MistralConfig

    save_like_decoder(folder, MistralConfig, sliding_window=16)


def save_capped(folder: Path) -> None:
    """Gemma 2, which bounds its attention's scores as packed attention cannot: padded."""
    from transformers import Gemma2Config

    save_like_decoder(folder, Gemma2Config, attn_logit_softcapping=5.0)


def save_encoder(folder: Path) -> None:
    """DeBERTa, which vLLM cannot load: attention in both directions, computed with a mask; two labels."""
    import torch
    from transformers import AutoTokenizer, DebertaV2Config, DebertaV2ForSequenceClassification

    save_decoder(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(5)
    config = DebertaV2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        num_labels=2,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
    )
    DebertaV2ForSequenceClassification(config).save_pretrained(folder)


def save_without_padding(folder: Path) -> None:
    """GPT-2 without a padding token: transformers computes it one sequence at a time."""
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2ForSequenceClassification

    save_decoder(folder)
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(6)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=MAX_LENGTH,
        num_labels=1,
        initializer_range=0.5,
    )
    GPT2ForSequenceClassification(config).save_pretrained(folder)


SAVE = {
    "decoder": save_decoder,
    "windows": save_with_windows,
    "capped": save_capped,
    "encoder": save_encoder,
    "without_padding": save_without_padding,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A classifier's folder by its kind, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            SAVE[kind](made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def plain_logits(model_folder: Callable[[str], Path]) -> Callable[[str, list[str]], list[list[float]]]:
    """What ``model(**tokenizer(text))`` gives, one text at a time."""
    loaded: dict[str, tuple[Any, Any]] = {}

    def logits(kind: str, texts: list[str]) -> list[list[float]]:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        torch.set_num_threads(1)
        if kind not in loaded:
            folder = model_folder(kind)
            model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
            loaded[kind] = model, AutoTokenizer.from_pretrained(folder)
        model, tokenizer = loaded[kind]
        with torch.no_grad():
            return [model(**tokenizer(text, return_tensors="pt")).logits[0].tolist() for text in texts]

    return logits


class ServerProcess:
    """A reward model server as ``plaudit run`` starts it, on a free port; it can sleep."""

    sleep_token = SLEEP_TOKEN

    def __init__(self, folder: Path, log: Path, *, engine: str, **arguments: Any) -> None:
        model = RewardModelSpec(
            source=str(folder), engine=engine, dtype="float32", arguments=arguments, sleep_during_updates=True
        )
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, *server_command(model, "tiny", "127.0.0.1", port, with_gpu=False)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **server_environment(model, with_gpu=False)}
        environment[SLEEP_TOKEN_VARIABLE] = SLEEP_TOKEN
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def wait_until_ready(self) -> None:
        """Asks for its health until it answers."""
        while True:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)

    def stop(self) -> int:
        """SIGTERM; returns its exit code."""
        self.process.terminate()
        return self.process.wait()


@pytest.fixture(scope="session")
def server(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Plaudit's own server with the decoder and a queue of 64, for the whole session; it ends well."""
    log = tmp_path_factory.mktemp("server") / "log"
    server = ServerProcess(model_folder("decoder"), log, engine="plaudit", max_queue=64)
    server.wait_until_ready()
    yield server
    assert server.stop() == 0, log.read_text()


@pytest.fixture(scope="session")
def vllm_server(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """vLLM's pooling server with the same model: 20 s and more to start, so there is one for all tests."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    server = ServerProcess(model_folder("decoder"), log, engine="vllm", max_num_seqs=64)
    server.wait_until_ready()
    yield server
    server.stop()

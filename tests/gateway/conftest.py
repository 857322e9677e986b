from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .servers import RunningServer, StartServer, demo_model, serve, server_starter

ORDERS = ["<die>", "<fatal>", "<error>", "<forever>", "<nonsense>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<start>{{ message['role'] }}\n{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog. Paris is the capital of France; 0123456789 é ü 😀"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text half of a checkpoint: a byte-level tokenizer of about 300 tokens and a chat template."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<eos>", "<start>", "<end>", *ORDERS]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE})
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"temperature": 0.25, "top_p": 0.5, "top_k": 7})
    )
    return folder


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


@pytest.fixture
def start_server(checkpoint: Path, tmp_path: Path) -> Iterator[StartServer]:
    with server_starter(checkpoint, tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def demo_server() -> Iterator[RunningServer]:
    """`bimetal serve` on the demo model; its key is `sesame`, a body may have 200,000 bytes."""
    flags = (
        "--api-key",
        "sesame",
        "--max-body-bytes",
        "200000",
        "--max-num-seqs",
        "16",
        "--max-model-len",
        "2048",
    )
    with serve("--model", str(demo_model()), "--layers", "18,12", *flags) as running:
        yield running

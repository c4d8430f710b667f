"""Tokenizers made on the spot, and rows written for one test."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hone.config.run import ModelSection
from hone.data.chat import load_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def digits():
    return load_tokenizer(ModelSection(characters="0123456789+-*/="), Path())


@pytest.fixture(scope="session")
def words():
    """A character-level tokenizer for sentences."""
    return load_tokenizer(ModelSection(characters="abcdefghijklmnopqrstuvwxyzQA0123456789 :{}?.\n"), Path())


@pytest.fixture
def model_directory(tmp_path):
    """A tokenizer directory as Hugging Face models have: byte-level BPE, BOS in front, a chat template."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["how many apples are left", "four apples are left"], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    hf.chat_template = CHAT_TEMPLATE
    folder = tmp_path / "model"
    hf.save_pretrained(folder)
    return folder


@pytest.fixture
def write_rows(tmp_path):
    def write(*rows, name="rows.jsonl"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return name

    return write

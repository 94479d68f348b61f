"""What the data tests share: a BERT preprocessor of the demo's words, and no network."""

from __future__ import annotations

import socket

import keras_nlp
import pytest

from precision_bert.data import demo_vocabulary


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(address, *args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, f"a test tried to reach {address}")

    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def preprocessor():
    """A stock keras_nlp preprocessor, 32 tokens long, that knows the demo's 52 words."""
    tokenizer = keras_nlp.models.BertTokenizer(demo_vocabulary())
    return keras_nlp.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=32)

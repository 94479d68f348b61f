"""Where a pretrained BERT comes from: a preset of keras-nlp, a folder, or a hub."""

from __future__ import annotations

import difflib
import json
import os
import socket
import urllib.parse
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import keras_nlp

from precision_bert.bert_config import read_wordpieces
from precision_bert.bert_text import BertTextTokenizer

# Of every BERT that keras-nlp publishes, so that a longer sequence is refused before a download.
_PUBLISHED_MAX_SEQUENCE_LENGTH = 512

_HOW_TO_DO_WITHOUT = (
    "Pass a folder instead: one written by save_to_preset() on a machine with a connection, or a "
    "download in Hugging Face layout (config.json, vocab.txt, tokenizer_config.json, "
    "model.safetensors)."
)


def load_bert(
    preset: str | os.PathLike[str],
    *,
    dtype: str,
    sequence_length: int,
    load_weights: bool,
    warn_untrained_pooler: bool,
) -> tuple[keras_nlp.models.BertBackbone, BertTextTokenizer]:
    """Returns the backbone and the tokenizer of a preset, a folder or a hub handle.

    Args:
        preset: See `precision_bert.bert_classifier`.
        dtype: Name of the policy that the backbone is built in.
        sequence_length: Length that the backbone must be able to read, in wordpieces.
        load_weights: Whether to read the weights.
        warn_untrained_pooler: Whether to warn of a sentence embedding model, whose training left
            BERT's pooling layer out.

    Raises:
        TypeError: If `preset` is neither a string nor a path.
        ValueError: If it is unknown, no BERT, or shorter than `sequence_length`.
        FileNotFoundError: If the folder, or a file that it must hold, is not there.
        ConnectionError: If the hub cannot be reached.
    """
    if not isinstance(preset, (str, os.PathLike)):
        raise TypeError(
            "The preset must be a name, a folder's path, or a BertConfig. "
            f"Received: {preset!r} of type {type(preset).__name__}."
        )
    name = os.fspath(preset)
    published = keras_nlp.models.BertBackbone.presets
    if isinstance(preset, str) and "://" in name:
        _check_reachable(name)
        return _from_hub(name, dtype, sequence_length, load_weights)
    if isinstance(preset, str) and name in published and not Path(name).is_dir():
        _check_length(sequence_length, _PUBLISHED_MAX_SEQUENCE_LENGTH, name)
        # What is not published as BERT itself is a sentence embedding model.
        if warn_untrained_pooler and "keras/bert/" not in published[name]["kaggle_handle"]:
            _warn_untrained_pooler(name)
        return _from_hub(name, dtype, sequence_length, load_weights)
    folder = Path(name)
    if not folder.is_dir():
        _raise_unknown(name, isinstance(preset, str), published)

    config = _read_json(folder, "config.json", "It is what makes a folder a preset.")
    if "registered_name" in config:
        return _from_keras_folder(folder, config, dtype, sequence_length, load_weights)
    return _from_hugging_face_folder(
        folder, config, dtype, sequence_length, load_weights, warn_untrained_pooler
    )


def _from_hub(
    handle: str, dtype: str, sequence_length: int, load_weights: bool
) -> tuple[keras_nlp.models.BertBackbone, BertTextTokenizer]:
    try:
        # The tokenizer first: it is small, and shows whether the model can be used at all.
        tokenizer = _as_trained(keras_nlp.models.BertTokenizer.from_preset(handle), handle)
        backbone = keras_nlp.models.BertBackbone.from_preset(
            handle, load_weights=load_weights, dtype=dtype
        )
    except FileNotFoundError:
        raise
    except OSError as error:  # requests' and urllib3's connection errors are OSErrors
        raise ConnectionError(
            f"{handle!r} is not on this machine and its hub cannot be reached ({error}). "
            f"{_HOW_TO_DO_WITHOUT}"
        ) from error
    _check_length(sequence_length, backbone.max_sequence_length, handle)
    return backbone, tokenizer


def _from_keras_folder(
    folder: Path, config: dict[str, Any], dtype: str, sequence_length: int, load_weights: bool
) -> tuple[keras_nlp.models.BertBackbone, BertTextTokenizer]:
    if config.get("class_name") != "BertBackbone":
        raise ValueError(
            f"The folder {folder} must hold a BertBackbone. "
            f"Received: a {config.get('class_name')!r} in its config.json."
        )
    _check_length(sequence_length, config["config"]["max_sequence_length"], folder)
    _require(folder, "tokenizer.json", "It says how text is split; save_to_preset() writes it.")
    _require(folder, "assets/tokenizer/vocabulary.txt", "It holds the wordpieces.")
    if load_weights:
        _require_weights(folder, "model.weights.h5", "model.weights.json")
    backbone = keras_nlp.models.BertBackbone.from_preset(
        str(folder), load_weights=load_weights, dtype=dtype
    )
    tokenizer = keras_nlp.models.BertTokenizer.from_preset(str(folder))
    return backbone, _as_trained(tokenizer, folder)


def _from_hugging_face_folder(
    folder: Path,
    config: dict[str, Any],
    dtype: str,
    sequence_length: int,
    load_weights: bool,
    warn_untrained_pooler: bool,
) -> tuple[keras_nlp.models.BertBackbone, BertTextTokenizer]:
    if config.get("model_type") != "bert":
        raise ValueError(
            f"The folder {folder} must hold a BERT: model_type 'bert' in its config.json (Hugging "
            "Face layout), or a BertBackbone (Keras layout). "
            f"Received: model_type={config.get('model_type')!r}."
        )
    # keras-nlp's BERT has no setting for these, and would compute something else without a word.
    for key, supported in (
        ("hidden_act", ("gelu", "gelu_new", "gelu_pytorch_tanh")),
        ("position_embedding_type", ("absolute", None)),
        ("type_vocab_size", (2,)),
    ):
        value = config.get(key, supported[0])
        if value not in supported:
            raise ValueError(
                f"keras-nlp's BertBackbone supports {key}={supported[0]!r} only. "
                f"Received: {key}={value!r} in {folder / 'config.json'}."
            )
    _check_length(sequence_length, config["max_position_embeddings"], folder)
    _require(folder, "vocab.txt", "It holds the wordpieces, one a line.")
    settings = _read_json(
        folder,
        "tokenizer_config.json",
        'It says whether the vocabulary is uncased: {"do_lower_case": true} or false.',
    )
    if not isinstance(settings.get("do_lower_case"), bool):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'} must say whether the vocabulary is uncased, as "
            f'"do_lower_case": true or false. Received: {settings.get("do_lower_case")!r}.'
        )
    if load_weights:
        _require_weights(folder, "model.safetensors", "model.safetensors.index.json")
    wordpieces = read_wordpieces(folder / "vocab.txt")
    if len(wordpieces) > config["vocab_size"]:
        raise ValueError(
            f"vocab.txt must hold no more wordpieces than config.json's vocab_size. Received: "
            f"{len(wordpieces)} wordpieces for vocab_size={config['vocab_size']} in {folder}."
        )
    # sentence-transformers' mark. Its models pool without BERT's layer, also where they read [CLS].
    if warn_untrained_pooler and (folder / "1_Pooling").is_dir():
        _warn_untrained_pooler(folder)
    backbone = keras_nlp.models.BertBackbone.from_preset(
        str(folder), load_weights=load_weights, dtype=dtype
    )
    return backbone, BertTextTokenizer(
        wordpieces,
        uncased=settings["do_lower_case"],
        strip_accents=settings.get("strip_accents"),  # null, the usual, follows do_lower_case
    )


def _as_trained(tokenizer: Any, source: object) -> BertTextTokenizer:
    """Returns the tokenizer that the published weights were trained with."""
    if isinstance(tokenizer, BertTextTokenizer):
        return tokenizer
    if not isinstance(tokenizer, keras_nlp.models.BertTokenizer):
        raise ValueError(
            f"The preset must split text into wordpieces, as BERT does. Received: {str(source)!r}, "
            f"whose tokenizer is a {type(tokenizer).__name__}."
        )
    return BertTextTokenizer(tokenizer.vocabulary, uncased=tokenizer.lowercase)


def _warn_untrained_pooler(source: object) -> None:
    warnings.warn(
        f"{str(source)!r} is a sentence embedding model: BERT's pooling layer was not trained with "
        "it, and pooling='cls' sends every gradient through that layer, so fine-tuning starts "
        "slowly. Prefer pooling='mean' with these weights.",
        UserWarning,
        stacklevel=5,
    )


def _check_length(sequence_length: int, longest: int, source: object) -> None:
    if sequence_length > longest:
        raise ValueError(
            f"sequence_length must not exceed {longest}, the number of position embeddings of "
            f"{str(source)!r}. Received: sequence_length={sequence_length}."
        )


def _check_reachable(handle: str) -> None:
    """Raises at once where huggingface_hub would retry for 24 s and then blame the handle."""
    if not handle.startswith("hf://"):
        return
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(handle.removeprefix("hf://"), "config.json")
    if isinstance(cached, str) or urllib.request.getproxies():
        return
    host = urllib.parse.urlparse(huggingface_hub.constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise ConnectionError(
            f"{handle!r} is not on this machine and {host} cannot be reached ({error}). "
            f"{_HOW_TO_DO_WITHOUT}"
        ) from error


def _raise_unknown(name: str, may_be_preset: bool, published: dict[str, Any]) -> None:
    if not may_be_preset or os.sep in name or name.startswith((".", "~")):
        raise FileNotFoundError(
            f"The preset must be an existing folder. Received: {name!r}, which is none "
            "(relative paths start at the working directory, and ~ is not expanded)."
        )
    if name in keras_nlp.models.Backbone.presets:
        reason = f"{name!r} is known to keras-nlp, but is no BERT."
    else:
        near = difflib.get_close_matches(name, published, n=1)
        reason = f"Received: {name!r}." + (f" Did you mean {near[0]!r}?" if near else "")
    raise ValueError(
        "The preset must be the name of a BERT that keras-nlp publishes, a folder's path, or a hub "
        f"handle such as 'hf://user/model'. {reason} Known names: {', '.join(sorted(published))}."
    )


def _require(folder: Path, file: str, why: str) -> None:
    if not (folder / file).is_file():
        raise FileNotFoundError(f"The folder {folder} must hold {file}. {why}")


def _require_weights(folder: Path, *files: str) -> None:
    if not any((folder / file).is_file() for file in files):
        hint = ""
        if (folder / "pytorch_model.bin").is_file():
            hint = " Its pytorch_model.bin cannot be read; save it anew as safetensors."
        raise FileNotFoundError(
            f"The folder {folder} holds no weights: expected {' or '.join(files)}.{hint} "
            "Pass load_weights=False to initialise the architecture at random."
        )


def _read_json(folder: Path, file: str, why: str) -> dict[str, Any]:
    _require(folder, file, why)
    try:
        content = json.loads((folder / file).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / file} must be JSON. Received: {error}.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{folder / file} must be a JSON object. Received: {content!r}.")
    return content

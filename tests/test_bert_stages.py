"""What the stages promise on a keras-nlp BERT."""

from __future__ import annotations

import keras
import keras_nlp
import numpy as np
import pytest

import precision_bert as pb
from precision_bert.policies import SWITCHABLE_POLICIES

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[f"w{i}" for i in range(3000)]]


def tiny(policy="float32", pooling="cls"):
    config = pb.BertConfig(
        WORDS, num_layers=2, num_heads=2, hidden_dim=16, intermediate_dim=32, dropout=0.1
    )
    return pb.bert_classifier(config, 2, sequence_length=16, dtype=policy, pooling=pooling)


def batch(n=8):
    random = np.random.RandomState(0)
    ids = random.randint(5, len(WORDS), (n, 12)).astype("int32")
    mask = (np.arange(12) < random.randint(3, 13, (n, 1))).astype("int32")
    return {"token_ids": ids * mask, "segment_ids": np.zeros_like(ids), "padding_mask": mask}


LABELS = np.array([0, 1] * 4, "int32")


def bits(tensor):
    return keras.ops.convert_to_numpy(tensor).tobytes()


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("target", SWITCHABLE_POLICIES)
@pytest.mark.parametrize("source", SWITCHABLE_POLICIES)
def test_a_switched_bert_computes_what_one_built_in_that_policy_computes(source, target, pooling):
    switched, built = tiny(source, pooling), tiny(target, pooling)
    built.set_weights(switched.get_weights())
    x = batch()
    switched.predict(x, verbose=0)
    pb.switch_precision(switched, target)
    assert bits(switched(x)) == bits(built(x))
    assert switched.predict(x, verbose=0).tobytes() == built.predict(x, verbose=0).tobytes()


def test_a_stock_keras_nlp_task_is_switched_with_its_backbone():
    backbone = tiny().backbone
    task = keras_nlp.models.BertTextClassifier(backbone, num_classes=2)
    pb.switch_precision(task, "mixed_float16")
    assert set(pb.compute_dtypes(task).values()) == {"float16"}
    assert backbone.dtype_policy.name == "mixed_float16"
    assert isinstance(task.optimizer, pb.DynamicLossScaleOptimizer)


@pytest.mark.parametrize("low", ["mixed_float16", "mixed_bfloat16"])
def test_after_two_stages_it_equals_a_float32_model_with_the_same_weights(low):
    model = tiny()
    pb.compile_classifier(model, num_steps=8, learning_rate=1e-3)
    record = pb.two_stage_fit(
        model, batch(), LABELS, epochs=4, switch_epoch=3, low=low, batch_size=4, shuffle=False,
        verbose=0,
    )  # fmt: skip
    assert [s.applied_steps + s.skipped_steps for s in record.stages] == [6, 2]
    built = tiny()
    built.set_weights(model.get_weights())
    assert bits(model(batch())) == bits(built(batch()))
    assert (
        model.predict(batch(), verbose=0).tobytes() == built.predict(batch(), verbose=0).tobytes()
    )


@pytest.mark.parametrize("policy", SWITCHABLE_POLICIES)
def test_logits_and_head_stay_float32_in_every_stage_wherever_it_was_built(policy):
    for built_in in SWITCHABLE_POLICIES:
        model = tiny(built_in, "mean")
        pb.switch_precision(model, policy)
        dtypes = pb.compute_dtypes(model)
        head = {n: d for n, d in dtypes.items() if n.split("/")[-1] in
                ("logits", "classifier_dropout", "mean_pooling")}  # fmt: skip
        assert set(head.values()) == {"float32"} and len(head) == 3
        body = {d for n, d in dtypes.items() if n not in head and "preprocessor" not in n}
        assert body == {keras.DTypePolicy(policy).compute_dtype}
        assert model.predict(batch(), verbose=0).dtype == "float32"


def test_ids_above_2048_are_looked_up_exactly_in_half():
    model = tiny("mixed_float16")
    table = np.array(model.backbone.token_embedding.embeddings)
    ids = np.array([[2047, 2048, 2049, 2051, 3004]], "int32")
    looked_up = keras.ops.convert_to_numpy(model.backbone.token_embedding(ids))
    np.testing.assert_array_equal(looked_up, table[ids].astype("float16"))


def test_the_tokenizer_is_left_alone_and_raw_text_works_in_every_stage():
    model = tiny()
    tokenizer = model.preprocessor.tokenizer
    before = tokenizer.dtype_policy.name
    pairs = (["w1 w2", "w3"], ["w2", "w3 w4"])
    for policy in ("mixed_float16", "float32"):
        pb.switch_precision(model, policy)
        assert tokenizer.dtype_policy.name == before
        assert model.predict(pairs, verbose=0).shape == (2, 2)


def test_a_model_saved_after_the_stages_comes_back_with_optimizer_and_predictions(tmp_path):
    model = tiny()
    pb.compile_classifier(model, num_steps=6, learning_rate=1e-3)
    pb.two_stage_fit(
        model, batch(), LABELS, epochs=3, switch_epoch=2, batch_size=4, shuffle=False, verbose=0
    )
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert bits(again(batch())) == bits(model(batch()))
    assert int(again.optimizer.iterations) == int(model.optimizer.iterations)
    for one, other in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        assert bits(one) == bits(other)


def test_a_regression_trains_in_both_stages():
    config = pb.BertConfig(WORDS, num_layers=1, num_heads=2, hidden_dim=16, intermediate_dim=32)
    model = pb.bert_classifier(config, num_classes=1, sequence_length=16)
    pb.compile_classifier(model, num_steps=4, learning_rate=1e-3)
    targets = np.linspace(0, 5, 8, dtype="float32")
    record = pb.two_stage_fit(
        model, batch(), targets, epochs=2, switch_epoch=1, batch_size=4, shuffle=False, verbose=0
    )
    assert np.isfinite(record.history["rmse"]).all()

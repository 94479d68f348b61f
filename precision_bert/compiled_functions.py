"""The compiled functions of a live model: when they are of another precision, they are renewed."""

from __future__ import annotations

import inspect

import keras

from precision_bert.layer_policies import is_container

_STEPS = ("train_step", "test_step", "predict_step", "call")


def renew_functions(model: keras.Model) -> None:
    """Makes the next step of each compiled function of `model` be traced anew.

    Args:
        model: Any Keras model, within a running `fit` or not.
    """
    # compile() would renew them too, but kills a running fit and resets more than that. Inside a
    # fit the train function is looked up anew for each step, so it must never be None.
    for part in model._flatten_layers():
        _forget_traces(part)
        if not is_container(part):
            continue
        part.test_function = None
        part.predict_function = None
        if getattr(part, "train_function", None) is not None:
            if "force" in inspect.signature(part.make_train_function).parameters:
                part.make_train_function(force=True)
            else:  # a user's own
                part.train_function = None
                part.make_train_function()


def _forget_traces(layer: keras.Layer) -> None:
    # A step or a call that its author decorated with tf.function is traced once for each shape and
    # dtype of its inputs, and knows nothing of policies. TensorFlow keeps such a function for each
    # object in this cache, and has no public way to make it forget one.
    for name in _STEPS:
        function = inspect.getattr_static(type(layer), name, None)
        cache = getattr(function, "_descriptor_cache", None)
        if cache is not None:
            cache.pop(layer, None)

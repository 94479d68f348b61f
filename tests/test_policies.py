import keras
import pytest

from precision_bert.policies import (
    SWITCHABLE_POLICIES,
    check_policy,
    compute_dtype,
    needs_loss_scaling,
)


@pytest.mark.parametrize("name", SWITCHABLE_POLICIES)
def test_dtypes_are_those_of_keras_own_policy(name):
    policy = keras.DTypePolicy(name)
    assert compute_dtype(name) == policy.compute_dtype
    assert policy.variable_dtype == "float32"
    assert check_policy(policy) == name


def test_only_float16_needs_loss_scaling():
    assert [p for p in SWITCHABLE_POLICIES if needs_loss_scaling(p)] == ["mixed_float16"]


@pytest.mark.parametrize(
    ("alias", "mixed"),
    [("fp16", "mixed_float16"), ("half", "mixed_float16"), ("bf16", "mixed_bfloat16")],
)
def test_a_common_alias_is_refused_with_the_name_that_is_meant(alias, mixed):
    with pytest.raises(ValueError, match=f"you probably want '{mixed}'"):
        check_policy(alias)


def test_the_error_names_the_argument():
    with pytest.raises(ValueError, match=r"high must be one of .*Received: high='fp8'"):
        check_policy("fp8", "high")

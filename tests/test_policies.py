import keras
import pytest

from precision_bert.policies import SWITCHABLE_POLICIES, check_policy


@pytest.mark.parametrize("name", SWITCHABLE_POLICIES)
def test_every_policy_is_keras_own_and_keeps_float32_variables(name):
    policy = keras.DTypePolicy(name)
    assert policy.variable_dtype == "float32"
    assert check_policy(policy) == name


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

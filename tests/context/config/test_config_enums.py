import pickle

import pytest

from accelfn.context.config import DynamoBackend, FP8Backend, GuardMode, PrecisionType, RNGType, StringEnum

ENUMS = (DynamoBackend, FP8Backend, GuardMode, PrecisionType, RNGType)


@pytest.mark.parametrize("enum", ENUMS)
def test_membership_is_by_value(enum: type[StringEnum]) -> None:
    for member in enum:
        assert member.value in enum
        assert member in enum
        assert member.value in {member}
        assert str(member) == f"{member}" == member.value
        assert pickle.loads(pickle.dumps(member)) is member
    assert "nonsense" not in enum
    assert 3 not in enum
    assert enum.values() == tuple(member.value for member in enum)


def test_values_are_those_users_write() -> None:
    assert PrecisionType.values() == ("no", "fp8", "fp16", "bf16")
    assert "bf16" == PrecisionType.BF16  # noqa: SIM300 - either side
    assert "BF16" not in PrecisionType

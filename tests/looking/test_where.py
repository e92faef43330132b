"""Conditions on rows: what they choose, and what they refuse."""

import pyarrow as pa
import pytest

from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.looking.where import read_condition

ROWS = {
    "reward": pa.array([1.0, 0.0, None, -0.5]),
    "tokens": pa.array([10, 20, 30, None]),
    "success": pa.array([True, False, None, False]),
    "response": pa.array(["yes", "an error", None, "error error"]),
    "env": pa.array(["a", "b", "a", "c"]),
    "part.answer": pa.array([1.0, 0.0, None, 0.5]),
}


def chosen(text):
    return read_condition(text, ROWS, ("part",)).holds(ROWS.__getitem__, 4).to_pylist()


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("reward < 0", [3]),
        ("reward < 0.5 and tokens >= 20", [1]),
        ("reward > 0 or tokens == 30", [0, 2]),
        ("not success", [1, 3]),
        ("success == False", [1, 3]),
        ("success == 1", [0]),
        ("reward is None", [2]),
        ("reward == null", [2]),
        ("reward is not None", [0, 1, 3]),
        ("'error' in response", [1, 3]),
        ("'error' not in response", [0]),
        ("env in ('a', 'c')", [0, 2, 3]),
        ("env not in ['a']", [1, 3]),
        ("0 <= reward < 1", [1]),
        ("reward + tokens / 10 > 1.5", [0, 1]),
        ("-reward > 0", [3]),
        ("part.answer == 0.5", [3]),
        ("true", [0, 1, 2, 3]),
        ("none", []),
    ],
)
def test_a_condition_chooses_rows_and_null_is_never_chosen(text, rows):
    assert [index for index, holds in enumerate(chosen(text)) if holds] == rows


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("reward = 1", "cannot be read", "Compare with `==`"),
        ("rewards > 1", "`--where` knows no `rewards`", "Did you mean `reward`?"),
        ("reward", "is no yes or no", "Write, for instance"),
        ("reward == 'a'", "cannot be worked out", "Compare numbers with numbers"),
        ("reward and success", "`reward` is no yes or no", "Compare numbers"),
        ("__import__('os').system('x') == 0", "knows no `__import__`", "texts need quotes"),
        ("reward.real > 0", "knows no `reward.real`", ""),
        ("part > 0", "knows no `part`", ""),
        ("(lambda: True)()", "is no comparison", ""),
        ("[reward for reward in env]", "is no comparison", ""),
        ("(" * 300 + "reward" + ")" * 300, "cannot be read", ""),
        ("reward > " + "9" * 5000, "longer than", ""),
        ("env in (reward,)", "more than numbers and texts", ""),
        ("", "cannot be read", ""),
    ],
)
def test_what_is_no_condition_is_one_error(text, says, hint):
    with pytest.raises(SettingsError, match="--where") as error:
        chosen(text)
    assert says in str(error.value)
    assert hint in error.value.hint

"""Tasks of reasoning-gym with text answers: the answer of another row that their own scorer rejects is wrong here."""

import pytest

pytest.importorskip("reasoning_gym")

import reasoning_gym
from reasoning_gym.factory import DATASETS

from nanoskyrl.envs.graders.kinds import grade

ROWS = 20
SLOW_TO_MAKE = {"composite": "mixes others", "acre": "makes all its entries at the start"}


def answers_of(name):
    """Return the data set and its first rows with a text answer."""
    data = reasoning_gym.create_dataset(name, size=ROWS, seed=5)
    rows = [data[i] for i in range(ROWS)]
    return data, [row for row in rows if isinstance(row["answer"], str) and row["answer"].strip()]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(DATASETS) - set(SLOW_TO_MAKE)))
@pytest.mark.timeout(600)
def test_the_answer_of_another_row_is_wrong_and_its_own_is_right(name):
    data, rows = answers_of(name)
    if len(rows) < 2:
        pytest.skip("no text answers")
    otherwise = []
    for i, row in enumerate(rows):
        gold, other = row["answer"], rows[(i + 1) % len(rows)]["answer"]
        own = grade("final_answer", gold, f"<answer>{gold}</answer>")
        if own.correct is not True:
            otherwise.append((gold, gold, own))
        if other != gold and data.score_answer(other, row) < 1:
            found = grade("final_answer", gold, f"<answer>{other}</answer>")
            if found.correct is not False:
                otherwise.append((gold, other, found))
    assert otherwise == []

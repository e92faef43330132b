"""A package for verifiers, as tests use it: a tool that knows the sizes of cities, and a rubric of two functions."""

import verifiers as vf
from datasets import Dataset

SIZES = {"Arden": 31, "Borel": 87, "Cadiz": 11}


def size(city: str) -> int:
    """Return the size of a city.

    Args:
        city: Its name.
    """
    return SIZES[city]


def right(completion, answer, **kwargs) -> float:
    return float(answer in str(completion[-1].content))


async def short(completion, **kwargs) -> float:
    return 1.0 if len(completion) <= 3 else 0.5


def load_environment(turns: int = 5):
    rows = [
        {"question": f"Is {a} or {b} larger?", "answer": max(a, b, key=SIZES.get)}
        for a, b in (("Arden", "Borel"), ("Cadiz", "Arden"))
    ]
    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.2])
    return vf.ToolEnv(
        dataset=Dataset.from_list(rows), system_prompt="Be brief.", tools=[size], max_turns=turns, rubric=rubric
    )

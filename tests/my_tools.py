"""Tools of a user's, named in tests as `my_tools:...`."""

from typing import Literal


def weather(town: str, unit: Literal["C", "F"] = "C", days: int = 1) -> dict:
    """Say what the weather will be.

    Not shown to the policy.
    """
    return {"town": town, "unit": unit, "days": days, "sky": "blue"}


def broken(x: int) -> str:
    """Break."""
    raise KeyError("no such thing")


def no_schema(x: object()) -> str:  # type: ignore[valid-type]
    """Cannot be described."""
    return ""


class other:
    """A tool that is called as another one is."""

    @staticmethod
    def calculator(expression: str) -> str:
        return expression


def nothing() -> None:
    """Take nothing, return nothing."""

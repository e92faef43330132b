"""A share of the cases drawn for everything that reads what others wrote."""

import pytest
from faults.fuzz import CASES, tried


@pytest.mark.parametrize("name", CASES)
def test_whatever_comes_is_read_or_refused(name):
    assert tried(name, range(60)) == []

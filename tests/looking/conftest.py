import pytest
from looked_at import hostile_run, small_run


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A run of two small steps of tool_use."""
    return small_run(tmp_path_factory.mktemp("looking") / "small")


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """A run whose policy wrote what does harm where it is obeyed."""
    return hostile_run(tmp_path_factory.mktemp("looking") / "hostile")

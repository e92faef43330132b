"""What environments made by others share."""

import json

import pytest

from nanoskyrl.envs.outside.common import json_ready, need, sendable
from nanoskyrl.stages.core.errors import SettingsError


def test_a_missing_package_is_one_error_that_says_what_to_install():
    with pytest.raises(SettingsError, match="`no_such_world`") as caught:
        need("no_such_world", "openenv")
    assert caught.value.hint == "Run `pip install 'nanoskyrl[openenv]'`"
    assert need("json", "openenv") is json


@pytest.mark.parametrize("value", ["\ud800", {"a\udfff": ["\ud83d", 1]}, {"x": "\u202e\0"}])
def test_whatever_is_sent_can_be_encoded(value):
    sent = sendable(value)
    json.dumps(sent, ensure_ascii=False).encode()
    assert sendable(sent) == sent


def test_what_json_cannot_hold_becomes_text():
    assert json_ready({"a": {1}, "b": 2}) == {"a": "{1}", "b": 2}

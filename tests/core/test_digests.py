import pytest

from nanoskyrl.stages.core.digests import canonical_json, derive_seed, digest_bytes, digest_file, digest_json
from nanoskyrl.stages.core.storage import as_path


def test_the_digest_is_blake3():
    # The first of the official test vectors.
    assert digest_bytes(b"") == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, (2 << 20) - 1])
def test_a_file_has_the_digest_of_its_bytes(tmp_path, size):
    data = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
    (tmp_path / "file").write_bytes(data[:size])
    assert digest_file(tmp_path / "file") == digest_bytes(data[:size])


def test_a_file_behind_a_url_has_the_same_digest(tmp_path):
    path = as_path(f"memory:/{tmp_path}/file")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    assert digest_file(path) == digest_bytes(b"weights")


def test_canonical_json_sorts_keys_at_every_level_and_has_no_spaces():
    assert canonical_json({"b": [1, {"d": None, "c": "ü"}], "a": 0.5}) == '{"a":0.5,"b":[1,{"c":"ü","d":null}]}'


def test_the_order_of_keys_does_not_change_a_digest_and_the_order_of_a_list_does():
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    assert digest_json([1, 2]) != digest_json([2, 1])


def test_a_number_and_its_text_have_different_digests():
    assert digest_json({"x": 1}) != digest_json({"x": "1"})


def test_a_tuple_counts_as_the_list_that_json_makes_of_it():
    assert digest_json({"tools": ("calculator", "search")}) == digest_json({"tools": ["calculator", "search"]})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_cannot_hold_has_no_digest(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        digest_json({"lr": value})


def test_a_seed_is_the_same_on_every_machine():
    # The first 16 digits of the digest of ["text_math",3], halved.
    assert digest_bytes(b'["text_math",3]').startswith("37e1b67c2e1ec9c4")
    assert derive_seed("text_math", 3) == 0x37E1B67C2E1EC9C4 >> 1


def test_seeds_fit_a_signed_64_bit_column():
    seeds = [derive_seed("task", i) for i in range(2000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # all 63 bits are used


def test_every_part_of_a_seed_counts_and_parts_do_not_run_together():
    seeds = [derive_seed("ab", "c"), derive_seed("a", "bc"), derive_seed("abc"), derive_seed("c", "ab"), derive_seed()]
    assert len({*seeds, derive_seed("ab", "c", 0), derive_seed(1), derive_seed("1"), derive_seed(1, None)}) == 9


def test_a_task_id_with_a_lone_surrogate_has_a_seed():
    assert derive_seed("task \ud800") != derive_seed("task \ud801")

import copy
import dataclasses
import io
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from nanoskyrl.stages.core.errors import InputError
from nanoskyrl.stages.core.rows import (
    clean_text,
    flat_values,
    from_json,
    from_table,
    list_column,
    row_arrays,
    texts_of,
    to_json,
    to_table,
)
from nanoskyrl.stages.core.table_checks import check
from nanoskyrl.stages.core.trajectory import (
    COLUMNS,
    DROP_REASONS,
    PER_RESPONSE_TOKEN,
    SCHEMA_KEY,
    SCHEMA_VERSION,
    STATUSES,
    STOP_REASONS,
    TOKEN_COLUMNS,
    ToolCall,
    Trajectory,
    Turn,
    columns_of,
    schema_of,
)

# The table of design.md, section 3, in its order.
DESIGN = {
    "rollout": """
        trajectory_id:string step_index:int32 is_last_step:bool group_id:string sample:int32 env:string task_id:string
        split:string seed:int64 policy_version:int32 policy_digest:string temperature:double top_p:double top_k:int32
        logprobs_mode:string prompt_ids:int32* response_ids:int32* loss_mask:int8* rollout_logprobs:float* prompt:string
        response:string messages:string turns:struct* status:string stop_reason:string error:string trainable:bool
        prompt_tokens:int32 completion_tokens:int32 metadata:string""",
    "score": "reward:double reward_parts:string success:bool score_status:string",
    "advantage": """
        shaped_reward:double advantages:float* returns:float* values:float* old_logprobs:float* ref_logprobs:float*
        kept:bool drop_reason:string""",
}
NULLABLE = [
    "policy_version", "policy_digest", "prompt_ids", "response_ids", "loss_mask", "rollout_logprobs", "prompt",
    "response", "messages", "turns", "error", "prompt_tokens", "completion_tokens", "metadata", "reward",
    "success", "shaped_reward", "advantages", "returns", "values", "old_logprobs", "ref_logprobs", "drop_reason",
]  # fmt: skip


def trajectory(**changes):
    """Return a row that keeps every promise: two sampled tokens with an observed one between them."""
    return dataclasses.replace(
        Trajectory(
            trajectory_id="t0", group_id="g0", sample=0, env="tool_use", task_id="k0", split="train", seed=2**62 + 1,
            policy_version=3, policy_digest="d0", temperature=0.7, top_p=1.0, top_k=0, logprobs_mode="processed",
            prompt_ids=np.array([1, 2], np.int32),
            response_ids=np.array([3, 4, 5], np.int32),
            loss_mask=np.array([1, 0, 1], np.int8),
            rollout_logprobs=np.array([-0.5, np.nan, -0.25], np.float32),
            prompt="ab", response="cde",
            messages=[{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}],
            turns=[
                Turn(action="c", observation="d", reward=0.5, done=False, first_token=0, token_count=1,
                     tool_calls=[ToolCall(tool="search", args={"q": "d"}, result="d", ok=True)]),
                Turn(action="e", observation="", done=True, first_token=2, token_count=1),
            ],
            status="completed", stop_reason="stop", trainable=True, prompt_tokens=2, completion_tokens=2,
            metadata={"ground_truth": "42"},
        ),
        **changes,
    )  # fmt: skip


def with_args(*args):
    """Return a row whose one turn made a tool call for each of these arguments."""
    calls = [ToolCall(tool="t", args=value, ok=False, error="malformed") for value in args]
    return trajectory(turns=[Turn(action="", observation="", done=True, tool_calls=calls)])


def args_of(row):
    return [call.args for call in row.turns[0].tool_calls]


def scored(**changes):
    return to_table([trajectory(reward=1.0, success=True, score_status="scored", **changes)], "score")


def with_advantages(**changes):
    """Return a table of one kept row as `advantage` writes it."""
    table = scored()
    columns = {
        "shaped_reward": 1.0, "advantages": [0.5, 0.0, 0.5], "returns": None, "values": None, "old_logprobs": None,
        "ref_logprobs": None, "kept": True, "drop_reason": None,
    } | changes  # fmt: skip
    schema = schema_of("advantage")
    arrays = [pa.array([value], schema.field(name).type) for name, value in columns.items()]
    return pa.Table.from_arrays([*table.columns, *arrays], schema=schema)


def with_column(table, name, values):
    """Return the table with one column's values replaced and its schema unchanged, as a careless writer would."""
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), pa.array(values, table.schema.field(index).type))


def through_parquet(table):
    file = io.BytesIO()
    pq.write_table(table, file)
    return pq.read_table(pa.BufferReader(file.getvalue()), use_threads=False)


def assert_same_rows(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        for field in dataclasses.fields(Trajectory):
            value, wanted = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(wanted, np.ndarray):
                assert value.dtype == wanted.dtype, field.name
                np.testing.assert_array_equal(value, wanted, err_msg=field.name)
            elif field.name == "turns":
                assert [dataclasses.replace(turn, tool_calls=list(turn.tool_calls)) for turn in wanted] == value
            else:
                assert value == wanted, field.name


# The columns


def test_names_order_and_types_are_those_of_the_design():
    def word(of):
        if pa.types.is_list(of):
            return "struct*" if pa.types.is_struct(of.value_type) else f"{of.value_type}*"
        return str(of)

    found = {
        stage: [f"{column.name}:{word(column.type)}" for column in COLUMNS if column.stage == stage] for stage in DESIGN
    }
    assert found == {stage: columns.split() for stage, columns in DESIGN.items()}
    assert [column.stage for column in COLUMNS] == [stage for stage in DESIGN for _ in DESIGN[stage].split()]


def test_a_turn_holds_what_the_design_says():
    turn = schema_of("rollout").field("turns").type.value_type
    assert " ".join(f"{field.name}:{field.type}" for field in turn) == (
        "action:string observation:string reward:double done:bool tool_calls:string first_token:int32 token_count:int32"
    )


def test_columns_come_with_the_stage_that_fills_them():
    count = {stage: len(columns.split()) for stage, columns in DESIGN.items()}
    assert len(columns_of("rollout")) == count["rollout"]
    assert len(columns_of("score")) == count["rollout"] + count["score"]
    assert len(columns_of("advantage")) == sum(count.values())
    assert columns_of("eval") == columns_of("score")


def test_only_what_may_be_unknown_is_nullable():
    assert [column.name for column in COLUMNS if column.nullable] == NULLABLE
    assert [field.name for field in schema_of("advantage") if field.nullable] == NULLABLE


def test_every_column_says_what_it_means():
    assert all(column.meaning for column in COLUMNS)


def test_the_schema_carries_its_version():
    for stage in ("rollout", "score", "advantage", "eval"):
        assert schema_of(stage).metadata == {SCHEMA_KEY: str(SCHEMA_VERSION).encode()}
    assert to_table([trajectory()]).schema.metadata == {SCHEMA_KEY: str(SCHEMA_VERSION).encode()}


# A row goes into a table and comes back


def test_a_row_comes_back_as_it_was():
    row = trajectory()
    assert_same_rows(from_table(through_parquet(to_table([row]))), [row])


def test_a_scored_row_comes_back_as_it_was():
    row = trajectory(reward=0.1, reward_parts={"answer": 0.0, "judge": None}, success=False, score_status="scored")
    assert_same_rows(from_table(through_parquet(to_table([row], "score"))), [row])


def test_a_row_without_tokens_comes_back_without_tokens():
    row = trajectory(
        prompt_ids=None, response_ids=None, loss_mask=None, rollout_logprobs=None, trainable=False, policy_version=None,
        policy_digest=None, turns=(), messages=[], metadata={}, prompt="", response="",
    )  # fmt: skip
    found = next(from_table(through_parquet(to_table([row]))))
    assert_same_rows([found], [row])
    assert found.response_ids is None


def test_rows_with_and_without_tokens_stand_side_by_side():
    none = {"prompt_ids": None, "response_ids": None, "loss_mask": None, "rollout_logprobs": None, "trainable": False}
    empty = {"response_ids": np.int32([]), "loss_mask": np.int8([]), "rollout_logprobs": np.float32([])}
    rows = [
        trajectory(),
        trajectory(trajectory_id="t1", rollout_logprobs=None, logprobs_mode="recomputed"),
        trajectory(trajectory_id="t2", **none),
        trajectory(trajectory_id="t3", **empty),
        trajectory(trajectory_id="t4"),
    ]
    assert_same_rows(from_table(through_parquet(to_table(rows))), rows)


def test_no_rows_are_a_table_too():
    table = through_parquet(to_table([]))
    check(table, "rollout")
    assert table.schema.equals(schema_of("rollout"), check_metadata=True)
    assert list(from_table(table)) == []


def test_rows_of_several_chunks_and_of_a_slice_are_the_right_ones():
    rows = [trajectory(trajectory_id=f"t{i}", response_ids=np.array([i, 4, 5], np.int32)) for i in range(6)]
    table = pa.concat_tables([to_table(rows[:2]), to_table(rows[2:])])
    assert_same_rows(from_table(table), rows)
    assert_same_rows(from_table(table.slice(1, 4)), rows[1:5])
    check(table.slice(1, 4), "rollout")


def test_the_last_action_is_that_of_the_last_turn():
    turns = [[Turn(action=f"{row}{i}", observation="", done=False) for i in range(row % 3)] for row in range(6)]
    rows = [trajectory(trajectory_id=f"t{i}", turns=of_row) for i, of_row in enumerate(turns)]
    expected = ["", "10", "21", "", "40", "51"]
    assert [row.last_action for row in rows] == expected
    table = through_parquet(pa.concat_tables([to_table(rows[:2]), to_table(rows[2:])]))
    assert [row.last_action for row in from_table(table)] == expected
    assert [row.last_action for row in from_table(table.slice(1, 4))] == expected[1:5]
    found = next(from_table(table.slice(2)))
    assert dataclasses.replace(found, turns=turns[5]).last_action == "51"
    assert pickle.loads(pickle.dumps(found)).last_action == "21"
    gone = pa.nulls(6, table.schema.field("turns").type)
    assert {
        row.last_action for row in from_table(table.set_column(table.column_names.index("turns"), "turns", gone))
    } == {""}


def test_copies_of_a_row_have_what_was_changed_in_it():
    (row,) = from_table(to_table([trajectory()]))
    assert copy.copy(row) == row
    row.messages.append({"role": "user", "content": "more"})
    for made in (copy.copy(row), copy.deepcopy(row), pickle.loads(pickle.dumps(row)), dataclasses.replace(row)):
        assert made.messages[-1] == {"role": "user", "content": "more"}
        assert made.last_action == row.last_action


def test_rows_that_are_pickled_together_hold_their_fields_and_travel_as_few_bytes():
    rows = [trajectory(trajectory_id=f"t{i}", metadata={"n": i}) for i in range(200)]
    table = pa.concat_tables([to_table(rows[:150]), to_table(rows[150:])])
    data = pickle.dumps(list(from_table(table.slice(60, 70))))
    assert_same_rows(pickle.loads(data), rows[60:130])
    assert len(pickle.dumps(next(from_table(table)))) < 64 * 2000  # a piece, and not the table
    assert len(data) < 2.5 * len(pickle.dumps(next(from_table(table.slice(60, 70)))))
    asked = list(from_table(table.slice(60, 70)))
    assert {(one.trajectory_id, one.group_id, one.step_index) for one in asked}  # nobody can have changed these
    assert len(pickle.dumps(asked)) == len(data)
    again = pickle.loads(pickle.dumps(pickle.loads(data)[65]))
    assert_same_rows([again], [rows[125]])


def test_equal_values_have_one_text_and_numbers_that_compare_equal_keep_theirs():
    values = [{"a": value} for value in (0.0, -0.0, 0, False, 1, 1.0, True, None, float("nan"), "\ud800", "é")] * 2
    assert texts_of(values) == [to_json(value) for value in values]
    assert len(set(texts_of(values))) == 10  # NaN and None are one


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2.0}', "-0", "-0.0", "1e400", "NaN", "[1, Infinity]",
        '"\\ud800"', "123456789012345678901234567890",
        '{"\\u00e9": [true, null, "\\ud83d\\ude00"]}',
    ],
)  # fmt: skip
def test_json_is_read_as_python_reads_it(text):
    assert repr(from_json(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", ["", "[1,]", "01", '{"a": 1} x', '"a\x01b"', "[" * 100_000])
def test_what_is_no_json_is_refused_as_python_refuses_it(text):
    with pytest.raises((ValueError, RecursionError)):
        from_json(text)


def test_columns_of_advantage_are_left_aside():
    assert_same_rows(from_table(with_advantages()), from_table(scored()))


def test_a_log_prob_is_null_where_the_mask_is_0_whatever_stood_there():
    table = to_table([trajectory(rollout_logprobs=np.array([-0.5, -7.0, -0.25], np.float32))])
    assert table.column("rollout_logprobs").to_pylist() == [[-0.5, None, -0.25]]


def test_a_log_prob_keeps_every_bit():
    logprobs = np.array([np.float32(-1.1920929e-07), -0.0, np.nextafter(np.float32(-20), np.float32(0))], np.float32)
    row = trajectory(loss_mask=np.ones(3, np.int8), rollout_logprobs=logprobs)
    found = next(from_table(through_parquet(to_table([row])))).rollout_logprobs
    assert found.tobytes() == logprobs.tobytes()


# Text that no model should have written


def test_a_lone_surrogate_becomes_a_question_mark_in_text():
    row = trajectory(prompt="a\ud800b", response="\udfff", turns=[Turn(action="\udc80!", observation="ü", done=True)])
    found = next(from_table(through_parquet(to_table([row]))))
    assert (found.prompt, found.response, found.turns[0].action, found.turns[0].observation) == ("a?b", "?", "?!", "ü")


def test_a_lone_surrogate_is_kept_in_json():
    row = trajectory(messages=[{"role": "user", "content": "a\ud800"}], metadata={"\udfff": "ü\ud800"})
    found = next(from_table(through_parquet(to_table([row]))))
    assert found.messages == row.messages
    assert found.metadata == row.metadata
    assert args_of(next(from_table(through_parquet(to_table([with_args({"q": "\ud800"})]))))) == [{"q": "\ud800"}]


def test_nul_is_a_character_like_any_other():
    row = trajectory(prompt="a\0b", response="\0", metadata={"\0": "\0"}, messages=[{"role": "user", "content": "\0"}])
    assert_same_rows(from_table(through_parquet(to_table([row]))), [row])


def test_other_languages_stay_readable_in_json():
    assert to_json({"ß": "数学🦊"}) == '{"ß": "数学🦊"}'


def test_text_that_utf8_can_hold_is_left_alone():
    text = "".join(chr(point) for point in (0, 0x7F, 0xD7FF, 0xE000, 0xFFFF, 0x10FFFF))
    assert clean_text(text) == text


# Pitfalls, case 18


def test_arguments_of_different_types_stand_side_by_side():
    args = [{"x": 1}, {"x": "1"}, {"x": 1.0}, {"x": None}, {"x": [1, "1"]}, {"a": 1}, {"b": 2}, "no object", 7, None]
    found = next(from_table(through_parquet(to_table([with_args(*args)]))))
    assert [to_json(value) for value in args_of(found)] == [to_json(value) for value in args]  # 1, 1.0 and "1" differ


def test_arguments_of_different_rows_gain_no_keys_from_each_other():
    rows = [with_args({"a": 1}), dataclasses.replace(with_args({"b": 2}), trajectory_id="t1")]
    assert [args_of(row) for row in from_table(through_parquet(to_table(rows)))] == [[{"a": 1}], [{"b": 2}]]


def test_integers_past_64_bits_keep_their_digits():
    args = [{"x": 2**63}, {"x": -(2**64)}, {"x": 10**4000 + 7}]
    assert args_of(next(from_table(through_parquet(to_table([with_args(*args)]))))) == args


def test_a_table_is_byte_equal_after_a_round_trip():
    rows = [
        with_args({"x": 1}, {"x": "1"}, {"x": "\ud800"}, {"x": 10**30}, {"b": 1, "a": 2}),
        trajectory(trajectory_id="t1", metadata={"z": 1, "a": [None, True, 0.1]}),
    ]
    table = to_table(rows)
    again = to_table(from_table(through_parquet(table)))
    assert again.equals(table)
    calls = table.column("turns").to_pylist()[0][0]["tool_calls"]
    assert again.column("turns").to_pylist()[0][0]["tool_calls"].encode() == calls.encode()
    # Keys stay in the order in which they were written.
    assert '{"b": 1, "a": 2}' in calls
    assert table.column("metadata")[1].as_py() == '{"z": 1, "a": [null, true, 0.1]}'


any_text = st.text(st.characters(codec=None), max_size=8)
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60)
@given(args=any_json, metadata=st.dictionaries(any_text, any_json, max_size=2), text=any_text)
def test_whatever_json_can_hold_comes_back(args, metadata, text):
    row = dataclasses.replace(with_args(args), metadata=metadata, response=text)
    found = next(from_table(to_table([row])))
    # JSON itself reads a high and a low surrogate in a row as one character.
    assert args_of(found) == [json.loads(json.dumps(args))]
    assert found.metadata == json.loads(json.dumps(metadata))
    assert found.response == "".join("?" if "\ud800" <= letter <= "\udfff" else letter for letter in text)


# Lists in flat buffers


def test_a_list_column_is_what_pyarrow_makes_of_python_lists():
    rows = [np.array([1, 2]), None, np.array([], np.int64), np.array([3])]
    found = list_column(rows, pa.int32())
    found.validate(full=True)
    assert found.equals(pa.array([[1, 2], None, [], [3]], found.type))
    assert found.type == pa.list_(pa.field("element", pa.int32()))


def test_an_element_is_null_where_it_is_not_valid():
    rows = [np.array([1.0, 2.0]), None, np.array([3.0])]
    found = list_column(rows, pa.float32(), [np.array([True, False]), None, np.array([False])])
    found.validate(full=True)
    assert found.to_pylist() == [[1.0, None], None, [None]]


@pytest.mark.parametrize("rows", [[], [None], [None, None], [np.array([])]])
def test_a_list_column_may_be_empty(rows):
    for valid in (None, rows):
        found = list_column(rows, pa.int8(), valid)
        found.validate(full=True)
        assert found.to_pylist() == [None if row is None else [] for row in rows]


def test_lists_come_back_as_views_of_the_column():
    array = pa.array([[1, 2], None, [], [3]], pa.list_(pa.int32()))
    found = row_arrays(array)
    assert [None if row is None else row.tolist() for row in found] == [[1, 2], None, [], [3]]
    assert np.shares_memory(found[0], array.values.to_numpy())


def test_null_elements_come_back_as_nan_or_0():
    floats = row_arrays(pa.array([[1.0, None]], pa.list_(pa.float32())))[0]
    np.testing.assert_array_equal(floats, np.array([1.0, np.nan], np.float32))
    assert floats.dtype == np.float32
    integers = flat_values(pa.array([[1, None]], pa.list_(pa.int8())))
    assert (integers.tolist(), integers.dtype) == ([1, 0], np.int8)


def test_lists_of_a_slice_and_of_chunks_are_the_right_ones():
    of = pa.list_(pa.int32())
    sliced = pa.array([[9], [1, 2], None, [3]], of).slice(1, 2)
    assert [None if row is None else row.tolist() for row in row_arrays(sliced)] == [[1, 2], None]
    chunked = pa.chunked_array([pa.array([[1]], of), pa.array([None, [2, 3]], of)])
    assert [None if row is None else row.tolist() for row in row_arrays(chunked)] == [[1], None, [2, 3]]
    assert row_arrays(pa.chunked_array([], of)) == []


# What is refused


def test_good_tables_pass():
    check(to_table([trajectory()]), "rollout")
    check(scored(), "score")
    check(scored(), "eval")
    check(with_advantages(), "advantage")
    check(with_advantages(kept=False, drop_reason="overlong", advantages=None), "advantage")
    check(with_advantages(returns=[1.0, 0.0, 1.0], values=[0.0] * 3, old_logprobs=[-1.0, 0.0, -1.0]), "advantage")


@pytest.mark.parametrize("name", [name for name in PER_RESPONSE_TOKEN if name != "rollout_logprobs"])
@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_list_of_another_length_than_the_response_is_refused(name, length):
    table = with_column(with_advantages(), name, [[1] * length])
    with pytest.raises(InputError, match=f"row 0: `{name}` has {length} elements and response_ids 3"):
        check(table, "advantage")


@pytest.mark.parametrize("logprobs", [[], [-0.5, None], [-0.5, None, -0.25, None]])
def test_log_probs_of_another_length_than_the_response_are_refused(logprobs):
    with pytest.raises(InputError, match=f"row 0: `rollout_logprobs` has {len(logprobs)} elements and response_ids 3"):
        check(with_column(to_table([trajectory()]), "rollout_logprobs", [logprobs]), "rollout")


def test_the_row_is_counted_across_chunks():
    table = pa.concat_tables([to_table([trajectory(trajectory_id=f"t{i}")]) for i in range(3)])
    bad = with_column(table.slice(2), "loss_mask", [[1]])
    with pytest.raises(InputError, match="row 2: `loss_mask` has 1 elements"):
        check(pa.concat_tables([table.slice(0, 2), bad]), "rollout")


def test_lengths_that_agree_only_in_sum_are_refused():
    table = to_table([trajectory(), trajectory(trajectory_id="t1")])
    with pytest.raises(InputError, match="row 0: `loss_mask` has 2 elements"):
        check(with_column(table, "loss_mask", [[1, 0], [1, 1, 0, 1]]), "rollout")


@pytest.mark.parametrize("name", [name for name in TOKEN_COLUMNS if name != "rollout_logprobs"])
def test_only_log_probs_may_have_a_null_element(name):
    with pytest.raises(InputError, match=f"column `{name}` has a null element"):
        check(with_column(with_advantages(), name, [[1, None, 1]]), "advantage")


@pytest.mark.parametrize(
    "logprobs",
    [[-0.5, -0.1, -0.25], [None, None, -0.25], [None, -0.1, None], [None, None, None]],
    ids=["set on an observed token", "null on a sampled token", "the wrong way round", "all null"],
)
def test_log_probs_are_null_exactly_where_the_mask_is_0(logprobs):
    with pytest.raises(InputError, match="`rollout_logprobs` is null on a sampled token, or set on an observed one"):
        check(with_column(to_table([trajectory()]), "rollout_logprobs", [logprobs]), "rollout")


@pytest.mark.parametrize("name", ["prompt_ids", "response_ids", "loss_mask"])
def test_a_row_without_tokens_is_not_trainable(name):
    table = to_table([trajectory(), trajectory(trajectory_id="t1")])
    whole, missing = table.slice(0, 1), with_column(table.slice(1), name, [None])
    if name == "response_ids":
        missing = with_column(with_column(missing, "loss_mask", [None]), "rollout_logprobs", [None])
    with pytest.raises(InputError, match=f"row 1 is trainable but has no `{name}`"):
        check(pa.concat_tables([whole, missing]), "rollout")


def test_a_trainable_row_may_lack_log_probs():
    check(to_table([trajectory(rollout_logprobs=None, logprobs_mode="recomputed")]), "rollout")


@pytest.mark.parametrize("reason", STOP_REASONS)
@pytest.mark.parametrize("status", STATUSES)
def test_status_and_stop_reason_go_together(status, reason):
    fitting = {
        ("completed", "stop"), ("truncated", "length"), ("truncated", "max_input_length"),
        ("truncated", "max_sequence_length"), ("max_turns", "max_turns"), ("failed", "error"),
    }  # fmt: skip
    row = trajectory(status=status, stop_reason=reason, error="boom" if status == "failed" else None)
    if (status, reason) in fitting:
        assert to_table([row]).num_rows == 1
        return
    with pytest.raises(InputError, match=f"row 0 has status `{status}` with stop_reason `{reason}`") as error:
        to_table([row])
    assert error.value.hint == f"It must be `{STOP_REASONS[reason]}`"


@pytest.mark.parametrize("name", ["status", "stop_reason", "logprobs_mode", "score_status"])
def test_an_unknown_word_is_refused(name):
    with pytest.raises(InputError, match=f"column `{name}` holds `bananas`") as error:
        check(with_column(scored(), name, ["bananas"]), "score")
    assert "It must be one of" in error.value.hint


@pytest.mark.parametrize("name", [column.name for column in COLUMNS if not column.nullable])
def test_a_null_row_is_refused_where_the_schema_has_none(name):
    table = pa.concat_tables([with_advantages(), with_column(with_advantages(), name, [None])])
    with pytest.raises(InputError, match=f"column `{name}` is null in row 1"):
        check(table, "advantage")


@pytest.mark.parametrize("name", NULLABLE)
def test_a_null_row_is_let_pass_where_the_schema_has_some(name):
    left_out = with_advantages(kept=False, advantages=None, drop_reason="untrainable")
    if name == "drop_reason":
        left_out = with_advantages()
    with_untrainable = with_column(left_out, "trainable", [False])
    if name == "response_ids":  # nothing can be as long as what is not there
        for other in PER_RESPONSE_TOKEN:
            with_untrainable = with_column(with_untrainable, other, [None])
    if name == "loss_mask":
        with_untrainable = with_column(with_untrainable, "rollout_logprobs", [None])
    check(with_column(with_untrainable, name, [None]), "advantage")


def test_two_rows_may_not_share_trajectory_and_step():
    with pytest.raises(InputError, match=r"two rows share \(trajectory_id, step_index\)"):
        to_table([trajectory(), trajectory()])


def test_two_steps_of_one_trajectory_are_two_rows():
    table = to_table([trajectory(is_last_step=False), trajectory(step_index=1)])
    assert table.column("is_last_step").to_pylist() == [False, True]


def test_a_missing_column_is_named():
    with pytest.raises(InputError, match="column `loss_mask` is missing"):
        check(to_table([trajectory()]).drop_columns(["loss_mask"]), "rollout")
    with pytest.raises(InputError, match="column `reward` is missing"):
        check(to_table([trajectory()]), "score")


def test_a_column_too_many_is_named():
    with pytest.raises(InputError, match="column `note` is not known here"):
        check(to_table([trajectory()]).append_column("note", [["x"]]), "rollout")
    with pytest.raises(InputError, match="column `reward` is not known here"):
        check(scored(), "rollout")


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("seed", pa.int32()),
        ("prompt", pa.large_string()),
        ("response_ids", pa.list_(pa.int64())),
        ("rollout_logprobs", pa.list_(pa.float64())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("turns", pa.string()),
    ],
)
def test_a_column_of_another_type_is_named_with_both_types(name, of):
    table = to_table([trajectory()])
    index = table.schema.get_field_index(name)
    with pytest.raises(InputError, match=f"column `{name}` is {str(of).split('<')[0]}.*, not "):
        check(table.set_column(index, pa.field(name, of), pa.nulls(1, of)), "rollout")


def test_a_score_table_needs_a_score_status():
    with pytest.raises(InputError, match="column `score_status` is null in row 0"):
        to_table([trajectory()], "score")


def test_every_drop_reason_is_let_pass():
    for reason in DROP_REASONS:
        check(with_advantages(kept=False, drop_reason=reason, advantages=None), "advantage")


# What the meanings of the columns promise


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": np.array([1, 0], np.int8)},
        {"rollout_logprobs": np.array([-0.5], np.float32)},
        {"loss_mask": None},
    ],
    ids=["short mask", "short rollout_logprobs", "no mask"],
)
def test_a_row_whose_mask_does_not_fit_its_log_probs_is_an_input_error(changes):
    with pytest.raises(InputError):
        to_table([trajectory(**changes)])


@pytest.mark.parametrize(
    "changes",
    [
        {"response_ids": None},
        {"response_ids": None, "rollout_logprobs": None},
    ],
    ids=["mask and log-probs without a response", "mask without a response"],
)
def test_a_list_beside_no_response_is_refused(changes):
    with pytest.raises(InputError):
        to_table([trajectory(trainable=False, **changes)])


@pytest.mark.parametrize("logprobs", [[-0.5, None, -0.25], [-0.5, -0.1, -0.25]])
def test_log_probs_without_a_mask_are_refused(logprobs):
    table = to_table([trajectory(trainable=False, loss_mask=None, rollout_logprobs=None)])
    with pytest.raises(InputError):
        check(with_column(table, "rollout_logprobs", [logprobs]), "rollout")


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_mask": np.array([2, 0, 1], np.int8)},
        {"rollout_logprobs": np.array([np.nan, np.nan, -0.25], np.float32)},
        {"rollout_logprobs": np.array([0.5, np.nan, -0.25], np.float32)},
        {"split": "bananas"},
        {"error": "boom"},
        {"status": "failed", "stop_reason": "error"},
    ],
    ids=["mask of 2", "NaN sampled", "log-prob above 0", "split", "error without failed", "failed without error"],
)
def test_a_rollout_row_that_contradicts_the_meaning_of_its_columns_is_refused(changes):
    with pytest.raises(InputError):
        to_table([trajectory(**changes)])


@pytest.mark.parametrize(
    "changes",
    [
        {"advantages": [0.5, 9.0, 0.5]},
        {"advantages": None},
        {"kept": False, "drop_reason": "overlong"},
        {"kept": False, "advantages": None},
        {"kept": False, "advantages": None, "drop_reason": "bananas"},
        {"drop_reason": "overlong"},
    ],
    ids=["observed", "kept without", "dropped with", "dropped without reason", "unknown reason", "kept with reason"],
)
def test_an_advantage_row_that_contradicts_the_meaning_of_its_columns_is_refused(changes):
    with pytest.raises(InputError):
        check(with_advantages(**changes), "advantage")

"""`alfworld_lite`: rooms by seed, ALFWorld's commands and words, an expert that sees only observations."""

import copy
import json
import random

import pytest
from worlds import check_determinism, play

from nanoskyrl.envs.worlds.alfworld.environment import AlfworldLite, AlfworldLiteConfig, world_of
from nanoskyrl.envs.worlds.alfworld.expert import expert, read_task, solve
from nanoskyrl.envs.worlds.alfworld.rooms import MAX_LEVEL, TASK_TYPES, make_world, plots, types_of
from nanoskyrl.envs.worlds.alfworld.things import BELONGINGS, CONTAINS, OPENABLE, ROOMS
from nanoskyrl.envs.worlds.alfworld.world import NOTHING, Goal, World, kind_of, listed, parse
from nanoskyrl.stages.core.errors import SettingsError

SEEDS = 300


def kitchen(task_type: str = "pick_heat_then_place_in_recep", obj: str = "mug", recep: str = "cabinet") -> World:
    return World(
        Goal(task_type, obj, recep, "put a hot mug in cabinet"),
        {
            "cabinet 1": [], "countertop 1": ["mug 1", "knife 1", "apple 1"], "microwave 1": ["egg 1"],
            "fridge 1": [], "sinkbasin 1": [], "sidetable 1": ["desklamp 1", "mug 2"], "drawer 1": ["pen 1"],
        },
    )  # fmt: skip


def feedback(world: World, *commands: str) -> list[str]:
    return [world.act(command) for command in commands]


@pytest.mark.parametrize(("level", "task_type"), [(n, t) for n in range(1, MAX_LEVEL + 1) for t in types_of(n)])
def test_the_expert_solves_every_generated_task(level, task_type):
    longest = 0
    for seed in range(SEEDS):
        world = make_world(task_type, level, seed)
        assert not world.won()
        commands = solve(world, 50)
        assert world.won(), (seed, commands)
        longest = max(longest, len(commands))
    assert longest <= 30  # far from ALFWorld's limit of 50, so that a slower player can win, too


@pytest.mark.parametrize("task_type", TASK_TYPES)
def test_the_expert_sees_only_what_a_player_sees(task_type):
    """Played through texts alone, with a world on the other side that the expert never holds."""
    for seed in range(40):
        world = make_world(task_type, MAX_LEVEL, seed)
        player = expert(world.intro())
        command = next(player)
        known = set(world.inside)
        for _ in range(50):
            # It names only receptacles of the first text, and objects that a feedback has shown.
            for name in parse(command)[1:]:
                assert not name or name in known, command
            text = world.act(command)
            assert text != NOTHING
            known |= {word.strip(".") for word in text.replace(" and ", " ").replace(",", "").split(" a ")}
            if world.won():
                break
            command = player.send(text)
        assert world.won()


def test_nothing_wanted_lies_in_its_place_and_everything_lies_where_it_fits():
    for task_type in TASK_TYPES:
        for seed in range(SEEDS):
            world = make_world(task_type, MAX_LEVEL, seed)
            for receptacle, things in world.inside.items():
                for thing in things:
                    if kind_of(thing) != "desklamp":
                        assert kind_of(thing) in CONTAINS[kind_of(receptacle)]
                    assert not (kind_of(thing) == world.goal.obj and kind_of(receptacle) == world.goal.recep)
            names = [thing for things in world.inside.values() for thing in things]
            assert len(names) == len(set(names))


def test_most_of_what_is_wanted_at_the_highest_level_is_behind_a_door():
    behind = 0
    for seed in range(SEEDS):
        world = make_world("pick_and_place_simple", MAX_LEVEL, seed)
        holders = [name for name, things in world.inside.items() if any(kind_of(t) == world.goal.obj for t in things)]
        behind += all(kind_of(name) in OPENABLE for name in holders)
    assert behind > SEEDS / 3


def test_every_plot_can_be_furnished():
    for task_type in TASK_TYPES:
        assert len(plots(task_type)) > 20
        for plot in plots(task_type):
            assert plot.obj in BELONGINGS[plot.room]
            assert plot.recep == "desklamp" or plot.recep in ROOMS[plot.room]


def test_feedback_has_alfworlds_words():
    assert feedback(
        kitchen(), "go to microwave 1", "open microwave 1", "take egg 1 from microwave 1",
        "heat egg 1 with microwave 1", "examine egg 1", "close microwave 1", "inventory", "look",
        "go to cabinet 1", "open cabinet 1",
        "go to countertop 1", "move egg 1 to countertop 1", "examine countertop 1", "take mug 1 from countertop 1",
        "examine mug 1",
    ) == [
        "You arrive at microwave 1. The microwave 1 is closed.",
        "You open the microwave 1. The microwave 1 is open. In it, you see a egg 1.",
        "You pick up the egg 1 from the microwave 1.",
        "You heat the egg 1 using the microwave 1.",
        "This is a hot egg 1.",
        "You close the microwave 1.",
        "You are carrying: a egg 1.",
        "You are facing the microwave 1. Next to it, you see nothing.",
        "You arrive at cabinet 1. The cabinet 1 is closed.",
        "You open the cabinet 1. The cabinet 1 is open. In it, you see nothing.",
        "You arrive at countertop 1. On the countertop 1, you see a mug 1, a knife 1, and a apple 1.",
        "You move the egg 1 to the countertop 1.",
        "On the countertop 1, you see a mug 1, a knife 1, a apple 1, and a egg 1.",
        "You pick up the mug 1 from the countertop 1.",
        "This is a normal mug 1. In it, you see nothing.",
    ]  # fmt: skip
    assert (
        kitchen()
        .intro()
        .startswith(
            "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you"
        )
    )
    assert listed(["pen 1", "mug 2"]) == "a pen 1, and a mug 2"


@pytest.mark.parametrize(
    ("before", "command"),
    [
        ([], "take mug 1 from countertop 1"),  # not there
        ([], "open cabinet 1"),
        (["go to cabinet 1"], "go to cabinet 1"),  # there already
        (["go to drawer 1"], "take pen 1 from drawer 1"),  # closed
        (["go to drawer 1"], "examine pen 1"),  # not seen
        (["go to countertop 1", "take mug 1 from countertop 1"], "take knife 1 from countertop 1"),  # hands full
        (["go to countertop 1", "take mug 1 from countertop 1", "go to cabinet 1"], "move mug 1 to cabinet 1"),
        (["go to countertop 1", "take knife 1 from countertop 1", "go to fridge 1", "open fridge 1"],
         "move knife 1 to fridge 1"),  # does not fit
        (["go to countertop 1", "take mug 1 from countertop 1"], "move mug 2 to countertop 1"),  # not in hand
        (["go to countertop 1", "take mug 1 from countertop 1"], "heat mug 1 with microwave 1"),  # not there
        (["go to countertop 1", "take knife 1 from countertop 1", "go to microwave 1"],
         "heat knife 1 with microwave 1"),
        (["go to countertop 1", "take mug 1 from countertop 1", "go to fridge 1"], "heat mug 1 with fridge 1"),
        (["go to sidetable 1"], "take desklamp 1 from sidetable 1"),
        (["go to sidetable 1"], "use mug 2"),
        (["go to countertop 1"], "slice apple 1 with knife 1"),  # not in hand
        (["go to countertop 1"], "close countertop 1"),
        ([], "put mug 1 in/on cabinet 1"),  # the words of versions before 0.4
        ([], "look around"), ([], "take"), ([], "take from"), ([], "go to"), ([], "examine"), ([], ""),
    ],
)  # fmt: skip
def test_what_cannot_be_done_changes_nothing(before, command):
    world, twin = kitchen(), kitchen()
    feedback(world, *before)
    feedback(twin, *before)
    assert world.act(command) == NOTHING
    assert world == twin


def test_heating_and_cooling_need_no_open_door_and_undo_each_other():
    world = kitchen()
    feedback(world, "go to countertop 1", "take apple 1 from countertop 1", "go to microwave 1")
    assert world.act("heat apple 1 with microwave 1") == "You heat the apple 1 using the microwave 1."
    assert world.hot == {"apple 1"}
    assert feedback(world, "go to fridge 1", "cool apple 1 with fridge 1")[1].startswith("You cool the apple 1")
    assert (world.hot, world.cool) == (set(), {"apple 1"})
    assert world.act("examine apple 1") == "This is a cold apple 1."
    feedback(world, "go to sinkbasin 1", "clean apple 1 with sinkbasin 1")
    assert world.act("examine apple 1") == "This is a cool and clean apple 1."


def test_slicing_wants_a_knife_in_hand():
    world = kitchen()
    feedback(world, "go to countertop 1", "take knife 1 from countertop 1")
    assert world.act("slice apple 1 with knife 1") == "You sliced the apple 1 with the knife 1."
    assert world.act("examine apple 1") == "This is a sliced apple 1."
    assert world.act("slice mug 1 with knife 1") == NOTHING


def test_won_wants_the_state_as_well_as_the_place():
    world = kitchen()
    feedback(
        world, "go to countertop 1", "take mug 1 from countertop 1", "go to cabinet 1", "open cabinet 1",
        "move mug 1 to cabinet 1",
    )  # fmt: skip
    assert not world.won()
    feedback(
        world, "take mug 1 from cabinet 1", "go to microwave 1", "heat mug 1 with microwave 1", "go to cabinet 1",
        "move mug 1 to cabinet 1",
    )  # fmt: skip
    assert world.won()


def test_two_objects_count_only_in_one_receptacle():
    world = kitchen("pick_two_obj_and_place")
    world.inside = {"cabinet 1": ["mug 1"], "cabinet 2": ["mug 2"]}
    assert not world.won()
    world.inside = {"cabinet 1": ["mug 1", "mug 2"], "cabinet 2": []}
    assert world.won()


def test_looking_in_the_light_wants_the_thing_in_hand_where_the_lamp_burns():
    world = kitchen("look_at_obj_in_light", "mug", "desklamp")
    feedback(world, "go to sidetable 1", "use desklamp 1")
    assert not world.won()
    feedback(world, "take mug 2 from sidetable 1")
    assert world.won()
    feedback(world, "go to drawer 1")
    assert not world.won()


CHANGES = ("go to", "open", "close", "take", "move", "use", "heat", "clean", "cool", "slice")
JOINED = {"take": "from", "move": "to", "heat": "with", "clean": "with", "cool": "with", "slice": "with"}


@pytest.mark.parametrize("seed", range(24))
def test_admissible_commands_are_exactly_those_that_do_something(seed):
    """A walk of the expert's, and at each step all that is offered, and a sample of all that could be said."""
    rng = random.Random(seed)
    task_type = TASK_TYPES[seed % 6]
    world = make_world(task_type, 4, seed)
    objects = sorted(thing for things in world.inside.values() for thing in things)
    names = [*world.inside, *objects]
    for command in solve(make_world(task_type, 4, seed), 50):
        offered = world.admissible()
        assert command in offered
        assert len(offered) == len(set(offered))
        for choice in offered:
            assert copy.deepcopy(world).act(choice) != NOTHING
        for _ in range(60):
            verb = rng.choice(CHANGES)
            said = f"{verb} {rng.choice(names)}" + (f" {JOINED[verb]} {rng.choice(names)}" if verb in JOINED else "")
            twin = copy.deepcopy(world)
            if said not in offered:
                assert twin.act(said) == NOTHING
                assert twin == world
        assert world.act(command) != NOTHING
        there = [thing for things in world.inside.values() for thing in things]
        assert sorted([*there, *([world.holding] if world.holding else [])]) == objects  # nothing is lost or doubled


def test_a_number_acts_only_where_commands_are_offered():
    shown, hidden = (AlfworldLite(AlfworldLiteConfig(admissible=on)) for on in (True, False))
    task = shown.tasks("train")[0]
    target = next(i for i, c in enumerate(world_of(task).admissible(), 1) if kind_of(c.removeprefix("go to "))
                  == world_of(task).goal.recep)  # fmt: skip
    for environment, moves in ((shown, True), (hidden, False)):
        episode = environment.start()
        text = episode.reset(task, 0).messages[0]["content"]
        assert ("1. go to" in text) is moves
        assert episode.step(f"<answer>{target}</answer>").observation.startswith("You arrive") is moves
        for number in ("0", "99", "-1", "²", "1" * 5000):
            assert episode.step(number).tool_calls[0].error == "malformed"


def test_the_summary_holds_what_was_seen_and_nothing_else():
    environment = AlfworldLite(AlfworldLiteConfig(level=4))
    for task in environment.tasks("train")[:24]:
        world, episode = world_of(task), environment.start()
        episode.reset(task, 0)
        shown = ""
        for command in environment.expert(task):
            step = episode.step(command)
            shown += step.observation
            objects = [thing for things in world.inside.values() for thing in things]
            assert all(thing in shown for thing in objects if f"a {thing}" in str(step.summary))
            assert f"{step.metadata['steps']} commands given." in str(step.summary)
        visited = [call for call in environment.expert(task) if "go to" in call]
        assert str(step.summary).count("you see") + str(step.summary).count("closed") == len(set(visited))


def test_the_step_limit_ends_the_game_and_is_not_a_win(make_trajectory):
    environment = AlfworldLite(AlfworldLiteConfig(max_steps=3))
    episode = environment.start()
    episode.reset(environment.tasks("train")[0], 0)
    steps = [episode.step("look") for _ in range(3)]
    assert [step.done for step in steps] == [step.truncated for step in steps] == [False, False, True]
    assert steps[-1].metadata == {"won": False, "steps": 3}
    score = environment.score(make_trajectory(metadata=steps[-1].metadata))
    assert (score.reward, score.success) == (0.0, False)


def test_levels_grow():
    steps = []
    for level in range(1, MAX_LEVEL + 1):
        environment = AlfworldLite(AlfworldLiteConfig(level=level, n_train=60))
        steps.append(sum(len(environment.expert(task)) for task in environment.tasks("train")))
    assert steps == sorted(steps)
    assert steps[0] == 120  # two commands each


def test_train_and_test_share_no_game():
    environment = AlfworldLite(AlfworldLiteConfig())
    intros = {split: {world_of(task).intro() for task in environment.tasks(split)} for split in ("train", "test")}
    assert len(intros["train"]) == 2048
    assert len(intros["test"]) == 512
    assert not intros["train"] & intros["test"]


def test_the_task_can_be_read_back_from_every_template():
    for task_type in TASK_TYPES:
        for seed in range(20):
            world = make_world(task_type, 3, seed)
            assert read_task(world.intro()) == (task_type, world.goal.obj, world.goal.recep)


@pytest.mark.parametrize(
    ("key", "values", "hint"),
    [
        ("level", {"level": 0}, "two steps to go"),
        ("level", {"level": 5}, "whole rooms"),
        ("task_types", {"task_types": ("pick_two_obj_and_place",)}, "level` to 3"),
        ("task_types", {"level": 3, "task_types": ("juggle",)}, "Choose from"),
        ("max_steps", {"max_steps": 0}, "The default is"),
        ("n_train", {"n_train": 0}, "The default is"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(key, values, hint):
    with pytest.raises(SettingsError, match=f"`alfworld_lite.{key}`") as caught:
        AlfworldLiteConfig(**values)
    assert hint in str(caught.value.hint)


def test_episodes_repeat_whatever_the_seed_of_the_trajectory():
    check_determinism(lambda: AlfworldLite(AlfworldLiteConfig(level=4)))


def test_the_expert_through_the_environment_is_rewarded(make_trajectory):
    environment = AlfworldLite(AlfworldLiteConfig(level=3))
    for task in environment.tasks("test")[:30]:
        steps = play(environment, task, environment.expert(task))
        assert steps[-1].done
        assert all(call.ok for step in steps for call in step.tool_calls)
        assert json.loads(json.dumps(steps[-1].metadata)) == {"won": True, "steps": len(steps)}
        assert environment.score(make_trajectory(metadata=steps[-1].metadata)).success

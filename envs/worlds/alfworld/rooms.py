"""Rooms of `alfworld_lite` with a goal in them, drawn from a seed.

A world is settled by task type, level and seed alone. At the start no object of the wanted
kind is where the goal wants it, and every one lies where it fits. Levels: at 1 the object
is in hand and two receptacles stand there; at 2 it lies open in one of three; at 3 the
room is small and all six task types come up; 4 is a whole room with more than one of many
things, and what is wanted is mostly behind a closed door.
"""

import random
from dataclasses import dataclass
from functools import cache

from nanoskyrl.envs.worlds.alfworld.things import (
    BELONGINGS,
    CLEANABLE,
    CONTAINS,
    COOLABLE,
    HEATABLE,
    LAMP_STANDS,
    OPENABLE,
    ROOMS,
)
from nanoskyrl.envs.worlds.alfworld.world import Goal, World, kind_of
from nanoskyrl.stages.core.digests import derive_seed

MAX_LEVEL = 4
TEMPLATES = {
    "pick_and_place_simple": ("put a {obj} in {recep}", "put some {obj} on {recep}"),
    "look_at_obj_in_light": ("look at {obj} under the {recep}", "examine the {obj} with the {recep}"),
    "pick_clean_then_place_in_recep": ("put a clean {obj} in {recep}", "clean some {obj} and put it in {recep}"),
    "pick_heat_then_place_in_recep": ("put a hot {obj} in {recep}", "heat some {obj} and put it in {recep}"),
    "pick_cool_then_place_in_recep": ("put a cool {obj} in {recep}", "cool some {obj} and put it in {recep}"),
    "pick_two_obj_and_place": ("put two {obj} in {recep}", "find two {obj} and put them in {recep}"),
}
TASK_TYPES = tuple(TEMPLATES)
_NEEDS = {
    "pick_clean_then_place_in_recep": ("sinkbasin", CLEANABLE),
    "pick_heat_then_place_in_recep": ("microwave", HEATABLE),
    "pick_cool_then_place_in_recep": ("fridge", COOLABLE),
}
HIDDEN_SHARE = 0.7
"""How often a wanted object of level 4 is put behind a door, where the room has one that it fits."""


@dataclass(frozen=True, slots=True)
class Plot:
    """What a task is about, before the room is furnished."""

    room: str
    obj: str
    recep: str


def types_of(level: int) -> tuple[str, ...]:
    """Return the task types that a level poses."""
    return TASK_TYPES if level > 2 else TASK_TYPES[:1]


@cache
def plots(task_type: str) -> tuple[Plot, ...]:
    """Return everything a task of this type can be about."""
    appliance, kinds = _NEEDS.get(task_type, (None, None))
    found = []
    for room, stands in ROOMS.items():
        if appliance is not None and appliance not in stands:
            continue
        for obj in BELONGINGS[room]:
            if kinds is not None and obj not in kinds:
                continue
            sure = [kind for kind, (least, _) in stands.items() if least and obj in CONTAINS[kind]]
            if task_type == "look_at_obj_in_light":
                if sure and any(stands.get(stand, (0, 0))[0] for stand in LAMP_STANDS):
                    found.append(Plot(room, obj, "desklamp"))
                continue
            targets = [kind for kind in stands if obj in CONTAINS[kind] and kind != appliance]
            found += [Plot(room, obj, recep) for recep in targets if set(sure) - {recep}]
    return tuple(found)


def make_world(task_type: str, level: int, seed: int) -> World:
    """Return the world of this task type, level and seed, before anything happened in it."""
    rng = random.Random(derive_seed("alfworld_lite", task_type, level, seed))
    plot = rng.choice(plots(task_type))
    text = rng.choice(TEMPLATES[task_type]).format(obj=plot.obj, recep=plot.recep)
    goal = Goal(task_type, plot.obj, plot.recep, text)
    return _small(rng, goal, plot, level) if level <= 2 else _room(rng, goal, plot, level)


def _small(rng: random.Random, goal: Goal, plot: Plot, level: int) -> World:
    """Two or three receptacles without doors, and one object, in hand or on one of them."""
    while plot.recep in OPENABLE or not _open_places(plot):
        plot = rng.choice(plots(goal.task_type))
    places = _open_places(plot)
    goal = Goal(goal.task_type, plot.obj, plot.recep, f"put a {plot.obj} in {plot.recep}")
    others = rng.sample(places, min(level, len(places)))
    names = [f"{kind} 1" for kind in rng.sample([plot.recep, *others], len(others) + 1)]
    world = World(goal, {name: [] for name in names})
    if level == 1:
        world.holding = f"{plot.obj} 1"
    else:
        world.inside[f"{others[0]} 1"].append(f"{plot.obj} 1")
    return world


def _open_places(plot: Plot) -> list[str]:
    """Return the other kinds of receptacles of the room that have no door and take the object."""
    kinds = [kind for kind in ROOMS[plot.room] if kind != plot.recep and kind not in OPENABLE]
    return [kind for kind in kinds if plot.obj in CONTAINS[kind]]


def _room(rng: random.Random, goal: Goal, plot: Plot, level: int) -> World:
    counts = {
        kind: rng.randint(least, most) if level > 3 else min(least, 1)
        for kind, (least, most) in ROOMS[plot.room].items()
    }
    if plot.recep in counts:
        counts[plot.recep] = max(1, counts[plot.recep])
    names = [f"{kind} {number}" for kind, count in counts.items() for number in range(1, count + 1)]
    rng.shuffle(names)
    world = World(goal, {name: [] for name in names})
    copies = 2 if goal.task_type == "pick_two_obj_and_place" else 1
    copies += level > 3 and rng.random() < 0.3
    elsewhere = [name for name in names if plot.obj in CONTAINS[kind_of(name)] and kind_of(name) != plot.recep]
    behind = [name for name in elsewhere if kind_of(name) in OPENABLE]
    for number in range(1, copies + 1):
        hidden = level > 3 and behind and rng.random() < HIDDEN_SHARE
        world.inside[rng.choice(behind if hidden else elsewhere)].append(f"{plot.obj} {number}")
    others = [kind for kind in BELONGINGS[plot.room] if kind != plot.obj]
    for kind in rng.sample(others, rng.randint(4, 6) if level == 3 else rng.randint(7, min(12, len(others)))):
        places = [name for name in names if kind in CONTAINS[kind_of(name)]]
        for number in range(1, 2 + (level > 3 and rng.random() < 0.3)):
            if places:
                world.inside[rng.choice(places)].append(f"{kind} {number}")
    stands = [name for name in names if kind_of(name) in LAMP_STANDS]
    if goal.recep == "desklamp":
        world.inside[rng.choice(stands)].append("desklamp 1")
    for things in world.inside.values():
        rng.shuffle(things)
    return world

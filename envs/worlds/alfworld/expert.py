"""Plays `alfworld_lite` from what the observations say, and from common sense about where things fit.

It never looks into a world: it reads the room and the task from the first text, goes to
one receptacle after another that could hold what it wants, opens those that are closed,
and remembers everything it has seen.
"""

import re
from collections.abc import Generator
from dataclasses import dataclass, field

from nanoskyrl.envs.worlds.alfworld.rooms import TEMPLATES
from nanoskyrl.envs.worlds.alfworld.things import CONTAINS, LAMP_STANDS, LAMPS
from nanoskyrl.envs.worlds.alfworld.world import World, kind_of

Play = Generator[str, str, None]
"""Yields commands, and is sent the feedback to each."""

_APPLIANCE = {
    "pick_clean_then_place_in_recep": ("clean", "sinkbasin"),
    "pick_heat_then_place_in_recep": ("heat", "microwave"),
    "pick_cool_then_place_in_recep": ("cool", "fridge"),
}
_THING = re.compile(r"\ba ([a-z]+ \d+)")


def solve(world: World, limit: int) -> list[str]:
    """Return the commands of the expert in this world, which is played to its end, at most `limit` of them."""
    play = expert(world.intro())
    commands: list[str] = []
    try:
        command = next(play)
        while len(commands) < limit:
            commands.append(command)
            feedback = world.act(command)
            if world.won():
                break
            command = play.send(feedback)
    except StopIteration:
        pass
    return commands


@dataclass(slots=True)
class _Memory:
    """What has been seen so far."""

    receptacles: list[str]
    at: dict[str, str] = field(default_factory=dict)
    """Receptacle by object."""
    looked: set[str] = field(default_factory=set)
    here: str | None = None

    def note(self, receptacle: str, feedback: str) -> None:
        self.looked.add(receptacle)
        _, _, seen = feedback.partition(", you see ")
        self.at |= dict.fromkeys(_THING.findall(seen), receptacle)

    def of_kind(self, kind: str, *, besides: set[str]) -> str | None:
        return next((thing for thing in self.at if kind_of(thing) == kind and thing not in besides), None)


def expert(intro: str) -> Play:
    """Play from the first text on until the task is done, or there is nowhere left to look."""
    task_type, obj, recep = read_task(intro)
    room, _, rest = intro.partition("Looking quickly around you, you see ")[2].partition(".")
    memory = _Memory(_THING.findall(room))
    carried = re.search(r"You are carrying: a ([a-z]+ \d+)", rest)
    if task_type == "look_at_obj_in_light":
        yield from _fetch(memory, obj, set())
        lamp = yield from _find(memory, recep, set())
        if lamp is not None:
            yield from _go(memory, memory.at[lamp])
            yield f"use {lamp}"
        return
    target = next((name for name in memory.receptacles if kind_of(name) == recep), None)
    placed: set[str] = set()
    for _ in range(2 if task_type == "pick_two_obj_and_place" else 1):
        thing = carried[1] if carried else (yield from _fetch(memory, obj, placed))
        if thing is None or target is None:
            return
        if task_type in _APPLIANCE:
            verb, kind = _APPLIANCE[task_type]
            appliance = next(name for name in memory.receptacles if kind_of(name) == kind)
            yield from _go(memory, appliance, look_inside=False)
            yield f"{verb} {thing} with {appliance}"
        yield from _go(memory, target)
        yield f"move {thing} to {target}"
        placed.add(thing)


def read_task(intro: str) -> tuple[str, str, str]:
    """Return task type, kind of object and kind of receptacle from the line that tells the task."""
    text = intro.partition("Your task is to: ")[2].split("\n")[0].strip().removesuffix(".")
    for task_type, templates in TEMPLATES.items():
        for template in templates:
            pattern = template.replace("{obj}", "([a-z]+)").replace("{recep}", "([a-z]+)")
            if found := re.fullmatch(pattern, text):
                return task_type, found[1], found[2]
    raise ValueError(f"no task in {text!r}")


def _fetch(memory: _Memory, kind: str, besides: set[str]) -> Generator[str, str, str | None]:
    """Find an object of this kind and pick it up; return its name."""
    thing = yield from _find(memory, kind, besides)
    if thing is not None:
        place = memory.at.pop(thing)
        yield from _go(memory, place)
        yield f"take {thing} from {place}"
    return thing


def _find(memory: _Memory, kind: str, besides: set[str]) -> Generator[str, str, str | None]:
    """Look into one receptacle after another until an object of this kind has been seen."""
    fits = LAMP_STANDS if kind in LAMPS else [name for name, kinds in CONTAINS.items() if kind in kinds]
    for place in memory.receptacles:
        if thing := memory.of_kind(kind, besides=besides):
            return thing
        if place not in memory.looked and kind_of(place) in fits:
            yield from _go(memory, place)
    return memory.of_kind(kind, besides=besides)


def _go(memory: _Memory, place: str, *, look_inside: bool = True) -> Generator[str, str, None]:
    """Go to a receptacle, unless one stands there already, and open it if it is closed."""
    if place == memory.here:
        return
    feedback = yield f"go to {place}"
    memory.here = place
    if look_inside:
        memory.note(place, (yield f"open {place}") if feedback.endswith("is closed.") else feedback)

"""The state of one room of `alfworld_lite`, ALFWorld's commands on it, and what they answer.

Commands, preconditions, effects and wording are those of ALFWorld 0.4
(alfworld/alfworld, `alfworld/data/alfred.pddl` and `alfred.twl2`), where
`move O to R` places an object. Whatever is not admissible answers "Nothing happens.".
Objects in closed receptacles are not seen and cannot be named.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nanoskyrl.envs.worlds.alfworld.things import (
    CLEANABLE,
    CONTAINS,
    COOLABLE,
    HEATABLE,
    KNIVES,
    LAMPS,
    MOVABLE_RECEPTACLES,
    OPENABLE,
    SLICEABLE,
)

NOTHING = "Nothing happens."
WELCOME = "-= Welcome to TextWorld, ALFRED! =-"
HELP = "\n".join(
    [
        "Available commands:",
        "  look:                             look around your current location",
        "  inventory:                        check your current inventory",
        "  go to (receptacle):               move to a receptacle",
        "  open (receptacle):                open a receptacle",
        "  close (receptacle):               close a receptacle",
        "  take (object) from (receptacle):  take an object from a receptacle",
        "  move (object) to (receptacle):    place an object in or on a receptacle",
        "  examine (something):              examine a receptacle or an object",
        "  use (object):                     use an object",
        "  heat (object) with (receptacle):  heat an object using a receptacle",
        "  clean (object) with (receptacle): clean an object using a receptacle",
        "  cool (object) with (receptacle):  cool an object using a receptacle",
        "  slice (object) with (object):     slice an object using a sharp object",
    ]
)
VERBS = (
    "look", "inventory", "help", "go to", "open", "close", "take", "move", "examine", "use", "heat", "clean", "cool",
    "slice",
)  # fmt: skip
_JOINED_BY = {
    "take": " from ", "move": " to ", "heat": " with ", "clean": " with ", "cool": " with ", "slice": " with ",
}  # fmt: skip
_APPLIANCES = {
    "heat": ("microwave", HEATABLE), "clean": ("sinkbasin", CLEANABLE), "cool": ("fridge", COOLABLE),
}  # fmt: skip
"""Verb to the kind of receptacle that does it, and the kinds of objects it does it to; neither needs it open."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be brought about."""

    task_type: str
    """One of ALFWorld's six."""
    obj: str
    """Kind of the object."""
    recep: str
    """Kind of the receptacle, or of the lamp."""
    text: str
    """As the player reads it."""


@dataclass(slots=True)
class World:
    """A room, what is in it, and the player."""

    goal: Goal
    inside: dict[str, list[str]]
    """Objects by receptacle, both by name, such as `mug 1` in `cabinet 2`; the order is the room's."""
    here: str | None = None
    """The receptacle that the player faces; None in the middle of the room."""
    holding: str | None = None
    opened: set[str] = field(default_factory=set)
    hot: set[str] = field(default_factory=set)
    cool: set[str] = field(default_factory=set)
    clean: set[str] = field(default_factory=set)
    sliced: set[str] = field(default_factory=set)
    lit: set[str] = field(default_factory=set)

    def intro(self) -> str:
        """Return what the player reads first."""
        carrying = f"\n\n{self.inventory()}" if self.holding else ""
        return f"{WELCOME}\n\n{self.look()}{carrying}\n\nYour task is to: {self.goal.text}."

    def act(self, command: str) -> str:
        """Carry out a command and return the feedback; `NOTHING` where it is not admissible."""
        verb, first, second = parse(command)
        match verb:
            case "look":
                return self.look()
            case "inventory":
                return self.inventory()
            case "help":
                return HELP
            case "go to" if first in self.inside and first != self.here:
                self.here = first
                return f"You arrive at {first}. {self.contents(first)}"
            case "open" if first == self.here and kind_of(first) in OPENABLE and first not in self.opened:
                self.opened.add(first)
                return f"You open the {first}. {self.contents(first)}"
            case "close" if first == self.here and first in self.opened:
                self.opened.remove(first)
                return f"You close the {first}."
            case "take" if second == self.here and first in self._takeable():
                self.inside[second].remove(first)
                self.holding = first
                return f"You pick up the {first} from the {second}."
            case "move" if self.holding == first and second == self.here and self._accepts(second):
                self.inside[second].append(first)
                self.holding = None
                return f"You move the {first} to the {second}."
            case "examine":
                return self._examine(first)
            case "use" if self.here and first in self.inside[self.here] and kind_of(first) in LAMPS:
                self.lit.add(first)  # ALFWorld's isToggled stays once it is set
                return f"You turn on the {first}."
            case "heat" | "clean" | "cool" if self.holding == first and second == self.here:
                return self._treat(verb, first, second)
            case "slice" if self._can_slice(first, second):
                self.sliced.add(first)
                return f"You sliced the {first} with the {second}."
        return NOTHING

    def _treat(self, verb: str, thing: str, receptacle: str) -> str:
        appliance, kinds = _APPLIANCES[verb]
        if kind_of(receptacle) != appliance or kind_of(thing) not in kinds:
            return NOTHING
        if verb == "clean":
            self.clean.add(thing)
        else:
            gained, lost = (self.hot, self.cool) if verb == "heat" else (self.cool, self.hot)
            gained.add(thing)
            lost.discard(thing)
        return f"You {verb} the {thing} using the {receptacle}."

    def admissible(self) -> list[str]:
        """Return every command that would change something now, sorted; look, inventory, examine and help aside."""
        return sorted(self._admissible())

    def _admissible(self) -> Iterator[str]:
        yield from (f"go to {name}" for name in self.inside if name != self.here)
        if self.here is None:
            return
        if kind_of(self.here) in OPENABLE:
            yield f"{'close' if self.here in self.opened else 'open'} {self.here}"
        yield from (f"take {thing} from {self.here}" for thing in self._takeable())
        if self.holding:
            if self._accepts(self.here):
                yield f"move {self.holding} to {self.here}"
            for verb, (appliance, kinds) in _APPLIANCES.items():
                if kind_of(self.here) == appliance and kind_of(self.holding) in kinds:
                    yield f"{verb} {self.holding} with {self.here}"
        for thing in self._visible():
            if kind_of(thing) in LAMPS:
                yield f"use {thing}"
            if self.holding and self._can_slice(thing, self.holding):
                yield f"slice {thing} with {self.holding}"

    def won(self) -> bool:
        """Say whether the goal holds now."""
        goal = self.goal
        if goal.task_type == "look_at_obj_in_light":
            here = self.inside[self.here] if self.here else []
            lamp = any(kind_of(thing) == goal.recep and thing in self.lit for thing in here)
            return lamp and self.holding is not None and kind_of(self.holding) == goal.obj
        state = {
            "pick_clean_then_place_in_recep": self.clean,
            "pick_heat_then_place_in_recep": self.hot,
            "pick_cool_then_place_in_recep": self.cool,
        }.get(goal.task_type)
        wanted = 2 if goal.task_type == "pick_two_obj_and_place" else 1
        return any(
            sum(kind_of(thing) == goal.obj and (state is None or thing in state) for thing in things) >= wanted
            for name, things in self.inside.items()
            if kind_of(name) == goal.recep
        )

    def _is_open(self, name: str) -> bool:
        return kind_of(name) not in OPENABLE or name in self.opened

    def _visible(self) -> list[str]:
        return self.inside[self.here] if self.here and self._is_open(self.here) else []

    def _takeable(self) -> list[str]:
        return [] if self.holding else [thing for thing in self._visible() if kind_of(thing) not in LAMPS]

    def _accepts(self, receptacle: str) -> bool:
        return self._is_open(receptacle) and kind_of(self.holding or "") in CONTAINS[kind_of(receptacle)]

    def _can_slice(self, thing: str, knife: str) -> bool:
        held = self.holding == knife and kind_of(knife) in KNIVES
        return held and thing in self._visible() and kind_of(thing) in SLICEABLE

    def contents(self, name: str) -> str:
        """Return what one sees of a receptacle that one faces."""
        if not self._is_open(name):
            return f"The {name} is closed."
        if kind_of(name) in OPENABLE:
            return f"The {name} is open. In it, you see {listed(self.inside[name])}."
        return f"On the {name}, you see {listed(self.inside[name])}."

    def look(self) -> str:
        """Return where one is."""
        if self.here is not None:
            return f"You are facing the {self.here}. Next to it, you see nothing."
        return f"You are in the middle of a room. Looking quickly around you, you see {listed(self.inside)}."

    def inventory(self) -> str:
        """Return what is carried."""
        return f"You are carrying: a {self.holding}." if self.holding else "You are not carrying anything."

    def _examine(self, name: str) -> str:
        if name == self.here and name in self.inside:
            return self.contents(name)
        if name != self.holding and name not in self._visible():
            return NOTHING
        kind = kind_of(name)
        if kind in MOVABLE_RECEPTACLES:
            return f"This is a normal {name}. In it, you see nothing."
        warmth = "hot" if name in self.hot else "cool" if name in self.cool else ""
        sliced = "sliced " if name in self.sliced else ""
        if name in self.clean:
            return f"This is a {warmth + ' and ' if warmth else ''}clean {sliced}{name}."
        if warmth:
            return f"This is a {'cold' if warmth == 'cool' and not sliced else warmth} {sliced}{name}."
        if kind in LAMPS:
            return f"This {name} is {'on' if name in self.lit else 'off'}."
        return f"This is a sliced {name}." if sliced else f"There's nothing special about {name}."


def kind_of(name: str) -> str:
    """Return the kind of a thing from its name: `mug 1` is a `mug`."""
    return name.rpartition(" ")[0]


def listed(names: list[str] | dict[str, list[str]]) -> str:
    """Return names as ALFWorld lists them: `a pen 1, a mug 2, and a book 1`; every article is `a`."""
    words = [f"a {name}" for name in names]
    if len(words) < 2:
        return words[0] if words else "nothing"
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def parse(command: str) -> tuple[str, str, str]:
    """Return verb and one or two names of a command; the verb is "" where it is none, a missing name is ""."""
    command = command.lower().strip()
    verb = next((verb for verb in VERBS if command == verb or command.startswith(f"{verb} ")), "")
    rest = command.removeprefix(verb).strip()
    first, _, second = rest.partition(_JOINED_BY[verb]) if verb in _JOINED_BY else (rest, "", "")
    if verb in ("look", "inventory", "help") and rest:
        return "", "", ""
    return verb, first.strip(), second.strip()

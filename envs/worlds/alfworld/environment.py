"""`alfworld_lite`: household tasks by text, with ALFWorld's commands, in pure Python.

The six task types, the commands, what they need and what they answer are ALFWorld's;
rooms are drawn by a seed, and what is wanted may lie behind a closed door. Success is
`won`, which is not the same as the episode being over. Level 1, two steps from the goal
with two commands to choose from, is for very small policies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from msgspec import Meta

from nanoskyrl.envs.base import Observation, Score, Step, Task
from nanoskyrl.envs.commands import ACTION, ACTION_END, command_of, record
from nanoskyrl.envs.worlds.alfworld.expert import solve
from nanoskyrl.envs.worlds.alfworld.rooms import MAX_LEVEL, TASK_TYPES, make_world, types_of
from nanoskyrl.envs.worlds.alfworld.world import NOTHING, World, parse
from nanoskyrl.envs.worlds.text_math.problems import is_test
from nanoskyrl.stages.core.checked import Checked, PositiveInt
from nanoskyrl.stages.core.digests import derive_seed
from nanoskyrl.stages.core.errors import SettingsError
from nanoskyrl.stages.core.trajectory import Trajectory

HOW = f"Give one command at a time in {ACTION}{ACTION_END} tags."
COMMANDS = (
    "Commands: go to R, open R, close R, take O from R, move O to R, use O, heat O with R, clean O with R, "
    "cool O with R, slice O with O, examine X, look, inventory."
)
DRAWS_PER_TASK = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AlfworldLiteConfig(Checked):
    """Which tasks are posed, and what the player is shown."""

    level: Annotated[int, Meta(ge=1, le=MAX_LEVEL)] = 1
    """1: two steps to go with two receptacles; three receptacles; small rooms and all task types; whole rooms."""
    task_types: tuple[str, ...] = ()
    """ALFWorld's names; none: all that the level poses, which below level 3 is pick_and_place_simple."""
    admissible: bool = True
    """Show after each observation, with numbers, the commands that would change something; a number then acts too."""
    max_steps: PositiveInt = 50
    """Commands after which the game is over, whatever they were; `rollout.max_turns` may end it earlier."""
    n_train: PositiveInt = 2048
    """Generated training tasks, at most."""
    n_test: PositiveInt = 512
    """Generated held-out tasks, at most."""

    def check(self) -> None:
        """Refuse task types that the level does not pose."""
        for kind in self.task_types:
            if kind not in types_of(self.level):
                raise SettingsError(
                    f"`alfworld_lite.task_types` holds `{kind}`, which level {self.level} does not pose",
                    hint=f"Choose from {', '.join(types_of(self.level))}"
                    + (", or set `alfworld_lite.level` to 3 or 4" if kind in TASK_TYPES else ""),
                )


@cache  # a loop asks again at every step
def games(task_types: tuple[str, ...], level: int, split: str, count: int) -> tuple[Task, ...]:
    """Return up to `count` tasks, types in turn; a room belongs to train or to test by its first text."""
    found: dict[str, Task] = {}
    for draw in range(DRAWS_PER_TASK * count):  # level 1 has some 2,000 games in all
        task_type = task_types[draw % len(task_types)]
        world_seed = derive_seed("alfworld_lite", split, draw)
        world = make_world(task_type, level, world_seed)
        intro = world.intro()
        if intro not in found and is_test(intro) == (split == "test"):
            found[intro] = Task(
                task_id=f"{task_type}-{level}-{len(found):06d}", split=split, prompt=world.goal.text,
                metadata={"kind": task_type, "level": level, "world_seed": world_seed},
            )  # fmt: skip
            if len(found) == count:
                break
    return tuple(found.values())


def world_of(task: Task) -> World:
    """Return the world of a task as it is at the start."""
    return make_world(task.metadata["kind"], task.metadata["level"], task.metadata["world_seed"])


@cache  # the scripted engine asks again at every turn
def _solution(task_type: str, level: int, world_seed: int, limit: int) -> tuple[str, ...]:
    return tuple(solve(make_world(task_type, level, world_seed), limit))


class AlfworldLite:
    """Rooms, things, and something to be done with them."""

    Config = AlfworldLiteConfig

    def __init__(self, config: AlfworldLiteConfig) -> None:
        """Keep the settings; rooms are made when they are asked for."""
        self.config = config

    def tasks(self, split: str) -> Sequence[Task]:
        """Return the tasks of `train` or `test`."""
        count = self.config.n_test if split == "test" else self.config.n_train
        return games(self.config.task_types or types_of(self.config.level), self.config.level, split, count)

    def start(self) -> "AlfworldLiteEpisode":
        """Return a fresh episode."""
        return AlfworldLiteEpisode(self.config)

    def score(self, trajectory: Trajectory) -> Score:
        """Reward 1 where the goal held at the end, else 0."""
        won = trajectory.metadata.get("won") is True
        return Score(reward=float(won), success=won, parts={"won": float(won)})

    def expert(self, task: Task) -> list[str]:
        """Return the commands of a player that sees only what every player sees."""
        where = task.metadata
        commands = _solution(where["kind"], where["level"], where["world_seed"], self.config.max_steps)
        return [f"{ACTION}{command}{ACTION_END}" for command in commands]


class AlfworldLiteEpisode:
    """One game."""

    def __init__(self, config: AlfworldLiteConfig) -> None:
        """Wait for a task."""
        self.config = config
        self.steps = 0
        self.world: World
        self.offered: list[str] = []
        self.seen: dict[str, str] = {}

    def reset(self, task: Task, seed: int) -> Observation:
        """Enter the room; it is the task's, whatever the seed."""
        self.world = world_of(task)
        self.steps, self.seen = 0, {}
        how = HOW if self.config.admissible else f"{COMMANDS}\n{HOW}"
        text = self._with_commands(f"{self.world.intro()}\n\n{how}")
        return Observation(messages=({"role": "user", "content": text},), metadata={"won": False, "steps": 0})

    def step(self, action: str) -> Step:
        """Carry out one command; whatever cannot be done answers "Nothing happens."."""
        self.steps += 1
        command = self._chosen(command_of(action))
        feedback = self.world.act(command)
        verb = parse(command)[0]
        error = None if feedback != NOTHING else "not_admissible" if verb else "malformed"
        won = self.world.won()
        truncated = not won and self.steps >= self.config.max_steps
        done = won or truncated
        text = feedback if done else self._with_commands(feedback)
        return Step(
            messages=({"role": "user", "content": text},), reward=float(won), done=done, truncated=truncated,
            tool_calls=(record(verb, command, feedback, error),), summary=self._summary(),
            metadata={"won": won, "steps": self.steps},
        )  # fmt: skip

    def close(self) -> None:
        """Nothing is held."""

    def _summary(self) -> str:
        """Return what the player knows by now: where it is, what it carries and did, and what it saw where."""
        world = self.world
        if world.here is not None:
            self.seen[world.here] = world.contents(world.here)
        done = {"hot": world.hot, "cool": world.cool, "clean": world.clean}
        states = [f"The {thing} is {state}." for state, things in done.items() for thing in sorted(things)]
        where = f"You are facing the {world.here}." if world.here else "You are in the middle of the room."
        return " ".join([f"{self.steps} commands given.", where, world.inventory(), *states, *self.seen.values()])

    def _with_commands(self, text: str) -> str:
        if not self.config.admissible:
            return text
        self.offered = self.world.admissible()
        return "\n".join([text, *(f"{number}. {command}" for number, command in enumerate(self.offered, 1))])

    def _chosen(self, written: str) -> str:
        """Return the command that a number stands for, or what was written."""
        number = int(written) if written.isascii() and written.isdigit() and len(written) < 4 else 0
        return self.offered[number - 1] if 1 <= number <= len(self.offered) else written

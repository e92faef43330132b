"""A small invented world: towns, rivers, people and companies, and pages that tell about them.

Nobody knows it by heart, so a question about it wants looking up, and a question that goes through several pages
wants as many look-ups. The world is always the same one.
"""

import random
from dataclasses import dataclass, field
from functools import cache

from nanoskyrl.stages.core.digests import derive_seed

TOWNS, RIVERS, PEOPLE, COMPANIES = 48, 16, 160, 48
STARTS = ("Ar", "Bel", "Cor", "Dun", "El", "Fen", "Gal", "Hol", "Ist", "Jor", "Kal", "Lun", "Mar", "Nev", "Or", "Pel")
MIDDLES = ("a", "e", "i", "o", "u", "an", "en", "or", "il", "us")
TOWN_ENDS = ("ford", "holm", "stad", "wick", "mere", "gate", "burg", "field")
RIVER_ENDS = ("va", "ne", "ra", "sk")
SURNAME_ENDS = ("son", "ley", "mann", "ova", "ett", "idge", "well", "aro")
GIVEN = (
    "Adela", "Bruno", "Celia", "Dario", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Leon", "Mira",
    "Nils", "Olga", "Pavel", "Ruth", "Simon", "Tessa", "Viktor",
)  # fmt: skip
JOBS = ("baker", "painter", "engineer", "teacher", "pilot", "lawyer", "gardener", "doctor", "composer", "sailor")
GOODS = ("clocks", "bicycles", "lamps", "paper", "bells", "boots", "pianos", "glass", "tiles", "kites")
CRAFTS = ("lace", "cheese", "pottery", "cider", "carpets", "honey", "silver", "mustard", "baskets", "candles")


@dataclass(frozen=True)
class Thing:
    """A page of the world: its facts, by relation, and its text."""

    name: str
    kind: str
    """town, river, person or company."""
    facts: dict[str, str] = field(default_factory=dict)
    """Names of other things, or numbers and words."""

    @property
    def text(self) -> str:
        """What its page says."""
        return TEXTS[self.kind].format(name=self.name, **self.facts)


TEXTS = {
    "town": "{name} is a town on the river {river}. It was founded in {founded}. Its mayor is {mayor}. "
    "It is known for its {craft}.",
    "river": "{name} is a river. It is {length} km long.",
    "person": "{name}, {job}, was born in {birthplace} in {born} and works for {employer}.",
    "company": "{name} makes {good}. The company was founded by {founder} in {founded}. It has its seat in {seat}.",
}
LINKS = {
    ("person", "birthplace"): ("town", "the town where {} was born"),
    ("person", "employer"): ("company", "the company that {} works for"),
    ("town", "mayor"): ("person", "the mayor of {}"),
    ("town", "river"): ("river", "the river on which {} lies"),
    ("company", "founder"): ("person", "the founder of {}"),
    ("company", "seat"): ("town", "the town where {} has its seat"),
}
"""From a kind of thing by a relation to another kind, and how that is said."""
ASKED = {
    "town": {"founded": "In which year was {} founded?", "craft": "What is {} known for?"},
    "river": {"length": "How many km long is {}?"},
    "person": {"born": "In which year was {} born?", "job": "What is the job of {}?"},
    "company": {"founded": "In which year was {} founded?", "good": "What does {} make?"},
}
"""What can be asked of the thing at the end."""


@dataclass(frozen=True)
class Chain:
    """A question, its answer, and the pages that lead there, in order."""

    question: str
    answer: str
    titles: tuple[str, ...]


@cache
def world() -> dict[str, Thing]:
    """Return every thing by its name."""
    rng = random.Random(derive_seed("world"))

    def names(count: int, ends: tuple[str, ...], taken: set[str]) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            name = rng.choice(STARTS) + rng.choice(MIDDLES) + rng.choice(ends)
            if name not in taken:
                taken.add(name)
                found.append(name)
        return found

    taken: set[str] = set()
    towns, rivers = names(TOWNS, TOWN_ENDS, taken), names(RIVERS, RIVER_ENDS, taken)
    people = [f"{rng.choice(GIVEN)} {surname}" for surname in names(PEOPLE, SURNAME_ENDS, taken)]
    companies = [f"{surname} Works" for surname in names(COMPANIES, SURNAME_ENDS, taken)]
    things = [
        Thing(name, "town", {
            "river": rng.choice(rivers), "founded": str(rng.randrange(900, 1800)), "mayor": people[i],
            "craft": rng.choice(CRAFTS),
        })
        for i, name in enumerate(towns)
    ]  # fmt: skip
    things += [Thing(name, "river", {"length": str(rng.randrange(40, 900))}) for name in rivers]
    things += [
        Thing(name, "person", {
            "job": rng.choice(JOBS), "birthplace": rng.choice(towns), "born": str(rng.randrange(1900, 1990)),
            "employer": rng.choice(companies),
        })
        for name in people
    ]  # fmt: skip
    things += [
        Thing(name, "company", {
            "good": rng.choice(GOODS), "founder": people[TOWNS + i], "founded": str(rng.randrange(1850, 2000)),
            "seat": rng.choice(towns),
        })
        for i, name in enumerate(companies)
    ]  # fmt: skip
    return {thing.name: thing for thing in things}


def pages() -> list[dict[str, str]]:
    """Return the world's pages, as a corpus."""
    return [{"title": thing.name, "text": thing.text} for thing in world().values()]


def chain(rng: random.Random, pages_to_read: int, *, number: bool = False) -> Chain:
    """Return a question that leads through so many pages.

    Args:
        rng: Draws the question.
        pages_to_read: 1 or more.
        number: Whether the answer must be a number.
    """
    while True:
        here = rng.choice([thing for thing in world().values() if thing.kind != "river"])
        titles, said = [here.name], here.name
        while len(titles) < pages_to_read:
            relations = [relation for kind, relation in LINKS if kind == here.kind]
            if not relations:  # a river leads nowhere
                break
            relation = rng.choice(relations)
            said = LINKS[here.kind, relation][1].format(said)
            here = world()[here.facts[relation]]
            titles.append(here.name)
        asked = {name: text for name, text in ASKED[here.kind].items() if not number or here.facts[name].isdigit()}
        if len(titles) == pages_to_read and len(set(titles)) == pages_to_read:
            name = rng.choice(sorted(asked))
            return Chain(asked[name].format(said), here.facts[name], tuple(titles))

"""WebShop's reward: how well what was bought is what was asked for.

The formula and the names of its parts are WebShop's (princeton-nlp/WebShop,
`web_agent_site/engine/goal.py`), with one replacement: where WebShop counts the nouns
that spaCy finds in titles, this counts their words of three letters and more that are
no function words, so titles agree a little more often here.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nanoskyrl.envs.worlds.webshop.catalogue import Product

LEAST_RATIO = 85
"""Texts whose token_set_ratio is above it are the same attribute or option."""
SAME_TITLE, ALIKE_TITLE = 0.2, 0.1
"""Title scores above which products are of one type, and below which they are hardly of one kind."""
COLORS = (
    "aqua", "beige", "black", "blue", "bronze", "brown", "burgundy", "charcoal", "chocolate", "copper", "coral",
    "cream", "gold", "gray", "green", "grey", "ivory", "khaki", "lavender", "magenta", "maroon", "mint", "mustard",
    "navy", "olive", "orange", "peach", "pink", "plum", "purple", "red", "rose", "rust", "sand", "silver", "taupe",
    "teal", "turquoise", "violet", "walnut", "white", "wine", "yellow",
)  # fmt: skip
"""Any shade of one of these counts as the colour itself, where a word of an option is one."""
AUTHORS_COLORS = (
    "alabaster", "apricot", "aqua", "ash", "asphalt", "azure", "banana", "beige", "black", "blue", "blush", "bordeaux",
    "bronze", "brown", "burgundy", "camel", "camo", "caramel", "champagne", "charcoal", "cheetah", "chestnut",
    "chocolate", "christmas", "coffee", "cognac", "copper", "coral", "cranberry", "cream", "crystal", "dark", "denim",
    "eggplant", "elephant", "espresso", "fuchsia", "gold", "granite", "grape", "graphite", "grass", "gray", "green",
    "grey", "heather", "indigo", "ivory", "ivy", "khaki", "lavender", "lemon", "leopard", "light", "lilac", "lime",
    "magenta", "maroon", "mauve", "merlot", "midnight", "mint", "mocha", "multicolor", "mushroom", "mustard", "natural",
    "navy", "nude", "olive", "orange", "peach", "pewter", "pink", "plum", "purple", "rainbow", "red", "rose", "royal",
    "rust", "sand", "sapphire", "seashell", "silver", "skull", "slate", "steel", "stone", "stonewash", "sunflower",
    "tan", "taupe", "teal", "tiger", "turquoise", "violet", "walnut", "wheat", "white", "wine", "yellow",
)  # fmt: skip
"""WebShop's own, in its order: the first that stands anywhere in an option is its colour, so `wash` is `ash`."""
_FUNCTION_WORDS = {
    "and", "any", "are", "but", "can", "for", "from", "has", "have", "into", "its", "more", "non", "not", "off", "our",
    "out", "over", "than", "that", "the", "them", "this", "with", "without", "you", "your",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShoppingGoal:
    """What is to be bought."""

    asin: str
    """A product that has it all; another may, too."""
    instruction: str
    attributes: tuple[str, ...]
    options: dict[str, str]
    """Value by name of option."""
    price_upper: float
    """Dollars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A purchase's reward and what it is made of."""

    total: float
    parts: dict[str, float | None]
    """By WebShop's names; the one of options is None where none was asked for."""


def reward(
    bought: Product,
    price: float,
    options: Sequence[str],
    goal: ShoppingGoal,
    wanted: Product,
    *,
    authors_colors: bool = False,
) -> Reward:
    """Return r_type * (attributes + options matched + price kept) / (attributes + options + 1).

    Args:
        bought: What was bought.
        price: What it costs, in dollars.
        options: The values chosen for it.
        goal: What was asked for.
        wanted: The product that the goal was made from.
        authors_colors: Read colours as WebShop does, as its own catalogue wants.
    """
    r_type = type_reward(bought, wanted)
    attributes = matched_attributes(bought, goal.attributes)
    chosen = matched_options(options, list(goal.options.values()), authors_colors)
    in_price = price <= goal.price_upper
    total = r_type * (attributes + chosen + in_price) / (len(goal.attributes) + len(goal.options) + 1)
    parts = {
        "r_type": r_type, "r_att": attributes / len(goal.attributes),
        "r_option": chosen / len(goal.options) if goal.options else None, "r_price": float(in_price),
    }  # fmt: skip
    return Reward(total=total, parts=parts)


def type_reward(bought: Product, wanted: Product) -> float:
    """Return 1 for the same type of product, 0.5 for another, 0.1 or 0 where the titles share hardly a word."""
    categories = [{part.strip() for part in p.product_category.split("›")} for p in (bought, wanted)]
    score = title_score(bought.title, wanted.title)
    same = bought.query == wanted.query or len(categories[0] & categories[1]) >= 2 or score > SAME_TITLE
    # A title without a common word outweighs an equal query: WebShop's order, kept.
    return 0.0 if score == 0 else 0.1 if score < ALIKE_TITLE else 1.0 if same else 0.5


def title_score(bought: str, wanted: str) -> float:
    """Return the share of the wanted title's words that the bought one has, too; 0.2 where it has none."""
    words = title_words(wanted)
    return len(set(words) & set(title_words(bought))) / len(words) if words else SAME_TITLE


def title_words(title: str) -> list[str]:
    """Return what stands here for the nouns of a title."""
    return [word for word in re.findall(r"[a-z]{3,}", title.lower()) if word not in _FUNCTION_WORDS]


def matched_attributes(bought: Product, wanted: Sequence[str]) -> int:
    """Return how many wanted attributes the product has, in its list or in its words."""
    words = (bought.title.lower(), " ".join(bought.bullet_points).lower(), bought.description.lower())
    return sum(
        any(_same(attribute, own) for own in bought.attributes) or any(attribute in text for text in words)
        for attribute in wanted
    )


def matched_options(chosen: Sequence[str], wanted: Sequence[str], authors_colors: bool = False) -> int:
    """Return how many wanted options were chosen; shades of one colour are the same."""
    colors = [normalize_color(value, authors_colors) for value in chosen]
    return sum(any(_same(normalize_color(value, authors_colors), color) for color in colors) for value in wanted)


def normalize_color(value: str, authors: bool = False) -> str:
    """Return the plain colour that an option names, or the option as it is; by the authors' rule where it is theirs."""
    if authors:
        return next((color for color in AUTHORS_COLORS if color in value), value)
    words = re.findall(r"[a-z]+", value.lower())
    return next((color for color in COLORS if color in words), value)


def _same(one: str, other: str) -> bool:
    from rapidfuzz import fuzz, utils

    return fuzz.token_set_ratio(one, other, processor=utils.default_process) > LEAST_RATIO

"""The shop of `webshop_lite`: a catalogue with its search, and the pages that one shopper sees.

Pages, buttons and what a click does are WebShop's (princeton-nlp/WebShop,
`web_agent_site/`); a page's text is its visible strings joined by ` [SEP] `, as in
WebShop's observation mode `text`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoskyrl.envs.bm25 import Index
from nanoskyrl.envs.worlds.webshop.catalogue import Product

SEARCH_RETURN_N, PRODUCT_WINDOW = 50, 10
BACK, PREV, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUBPAGES = ("Description", "Features", "Reviews")
SEPARATOR = " [SEP] "


class Shop:
    """Products that can be searched; shared by all shoppers."""

    def __init__(self, products: Sequence[Product]) -> None:
        """Index the products by all of their words."""
        self.products = products
        self.by_asin = {product.asin: product for product in products}
        self._index = Index([_words_of(product) for product in products])

    def search(self, keywords: str) -> list[Product]:
        """Return at most 50 products, the best first."""
        return [self.products[i] for i in self._index.find(keywords, SEARCH_RETURN_N)]


def _words_of(product: Product) -> str:
    options = [value for values in product.options.values() for value in values]
    return " ".join(
        [product.title, product.query, *product.attributes, *product.bullet_points, product.description, *options]
    )


@dataclass(slots=True)
class Visit:
    """One shopper's way through the shop."""

    shop: Shop
    instruction: str
    found: list[Product] | None = None
    """What the last search found; None before there was one."""
    page: int = 1
    product: Product | None = None
    """Whose page is open."""
    subpage: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    """Values chosen on the open product's page, by name."""
    bought: Product | None = None
    keywords: list[str] = field(default_factory=list)
    """Of every search, in order."""
    opened: list[str] = field(default_factory=list)
    """Every product whose page was opened, by its asin, in order."""

    @property
    def can_search(self) -> bool:
        """Whether the page has a search bar: only the first has."""
        return self.found is None

    def clickables(self) -> list[str]:
        """Return what can be clicked, in the order of the page, lower case."""
        if self.bought is not None or self.found is None:
            return []
        if self.product is None:
            pages = [PREV] * (self.page > 1) + [NEXT] * (self.page * PRODUCT_WINDOW < len(self.found))
            return [text.lower() for text in (BACK, *pages, *(product.asin for product in self._window()))]
        if self.subpage is not None:
            return [BACK.lower(), PREV.lower()]
        values = [value for values in self.product.options.values() for value in values]
        return [text.lower() for text in (BACK, PREV, *dict.fromkeys(values), *SUBPAGES, BUY)]

    def search(self, keywords: str) -> bool:
        """Search, where there is a search bar; say whether that happened."""
        if not self.can_search:
            return False
        self.found, self.page = self.shop.search(keywords), 1
        self.keywords.append(keywords)
        return True

    def click(self, value: str) -> bool:
        """Click, where there is such a thing on the page; say whether that happened."""
        if value not in self.clickables():
            return False
        if value == BACK.lower():
            self.found, self.product, self.subpage = None, None, None
        elif self.product is None:
            self._click_in_results(value)
        elif value == PREV.lower() and self.subpage is not None:
            self.subpage = None
        elif value == PREV.lower():
            self.product = None
        elif value == BUY.lower():
            self.bought = self.product
        elif value in (name.lower() for name in SUBPAGES):
            self.subpage = value
        else:  # of two options with the same value the last, as in WebShop
            self.options[[name for name, values in self.product.options.items() if value in values][-1]] = value
        return True

    def _click_in_results(self, value: str) -> None:
        if value in (PREV.lower(), NEXT.lower()):
            self.page += 1 if value == NEXT.lower() else -1
        else:
            self.product, self.options = self.shop.by_asin[value.upper()], {}  # chosen anew on every visit to a page
            self.opened.append(self.product.asin)

    def _window(self) -> list[Product]:
        start = (self.page - 1) * PRODUCT_WINDOW
        return (self.found or [])[start : start + PRODUCT_WINDOW]

    def summary(self) -> str:
        """Return what was done so far, and what is chosen now, which no page shows."""
        chosen = ", ".join(f"{name}: {value}" for name, value in self.options.items()) if self.product else ""
        return (
            f"searched for {'; '.join(self.keywords) or 'nothing'}. Opened {', '.join(self.opened) or 'nothing'}. "
            f"Chosen on this page: {chosen or 'nothing'}."
        )

    def text(self) -> str:
        """Return the visible strings of the page."""
        return SEPARATOR.join(self._strings())

    def _strings(self) -> list[str]:
        if self.bought is not None:
            return ["Thank you for shopping with us!", "Purchased", self.bought.asin, *self.options.values()]
        top = ["Instruction:", self.instruction]
        if self.found is None:
            return ["WebShop", *top, "Search"]
        if self.product is None:
            pages = [PREV] * (self.page > 1) + [NEXT] * (self.page * PRODUCT_WINDOW < len(self.found))
            items = [text for p in self._window() for text in (p.asin, p.title, p.price_tag)]
            return [*top, BACK, f"Page {self.page} (Total results: {len(self.found)})", *pages, *items]
        if self.subpage is not None:
            return [*top, BACK, PREV, *self._subpage_strings(self.product)]
        options = [text for name, values in self.product.options.items() for text in (name, *values)]
        facts = [self.product.title, f"Price: {self.product.price_tag}", "Rating: N.A."]
        return [*top, BACK, PREV, *options, *facts, *SUBPAGES, BUY]

    def _subpage_strings(self, product: Product) -> list[str]:
        texts = {"description": [product.description], "features": list(product.bullet_points), "reviews": []}
        return texts[self.subpage or ""]

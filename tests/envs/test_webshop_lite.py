"""`webshop_lite`: a catalogue by seed, WebShop's pages and actions, and its reward by its own test vectors."""

import json
from dataclasses import replace

import pytest
from worlds import check_determinism, play

from nanoskyrl.envs.worlds.webshop.catalogue import NO_PRICE, Product, generated_products, read_products
from nanoskyrl.envs.worlds.webshop.environment import WebshopLite, WebshopLiteConfig, goal_of
from nanoskyrl.envs.worlds.webshop.reward import (
    ShoppingGoal,
    matched_attributes,
    matched_options,
    normalize_color,
    reward,
    title_score,
    title_words,
    type_reward,
)
from nanoskyrl.envs.worlds.webshop.shop import Shop, Visit
from nanoskyrl.stages.core.errors import InputError, SettingsError

PLAIN = Product(
    asin="B000000001", category="fashion", query="query 1", title="Name 1", product_category="a › b › c",
    attributes=("tea tree", "essential oil", "natural ingredients"), options={}, pricing=(35.0,),
)  # fmt: skip
WANTED = ("tea tree", "essential oils", "natural ingredients")
SHOE = "adidas Unisex-Adult D.o.n. Issue 2 Basketball Shoe"
CORD = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
CABLE = "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home Theater System"


def product(**changes):
    return replace(PLAIN, **changes)


# WebShop's own vectors: tests/web-agent-site/engine/test_goal.py.


@pytest.mark.parametrize(
    ("category", "same"),
    [("b › c › a", True), ("d › e › f", False), ("a › d › b", True), ("a › a › b", True), ("a › a › d", False)],
)
def test_two_shared_categories_make_the_same_type(category, same):
    wanted = product(title="alpha beta gamma delta epsilon zeta")
    bought = product(query="query 2", product_category=category, title="alpha omega psi chi phi tau")  # score 1/6
    assert type_reward(bought, wanted) == (1.0 if same else 0.5)


@pytest.mark.parametrize(
    ("wanted", "bought", "spacy", "ours"),
    [
        (SHOE, "adidas Unisex-Adult D.o.n. Issue 2 Indoor Court Shoe", 0.85, 5 / 6),
        (f"{CORD} Home Theater System Subwoofer", CABLE, 0.31, 5 / 15),
        (CORD, CABLE, 0.17, 2 / 11),
        ("Rusticware 921ORB Kitchen and Bath Cabinet Knob",
         "Minkissy 2pcs Stainless Steel Eyebrow Tweezers Blackhead Acne Remover Portable Makeup Tweezers (Silver)",
         0, 0),
    ],
)  # fmt: skip
def test_title_scores_are_near_those_of_spacy_and_on_the_same_side_of_the_thresholds(wanted, bought, spacy, ours):
    found = title_score(bought, wanted)
    assert found == pytest.approx(ours)
    assert found == pytest.approx(spacy, abs=0.03)
    assert (found > 0.2, found < 0.1) == (spacy > 0.2, spacy < 0.1)


def test_a_title_without_words_is_as_like_as_any():
    assert title_words("For 2 in 1") == []
    assert title_score("anything", "A 2") == 0.2


def test_an_equal_query_does_not_outweigh_a_title_without_a_common_word():
    assert type_reward(product(title="mug"), product(title="lamp")) == 0.0
    eleven = "one two three four five six seven eight nine ten eleven"
    assert type_reward(product(title="eleven things"), product(title=eleven)) == 0.1


@pytest.mark.parametrize(
    ("bought", "matches"),
    [
        ({}, 3),
        ({"attributes": ("essential oil", "natural ingredients")}, 2),
        ({"attributes": (), "bullet_points": ("This shampoo has essential oils and smells like lemons",),
          "description": "Best shampoo on the market, made with natural ingredients"}, 2),
        ({"attributes": ("tea bag", "earl gray", "lipton"), "title": "English tea for breakfast",
          "bullet_points": ("Soothing aroma", "Calming, great feeling")}, 0),
    ],
)  # fmt: skip
def test_attributes(bought, matches):
    assert matched_attributes(product(**bought), WANTED) == matches


@pytest.mark.parametrize(
    ("chosen", "wanted", "matches"),
    [
        (["pack of 12", "grey", "XL"], ["grey", "XL", "pack of 12"], 3),
        (["pack of 12", "blue", "XL"], ["grey", "XL", "pack of 12"], 2),
        (["pack of 12", "powder snow", "XL"], ["cool powder snow", "XL", "pack of 12"], 3),
        (["goal 1", "goal 2"], [], 0),
        ([], ["goal 1", "goal 2"], 0),
        (["dark navy"], ["blue"], 0),
        (["light blue"], ["blue"], 1),
        (["standard"], ["tan"], 0),
    ],
)
def test_options(chosen, wanted, matches):
    assert matched_options(chosen, wanted) == matches


@pytest.mark.parametrize(
    ("value", "authors", "ours"),
    [
        ("light blue", "blue", "blue"), ("stonewash", "ash", "stonewash"), ("dark navy", "dark", "navy"),
        ("standard", "tan", "standard"), ("heather grey", "grey", "grey"), ("Red", "Red", "red"), ("xl", "xl", "xl"),
    ],
)  # fmt: skip
def test_colors_of_an_imported_catalogue_are_read_by_the_authors_rule(value, authors, ours):
    assert normalize_color(value, authors=True) == authors
    assert normalize_color(value) == ours


def test_the_whole_reward_of_webshops_vectors():
    name = "Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White"
    wanted = product(title=name)
    goal = ShoppingGoal(
        asin="x", instruction="", attributes=WANTED, options={"color": "grey", "size": "XL"}, price_upper=40.0
    )
    chosen = ["grey", "XL"]
    assert reward(wanted, 35, chosen, goal, wanted).total == 1
    words = product(
        title=name, attributes=(), bullet_points=("This shampoo has essential oils",),
        description="Best shampoo, made with natural ingredients",
    )  # fmt: skip
    found = reward(words, 35, chosen, goal, wanted)
    assert found.total == pytest.approx(5 / 6)
    assert found.parts == {"r_type": 1.0, "r_att": pytest.approx(2 / 3), "r_option": 1.0, "r_price": 1.0}
    only_one = replace(words, bullet_points=())
    assert reward(only_one, 35, chosen, goal, wanted).total == pytest.approx(2 / 3)
    three = replace(goal, options={**goal.options, "amount": "pack of 12"})
    assert reward(only_one, 35, chosen, three, wanted).total == pytest.approx(4 / 7)
    other = product(title=CABLE, query="query 2", product_category="a › d › e", attributes=(),
                    description=only_one.description)  # fmt: skip
    assert reward(other, 35, chosen, three, product(title=CORD)).total == pytest.approx(2 / 7)
    assert reward(wanted, 40.01, chosen, goal, wanted).parts["r_price"] == 0.0
    assert reward(wanted, 35, [], replace(goal, options={}), wanted).parts["r_option"] is None


def test_the_catalogue_is_large_distinct_and_the_seeds():
    products = generated_products(1000, 0)
    assert products == generated_products(1000, 0)
    assert products != generated_products(1000, 1)
    assert len({p.asin for p in products}) == len({p.title for p in products}) == 1000
    assert len({p.query for p in products}) == 24
    for p in products:
        assert len(p.asin) == 10
        assert p.attributes
        assert p.options
        assert all(price > 0 for price in p.pricing)
        assert all(value == value.lower() for values in p.options.values() for value in values)


def test_the_expert_gets_the_whole_reward_in_every_task(make_trajectory):
    environment = WebshopLite(WebshopLiteConfig())
    tasks = [*environment.tasks("train"), *environment.tasks("test")]
    assert len(tasks) == 2548
    for task in tasks:
        actions = environment.expert(task)
        steps = play(environment, task, actions)
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        assert len(actions) <= 8  # rollout.max_turns
        assert all(step.reward == 0 for step in steps[:-1])
        score = environment.score(make_trajectory(metadata={**task.metadata, **steps[-1].metadata}))
        assert (score.reward, score.success) == (1.0, True)


def test_train_and_test_share_no_goal():
    environment = WebshopLite(WebshopLiteConfig())
    train, test = ({task.prompt for task in environment.tasks(split)} for split in ("train", "test"))
    assert not train & test


def test_another_purchase_is_rewarded_in_part_and_nothing_bought_is_nothing(make_trajectory):
    environment = WebshopLite(WebshopLiteConfig())
    task = environment.tasks("train")[0]
    actions = environment.expert(task)
    without_options = [actions[0], actions[1], actions[-1]]
    last = play(environment, task, without_options)[-1]
    goal = goal_of(task)
    assert last.reward == pytest.approx((len(goal.attributes) + 1) / (len(goal.attributes) + len(goal.options) + 1))
    assert last.metadata["purchase"]["parts"]["r_option"] == 0.0
    score = environment.score(make_trajectory(metadata={**task.metadata, **last.metadata}))
    assert (score.reward, score.success) == (last.reward, False)
    nothing = environment.score(make_trajectory(metadata=task.metadata))
    assert (nothing.reward, nothing.success, nothing.parts) == (0.0, False, {})


def visit() -> Visit:
    return Visit(Shop(generated_products(200, 0)), "Find me a lamp")


def test_pages_read_as_in_webshops_text_mode():
    seen = visit()
    assert seen.text() == "WebShop [SEP] Instruction: [SEP] Find me a lamp [SEP] Search"
    seen.search("floor lamp")
    first = seen.text().split(" [SEP] ")
    assert first[:5] == ["Instruction:", "Find me a lamp", "Back to Search", "Page 1 (Total results: 8)", first[4]]
    assert len(first) == 4 + 3 * 8
    asin = first[4]
    seen.click(asin.lower())
    page = seen.text().split(" [SEP] ")
    assert page[2:5] == ["Back to Search", "< Prev", "color"]
    assert page[-4:] == ["Description", "Features", "Reviews", "Buy Now"]
    assert page[-6].startswith("Price: $")
    seen.click("features")
    assert "Buy Now" not in seen.text()
    seen.click("< prev")
    assert seen.text().split(" [SEP] ") == page


def test_results_have_ten_to_a_page():
    seen = visit()
    seen.search("easy")
    assert len(seen.found or ()) == 50
    pages = [seen.clickables()[1:]]
    while "next >" in seen.clickables():
        seen.click("next >")
        pages.append([value for value in seen.clickables() if value.startswith("b0")])
    assert len(pages) == 5
    assert seen.page == 5
    seen.click("< prev")
    assert "Page 4" in seen.text()


@pytest.mark.parametrize(
    ("before", "action"),
    [
        ([], "click[buy now]"), ([], "click[back to search]"), ([], "click[search]"),
        (["search[lamp]"], "search[lamp]"),  # no search bar here
        (["search[lamp]"], "click[buy now]"), (["search[lamp]"], "click[< prev]"), (["search[lamp]"], "click[B0]"),
        (["search[the of and]"], "click[next >]"),
        ([], "search lamp"), ([], "buy now"), ([], "search[]"), ([], "find[lamp]"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_leaves_the_page_as_it_is(before, action):
    environment = WebshopLite(WebshopLiteConfig(n_products=100))
    episode = environment.start()
    episode.reset(environment.tasks("train")[0], 0)
    for earlier in before:
        assert episode.step(earlier).tool_calls[0].ok
    page = episode.visit.text()
    step = episode.step(action)
    assert step.observation == page
    assert (step.reward, step.done) == (0.0, False)
    assert step.tool_calls[0].error in ("malformed", "not_admissible")


def test_going_back_forgets_what_was_chosen():
    environment = WebshopLite(WebshopLiteConfig(n_products=100))
    task = environment.tasks("train")[0]
    search, item, *options, buy = environment.expert(task)
    last = play(environment, task, [search, item, *options, "click[< prev]", item, buy])[-1]
    assert last.metadata["purchase"]["options"] == {}


def test_the_summary_says_what_no_page_shows():
    environment = WebshopLite(WebshopLiteConfig(n_products=100))
    task = environment.tasks("train")[0]
    goal, actions = goal_of(task), environment.expert(task)
    last = play(environment, task, actions[:-1])[-1]
    chosen = ", ".join(f"{name}: {value}" for name, value in goal.options.items())
    assert last.summary is not None
    assert last.summary.endswith(f"Opened {goal.asin}. Chosen on this page: {chosen}.")
    back = play(environment, task, [*actions[:-1], "click[back to search]"])[-1]
    assert str(back.summary).endswith("Chosen on this page: nothing.")


def test_what_can_be_done_is_shown_where_asked_for():
    environment = WebshopLite(WebshopLiteConfig(n_products=100, admissible=True))
    task = environment.tasks("train")[0]
    episode = environment.start()
    text = episode.reset(task, 0).messages[0]["content"]
    for action in environment.expert(task):
        command = action.removeprefix("<action>").removesuffix("</action>")
        assert (command if command.startswith("click") else "search[KEYWORDS]") in text
        text = episode.step(action).observation


ITEM = {
    "asin": "b01LOWER00",
    "name": "Red Lamp",
    "category": "garden",
    "query": " Lamps ",
    "product_category": "Home › Lamps",
    "full_description": "A lamp.",
    "small_description": ["Bright"],
    "pricing": "$1,010.99 to $1,015.00",
    "customization_options": {"Color": [{"value": "Red/Blue", "image": None}], "Size": None},
    "attributes": ["bright"],
}


@pytest.mark.parametrize("dump", [lambda rows: json.dumps(rows), lambda rows: "\n".join(map(json.dumps, rows)) + "\n"])
def test_a_catalogue_of_webshops_items_is_read(tmp_path, dump):
    path = tmp_path / "items.json"
    path.write_text(
        dump([ITEM, {**ITEM, "name": "Twin"}, {"asin": "B2", "name": "Mug", "query": "mugs", "attributes": ["blue"]}])
    )
    first, second = read_products(str(path))
    assert (first.asin, first.query, first.options) == ("B01LOWER00", "lamps", {"color": ("red | blue",)})
    assert first.pricing == (1010.99, 1015.0)
    assert first.price_tag == "$1010.99 to $1015.0"
    assert second.pricing == (NO_PRICE,)
    environment = WebshopLite(WebshopLiteConfig(data=str(path)))
    tasks = [task for split in ("train", "test") for task in environment.tasks(split)]
    assert {goal_of(task).asin for task in tasks} == {"B01LOWER00", "B2"}
    for task in tasks:
        assert play(environment, task, environment.expert(task))[-1].reward == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("[]", "empty"),
        ("{", "not JSON"),
        ("[1]", "item 0 .* no JSON object"),
        (json.dumps([{**ITEM, "asin": 3}]), "item 0 .* no `asin`"),
        (json.dumps([{**ITEM, "query": ""}]), "no `query`"),
        (json.dumps([{**ITEM, "attributes": []}]), "no list of `attributes`"),
        (json.dumps([{**ITEM, "customization_options": {"Color": ["red"]}}]), "not as WebShop has it"),
        (json.dumps([{**ITEM, "customization_options": 3}]), "not as WebShop has it"),
        (json.dumps([{**ITEM, "small_description": 3}]), "not as WebShop has it"),
        (json.dumps([{**ITEM, "pricing": 3}]), "not as WebShop has it"),
    ],
)
def test_a_catalogue_that_cannot_be_used_is_one_clear_error(tmp_path, text, says):
    path = tmp_path / "items.json"
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        read_products(str(path))
    assert caught.value.hint
    with pytest.raises(InputError, match="no catalogue"):
        read_products(str(tmp_path / "absent.json"))


def test_settings_out_of_range_are_refused_by_name():
    for key, value in (("n_products", 99), ("n_train", 0), ("n_test", 0)):
        with pytest.raises(SettingsError, match=f"`webshop_lite.{key}`"):
            WebshopLiteConfig(**{key: value})


def test_episodes_repeat_whatever_the_seed_of_the_trajectory():
    check_determinism(lambda: WebshopLite(WebshopLiteConfig(n_products=200)))

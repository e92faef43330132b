"""What stands and lies in the rooms of `alfworld_lite`: kinds of receptacles and objects, and what fits where.

The names, what can be opened, heated, cooled, cleaned or sliced, and what each receptacle
can contain are ALFWorld's (alfworld/alfworld, `alfworld/gen/constants.py`), for the
objects that are used here.
"""

OPENABLE = {"fridge", "microwave", "safe", "cabinet", "drawer"}
MOVABLE_RECEPTACLES = {"bowl", "box", "cup", "mug", "pan", "plate", "pot"}
LAMPS = {"desklamp"}
KNIVES = {"knife", "butterknife"}

HEATABLE = {"apple", "bread", "cup", "egg", "mug", "plate", "potato", "tomato"}
COOLABLE = HEATABLE | {"bowl", "lettuce", "pan", "pot", "winebottle"}
CLEANABLE = {
    "apple", "bowl", "butterknife", "cloth", "cup", "dishsponge", "egg", "fork", "kettle", "knife", "ladle",
    "lettuce", "mug", "pan", "plate", "pot", "potato", "soapbar", "spatula", "spoon", "tomato",
}  # fmt: skip
SLICEABLE = {"apple", "bread", "egg", "lettuce", "potato", "tomato"}

_TABLETOP = {
    "alarmclock", "apple", "book", "bowl", "box", "bread", "butterknife", "candle", "cd", "cellphone", "cloth",
    "creditcard", "cup", "dishsponge", "egg", "fork", "glassbottle", "handtowel", "kettle", "keychain", "knife",
    "ladle", "laptop", "lettuce", "mug", "newspaper", "pan", "pen", "pencil", "peppershaker", "plate", "pot",
    "potato", "remotecontrol", "saltshaker", "soapbar", "soapbottle", "spatula", "spoon", "spraybottle", "statue",
    "tissuebox", "toiletpaper", "tomato", "vase", "watch", "winebottle",
}  # fmt: skip
_DRESSER = {
    "alarmclock", "book", "bowl", "box", "candle", "cd", "cellphone", "cloth", "creditcard", "cup", "glassbottle",
    "keychain", "laptop", "mug", "newspaper", "pen", "pencil", "plate", "remotecontrol", "spraybottle", "statue",
    "tissuebox", "toiletpaper", "vase", "watch", "winebottle",
}  # fmt: skip
_SEAT = {
    "book", "box", "cellphone", "cloth", "creditcard", "keychain", "laptop", "newspaper", "pillow", "remotecontrol",
}  # fmt: skip
CONTAINS: dict[str, set[str]] = {
    "armchair": _SEAT,
    "bathtubbasin": {"cloth", "dishsponge", "handtowel", "soapbar"},
    "bed": {"book", "cellphone", "laptop", "newspaper", "pillow"},
    "cabinet": {
        "book", "bowl", "box", "candle", "cd", "cloth", "cup", "dishsponge", "glassbottle", "handtowel", "kettle",
        "ladle", "mug", "newspaper", "pan", "peppershaker", "plate", "pot", "saltshaker", "soapbar", "soapbottle",
        "spraybottle", "tissuebox", "toiletpaper", "vase", "winebottle",
    },
    "cart": {
        "candle", "cloth", "dishsponge", "handtowel", "mug", "soapbar", "soapbottle", "spraybottle", "statue",
        "tissuebox", "toiletpaper", "vase",
    },
    "coffeemachine": {"mug"},
    "coffeetable": _TABLETOP,
    "countertop": _TABLETOP,
    "desk": (_DRESSER | {"soapbottle"}),
    "diningtable": _TABLETOP,
    "drawer": {
        "book", "butterknife", "candle", "cd", "cellphone", "cloth", "creditcard", "dishsponge", "fork", "handtowel",
        "keychain", "knife", "ladle", "newspaper", "pen", "pencil", "peppershaker", "remotecontrol", "saltshaker",
        "soapbar", "soapbottle", "spatula", "spoon", "spraybottle", "tissuebox", "toiletpaper", "watch",
    },
    "dresser": _DRESSER,
    "fridge": {
        "apple", "bowl", "bread", "cup", "egg", "glassbottle", "lettuce", "mug", "pan", "plate", "pot", "potato",
        "tomato", "winebottle",
    },
    "garbagecan": {
        "apple", "bread", "cd", "cloth", "dishsponge", "egg", "handtowel", "lettuce", "newspaper", "pen", "pencil",
        "potato", "soapbar", "soapbottle", "spraybottle", "tissuebox", "toiletpaper", "tomato", "winebottle",
    },
    "handtowelholder": {"handtowel"},
    "microwave": {"apple", "bowl", "bread", "cup", "egg", "glassbottle", "mug", "plate", "potato", "tomato"},
    "ottoman": _SEAT,
    "safe": {"cd", "cellphone", "creditcard", "keychain", "statue", "vase", "watch"},
    "shelf": (_DRESSER - {"laptop"}) | {
        "dishsponge", "handtowel", "kettle", "peppershaker", "pot", "saltshaker", "soapbar", "soapbottle",
    },
    "sidetable": _TABLETOP,
    "sinkbasin": {
        "apple", "bowl", "butterknife", "cloth", "cup", "dishsponge", "egg", "fork", "glassbottle", "handtowel",
        "kettle", "knife", "ladle", "lettuce", "mug", "pan", "plate", "pot", "potato", "soapbar", "spatula", "spoon",
        "tomato",
    },
    "sofa": _SEAT,
    "stoveburner": {"kettle", "pan", "pot"},
    "toilet": {
        "candle", "cloth", "dishsponge", "handtowel", "newspaper", "soapbar", "soapbottle", "spraybottle",
        "tissuebox", "toiletpaper",
    },
    "toiletpaperhanger": {"toiletpaper"},
}  # fmt: skip

ROOMS: dict[str, dict[str, tuple[int, int]]] = {
    "kitchen": {
        "cabinet": (2, 4), "coffeemachine": (1, 1), "countertop": (1, 2), "diningtable": (0, 1), "drawer": (1, 3),
        "fridge": (1, 1), "garbagecan": (1, 1), "microwave": (1, 1), "shelf": (0, 1), "sidetable": (0, 1),
        "sinkbasin": (1, 1), "stoveburner": (1, 3),
    },
    "living room": {
        "armchair": (1, 2), "cabinet": (0, 2), "coffeetable": (1, 1), "diningtable": (0, 1), "drawer": (1, 3),
        "dresser": (0, 1), "garbagecan": (1, 1), "ottoman": (0, 1), "safe": (0, 1), "shelf": (0, 2),
        "sidetable": (1, 2), "sofa": (1, 1),
    },
    "bedroom": {
        "armchair": (0, 1), "bed": (1, 1), "desk": (1, 1), "drawer": (2, 5), "dresser": (0, 1), "garbagecan": (1, 1),
        "safe": (0, 1), "shelf": (0, 3), "sidetable": (1, 2),
    },
    "bathroom": {
        "bathtubbasin": (0, 1), "cabinet": (1, 4), "cart": (0, 1), "countertop": (1, 1), "drawer": (0, 2),
        "garbagecan": (1, 1), "handtowelholder": (1, 2), "shelf": (0, 1), "sinkbasin": (1, 2), "toilet": (1, 1),
        "toiletpaperhanger": (1, 1),
    },
}  # fmt: skip
"""How many of each kind of receptacle are in a room, at least and at most."""

BELONGINGS: dict[str, tuple[str, ...]] = {
    "kitchen": (
        "apple", "bowl", "bread", "butterknife", "cup", "dishsponge", "egg", "fork", "glassbottle", "kettle", "knife",
        "ladle", "lettuce", "mug", "pan", "peppershaker", "plate", "pot", "potato", "saltshaker", "soapbottle",
        "spatula", "spoon", "tomato", "winebottle",
    ),
    "living room": (
        "book", "box", "cellphone", "creditcard", "keychain", "laptop", "newspaper", "pen", "pencil", "pillow",
        "plate", "remotecontrol", "statue", "tissuebox", "vase", "watch",
    ),
    "bedroom": (
        "alarmclock", "book", "bowl", "cd", "cellphone", "creditcard", "keychain", "laptop", "mug", "pen", "pencil",
        "pillow", "statue", "tissuebox", "vase", "watch",
    ),
    "bathroom": (
        "candle", "cloth", "dishsponge", "handtowel", "soapbar", "soapbottle", "spraybottle", "tissuebox",
        "toiletpaper",
    ),
}  # fmt: skip
"""What lies about in each room."""

LAMP_STANDS = ("desk", "sidetable", "dresser", "coffeetable", "shelf")
"""Where a desk lamp can stand, the likeliest first."""

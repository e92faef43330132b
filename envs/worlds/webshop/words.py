"""What the generated catalogue of `webshop_lite` is made of: kinds of products and the words for them.

Categories, queries and attributes are of the sort that WebShop's products have; brands
and models are invented.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of product."""

    category: str
    """One of WebShop's five."""
    query: str
    """What a shopper would search for."""
    path: str
    """From the general to the special, joined by ` › `."""
    nouns: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]
    """Values by name."""
    dollars: tuple[float, float]
    """Cheapest and dearest."""


_COLORS = ("black", "white", "grey", "navy blue", "red", "dark green", "beige", "pink", "brown", "purple")
_CLOTHES = ("small", "medium", "large", "x-large", "xx-large")
_PACKS = ("pack of 1", "pack of 2", "pack of 3", "pack of 6", "pack of 12")
_SHOES = ("6", "7", "8", "9", "10", "11", "12")
_FABRIC = (
    "machine wash", "hand wash", "long sleeve", "short sleeve", "slim fit", "classic fit", "loose fit", "daily wear",
    "polyester spandex", "quick drying", "button closure", "elastic waistband", "cotton spandex", "tumble dry",
)  # fmt: skip
_FURNITURE = (
    "living room", "dining room", "solid wood", "easy assemble", "storage space", "heavy duty", "easy clean",
    "space saving", "wood finish", "mid century", "steel frame", "water resistant",
)  # fmt: skip
_SKIN = (
    "cruelty free", "paraben free", "sensitive skin", "long lasting", "natural ingredients", "tea tree", "fine lines",
    "dry skin", "hyaluronic acid", "coconut oil", "fragrance free", "travel size",
)  # fmt: skip
_FOOD = (
    "gluten free", "non gmo", "low sugar", "high protein", "usda organic", "dairy free", "keto friendly", "low carb",
    "nut free", "artificial colors free", "plant based", "ready eat",
)  # fmt: skip
_DEVICES = (
    "high speed", "fast charging", "easy carry", "wireless bluetooth", "hands free", "noise cancelling", "plug play",
    "high definition", "stereo sound", "easy install", "water proof", "light weight",
)  # fmt: skip

KINDS = (
    Kind("fashion", "men's shirts", "Clothing, Shoes & Jewelry › Men › Clothing › Shirts",
         ("shirt", "polo shirt", "henley shirt"), _FABRIC, {"color": _COLORS, "size": _CLOTHES}, (12, 60)),
    Kind("fashion", "women's dresses", "Clothing, Shoes & Jewelry › Women › Clothing › Dresses",
         ("dress", "summer dress", "midi dress"), _FABRIC, {"color": _COLORS, "size": _CLOTHES}, (18, 90)),
    Kind("fashion", "women's sweaters", "Clothing, Shoes & Jewelry › Women › Clothing › Sweaters",
         ("sweater", "cardigan", "pullover"), _FABRIC, {"color": _COLORS, "size": _CLOTHES}, (15, 80)),
    Kind("fashion", "men's pants", "Clothing, Shoes & Jewelry › Men › Clothing › Pants",
         ("trousers", "cargo pants", "chinos"), _FABRIC, {"color": _COLORS, "size": _CLOTHES}, (20, 75)),
    Kind("fashion", "walking shoes", "Clothing, Shoes & Jewelry › Men › Shoes › Walking",
         ("walking shoes", "sneakers", "trainers"),
         ("rubber sole", "non slip", "arch support", "memory foam", "ankle strap", "ethylene vinyl", "lace closure"),
         {"color": _COLORS, "size": _SHOES}, (25, 140)),
    Kind("beauty", "face moisturizer", "Beauty & Personal Care › Skin Care › Face › Creams & Moisturizers",
         ("face cream", "moisturizer", "day lotion"), _SKIN,
         {"scent": ("unscented", "lavender", "rose", "green tea", "citrus"), "size": _PACKS}, (8, 55)),
    Kind("beauty", "shampoo", "Beauty & Personal Care › Hair Care › Shampoo & Conditioner › Shampoos",
         ("shampoo", "hair wash", "shampoo bar"),
         ("sulfate free", "hair growth", "damaged hair", "argan oil", "color treated", "dry scalp", *_SKIN[:4]),
         {"scent": ("coconut", "mint", "almond", "vanilla"), "size": ("8 ounce", "12 ounce", "16 ounce")}, (6, 40)),
    Kind("beauty", "lipstick", "Beauty & Personal Care › Makeup › Lips › Lipsticks",
         ("lipstick", "lip stain", "lip color"),
         ("long lasting", "highly pigmented", "cruelty free", "non toxic", "easy apply", "water proof"),
         {"color": ("cherry red", "coral", "rose pink", "plum", "nude", "burgundy")}, (5, 30)),
    Kind("beauty", "toothbrushes", "Beauty & Personal Care › Oral Care › Toothbrushes",
         ("toothbrush", "toothbrush set", "travel toothbrush"),
         ("oral hygiene", "sensitive teeth", "easy use", "bpa free", "eco friendly", "teeth whitening"),
         {"color": _COLORS[:6], "size": _PACKS}, (4, 28)),
    Kind("electronics", "headphones", "Electronics › Headphones, Earbuds & Accessories › Headphones",
         ("headphones", "earbuds", "headset"), _DEVICES, {"color": _COLORS[:7]}, (15, 220)),
    Kind("electronics", "bluetooth speakers", "Electronics › Portable Audio & Video › Portable Speakers",
         ("speaker", "party speaker", "shower speaker"), _DEVICES, {"color": _COLORS[:7]}, (18, 180)),
    Kind("electronics", "usb cables", "Electronics › Computers & Accessories › Cables › USB Cables",
         ("usb cable", "charging cable", "data cable"), _DEVICES[:8],
         {"color": _COLORS[:5], "size": ("3 feet", "6 feet", "10 feet")}, (5, 30)),
    Kind("electronics", "tablet cases", "Electronics › Computers & Accessories › Tablet Accessories › Cases",
         ("tablet case", "folio case", "tablet sleeve"),
         ("heavy duty", "easy install", "screen protector", "light weight", "wireless charging", "dust proof"),
         {"color": _COLORS, "size": ("8 inch", "10 inch", "11 inch", "13 inch")}, (9, 60)),
    Kind("electronics", "security cameras", "Electronics › Camera & Photo › Video Surveillance › Cameras",
         ("security camera", "doorbell camera", "dome camera"),
         ("night vision", "motion detection", "1080p hd", "easy install", "optical zoom", "batteries included"),
         {"color": _COLORS[:3], "style": ("one camera", "two cameras", "four cameras")}, (25, 300)),
    Kind("garden", "coffee tables", "Home & Kitchen › Furniture › Living Room Furniture › Coffee Tables",
         ("coffee table", "lift top table", "cocktail table"), _FURNITURE,
         {"color": ("walnut", "white", "black", "rustic brown", "grey oak")}, (60, 420)),
    Kind("garden", "bookcases", "Home & Kitchen › Furniture › Home Office Furniture › Bookcases",
         ("bookcase", "bookshelf", "shelf unit"), _FURNITURE,
         {"color": ("walnut", "white", "black", "rustic brown"), "size": ("3 tier", "4 tier", "5 tier", "6 tier")},
         (40, 320)),
    Kind("garden", "ottomans", "Home & Kitchen › Furniture › Accent Furniture › Ottomans",
         ("ottoman", "footstool", "storage bench"), _FURNITURE, {"color": _COLORS}, (30, 210)),
    Kind("garden", "floor lamps", "Tools & Home Improvement › Lighting & Ceiling Fans › Lamps › Floor Lamps",
         ("floor lamp", "arc lamp", "reading lamp"),
         ("bronze finish", "glass shade", "living room", "easy assemble", "energy efficient", "brushed nickel"),
         {"color": ("bronze", "black", "gold", "silver"), "style": ("with bulb", "without bulb")}, (30, 240)),
    Kind("garden", "window curtains", "Home & Kitchen › Home Décor › Window Treatments › Curtains",
         ("curtains", "blackout curtains", "sheer curtains"),
         ("machine washable", "easy clean", "living room", "dining room", "energy efficient", "printing technology"),
         {"color": _COLORS, "size": ("52 x 63 inch", "52 x 84 inch", "52 x 96 inch")}, (14, 90)),
    Kind("garden", "throw pillows", "Home & Kitchen › Bedding › Decorative Pillows › Throw Pillows",
         ("throw pillow", "cushion", "lumbar pillow"),
         ("super soft", "machine washable", "eco friendly", "living room", "double sided", "high density"),
         {"color": _COLORS, "size": ("16 x 16 inch", "18 x 18 inch", "20 x 20 inch")}, (9, 60)),
    Kind("grocery", "snack bars", "Grocery & Gourmet Food › Snack Foods › Bars › Nutrition Bars",
         ("snack bars", "granola bars", "protein bars"), _FOOD,
         {"flavor": ("peanut butter", "dark chocolate", "blueberry", "salted caramel"), "size": _PACKS}, (6, 48)),
    Kind("grocery", "green tea", "Grocery & Gourmet Food › Beverages › Tea › Green Tea",
         ("green tea", "matcha", "tea bags"), _FOOD,
         {"flavor": ("original", "jasmine", "lemon", "ginger peach"), "size": _PACKS}, (5, 40)),
    Kind("grocery", "popcorn", "Grocery & Gourmet Food › Snack Foods › Popcorn",
         ("popcorn", "kettle corn", "popcorn kernels"), _FOOD,
         {"flavor": ("sea salt", "white cheddar", "caramel", "butter"), "size": _PACKS}, (4, 36)),
    Kind("grocery", "pasta sauce", "Grocery & Gourmet Food › Sauces, Gravies & Marinades › Pasta Sauces",
         ("pasta sauce", "marinara", "tomato sauce"), _FOOD,
         {"flavor": ("basil", "roasted garlic", "arrabbiata", "vodka"), "size": _PACKS}, (4, 34)),
)  # fmt: skip

BRANDS = (
    "Alderway", "Brambleton", "Cedarline", "Dunmere", "Eastlake", "Fernhill", "Glenmoor", "Harrowgate", "Ivydale",
    "Juniper & Co", "Kestrel", "Larkfield", "Marlowe", "Northbay", "Oakhurst", "Pinecrest", "Quillon", "Rosedale",
    "Silverbrook", "Thornbury", "Upland", "Valewood", "Westmark", "Yarrow",
)  # fmt: skip
SERIES = (
    "Aurora", "Breeze", "Comet", "Delta", "Ember", "Flint", "Grove", "Harbor", "Indigo", "Jasper", "Koda", "Lumen",
    "Meadow", "Nova", "Orbit", "Prairie", "Quest", "Ridge", "Summit", "Terra", "Umber", "Vista", "Willow", "Zephyr",
)  # fmt: skip

"""Fictional countries, made by rule: 195 real ones are too few to learn reading from scratch.

Names of countries, people, cities and mountains are drawn from syllables; a country name that
equals or contains a real country's name is drawn again.
"""

import random
from collections.abc import Sequence

from rag_jax.countries.facts import EDITIONS, Country, Office

ONSETS = ("b br c ch d dr f fr g gr h j k kh kl l m mb n nd p pr qu r s sh sk st t th tr v w y z "
          "zh gu ts ny").split()
VOWELS = "a e i o u a e i o a ai ia ou ei á é í ó ã ö ü".split()
CODAS = "n r s l m t k d nd rt ng st ck sh th x".split() + [""] * 14
COUNTRY_ENDINGS = ("ia a land stan o e an ar ou istan ania on as i u el ein os ay ur").split()
FIRST_ENDINGS = "a o el an us i in ah ie ez ik am as ed en ar eth y".split()
LAST_ENDINGS = ("ov ez son i ic ski ova man berg o a ou e el u in ian oglu shvili wa ama en y"
                " ero as dze idze yev").split()
PARTICLES = ["al-", "de ", "van ", "von ", "el-", "da ", "bin ", "de la ", "Ben ", "Mc", "O'"]
CITY_FORMS = (["{}"] * 8) + ["Port {}", "San {}", "New {}", "Saint {}", "{} City", "{}ville",
                             "{}burg", "{}grad", "{}abad", "Fort {}", "El {}", "La {}"]
PEAK_FORMS = ["Mount {}", "{} Peak", "Mont {}", "Pico {}", "Cerro {}", "{}", "Monte {}",
              "{} Hill", "Jebel {}", "{} Ridge", "{}berg", "Pico de {}"]
MONEY = ("dollar franc peso pound shilling dinar rupee krone crown lira riyal som manat kwacha "
         "real dirham mark florin guilder tala won baht koruna lek leu lev").split()
TITLES = (["President"] * 5 + ["King", "Queen", "Emir", "Sultan", "Monarch", "Prince",
                               "Grand Duke", "Emperor"])
HEADS_OF_GOVERNMENT = ["Prime Minister"] * 6 + ["Chancellor", "Premier", "Taoiseach"]
REGIONS = ("North Africa;West Africa;Central Africa;East Africa;Southern Africa;North America;"
           "Central America;the Caribbean;South America;Western Asia;Central Asia;South Asia;"
           "Southeast Asia;East Asia;Northern Europe;Western Europe;Southern Europe;"
           "Eastern Europe;Central Europe;Southeastern Europe;Melanesia;Polynesia").split(";")
STATES = ["Republic of {}", "Kingdom of {}", "{}", "Democratic Republic of {}",
          "Federation of {}", "{} Republic", "State of {}", "United Republic of {}",
          "Principality of {}", "Commonwealth of {}"]


def _word(rng: random.Random, syllables: int, endings: Sequence[str] = ("",)) -> str:
    parts = [rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
             for _ in range(syllables - 1)]
    return "".join(parts) + rng.choice(ONSETS) + rng.choice(endings or VOWELS)


def _name(rng: random.Random, longest: int = 3, endings: Sequence[str] = ()) -> str:
    return _word(rng, rng.randint(2, longest), endings).capitalize()


def _person(rng: random.Random) -> str:
    first = _name(rng, 2, FIRST_ENDINGS)
    if rng.random() < 0.1:
        return f"{first} {rng.choice(['II', 'III', 'IV', 'V', 'VI', 'VIII', 'X'])}"
    last = _name(rng, 3, LAST_ENDINGS)
    if rng.random() < 0.12:
        last = rng.choice(PARTICLES) + last
    middle = rng.random()
    if middle < 0.12:
        return f"{first} {_name(rng, 2, FIRST_ENDINGS)} {last}"
    if middle < 0.16:
        return f"{first} {rng.choice('ABCDEFGHJKLMPRST')}. {last}"
    if middle < 0.24:
        return f"{first}-{_name(rng, 2, FIRST_ENDINGS)} {last}"
    return f"{first} {last}"


def _office(rng: random.Random, titles: Sequence[str], roles: tuple[str, ...]) -> Office:
    holder = _person(rng)
    later = _person(rng) if rng.random() < 0.4 else holder
    return Office(rng.choice(titles), roles, tuple(zip(EDITIONS, (holder, later), strict=True)))


def _country(rng: random.Random, name: str, neighbours: Sequence[str]) -> Country:
    stem = name.rstrip("aeiou") or name
    demonym = stem + rng.choice(["ian", "an", "ese", "i", "ish", "er"])
    capital = rng.choice(CITY_FORMS).format(_name(rng))
    largest = capital if rng.random() < 0.6 else rng.choice(CITY_FORMS).format(_name(rng))
    unit = rng.choice(MONEY) if rng.random() < 0.6 else _word(rng, 2, VOWELS)
    languages = [_name(rng, 2, ["i", "ish", "ese", "ic", "an", "a", "o", "ian"])
                 for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    offices = [_office(rng, TITLES, ("state",))]
    if rng.random() < 0.8:
        offices.append(_office(rng, HEADS_OF_GOVERNMENT, ("government",)))
    return Country(
        name=name,
        article=rng.random() < 0.08,
        official_name=rng.choice(STATES).format(name),
        demonym=demonym,
        region=rng.choice(REGIONS),
        capital=capital,
        capital_also=(),
        largest_city=largest,
        currency=f"{demonym} {unit}",
        currency_also=(unit,),
        languages=tuple(languages),
        neighbours=tuple(neighbours),
        highest_point=rng.choice(PEAK_FORMS).format(_name(rng)),
        highest_point_m=int(rng.lognormvariate(7.2, 0.8)) % 8800 + 5,
        calling_code=f"+{rng.randint(20, 999)}",
        internet_tld="." + "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(2)),
        drives_on=rng.choice(["left", "right", "right"]),
        un_member_since=rng.randint(1945, 2011),
        offices=tuple(offices),
        fictional=True,
    )


def fictional_countries(count: int, seed: int, taken: Sequence[str]) -> list[Country]:
    """`count` fictional countries, a pure function of (count, seed, taken).

    Args:
      count: how many.
      seed: of the draw.
      taken: names of real countries; no fictional name contains one or is contained in one.
    """
    rng = random.Random(f"fiction {seed}")
    forbidden = [name.lower() for name in taken]
    names: dict[str, None] = {}
    while len(names) < count:
        name = _name(rng, 3, COUNTRY_ENDINGS)
        if rng.random() < 0.08:
            name = f"{rng.choice(['New', 'Saint', 'North', 'South', 'East', 'West'])} {name}"
        low = name.lower()
        if len(name) > 3 and not any(low in other or other in low for other in forbidden):
            names[name] = None
    ordered = list(names)
    borders: dict[str, list[str]] = {name: [] for name in names}
    for i, name in enumerate(ordered):
        for other in ordered[i + 1 : i + 5]:
            if rng.random() < 0.4:
                borders[name].append(other)
                borders[other].append(name)
    return [_country(rng, name, borders[name]) for name in ordered]

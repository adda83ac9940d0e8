"""Fictional countries, made by rule: 195 real ones are too few to learn reading from scratch.

Names sound like the real ones that training may see: each kind (countries, cities, people, ...)
has a Markov chain over letters, fitted to the names of that kind. No fictional name equals a real
one, and no fictional country's name contains a real country's name or is contained in one.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rag_jax.countries.facts import EDITIONS, Country, Office

ORDER = 2  # letters that the next one depends on
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


class NameMaker:
    """Draws new words that resemble `examples`; a word of the examples is never drawn."""

    def __init__(self, examples: Iterable[str], shortest: int = 3, longest: int = 12):
        self.known = {example.lower() for example in examples}
        self.shortest, self.longest = shortest, longest
        self.following: dict[str, list[str]] = defaultdict(list)
        for word in sorted(self.known):
            padded = "^" * ORDER + word + "$"
            for i in range(len(padded) - ORDER):
                self.following[padded[i : i + ORDER]].append(padded[i + ORDER])

    def draw(self, rng: random.Random) -> str:
        """A new word, capitalised."""
        while True:
            word = "^" * ORDER
            while not word.endswith("$") and len(word) <= self.longest + ORDER:
                word += rng.choice(self.following[word[-ORDER:]])
            name = word[ORDER:].rstrip("$")
            fits = word.endswith("$") and self.shortest <= len(name) <= self.longest
            if fits and name not in self.known:
                return name[0].upper() + name[1:]


class Names:
    """A NameMaker for each kind of name, fitted to `countries`."""

    def __init__(self, countries: Sequence[Country]):
        def words(texts: Iterable[str]) -> list[str]:
            return [w for text in texts for w in text.replace("-", " ").split()
                    if w.isalpha() and len(w) > 2 and w[0].isupper()]

        people = [name.split() for c in countries for o in c.offices for _, name in o.holders]
        self.country = NameMaker(words(c.name for c in countries), shortest=4)
        self.city = NameMaker(words(n for c in countries for n in (c.capital, c.largest_city)))
        self.first = NameMaker(words(p[0] for p in people))
        self.last = NameMaker(words(p[-1] for p in people if len(p) > 1))
        self.peak = NameMaker(words(c.highest_point for c in countries))
        self.language = NameMaker(words(name for c in countries for name in c.languages))

    def person(self, rng: random.Random) -> str:
        """First and last name in the forms that names of heads of state have."""
        first, last = self.first.draw(rng), self.last.draw(rng)
        form = rng.random()
        if form < 0.06:
            return f"{first} {rng.choice(['II', 'III', 'IV', 'V', 'VI', 'VIII', 'X'])}"
        if form < 0.16:
            last = rng.choice(PARTICLES) + last
        elif form < 0.28:
            first = f"{first} {self.first.draw(rng)}"
        elif form < 0.34:
            first = f"{first}-{self.first.draw(rng).lower()}"
        elif form < 0.38:
            first = f"{first} {rng.choice('ABCDEFGHJKLMPRST')}."
        elif form < 0.46:
            last = f"{last} {self.last.draw(rng)}"
        return f"{first} {last}"


def _office(rng: random.Random, names: Names, titles: Sequence[str], roles: tuple[str, ...]
            ) -> Office:
    holder = names.person(rng)
    later = names.person(rng) if rng.random() < 0.4 else holder
    return Office(rng.choice(titles), roles, tuple(zip(EDITIONS, (holder, later), strict=True)))


def _country(rng: random.Random, names: Names, name: str, neighbours: Sequence[str]) -> Country:
    stem = name.rstrip("aeiou") or name
    demonym = stem + rng.choice(["ian", "an", "ese", "i", "ish", "er"])
    capital = rng.choice(CITY_FORMS).format(names.city.draw(rng))
    largest = capital if rng.random() < 0.6 else rng.choice(CITY_FORMS).format(names.city.draw(rng))
    unit = rng.choice(MONEY) if rng.random() < 0.7 else names.language.draw(rng).lower()
    languages = [names.language.draw(rng) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    offices = [_office(rng, names, TITLES, ("state",))]
    if rng.random() < 0.8:
        offices.append(_office(rng, names, HEADS_OF_GOVERNMENT, ("government",)))
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
        highest_point=rng.choice(PEAK_FORMS).format(names.peak.draw(rng)),
        highest_point_m=int(rng.lognormvariate(7.2, 0.8)) % 8800 + 5,
        calling_code=f"+{rng.randint(20, 999)}",
        # No vowel first: the scoring of answers drops articles, and with them the domain ".an".
        internet_tld="." + rng.choice("bcdfghjklmnpqrstvwxyz")
        + rng.choice("abcdefghijklmnopqrstuvwxyz"),
        drives_on=rng.choice(["left", "right", "right"]),
        un_member_since=rng.randint(1945, 2011),
        offices=tuple(offices),
        fictional=True,
    )


def fictional_countries(count: int, seed: int, models: Sequence[Country],
                        taken: Iterable[str]) -> list[Country]:
    """`count` fictional countries, a pure function of the arguments.

    Args:
      count: how many.
      seed: of the draw.
      models: real countries whose names the fictional ones resemble.
      taken: names of all real countries; no fictional name contains one or is contained in one.
    """
    rng = random.Random(f"fiction {seed}")
    makers = Names(models)
    forbidden = [name.lower() for name in taken]
    names: dict[str, None] = {}
    while len(names) < count:
        name = makers.country.draw(rng)
        form = rng.random()
        if form < 0.08:
            name = f"{rng.choice(['New', 'Saint', 'North', 'South', 'East', 'West'])} {name}"
        elif form < 0.14:
            name = f"{name} and {makers.country.draw(rng)}"
        low = name.lower()
        if not any(low in other or other in low for other in forbidden):
            names[name] = None
    ordered = list(names)
    borders: dict[str, list[str]] = {name: [] for name in names}
    for i, name in enumerate(ordered):
        for other in ordered[i + 1 : i + 5]:
            if rng.random() < 0.4:
                borders[name].append(other)
                borders[other].append(name)
    return [_country(rng, makers, name, borders[name]) for name in ordered]

"""Fictional countries, made by rule: 195 real ones are too few to learn reading from scratch.

Names sound like the real ones that training may see: each kind (countries, cities, people, ...)
has a Markov chain over letters, fitted to the names of that kind. As the uncased retriever reads
them, no name of a fictional country, city, peak, currency, language or person equals a name of a
real country or of another fictional one, except that fictional countries may share languages; and
no fictional country's name contains a real country's name or is contained in one.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tokenizers.normalizers import BertNormalizer

from rag_jax.countries.facts import EDITIONS, PHRASINGS, Country, Office

FORMS = PHRASINGS["fiction"]
LONGEST = 12  # letters of a word that is drawn
_uncased = BertNormalizer(lowercase=True)


def plain(name: str) -> str:
    """The name as the uncased retriever reads it: "Chilé" and "chile" are one."""
    return _uncased.normalize_str(name)


class NameMaker:
    """Draws new words that resemble `examples`; a word of the examples is never drawn.

    Args:
      examples: words.
      order: letters that the next one depends on; 1 gives stranger words than 2.
      shortest: letters that a drawn word has at least; it has at most LONGEST.
    """

    def __init__(self, examples: Iterable[str], order: int = 2, shortest: int = 3):
        self.known = {example.lower() for example in examples}
        self.order, self.shortest = order, shortest
        self.following: dict[str, list[str]] = defaultdict(list)
        for word in sorted(self.known):
            padded = "^" * order + word + "$"
            for i in range(len(padded) - order):
                self.following[padded[i : i + order]].append(padded[i + order])

    def draw(self, rng: random.Random) -> str:
        """A new word, capitalised."""
        while True:
            word = "^" * self.order
            while not word.endswith("$") and len(word) <= LONGEST + self.order:
                word += rng.choice(self.following[word[-self.order:]])
            name = word[self.order:].rstrip("$")
            fits = word.endswith("$") and self.shortest <= len(name) <= LONGEST
            if fits and name not in self.known:
                return name[0].upper() + name[1:]


class Names:
    """A NameMaker for each kind of name, fitted to `countries`.

    Half of the countries' names resemble any name at all: the names to tell apart later are more
    varied than 140 examples show.
    """

    def __init__(self, countries: Sequence[Country]):
        def words(texts: Iterable[str]) -> list[str]:
            return [w for text in texts for w in text.replace("-", " ").split()
                    if w.isalpha() and len(w) > 2 and w[0].isupper()]

        people = [name.split() for c in countries for o in c.offices for _, name in o.holders]
        self.countries = (
            NameMaker(words(c.name for c in countries), shortest=4),
            NameMaker(words(name for c in countries for name in sorted(c.names)), order=1,
                      shortest=4))
        self.city = NameMaker(words(n for c in countries for n in (c.capital, c.largest_city)))
        self.first = NameMaker(words(p[0] for p in people))
        self.last = NameMaker(words(p[-1] for p in people if len(p) > 1))
        self.peak = NameMaker(words(c.highest_point for c in countries))
        self.language = NameMaker(words(name for c in countries for name in c.languages))

    def country(self, rng: random.Random) -> str:
        """A name in one of the forms that names of countries have."""
        name = rng.choice(self.countries).draw(rng)
        form = rng.random()
        if form < 0.08:
            return f"{rng.choice(['New', 'Saint', 'North', 'South', 'East', 'West'])} {name}"
        if form < 0.14:
            return f"{name} and {rng.choice(self.countries).draw(rng)}"
        return name

    def person(self, rng: random.Random) -> str:
        """A name in one of the forms that names of heads of state have."""
        parts = {"first": self.first.draw(rng), "last": self.last.draw(rng),
                 "middle": rng.choice([self.first, self.last]).draw(rng)}
        parts |= {"lower_middle": parts["middle"].lower(),
                  **{part: rng.choice(FORMS[f"{part}s"])
                     for part in ("particle", "initial", "numeral")}}
        forms, weights = zip(*{form.format(**parts): weight
                               for form, weight in FORMS["people"].items()}.items(), strict=True)
        return rng.choices(forms, weights)[0]


def _office(rng: random.Random, names: Names, titles: Sequence[str], roles: tuple[str, ...]
            ) -> Office:
    holder = names.person(rng)
    later = names.person(rng) if rng.random() < 0.4 else holder
    return Office(rng.choice(titles), roles, tuple(zip(EDITIONS, (holder, later), strict=True)))


def _country(rng: random.Random, names: Names, name: str, neighbours: Sequence[str]) -> Country:
    stem = name.rstrip("aeiou") or name
    demonym = stem + rng.choice(["ian", "an", "ese", "i", "ish", "er"])
    cities = FORMS["cities"]
    capital = rng.choice(cities).format(rng.choices([names.city.draw(rng), name], [9, 1])[0])
    largest = capital if rng.random() < 0.6 else rng.choice(cities).format(names.city.draw(rng))
    unit = rng.choice(FORMS["money"]) if rng.random() < 0.7 else names.language.draw(rng).lower()
    languages = [names.language.draw(rng) for _ in range(rng.choice([1, 1, 1, 2, 2, 3]))]
    if rng.random() < 0.35:
        languages[0] = demonym
    offices = [_office(rng, names, FORMS["heads_of_state"], ("state",))]
    if rng.random() < 0.8:
        offices.append(_office(rng, names, FORMS["heads_of_government"], ("government",)))
    return Country(
        name=name,
        article=rng.random() < 0.08,
        official_name=rng.choice(FORMS["states"]).format(name=name, demonym=demonym),
        demonym=demonym,
        region=rng.choice(FORMS["regions"]),
        capital=capital,
        capital_also=(),
        largest_city=largest,
        currency=f"{demonym} {unit}",
        currency_also=(unit,),
        languages=tuple(languages),
        neighbours=tuple(neighbours),
        highest_point=rng.choice(FORMS["peaks"]).format(names.peak.draw(rng)),
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


def _own_names(country: Country) -> set[str]:
    """The names that no other country has: all but the languages."""
    people = (name for office in country.offices for _, name in office.holders)
    return set(map(plain, (country.official_name, country.demonym, country.capital,
                           country.largest_city, country.highest_point, country.currency,
                           *people)))


def _clashes(country: Country, taken: set[str], used: set[str]) -> bool:
    own = _own_names(country)
    everything = {*own, *map(plain, country.languages)} - {plain(country.name)}
    return bool(everything & taken or own & used)


def _contains(name: str, others: Iterable[str]) -> bool:
    """Whether the name contains one of the others, or one of them contains it."""
    return any(name in other or other in name for other in others)


def _country_names(rng: random.Random, again: random.Random, makers: Names, count: int,
                   real: Sequence[Country], taken: set[str]) -> list[str]:
    lower, uncased = [c.name.lower() for c in real], [plain(c.name) for c in real]
    names: dict[str, None] = {}
    while len(names) < count:
        name = makers.country(rng)
        if not _contains(name.lower(), lower):
            names[name] = None
    distinct: dict[str, str] = {}
    for name in names:
        while (plain(name) in distinct or plain(name) in taken
               or _contains(plain(name), uncased)):
            name = makers.country(again)
        distinct[plain(name)] = name
    return list(distinct.values())


def fictional_countries(count: int, seed: int | str, models: Sequence[Country],
                        held_out: Sequence[Country]) -> list[Country]:
    """`count` fictional countries, a pure function of the arguments.

    Args:
      count: how many.
      seed: seed of the draw.
      models: real countries whose names the fictional ones resemble.
      held_out: further real countries, whose names are resembled by chance alone.
    """
    rng = random.Random(f"fiction {seed}")
    # What clashes is drawn again from a stream of its own: all the other countries stay.
    again = random.Random(f"fiction {seed} again")
    makers = Names(models)
    real = (*models, *held_out)
    taken = {plain(name) for c in real for name in (*c.names, c.currency)}
    ordered = _country_names(rng, again, makers, count, real, taken)
    borders: dict[str, list[str]] = {name: [] for name in ordered}
    for i, name in enumerate(ordered):
        for other in ordered[i + 1 : i + 5]:
            if rng.random() < 0.4:
                borders[name].append(other)
                borders[other].append(name)
    taken |= set(map(plain, ordered))
    used: set[str] = set()
    made = []
    for name in ordered:
        country = _country(rng, makers, name, borders[name])
        while _clashes(country, taken, used):
            country = _country(again, makers, name, borders[name])
        used |= _own_names(country)
        made.append(country)
    return made

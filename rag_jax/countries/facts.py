"""Facts about the 193 UN member states and the two observers, on 31 Dec 2016 and 31 Dec 2018.

`countries.jsonl` holds one country a line. Everything but the holders of offices is the same in
both editions. What must agree between the entries is checked by tests/countries/test_facts.py.
`phrasings.toml` has the sentences that state facts, and the questions that ask for them.
"""

import dataclasses
import functools
import json

from rag_jax import package_data

EDITIONS = ("2016", "2018")
PHRASINGS = package_data.table(__package__, "phrasings.toml")


@dataclasses.dataclass(frozen=True)
class Office:
    """An office of state with its holder on 31 December of each edition's year."""

    title: str
    roles: tuple[str, ...]  # "state" (head of state), "government" (head of government)
    holders: tuple[tuple[str, str], ...]  # (edition, name)

    def holder(self, edition: str) -> str:
        return dict(self.holders)[edition]

    @property
    def changed(self) -> bool:
        """True when the office changed hands between the editions."""
        return len({name for _, name in self.holders}) > 1


@dataclasses.dataclass(frozen=True)
class Country:
    """One country; tuples named `*_also` are further right answers."""

    name: str
    article: bool  # prose says "the NAME"
    official_name: str
    demonym: str
    region: str
    capital: str
    capital_also: tuple[str, ...]
    largest_city: str
    currency: str
    currency_also: tuple[str, ...]
    languages: tuple[str, ...]
    neighbours: tuple[str, ...]
    highest_point: str
    highest_point_m: int
    calling_code: str
    internet_tld: str
    drives_on: str
    un_member_since: int | None
    offices: tuple[Office, ...]
    office_note: str = ""
    fictional: bool = False

    @property
    def prose_name(self) -> str:
        return f"the {self.name}" if self.article else self.name

    @property
    def names(self) -> frozenset[str]:
        """The country's own names and those of its places, languages and office holders."""
        holders = [name for office in self.offices for _, name in office.holders]
        return frozenset((self.name, self.official_name, self.demonym, self.capital,
                          *self.capital_also, self.largest_city, self.highest_point,
                          *self.languages, *holders))


def _country(record: dict) -> Country:
    offices = tuple(
        Office(o["title"], tuple(o["roles"]), tuple((e, o[e]) for e in EDITIONS))
        for o in record.pop("offices")
    )
    tuples = {key: tuple(value) for key, value in record.items() if isinstance(value, list)}
    return Country(**{**record, **tuples}, offices=offices)


@functools.cache
def load_countries() -> tuple[Country, ...]:
    """The 195 countries in alphabetical order."""
    lines = package_data.text(__package__, "countries.jsonl").splitlines()
    return tuple(_country(json.loads(line)) for line in lines)
